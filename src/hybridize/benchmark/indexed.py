"""One layer of RTPurbo's attention alone: few heads retrieve by an index, the others see a window, against dense attention.

Weights are random, so what an index would find is planted: 16 themes, one an index dimension. A block of keys belongs to a
theme or not, `fraction` of the blocks to each; a query asks for one theme, for `run` tokens the same. Members of the theme
share nearly all of the softmax, so top-p chooses them and nothing else; how many that was is measured, and stands in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.benchmark.attention import BACKENDS, only
from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.timing import Ceilings, Job, Step, captured, interleaved, speed
from hybridize.operators.contract import Chunk, Heads, Operator
from hybridize.operators.indexed import Index, IndexedAttention, IndexedState
from hybridize.operators.specs import Full, Indexed, Window
from hybridize.operators.window import WindowAttention

FRACTIONS = (0.005, 0.02, 0.05, 0.1)
SCATTERED = 0.02  # the fraction at which neighbours ask for different themes, too
THEMES, STRENGTH = 16, 12.0
RUN = 64
LONG = 1 << 18  # tokens; runs of longer prompts take long enough to need few of them
LOOKED_AT = 8  # queries whose choice is counted


@dataclass(frozen=True)
class Layer:
    """Which heads of a layer retrieve: `heads` of them, in the first `groups` of its KV groups."""

    shape: Shape
    heads: int
    groups: int

    @classmethod
    def of(cls, shape: Shape, ratio: float) -> Layer:
        """As many groups as heads that lie at random would touch."""
        each = shape.heads // shape.kv_heads
        heads = max(1, round(ratio * shape.heads))
        groups = max(-(-heads // each), round(shape.kv_heads * (1 - (1 - ratio) ** each)))
        return cls(shape, heads, min(groups, heads))

    @property
    def per_group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    def members(self, spec: Indexed) -> list[Indexed]:
        """Specs of the groups that retrieve; their heads are dealt out in turn."""
        counts = [len(range(group, self.heads, self.groups)) for group in range(self.groups)]
        return [replace(spec, retrieves=tuple(i < n for i in range(self.per_group))) for n in counts]


class Planted:
    """Inputs of one layer, [1, heads, T, D]: q, k, v random; before RoPE, themes in the first THEMES dimensions."""

    def __init__(self, layer: Layer, context: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layer, self.context, self.device, self.dtype = layer, context, device, dtype
        self.draw = torch.Generator(device).manual_seed(0)
        shape = layer.shape
        self.q, self.k, self.v = (self._randn(n) for n in (shape.heads, shape.kv_heads, shape.kv_heads))

    def _randn(self, heads: int) -> Tensor:
        given = (1, self.context, heads, self.layer.shape.head_dim)
        return torch.randn(*given, generator=self.draw, device=self.device, dtype=self.dtype).transpose(1, 2)

    def queries(self, run: int) -> Tensor:
        """q_raw of the groups that retrieve: STRENGTH in one theme's dimension, another each `run` tokens and head."""
        heads = self.layer.groups * self.layer.per_group
        themes = torch.randint(THEMES, (heads, -(-self.context // run)), generator=self.draw, device=self.device)
        themes = themes.repeat_interleave(run, dim=1)[:, : self.context]
        q_raw = self._zeros(heads)
        return q_raw.scatter_(3, themes[None, ..., None], STRENGTH)

    def keys(self, fraction: float, block: int) -> Tensor:
        """k_raw of the groups that retrieve: 1 in the dimensions of the themes that a token's block belongs to."""
        blocks = -(-self.context // block)
        ranks = torch.rand(self.layer.groups, THEMES, blocks, generator=self.draw, device=self.device).argsort(-1)
        belongs = (ranks < max(1, round(fraction * blocks))).to(self.dtype).repeat_interleave(block, dim=2)
        k_raw = self._zeros(self.layer.groups)
        k_raw[0, :, :, :THEMES] = belongs[..., : self.context].transpose(1, 2)
        return k_raw

    def _zeros(self, heads: int) -> Tensor:
        return torch.zeros(1, heads, self.context, self.layer.shape.head_dim, device=self.device, dtype=self.dtype)


class Hybrid:
    """A layer's attention under RTPurbo: indexed groups, and windows for the other groups."""

    def __init__(self, inputs: Planted, spec: Indexed, q_raw: Tensor, k_raw: Tensor) -> None:
        self.inputs, self.spec, layer = inputs, spec, inputs.layer
        branches = {i: Index(spec, layer.shape.head_dim, layer.per_group) for i in range(layer.groups)}
        with torch.no_grad():
            for branch in branches.values():  # index dimension i is theme i
                branch.map_k.copy_(torch.eye(layer.shape.head_dim, spec.dim))
                branch.map_q.copy_(branch.map_k.expand_as(branch.map_q))
        given = {} if spec.select == "all" else branches
        self.retrieving = IndexedAttention(spec, given, layer.members(spec)).to(inputs.device).requires_grad_(False)
        self.operators: list[Operator] = [self.retrieving]
        if layer.groups < layer.shape.kv_heads:
            self.operators.append(WindowAttention(spec.near))
        self.raw = q_raw, k_raw

    def spans(self, positions: slice, offset: int | None = 0) -> list[Heads]:
        """Heads of each operator's groups at `positions`, of queries and keys alike."""
        inputs, layer = self.inputs, self.inputs.layer
        tokens = torch.arange(inputs.context, device=inputs.device)[None, positions]
        chunk, empty, scale = Chunk(tokens, offset, None, None, 1), inputs.q.new_empty(0), layer.shape.head_dim**-0.5
        raw_q, raw_k = (x[:, :, positions] for x in self.raw)
        edge, found = layer.groups * layer.per_group, []
        for of_q, of_k in ((slice(edge), slice(layer.groups)), (slice(edge, None), slice(layer.groups, None))):
            q, k, v = inputs.q[:, of_q, positions], inputs.k[:, of_k, positions], inputs.v[:, of_k, positions]
            found.append(Heads(q, k, v, chunk, scale, 0.0, empty, lambda: raw_q, lambda: raw_k, lambda far: empty))
        return found[: len(self.operators)]

    def prefill(self, spans: Sequence[Heads]) -> list[Tensor]:
        return [operator(heads, None)[0] for operator, heads in zip(self.operators, spans, strict=True)]

    def decode(self) -> Callable[[], list[Tensor]]:
        """A step that takes in the last token again and again, over static states that hold all before it."""
        context = self.inputs.context
        states = [operator.new_state(context) for operator in self.operators]
        for state, heads in zip(states, self.spans(slice(0, context)), strict=True):
            state.append(heads.k, heads.v, heads.chunk)
            if isinstance(state, IndexedState):
                state.append_index(self.retrieving.index_keys(heads), heads.chunk)
        spans = self.spans(slice(context - 1, context), offset=None)

        def step() -> list[Tensor]:
            return [op(heads, state)[0] for op, heads, state in zip(self.operators, spans, states, strict=True)]

        return step

    def chosen(self) -> float:
        """Share of the tokens before them that the last queries attend to, on average over heads that retrieve."""
        if self.spec.select == "all":
            return 1.0
        rows = slice(max(0, self.inputs.context - LOOKED_AT), self.inputs.context)
        every = self.spans(slice(0, self.inputs.context))[0]
        seen = self.retrieving.sees(every, self.retrieving.retrieving(every), every.k, self.retrieving.index_keys(every), rows)
        return float((seen.sum(-1) / (every.chunk.positions[:, rows] + 1)).mean())


def indexed_rows(
    name: str, shape: Shape, context: int, window: Window, ratio: float, device: torch.device, dtype: torch.dtype,
    ceilings: Ceilings, seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Speed rows of "layer_forward" (a prompt) and "layer_decode" (one token), each against dense attention's backends.

    `ratio` of the query heads retrieve; `window` is what the others see.
    """
    layer = Layer.of(shape, ratio)
    inputs = Planted(layer, context, device, dtype)
    spec = Indexed(window=window.size, sinks=window.sinks)
    hybrids = _hybrids(inputs, spec)
    dense: list[str | None] = list(BACKENDS) if device.type == "cuda" else [None]
    prefill: dict[str, Job] = {}
    decode: dict[str, Job] = {}
    for backend in dense:
        full = f"full {backend or 'sdpa'}"
        prefill[full] = partial(_dense, inputs, backend)
        step = captured(partial(_dense_token, inputs, backend), device)
        decode[full] = partial(_replay, step)
    for variant, hybrid in hybrids.items():
        prefill[variant] = partial(_prefill, hybrid, hybrid.spans(slice(0, context)))
        step = captured(hybrid.decode(), device)
        decode[variant] = partial(_replay, step)
    shares = {variant: hybrid.chosen() for variant, hybrid in hybrids.items()}
    rows = []
    for what, jobs in (("layer_forward", prefill), ("layer_decode", decode)):
        few = what == "layer_forward" and context >= LONG
        times = interleaved(jobs, device, seconds, least=2 if few else 5, warm_up=1 if few else 2)
        best = min((v for v in times if v.startswith("full")), key=lambda v: times[v].median)
        baselines = dict.fromkeys([best, *(v for v in times if v.startswith("full")), "heads dense"])
        for variant, timing in times.items():
            floor = ceilings.floor(*_work(layer, context, spec, shares.get(variant), dtype, what == "layer_decode"))
            head = {"shape": name, "what": what, "variant": variant, "context": context, "batch": 1}
            head |= {"chosen": shares.get(variant), "heads": layer.heads, "groups": layer.groups, "window": window.size}
            for baseline in baselines:
                if variant != baseline or variant == best:
                    rows.append(head | speed(timing, times[baseline], baseline, floor))
    return rows


def pays_from(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Tokens from which on choosing was faster than the same heads dense, at every length measured; by what was timed.

    None: it was not at the longest length. A plan's `dense_below` wants to be no less.
    """
    ratios: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: -row["context"]):
        if row["baseline"] == "heads dense" and row["variant"].startswith("indexed"):
            ratios.setdefault(f"{row['what']}, {row['variant']}", []).append((row["context"], row["ratio"]))
    pays = {name: [context for context, _ in takewhile(lambda x: x[1] > 1, each)] for name, each in ratios.items()}
    return {name: contexts[-1] if contexts else None for name, contexts in pays.items()}


def _hybrids(inputs: Planted, spec: Indexed) -> dict[str, Hybrid]:
    together, apart = inputs.queries(RUN), inputs.queries(1)
    found = {}
    for fraction in FRACTIONS:
        keys = inputs.keys(fraction, spec.block)
        found[f"indexed {fraction:.1%}"] = Hybrid(inputs, spec, together, keys)
        if fraction == SCATTERED:
            found[f"indexed {fraction:.1%} scattered"] = Hybrid(inputs, spec, apart, keys)
    found["heads dense"] = Hybrid(inputs, replace(spec, select="all"), together, keys)
    return found


def _prefill(hybrid: Hybrid, spans: Sequence[Heads], number: int) -> None:
    with torch.inference_mode():
        hybrid.prefill(spans)


def _replay(step: Step, number: int) -> None:
    step()


def _dense(inputs: Planted, backend: str | None, number: int) -> None:
    with torch.inference_mode(), only(backend):
        F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True, enable_gqa=True)


def _dense_token(inputs: Planted, backend: str | None) -> Tensor:
    with only(backend):
        return F.scaled_dot_product_attention(inputs.q[:, :, -1:], inputs.k, inputs.v, enable_gqa=True)


def _work(
    layer: Layer, context: int, spec: Indexed, chosen: float | None, dtype: torch.dtype, decode: bool
) -> tuple[float, float]:
    """(bytes in and out, FLOPs) that cannot be spared: visible pairs and, where there is a choice, one score of each pair."""
    shape, d = layer.shape, layer.shape.head_dim
    pairs = float(context if decode else Full().visible_pairs(context))
    near = float(min(context, spec.window + spec.sinks) if decode else spec.near.visible_pairs(context))
    rows = 1 if decode else context
    ends = 2.0 * rows * shape.heads * d  # queries in, outputs out
    if chosen is None:
        return (ends + 2.0 * context * shape.kv_heads * d) * dtype.itemsize, 4.0 * d * shape.heads * pairs
    flops = 4.0 * d * (layer.heads * chosen * pairs + (shape.heads - layer.heads) * near)
    scored = chosen < 1
    flops += 2.0 * spec.dim * layer.heads * pairs if scored else 0.0
    held = (min(1.0, chosen * layer.heads / layer.groups) if decode else 1.0) * context * 2 * d
    index = context * spec.dim if scored else 0.0
    others = 2.0 * d * (shape.kv_heads - layer.groups) * (near if decode else context)
    return (ends + layer.groups * (held + index) + others) * dtype.itemsize, flops
