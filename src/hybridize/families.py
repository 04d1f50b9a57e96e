"""The supported base families: a hybrid config and model class each, and their Auto registration."""

from __future__ import annotations

from typing import NamedTuple

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from hybridize.errors import HybridizeError
from hybridize.modeling import HybridForCausalLM, HybridModel


@strict
class HybridLlamaConfig(LlamaConfig):
    """Llama (and SmolLM2) with a plan."""

    model_type = "hybridize_llama"
    hybrid_plan: dict | None = None
    hybrid_allow_beyond_context: bool = False


@strict
class HybridQwen2Config(Qwen2Config):
    """Qwen 2 and 2.5 with a plan."""

    model_type = "hybridize_qwen2"
    hybrid_plan: dict | None = None
    hybrid_allow_beyond_context: bool = False


@strict
class HybridQwen3Config(Qwen3Config):
    """Qwen 3 with a plan."""

    model_type = "hybridize_qwen3"
    hybrid_plan: dict | None = None
    hybrid_allow_beyond_context: bool = False


@strict
class HybridMistralConfig(MistralConfig):
    """Mistral with a plan."""

    model_type = "hybridize_mistral"
    hybrid_plan: dict | None = None
    hybrid_allow_beyond_context: bool = False


class HybridLlamaModel(HybridModel, LlamaModel):
    config_class = HybridLlamaConfig


class HybridQwen2Model(HybridModel, Qwen2Model):
    config_class = HybridQwen2Config


class HybridQwen3Model(HybridModel, Qwen3Model):
    config_class = HybridQwen3Config


class HybridMistralModel(HybridModel, MistralModel):
    config_class = HybridMistralConfig


class HybridLlamaForCausalLM(HybridForCausalLM, LlamaForCausalLM):
    config_class, body_class = HybridLlamaConfig, HybridLlamaModel


class HybridQwen2ForCausalLM(HybridForCausalLM, Qwen2ForCausalLM):
    config_class, body_class = HybridQwen2Config, HybridQwen2Model


class HybridQwen3ForCausalLM(HybridForCausalLM, Qwen3ForCausalLM):
    config_class, body_class = HybridQwen3Config, HybridQwen3Model


class HybridMistralForCausalLM(HybridForCausalLM, MistralForCausalLM):
    config_class, body_class = HybridMistralConfig, HybridMistralModel


class Family(NamedTuple):
    base_config: type[PreTrainedConfig]
    base_model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    body: type[PreTrainedModel]
    model: type[PreTrainedModel]


FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, LlamaForCausalLM, HybridLlamaConfig, HybridLlamaModel, HybridLlamaForCausalLM),
    "qwen2": Family(Qwen2Config, Qwen2ForCausalLM, HybridQwen2Config, HybridQwen2Model, HybridQwen2ForCausalLM),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, HybridQwen3Config, HybridQwen3Model, HybridQwen3ForCausalLM),
    "mistral": Family(MistralConfig, MistralForCausalLM, HybridMistralConfig, HybridMistralModel, HybridMistralForCausalLM),
}
HYBRID_TYPES = {family.config.model_type: name for name, family in FAMILIES.items()}


def family_of(model_type: str) -> Family:
    """The family of a base's or a hybrid's `model_type`.

    Raises:
        HybridizeError: a family that is not supported.
    """
    name = HYBRID_TYPES.get(model_type, model_type)
    if name not in FAMILIES:
        raise HybridizeError(f"model_type: got {model_type!r}, expected one of {sorted(FAMILIES)}")
    return FAMILIES[name]


def register() -> None:
    """Let transformers' Auto classes load converted folders; runs on `import hybridize`."""
    for family in FAMILIES.values():
        AutoConfig.register(family.config.model_type, family.config, exist_ok=True)
        AutoModel.register(family.config, family.body, exist_ok=True)
        AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
