"""Window + sinks attention on a GPU: launches the Triton kernels, with gradients. Same signature as the torch reference."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from hybridize.errors import bad
from hybridize.kernels.dispatch import HEAD_DIMS, head_dim_fits
from hybridize.kernels.window_backward_triton import dkv_kernel, dq_kernel
from hybridize.kernels.window_triton import LOG2E, forward_kernel


@functools.cache
def sizes_on(device: torch.device, sizes: tuple[int, ...]) -> Tensor:
    """Window sizes of the groups, int32 on the device, made once."""
    return torch.tensor(sizes, dtype=torch.int32, device=device)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor,
    sink_v: Tensor,
    positions: Tensor,
    size: int | tuple[int, ...],
    scale: float,
    q_sink: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Query n sees keys n - size < j <= n, and all sinks j <= n (operators/banded.py is the reference).

    Args:
        q: [B, H, T, D]. positions: content positions, [B, T] or [1, T], consecutive in a row.
        k, v: [B, G, P + T, D], keys of the chunk behind those of P = 0 or size - 1 earlier tokens.
        sink_k, sink_v: [B, G, S, D], the row's first S tokens.
        size: of the window, or one for each group (a full span's is larger than any position).
        q_sink: queries for the sinks where those are re-based, [B, H, T, D]; None: q itself.
        counts: [B], real tokens of each row; later columns come out as 0 and get no gradient. None: all are real.

    Returns:
        [B, H, T, D], whose transpose [B, T, H, D] is contiguous.

    Raises:
        HybridizeError: a head_dim or number of sinks that the kernels do not have.
    """
    if not head_dim_fits(q.shape[-1]):
        raise bad("head_dim", q.shape[-1], HEAD_DIMS)
    if sink_k.shape[2] > 128:
        raise bad("sinks", sink_k.shape[2], "at most 128")
    sizes = (size,) * k.shape[1] if isinstance(size, int) else size
    if len(sizes) != k.shape[1]:
        raise bad("size", sizes, f"one for each of {k.shape[1]} groups")
    return _Window.apply(q, k, v, sink_k, sink_v, q_sink, positions[:, 0], counts, sizes, scale)


def _blocks(r: int, d: int, backward: bool) -> dict[str, Any]:
    """Block shapes for `r` query heads a group: about 128 rows of heads x positions, keys 64 at a time."""
    padded = triton.next_power_of_2(r)
    rows = 64 if d > 128 or (backward and d > 64) else 128
    block_t = max(16, rows // padded)
    return {"BLOCK_T": block_t, "BLOCK_M": block_t * padded, "BLOCK_N": 32 if d > 128 else 64}


def _warps(blocks: dict[str, Any], d: int) -> dict[str, int]:
    return {"num_warps": 8 if blocks["BLOCK_M"] * d >= 128 * 128 else 4, "num_stages": 2 if d > 128 else 3}


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
        starts: Tensor,
        counts: Tensor | None,
        sizes: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        b, h, t, d = q.shape
        g, r, past = k.shape[1], h // k.shape[1], k.shape[2] - t
        q, k, v, sink_k, sink_v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, sink_k, sink_v))
        near = q if q_sink is None else q_sink if q_sink.stride(-1) == 1 else q_sink.contiguous()
        starts = starts.expand(b).contiguous()
        out = torch.empty(b, t, h, d, dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
        where = (starts, starts if counts is None else counts, sizes_on(q.device, sizes))
        blocks = _blocks(r, d, False)
        shape = {
            "R": r, "D": d, "BLOCK_D": triton.next_power_of_2(d),
            "SINKS": sink_k.shape[2], "BLOCK_S": max(16, triton.next_power_of_2(max(1, sink_k.shape[2]))),
            "REBASED": q_sink is not None, "HAS_COUNTS": counts is not None,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        strides = [n for x in (q, k, v, sink_k, sink_v, near, out) for n in x.stride()[:3]]
        grid = (triton.cdiv(t, blocks["BLOCK_T"]), b * g)
        forward_kernel[grid](
            q, k, v, sink_k, sink_v, near, out, lse, *where, *strides, g, t, past, scale * LOG2E,
            **shape, **blocks, **_warps(blocks, d),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, sink_k, sink_v, near, out, lse, *where)
        ctx.shape, ctx.scale = shape, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, sink_k, sink_v, near, out, lse, *where = ctx.saved_tensors
        shape, scale = ctx.shape, ctx.scale
        b, h, t, d = q.shape
        g, past, sinks = k.shape[1], k.shape[2] - t, sink_k.shape[2]
        do = do if do.stride(-1) == 1 else do.contiguous()
        blocks = _blocks(shape["R"], d, True)
        count = triton.cdiv(t, blocks["BLOCK_T"])
        dq = torch.empty(b, t, h, d, dtype=q.dtype, device=q.device).transpose(1, 2)
        dqs = torch.zeros_like(dq) if shape["REBASED"] and not sinks else torch.empty_like(dq) if shape["REBASED"] else dq
        delta = torch.empty_like(lse)
        parts = [torch.empty(b, g, count, max(1, sinks), d, dtype=torch.float32, device=q.device) for _ in "kv"]
        strides = [n for x in (q, k, v, sink_k, sink_v, near, out, do, dq) for n in x.stride()[:3]]
        dq_kernel[(count, b * g)](
            q, k, v, sink_k, sink_v, near, out, do, lse, delta, dq, dqs, *parts, *where, *strides,
            g, t, past, scale * LOG2E, scale, **shape, **blocks, **_warps(blocks, d),
        )  # fmt: skip
        dk = torch.empty(b, k.shape[2], g, d, dtype=k.dtype, device=k.device).transpose(1, 2)
        dv = torch.empty_like(dk)
        strides = [n for x in (q, k, v, do, dk) for n in x.stride()[:3]]
        kept = {name: shape[name] for name in ("R", "D", "BLOCK_D", "HAS_COUNTS", "PRECISION")}
        dkv_kernel[(triton.cdiv(k.shape[2], blocks["BLOCK_N"]), b * g)](
            q, k, v, do, lse, delta, dk, dv, *where, *strides, g, t, past, scale * LOG2E, scale,
            **kept, **blocks, **_warps(blocks, d),
        )  # fmt: skip
        dsk, dsv = (x.sum(2).to(k.dtype) if sinks else torch.zeros_like(sink_k) for x in parts)
        return dq, dk, dv, dsk, dsv, dqs if shape["REBASED"] else None, None, None, None, None
