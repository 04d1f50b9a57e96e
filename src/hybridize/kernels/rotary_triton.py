"""RoPE of a chunk's queries and keys in Triton: a program takes a block of positions of a few heads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    Q, K, COS, SIN, OUT_Q, OUT_K,
    sqb, sqh, sqt, skb, skh, skt, scb, sct, ssb, sst, soqb, soqh, soqt, sokb, sokh, sokt,
    H, G, T,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, HEADS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """OUT_Q [B, H, T, D] and OUT_K [B, G, T, D], rounded at every step as transformers' apply_rotary_pos_emb rounds.

    BACKWARD: the transposed rotation, of gradients.
    """
    b, t, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    row = t.to(tl.int64)[:, None]
    real = (t < T)[:, None] & (d < HALF)[None, :]
    cos_at, sin_at = COS + b * scb + row * sct + d[None, :], SIN + b * ssb + row * sst + d[None, :]
    cos_1, cos_2 = tl.load(cos_at, mask=real, other=0.0), tl.load(cos_at + HALF, mask=real, other=0.0)
    sin_1, sin_2 = tl.load(sin_at, mask=real, other=0.0), tl.load(sin_at + HALF, mask=real, other=0.0)
    if BACKWARD:
        sin_1, sin_2 = -sin_2, -sin_1
    for i in range(HEADS):
        h = (tl.program_id(2) * HEADS + i).to(tl.int64)
        if h < H + G:
            if h < H:
                x_at, out_at = Q + b * sqb + h * sqh + row * sqt, OUT_Q + b * soqb + h * soqh + row * soqt
            else:
                x_at, out_at = K + b * skb + (h - H) * skh + row * skt, OUT_K + b * sokb + (h - H) * sokh + row * sokt
            x_1 = tl.load(x_at + d[None, :], mask=real, other=0.0)
            x_2 = tl.load(x_at + d[None, :] + HALF, mask=real, other=0.0)
            kind = OUT_Q.dtype.element_ty
            low = (x_1 * cos_1).to(kind).to(tl.float32) - (x_2 * sin_1).to(kind).to(tl.float32)
            high = (x_2 * cos_2).to(kind).to(tl.float32) + (x_1 * sin_2).to(kind).to(tl.float32)
            tl.store(out_at + d[None, :], low.to(kind), mask=real)
            tl.store(out_at + d[None, :] + HALF, high.to(kind), mask=real)
