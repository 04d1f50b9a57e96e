"""LongBench and LongMemEval from the user's own files, as prompts that fit a model.

LongBench (Bai et al. 2023, arXiv 2308.14508): jsonl rows with `context`, `input`, `answers`, `dataset`. LongMemEval (Wu et
al. 2024, arXiv 2410.10813): a json list with `question`, `answer`, `haystack_sessions`. Instructions are our own, one a kind
of task, and LongMemEval is scored without a judge model: numbers compare plans, not with the papers' tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.data.needles import chat_frame
from hybridize.errors import HybridizeError, bad

# metric, room for the answer (tokens), whether the user's message gets the chat template
LONGBENCH: dict[str, tuple[str, int, bool]] = {
    "narrativeqa": ("f1", 128, True),
    "qasper": ("f1", 128, True),
    "multifieldqa_en": ("f1", 64, True),
    "hotpotqa": ("f1", 32, True),
    "2wikimqa": ("f1", 32, True),
    "musique": ("f1", 32, True),
    "triviaqa": ("f1", 32, False),
    "gov_report": ("rouge_l", 512, True),
    "qmsum": ("rouge_l", 512, True),
    "multi_news": ("rouge_l", 512, True),
    "samsum": ("rouge_l", 128, False),
    "trec": ("class", 64, False),
    "passage_retrieval_en": ("number", 32, True),
    "passage_count": ("number", 32, True),
    "lcc": ("edit", 64, False),
    "repobench-p": ("edit", 64, False),
}
ASK = {
    "f1": ("Answer the question from the text. Give only the answer.\n\n", "\n\nQuestion: {input}\nAnswer:"),
    "rouge_l": ("Summarise the text.\n\n", "\n\n{input}\nSummary:"),
    "class": ("Name the type of the last question, as the examples do.\n\n", "\n{input}"),
    "number": ("", "\n\n{input}\nAnswer:"),
    "edit": ("", "{input}"),
    "contains": (
        "Here are earlier conversations between you and a user.\n\n",
        "\n\nToday is {date}. The user asks: {input}\nAnswer:",
    ),
}


@dataclass(frozen=True)
class LongItem:
    """One question over a long text.

    Args:
        context: what is cut in its middle where the whole does not fit.
        before, after: what stands around it and is never cut.
        metric: of evaluation/longtext.py. classes: names that a "class" answer may be.
    """

    task: str
    before: str
    context: str
    after: str
    references: tuple[str, ...]
    metric: str
    new_tokens: int
    chat: bool = True
    classes: tuple[str, ...] = ()


def load_long(path: str | Path) -> list[LongItem]:
    """Items of a LongBench .jsonl or a LongMemEval .json file.

    Raises:
        HybridizeError: no such file, neither kind, a data set that needs Chinese word segmentation, or no rows.
    """
    path = Path(path)
    if not path.is_file():
        raise bad("long", str(path), "an existing LongBench .jsonl or LongMemEval .json file")
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(x) for x in text.splitlines() if x.strip()]
    except json.JSONDecodeError as error:
        raise HybridizeError(f"long: {path} is not JSON ({error})") from None
    if not isinstance(rows, list) or not rows:
        raise bad("long", str(path), "at least one row")
    items = []
    for number, row in enumerate(rows, 1):
        try:
            items.append(_memory(row) if "haystack_sessions" in row else _longbench(row))
        except (KeyError, TypeError, ValueError) as error:
            raise HybridizeError(f"long: {path} row {number}: {type(error).__name__}: {error}") from None
    return items


def _longbench(row: Any) -> LongItem:
    name = row.get("dataset", "hotpotqa").removesuffix("_e")
    if name not in LONGBENCH:
        raise bad("dataset", name, f"one of {sorted(LONGBENCH)}")
    metric, room, chat = LONGBENCH[name]
    before, after = ASK[metric]
    references = tuple(map(str, row["answers"]))
    if not references:
        raise bad("answers", [], "at least one")
    classes = tuple(row.get("all_classes") or ())
    return LongItem(name, before, row["context"], after.format(input=row["input"]), references, metric, room, chat, classes)


def _memory(row: Any) -> LongItem:
    dates = row.get("haystack_dates") or [""] * len(row["haystack_sessions"])
    sessions = [
        f"[{date}]\n" + "\n".join(f"{turn['role']}: {turn['content']}" for turn in session)
        for date, session in zip(dates, row["haystack_sessions"], strict=True)
    ]
    before, after = ASK["contains"]
    asked = after.format(input=row["question"], date=row.get("question_date", "unknown"))
    task = f"longmemeval_{row['question_type']}" if "question_type" in row else "longmemeval"
    return LongItem(task, before, "\n\n".join(sessions), asked, (str(row["answer"]),), "contains", 64)


def long_prompt(tokenizer: Any, item: LongItem, limit: int) -> tuple[int, ...]:
    """Token ids of at most `limit` - `item.new_tokens`; the middle of the context is left out where it is longer.

    Raises:
        HybridizeError: not even the question fits.
    """

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    head, tail = chat_frame(tokenizer) if item.chat else (bos, [])
    before, context, after = [*head, *encode(item.before)], encode(item.context), [*encode(item.after), *tail]
    room = limit - item.new_tokens - len(before) - len(after)
    if room < 1:
        raise bad("length", limit, f"at least {limit - room + 1} tokens for a question of {item.task!r}")
    if len(context) > room:
        context = context[: room // 2] + context[len(context) - (room - room // 2) :]
    return (*before, *context, *after)
