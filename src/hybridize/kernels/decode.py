"""One decoded token on a GPU: launches the split kernels over all spans of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from hybridize.kernels.decode_triton import decode_kernel, join_kernel
from hybridize.kernels.memory import PROGRAMS, heads_inside
from hybridize.kernels.window_triton import LOG2E

BLOCK_N = 64


@torch.library.custom_op("hybridize::one_token", mutates_args=("k", "v"))
def one_token_attention(
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    count: Sequence[Tensor],
    start: Sequence[Tensor],
    q_sink: Sequence[Tensor],
    sinks: Sequence[int],
    rings: Sequence[bool],
    new: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """Attention of one token a row over every span of a layer. A graph sees one operation, never what is inside.

    Args:
        q: [B, H, 1, D], the spans' heads side by side.
        k, v: of each span [B, G, S, D]. count: columns that are filled, [B] or [1] int64.
        start: first visible column besides the sinks, [B] or [1] int64; empty: all filled columns are visible.
        q_sink: queries for the sinks where those are re-based, [B, H of the span, 1, D]; empty: q itself.
        sinks, rings: of each span; a ring's columns behind the sinks are written over in turn once all are filled.
        new: nothing, or (k, v, cos, sin) of the token, [B, G of the layer, 1, D] and [B or 1, 1, D]: q and k come without
            RoPE, `count` is without the token (a ring's counts on), and the token is written into k and v.

    Returns:
        [B, H, 1, D], whose transpose [B, 1, H, D] is contiguous.
    """
    b, h, _, d = q.shape
    groups = [x.shape[1] for x in k]
    r, g = h // sum(groups), sum(groups)
    longest = max(x.shape[2] for x in k)
    splits = min(max(1, PROGRAMS // (b * g)), triton.cdiv(longest, BLOCK_N))
    out = heads_inside(q)
    parts = torch.empty(b, h, splits, d, dtype=torch.float32, device=q.device)
    lse = torch.empty(b, h, splits, dtype=torch.float32, device=q.device)
    token = list(new) if new else [q, q, q, q]
    token_strides = [n for x in token[:2] for n in x.stride()[:2]]
    token_strides += [0 if x.shape[0] == 1 else x.stride(0) for x in token[2:]]
    first = 0
    for a in range(0, len(k), 2):  # two spans a launch
        two = a + 1 < len(k)
        spans = (a, a + 1 if two else a)
        tensors, strides = [], []
        for i in spans:
            near, begin = q_sink[i] if q_sink[i].numel() else q, start[i] if start[i].numel() else count[i]
            tensors += [near, k[i], v[i], count[i], begin]
            strides += [*near.stride()[:2], *k[i].stride()[:3], *v[i].stride()[:3]]
            strides += [0 if x.shape[0] == 1 else x.stride(0) for x in (count[i], begin)]
        launched = sum(groups[i] for i in set(spans))
        decode_kernel[(splits * b * launched,)](  # one axis: the others end at 65535, and thousands of small caches fit
            q, *token, parts, lse, *tensors, *q.stride()[:2], *token_strides, *strides,
            launched, h, groups[a], first, splits, *(k[i].shape[2] for i in spans), scale * LOG2E,
            R=r, D=d, BLOCK_D=triton.next_power_of_2(d), BLOCK_R=max(16, triton.next_power_of_2(r)),
            BLOCK_N=BLOCK_N if d <= 128 else 32,
            BLOCK_S=max(16, triton.next_power_of_2(max(1, *(sinks[i] for i in spans)))),
            SINKS_A=sinks[a], SINKS_B=sinks[spans[1]],
            REBASED_A=q_sink[a].numel() > 0, REBASED_B=q_sink[spans[1]].numel() > 0,
            HAS_START_A=start[a].numel() > 0, HAS_START_B=start[spans[1]].numel() > 0,
            RING_A=len(new) > 0 and rings[a], RING_B=len(new) > 0 and rings[spans[1]],
            TWO=two, NEW=len(new) > 0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
            enable_fp_fusion=False,  # RoPE rounds as the base rounds
        )  # fmt: skip
        first += launched
    join_kernel[(b * h,)](
        parts, lse, out, *out.stride()[:2], h, splits, D=d, BLOCK_D=triton.next_power_of_2(d),
        BLOCK_P=triton.next_power_of_2(splits), num_warps=2,
    )  # fmt: skip
    return out


@one_token_attention.register_fake
def _(q, k, v, count, start, q_sink, sinks, rings, new, scale):  # type: ignore[no-untyped-def]
    b, h, _, d = q.shape
    return q.new_empty(b, 1, h, d).transpose(1, 2)
