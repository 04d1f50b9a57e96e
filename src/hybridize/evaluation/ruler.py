"""RULER scores: greedy answers in left-padded batches, and the share of references they contain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hybridize.answers import left_pad
from hybridize.data.ruler import RulerPrompt
from hybridize.errors import bad


def ruler_score(answer: str, references: Sequence[str], metric: str) -> float:
    """RULER's string match, case ignored: "all", the share of references found; "part", 1 if any is."""
    if metric not in ("all", "part"):
        raise bad("metric", metric, "'all' or 'part'")
    found = [reference.lower() in answer.lower() for reference in references]
    return float(any(found)) if metric == "part" else sum(found) / len(found)


@torch.no_grad()
def ruler_answers(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[RulerPrompt],
    *,
    batch_tokens: int = 16384,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[RulerPrompt, str]]:
    """Each prompt with the model's greedy answer, in the given order; rows of a batch are padded on the left."""
    answered: list[tuple[RulerPrompt, str]] = []
    for batch in _batches(prompts, batch_tokens):
        ids, mask = left_pad([prompt.ids for prompt in batch], model.device)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=batch[0].new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        answered += zip(batch, texts, strict=True)
        if progress:
            progress(len(answered))
    return answered


def _batches(prompts: Iterable[RulerPrompt], tokens: int) -> Iterable[list[RulerPrompt]]:
    """Neighbours with the same room for an answer, at most `tokens` padded tokens together."""
    batch: list[RulerPrompt] = []
    for prompt in prompts:
        width = max(len(p.ids) + p.new_tokens for p in [*batch, prompt])
        if batch and (width * (len(batch) + 1) > tokens or prompt.new_tokens != batch[0].new_tokens):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def ruler_rows(answered: Sequence[tuple[RulerPrompt, str]]) -> list[dict[str, Any]]:
    """One row a (task, length): mean score, n, 95 % interval of the mean."""
    rows = []
    for task, length in dict.fromkeys((prompt.task, prompt.length) for prompt, _ in answered):
        scores = [
            ruler_score(answer, prompt.references, prompt.metric)
            for prompt, answer in answered
            if (prompt.task, prompt.length) == (task, length)
        ]
        mean, n = sum(scores) / len(scores), len(scores)
        spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / max(1, n - 1))
        half = 1.96 * spread / math.sqrt(n)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
        rows.append({"task": task, "context": length, "depth": None, "score": mean, "n": n, "low": low, "high": high})
    return rows
