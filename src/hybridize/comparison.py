"""`hybridize compare`: many plans of one base on the same items, at matched cache bytes, against the base in one run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridize.entries import BASE, Comparison, Entry
from hybridize.errors import bad
from hybridize.evaluation.cells import Cell, average, average_against
from hybridize.evaluation.statistics import holm
from hybridize.evaluation.suite import Measure
from hybridize.files import read_json
from hybridize.loading import Loaded
from hybridize.methods.baselines import BASELINES, baseline_plan, matched_plan, random_group_plans
from hybridize.methods.nll import control_plans
from hybridize.operators.specs import DTYPE_BYTES
from hybridize.options import load_model
from hybridize.plan import FORMAT as PLAN_FORMAT
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.runs import RunFolder
from hybridize.scores import Scores
from hybridize.scoring.scorers import SCORERS
from hybridize.workflows import Report, compute_scores, hybrid_of, measure, paired_rows, plan_head, silent


@dataclass
class Candidate:
    """An entry with its plan: run on the base's weights (under another `rope`), or on those of `folder`.

    A cost of None: not known.
    """

    name: str
    source: str
    plan: AttentionPlan
    folder: str | None = None
    tokens: int | None = None
    seconds: float | None = None
    without: tuple[str, ...] = ()
    rope: dict[str, Any] | None = None

    @property
    def component(self) -> str:
        return "+".join(f"{part}_off" for part in self.without) or "all"


def base_candidate(plan: AttentionPlan) -> Candidate:
    """The base itself, which every comparison starts with."""
    return Candidate("full", "base", plan, tokens=0, seconds=0.0)


# -- plans ----------------------------------------------------------------------------------------------------------


def candidates(run: RunFolder, asked: Comparison, loaded: Loaded, model: Any, report: Report = silent) -> list[Candidate]:
    """Every entry's plan; selectors score now (resumable), with what that cost."""
    base = AttentionPlan.base(model.plan.geometry)
    keep = units_for_budget(base.geometry.layers, asked.ask.budget)
    match = AttentionPlan.from_layers(base.geometry, range(keep), asked.ask.cheap)
    found = {}
    for entry in sorted(asked.entries, key=lambda e: e.source in SCORERS):  # what may be refused comes before the work
        made = _candidate(run, entry, asked, loaded, model, base, match, report)
        made.plan.check_base(base.geometry, descends=made.folder is not None)
        for part in entry.without:
            made.plan = made.plan.without(part)
        made.without = entry.without
        found[entry.name] = made
    return [found[entry.name] for entry in asked.entries]


def _candidate(
    run: RunFolder,
    entry: Entry,
    asked: Comparison,
    loaded: Loaded,
    model: Any,
    base: AttentionPlan,
    match: AttentionPlan,
    report: Report,
) -> Candidate:
    source, cheap, at = entry.source, asked.ask.cheap, asked.match_at
    if source in SCORERS:
        ask = replace(asked.ask, **{"unit": None, **entry.select, "selector": source})
        step = f"score-{entry.name}"
        scores = compute_scores(run, loaded, model, ask, report, step)
        seconds = sum(value for name, value in run.seconds.items() if name.startswith(step))
        plan = matched_plan(scores, match, at, cheap, {"method": "nll", "selector": source, "unit": scores.unit})
        return Candidate(entry.name, source, plan, tokens=ask.tokens, seconds=seconds)
    if source == BASE:
        return Candidate(entry.name, source, base, tokens=0, seconds=0.0, rope=entry.rope)
    if source in BASELINES:
        return Candidate(entry.name, source, baseline_plan(source, match, at, asked.ask.sinks), tokens=0, seconds=0.0)
    path = Path(source)
    if not path.exists():
        budget = asked.ask.budget
        controls = control_plans(base, cheap, budget) | random_group_plans(base, cheap, budget)
        if source not in controls:
            raise bad("compare.entries", source, f"one of {sorted(controls)}, or an existing path")
        return Candidate(entry.name, source, controls[source], tokens=0, seconds=0.0)
    return _from_path(entry, path, match, at, asked)


def _from_path(entry: Entry, path: Path, match: AttentionPlan, at: int, asked: Comparison) -> Candidate:
    if path.suffix == ".tsv":
        scores = Scores.load(path)
    elif path.is_dir():
        plan = AttentionPlan.load(path / "plan.json")
        metrics = read_json(path / "metrics.json", "metrics") if (path / "metrics.json").is_file() else {}
        cost = metrics.get("conversion", {})
        weights = str(path) if (path / "config.json").is_file() or (path / "link.json").is_file() else None
        return Candidate(entry.name, path.name, plan, weights, cost.get("tokens"), cost.get("seconds"))
    else:
        data = read_json(path, "compare.entries")
        if isinstance(data, dict) and data.get("format") == PLAN_FORMAT:
            return Candidate(entry.name, path.name, AttentionPlan.from_dict(data))
        scores = Scores.from_dict(data)
    scores.check_identity(match.geometry.identity)
    provenance = {"method": "scores", "selector": scores.provenance.get("scorer", path.stem), "unit": scores.unit}
    return Candidate(entry.name, path.name, matched_plan(scores, match, at, asked.ask.cheap, provenance))


# -- measuring ------------------------------------------------------------------------------------------------------


def compare(
    run: RunFolder,
    asked: Comparison,
    model: Any,
    everyone: Sequence[Candidate],
    measures: Sequence[Measure],
    options: dict[str, Any],
    report: Report = silent,
) -> list[dict[str, Any]]:
    """Rows of every candidate, the base first; a step a measure and plan, so that a killed run goes on where it was."""
    rows: list[dict[str, Any]] = []
    base: list[Cell] | None = None
    for i, each in enumerate(everyone):
        own = model
        plan = each.plan
        if each.folder is not None:
            own = hybrid_of(load_model(each.folder, options))
        elif each.rope is not None:
            own = hybrid_of(load_model(asked.model, {**options, "rope": each.rope}))
            plan = own.plan
        with own.temporary_plan(plan):
            cells = measure(run, measures, each.name, own, report, i, len(everyone))
        if own is not model:
            del own
            gc.collect()
            torch.cuda.empty_cache()
        rows += candidate_rows(each, asked, cells, base)
        base = base or cells
    return rows


def candidate_rows(
    each: Candidate, asked: Comparison, cells: Sequence[Cell], base: Sequence[Cell] | None
) -> list[dict[str, Any]]:
    """A row a cell and an average, with its difference from the base's; p_holm over the cells that are no part of others."""
    theirs = {cell.key: cell for cell in base or ()}
    head = plan_head(each.name, each.plan, asked.proof.seed, asked.match_at)
    head |= {"component": each.component, "conversion_tokens": each.tokens, "conversion_seconds": each.seconds}
    rows = paired_rows(head, cells, base)
    main = [row for row in rows if "p" in row and row["depth"] is None and row.get("positions", [0])[0] == 0]
    for row, p in zip(main, holm([row["p"] for row in main]), strict=True):
        row["p_holm"] = p
    for name, group in averaged(cells).items():
        made = average(group, name[0])
        known = all(cell.key in theirs for cell in group)
        rows.append(head | made | (average_against(group, [theirs[c.key] for c in group]) if known else {}))
    return rows


def averaged(cells: Sequence[Cell]) -> dict[tuple[str, int | None], list[Cell]]:
    """Cells that belong into one number: RULER's tasks of a length, and the choice sets' raw accuracies."""
    groups: dict[tuple[str, int | None], list[Cell]] = {}
    for cell in cells:
        if cell.metric == "score" and cell.context is not None:
            groups.setdefault(("ruler_average", cell.context), []).append(cell)
        elif cell.metric == "acc":
            groups.setdefault(("choice_average", None), []).append(cell)
    return {key: group for key, group in groups.items() if len(group) > 1}


def entry_facts(each: Candidate, asked: Comparison, dtype: str) -> dict[str, Any]:
    """What an entry is and costs, for compare.json and the page."""
    contexts = sorted({*asked.contexts, *asked.proof.lengths, asked.match_at})
    stored = dtype if dtype in DTYPE_BYTES else "bfloat16"
    return {
        "name": each.name,
        "source": each.source,
        "operators": [spec.label() for spec in each.plan.specs()],
        "map": each.plan.map(),
        "kept_layers": each.plan.kept_layers,
        "kept_groups": len(each.plan.kept_groups),
        "component": each.component,
        "conversion": {"tokens": each.tokens, "seconds": each.seconds},
        "cache_bytes": {str(n): each.plan.cache_bytes(n, 1, stored) for n in contexts},
        "prefill_flops": {str(n): each.plan.prefill_flops(n) for n in contexts},
        "decode_flops": {str(n): each.plan.decode_flops(n) for n in contexts},
    }
