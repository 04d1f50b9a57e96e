"""LightTransfer's lazy ratio: the attention mass that a layer's last queries put on sinks and recent keys.

Source: LightTransfer (arXiv 2410.13846); the control of methods/nll: keep the least lazy layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridize.answers import batches
from hybridize.data.needles import Prompt
from hybridize.operators.contract import Chunk
from hybridize.operators.dense import repeat_groups
from hybridize.operators.specs import Window
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores

LAST_QUERIES = 64


@torch.no_grad()
def lazy_scores(
    model: Any, prompts: Sequence[Prompt], cheap: Window, *, batch_tokens: int = 8192, queries: int = LAST_QUERIES
) -> Scores:
    """Minus the mass on `cheap`'s sinks and window, mean over a prompt's last `queries` prompt tokens and all heads.

    Returns:
        Scores [N, L] in -1..0; the highest is the least lazy layer.
    """
    geometry = model.plan.geometry
    full = AttentionPlan.base(geometry)
    rows = []
    with model.temporary_plan(full):
        for batch in batches(prompts, batch_tokens, model.device):
            masses: list[Tensor] = []
            hooks = [
                attention.operators[0].register_forward_pre_hook(
                    lambda _, args, b=batch, m=masses: m.append(_lazy_mass(args[0], b.prompt_len, cheap, queries))
                )
                for attention in model.attentions()
            ]
            try:
                body = model.model
                positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)[None]
                hidden = body.embed_tokens(batch.ids)
                context = body.context(hidden, Chunk(positions, 0, None, None, len(batch.ids)))
                for layer in body.layers:
                    hidden, _ = layer(hidden, context)
            finally:
                for hook in hooks:
                    hook.remove()
            rows.append(-torch.stack(masses, dim=1).double().cpu().numpy())
    provenance = {
        "scorer": "lazy",
        "identity": geometry.identity,
        "sinks": cheap.sinks,
        "size": cheap.size,
        "queries": queries,
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
        "forwards_per_prompt": 1,
    }
    return Scores("layer", np.concatenate(rows), provenance)


def _lazy_mass(heads: Any, prompt_len: Tensor, window: Window, queries: int) -> Tensor:
    """Mass of each row's last prompt queries on sinks and window, mean over queries and heads, [B]."""
    n = (prompt_len[:, None] - 1 - torch.arange(queries, device=prompt_len.device)).clamp_min(0)  # [B, N]
    q = heads.q.gather(2, n[:, None, :, None].expand(-1, heads.q.shape[1], -1, heads.q.shape[3]))
    k = repeat_groups(heads.k, q.shape[1] // heads.k.shape[1])
    logits = (q @ k.transpose(-1, -2)).float() * heads.scale
    columns = torch.arange(k.shape[2], device=k.device)
    seen = columns <= n[..., None]
    near = seen & ((columns > n[..., None] - window.size) | (columns < window.sinks))
    total = logits.masked_fill(~seen[:, None], float("-inf")).logsumexp(-1)
    local = logits.masked_fill(~near[:, None], float("-inf")).logsumexp(-1)
    return (local - total).exp().mean(dim=(1, 2))
