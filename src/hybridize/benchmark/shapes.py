"""Shapes of known models, for speed on random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from hybridize.conversion import convert
from hybridize.errors import bad
from hybridize.families import family_of
from hybridize.geometry import geometry_of
from hybridize.plan import AttentionPlan


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; `family` is transformers' model_type."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def config(self, context: int) -> Any:
        cls = {"llama": LlamaConfig, "qwen3": Qwen3Config}[self.family]
        return cls(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=context,
            rope_theta=500_000.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def step_parameters(self) -> int:
        """Weights that one decoded token reads."""
        return self.layers * self.layer_parameters + self.hidden * self.vocabulary


SHAPES = {
    "tiny": Shape("llama", 4, 64, 128, 4, 2, 16, 256),
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 6144, 16, 8, 128, 151936),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    # the heads of Qwen3-Coder-30B-A3B, whose mixtures of experts are dense layers here
    "qwen3-30b-heads": Shape("qwen3", 48, 2048, 6144, 32, 4, 128, 151936),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
}


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise bad("shape", name, f"one of {sorted(SHAPES)}")
    return SHAPES[name]


def random_models(shape: Shape, context: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """(transformers' own model, a hybrid under its plan) over one set of small random weights, made on the device."""
    config = shape.config(context)
    with torch.device("meta"):
        base = family_of(config.model_type).base_model(config)
    base = base.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    with torch.device(device):
        base.model.rotary_emb = type(base.model.rotary_emb)(config)
    return base.eval(), convert(base, AttentionPlan.base(geometry_of(config))).eval()
