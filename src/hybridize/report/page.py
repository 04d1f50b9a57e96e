"""report.html: what was kept and what was saved, on one page that needs no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from hybridize.files import write_text
from hybridize.plan import AttentionPlan
from hybridize.report.charts import bars, grid, lines, short
from hybridize.report.training import training_parts
from hybridize.scores import Scores


def write_report(
    path: str | Path,
    *,
    title: str,
    plan: AttentionPlan,
    rows: Sequence[dict[str, Any]],
    scores: Scores | None = None,
    facts: dict[str, Any] | None = None,
    seconds: dict[str, float] | None = None,
    training: Mapping[str, Mapping[str, Any]] | None = None,
    sparsity: Sequence[dict[str, Any]] | None = None,
    closing: Sequence[dict[str, Any]] | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Write the page.

    Args:
        rows: quality rows (design.md's results format); those of method "base" are the reference.
        facts: shown as name and value at the top.
        seconds: per phase. training: for each stage its record (report/training.py). sparsity: rows of evaluation/sparsity.py.
        closing: rows of evaluation/closing.py.
    """
    base = AttentionPlan.base(plan.geometry)
    contexts = [2**i for i in range(10, 18)]
    names = _variants(rows)

    def costs(label: str, cost: Callable[[AttentionPlan, int], int]) -> Markup:
        each = {name: [cost(p, n) for n in contexts] for name, p in (("base", base), ("hybrid", plan))}
        return Markup(lines(contexts, each, label))

    html = template("page.html").render(
        title=title,
        plan=plan,
        reaching=_reaching(plan),
        facts=facts or {},
        seconds=seconds or {},
        table=_summary(rows, names, plan, base, dtype),
        tasks=_tasks(rows),
        heatmaps=[(name, _heatmap(rows, name)) for name in names],
        score_chart=None if scores is None else Markup(_score_chart(scores, plan)),
        score_unit=None if scores is None else scores.unit,
        training=training_parts(training, plan),
        sparsity=sparsity,
        closing=closing,
        scorer=None if scores is None else scores.provenance.get("scorer"),
        cache_lines=costs("cache bytes over context", lambda p, n: p.cache_bytes(n, 1, dtype)),
        prefill_lines=costs("attention FLOPs of a prefill over context", AttentionPlan.prefill_flops),
        decode_lines=costs("attention FLOPs of one decoded token over context", AttentionPlan.decode_flops),
    )
    return write_text(path, html)


def template(name: str) -> Template:
    """A page of this folder, with the style all pages share."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: "–" if value is None else f"{100 * value:.0f} %"
    environment.filters["short"] = short
    folder = resources.files("hybridize.report")
    environment.globals["style"] = Markup(folder.joinpath("style.css").read_text(encoding="utf-8"))
    return environment.from_string(folder.joinpath(name).read_text(encoding="utf-8"))


def _variants(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = [row["selector"] for row in rows]
    return sorted(dict.fromkeys(names), key=lambda name: (name != "full", names.index(name)))


def _score_chart(scores: Scores, plan: AttentionPlan) -> str:
    if scores.unit == "layer":
        return bars(scores.values.tolist(), scores.standard_error.tolist(), plan.kept_layers, "score of each layer")
    heads = plan.geometry.group_size if scores.unit == "head" else 1
    far = set(plan.far_groups)
    kept = [[(i, j) in far for j in range(len(row)) for _ in range(heads)] for i, row in enumerate(plan.assignment)]
    return grid(scores.values.tolist(), kept, scores.unit, f"score of each {scores.unit}")


REACHING = {
    "linear": "have a linear state",
    "indexed": "find their tokens by an index",
    "gated": "look far where a gate opens the token",
}


def _reaching(plan: AttentionPlan) -> list[tuple[int, str]]:
    """(groups, how they reach beyond a window), but for those that are the base's."""
    kinds = [plan.operators[name].kind for row in plan.assignment for name in row]
    return [(kinds.count(kind), how) for kind, how in REACHING.items() if kind in kinds]


def _summary(
    rows: Sequence[dict[str, Any]], names: Sequence[str], plan: AttentionPlan, base: AttentionPlan, dtype: str
) -> list[dict[str, Any]]:
    lengths = sorted({row["context"] for row in rows if row["task"] == "needle"})
    table = []
    for name in names:
        mine = [row for row in rows if row["selector"] == name]
        cells = [
            next((r for r in mine if r["task"] == "needle" and r["context"] == n and r["depth"] is None), None)
            for n in lengths
        ]
        whole = next((r for r in mine if r["task"] == "perplexity" and r["positions"] == [0, r["context"]]), None)
        first = mine[0]
        table.append(
            {
                "name": name,
                "layers": first.get("kept"),
                "cells": list(zip(lengths, cells, strict=True)),
                "perplexity": whole,
                "cache": first.get("cache_ratio"),
                "prefill": first.get("prefill_ratio"),
                "decode": first.get("decode_ratio"),
            }
        )
    return table


def _tasks(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """RULER tasks and choice sets: one line a (task, metric, length), one cell a plan; None where there are none."""
    rows = [row for row in rows if row["task"] not in ("needle", "perplexity")]
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["task"], row["metric"], row["context"]), []).append(row)
    shown = [{"task": t, "metric": m, "length": n, "cells": cells} for (t, m, n), cells in lines.items()]
    return {"selectors": list(dict.fromkeys(row["selector"] for row in rows)), "rows": shown} if rows else None


def _heatmap(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    cells = [row for row in rows if row["selector"] == name and row["task"] == "needle" and row["depth"] is not None]
    lengths, depths = sorted({c["context"] for c in cells}), sorted({c["depth"] for c in cells})
    found = {(c["context"], c["depth"]): c for c in cells}
    return {"lengths": lengths, "depths": depths, "cells": [[found.get((n, d)) for n in lengths] for d in depths]}
