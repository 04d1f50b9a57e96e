"""IGAL: the groups that matter become linear attention, all others sliding windows; then a short fine-tune.

Head scores that were made to give heads larger KV budgets choose the few groups (6.25 %) that get a state for the far
context. No full attention remains, so the cache stops growing. Only the abstract of the paper is public: which scores,
which linear attention and which training are our decisions (docs/igal.md).
"""

from __future__ import annotations

from typing import Any

from hybridize.errors import bad
from hybridize.methods.baselines import RANDOM_SEEDS, random_group_plans
from hybridize.operators.specs import Linear, Window
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.scores import Scores

DEFAULTS: dict[str, Any] = {
    "selector": "echo", "budget": 0.0625, "window": 64, "sinks": 4, "sink_positions": "rebased",
}  # fmt: skip
CONTROLS = ("all-window", "all-linear", "lowest", "important-full", *(f"random-groups-{seed}" for seed in RANDOM_SEEDS))


def needs_scores(control: str | None) -> bool:
    return control in (None, "lowest", "important-full")


def igal_plan(
    scores: Scores | None, base: AttentionPlan, linear: Linear, cheap: Window, budget: float, control: str | None = None
) -> AttentionPlan:
    """`linear` in the budget's share of groups with the highest scores, `cheap` in all others.

    Args:
        control: "all-window", "all-linear"; as many "random-groups-SEED" or "lowest"-scored groups; "important-full", the
            highest-scored ones with the base's attention (what a linear group can at best come near to).

    Raises:
        HybridizeError: an unknown control, or scores of another shape.
    """
    if control is not None and control not in CONTROLS:
        raise bad("control", control, f"one of {CONTROLS}")
    geometry = base.geometry
    kept: Linear | None = linear
    selector = "none"
    if needs_scores(control):
        assert scores is not None
        scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
        selector = scores.provenance.get("scorer", "unknown")
        pairs = lowest_groups(scores, budget, base) if control == "lowest" else scores.top_groups(budget, geometry.kv_heads)
        kept = None if control == "important-full" else linear
    elif control == "all-window":
        pairs = []
    elif control == "all-linear":
        pairs = [(layer, group) for layer in range(geometry.layers) for group in range(geometry.kv_heads)]
    else:
        pairs = random_group_plans(base, cheap, budget)[str(control)].kept_groups
    provenance = {"method": "igal", "selector": selector, "budget": budget, **({"control": control} if control else {})}
    return AttentionPlan.from_groups(geometry, pairs, cheap, provenance, kept)


def lowest_groups(scores: Scores, budget: float, base: AttentionPlan) -> list[tuple[int, int]]:
    """As many groups as `top_groups` gives, from the other end of the ranking.

    Raises:
        HybridizeError: scores of layers, which rank no groups.
    """
    if scores.unit == "layer":
        raise bad("scores.unit", "layer", "'head' or 'group', to rank groups")
    ranking = scores.to_groups(base.geometry.kv_heads).ranking()
    count = units_for_budget(len(ranking), budget)
    return sorted(divmod(unit, base.geometry.kv_heads) for unit in ranking[-count:])
