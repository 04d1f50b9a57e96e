"""What a transformers config says about its model's attention: the geometry that plans are made for."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedConfig

from hybridize.errors import bad
from hybridize.plan import AttentionPlan, Geometry

# fields of a config that say nothing about the function it computes
VOLATILE = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "quantization_config",
    "bos_token_id", "eos_token_id", "pad_token_id", "hybrid_plan", "hybrid_allow_beyond_context", "model_type", "auto_map",
    "return_dict", "output_hidden_states", "output_attentions", "_attn_implementation_autoset", "tokenizer_class", "id2label",
    "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "layer_types",
}  # fmt: skip


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """What a plan must know of a base (or of a hybrid's base), read from its config."""
    if plan := getattr(config, "hybrid_plan", None):
        return AttentionPlan.from_dict(plan).geometry
    values = config.to_dict()
    identity = {key: values[key] for key in sorted(values) if key not in VOLATILE}
    identity["model_type"], identity["windows"] = config.model_type, _base_windows(config)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
    heads = config.num_attention_heads
    return Geometry(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context=_context(config),
        windows=tuple(_base_windows(config)),
        identity=digest,
    )


def _context(config: PreTrainedConfig) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    # dynamic NTK keeps the trained length in the config, and stretches it by itself
    factor = rope.get("factor", 1.0) if rope.get("rope_type") == "dynamic" else 1.0
    return int(config.max_position_embeddings * factor)


def _base_windows(config: PreTrainedConfig) -> list[int | None]:
    window, layers = getattr(config, "sliding_window", None), config.num_hidden_layers
    if window is None:
        return [None] * layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers  # Mistral slides in every layer
    return [window if kind == "sliding_attention" else None for kind in types]


def plan_of(config: PreTrainedConfig) -> AttentionPlan:
    """The plan a hybrid config carries.

    Raises:
        HybridizeError: none, a broken one, or one made for another geometry.
    """
    data = getattr(config, "hybrid_plan", None)
    if data is None:
        raise bad("config.hybrid_plan", None, "a plan; convert a base with hybridize.convert")
    plan = AttentionPlan.from_dict(data)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (config.num_hidden_layers, heads, config.num_key_value_heads or heads, head_dim)
    if plan.geometry.shape() != shape:
        raise bad("plan.geometry", plan.geometry.shape(), f"{shape}, the config's (layers, heads, kv_heads, head_dim)")
    return plan
