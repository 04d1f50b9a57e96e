"""NLL-guided full-attention layer selection (arXiv 2606.27791), training-free, with its controls.

Keep the base's attention in k of L layers and sinks + sliding window in the rest; pick the k layers by how much each
one lowers the NLL of an answer that needs the far context. No weight changes.
"""

from __future__ import annotations

import random
from typing import Any

from hybridize.methods.baselines import RANDOM_SEEDS
from hybridize.operators.specs import Window
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.scores import Scores

DEFAULTS: dict[str, Any] = {
    "selector": "drop", "budget": 0.25, "window": 128, "sinks": 4, "sink_positions": "absolute",
}  # fmt: skip


def plan_from_scores(scores: Scores, base: AttentionPlan, cheap: Window, budget: float) -> AttentionPlan:
    """Keep the budget's share of units with the highest scores."""
    geometry = base.geometry
    scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
    pairs = scores.top_groups(budget, geometry.kv_heads)
    provenance = {"method": "nll", "selector": scores.provenance.get("scorer", "unknown"), "budget": budget}
    return AttentionPlan.from_groups(geometry, pairs, cheap, {**provenance, "unit": scores.unit})


def periodic_layers(layers: int, keep: int) -> list[list[int]]:
    """`keep` layers at one spacing, in every phase: [phase][i] = phase + floor(i * layers / keep)."""
    steps = [i * layers // keep for i in range(keep)] if keep else []
    return [[phase + step for step in steps] for phase in range(layers - steps[-1])] if steps else []


def random_layers(layers: int, keep: int, seed: int) -> list[int]:
    return sorted(random.Random(f"layers/{seed}").sample(range(layers), keep))


def control_plans(base: AttentionPlan, cheap: Window, budget: float) -> dict[str, AttentionPlan]:
    """The controls of equal k that need no scores, plus full and all-window, by selector name."""
    layers = base.geometry.layers
    keep = units_for_budget(layers, budget)
    chosen = {f"periodic-{phase}": kept for phase, kept in enumerate(periodic_layers(layers, keep))}
    chosen |= {f"random-{seed}": random_layers(layers, keep, seed) for seed in RANDOM_SEEDS}
    plans = {
        name: AttentionPlan.from_layers(base.geometry, kept, cheap, {"method": "nll", "selector": name, "budget": budget})
        for name, kept in chosen.items()
    }
    nothing = AttentionPlan.from_layers(base.geometry, [], cheap, {"method": "nll", "selector": "all-window", "budget": 0.0})
    return {"full": AttentionPlan.base(base.geometry), "all-window": nothing, **plans}
