"""The command line as a user meets it: every verb on a tiny model, resume, and clear errors with exit code 2."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hybridize as hz
from conftest import make_base, make_plan, make_tokenizer
from hybridize import cli, workflows
from hybridize.data.text import bundled_text
from hybridize.evaluation import suite


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    for module in (workflows, suite):
        monkeypatch.setattr(module, "load_text", lambda *_: [bundled_text("evaluation")[:6000]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "base"
    make_base("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# a base\n")
    return folder


def run(capsys, *words):
    """(exit code, stdout, stderr) of `hybridize WORDS`."""
    argv, sys.argv = sys.argv, ["hybridize", *map(str, words)]
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = argv
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SMALL = ["--window", 16, "--sinks", 2, "--prompts", 2, "--length", 760, "--budget", 0.34]
PROVE = ["--test-prompts", 2, "--lengths", "760"]


def test_the_whole_way(capsys, base, tmp_path, ids):
    code, out, err = run(capsys, "score", base, "--out", tmp_path / "scores", *SMALL)
    assert code == 0, err
    scores = hz.Scores.load(tmp_path / "scores" / "scores.json")
    assert scores.samples.shape == (2, 3)
    scores_file = tmp_path / "scores" / "scores.json"

    code, out, err = run(capsys, "plan", base, "--scores", scores_file, *SMALL[:4], *SMALL[-2:], "--out", tmp_path / "p.json")
    assert code == 0, err
    plan = hz.AttentionPlan.load(tmp_path / "p.json")
    assert plan.kept_layers == scores.top(0.34)
    assert plan.map().splitlines()[0] in out and "predicted cost" in out

    code, out, err = run(capsys, "convert", base, "--plan", tmp_path / "p.json", "--out", tmp_path / "hybrid", *PROVE)
    assert code == 0, err
    assert "kept and saved" in out
    folder = tmp_path / "hybrid"
    assert {f.name for f in folder.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "plan.json",
        "metrics.json",
        "report.html",
    }
    metrics = json.loads((folder / "metrics.json").read_text())
    row = next(r for r in metrics["rows"] if r["selector"] == "hybrid")
    assert {"method", "budget", "window", "sinks", "decode", "task", "context", "score", "n", "low", "high", "seed"} <= set(
        row
    )
    assert row["cache_ratio"] == plan.cache_bytes(760) / hz.AttentionPlan.base(plan.geometry).cache_bytes(760)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.plan.assignment == plan.assignment
    card = ModelCard.load(folder / "README.md")
    assert (card.data.base_model, card.data.license) == ("base", "mit")
    score = next(r for r in metrics["rows"] if r["selector"] == "hybrid" and r["task"] == "needle" and r["depth"] is None)
    assert f"| hybrid | {score['score']:.2f} (" in card.text and plan.map() in card.text

    code, out, err = run(capsys, "eval", folder, "--out", tmp_path / "eval", *PROVE, "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]  # nothing else on stdout
    assert {r["selector"] for r in rows} == {"full", "hybrid"}
    assert {r["method"] for r in rows} == {"base", "nll"}
    same = [r for r in metrics["rows"] if r["task"] == "needle"]
    assert [r["score"] for r in rows if r["task"] == "needle"] == [r["score"] for r in same]

    code, out, err = run(capsys, "export", folder, "--out", tmp_path / "back")
    assert code == 0, err
    original, back = (AutoModelForCausalLM.from_pretrained(f) for f in (base, tmp_path / "back"))
    assert all(torch.equal(a, b) for a, b in zip(original.state_dict().values(), back.state_dict().values()))

    linked = ["convert", base, "--plan", tmp_path / "p.json", "--link", "--out", tmp_path / "linked", *PROVE]
    code, out, err = run(capsys, *linked)
    assert code == 0, err
    assert not list((tmp_path / "linked").glob("*.safetensors"))
    code, out, err = run(capsys, "eval", tmp_path / "linked", "--out", tmp_path / "eval2", *PROVE, "--json")
    assert code == 0, err
    assert [r["score"] for r in json.loads(out)["rows"]] == [r["score"] for r in rows]


@pytest.mark.parametrize("selector", ["nll", "greedy", "backward", "lazy", "echo", "retrieval", "reasoning"])
def test_convert_by_every_selector(capsys, base, tmp_path, selector):
    words = ["convert", base, "--selector", selector, "--out", tmp_path / "out", *SMALL, *PROVE, "--json"]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    kept = [name for row in hz.AttentionPlan.load(tmp_path / "out" / "plan.json").assignment for name in row].count("full")
    assert kept == 3  # a layer of three groups, or three groups
    assert hz.Scores.load(tmp_path / "out" / "scores.json").provenance["scorer"] == selector


def test_demo_on_a_tiny_model(capsys, base, tmp_path):
    words = ["demo", "--model", base, "--out", tmp_path / "demo", *SMALL, "--test-prompts", 2]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    demo = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert {r["selector"] for r in demo["rows"]} == {"full", "drop", "all-window", "periodic-0", "periodic-1", "periodic-2"}
    assert set(demo["seconds"]) == {"load", "score", "prove", "save"}
    assert (tmp_path / "demo" / "report.html").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model").plan.kept_layers == demo["layers"]


class Killed(BaseException):
    """Stands for a kill: nothing in the program catches it."""


def test_resume_repeats_nothing(capsys, base, tmp_path, monkeypatch):
    words = ["score", base, "--out", tmp_path / "out", *SMALL]
    whole = run(capsys, "score", base, "--out", tmp_path / "whole", *SMALL)
    assert whole[0] == 0
    real, calls = workflows.score, []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(workflows, "score", dies)
    with pytest.raises(Killed):
        run(capsys, *words)
    assert not (tmp_path / "out").exists()
    code, out, err = run(capsys, *words, "--seed", 9)  # another question
    assert code == 2 and "select" in err and "--overwrite" in err
    code, out, err = run(capsys, *words)
    assert code == 0 and "going on" in out
    assert len(calls) == 3  # the first prompt was not scored again
    assert (tmp_path / "out" / "scores.json").read_bytes() == (tmp_path / "whole" / "scores.json").read_bytes()


def test_prompts_are_shared_out_over_lengths(capsys, base, tmp_path):
    words = ["score", base, "--out", tmp_path / "out", "--window", 16, "--prompts", 3, "--length", "760,900"]
    code, _, err = run(capsys, *words)
    assert code == 0, err
    scores = hz.Scores.load(tmp_path / "out" / "scores.json")
    assert len(scores.samples) == 3 and scores.provenance["lengths"] == [760, 900]


def test_convert_from_duo_attentions_table(capsys, base, tmp_path):
    (tmp_path / "gates.tsv").write_text("0.9\t0.1\t0.2\n0.3\t0.8\t0.0\n0.1\t0.2\t0.7\n")
    words = ["convert", base, "--scores", tmp_path / "gates.tsv", "--out", tmp_path / "out", *SMALL[:4], "--budget", 0.34]
    code, _, err = run(capsys, *words, *PROVE)
    assert code == 0, err
    assert hz.AttentionPlan.load(tmp_path / "out" / "plan.json").kept_groups == [(0, 0), (1, 1), (2, 2)]


def test_dry_run_writes_nothing(capsys, base, tmp_path):
    code, out, err = run(capsys, "convert", base, "--out", tmp_path / "out", "--dry-run", *SMALL)
    assert code == 0, err
    assert "predicted cost" in out and "which 1 layers" in out
    assert list(tmp_path.iterdir()) == []


def test_version_and_help(capsys):
    assert run(capsys, "--version")[1].strip() == hz.__version__
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(
        verb in out for verb in ("demo", "score", "plan", "convert", "eval", "compare", "bench", "export")
    )


# -- bad input: a clear error, exit code 2, nothing half-written --------------------------------------------------


@pytest.fixture(scope="module")
def material(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2)).save_pretrained(folder / "gpt2")
    make_tokenizer().save_pretrained(folder / "gpt2")
    make_plan(make_base("llama", intermediate_size=56), "window").save(folder / "other_plan.json")
    plan = make_plan(make_base("llama"), "window").save(folder / "plan.json")
    (folder / "cut_plan.json").write_text(plan.read_text()[:200])
    hz.Scores("layer", [[1.0, 2.0, 3.0]], {"identity": "another"}).save(folder / "other_scores.json")
    (folder / "two.tsv").write_text("0.5\t0.1\n0.3\t0.2\n")
    (folder / "cut_scores.json").write_text('{"format": "hybridize-sc')
    (folder / "full").mkdir()
    (folder / "full" / "file").write_text("mine")
    (folder / "empty").mkdir()
    make_base("llama").save_pretrained(folder / "cut")
    make_tokenizer().save_pretrained(folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    (folder / "file").write_text("a file")
    return folder


CASES = {
    "unknown family": (["convert", "{m}/gpt2", *SMALL], "model_type"),
    "no such model": (["convert", "{m}/nothing", *SMALL], "model"),
    "folder without a model": (["convert", "{m}/empty", *SMALL], "config.json"),
    "plan of another base": (["convert", "{b}", "--plan", "{m}/other_plan.json"], "identity"),
    "truncated plan": (["convert", "{b}", "--plan", "{m}/cut_plan.json"], "corrupted or truncated"),
    "missing plan": (["eval", "{b}", "--plan", "{m}/none.json"], "existing file"),
    "scores of another base": (["convert", "{b}", "--scores", "{m}/other_scores.json"], "identity"),
    "truncated scores": (["convert", "{b}", "--scores", "{m}/cut_scores.json"], "corrupted or truncated"),
    "scores of another shape": (["convert", "{b}", "--scores", "{m}/two.tsv"], "scores"),
    "plan and scores": (["convert", "{b}", "--plan", "{m}/plan.json", "--scores", "{m}/cut_scores.json"], "at most one"),
    "truncated weights": (["convert", "{m}/cut", *SMALL], "model"),
    "budget above 1": (["convert", "{b}", "--budget", 1.5], "budget"),
    "budget below 0": (["convert", "{b}", "--budget", -0.5], "budget"),
    "budget of no layer": (["convert", "{b}", "--budget", 0.1], "rounds to none"),
    "window 0": (["convert", "{b}", "--window", 0], "window.size"),
    "window -4": (["score", "{b}", "--window", -4], "window.size"),
    "negative sinks": (["score", "{b}", "--sinks", -1], "window.sinks"),
    "unknown decode": (["score", "{b}", "--decode", "x"], "window.decode"),
    "rebased with full decode": (["score", "{b}", "--decode", "full", "--sink-positions", "rebased"], "sink_positions"),
    "unknown selector": (["score", "{b}", "--selector", "best", "--length", 760], "selector"),
    "unknown method": (["convert", "{b}", "--method", "magic"], "method"),
    "no prompts": (["score", "{b}", "--prompts", 0], "prompts"),
    "length that is no number": (["score", "{b}", "--length", "long"], "length"),
    "more lengths than prompts": (["score", "{b}", "--length", "760,800", "--prompts", 1], "prompts"),
    "prompt too short": (["score", "{b}", "--length", 50], "length"),
    "prompt beyond the context": (["score", "{b}", "--length", 4000], "trained context"),
    "test beyond the context": (["eval", "{b}", "--lengths", "4000"], "trained context"),
    "lengths that are no numbers": (["eval", "{b}", "--lengths", "1k"], "lengths"),
    "no such device": (["score", "{b}", "--device-map", "cuda"], "device_map"),
    "unknown dtype": (["score", "{b}", "--dtype", "int3"], "dtype"),
    "unknown needle kind": (["eval", "{b}", "--kinds", "gold", "--lengths", "760"], "kinds"),
    "output not empty": (["score", "{b}", "--length", 760, "--out", "{m}/full"], "--overwrite"),
    "output is a file": (["score", "{b}", "--length", 760, "--out", "{m}/file"], "a file"),
    "export of a base": (["export", "{b}"], "converted folder"),
    "plan without a source": (["plan", "{b}"], "exactly one"),
    "plan by an unknown control": (["plan", "{b}", "--selector", "periodic-99"], "selector"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(capsys, base, material, tmp_path, case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words, expected = CASES[case]
    words = [str(w).format(b=base, m=material) for w in words]
    if "--out" not in words and words[0] != "plan":
        words += ["--out", str(tmp_path / "out")]
    code, out, err = run(capsys, *words)
    assert code == 2, (out, err)
    assert expected in err.replace("\n", " ")
    assert err.startswith("error: ") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert not list(material.glob("*.partial"))
    assert (material / "full" / "file").read_text() == "mine"


def test_usage_errors_exit_2(capsys):
    assert run(capsys, "convert")[0] == 2
    assert run(capsys, "nothing")[0] == 2


def test_json_errors_are_json(capsys, base, tmp_path):
    code, out, _ = run(capsys, "convert", base, "--out", tmp_path / "x", "--budget", 2, "--json")
    assert code == 2 and "budget" in json.loads(out)["error"]


def test_user_text(tmp_path, monkeypatch):
    from hybridize.data.text import load_text

    (tmp_path / "a.txt").write_text("one text")
    assert load_text(str(tmp_path / "a.txt")) == ["one text"]
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"messages": [{"role": "user", "content": "hi"}, {"content": "you"}]}\n')
    assert load_text(str(tmp_path / "b.jsonl")) == ["x", "hi\n\nyou"]
    assert load_text("calibration")[0] == bundled_text("calibration")
    for content, expected in (("{", "line 1"), ('{"text": "x"}\n{"other": 1}', "line 2"), ("", "at least one document")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(hz.HybridizeError, match=expected):
            load_text(str(tmp_path / "c.jsonl"))
    for source in ("nothing.txt", str(tmp_path)):
        with pytest.raises(hz.HybridizeError, match="text"):
            load_text(source)
    hub = types.SimpleNamespace(load_dataset=lambda name, split: [{"text": name}, {"text": split}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert load_text("hub:some/set", split="test") == ["some/set", "test"]
    with pytest.raises(hz.HybridizeError, match="row 0"):
        load_text("hub:some/set", field="body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(hz.HybridizeError, match=r"hybridize\[train\]"):
        load_text("hub:wikitext")
    assert Path(tmp_path).exists()


# -- igal -----------------------------------------------------------------------------------------------------------

IGAL = ["--method", "igal", "--budget", 0.34, "--window", 16, "--linear", "dim=4", "--prompts", 2, "--length", 760]
TRAIN = ["--train", "steps=2,rows=2,length=500,save_every=1,kinds=number,transfer_steps=1,watch=1"]


def test_igal(capsys, base, tmp_path, monkeypatch):
    """Scores, plan, transfer, fine-tune, proof with the state off beside it, a folder that loads by Auto classes."""
    from hybridize import adapting

    monkeypatch.setattr(adapting, "load_text", lambda *_: [bundled_text("calibration")[:6000]])
    out = tmp_path / "out"
    code, printed, err = run(capsys, "convert", base, "--out", out, *IGAL, *TRAIN, *PROVE, "--json")
    assert code == 0, err
    assert json.loads(printed)["out"] == str(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    linear = [spec for row in model.plan.assignment for spec in row if spec == "linear"]
    assert len(linear) == 3 and model.plan.provenance["method"] == "igal" and model.plan.provenance["selector"] == "echo"
    assert all(branch.gate.abs().max() > 0 for branches in model.branches() for branch in branches.values())
    metrics = json.loads((out / "metrics.json").read_text())
    assert {row["selector"] for row in metrics["rows"]} == {"full", "hybrid", "state off"}
    assert {(r["selector"], r["component"], r["trained_tokens"]) for r in metrics["rows"]} == {
        ("full", "all", 0), ("hybrid", "all", 3000), ("state off", "linear_off", 3000)}  # fmt: skip
    assert len(metrics["training"]["finetune"]["losses"]) == 2 and len(metrics["training"]["transfer"]["losses"]) == 1
    assert [step for step, _ in metrics["training"]["finetune"]["recall"]] == [1, 2]
    assert metrics["conversion"]["tokens"] == 2 * 760 + 3 * 2 * 500
    base_rows = [row for row in metrics["rows"] if row["selector"] == "full" and row["task"] == "needle"]
    code, _, err = run(capsys, "eval", base, "--out", tmp_path / "eval", *PROVE, "--seed", 2)
    again = json.loads((tmp_path / "eval" / "metrics.json").read_text())["rows"]
    assert base_rows[0]["score"] == next(row for row in again if row["task"] == "needle")["score"]
    code, printed, err = run(capsys, "eval", out, "--out", tmp_path / "own", *PROVE, "--json")
    assert code == 0 and {row["selector"] for row in json.loads(printed)["rows"]} == {"trained weights, full", "hybrid"}, err
    assert "was trained" in err
    code, printed, err = run(capsys, "compare", out, "--model", base, "--out", tmp_path / "compared", *PROVE, "--json")
    rows = [row for row in json.loads(printed)["rows"] if row["task"] == "perplexity" and row["positions"] == [0, 760]]
    mine = [row["score"] for row in metrics["rows"] if row["task"] == "perplexity" and row["positions"] == [0, 760]]
    assert [row["score"] for row in rows] == pytest.approx(mine[:2]) and rows[1]["trained_tokens"] == 3000
    page = (out / "report.html").read_text()
    assert 'id="training"' in page and "groups have a linear state" in page
    assert "with a short fine-tune" in (out / "README.md").read_text()
    assert not (out / "training").exists()


@pytest.mark.parametrize(
    "control", ["all-window", "all-linear", "lowest", "important-full", "random-groups-1", "important-wide", "all-wide"]
)
def test_igal_controls(capsys, base, tmp_path, control):
    scores = tmp_path / "scores.json"
    hz.Scores("head", torch.rand(2, 3, 6).numpy(), {"scorer": "echo"}).save(scores)
    words = [
        "convert",
        base,
        "--out",
        tmp_path / "out",
        *IGAL,
        "--control",
        control,
        "--scores",
        scores,
        "--dry-run",
        "--json",
    ]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    plan = hz.AttentionPlan.from_dict(json.loads(out)["plan"])
    counts = {
        "all-window": (0, 0),
        "important-wide": (0, 0),
        "all-wide": (0, 0),
        "all-linear": (9, 0),
        "important-full": (0, 3),
    }
    assert (sum(name == "linear" for row in plan.assignment for name in row), len(plan.kept_groups)) == counts.get(
        control, (3, 0)
    )
    top = hz.Scores.load(scores).top_groups(0.34, 3)
    if control == "lowest":
        assert not set(top) & set(plan.far_groups)
    if control == "important-full":
        assert plan.kept_groups == top
    if "wide" in control:  # the bytes of the method's plan, less than a token for each group
        linear = hz.AttentionPlan.from_groups(
            plan.geometry, top, hz.Window(16, 4, "rebased"), kept=hz.Linear(dim=4, window=16)
        )
        spare = linear.cache_bytes(4096) - plan.cache_bytes(4096)
        assert 0 <= spare < 9 * 4 * 16 and plan.cache_bytes(4096) == plan.cache_bytes(2048)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--method", "other"], "method"),
        (["--method", "igal", "--control", "none"], "control"),
        (["--method", "igal", "--linear", "size=3"], "linear"),
        (["--method", "igal", "--linear", "degree=5"], "linear.degree"),
        (["--method", "igal", "--train", "steps=many"], "train.steps"),
        (["--method", "igal", "--train", "length=4096"], "train.length"),
        (["--method", "igal", "--link"], "link"),
        (["--method", "igal", "--budget", "0"], "budget"),
        (["--train", "steps=3"], "train"),
        (["--linear", "dim=3"], "linear"),
    ],
)
def test_bad_igal(capsys, base, tmp_path, words, field):
    code, _, err = run(capsys, "convert", base, "--out", tmp_path / "out", "--prompts", 1, "--length", 760, *PROVE, *words)
    assert code == 2 and f"error: {field}: got" in err, err
    assert not (tmp_path / "out").exists()
