"""DuoAttention's learned gates (Xiao et al. 2024, arXiv 2410.10819): which KV groups need their far context.

Each group's output is gate * full + (1 - gate) * window; the gates alone are trained to give the answer tokens the final
hidden states of the full model, at a price for every gate that stays open:

    loss = mean((h_full - h_gated)^2) + 0.05 * mean(|gate|)

The paper trains 2000 steps on 8 GPUs; the default here is a small fraction of that, on our own needle prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridize.answers import Batch, batches
from hybridize.data.needles import Prompt
from hybridize.morphing import morphing
from hybridize.operators.specs import OperatorSpec, spec_to_dict
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores

STEPS, LEARNING_RATE, PRICE = 100, 0.02, 0.05


def duo_scores(
    model: Any,
    prompts: Sequence[Prompt],
    cheap: OperatorSpec,
    *,
    steps: int = STEPS,
    price: float = PRICE,
    batch_tokens: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Gates after `steps` steps of AdamW, batches of prompts in turn; `price` is what an open gate costs.

    The model's weights are not touched.

    Returns:
        Scores by group, [1, L, G] in 0..1.
    """
    geometry = model.plan.geometry
    full = AttentionPlan.base(geometry)
    chosen = list(batches(prompts, batch_tokens, model.device))
    with model.temporary_plan(full):
        with torch.no_grad():
            teacher = [_answer_states(model, batch) for batch in chosen]
        gates = nn.Parameter(torch.ones(geometry.layers, geometry.kv_heads, device=model.device))
        optimizer = torch.optim.AdamW([gates], lr=LEARNING_RATE, weight_decay=0.0)
        with morphing(model, cheap, gates), torch.enable_grad():
            for step in range(steps):
                i = step % len(chosen)
                error = (_answer_states(model, chosen[i]) - teacher[i])[chosen[i].real]
                loss = error.pow(2).mean() + price * gates.abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    gates.clamp_(0, 1)
                if progress:
                    progress(step + 1, steps)
    provenance = {
        "scorer": "duo",
        "identity": geometry.identity,
        "cheap": spec_to_dict(cheap),
        "steps": steps,
        "price": price,
        "prompts": len(prompts),
        "lengths": sorted({prompt.length for prompt in prompts}),
    }
    return Scores("group", gates.detach().double().cpu().numpy()[None], provenance)


def _answer_states(model: Any, batch: Batch) -> Tensor:
    """Final hidden states where answer tokens are predicted, fp32 [B, A, E]."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    return hidden.gather(1, batch.columns[..., None].expand(-1, -1, hidden.shape[-1])).float()
