"""What indexed attention chooses: tokens a query, the attention that lies in them, and what that computes of all pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridize.data.needles import Prompt
from hybridize.operators.contract import Chunk, Heads
from hybridize.operators.indexed import IndexedAttention
from hybridize.operators.specs import Indexed
from hybridize.plan import AttentionPlan

LAST = 32  # queries at the end of a prompt, where the answer stands
SPREAD = 64  # and so many over the whole of it


@torch.no_grad()
def sparsity(
    model: Any, prompts: Sequence[Prompt], progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """One row a length of `prompts`, under the model's own plan; nothing where it has no indexed attention.

    "tokens": mean of what a retrieving query sees, "p10", "p50", "p90" over queries and heads: easy ones see few tokens,
    diffuse ones many; "chosen": tokens over those before the query, mean; "captured": share of the true attention that lies in
    them, mean, and "captured_p10"; "at_the_end": tokens of the last queries, mean; "pairs": query-key pairs over full
    attention's, all heads of the model, scoring not counted; "groups": share of groups that keep their whole cache; "cache":
    bytes over the base's; "heads": tokens, mean, as [layer, query head, tokens].
    """
    plan = model.plan
    if not any(spec.kind == "indexed" for spec in plan.specs()):
        return []
    rows = []
    for length in sorted({prompt.length for prompt in prompts}):
        chosen = [prompt for prompt in prompts if prompt.length == length]
        found = [_watched(model, torch.tensor([prompt.ids], device=model.device)) for prompt in chosen]
        rows.append(_row(plan, length, found))
        if progress:
            progress(len(rows), len({prompt.length for prompt in prompts}))
    return rows


def _watched(model: Any, ids: Tensor) -> dict[str, Any]:
    """Of one prompt, for each layer: head numbers, tokens seen and attention captured by sampled queries, [H', N]."""
    found: dict[int, tuple[list[int], Tensor, Tensor, Tensor]] = {}
    tokens = ids.shape[1]
    stride = max(1, tokens // SPREAD)
    places = (slice(stride - 1, None, stride), slice(max(0, tokens - LAST), None))

    def look(layer: int, numbers: list[int]) -> Callable[..., None]:
        def hook(operator: IndexedAttention, args: tuple[Any, ...]) -> None:
            heads, which = args[0], operator.retrieving(args[0])
            parts = [_seen(operator, heads, which, rows) for rows in places]
            found[layer] = ([numbers[i] for i in which.tolist()], *parts[0], parts[1][0])

        return hook

    hooks = []
    for layer, attention in enumerate(model.attentions()):
        first, size = 0, attention.group_size
        for operator, groups in zip(attention.operators, attention.span_sizes, strict=True):
            if isinstance(operator, IndexedAttention):
                order = attention.group_order[first : first + groups]
                numbers = [group * size + i for group in order for i in range(size)]
                hooks.append(operator.register_forward_pre_hook(look(layer, numbers)))
            first += groups
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    positions = torch.arange(tokens)[places[0]] + 1
    return {"layers": found, "before": positions.tolist()}


def _seen(operator: IndexedAttention, heads: Heads, which: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Tokens that queries see, and the share of their attention over all earlier tokens that lies there, [H', N] each."""
    mask = operator.sees(heads, which, heads.k, operator.index_keys(heads), rows)[0]
    group = which // (heads.q.shape[1] // heads.k.shape[1])
    logits = heads.q[0, which, rows].float() @ heads.k[0, group].float().transpose(-1, -2) * heads.scale
    causal = _causal(heads.chunk, rows)
    weights = logits.masked_fill(~causal, float("-inf")).softmax(-1)
    return mask.expand_as(weights).sum(-1).cpu(), (weights * mask).sum(-1).cpu()


def _causal(chunk: Chunk, rows: slice) -> Tensor:
    return torch.arange(chunk.tokens, device=chunk.positions.device) <= chunk.positions[0, rows, None]


def _row(plan: AttentionPlan, length: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    geometry = plan.geometry
    tokens: list[Tensor] = []
    shares: list[Tensor] = []
    captured: list[Tensor] = []
    last: list[Tensor] = []
    by_head: dict[tuple[int, int], list[float]] = {}
    for each in found:
        before = torch.tensor(each["before"])
        for layer, (numbers, seen, mass, ending) in each["layers"].items():
            tokens.append(seen.flatten().float())
            shares.append((seen / before).flatten())
            captured.append(mass.flatten())
            last.append(ending.flatten().float())
            for number, row in zip(numbers, seen.float().mean(1).tolist(), strict=True):
                by_head.setdefault((layer, number), []).append(row)
    every, part, mass = torch.cat(tokens), torch.cat(shares), torch.cat(captured)
    deciles = torch.tensor([0.1, 0.5, 0.9])
    low, middle, high = every.quantile(deciles).tolist() if len(every) < 1 << 24 else (float("nan"),) * 3
    heads = [[layer, head, sum(values) / len(values)] for (layer, head), values in sorted(by_head.items())]
    base = AttentionPlan.base(geometry)
    return {
        "length": length,
        "prompts": len(found),
        "tokens": float(every.mean()),
        "p10": low,
        "p50": middle,
        "p90": high,
        "chosen": float(part.mean()),
        "captured": float(mass.mean()),
        "captured_p10": float(mass.quantile(0.1)),
        "at_the_end": float(torch.cat(last).mean()),
        "pairs": _pairs(plan, length, {place: sum(values) / len(values) for place, values in by_head.items()}),
        "groups": len(plan.far_groups) / (geometry.layers * geometry.kv_heads),
        "cache": plan.cache_bytes(length) / base.cache_bytes(length),
        "heads": heads,
    }


def _pairs(plan: AttentionPlan, length: int, tokens: dict[tuple[int, int], float]) -> float:
    """Query-key pairs over full attention's: heads that retrieve at their measured means, all others as their plan says."""
    geometry, size, full = plan.geometry, plan.geometry.group_size, length * (length + 1) / 2
    sums = 0.0
    for layer in range(geometry.layers):
        for head in range(geometry.heads):
            spec = plan.spec(layer, head // size)
            if (layer, head) in tokens:
                sums += tokens[layer, head] * length
            else:
                sums += (spec.near if isinstance(spec, Indexed) else spec).visible_pairs(length)
    return sums / (geometry.layers * geometry.heads * full)
