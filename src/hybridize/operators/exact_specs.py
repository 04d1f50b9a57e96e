"""Specs of exact attention: over everything, over a window with sinks, over what is kept of a prompt.

Words: a *window* of size w is the token itself and the w-1 before it; *sinks* are the first tokens of each row,
always visible; *re-based* sinks are scored as if they stood at a fixed distance behind the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hybridize.errors import bad
from hybridize.operators.spec import Spec, check_choice, check_integer


@dataclass(frozen=True)
class Full(Spec):
    """Causal attention over every earlier token."""

    kind: ClassVar[str] = "full"
    code: ClassVar[str] = "F"

    @property
    def keeps_everything(self) -> bool:
        return True

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        return context

    def visible_pairs(self, context: int) -> int:
        return context * (context + 1) // 2

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        return context

    def longest_distance(self, context: int) -> int:
        return context

    def label(self) -> str:
        return "full"


@dataclass(frozen=True)
class Window(Spec):
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
        check_integer("window.size", self.size, 1)
        check_integer("window.sinks", self.sinks, 0)
        check_choice("window.sink_positions", self.sink_positions, ("absolute", "rebased"))
        check_choice("window.decode", self.decode, ("window", "full"))
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

    def without(self, component: str) -> Window | None:
        if component == "sinks" and self.sinks:
            return replace(self, sinks=0, sink_positions="absolute")
        if component == "window" and self.size > 1:
            return replace(self, size=1)  # a token always sees itself
        return None


@dataclass(frozen=True)
class SnapKV(Spec):
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
        check_integer("snapkv.observe", self.observe, 1)
        check_integer("snapkv.budget", self.budget, self.observe + 1)
        check_integer("snapkv.pool", self.pool, 1)
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
