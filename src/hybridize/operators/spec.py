"""What every operator spec says of itself: plain frozen data with its costs. No torch in this file."""

from __future__ import annotations

from typing import Any, ClassVar

from hybridize.errors import bad


class Spec:
    """Costs of one group; a subclass overrides what differs from an operator that keeps nothing and looks at nothing."""

    kind: ClassVar[str]
    code: ClassVar[str]

    @property
    def phased(self) -> bool:
        """Whether a query's view depends on whether it is in the prompt."""
        return False

    @property
    def keeps_everything(self) -> bool:
        """Whether keys and values of all tokens are held, at least until the prompt ends."""
        return False

    @property
    def rebased_distance(self) -> int | None:
        """Largest distance between a query and a sink, None where sinks keep their true distance."""
        return None

    @property
    def shared(self) -> Any:
        """This spec without what its groups differ in: groups that agree in the rest are run together. None: by their name."""
        return None

    @property
    def token_values(self) -> int:
        """Values that a cached token has beside its key and value."""
        return 0

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        """Tokens whose key and value are held for one group after `context` tokens, `prompt` of them the prompt's."""
        return 0

    def state_bytes(self, head_dim: int) -> int:
        """Bytes of one group's state of fixed size, beside keys and values."""
        return 0

    def visible_pairs(self, context: int) -> int:
        """Query-key pairs of one head in a prefill of `context` tokens."""
        return 0

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        """Keys that a decoded token at position `context` - 1 reads."""
        return 0

    def state_flops(self, head_dim: int, group_size: int) -> int:
        """FLOPs a token costs one group to write its fixed state once and read it for every query head."""
        return 0

    def scoring_flops(self, pairs: int, head_dim: int, group_size: int) -> int:
        """FLOPs one group spends to choose among `pairs` of a query and an earlier key."""
        return 0

    def longest_distance(self, context: int) -> int:
        """The largest RoPE distance met at `context` tokens."""
        return 0

    def label(self) -> str:
        raise NotImplementedError

    def without(self, component: str) -> Any:
        """This operator with one component off, for ablation; None where it has no such component."""
        return None


def check_integer(field: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise bad(field, value, f"an integer >= {low}")


def check_choice(field: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise bad(field, value, f"one of {', '.join(map(repr, choices))}")
