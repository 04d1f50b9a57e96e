"""How tensors lie in a GPU's memory where kernels read and write them, and how many programs keep the GPU busy."""

from __future__ import annotations

import torch
from torch import Tensor

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


def dense(x: Tensor) -> Tensor:
    """A head's entries side by side, which is all that kernels ask."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Of each tensor the first three."""
    return [n for x in tensors for n in x.stride()[:3]]


def heads_inside(like: Tensor, heads: int | None = None) -> Tensor:
    """Memory [B, T, H, D] for a result [B, H, T, D]: what the output projection reads without a copy.

    Args:
        like: [B, H, T, D]. heads: H of the result, where it is another.
    """
    b, h, t, d = like.shape
    return torch.empty(b, t, heads or h, d, dtype=like.dtype, device=like.device).transpose(1, 2)
