"""Indexed attention, backward, in Triton (FlashAttention-2's recomputation; Dao 2023): what a row chose has no gradient.

Two kernels: one a block of positions (dq), one a block of key columns (dk, dv of each query head, added up by the launcher).
Both make index scores anew to know which rows chose which block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels.indexed_triton import block_scores, taken_rows
from hybridize.kernels.window_triton import wide


@triton.jit
def query_rows(b, h, x, HP, T, begin, first, Q, DO, QI, PEAK, LIMIT, LSE, COUNTS, sqb, sqh, sqt, sdb, sdh, sdt, sib, sih, sit,
               D: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
               HAS_COUNTS: tl.constexpr):  # fmt: skip
    """(n, real, to, q, do, qi, peak, limit, lse) of the positions from `first` on."""
    t, i, d = first + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_D)
    real, to, row = t < T, (b * HP + x) * T + t, t.to(tl.int64)[:, None]
    if HAS_COUNTS:  # padding has no gradient, and what came in for it is not looked at
        real = real & (t < tl.load(COUNTS + b))
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    q = tl.load(Q + b * sqb + h * sqh + row * sqt + d[None, :], mask=rows, other=0.0)
    do = tl.load(DO + b * sdb + x * sdh + row * sdt + d[None, :], mask=rows, other=0.0)
    qi = tl.load(
        QI + b * sib + h * sih + row * sit + i[None, :], mask=wide(real[:, None], i[None, :], INDEX, BLOCK_I), other=0.0
    )
    peak, limit = tl.load(PEAK + to, mask=real, other=0.0), tl.load(LIMIT + to, mask=real, other=0.0)
    return begin + t, real, to, q, do, qi, peak, limit, tl.load(LSE + to, mask=real, other=0.0)


@triton.jit
def index_dq_kernel(
    Q, K, V, QI, KI, PEAK, LIMIT, OUT, DO, LSE, DELTA, DQ, HEADS, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sib, sih, sit, sjb, sjg, sjn, sob, soh, sot, sdb, sdh, sdt, sgb, sgh, sgt,
    HP, T, sinks, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DQ [B, H', T, D] and DELTA [B, H', T]; `natural` is scale without log2(e)."""
    pid, bh = tl.program_id(0), tl.program_id(1)
    b, x = (bh // HP).to(tl.int64), (bh % HP).to(tl.int64)
    h, begin = tl.load(HEADS + x).to(tl.int64), tl.load(STARTS + b).to(tl.int32)
    first = pid * BLOCK_T
    last = begin + tl.minimum(first + BLOCK_T, T) - 1
    n, real, to, q, do, qi, peak, limit, lse = query_rows(
        b, h, x, HP, T, begin, first, Q, DO, QI, PEAK, LIMIT, LSE, COUNTS, sqb, sqh, sqt, sdb, sdh, sdt, sib, sih, sit,
        D, BLOCK_D, INDEX, BLOCK_I, BLOCK_T, HAS_COUNTS)  # fmt: skip
    d, j = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    row = (n - begin).to(tl.int64)[:, None]
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    out = tl.load(OUT + b * sob + x * soh + row * sot + d[None, :], mask=rows, other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    dq = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for at in range(0, last + 1, BLOCK):
        s = block_scores(qi, KI + b * sjb + h // R * sjg, sjn, at, n, last, INDEX, BLOCK_I, BLOCK, True, PRECISION)
        taken = taken_rows(s, peak, limit, at, n, sinks, BLOCK) & real
        if tl.max(taken.to(tl.int32), 0) > 0:
            far = tl.cast(at, tl.int64)
            mask = wide((at + j <= last)[None, :], d[:, None], D, BLOCK_D)
            k = tl.load(K + b * skb + h // R * skg + far * skn + j[None, :] * skn + d[:, None], mask=mask, other=0.0)
            v = tl.load(V + b * svb + h // R * svg + far * svn + j[None, :] * svn + d[:, None], mask=mask, other=0.0)
            seen = taken[:, None] & ((at + j)[None, :] <= n[:, None])
            a = tl.dot(q, k, input_precision=PRECISION) * scale - lse[:, None]
            p = tl.exp2(tl.where(seen, a, float("-inf")))
            ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    tl.store(DQ + b * sgb + x * sgh + row * sgt + d[None, :], (dq * natural).to(DQ.dtype.element_ty),
             mask=wide((n <= last)[:, None], d[None, :], D, BLOCK_D))  # fmt: skip
    tl.store(DELTA + to, delta, mask=n <= last)


@triton.jit
def index_dkv_kernel(
    Q, K, V, QI, KI, PEAK, LIMIT, DO, LSE, DELTA, DK, DV, HEADS, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sib, sih, sit, sjb, sjg, sjn, sdb, sdh, sdt,
    HP, T, columns, sinks, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DK and DV [B, H', S, D], fp32, of the columns of one block."""
    pid, bh = tl.program_id(0), tl.program_id(1)
    b, x = (bh // HP).to(tl.int64), (bh % HP).to(tl.int64)
    h, begin = tl.load(HEADS + x).to(tl.int64), tl.load(STARTS + b).to(tl.int32)
    at, d, j = pid * BLOCK, tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    far, stop = tl.cast(at, tl.int64), begin + T
    dk, dv = tl.zeros([BLOCK, BLOCK_D], tl.float32), tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if at < stop:
        mask = wide((at + j < stop)[None, :], d[:, None], D, BLOCK_D)
        k = tl.load(K + b * skb + h // R * skg + far * skn + j[None, :] * skn + d[:, None], mask=mask, other=0.0)
        v = tl.load(V + b * svb + h // R * svg + far * svn + j[None, :] * svn + d[:, None], mask=mask, other=0.0)
        for first in range(tl.maximum(at - begin, 0) // BLOCK_T * BLOCK_T, T, BLOCK_T):
            n, real, to, q, do, qi, peak, limit, lse = query_rows(
                b, h, x, HP, T, begin, first, Q, DO, QI, PEAK, LIMIT, LSE, COUNTS, sqb, sqh, sqt, sdb, sdh, sdt, sib, sih, sit,
                D, BLOCK_D, INDEX, BLOCK_I, BLOCK_T, HAS_COUNTS)  # fmt: skip
            last = begin + tl.minimum(first + BLOCK_T, T) - 1
            s = block_scores(qi, KI + b * sjb + h // R * sjg, sjn, at, n, last, INDEX, BLOCK_I, BLOCK, True, PRECISION)
            taken = taken_rows(s, peak, limit, at, n, sinks, BLOCK) & real
            if tl.max(taken.to(tl.int32), 0) > 0:
                delta = tl.load(DELTA + to, mask=real, other=0.0)
                seen = taken[:, None] & ((at + j)[None, :] <= n[:, None])
                a = tl.dot(q, k, input_precision=PRECISION) * scale - lse[:, None]
                p = tl.exp2(tl.where(seen, a, float("-inf")))
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
                ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
                dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    to = bh.to(tl.int64) * columns * D + (far + j)[:, None] * D + d[None, :]
    mask = wide((at + j < columns)[:, None], d[None, :], D, BLOCK_D)
    tl.store(DK + to, dk * natural, mask=mask)
    tl.store(DV + to, dv, mask=mask)
