"""Window + sinks attention, forward, in Triton: one program a block of positions and KV group, its query heads side by side.

Rows of a program are `heads of the group x BLOCK_T positions`, so keys and values are read once a group, and a block of few
positions wastes few keys outside its window. Only blocks that some row sees are visited: the ones at the two ends of the
band under a mask, those between without. Sinks that lie before a row's window are one small block of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def rows_of(pid, BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr, T, R):
    """(head in the group, position in the chunk, row is real) of a program's rows, [BLOCK_M] each."""
    m = tl.arange(0, BLOCK_M)
    head, t = m // BLOCK_T, pid * BLOCK_T + m % BLOCK_T
    return head, t, (head < R) & (t < T)


@triton.jit
def wide(mask, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A mask of rows, and of real dimensions where the block has more of them than the head (96 in 128)."""
    if BLOCK_D != D:
        mask = mask & (d < D)
    return mask


@triton.jit
def softmax_step(acc, low, total, s, v, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """One block of the online softmax. s [M, N], base-2 logits, -inf where hidden; v [N, D]."""
    high = tl.maximum(low, tl.max(s, 1))
    safe = tl.where(high == float("-inf"), 0.0, high)  # a row that has seen nothing yet
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(low - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, high, total


@triton.jit
def band(acc, low, total, q, k_base, v_base, skn, svn, start, stop, columns, t, past, size, first, scale,
         D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Key columns start..stop. Column c is seen by the query at t where t + past - size < c <= t + past and c >= first."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for begin in range(start, stop, BLOCK_N):
        here = begin + n
        at = tl.cast(begin, tl.int64)
        k_at = k_base + at * skn + n[None, :] * skn + d[:, None]
        v_at = v_base + at * svn + n[:, None] * svn + d[None, :]
        inside = here < columns
        if MASKED or BLOCK_D != D:
            k = tl.load(k_at, mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
            v = tl.load(v_at, mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, k, input_precision=PRECISION) * scale
        if MASKED:
            behind = (t + past)[:, None] - here[None, :]
            seen = (behind >= 0) & (behind < size) & ((here >= first) & (here < stop) & inside)[None, :]
            s = tl.where(seen, s, float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, v, v.dtype, PRECISION)
    return acc, low, total


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
def forward_kernel(
    Q, K, V, SK, SV, QS, OUT, LSE, STARTS, COUNTS, SIZES,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, ssb, ssg, ssn, stb, stg, stn, srb, srh, srt, sob, soh, sot,
    G, T, past, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REBASED: tl.constexpr, HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [B, H, T, D] and LSE [B, H, T] (base 2) of one block of positions and one group."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    begin = tl.load(STARTS + b).to(tl.int32)  # content position of the chunk's first query
    size = tl.load(SIZES + g)  # of the group's window; a full span's is larger than any position
    head, t, real = rows_of(pid, BLOCK_T, BLOCK_M, T, R)
    d = tl.arange(0, BLOCK_D)
    p0 = pid * BLOCK_T
    row = t.to(tl.int64)
    h = g * R + head
    rows = wide(real[:, None], d[None, :], D, BLOCK_D)
    out_at = OUT + b * sob + h[:, None] * soh + row[:, None] * sot + d[None, :]
    if HAS_COUNTS:
        if p0 >= tl.load(COUNTS + b):  # padding alone
            tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_D], OUT.dtype.element_ty), mask=rows)
            tl.store(LSE + (b * G * R + h) * T + row, tl.zeros([BLOCK_M], tl.float32), mask=real)
            return
    q = tl.load(Q + b * sqb + h[:, None] * sqh + row[:, None] * sqt + d[None, :], mask=rows, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS > 0:
        if begin + p0 + BLOCK_T > size:  # some row has left a sink behind its window
            n = tl.arange(0, BLOCK_S)
            few = n < SINKS
            sk_at, sv_at = SK + b * ssb + g * ssg, SV + b * stb + g * stg
            sk_mask, sv_mask = wide(few[None, :], d[:, None], D, BLOCK_D), wide(few[:, None], d[None, :], D, BLOCK_D)
            sk = tl.load(sk_at + n[None, :] * ssn + d[:, None], mask=sk_mask, other=0.0)
            sv = tl.load(sv_at + n[:, None] * stn + d[None, :], mask=sv_mask, other=0.0)
            near = q
            if REBASED:
                at = QS + b * srb + h[:, None] * srh + row[:, None] * srt + d[None, :]
                near = tl.load(at, mask=rows, other=0.0)
            s = tl.dot(near, sk, input_precision=PRECISION) * scale
            left = ((begin + t)[:, None] - n[None, :] >= size) & (n < SINKS)[None, :]
            acc, low, total = softmax_step(acc, low, total, tl.where(left, s, float("-inf")), sv, sv.dtype, PRECISION)
    first = tl.maximum(past - begin, 0)  # earlier columns are positions before 0
    start, plain, until, stop = bounds(p0, T, past, size, first, BLOCK_T, BLOCK_N)
    k_base, v_base = K + b * skb + g * skg, V + b * svb + g * svg
    columns = T + past
    acc, low, total = band(acc, low, total, q, k_base, v_base, skn, svn, start, plain, columns, t, past, size, first, scale,
                           D, BLOCK_D, BLOCK_N, True, PRECISION)  # fmt: skip
    acc, low, total = band(acc, low, total, q, k_base, v_base, skn, svn, plain, until, columns, t, past, size, first, scale,
                           D, BLOCK_D, BLOCK_N, False, PRECISION)  # fmt: skip
    acc, low, total = band(acc, low, total, q, k_base, v_base, skn, svn, until, stop, columns, t, past, size, first, scale,
                           D, BLOCK_D, BLOCK_N, True, PRECISION)  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # rows that are none
    tl.store(out_at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=rows)
    tl.store(LSE + (b * G * R + h) * T + row, low + tl.log2(total), mask=real)
