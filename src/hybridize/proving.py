"""The verbs that measure: eval (a hybrid against its base), compare (many plans at matched bytes) and bench (speed)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridize.benchmark.run import Bench
from hybridize.benchmark.run import bench as run_bench
from hybridize.comparison import Candidate, base_candidate, candidates, entry_facts
from hybridize.comparison import compare as run_comparison
from hybridize.entries import Comparison, entry_of, make_comparison, read_comparison
from hybridize.errors import bad
from hybridize.evaluation.estimate import estimate
from hybridize.evaluation.suite import Measure, Proof, measures
from hybridize.files import write_json
from hybridize.indexing import sparsity_rows
from hybridize.looking import closing_rows
from hybridize.options import lengths_of, load_model, proof_of
from hybridize.plan import AttentionPlan
from hybridize.report.comparison import summary, write_comparison
from hybridize.results import results
from hybridize.runs import RunFolder, quiet_libraries
from hybridize.terminal import Terminal
from hybridize.verbs import note_resume, write_run
from hybridize.workflows import check_lengths, counted, hybrid_of, prove

# what an index chooses, what gates leave closed
CHOOSING: dict[str, Callable[..., list[dict[str, Any]]]] = {"sparsity": sparsity_rows, "closing": closing_rows}


def evaluate(terminal: Terminal, model: str, out: Path, plan: Path | None, without: list[str] | None, **options: Any) -> None:
    """Quality of a hybrid against its base."""
    proof = Proof(**proof_of(options))
    given = AttentionPlan.load(plan) if plan is not None else None
    config = {"verb": "eval", "model": model, "plan": str(plan), "without": without, "prove": proof.as_config()}
    with quiet_libraries():
        loaded = load_model(model, options)
        hybrid = hybrid_of(loaded)
        if given is not None:
            given.check_base(hybrid.plan.geometry)
        run = RunFolder(out, config, options["overwrite"])
        note_resume(terminal, run)
        chosen = given or hybrid.plan
        base = AttentionPlan.base(chosen.geometry)
        reference = "full"
        if hybrid.plan.provenance.get("trained_tokens"):
            reference = "trained weights, full"
            terminal.say(
                f"{model} was trained: its reference here is its own weights with full attention; "
                f"`hybridize compare {model} --model BASE` measures it against the base it came from"
            )
        plans = {reference: base} if chosen.assignment == base.assignment else {reference: base, "hybrid": chosen}
        plans |= {f"hybrid without {part}": chosen.without(part) for part in without or ()}
        for each in plans.values():
            check_lengths(each, proof)
        asked = measures(loaded.tokenizer, proof, run.step)
        if _told(terminal, run, asked, list(plans), hybrid, proof, options["dry_run"]):
            return
        seconds: dict[str, float] = {}
        with counted(seconds, "prove"):
            rows = prove(run, loaded, hybrid, plans, proof, terminal.report, asked)
            with hybrid.temporary_plan(chosen):
                seen = {name: make(run, loaded, hybrid, proof, terminal.report) for name, make in CHOOSING.items()}
    terminal.close()
    write_run(run, model, chosen, None, rows, seconds, {"model": model}, **seen, **run.where)
    folder = run.finish()
    terminal.quality_table(rows)
    terminal.task_table(rows)
    terminal.sparsity_table(seen["sparsity"])
    terminal.closing_table(seen["closing"])
    terminal.say(f"report: {folder / 'report.html'}")
    terminal.result({"out": str(folder), "rows": rows, "seconds": seconds})


def compare(terminal: Terminal, sources: list[str], out: Path, model: str | None, **options: Any) -> None:
    """Many plans against the base and each other."""
    asked = _comparison(sources, model, options)
    with quiet_libraries():
        loaded = load_model(asked.model, options)
        hybrid = hybrid_of(loaded)
        base = AttentionPlan.base(hybrid.plan.geometry)
        check_lengths(base, asked.proof)
        run = RunFolder(out, asked.as_config(), options["overwrite"])
        note_resume(terminal, run)
        todo = measures(loaded.tokenizer, asked.proof, run.step)
        names = ["full", *(entry.name for entry in asked.entries)]
        with hybrid.temporary_plan(base):
            if _told(terminal, run, todo, names, hybrid, asked.proof, options["dry_run"]):
                return
        seconds: dict[str, float] = {}
        with counted(seconds, "score"):
            everyone = [base_candidate(base), *candidates(run, asked, loaded, hybrid, terminal.report)]
        for each in everyone:
            check_lengths(each.plan, asked.proof)
        with counted(seconds, "prove"):
            rows = run_comparison(run, asked, hybrid, everyone, todo, options, terminal.report)
    terminal.close()
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    made = _write(run, asked, everyone, rows, seconds, {**run.where, "dtype": dtype})
    folder = run.finish()
    terminal.comparison_table(summary(rows, made["entries"], asked.match_at))
    terminal.seconds_table(seconds)
    terminal.say(f"report: {folder / 'report.html'}\nnumbers: {folder / 'compare.json'}")
    terminal.result({"out": str(folder), **json.loads(json.dumps(made))})


def bench(terminal: Terminal, out: Path, device: str, overwrite: bool, **options: Any) -> None:
    """Speed of a shape, base and hybrid in one run, beside the machine's ceilings."""
    numbers: dict[str, Any] = {name: lengths_of(options[name], name) for name in ("contexts", "batches")}
    rest = {
        name: options[name]
        for name in ("shape", "budget", "method", "linear", "window", "sinks", "backward", "stock", "seconds", "dtype")
    }
    ask = Bench(**rest, **numbers, parts=tuple(options["parts"].split(",")))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise bad("device", device, "'auto' or 'cpu': torch sees no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunFolder(out, {"verb": "bench", "device": device, "ask": vars(ask)}, overwrite)
    note_resume(terminal, run)
    with quiet_libraries():
        rows, facts = run_bench(ask, torch.device(device), run.step, terminal.report)
    terminal.close()
    run.begin()
    made = results(f"speed_{ask.shape}", rows, facts=facts, ask=vars(ask), **run.where)
    write_json(run.path / "bench.json", made)
    folder = run.finish()
    terminal.speed_table(rows, facts)
    terminal.say(f"numbers: {folder / 'bench.json'}")
    terminal.result({"out": str(folder), "rows": rows, "facts": facts})


def _comparison(sources: list[str], model: str | None, options: dict[str, Any]) -> Comparison:
    given = proof_of(options)
    if len(sources) == 1 and Path(sources[0]).suffix in (".yaml", ".yml"):
        return read_comparison(sources[0], given, model)
    select = {key: options[key] for key in ("budget", "window", "sinks") if options[key] is not None}
    return make_comparison(model, [entry_of(source) for source in sources], select, given, options["match_at"])


def _write(
    run: RunFolder,
    asked: Comparison,
    everyone: list[Candidate],
    rows: list[dict[str, Any]],
    seconds: dict[str, float],
    measured: dict[str, Any],
) -> dict[str, Any]:
    run.begin()
    entries = [entry_facts(each, asked, measured["dtype"]) for each in everyone]
    for each in everyone[1:]:
        each.plan.save(run.path / "plans" / f"{each.name}.json")
    how: dict[str, Any] = {"match_at": asked.match_at, "contexts": list(asked.contexts), "prove": asked.proof.as_config()}
    how |= {"select": asked.ask.as_config(), "model": Path(asked.model).name, **measured}
    made = results("compare", rows, seconds=seconds, entries=entries, **how)
    write_json(run.path / "compare.json", made)
    write_comparison(run.path / "report.html", made)
    return made


def _told(
    terminal: Terminal, run: RunFolder, asked: list[Measure], names: list[str], model: Any, proof: Proof, dry_run: bool
) -> bool:
    """Say what the measurement will cost; whether that was all that was asked."""
    pending = [each for name in names for each in asked if not run.has(f"{each.name}-{name}")]
    made = estimate(model, pending, proof.batch_tokens, min(proof.lengths))
    terminal.say(made.text())
    if dry_run:
        terminal.result({"estimate": vars(made)})
    return dry_run
