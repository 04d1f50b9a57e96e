"""The stages: attention transfer, and fine-tuning on answers and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.data.mixture import Mixture
from hybridize.operators.learned import branches_of
from hybridize.operators.registry import build_operator
from hybridize.operators.teacher import Taught
from hybridize.plan import AttentionPlan
from hybridize.training.adapters import PROJECTIONS, add_lora, merge_lora
from hybridize.training.losses import chunked_cross_entropy, chunked_kl, chunked_top_kl, row_means
from hybridize.training.recipe import Recipe
from hybridize.training.teacher import frozen_teacher
from hybridize.training.top import TopRows
from hybridize.training.trainer import train

Report = Callable[[int, int], None]
ATTENTION = ("attention", "attention_norms")


class FineTune(nn.Module):
    """`ce` times the cross entropy of the tokens from each row's `start` on, and `kl` times the KL there from a teacher, or
    from what one said before: a row's mean, then the mean over rows."""

    def __init__(self, model: Any, teacher: Any = None, ce: float = 1.0, kl: float = 0.0) -> None:
        super().__init__()
        self.model, self.ce, self.kl = model, ce, kl
        self.held = (teacher,)  # no module of this one: it is not trained, saved or shared out

    def forward(
        self, input_ids: Tensor, start: Tensor, top_ids: Tensor | None = None, top_logits: Tensor | None = None
    ) -> dict[str, Tensor]:
        """input_ids [B, T], start [B] to {"loss"}; top_ids, top_logits: of all learned tokens, one row behind the other."""
        out = self.model.model(input_ids=input_ids, use_cache=False)
        hidden, learned = out.last_hidden_state, learned_tokens(input_ids, start)
        states, (teacher,) = hidden[:, :-1][learned], self.held
        losses = states.new_zeros(len(states), dtype=torch.float32)
        if self.ce:
            losses = self.ce * chunked_cross_entropy(states, self.model.lm_head, input_ids[:, 1:][learned])
        if teacher is not None:
            with torch.no_grad():
                theirs = teacher.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1][learned]
            losses = losses + self.kl * chunked_kl(states, self.model.lm_head, theirs, teacher.lm_head)
        if top_ids is not None and top_logits is not None:
            losses = losses + self.kl * chunked_top_kl(states, self.model.lm_head, top_ids, top_logits)
        loss = row_means(losses, learned.nonzero()[:, 0], len(input_ids)).mean()
        return {"loss": loss + self.beside(out.aux or {})}

    def beside(self, aux: Mapping[str, Tensor]) -> Tensor | float:
        """What is added to the loss, from what operators say beside their output."""
        return 0.0


def learned_tokens(input_ids: Tensor, start: Tensor) -> Tensor:
    """Which columns of [:, :-1] predict a token from each row's `start` on, [B, T - 1] bool."""
    return torch.arange(1, input_ids.shape[1], device=input_ids.device) >= start[:, None]


class Transfer(nn.Module):
    """Every branch learns the attention of the base on the base's own activations; the mean of its errors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, start: Tensor) -> dict[str, Tensor]:
        aux = self.model.model(input_ids=input_ids, use_cache=False).aux
        return {"loss": torch.stack([error for name, error in aux.items() if name.endswith(".error")]).mean()}


def fine_tune(
    model: Any,
    rows: Mixture | TopRows,
    recipe: Recipe,
    folder: Path,
    report: Report | None = None,
    recall: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """Train what the recipe names, in place, on fp32 masters; what `train` returns. `rows` with a teacher's most likely tokens
    where the recipe has `top`."""
    with masters(model):
        beside = recipe.kl and not recipe.top
        teacher = frozen_teacher(model, lambda name: is_trained(name, recipe.trains)) if beside else None
        if recipe.trains == "lora":
            add_lora(model, recipe.lora_rank, recipe.lora_alpha)
        select(model, recipe.trains)
        rates = {"base": recipe.rate, "branch": recipe.branch_rate}
        stage = FineTune(model, teacher, recipe.ce, recipe.kl)
        made = run_stage(stage, model, rows, recipe, folder, report, steps=recipe.steps, rates=rates, recall=recall)
        if recipe.trains == "lora":
            merge_lora(model)
        return made


def transfer(model: Any, rows: Mixture, recipe: Recipe, folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Train branches alone to give the base's attention, under the model's plan; what `train` returns."""
    with masters(model), teaching(model):
        select(model, "branches")
        rates = {"branch": recipe.transfer_rate}
        return run_stage(Transfer(model), model, rows, recipe, folder, report, steps=recipe.transfer_steps, rates=rates)


def run_stage(
    stage: nn.Module, model: Any, rows: Mixture | TopRows, recipe: Recipe, folder: Path, report: Report | None, **how: Any
) -> dict[str, Any]:
    """`train`, with what a recipe says of memory."""
    if recipe.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return train(stage.train(), rows, recipe, folder, report=report, **how)
    finally:
        if recipe.checkpointing:
            model.gradient_checkpointing_disable()
        model.eval()


def select(model: nn.Module, trains: str) -> None:
    """Make trainable what a recipe's `trains` names, and nothing else."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, trains))


def is_trained(name: str, trains: str) -> bool:
    """Whether a parameter is among those that a recipe's `trains` names."""
    part = name.split(".")
    if "branches" in part or "far" in part:
        return trains != "base"
    if trains in ("all", "base"):
        return True
    if trains == "attention_norms" and any("norm" in p for p in part):
        return True
    return "lora_" in name if trains == "lora" else trains in ATTENTION and any(p in part for p in PROJECTIONS)


@contextmanager
def masters(model: nn.Module) -> Iterator[None]:
    """fp32 weights inside, of which all are trainable again afterwards, in the dtype that they had."""
    dtype = next(model.parameters()).dtype
    model.float()
    try:
        yield
    finally:
        model.to(dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None


@contextmanager
def teaching(model: Any) -> Iterator[None]:
    """Every layer runs the base's operators, and those that have parameters learn beside them, until the `with` block ends."""
    attentions, base = model.attentions(), AttentionPlan.base(model.plan.geometry)
    before = [attention.operators for attention in attentions]
    for layer, attention in enumerate(attentions):
        attention.operators = nn.ModuleList(
            Taught(build_operator(base.spec(layer, 0)), operator)
            if branches_of([operator])
            else build_operator(base.spec(layer, 0))
            for operator in attention.operators
        )
    try:
        yield
    finally:
        for attention, operators in zip(attentions, before, strict=True):
            attention.operators = operators
