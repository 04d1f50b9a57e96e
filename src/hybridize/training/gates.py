"""Gates between the base's attention and a cheap one, learned jointly while every weight stays (FlashMorph, arXiv 2606.30562).

    H_mix = alpha * H_full + (1 - alpha) * H_cheap                   in every layer at once; what is mixed goes on upwards
    loss  = mean ||H_mix - H_teacher||^2 / mean ||H_teacher||^2  +  price * sum alpha

H is a layer's attention behind its output projection, at the tokens that predict an answer; the means are over layers and such
tokens, and the teacher is the base in a pass of its own. Dividing by the teacher's mean square is ours: it makes `price` mean
the same for every model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.data.mixture import Mixture
from hybridize.errors import bad
from hybridize.morphing import morphing
from hybridize.operators.specs import OperatorSpec, spec_to_dict
from hybridize.plan import Geometry
from hybridize.scores import Scores
from hybridize.training.recipe import Recipe
from hybridize.training.stages import Report, learned_tokens, run_stage

PASSES = 4  # a step reads its tokens so often, in units of a forward pass: the teacher's, its own, and a backward of two


class Gates(nn.Module):
    """alpha [L, 1], or [L, G] for gates of groups, from 1 (all full), clamped to 0..1 after every step."""

    def __init__(self, model: Any, cheap: OperatorSpec, unit: str, price: float) -> None:
        super().__init__()
        geometry = model.plan.geometry
        if unit not in ("layer", "group"):
            raise bad("unit", unit, "'layer' or 'group'")
        self.price = price
        columns = 1 if unit == "layer" else geometry.kv_heads
        self.gates = nn.Parameter(torch.ones(geometry.layers, columns, device=model.device))
        self.held = (model,)  # no module of this one: it is not trained, saved or shared out
        self.morphs: list[Any] = []

    def forward(self, input_ids: Tensor, start: Tensor) -> dict[str, Tensor]:
        """input_ids [B, T], start [B] to {"loss"}."""
        learned = learned_tokens(input_ids, start)
        with torch.no_grad():
            wanted = self.attended(input_ids, learned, shut=True)
        given = self.attended(input_ids, learned, shut=False)
        return {"loss": alignment(given, wanted) + self.price * self.gates.sum()}

    def attended(self, input_ids: Tensor, learned: Tensor, shut: bool) -> Tensor:
        """Every layer's attention at the learned tokens, fp32 [L, N, E]."""
        (model,), found = self.held, []

        def look(_: Any, __: Any, out: tuple[Tensor, Any]) -> None:
            found.append(out[0][:, :-1][learned].float())

        for morph in self.morphs:
            morph.shut = shut
        hooks = [attention.register_forward_hook(look) for attention in model.attentions()]
        try:
            model.model(input_ids=input_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found)

    @torch.no_grad()
    def settle(self) -> None:
        self.gates.clamp_(0, 1)

    def record(self) -> dict[str, Any]:
        return {"gates": self.gates.detach().cpu().tolist()}


def alignment(given: Tensor, wanted: Tensor) -> Tensor:
    """L_align of [L, N, E], over the teacher's mean square."""
    return (given - wanted).pow(2).mean() / wanted.pow(2).mean().clamp_min(1e-12)


def learn_gates(
    model: Any, cheap: OperatorSpec, unit: str, rows: Mixture, recipe: Recipe, folder: Path, report: Report | None = None
) -> dict[str, Any]:
    """Train one gate a `unit` ("layer" or "group") on rows whose answers need the far context; what `train` returns, and
    "gates": alpha after every step. No weight changes.

    Args:
        cheap: what a shut gate runs; its learned parameters are those that the model holds (`holding_branches`).
    """
    stage = Gates(model, cheap, unit, recipe.price)
    model.train(recipe.checkpointing)  # layers are only recomputed in training mode
    with morphing(model, cheap, stage.gates) as stage.morphs:
        how: dict[str, Any] = {"steps": recipe.steps, "rates": {"gate": recipe.gate_rate}}
        return run_stage(stage, model, rows, recipe, folder, report, **how)


def gate_scores(gates: list[Any], unit: str, geometry: Geometry, cheap: OperatorSpec, recipe: Recipe) -> Scores:
    """Scores from alpha after every step [S, L, 1 or G]: the last ones; where they are equal the mean over the run decides."""
    path = torch.tensor(gates, dtype=torch.float64)
    last, mean = path[-1], path.mean(0)
    order = sorted(range(last.numel()), key=lambda i: (-float(last.flatten()[i]), -float(mean.flatten()[i])))
    samples = last[None, :, 0] if unit == "layer" else last[None]
    provenance = {
        "scorer": "gates",
        "identity": geometry.identity,
        "cheap": spec_to_dict(cheap),
        "steps": recipe.steps,
        "price": recipe.price,
        "kinds": list(recipe.kinds),
        "lengths": [recipe.length],
        "mean": mean.tolist(),
    }
    return Scores(unit, samples.numpy(), provenance, order=tuple(order))


def collapse(scores: Scores) -> str | None:
    """What is wrong with gates that all ended alike, and what helps; None: nothing."""
    if scores.values.max() <= 0.01:
        return "all gates shut, so only the way there ranks them: a lower gates.price keeps those open that are needed"
    if scores.values.min() >= 0.99:
        return "all gates stayed open: more gates.steps, or a higher gates.price, shut those that are not needed"
    return None
