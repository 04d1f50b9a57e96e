"""Window + sinks attention, forward, in Triton: one program a block of positions and KV group, its query heads side by side.

Rows of a program are `heads of the group x BLOCK_T positions`, so keys and values are read once a group, and a block of few
positions wastes few keys outside its window. Only blocks that some row sees are visited: the ones at the two ends of the
band under a mask, those between without. Sinks that lie before a row's window share the band's first block, where they can.
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
def softmax_step(acc, low, total, s, v, scale, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """One block of the online softmax. s [M, N], -inf where hidden, base-2 logits once scaled (scale > 0); v [N, D]."""
    high = tl.maximum(low, tl.max(s, 1) * scale)
    safe = tl.where(high == float("-inf"), 0.0, high)  # a row that has seen nothing yet
    p = tl.exp2(s * scale - safe[:, None])  # one fused multiply-add an element
    shrink = tl.exp2(low - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(DTYPE), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, high, total


@triton.jit
def visible(t, here, past, size, stop):
    """[M, N]: the query at t sees column c where t + past - size < c <= t + past."""
    behind = (t + past)[:, None] - here[None, :]
    return (behind >= 0) & (behind < size) & (here < stop)[None, :]


@triton.jit
def lead_block(acc, low, total, q, k_base, v_base, skn, svn, sk_base, sv_base, ssn, stn, shift, start, stop, columns, t, begin,
               past, size, scale, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """The first block: `shift` sinks that lie before some row's window, then the band's first columns."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    here, at, sink = start + n - shift, tl.cast(start, tl.int64), n < shift
    k_at = tl.where(sink, sk_base + n * ssn, k_base + at * skn + (n - shift) * skn)
    v_at = tl.where(sink, sv_base + n * stn, v_base + at * svn + (n - shift) * svn)
    inside = sink | (here < columns)
    k = tl.load(k_at[None, :] + d[:, None], mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
    v = tl.load(v_at[:, None] + d[None, :], mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
    behind = (t + past)[:, None] - here[None, :]
    near = (behind >= 0) & (behind < size) & (here < stop)[None, :]
    left = (begin + t)[:, None] - n[None, :] >= size
    s = tl.dot(q, k, input_precision=PRECISION)
    s = tl.where((sink[None, :] & left) | (near & (~sink)[None, :]), s, float("-inf"))
    return softmax_step(acc, low, total, s, v, scale, v.dtype, PRECISION)


@triton.jit
def band(acc, low, total, q, k_base, v_base, skn, svn, start, blocks, head, until, stop, columns, t, past, size, scale,
         D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The other blocks of key columns: all but the first `head`, and those from column `until` on, are seen by every row."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for i in range(0, blocks):
        begin = start + i * BLOCK_N
        here, far = begin + n, tl.cast(begin, tl.int64)
        inside = here < columns
        k_at = k_base + far * skn + n[None, :] * skn + d[:, None]
        v_at = v_base + far * svn + n[:, None] * svn + d[None, :]
        k = tl.load(k_at, mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
        v = tl.load(v_at, mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        if (i < head) | (begin + BLOCK_N > until):
            behind = (t + past)[:, None] - here[None, :]
            s = tl.where((behind >= 0) & (behind < size) & (here < stop)[None, :], s, float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, v, scale, v.dtype, PRECISION)
    return acc, low, total


@triton.jit
def forward_kernel(
    Q, K, V, SK, SV, QS, OUT, LSE, STARTS, COUNTS,
    sqb, sqh, sqt, skb, skg, skn, svb, svg, svn, ssb, ssg, ssn, stb, stg, stn, srb, srh, srt, sob, soh, sot,
    G, T, past, size, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REBASED: tl.constexpr, JOINED: tl.constexpr,
    HAS_COUNTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT [B, H, T, D] and LSE [B, H, T] (base 2) of one block of positions and one group."""
    pid, bg = tl.program_id(0), tl.program_id(1)
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    begin = tl.load(STARTS + b).to(tl.int32)  # content position of the chunk's first query
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
    sk_at, sv_at, shift = SK + b * ssb + g * ssg, SV + b * stb + g * stg, 0
    if SINKS > 0:
        left_behind = begin + p0 + BLOCK_T > size  # some row has left a sink behind its window
        if JOINED:
            shift = tl.where(left_behind, SINKS, 0)
        elif left_behind:
            n = tl.arange(0, BLOCK_S)
            few = n < SINKS
            sk_mask, sv_mask = wide(few[None, :], d[:, None], D, BLOCK_D), wide(few[:, None], d[None, :], D, BLOCK_D)
            sk = tl.load(sk_at + n[None, :] * ssn + d[:, None], mask=sk_mask, other=0.0)
            sv = tl.load(sv_at + n[:, None] * stn + d[None, :], mask=sv_mask, other=0.0)
            near = q
            if REBASED:
                at = QS + b * srb + h[:, None] * srh + row[:, None] * srt + d[None, :]
                near = tl.load(at, mask=rows, other=0.0)
            s = tl.dot(near, sk, input_precision=PRECISION)
            left = ((begin + t)[:, None] - n[None, :] >= size) & (n < SINKS)[None, :]
            s = tl.where(left, s, float("-inf"))
            acc, low, total = softmax_step(acc, low, total, s, sv, scale, sv.dtype, PRECISION)
    # columns start..stop; every row sees those from `all_see` on, and before `until`
    first = tl.maximum(past - begin, 0)  # earlier columns are positions before 0
    start = tl.maximum(p0 + past - size + 1, first)
    stop = tl.minimum(p0 + BLOCK_T, T) + past
    all_see, until = tl.maximum(p0 + BLOCK_T + past - size, first), p0 + past + 1
    lead = tl.minimum(start + BLOCK_N - shift, stop)
    head = tl.cdiv(tl.maximum(all_see - lead, 0), BLOCK_N)
    k_base, v_base, columns = K + b * skb + g * skg, V + b * svb + g * svg, T + past
    acc, low, total = lead_block(acc, low, total, q, k_base, v_base, skn, svn, sk_at, sv_at, ssn, stn, shift, start, stop,
                                 columns, t, begin, past, size, scale, D, BLOCK_D, BLOCK_N, PRECISION)  # fmt: skip
    acc, low, total = band(acc, low, total, q, k_base, v_base, skn, svn, lead, tl.cdiv(stop - lead, BLOCK_N), head, until,
                           stop, columns, t, past, size, scale, D, BLOCK_D, BLOCK_N, PRECISION)  # fmt: skip
    total = tl.where(total > 0, total, 1.0)  # rows that are none
    tl.store(out_at, (acc * (1.0 / total)[:, None]).to(OUT.dtype.element_ty), mask=rows)
    tl.store(LSE + (b * G * R + h) * T + row, low + tl.log2(total), mask=real)
