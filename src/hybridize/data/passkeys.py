"""Many passkeys of many words in one haystack, all asked for at its end: what gates are learned on (FlashMorph)."""

from __future__ import annotations

import random

from hybridize.data.needles import INTRO, KEYS, Haystack, Prompt, sentence_end
from hybridize.errors import bad

PASSKEYS = "passkeys"
FIRST, LAST = 0.05, 0.95  # depths, evenly spread between


def sizes(length: int) -> tuple[int, int]:
    """(passkeys, words of each): 10 of 32 from 4096 tokens on, as published; fewer in shorter prompts, where they fill a
    quarter of the tokens."""
    return max(1, min(10, length // 100)), max(2, min(32, length // 128))


def passkeys_prompt(hay: Haystack, length: int, rng: random.Random) -> Prompt:
    """A prompt of exactly `length` tokens whose answer names every passkey, in the order in which they stand.

    Raises:
        HybridizeError: too few tokens.
    """
    count, words = sizes(length)
    keys = rng.sample(KEYS, count)
    values = [" ".join(rng.choice(KEYS) for _ in range(words)) for _ in keys]
    head = hay.head + hay.encode(INTRO)
    tail = hay.encode("\n\nList every passkey mentioned in the provided text, in their order.") + hay.tail
    answer = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    start, whole = hay.encode("The passkeys are:\n"), hay.encode(f"The passkeys are:\n{answer}")
    shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    needles = [hay.encode(f" The passkey of {key} is: {value}.") for key, value in zip(keys, values, strict=True)]
    room = length - len(head) - len(tail) - len(whole) - sum(map(len, needles))
    if room < 16:
        raise bad("length", length, f"at least {length - room + 16} tokens for {count} passkeys of {words} words")
    body = hay.stretch(room, rng)
    for i in reversed(range(count)):
        depth = FIRST + (LAST - FIRST) * (i / (count - 1) if count > 1 else 0.5)
        cut = sentence_end(hay, body, round(depth * room))
        body = body[:cut] + needles[i] + body[cut:]
    ids = head + body + tail + whole
    text = (len(head), len(head) + len(body))
    return Prompt(tuple(ids), len(ids) - len(whole) + shared, PASSKEYS, length, 0.5, answer, None, text)
