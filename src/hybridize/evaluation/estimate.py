"""What a measurement will cost, told before it starts: tokens, decoding steps, and seconds from a short probe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridize.evaluation.suite import Measure

DECODED = 8


@dataclass(frozen=True)
class Estimate:
    """tokens are read in prefills, steps decoded one by one, both over all plans; seconds from what a probe took."""

    measures: int
    tokens: int
    steps: int
    seconds: float

    def text(self) -> str:
        minutes = self.seconds / 60
        long = f"{minutes:.0f} min" if minutes >= 2 else f"{self.seconds:.0f} s"
        return (
            f"{self.measures} measures to take: {self.tokens:,} tokens to read, {self.steps:,} decoding steps; "
            f"about {long} at the speed of a short probe of the base"
        )


@torch.no_grad()
def estimate(model: Any, pending: Sequence[Measure], batch_tokens: int, length: int) -> Estimate:
    """Time one prefill of a batch like those to come, and a few decoding steps behind it, and scale them up.

    Args:
        pending: measures not yet taken, once for every plan.
        batch_tokens, length: of the batches; a CPU is probed with one row of at most 512 tokens.
    """
    tokens, steps = sum(m.tokens for m in pending), sum(m.steps for m in pending)
    if not pending:
        return Estimate(0, 0, 0, 0.0)
    on_cpu = model.device.type == "cpu"
    width = min(length, 512) if on_cpu else length
    rows = 1 if on_cpu else max(1, batch_tokens // width)
    ids = torch.ones(rows, width, dtype=torch.long, device=model.device)
    best = float("inf")
    for _ in range(2):  # the first one warms up
        cache = model.new_cache()
        start = _now(model)
        model.model(input_ids=ids, past_key_values=cache)
        best = min(best, _now(model) - start)
    decoding = 0.0
    if steps:
        model.model(input_ids=ids[:, :1], past_key_values=cache)  # kernels are compiled, and prove themselves, here
        start = _now(model)
        for _ in range(DECODED):
            model.model(input_ids=ids[:, :1], past_key_values=cache)
        decoding = (_now(model) - start) / DECODED
    return Estimate(len(pending), tokens, steps, tokens * best / ids.numel() + steps * decoding)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
