"""What the verbs do: score, plan, convert and prove, in resumable steps of a run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybridize.conversion import convert
from hybridize.data.choice import load_items
from hybridize.data.needles import KINDS, Prompt, needle_prompts
from hybridize.data.ruler import ruler_prompts
from hybridize.data.text import load_text
from hybridize.errors import bad
from hybridize.evaluation.choice import choice_results, choice_rows
from hybridize.evaluation.perplexity import perplexity_rows
from hybridize.evaluation.retrieval import retrieval_hits, retrieval_rows
from hybridize.evaluation.ruler import ruler_answers, ruler_rows
from hybridize.geometry import geometry_of
from hybridize.loading import Loaded
from hybridize.methods.nll import plan_from_scores, score
from hybridize.operators.specs import Window
from hybridize.plan import AttentionPlan
from hybridize.results import quality_row
from hybridize.runs import RunFolder
from hybridize.scores import Scores

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
Report = Callable[[str, int, int], None]  # (what, done, of)


def silent(what: str, done: int, of: int) -> None:
    """A Report that shows nothing."""


@dataclass(frozen=True)
class Selection:
    """How layers are chosen, and what the others run."""

    selector: str = "drop"
    budget: float = 0.25
    window: int = 128
    sinks: int = 4
    sink_positions: str = "absolute"
    decode: str = "window"
    unit: str = "layer"
    prompts: int = 8
    lengths: tuple[int, ...] = (1024,)
    kinds: tuple[str, ...] = tuple(sorted(KINDS))
    text: str = "calibration"
    seed: int = 1
    batch_tokens: int = 1024

    @property
    def cheap(self) -> Window:
        return Window(self.window, self.sinks, self.sink_positions, self.decode)

    def as_config(self) -> dict[str, Any]:
        return {**asdict(self), "lengths": list(self.lengths), "kinds": list(self.kinds)}


@dataclass(frozen=True)
class Proof:
    """What a plan is measured on."""

    prompts: int = 20
    lengths: tuple[int, ...] = (1024,)
    kinds: tuple[str, ...] = ("number",)
    text: str = "evaluation"
    seed: int = 2
    method: str = "argmax"
    perplexity_windows: int = 4
    batch_tokens: int = 4096
    ruler: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    limit: int | None = None

    def as_config(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def hybrid_of(loaded: Loaded) -> Any:
    """The loaded model as a hybrid that runs its own plan, or the base's plan where it is a base."""
    if loaded.is_hybrid:
        return loaded.model
    return convert(loaded.model, AttentionPlan.base(geometry_of(loaded.model.config)))


def compute_scores(run: RunFolder, loaded: Loaded, model: Any, ask: Selection, report: Report = silent) -> Scores:
    """Scores by `ask.selector`; one resumable step a prompt where prompts are scored one by one."""
    AttentionPlan.base(model.plan.geometry).check_context(max(ask.lengths), "length")
    text, prompts = "\n\n".join(load_text(ask.text)), []
    for i, length in enumerate(ask.lengths):  # evenly over the lengths, the first ones take what is left over
        count = (ask.prompts + len(ask.lengths) - 1 - i) // len(ask.lengths)
        prompts += needle_prompts(loaded.tokenizer, text, length=length, count=count, kinds=ask.kinds, seed=ask.seed)

    def part(chosen: Sequence[Prompt], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        made = score(
            model,
            chosen,
            ask.cheap,
            ask.selector,
            budget=ask.budget,
            unit=ask.unit,
            batch_tokens=ask.batch_tokens,
            progress=progress,
        )
        return made.to_dict()

    if ask.selector not in ("nll", "drop"):
        steps = run.step("score", lambda: part(prompts, lambda done, of: report("scoring", done, of)))
        return Scores.from_dict(steps)
    parts = []
    for i, prompt in enumerate(prompts):
        parts.append(Scores.from_dict(run.step(f"score-{i:04}", partial(part, [prompt]))))
        report("scoring", i + 1, len(prompts))
    provenance = {**parts[0].provenance, "prompts": len(prompts), "kinds": sorted({p.kind for p in prompts})}
    provenance["lengths"] = list(ask.lengths)
    return Scores(ask.unit, np.concatenate([p.samples for p in parts]), {**provenance, "seed": ask.seed, "text": ask.text})


def plan_of_scores(scores: Scores, base: AttentionPlan, ask: Selection) -> AttentionPlan:
    """The plan of `ask` from scores, for the model whose base plan is `base`.

    Raises:
        HybridizeError: scores of another base.
    """
    identity, mine = scores.provenance.get("identity"), base.geometry.identity
    if identity and identity != mine:
        raise bad("scores.identity", identity, f"{mine!r}, as the model has (these scores were made for another base)")
    return plan_from_scores(scores, base, ask.cheap, ask.budget)


def prove(
    run: RunFolder, loaded: Loaded, model: Any, plans: dict[str, AttentionPlan], proof: Proof, report: Report = silent
) -> list[dict[str, Any]]:
    """Quality rows of every plan on the same prompts, each with its costs as shares of the base's."""
    rows: list[dict[str, Any]] = []
    text = "\n\n".join(load_text(proof.text))
    of, done = len(plans) * proof.prompts * len(proof.lengths), 0
    for length in proof.lengths:
        prompts = needle_prompts(
            loaded.tokenizer, text, length=length, count=proof.prompts, kinds=proof.kinds, seed=proof.seed
        )
        for name, plan in plans.items():
            plan.check_context(length, "length")
            with model.temporary_plan(plan):
                measure = partial(
                    retrieval_hits, model, prompts, method=proof.method, batch_tokens=proof.batch_tokens,
                    progress=partial(_count, report, done, of),
                )  # fmt: skip
                hits = run.step(f"needle-{length}-{name}", measure)
            done += len(prompts)
            report("retrieval", done, of)
            rows += [plan_row(name, plan, proof.seed, max(proof.lengths), cell) for cell in retrieval_rows(prompts, hits)]
    if proof.perplexity_windows:
        length = min(proof.lengths)
        for i, (name, plan) in enumerate(plans.items()):
            with model.temporary_plan(plan):
                cells = run.step(
                    f"perplexity-{length}-{name}",
                    lambda: perplexity_rows(model, loaded.tokenizer, [text], length=length, windows=proof.perplexity_windows),
                )
            report("perplexity", i + 1, len(plans))
            rows += [plan_row(name, plan, proof.seed, max(proof.lengths), cell) for cell in cells]
    return rows + _prove_tasks(run, loaded, model, plans, proof, text, report)


def _prove_tasks(
    run: RunFolder, loaded: Loaded, model: Any, plans: dict[str, AttentionPlan], proof: Proof, text: str, report: Report
) -> list[dict[str, Any]]:
    """RULER tasks and choice sets, one resumable step a (task, length, plan)."""

    def ruler(task: str, length: int) -> list[dict[str, Any]]:
        prompts = ruler_prompts(loaded.tokenizer, task, text, length=length, count=proof.prompts, seed=proof.seed)
        return ruler_rows(ruler_answers(model, loaded.tokenizer, prompts, batch_tokens=proof.batch_tokens))

    def choice(file: str) -> list[dict[str, Any]]:
        items = load_items(file)[: proof.limit]
        return choice_rows(Path(file).stem, choice_results(model, loaded.tokenizer, items, batch_tokens=proof.batch_tokens))

    measures = [(f"ruler-{task}-{n}", partial(ruler, task, n)) for task in proof.ruler for n in proof.lengths]
    measures += [(f"choice-{Path(file).stem}", partial(choice, file)) for file in proof.choice]
    rows, done = [], 0
    for step, measure in measures:
        for name, plan in plans.items():
            with model.temporary_plan(plan):
                cells = run.step(f"{step}-{name}", measure)
            done += 1
            report("tasks", done, len(measures) * len(plans))
            rows += [plan_row(name, plan, proof.seed, max(proof.lengths), cell) for cell in cells]
    return rows


def _count(report: Report, before: int, of: int, done: int, _: int) -> None:
    report("retrieval", before + done, of)


def plan_row(name: str, plan: AttentionPlan, seed: int, context: int, cell: dict[str, Any]) -> dict[str, Any]:
    """A results row of one plan, with what it costs at `context` as a share of the base."""
    base = AttentionPlan.base(plan.geometry)
    windows = [spec for spec in plan.specs() if isinstance(spec, Window)]
    window = max(windows, key=lambda spec: spec.size) if windows else None
    is_base = plan.assignment == base.assignment
    row = quality_row(
        method="base" if is_base else "nll",
        selector=name,
        operators=",".join(spec.kind for spec in plan.specs()),
        budget=len(plan.kept_groups) / (plan.geometry.layers * plan.geometry.kv_heads),
        window=window.size if window else None,
        sinks=window.sinks if window else None,
        decode=window.decode if window else "full",
        seed=seed,
        **cell,
    )
    return row | {
        "kept": len(plan.kept_layers),
        "cache_ratio": plan.cache_bytes(context) / base.cache_bytes(context),
        "prefill_ratio": plan.prefill_flops(context) / base.prefill_flops(context),
        "decode_ratio": plan.decode_flops(context) / base.decode_flops(context),
    }


@contextlib.contextmanager
def counted(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time of a block to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def cost_rows(plan: AttentionPlan) -> list[dict[str, Any]]:
    """What a plan costs over contexts, and as shares of the base."""
    base = AttentionPlan.base(plan.geometry)
    return [
        {
            "context": n,
            "cache bytes": plan.cache_bytes(n),
            "of base": plan.cache_bytes(n) / base.cache_bytes(n),
            "prefill FLOPs": plan.prefill_flops(n),
            "prefill of base": plan.prefill_flops(n) / base.prefill_flops(n),
            "decode FLOPs": plan.decode_flops(n),
            "decode of base": plan.decode_flops(n) / base.decode_flops(n),
        }
        for n in CONTEXTS
    ]
