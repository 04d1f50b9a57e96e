"""Linear maps over one input: the modules' own, or, for the single row of a decoding step, one launch over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.kernels.dispatch import kernels_for


def row_kernels(hidden: Tensor, cache: Any, head_dim: int) -> Any:
    """The kernels for a decoding step of one sequence, hidden [1, 1, E]; None: the modules run as they are."""
    if cache is None or hidden.shape[0] != 1 or hidden.shape[1] != 1 or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled(hidden.device.type):  # it would choose another dtype
        return None
    return kernels_for("matvec", hidden[..., :head_dim])


def project(hidden: Tensor, modules: Sequence[nn.Module], kernels: Any) -> Sequence[Tensor]:
    """Each module's output, [B, T, N]; with `kernels` in one launch, where all of them are plain linear layers."""
    if kernels is None or not all(_plain(module, hidden) for module in modules):
        return [module(hidden) for module in modules]
    weights: list[Any] = [module.weight for module in modules]
    out = kernels.matvec(hidden[0], weights).split([len(w) for w in weights], dim=1)
    biases: list[Any] = [module.bias for module in modules]
    return [(x if bias is None else x + bias)[None] for x, bias in zip(out, biases, strict=True)]


def gated_mlp(mlp: Any, hidden: Tensor, kernels: Any) -> Tensor:
    """down(act(gate(x)) * up(x)), as in every supported family."""
    if kernels is None or not _untouched(mlp):
        out: Tensor = mlp(hidden)
        return out
    gate, up = project(hidden, (mlp.gate_proj, mlp.up_proj), kernels)
    return project(mlp.act_fn(gate) * up, (mlp.down_proj,), kernels)[0]


def _plain(module: nn.Module, x: Tensor) -> bool:
    """No adapter, quantisation, offloading or hook: what runs is its weight alone."""
    if type(module) is not nn.Linear or not _untouched(module):
        return False
    weight = module.weight
    return weight.dtype == x.dtype and weight.device == x.device and weight.stride(1) == 1


def _untouched(module: nn.Module) -> bool:
    return "forward" not in module.__dict__ and not module._forward_hooks and not module._forward_pre_hooks
