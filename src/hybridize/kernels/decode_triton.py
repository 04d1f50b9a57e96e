"""Attention of one decoded token over what a layer's spans hold, split over the keys (FlashDecoding; Dao et al. 2023).

One launch serves two spans of a layer at once, say growing full attention and a ring of window + sinks: each program takes
one row, one KV group with its query heads side by side, and one part of that row's real columns. Lengths are read on the
device, so that a captured graph stays right as a cache fills. Over a static cache the same launch rotates the queries and the
new token, writes it into its slot, and attends to it. A second kernel joins the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels.window_triton import softmax_step, wide


@triton.jit
def rotated(X, d, cos, sin, mask, D: tl.constexpr):
    """RoPE of the rows at X (pointers to their first entries), rounded as transformers' apply_rotary_pos_emb rounds."""
    low = d < D // 2
    x = tl.load(X + d[None, :], mask=mask, other=0.0)
    y = tl.load(X + tl.where(low, d + D // 2, d - D // 2)[None, :], mask=mask, other=0.0)
    y = tl.where(low[None, :], -y, y)
    straight, turned = (x * cos).to(x.dtype), (y * sin).to(x.dtype)
    return (straight.to(tl.float32) + turned.to(tl.float32)).to(x.dtype)


@triton.jit
def take_in(acc, low, total, q, new_k, new_v, k_at, v_at, scale, mask):
    """Write the row's new token [1, D] into its slot, and attend to it."""
    tl.store(k_at, new_k, mask=mask)
    tl.store(v_at, new_v, mask=mask)
    s = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    high = tl.maximum(low, s)
    p, shrink = tl.exp2(s - high), tl.exp2(low - high)
    acc = acc * shrink[:, None] + p[:, None] * new_v.to(tl.float32)
    return acc, high, total * shrink + p


@triton.jit
def read_span(q, new_k, new_v, QS, K, V, COUNT, START, b, g, rows, split, splits, columns, scale,
              sqsb, sqsh, skb, skg, skn, svb, svg, svn, cb, ab,
              R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, BLOCK_R: tl.constexpr,
              BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, REBASED: tl.constexpr, HAS_START: tl.constexpr,
              NEW: tl.constexpr, RING: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """(acc, low, total) of one part of a span: columns below COUNT, from START on where it has one, sinks always.

    NEW: COUNT does not have the row's new token yet. It goes behind the others, or, where a RING is full, in the place of
    the one that leaves the window, and is seen.
    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    low = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    count = tl.load(COUNT + b * cb).to(tl.int32)
    slot = count
    if RING:
        slot = tl.where(count < columns, count, SINKS + (count - SINKS) % tl.maximum(columns - SINKS, 1))
        count = tl.minimum(count, columns)
    begin = 0
    if HAS_START:
        begin = tl.maximum(tl.load(START + b * ab).to(tl.int32), SINKS)
    elif REBASED:
        begin = tl.minimum(count, SINKS)
    k_base, v_base = K + b * skb + g * skg, V + b * svb + g * svg
    if (HAS_START or REBASED) and SINKS > 0:
        if split == 0:  # the first part reads the sinks too
            s_n = tl.arange(0, BLOCK_S)
            few = s_n < tl.minimum(count, SINKS)
            sk = tl.load(k_base + s_n[None, :] * skn + d[:, None], mask=wide(few[None, :], d[:, None], D, BLOCK_D), other=0.0)
            sv = tl.load(v_base + s_n[:, None] * svn + d[None, :], mask=wide(few[:, None], d[None, :], D, BLOCK_D), other=0.0)
            near = q
            if REBASED:
                at = QS + b * sqsb + (g * R + rows)[:, None] * sqsh + d[None, :]
                near = tl.load(at, mask=wide((rows < R)[:, None], d[None, :], D, BLOCK_D), other=0.0)
            s = tl.where(few[None, :], tl.dot(near, sk, input_precision=PRECISION), float("-inf"))
            acc, low, total = softmax_step(acc, low, total, s, sv, scale, sv.dtype, PRECISION)
    part = tl.cdiv(tl.cdiv(tl.maximum(count - begin, 0), splits), BLOCK_N) * BLOCK_N
    first = begin + split * part
    last = tl.minimum(first + part, count)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    for at in range(first, whole, BLOCK_N):
        far = tl.cast(at, tl.int64)
        k_at = k_base + far * skn + n[None, :] * skn + d[:, None]
        v_at = v_base + far * svn + n[:, None] * svn + d[None, :]
        if BLOCK_D != D:
            k, v = tl.load(k_at, mask=d[:, None] < D, other=0.0), tl.load(v_at, mask=d[None, :] < D, other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, k, input_precision=PRECISION)
        if RING:
            s = tl.where((at + n != slot)[None, :], s, float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, v, scale, v.dtype, PRECISION)
    if whole < last:
        far = tl.cast(whole, tl.int64)
        inside = (whole + n < last) & (whole + n != slot)
        k_at = k_base + far * skn + n[None, :] * skn + d[:, None]
        v_at = v_base + far * svn + n[:, None] * svn + d[None, :]
        k = tl.load(k_at, mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
        v = tl.load(v_at, mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
        s = tl.where(inside[None, :], tl.dot(q, k, input_precision=PRECISION), float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, v, scale, v.dtype, PRECISION)
    if NEW:
        if split == 0:
            far, real = tl.cast(slot, tl.int64), (d < D)[None, :]
            k_at, v_at = k_base + far * skn + d[None, :], v_base + far * svn + d[None, :]
            acc, low, total = take_in(acc, low, total, q, new_k, new_v, k_at, v_at, scale, real)
    return acc, low, total


@triton.jit
def decode_kernel(
    Q, NEW_K, NEW_V, COS, SIN, PARTS, LSE,
    QSA, KA, VA, COUNT_A, START_A, QSB, KB, VB, COUNT_B, START_B,
    sqb, sqh, snkb, snkg, snvb, snvg, scb, ssb,
    asqb, asqh, askb, askg, askn, asvb, asvg, asvn, acb, aab,
    bsqb, bsqh, bskb, bskg, bskn, bsvb, bsvg, bsvn, bcb, bab,
    G, H, GA, first_group, splits, columns_a, columns_b, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, SINKS_A: tl.constexpr, SINKS_B: tl.constexpr, REBASED_A: tl.constexpr,
    REBASED_B: tl.constexpr, HAS_START_A: tl.constexpr, HAS_START_B: tl.constexpr, RING_A: tl.constexpr,
    RING_B: tl.constexpr, TWO: tl.constexpr, NEW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PARTS [B, H, splits, D] (each part's own average) and LSE [B, H, splits] of `G` groups, the first GA of span A.

    NEW: queries and the new token's keys come without RoPE, and the token is written into the spans' memory.
    """
    split, bg = tl.program_id(0) % splits, tl.program_id(0) // splits
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    rows, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    h = (first_group + g) * R + rows
    mask = (rows < R)[:, None] & (d < D)[None, :]
    if NEW:
        real = (d < D)[None, :]
        cos = tl.load(COS + b * scb + d[None, :], mask=real, other=0.0)
        sin = tl.load(SIN + b * ssb + d[None, :], mask=real, other=0.0)
        q = rotated(Q + b * sqb + h[:, None] * sqh, d, cos, sin, mask, D)
        new_k = rotated(NEW_K + b * snkb + (first_group + g) * snkg + tl.zeros([1, 1], tl.int32), d, cos, sin, real, D)
        new_v = tl.load(NEW_V + b * snvb + (first_group + g) * snvg + d[None, :], mask=real, other=0.0)
    else:
        q = tl.load(Q + b * sqb + h[:, None] * sqh + d[None, :], mask=mask, other=0.0)
        new_k, new_v = 0, 0
    if TWO:
        if g < GA:
            acc, low, total = read_span(q, new_k, new_v, QSA, KA, VA, COUNT_A, START_A, b, g, rows, split, splits, columns_a,
                                        scale, asqb, asqh, askb, askg, askn, asvb, asvg, asvn, acb, aab, R, D, BLOCK_D,
                                        SINKS_A, BLOCK_R, BLOCK_S, BLOCK_N, REBASED_A, HAS_START_A, NEW, RING_A,
                                        PRECISION)  # fmt: skip
        else:
            acc, low, total = read_span(q, new_k, new_v, QSB, KB, VB, COUNT_B, START_B, b, g - GA, rows, split, splits,
                                        columns_b, scale, bsqb, bsqh, bskb, bskg, bskn, bsvb, bsvg, bsvn, bcb, bab, R, D,
                                        BLOCK_D, SINKS_B, BLOCK_R, BLOCK_S, BLOCK_N, REBASED_B, HAS_START_B, NEW, RING_B,
                                        PRECISION)  # fmt: skip
    else:
        acc, low, total = read_span(q, new_k, new_v, QSA, KA, VA, COUNT_A, START_A, b, g, rows, split, splits, columns_a,
                                    scale, asqb, asqh, askb, askg, askn, asvb, asvg, asvn, acb, aab, R, D, BLOCK_D,
                                    SINKS_A, BLOCK_R, BLOCK_S, BLOCK_N, REBASED_A, HAS_START_A, NEW, RING_A,
                                    PRECISION)  # fmt: skip
    to = (b * H + h) * splits + split
    some = tl.where(total > 0, total, 1.0)
    tl.store(PARTS + to[:, None] * D + d[None, :], acc / some[:, None], mask=mask)
    tl.store(LSE + to, tl.where(total > 0, low + tl.log2(some), float("-inf")), mask=rows < R)


@triton.jit
def join_kernel(PARTS, LSE, OUT, sob, soh, H, splits, D: tl.constexpr, BLOCK_D: tl.constexpr,
                BLOCK_P: tl.constexpr):  # fmt: skip
    """OUT [B, H, D] from the parts, weighted by their softmax mass; 0 for a row that sees nothing."""
    bh = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    lse = tl.load(LSE + bh * splits + n, mask=n < splits, other=float("-inf"))
    high = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(high == float("-inf"), 0.0, high))
    real = (n < splits)[:, None] & (d < D)[None, :]
    parts = tl.load(PARTS + (bh * splits + n)[:, None] * D + d[None, :], mask=real, other=0.0)
    mass = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(OUT + bh // H * sob + bh % H * soh + d, out.to(OUT.dtype.element_ty), mask=d < D)
