"""HALO's layer scores (arXiv 2601.22156): what recall loses where a layer is cheap, for each share that common sense loses.

    s_l = min(50, (max R - R_l) / (max C - C_l + 1e-10))

R_l and C_l are recall and common sense with layer l alone made cheap; the maxima are over layers. HALO's C is a mean of
benchmarks. Here it is the share of haystack tokens that are predicted right, of the same prompts: no data set is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridize.answers import Batch, answer_logits, batches
from hybridize.data.needles import Prompt
from hybridize.errors import bad
from hybridize.operators.specs import OperatorSpec, spec_to_dict
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores
from hybridize.scoring.suffix import SuffixRunner

MOST = 50.0
READ = 256  # haystack tokens of a prompt whose prediction is looked at, evenly spread


def halo_scores(
    model: Any,
    prompts: Sequence[Prompt],
    cheap: OperatorSpec,
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Scores by layer, [1, L].

    Args:
        prompts: with a haystack. cheap: what the layer runs whose loss is measured.

    Raises:
        HybridizeError: a prompt that does not say where its haystack lies.
    """
    if blind := [prompt.kind for prompt in prompts if prompt.text is None]:
        raise bad("prompts", f"a {blind[0]!r} prompt that does not say where its text lies", "needle_prompts(...)")
    geometry = model.plan.geometry
    base, layers = AttentionPlan.base(geometry), range(geometry.layers)
    plans = [AttentionPlan.from_layers(geometry, [i for i in layers if i != layer], cheap) for layer in layers]
    found, first, groups = [], 0, list(batches(prompts, batch_tokens, model.device))
    layers_run = 0
    with model.temporary_plan(base):
        for done, batch in enumerate(groups):
            texts = [prompt.text for prompt in prompts[first : first + len(batch.ids)]]
            runner = SuffixRunner(model, batch, _rights(model, batch, texts))
            runner.base(base)
            found.append(torch.stack([runner.toggled(plan, layer) for layer, plan in enumerate(plans)]))
            first += len(batch.ids)
            layers_run += runner.layers_run
            if progress:
                progress(done + 1, len(groups))
    recall, sense = torch.cat(found, dim=1).double().mean(1).unbind(-1)
    values = ((recall.max() - recall) / (sense.max() - sense + 1e-10)).clamp_max(MOST)
    provenance = {
        "scorer": "halo",
        "identity": geometry.identity,
        "cheap": spec_to_dict(cheap),
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "kinds": sorted({prompt.kind for prompt in prompts}),
        "recall": recall.tolist(),
        "common_sense": sense.tolist(),
        "forwards_per_prompt": round(layers_run / len(groups) / geometry.layers, 3),
    }
    return Scores("layer", np.asarray(values.cpu())[None], provenance)


def _rights(model: Any, batch: Batch, texts: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """A measure: [B, 2], shares of answer tokens and of haystack tokens that are the most likely ones."""
    places = torch.stack([torch.linspace(start, end - 2, READ).round().long() for start, end in texts]).to(batch.ids.device)
    targets = batch.ids.gather(1, places + 1)

    def measure(hidden: Tensor) -> Tensor:
        answers = (answer_logits(model, hidden, batch).argmax(-1) == batch.targets) & batch.real
        read = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        right = (model.lm_head(read).argmax(-1) == targets).float().mean(1)
        return torch.stack([answers.sum(1) / batch.real.sum(1), right], dim=1)

    return measure
