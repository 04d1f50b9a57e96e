"""Linear maps of one row on a GPU: up to three weights over the same input in one launch.

A decoded token of one sequence reads every weight once, and libraries' matrix products reach 60 to 90 % of a copy's rate
there (docs/speed.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridize.kernels.matvec_triton import matvec_kernel

MOST = 3  # weights of one launch
BLOCK_E, WARPS = 1024, 2  # measured on an H200 for each projection of an 8B model


@torch.library.custom_op("hybridize::matvec", mutates_args=())
def matvec(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[1, N of all weights, side by side], each `weight @ x`. A graph sees one operation.

    Args:
        x: [1, E]. weights: up to MOST of [N, E], each row contiguous, of x's dtype.
    """
    x = x.contiguous()
    sizes = [len(w) for w in weights]
    given = [*weights, *[weights[0]] * (MOST - len(weights))]
    out = torch.empty(1, sum(sizes), dtype=x.dtype, device=x.device)
    second = sizes[1] if len(sizes) > 1 else 0
    matvec_kernel[(sum(sizes),)](
        x, *given, out, sizes[0], second, *(w.stride(0) for w in given), E=x.shape[1], BLOCK_E=BLOCK_E, num_warps=WARPS
    )
    return out


@matvec.register_fake
def _(x, weights):  # type: ignore[no-untyped-def]
    return x.new_empty(1, sum(len(w) for w in weights))
