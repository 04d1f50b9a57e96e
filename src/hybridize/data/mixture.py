"""Rows to train on: needle prompts, whose answers are learned, and stretches of text, learned whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridize.data.needles import KINDS, Haystack, needle_prompt
from hybridize.data.passkeys import PASSKEYS, passkeys_prompt
from hybridize.errors import bad


@dataclass(frozen=True)
class Row:
    """ids: exactly the asked length; `start`: the first token that is learned to be predicted."""

    ids: tuple[int, ...]
    start: int


class Mixture:
    """`count` rows of `length` tokens, each made when it is asked for; row i is the same for the same seed.

    Args:
        tokenizer: a transformers tokenizer.
        text: where haystacks and stretches are taken from, at seeded places.
        kinds: needle kinds and "passkeys", in turn. text_share: share of rows that are text, spread evenly, 0..1.

    Raises:
        HybridizeError: an unknown kind, a share outside 0..1, or too little text for the length.
    """

    def __init__(
        self, tokenizer: Any, text: str, *, count: int, length: int, kinds: Sequence[str], text_share: float, seed: int
    ) -> None:
        if unknown := [kind for kind in kinds if kind not in (*KINDS, PASSKEYS)]:
            raise bad("kinds", unknown[0], f"one of {[*sorted(KINDS), PASSKEYS]}")
        if not 0 <= text_share <= 1 or (text_share < 1 and not kinds):
            raise bad("text_share", text_share, "a share between 0 and 1 (1 where no kinds are named)")
        self.hay = Haystack(tokenizer, text)
        if len(self.hay.ids) < length:
            raise bad("text", f"{len(self.hay.ids)} tokens", f"at least {length} for the asked length")
        self.count, self.length, self.kinds, self.text_share, self.seed = count, length, tuple(kinds), text_share, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = random.Random(f"{self.seed}/train/{index}")
        texts = int((index + 1) * self.text_share + 1e-9)
        if texts > int(index * self.text_share + 1e-9):
            return Row(tuple(self.hay.stretch(self.length, rng)), 1)
        kind = self.kinds[(index - texts) % len(self.kinds)]
        if kind == PASSKEYS:
            prompt = passkeys_prompt(self.hay, self.length, rng)
        else:
            prompt = needle_prompt(self.hay, kind, self.length, rng.random(), rng)
        return Row(prompt.ids, prompt.prompt_len)
