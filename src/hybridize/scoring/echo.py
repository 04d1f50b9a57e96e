"""The echo score: which query heads find an earlier copy of what they are reading (RTPurbo's R_h; RazorAttention).

A long document carries the same sentence near its start and at its end. With A the attention after softmax,

    R_h = mean over t in the second copy of the sum over j in the first copy of A_h(t, j)

One forward pass a document, no answer, no training: the cheapest score of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hybridize.answers import batches
from hybridize.data.needles import Prompt, needle_of
from hybridize.scores import Scores
from hybridize.scoring.watch import watch

NEAR_THE_START = 0.05  # of the document


def echo_prompt(prompt: Prompt) -> Prompt:
    """The document of a needle prompt, its needle near the start and again at the end, which is where the "answer" begins."""
    (start, stop), (first, last) = needle_of(prompt)
    ids = list(prompt.ids)
    needle, text = ids[start:stop], ids[first:start] + ids[stop:last]
    place = round(NEAR_THE_START * len(text))
    head = ids[:first] + text[:place]
    whole = head + needle + text[place:] + needle
    span, document = (len(head), len(head) + len(needle)), (first, len(whole) - len(needle))
    return Prompt(
        tuple(whole), len(whole) - len(needle), prompt.kind, prompt.length, NEAR_THE_START, prompt.answer, span, document
    )  # fmt: skip


def echo_scores(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """R_h of every query head, from the documents of needle prompts.

    Returns:
        Scores by head, [N, L, H] in 0..1.

    Raises:
        HybridizeError: prompts that do not say where their needle lies.
    """
    documents = [echo_prompt(prompt) for prompt in prompts]
    rows: list[np.ndarray] = []
    for batch in batches(documents, batch_tokens, model.device):
        chosen = documents[len(rows) : len(rows) + len(batch.ids)]
        spans = torch.tensor([needle_of(document)[0] for document in chosen], device=model.device)
        columns = torch.arange(batch.ids.shape[1], device=model.device)
        first = ((columns >= spans[:, :1]) & (columns < spans[:, 1:]))[:, None, None]
        second = (batch.columns + 1).clamp_max(batch.ids.shape[1] - 1)  # where each token of the copy lies
        real = batch.real[:, None]

        def echo(weights: torch.Tensor, first: Any = first, real: Any = real) -> torch.Tensor:
            return ((weights * first).sum(-1) * real).sum(-1) / real.sum(-1)

        rows += list(watch(model, batch, second, echo).double().cpu().numpy())
        if progress:
            progress(len(rows), len(documents))
    provenance = {
        "scorer": "echo",
        "identity": model.plan.geometry.identity,
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "forwards_per_prompt": 1,
    }
    return Scores("head", np.stack(rows), provenance)
