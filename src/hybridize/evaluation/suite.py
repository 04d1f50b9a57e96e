"""What a plan is measured on, as a list of resumable measures: the same for every plan of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hybridize.data.choice import load_items
from hybridize.data.longtext import load_long
from hybridize.data.needles import needle_prompts
from hybridize.data.questions import load_questions
from hybridize.data.ruler import RulerPrompt, cached_prompts
from hybridize.data.ruler_tasks import TASKS, Task
from hybridize.data.text import load_text
from hybridize.errors import bad
from hybridize.evaluation.cells import Cell
from hybridize.evaluation.choice import choice_cells, choice_results
from hybridize.evaluation.drift import base_path, chain_cell, drift_prompts, free_chain, path_cells, path_choices
from hybridize.evaluation.longtext import long_answers, long_cells
from hybridize.evaluation.perplexity import position_cells, sliding_cell
from hybridize.evaluation.retrieval import retrieval_cells, retrieval_hits
from hybridize.evaluation.ruler import forced_cells, ruler_answers, ruler_cells

DRIFT_PROMPT = 512  # tokens before a long generation, about
CHOICE_TOKENS = 32768  # many short rows: logits over the vocabulary, not keys, are what fills the memory
Tick = Callable[[int, int], None]  # done, of
Store = Callable[[str, Callable[[], Any]], Any]  # RunFolder.step: a named result, made once


@dataclass(frozen=True)
class Proof:
    """What a plan is measured on.

    Args:
        prompts: needle prompts a length, and RULER prompts a task and length.
        lengths: tokens. kinds: of needles; none where empty.
        text: of haystacks and perplexity by position. seed: of all prompts.
        method: "argmax" or "generate", of needles.
        perplexity_windows: stretches for perplexity by position; 0: none.
        ruler: task names. qa: SQuAD or HotpotQA files. choice: jsonl sets or folders; limit: rows of each.
        ruler_method: "generate", or, where every task has one right answer, "argmax": teacher-forced, one prefill a prompt.
        perplexity: files whose whole text is scored with a sliding `stride` (default half the view) at `view` tokens
            (default the shortest length); limit: views of each.
        long: LongBench or LongMemEval files, read up to the longest length.
        drift: tokens of a long generation (0: none), `drift_prompts` of each kind.
        beyond: lengths may exceed what some plan was trained to see; such a plan is not measured there (else: refused).
    """

    prompts: int = 20
    lengths: tuple[int, ...] = (1024,)
    kinds: tuple[str, ...] = ("number",)
    text: str = "evaluation"
    seed: int = 2
    method: str = "argmax"
    perplexity_windows: int = 4
    batch_tokens: int = 4096
    ruler: tuple[str, ...] = ()
    ruler_method: str = "generate"
    qa: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    perplexity: tuple[str, ...] = ()
    view: int | None = None
    stride: int | None = None
    long: tuple[str, ...] = ()
    drift: int = 0
    drift_prompts: int = 8
    limit: int | None = None
    beyond: bool = False

    def __post_init__(self) -> None:
        for name, low in (("prompts", 1), ("perplexity_windows", 0), ("batch_tokens", 1), ("drift", 0), ("drift_prompts", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise bad(name, value, f"an integer >= {low}")
        for name in ("view", "stride", "limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise bad(name, value, "an integer >= 1, or nothing")
        if not self.lengths or any(not isinstance(n, int) or n < 1 for n in self.lengths):
            raise bad("lengths", self.lengths, "numbers of at least 1")
        if unknown := [task for task in self.ruler if task not in TASKS]:
            raise bad("ruler", unknown[0], f"'all' or names of {sorted(TASKS)}")
        if self.ruler_method not in ("generate", "argmax"):
            raise bad("ruler_method", self.ruler_method, "'generate' or 'argmax'")
        if self.ruler_method == "argmax" and (many := [*self.qa, *(task for task in self.ruler if not TASKS[task].one)]):
            raise bad("ruler_method", "argmax", f"'generate' for {many[0]!r}, which has no one right answer")
        for name in ("qa", "choice", "perplexity", "long"):
            stems = [Path(file).stem for file in getattr(self, name)]
            if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
                raise bad(name, twice[0], "files of different names: a set is known by its file's name")

    def as_config(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Measure:
    """One resumable piece of a plan's measurement.

    Args:
        name: of its step. phase: of the progress bar.
        tokens: read in prefills, at most. steps: decoded one by one (a batch counts once).
        run: (model, tick) to cells; a cell may go on in the next measure.
        reach: tokens of context that it needs.
    """

    name: str
    phase: str
    tokens: int
    steps: int
    run: Callable[[Any, Tick], list[Cell]]
    reach: int = 0


def measures(tokenizer: Any, proof: Proof, store: Store) -> list[Measure]:
    """All measures of a proof. Files are read, and so refused, here; prompts are made when they are first needed.

    Raises:
        HybridizeError: a file that is missing or broken (its name and line are given).
    """
    text = cache(lambda: "\n\n".join(load_text(proof.text)))
    found = [*_needles(tokenizer, proof, text), *_ruler(tokenizer, proof, text), *_choices(tokenizer, proof)]
    found += _perplexities(tokenizer, proof, text)
    found += [_long(tokenizer, proof, file) for file in proof.long]
    return [*found, *_drift(tokenizer, proof, text, store)]


def _needles(tokenizer: Any, proof: Proof, text: Callable[[], str]) -> list[Measure]:
    made = cache(
        lambda length: needle_prompts(
            tokenizer, text(), length=length, count=proof.prompts, kinds=proof.kinds, seed=proof.seed
        )
    )

    def run(length: int, model: Any, tick: Tick) -> list[Cell]:
        how: dict[str, Any] = {"method": proof.method, "batch_tokens": proof.batch_tokens, "progress": tick}
        hits = retrieval_hits(model, made(length), **how)
        return retrieval_cells(made(length), hits)

    lengths = proof.lengths if proof.kinds else ()
    return [Measure(f"needle-{n}", "retrieval", n * proof.prompts, 0, partial(run, n), n) for n in lengths]


def _ruler(tokenizer: Any, proof: Proof, text: Callable[[], str]) -> list[Measure]:
    """Batches of as many prompts as fit, tasks side by side: decoding costs what its longest answer costs."""
    tasks: list[tuple[str, Task, str]] = [(name, TASKS[name], "") for name in proof.ruler]
    tasks += [(*load_questions(file), Path(file).read_text(encoding="utf-8")) for file in proof.qa]
    if len({name for name, _, _ in tasks}) < len(tasks):
        raise bad("qa", proof.qa, "at most one SQuAD file (qa_1) and one HotpotQA file (qa_2)")

    @cache
    def made(length: int) -> list[RulerPrompt]:
        prompts = []
        for name, task, source in tasks:
            prompts += cached_prompts(
                tokenizer, task, text(), length=length, count=proof.prompts, seed=proof.seed, name=name, source=source
            )
        return prompts

    def run(length: int, first: int, last: int, model: Any, tick: Tick) -> list[Cell]:
        prompts = made(length)[first:last]
        if proof.ruler_method == "argmax":
            return forced_cells(model, prompts, batch_tokens=proof.batch_tokens, progress=tick)
        return ruler_cells(ruler_answers(model, tokenizer, prompts, batch_tokens=length * len(prompts)))

    found = []
    for length in proof.lengths:
        count, rows = len(tasks) * proof.prompts, max(1, proof.batch_tokens // length)
        for first in range(0, count, rows):
            last = min(first + rows, count)
            steps = [] if proof.ruler_method == "argmax" else tasks[first // proof.prompts : (last - 1) // proof.prompts + 1]
            room = max((task.new_tokens for _, task, _ in steps), default=0)
            made_of = partial(run, length, first, last)
            found.append(Measure(f"ruler-{length}-{first}", "ruler", length * (last - first), room, made_of, length))
    return found


def _choices(tokenizer: Any, proof: Proof) -> list[Measure]:
    found = []
    for file in proof.choice:
        items = _first(load_items(file), proof.limit, spread=Path(file).is_dir())

        def run(model: Any, tick: Tick, file: str = file, items: Any = items) -> list[Cell]:
            tokens = min(proof.batch_tokens, CHOICE_TOKENS)
            results = choice_results(model, tokenizer, items, batch_tokens=tokens, progress=tick)
            return choice_cells(Path(file).stem, results)

        characters = sum(len(context) + len(continuation) for item in items for context, continuation in item.pairs)
        found.append(Measure(f"choice-{Path(file).stem}", "choice", characters // 4, 0, run))
    return found


def _first(items: list[Any], limit: int | None, spread: bool) -> list[Any]:
    """The first `limit` items, or as many spread evenly where the set is a folder of files."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)] if spread else items[:limit]


def _perplexities(tokenizer: Any, proof: Proof, text: Callable[[], str]) -> list[Measure]:
    found, shortest = [], min(proof.lengths)
    if proof.perplexity_windows:

        def by_position(model: Any, tick: Tick) -> list[Cell]:
            how: dict[str, Any] = {"length": shortest, "windows": proof.perplexity_windows, "progress": tick}
            return position_cells(model, tokenizer, [text()], **how)

        tokens = shortest * proof.perplexity_windows
        found.append(Measure(f"perplexity-{shortest}", "perplexity", tokens, 0, by_position, shortest))
    for file in proof.perplexity:
        documents, view = load_text(file), proof.view or shortest

        def sliding(model: Any, tick: Tick, file: str = file, documents: Any = documents, view: int = view) -> list[Cell]:
            how: dict[str, Any] = {"length": view, "stride": proof.stride, "limit": proof.limit, "progress": tick}
            return [sliding_cell(model, tokenizer, documents, task=Path(file).stem, **how)]

        stride = proof.stride or max(1, view // 2)
        views = min(proof.limit or 10**9, max(1, sum(map(len, documents)) // 4 // stride))
        found.append(Measure(f"sliding-{Path(file).stem}", "perplexity", views * view, 0, sliding, view))
    return found


def _long(tokenizer: Any, proof: Proof, file: str) -> Measure:
    items, limit = load_long(file)[: proof.limit], max(proof.lengths)

    def run(model: Any, tick: Tick) -> list[Cell]:
        return long_cells(items, long_answers(model, tokenizer, items, limit, proof.batch_tokens))

    rows = max(1, proof.batch_tokens // limit)
    steps = -(-len(items) // rows) * max(item.new_tokens for item in items)
    return Measure(f"long-{Path(file).stem}", "long texts", limit * len(items), steps, run, limit)


def _drift(tokenizer: Any, proof: Proof, text: Callable[[], str], store: Store) -> list[Measure]:
    """The base is measured first, so that its path is there when another plan is asked to follow it."""
    made = cache(lambda: drift_prompts(tokenizer, text(), proof.drift_prompts, proof.seed))
    lengths = {"text": proof.drift, "chain": min(proof.drift, 1024)}

    def path(kind: str, model: Any) -> dict[str, Any]:
        tokens = base_path(model, made()[kind], lengths[kind], proof.seed)
        return {"tokens": tokens, "choices": path_choices(model, made()[kind], tokens)[0].tolist()}

    def run(kind: str, model: Any, tick: Tick) -> list[Cell]:
        base = store(f"drift-path-{kind}", partial(path, kind, model))
        choices, nll = path_choices(model, made()[kind], base["tokens"])
        cells = path_cells(kind, choices, nll, torch.tensor(base["choices"]))
        if kind == "chain":
            free = free_chain(model, tokenizer, made()[kind], lengths[kind])
            cells.append(chain_cell(tokenizer, made()[kind], free, lengths[kind]))
        return cells

    kinds = lengths if proof.drift else {}
    rows = proof.drift_prompts
    return [
        Measure(f"drift-{kind}", "drift", rows * n, n if kind == "chain" else 0, partial(run, kind), DRIFT_PROMPT + n)
        for kind, n in kinds.items()
    ]
