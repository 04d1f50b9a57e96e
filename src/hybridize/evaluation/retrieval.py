"""Needle retrieval over length x depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.answers import answer_hits, batches, run_answers
from hybridize.data.needles import Prompt
from hybridize.errors import bad
from hybridize.evaluation.cells import Cell


def retrieval_hits(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    method: str = "argmax",
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[bool]:
    """Whether each prompt's whole answer is right.

    Args:
        model: base or hybrid, in eval mode.
        method: "argmax" (teacher-forced: every answer token is the argmax, one prefill) or "generate" (greedy decoding,
            exact match of the answer's tokens); they agree, and the first costs a prefill only.
        batch_tokens: padded tokens a batch.
    """
    if method not in ("argmax", "generate"):
        raise bad("method", method, "'argmax' or 'generate'")
    hits: list[bool] = []
    if method == "argmax":
        for batch in batches(prompts, batch_tokens, model.device):
            hits += answer_hits(run_answers(model, batch), batch).tolist()
            if progress:
                progress(len(hits), len(prompts))
        return hits
    for prompt in prompts:
        hits.append(_generates(model, prompt))
        if progress:
            progress(len(hits), len(prompts))
    return hits


@torch.no_grad()
def _generates(model: Any, prompt: Prompt) -> bool:
    ids = torch.tensor([prompt.ids[: prompt.prompt_len]], device=model.device)
    answer = list(prompt.ids[prompt.prompt_len :])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(answer),
        min_new_tokens=len(answer),
        do_sample=False,
    )
    return out[0, ids.shape[1] :].tolist() == answer


def retrieval_cells(prompts: Sequence[Prompt], hits: Sequence[bool], depth_buckets: int = 5) -> list[Cell]:
    """One cell a length with depth None, and one a (length, depth bucket)."""
    cells = []
    for length in sorted({p.length for p in prompts}):
        chosen = [(p, float(hit)) for p, hit in zip(prompts, hits, strict=True) if p.length == length]
        cells.append(Cell("needle", "exact", "share", tuple(hit for _, hit in chosen), context=length))
        for bucket in range(depth_buckets):
            inside = [hit for p, hit in chosen if min(int(p.depth * depth_buckets), depth_buckets - 1) == bucket]
            if inside:
                depth = (bucket + 0.5) / depth_buckets
                cells.append(Cell("needle", "exact", "share", tuple(inside), context=length, depth=depth))
    return cells
