"""Operator specs: what a group runs, as plain frozen data with its costs, and their JSON form. No torch in this file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hybridize.errors import bad
from hybridize.operators.exact_specs import Full, SnapKV, Window
from hybridize.operators.gated_spec import Gated
from hybridize.operators.indexed_spec import Indexed
from hybridize.operators.linear_spec import Linear

__all__ = [
    "DTYPE_BYTES",
    "SPECS",
    "Full",
    "Gated",
    "Indexed",
    "Linear",
    "OperatorSpec",
    "SnapKV",
    "Window",
    "spec_from_dict",
    "spec_to_dict",
]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OperatorSpec = Full | Window | SnapKV | Linear | Indexed | Gated
SPECS: dict[str, type[OperatorSpec]] = {spec.kind: spec for spec in (Full, Window, SnapKV, Linear, Indexed, Gated)}


def spec_to_dict(spec: OperatorSpec) -> dict[str, Any]:
    return {"kind": spec.kind, **asdict(spec)}


def spec_from_dict(data: Any, field: str = "operator") -> OperatorSpec:
    """Build a spec from its JSON form.

    Raises:
        HybridizeError: unknown kind or option, or a value out of range.
    """
    if not isinstance(data, dict) or data.get("kind") not in SPECS:
        got = data.get("kind") if isinstance(data, dict) else data
        raise bad(f"{field}.kind", got, f"one of {sorted(SPECS)}")
    cls = SPECS[data["kind"]]
    options = {key: value for key, value in data.items() if key != "kind"}
    known = set(cls.__dataclass_fields__)
    if unknown := sorted(set(options) - known):
        raise bad(f"{field}.{unknown[0]}", options[unknown[0]], f"one of the fields {sorted(known)}")
    try:
        return cls(**options)
    except TypeError:
        raise bad(field, data, f"the fields {sorted(known)}") from None
