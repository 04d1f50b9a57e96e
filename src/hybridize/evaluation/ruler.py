"""RULER scores: greedy answers in left-padded batches, and the share of references they contain; or, at a prefill's cost
where there is one right answer, whether greedy decoding would begin with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridize.answers import greedy_texts, within_tokens
from hybridize.data.ruler import RulerPrompt
from hybridize.errors import bad
from hybridize.evaluation.cells import Cell
from hybridize.evaluation.retrieval import retrieval_hits


def ruler_score(answer: str, references: Sequence[str], metric: str) -> float:
    """RULER's string match, case ignored: "all", the share of references found; "part", 1 if any is."""
    if metric not in ("all", "part"):
        raise bad("metric", metric, "'all' or 'part'")
    found = [reference.lower() in answer.lower() for reference in references]
    return float(any(found)) if metric == "part" else sum(found) / len(found)


def ruler_answers(
    model: Any, tokenizer: Any, prompts: Iterable[RulerPrompt], *, batch_tokens: int = 16384
) -> list[tuple[RulerPrompt, str]]:
    """Each prompt with the model's greedy answer, in the given order; rows of a batch are padded on the left.

    Tasks share batches: one that answers in fewer tokens than its neighbours has its answer cut at its own limit, which is
    the answer it gives alone.
    """
    answered: list[tuple[RulerPrompt, str]] = []
    for batch in within_tokens(prompts, lambda prompt: len(prompt.ids) + prompt.new_tokens, batch_tokens):
        texts = greedy_texts(model, tokenizer, [p.ids for p in batch], [p.new_tokens for p in batch])
        answered += zip(batch, texts, strict=True)
    return answered


def forced_cells(
    model: Any,
    prompts: Sequence[RulerPrompt],
    *,
    batch_tokens: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """One cell a (task, length): 1 where every token of the right answer is the argmax behind those before it.

    That is stricter than `ruler_cells`, which finds the answer anywhere in what was written.
    """
    forced = [prompt.forced() for prompt in prompts]
    hits = retrieval_hits(model, forced, batch_tokens=batch_tokens, progress=progress)
    found: dict[tuple[str, int], list[float]] = {}
    for prompt, hit in zip(prompts, hits, strict=True):
        found.setdefault((prompt.task, prompt.length), []).append(float(hit))
    return [Cell(task, "score", "share", tuple(scores), context=length) for (task, length), scores in found.items()]


def ruler_cells(answered: Sequence[tuple[RulerPrompt, str]]) -> list[Cell]:
    """One cell a (task, length): a score a prompt."""
    found: dict[tuple[str, int], list[float]] = {}
    for prompt, answer in answered:
        score = ruler_score(answer, prompt.references, prompt.metric)
        found.setdefault((prompt.task, prompt.length), []).append(score)
    return [Cell(task, "score", "mean", tuple(scores), context=length) for (task, length), scores in found.items()]
