"""From a base model to a hybrid and back, in memory, sharing every weight that keeps its layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybridize.errors import HybridizeError, bad
from hybridize.families import HYBRID_TYPES, family_of
from hybridize.geometry import geometry_of
from hybridize.modeling import HybridForCausalLM
from hybridize.operators.specs import DTYPE_BYTES
from hybridize.plan import AttentionPlan

HYBRID_FIELDS = ("hybrid_plan", "hybrid_allow_beyond_context", "auto_map", "architectures", "model_type")


def convert(model: PreTrainedModel, plan: AttentionPlan) -> Any:
    """A hybrid model that runs `plan`; weights are shared with `model`, except those a mixed layer reorders.

    Args:
        model: a base causal LM (Llama, Qwen2, Qwen3, Mistral), in any dtype, on any device.
        plan: a plan made for this base (`geometry_of(model.config)`).

    Raises:
        HybridizeError: unknown family, a hybrid already, a plan of another base, or quantized weights under a plan that
            mixes operators inside a layer.
    """
    if isinstance(model, HybridForCausalLM):
        raise bad("model", "a hybrid model", "a base model (use model.set_plan to re-cut a hybrid)")
    family = family_of(model.config.model_type)
    if not isinstance(model, family.base_model):
        raise bad("model", type(model).__name__, family.base_model.__name__)
    plan.check_base(geometry_of(model.config))
    config = hybrid_config(model.config, plan)
    with torch.device("meta"):
        hybrid = family.model(config)
    body, base = hybrid.model, model.model
    body.embed_tokens, body.norm, body.rotary_emb = base.embed_tokens, base.norm, base.rotary_emb
    hybrid.lm_head = model.lm_head
    for layer, base_layer in zip(body.layers, base.layers, strict=True):
        _adopt(layer.self_attn, base_layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
        layer.self_attn.shares_weights = True
        _adopt(layer, base_layer, ("mlp", "input_layernorm", "post_attention_layernorm"))
        layer.materialise()
    hybrid.generation_config = model.generation_config
    for name in ("hf_quantizer", "is_quantized", "hf_device_map"):
        if hasattr(model, name):
            setattr(hybrid, name, getattr(model, name))
    hybrid.train(model.training)
    hybrid.permute_heads()
    return hybrid


def extended(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A base model, in place, under a config that differs in RoPE and context alone (`rope.raised`); to be trained."""
    rotary: Any = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(rotary.inv_freq.device)
    model.config = config
    return model


def _adopt(target: nn.Module, source: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


def hybrid_config(config: PreTrainedConfig, plan: AttentionPlan) -> PreTrainedConfig:
    """The base's config with a plan, under our own model_type: a stock loader must not run full attention silently."""
    family = family_of(config.model_type)
    values = {key: value for key, value in config.to_dict().items() if key not in HYBRID_FIELDS}
    made = family.config(**values, hybrid_plan=plan.to_dict())
    made.architectures = [family.model.__name__]
    return made


def base_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Inverse of `hybrid_config`."""
    family = family_of(config.model_type)
    values = {key: value for key, value in config.to_dict().items() if key not in HYBRID_FIELDS}
    made = family.base_config(**values)
    made.architectures = [family.base_model.__name__]
    return made


def to_base(model: Any) -> PreTrainedModel:
    """The base model again, exactly, in its own class and layout (copies the weights).

    Raises:
        HybridizeError: not a hybrid model.
    """
    if model.config.model_type not in HYBRID_TYPES:
        raise bad("model", model.config.model_type, f"a hybrid, one of {sorted(HYBRID_TYPES)}")
    return with_weights(family_of(model.config.model_type).base_model, base_config(model.config), model)


def is_learned(key: str) -> bool:
    """Whether an entry of a state dict is beside the base's weights."""
    return ".branches." in key or ".far." in key


def with_weights(cls: type[PreTrainedModel], config: PreTrainedConfig, model: Any) -> Any:
    """A stock model of class `cls` that carries the hybrid's weights, in the base's layout."""
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if not is_learned(key)}
    made = cls(config).to(device=model.device, dtype=model.dtype)
    missing, unexpected = made.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise HybridizeError(f"export: got weights that do not fit, missing {missing}, unexpected {unexpected}")
    made.tie_weights()
    made.generation_config = model.generation_config
    return made.eval()


def memory_estimate(config: PreTrainedConfig, plan: AttentionPlan, context: int, batch: int, dtype: str) -> dict[str, int]:
    """Bytes that serving needs: weights, cache under `plan`, and the base's cache beside it."""
    with torch.device("meta"):
        model = family_of(config.model_type).base_model(base_config(config))
    parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    return {
        "parameters": parameters,
        "weights": parameters * DTYPE_BYTES[dtype],
        "cache": plan.cache_bytes(context, batch, dtype),
        "base_cache": AttentionPlan.base(plan.geometry).cache_bytes(context, batch, dtype),
    }
