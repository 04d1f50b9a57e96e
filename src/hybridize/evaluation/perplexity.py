"""Perplexity by position: where in the context a model loses or gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.errors import bad


@torch.no_grad()
def perplexity_rows(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    length: int,
    windows: int = 8,
    buckets: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Teacher-forced perplexity on `windows` stretches of `length` tokens, over all positions and by position bucket.

    Args:
        documents: text; stretches are taken without overlap from its start on.
        buckets: upper edges of the position buckets; default powers of two from 128 up to `length`.

    Returns:
        One row a bucket and one for all: perplexity, 95 % interval over stretches, n tokens.

    Raises:
        HybridizeError: less text than one stretch.
    """
    ids = [i for text in documents for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    count = min(windows, len(ids) // length)
    if count < 1:
        raise bad("text", f"{len(ids)} tokens", f"at least {length}, one stretch")
    edges = list(buckets or [128 * 2**i for i in range(64) if 128 * 2**i < length]) + [length]
    nll = []
    for i in range(count):
        tokens = torch.tensor([ids[i * length : (i + 1) * length]], device=model.device)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        nll.append(torch.cat([_token_nll(model, hidden, tokens, start) for start in range(0, length - 1, 1024)]))
        if progress:
            progress(i + 1, count)
    table = torch.stack(nll).double().cpu()  # [stretches, length - 1]; column t predicts position t + 1
    rows = [_row(table, 0, length, length)]
    return rows + [_row(table, low, high, length) for low, high in zip([0, *edges], edges, strict=False)]


def _token_nll(model: Any, hidden: torch.Tensor, tokens: torch.Tensor, start: int) -> torch.Tensor:
    stop = min(start + 1024, tokens.shape[1] - 1)
    logits = model.lm_head(hidden[0, start:stop]).float()
    return torch.nn.functional.cross_entropy(logits, tokens[0, start + 1 : stop + 1], reduction="none")


def _row(table: torch.Tensor, low: int, high: int, length: int) -> dict[str, Any]:
    inside = table[:, max(low - 1, 0) : high - 1]
    part = inside.mean(dim=1)
    mean = float(part.mean())
    error = 1.96 * float(part.std(unbiased=True)) / math.sqrt(len(part)) if len(part) > 1 else 0.0
    return {
        "task": "perplexity",
        "context": length,
        "positions": [low, high],
        "score": math.exp(mean),
        "low": math.exp(mean - error),
        "high": math.exp(mean + error),
        "n": inside.numel(),
    }
