"""Spec of gated attention: every token sees a window, and the tokens that a gate opens see everything as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hybridize.errors import bad
from hybridize.operators.exact_specs import Full, Window
from hybridize.operators.spec import Spec, check_choice, check_integer

GATES = ("learned", "random", "position", "open")
INITS = ("reference", "identity")


@dataclass(frozen=True)
class Gated(Spec):
    """L2A's layer (arXiv 2603.17484): windowed attention, then, on its result, attention to everything for open tokens.

    The second attention has a norm, projections and a router of its own, for the layer as a whole: all groups of a layer are
    gated, or none is. Keys and values of every token are kept.

    Args:
        window: what every token sees, itself included; no sinks.
        gate: which tokens are open. "learned": sigmoid(router / tau) >= theta; "random" and "position": `rate` of them, by
            a hash or evenly, whatever the text says (controls); "open": all.
        tau, theta: of the learned gate.
        leak: share of training steps, drawn for each layer, in which closed tokens are computed too, so that the router
            learns what they would have seen.
        rate: open share of a gate that is not learned.
        share_projections: run the window's own projections again, instead of copies.
        init: what new copies start as. "reference": the base's weights; "identity": the same with an output of zero.

    Raises:
        HybridizeError: a field is out of its range.
    """

    window: int = 4096
    gate: str = "learned"
    tau: float = 0.1
    theta: float = 0.5
    leak: float = 0.1
    rate: float = 0.2
    share_projections: bool = False
    init: str = "reference"

    kind: ClassVar[str] = "gated"
    code: ClassVar[str] = "g"

    def __post_init__(self) -> None:
        check_integer("gated.window", self.window, 1)
        check_choice("gated.gate", self.gate, GATES)
        check_choice("gated.init", self.init, INITS)
        check_choice("gated.share_projections", self.share_projections, (False, True))
        _check_number("gated.tau", self.tau, "above 0", lambda x: x > 0)
        _check_number("gated.theta", self.theta, "between 0 and 1, neither of them", lambda x: 0 < x < 1)
        for name in ("leak", "rate"):
            _check_number(f"gated.{name}", getattr(self, name), "a share from 0 to 1", lambda x: 0 <= x <= 1)
        if self.share_projections and self.init == "identity":
            raise bad("gated.init", self.init, "'reference' with share_projections: shared weights start as they are")

    @property
    def near(self) -> Window:
        """What every token sees."""
        return Window(self.window, 0)

    @property
    def learned(self) -> tuple[Any, ...]:
        """What the shapes and the meaning of the learned parameters follow from."""
        return self.kind, self.gate == "learned", self.share_projections

    @property
    def keeps_everything(self) -> bool:
        return True

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        return self.near.cached_tokens(context, prompt) + context

    def visible_pairs(self, context: int) -> int:
        return self.near.visible_pairs(context) + self._open(Full().visible_pairs(context))

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        return self.near.visible_keys(context, prompt) + self._open(Full().visible_keys(context, prompt))

    def _open(self, pairs: int) -> int:
        """Of the pairs that open tokens see; at most all where the text decides."""
        return round(self.rate * pairs) if self.gate in ("random", "position") else pairs

    def longest_distance(self, context: int) -> int:
        return Full().longest_distance(context)

    def label(self) -> str:
        return f"gated ({self.gate}, window {self.window})"

    def without(self, component: str) -> Window | None:
        return self.near if component == "far" else None


def _check_number(field: str, value: Any, expected: str, right: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not right(value):
        raise bad(field, value, expected)
