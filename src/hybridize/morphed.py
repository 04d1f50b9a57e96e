"""FlashMorph's stages as resumable steps of a run: branches, a selection between them, distillation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybridize.adapting import recall_of, stage_step, training_rows
from hybridize.loading import Loaded
from hybridize.methods.flashmorph import GATES, flashmorph_plan, is_control, stage_recipes
from hybridize.operators.specs import Linear
from hybridize.plan import AttentionPlan
from hybridize.runs import TRAINING, RunFolder
from hybridize.scores import Scores
from hybridize.training.gates import PASSES, collapse, gate_scores, learn_gates
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune, transfer
from hybridize.workflows import Report, Selection, compute_scores, silent


def morph(
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    ask: Selection,
    asked: dict[str, Recipe],
    text: str,
    given: Scores | None = None,
    fixed: AttentionPlan | None = None,
    report: Report = silent,
) -> tuple[Scores | None, AttentionPlan, dict[str, Any]]:
    """(scores, plan, {stage: record}); the model is left under its plan, trained.

    "selection" among the records says what choosing cost beside the branches: {"tokens", "passes", "flops", "seconds"}.
    """
    assert ask.linear is not None
    linear, recipes, trained = ask.linear, stage_recipes(asked), {}
    base = AttentionPlan.base(model.plan.geometry)
    run.begin()
    with model.holding_branches():
        torch.manual_seed(recipes["branches"].seed)  # first values of what is learned
        model.set_plan(AttentionPlan.from_layers(base.geometry, [], linear))
        given_to = (run, loaded, model)
        if recipes["branches"].steps:
            trained["branches"] = stage_step("branches", transfer, "branches", *given_to, recipes["branches"], text, report)
        scores = given
        if scores is None and fixed is None and not is_control(ask.selector):
            scores, trained["selection"] = _selected(run, loaded, model, ask, linear, recipes["gates"], text, report)
        plan = fixed or flashmorph_plan(scores, base, linear, ask.budget, ask.selector)
        model.set_plan(plan)
    for name in ("distil", "long"):
        recipe = recipes[name]
        if recipe.steps:
            recall = recall_of(loaded, model, ask.text, recipe) if recipe.watch else None
            tuned = partial(fine_tune, recall=recall)
            trained[name] = stage_step(name, tuned, recipe.trains, *given_to, recipe, text, report)
    tokens = sum(trained[name]["tokens"] for name in ("branches", "distil", "long") if name in trained)
    return scores, replace(plan, provenance={**plan.provenance, "trained_tokens": tokens}), trained


def _selected(
    run: RunFolder, loaded: Loaded, model: Any, ask: Selection, linear: Linear, recipe: Recipe, text: str, report: Report
) -> tuple[Scores, dict[str, Any]]:
    """Scores of the asked selector between the branches, and what they cost."""
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and ".branches." not in name)
    if ask.selector != GATES:
        before = sum(run.seconds.values())
        scores = compute_scores(run, loaded, model, ask, report, cheap=linear)
        passes = float(scores.provenance.get("forwards_per_prompt", 1.0))
        seconds = sum(run.seconds.values()) - before
        return scores, _cost(ask.tokens, passes, weights, seconds)
    unit = ask.unit or "layer"

    def make() -> dict[str, Any]:
        rows = training_rows(loaded, text, recipe, recipe.steps)
        return learn_gates(model, linear, unit, rows, recipe, run.path / TRAINING / "gates", partial(report, "gates"))

    record = run.step("gates", make)
    scores = gate_scores(record["gates"], unit, model.plan.geometry, linear, recipe)
    return scores, {**_cost(record["tokens"], PASSES, weights, record["seconds"]), **record, "warning": collapse(scores)}


def _cost(tokens: int, passes: float, weights: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "passes": passes, "flops": 2.0 * weights * passes * tokens, "seconds": seconds}
