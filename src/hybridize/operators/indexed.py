"""Indexed attention (RTPurbo, arXiv 2605.16928): a small index finds the tokens that a query needs, softmax is over those.

    score(n, j) = (Wq q_n) . (Wk k_j)      Wq of each query head, Wk of the group, before RoPE

Keys and values of all tokens are kept, and the index key of each beside them. What is chosen has no gradient: the index
learns from the attention it stands for (`error`), not from what is done with its choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridize.kernels.dispatch import INDEX_BLOCKS, index_tile_fits, keeps_gradients, kernels_for
from hybridize.operators.choosing import chosen, page_bounds, random_scores
from hybridize.operators.contract import Chunk, Heads, Operator, State
from hybridize.operators.dense import causal_attention, masked_attention, token_attention
from hybridize.operators.full import attend_history, extended
from hybridize.operators.learned import Learned, stacked
from hybridize.operators.specs import Indexed
from hybridize.operators.window import WindowAttention

AT_ONCE = 1 << 25  # scores that stand in memory together
ERROR_ROWS = 256  # queries of a row whose attention the index learns in one step


class Index(Learned):
    """Projections of one group. map_q [R, D, d], map_k [D, d]: at first the same random directions for queries and keys."""

    def __init__(self, spec: Indexed, head_dim: int, query_heads: int) -> None:
        super().__init__()
        self.spec = spec
        self.map_q = nn.Parameter(torch.empty(query_heads, head_dim, spec.dim, dtype=torch.float32))
        self.map_k = nn.Parameter(torch.empty(head_dim, spec.dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.is_meta:
            return
        nn.init.orthogonal_(self.map_k)
        with torch.no_grad():
            # q.k / sqrt(D) of random directions: the D / d of them that are not looked at are made up for
            scale = self.map_k.shape[0] ** 0.5 / self.map_k.shape[1]
            self.map_q.copy_(scale * self.map_k.expand_as(self.map_q))


class IndexedAttention(Operator):
    """`branches`: by the group's number in the base, ascending, as the span's heads lie. `members`: the groups' own specs."""

    def __init__(
        self, spec: Indexed, branches: Mapping[int, Index] | None = None, members: Sequence[Indexed] | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.near = WindowAttention(spec.near)
        self.branches = nn.ModuleDict({str(group): branch for group, branch in (branches or {}).items()})
        self.members = tuple(members or ())
        self.which: Tensor | None = None

    def new_state(self, max_tokens: int | None) -> State:
        return IndexedState(max_tokens)

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert state is None or isinstance(state, IndexedState)
        index_k = self.index_keys(heads)
        if state is not None:
            state.append(heads.k, heads.v, heads.chunk)
            index_k = state.append_index(index_k, heads.chunk)
        k, v = (heads.k, heads.v) if state is None else state.kv()
        which = self.retrieving(heads)
        if len(which) == heads.q.shape[1]:
            return self._tracked(self._retrieve(heads, which, k, v, index_k, state)), {}
        out = self.near.over_everything(heads, k, v, stored=state is not None)
        found = self._retrieve(heads, which, k, v, index_k, state).to(out.dtype)
        # in the layer's own memory, where nothing is learned from it
        joined = out.index_copy(1, which, found) if keeps_gradients(out, found) else out.index_copy_(1, which, found)
        return self._tracked(joined), {}

    def retrieving(self, heads: Heads) -> Tensor:
        """Numbers of the span's query heads that retrieve."""
        if self.which is None or self.which.device != heads.q.device:
            repeats = heads.q.shape[1] // heads.k.shape[1]
            flags = [x for spec in self.members for x in (spec.retrieves or (True,) * repeats)]
            self.which = torch.tensor([i for i, x in enumerate(flags) if x], device=heads.q.device)
        return self.which

    def index_keys(self, heads: Heads) -> Tensor | None:
        """Wk k [B, G, T, d] in the keys' dtype, as they are kept; None: no index is asked."""
        if self.spec.select != "index":
            return None
        with torch.autocast(heads.k.device.type, enabled=False):
            return (heads.k_raw().float() @ stacked(self.branches.values(), "map_k")).to(heads.k.dtype)

    def index_queries(self, heads: Heads) -> Tensor:
        """Wq q [B, H, T, d] in the queries' dtype."""
        q, maps = heads.q_raw().float(), stacked(self.branches.values(), "map_q")
        with torch.autocast(q.device.type, enabled=False):
            return (q @ maps.flatten(0, 1)).to(heads.q.dtype)

    def sees(self, heads: Heads, which: Tensor, k: Tensor, index_k: Tensor | None, rows: slice) -> Tensor:
        """bool [B, H', T', S]: what the queries of heads `which` and columns `rows` attend to, among keys k [B, G, S, D]."""
        spec, positions = self.spec, heads.chunk.positions[:, rows]
        seen = (torch.arange(k.shape[2], device=k.device) <= positions[..., None])[:, None]
        if spec.select == "all":
            return seen
        with torch.no_grad():
            mask = chosen(self._scores(heads, which, k, index_k, rows), positions, spec)
        dense = positions < spec.dense_below
        if spec.dense_prefill:
            behind = heads.chunk.decoding
            dense = torch.ones_like(positions, dtype=torch.bool) if behind is None else dense | ~behind[:, rows]
        return mask | (seen & dense[:, None, :, None])

    def _scores(self, heads: Heads, which: Tensor, k: Tensor, index_k: Tensor | None, rows: slice) -> Tensor:
        """[B, H', T', S], fp32."""
        spec, group = self.spec, self._group_of(heads, which)
        if spec.select == "random":
            return random_scores(heads.chunk.positions[:, rows], len(which), k.shape[2])
        with torch.autocast(k.device.type, enabled=False):
            if spec.select == "index":
                assert index_k is not None
                q = self.index_queries(heads)[:, which, rows].float()
                return q @ index_k[:, group].float().transpose(-1, -2)
            q = heads.q[:, which, rows].float() * heads.scale
            if spec.select == "pages":
                return page_bounds(q, k[:, group], spec.block)
            return q @ k[:, group].float().transpose(-1, -2)

    def _retrieve(
        self, heads: Heads, which: Tensor, k: Tensor, v: Tensor, index_k: Tensor | None, state: IndexedState | None
    ) -> Tensor:
        """[B, H', T, D]: attention of the heads `which` to what each query sees."""
        chunk, group = heads.chunk, self._group_of(heads, which)
        if self._everything(chunk):
            every = len(which) == heads.q.shape[1]
            if state is None or (chunk.offset == 0 and chunk.tokens > 1):
                own = (heads.q, heads.k, heads.v) if every else (heads.q[:, which], heads.k[:, group], heads.v[:, group])
                return causal_attention(*own, heads.scale, heads.dropout)
            if chunk.tokens == 1:
                # keys are read once a group, whichever of its heads ask
                seen = self._token(heads, k, v, state)
                return seen if every else seen[:, which]
            if every:
                return attend_history(heads, state)
        if (kernels := self._kernels(heads)) is not None:
            return self._fused(kernels, heads, which, k, v, index_k)
        trains = keeps_gradients(heads.q, k, v)
        k_each, v_each = k[:, group], v[:, group]

        def part(rows: slice, q: Tensor, k_each: Tensor, v_each: Tensor) -> Tensor:
            mask = self.sees(heads, which, k, index_k, rows)
            return masked_attention(q, k_each, v_each, mask, heads.scale, heads.dropout)

        step = max(1, AT_ONCE // (chunk.batch * len(which) * k.shape[2]))
        outs = []
        for first in range(0, chunk.tokens, step):
            rows = slice(first, first + step)
            given = (rows, heads.q[:, which, rows], k_each, v_each)
            # masks and scores of all rows together would be the whole T x S
            again = trains and step < chunk.tokens
            outs.append(checkpoint(part, *given, use_reentrant=False) if again else part(*given))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _token(self, heads: Heads, k: Tensor, v: Tensor, state: IndexedState) -> Tensor:
        """[B, H, 1, D]: one token over everything before it."""
        kernels = None if keeps_gradients(heads.q, k, v) else kernels_for("decode", heads.q, heads.dropout)
        if kernels is None:
            return attend_history(heads, state)
        return token_attention(kernels, heads.q, k, v, heads.chunk.starts + 1, heads.scale)

    def _everything(self, chunk: Chunk) -> bool:
        """Whether it is known, without asking the device, that every query of the chunk sees all before it."""
        if self.spec.select == "all" or (self.spec.dense_prefill and chunk.prompt_len is None):
            return True
        return chunk.offset is not None and chunk.offset + chunk.tokens <= self.spec.dense_below

    def _kernels(self, heads: Heads) -> Any:
        spec, lacks = self.spec, None
        if spec.select != "index":
            return None  # a control
        if spec.min_tokens or spec.max_tokens or spec.top_p == 1:
            lacks = "they choose by a share below 1 alone, without min_tokens and max_tokens"
        elif spec.block not in INDEX_BLOCKS:
            lacks = f"indexed.block is {spec.block}, they have {INDEX_BLOCKS}"
        elif not index_tile_fits(heads.q.dtype, heads.q.shape[-1], spec.block):
            lacks = f"a block of {spec.block} keys of {heads.q.dtype} and head_dim {heads.q.shape[-1]} is above 64 KiB"
        return kernels_for("indexed", heads.q, heads.dropout, lacks)

    def _fused(self, kernels: Any, heads: Heads, which: Tensor, k: Tensor, v: Tensor, index_k: Tensor | None) -> Tensor:
        spec, chunk = self.spec, heads.chunk
        starts = chunk.starts.expand(chunk.batch).contiguous()
        dense = torch.full_like(starts, spec.dense_below)
        if spec.dense_prefill:
            dense = torch.full_like(starts, 2**31 - 1) if chunk.prompt_len is None else dense.maximum(chunk.prompt_len)
        given = (heads.q, k, v, self.index_queries(heads), index_k, which, starts, dense)
        how = (spec.block, spec.sinks, spec.top_p, heads.scale)
        if chunk.tokens == 1 and not keeps_gradients(heads.q, k, v):
            return kernels.indexed_token_attention(*given, *how)
        return kernels.indexed_attention(*given, *how, chunk.count)

    def error(self, heads: Heads, wanted: Tensor) -> Tensor:
        """KL(attention || softmax(score)) of the heads that retrieve, over at most ERROR_ROWS queries of each row (RTPurbo's
        stage 1). The attention is the base's own, over every token; neither side's inputs have a gradient."""
        with torch.autocast(heads.q.device.type, enabled=False):
            which, tokens = self.retrieving(heads), heads.chunk.tokens
            group = self._group_of(heads, which)
            stride = -(-tokens // ERROR_ROWS) | 1  # odd: queries do not all stand at one place of their blocks
            rows = torch.arange(tokens - 1, -1, -stride, device=heads.q.device)
            seen = torch.arange(tokens, device=rows.device) <= rows[:, None]
            maps_q, maps_k = (stacked(self.branches.values(), name) for name in ("map_q", "map_k"))
            q_raw, k_raw = heads.q_raw().detach()[:, which][:, :, rows].float(), heads.k_raw().detach().float()
            scores = (q_raw @ maps_q.flatten(0, 1)[which]) @ (k_raw @ maps_k)[:, group].transpose(-1, -2)
            q, k = heads.q.detach()[:, which][:, :, rows].float(), heads.k.detach()[:, group].float()
            true = ((q @ k.transpose(-1, -2)) * heads.scale).masked_fill(~seen, float("-inf")).log_softmax(-1)
            mine = scores.masked_fill(~seen, float("-inf")).log_softmax(-1)
            return (true.exp() * (true - mine).masked_fill(~seen, 0.0)).sum(-1).mean()

    def _group_of(self, heads: Heads, which: Tensor) -> Tensor:
        return which // (heads.q.shape[1] // heads.k.shape[1])

    def _tracked(self, out: Tensor) -> Tensor:
        """`out` with a gradient of zero for parameters that a choice gives none: every one has a gradient on every device."""
        parameters = [p for p in self.branches.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not parameters:
            return out
        return out + 0 * torch.stack([p.sum() for p in parameters]).sum().to(out.dtype)


class IndexedState(State):
    """Column n holds content position n: its key, its value and, where an index is asked, its index key [B, G, S, d].

    Args:
        max_tokens: None to grow; else columns of memory of a fixed size, written in place.
    """

    def __init__(self, max_tokens: int | None) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.index: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        self.k, self.v = (extended(*pair, chunk, self.max_tokens) for pair in ((self.k, k), (self.v, v)))

    def append_index(self, keys: Tensor | None, chunk: Chunk) -> Tensor | None:
        if keys is not None:
            self.index = extended(self.index, keys, chunk, self.max_tokens)
        return self.index

    def kv(self) -> tuple[Tensor, Tensor]:
        assert self.k is not None and self.v is not None
        return self.k, self.v

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.index is None else [self.index])

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.index is not None:
            self.index = self.index.index_select(0, index.to(self.index.device))

    def reset(self) -> None:
        if self.max_tokens is None:
            super().reset()
            self.index = None
        for tensor in self.tensors():
            tensor.zero_()
