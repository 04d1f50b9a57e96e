"""Whole models over a prompt: time to the first token, a training step; base and hybrid in turns.

The base is the same model under the all-full plan; transformers' own class over the same weights is a row beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from hybridize.benchmark.subject import STOCK, Subject
from hybridize.benchmark.timing import interleaved, speed

logger = logging.get_logger(__name__)
TRAINED_LOGITS = 1024  # a loss on every position would time the vocabulary, and not fit
STOCK_UP_TO = 131_072  # tokens
WARM_UP = 4096  # tokens: a run of a long prompt takes long enough to need no other


def prefill_rows(of: Subject, context: int, stock: bool = True) -> list[dict[str, Any]]:
    """Time to the first token's logits of one prompt, cache included, and the peak of memory on a GPU."""
    peak: dict[str, int] = {}

    def run(variant: str, ids: torch.Tensor, number: int) -> None:
        if of.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        rows = ids[number % 2 :][:1]
        with torch.inference_mode():
            if variant == STOCK:
                of.stock(rows, use_cache=True, logits_to_keep=1)
            else:
                of.model(rows, past_key_values=of.model.new_cache(), logits_to_keep=1)
        if of.on_gpu:
            peak[variant] = torch.cuda.max_memory_allocated()

    if stock and context > STOCK_UP_TO:
        logger.warning(f"hybridize bench: no row of {STOCK} at {context} tokens: it would take longer than all others")
    variants = [*of.plans, STOCK] if stock and context <= STOCK_UP_TO else list(of.plans)
    short = of.prompts(min(WARM_UP, context))
    for variant in variants:
        of.cut(variant)
        for number in range(2):
            run(variant, short, number)
    jobs = {variant: partial(run, variant, of.prompts(context)) for variant in variants}
    times = interleaved(jobs, of.device, of.seconds, least=2, warm_up=0, prepare=of.cut)
    weights, rows = of.shape.layers * of.shape.layer_parameters, []
    for variant, timing in times.items():
        flops = 2.0 * weights * context + of.plan(variant).prefill_flops(context)
        floor = of.ceilings.floor(weights * of.model.dtype.itemsize, flops)
        row = of.row("prefill", variant, context) | speed(timing, times["base"], "base", floor)
        rows.append(row | {"peak_bytes": peak.get(variant)})
    return rows


def train_rows(of: Subject, context: int) -> list[dict[str, Any]]:
    """Forward and backward of one prompt with gradient checkpointing, the loss on its last 1024 positions."""
    ids, last = of.prompts(context), min(TRAINED_LOGITS, context)

    def run(number: int) -> None:
        rows = ids[number % 2 :][:1]
        logits = of.model(rows, use_cache=False, logits_to_keep=last).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, rows[0, context - last + 1 :]).backward()
        of.model.zero_grad(set_to_none=True)

    of.model.train()
    of.model.gradient_checkpointing_enable()
    try:
        times = interleaved(dict.fromkeys(of.plans, run), of.device, of.seconds, least=3, prepare=of.cut)
    finally:
        of.model.gradient_checkpointing_disable()
        of.model.eval()
    weights, rows = of.shape.layers * of.shape.layer_parameters, []
    for variant, timing in times.items():
        # forward, forward again, and a backward of two matmuls for each (attention's has 2.5)
        flops = 8.0 * weights * context + 4.5 * of.plan(variant).prefill_flops(context)
        floor = of.ceilings.floor(0.0, flops)
        rows.append(of.row("train", variant, context) | speed(timing, times["base"], "base", floor))
    return rows
