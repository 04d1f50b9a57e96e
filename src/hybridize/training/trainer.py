"""transformers' Trainer for stages: two learning rates, rows in order, checkpoints of what is trained, exact resume."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from hybridize.data.mixture import Mixture, Row
from hybridize.errors import HybridizeError, bad
from hybridize.files import write_text
from hybridize.training.recipe import Recipe
from hybridize.training.top import TaughtRow, TopRows
from hybridize.training.watching import Watch, settled

WHOLE = "whole"  # a file in each checkpoint that was written to its end
TRAINED_FILE = "trained.safetensors"


def train(
    stage: nn.Module,
    rows: Mixture | TopRows,
    recipe: Recipe,
    folder: Path,
    *,
    steps: int,
    rates: dict[str, float],
    report: Callable[[int, int], None] | None = None,
    recall: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """Train what `stage` leaves trainable; its forward gives {"loss"}, a mean over the rows it is given.

    A stage may have `begin(step, history)`, called before every step with what was kept of those before, `settle()`, called
    after every optimizer step, and `record()`, whose values are kept for every step.

    Args:
        folder: checkpoints; the last whole one is continued, to the same bits as if nothing had stopped it.
        rates: peak learning rates of "base", "branch" and "gate" parameters.
        recall: what the recipe's `watch` has called; the weights of the step where it is highest are the result.

    Returns:
        {"losses": one a step, "seconds": of all the runs it took, "tokens"}, what the stage records, and where recall was
        watched "recall" ([step, value] each) and "best_step".

    Raises:
        HybridizeError: nothing to train, or rows that cannot be shared out evenly over devices.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise HybridizeError("train: got no accelerate, expected it: pip install 'hybridize[train]'")
    if not any(p.requires_grad for p in stage.parameters()):
        raise bad("train.trains", "no parameter", "a plan with operators that have parameters, or weights to train")
    on_gpu = next(stage.parameters()).is_cuda
    world = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and accelerate launch say it
    micro = recipe.micro or max(1, recipe.rows // world)
    if recipe.rows % (micro * world):
        raise bad("train.rows", recipe.rows, f"a multiple of micro={micro} times {world} devices")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=recipe.rows // (micro * world),
        lr_scheduler_type="cosine_with_min_lr" if recipe.floor else "cosine",
        lr_scheduler_kwargs={"min_lr_rate": recipe.floor} if recipe.floor else {},
        warmup_steps=min(recipe.warmup, steps // 2),
        max_grad_norm=recipe.clip,
        seed=recipe.seed,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_steps=recipe.save_every,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    callbacks: list[TrainerCallback] = [Marker(report, steps)]
    watch = None
    if recipe.watch and recall is not None:
        watch = Watch(folder, recipe.watch, steps, recall, lambda path: save_trained(stage, path))
        callbacks.insert(0, watch)  # its files are written before a checkpoint is said to be whole
    trainer = StageTrainer(model=stage, args=arguments, train_dataset=rows, data_collator=collate, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is the command's
    trainer.rates = rates
    found = last_whole(folder)
    if found is not None and found.name == f"checkpoint-{steps}":  # the Trainer would take one more step
        load_trained(stage, found / TRAINED_FILE)
        trainer.state = TrainerState.load_from_json(str(found / "trainer_state.json"))
    else:
        trainer.train(resume_from_checkpoint=str(found) if found else None)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses, seconds = [entry["loss"] for entry in history], history[-1]["seconds"] if history else 0.0
    made = {"losses": losses, "seconds": seconds, "tokens": steps * recipe.rows * recipe.length}
    if watch is not None:
        made |= settled(watch, lambda path: load_trained(stage, path))
    return made | {name: [entry[name] for entry in history] for name in recorded(stage)}


def recorded(stage: Any) -> dict[str, Any]:
    """What a stage says of itself beside its loss, as JSON takes it."""
    return stage.record() if hasattr(stage, "record") else {}


def kind_of(name: str) -> str:
    """Which learning rate a parameter has."""
    if name == "gates":
        return "gate"
    return "branch" if ".branches." in name or ".router." in name else "base"


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """input_ids [B, T] and start [B] of rows of one length, and what a teacher said of them, one row behind the other."""
    made = {"input_ids": torch.tensor([row.ids for row in rows]), "start": torch.tensor([row.start for row in rows])}
    taught = [row for row in rows if isinstance(row, TaughtRow)]
    if taught:
        made |= {name: torch.cat([getattr(row, name) for row in taught]) for name in ("top_ids", "top_logits")}
    return made


def last_whole(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class StageTrainer(Trainer):
    """Checkpoints hold trained parameters only, in safetensors; base weights are where they came from."""

    rates: dict[str, float]
    seconds = 0.0  # of earlier runs; counted on from the first step of this one
    started: float | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        by_rate: dict[str, list[nn.Parameter]] = {name: [] for name in self.rates}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                by_rate[kind_of(name)].append(parameter)
        groups = [{"params": found, "lr": self.rates[name]} for name, found in by_rate.items() if found]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # rows are drawn already

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        assert self.started is not None
        spent = {"seconds": self.seconds + time.perf_counter() - self.started}
        super().log({**logs, **spent, **recorded(self.model)}, start_time)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.started is None:
            past = [entry["seconds"] for entry in self.state.log_history if "seconds" in entry]
            self.started, self.seconds = time.perf_counter(), past[-1] if past else 0.0
        stage = self.accelerator.unwrap_model(self.model)
        if hasattr(stage, "begin"):
            stage.begin(self.state.global_step, self.state.log_history)
        return super().training_step(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_trained(self.accelerator.unwrap_model(self.model), folder / TRAINED_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_trained(self.model if model is None else model, Path(resume_from_checkpoint) / TRAINED_FILE)


class Marker(TrainerCallback):
    """Says of a checkpoint that it is whole, and of a step that it is done."""

    def __init__(self, report: Callable[[int, int], None] | None, steps: int) -> None:
        self.report, self.steps = report, steps

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            write_text(Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE, "")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        stage = getattr(model, "module", model)
        if hasattr(stage, "settle"):
            stage.settle()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.report and state.is_world_process_zero:
            self.report(state.global_step, self.steps)


def save_trained(model: nn.Module, path: Path, names: AbstractSet[str] | None = None) -> None:
    """The parameters of `names` (None: what is trainable now), in the order they have in memory."""
    save_file({name: p.detach().contiguous() for name, p in _named(model, names).items()}, path)


@torch.no_grad()
def load_trained(model: nn.Module, path: Path, names: AbstractSet[str] | None = None) -> None:
    """Inverse of `save_trained`, on a model of the same plan.

    Raises:
        HybridizeError: other parameters in the file.
    """
    stored, wanted = load_file(path, device="cpu"), _named(model, names)
    if set(stored) != set(wanted):
        raise bad("checkpoint", sorted(set(stored) ^ set(wanted))[:3], "the parameters that this stage trains")
    for name, parameter in wanted.items():
        parameter.copy_(stored[name])


def _named(model: nn.Module, names: AbstractSet[str] | None) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if (p.requires_grad if names is None else name in names)}
