"""A measured cell: one task at one length under one plan, item by item, so that plans can be compared in pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hybridize.errors import bad
from hybridize.evaluation.statistics import sign_flip_p, standard_error, wilson

KINDS = ("share", "mean", "nats")


@dataclass(frozen=True)
class Cell:
    """values: one number an item, in the items' order.

    Args:
        kind: "share" (0 or 1 an item; Wilson interval), "mean" (any score; normal interval, kept inside 0..1 where all
            values are) or "nats" (mean nats a token of each item; the score is their perplexity, lower is better).
        weights: of each item in the mean (tokens of a stretch); None: equal.
        context, depth, positions: tokens, needle depth, position bucket, where the task has them.
    """

    task: str
    metric: str
    kind: str
    values: tuple[float, ...]
    weights: tuple[float, ...] | None = None
    context: int | None = None
    depth: float | None = None
    positions: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise bad("cell.kind", self.kind, f"one of {KINDS}")
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        for name in ("weights", "positions"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def key(self) -> tuple[Any, ...]:
        """What is measured: equal for the base's cell and a plan's."""
        return self.task, self.metric, self.context, self.depth, self.positions

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    @property
    def higher_is_better(self) -> bool:
        return self.kind != "nats"

    def row(self) -> dict[str, Any]:
        """score, n and 95 % interval, with what the cell measures; n counts tokens where items are weighted by them."""
        mean, half = self.mean, 1.96 * standard_error(self.values, self.weights)
        n = int(sum(self.weights)) if self.weights else len(self.values)
        if self.kind == "share":
            low, high = wilson(sum(self.values), len(self.values))
        elif self.kind == "nats":
            mean, low, high = _exp(mean), _exp(mean - half), _exp(mean + half)
        else:
            bounded = min(self.values) >= 0 and max(self.values) <= 1
            low, high = (max(0.0, mean - half), min(1.0, mean + half)) if bounded else (mean - half, mean + half)
        row: dict[str, Any] = {"task": self.task, "metric": self.metric, "context": self.context, "depth": self.depth}
        if self.positions is not None:
            row["positions"] = list(self.positions)
        return row | {"score": mean, "n": n, "low": low, "high": high}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Cells of equal key joined, values one behind the other: batches may cut a cell anywhere."""
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key, []).append(cell)
    return [_joined(group) for group in found.values()]


def _joined(group: Sequence[Cell]) -> Cell:
    weights = None if group[0].weights is None else tuple(w for cell in group for w in cell.weights or ())
    values = tuple(v for cell in group for v in cell.values)
    return Cell(**{**asdict(group[0]), "values": values, "weights": weights})


def against(cell: Cell, base: Cell) -> dict[str, float]:
    """{"difference", "difference_low", "difference_high", "p"} of a plan's cell against the base's, item by item.

    Differences are of the cell's own unit, nats a token for "nats". The interval is normal with the paired standard
    error; p is the two-sided sign-flip test.

    Raises:
        HybridizeError: cells of other items.
    """
    if cell.key != base.key or len(cell.values) != len(base.values) or cell.weights != base.weights:
        raise bad("cell", f"{cell.key}, {len(cell.values)} items", f"the base's {base.key}, {len(base.values)} items")
    differences = [a - b for a, b in zip(cell.values, base.values, strict=True)]
    mean = float(np.average(differences, weights=cell.weights))
    half = 1.96 * standard_error(differences, cell.weights)
    weighted = differences if cell.weights is None else [d * w for d, w in zip(differences, cell.weights, strict=True)]
    return {
        "difference": mean,
        "difference_low": mean - half,
        "difference_high": mean + half,
        "p": sign_flip_p(weighted),
    }


def average(cells: Sequence[Cell], task: str) -> dict[str, Any]:
    """Mean of several tasks' means at one length, each task counting alike: score, n, 95 % interval, as a row."""
    mean = sum(cell.mean for cell in cells) / len(cells)
    half = 1.96 * math.sqrt(sum(standard_error(cell.values) ** 2 for cell in cells)) / len(cells)
    row = {"task": task, "metric": "score", "context": cells[0].context, "depth": None, "score": mean}
    return row | {"n": sum(len(c.values) for c in cells), "low": max(0.0, mean - half), "high": min(1.0, mean + half)}


def average_against(cells: Sequence[Cell], bases: Sequence[Cell]) -> dict[str, float]:
    """`against` for `average`: tasks count alike whatever their numbers of items."""
    scaled = [
        (a - b) / len(cell.values)
        for cell, base in zip(cells, bases, strict=True)
        for a, b in zip(cell.values, base.values, strict=True)
    ]
    pairs = [[a - b for a, b in zip(cell.values, base.values, strict=True)] for cell, base in zip(cells, bases, strict=True)]
    mean = sum(sum(d) / len(d) for d in pairs) / len(pairs)
    half = 1.96 * math.sqrt(sum(standard_error(d) ** 2 for d in pairs)) / len(pairs)
    p = sign_flip_p(scaled)
    return {"difference": mean, "difference_low": mean - half, "difference_high": mean + half, "p": p}


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
