"""How many tokens each gated layer keeps from looking far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.data.needles import Prompt


@torch.no_grad()
def closed_shares(
    model: Any, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None = None
) -> list[float | None]:
    """For each layer the share of tokens that its gate leaves closed, the mean over prompts; None: a layer without a gate."""
    layers = model.plan.geometry.layers
    sums = [0.0] * layers
    for i, prompt in enumerate(prompts):
        aux = model.model(input_ids=torch.tensor([prompt.ids], device=model.device), use_cache=False).aux or {}
        for layer in range(layers):
            sums[layer] += 1 - float(aux.get(f"{layer}.far.open", 0.0))
        if progress:
            progress(i + 1, len(prompts))
    gated = [model.plan.gate(layer) is not None for layer in range(layers)]
    return [total / len(prompts) if has else None for total, has in zip(sums, gated, strict=True)]
