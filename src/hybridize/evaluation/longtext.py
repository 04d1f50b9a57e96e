"""Scores of free answers: token F1, ROUGE-L, edit similarity, classes, numbers, and whether the answer is contained."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hybridize.answers import greedy_texts, within_tokens
from hybridize.data.longtext import LongItem, long_prompt
from hybridize.evaluation.cells import Cell

ARTICLES = re.compile(r"\b(a|an|the)\b")


def _words(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return ARTICLES.sub(" ", text).split()


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of the precision and recall of words (SQuAD)."""
    a, b = _words(answer), _words(reference)
    return _f_measure(sum((Counter(a) & Counter(b)).values()), len(a), len(b))


def rouge_l(answer: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004)."""
    a, b = answer.lower().split(), reference.lower().split()
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return _f_measure(row[-1], len(a), len(b))


def _f_measure(common: int, a: int, b: int) -> float:
    return 2 * common / (a + b) if common else 0.0


def contains(answer: str, reference: str) -> float:
    """1 where the answer has the reference's words in one piece, else 0."""
    return float(f" {' '.join(_words(reference))} " in f" {' '.join(_words(answer))} ")


def edit(answer: str, reference: str) -> float:
    """Similarity of the first line that is neither empty nor a comment, 0..1 (difflib)."""
    lines = [line for line in answer.lstrip("\n").split("\n") if line.strip() and not re.match(r"\s*(`|#|//)", line)]
    return difflib.SequenceMatcher(None, lines[0] if lines else "", reference, autojunk=False).ratio()


def number(answer: str, reference: str) -> float:
    """Share of the numbers in the answer that are the reference's."""
    wanted, found = re.findall(r"\d+", reference), re.findall(r"\d+", answer)
    return sum(n == wanted[0] for n in found) / len(found) if found and wanted else 0.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "contains": contains,
    "edit": edit,
    "number": number,
}


def long_score(item: LongItem, answer: str) -> float:
    """The best score over the references; few-shot tasks are read up to the first line break."""
    if not item.chat and item.metric != "edit":
        answer = answer.lstrip("\n").split("\n")[0]
    if item.metric == "class":
        named = [name for name in item.classes if name in answer]
        # "Sport" is no answer where "Sport team" is
        named = [name for name in named if not any(name != other and name in other for other in named)]
        return float(item.references[0] in named) / len(named) if named else 0.0
    return max(METRICS[item.metric](answer, reference) for reference in item.references)


def long_answers(model: Any, tokenizer: Any, items: Sequence[LongItem], limit: int, batch_tokens: int = 16384) -> list[str]:
    """Greedy answers in the items' order; batches are left-padded."""
    prompts = [long_prompt(tokenizer, item, limit) for item in items]
    order = sorted(range(len(items)), key=lambda i: (items[i].new_tokens, len(prompts[i])))
    answers = [""] * len(items)
    for chosen in within_tokens(order, lambda i: len(prompts[i]) + items[i].new_tokens, batch_tokens):
        texts = greedy_texts(model, tokenizer, [prompts[i] for i in chosen], [items[i].new_tokens for i in chosen])
        for i, text in zip(chosen, texts, strict=True):
            answers[i] = text
    return answers


def long_cells(items: Sequence[LongItem], answers: Sequence[str]) -> list[Cell]:
    """One cell a task."""
    found: dict[tuple[str, str], list[float]] = {}
    for item, answer in zip(items, answers, strict=True):
        found.setdefault((item.task, item.metric), []).append(long_score(item, answer))
    return [Cell(task, metric, "mean", tuple(scores)) for (task, metric), scores in found.items()]
