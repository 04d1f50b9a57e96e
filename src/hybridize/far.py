"""The half of a gated layer that reads what its window wrote: norm, router, and attention to everything for open tokens.

    u = x + window(x)          h = norm(u)          z = w . h          y = u + d(z) Wo Attention(Wq h, Wk h, Wv h)

(L2A, arXiv 2603.17484.) Queries and the output are projected for open tokens only, keys and values for all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybridize.errors import bad
from hybridize.operators.contract import Chunk, State
from hybridize.operators.dense import causal_attention
from hybridize.operators.gated import open_attention, open_by_rule, open_by_score, open_first, real_open, straight_through
from hybridize.operators.gated_spec import Gated
from hybridize.projections import project

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


class Router(nn.Module):
    """One scalar a token; fp32 whatever the model runs in. Zero at first: every token is open."""

    def __init__(self, width: int, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float32, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, E] to [B, T], fp32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight.float()


class FarAttention(nn.Module):
    """`spec` of a layer, and copies of its attention's projections and norm as they are now (`spec.init`)."""

    def __init__(self, spec: Gated, attention: Any, norm: nn.Module, layer: int) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.norm = copy.deepcopy(norm)
        if spec.gate == "learned":
            width = attention.q_proj.in_features
            self.router = Router(width, next(norm.parameters()).device)
        if spec.share_projections:
            return
        for name in PROJECTIONS:
            setattr(self, name, copy.deepcopy(getattr(attention, name)))
        if self.is_meta:
            return
        # heads in the base's order, whatever order they have in memory
        held = attention.state_dict()
        self.load_state_dict({key: held[key] for key in held if key.split(".")[0] in PROJECTIONS}, strict=False)
        if spec.init == "identity":
            with torch.no_grad():
                for parameter in self.o_proj.parameters():
                    parameter.zero_()

    @property
    def is_meta(self) -> bool:
        return next(self.norm.parameters()).is_meta

    def forward(self, hidden: Tensor, attention: Any, context: Any, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        """hidden [B, T, E], the window's result added, to (what open tokens add to it [B, T, E], aux).

        `attention`: the layer's HybridAttention. `context`: its LayerContext. `state`: keys and values of all tokens so far.

        aux: "far.strength", mean of sigmoid(z / tau)^2 over real tokens, and "far.open", the share of them that is open.
        """
        chunk, of = context.chunk, attention if self.spec.share_projections else self
        h = self.norm(hidden)
        weight, is_open, aux = self._gate(h, chunk)
        index = None if self._all_at_once(chunk, state) else open_first(is_open, least=1 if self.training else 0)
        if index is not None and not index.shape[1]:
            self._keys(h, of, attention, context, state)
            return torch.zeros_like(hidden), aux
        k, v = self._keys(h, of, attention, context, state)
        asking, turn, at = h, context.rotation, chunk.positions.expand(chunk.batch, -1)
        counts = is_open.sum(1)
        if index is None and chunk.tokens > 1:
            counts = torch.full_like(counts, chunk.tokens)  # all, in their own order
        if index is not None:
            asking, at = _taken(h, index), at.gather(1, index)
            turn = tuple(_taken(x.expand(chunk.batch, -1, -1), index) for x in context.rotation)
            weight = (weight * is_open).gather(1, index)  # a closed one that stands in for none has no gradient
        (q,) = project(asking, (of.q_proj,), context.row)
        q = of.q_norm(q.view(*q.shape[:-1], -1, attention.head_dim)).to(v.dtype).transpose(1, 2)
        q = apply_rotary_pos_emb(q, q, *turn)[0].to(v.dtype)
        dropout = attention.attention_dropout if self.training else 0.0
        if index is None and chunk.tokens > 1 and k.shape[2] == chunk.tokens:
            out = causal_attention(q, k, v, attention.scaling, dropout)
        else:
            out = open_attention(q, k, v, at, counts, attention.scaling, dropout)
        (out,) = project(out.transpose(1, 2).reshape(*asking.shape[:-1], -1), (of.o_proj,), context.row)
        out = out * weight[..., None].to(out.dtype)
        if index is None:
            return out, aux
        return torch.zeros_like(hidden).scatter(1, index[..., None].expand_as(out), out.to(hidden.dtype)), aux

    def _gate(self, h: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(d [B, T] fp32 with its gradient, the same as bool, aux)."""
        spec = self.spec
        if spec.gate != "learned":
            is_open = real_open(open_by_rule(spec.gate, spec.rate, chunk.positions, self.layer), chunk)
            weight = is_open.float()
            return weight, is_open, {"far.open": self._mean(weight, chunk)}
        soft = torch.sigmoid(self.router(h) / spec.tau)
        is_open = real_open(open_by_score(soft, spec.theta), chunk)
        weight = straight_through(is_open, soft)
        if chunk.valid is not None:
            weight = weight * chunk.valid
        return weight, is_open, {"far.strength": self._mean(soft**2, chunk), "far.open": self._mean(is_open.float(), chunk)}

    def _mean(self, values: Tensor, chunk: Chunk) -> Tensor:
        """Mean over real tokens."""
        if chunk.valid is None:
            return values.mean()
        return (values * chunk.valid).sum() / chunk.valid.sum().clamp_min(1)

    def _all_at_once(self, chunk: Chunk, state: State | None) -> bool:
        """Whether every token is computed, open or not: a leak, and where the device must not be asked how many are open."""
        static = state is not None and getattr(state, "max_tokens", None) is not None
        if (static and chunk.tokens == 1) or torch.compiler.is_compiling():
            return True
        # torch's own generator on the host: activation checkpointing replays it
        return self.training and torch.is_grad_enabled() and bool(torch.rand((), device="cpu") < self.spec.leak)

    def _keys(self, h: Tensor, of: Any, attention: Any, context: Any, state: State | None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, D] of all tokens so far."""
        k, v = (x.view(*h.shape[:-1], -1, attention.head_dim) for x in project(h, (of.k_proj, of.v_proj), context.row))
        k, v = (x.to(v.dtype).transpose(1, 2) for x in (of.k_norm(k), v))
        k = apply_rotary_pos_emb(k, k, *context.rotation)[1].to(v.dtype)
        if state is None:
            return k, v
        state.append(k, v, context.chunk)
        if state.k is None or state.v is None:
            raise bad("past_key_values", "a state without memory", "a cache made by this model (model.new_cache())")
        return state.k, state.v


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x [B, T, E] at columns `index` [B, N]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
