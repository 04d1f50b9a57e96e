"""Attention of open queries on a GPU: launches the Triton kernels. operators/gated.py is the reference."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hybridize.errors import bad
from hybridize.kernels.dispatch import HEAD_DIMS, head_dim_fits
from hybridize.kernels.memory import dense, heads_inside, strides
from hybridize.kernels.opened_triton import open_dkv_kernel, open_dq_kernel, open_forward_kernel
from hybridize.kernels.window_triton import LOG2E

SHAPES = {"forward": (128, 64, 8, 3), "dq": (64, 64, 4, 2), "dkv": (64, 64, 4, 2)}  # rows, keys, warps, stages
SMALL = (64, 32, 4, 2)  # where operands are wide


def open_attention(q: Tensor, k: Tensor, v: Tensor, at: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Attention of each row's first `counts` queries to every key up to their places.

    Args:
        q: [B, H, N, D]. k, v: [B, G, S, D], column n of content position n.
        at: int [B, N], content positions, ascending among the first `counts` (int [B]) of a row; later ones are not looked at.
        scale: above 0.

    Returns:
        [B, H, N, D], whose transpose [B, N, H, D] is contiguous; 0 from `counts` on.

    Raises:
        HybridizeError: a head_dim or scale that the kernels do not have.
    """
    if not head_dim_fits(q.shape[-1]):
        raise bad("head_dim", q.shape[-1], HEAD_DIMS)
    if scale <= 0:
        raise bad("scale", scale, "above 0")
    q, k, v = (dense(x) for x in (q, k, v))
    return _Open.apply(q, k, v, at.contiguous(), counts, scale)


def _launch(kernel: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    r, d = q.shape[1] // k.shape[1], q.shape[3]
    padded = triton.next_power_of_2(r)
    rows, keys, warps, stages = SMALL if d > 128 or q.dtype == torch.float32 else SHAPES[kernel]
    block_t = max(16, rows // padded)
    return {
        "R": r, "D": d, "BLOCK_D": triton.next_power_of_2(d), "BLOCK_T": block_t, "BLOCK_M": block_t * padded,
        "BLOCK_N": keys, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, at: Tensor, counts: Tensor, scale: float) -> Tensor:
        (b, h, n, _), (g, columns) = q.shape, k.shape[1:3]
        out, lse = heads_inside(q), torch.empty(b, h, n, dtype=torch.float32, device=q.device)
        launch = _launch("forward", q, k)
        open_forward_kernel[triton.cdiv(n, launch["BLOCK_T"]), b * g](
            q, k, v, out, lse, at, counts, *strides(q, k, v, out), g, n, columns, scale * LOG2E, **launch
        )
        ctx.save_for_backward(q, k, v, at, counts, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, at, counts, out, lse = ctx.saved_tensors
        (b, _, n, _), (g, columns), do = q.shape, k.shape[1:3], dense(do)
        dq, dk, dv, delta = heads_inside(q), heads_inside(k), heads_inside(k), torch.empty_like(lse)
        numbers = (g, n, columns, ctx.scale * LOG2E, ctx.scale)
        launch = _launch("dq", q, k)
        open_dq_kernel[triton.cdiv(n, launch["BLOCK_T"]), b * g](
            q, k, v, out, do, lse, delta, dq, at, counts, *strides(q, k, v, out, do, dq), *numbers, **launch
        )
        launch = _launch("dkv", q, k)
        blocks = torch.arange(0, columns, launch["BLOCK_N"], device=q.device).expand(b, -1).contiguous()
        real = torch.arange(n, device=q.device) < counts[:, None]
        first = torch.searchsorted(at.masked_fill(~real, columns).long(), blocks)
        open_dkv_kernel[blocks.shape[1], b * g](
            q, k, v, do, lse, delta, dk, dv, at, counts, first, *strides(q, k, v, do, dk), *numbers, **launch
        )
        return dq, dk, dv, None, None, None
