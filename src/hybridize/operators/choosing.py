"""Which tokens a query chooses by its scores: few of them, with a share p of their softmax (RTPurbo, arXiv 2605.16928).

    m_b = largest score of block b,   M = largest of all,   bin(b) = floor((M - m_b) / WIDTH)

The histogram of shares by bin is read from the top until p is reached, and whole bins are taken: no sort, and blocks that tie
(the same token twice has one index key in the first layer) are in or out together, whatever the order of sums was. Plain
torch: the definition that kernels are held to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.operators.specs import Indexed

WIDTH = 1 / 8  # of a bin: what is taken beyond the smallest set lies within e^(-1/8) of the last of it
BINS = 128  # all that lies further down is in the last one
FINE = 1024  # steps a unit of score, by which tokens are ranked where their number is bounded


def chosen(scores: Tensor, positions: Tensor, spec: Indexed) -> Tensor:
    """bool [B, H, T, S]: what each query sees.

    Blocks that are always seen come first, then others by their largest score; a block is in or out as a whole, and nothing
    behind the query is in.

    Args:
        scores: [B, H, T, S], of the tokens at content positions 0 to S - 1.
        positions: of the queries, [B, T] or [1, T].
    """
    block, tokens = spec.block, scores.shape[-1]
    n = positions[:, None, :, None]
    seen = torch.arange(tokens, device=scores.device) <= n
    scores = scores.float().masked_fill(~seen, float("-inf"))
    short = -tokens % block
    share = F.pad(scores.softmax(-1), (0, short)).unflatten(-1, (-1, block)).sum(-1)  # [B, H, T, blocks]
    peak = F.pad(scores, (0, short), value=float("-inf")).unflatten(-1, (-1, block)).amax(-1)
    below = peak.amax(-1, keepdim=True) - peak
    first = torch.arange(share.shape[-1], device=scores.device) * block  # of each block
    always = ((first < spec.sinks) | (first == n // block * block)) & (first <= n)
    below = below.masked_fill(always, 0.0)
    taken = _share_taken(share, below, spec.top_p) if spec.top_p < 1 else torch.ones_like(below, dtype=torch.bool)
    if spec.min_tokens or spec.max_tokens:
        fine = (below * FINE).floor().masked_fill(always, -1.0)
        place = fine.argsort(dim=-1, stable=True).argsort(dim=-1) * block
        taken = taken | (place < spec.min_tokens)
        taken = taken & (place < spec.max_tokens) if spec.max_tokens else taken
    return (taken | always).repeat_interleave(block, dim=-1)[..., :tokens] & seen


def _share_taken(share: Tensor, below: Tensor, p: float) -> Tensor:
    """Blocks of the first bins with a share of p or more together, bool [..., blocks]; `below`: M - m_b."""
    bins = (below / WIDTH).floor().clamp_max(BINS - 1).long()
    held = share.new_zeros(*share.shape[:-1], BINS).scatter_add(-1, bins, share)
    return (held.cumsum(-1) - held < p).gather(-1, bins)


def random_scores(positions: Tensor, heads: int, tokens: int) -> Tensor:
    """Scores in 0..1 [B, H, T, tokens] that know nothing, the same for a query however a prompt is cut into calls."""
    device = positions.device
    query = positions[:, None, :, None] * 73_856_093
    head = torch.arange(heads, device=device)[:, None, None] * 83_492_791
    mixed = query ^ head ^ (torch.arange(tokens, device=device) * 19_349_663)
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 15)) * 1_274_126_177) & 0x7FFFFFFF
    return mixed.float() / 0x80000000


def page_bounds(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Quest's upper bound of q.k within each block (arXiv 2406.10774, eq. 1), at each of its tokens: [B, H, T, S], fp32.

    q [B, H, T, D], k [B, H, S, D], both rotated. Tokens behind the last one stand for nothing.
    """
    tokens = k.shape[2]
    pages = F.pad(k.float(), (0, 0, 0, -tokens % block)).unflatten(2, (-1, block))
    inside = (torch.arange(pages.shape[2] * block, device=k.device) < tokens).view(-1, block, 1)
    low, high = pages.masked_fill(~inside, float("inf")).amin(3), pages.masked_fill(~inside, float("-inf")).amax(3)
    q = q.float()
    bounds = q.clamp_min(0) @ high.transpose(-1, -2) + q.clamp_max(0) @ low.transpose(-1, -2)
    return bounds.repeat_interleave(block, dim=-1)[..., :tokens]
