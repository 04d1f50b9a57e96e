"""Window + sinks attention of a whole chunk in plain torch: block by block, only keys that some query sees.

The reference that kernels are held to. Cost is O(T * (size + block + sinks)), never O(T^2), on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.operators.dense import softmax_attention

GROUP_ELEMENTS = 1 << 26  # bound on mask elements worked on at once


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    positions: Tensor,
    size: int,
    scale: float,
    dropout: float = 0.0,
    q_sink: Tensor | None = None,
) -> Tensor:
    """Query n sees keys n - size < j <= n, and all sinks j <= n.

    Args:
        q: [B, H, T, D]. positions: content positions, [B, T] or [1, T], consecutive in a row.
        k, v: [B, G, P + T, D], keys of the chunk behind those of P = 0 or size - 1 earlier tokens.
        sink_k, sink_v: [B, G, S, D], the row's first S tokens.
        q_sink: queries for the sinks where those are re-based, [B, H, T, D]; None: q itself.

    Returns:
        [B, H, T, D].
    """
    b, h, t, _ = q.shape
    g, past, sinks = k.shape[1], k.shape[2] - t, sink_k.shape[2]
    block = min(t, max(64, min(size // 2, 512)))
    if b > 1 and block * (block + size + sinks) * h * b > 4 * GROUP_ELEMENTS:  # even one block of all rows is too much
        parts = []
        for r in (slice(0, b // 2), slice(b // 2, b)):
            few = None if q_sink is None else q_sink[r]
            where = positions.expand(b, -1)[r]
            parts.append(banded_attention(q[r], k[r], v[r], sink_k[r], sink_v[r], where, size, scale, dropout, few))
        return torch.cat(parts)
    blocks = -(-t // block)
    span = block + size - 1
    tail = blocks * block - t
    k, v = (F.pad(x, (0, 0, size - 1 - past, tail)) for x in (k, v))
    q = F.pad(q, (0, 0, 0, tail))
    q_sink = None if q_sink is None else F.pad(q_sink, (0, 0, 0, tail))
    starts = positions[:, :1]
    together = max(1, GROUP_ELEMENTS // (block * (span + sinks) * (h // g) * b))
    parts = []
    for first in range(0, blocks, together):
        last = min(first + together, blocks)
        rows = slice(first * block, last * block)
        columns = slice(first * block, last * block + size - 1)
        visible = _visible(starts, first, last, block, span, size, sinks)
        parts.append(
            _attend_blocks(
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                sink_k,
                sink_v,
                visible,
                block,
                span,
                scale,
                dropout,
                None if q_sink is None else q_sink[:, :, rows],
            )
        )
    return torch.cat(parts, dim=2)[:, :, :t]


def banded_mass(q: Tensor, k: Tensor, positions: Tensor, size: int, scale: float) -> Tensor:
    """sum of e^(s - largest s) over the window of each query, [B, H, T]; arguments as of banded_attention, P = size - 1."""
    b, h, t, d = q.shape
    g, block = k.shape[1], min(t, max(64, min(size // 2, 512)))
    blocks = -(-t // block)
    span, tail = block + size - 1, blocks * block - t
    keys = F.pad(k, (0, 0, 0, tail)).unfold(2, span, block).transpose(-1, -2)  # [B, G, N, span, D]
    rows = F.pad(q, (0, 0, 0, tail)).reshape(b, g, h // g, blocks, block, d)
    logits = torch.einsum("bgrnqd,bgnkd->bgrnqk", rows, keys) * scale
    visible = _visible(positions[:, :1], 0, blocks, block, span, size, 0)[:, None, None]
    logits = logits.masked_fill(~visible, float("-inf"))
    mass = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1)
    return mass.reshape(b, h, blocks * block)[:, :, :t]


def _visible(starts: Tensor, first: int, last: int, block: int, span: int, size: int, sinks: int) -> Tensor:
    """[Bm, N, block, sinks + span]: sinks first, then the band; a sink inside the window counts once, as a sink."""
    device = starts.device
    rows, columns = torch.arange(block, device=device), torch.arange(span, device=device)
    behind = rows[:, None] + size - 1 - columns  # distance from query to key
    band = (behind >= 0) & (behind < size)
    base = starts[:, :, None] + torch.arange(first, last, device=device)[:, None] * block  # [Bm, N, 1]
    key_position = base - (size - 1) + columns
    near = band & (key_position >= sinks)[:, :, None, :]
    sink = torch.arange(sinks, device=device) <= (base + rows)[..., None]
    return torch.cat([sink, near], dim=-1)


def _attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    visible: Tensor,
    block: int,
    span: int,
    scale: float,
    dropout: float,
    q_sink: Tensor | None,
) -> Tensor:
    b, h, length, d = q.shape
    g, n = k.shape[1], length // block
    repeats = h // g

    def fold(x: Tensor) -> Tensor:  # a group's query heads become rows: keys are read once a group
        return x.reshape(b, g, repeats, n, block, d).permute(0, 3, 1, 2, 4, 5).reshape(b * n, g, repeats * block, d)

    def unfold(x: Tensor, sink: Tensor) -> Tensor:
        near = x.unfold(2, span, block).permute(0, 2, 1, 4, 3)  # [B, N, G, span, D]
        sink = sink[:, None].expand(b, n, *sink.shape[1:])
        return torch.cat([sink, near], dim=3).reshape(b * n, g, -1, d)

    keys, values = unfold(k, sink_k), unfold(v, sink_v)
    mask = visible.expand(b, -1, -1, -1).reshape(b * n, 1, block, -1).repeat(1, 1, repeats, 1)
    if q_sink is None:
        out = F.scaled_dot_product_attention(fold(q), keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)
    else:
        sinks = sink_k.shape[2]
        near = fold(q) @ keys[:, :, sinks:].transpose(-1, -2)
        far = fold(q_sink) @ keys[:, :, :sinks].transpose(-1, -2)
        out = softmax_attention(torch.cat([far, near], dim=-1), values, mask, scale, dropout)
    return out.reshape(b, n, g, repeats, block, d).permute(0, 2, 3, 1, 4, 5).reshape(b, h, length, d)
