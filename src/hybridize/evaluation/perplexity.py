"""Perplexity: by position, where in the context a model loses or gains; and with a sliding stride, over a whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.errors import bad
from hybridize.evaluation.cells import Cell

Progress = Callable[[int, int], None]


@torch.no_grad()
def position_cells(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    length: int,
    windows: int = 8,
    buckets: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Teacher-forced perplexity on `windows` stretches of `length` tokens, over all positions and by position bucket.

    Args:
        documents: text; stretches are taken without overlap from its start on.
        buckets: upper edges of the position buckets; default powers of two from 128 up to `length`.

    Returns:
        One cell for all positions and one a bucket, task "perplexity": a value a stretch.

    Raises:
        HybridizeError: less text than one stretch.
    """
    ids = _encode(tokenizer, documents)
    count = min(windows, len(ids) // length)
    if count < 1:
        raise bad("text", f"{len(ids)} tokens", f"at least {length}, one stretch")
    edges = list(buckets or [128 * 2**i for i in range(64) if 128 * 2**i < length]) + [length]
    nll = []
    for i in range(count):
        nll.append(_token_nll(model, ids[i * length : (i + 1) * length]))
        if progress:
            progress(i + 1, count)
    table = torch.stack(nll).double().cpu()  # [stretches, length - 1]; column t predicts position t + 1
    spans = [(0, length), *zip([0, *edges], edges, strict=False)]
    return [_position_cell(table, low, high, length) for low, high in spans]


def _position_cell(table: torch.Tensor, low: int, high: int, length: int) -> Cell:
    inside = table[:, max(low - 1, 0) : high - 1]
    tokens = (float(inside.shape[1]),) * len(inside)
    values = tuple(inside.mean(dim=1).tolist())
    return Cell("perplexity", "perplexity", "nats", values, tokens, context=length, positions=(low, high))


@torch.no_grad()
def sliding_cell(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    task: str,
    length: int,
    stride: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Cell:
    """Perplexity of a whole text, each token with at least `length - stride` tokens before it (but at the text's start).

    Args:
        documents: joined by blank lines into one text.
        length: tokens a model sees at once.
        stride: tokens by which the view moves on; default half of `length`. `length` itself gives disjoint stretches.
        limit: views at most.

    Returns:
        A value a view, weighted by the tokens it scores.

    Raises:
        HybridizeError: a stride outside 1..length, or a text of fewer than two tokens.
    """
    stride = stride or max(1, length // 2)
    if not 1 <= stride <= length:
        raise bad("stride", stride, f"1 to {length}, the length")
    ids = _encode(tokenizer, ["\n\n".join(documents)])
    if len(ids) < 2:
        raise bad("text", f"{len(ids)} tokens", "at least 2")
    starts = list(range(0, max(1, len(ids) - length + stride), stride))[:limit]
    values, tokens = [], []
    for i, start in enumerate(starts):
        nll = _token_nll(model, ids[start : start + length])
        fresh = nll if i == 0 else nll[max(0, length - stride - 1) :]  # tokens that no earlier view has scored
        if len(fresh):
            values.append(float(fresh.double().mean()))
            tokens.append(float(len(fresh)))
        if progress:
            progress(i + 1, len(starts))
    return Cell(task, "perplexity", "nats", tuple(values), tuple(tokens), context=length)


def _encode(tokenizer: Any, documents: Sequence[str]) -> list[int]:
    return [i for text in documents for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _token_nll(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """NLL of ids[1:], nats, [len(ids) - 1]; logits are made 1024 positions at a time."""
    tokens = torch.tensor([ids], device=model.device)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    parts = []
    for start in range(0, len(ids) - 1, 1024):
        stop = min(start + 1024, len(ids) - 1)
        logits = model.lm_head(hidden[0, start:stop]).float()
        parts.append(torch.nn.functional.cross_entropy(logits, tokens[0, start + 1 : stop + 1], reduction="none"))
    return torch.cat(parts)
