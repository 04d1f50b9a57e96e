"""LoRA on a hybrid's attention, by peft, in place: the model keeps its class, and merging leaves plain weights."""

from __future__ import annotations

from typing import Any

from hybridize.errors import HybridizeError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def add_lora(model: Any, rank: int, alpha: int) -> None:
    """Low-rank factors on q, k, v and o of every layer (B is zero, so nothing changes yet).

    Raises:
        HybridizeError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise HybridizeError("train.trains: 'lora' needs peft: pip install 'hybridize[train]'") from None
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(PROJECTIONS), lora_dropout=0.0), model)


def merge_lora(model: Any) -> None:
    """Add the factors to the weights they belong to, and take them away."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for attention in model.attentions():
        for name in PROJECTIONS:
            module = getattr(attention, name)
            if isinstance(module, BaseTunerLayer):
                module.merge()
                setattr(attention, name, module.get_base_layer())
