"""Every score by its name, and the units it can give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridize.data.needles import CALIBRATION_KINDS, Prompt
from hybridize.errors import bad
from hybridize.operators.specs import OperatorSpec, Window
from hybridize.plan import units_for_budget
from hybridize.scores import Scores
from hybridize.scoring.duo import duo_scores
from hybridize.scoring.echo import echo_scores
from hybridize.scoring.halo import halo_scores
from hybridize.scoring.lazy import lazy_scores
from hybridize.scoring.nll import greedy_scores, nll_scores
from hybridize.scoring.retrieval import retrieval_scores

# the first unit is the one taken where none is asked for
UNITS: dict[str, tuple[str, ...]] = {
    "nll": ("layer", "group"),
    "drop": ("layer", "group"),
    "greedy": ("layer", "group"),
    "backward": ("layer", "group"),
    "lazy": ("layer",),
    "kl": ("layer", "group"),
    "halo": ("layer",),
    "duo": ("group",),
    "echo": ("head", "group"),
    "retrieval": ("head", "group"),
    "reasoning": ("head", "group"),
}
SCORERS = tuple(UNITS)
DEFAULT_SELECTOR = "drop"


def unit_of(selector: str, unit: str | None) -> str:
    """The unit asked for, or the scorer's own.

    Raises:
        HybridizeError: an unknown scorer, or a unit that it does not give.
    """
    if selector not in UNITS:
        raise bad("selector", selector, f"one of {SCORERS}")
    if unit is not None and unit not in UNITS[selector]:
        raise bad("selector, unit", f"{selector} by {unit}", f"{selector} by one of {UNITS[selector]}")
    return UNITS[selector][0] if unit is None else unit


def kinds_of(selector: str) -> tuple[str, ...]:
    """The needles that a scorer is asked with where none are named."""
    return ("courier",) if selector == "reasoning" else CALIBRATION_KINDS


def score(
    model: Any,
    prompts: Sequence[Prompt],
    cheap: OperatorSpec,
    selector: str = DEFAULT_SELECTOR,
    *,
    budget: float = 0.25,
    unit: str | None = None,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores by one of SCORERS. `budget` tells the stepwise ones how far to go; heads become groups by their highest.

    Raises:
        HybridizeError: an unknown selector, or a unit that it does not give.
    """
    unit = unit_of(selector, unit)
    how: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    if selector in ("nll", "drop", "kl"):
        base, measure = "full" if selector == "drop" else "window", "kl" if selector == "kl" else "nll"
        return nll_scores(model, prompts, cheap, base=base, measure=measure, unit=unit, **how)
    if selector == "halo":
        return halo_scores(model, prompts, cheap, **how)
    if selector in ("greedy", "backward"):
        geometry = model.plan.geometry
        units = geometry.layers * (1 if unit == "layer" else geometry.kv_heads)
        kept = units_for_budget(units, budget)
        backward = selector == "backward"
        steps = max(1, units - kept) if backward else kept
        return greedy_scores(model, prompts, cheap, steps, backward=backward, unit=unit, **how)
    if selector == "lazy":
        if not isinstance(cheap, Window):
            raise bad("selector", "lazy", f"another one beside {cheap.label()}: it looks at what a window leaves out")
        return lazy_scores(model, prompts, cheap, batch_tokens=batch_tokens)
    if selector == "duo":
        return duo_scores(model, prompts, cheap, **how)
    if selector == "echo":
        heads = echo_scores(model, prompts, **how)
    else:
        heads = retrieval_scores(model, prompts, reasoning=selector == "reasoning", **how)
    return heads if unit == "head" else heads.to_groups(model.plan.geometry.kv_heads)
