"""LightTransfer's lazy ratio: the attention mass that a layer's last queries put on sinks and recent keys.

Source: LightTransfer (arXiv 2410.13846); the control of methods/nll: keep the least lazy layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hybridize.answers import Batch, batches
from hybridize.data.needles import Prompt
from hybridize.operators.specs import Window
from hybridize.scores import Scores
from hybridize.scoring.watch import watch

LAST_QUERIES = 64


def lazy_scores(
    model: Any, prompts: Sequence[Prompt], cheap: Window, *, batch_tokens: int = 8192, queries: int = LAST_QUERIES
) -> Scores:
    """Minus the mass on `cheap`'s sinks and window, mean over a prompt's last `queries` prompt tokens and all heads.

    Returns:
        Scores [N, L] in -1..0; the highest is the least lazy layer.
    """
    rows = [_lazy_mass(model, batch, cheap, queries) for batch in batches(prompts, batch_tokens, model.device)]
    provenance = {
        "scorer": "lazy",
        "identity": model.plan.geometry.identity,
        "sinks": cheap.sinks,
        "size": cheap.size,
        "queries": queries,
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "forwards_per_prompt": 1,
    }
    return Scores("layer", -np.concatenate(rows), provenance)


def _lazy_mass(model: Any, batch: Batch, window: Window, queries: int) -> np.ndarray:
    """Mass of each row's last prompt queries on sinks and window, mean over queries and heads, [B, L]."""
    n = (batch.prompt_len[:, None] - 1 - torch.arange(queries, device=model.device)).clamp_min(0)
    columns = torch.arange(batch.ids.shape[1], device=model.device)
    near = ((columns > n[..., None] - window.size) | (columns < window.sinks))[:, None]
    mass = watch(model, batch, n, lambda weights: (weights * near).sum(-1).mean(dim=(1, 2)))
    return mass.double().cpu().numpy()
