"""Window + sinks attention on a GPU: launches the Triton kernels, with gradients. Same signature as the torch reference."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hybridize.errors import bad
from hybridize.kernels.dispatch import HEAD_DIMS, head_dim_fits, keeps_gradients
from hybridize.kernels.memory import dense, heads_inside, strides
from hybridize.kernels.window_backward_triton import dkv_kernel, dq_kernel
from hybridize.kernels.window_triton import LOG2E, forward_kernel

Where = tuple[Tensor, Tensor | None]  # content position of the first query, and real tokens, of each row


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    positions: Tensor,
    size: int,
    scale: float,
    q_sink: Tensor | None = None,
    counts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Query n sees keys n - size < j <= n, and all sinks j <= n (operators/banded.py is the reference).

    Args:
        q: [B, H, T, D]. positions: content positions, [B, T] or [1, T], consecutive in a row.
        k, v: [B, G, P + T, D], keys of the chunk behind those of P = 0 or size - 1 earlier tokens.
        sink_k, sink_v: [B, G, S, D], the row's first S tokens.
        size: of the window.
        q_sink: queries for the sinks where those are re-based, [B, H, T, D]; None: q itself.
        counts: [B], real tokens of each row; later columns come out as 0 and get no gradient. None: all are real.
        out: where to write [B, H, T, D], heads dense; without gradients only.

    Returns:
        `out`, or [B, H, T, D] whose transpose [B, T, H, D] is contiguous.

    Raises:
        HybridizeError: a head_dim, scale or number of sinks that the kernels do not have, or `out` where gradients are kept.
    """
    if not head_dim_fits(q.shape[-1]):
        raise bad("head_dim", q.shape[-1], HEAD_DIMS)
    if scale <= 0:
        raise bad("scale", scale, "above 0")
    if sink_k.shape[2] > 128:
        raise bad("sinks", sink_k.shape[2], "at most 128")
    q, k, v, sink_k, sink_v = (dense(x) for x in (q, k, v, sink_k, sink_v))
    q_sink = None if q_sink is None else dense(q_sink)
    where = positions[:, 0].expand(q.shape[0]).contiguous(), counts
    if out is None:
        return _Window.apply(q, k, v, sink_k, sink_v, q_sink, where, size, scale)
    if keeps_gradients(q, k, v):
        raise bad("out", "memory to write to", "None where gradients are kept")
    launch_forward(q, k, v, sink_k, sink_v, q_sink, where, size, scale, out)
    return out


def launch_shape(kernel: str, r: int, d: int, wide: bool) -> dict[str, int]:
    """Block shapes of "forward", "dq" or "dkv" for `r` query heads a group and head_dim `d`; `wide`: fp32 operands.

    BLOCK_M rows are heads x BLOCK_T positions; keys come BLOCK_N at a time.
    """
    padded = triton.next_power_of_2(r)
    rows, keys, warps, stages = (128, 32, 4, 3) if kernel == "forward" else (64, 64, 4, 2)
    if d > 128 or wide:
        rows, keys, warps, stages = 64, 32, 4, 2
    block_t = max(16, rows // padded)
    return {
        "BLOCK_T": block_t, "BLOCK_M": block_t * padded, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages
    }  # fmt: skip


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    q_sink: Tensor | None,
    where: Where,
    size: int,
    scale: float,
    out: Tensor,
) -> tuple[Tensor, dict[str, Any]]:
    """Fill out [B, H, T, D]; give (base-2 logsumexp [B, H, T], what all launches share)."""
    (b, h, t, d), g = q.shape, k.shape[1]
    lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
    near = q if q_sink is None else q_sink
    shape = {
        "R": h // g, "D": d, "BLOCK_D": triton.next_power_of_2(d),
        "SINKS": sink_k.shape[2], "BLOCK_S": max(16, triton.next_power_of_2(max(1, sink_k.shape[2]))),
        "REBASED": q_sink is not None, "HAS_COUNTS": where[1] is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    launch = launch_shape("forward", h // g, d, q.dtype == torch.float32)
    forward_kernel[triton.cdiv(t, launch["BLOCK_T"]), b * g](
        q, k, v, sink_k, sink_v, near, out, lse, *_pointers(where), *strides(q, k, v, sink_k, sink_v, near, out),
        g, t, k.shape[2] - t, size, scale * LOG2E, JOINED=q_sink is None and 2 * shape["SINKS"] <= launch["BLOCK_N"],
        **shape, **launch,
    )  # fmt: skip
    return lse, shape


def _pointers(where: Where) -> tuple[Tensor, Tensor]:
    starts, counts = where
    return starts, starts if counts is None else counts


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_k: Tensor,
        sink_v: Tensor,
        q_sink: Tensor | None,
        where: Where,
        size: int,
        scale: float,
    ) -> Tensor:
        out = heads_inside(q)
        lse, ctx.shape = launch_forward(q, k, v, sink_k, sink_v, q_sink, where, size, scale, out)
        ctx.save_for_backward(q, k, v, sink_k, sink_v, q if q_sink is None else q_sink, out, lse, *where)
        ctx.size, ctx.scale = size, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, sink_k, sink_v, near, out, lse, *where = ctx.saved_tensors
        shape, size, scale, do = ctx.shape, ctx.size, ctx.scale, dense(do)
        b, _, t, d = q.shape
        g, past, sinks, fp32 = k.shape[1], k.shape[2] - t, sink_k.shape[2], q.dtype == torch.float32
        launch = launch_shape("dq", shape["R"], d, fp32)
        count = triton.cdiv(t, launch["BLOCK_T"])
        dq = heads_inside(q)
        dqs = torch.zeros_like(dq) if shape["REBASED"] and not sinks else torch.empty_like(dq) if shape["REBASED"] else dq
        delta = torch.empty_like(lse)
        parts = [torch.empty(b, g, count, max(1, sinks), d, dtype=torch.float32, device=q.device) for _ in "kv"]
        dq_kernel[count, b * g](
            q, k, v, sink_k, sink_v, near, out, do, lse, delta, dq, dqs, *parts, *_pointers(where),
            *strides(q, k, v, sink_k, sink_v, near, out, do, dq),
            g, t, past, size, scale * LOG2E, scale, **shape, **launch,
        )  # fmt: skip
        dk, dv = heads_inside(k), heads_inside(k)
        launch = launch_shape("dkv", shape["R"], d, fp32)
        kept = {name: shape[name] for name in ("R", "D", "BLOCK_D", "HAS_COUNTS", "PRECISION")}
        dkv_kernel[triton.cdiv(k.shape[2], launch["BLOCK_N"]), b * g](
            q, k, v, do, lse, delta, dk, dv, *_pointers(where), *strides(q, k, v, do, dk),
            g, t, past, size, scale * LOG2E, scale, **kept, **launch,
        )  # fmt: skip
        dsk, dsv = (x.sum(2).to(k.dtype) if sinks else torch.zeros_like(sink_k) for x in parts)
        return dq, dk, dv, dsk, dsv, dqs if shape["REBASED"] else None, None, None, None
