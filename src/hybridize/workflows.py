"""What the verbs do: score, plan, convert and prove, in resumable steps of a run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from hybridize.conversion import convert
from hybridize.data.needles import Prompt, needle_prompts
from hybridize.data.text import load_text
from hybridize.evaluation.cells import Cell, against, merged
from hybridize.evaluation.suite import DRIFT_PROMPT, Measure, Proof, measures
from hybridize.geometry import geometry_of
from hybridize.loading import Loaded
from hybridize.methods import igal, l2a, rtpurbo
from hybridize.methods.nll import plan_from_scores
from hybridize.operators.specs import Gated, Indexed, Linear, OperatorSpec, Window
from hybridize.plan import AttentionPlan
from hybridize.results import quality_row
from hybridize.runs import RunFolder
from hybridize.scores import Scores
from hybridize.scoring.scorers import SCORERS, kinds_of, score, unit_of

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
Report = Callable[[str, float, int], None]  # (what, done, of)


def silent(what: str, done: float, of: int) -> None:
    """A Report that shows nothing."""


@dataclass(frozen=True)
class Selection:
    """How layers, or groups, are chosen, and what the others run. unit, kinds: None for the selector's own.

    linear: IGAL's, what the chosen run (`control` names a control of it), or FlashMorph's, what the others run; None: the
        chosen run what the base does, the others a window. indexed: RTPurbo's, what chosen heads run. gated: L2A's, what
        every layer runs.
    """

    selector: str = "drop"
    budget: float = 0.25
    window: int = 128
    sinks: int = 4
    sink_positions: str = "absolute"
    decode: str = "window"
    unit: str | None = None
    prompts: int = 8
    lengths: tuple[int, ...] = (1024,)
    kinds: tuple[str, ...] | None = None
    text: str = "calibration"
    seed: int = 1
    batch_tokens: int = 1024
    linear: Linear | None = None
    indexed: Indexed | None = None
    gated: Gated | None = None
    control: str | None = None

    @property
    def needs_scores(self) -> bool:
        if self.gated is not None:
            return False
        if self.indexed is not None:
            return rtpurbo.needs_scores(self.control)
        return self.linear is None or igal.needs_scores(self.control)

    @property
    def cheap(self) -> Window:
        return Window(self.window, self.sinks, self.sink_positions, self.decode)

    @property
    def counts(self) -> list[int]:
        """Prompts of each length: evenly over the lengths, the first ones take what is left over."""
        return [(self.prompts + len(self.lengths) - 1 - i) // len(self.lengths) for i in range(len(self.lengths))]

    @property
    def tokens(self) -> int:
        """Calibration tokens; a selector reads each of them many times."""
        return sum(count * length for count, length in zip(self.counts, self.lengths, strict=True))

    def as_config(self) -> dict[str, Any]:
        asked = {"unit": self.asked_unit, "lengths": list(self.lengths), "kinds": list(self.asked_kinds)}
        return {**asdict(self), **asked}

    @property
    def asked_unit(self) -> str:
        if self.linear is not None and self.selector not in SCORERS:
            return self.unit or "layer"  # learned gates, or layers that need no scores (FlashMorph)
        return unit_of(self.selector, self.unit)

    @property
    def asked_kinds(self) -> tuple[str, ...]:
        return kinds_of(self.selector) if self.kinds is None else self.kinds


def hybrid_of(loaded: Loaded) -> Any:
    """The loaded model as a hybrid that runs its own plan, or the base's plan where it is a base."""
    if loaded.is_hybrid:
        return loaded.model
    return convert(loaded.model, AttentionPlan.base(geometry_of(loaded.model.config)))


def compute_scores(
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    ask: Selection,
    report: Report = silent,
    step: str = "score",
    cheap: OperatorSpec | None = None,
) -> Scores:
    """Scores by `ask.selector`; one resumable step (named from `step` on) a prompt where prompts are scored one by one.

    `cheap`: what a unit runs that is not kept; None: the window that is asked for.
    """
    AttentionPlan.base(model.plan.geometry).check_context(max(ask.lengths), "length")
    text, prompts = "\n\n".join(load_text(ask.text)), []
    for count, length in zip(ask.counts, ask.lengths, strict=True):
        prompts += needle_prompts(loaded.tokenizer, text, length=length, count=count, kinds=ask.asked_kinds, seed=ask.seed)

    def part(chosen: Sequence[Prompt], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        made = score(
            model,
            chosen,
            ask.cheap if cheap is None else cheap,
            ask.selector,
            budget=ask.budget,
            unit=ask.asked_unit,
            batch_tokens=ask.batch_tokens,
            progress=progress,
        )
        return made.to_dict()

    if ask.selector not in ("nll", "drop"):
        steps = run.step(step, lambda: part(prompts, lambda done, of: report("scoring", done, of)))
        return Scores.from_dict(steps)
    parts = []
    for i, prompt in enumerate(prompts):
        parts.append(Scores.from_dict(run.step(f"{step}-{i:04}", partial(part, [prompt]))))
        report("scoring", i + 1, len(prompts))
    provenance = {**parts[0].provenance, "prompts": len(prompts), "kinds": sorted({p.kind for p in prompts})}
    provenance["lengths"] = list(ask.lengths)
    return Scores(
        ask.asked_unit, np.concatenate([p.samples for p in parts]), {**provenance, "seed": ask.seed, "text": ask.text}
    )


def plan_of_scores(scores: Scores | None, base: AttentionPlan, ask: Selection) -> AttentionPlan:
    """The plan of `ask` from scores (None where it needs none), for the model whose base plan is `base`.

    Raises:
        HybridizeError: scores of another base.
    """
    if scores is not None:
        scores.check_identity(base.geometry.identity)
    if ask.gated is not None:
        return l2a.l2a_plan(base, ask.gated, ask.control)
    if ask.indexed is not None:
        return rtpurbo.rtpurbo_plan(scores, base, ask.indexed, ask.budget, ask.control)
    if ask.linear is not None:
        return igal.igal_plan(scores, base, ask.linear, ask.cheap, ask.budget, ask.control)
    assert scores is not None
    return plan_from_scores(scores, base, ask.cheap, ask.budget)


@dataclass(frozen=True)
class Reference:
    """A plan as it was measured on weights that training then changes."""

    name: str
    plan: AttentionPlan
    cells: list[Cell]


def reference(
    run: RunFolder, model: Any, plan: AttentionPlan, proof: Proof, asked: Sequence[Measure], report: Report = silent
) -> Reference:
    """What `prove` compares with, measured now."""
    check_lengths(plan, proof)
    with model.temporary_plan(plan):
        return Reference("full", plan, measure(run, asked, "full", model, report))


def prove(
    run: RunFolder,
    loaded: Loaded,
    model: Any,
    plans: dict[str, AttentionPlan],
    proof: Proof,
    report: Report = silent,
    asked: Sequence[Measure] | None = None,
    before: Reference | None = None,
) -> list[dict[str, Any]]:
    """Quality rows of every plan on the same items, each with its costs as shares of the base's.

    The base is `before`, or else the first plan; rows of the others have their paired difference from it. `asked`: the proof's
    measures, where they are made already.
    """
    for plan in plans.values():
        check_lengths(plan, proof)
    if asked is None:
        asked = measures(loaded.tokenizer, proof, run.step)
    rows: list[dict[str, Any]] = []
    longest, base = max(proof.lengths), None if before is None else before.cells
    if before is not None:
        rows += paired_rows(plan_head(before.name, before.plan, proof.seed, longest), before.cells, None)
    for i, (name, plan) in enumerate(plans.items()):
        with model.temporary_plan(plan):
            cells = measure(run, asked, name, model, report, i, len(plans))
        rows += paired_rows(plan_head(name, plan, proof.seed, longest), cells, base)
        base = base or cells
    return rows


def check_lengths(plan: AttentionPlan, proof: Proof) -> None:
    """Refuse lengths at which the plan would meet RoPE distances that the base never saw, unless they may be left out."""
    if proof.beyond and plan.reaches(min(proof.lengths)):
        return
    plan.check_context(max(proof.lengths), "length")
    plan.check_context(proof.view or 1, "view")
    plan.check_context(proof.drift + DRIFT_PROMPT if proof.drift else 1, "drift")


def measure(
    run: RunFolder, asked: Sequence[Measure], name: str, model: Any, report: Report = silent, nth: int = 0, of: int = 1
) -> list[Cell]:
    """Cells of one plan, the model running it; a step a measure. The plan is number `nth` of `of`, for the progress bars.

    Measures beyond what the plan was trained to see are left out.
    """
    asked = [each for each in asked if model.plan.reaches(each.reach)]
    size = {m.phase: sum(x.phase == m.phase for x in asked) for m in asked}
    done = {phase: nth * count for phase, count in size.items()}
    cells: list[Cell] = []
    for each in asked:

        def tick(part: int, whole: int, phase: str = each.phase) -> None:
            report(phase, done[phase] + part / whole, of * size[phase])

        found = run.step(f"{each.name}-{name}", partial(_cells, each, model, tick))
        cells += [Cell(**cell) for cell in found]
        done[each.phase] += 1
        report(each.phase, done[each.phase], of * size[each.phase])
    return merged(cells)


def _cells(each: Measure, model: Any, tick: Callable[[int, int], None]) -> list[dict[str, Any]]:
    return [cell.to_dict() for cell in each.run(model, tick)]


def paired_rows(head: dict[str, Any], cells: Sequence[Cell], base: Sequence[Cell] | None) -> list[dict[str, Any]]:
    """A row a cell behind `head`, with its paired difference from the base's cells where those are given."""
    found = {cell.key: cell for cell in base or ()}
    return [head | cell.row() | (against(cell, found[cell.key]) if cell.key in found else {}) for cell in cells]


def plan_head(name: str, plan: AttentionPlan, seed: int, context: int) -> dict[str, Any]:
    """What a results row says of its plan, with what it costs at `context` as a share of the base."""
    base = AttentionPlan.base(plan.geometry)
    windows = [spec for spec in plan.specs() if isinstance(spec, Window)]
    window = max(windows, key=lambda spec: spec.size) if windows else None
    head = quality_row(
        method="base" if plan.assignment == base.assignment else plan.provenance.get("method", "plan"),
        selector=name,
        operators=",".join(dict.fromkeys(spec.kind for spec in plan.specs())),
        budget=len(plan.far_groups) / (plan.geometry.layers * plan.geometry.kv_heads),
        window=window.size if window else None,
        sinks=window.sinks if window else None,
        decode=window.decode if window else "full",
        seed=seed,
        component=f"{plan.provenance['without']}_off" if "without" in plan.provenance else "all",
    )
    return head | {
        "trained_tokens": plan.provenance.get("trained_tokens", 0),
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
