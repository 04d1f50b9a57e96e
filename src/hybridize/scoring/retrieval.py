"""Which query heads fetch the needle while the model writes its answer.

`retrieval` (Wu et al. 2024, arXiv 2404.15574; HeadKV's R1): a step counts where the head's most attended token lies in the
needle and is the token just written. `reasoning` (HeadKV's R2, Fu et al. 2024, arXiv 2410.19258): a step counts the weights
that lie in the needle among the head's most attended tokens, as many as the needle has; what is written need not stand there,
so that needles which take a step of reasoning (kind "courier") are scored too.

The model's own greedy answer is read back in one forward pass, which gives the attention of each decoding step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridize.answers import Batch, collate, greedy_tokens, within_tokens
from hybridize.data.needles import Prompt, needle_of
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores
from hybridize.scoring.watch import watch


def retrieval_scores(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    reasoning: bool = False,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Mean over the steps of an answer.

    Returns:
        Scores by head, [N, L, H] in 0..1. Where the papers divide by the needle's length, `retrieval` divides by the
        answer's, which is shorter here: the ranking is the same.

    Raises:
        HybridizeError: prompts that do not say where their needle lies.
    """
    rows: list[np.ndarray] = []
    for chosen in within_tokens(prompts, lambda prompt: len(prompt.ids), batch_tokens):
        spans = torch.tensor([needle_of(prompt)[0] for prompt in chosen], device=model.device)
        batch = collate(_answered(model, chosen), model.device)

        def each(weights: Tensor, batch: Batch = batch, spans: Tensor = spans) -> Tensor:
            steps = _reasoning(weights, spans) if reasoning else _retrieval(weights, batch, spans)
            real = batch.real[:, None]
            return (steps * real).sum(-1) / real.sum(-1)

        rows += list(watch(model, batch, batch.columns, each).double().cpu().numpy())
        if progress:
            progress(len(rows), len(prompts))
    provenance = {
        "scorer": "reasoning" if reasoning else "retrieval",
        "identity": model.plan.geometry.identity,
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
    }
    return Scores("head", np.stack(rows), provenance)


def _answered(model: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with what the model writes, as many tokens as the answer has, in the answer's place."""
    questions = [prompt.ids[: prompt.prompt_len] for prompt in prompts]
    with model.temporary_plan(AttentionPlan.base(model.plan.geometry)):
        written = greedy_tokens(model, questions, [len(p.ids) - p.prompt_len for p in prompts])
    return [replace(p, ids=tuple(q) + tuple(w)) for p, q, w in zip(prompts, questions, written, strict=True)]


def _retrieval(weights: Tensor, batch: Batch, spans: Tensor) -> Tensor:
    """1 where the most attended token lies in the needle and is the one written next, [B, H, A]."""
    top = weights.argmax(-1)
    token = batch.ids[:, None, None].expand(*top.shape[:3], -1).gather(-1, top[..., None])[..., 0]
    inside = (top >= spans[:, 0, None, None]) & (top < spans[:, 1, None, None])
    return (inside & (token == batch.targets[:, None])).float()


def _reasoning(weights: Tensor, spans: Tensor) -> Tensor:
    """Weights in the needle among the most attended tokens, over the needle's length, [B, H, A]."""
    sizes = (spans[:, 1] - spans[:, 0])[:, None, None, None]
    value, place = weights.topk(min(int(sizes.max()), weights.shape[-1]), dim=-1)
    counted = torch.arange(value.shape[-1], device=value.device) < sizes
    inside = (place >= spans[:, 0, None, None, None]) & (place < spans[:, 1, None, None, None])
    return (value * (counted & inside)).sum(-1) / sizes[..., 0]
