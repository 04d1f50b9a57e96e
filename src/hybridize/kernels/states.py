"""Launches the kernel that carries linear attention's states from chunk to chunk; no gradients."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hybridize.kernels.states_triton import states_kernel

BLOCK_E = 16  # columns of a program: more programs for the few groups there are


def states(
    u: Tensor, asked: Tensor | None, left: Tensor, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As operators/recurrence.py's `states_between`: (states before each chunk, writes, the last state), fp32.

    Args:
        u: [B, G, N, C, E]. asked: [B, G, N, C, F]. left: [B, G, N, F, C]. total: [B, G, N, 1, 1]. state: [B, G, F, E].
    """
    b, g, n, c, e = u.shape
    f = left.shape[3]
    u, left, state = u.contiguous(), left.contiguous(), state.contiguous()
    before = torch.empty(b, g, n, f, e, dtype=u.dtype, device=u.device)
    before[:, :, 0] = state
    written, last = torch.empty_like(u), torch.empty_like(state)
    asked = None if asked is None else asked.contiguous()
    total = None if total is None else total.contiguous()
    states_kernel[(triton.cdiv(e, BLOCK_E), b * g)](
        u, u if asked is None else asked, left, u if total is None else total, before, written, last, n, c, f, e,
        HAS_ASKED=asked is not None, HAS_TOTAL=total is not None, BLOCK_C=max(16, triton.next_power_of_2(c)),
        BLOCK_F=min(64, max(16, triton.next_power_of_2(f))), BLOCK_E=BLOCK_E, PRECISION="tf32x3", num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, written, last
