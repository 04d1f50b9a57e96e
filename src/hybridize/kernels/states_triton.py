"""The states of linear attention from chunk to chunk, which nothing but this order of chunks makes sequential.

A program takes one group and some columns of its state, and goes through all chunks: what it needs of a state is read back
from where the state before the chunk was just written, which is in the L2 cache and is wanted there anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def states_kernel(U, ASKED, LEFT, TOTAL, BEFORE, WRITTEN, LAST, N, C, F, E,
                  HAS_ASKED: tl.constexpr, HAS_TOTAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_F: tl.constexpr,
                  BLOCK_E: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """BEFORE [BG, N, F, E] (its first state given), WRITTEN [BG, N, C, E] and LAST [BG, F, E], all contiguous, fp32, of

        written_n = u_n - asked_n S_n,   S_{n+1} = total_n S_n + left_n written_n

    U [BG, N, C, E], ASKED [BG, N, C, F], LEFT [BG, N, F, C], TOTAL [BG, N]. C is at most BLOCK_C.
    """
    g = tl.program_id(1).to(tl.int64)
    c, f, e = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_F), tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens, columns = c[:, None] < C, e[None, :] < E
    for n in range(0, N):
        at = g * N + n
        here = c[:, None] * E + e[None, :]
        write = tl.load(U + at * C * E + here, mask=tokens & columns, other=0.0)
        if HAS_ASKED:
            for first in range(0, F, BLOCK_F):
                some = first + f
                s = tl.load(
                    BEFORE + at * F * E + some[:, None] * E + e[None, :], mask=(some[:, None] < F) & columns, other=0.0
                )
                a = tl.load(ASKED + at * C * F + c[:, None] * F + some[None, :], mask=tokens & (some[None, :] < F), other=0.0)
                write -= tl.dot(a, s, input_precision=PRECISION)
        tl.store(WRITTEN + at * C * E + here, write, mask=tokens & columns)
        decay = 1.0
        if HAS_TOTAL:
            decay = tl.load(TOTAL + at)
        out = BEFORE + (at + 1) * F * E
        if n + 1 == N:
            out = LAST + g * F * E
        for first in range(0, F, BLOCK_F):
            some = first + f
            kept = some[:, None] * E + e[None, :]
            inside = (some[:, None] < F) & columns
            s = tl.load(BEFORE + at * F * E + kept, mask=inside, other=0.0)
            k = tl.load(
                LEFT + at * F * C + some[:, None] * C + c[None, :], mask=(some[:, None] < F) & (c[None, :] < C), other=0.0
            )
            s = s * decay + tl.dot(k, write, input_precision=PRECISION)
            tl.store(out + kept, s, mask=inside)
        tl.debug_barrier()  # the next chunk reads what other threads wrote
