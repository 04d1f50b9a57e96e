"""FlashMorph: gates that are learned jointly choose the layers that keep full attention (arXiv 2606.30562).

    1. branches   every layer's linear branch learns its layer's attention, on the base's own activations
    2. gates      full attention and branch side by side in every layer, one gate each; only the gates are trained
    3. plan       full attention stays in the K layers with the highest gates, the others run their branch
    4. distil     the hybrid learns the base's next-token distribution
    5. long       cross entropy at a longer length

Gates come from one run for every budget. Selectors that it is held against choose layers at the same place, between the same
branches and the same distillation, so that they differ in nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridize.data.passkeys import PASSKEYS
from hybridize.errors import bad
from hybridize.methods.nll import control_plans
from hybridize.operators.specs import Linear, Window
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores
from hybridize.scoring.scorers import SCORERS
from hybridize.training.recipe import Recipe

GATES = "gates"
DEFAULTS: dict[str, Any] = {
    "selector": GATES, "budget": 0.25, "window": 64, "sinks": 4, "sink_positions": "rebased",
}  # fmt: skip
# the gated delta rule, beside a window: with window=0, sinks=0 the branch is alone, as published
LINEAR: dict[str, Any] = {"degree": 1, "dim": 64, "rule": "delta", "decay": "token"}
# tokens: 10 M, 10 M, 5 M, and none at a longer length; published for 1.7B: 320 M, 20 M, 1 B, 1 B
STAGES: dict[str, Recipe] = {
    "branches": Recipe(
        steps=400, rows=48, length=512, trains="branches", branch_rate=1e-3, floor=0.01, text_share=1.0, kinds=()
    ),
    "gates": Recipe(steps=200, rows=24, length=2048, floor=0.1, text_share=0.0, kinds=(PASSKEYS,), warmup=0),
    "distil": Recipe(
        steps=200, rows=48, length=512, trains="all", rate=1e-4, branch_rate=1e-3, ce=0.0, kl=1.0, floor=0.1, watch=50
    ),
    "long": Recipe(steps=0, rows=4, length=8192, trains="all", rate=1e-5, branch_rate=1e-5, watch=25, checkpointing=True),
}


def is_control(selector: str) -> bool:
    """Whether a selector needs no scores: "periodic-PHASE", "random-SEED"."""
    return selector.startswith(("periodic-", "random-")) and selector.rpartition("-")[2].isdecimal()


def check_selector(selector: str, unit: str | None) -> None:
    """
    Raises:
        HybridizeError: no selector of this method, or a unit that it does not give.
    """
    if selector not in (GATES, *SCORERS) and not is_control(selector):
        raise bad("selector", selector, f"{GATES!r}, one of {SCORERS}, periodic-PHASE or random-SEED")
    if unit not in (None, "layer", *(("group",) if not is_control(selector) else ())):
        raise bad("unit", unit, "'layer' or 'group' ('layer' for selectors without scores)")


def flashmorph_plan(scores: Scores | None, base: AttentionPlan, linear: Linear, budget: float, selector: str) -> AttentionPlan:
    """The base's attention in the budget's share of layers (or groups) with the highest scores, `linear` in all others.

    `scores` None: the layers of a selector that needs none.

    Raises:
        HybridizeError: a selector of no such phase or seed, or scores of another shape.
    """
    provenance = {"method": "flashmorph", "selector": selector, "budget": budget}
    if scores is None:
        controls = control_plans(base, Window(1, 0), budget)
        if selector not in controls:
            raise bad("selector", selector, f"one of {sorted(controls)} at this budget")
        return AttentionPlan.from_layers(base.geometry, controls[selector].kept_layers, linear, provenance)
    geometry = base.geometry
    scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
    pairs = scores.top_groups(budget, geometry.kv_heads)
    return AttentionPlan.from_groups(geometry, pairs, linear, {**provenance, "unit": scores.unit})


def stage_recipes(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Recipes as the stages take them: branches are attention transfer."""
    branches = recipes["branches"]
    return {**recipes, "branches": replace(branches, transfer_steps=branches.steps, transfer_rate=branches.branch_rate)}
