"""RoPE for contexts beyond the trained one: scaled, untrained, or with a larger base, to be trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from hybridize.errors import bad

ROPES = ("yarn", "linear", "dynamic")


def check_rope(rope: Any) -> None:
    """Refuse what `stretched` could not read.

    Raises:
        HybridizeError: an unknown type, or a factor that is not above 1.
    """
    if not isinstance(rope, Mapping) or set(rope) != {"rope_type", "factor"} or rope["rope_type"] not in ROPES:
        raise bad("rope", rope, f"a mapping of rope_type (one of {ROPES}) and factor")
    if not isinstance(rope["factor"], (int, float)) or isinstance(rope["factor"], bool) or rope["factor"] <= 1:
        raise bad("rope.factor", rope["factor"], "a number above 1")


def stretched(config: Any, rope: Mapping[str, Any]) -> Any:
    """A copy of a config whose RoPE reaches `factor` times as far: YaRN, linear interpolation or dynamic NTK, untrained.

    Raises:
        HybridizeError: the config's RoPE is scaled already.
    """
    check_rope(rope)
    made = copy.deepcopy(config)
    made.rope_parameters = {**_unscaled(config, "rope"), **rope}
    if rope["rope_type"] != "dynamic":  # dynamic NTK reads the trained length here, and scales by itself
        made.rope_parameters["original_max_position_embeddings"] = made.max_position_embeddings
        made.max_position_embeddings = int(made.max_position_embeddings * rope["factor"])
    return made


def raised(config: Any, context: int, theta: float | None = None) -> Any:
    """A copy of a config for `context` tokens, with a larger RoPE base; to be trained on rows of that length.

    Args:
        theta: the new base; None: the least that covers `context` (`covered`).

    Raises:
        HybridizeError: a context that the base has already, or that `theta` does not cover, or a RoPE that is scaled.
    """
    rope, trained = _unscaled(config, "context"), config.max_position_embeddings
    if context <= trained:
        raise bad("context", context, f"more than {trained}, the trained context of the base")
    dim, before = _turned(config), float(rope["rope_theta"])
    if theta is None:
        theta = float(math.ceil(before * (context / trained) ** (dim / (dim - 2))))
    if theta <= before:
        raise bad("rope_theta", theta, f"more than {before:g}, the base's own")
    if context > (most := covered(trained, before, theta, dim)):
        raise bad("context", context, f"at most {most}, what rope_theta {theta:g} covers from {trained} at {before:g}")
    made = copy.deepcopy(config)
    made.rope_parameters = {**rope, "rope_theta": theta}
    made.max_position_embeddings = context
    return made


def covered(trained: int, before: float, after: float, dim: int) -> int:
    """Tokens at which the slowest of the `dim` / 2 pairs has turned under base `after` as far as at `trained` under `before`.

    A pair i turns by base^(-2i / dim) a token (arXiv 2104.09864); for the last this is the rule of NTK-aware scaling.
    """
    return math.floor(trained * (after / before) ** ((dim - 2) / dim) + 1e-6)


def _turned(config: Any) -> int:
    """Dimensions of a head that RoPE turns."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _unscaled(config: Any, field: str) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise bad(field, rope["rope_type"], "a base whose RoPE is not scaled already")
    return rope
