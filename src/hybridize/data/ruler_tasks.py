"""The definitions of RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654; NVIDIA/RULER): text of any size from a seed."""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hybridize.data.needles import a_number, a_uuid
from hybridize.errors import bad

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SHORT = 4096
DEPTHS = [round(100 * i / 39) for i in range(40)]
ADJECTIVES = (
    "ancient bitter bold brave bright broad calm careful cheerful clever cold common cool curious dark deep dry eager early "
    "easy empty fair faint famous fierce fine firm fresh gentle giant glad golden grand great happy heavy hollow honest "
    "humble icy idle jolly keen kind large late lazy light little lively lonely long loud lucky merry mighty mild modest "
    "narrow neat noble odd old pale plain polite proud quick quiet rapid rare rich rough round royal rusty sharp shiny "
    "short shy silent simple slow small smooth soft solid sour steady steep stiff strange strong sunny sweet swift tall "
    "tame tender thick thin tidy tiny tough tranquil vast vivid warm wide wild wise witty young "
).split()
NOUNS = (  # none of them a key of needles.py, which models are trained on
    "acorn airport almond ankle apron army artist attic author badge bakery balloon banker barrel basket beetle bicycle "
    "blanket blossom border bracelet brother bucket buffalo cabin camel captain caravan carrot cellar chapel cheese chimney "
    "clarinet cloud cottage cousin cradle curtain cushion dancer deer dentist doctor dolphin donkey drawer drum elbow "
    "elephant envelope farmer fence finger fiction flower fountain freedom garlic gate giraffe glove goat grandson guitar "
    "harvest hedge horse hospital hotel jewel journey judge kitchen kitten lake lawyer library lion lobster market mayor "
    "meal melody mineral morning mosquito museum mustard nephew night notebook ocean onion orchard oven palace pancake "
    "parade parcel peanut pencil pepperoni piano pirate poet potato prairie prince pupil railway rainbow restaurant "
    "rooster sailor sausage scarf school sheep sister soldier song spoon squirrel stadium station storm sugar teacher "
    "theater ticket tomato trumpet uncle village violin volcano wagon waiter weather wheel wolf yogurt zebra"
).split()


@dataclass(frozen=True)
class Example:
    """A task's text at some size: everything the user says, how the answer begins, and its references."""

    text: str
    prefix: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """build(rng, size, text) makes an example with `size` units of filler; more units never make it shorter.

    `short` does where less than 4096 tokens are asked for (the published cwe has smaller lists there). `one`: a right answer
    is the one reference, right behind the prefix.
    """

    build: Callable[[random.Random, int, str], Example]
    new_tokens: int
    metric: str = "all"
    smallest: int = 1
    short: Callable[[random.Random, int, str], Example] | None = None
    one: bool = False

    def build_for(self, length: int) -> Callable[[random.Random, int, str], Example]:
        return self.short if self.short is not None and length < SHORT else self.build


# -- needle in a haystack -----------------------------------------------------------------------------------------


def _word(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


_DRAW = {"words": _word, "numbers": a_number, "uuids": a_uuid}


def niah(haystack: str, key: str, value: str, keys: int = 1, values: int = 1, queries: int = 1) -> Callable[..., Example]:
    """haystack: "noise", "essay" or "needle"; key and value: "words", "numbers" or "uuids"."""
    keys = max(keys, queries)

    def build(rng: random.Random, size: int, text: str) -> Example:
        names: list[str] = []
        while len(names) < keys:
            if (name := _DRAW[key](rng)) not in names:
                names.append(name)
        answers = [[_DRAW[value](rng) for _ in range(values)] for _ in names]
        needles = [_needle(value, name, each) for name, many in zip(names, answers, strict=True) for each in many]
        rng.shuffle(needles)
        context = _HAYSTACKS[haystack](rng, size, text, needles, key, value)
        asked = rng.sample(range(keys), queries)
        query = [names[i] for i in asked]
        listed = query[0] if len(query) == 1 else ", ".join(query[:-1]) + ", and " + query[-1]
        one = queries * values == 1
        kind, a, verb = (value[:-1], "A", "is") if one else (value, "Some", "are")
        question = "What is the" if one else "What are all the"
        return Example(
            f"{a} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n{context}\n"
            f"{question} special magic {kind} for {listed} mentioned in the provided text?",
            f" The special magic {kind} for {listed} mentioned in the provided text {verb}",
            tuple(each for i in asked for each in answers[i]),
        )

    return build


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _insert_lines(rng: random.Random, lines: list[str], needles: Sequence[str]) -> str:
    for place, needle in zip(sorted(rng.sample(range(len(lines)), len(needles)), reverse=True), needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _noise_hay(rng: random.Random, size: int, text: str, needles: Sequence[str], *_: str) -> str:
    return _insert_lines(rng, [NOISE] * (size + len(needles) - 1), needles)


def _needle_hay(rng: random.Random, size: int, text: str, needles: Sequence[str], key: str, value: str) -> str:
    others = [_needle(value, _DRAW[key](rng), _DRAW[value](rng)) for _ in range(size + len(needles) - 1)]
    return _insert_lines(rng, others, needles)


@lru_cache(maxsize=2)
def _split(text: str) -> list[str]:
    return text.split()


def _essay_hay(rng: random.Random, size: int, text: str, needles: Sequence[str], *_: str) -> str:
    words = _split(text)
    hay = " ".join(words[i % len(words)] for i in range(size))
    sentences = re.split(r"(?<=[.!?])\s+", hay)
    places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    parts, last = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*sentences[last:place], needle]
        last = place
    return " ".join([*parts, *sentences[last:]])


_HAYSTACKS: dict[str, Callable[..., str]] = {"noise": _noise_hay, "needle": _needle_hay, "essay": _essay_hay}


# -- variable tracking, common and frequent words ------------------------------------------------------------------


def _chain(rng: random.Random, letters: int, hops: int) -> tuple[str, list[str], list[str]]:
    """(value, names, assignments in order) of one chain."""
    names: list[str] = []
    while len(names) <= hops:
        if (name := "".join(rng.choices(string.ascii_uppercase, k=letters))) not in names:
            names.append(name)
    value = str(rng.randint(10_000, 99_999))
    return (
        value,
        names,
        [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))],
    )


def _vt_text(rng: random.Random, size: int, letters: int, hops: int) -> Example:
    value, names, lines = _chain(rng, letters, hops)
    sentences = [NOISE] * size
    for place, line in zip(sorted(rng.choices(range(size + 1), k=len(lines)), reverse=True), reversed(lines), strict=True):
        sentences.insert(place, line)
    context = "\n".join(sentences)
    return Example(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: ",
        tuple(names),
    )


def variable_tracking(rng: random.Random, size: int, text: str) -> Example:
    """One chain of 4 hops, behind one solved example with shorter names."""
    shown, asked = _vt_text(rng, 5, 3, 4), _vt_text(rng, size, 5, 4)
    return Example(f"{shown.text}{shown.prefix}{' '.join(shown.references)}\n\n{asked.text}", asked.prefix, asked.references)


@lru_cache(maxsize=2)  # a size is searched for by making the text again and again
def _words_of(text: str) -> list[str]:
    return sorted(set(re.findall(r"\b[a-z]{4,10}\b", text)))


def _cwe_list(rng: random.Random, words: Sequence[str], common: int, often: int, seldom: int) -> tuple[str, tuple[str, ...]]:
    entries = [w for w in words[:common] for _ in range(often)] + [w for w in words[common:] for _ in range(seldom)]
    rng.shuffle(entries)
    return " ".join(f"{i + 1}. {word}" for i, word in enumerate(entries)), tuple(words[:common])


def common_words(often: int, seldom: int, example: tuple[int, int, int]) -> Callable[..., Example]:
    """10 words `often` times among `size` words `seldom` times, behind a solved example (its words, often, seldom)."""

    def build(rng: random.Random, size: int, text: str) -> Example:
        vocabulary = _words_of(text)
        if size + 10 > len(vocabulary):
            raise bad("text", f"{len(vocabulary)} words", f"at least {size + 10} different words for this length")
        ask = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n{}\nQuestion: What are the 10 most common words in the above list?"
        )
        prefix = " Answer: The top 10 words that appear most often in the list are:"
        words, *times = example
        context, shown = _cwe_list(rng, rng.sample(vocabulary, words), 10, *times)
        solved = f"{ask.format(context)}{prefix} {' '.join(f'{i + 1}. {word}' for i, word in enumerate(shown))}"
        context, references = _cwe_list(rng, rng.sample(vocabulary, size + 10), 10, often, seldom)
        return Example(f"{solved}\n\n{ask.format(context)}", prefix, references)

    return build


def frequent_words(rng: random.Random, size: int, text: str) -> Example:
    """Coded words by a zeta law of exponent 2; the most frequent one is written as dots, ranks 2 to 4 are asked for."""
    vocabulary: list[str] = []
    while len(vocabulary) < max(8, size // 12):
        if (word := "".join(rng.choices(string.ascii_lowercase, k=6))) not in vocabulary:
            vocabulary.append(word)
    zeta2 = 1.6449340668482264
    entries = []
    for rank, word in enumerate(vocabulary, 1):
        entries += ["..." if rank == 1 else word] * int(size / rank**2 / zeta2)
    rng.shuffle(entries)
    return Example(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
        f"coded words. {' '.join(entries)}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(vocabulary[1:4]),
    )


TASKS: dict[str, Task] = {
    "niah_single_1": Task(niah("noise", "words", "numbers"), 128, one=True),
    "niah_single_2": Task(niah("essay", "words", "numbers"), 128, smallest=64, one=True),
    "niah_single_3": Task(niah("essay", "words", "uuids"), 128, smallest=64, one=True),
    "niah_multikey_1": Task(niah("essay", "words", "numbers", keys=4), 128, smallest=64, one=True),
    "niah_multikey_2": Task(niah("needle", "words", "numbers"), 128, one=True),
    "niah_multikey_3": Task(niah("needle", "uuids", "uuids"), 128, one=True),
    "niah_multivalue": Task(niah("essay", "words", "numbers", values=4), 128, smallest=64),
    "niah_multiquery": Task(niah("essay", "words", "numbers", queries=4), 128, smallest=64),
    "vt": Task(variable_tracking, 30, smallest=5),
    "cwe": Task(common_words(30, 3, (40, 10, 3)), 120, smallest=20, short=common_words(6, 1, (20, 3, 1))),
    "fwe": Task(frequent_words, 50, smallest=64),
}
