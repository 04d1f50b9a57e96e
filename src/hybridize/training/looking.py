"""Gated layers learn which tokens have to look far (L2A, arXiv 2603.17484): a price on open gates that rises with the steps.

    loss = CE + weight(step) * R        R = mean over gated layers and tokens of sigmoid(z / tau)^2

weight is 0 in the warm-up, then rises evenly to `strength` at the last step. R is a mean, not the source's sum over tokens, so
that the price of a token does not depend on the length. With a wanted share of closed tokens (`skip`; ours) the weight is
multiplied by what a controller has learned: up while fewer are closed, down while more are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridize.data.mixture import Mixture
from hybridize.errors import bad
from hybridize.training.recipe import Recipe
from hybridize.training.stages import FineTune, Report, is_trained, masters, run_stage, select
from hybridize.training.teacher import frozen_teacher

GAIN = 0.5  # of the controller: e^(GAIN * missing share) a step
FURTHEST = 10.0  # log of the largest factor, up or down
COLLAPSED = 0.02  # share of open or of closed tokens below which a gate has stopped choosing


class LookFar(FineTune):
    """FineTune, and the price of open gates. `record` has, for each step, "skip" (closed share of each gated layer) and
    "push" (log of the controller's factor)."""

    def __init__(self, model: Any, recipe: Recipe, teacher: Any = None) -> None:
        super().__init__(model, teacher, recipe.ce, recipe.kl)
        self.recipe, self.step, self.push = recipe, 0, 0.0
        self.open: list[Tensor] = []  # of the step's forward passes, [gated layers]
        self.skip: list[float] = []

    @property
    def weight(self) -> float:
        """Of R, at the present step."""
        steps, warmup = self.recipe.steps, min(self.recipe.warmup, self.recipe.steps // 2)
        risen = max(0.0, (self.step + 1 - warmup) / max(1, steps - warmup))
        return self.recipe.strength * risen * math.exp(self.push)

    def beside(self, aux: Mapping[str, Tensor]) -> Tensor | float:
        self.open.append(torch.stack([value for name, value in aux.items() if name.endswith("far.open")]).detach())
        strengths = [value for name, value in aux.items() if name.endswith("far.strength")]
        return self.weight * torch.stack(strengths).mean() if strengths else 0.0

    def begin(self, step: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Before every step: a training that was stopped goes on where its history ends."""
        pushes = [entry["push"] for entry in history if "push" in entry]
        self.step, self.push = step, pushes[-1] if pushes else 0.0

    @torch.no_grad()
    def settle(self) -> None:
        closed = 1 - torch.stack(self.open).mean(0)
        if torch.distributed.is_initialized():  # one price on every device
            torch.distributed.all_reduce(closed)
            closed /= torch.distributed.get_world_size()
        self.open, self.skip = [], closed.tolist()
        if self.recipe.skip and self.weight:
            missing = self.recipe.skip - sum(self.skip) / len(self.skip)
            self.push = max(-FURTHEST, min(FURTHEST, self.push + GAIN * missing))

    def record(self) -> dict[str, Any]:
        return {"skip": self.skip, "push": self.push}


def look_far(model: Any, rows: Mixture, recipe: Recipe, folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Train gated layers, in place, on fp32 masters; what `train` returns, "skip" of every step, and where gates have
    collapsed "warning".

    Raises:
        HybridizeError: no gated layer.
    """
    if not any(model.plan.gate(layer) for layer in range(model.plan.geometry.layers)):
        raise bad("plan", "no gated layer", "at least one")
    with masters(model):
        teacher = frozen_teacher(model, lambda name: is_trained(name, recipe.trains)) if recipe.kl else None
        select(model, recipe.trains)
        rates = {"base": recipe.rate, "branch": recipe.branch_rate}
        stage = LookFar(model, recipe, teacher)
        made = run_stage(stage, model, rows, recipe, folder, report, steps=recipe.steps, rates=rates)
    warning = collapse(made["skip"][-1]) if made["skip"] else None
    return made | ({"warning": warning} if warning else {})


def collapse(skip: Sequence[float]) -> str | None:
    """What is wrong with the layers' closed shares, and what helps; None: nothing."""
    share = sum(skip) / len(skip)
    if share < COLLAPSED:
        return f"{1 - share:.0%} of tokens are open, the gates choose nothing: a higher look.strength, or look.skip=0.8"
    if share > 1 - COLLAPSED:
        return f"{share:.0%} of tokens are closed, hardly one looks far: a lower look.strength, or look.skip=0.8"
    return None
