"""IGAL: the groups that matter become linear attention, all others sliding windows; then a short fine-tune.

Head scores that were made to give heads larger KV budgets choose the few groups (6.25 %) that get a state for the far
context. No full attention remains, so the cache stops growing. Only the abstract of the paper is public: which scores,
which linear attention and which training are our decisions (docs/igal.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridize.errors import bad
from hybridize.methods.baselines import RANDOM_SEEDS, largest_that_fits, random_group_plans
from hybridize.operators.specs import Linear, Window
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.scores import Scores

DEFAULTS: dict[str, Any] = {
    "selector": "echo", "budget": 0.0625, "window": 64, "sinks": 4, "sink_positions": "rebased",
}  # fmt: skip
CONTROLS = (
    "all-window",
    "all-linear",
    "lowest",
    "important-full",
    "important-wide",
    "all-wide",
    *(f"random-groups-{seed}" for seed in RANDOM_SEEDS),
)


def needs_scores(control: str | None) -> bool:
    """Whether the method (None) or one of its controls chooses groups by scores.

    Raises:
        HybridizeError: an unknown control.
    """
    if control is not None and control not in CONTROLS:
        raise bad("control", control, f"one of {CONTROLS}")
    return control in (None, "lowest", "important-full", "important-wide")


def igal_plan(
    scores: Scores | None, base: AttentionPlan, linear: Linear, cheap: Window, budget: float, control: str | None = None
) -> AttentionPlan:
    """`linear` in the budget's share of groups with the highest scores, `cheap` in all others.

    Args:
        control: "all-window", "all-linear"; as many "random-groups-SEED" or "lowest"-scored groups; "important-full", the
            highest-scored ones with the base's attention (what a linear group can at best come near to). Equal bytes in place
            of equal groups: "important-wide", the state's bytes spent on a wider window of the same groups, "all-wide" of all.

    Raises:
        HybridizeError: an unknown control, or scores of another shape.
    """
    geometry = base.geometry
    kept: Linear | Window | None = linear
    selector = "none"
    if needs_scores(control):
        assert scores is not None
        scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
        selector = scores.provenance.get("scorer", "unknown")
        pairs = lowest_groups(scores, budget, base) if control == "lowest" else scores.top_groups(budget, geometry.kv_heads)
        kept = None if control == "important-full" else linear
    elif control == "all-wide":
        return all_wide(base, linear, cheap, budget)
    elif control == "all-window":
        pairs = []
    elif control == "all-linear":
        pairs = [(layer, group) for layer in range(geometry.layers) for group in range(geometry.kv_heads)]
    else:
        pairs = random_group_plans(base, cheap, budget)[str(control)].kept_groups
    if control == "important-wide":
        kept = wide(linear, geometry.head_dim)
    provenance = {"method": "igal", "selector": selector, "budget": budget, **({"control": control} if control else {})}
    return AttentionPlan.from_groups(geometry, pairs, cheap, provenance, kept)


def wide(linear: Linear, head_dim: int) -> Window:
    """A window whose keys and values in 16 bits take the bytes of the linear group's window and state."""
    tokens = linear.state_bytes(head_dim) // (4 * head_dim)
    return Window(max(1, linear.window + tokens), linear.sinks, linear.sink_positions)


def all_wide(base: AttentionPlan, linear: Linear, cheap: Window, budget: float) -> AttentionPlan:
    """The bytes of all states spent on wider windows of all groups."""
    geometry, far = base.geometry, 1 << 20  # tokens behind which no cache of these grows
    pairs = [divmod(unit, geometry.kv_heads) for unit in range(units_for_budget(geometry.layers * geometry.kv_heads, budget))]
    match = AttentionPlan.from_groups(geometry, pairs, cheap, kept=linear).cache_bytes(far)
    provenance = {"method": "igal", "selector": "none", "budget": budget, "control": "all-wide"}

    def make(size: int) -> AttentionPlan:
        return AttentionPlan.from_layers(geometry, [], replace(cheap, size=size), provenance)

    return largest_that_fits(make, cheap.size, cheap.size + 4096, match, far)


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
