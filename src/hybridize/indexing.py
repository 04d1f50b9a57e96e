"""RTPurbo's stages as resumable steps of a run: an index for the heads that retrieve, then the base's most likely tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybridize.adapting import stage_step, training_rows
from hybridize.data.mixture import Mixture
from hybridize.data.needles import needle_prompts
from hybridize.data.text import load_text
from hybridize.evaluation.sparsity import sparsity
from hybridize.evaluation.suite import Proof
from hybridize.loading import Loaded
from hybridize.plan import AttentionPlan
from hybridize.runs import TRAINING, RunFolder
from hybridize.training.index import learn_index
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune
from hybridize.training.top import TopRows, write_top
from hybridize.workflows import Report, silent

SPARSITY_PROMPTS = 4  # a length


def index(
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    plan: AttentionPlan,
    recipes: dict[str, Recipe],
    text: str,
    report: Report = silent,
) -> dict[str, Any]:
    """Set `plan` and run the recipes' stages on it, in place; {stage: record}. A run that was killed goes on where it was."""
    run.begin()
    torch.manual_seed(recipes["index"].seed)  # first values of what is learned
    model.set_plan(plan)
    trained = {}
    if any(model.branches()) and recipes["index"].steps:
        trained["index"] = stage_step("index", learn_index, "branches", run, loaded, model, recipes["index"], text, report)
    recipe = recipes["distil"]
    if recipe.steps:
        file = run.path / TRAINING / "teacher.safetensors"
        if recipe.top and not run.has("distil"):
            rows = training_rows(loaded, text, recipe, recipe.steps)
            batch = recipe.micro or recipe.rows
            run.step("teacher", lambda: write_top(model, rows, recipe.top, batch, file, partial(report, "teacher")))
        stage = partial(_distilled, file) if recipe.top else fine_tune
        trained["distil"] = stage_step("distil", stage, recipe.trains, run, loaded, model, recipe, text, report)
        file.unlink(missing_ok=True)
    return trained


def _distilled(file: Any, model: Any, rows: Mixture, *more: Any) -> dict[str, Any]:
    return fine_tune(model, TopRows(rows, file), *more)


def with_trained(plan: AttentionPlan, trained: dict[str, Any]) -> AttentionPlan:
    """The plan, saying how many tokens its weights were trained on."""
    tokens = sum(record["tokens"] for record in trained.values())
    return replace(plan, provenance={**plan.provenance, "trained_tokens": tokens})


def sparsity_rows(
    run: RunFolder, loaded: Loaded, model: Any, proof: Proof, report: Report = silent, step: str = "sparsity"
) -> list[dict[str, Any]]:
    """What the model's indexed attention chooses at the proof's lengths, one step of the run; nothing where it has none."""
    if not any(spec.kind == "indexed" for spec in model.plan.specs()):
        return []

    def make() -> list[dict[str, Any]]:
        text, prompts = "\n\n".join(load_text(proof.text)), []
        for length in proof.lengths:
            given: dict[str, Any] = {"length": length, "count": SPARSITY_PROMPTS, "seed": proof.seed}
            given["kinds"] = proof.kinds or ("number",)
            prompts += needle_prompts(loaded.tokenizer, text, **given)
        return sparsity(model, prompts, partial(report, "sparsity"))

    rows: list[dict[str, Any]] = run.step(step, make)
    return rows
