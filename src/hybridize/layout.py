"""Which order heads have in memory: those of one operator side by side, while state dicts stay in the base's layout."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.errors import bad
from hybridize.plan import Geometry

MIXED_PLAN_NEEDS = (
    "whole weights on one device each: this plan mixes operators inside a layer, so rows are reordered in memory "
    "(convert on the CPU and save; load that folder without disk offload)"
)


class HeadLayout(nn.Module):
    """An attention module whose rows of q, k, v and columns of o can be reordered by groups.

    State dicts are always in the base's layout; the permutation is undone on the way out and redone on the way in.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.head_dim, self.group_size = geometry.head_dim, geometry.group_size
        self.group_order = tuple(range(geometry.kv_heads))  # the order weights have in memory now
        self.wanted_order = self.group_order
        self.shares_weights = False  # with a base model that is in use itself (convert)
        self.register_state_dict_post_hook(_to_base_layout)
        self.register_load_state_dict_pre_hook(_from_base_layout)

    @torch.no_grad()
    def permute(self) -> None:
        """Bring weights from their present order into the plan's.

        Raises:
            HybridizeError: weights that are offloaded, or shared with a base that is spread over devices.
        """
        if self.group_order == self.wanted_order:
            return
        index = [self.group_order.index(group) for group in self.wanted_order]
        for name, dim, heads in self.head_axes():
            module = getattr(self, name)
            hooked = hasattr(module, "_hf_hook")
            if any(p.is_meta for p in module.parameters()) or (hooked and self.shares_weights):
                raise bad("device_map", "offloaded or split weights", MIXED_PLAN_NEEDS)
            if self.shares_weights:
                if list(module.children()):
                    raise bad("plan", "another order of heads", "the plan set before adapters were attached")
                # a new module over the same weights: the base that this one was adopted from keeps its own order
                module = copy.copy(module)
                module._parameters = {
                    key: None if p is None else nn.Parameter(p, p.requires_grad) for key, p in module._parameters.items()
                }
                setattr(self, name, module)
            for key, parameter in module.named_parameters():
                if lies_on_heads(key, dim):
                    parameter.data = select_heads(parameter.data, index, heads, self.head_dim, dim)
        self.group_order = self.wanted_order
        self.shares_weights = False

    def head_axes(self) -> list[tuple[str, int, int]]:
        """(projection, axis of its weight that heads lie on, heads a group has there)."""
        return [("q_proj", 0, self.group_size), ("k_proj", 0, 1), ("v_proj", 0, 1), ("o_proj", 1, self.group_size)]

    def base_layout(self, state_dict: dict[str, Tensor], prefix: str, back: bool) -> None:
        """In place: this module's entries of a state dict from memory order to the base's (`back`), or the other way.

        LoRA factors follow the weight they belong to, so adapters are saved and loaded in the base's layout too.
        """
        order = list(self.group_order)
        if order == sorted(order):
            return
        index = [order.index(group) for group in range(len(order))] if back else order
        for name, dim, heads in self.head_axes():
            start = f"{prefix}{name}."
            for key in [key for key in state_dict if key.startswith(start) and lies_on_heads(key[len(start) :], dim)]:
                state_dict[key] = select_heads(state_dict[key], index, heads, self.head_dim, dim)


def select_heads(weight: Tensor, order: list[int], heads: int, head_dim: int, dim: int) -> Tensor:
    """Reorder a weight's groups along `dim`, where each group takes `heads * head_dim` entries."""
    index = torch.arange(weight.shape[dim], device=weight.device).view(len(order), heads * head_dim)[order]
    return weight.index_select(dim, index.reshape(-1))


def lies_on_heads(key: str, dim: int) -> bool:
    """Whether a parameter of a projection, adapters included, has its heads along `dim` (0 for q, k, v; 1 for o)."""
    if "lora_" in key:
        return key.startswith("lora_B." if dim == 0 else "lora_A.")
    return dim == 0 or key.endswith("weight")  # o_proj's bias belongs to no head


def _to_base_layout(module: Any, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any) -> None:
    module.base_layout(state_dict, prefix, back=True)


def _from_base_layout(module: Any, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    module.base_layout(state_dict, prefix, back=False)
