"""L2A's training as a resumable step of a run, and how many tokens each layer then keeps from looking far."""

from __future__ import annotations

from typing import Any

import torch

from hybridize.adapting import stage_step
from hybridize.loading import Loaded
from hybridize.plan import AttentionPlan
from hybridize.runs import RunFolder
from hybridize.training.looking import look_far
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune
from hybridize.workflows import Report, silent


def look(
    run: RunFolder, loaded: Loaded, model: Any, plan: AttentionPlan, recipe: Recipe, text: str, report: Report = silent
) -> dict[str, Any]:
    """Set `plan` and train it, in place; {"look": record}. A plan without gates (a control) is trained on the same rows.

    A run that was killed goes on at its last checkpoint, at the same place of the ramp.
    """
    run.begin()
    torch.manual_seed(recipe.seed)
    model.set_plan(plan)
    if not recipe.steps:
        return {}
    gated = any(plan.gate(layer) for layer in range(plan.geometry.layers))
    stage = look_far if gated else fine_tune
    return {"look": stage_step("look", stage, recipe.trains, run, loaded, model, recipe, text, report)}
