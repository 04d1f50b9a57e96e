"""RTPurbo: few query heads retrieve, each query of them finds its tokens by a small index (arXiv 2605.16928).

    1. score    the echo of a sentence that stands at both ends of a document: which heads read it back
    2. plan     the `ratio` of heads with the highest echo retrieve by an index, all others see a window with sinks; a group
                keeps its whole cache where one of its heads retrieves
    3. index    projections learn the attention of their heads, nothing else is trained
    4. distil   all but the index learns the base's most likely tokens, under the sparse attention

Memory is saved by group, compute by head, so a plan says both shares.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hybridize.errors import bad
from hybridize.methods.baselines import RANDOM_SEEDS
from hybridize.operators.specs import Indexed, OperatorSpec, Window
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.scores import Scores
from hybridize.training.recipe import Recipe

DEFAULTS: dict[str, Any] = {
    "selector": "echo", "budget": 0.15, "window": 1024, "sinks": 4, "sink_positions": "absolute",
}  # fmt: skip
INDEXED: dict[str, Any] = {"top_p": 0.9, "dim": 16, "block": 64, "dense_below": 512}
# published for 30B: 600 steps each, rows of 32K to 80K tokens, rates 1e-3 and 3e-6
STAGES: dict[str, Recipe] = {
    "index": Recipe(steps=200, rows=8, length=2048, trains="branches", branch_rate=1e-3, warmup=20, text_share=0.5),
    "distil": Recipe(
        steps=100, rows=8, length=2048, trains="base", rate=3e-6, ce=0.0, kl=1.0, top=10, warmup=10, text_share=0.5
    ),
}
# the same heads, and what chooses their tokens
SELECTED: dict[str, dict[str, Any]] = {
    "dense": {"select": "all"},
    "top-k": {"top_p": 1.0},
    "pages": {"select": "pages", "top_p": 1.0},
    "oracle": {"select": "exact"},
    "random": {"select": "random", "top_p": 1.0},
}
CONTROLS = (*SELECTED, "all-window", "lowest", *(f"random-heads-{seed}" for seed in RANDOM_SEEDS))


def needs_scores(control: str | None) -> bool:
    """Whether the method (None) or one of its controls chooses heads by scores.

    Raises:
        HybridizeError: an unknown control.
    """
    if control is not None and control not in CONTROLS:
        raise bad("control", control, f"one of {CONTROLS}")
    return control in (None, "lowest", *SELECTED)


def controlled(indexed: Indexed, control: str | None) -> Indexed:
    """What heads that retrieve run under a control.

    Raises:
        HybridizeError: a control of a fixed number of tokens, and no number.
    """
    changed = SELECTED.get(control or "", {})
    if changed.get("top_p") == 1.0 and not indexed.max_tokens:
        raise bad("indexed.max_tokens", 0, f"how many tokens control {control!r} chooses for a query")
    return replace(indexed, **changed)


def rtpurbo_plan(
    scores: Scores | None, base: AttentionPlan, indexed: Indexed, budget: float, control: str | None = None
) -> AttentionPlan:
    """The budget's share of query heads with the highest scores retrieve, all others see the window of `indexed`.

    Args:
        scores: of heads.
        control: "top-k" (by the index), "pages" (Quest's bounds), "oracle" (the attention's own scores), "random" or "dense"
            in the same heads; "lowest" or "random-heads-SEED", as many other heads; "all-window".

    Raises:
        HybridizeError: an unknown control, or scores of another shape or unit.
    """
    geometry, selector = base.geometry, "none"
    count = geometry.layers * geometry.heads
    kept = units_for_budget(count, budget)
    indexed = controlled(indexed, control)
    if needs_scores(control):
        assert scores is not None
        if scores.unit != "head":
            raise bad("scores.unit", scores.unit, "'head': RTPurbo ranks query heads")
        scores.check_shape(geometry.layers, geometry.kv_heads, geometry.heads)
        selector = scores.provenance.get("scorer", "unknown")
        chosen = set(scores.ranking()[-kept:] if control == "lowest" else scores.ranking()[:kept])
    elif control == "all-window":
        chosen = set()
    else:
        chosen = set(random.Random(f"heads/{control}").sample(range(count), kept))
    return _plan_of_heads(base, indexed, chosen, {
        "method": "rtpurbo", "selector": selector, "budget": budget, **({"control": control} if control else {}),
    })  # fmt: skip


def _plan_of_heads(base: AttentionPlan, indexed: Indexed, heads: set[int], provenance: dict[str, Any]) -> AttentionPlan:
    """`heads`: numbers layer * heads + head of those that retrieve."""
    geometry, size = base.geometry, base.geometry.group_size
    operators: dict[str, OperatorSpec] = {"window": Window(indexed.window, indexed.sinks)}
    rows: list[list[str]] = []
    for layer in range(geometry.layers):
        rows.append([])
        for group in range(geometry.kv_heads):
            first = layer * geometry.heads + group * size
            retrieves = tuple(head in heads for head in range(first, first + size))
            name = "indexed_" + "".join("1" if x else "0" for x in retrieves) if any(retrieves) else "window"
            if any(retrieves):
                operators[name] = replace(indexed, retrieves=retrieves)
            rows[-1].append(name)
    groups = sum(name != "window" for row in rows for name in row) / (geometry.layers * geometry.kv_heads)
    return AttentionPlan(geometry, operators, tuple(map(tuple, rows)), {**provenance, "groups": groups})
