"""Losses that never hold the logits of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2048  # tokens whose logits stand in memory together


def chunked_cross_entropy(hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, chunk: int = CHUNK) -> Tensor:
    """Cross entropy of each token, fp32 [N], from hidden [N, E] and targets [N]; logits are recomputed in the backward."""

    def part(states: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(states).float(), wanted, reduction="none")

    pieces = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    losses = [checkpoint(part, states, wanted, use_reentrant=False) for states, wanted in pieces]
    return torch.cat(losses) if losses else hidden.sum(-1).float()


def chunked_kl(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    teacher: Tensor,
    teacher_head: Callable[[Tensor], Tensor],
    chunk: int = CHUNK,
) -> Tensor:
    """KL(teacher || student) over the whole vocabulary at each token, fp32 [N], from hidden states [N, E] of both."""

    def part(mine: Tensor, theirs: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher_head(theirs).float().log_softmax(-1)
        return F.kl_div(head(mine).float().log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)

    pieces = zip(hidden.split(chunk), teacher.split(chunk), strict=True)
    losses = [checkpoint(part, mine, theirs, use_reentrant=False) for mine, theirs in pieces]
    return torch.cat(losses) if losses else hidden.sum(-1).float()


def chunked_top_kl(
    hidden: Tensor, head: Callable[[Tensor], Tensor], ids: Tensor, logits: Tensor, chunk: int = CHUNK
) -> Tensor:
    """KL(teacher || student) over the teacher's K most likely tokens at each token, fp32 [N] (RTPurbo's stage 2).

    The teacher's share is among those K, the student's among all: what it gives to others is lost.

    Args:
        hidden: [N, E]. ids, logits: [N, K], of the teacher.
    """

    def part(mine: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        wanted = logits.float().log_softmax(-1)
        given = head(mine).float().log_softmax(-1).gather(-1, ids)
        return (wanted.exp() * (wanted - given)).sum(-1)

    pieces = zip(hidden.split(chunk), ids.split(chunk), logits.split(chunk), strict=True)
    losses = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat(losses) if losses else hidden.sum(-1).float()


def row_means(losses: Tensor, rows: Tensor, count: int) -> Tensor:
    """Mean of the losses [N] of each row, [count]; `rows` [N] says whose each is, a row without any gives 0."""
    sums = losses.new_zeros(count).index_add(0, rows, losses)
    return sums / torch.bincount(rows, minlength=count).clamp_min(1)
