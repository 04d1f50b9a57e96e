"""Needle prompts: a fact hidden at a known depth of a long text, asked for at the end, its answer tokens marked."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridize.errors import bad

KEYS = (
    "amber anchor apple arrow autumn bamboo beacon bishop bottle breeze bridge bronze button cactus camera candle canyon "
    "carpet castle cedar cello cherry circle cobalt copper coral cotton crystal dagger desert diamond dragon eagle ember "
    "engine falcon feather fiddle forest garden ginger glacier granite hammer harbor hazel helmet honey island ivory "
    "jacket jasmine jungle kettle ladder lantern lemon leopard lily magnet maple marble meadow mirror monkey mountain "
    "needle nickel oasis olive orchid otter oyster paddle panther parrot pebble pepper pigeon pillow planet pocket poppy "
    "quarry rabbit raven ribbon river rocket saddle saffron salmon shadow silver spider spruce statue summer sunset "
    "temple thistle thunder tiger timber tunnel turtle valley velvet violet walnut whisper willow window winter wizard"
).split()
NAMES = (
    "Alice Benjamin Clara Daniel Eleanor Frederick Grace Henry Isabel James Laura Martin Nora Oliver Paula Samuel"
).split()


@dataclass(frozen=True)
class NeedleKind:
    """statement, question and prefix take {key} and {value}, a statement {name} too; `value` draws one.

    decoys: more needles of other keys. pairs: a key is two words, so that keys are often half alike.
    """

    statement: str
    question: str
    prefix: str
    value: Callable[[random.Random], str]
    decoys: int = 0
    pairs: bool = False


def a_number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _words(rng: random.Random) -> str:
    return " ".join(rng.sample(KEYS, 3))


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(4)) + str(rng.randint(100, 999))


def a_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _magic(what: str) -> tuple[str, str, str]:
    return (
        f"One of the special magic {what}s for {{key}} is: {{value}}.",
        f"What is the special magic {what} for {{key}} mentioned in the provided text?",
        f"The special magic {what} for {{key}} mentioned in the provided text is:",
    )


KINDS: dict[str, NeedleKind] = {
    "number": NeedleKind(*_magic("number"), a_number),
    "multikey": NeedleKind(*_magic("number"), a_number, decoys=3),
    "manykeys": NeedleKind(*_magic("number"), a_number, decoys=15, pairs=True),
    "uuid": NeedleKind(*_magic("uuid"), a_uuid),
    "words": NeedleKind(
        "The secret words of the {key} society are: {value}.",
        "What are the secret words of the {key} society mentioned in the provided text?",
        "The secret words of the {key} society mentioned in the provided text are:",
        _words,
    ),
    "code": NeedleKind(
        "The door code of the {key} room is: {value}.",
        "What is the door code of the {key} room mentioned in the provided text?",
        "The door code of the {key} room mentioned in the provided text is:",
        _code,
    ),
    "friend": NeedleKind(
        "The person who keeps the key of the {key} house is: {value}.",
        "Who keeps the key of the {key} house mentioned in the provided text?",
        "The person who keeps the key of the {key} house mentioned in the provided text is:",
        lambda rng: f"{rng.choice(NAMES)} {rng.choice(KEYS).capitalize()}",
    ),
    "courier": NeedleKind(  # the key leads to a name, the name to the value
        "The {key} courier is called {name}. The number that {name} carries is: {value}.",
        "What is the number that the {key} courier mentioned in the provided text carries?",
        "The number that the {key} courier mentioned in the provided text carries is:",
        a_number,
    ),
}
CALIBRATION_KINDS = ("code", "friend", "multikey", "number", "words")
INTRO = "Some facts are hidden in the following text. Read it and remember them. I will ask about them at the end.\n\n"


@dataclass(frozen=True)
class Prompt:
    """ids: prompt and answer tokens; the answer is ids[prompt_len:]. depth: 0 (start) to 1 (end) of the text.

    needle, text: where the asked needle, and the haystack with all needles, lie in ids; None: there is none.
    """

    ids: tuple[int, ...]
    prompt_len: int
    kind: str
    length: int
    depth: float
    answer: str
    needle: tuple[int, int] | None = None
    text: tuple[int, int] | None = None


def needle_of(prompt: Prompt) -> tuple[tuple[int, int], tuple[int, int]]:
    """(needle, text) of a prompt.

    Raises:
        HybridizeError: it has none.
    """
    if prompt.needle is None or prompt.text is None:
        raise bad("prompts", f"a {prompt.kind!r} prompt that says of no needle where it lies", "needle_prompts(...)")
    return prompt.needle, prompt.text


def needle_prompts(
    tokenizer: Any,
    text: str,
    *,
    length: int,
    count: int,
    kinds: Sequence[str] = ("number",),
    depths: Sequence[float] | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """`count` prompts of exactly `length` tokens, answer included, chat template applied where the tokenizer has one.

    Args:
        tokenizer: a transformers tokenizer.
        text: the haystack; each prompt takes a stretch of it at a seeded place.
        kinds: names of KINDS, taken in turn.
        depths: where the asked needle lies, 0..1, taken in turn; None: evenly spread over `count` prompts.
        seed: the same seed gives the same prompts.

    Raises:
        HybridizeError: an unknown kind, a depth outside 0..1, or too few tokens for the question or in the text.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise bad("kinds", unknown[0], f"one of {sorted(KINDS)}")
    if any(not 0 <= depth <= 1 for depth in depths or ()):
        raise bad("depths", list(depths or ()), "numbers from 0 to 1")
    hay = Haystack(tokenizer, text)
    prompts = []
    for i in range(count):
        rng = random.Random(f"{seed}/{length}/{i}")
        depth = depths[i % len(depths)] if depths else (i + 0.5) / count
        prompts.append(needle_prompt(hay, kinds[i % len(kinds)], length, depth, rng))
    return prompts


class Haystack:
    """A text's tokens, with the places where a sentence ends, and the pieces of the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = self.encode(text)
        self.enders = {i for i in set(self.ids) if tokenizer.decode([i]).rstrip(" \"”'").endswith((".", "!", "?"))}
        self.head, self.tail = chat_frame(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def stretch(self, tokens: int, rng: random.Random) -> list[int]:
        if tokens > len(self.ids):
            raise bad("text", f"{len(self.ids)} tokens", f"at least {tokens} for the asked length")
        start = rng.randint(0, len(self.ids) - tokens)
        return self.ids[start : start + tokens]


def chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids around a user's message, up to where the assistant begins; without a template, BOS and a line break."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if getattr(tokenizer, "chat_template", None):
        mark = "<<MESSAGE>>"
        whole = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
        head, _, tail = whole.partition(mark)
        return encode(head), encode(tail)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return bos, encode("\n")


def needle_prompt(hay: Haystack, kind_name: str, length: int, depth: float, rng: random.Random) -> Prompt:
    """One prompt of a kind, its asked needle at `depth`; everything else is drawn from `rng`."""
    kind = KINDS[kind_name]
    keys = _keys(kind, rng)
    values = [kind.value(rng) for _ in keys]
    key, value = keys[0], values[0]
    head = hay.head + hay.encode(INTRO)
    tail = hay.encode("\n\n" + kind.question.format(key=key)) + hay.tail
    prefix = kind.prefix.format(key=key)
    start, whole = hay.encode(prefix), hay.encode(f"{prefix} {value}")
    shared = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), len(start))
    names = rng.sample(NAMES, len(keys)) if "{name}" in kind.statement else keys
    needles = [
        hay.encode(" " + kind.statement.format(key=k, value=v, name=n)) for k, v, n in zip(keys, values, names, strict=True)
    ]
    room = length - len(head) - len(tail) - len(whole) - sum(map(len, needles))
    if room < 16:
        raise bad("length", length, f"at least {length - room + 16} tokens for a {kind_name!r} needle and its question")
    body = hay.stretch(room, rng)
    places = [depth, *(rng.random() for _ in range(kind.decoys))]
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: -pair[0]):
        cut = sentence_end(hay, body, round(place * room))
        body = body[:cut] + needle + body[cut:]
    ids = head + body + tail + whole
    text = (len(head), len(head) + len(body))
    asked = needles[0]
    at = next(i for i in range(*text) if ids[i : i + len(asked)] == asked)
    prompt_len = len(ids) - len(whole) + shared
    return Prompt(tuple(ids), prompt_len, kind_name, length, depth, value, (at, at + len(asked)), text)


def _keys(kind: NeedleKind, rng: random.Random) -> list[str]:
    """The asked key and those of the decoys, all different."""
    if not kind.pairs:
        return rng.sample(KEYS, 1 + kind.decoys)
    return ["-".join(pair) for pair in rng.sample(list(itertools.permutations(KEYS, 2)), 1 + kind.decoys)]


def sentence_end(hay: Haystack, body: list[int], wanted: int) -> int:
    """The nearest place right behind a sentence, so that the needle reads as a sentence of its own."""
    for step in range(64):
        for place in (wanted - step, wanted + step):
            if place in (0, len(body)) or (0 < place < len(body) and body[place - 1] in hay.enders):
                return place
    return wanted
