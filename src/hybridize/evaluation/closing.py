"""How many tokens each gated layer keeps from looking far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridize.data.needles import Prompt
from hybridize.operators.specs import Full, Gated
from hybridize.plan import AttentionPlan


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


def closing_row(plan: AttentionPlan, length: int, closed: Sequence[float | None]) -> dict[str, Any]:
    """ "closed": mean share over gated layers, "least", "most"; "layers": of each, None where there is no gate; "pairs":
    query-key pairs over full attention's, as many tokens open as were."""
    shares = [share for share in closed if share is not None]
    full = Full().visible_pairs(length)
    pairs = 0.0
    for layer, share in enumerate(closed):
        for group in range(plan.geometry.kv_heads):
            spec = plan.spec(layer, group)
            seen = spec.near if isinstance(spec, Gated) else spec
            pairs += seen.visible_pairs(length) + (0.0 if share is None else (1 - share) * full)
    return {
        "length": length,
        "closed": sum(shares) / len(shares),
        "least": min(shares),
        "most": max(shares),
        "pairs": pairs / (plan.geometry.layers * plan.geometry.kv_heads * full),
        "layers": list(closed),
    }
