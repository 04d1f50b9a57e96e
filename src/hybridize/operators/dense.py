"""Attention over all keys of a span, in plain torch: shared by every operator that ever looks at everything."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.kernels.dispatch import dense_backends

# SDPA's memory-efficient backend is silently wrong with a mask above 65,536 keys (pytorch#162588)
MASKED_SDPA_LIMIT = 65_536


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal attention of a chunk over itself, or of one query over all keys.

    q [B, H, T, D]; k, v [B, G, S, D], T = S or T = 1. The same SDPA call as transformers' own, bit for bit; long prompts on
    a GPU may take another backend of it (kernels/dispatch.py).
    """
    with dense_backends(q, dropout):
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scale, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]
        )


def token_attention(
    kernels: Any, q: Tensor, k: Tensor, v: Tensor, count: Tensor, scale: float, start: Tensor | None = None, sinks: int = 0
) -> Tensor:
    """One token a row by a kernel that reads each key once: q [B, H, 1, D] over columns start <= c < count (both int64, [B] or
    [1]) and c < sinks of k and v [B, G, S, D]."""
    none = q.new_empty(0)
    start = none.long() if start is None else start
    out: Tensor = kernels.one_token_attention(q, [k], [v], [count], [start], [none], [sinks], [False], [], scale)
    return out


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Attention under a mask. q [B, H, T, D]; k, v [B, G, S, D]; visible: bool, broadcasts to [B, 1, T, S]."""
    if k.shape[2] > MASKED_SDPA_LIMIT:
        return explicit_attention(q, k, v, visible, scale, dropout)
    repeats = q.shape[1] // k.shape[1]
    if q.shape[2] == 1 and repeats > 1 and visible.shape[1] == 1:
        # one token: a group's query heads see the same keys, so they are that group's queries, and no key is copied
        b, h, _, d = q.shape
        out = masked_attention(q.reshape(b, -1, repeats, d), k, v, visible, scale, dropout)
        return out.reshape(b, h, 1, d)
    k, v = repeat_groups(k, repeats), repeat_groups(v, repeats)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=dropout, scale=scale)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, dropout: float = 0.0, rows: int = 256
) -> Tensor:
    """`masked_attention` written out, `rows` queries at a time: right at any number of keys."""
    repeats, parts = q.shape[1] // k.shape[1], []
    k, v = repeat_groups(k, repeats), repeat_groups(v, repeats)
    for start in range(0, q.shape[2], rows):
        stop = min(start + rows, q.shape[2])
        mask = visible[..., start:stop, :] if visible.shape[-2] > 1 else visible
        parts.append(softmax_attention(q[:, :, start:stop] @ k.transpose(-1, -2), v, mask, scale, dropout))
    return torch.cat(parts, dim=2)


def softmax_attention(logits: Tensor, v: Tensor, visible: Tensor, scale: float, dropout: float) -> Tensor:
    """Softmax in fp32 over visible keys, then the weighted values. logits [..., T, S], v [..., S, D]."""
    weights = (logits.float() * scale).masked_fill(~visible, float("-inf")).softmax(dim=-1).to(v.dtype)
    return F.dropout(weights, dropout, training=dropout > 0) @ v


def repeat_groups(x: Tensor, repeats: int) -> Tensor:
    """[B, G, S, D] to [B, G * repeats, S, D], each group's heads side by side."""
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
