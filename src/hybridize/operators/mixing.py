"""Key mixing: a causal convolution over a few tokens, each dimension by itself, as gated linear attention puts before its
keys (arXiv 2312.00752, 2412.06464). A key then says what stands before its token, and not only what the token is."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.operators.contract import Chunk


def mixed_keys(k: Tensor, weights: Tensor, before: Tensor | None, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """k'_t = sum_j weights_j k_{t-j}, and the last keys, which the next chunk begins with.

    Args:
        k: [B, G, T, D]; padding lies behind each row's real tokens.
        weights: [G, M, D], of the token itself first.
        before: [B, G, M - 1, D], None for nothing.
    """
    tokens, back = k.shape[2], weights.shape[1] - 1
    joined = torch.cat([k.new_zeros(*k.shape[:2], back, k.shape[-1]) if before is None else before, k], dim=2)
    mixed = weights[:, 0, None] * k
    for j in range(1, back + 1):
        mixed = mixed + weights[:, j, None] * joined[:, :, back - j : back - j + tokens]
    if chunk.count is None:
        return mixed, joined[:, :, tokens:].clone()  # a view would keep all of them in memory
    last = chunk.count[:, None] + torch.arange(back, device=k.device)
    return mixed, joined.gather(2, last[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1]))
