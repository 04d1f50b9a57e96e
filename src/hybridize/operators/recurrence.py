"""Linear attention as maths: a state S [F, E] that every key writes a value into, and every query reads.

    sum     S_t = e^{g_t} S_{t-1} + b_t phi(k_t) v_t^T
    delta   S_t = e^{g_t} S_{t-1} + b_t phi(k_t) (v_t - phi(k_t)^T e^{g_t} S_{t-1})^T      (arXiv 2406.06484, 2412.06464)
    read    o_t = phi(q_t)^T S_t

phi is the symmetric power of a degree, so phi(q).phi(k) = (q.k)^degree and a chunk never writes features out for its own
pairs. The chunked form and the recurrent form are the same function; everything is fp32 (or fp64).

Shapes: q [B, G, R, T, d] (R query heads a group), k [B, G, T, d], v [B, G, T, E], write strength b [B, G, T], log decay g
[B, G, T], or [B, G, T, d] (one a feature; degree 1, sum only), or None; S [B, G, F, E]. A token with b = 0 and g = 0 is
not there. Returns o [B, G, R, T, E] and S.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

Outcome = tuple[Tensor, Tensor]
CHANNEL_CHUNK = 16  # tokens: all features of all pairs of a chunk stand in memory
TOGETHER = 32  # chunks worked on at once


def _monomials(dim: int, degree: int) -> tuple[list[list[int]], list[float]]:
    """Index lists of all monomials of a degree in `dim` variables, and the root of how often each occurs."""
    terms = list(combinations_with_replacement(range(dim), degree))
    weights = [math.sqrt(math.factorial(degree) / math.prod(map(math.factorial, Counter(t).values()))) for t in terms]
    return [list(column) for column in zip(*terms, strict=True)], weights


def power_features(x: Tensor, degree: int) -> Tensor:
    """phi(x) [..., C(d + degree - 1, degree)] of x [..., d], with phi(x).phi(y) = (x.y)^degree."""
    if degree == 1:
        return x
    columns, weights = _on_device(x.shape[-1], degree, x.device)
    out = weights.to(x.dtype)
    for column in columns:
        out = out * x[..., column]
    return out


@torch.compiler.assume_constant_result
def _on_device(dim: int, degree: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    return _kept_on_device(dim, degree, device)  # a cached function would be traced into


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _kept_on_device(dim: int, degree: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    columns, weights = _monomials(dim, degree)
    on_device = torch.tensor(weights, dtype=torch.float64, device=device)
    return [torch.tensor(column, device=device) for column in columns], on_device


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor, degree: int = 1, delta: bool = False
) -> Outcome:
    """Token by token, as decoding runs; the definition that `chunked` is held to."""
    outs = []
    for t in range(k.shape[2]):
        key, query = power_features(k[:, :, t], degree), power_features(q[:, :, :, t], degree)
        value = v[:, :, t]
        if g is not None:
            decay = g[:, :, t].exp()
            state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        if delta:
            value = value - (key[:, :, None] @ state)[:, :, 0]
        state = state + key[..., None] * (b[:, :, t, None] * value)[:, :, None]
        outs.append(query @ state)
    return torch.stack(outs, dim=3), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    g: Tensor | None,
    state: Tensor | None = None,
    degree: int = 1,
    delta: bool = False,
    keep_state: bool = True,
    size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk: pairs inside a chunk by their scores, everything before it through the state.

    Args:
        state: what came before, None for nothing.
        keep_state: whether the state at the end is wanted; without, a single chunk needs no features at all.
        size: tokens a chunk, None for what costs least.
    """
    tokens = k.shape[2]
    channel = g is not None and g.dim() == 4
    if size is None:
        size = (
            CHANNEL_CHUNK if channel else chunk_size(tokens, k.shape[-1], degree, state is None and not keep_state, k.is_cuda)
        )
    if not channel and tokens <= size and state is None and not keep_state:
        ratio = _decay_between(None if g is None else g.cumsum(-1), tokens, k)
        u = b[..., None] * v
        return _pairs(q, k, _solved(u, k, b, ratio, degree) if delta else u, ratio, degree), None
    outs, step = [], size if channel else size * TOGETHER
    for first in range(0, tokens, step):
        part = slice(first, first + step)
        decay = None if g is None else g[:, :, part]
        given = (q[:, :, :, part], k[:, :, part], v[:, :, part], b[:, :, part])
        if channel:
            assert decay is not None
            out, state = _channel_chunk(*given, decay, state)
        else:
            out, state = _segment(*given, decay, state, degree, delta, size)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=3), state


def chunk_size(tokens: int, dim: int, degree: int, alone: bool, on_gpu: bool) -> int:
    """Tokens a chunk: pairs cost its length, the state its width; one chunk where no state is asked for."""
    if alone and tokens <= 2048:
        return max(tokens, 1)
    wide = 1 << (math.comb(dim + degree - 1, degree) - 1).bit_length()
    return min(max(64, wide), 512 if on_gpu else 64)  # a GPU waits for launches, of which each chunk costs some


def _segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    g: Tensor | None,
    state: Tensor | None,
    degree: int,
    delta: bool,
    size: int,
) -> Outcome:
    """Several chunks: all that does not need the state at once, then the state from chunk to chunk, then what reads it."""
    tokens = k.shape[2]
    q, k, v = (_in_chunks(x, size, -2) for x in (q, k, v))  # [B, G, R, N, C, d], [B, G, N, C, d], [B, G, N, C, E]
    b, g = _in_chunks(b, size, -1), None if g is None else _in_chunks(g, size, -1)
    key = power_features(k, degree)
    past = None if g is None else g.cumsum(-1)
    since = None if past is None else past.exp()[..., None]  # decay from the chunk's beginning
    ratio = _decay_between(past, size, k)
    u = b[..., None] * v
    asked = None
    if delta:  # u_i = b_i (v_i - what is known under k_i): of the chunk itself, and of the state
        right = b[..., None] * (key if since is None else since * key)
        solved = _solved(torch.cat([u, right], dim=-1), k, b, ratio, degree)
        u, asked = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    left = (key if past is None else (past[..., -1:] - past).exp()[..., None] * key).transpose(-1, -2)
    state = v.new_zeros(*v.shape[:2], key.shape[-1], v.shape[-1]) if state is None else state
    if asked is None and past is None:  # a plain sum: all states are one running sum
        more = left @ u
        sums = more.cumsum(2)
        before, state = state[:, :, None] + (sums - more), state + sums[:, :, -1]
    else:
        total = None if past is None else past[..., -1, None, None].exp()
        before, u, state = states_between(u, asked, left, total, state)
    read = power_features(q, degree) @ before[:, :, None]
    out = _pairs(q, k, u, ratio, degree)
    out = out + (read if since is None else since[:, :, None] * read)
    return out.flatten(3, 4)[:, :, :, :tokens], state


def states_between(
    u: Tensor, asked: Tensor | None, left: Tensor, total: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From chunk to chunk, two products each: (states before each [B, G, N, F, E], writes [B, G, N, C, E], the last state).

    writes_n = u_n - asked_n S_n,   S_{n+1} = total_n S_n + left_n writes_n

    Args:
        u: [B, G, N, C, E]. asked: [B, G, N, C, F]. left: [B, G, N, F, C]. total: [B, G, N, 1, 1]. state: [B, G, F, E].
    """
    groups, shape = u.shape[:2], state.shape
    u, left, state = u.flatten(0, 1), left.flatten(0, 1), state.flatten(0, 1)
    asked, total = (None if x is None else x.flatten(0, 1) for x in (asked, total))
    before, written = [], []
    for n in range(u.shape[1]):
        before.append(state)
        written.append(u[:, n] if asked is None else torch.baddbmm(u[:, n], asked[:, n], state, alpha=-1))
        state = torch.baddbmm(state if total is None else total[:, n] * state, left[:, n], written[-1])
    states, writes = torch.stack(before, dim=1), torch.stack(written, dim=1)
    return states.unflatten(0, groups), writes.unflatten(0, groups), state.view(shape)


def _in_chunks(x: Tensor, size: int, dim: int) -> Tensor:
    """Split `dim` into chunks, zeros behind the last: tokens of no strength and no decay are not there."""
    short = -x.shape[dim] % size
    if short:
        x = torch.nn.functional.pad(x, (0, 0) * (-1 - dim) + (0, short))
    return x.unflatten(dim, (-1, size))


def _solved(right: Tensor, k: Tensor, b: Tensor, ratio: Tensor, degree: int) -> Tensor:
    """u of u_i + sum_{j < i} b_i e^{G_i - G_j} (k_i.k_j)^degree u_j = right_i, a unit lower triangular system."""
    own = (b[..., None] * (k @ k.transpose(-1, -2)) ** degree * ratio).tril(-1)
    return torch.linalg.solve_triangular(own, right, upper=False, unitriangular=True)


def _pairs(q: Tensor, k: Tensor, u: Tensor, ratio: Tensor, degree: int) -> Tensor:
    """What queries read of the writes of their own chunk, [B, G, R, ..., C, E]."""
    return ((q @ k.transpose(-1, -2)[:, :, None]) ** degree * ratio[:, :, None]) @ u[:, :, None]


def _decay_between(past: Tensor | None, tokens: int, like: Tensor) -> Tensor:
    """e^{G_i - G_j} where j <= i, else 0: [B, G, ..., C, C], or [1, 1, C, C] of ones without decay."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device).tril()
    if past is None:
        return causal.to(like.dtype)[None, None]
    # masked before exp: what lies above the diagonal may be too large for it
    return (past[..., :, None] - past[..., None, :]).masked_fill(~causal, float("-inf")).exp()


def _channel_chunk(q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor, state: Tensor | None) -> Outcome:
    """A sum whose features decay each at its own rate (GLA)."""
    past = g.cumsum(2)  # [B, G, C, d]
    causal = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).tril()[..., None]
    between = (past[:, :, :, None] - past[:, :, None]).masked_fill(~causal, float("-inf")).exp()
    scores = torch.einsum("bgrid,bgjd,bgijd->bgrij", q, k, between)
    u = b[..., None] * v
    out = scores @ u[:, :, None]
    new = (k * (past[:, :, -1:] - past).exp()).transpose(-1, -2) @ u
    if state is None:
        return out, new
    out = out + (q * past[:, :, None].exp()) @ state[:, :, None]
    return out, past[:, :, -1, :, None].exp() * state + new
