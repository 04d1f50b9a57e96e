"""SnapKV (Li et al. 2024, arXiv 2404.14469): full attention in the prompt, of which each group then keeps a few tokens.

A baseline to compare with. When a row's prompt ends, its last `observe` queries vote with their attention (softmax summed
over them and the group's query heads, averaged over `pool` neighbours); the `budget` tokens with the most votes stay, the
voters' own always, and decoded tokens are added behind them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridize.operators.contract import Chunk, Heads, OneToken, Operator, State, write_at
from hybridize.operators.dense import causal_attention, masked_attention
from hybridize.operators.full import static_zeros
from hybridize.operators.specs import SnapKV


class SnapKVAttention(Operator):
    """Without a prompt_len the prompt never ends, and this is full attention."""

    def __init__(self, spec: SnapKV) -> None:
        super().__init__()
        self.spec = spec

    def new_state(self, max_tokens: int | None) -> State:
        return SnapState(self.spec, max_tokens)

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        chunk = heads.chunk
        assert state is None or isinstance(state, SnapState)
        if state is not None:
            state.append(heads.k, heads.v, chunk)
        k, v = (heads.k, heads.v) if state is None else state.kv()
        columns = torch.arange(k.shape[2], device=k.device)
        slots = chunk.positions if state is None else state.slot(chunk.positions, chunk)
        if chunk.prompt_len is None or (state is not None and state.done):
            if chunk.offset == 0 and chunk.tokens > 1:
                return causal_attention(heads.q, heads.k, heads.v, heads.scale, heads.dropout), {}
            return masked_attention(heads.q, k, v, _until(columns, slots), heads.scale, heads.dropout), {}
        ends, prompt = chunk.ends, chunk.prompt_len
        unfinished = chunk.starts < prompt
        ending = unfinished & (ends >= prompt)
        observing = unfinished & (ends > prompt - self.spec.observe)
        decoding = chunk.decoding
        assert decoding is not None
        any_ending, any_observing, any_decoding = torch.stack([ending.any(), observing.any(), decoding.any()]).tolist()
        votes = kept = None
        if any_observing:
            votes = self._votes(heads, k, state)
        if any_ending:
            assert votes is not None
            kept = self._kept(votes, columns, prompt)
        if chunk.offset == 0 and chunk.tokens > 1 and not any_decoding:
            out = causal_attention(heads.q, heads.k, heads.v, heads.scale, heads.dropout)
        else:
            visible = _until(columns, slots)
            if any_decoding and kept is not None:
                # decoded in the very chunk that ends the prompt: what is dropped is still there, and must not be seen
                late = (decoding & ending[:, None])[:, None, :, None]
                chosen = kept[:, :, None] | (columns >= prompt[:, None])[:, None, None]
                visible = (visible & (chosen | ~late)).repeat_interleave(heads.q.shape[1] // k.shape[1], dim=1)
            out = masked_attention(heads.q, k, v, visible, heads.scale, heads.dropout)
        if state is not None:
            state.votes = votes if bool((observing & ~ending).any()) else None
            if kept is not None:
                state.compress(kept, ending, chunk)
        return out, {}

    def shares_decode(self, state: State) -> bool:
        assert isinstance(state, SnapState)
        return state.done

    def one_token(self, heads: Heads, state: State) -> OneToken:
        assert isinstance(state, SnapState)
        count = state.slot(heads.chunk.positions, heads.chunk)[:, 0]
        if state.max_tokens is None:
            state.append(heads.k, heads.v, heads.chunk)
            count = count + 1
        k, v = state.kv()
        return OneToken(k, v, count)

    def _votes(self, heads: Heads, k: Tensor, state: SnapState | None) -> Tensor:
        """Summed attention of the prompt's last queries so far to each key, fp32 [B, G, S]."""
        chunk, spec = heads.chunk, self.spec
        assert chunk.prompt_len is not None
        b, h, t, d = heads.q.shape
        g, s = k.shape[1], k.shape[2]
        where = chunk.prompt_len[:, None] - torch.arange(spec.observe, 0, -1, device=k.device)  # [B, O]
        place = where - chunk.starts[:, None]
        # rows that are finished have other columns, and nothing to vote on
        real = (place >= 0) & (place < t) & (where >= 0)
        index = place.clamp(0, t - 1)[:, None, :, None].expand(b, h, -1, d)
        q = heads.q.detach().gather(2, index).reshape(b, g, -1, d)
        logits = (q @ k.detach().transpose(-1, -2)).float() * heads.scale
        logits = logits.view(b, g, h // g, spec.observe, s)
        seen = torch.arange(s, device=k.device) <= where[:, :, None]
        weights = logits.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        votes = torch.where(real[:, None, None, :, None], weights, 0.0).sum(dim=(2, 3))
        if state is not None and state.votes is not None:
            votes[:, :, : state.votes.shape[2]] += state.votes
        return votes

    def _kept(self, votes: Tensor, columns: Tensor, prompt: Tensor) -> Tensor:
        """Which columns of a row that ends its prompt stay, bool [B, G, S]."""
        spec = self.spec
        pooled = F.avg_pool1d(votes, spec.pool, stride=1, padding=spec.pool // 2)
        behind = prompt[:, None] - 1 - columns  # [B, S]
        pooled = pooled.masked_fill((behind < spec.observe)[:, None], float("inf"))
        pooled = pooled.masked_fill((behind < 0)[:, None], float("-inf"))
        best = pooled.topk(min(spec.budget, len(columns)), dim=-1).indices
        return torch.zeros_like(pooled, dtype=torch.bool).scatter_(2, best, True) & (behind >= 0)[:, None]


def _until(columns: Tensor, slots: Tensor) -> Tensor:
    return columns <= slots[:, None, :, None]


class SnapState(State):
    """Column n holds content position n until a row's prompt ends; then what it kept, in order, and decoded tokens.

    Args:
        max_tokens: None to grow, and to shrink when every row's prompt has ended; else columns of a static state.

    Attributes:
        votes: of prompts whose last queries came in earlier chunks, None mostly. done: every row's prompt has ended.
    """

    def __init__(self, spec: SnapKV, max_tokens: int | None) -> None:
        super().__init__()
        self.spec = spec
        self.max_tokens = max_tokens
        self.votes: Tensor | None = None
        self.done = False

    @property
    def prompt_is_closed(self) -> bool:
        return self.done

    def kv(self) -> tuple[Tensor, Tensor]:
        assert self.k is not None and self.v is not None
        return self.k, self.v

    def kept_count(self, prompt: Tensor) -> Tensor:
        return prompt.clamp_max(self.spec.budget)

    def slot(self, positions: Tensor, chunk: Chunk) -> Tensor:
        """The column of each content position [B, T], for rows as they were when the chunk began."""
        if chunk.prompt_len is None:
            return positions
        prompt = chunk.prompt_len[:, None]
        return torch.where(chunk.starts[:, None] < prompt, positions, self.kept_count(prompt) + positions - prompt)

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        starts = self.slot(chunk.positions[:, :1], chunk)[:, 0].expand(k.shape[0])
        if self.max_tokens is not None:
            if self.k is None or self.v is None:
                self.k, self.v = static_zeros(k, self.max_tokens), static_zeros(v, self.max_tokens)
        elif self.k is None or self.v is None:
            self.k, self.v = k.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format)
            return
        else:
            self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        write_at(self.k, k, starts)
        write_at(self.v, v, starts)

    def compress(self, kept: Tensor, ending: Tensor, chunk: Chunk) -> None:
        """Bring what the `ending` rows [B] kept [B, G, S] to the front, and forget the rest."""
        k, v = self.kv()
        assert chunk.prompt_len is not None
        columns, prompt = torch.arange(k.shape[2], device=k.device), chunk.prompt_len
        count = self.kept_count(prompt)[:, None]
        order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)
        decoded = (prompt[:, None] + columns - count).clamp_max(k.shape[2] - 1)
        index = torch.where((columns < count)[:, None], order, decoded[:, None])
        index = torch.where(ending[:, None, None], index, columns)[..., None].expand_as(k)
        k, v = k.gather(2, index), v.gather(2, index)
        self.done = bool((chunk.ends >= prompt).all())
        if self.max_tokens is not None and self.k is not None and self.v is not None:
            self.k.copy_(k)
            self.v.copy_(v)
            return
        if self.done:
            held = int((count[:, 0] + chunk.ends - prompt).max())
            k, v = k[:, :, :held].clone(), v[:, :, :held].clone()
        self.k, self.v = k, v

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.votes is None else [self.votes])

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.votes is not None:
            self.votes = self.votes.index_select(0, index.to(self.votes.device))

    def reset(self) -> None:
        self.votes, self.done = None, False
        if self.max_tokens is None:
            super().reset()
        for tensor in self.tensors():
            tensor.zero_()
