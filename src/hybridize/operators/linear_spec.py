"""Spec of linear attention, alone or beside a window."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hybridize.errors import bad
from hybridize.operators.exact_specs import Window
from hybridize.operators.spec import Spec, check_choice, check_integer


@dataclass(frozen=True)
class Linear(Spec):
    """A state of fixed size that every token is written into; beside it, by default, an exact window with sinks.

    Args:
        features: what queries and keys become. "power": projected to `dim`, centred, l2-normalised, then the symmetric
            power of that `degree`, so that a score is (q.k)^degree; "hedgehog": softmax of the projection and of its
            negative (Zhang et al., arXiv 2402.04347).
        degree: of the power map: 1 to 4 (hedgehog: 1).
        dim: what a head's dimension is projected to (>= 1).
        rule: "sum" adds k v^T; "delta" first takes out what the state says about k (arXiv 2406.06484).
        decay: "none"; "head", one learned rate a group (simple decay); "token", from the key (gated delta rule,
            arXiv 2412.06464); "channel", from the key and for every feature (GLA, arXiv 2312.06635).
        mixing: tokens whose keys become one key by a learned convolution (1: none), which starts at the token's own key.
        rope: rotate queries and keys first; without, the state knows no distances.
        window, sinks, sink_positions: of the exact part, as in Window; window 0 with sinks 0: the state alone.
        mix: "residual" adds to the window's answer the state's, times a gate that starts at 0; "half" is the mean of both, the
            gate starting at 1 (Liger, arXiv 2503.01496); "joint" puts both under one normaliser, and the state takes in
            what leaves the window (LoLCATs, arXiv 2410.10254; rule "sum", no negative scores, RoPE, no sinks, no decay).

    Raises:
        HybridizeError: a field is out of its range, or two do not go together.
    """

    features: str = "power"
    degree: int = 2
    dim: int = 32
    rule: str = "delta"
    decay: str = "none"
    mixing: int = 1
    rope: bool = False
    window: int = 64
    sinks: int = 4
    sink_positions: str = "rebased"
    mix: str = "residual"

    kind: ClassVar[str] = "linear"
    code: ClassVar[str] = "L"

    def __post_init__(self) -> None:
        check_choice("linear.features", self.features, ("power", "hedgehog"))
        check_choice("linear.degree", self.degree, (1, 2, 3, 4))
        check_integer("linear.dim", self.dim, 1)
        check_choice("linear.rule", self.rule, ("sum", "delta"))
        check_choice("linear.decay", self.decay, ("none", "head", "token", "channel"))
        check_integer("linear.mixing", self.mixing, 1)
        check_choice("linear.rope", self.rope, (False, True))
        check_integer("linear.window", self.window, 0)
        check_integer("linear.sinks", self.sinks, 0)
        check_choice("linear.sink_positions", self.sink_positions, ("absolute", "rebased"))
        check_choice("linear.mix", self.mix, ("residual", "half", "joint"))
        if self.mix != "residual" and not self.window:
            raise bad("linear.mix", self.mix, "'residual' where window is 0: there is nothing to mix with")
        if self.features == "hedgehog" and (self.degree, self.rule) != (1, "sum"):
            raise bad("linear.features", "hedgehog", "'power' with another degree than 1 or with rule='delta'")
        if self.decay == "channel" and (self.degree, self.rule) != (1, "sum"):
            raise bad("linear.decay", "channel", "'none', 'head' or 'token' with another degree than 1 or with rule='delta'")
        if self.rule == "sum" and self.decay == "none" and not self.normalised:
            raise bad("linear.rule", "sum", "'delta', a decay, or an even degree: such a sum grows without bound")
        if self.mix == "joint" and (
            not self.normalised or not self.rope or self.sinks or self.decay != "none" or self.mixing > 1
        ):
            raise bad(
                "linear.mix",
                "joint",
                "another mix, or rule='sum' with an even degree, rope, sinks=0, decay='none' and mixing=1",
            )
        if self.sinks and not self.window:
            raise bad("linear.sinks", self.sinks, "0 where window is 0")

    @property
    def near(self) -> Window | None:
        """The exact part."""
        return Window(self.window, self.sinks, self.sink_positions) if self.window else None

    @property
    def normalised(self) -> bool:
        """Whether scores are weights, divided by their sum: a sum of scores that are never negative."""
        return self.rule == "sum" and (self.features == "hedgehog" or self.degree % 2 == 0)

    @property
    def width(self) -> int:
        """Features F of one key: rows of the state."""
        return 2 * self.dim if self.features == "hedgehog" else math.comb(self.dim + self.degree - 1, self.degree)

    @property
    def learned(self) -> tuple[Any, ...]:
        """What the shapes and the meaning of the learned parameters follow from."""
        return self.features, self.degree, self.dim, self.rule, self.decay, self.mixing, self.rope, self.mix

    @property
    def rebased_distance(self) -> int | None:
        return self.near.rebased_distance if self.near else None

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        return self.near.cached_tokens(context) if self.near else 0

    def state_bytes(self, head_dim: int) -> int:
        rows = self.width * (head_dim + self.normalised) + (self.mixing - 1) * head_dim  # a normaliser is one more column
        return 4 * rows  # always fp32

    def visible_pairs(self, context: int) -> int:
        return self.near.visible_pairs(context) if self.near else 0

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        return self.near.visible_keys(context) if self.near else 0

    def state_flops(self, head_dim: int, group_size: int) -> int:
        return 2 * self.width * (head_dim + self.normalised) * (group_size + 1 + (self.rule == "delta"))

    def longest_distance(self, context: int) -> int:
        return context if self.rope else self.near.longest_distance(context) if self.near else 0

    def label(self) -> str:
        what = "Hedgehog" if self.features == "hedgehog" else f"degree {self.degree}"
        text = f"linear {what} of {self.dim}" + (", delta" if self.rule == "delta" else "")
        text += f", keys of {self.mixing}" if self.mixing > 1 else ""
        text += ("" if self.decay == "none" else f", {self.decay} decay") + (", RoPE" if self.rope else "")
        join = {"residual": " + ", "half": " / ", "joint": " & "}[self.mix]
        return text + (f"{join}{self.near.label()}" if self.near else "")

    def without(self, component: str) -> Linear | Window | None:
        if component == "linear":
            return self.near or Window(1, sinks=0)  # a token always sees itself
        if self.near is None or (near := self.near.without(component)) is None:
            return None
        assert isinstance(near, Window)
        return replace(self, window=near.size, sinks=near.sinks, sink_positions=near.sink_positions)
