"""What stages will cost, told before they start: tokens, seconds from a short probe, bytes of weights and optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hybridize.plan import AttentionPlan
from hybridize.training.recipe import Recipe
from hybridize.training.stages import is_trained

PASSES = {
    "branches": 1.5,
    "index": 1.5,
    "gates": 3.0,
}  # forward passes' worth of a step beside a teacher's; other stages': three


@dataclass(frozen=True)
class Forecast:
    """bytes: fp32 weights, gradients, two moments of AdamW, and a teacher's copy; activations come on top."""

    stage: str
    tokens: int
    seconds: float
    bytes: int

    def text(self) -> str:
        long = f"{self.seconds / 60:.0f} min" if self.seconds >= 120 else f"{self.seconds:.0f} s"
        return (
            f"{self.stage}: {self.tokens:,} tokens, about {long} at the speed of a short probe; {self.bytes / 1e9:.1f} GB of "
            "weights and optimizer, activations on top"
        )


def forecast(model: Any, recipes: Iterable[tuple[str, Recipe]], plan: AttentionPlan) -> list[Forecast]:
    """One for each stage that has steps. A forward pass is timed under the base's plan, and under `plan`, which is trained."""
    made = []
    for name, recipe in recipes:
        if not recipe.tokens:
            continue
        with model.temporary_plan(plan):
            seconds = (PASSES.get(name, 3.0) + recipe.checkpointing) * _seconds_a_token(model, recipe)
        if recipe.kl or name in PASSES:
            with model.temporary_plan(AttentionPlan.base(plan.geometry)):
                seconds += _seconds_a_token(model, recipe)
        each = {id(p): (p.numel(), is_trained(n, recipe.trains)) for n, p in model.named_parameters()}
        whole = sum(count for count, _ in each.values())
        trained = 0 if name == "gates" else sum(count for count, mine in each.values() if mine)
        size = 4 * whole + 12 * trained + (4 * trained if recipe.kl else 0)
        made.append(Forecast(name, recipe.tokens, recipe.tokens * seconds, size))
    return made


@torch.no_grad()
def _seconds_a_token(model: Any, recipe: Recipe) -> float:
    on_gpu = model.device.type == "cuda"
    width = recipe.length if on_gpu else min(recipe.length, 256)
    rows = (recipe.micro or recipe.rows) if on_gpu else 1
    ids, best = torch.ones(rows, width, dtype=torch.long, device=model.device), float("inf")
    for _ in range(2):  # the first one warms up
        start = _now(on_gpu)
        model.model(input_ids=ids, use_cache=False)
        best = min(best, _now(on_gpu) - start)
    return best / ids.numel()


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
