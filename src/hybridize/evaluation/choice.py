"""Accuracy on multiple-choice, last-word and minimal-pair sets, raw and normalised by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.answers import answer_hits, answer_log_probability, batches, run_answers
from hybridize.data.choice import Item, continuation_prompt
from hybridize.evaluation.cells import Cell


@torch.no_grad()
def choice_results(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """For each item: right by log probability ("acc"), by log probability per character ("acc_norm"), and gold's nats.

    Options are scored by their content, never by a letter, so a model that always answers "A" gains nothing.
    """
    prompts = [continuation_prompt(tokenizer, *pair) for item in items for pair in item.pairs]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids))  # batches of like lengths
    scores, greedy, done = [0.0] * len(prompts), [False] * len(prompts), 0
    for batch in batches([prompts[i] for i in order], batch_tokens, model.device):
        logits = run_answers(model, batch)
        found = zip(answer_log_probability(logits, batch).tolist(), answer_hits(logits, batch).tolist(), strict=True)
        for score, hit in found:
            scores[order[done]], greedy[order[done]] = score, hit
            done += 1
        if progress:
            progress(done, len(prompts))
    results, start = [], 0
    for item in items:
        mine = scores[start : start + len(item.pairs)]
        if len(item.pairs) == 1:
            right = normalised = greedy[start]
        else:
            per_character = [score / len(pair[1].lstrip()) for score, pair in zip(mine, item.pairs, strict=True)]
            right = max(range(len(mine)), key=lambda i: mine[i]) == item.gold
            normalised = max(range(len(mine)), key=lambda i: per_character[i]) == item.gold
        results.append({"acc": right, "acc_norm": normalised, "gold_nats": mine[item.gold], "options": len(mine)})
        start += len(item.pairs)
    return results


def choice_cells(task: str, results: Sequence[dict[str, Any]]) -> list[Cell]:
    """Cells of acc and acc_norm; of acc and the perplexity of whole continuations where items have one only (LAMBADA)."""
    if all(r["options"] == 1 for r in results):
        acc = Cell(task, "acc", "share", tuple(float(r["acc"]) for r in results))
        return [acc, Cell(task, "gold_perplexity", "nats", tuple(-r["gold_nats"] for r in results))]
    return [Cell(task, metric, "share", tuple(float(r[metric]) for r in results)) for metric in ("acc", "acc_norm")]
