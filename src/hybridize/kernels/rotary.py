"""RoPE of a chunk's queries and keys in one launch, where plain torch takes about ten over the same memory; with gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hybridize.kernels.memory import dense, heads_inside, strides
from hybridize.kernels.rotary_triton import rotary_kernel

HEADS = 8  # of one program: they share its cosines and sines


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; transposed, each is contiguous.

    Args:
        q, k: [B, H, T, D], [B, G, T, D], before RoPE. cos, sin: [B or 1, T, D].
    """
    out: tuple[Tensor, Tensor] = _Rotate.apply(q, k, cos, sin)
    return out


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (dense(x) for x in (q, k, cos, sin))
    (b, h, t, d), g = q.shape, k.shape[1]
    out_q, out_k = heads_inside(q), heads_inside(k)
    by_row = [n for x in (cos, sin) for n in (0 if x.shape[0] == 1 else x.stride(0), x.stride(1))]
    block_t = 32 if t >= 4096 else 4
    rotary_kernel[triton.cdiv(t, block_t), b, triton.cdiv(h + g, HEADS)](
        q, k, cos, sin, out_q, out_k,
        *strides(q, k), *by_row, *strides(out_q, out_k), h, g, t,
        HALF=d // 2, BLOCK_D=triton.next_power_of_2(d // 2), BLOCK_T=block_t, HEADS=HEADS, BACKWARD=backward, num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add rounds once where the base rounds twice
    )  # fmt: skip
    return out_q, out_k


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _launch(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return *_launch(dq, dk, cos, sin, True), None, None
