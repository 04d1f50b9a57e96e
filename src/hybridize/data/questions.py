"""RULER's qa_1 and qa_2 over the user's own SQuAD and HotpotQA files, as their authors publish them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridize.data.ruler_tasks import Example, Task
from hybridize.errors import HybridizeError, bad


@dataclass(frozen=True)
class Question:
    """A question with its gold documents and answers, any of which is right (SQuAD, HotpotQA)."""

    question: str
    gold: tuple[str, ...]
    answers: tuple[str, ...]


def questions(items: Sequence[Question], documents: Sequence[str]) -> Task:
    """qa_1 and qa_2 over the user's data: gold documents shuffled among distractors."""

    def build(rng: random.Random, size: int, text: str) -> Example:
        item = rng.choice(list(items))
        others = [d for d in documents if d not in item.gold]
        if size > len(others):
            raise bad("documents", len(others), f"at least {size} distractors for this length")
        shown = [*item.gold, *rng.sample(others, size)]
        rng.shuffle(shown)
        ask = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        context = "\n\n".join(f"Document {i + 1}:\n{document}" for i, document in enumerate(shown))
        return Example(
            f"{ask}\n\nThe following are given documents.\n\n{context}\n\n{ask}\n\nQuestion: {item.question}",
            " Answer:",
            item.answers,
        )

    return Task(build, 32, "part")


def load_questions(path: str | Path) -> tuple[str, Task]:
    """("qa_1", task) of a SQuAD file, ("qa_2", task) of a HotpotQA one, told apart by their fields.

    SQuAD: {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]}; questions without an
    answer are left out. HotpotQA: [{"question", "answer", "context": [[title, [sentence, ...]], ...]}].

    Raises:
        HybridizeError: no such file, no JSON, neither kind, or no question with an answer.
    """
    path = Path(path)
    if not path.is_file():
        raise bad("qa", str(path), "an existing .json file of SQuAD or HotpotQA")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        squad = isinstance(data, dict)
        items, documents = _squad(data) if squad else _hotpot(data)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise HybridizeError(f"qa: {path} is no SQuAD or HotpotQA file ({type(error).__name__}: {error})") from None
    if not items:
        raise bad("qa", str(path), "at least one question with an answer")
    return ("qa_1" if squad else "qa_2"), questions(items, list(dict.fromkeys(documents)))


def _squad(data: Any) -> tuple[list[Question], list[str]]:
    items: list[Question] = []
    documents: list[str] = []
    for paragraph in (paragraph for article in data["data"] for paragraph in article["paragraphs"]):
        documents.append(paragraph["context"])
        for qa in paragraph["qas"]:
            answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
            if answers:
                items.append(Question(qa["question"], (paragraph["context"],), answers))
    return items, documents


def _hotpot(data: Any) -> tuple[list[Question], list[str]]:
    items: list[Question] = []
    documents: list[str] = []
    for row in data:
        mine = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in row["context"])
        items.append(Question(row["question"], mine, (row["answer"],)))
        documents += mine
    return items, documents
