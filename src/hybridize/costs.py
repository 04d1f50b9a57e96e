"""What a plan is made for, and what it costs there: bytes, FLOPs, and how far it reaches. No torch in this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridize.errors import bad
from hybridize.operators.specs import DTYPE_BYTES, OperatorSpec

ROW_BYTES = 16  # a cache holds two int64 per row: content length and prompt length


@dataclass(frozen=True)
class Geometry:
    """What a plan must know of its base.

    Args:
        model_type: the base's transformers `model_type`.
        layers, heads, kv_heads, head_dim: attention shape; a *group* is one KV head with `heads / kv_heads` query heads.
        context: positions the base was trained to (`max_position_embeddings`).
        windows: per layer, the base's own sliding window, or None where it attends to everything.
        identity: hash of the base's config; a plan only loads onto the same base.
    """

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    windows: tuple[int | None, ...] = ()
    identity: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad(f"geometry.{name}", value, "an integer >= 1")
        if self.heads % self.kv_heads:
            raise bad("geometry.heads", self.heads, f"a multiple of kv_heads={self.kv_heads}")
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.layers)
        if len(self.windows) != self.layers:
            raise bad("geometry.windows", list(self.windows), f"one entry for each of {self.layers} layers")

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads

    def shape(self) -> tuple[int, int, int, int]:
        return self.layers, self.heads, self.kv_heads, self.head_dim


class Costs:
    """Sums over the groups of a plan."""

    geometry: Geometry
    operators: Mapping[str, OperatorSpec]
    assignment: tuple[tuple[str, ...], ...]

    def specs(self) -> list[OperatorSpec]:
        """Every spec in use, once."""
        used = {name for row in self.assignment for name in row}
        return [spec for name, spec in self.operators.items() if name in used]

    def cache_bytes(self, context: int, batch: int = 1, dtype: str = "bfloat16", prompt: int | None = None) -> int:
        """Bytes a growing HybridCache holds after `context` tokens in each of `batch` rows.

        Args:
            prompt: tokens of the context that are the prompt, default all of it. An operator that drops prompt tokens does
                so when the prompt ends: a static cache of n columns holds what a longer prompt than n would.
        """
        head_dim, width = self.geometry.head_dim, _width(dtype)
        token = 2 * head_dim * width  # a key and a value
        held = self._sum(
            lambda spec: spec.cached_tokens(context, prompt) * (token + spec.token_values * width) + spec.state_bytes(head_dim)
        )
        return batch * (ROW_BYTES + held)

    def prefill_flops(self, context: int) -> int:
        """Attention FLOPs (QK and AV, two per multiply-add) of one row's prefill; projections not counted.

        Where what is seen depends on the text (indexed attention), at most so many.
        """
        return self._flops(lambda spec: spec.visible_pairs(context), context, context * (context + 1) // 2)

    def decode_flops(self, context: int) -> int:
        """Attention FLOPs of one decoded token that sees `context` tokens, itself included."""
        return self._flops(lambda spec: spec.visible_keys(context), 1, context)

    def check_context(self, context: int, field_name: str = "prompt") -> None:
        """Refuse a prompt that would meet RoPE distances the base never saw in training.

        Raises:
            HybridizeError: some operator's distance exceeds the trained context.
        """
        for spec in self.specs():
            if not self.reaches(context, spec):
                raise bad(
                    field_name,
                    f"{context} tokens",
                    f"at most {self.geometry.context}, the trained context of the base ({spec.label()} attention meets "
                    "larger RoPE distances; a plan of re-based windows alone has no such limit)",
                )

    def reaches(self, context: int, spec: OperatorSpec | None = None) -> bool:
        """Whether all operators (or one) meet only RoPE distances at `context` tokens that the base was trained on."""
        specs = self.specs() if spec is None else [spec]
        return all(each.longest_distance(context) <= self.geometry.context for each in specs)

    def _flops(self, pairs: Any, tokens: int, all_pairs: int) -> int:
        d, size = self.geometry.head_dim, self.geometry.group_size
        return self._sum(
            lambda spec: (
                4 * d * size * pairs(spec) + tokens * spec.state_flops(d, size) + spec.scoring_flops(all_pairs, d, size)
            )
        )

    def _sum(self, cost: Any) -> int:
        return sum(cost(self.operators[name]) for row in self.assignment for name in row)


def _width(dtype: str) -> int:
    """Bytes of a value.

    Raises:
        HybridizeError: an unknown dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise bad("dtype", dtype, f"one of {sorted(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
