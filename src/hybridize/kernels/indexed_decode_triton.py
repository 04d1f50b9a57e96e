"""Indexed attention of one decoded token in Triton: scores of all blocks, the choice among them, attention to what is chosen.

Four kernels, all of static shape: the first reads index keys once a group, split over the context; the second makes histograms
of parts of it, the third finds the limit from all of them and lists the blocks within it; the fourth splits that list evenly,
however long it is (its length is read on the device, so that a captured graph stays right), and parts are joined as full
attention's are. Sums have one fixed order: no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridize.kernels.indexed_triton import LOG2E, always_seen, limit_of
from hybridize.kernels.window_triton import softmax_step, wide


@triton.jit
def scan_kernel(
    QI, KI, TOPS, MASSES, STARTS, sqb, sqh, skb, skg, skn, G, blocks, parts,
    R: tl.constexpr, INDEX: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TOPS and MASSES [B, H, blocks]: the largest score m_b of each block, and its sum of e^(s - m_b)."""
    part, bg = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
    n = tl.load(STARTS + b).to(tl.int32)
    rows, i, j = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_I), tl.arange(0, BLOCK)
    real, h = rows < R, g * R + rows
    q = tl.load(QI + b * sqb + h[:, None] * sqh + i[None, :], mask=wide(real[:, None], i[None, :], INDEX, BLOCK_I), other=0.0)
    each = tl.cdiv(n // BLOCK + 1, parts)
    first = part * each
    for block in range(first, tl.minimum(first + each, n // BLOCK + 1)):
        at = block * BLOCK
        where = KI + b * skb + g * skg + tl.cast(at, tl.int64) * skn + j[None, :] * skn + i[:, None]
        k = tl.load(where, mask=wide((at + j <= n)[None, :], i[:, None], INDEX, BLOCK_I), other=0.0)
        s = tl.where((at + j <= n)[None, :], tl.dot(q, k, input_precision=PRECISION), float("-inf"))
        top = tl.max(s, 1)
        to = (b * G * R + h) * blocks + block
        tl.store(TOPS + to, top, mask=real)
        tl.store(MASSES + to, tl.sum(tl.exp2((s - top[:, None]) * LOG2E), 1), mask=real)


@triton.jit
def highest(TOPS, base, count, WIDE: tl.constexpr):
    """M: the largest score of all blocks."""
    a = tl.arange(0, WIDE)
    top = tl.full([WIDE], float("-inf"), tl.float32)
    for first in range(0, count, WIDE):
        top = tl.maximum(top, tl.load(TOPS + base + first + a, mask=first + a < count, other=float("-inf")))
    return tl.max(top, 0)


@triton.jit
def tally_kernel(
    TOPS, MASSES, PEAKS, HELD, HEADS, STARTS, HP, H, blocks, sinks, parts,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """PEAKS [B, H']: M. HELD [B, H', parts, BINS]: each part's histogram of shares by bin of M - m_b."""
    part, bh = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    b = bh // HP
    n, base = tl.load(STARTS + b).to(tl.int32), (b * H + tl.load(HEADS + bh % HP)) * blocks
    a, bins, count = tl.arange(0, AT_ONCE), tl.arange(0, BINS), n // BLOCK + 1
    peak = highest(TOPS, base, count, WIDE)
    each = tl.cdiv(count, parts)
    stop = tl.minimum((part + 1) * each, count)
    held = tl.zeros([BINS], tl.float32)
    for first in range(part * each, stop, AT_ONCE):
        here = first + a < stop
        top = tl.load(TOPS + base + first + a, mask=here, other=float("-inf"))
        mass = tl.load(MASSES + base + first + a, mask=here, other=0.0) * tl.exp2((top - peak) * LOG2E)
        below = tl.where(always_seen((first + a) * BLOCK, n, sinks, BLOCK), 0.0, peak - top)
        mine = tl.minimum(below / WIDTH, BINS - 1).to(tl.int32)
        held += tl.sum(tl.where(mine[:, None] == bins[None, :], mass[:, None], 0.0), 0)
    tl.store(HELD + (bh * parts + part) * BINS + bins, held)
    tl.store(PEAKS + bh, peak, mask=part == 0)


@triton.jit
def taken_blocks(TOPS, base, first, stop, n, sinks, peak, limit, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """(numbers of the WIDE blocks from `first` on, 1 for those that are seen)."""
    block = first + tl.arange(0, WIDE)
    here = block < stop
    top = tl.load(TOPS + base + block, mask=here, other=float("-inf"))
    seen = (peak - top < limit) | always_seen(block * BLOCK, n, sinks, BLOCK)
    return block, (seen & here).to(tl.int32)


@triton.jit
def pick_kernel(
    TOPS, PEAKS, HELD, LIST, FOUND, HEADS, STARTS, DENSE, HP, H, blocks, sinks, top_p, parts,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """LIST [B, H', blocks], ascending, and FOUND [B, H'], its length: the blocks that each head sees.

    A part lists its own blocks; how many stand before them it counts by itself.
    """
    part, bh = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    b = bh // HP
    n, dense = tl.load(STARTS + b).to(tl.int32), tl.load(DENSE + b).to(tl.int32)
    base, count = (b * H + tl.load(HEADS + bh % HP)) * blocks, n // BLOCK + 1
    each_part, bins = tl.arange(0, PARTS), tl.arange(0, BINS)
    at = HELD + (bh * parts + each_part[:, None]) * BINS + bins[None, :]
    held = tl.sum(tl.load(at, mask=(each_part < parts)[:, None], other=0.0), 0)[None, :]
    limit = tl.where(n < dense, float("inf"), tl.max(limit_of(held, top_p, BINS, WIDTH), 0))
    peak, each, found = tl.load(PEAKS + bh), tl.cdiv(count, parts), 0
    start = tl.minimum(part * each, count)
    stop = tl.minimum(start + each, count)
    for first in range(0, start, WIDE):
        _, taken = taken_blocks(TOPS, base, first, start, n, sinks, peak, limit, BLOCK, WIDE)
        found += tl.sum(taken, 0)
    for first in range(start, stop, WIDE):
        block, taken = taken_blocks(TOPS, base, first, stop, n, sinks, peak, limit, BLOCK, WIDE)
        tl.store(LIST + bh * blocks + found + tl.cumsum(taken, 0) - 1, block, mask=taken > 0)
        found += tl.sum(taken, 0)
    tl.store(FOUND + bh, found, mask=part == parts - 1)


@triton.jit
def read_kernel(
    Q, K, V, PARTS, LSE, LIST, FOUND, HEADS, STARTS, sqb, sqh, skb, skg, skn, svb, svg, svn, HP, blocks, splits, scale,
    R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PARTS [B, H', splits, D] (each part's own average) and base-2 LSE [B, H', splits] over the listed blocks."""
    split, bh = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    b, h = bh // HP, tl.load(HEADS + bh % HP).to(tl.int64)
    n, found = tl.load(STARTS + b).to(tl.int32), tl.load(FOUND + bh)
    # rows: tl.dot's least number of them; the first is real
    rows, d, j = tl.arange(0, 16), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    mask = (rows < 1)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * sqb + h * sqh + rows[:, None] * 0 + d[None, :], mask=mask, other=0.0)
    acc = tl.zeros([16, BLOCK_D], tl.float32)
    low = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    each = tl.cdiv(found, splits)
    for e in range(split * each, tl.minimum((split + 1) * each, found)):
        at = tl.load(LIST + bh * blocks + e) * BLOCK
        far, inside = tl.cast(at, tl.int64), at + j <= n
        k_at = K + b * skb + h // R * skg + far * skn + j[None, :] * skn + d[:, None]
        v_at = V + b * svb + h // R * svg + far * svn + j[:, None] * svn + d[None, :]
        k = tl.load(k_at, mask=wide(inside[None, :], d[:, None], D, BLOCK_D), other=0.0)
        v = tl.load(v_at, mask=wide(inside[:, None], d[None, :], D, BLOCK_D), other=0.0)
        s = tl.where(inside[None, :], tl.dot(q, k, input_precision=PRECISION), float("-inf"))
        acc, low, total = softmax_step(acc, low, total, s, v, scale, v.dtype, PRECISION)
    to = bh * splits + split
    some = tl.where(total > 0, total, 1.0)
    tl.store(PARTS + to * D + rows[:, None] * 0 + d[None, :], acc / some[:, None], mask=mask)
    tl.store(LSE + to + rows * 0, tl.where(total > 0, low + tl.log2(some), float("-inf")), mask=rows < 1)
