"""AttentionPlan: which operator every group of every layer runs, with its costs. No torch in this file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridize.costs import Costs, Geometry
from hybridize.errors import HybridizeError, bad
from hybridize.files import check_format, read_json, write_json
from hybridize.operators.specs import Full, Gated, OperatorSpec, Window, spec_from_dict, spec_to_dict

__all__ = ["AttentionPlan", "Geometry", "units_for_budget"]

FORMAT, FORMAT_VERSION = "hybridize-plan", 1


def units_for_budget(units: int, budget: float, allow_none: bool = False) -> int:
    """Number of units kept at a budget: the share of `units`, rounded half up.

    Raises:
        HybridizeError: the budget is outside 0..1, or rounds to no unit and `allow_none` is false.
    """
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 <= budget <= 1:
        raise bad("budget", budget, "a share between 0 and 1")
    kept = math.floor(units * budget + 0.5)
    if kept == 0 and not allow_none:
        raise bad("budget", budget, f"at least {0.5 / units:.4f}, this rounds to none of {units}")
    return kept


@dataclass(frozen=True)
class AttentionPlan(Costs):
    """operators: named specs; assignment[layer][group]: a name of `operators`, in the base's numbering."""

    geometry: Geometry
    operators: Mapping[str, OperatorSpec]
    assignment: tuple[tuple[str, ...], ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "assignment", tuple(tuple(row) for row in self.assignment))
        geometry = self.geometry
        if len(self.assignment) != geometry.layers:
            raise bad("plan.assignment", f"{len(self.assignment)} layers", f"{geometry.layers} layers")
        for layer, row in enumerate(self.assignment):
            if len(row) != geometry.kv_heads:
                raise bad(f"plan.assignment[{layer}]", f"{len(row)} groups", f"{geometry.kv_heads} groups")
            for group, name in enumerate(row):
                if name not in self.operators:
                    raise bad(f"plan.assignment[{layer}][{group}]", name, f"one of the operators {sorted(self.operators)}")
                _check_heads(self.operators[name], geometry.group_size, f"plan.assignment[{layer}][{group}]")
                _check_base_window(self.operators[name], geometry.windows[layer], f"plan.assignment[{layer}][{group}]")
            if any(self.operators[name].kind == "gated" for name in row) and len(set(row)) > 1:
                raise bad(f"plan.assignment[{layer}]", list(row), "one gated operator for the whole layer, or none")

    # -- making plans ---------------------------------------------------------------------------------------------

    @classmethod
    def base(cls, geometry: Geometry) -> AttentionPlan:
        """The base as it is: full attention, or the base's own window where it has one."""
        operators: dict[str, OperatorSpec] = {"full": Full()}
        rows = []
        for window in geometry.windows:
            name = "full" if window is None else f"base_window_{window}"
            if window is not None:
                operators[name] = Window(window, sinks=0)
            rows.append((name,) * geometry.kv_heads)
        return cls(geometry, operators, tuple(rows), {"method": "base"})

    @classmethod
    def from_groups(
        cls,
        geometry: Geometry,
        keep: Iterable[tuple[int, int]],
        cheap: OperatorSpec,
        provenance: Mapping[str, Any] | None = None,
        kept: OperatorSpec | None = None,
    ) -> AttentionPlan:
        """`kept` (None: the base's operator) in the (layer, group) pairs of `keep`, `cheap` in all others."""
        base, chosen = cls.base(geometry), set(keep)
        for layer, group in chosen:
            if not (0 <= layer < geometry.layers and 0 <= group < geometry.kv_heads):
                raise bad("keep", (layer, group), f"layer < {geometry.layers} and group < {geometry.kv_heads}")
        name = "" if kept is None else kept.kind if kept.kind != cheap.kind else f"wide_{kept.kind}"
        rows = tuple(
            tuple(
                cheap.kind if (i, j) not in chosen else base.assignment[i][j] if kept is None else name
                for j in range(geometry.kv_heads)
            )
            for i in range(geometry.layers)
        )
        more = {} if kept is None else {name: kept}
        return cls(geometry, {**base.operators, cheap.kind: cheap, **more}, rows, provenance or {})

    @classmethod
    def from_layers(
        cls,
        geometry: Geometry,
        keep: Iterable[int],
        cheap: OperatorSpec,
        provenance: Mapping[str, Any] | None = None,
    ) -> AttentionPlan:
        """Keep the base's operator in every group of the layers of `keep`, run `cheap` in all others."""
        pairs = [(layer, group) for layer in keep for group in range(geometry.kv_heads)]
        return cls.from_groups(geometry, pairs, cheap, provenance)

    def without(self, component: str) -> AttentionPlan:
        """This plan with one component ("window", "sinks", ...) off in every operator that has it, to measure what it does.

        Raises:
            HybridizeError: no operator in use has it.
        """
        changed = {name: spec.without(component) for name, spec in self.operators.items()}
        used = {name for row in self.assignment for name in row}
        if not any(changed[name] for name in used):
            raise bad("without", component, f"a component of {', '.join(spec.label() for spec in self.specs())}")
        operators = {name: changed[name] or spec for name, spec in self.operators.items()}
        return replace(self, operators=operators, provenance={**self.provenance, "without": component})

    # -- reading plans --------------------------------------------------------------------------------------------

    def spec(self, layer: int, group: int) -> OperatorSpec:
        return self.operators[self.assignment[layer][group]]

    def gate(self, layer: int) -> Gated | None:
        """What the whole layer runs beside its window, where it is gated."""
        spec = self.spec(layer, 0)
        return spec if isinstance(spec, Gated) else None

    def spans(self, layer: int) -> list[tuple[str, tuple[int, ...]]]:
        """(operator name, its groups) of a layer, in order of first appearance: the order heads take in memory.

        Groups whose specs agree in what `shared` leaves of them are one span, by the name of the first.
        """
        found: dict[Any, tuple[str, list[int]]] = {}
        for group, name in enumerate(self.assignment[layer]):
            found.setdefault(self.operators[name].shared or name, (name, []))[1].append(group)
        return [(name, tuple(groups)) for name, groups in found.values()]

    def group_order(self, layer: int) -> tuple[int, ...]:
        """Base group numbers in memory order; the identity where the layer runs one operator."""
        return tuple(group for _, groups in self.spans(layer) for group in groups)

    @property
    def phased(self) -> bool:
        return any(spec.phased for spec in self.specs())

    @property
    def kept_groups(self) -> list[tuple[int, int]]:
        """Groups that run what the base runs there."""
        base = AttentionPlan.base(self.geometry)
        return [
            (layer, group)
            for layer in range(self.geometry.layers)
            for group in range(self.geometry.kv_heads)
            if self.spec(layer, group) == base.spec(layer, group)
        ]

    @property
    def far_groups(self) -> list[tuple[int, int]]:
        """Groups that reach beyond a window: kept ones, linear, indexed and gated ones."""
        kept = set(self.kept_groups)
        return [
            (layer, group)
            for layer, row in enumerate(self.assignment)
            for group, name in enumerate(row)
            if (layer, group) in kept or self.operators[name].kind in ("linear", "indexed", "gated")
        ]

    @property
    def kept_layers(self) -> list[int]:
        kept = set(self.kept_groups)
        return [i for i in range(self.geometry.layers) if all((i, j) in kept for j in range(self.geometry.kv_heads))]

    def extended_from(self, geometry: Geometry) -> AttentionPlan:
        """This plan, saying that its base is one of `geometry` with a longer context, that it is trained for."""
        said = {"identity": geometry.identity, "context": [geometry.context, self.geometry.context]}
        return replace(self, provenance={**self.provenance, "extended": said})

    # -- people ---------------------------------------------------------------------------------------------------

    def map(self) -> str:
        """The layer x group map as text, one letter a group, one line a layer; legend below."""
        width = len(str(self.geometry.layers - 1))
        lines = [
            f"{layer:>{width}} " + "".join(self.operators[name].code for name in row)
            for layer, row in enumerate(self.assignment)
        ]
        legend = ", ".join(dict.fromkeys(f"{spec.code} = {spec.label()}" for spec in self.specs()))
        return "\n".join([*lines, legend])

    # -- files ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "geometry": {**asdict(self.geometry), "windows": list(self.geometry.windows)},
            "operators": {name: spec_to_dict(spec) for name, spec in self.operators.items()},
            "assignment": [list(row) for row in self.assignment],
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Any) -> AttentionPlan:
        """Inverse of `to_dict`.

        Raises:
            HybridizeError: wrong format or version, a missing or unknown field, a value out of range.
        """
        data = check_format(data, FORMAT, FORMAT_VERSION)
        expected = {"format", "format_version", "geometry", "operators", "assignment", "provenance"}
        if set(data) != expected:
            raise bad("plan fields", sorted(data), f"{sorted(expected)}")
        try:
            geometry = Geometry(**data["geometry"])
        except TypeError as error:
            raise HybridizeError(f"plan.geometry: {error}") from None
        if not isinstance(data["operators"], dict):
            raise bad("plan.operators", data["operators"], "a mapping of names to specs")
        operators = {name: spec_from_dict(spec, f"plan.operators.{name}") for name, spec in data["operators"].items()}
        if not isinstance(data["assignment"], list) or not all(isinstance(row, list) for row in data["assignment"]):
            raise bad("plan.assignment", data["assignment"], "a list of layers, each a list of operator names")
        return cls(geometry, operators, tuple(map(tuple, data["assignment"])), data["provenance"])

    def save(self, path: str | Path) -> Path:
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> AttentionPlan:
        return cls.from_dict(read_json(path, "plan"))

    def check_base(self, geometry: Geometry, descends: bool = False) -> None:
        """Refuse a plan made for another base, or (`descends`) for what is not this base with a longer context either.

        Raises:
            HybridizeError: shape, family or config hash differ.
        """
        names = ["model_type", "layers", "heads", "kv_heads", "head_dim", "windows", "identity"]
        if descends and self.provenance.get("extended", {}).get("identity") == geometry.identity:
            names.remove("identity")
        for name in names:
            mine, theirs = getattr(self.geometry, name), getattr(geometry, name)
            if mine != theirs:
                raise bad(f"plan.geometry.{name}", mine, f"{theirs!r}, as the model has (the plan was made for another base)")


def _check_heads(spec: OperatorSpec, group_size: int, where: str) -> None:
    retrieves = getattr(spec, "retrieves", ())
    if retrieves and len(retrieves) != group_size:
        raise bad(f"{where}.retrieves", retrieves, f"true or false for each of a group's {group_size} query heads, or nothing")


def _check_base_window(spec: OperatorSpec, window: int | None, where: str) -> None:
    # a base that slides was never trained to see further: full attention there would be another model
    if window is None:
        return
    if not isinstance(spec, Window) or spec.keeps_everything or spec.size > window:
        raise bad(where, spec.label(), f"a window of at most {window} tokens, the base's own window in this layer")
