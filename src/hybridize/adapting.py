"""Train a model under its plan, in resumable steps of a run folder: the adapt of score, plan, adapt, prove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridize.data.mixture import Mixture
from hybridize.data.text import load_text
from hybridize.loading import Loaded
from hybridize.plan import AttentionPlan
from hybridize.runs import TRAINING, RunFolder
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune, is_trained, transfer
from hybridize.training.trainer import load_trained, save_trained
from hybridize.workflows import Report, silent


def adapt(
    run: RunFolder, loaded: Loaded, model: Any, plan: AttentionPlan, recipe: Recipe, text: str, report: Report = silent
) -> dict[str, Any]:
    """Set `plan` and run the recipe's stages on it, in place; {stage: {"losses", "seconds", "tokens"}}.

    A run that was killed goes on at its last checkpoint, and ends with the same bits.

    Raises:
        HybridizeError: a text that is too short.
    """
    run.begin()
    torch.manual_seed(recipe.seed)  # first values of what is learned
    model.set_plan(plan)
    stages: list[tuple[str, int, Callable[..., dict[str, Any]], str]] = [("finetune", recipe.steps, fine_tune, recipe.trains)]
    if any(model.branches()):
        stages.insert(0, ("transfer", recipe.transfer_steps, transfer, "branches"))
    given = (run, loaded, model, recipe, text, report)
    return {name: _stage(name, steps, stage, trains, *given) for name, steps, stage, trains in stages if steps}


def _stage(
    name: str,
    steps: int,
    stage: Callable[..., dict[str, Any]],
    trains: str,
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    recipe: Recipe,
    text: str,
    report: Report,
) -> dict[str, Any]:
    """One stage as a step of the run: what it trained is a file beside its record, read back where it was done before."""
    file = run.path / TRAINING / f"{name}.safetensors"
    wanted = {n for n, _ in model.named_parameters() if is_trained(n, "attention" if trains == "lora" else trains)}

    def make() -> dict[str, Any]:
        rows = Mixture(
            loaded.tokenizer,
            "\n\n".join(load_text(text)),
            count=steps * recipe.rows,
            length=recipe.length,
            kinds=recipe.kinds,
            text_share=recipe.text_share,
            seed=recipe.seed,
        )
        made = stage(model, rows, recipe, run.path / TRAINING / name, lambda done, of: report(name, done, of))
        save_trained(model, file, wanted)
        return made

    if run.has(name):
        load_trained(model, file, wanted)
    record: dict[str, Any] = run.step(name, make)
    return record
