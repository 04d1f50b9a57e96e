"""The verbs behind the command line, over the workflows: each ends with the table a person wants."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hybridize import checkpoint
from hybridize.conversion import memory_estimate
from hybridize.errors import bad
from hybridize.evaluation.suite import Proof
from hybridize.files import check_output_folder, write_json
from hybridize.geometry import geometry_of
from hybridize.loading import Loaded, load
from hybridize.methods.baselines import random_group_plans
from hybridize.methods.nll import control_plans
from hybridize.options import load_model, read_config, selection_of
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.report.charts import short
from hybridize.report.page import write_report
from hybridize.results import results, write_results
from hybridize.runs import RunFolder, quiet_libraries
from hybridize.scores import Scores
from hybridize.terminal import Terminal
from hybridize.workflows import Selection, compute_scores, cost_rows, counted, hybrid_of, plan_of_scores, prove


def demo(
    terminal: Terminal,
    out: Path,
    budget: float,
    window: int,
    sinks: int,
    prompts: int,
    length: int,
    test_prompts: int,
    model: str,
    overwrite: bool,
    **_: Any,
) -> None:
    """Score, convert, prove and report on the embedded model."""
    ask = Selection("drop", budget, window, sinks, prompts=prompts, lengths=(length,))
    proof = Proof(prompts=test_prompts, lengths=(length,))
    run = RunFolder(out, {"verb": "demo", "model": model, "select": ask.as_config(), "prove": proof.as_config()}, overwrite)
    note_resume(terminal, run)
    seconds: dict[str, float] = {}
    with quiet_libraries():
        with counted(seconds, "load"):
            loaded = load(model)
            hybrid = hybrid_of(loaded)
            base = AttentionPlan.base(hybrid.plan.geometry)
            units_for_budget(base.geometry.layers, budget)
        with counted(seconds, "score"):
            scores = compute_scores(run, loaded, hybrid, ask, terminal.report)
        chosen = plan_of_scores(scores, base, ask)
        controls = control_plans(base, ask.cheap, budget)
        plans = {"full": base, "drop": chosen, "all-window": controls["all-window"]}
        plans |= {name: plan for name, plan in controls.items() if name.startswith("periodic")}
        with counted(seconds, "prove"):
            rows = prove(run, loaded, hybrid, plans, proof, terminal.report)
        with counted(seconds, "save"):
            hybrid.set_plan(chosen)
            save_model(run, loaded, hybrid, scores)
    terminal.close()
    write_run(run, "demo", chosen, scores, rows, seconds, {"model": model, "dtype": str(loaded.model.dtype)[6:]})
    write_results(run.path / "demo.json", results("demo", rows, seconds=seconds, model=model, layers=chosen.kept_layers))
    folder = run.finish()
    terminal.quality_table(_best_and_worst(rows, "periodic"))
    terminal.seconds_table(seconds)
    terminal.say(f"plan: full attention stays in layers {chosen.kept_layers}")
    terminal.say(
        f"report: {folder / 'report.html'}\nmodel:  {folder / 'model'}  (AutoModelForCausalLM after `import hybridize`)"
    )
    terminal.result({"out": str(folder), "rows": rows, "seconds": seconds, "layers": chosen.kept_layers})


def score(terminal: Terminal, model: str, out: Path, **options: Any) -> None:
    """scores.json of a model."""
    ask = selection_of(options)
    run = RunFolder(out, {"verb": "score", "model": model, "select": ask.as_config()}, options["overwrite"])
    note_resume(terminal, run)
    with quiet_libraries():
        loaded = load_model(model, options)
        scores = compute_scores(run, loaded, hybrid_of(loaded), ask, terminal.report)
    terminal.close()
    run.begin()
    scores.save(run.path / "scores.json")
    folder = run.finish()
    terminal.say(f"most needed first: {most_needed(scores, ask.budget)}\nscores: {folder / 'scores.json'}")
    terminal.result({"out": str(folder), "ranking": scores.ranking(), "values": scores.values.tolist()})


def most_needed(scores: Scores, budget: float, shown: int = 30) -> str:
    """The first units of a ranking; behind each, how often a bootstrap over the samples keeps it at the budget."""
    ranking, columns = scores.ranking(), scores.values.reshape(scores.values.shape[0], -1).shape[1]
    names = [str(i) if scores.unit == "layer" else "{}.{}".format(*divmod(i, columns)) for i in ranking[:shown]]
    if scores.order is None and len(scores.samples) > 1:
        kept = scores.stability(budget).ravel()
        names = [f"{name} ({100 * kept[i]:.0f} %)" for name, i in zip(names, ranking, strict=False)]
    kind = "" if scores.unit == "layer" else f" (layer.{scores.unit})"
    return ", ".join(names) + (", ..." if len(ranking) > shown else "") + kind


def plan(
    terminal: Terminal,
    model: str,
    out: Path | None,
    scores: Path | None,
    selector: str | None,
    batch: int,
    trust_remote_code: bool,
    overwrite: bool,
    **options: Any,
) -> None:
    """A plan from scores or a control, printed with its costs."""
    with quiet_libraries():
        config = read_config(model, trust_remote_code)
    base = AttentionPlan.base(geometry_of(config))
    ask = Selection(**{key: options[key] for key in ("budget", "window", "sinks", "sink_positions", "decode")})
    if (scores is None) == (selector is None):
        raise bad("scores, selector", "both or neither", "exactly one of --scores and --selector")
    if scores is not None:
        made = plan_of_scores(Scores.load(scores), base, ask)
    else:
        controls = control_plans(base, ask.cheap, ask.budget) | random_group_plans(base, ask.cheap, ask.budget)
        if selector not in controls:
            raise bad("selector", selector, f"one of {sorted(controls)}")
        made = controls[selector]
    show_plan(terminal, made, memory_estimate(config, made, 8192, batch, "bfloat16"))
    if out is not None:
        out = out / "plan.json" if out.suffix != ".json" else out
        if out.exists() and not overwrite:
            raise bad("out", str(out), "a new file (or pass --overwrite)")
        made.save(out)
        terminal.say(f"plan: {out}")
    terminal.result({"plan": made.to_dict(), "cost": cost_rows(made)})


def export(terminal: Terminal, model: str, out: Path, form: str, overwrite: bool, **options: Any) -> None:
    """A hybrid as a stock folder."""
    check_output_folder(out, overwrite)
    with quiet_libraries():
        loaded = load_model(model, {**options, "device_map": None})
        if not loaded.is_hybrid:
            raise bad("model", model, "a converted folder")
        folder = checkpoint.export(loaded.model, loaded.tokenizer, out, form, overwrite)
    terminal.say(f"{form}: {folder}")
    terminal.result({"out": str(folder), "form": form})


def save_model(run: RunFolder, loaded: Loaded, hybrid: Any, scores: Scores | None, shard: str = "5GB") -> None:
    run.begin()
    base = loaded.source if Path(loaded.source).exists() else None
    checkpoint.save(
        hybrid, loaded.tokenizer, run.path / "model", scores=scores, base=base, overwrite=True, max_shard_size=shard
    )


def lift_model(run: RunFolder) -> None:
    """Move the saved model up: the output folder itself is what from_pretrained is given."""
    for file in sorted((run.path / "model").iterdir()):
        target = run.path / file.name
        target.unlink(missing_ok=True)
        shutil.move(file, target)
    (run.path / "model").rmdir()


def write_run(
    run: RunFolder,
    title: str,
    plan: AttentionPlan,
    scores: Scores | None,
    rows: list[dict[str, Any]],
    seconds: dict[str, float],
    facts: dict[str, Any],
    **more: Any,
) -> None:
    """plan.json, scores.json, metrics.json and report.html of a run."""
    run.begin()
    plan.save(run.path / "plan.json")
    if scores is not None:
        scores.save(run.path / "scores.json")
    made = results(title, rows, seconds=seconds, **more)
    write_json(run.path / "metrics.json", made)
    shown = {**facts, "operators": "; ".join(spec.label() for spec in plan.specs()), "device": made["device"]}
    shown |= {"date": made["date"], "versions": ", ".join(f"{k} {v}" for k, v in made["versions"].items())}
    write_report(
        run.path / "report.html",
        title=f"hybridize: {title}",
        plan=plan,
        rows=rows,
        scores=scores,
        facts=shown,
        seconds=seconds,
        training=more.get("training"),
        sparsity=more.get("sparsity"),
        closing=more.get("closing"),
    )


def _best_and_worst(rows: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """All rows, but of the selectors that start with `prefix` only the best and the worst."""
    means = {
        row["selector"]: row["score"]
        for row in rows
        if row["selector"].startswith(prefix) and row["task"] == "needle" and row["depth"] is None
    }
    if len(means) < 3:
        return rows
    shown = {max(means, key=lambda name: means[name]), min(means, key=lambda name: means[name])}
    return [row for row in rows if not row["selector"].startswith(prefix) or row["selector"] in shown]


def note_resume(terminal: Terminal, run: RunFolder) -> None:
    if run.resumed:
        terminal.say(f"going on with the unfinished run in {run.path}")


def show_plan(terminal: Terminal, plan: AttentionPlan, memory: dict[str, int]) -> None:
    terminal.say(plan.map())
    terminal.cost_table(cost_rows(plan))
    terminal.say(
        f"memory at 8192 tokens, bf16: weights {short(memory['weights'])}B, cache {short(memory['cache'])}B "
        f"(base {short(memory['base_cache'])}B)"
    )
