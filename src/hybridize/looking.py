"""L2A's training as a resumable step of a run, and how many tokens each layer then keeps from looking far."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hybridize.adapting import stage_step
from hybridize.data.needles import needle_prompts
from hybridize.data.text import load_text
from hybridize.evaluation.closing import closed_shares, closing_row
from hybridize.evaluation.suite import Proof
from hybridize.loading import Loaded
from hybridize.plan import AttentionPlan
from hybridize.runs import RunFolder
from hybridize.training.looking import look_far
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune
from hybridize.workflows import Report, silent

CLOSING_PROMPTS = 4  # a length


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


def closing_rows(
    run: RunFolder, loaded: Loaded, model: Any, proof: Proof, report: Report = silent, count: int = CLOSING_PROMPTS
) -> list[dict[str, Any]]:
    """What the model's gates leave closed at the proof's lengths, one step of the run; nothing where it has none."""
    if not any(spec.kind == "gated" for spec in model.plan.specs()):
        return []

    def make() -> list[dict[str, Any]]:
        text, made = "\n\n".join(load_text(proof.text)), []
        for length in proof.lengths:
            given: dict[str, Any] = {"length": length, "count": count, "kinds": ("number",), "seed": proof.seed}
            closed = closed_shares(model, needle_prompts(loaded.tokenizer, text, **given), partial(report, "closed tokens"))
            made.append(closing_row(model.plan, length, closed))
        return made

    rows: list[dict[str, Any]] = run.step("closing", make)
    return rows
