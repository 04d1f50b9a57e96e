"""Scores: an importance table with its spread and where it came from. No torch in this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridize.errors import HybridizeError, bad
from hybridize.files import check_format, read_json, write_json
from hybridize.plan import units_for_budget

FORMAT, FORMAT_VERSION = "hybridize-scores", 1
UNITS = ("layer", "group", "head")


@dataclass(frozen=True)
class Scores:
    """Higher means more needed.

    Args:
        unit: what a value belongs to: "layer" ([L]), "group" ([L, G]) or "head" ([L, H]), in the base's numbering.
        samples: per-sample values [N, L] or [N, L, G or H]; a score without samples has N = 1.
        provenance: scorer, specs, prompts, seed, and `identity` of the base.
        order: units from most to least needed where the scorer fixes an order (greedy), else by mean value.
    """

    unit: str
    samples: np.ndarray
    provenance: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        samples = np.asarray(self.samples, dtype=np.float64)
        object.__setattr__(self, "samples", samples)
        if self.unit not in UNITS:
            raise bad("scores.unit", self.unit, f"one of {UNITS}")
        if samples.ndim != (2 if self.unit == "layer" else 3) or samples.size == 0:
            raise bad("scores.samples", f"shape {samples.shape}", "[N, layers] or [N, layers, groups or heads], not empty")
        if not np.isfinite(samples).all():
            raise bad("scores.samples", "NaN or infinity", "finite numbers")
        if self.order is not None and sorted(self.order) != list(range(self.values.size)):
            raise bad("scores.order", self.order, f"a permutation of 0..{self.values.size - 1}")

    @property
    def values(self) -> np.ndarray:
        """Mean over samples: [L] or [L, G or H]."""
        return self.samples.mean(axis=0)

    @property
    def standard_error(self) -> np.ndarray:
        """Standard error of the mean over samples, zero for a single sample; shape of `values`."""
        n = len(self.samples)
        return self.samples.std(axis=0, ddof=1) / np.sqrt(n) if n > 1 else np.zeros_like(self.values)

    def ranking(self) -> list[int]:
        """Flat unit indices from most to least needed; ties keep the base's order."""
        if self.order is not None:
            return list(self.order)
        return [int(i) for i in np.argsort(-self.values.ravel(), kind="stable")]

    def top(self, budget: float) -> list[int]:
        """Flat indices of the units kept at a budget (a share, rounded half up), in the base's order."""
        return sorted(self.ranking()[: units_for_budget(self.values.size, budget)])

    def top_groups(self, budget: float, kv_heads: int) -> list[tuple[int, int]]:
        """(layer, group) pairs kept at a budget; a kept layer keeps all its groups."""
        if self.unit == "layer":
            return [(layer, group) for layer in self.top(budget) for group in range(kv_heads)]
        scores = self if self.unit == "group" else self.to_groups(kv_heads)
        return [divmod(i, kv_heads) for i in scores.top(budget)]

    def to_groups(self, kv_heads: int, reduce: str = "max") -> Scores:
        """Query-head scores to group scores by `max` (recall) or `mean`."""
        if self.unit == "group":
            return self
        if self.unit != "head":
            raise bad("scores.unit", self.unit, "'head' or 'group'")
        if reduce not in ("max", "mean"):
            raise bad("reduce", reduce, "'max' or 'mean'")
        n, layers, heads = self.samples.shape
        if heads % kv_heads:
            raise bad("kv_heads", kv_heads, f"a divisor of {heads} heads")
        grouped = self.samples.reshape(n, layers, kv_heads, heads // kv_heads)
        combine: Callable[..., np.ndarray] = np.max if reduce == "max" else np.mean
        return Scores("group", combine(grouped, axis=-1), {**self.provenance, "reduce": reduce})

    def check_identity(self, identity: str) -> None:
        """Refuse scores of another base; a table that names none (an imported one) fits any.

        Raises:
            HybridizeError: made for another base.
        """
        theirs = self.provenance.get("identity")
        if theirs and theirs != identity:
            raise bad("scores.identity", theirs, f"{identity!r}, as the model has (these scores were made for another base)")

    def check_shape(self, layers: int, kv_heads: int, heads: int) -> None:
        """Refuse a table of another model's shape.

        Raises:
            HybridizeError: not one value for each layer, group or head.
        """
        expected = {"layer": (layers,), "group": (layers, kv_heads), "head": (layers, heads)}[self.unit]
        if self.values.shape != expected:
            raise bad("scores", f"{self.values.shape} {self.unit}s", f"{expected}, as the model has")

    def stability(self, budget: float, draws: int = 1000, seed: int = 0) -> np.ndarray:
        """Bootstrap over samples: how often each unit is among those kept at `budget`, 0..1, shape of `values`."""
        rng = np.random.default_rng(seed)
        n, flat = len(self.samples), self.samples.reshape(len(self.samples), -1)
        kept = units_for_budget(flat.shape[1], budget)
        counts = np.zeros(flat.shape[1])
        for _ in range(draws):
            means = flat[rng.integers(0, n, n)].mean(axis=0)
            counts[np.argsort(-means, kind="stable")[:kept]] += 1
        return (counts / draws).reshape(self.values.shape)

    def spearman(self, other: Scores) -> float:
        """Rank correlation with another table of the same shape."""
        a, b = (_ranks(scores.values.ravel()) for scores in (self, other))
        if a.shape != b.shape:
            raise bad("other", f"{b.size} units", f"{a.size} units")
        return float(np.corrcoef(a, b)[0, 1])

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "unit": self.unit,
            "samples": self.samples.tolist(),
            "order": None if self.order is None else list(self.order),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Scores:
        """Inverse of `to_dict`.

        Raises:
            HybridizeError: wrong format or version, a missing field, values that are not a finite table.
        """
        data = check_format(data, FORMAT, FORMAT_VERSION)
        try:
            order = None if data["order"] is None else tuple(data["order"])
            return cls(data["unit"], np.array(data["samples"], dtype=np.float64), data["provenance"], order)
        except KeyError as error:
            raise bad("scores fields", sorted(data), f"a field {error}") from None
        except (TypeError, ValueError) as error:
            if isinstance(error, HybridizeError):
                raise
            raise HybridizeError(f"scores.samples: {error}") from None

    def save(self, path: str | Path) -> Path:
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """A scores.json, or DuoAttention's .tsv of gates."""
        if Path(path).suffix == ".tsv":
            return cls.from_duo_attention(path)
        return cls.from_dict(read_json(path, "scores"))

    @classmethod
    def from_duo_attention(cls, path: str | Path, identity: str = "") -> Scores:
        """Import DuoAttention's `full_attention_heads.tsv`: a row a layer, a tab-separated gate a KV head.

        Raises:
            HybridizeError: the file is missing or is not a rectangular table of numbers.
        """
        try:
            table = np.loadtxt(path, delimiter="\t", ndmin=2)
        except (OSError, ValueError) as error:
            raise HybridizeError(f"scores: {path} is not a DuoAttention table ({error})") from error
        return cls("group", table[None], {"scorer": "duo_attention", "file": Path(path).name, "identity": identity})


def _ranks(values: np.ndarray) -> np.ndarray:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):  # ties share their mean rank
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks
