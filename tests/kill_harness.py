"""Kill a run at every write, go on, and compare with a run that was never killed.

    python tests/kill_harness.py MODEL WORK [igal [EVERY]]

igal: a run that trains, killed at every EVERY-th write only, since each takes seconds.

Forks: the child patches the calls by which bytes reach their final name, and kills itself before the n-th of them.
"""

import fcntl
import hashlib
import os
import shutil
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)

from hybridize import adapting, converting, files, workflows  # noqa: E402  threads are set first
from hybridize.data.text import bundled_text  # noqa: E402
from hybridize.evaluation import suite  # noqa: E402
from hybridize.terminal import Terminal  # noqa: E402

METHOD = (sys.argv[3:] or ["nll"])[0]
# what a run leaves that holds times, dates or the state of the checkout
TIMED = {"log.txt", "metrics.json", "report.html", "where.json"}


def digest(folder):
    found = {}
    for file in sorted(Path(folder).rglob("*")):
        if file.is_file() and file.name not in TIMED:
            found[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def arm(kill_at):
    """Kill this process before its `kill_at`-th write, rename or exchange; count them all."""
    seen = [0]

    def counted(call, counts=lambda *_: True):
        def patched(*args, **kwargs):
            if counts(*args):
                if seen[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen[0] += 1
            return call(*args, **kwargs)

        return patched

    def written(descriptor):  # not the fsync of files that others wrote
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY

    os.fsync = counted(os.fsync, written)
    os.replace = counted(os.replace)
    os.rename = counted(os.rename)
    files.exchange_names = counted(files.exchange_names)
    return seen


TRAIN = "steps=4,rows=2,length=500,save_every=1,kinds=number,transfer_steps=2"


def run(model, out):
    igal = METHOD == "igal"
    converting.convert(
        Terminal(as_json=True), model, Path(out), METHOD,
        selector="echo" if igal else "drop", budget=0.5, window=16, sinks=2, sink_positions="absolute", decode="window",
        unit="group" if igal else "layer",
        prompts=2, length="760", text="calibration", seed=1, batch_tokens=1024, test_prompts=1, lengths="760",
        plan=None, scores=None, link=False, max_shard_size="5GB", dtype="auto", device_map=None,
        trust_remote_code=False, dry_run=False, overwrite=True, beyond=False,
        linear="dim=4" if igal else None, indexed=None, top_p=None, gated=None, context=None, rope_theta=None,
        control=None, train=TRAIN if igal else None, train_text=None,
    )  # fmt: skip


def child(model, out, kill_at):
    """Run in a fork; returns (killed, writes seen)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for the life of the process
        code = 1
        try:
            seen = arm(kill_at)
            run(model, out)
            os.write(writer, str(seen[0]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    seen = os.read(reader, 32)
    os.close(reader)
    if os.WIFSIGNALED(status):
        return True, None
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return False, int(seen)


def main():
    model, work, every = sys.argv[1], Path(sys.argv[2]), int((sys.argv[4:] or [1])[0])
    short = bundled_text("calibration")[:3000]
    workflows.load_text = suite.load_text = adapting.load_text = lambda *_: [
        short
    ]  # the whole text would be tokenized again in every run
    _, writes = child(model, work / "unkilled", -1)
    expected = digest(work / "unkilled")
    assert "model.safetensors" in expected and "scores.json" in expected and "plan.json" in expected
    old = work / "old"
    old.mkdir()
    (old / "keep.txt").write_text("what was here before")
    before = digest(old)
    for kill_at in range(0, writes, every):
        out = work / "killed"
        shutil.copytree(old, out)
        killed, _ = child(model, out, kill_at)
        assert killed, kill_at
        assert digest(out) in (before, expected), f"write {kill_at}: the output folder is neither the old nor the new one"
        child(model, out, -1)
        assert digest(out) == expected, f"write {kill_at}: the resumed run differs"
        assert not list(work.glob("killed.*")), f"write {kill_at}: {list(work.glob('killed.*'))} left behind"
        shutil.rmtree(out)
    print(f"{writes} writes, killed at {len(range(0, writes, every))}, all as the unkilled run")


if __name__ == "__main__":
    main()
