"""RULER (Hsieh et al. 2024, arXiv 2404.06654; NVIDIA/RULER), generated offline: the 13 tasks' definitions, any length.

Differences from the published set, all named: haystack "essays" are the text that the caller gives (the published set
downloads Paul Graham's), word lists are our own, and qa tasks need the user's SQuAD or HotpotQA documents.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridize.data.needles import Prompt, chat_frame
from hybridize.data.ruler_tasks import TASKS, Example, Task
from hybridize.errors import bad
from hybridize.files import write_bytes

# of the prompts kept on disk: raise it when a task's text changes
GENERATOR_VERSION = 2


@dataclass(frozen=True)
class RulerPrompt:
    """One example: prompt ids [n], room for `new_tokens` behind them, and the strings that a right answer contains.

    answer: ids of the one right answer, where there is only one.
    """

    task: str
    length: int
    ids: tuple[int, ...]
    new_tokens: int
    references: tuple[str, ...]
    metric: str
    answer: tuple[int, ...] = ()

    def forced(self) -> Prompt:
        """Prompt and answer together, for teacher forcing."""
        if not self.answer:
            raise bad("ruler_method", "argmax", f"'generate' for task {self.task!r}, which has no one right answer")
        return Prompt(self.ids + self.answer, len(self.ids), self.task, self.length, 0.0, self.references[0])


def ruler_prompts(
    tokenizer: Any,
    task: str | Task,
    text: str,
    *,
    length: int,
    count: int,
    seed: int = 0,
    name: str | None = None,
    start: int = 0,
) -> Iterator[RulerPrompt]:
    """Examples `start` to `count` - 1, one at a time, each as large as fits: prompt + answer tokens <= `length`.

    Args:
        task: a name of TASKS, or a Task (`questions(...)`, then with a `name`).
        text: haystack of the essay tasks and vocabulary of cwe.
        seed: an example depends on seed, task, length and its number only, never on `count`.

    Raises:
        HybridizeError: an unknown task, or a length that not even the smallest example fits.
    """
    if isinstance(task, str) and task not in TASKS:
        raise bad("task", task, f"one of {sorted(TASKS)}")
    name = name or (task if isinstance(task, str) else "qa")
    definition = TASKS[task] if isinstance(task, str) else task
    head, tail = chat_frame(tokenizer)

    def encode(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]

    def ids_of(example: Example) -> list[int]:
        return [*head, *encode(example.text), *tail, *encode(example.prefix.strip())]

    def answer_of(example: Example) -> list[int]:
        start, whole = encode(example.prefix.strip()), encode(f"{example.prefix.strip()} {example.references[0]}")
        return whole[len(start) :] if whole[: len(start)] == start else encode(f" {example.references[0]}")

    room = length - definition.new_tokens
    for i in range(start, count):

        def made(size: int, i: int = i) -> Example:
            return definition.build_for(length)(random.Random(f"{seed}/{name}/{length}/{i}"), size, text)

        def tokens(size: int, made: Callable[[int], Example] = made) -> int:
            return len(ids_of(made(size)))

        if tokens(definition.smallest) > room:
            raise bad("length", length, f"at least {tokens(definition.smallest) + definition.new_tokens} for task {name!r}")
        example = made(_largest(tokens, definition.smallest, room))
        answer = tuple(answer_of(example)) if definition.one else ()
        given = (tuple(ids_of(example)), definition.new_tokens, example.references, definition.metric)
        yield RulerPrompt(name, length, *given, answer)


def _largest(tokens: Callable[[int], int], smallest: int, room: int) -> int:
    """The largest size whose prompt fits: doubled until one does not, then bisected."""
    high = smallest * 2
    try:
        while tokens(high) <= room:
            high *= 2
    except ValueError:  # the text has no more words or documents to give: search below
        pass

    def too_large(size: int) -> bool:
        try:
            return tokens(size) > room
        except ValueError:
            return True

    return bisect.bisect_left(range(smallest, high + 1), True, key=too_large) + smallest - 1


def cache_folder() -> Path:
    """Where prompts are kept: $HYBRIDIZE_CACHE, or ~/.cache/hybridize."""
    return Path(os.environ.get("HYBRIDIZE_CACHE") or Path.home() / ".cache" / "hybridize")


def cached_prompts(
    tokenizer: Any,
    task: str | Task,
    text: str,
    *,
    length: int,
    count: int,
    seed: int = 0,
    name: str | None = None,
    source: str = "",
    folder: Path | None = None,
) -> list[RulerPrompt]:
    """`ruler_prompts`, kept on disk: what was made once for this tokenizer, text, task, length and seed is read back.

    Args:
        source: what a Task of the caller's was made from (its file's content), so that another one is not taken for it.
        folder: default `cache_folder()`.
    """
    label = name or str(task)
    asked = {
        "version": GENERATOR_VERSION,
        "tokenizer": _fingerprint(tokenizer),
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "task": label,
        "length": length,
        "seed": seed,
        "source": hashlib.sha256(source.encode()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
    path = (folder or cache_folder()) / "ruler" / f"{label}-{length}-{key}.jsonl.gz"
    found = _read_prompts(path)[:count]
    if len(found) < count:
        # example i does not depend on how many are made: only the missing ones are
        stream = ruler_prompts(tokenizer, task, text, length=length, count=count, seed=seed, name=name, start=len(found))
        found += stream
        lines = "".join(json.dumps(asdict(prompt)) + "\n" for prompt in found)
        write_bytes(path, gzip.compress(lines.encode(), 1, mtime=0))
    return found


def _read_prompts(path: Path) -> list[RulerPrompt]:
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
        listed = ("ids", "references", "answer")
        return [RulerPrompt(**{**row, **{name: tuple(row[name]) for name in listed}}) for row in rows]
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return []  # made again, the same: it is only a cache


def _fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    frame = json.dumps([tokenizer.bos_token, getattr(tokenizer, "chat_template", None)])
    return hashlib.sha256((vocabulary + frame).encode()).hexdigest()
