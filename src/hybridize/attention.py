"""HybridAttention and the decoder layer around it: the base's own modules under their own names, other attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybridize.cache import HybridCache
from hybridize.errors import bad
from hybridize.far import FarAttention
from hybridize.kernels.dispatch import kernels_for, prepare
from hybridize.layout import HeadLayout
from hybridize.operators.contract import Chunk, Heads, OneToken
from hybridize.operators.learned import Learned, branches_of
from hybridize.operators.registry import branches_for, build_operator
from hybridize.plan import AttentionPlan
from hybridize.projections import gated_mlp, project

Rotation = tuple[Tensor, Tensor]
FAR = -1  # no group: what belongs to a layer as a whole


@dataclass
class LayerContext:
    """What every layer of one forward call shares.

    `rotation` is the base's (cos, sin), [B or 1, T, D] each; `sink_rotation(distance)` the one at
    min(position, distance), for re-based sinks. `row`: the kernels of a decoding step of one sequence, else None.
    """

    chunk: Chunk
    cache: HybridCache | None
    rotation: Rotation
    sink_rotation: Callable[[int], Rotation]
    row: Any = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LayerContext:
        """Copy to a layer's device; the cache stays, its states live where their layer lives."""

        def move(rotation: Rotation) -> Rotation:
            return rotation[0].to(device), rotation[1].to(device)

        return LayerContext(
            self.chunk.to(device),
            self.cache,
            move(self.rotation),
            lambda distance: move(self.sink_rotation(distance)),
            self.row,
        )


class HybridAttention(HeadLayout):
    """Runs one operator per span of groups.

    Heads of one operator are contiguous: rows of q, k, v and columns of o are permuted in memory, so spans are slices.
    State dicts are always in the base's layout; the permutation is undone on the way out and redone on the way in.
    """

    def __init__(self, base: nn.Module, plan: AttentionPlan, layer: int) -> None:
        super().__init__(plan.geometry)
        self.layer = layer
        self.scaling = base.scaling
        self.attention_dropout = base.attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        self.q_norm: nn.Module = base.q_norm if hasattr(base, "q_norm") else nn.Identity()
        self.k_norm: nn.Module = base.k_norm if hasattr(base, "k_norm") else nn.Identity()
        self.operators = nn.ModuleList()
        self.held: dict[int, Learned] | None = None  # learned parameters that no plan may lose
        self.use_plan(plan)

    def use_plan(self, plan: AttentionPlan, branches: Mapping[int, Learned] | None = None) -> None:
        """Set the operators; weights keep their order until `permute`.

        A group that stays what it is keeps its learned parameters, or gets those of `branches` (by group) back.
        """
        prepare()
        spans = plan.spans(self.layer)
        self.wanted_order = plan.group_order(self.layer)
        self.span_sizes = [len(groups) for _, groups in spans]
        had = {**(self.held or {}), **self.branches(), **(branches or {})}
        if self.held is not None:
            self.held.update(had)
        operators = []
        with torch.device(self.device):
            for name, groups in spans:
                spec = plan.operators[name]
                branches_of_span = branches_for(spec, groups, self.head_dim, self.group_size, had)
                members = [plan.spec(self.layer, group) for group in groups]
                operators.append(build_operator(spec, branches_of_span, members))
        self.operators = nn.ModuleList(operators).train(self.training)

    @property
    def device(self) -> torch.device:
        return next(self.v_proj.parameters()).device

    def branches(self) -> dict[int, Learned]:
        """Learned parameters beside the base's, by group."""
        return branches_of(self.operators)

    def materialise(self) -> None:
        """Give branches that were made without memory their first values, where the layer's weights are.

        Raises:
            HybridizeError: those weights are offloaded.
        """
        device = self.device
        for branch in self.branches().values():
            if branch.is_meta:
                if device.type == "meta":
                    raise bad("device_map", "offloaded weights", "weights in memory: this plan adds parameters beside them")
                branch.to_empty(device=device).reset_parameters()

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, dict[str, Tensor]]:
        """hidden [B, T, E] (normed input of the layer) to (output of o_proj [B, T, E], aux of the operators)."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        row = context.row
        q_raw, k_raw, v = (x.view(shape) for x in project(hidden, (self.q_proj, self.k_proj, self.v_proj), row))
        # under autocast norms and cosines are wider than the projections: what attends together has one dtype
        q_raw, k_raw, v = (x.to(v.dtype).transpose(1, 2) for x in (self.q_norm(q_raw), self.k_norm(k_raw), v))
        cache = context.cache
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q_raw, k_raw, v, *self.operators.parameters()))
        kernels = None
        if cache is not None and q_raw.shape[2] == 1 and not trains:  # they have no backward
            kernels = kernels_for("decode", q_raw, self.attention_dropout if self.training else 0.0)
        states = cache.states(self.layer) if cache is not None else [None] * len(self.operators)
        shared = [kernels is not None and op.shares_decode(st) for op, st in zip(self.operators, states, strict=True)]
        if cache is not None and cache.max_tokens is not None:
            if all(shared):  # a static cache: one launch rotates, writes and attends
                spans = self._spans(q_raw, k_raw, v, q_raw, k_raw, hidden, context)
                views = [op.one_token(heads, st) for op, heads, st in zip(self.operators, spans, states, strict=True)]
                out = self._launch(kernels, q_raw, views, [k_raw, v, *context.rotation])
                self._add_beside(out, spans, states)
                return project(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1), (self.o_proj,), row)[0], {}
            shared = [False] * len(shared)
        q, k = rotated(q_raw, k_raw, context.rotation)
        spans = self._spans(q, k, v, q_raw, k_raw, hidden, context)
        room = None if trains else self._room(q, spans)
        outputs, aux = self._run(q, spans, states, shared, kernels)
        return project(_join(spans, outputs, room).reshape(*hidden.shape[:-1], -1), (self.o_proj,), row)[0], aux

    def _run(
        self, q: Tensor, spans: Sequence[Heads], states: Sequence[Any], shared: Sequence[bool], kernels: Any
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """(outputs [B, H, T, D], aux): one launch for all spans that share a decoded token's, the others by themselves."""
        outputs: list[Tensor | None] = []
        views, aux, first = [], {}, 0
        for operator, groups, heads, state, mine in zip(self.operators, self.span_sizes, spans, states, shared, strict=True):
            if mine:
                views.append(operator.one_token(heads, state))
                outputs.append(None)
            else:
                out, extra = operator(heads, state)
                outputs.append(out)
                aux.update({f"{first}.{name}": value for name, value in extra.items()})
            first += groups
        parts: Iterator[Tensor] = iter(())
        if views:
            chosen = [heads.q for heads, mine in zip(spans, shared, strict=True) if mine]
            out = self._launch(kernels, q if all(shared) else torch.cat(chosen, dim=1), views, [])
            self._add_beside(out, spans, states, shared)
            parts = iter([out] if len(chosen) == 1 else out.split([part.shape[1] for part in chosen], dim=1))
        return [next(parts) if own is None else own for own in outputs], aux

    def _add_beside(
        self, out: Tensor, spans: Sequence[Heads], states: Sequence[Any], shared: Sequence[bool] | None = None
    ) -> None:
        """In place: to each span's part of a launch's output what its operator says beside it."""
        first = 0
        for i, (operator, heads, state) in enumerate(zip(self.operators, spans, states, strict=True)):
            if shared is None or shared[i]:
                last = first + heads.q.shape[1]
                if (more := operator.beside(heads, state)) is not None:
                    out[:, first:last] += more
                first = last

    def _room(self, q: Tensor, spans: Sequence[Heads]) -> Tensor | None:
        """Memory [B, T, H, D] that spans may write their parts of; None: there is nothing to join."""
        if len(spans) == 1 or q.shape[2] == 1:
            return None
        joined = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        for heads, part in zip(spans, joined.split([heads.q.shape[1] for heads in spans], dim=2), strict=True):
            heads.out = part.transpose(1, 2)
        return joined

    def _launch(self, kernels: Any, q: Tensor, views: Sequence[OneToken], new: list[Tensor]) -> Tensor:
        """One launch over all spans that have a view: q [B, H of them, 1, D] to the outputs, of the same shape."""
        none = q.new_empty(0)
        out: Tensor = kernels.one_token_attention(
            q,
            [view.k for view in views],
            [view.v for view in views],
            [view.count for view in views],
            [none.long() if view.start is None else view.start for view in views],
            [none if view.q_sink is None else view.q_sink for view in views],
            [view.sinks for view in views],
            [view.ring for view in views],
            new,
            self.scaling,
        )
        return out

    def _spans(
        self, q: Tensor, k: Tensor, v: Tensor, q_raw: Tensor, k_raw: Tensor, hidden: Tensor, context: LayerContext
    ) -> list[Heads]:
        """What each operator is given, in memory order."""
        made, first = [], 0
        for groups in self.span_sizes:
            heads = slice(first * self.group_size, (first + groups) * self.group_size)
            made.append(self._heads(q, k, v, q_raw, k_raw, hidden, heads, slice(first, first + groups), context))
            first += groups
        return made

    def _heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_raw: Tensor,
        k_raw: Tensor,
        hidden: Tensor,
        heads: slice,
        span: slice,
        context: LayerContext,
    ) -> Heads:
        def q_sink(distance: int) -> Tensor:
            raw = q_raw[:, heads]
            return apply_rotary_pos_emb(raw, raw, *context.sink_rotation(distance))[0].to(raw.dtype)

        return Heads(
            q=q[:, heads],
            k=k[:, span],
            v=v[:, span],
            chunk=context.chunk,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            hidden=hidden,
            q_raw=lambda: q_raw[:, heads],
            k_raw=lambda: k_raw[:, span],
            q_sink=q_sink,
        )


def _join(spans: Sequence[Heads], outputs: Sequence[Tensor], room: Tensor | None) -> Tensor:
    """[B, T, H, D], which is what o_proj reads and kernels write; `room` already has what was written there."""
    if room is None:
        parts = [out.transpose(1, 2) for out in outputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    for heads, out in zip(spans, outputs, strict=True):
        if heads.out is not None and out is not heads.out:
            heads.out.copy_(out)
    return room


def rotated(q: Tensor, k: Tensor, rotation: Rotation) -> Rotation:
    """RoPE of q [B, H, T, D] and k [B, G, T, D], in their dtype; the compiler of a traced graph needs no kernel for it."""
    if (kernels := None if torch.compiler.is_compiling() else kernels_for("rotary", q)) is not None:
        return kernels.rotate(q, k, *rotation)
    q_turned, k_turned = apply_rotary_pos_emb(q, k, *rotation)
    return q_turned.to(q.dtype), k_turned.to(k.dtype)


class HybridDecoderLayer(GradientCheckpointingLayer):
    """One pre-norm block of any supported family, over the base layer's own submodules."""

    def __init__(self, base: nn.Module, plan: AttentionPlan, layer: int) -> None:
        super().__init__()
        self.self_attn = HybridAttention(base.self_attn, plan, layer)
        self.mlp = base.mlp
        self.input_layernorm = base.input_layernorm
        self.post_attention_layernorm = base.post_attention_layernorm
        self.layer = layer
        self.far: FarAttention | None = None
        self.use_far(plan)

    def use_plan(self, plan: AttentionPlan, branches: Mapping[int, Any] | None = None) -> None:
        """Set what the layer runs; what it has learned stays where it means the same, or is what `branches` has."""
        self.self_attn.use_plan(plan, branches)
        self.use_far(plan, branches)

    def use_far(self, plan: AttentionPlan, branches: Mapping[int, Any] | None = None) -> None:
        spec, held = plan.gate(self.layer), self.self_attn.held
        had = {**(held or {}), **self.branches(), **(branches or {})}.get(FAR)
        if spec is not None:
            if had is None or had.spec.learned != spec.learned:
                had = FarAttention(spec, self.self_attn, self.input_layernorm, self.layer).train(self.training)
            had.spec = spec
        if held is not None and had is not None:
            held[FAR] = had
        self.far = None if spec is None else had

    def branches(self) -> dict[int, Any]:
        """What was learned beside the base's weights: by group, and as FAR the far half of a gated layer."""
        return self.self_attn.branches() | ({} if self.far is None else {FAR: self.far})

    def materialise(self) -> None:
        """Give what was made without memory its first values, once the base's weights are in place."""
        self.self_attn.materialise()
        if self.far is not None and self.far.is_meta:
            self.far = FarAttention(self.far.spec, self.self_attn, self.input_layernorm, self.layer)

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, dict[str, Tensor]]:
        """hidden [B, T, E] to (hidden [B, T, E], aux of the layer's operators)."""
        attended, aux = self.self_attn(self.input_layernorm(hidden), context)
        hidden = hidden + attended
        if self.far is not None:
            state = None if context.cache is None else context.cache.far_state(self.layer)
            seen, more = self.far(hidden, self.self_attn, context, state)
            hidden, aux = hidden + seen, aux | more
        return hidden + gated_mlp(self.mlp, self.post_attention_layernorm(hidden), context.row), aux
