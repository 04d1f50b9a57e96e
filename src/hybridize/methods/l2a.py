"""L2A: tokens decide when to look far (arXiv 2603.17484).

    1. plan     every layer is gated: a window for all tokens, then, for those that its router opens, attention to everything
    2. look     cross entropy and a rising price of open tokens; attention (both halves), norms and routers are trained

Not here: longer context by another RoPE base, and dropping the far half of layers that hardly use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridize.errors import bad
from hybridize.operators.specs import Gated, OperatorSpec, Window
from hybridize.plan import AttentionPlan
from hybridize.training.recipe import Recipe

DEFAULTS: dict[str, Any] = {"window": 512, "sinks": 0, "sink_positions": "absolute", "selector": "drop", "budget": 1.0}
# published for 8B: 25 B tokens of 128K rows, rate 5e-5, price 1.31e-3 of the mean
STAGES: dict[str, Recipe] = {
    "look": Recipe(
        steps=200, rows=8, length=4096, trains="attention_norms", rate=5e-5, branch_rate=5e-5, skip=0.8, text_share=0.5,
        checkpointing=True,
    ),
}  # fmt: skip
# the same training; what a gate that asks for no content opens is `rate` of the tokens
CONTROLS = ("random-gate", "position-gate", "all-open", "all-closed", "standard")


def check_control(control: str | None) -> None:
    """
    Raises:
        HybridizeError: an unknown control.
    """
    if control is not None and control not in CONTROLS:
        raise bad("control", control, f"one of {CONTROLS}")


def l2a_plan(base: AttentionPlan, spec: Gated, control: str | None = None) -> AttentionPlan:
    """Every layer gated by `spec`, or a control's plan: other gates, the window alone ("all-closed"), the base ("standard").

    Raises:
        HybridizeError: an unknown control, or a base that slides.
    """
    check_control(control)
    provenance = {"method": "l2a"} | ({"control": control} if control else {})
    if control == "standard":
        return replace(base, provenance=provenance)
    gates = {"random-gate": "random", "position-gate": "position", "all-open": "open"}
    chosen: OperatorSpec = replace(spec, gate=gates[control]) if control in gates else spec
    if control == "all-closed":
        chosen = Window(spec.window, 0)
    return AttentionPlan.from_layers(base.geometry, [], chosen, provenance)
