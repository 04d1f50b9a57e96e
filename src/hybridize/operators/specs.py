"""Operator specs: what a group runs, as plain frozen data with its costs. No torch in this file.

Words: a *window* of size w is the token itself and the w-1 before it; *sinks* are the first tokens of each row,
always visible; *re-based* sinks are scored as if they stood at a fixed distance behind the window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from hybridize.errors import bad

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Full:
    """Causal attention over every earlier token."""

    kind: ClassVar[str] = "full"
    code: ClassVar[str] = "F"

    @property
    def phased(self) -> bool:
        """Whether a query's view depends on whether it is in the prompt."""
        return False

    @property
    def keeps_everything(self) -> bool:
        return True

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        """Tokens whose key and value are held for one group after `context` tokens, `prompt` of them the prompt's."""
        return context

    def visible_pairs(self, context: int) -> int:
        """Query-key pairs of one head in a prefill of `context` tokens."""
        return context * (context + 1) // 2

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        """Keys that a decoded token at position `context` - 1 reads."""
        return context

    def longest_distance(self, context: int) -> int:
        """The largest RoPE distance met at `context` tokens."""
        return context

    def label(self) -> str:
        return "full"

    def without(self, component: str) -> OperatorSpec | None:
        """This operator with one component off, for ablation; None where it has no such component."""
        return None


@dataclass(frozen=True)
class Window:
    """Sliding window with sinks.

    Args:
        size: tokens in the window, the query's own token included (>= 1).
        sinks: first tokens of the row that stay visible (>= 0).
        sink_positions: "absolute" keeps a sink's true RoPE distance; "rebased" holds it at `size + sinks` at most
            (the cache positions of StreamingLLM, Xiao et al. 2023), so that no distance grows with the context.
        decode: "window" everywhere, or "full" (SWAA's FA decode): prompt tokens see the window, generated tokens
            see everything. "full" saves prefill compute only: no cache, no decode time.

    Raises:
        HybridizeError: a field is out of its range.
    """

    size: int
    sinks: int = 4
    sink_positions: str = "absolute"
    decode: str = "window"

    kind: ClassVar[str] = "window"
    code: ClassVar[str] = "w"

    def __post_init__(self) -> None:
        for name, low in (("size", 1), ("sinks", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise bad(f"window.{name}", value, f"an integer >= {low}")
        if self.sink_positions not in ("absolute", "rebased"):
            raise bad("window.sink_positions", self.sink_positions, "'absolute' or 'rebased'")
        if self.decode not in ("window", "full"):
            raise bad("window.decode", self.decode, "'window' or 'full'")
        if self.decode == "full" and self.sink_positions == "rebased":
            raise bad("window.sink_positions", "rebased", "'absolute' with decode='full' (full decode has true distances)")

    @property
    def phased(self) -> bool:
        return self.decode == "full"

    @property
    def keeps_everything(self) -> bool:
        return self.decode == "full"

    @property
    def rebased_distance(self) -> int | None:
        """Largest distance between a query and a sink, None where sinks keep their true distance."""
        return self.size + self.sinks if self.sink_positions == "rebased" and self.sinks else None

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        return context if self.decode == "full" else min(context, self.size + self.sinks)

    def visible_pairs(self, context: int) -> int:
        # query n sees min(n + 1, size) window keys, and the sinks that lie before its window
        inside = min(context, self.size)
        window = inside * (inside + 1) // 2 + (context - inside) * self.size
        beyond = context - self.size  # query n has clamp(n + 1 - size, 0, sinks) sinks before its window
        ramp = max(0, min(beyond, self.sinks))
        sinks = ramp * (ramp + 1) // 2 + max(0, beyond - ramp) * self.sinks
        return window + sinks

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        return context if self.decode == "full" else min(context, self.size + self.sinks)

    def longest_distance(self, context: int) -> int:
        if self.decode == "full":
            return context
        return min(context, self.rebased_distance or (context if self.sinks else self.size))

    def label(self) -> str:
        text = f"window {self.size} + {self.sinks} sinks"
        if self.sink_positions == "rebased":
            text += ", re-based"
        return text + (", full decode" if self.decode == "full" else "")

    def without(self, component: str) -> OperatorSpec | None:
        if component == "sinks" and self.sinks:
            return replace(self, sinks=0, sink_positions="absolute")
        if component == "window" and self.size > 1:
            return replace(self, size=1)  # a token always sees itself
        return None


@dataclass(frozen=True)
class SnapKV:
    """Full attention in the prompt; then `budget` of its tokens stay for each group, and all decoded ones.

    Args:
        budget: prompt tokens kept, the observing ones included (> observe).
        observe: last prompt tokens, whose attention decides.
        pool: neighbours over which votes are averaged (odd).

    Raises:
        HybridizeError: a field is out of its range.
    """

    budget: int
    observe: int = 32
    pool: int = 7

    kind: ClassVar[str] = "snapkv"
    code: ClassVar[str] = "s"

    def __post_init__(self) -> None:
        for name, low in (("observe", 1), ("budget", self.observe + 1), ("pool", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise bad(f"snapkv.{name}", value, f"an integer >= {low}")
        if self.pool % 2 == 0:
            raise bad("snapkv.pool", self.pool, "an odd number")

    @property
    def phased(self) -> bool:
        return True

    @property
    def keeps_everything(self) -> bool:
        return True

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        prompt = context if prompt is None else prompt
        return context if context < prompt else min(prompt, self.budget) + context - prompt

    def visible_pairs(self, context: int) -> int:
        return context * (context + 1) // 2

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        return self.cached_tokens(context, prompt)

    def longest_distance(self, context: int) -> int:
        return context

    def label(self) -> str:
        return f"SnapKV {self.budget}"

    def without(self, component: str) -> OperatorSpec | None:
        return None


OperatorSpec = Full | Window | SnapKV
SPECS: dict[str, type[OperatorSpec]] = {spec.kind: spec for spec in (Full, Window, SnapKV)}


def spec_to_dict(spec: OperatorSpec) -> dict[str, Any]:
    return {"kind": spec.kind, **asdict(spec)}


def spec_from_dict(data: Any, field: str = "operator") -> OperatorSpec:
    """Build a spec from its JSON form.

    Raises:
        HybridizeError: unknown kind or option, or a value out of range.
    """
    if not isinstance(data, dict) or data.get("kind") not in SPECS:
        got = data.get("kind") if isinstance(data, dict) else data
        raise bad(f"{field}.kind", got, f"one of {sorted(SPECS)}")
    cls = SPECS[data["kind"]]
    options = {key: value for key, value in data.items() if key != "kind"}
    known = set(cls.__dataclass_fields__)
    if unknown := sorted(set(options) - known):
        raise bad(f"{field}.{unknown[0]}", options[unknown[0]], f"one of the fields {sorted(known)}")
    try:
        return cls(**options)
    except TypeError:
        raise bad(field, data, f"the fields {sorted(known)}") from None
