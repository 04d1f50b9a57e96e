"""Published baselines at the cache bytes of another plan, plans of imported scores at the same bytes, random groups."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridize.errors import bad
from hybridize.operators.specs import OperatorSpec, SnapKV, Window
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.scores import Scores

BASELINES = ("streaming", "snapkv")
OBSERVE = 32
RANDOM_SEEDS = range(5)


def largest_that_fits(make: Callable[[int], AttentionPlan], low: int, high: int, bytes_: int, context: int) -> AttentionPlan:
    """The plan of the largest size in low..high whose cache at `context` is at most `bytes_`.

    Raises:
        HybridizeError: not even the smallest fits.
    """
    if make(low).cache_bytes(context) > bytes_:
        raise bad("cache bytes", bytes_, f"at least {make(low).cache_bytes(context)} at {context} tokens")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if make(middle).cache_bytes(context) <= bytes_ else (low, middle - 1)
    return make(low)


def baseline_plan(name: str, match: AttentionPlan, context: int, sinks: int = 4) -> AttentionPlan:
    """A baseline with no more cache bytes at `context` tokens than the plan `match`.

    Args:
        name: "streaming" (StreamingLLM: one re-based window in every layer) or "snapkv" (one token budget a group).

    Raises:
        HybridizeError: an unknown name, or too few bytes for the smallest such plan.
    """
    if name not in BASELINES:
        raise bad("baseline", name, f"one of {BASELINES}")

    def make(tokens: int) -> AttentionPlan:
        spec: OperatorSpec = SnapKV(tokens, OBSERVE) if name == "snapkv" else Window(tokens, sinks, "rebased")
        provenance = {"method": name, "matched_at": context}
        return AttentionPlan.from_layers(match.geometry, [], spec, provenance)

    low = OBSERVE + 1 if name == "snapkv" else 1
    return largest_that_fits(make, low, max(low, context), match.cache_bytes(context), context)


def matched_plan(scores: Scores, match: AttentionPlan, context: int, cheap: Window, provenance: Any) -> AttentionPlan:
    """The most needed units of a score table that fit into the cache bytes of `match` at `context` tokens."""
    geometry = match.geometry
    scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
    if scores.unit == "head":
        scores = scores.to_groups(geometry.kv_heads)
    units = scores.ranking()

    def make(count: int) -> AttentionPlan:
        if scores.unit == "layer":
            return AttentionPlan.from_layers(geometry, units[:count], cheap, provenance)
        return AttentionPlan.from_groups(geometry, [divmod(u, geometry.kv_heads) for u in units[:count]], cheap, provenance)

    plan = largest_that_fits(make, 0, len(units), match.cache_bytes(context), context)
    return replace(plan, provenance={**provenance, "matched_at": context})


def random_group_plans(base: AttentionPlan, cheap: Window, budget: float) -> dict[str, AttentionPlan]:
    """As many groups as a score would keep, drawn by chance: "random-groups-SEED"."""
    geometry, plans = base.geometry, {}
    units = geometry.layers * geometry.kv_heads
    for seed in RANDOM_SEEDS:
        name = f"random-groups-{seed}"
        drawn = random.Random(f"groups/{seed}").sample(range(units), units_for_budget(units, budget))
        pairs = [divmod(unit, geometry.kv_heads) for unit in drawn]
        plans[name] = AttentionPlan.from_groups(
            geometry, pairs, cheap, {"method": "control", "selector": name, "budget": budget}
        )
    return plans
