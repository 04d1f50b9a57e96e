"""Attention weights of a few queries in every layer, from one forward pass under the base's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridize.answers import Batch
from hybridize.operators.contract import Chunk, Heads
from hybridize.operators.dense import repeat_groups
from hybridize.plan import AttentionPlan


@torch.no_grad()
def watch(model: Any, batch: Batch, queries: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """What `reduce` makes of each layer's weights, side by side.

    Args:
        queries: columns of the batch whose attention is looked at, [B, N].
        reduce: gets softmax weights [B, H, N, T], fp32, and gives [B, ...].

    Returns:
        [B, L, ...].
    """
    found: list[Tensor] = []

    def look(_: Any, args: tuple[Any, ...]) -> None:
        found.append(reduce(attention_weights(args[0], queries)))

    with model.temporary_plan(AttentionPlan.base(model.plan.geometry)):
        hooks = [attention.operators[0].register_forward_pre_hook(look) for attention in model.attentions()]
        try:
            body = model.model
            positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
            hidden = body.embed_tokens(batch.ids)
            context = body.context(hidden, Chunk(positions, 0, None, None, len(batch.ids)))
            for layer in body.layers:
                hidden, _ = layer(hidden, context)
        finally:
            for hook in hooks:
                hook.remove()
    return torch.stack(found, dim=1)


def attention_weights(heads: Heads, queries: Tensor) -> Tensor:
    """Softmax weights of the queries at columns `queries` [B, N] over a whole chunk, fp32 [B, H, N, T]."""
    q = heads.q.gather(2, queries[:, None, :, None].expand(-1, heads.q.shape[1], -1, heads.q.shape[3]))
    k = repeat_groups(heads.k, q.shape[1] // heads.k.shape[1])
    logits = (q @ k.transpose(-1, -2)).float() * heads.scale
    seen = torch.arange(k.shape[2], device=k.device) <= queries[..., None]
    return logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
