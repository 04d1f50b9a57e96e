"""Suffix reuse: toggling layer l leaves every layer below l as it was, so a rerun starts from l's cached input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridize.answers import Batch, answer_logits, answer_nll
from hybridize.operators.contract import Chunk
from hybridize.plan import AttentionPlan


class SuffixRunner:
    """Answer NLL, or what `measure` makes of normed hidden states [B, T, E], of one batch under many plans that differ in few
    layers.

    `base(plan)` runs every layer and remembers each layer's input; `toggled(plan, layer)` runs layers `layer` and up under
    another plan that agrees with the base plan below. Exact: the same operations on the same numbers as a whole run.
    """

    def __init__(self, model: Any, batch: Batch, measure: Callable[[Tensor], Tensor] | None = None) -> None:
        self.model, self.batch = model, batch
        self.measure = measure or (lambda hidden: answer_nll(answer_logits(model, hidden, batch), batch))
        self.layers_run = 0
        positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
        prompt_len = batch.prompt_len if model.plan.phased else None
        self.chunk = Chunk(positions, 0, None, prompt_len, len(batch.ids))
        self.inputs: list[Tensor] = []

    @torch.no_grad()
    def base(self, plan: AttentionPlan) -> Tensor:
        """The measure of each row, [B]."""
        self.inputs = []
        return self._run(plan, 0, self.model.model.embed_tokens(self.batch.ids), remember=True)

    @torch.no_grad()
    def toggled(self, plan: AttentionPlan, layer: int) -> Tensor:
        """The measure of each row under `plan`, [B]."""
        return self._run(plan, layer, self.inputs[layer], remember=False)

    def _run(self, plan: AttentionPlan, first: int, hidden: Tensor, remember: bool) -> Tensor:
        body = self.model.model
        if plan is not self.model.plan:
            self.model.set_plan(plan)
        self.chunk.prompt_len = self.batch.prompt_len if plan.phased else None
        context = body.context(hidden, self.chunk)
        for layer in body.layers[first:]:
            if remember:
                self.inputs.append(hidden)
            hidden, _ = layer(hidden, context)
            self.layers_run += 1
        return self.measure(body.norm(hidden))
