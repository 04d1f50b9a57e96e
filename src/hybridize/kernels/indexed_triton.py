"""Indexed attention of a prompt in Triton: what each query chooses (operators/choosing.py), and attention to that.

Two kernels, one program a block of positions and query head. The first reads index keys twice, for each row's largest score M
and for the histogram of shares by bin of M - m_b, and leaves how far below M a block may lie. The second makes the scores of a
block of keys anew, sixteen multiplications a pair, and only where some row chose it are keys and values read. So each row
sees what it chose, whatever rows stand beside it; nothing of the size of queries x blocks is ever in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels import window_triton
from hybridize.kernels.window_triton import softmax_step, wide

LOG2E: tl.constexpr = tl.constexpr(window_triton.LOG2E)


@triton.jit
def block_scores(q, base, skn, at, n, last, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr,
                 MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Index scores [M, BLOCK] of the columns from `at` on, -inf behind a row's own position n [M]; `last`: largest of n."""
    i, j = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK)
    where = base + tl.cast(at, tl.int64) * skn + j[None, :] * skn + i[:, None]
    if MASKED:
        k = tl.load(where, mask=wide((at + j <= last)[None, :], i[:, None], INDEX, BLOCK_I), other=0.0)
        return tl.where((at + j)[None, :] <= n[:, None], tl.dot(q, k, input_precision=PRECISION), float("-inf"))
    if BLOCK_I != INDEX:
        k = tl.load(where, mask=i[:, None] < INDEX, other=0.0)
    else:
        k = tl.load(where)
    return tl.dot(q, k, input_precision=PRECISION)


@triton.jit
def always_seen(at, n, sinks, BLOCK: tl.constexpr):
    """Rows at positions n that see the block from column `at` on whatever its scores: sinks are in it, or the row itself."""
    return (at < sinks) | (at == n // BLOCK * BLOCK)


@triton.jit
def weighed(held, s, peak, always, BINS: tl.constexpr, WIDTH: tl.constexpr):
    """The histogram held [M, BINS] with a block's mass, sum of e^(s - M), in the bin of M - m_b."""
    bins = tl.arange(0, BINS)
    below = tl.where(always, 0.0, peak - tl.max(s, 1))
    mine = tl.minimum(below / WIDTH, BINS - 1).to(tl.int32)
    mass = tl.sum(tl.exp2((s - peak[:, None]) * LOG2E), 1)
    return held + tl.where(mine[:, None] == bins[None, :], mass[:, None], 0.0)


@triton.jit
def limit_of(held, top_p, BINS: tl.constexpr, WIDTH: tl.constexpr):
    """How far below M blocks are taken, [M]: whole bins, until a share of top_p or more is reached."""
    before = tl.cumsum(held, 1) - held
    taken = tl.sum((before < top_p * tl.sum(held, 1)[:, None]).to(tl.int32), 1)
    return tl.where(taken >= BINS, float("inf"), taken * WIDTH)


@triton.jit
def choose_kernel(
    QI, KI, PEAK, LIMIT, HEADS, STARTS, DENSE, sqb, sqh, sqt, skb, skg, skn, HP, T, sinks, top_p,
    R: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PEAK and LIMIT [B, H', T]: a row sees the blocks whose largest score lies less than LIMIT below PEAK."""
    pid, bh = tl.program_id(0), tl.program_id(1)
    b, x = (bh // HP).to(tl.int64), bh % HP
    h = tl.load(HEADS + x).to(tl.int64)
    begin, dense = tl.load(STARTS + b).to(tl.int32), tl.load(DENSE + b).to(tl.int32)
    t, i = pid * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_I)
    n, real, to = begin + t, t < T, bh.to(tl.int64) * T + t
    first = begin + pid * BLOCK_T
    last = begin + tl.minimum((pid + 1) * BLOCK_T, T) - 1
    everything = tl.full([BLOCK_T], float("inf"), tl.float32)
    if last < dense:
        tl.store(PEAK + to, tl.zeros([BLOCK_T], tl.float32), mask=real)
        tl.store(LIMIT + to, everything, mask=real)
    else:
        at_q = QI + b * sqb + h * sqh + t.to(tl.int64)[:, None] * sqt + i[None, :]
        q = tl.load(at_q, mask=wide(real[:, None], i[None, :], INDEX, BLOCK_I), other=0.0)
        base = KI + b * skb + h // R * skg
        # before `whole`, every row sees every column, and none of them is its own
        whole, stop = first // BLOCK * BLOCK, last + 1
        peak = tl.full([BLOCK_T], float("-inf"), tl.float32)
        for at in range(0, whole, BLOCK):
            s = block_scores(q, base, skn, at, n, last, INDEX, BLOCK_I, BLOCK, False, PRECISION)
            peak = tl.maximum(peak, tl.max(s, 1))
        for at in range(whole, stop, BLOCK):
            s = block_scores(q, base, skn, at, n, last, INDEX, BLOCK_I, BLOCK, True, PRECISION)
            peak = tl.maximum(peak, tl.max(s, 1))
        held = tl.zeros([BLOCK_T, BINS], tl.float32)
        for at in range(0, whole, BLOCK):
            s = block_scores(q, base, skn, at, n, last, INDEX, BLOCK_I, BLOCK, False, PRECISION)
            held = weighed(held, s, peak, at < sinks, BINS, WIDTH)
        for at in range(whole, stop, BLOCK):
            s = block_scores(q, base, skn, at, n, last, INDEX, BLOCK_I, BLOCK, True, PRECISION)
            held = weighed(held, s, peak, always_seen(at, n, sinks, BLOCK), BINS, WIDTH)
        tl.store(PEAK + to, peak, mask=real)
        tl.store(LIMIT + to, tl.where(n < dense, everything, limit_of(held, top_p, BINS, WIDTH)), mask=real)


@triton.jit
def taken_rows(s, peak, limit, at, n, sinks, BLOCK: tl.constexpr):
    """Rows that see the block of scores s [M, BLOCK] from column `at` on."""
    return (peak - tl.max(s, 1) < limit) | always_seen(at, n, sinks, BLOCK)


@triton.jit
def attend_kernel(
    Q, K, V, QI, KI, PEAK, LIMIT, OUT, LSE, HEADS, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sib, sih, sit, sjb, sjg, sjn, sob, soh, sot, HP, T, sinks, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [B, H', T, D] and base-2 LSE [B, H', T]; rows that are padding come out as 0."""
    pid, bh = tl.program_id(0), tl.program_id(1)
    b, x = (bh // HP).to(tl.int64), (bh % HP).to(tl.int64)
    h = tl.load(HEADS + x).to(tl.int64)
    begin = tl.load(STARTS + b).to(tl.int32)
    t, i, d, j = pid * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    n, real, to = begin + t, t < T, bh.to(tl.int64) * T + t
    last = begin + tl.minimum((pid + 1) * BLOCK_T, T) - 1
    if HAS_COUNTS:
        real = real & (t < tl.load(COUNTS + b))
    row = t.to(tl.int64)[:, None]
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    q = tl.load(Q + b * sqb + h * sqh + row * sqt + d[None, :], mask=rows, other=0.0)
    qi = tl.load(
        QI + b * sib + h * sih + row * sit + i[None, :], mask=wide(real[:, None], i[None, :], INDEX, BLOCK_I), other=0.0
    )
    peak, limit = tl.load(PEAK + to, mask=real, other=0.0), tl.load(LIMIT + to, mask=real, other=0.0)
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    low = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for at in range(0, last + 1, BLOCK):
        s = block_scores(qi, KI + b * sjb + h // R * sjg, sjn, at, n, last, INDEX, BLOCK_I, BLOCK, True, PRECISION)
        taken = taken_rows(s, peak, limit, at, n, sinks, BLOCK) & real
        if tl.max(taken.to(tl.int32), 0) > 0:
            far, inside = tl.cast(at, tl.int64), at + j <= last
            k_at = K + b * skb + h // R * skg + far * skn + j[None, :] * skn + d[:, None]
            v_at = V + b * svb + h // R * svg + far * svn + j[:, None] * svn + d[None, :]
            k = tl.load(k_at, mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
            v = tl.load(v_at, mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
            seen = taken[:, None] & ((at + j)[None, :] <= n[:, None])
            a = tl.where(seen, tl.dot(q, k, input_precision=PRECISION), float("-inf"))
            acc, low, total = softmax_step(acc, low, total, a, v, scale, v.dtype, PRECISION)
    total = tl.where(total > 0, total, 1.0)  # rows that are none
    tl.store(OUT + b * sob + x * soh + row * sot + d[None, :], (acc * (1.0 / total)[:, None]).to(OUT.dtype.element_ty),
             mask=wide((t < T)[:, None], d[None, :], D, BLOCK_D))  # fmt: skip
    tl.store(LSE + to, low + tl.log2(total), mask=t < T)
