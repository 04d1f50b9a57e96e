"""Indexed attention on a GPU: launches the Triton kernels. operators/indexed.py is the reference."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hybridize.errors import bad
from hybridize.kernels.decode_triton import join_kernel
from hybridize.kernels.dispatch import HEAD_DIMS, INDEX_BLOCKS, head_dim_fits, index_tile_fits
from hybridize.kernels.indexed_backward_triton import index_dkv_kernel, index_dq_kernel
from hybridize.kernels.indexed_decode_triton import pick_kernel, read_kernel, scan_kernel, tally_kernel
from hybridize.kernels.indexed_triton import attend_kernel, choose_kernel
from hybridize.kernels.memory import PROGRAMS, dense, heads_inside, strides
from hybridize.kernels.window_triton import LOG2E
from hybridize.operators.choosing import BINS, WIDTH

SCAN_PROGRAMS = 4 * PROGRAMS  # an index key is short: what few programs have on its way would not fill the memory's time
PICK_AT_ONCE = 128  # blocks that go into a histogram together
PICK_PARTS = 64  # programs at most that share the choice of one head, each of PICK_AT_ONCE blocks at least
PICK_WIDE = 1024  # blocks whose largest scores are read together


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    which: Tensor,
    starts: Tensor,
    dense_until: Tensor,
    block: int,
    sinks: int,
    top_p: float,
    scale: float,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of the query heads `which` to the blocks that each of their queries chooses by its index scores.

    Args:
        q: [B, H, T, D]. k, v: [B, G, S, D], column n of content position n, the chunk's own among them.
        index_q: [B, H, T, I]. index_k: [B, G, S, I].
        which: int [H'].
        starts: int [B], content position of each row's first query.
        dense_until: int [B]; queries at content positions below it see everything.
        block: one of INDEX_BLOCKS. top_p: below 1.
        counts: [B], real tokens of each row; later columns come out as 0. None: all are real.

    Returns:
        [B, H', T, D], whose transpose [B, T, H', D] is contiguous.

    Raises:
        HybridizeError: a head_dim, block, top_p or scale that the kernels do not have.
    """
    _check(q, block, top_p, scale)
    q, k, v, index_q, index_k = (dense(x) for x in (q, k, v, index_q.detach(), index_k.detach()))
    peak, limit = choose(index_q, index_k, which, starts, dense_until, block, sinks, top_p)
    return _Indexed.apply(q, k, v, (index_q, index_k, peak, limit, which, starts, counts), block, sinks, scale)


def choose(
    index_q: Tensor, index_k: Tensor, which: Tensor, starts: Tensor, dense_until: Tensor, block: int, sinks: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """(M, limit), fp32 [B, H', T] each: a query sees blocks whose largest score lies less than `limit` below M, and those that
    it always sees."""
    (b, _, t, _), g, hp = index_q.shape, index_k.shape[1], len(which)
    peak, limit = (torch.empty(b, hp, t, dtype=torch.float32, device=index_q.device) for _ in "ml")
    shape = _shape(index_q, g, block)
    rows = 64 if index_q.dtype != torch.float32 else 32
    choose_kernel[triton.cdiv(t, rows), b * hp](
        index_q, index_k, peak, limit, which, starts, dense_until, *strides(index_q, index_k),
        hp, t, sinks, top_p, **shape, BLOCK_T=rows, BINS=BINS, WIDTH=WIDTH, num_warps=4, num_stages=2,
    )  # fmt: skip
    return peak, limit


class _Indexed(torch.autograd.Function):
    """`chosen`: (index_q, index_k, M, limit, which, starts, counts)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Any, block: int, sinks: int, scale: float) -> Tensor:
        *given, which, starts, counts = chosen
        (b, _, t, _), hp = q.shape, len(which)
        out, lse = heads_inside(q, hp), torch.empty_like(given[-1])
        launch = _launch(q, 128)
        attend_kernel[triton.cdiv(t, launch["BLOCK_T"]), b * hp](
            q, k, v, *given, out, lse, which, starts, starts if counts is None else counts,
            *strides(q, k, v, *given[:2], out), hp, t, sinks, scale * LOG2E,
            **_shape(given[0], k.shape[1], block), **launch, HAS_COUNTS=counts is not None,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, *given, which, starts, counts, out, lse)
        ctx.block, ctx.sinks, ctx.scale = block, sinks, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, *given, which, starts, counts, out, lse = ctx.saved_tensors
        (b, h, t, d), (g, columns), hp, do = q.shape, k.shape[1:3], len(which), dense(do)
        shape, launch = _shape(given[0], g, ctx.block), _launch(q, 64)
        how = {**shape, **launch, "HAS_COUNTS": counts is not None}
        where, numbers = (which, starts, starts if counts is None else counts), (ctx.sinks, ctx.scale * LOG2E, ctx.scale)
        part, delta = heads_inside(q, hp), torch.empty_like(lse)
        index_dq_kernel[triton.cdiv(t, launch["BLOCK_T"]), b * hp](
            q, k, v, *given, out, do, lse, delta, part, *where, *strides(q, k, v, *given[:2], out, do, part),
            hp, t, *numbers, **how,
        )  # fmt: skip
        dk, dv = (torch.empty(b, hp, columns, d, dtype=torch.float32, device=q.device) for _ in "kv")
        index_dkv_kernel[triton.cdiv(columns, ctx.block), b * hp](
            q, k, v, *given, do, lse, delta, dk, dv, *where, *strides(q, k, v, *given[:2], do),
            hp, t, columns, *numbers, **how,
        )  # fmt: skip
        group = which.long() // (h // g)
        grouped = (torch.zeros(b, g, columns, d, device=q.device).index_add_(1, group, x).to(k.dtype) for x in (dk, dv))
        return torch.zeros_like(q).index_copy_(1, which.long(), part), *grouped, None, None, None, None


@torch.library.custom_op("hybridize::indexed_token", mutates_args=())
def indexed_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    which: Tensor,
    positions: Tensor,
    dense_until: Tensor,
    block: int,
    sinks: int,
    top_p: float,
    scale: float,
) -> Tensor:
    """`indexed_attention` of one token a row, at content positions [B]. A graph sees one operation.

    Returns:
        [B, H', 1, D].
    """
    _check(q, block, top_p, scale)
    q, k, v, index_q, index_k = (dense(x) for x in (q, k, v, index_q, index_k))
    (b, h, _, d), (g, columns), hp = q.shape, k.shape[1:3], len(which)
    blocks, device = triton.cdiv(columns, block), q.device
    shape = _shape(index_q, g, block)
    parts = max(1, min(SCAN_PROGRAMS // (b * g), blocks))
    tops, masses = (torch.empty(b, h, blocks, dtype=torch.float32, device=device) for _ in "tm")
    scan_kernel[(parts * b * g,)](
        index_q, index_k, tops, masses, positions, *index_q.stride()[:2], *strides(index_k), g, blocks, parts,
        **shape, BLOCK_R=max(16, triton.next_power_of_2(h // g)), num_warps=4, num_stages=3,
    )  # fmt: skip
    listed = torch.empty(b, hp, blocks, dtype=torch.int32, device=device)
    found = torch.empty(b, hp, dtype=torch.int32, device=device)
    parts = max(1, min(PICK_PARTS, triton.cdiv(blocks, PICK_AT_ONCE)))
    peaks = torch.empty(b, hp, dtype=torch.float32, device=device)
    held = torch.empty(b, hp, parts, BINS, dtype=torch.float32, device=device)
    how = {"BLOCK": block, "WIDE": PICK_WIDE, "BINS": BINS, "WIDTH": WIDTH}
    tally_kernel[(parts * b * hp,)](
        tops, masses, peaks, held, which, positions, hp, h, blocks, sinks, parts, AT_ONCE=PICK_AT_ONCE, **how, num_warps=4
    )
    pick_kernel[(parts * b * hp,)](
        tops, peaks, held, listed, found, which, positions, dense_until, hp, h, blocks, sinks, top_p, parts,
        PARTS=PICK_PARTS, **how, num_warps=8,
    )  # fmt: skip
    splits = max(1, min(PROGRAMS // (b * hp), blocks))
    pieces = torch.empty(b, hp, splits, d, dtype=torch.float32, device=device)
    lse = torch.empty(b, hp, splits, dtype=torch.float32, device=device)
    padded = triton.next_power_of_2(d)
    stages = 3 if block * padded * q.element_size() <= 1 << 15 else 2  # keys and values of a stage but the last wait in memory
    read_kernel[(splits * b * hp,)](
        q, k, v, pieces, lse, listed, found, which, positions, *q.stride()[:2], *strides(k, v),
        hp, blocks, splits, scale * LOG2E, R=h // g, D=d, BLOCK_D=padded, BLOCK=block, PRECISION=shape["PRECISION"],
        num_warps=4, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(b, hp, 1, d, dtype=q.dtype, device=device)
    join_kernel[(b * hp,)](
        pieces, lse, out, *out.stride()[:2], hp, splits, D=d, BLOCK_D=padded, BLOCK_P=triton.next_power_of_2(splits),
        num_warps=2,
    )  # fmt: skip
    return out


@indexed_token_attention.register_fake
def _(q, k, v, index_q, index_k, which, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], which.shape[0], 1, q.shape[3])


def _launch(q: Tensor, rows: int) -> dict[str, int]:
    """Sizes for [rows, head_dim] of queries at once, fewer where they are wide."""
    d = q.shape[-1]
    rows = rows if q.dtype != torch.float32 and d <= 128 else 32
    warps = 8 if rows == 128 else 4
    return {"D": d, "BLOCK_D": triton.next_power_of_2(d), "BLOCK_T": rows, "num_warps": warps, "num_stages": 2}


def _shape(index_q: Tensor, groups: int, block: int) -> dict[str, Any]:
    i = index_q.shape[-1]
    precision = "ieee" if index_q.dtype == torch.float32 else "tf32"
    return {
        "R": index_q.shape[1] // groups, "INDEX": i, "BLOCK_I": max(16, triton.next_power_of_2(i)), "BLOCK": block,
        "PRECISION": precision,
    }  # fmt: skip


def _check(q: Tensor, block: int, top_p: float, scale: float) -> None:
    if not head_dim_fits(q.shape[-1]):
        raise bad("head_dim", q.shape[-1], HEAD_DIMS)
    if block not in INDEX_BLOCKS or not index_tile_fits(q.dtype, q.shape[-1], block):
        raise bad("block", block, f"one of {INDEX_BLOCKS}, at most 64 KiB of keys")
    if not 0 < top_p < 1:
        raise bad("top_p", top_p, "a share above 0, below 1")
    if scale <= 0:
        raise bad("scale", scale, "above 0")
