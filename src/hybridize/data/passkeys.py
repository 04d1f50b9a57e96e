"""Many passkeys of many words in one haystack, all asked for at its end: what gates are learned on (FlashMorph)."""

from __future__ import annotations

import random

from hybridize.data.needles import INTRO, KEYS, Haystack, Prompt, sentence_end
from hybridize.errors import bad

PASSKEYS = "passkeys"
COUNT, WORDS = 10, 32  # as published; shorter prompts get shorter and then fewer passkeys
FIRST, LAST = 0.05, 0.95  # depths, evenly spread between


def passkeys_prompt(hay: Haystack, length: int, rng: random.Random) -> Prompt:
    """A prompt of exactly `length` tokens, at least half of them haystack, whose answer names every passkey in its order.

    Raises:
        HybridizeError: too few tokens for one passkey of two words, or too short a text.
    """
    keys = rng.sample(KEYS, COUNT)
    drawn = [[rng.choice(KEYS) for _ in range(WORDS)] for _ in keys]
    head = hay.head + hay.encode(INTRO)
    tail = hay.encode("\n\nList every passkey mentioned in the provided text, in their order.") + hay.tail
    start = hay.encode("The passkeys are:\n")
    count, words = COUNT, WORDS
    while True:
        values = [" ".join(each[:words]) for each in drawn[:count]]
        answer = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=False))
        whole = hay.encode(f"The passkeys are:\n{answer}")
        needles = [hay.encode(f" The passkey of {key} is: {value}.") for key, value in zip(keys, values, strict=False)]
        room = length - len(head) - len(tail) - len(whole) - sum(map(len, needles))
        if room >= length // 2:
            break
        if (count, words) == (1, 2):
            raise bad("length", length, f"at least {2 * (length - room)} tokens for a passkey")
        count, words = (count, max(2, words * 3 // 4)) if words > 2 else (count - 1, words)
    body = hay.stretch(room, rng)
    for i in reversed(range(count)):
        depth = FIRST + (LAST - FIRST) * (i / (count - 1) if count > 1 else 0.5)
        cut = sentence_end(hay, body, round(depth * room))
        body = body[:cut] + needles[i] + body[cut:]
    ids = head + body + tail + whole
    shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    text = (len(head), len(head) + len(body))
    return Prompt(tuple(ids), len(ids) - len(whole) + shared, PASSKEYS, length, 0.5, answer, None, text)
