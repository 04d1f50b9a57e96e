"""What a report shows of training: losses, learned gates, watched recall, and what choosing cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hybridize.plan import AttentionPlan
from hybridize.report.charts import curve, paths, short


def training_parts(training: Mapping[str, Mapping[str, Any]] | None, plan: AttentionPlan) -> dict[str, Any]:
    """Charts and numbers by name, None where there is nothing to show: "losses", "gates", "recall", "selection", "skip"."""
    stages = training or {}
    named = {"gates" if "gates" in record else name: record for name, record in stages.items()}
    losses = {name: record["losses"] for name, record in named.items() if record.get("losses")}
    gates = [record["gates"] for record in stages.values() if record.get("gates")]
    watched = {name: record for name, record in stages.items() if record.get("recall")}
    chosen = stages.get("selection")
    skips = [record["skip"] for record in stages.values() if record.get("skip")]
    return {
        "skip": Markup(_skip(skips[0], plan)) if skips else None,
        "losses": Markup(curve(losses, "loss")) if losses else None,
        "gates": Markup(_gates(gates[0], plan)) if gates else None,
        "recall": [{"stage": name, "steps": r["recall"], "best": r["best_step"]} for name, r in watched.items()] or None,
        "selection": None if chosen is None else [(name, _said(name, chosen[name])) for name in COST if name in chosen],
    }


COST = {"tokens": "", "passes": "", "flops": "FLOPs", "seconds": "s"}


def _said(name: str, value: float) -> str:
    return f"{short(value) if name in ('tokens', 'flops') else format(value, '.1f')} {COST[name]}".strip()


def _skip(path: Sequence[Any], plan: AttentionPlan) -> str:
    """A line a gated layer; path [S][layers that were gated]."""
    gated = [layer for layer in range(plan.geometry.layers) if plan.gate(layer) is not None]
    numbers = gated if len(gated) == len(path[0]) else range(len(path[0]))
    series = [(f"layer {layer}", [row[i] for row in path], True) for i, layer in enumerate(numbers)]
    return paths(series, "closed tokens over steps")


def _gates(path: Sequence[Any], plan: AttentionPlan) -> str:
    """A line a gate, those of units that stay full in the plan's colour; path [S][L][1 or G]."""
    full, columns, series = set(plan.kept_groups), len(path[0][0]), []
    for layer in range(len(path[0])):
        for column in range(columns):
            groups = [column] if columns > 1 else range(plan.geometry.kv_heads)
            name = f"layer {layer}" + (f", group {column}" if columns > 1 else "")
            kept = all((layer, group) in full for group in groups)
            series.append((name, [row[layer][column] for row in path], kept))
    return paths(series, "gates over steps")
