"""Multiple choice, last-word and minimal-pair sets from jsonl files, as scored continuations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.data.needles import Prompt
from hybridize.errors import HybridizeError, bad


@dataclass(frozen=True)
class Item:
    """pairs: (context, continuation) of each option; the likeliest continuation is the model's choice.

    One pair (LAMBADA): right where every token of the continuation is the argmax.
    """

    pairs: tuple[tuple[str, str], ...]
    gold: int


def load_items(path: str | Path) -> list[Item]:
    """Items of a jsonl file, or of all jsonl files of a folder (BLiMP's 67), by the fields of their rows.

    - `query`, `choices`, `gold`: each choice behind the query and a space.
    - `sentence` with one `_`, `option1`, `option2`, `gold`: WinoGrande by partial scoring, the rest of the sentence behind
      each option (Trinh and Le 2018, as lm-evaluation-harness does).
    - `context`, `continuation`: LAMBADA.
    - `sentence_good`, `sentence_bad`: BLiMP, whole sentences.

    Raises:
        HybridizeError: no such file, no rows, or a row of none of these kinds (its line is named).
    """
    path = Path(path)
    if path.is_dir():
        if not (files := sorted(path.glob("*.jsonl"))):
            raise bad("choice", str(path), "a folder with .jsonl files")
        return [item for file in files for item in load_items(file)]
    if not path.is_file():
        raise bad("choice", str(path), "an existing .jsonl file, or a folder of them")
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                items.append(_item(json.loads(line)))
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise HybridizeError(f"choice: {path} line {number}: {error}") from None
    if not items:
        raise bad("choice", str(path), "at least one row")
    return items


def _item(row: Any) -> Item:
    if "query" in row:
        pairs = tuple((row["query"], f" {choice}") for choice in row["choices"])
        return Item(pairs, _gold(row, len(pairs)))
    if "option1" in row:
        before, _, after = row["sentence"].partition("_")
        if not after.strip():
            raise ValueError("the sentence has no words behind its '_'")
        pairs = tuple((before + option, f" {after.strip()}") for option in (row["option1"], row["option2"]))
        return Item(pairs, _gold(row, 2))
    if "continuation" in row:
        return Item(((row["context"], row["continuation"]),), 0)
    if "sentence_good" in row:
        return Item((("", row["sentence_good"]), ("", row["sentence_bad"])), 0)
    raise ValueError(
        f"got the fields {sorted(row)}, expected query/choices/gold, sentence/option1/option2/gold, context/continuation or "
        "sentence_good/sentence_bad"
    )


def _gold(row: Any, options: int) -> int:
    if not isinstance(row["gold"], int) or not 0 <= row["gold"] < options:
        raise ValueError(f"gold: got {row['gold']!r}, expected 0 to {options - 1}")
    return row["gold"]


def continuation_prompt(tokenizer: Any, context: str, continuation: str) -> Prompt:
    """Token ids of context + continuation, split as lm-evaluation-harness splits them.

    Spaces at the end of the context belong to the continuation; the two are encoded as one text; an empty context is the
    tokenizer's BOS, or its end-of-text token where it has none.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    if not context:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids, split = [start, *encode(continuation)], 1
    else:
        kept = context.rstrip()
        ids, split = encode(context + continuation), len(encode(kept))
    return Prompt(tuple(ids), split, "continuation", len(ids), 0.0, continuation)
