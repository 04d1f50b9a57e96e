"""NLL-guided importance: how much a unit's full attention lowers the NLL of an answer that needs the far context.

Source: "NLL-Guided Full-Attention Layer Selection for Training-Free Sliding-Window Adaptation" (arXiv 2606.27791):

    delta[l] = NLL_answer(unit l = cheap) - NLL_answer(unit l = keep)

`base="window"` is the paper's score: everything cheap, one unit at a time restored. `base="full"` drops one at a time
from the full model. `greedy_scores` is our extension: after each pick, score the rest again on top of it.

`measure="kl"` puts the KL from the base's next-token distribution, at the same answer tokens, in the NLL's place: with
base="window" that is KL-guided selection (arXiv 2512.20569).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.answers import Batch, answer_logits, batches, run_answers
from hybridize.data.needles import Prompt
from hybridize.errors import bad
from hybridize.operators.specs import OperatorSpec, spec_to_dict
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores
from hybridize.scoring.suffix import SuffixRunner

Progress = Callable[[int, int], None]
Unit = tuple[int, tuple[int, ...]]  # (layer, its groups)


def units_of(plan: AttentionPlan, unit: str) -> list[Unit]:
    """Every layer, or every group, as (layer, groups)."""
    geometry = plan.geometry
    groups = tuple(range(geometry.kv_heads))
    if unit == "layer":
        return [(layer, groups) for layer in range(geometry.layers)]
    if unit == "group":
        return [(layer, (group,)) for layer in range(geometry.layers) for group in groups]
    raise bad("unit", unit, "'layer' or 'group'")


def plan_with(units: Sequence[Unit], kept: Sequence[int], plan: AttentionPlan, cheap: OperatorSpec) -> AttentionPlan:
    """The plan that keeps the units numbered in `kept` and runs `cheap` everywhere else."""
    pairs = [(layer, group) for i in kept for layer, groups in [units[i]] for group in groups]
    return AttentionPlan.from_groups(plan.geometry, pairs, cheap)


def nll_scores(
    model: Any,
    prompts: Sequence[Prompt],
    cheap: OperatorSpec,
    *,
    base: str = "window",
    measure: str = "nll",
    unit: str = "layer",
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> Scores:
    """One toggle a unit against one base run, per sample.

    Args:
        model: a hybrid model (any plan); its plan is restored afterwards.
        prompts: with answers that need far context.
        cheap: what a unit runs when it is not kept; its decode mode is the one scored.
        base: "window" (restore one, the paper's) or "full" (drop one). measure: "nll" or "kl".
        unit: "layer" or "group".
        batch_tokens: padded tokens a batch.
        progress: called with (batches done, batches).

    Returns:
        Scores [N, L] or [N, L, G] in nats: positive where full attention helps.
    """
    if base not in ("window", "full"):
        raise bad("base", base, "'window' or 'full'")
    units = units_of(model.plan, unit)
    everything = range(len(units))
    reference = plan_with(units, [] if base == "window" else list(everything), model.plan, cheap)
    toggled = [
        plan_with(units, [i] if base == "window" else [j for j in everything if j != i], model.plan, cheap) for i in everything
    ]
    if measure not in ("nll", "kl"):
        raise bad("measure", measure, "'nll' or 'kl'")
    groups = list(batches(prompts, batch_tokens, model.device))
    rows: list[np.ndarray] = []
    layers_run = 0
    with model.temporary_plan(reference):
        for done, batch in enumerate(groups):
            runner = SuffixRunner(model, batch, kl_from_base(model, batch) if measure == "kl" else None)
            start = runner.base(reference)
            ends = torch.stack([runner.toggled(plan, units[i][0]) for i, plan in enumerate(toggled)], dim=1)
            delta = start[:, None] - ends if base == "window" else ends - start[:, None]
            rows.append(delta.double().cpu().numpy())
            layers_run += runner.layers_run + (model.plan.geometry.layers if measure == "kl" else 0)
            if progress:
                progress(done + 1, len(groups))
    samples = np.concatenate(rows)
    if unit == "group":
        samples = samples.reshape(len(samples), model.plan.geometry.layers, -1)
    selector = measure if base == "window" else "drop" if measure == "nll" else "kl-drop"
    return Scores(unit, samples, _provenance(selector, model, prompts, cheap, layers_run / len(groups)))


def kl_from_base(model: Any, batch: Batch) -> Callable[[Tensor], Tensor]:
    """A measure: mean KL(base || model) over each row's answer tokens, nats, [B]."""
    with model.temporary_plan(AttentionPlan.base(model.plan.geometry)):
        wanted = run_answers(model, batch).log_softmax(-1)

    def measure(hidden: Tensor) -> Tensor:
        given = answer_logits(model, hidden, batch).log_softmax(-1)
        each = F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1)
        return (each * batch.real).sum(1) / batch.real.sum(1)

    return measure


def greedy_scores(
    model: Any,
    prompts: Sequence[Prompt],
    cheap: OperatorSpec,
    steps: int,
    *,
    backward: bool = False,
    unit: str = "layer",
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> Scores:
    """Stepwise selection, ours: every step scores each unit left on top of the picks so far, with suffix reuse.

    Forward starts with nothing kept and restores the unit that lowers the NLL most; `backward` starts from the full
    model and drops the unit that raises it least, so it never meets a circuit whose other half is missing.

    Args:
        steps: units restored (forward) or dropped (backward).

    Returns:
        Scores whose samples are each unit's delta NLL in its last step, and whose `order` is the ranking: picks first
        (forward), or the dropped ones last (backward). One run serves every budget its steps reach.
    """
    units = units_of(model.plan, unit)
    if not 1 <= steps <= len(units):
        raise bad("steps", steps, f"1 to {len(units)} units")
    groups = list(batches(prompts, batch_tokens, model.device))
    picks: list[int] = []
    samples = np.zeros((len(prompts), len(units)))
    layers_run = 0

    def plan_for(picked: Sequence[int]) -> AttentionPlan:
        kept = [i for i in range(len(units)) if i not in picked] if backward else picked
        return plan_with(units, kept, model.plan, cheap)

    with model.temporary_plan(plan_for([])):
        for step in range(steps):
            reference = plan_for(picks)
            left = [i for i in range(len(units)) if i not in picks]
            plans = {i: plan_for([*picks, i]) for i in left}
            row = 0
            for batch in groups:
                runner = SuffixRunner(model, batch)
                start = runner.base(reference)
                ends = torch.stack([runner.toggled(plans[i], units[i][0]) for i in left], dim=1)
                delta = ends - start[:, None] if backward else start[:, None] - ends
                samples[row : row + len(delta), left] = delta.double().cpu().numpy()
                row += len(delta)
                layers_run += runner.layers_run
            means = samples.mean(axis=0)
            picks.append(min(left, key=lambda i: means[i]) if backward else max(left, key=lambda i: means[i]))
            if progress:
                progress(step + 1, steps)
    means = samples.mean(axis=0)
    rest = sorted((i for i in range(len(units)) if i not in picks), key=lambda i: -means[i])
    order = (*rest, *reversed(picks)) if backward else (*picks, *rest)
    shaped = samples if unit == "layer" else samples.reshape(len(samples), model.plan.geometry.layers, -1)
    selector = "backward" if backward else "greedy"
    provenance = _provenance(selector, model, prompts, cheap, layers_run / len(groups))
    return Scores(unit, shaped, {**provenance, "steps": steps}, order=order)


def _provenance(
    selector: str, model: Any, prompts: Sequence[Prompt], cheap: OperatorSpec, layers_run: float
) -> dict[str, Any]:
    return {
        "scorer": selector,
        "identity": model.plan.geometry.identity,
        "cheap": spec_to_dict(cheap),
        "decode": getattr(cheap, "decode", "window"),
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "kinds": sorted({prompt.kind for prompt in prompts}),
        "forwards_per_prompt": round(layers_run / model.plan.geometry.layers, 3),
    }
