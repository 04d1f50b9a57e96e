"""Matrix-vector products in Triton: a program takes one row of one of up to three matrices, so that weights are read once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matvec_kernel(X, A, B, C, OUT, NA, NB, sa, sb, sc, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """OUT [NA + NB + NC] = [A; B; C] [·, E] @ X [E], summed in fp32 and rounded once."""
    row, e = tl.program_id(0), tl.arange(0, BLOCK_E)
    at = A + row.to(tl.int64) * sa
    if row >= NA + NB:
        at = C + (row - NA - NB).to(tl.int64) * sc
    elif row >= NA:
        at = B + (row - NA).to(tl.int64) * sb
    total = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, E, BLOCK_E):
        inside = first + e < E
        w = tl.load(at + first + e, mask=inside, other=0.0)
        x = tl.load(X + first + e, mask=inside, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)
    tl.store(OUT + row, tl.sum(total, 0).to(OUT.dtype.element_ty))
