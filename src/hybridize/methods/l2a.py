"""L2A: tokens decide when to look far (arXiv 2603.17484).

    1. plan     every layer is gated: a window for all tokens, then, for those that its router opens, attention to everything
    2. look     cross entropy and a rising price of open tokens; attention (both halves), norms and routers are trained

    3. prune    the far half of layers that hardly use it goes, with its keys and values (`hybridize prune`)

With `context`, the base is given a larger RoPE base first, and rows are that long.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def stages(context: int | None) -> dict[str, Recipe]:
    """The stage by default; with a context, on rows of so many tokens, at as many tokens a step."""
    look = STAGES["look"]
    return STAGES if context is None else {"look": replace(look, length=context, rows=max(1, look.tokens_a_step // context))}


def check_stage(recipe: Recipe, context: int | None) -> None:
    """
    Raises:
        HybridizeError: rows that are not as long as the context that is to be learned, or a teacher that does not know it.
    """
    if context is None or not recipe.tokens:
        return
    if recipe.length != context:
        raise bad("train.look.length", recipe.length, f"{context}, the context that is asked for")
    if recipe.kl:
        raise bad("train.look.kl", recipe.kl, "0 with a context: under another RoPE the base is no teacher")


# the same training; what a gate that asks for no content opens is `rate` of the tokens
CONTROLS = ("random-gate", "position-gate", "all-open", "all-closed", "standard")


def check_control(control: str | None) -> None:
    """
    Raises:
        HybridizeError: an unknown control.
    """
    if control is not None and control not in CONTROLS:
        raise bad("control", control, f"one of {CONTROLS}")


def pruned_plan(
    plan: AttentionPlan, closed: Sequence[float | None], context: int, threshold: float | None = None,
    budget: float | None = None,
) -> AttentionPlan:  # fmt: skip
    """Gated layers without their far half where it is hardly used.

    Args:
        closed: share of closed tokens of each layer, None where it has no gate.
        threshold: layers with so large a share lose it. budget: or those with the largest shares, until at most this share
            of the plan's cache bytes at `context` tokens is left.

    Raises:
        HybridizeError: a threshold or a budget that is no share, or a budget below what is left without any far half.
    """
    name, value = ("threshold", threshold) if budget is None else ("budget", budget)
    if value is None or not 0 < value <= 1:
        raise bad(name, value, "a share above 0, at most 1")
    order = sorted((i for i, share in enumerate(closed) if share is not None), key=lambda i: (-(closed[i] or 0.0), i))
    if threshold is not None:
        return _without_far(plan, [i for i in order if (closed[i] or 0.0) >= threshold], closed)
    whole = plan.cache_bytes(context)
    for count in range(len(order) + 1):
        made = _without_far(plan, order[:count], closed)
        if made.cache_bytes(context) <= value * whole:
            return made
    least = made.cache_bytes(context) / whole
    raise bad("budget", value, f"at least {least:.3f}, what windows alone leave of the cache at {context} tokens")


def _without_far(plan: AttentionPlan, layers: Sequence[int], closed: Sequence[float | None]) -> AttentionPlan:
    operators, rows = dict(plan.operators), list(plan.assignment)
    for layer in layers:
        spec = plan.gate(layer)
        assert spec is not None
        name = f"window_{spec.window}"
        operators[name], rows[layer] = spec.near, (name,) * plan.geometry.kv_heads
    said = {"pruned": sorted(layers), "closed": [None if share is None else round(share, 4) for share in closed]}
    return replace(plan, operators=operators, assignment=tuple(rows), provenance={**plan.provenance, **said})


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
