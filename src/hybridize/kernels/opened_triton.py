"""Attention of few queries, in ascending order of their places, to every key before each, in Triton: forward and backward.

L2A's kernel (arXiv 2603.17484) for grouped heads and any offset: rows of a program are `heads of the group x BLOCK_T queries`,
so keys and values are read once a group. Queries from COUNTS on are none. Backward recomputes (Dao 2023), without atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels.window_backward_triton import probabilities
from hybridize.kernels.window_triton import rows_of, softmax_step, wide


@triton.jit
def keys_and_values(k_base, v_base, skn, svn, begin, columns, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
                    MASKED: tl.constexpr):  # fmt: skip
    """k and v, [D, N] each, of the columns from `begin` on."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    far = tl.cast(begin, tl.int64)
    k_at = k_base + far * skn + n[None, :] * skn + d[:, None]
    v_at = v_base + far * svn + n[None, :] * svn + d[:, None]
    if MASKED or BLOCK_D != D:
        both = wide((begin + n < columns)[None, :], d[:, None], D, BLOCK_D)
        return tl.load(k_at, mask=both, other=0.0), tl.load(v_at, mask=both, other=0.0)
    return tl.load(k_at), tl.load(v_at)


@triton.jit
def attend(acc, low, total, q, k_base, v_base, skn, svn, start, stop, columns, at, scale, D: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    for begin in range(start, stop, BLOCK_N):
        k, v = keys_and_values(k_base, v_base, skn, svn, begin, columns, D, BLOCK_D, BLOCK_N, MASKED)
        s = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            s = tl.where((begin + tl.arange(0, BLOCK_N))[None, :] <= at[:, None], s, float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, tl.trans(v), scale, v.dtype, PRECISION)
    return acc, low, total


@triton.jit
def seen_by(at, real, BLOCK_N: tl.constexpr):
    """(columns that every row sees, in whole blocks; columns that any row sees)."""
    stop = tl.max(tl.where(real, at, -1), 0) + 1
    plain = (tl.min(tl.where(real, at, 2147483646), 0) + 1) // BLOCK_N * BLOCK_N
    return tl.minimum(plain, stop // BLOCK_N * BLOCK_N), stop


@triton.jit
def open_forward_kernel(
    Q, K, V, OUT, LSE, AT, COUNTS, sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sob, soh, sot, G, T, columns, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [B, H, T, D] and base-2 LSE [B, H, T]; queries that are none come out as 0."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    head, t, real = rows_of(pid, BLOCK_T, BLOCK_M, T, R)
    stored, row, h, d = real, t.to(tl.int64), g * R + head, tl.arange(0, BLOCK_D)
    real = real & (t < tl.load(COUNTS + b))
    at = tl.load(AT + b * T + t, mask=real, other=-1).to(tl.int32)
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    q = tl.load(Q + b * sqb + h[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    plain, stop = seen_by(at, real, BLOCK_N)
    k_base, v_base = K + b * skb + g * skg, V + b * svb + g * svg
    acc, low, total = attend(acc, low, total, q, k_base, v_base, skn, svn, 0, plain, columns, at, scale, D, BLOCK_D, BLOCK_N,
                             False, PRECISION)  # fmt: skip
    acc, low, total = attend(acc, low, total, q, k_base, v_base, skn, svn, plain, stop, columns, at, scale, D, BLOCK_D,
                             BLOCK_N, True, PRECISION)  # fmt: skip
    acc = tl.where(real[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    tl.store(OUT + b * sob + h[:, None] * soh + row[:, None] * sot + d[None, :], acc.to(OUT.dtype.element_ty),
             mask=wide(stored[:, None], d[None, :], D, BLOCK_D))  # fmt: skip
    tl.store(LSE + (b * G * R + h) * T + row, low + tl.log2(tl.where(total > 0, total, 1.0)), mask=stored)


@triton.jit
def add_dq(dq, q, do, lse, delta, k_base, v_base, skn, svn, start, stop, columns, at, scale, D: tl.constexpr,
           BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    for begin in range(start, stop, BLOCK_N):
        k, v = keys_and_values(k_base, v_base, skn, svn, begin, columns, D, BLOCK_D, BLOCK_N, MASKED)
        p = probabilities(q, k, scale, lse, PRECISION)
        if MASKED:
            p = tl.where((begin + tl.arange(0, BLOCK_N))[None, :] <= at[:, None], p, 0.0)
        ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq


@triton.jit
def open_dq_kernel(
    Q, K, V, OUT, DO, LSE, DELTA, DQ, AT, COUNTS, sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sob, soh, sot, sdb, sdh, sdt,
    sgb, sgh, sgt, G, T, columns, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DQ [B, H, T, D] and DELTA [B, H, T]; `natural` is scale without log2(e)."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    head, t, real = rows_of(pid, BLOCK_T, BLOCK_M, T, R)
    stored, row, h, d = real, t.to(tl.int64), g * R + head, tl.arange(0, BLOCK_D)
    real = real & (t < tl.load(COUNTS + b))
    at = tl.load(AT + b * T + t, mask=real, other=-1).to(tl.int32)
    rows, flat = wide(real[:, None], d[None, :], D, BLOCK_D), (b * G * R + h) * T + row
    q = tl.load(Q + b * sqb + h[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
    do = tl.load(DO + b * sdb + h[:, None] * sdh + row[:, None] * sdt + d[None, :], mask=rows, other=0.0)
    out = tl.load(OUT + b * sob + h[:, None] * soh + row[:, None] * sot + d[None, :], mask=rows, other=0.0)
    lse = tl.load(LSE + flat, mask=real, other=float("inf"))  # weight 0
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + flat, delta, mask=stored)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    plain, stop = seen_by(at, real, BLOCK_N)
    k_base, v_base = K + b * skb + g * skg, V + b * svb + g * svg
    dq = add_dq(dq, q, do, lse, delta, k_base, v_base, skn, svn, 0, plain, columns, at, scale, D, BLOCK_D, BLOCK_N, False,
                PRECISION)  # fmt: skip
    dq = add_dq(dq, q, do, lse, delta, k_base, v_base, skn, svn, plain, stop, columns, at, scale, D, BLOCK_D, BLOCK_N, True,
                PRECISION)  # fmt: skip
    tl.store(DQ + b * sgb + h[:, None] * sgh + row[:, None] * sgt + d[None, :], (dq * natural).to(DQ.dtype.element_ty),
             mask=wide(stored[:, None], d[None, :], D, BLOCK_D))  # fmt: skip


@triton.jit
def open_dkv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, AT, COUNTS, FIRST, sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sdb, sdh, sdt,
    spb, spg, spn, G, T, columns, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DK, DV [B, G, S, D] of one block of columns; FIRST [B, blocks]: the first query that stands at or behind the block."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    count = tl.load(COUNTS + b).to(tl.int32)
    first = tl.load(FIRST + b * tl.num_programs(0) + pid).to(tl.int32) // BLOCK_T * BLOCK_T
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    head, c = m // BLOCK_T, pid * BLOCK_N + n
    k, v = keys_and_values(K + b * skb + g * skg, V + b * svb + g * svg, skn, svn, pid * BLOCK_N, columns, D, BLOCK_D,
                           BLOCK_N, True)  # fmt: skip
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q_base, do_base, flat = Q + b * sqb + g * R * sqh, DO + b * sdb + g * R * sdh, (b * G + g) * R * T
    for begin in range(first, count, BLOCK_T):
        t = begin + m % BLOCK_T
        real, row = (head < R) & (t < count), t.to(tl.int64)
        rows = wide(real[:, None], d[None, :], D, BLOCK_D)
        q = tl.load(q_base + head[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
        do = tl.load(do_base + head[:, None] * sdh + row[:, None] * sdt + d[None, :], mask=rows, other=0.0)
        at = tl.load(AT + b * T + t, mask=real, other=-1).to(tl.int32)
        lse = tl.load(LSE + flat + head * T + row, mask=real, other=float("inf"))  # weight 0
        delta = tl.load(DELTA + flat + head * T + row, mask=real, other=0.0)
        p = tl.where(c[None, :] <= at[:, None], probabilities(q, k, scale, lse, PRECISION), 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    to = b * spb + g * spg + c.to(tl.int64)[:, None] * spn + d[None, :]
    kept = wide((c < columns)[:, None], d[None, :], D, BLOCK_D)
    tl.store(DK + to, (dk * natural).to(DK.dtype.element_ty), mask=kept)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=kept)
