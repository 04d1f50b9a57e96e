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
    if size is None:
        size = chunk_size(tokens, k.shape[-1], degree, g, alone=state is None and not keep_state)
    outs = []
    for first in range(0, tokens, size):
        part = slice(first, first + size)
        decay = None if g is None else g[:, :, part]
        wanted = keep_state or first + size < tokens
        given = (q[:, :, :, part], k[:, :, part], v[:, :, part], b[:, :, part])
        if decay is not None and decay.dim() == 4:
            out, state = _channel_chunk(*given, decay, state)
        else:
            out, state = _chunk(*given, decay, state, degree, delta, wanted)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=3), state


def chunk_size(tokens: int, dim: int, degree: int, g: Tensor | None, alone: bool) -> int:
    """Tokens a chunk: pairs cost its length, the state its width; one chunk where no state is asked for."""
    if g is not None and g.dim() == 4:
        return 16  # all features of all pairs of a chunk stand in memory
    if alone and tokens <= 2048:
        return max(tokens, 1)
    return min(max(64, 1 << (math.comb(dim + degree - 1, degree) - 1).bit_length()), 512)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, g: Tensor | None, state: Tensor | None, degree: int, delta: bool, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    tokens, transposed = k.shape[2], k.transpose(-1, -2)
    past = None if g is None else g.cumsum(-1)
    ratio = _decay_between(past, tokens, k)
    key = power_features(k, degree) if wanted or (delta and state is not None) else None
    since = None if past is None else past.exp()[..., None]  # decay from the chunk's beginning
    u = v
    if delta:
        if state is not None:
            assert key is not None
            known = key @ state
            u = v - (known if since is None else since * known)
        # u_i = b_i (v_i - what earlier tokens of the chunk left under k_i): a unit lower triangular system
        own = (b[..., None] * (k @ transposed) ** degree * ratio).tril(-1)
        u = torch.linalg.solve_triangular(own, b[..., None] * u, upper=False, unitriangular=True)
    else:
        u = b[..., None] * v
    out = ((q @ transposed[:, :, None]) ** degree * ratio[:, :, None]) @ u[:, :, None]
    if state is not None:
        before = power_features(q, degree) @ state[:, :, None]
        out = out + (before if since is None else since[:, :, None] * before)
    if not wanted:
        return out, None
    assert key is not None
    if past is None:
        new = key.transpose(-1, -2) @ u
        return out, new if state is None else state + new
    new = key.transpose(-1, -2) @ ((past[..., -1:] - past).exp()[..., None] * u)
    return out, new if state is None else past[..., -1, None, None].exp() * state + new


def _decay_between(past: Tensor | None, tokens: int, like: Tensor) -> Tensor:
    """e^{G_i - G_j} where j <= i, else 0: [B, G, C, C], or [1, 1, C, C] of ones without decay."""
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
