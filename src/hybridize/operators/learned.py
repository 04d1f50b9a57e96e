"""Learned parameters beside the base's weights: one module a group, in fp32 whatever the model runs in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.operators.contract import Operator


class Learned(nn.Module):
    """What a group learns; `spec.learned` says for which specs it still means the same."""

    spec: Any

    def reset_parameters(self) -> None:
        """First values; nothing where there is no memory yet."""
        raise NotImplementedError

    @property
    def is_meta(self) -> bool:
        return next(self.parameters()).is_meta

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the model to its device, not to a narrower dtype."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype or not moved.dtype.is_floating_point or moved.dtype == torch.float64:
                return moved
            return torch.empty_like(moved, dtype=tensor.dtype) if tensor.is_meta else tensor.to(moved.device)

        return super()._apply(move, recurse)


def stacked(branches: Iterable[nn.Module], name: str) -> Tensor:
    """A parameter of all groups of a span, [G, ...]."""
    return torch.stack([getattr(branch, name) for branch in branches])


def branches_of(operators: Iterable[Operator]) -> dict[int, Learned]:
    """What the operators of a layer have learned, by group."""
    found = (getattr(operator, "branches", {}).items() for operator in operators)
    return {int(group): branch for branches in found for group, branch in branches}
