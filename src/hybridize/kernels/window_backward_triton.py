"""Window + sinks attention, backward, in Triton (FlashAttention-2's recomputation; Dao 2023), over the forward's blocks.

Two kernels: one a block of positions (dq, and each block's own share of the sinks' gradients, so that sums are in one fixed
order), one a block of key columns (dk, dv).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels.window_triton import rows_of, wide


@triton.jit
def probabilities(q, k, scale, lse, PRECISION: tl.constexpr):
    """softmax weights [M, N] from q [M, D], k [D, N] and base-2 logsumexp [M]."""
    return tl.exp2(tl.dot(q, k, input_precision=PRECISION) * scale - lse[:, None])


@triton.jit
def bounds(p0, T, past, size, first, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """(start, first unmasked, end of unmasked, stop) of a block's key columns; unmasked is whole blocks from start on."""
    start = tl.maximum(p0 + past - size + 1, first)
    stop = tl.minimum(p0 + BLOCK_T, T) + past
    all_see = tl.maximum(p0 + BLOCK_T - 1 + past - size + 1, first)  # from here on, and up to the first row's own
    head = tl.cdiv(tl.maximum(all_see - start, 0), BLOCK_N) * BLOCK_N
    plain = tl.minimum(start + head, stop)
    until = plain + tl.maximum(p0 + past + 1 - plain, 0) // BLOCK_N * BLOCK_N
    return start, plain, until, stop


@triton.jit
def dq_band(dq, q, do, lse, delta, k_base, v_base, skn, svn, start, stop, columns, t, past, size, first, scale,
            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for begin in range(start, stop, BLOCK_N):
        here = begin + n
        at = tl.cast(begin, tl.int64)
        k_at = k_base + at * skn + n[None, :] * skn + d[:, None]
        v_at = v_base + at * svn + n[None, :] * svn + d[:, None]
        inside = here < columns
        if MASKED or BLOCK_D != D:
            both = wide(inside[None, :], d[:, None], D, BLOCK_D)
            k, v = tl.load(k_at, mask=both, other=0.0), tl.load(v_at, mask=both, other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        p = probabilities(q, k, scale, lse, PRECISION)
        if MASKED:
            behind = (t + past)[:, None] - here[None, :]
            p = tl.where((behind >= 0) & (behind < size) & ((here >= first) & (here < stop) & inside)[None, :], p, 0.0)
        ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    Q, K, V, SK, SV, QS, OUT, DO, LSE, DELTA, DQ, DQS, DSK, DSV, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, ssb, ssg, ssn, stb, stg, stn, srb, srh, srt, sob, soh, sot,
    sdb, sdh, sdt, spb, sph, spt,
    G, T, past, size, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REBASED: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DQ (and DQS) [B, H, T, D], DELTA [B, H, T], DSK and DSV [B, G, blocks, SINKS, D]; `natural` is scale without log2(e)."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    begin = tl.load(STARTS + b).to(tl.int32)
    head, t, real = rows_of(pid, BLOCK_T, BLOCK_M, T, R)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    p0 = pid * BLOCK_T
    row, h = t.to(tl.int64), g * R + head
    flat = (b * G * R + h) * T + row
    if HAS_COUNTS:  # padding has no gradient, and what came in for it is not looked at
        real = real & (t < tl.load(COUNTS + b))
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    q = tl.load(Q + b * sqb + h[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
    do = tl.load(DO + b * sdb + h[:, None] * sdh + row[:, None] * sdt + d[None, :], mask=rows, other=0.0)
    out = tl.load(OUT + b * sob + h[:, None] * soh + row[:, None] * sot + d[None, :], mask=rows, other=0.0)
    lse = tl.load(LSE + flat, mask=real, other=float("inf"))
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stored = (head < R) & (t < T)
    tl.store(DELTA + flat, delta, mask=stored)
    stored = wide(stored[:, None], d[None, :], D, BLOCK_D)
    dq_at = b * spb + h[:, None] * sph + row[:, None] * spt + d[None, :]
    if SINKS > 0:
        few = wide((n < SINKS)[:, None], d[None, :], D, BLOCK_D)
        sk = tl.load(SK + b * ssb + g * ssg + n[:, None] * ssn + d[None, :], mask=few, other=0.0)
        sv = tl.load(SV + b * stb + g * stg + n[:, None] * stn + d[None, :], mask=few, other=0.0)
        near = q
        if REBASED:
            near = tl.load(QS + b * srb + h[:, None] * srh + row[:, None] * srt + d[None, :], mask=rows, other=0.0)
        left = ((begin + t)[:, None] - n[None, :] >= size) & (n < SINKS)[None, :]
        p = tl.where(left, probabilities(near, tl.trans(sk), scale, lse, PRECISION), 0.0)
        ds = p * (tl.dot(do, tl.trans(sv), input_precision=PRECISION) - delta[:, None])
        part = ((b * G + g) * tl.num_programs(0) + pid) * SINKS * D + n[:, None] * D + d[None, :]
        dsk = tl.dot(tl.trans(ds.to(near.dtype)), near, input_precision=PRECISION) * natural
        tl.store(DSK + part, dsk, mask=few)
        tl.store(DSV + part, tl.dot(tl.trans(p.to(do.dtype)), do, input_precision=PRECISION), mask=few)
        mine = tl.dot(ds.to(sk.dtype), sk, input_precision=PRECISION)
        if REBASED:
            tl.store(DQS + dq_at, (mine * natural).to(DQS.dtype.element_ty), mask=stored)
        else:
            dq += mine
    first = tl.maximum(past - begin, 0)
    start, plain, until, stop = bounds(p0, T, past, size, first, BLOCK_T, BLOCK_N)
    k_base, v_base = K + b * skb + g * skg, V + b * svb + g * svg
    columns = T + past
    dq = dq_band(dq, q, do, lse, delta, k_base, v_base, skn, svn, start, plain, columns, t, past, size, first, scale,
                 D, BLOCK_D, BLOCK_N, True, PRECISION)  # fmt: skip
    dq = dq_band(dq, q, do, lse, delta, k_base, v_base, skn, svn, plain, until, columns, t, past, size, first, scale,
                 D, BLOCK_D, BLOCK_N, False, PRECISION)  # fmt: skip
    dq = dq_band(dq, q, do, lse, delta, k_base, v_base, skn, svn, until, stop, columns, t, past, size, first, scale,
                 D, BLOCK_D, BLOCK_N, True, PRECISION)  # fmt: skip
    tl.store(DQ + dq_at, (dq * natural).to(DQ.dtype.element_ty), mask=stored)


@triton.jit
def dkv_rows(dk, dv, k, v, q_base, do_base, LSE, DELTA, sqh, sqt, sdh, sdt, first_flat, start, stop, T, count, c, past,
             size, first, scale, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
             BLOCK_M: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Positions start..stop of the queries that see a block of key columns c [N]; k and v are [D, N]."""
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = m // BLOCK_T
    for begin in range(start, stop, BLOCK_T):
        t = begin + m % BLOCK_T
        real = (head < R) & (t < count)
        row = t.to(tl.int64)
        rows = wide(real[:, None], d[None, :], D, BLOCK_D)
        q = tl.load(q_base + head[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
        do = tl.load(do_base + head[:, None] * sdh + row[:, None] * sdt + d[None, :], mask=rows, other=0.0)
        lse = tl.load(LSE + first_flat + head * T + row, mask=real, other=float("inf"))  # weight 0
        delta = tl.load(DELTA + first_flat + head * T + row, mask=real, other=0.0)
        p = probabilities(q, k, scale, lse, PRECISION)
        if MASKED:
            behind = (t + past)[:, None] - c[None, :]
            p = tl.where((behind >= 0) & (behind < size) & (c >= first)[None, :] & (t < stop)[:, None], p, 0.0)
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
        ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, sdb, sdh, sdt, spb, spg, spn,
    G, T, past, size, scale, natural,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DK, DV [B, G, past + T, D] of one block of key columns and one group; every query head of the group adds to it."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    begin = tl.load(STARTS + b).to(tl.int32)
    count = T
    if HAS_COUNTS:
        count = tl.minimum(tl.load(COUNTS + b).to(tl.int32), T)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    c0 = pid * BLOCK_N
    c = c0 + n
    inside = c < T + past
    at = tl.cast(c0, tl.int64)
    k_at = K + b * skb + g * skg + at * skn + n[None, :] * skn + d[:, None]
    v_at = V + b * svb + g * svg + at * svn + n[None, :] * svn + d[:, None]
    both = wide(inside[None, :], d[:, None], D, BLOCK_D)
    k, v = tl.load(k_at, mask=both, other=0.0), tl.load(v_at, mask=both, other=0.0)
    first = tl.maximum(past - begin, 0)
    start = tl.maximum(c0 - past, 0)
    stop = tl.minimum(tl.minimum(c0 + BLOCK_N - 1, T + past - 1) - past + size, count)
    # all of the block's columns are seen from the last one's own query on, up to where the first one leaves the window
    all_from = tl.maximum(c0 + BLOCK_N - 1 - past, 0)
    plain = tl.minimum(start + tl.cdiv(tl.maximum(all_from - start, 0), BLOCK_T) * BLOCK_T, tl.maximum(stop, start))
    until = plain + tl.maximum(tl.minimum(c0 - past + size, stop) - plain, 0) // BLOCK_T * BLOCK_T
    until = tl.where((c0 >= first) & (c0 + BLOCK_N <= T + past), until, plain)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q_base, do_base = Q + b * sqb + g * R * sqh, DO + b * sdb + g * R * sdh
    flat = (b * G + g) * R * T
    dk, dv = dkv_rows(dk, dv, k, v, q_base, do_base, LSE, DELTA, sqh, sqt, sdh, sdt, flat, start, plain, T, count, c, past,
                      size, first, scale, R, D, BLOCK_D, BLOCK_T, BLOCK_M, True, PRECISION)  # fmt: skip
    dk, dv = dkv_rows(dk, dv, k, v, q_base, do_base, LSE, DELTA, sqh, sqt, sdh, sdt, flat, plain, until, T, count, c, past,
                      size, first, scale, R, D, BLOCK_D, BLOCK_T, BLOCK_M, False, PRECISION)  # fmt: skip
    dk, dv = dkv_rows(dk, dv, k, v, q_base, do_base, LSE, DELTA, sqh, sqt, sdh, sdt, flat, until, stop, T, count, c, past,
                      size, first, scale, R, D, BLOCK_D, BLOCK_T, BLOCK_M, True, PRECISION)  # fmt: skip
    to = b * spb + g * spg + at * spn + n[:, None] * spn + d[None, :]
    kept = wide(inside[:, None], d[None, :], D, BLOCK_D)
    tl.store(DK + to, (dk * natural).to(DK.dtype.element_ty), mask=kept)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=kept)
