"""Train a model under its plan, in resumable steps of a run folder: the adapt of score, plan, adapt, prove."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hybridize.answers import answer_hits, batches, run_answers
from hybridize.data.mixture import Mixture
from hybridize.data.needles import needle_prompts
from hybridize.data.text import load_text
from hybridize.loading import Loaded
from hybridize.plan import AttentionPlan
from hybridize.runs import TRAINING, RunFolder
from hybridize.training.recipe import Recipe
from hybridize.training.stages import fine_tune, is_trained, transfer
from hybridize.training.trainer import load_trained, save_trained
from hybridize.workflows import Report, silent

WATCHED = ("number", "code")  # needles whose recall is watched while a stage trains


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
    tuned = partial(fine_tune, recall=recall_of(loaded, model, "calibration", recipe)) if recipe.watch else fine_tune
    stages: list[tuple[str, int, Callable[..., dict[str, Any]], str]] = [("finetune", recipe.steps, tuned, recipe.trains)]
    if any(model.branches()):
        stages.insert(0, ("transfer", recipe.transfer_steps, transfer, "branches"))
    given = (run, loaded, model, recipe, text, report)
    return {name: stage_step(name, stage, trains, *given, steps) for name, steps, stage, trains in stages if steps}


def stage_step(
    name: str,
    stage: Callable[..., dict[str, Any]],
    trains: str,
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    recipe: Recipe,
    text: str,
    report: Report,
    steps: int | None = None,
) -> dict[str, Any]:
    """One stage as a step of the run: what it trained is a file beside its record, read back where it was done before.

    `trains` as in Recipe; `steps` None: the recipe's.
    """
    steps = recipe.steps if steps is None else steps
    file = run.path / TRAINING / f"{name}.safetensors"
    wanted = {n for n, _ in model.named_parameters() if is_trained(n, "attention" if trains == "lora" else trains)}

    def make() -> dict[str, Any]:
        made = stage(
            model,
            training_rows(loaded, text, recipe, steps),
            recipe,
            run.path / TRAINING / name,
            lambda done, of: report(name, done, of),
        )
        save_trained(model, file, wanted)
        return made

    if run.has(name):
        load_trained(model, file, wanted)
    record: dict[str, Any] = run.step(name, make)
    return record


def training_rows(loaded: Loaded, text: str, recipe: Recipe, steps: int) -> Mixture:
    """What `steps` steps of a recipe read."""
    return Mixture(
        loaded.tokenizer,
        "\n\n".join(load_text(text)),
        count=steps * recipe.rows,
        length=recipe.length,
        kinds=recipe.kinds,
        text_share=recipe.text_share,
        seed=recipe.seed,
    )


def recall_of(loaded: Loaded, model: Any, text: str, recipe: Recipe) -> Callable[[], float]:
    """Share of needles found by teacher-forced argmax, on 16 prompts of the recipe's length that no stage trains on."""
    prompts = needle_prompts(
        loaded.tokenizer, "\n\n".join(load_text(text)), length=recipe.length, count=16, kinds=WATCHED, seed=recipe.seed + 7919
    )

    @torch.no_grad()
    def recall() -> float:
        training = model.training
        model.eval()
        hits = []
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            for batch in batches(prompts, 8192, model.device):
                hits += answer_hits(run_answers(model, batch), batch).tolist()
        model.train(training)
        return sum(hits) / len(hits)

    return recall
