"""Which tokens look far (L2A, arXiv 2603.17484), and their attention: queries of open tokens alone, keys of all.

d = 1[ sigmoid(z / tau) >= theta ]      forward; backward as if it were the sigmoid
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.kernels.dispatch import keeps_gradients, kernels_for
from hybridize.operators.contract import Chunk, State
from hybridize.operators.dense import masked_attention, token_attention
from hybridize.operators.full import FullAttention
from hybridize.operators.gated_spec import Gated
from hybridize.operators.specs import Full
from hybridize.operators.window import WindowAttention

PARTS = 1000  # a rate is so many of them
AT_ONCE = 1 << 27  # entries of a mask that stand in memory together


class GatedWindow(WindowAttention):
    """The windowed half of a gated layer, which lies between projections as any operator; the other half is far.py's."""

    def __init__(self, spec: Gated) -> None:
        super().__init__(spec.near)


def new_far_state(max_tokens: int | None) -> State:
    """An empty state of the keys and values of all tokens."""
    return FullAttention(Full()).new_state(max_tokens)


def open_by_score(soft: Tensor, theta: float) -> Tensor:
    """bool: tokens that the router opens, soft = sigmoid(z / tau)."""
    return soft >= theta


def straight_through(is_open: Tensor, soft: Tensor) -> Tensor:
    """1 where open, else 0, in soft's dtype, with the gradient of `soft`."""
    return is_open.to(soft.dtype) + (soft - soft.detach())


def open_by_rule(gate: str, rate: float, positions: Tensor, layer: int) -> Tensor:
    """bool, of the shape of content positions: tokens that a gate opens which asks for no content."""
    if gate == "open":
        return torch.ones_like(positions, dtype=torch.bool)
    share = round(rate * PARTS)
    if gate == "position":
        return (positions + 1) * share // PARTS > positions * share // PARTS
    mixed = positions * 73_856_093 ^ layer * 83_492_791 + 12_345
    for _ in range(3):
        mixed = ((mixed ^ (mixed >> 15)) * 1_274_126_177) & 0x7FFFFFFF
    return mixed % PARTS < share


def open_attention(q: Tensor, k: Tensor, v: Tensor, at: Tensor, counts: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Attention of the first `counts` [B] queries of each row, q [B, H, N, D] at content positions `at` [B, N], ascending, to
    k, v [B, G, S, D], of which column n is content position n: [B, H, N, D]. What comes out for other queries means nothing,
    and is finite."""
    if q.shape[2] == 1 and not keeps_gradients(q, k, v):
        if (kernels := kernels_for("decode", q, dropout)) is not None:
            # a row whose token is closed reads no key; a sum over none is none
            reads = torch.where(counts > 0, at[:, 0] + 1, 0)
            return token_attention(kernels, q, k, v, reads, scale).masked_fill((counts == 0)[:, None, None, None], 0.0)
    elif (kernels := kernels_for("opened", q, dropout)) is not None:
        out: Tensor = kernels.open_attention(q, k, v, at, counts, scale)
        return out
    columns, step = torch.arange(k.shape[2], device=k.device), max(1, AT_ONCE // (k.shape[0] * k.shape[2]))
    outs = []
    for first in range(0, q.shape[2], step):
        rows = slice(first, first + step)
        seen = columns <= at[:, None, rows, None]
        outs.append(masked_attention(q[:, :, rows], k, v, seen, scale, dropout))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def open_first(is_open: Tensor, least: int) -> Tensor:
    """Columns [B, N] of each row's open tokens in their order, then closed ones; N: the most of any row, at least `least`."""
    count = max(least, int(is_open.sum(1).max()))
    return (~is_open).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]


def real_open(is_open: Tensor, chunk: Chunk) -> Tensor:
    """Padding is never open. [B, T]."""
    is_open = is_open.expand(chunk.batch, -1)
    return is_open if chunk.valid is None else is_open & chunk.valid
