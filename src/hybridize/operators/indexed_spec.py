"""Spec of indexed attention: exact softmax over the few tokens that an index of each query finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hybridize.errors import bad
from hybridize.operators.exact_specs import Window
from hybridize.operators.spec import Spec, check_choice, check_integer

SELECTS = ("index", "exact", "pages", "random", "all")


@dataclass(frozen=True)
class Indexed(Spec):
    """Query heads that retrieve attend to the tokens they choose, the group's other heads to a window with sinks.

    A retrieving head chooses, for every query, the smallest set whose share of softmax(score) is `top_p`, blocks in the order
    of their largest score; the sinks' blocks and the query's own are always in it.

    Args:
        select: what scores are. "index": (Wq q).(Wk k) in `dim` dimensions, learned, without RoPE; "exact": the attention's
            own (an oracle); "pages": an upper bound of those in each block (Quest, arXiv 2406.10774); "random"; "all": there
            is no choice (retrieving heads are dense, as RazorAttention's, arXiv 2407.15891).
        top_p: share of the softmax over scores, 0 < top_p <= 1. 1 with `max_tokens`: a fixed top-k.
        dim: of the index.
        block: tokens that are chosen together, by content position; 1: single tokens.
        min_tokens, max_tokens: bounds of what a query chooses, in whole blocks (max_tokens 0: none).
        dense_below: queries at content positions below see every token.
        dense_prefill: so do queries of the prompt.
        window, sinks: of heads that do not retrieve; `sinks` of those that do as well.
        retrieves: of each query head of the group, whether it retrieves; empty: all do.

    Raises:
        HybridizeError: a field is out of its range.
    """

    select: str = "index"
    top_p: float = 0.9
    dim: int = 16
    block: int = 64
    min_tokens: int = 0
    max_tokens: int = 0
    dense_below: int = 0
    dense_prefill: bool = False
    window: int = 1024
    sinks: int = 4
    retrieves: tuple[bool, ...] = ()

    kind: ClassVar[str] = "indexed"
    code: ClassVar[str] = "i"

    def __post_init__(self) -> None:
        check_choice("indexed.select", self.select, SELECTS)
        if not isinstance(self.top_p, (int, float)) or isinstance(self.top_p, bool) or not 0 < self.top_p <= 1:
            raise bad("indexed.top_p", self.top_p, "a share above 0, at most 1")
        for name in ("dim", "block", "window"):
            check_integer(f"indexed.{name}", getattr(self, name), 1)
        for name in ("min_tokens", "max_tokens", "dense_below", "sinks"):
            check_integer(f"indexed.{name}", getattr(self, name), 0)
        check_choice("indexed.dense_prefill", self.dense_prefill, (False, True))
        if self.max_tokens and self.max_tokens < self.min_tokens:
            raise bad("indexed.max_tokens", self.max_tokens, f"at least min_tokens={self.min_tokens}, or 0 for no bound")
        if self.select == "pages" and (self.top_p < 1 or not self.max_tokens):
            got = f"{self.top_p}, {self.max_tokens}"
            raise bad("indexed.top_p, max_tokens", got, "top_p=1 and max_tokens above 0: bounds are no shares")
        object.__setattr__(self, "retrieves", tuple(self.retrieves))
        if self.retrieves and (any(type(x) is not bool for x in self.retrieves) or not any(self.retrieves)):
            raise bad(
                "indexed.retrieves", self.retrieves, "true or false for each query head of the group, true for one at least"
            )

    @property
    def near(self) -> Window:
        """What heads run that do not retrieve."""
        return Window(self.window, self.sinks)

    @property
    def shared(self) -> Indexed:
        return replace(self, retrieves=())

    @property
    def learned(self) -> tuple[Any, ...]:
        """What the shapes and the meaning of the learned parameters follow from."""
        return self.kind, self.dim

    @property
    def phased(self) -> bool:
        return self.dense_prefill

    @property
    def keeps_everything(self) -> bool:
        return True

    @property
    def token_values(self) -> int:
        return self.dim if self.select == "index" else 0

    @property
    def always(self) -> int:
        """Tokens in the blocks that are always chosen."""
        return -(-self.sinks // self.block) * self.block + self.block

    @property
    def share(self) -> float:
        """Of the group's query heads, those that retrieve."""
        return sum(self.retrieves) / len(self.retrieves) if self.retrieves else 1.0

    def cached_tokens(self, context: int, prompt: int | None = None) -> int:
        return context

    def visible_pairs(self, context: int) -> int:
        most = context * (context + 1) // 2
        cap = max(self.max_tokens, self.always)
        if self.max_tokens and not self.dense_prefill and self.select != "all":
            dense = min(context, max(self.dense_below, cap))  # queries that see everything before them
            most = dense * (dense + 1) // 2 + (context - dense) * cap
        return round(self.share * most + (1 - self.share) * self.near.visible_pairs(context))

    def visible_keys(self, context: int, prompt: int | None = None) -> int:
        capped = self.max_tokens and context > self.dense_below and self.select != "all"
        most = min(context, max(self.max_tokens, self.always)) if capped else context
        return round(self.share * most + (1 - self.share) * self.near.visible_keys(context))

    def scoring_flops(self, pairs: int, head_dim: int, group_size: int) -> int:
        each = {"index": 2 * self.dim, "exact": 2 * head_dim, "pages": 4 * head_dim // self.block}.get(self.select, 0)
        return round(self.share * group_size * each * pairs)

    def longest_distance(self, context: int) -> int:
        return context

    def label(self) -> str:
        what = {"index": f"index of {self.dim}", "exact": "exact scores", "pages": "page bounds", "random": "random scores"}
        if self.select == "all":
            return f"retrieval heads dense, others {self.near.label()}"
        share = f"top-p {self.top_p:g}" if self.top_p < 1 else ""
        most = f"at most {self.max_tokens}" if self.max_tokens else ""
        text = ", ".join(filter(None, (f"indexed by {what[self.select]}", share, most, f"blocks of {self.block}")))
        return text + (", dense prefill" if self.dense_prefill else "")

    def without(self, component: str) -> Indexed | Window | None:
        if component == "indexed":
            return self.near
        near = self.near.without(component)
        if near is None:
            return None
        return replace(self, window=near.size, sinks=near.sinks)
