"""Sliding window with sinks (StreamingLLM, Xiao et al. 2023; SWAA, arXiv 2512.10411), optionally full in decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridize.kernels.dispatch import keeps_gradients, kernels_for
from hybridize.operators.banded import banded_attention
from hybridize.operators.contract import Chunk, Heads, OneToken, Operator, State, take, write_at
from hybridize.operators.dense import masked_attention, softmax_attention, token_attention
from hybridize.operators.full import GrowingState, StaticState, make_room, static_zeros
from hybridize.operators.specs import Window


class WindowAttention(Operator):
    """A query at content position n sees n - size < j <= n and j < sinks."""

    def __init__(self, spec: Window) -> None:
        super().__init__()
        self.spec = spec

    def new_state(self, max_tokens: int | None) -> State:
        if self.spec.decode == "full":
            return GrowingState() if max_tokens is None else StaticState(max_tokens)
        return WindowState(self.spec) if max_tokens is None else StaticWindowState(self.spec, max_tokens)

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        if self.spec.decode == "full":
            return self._phased(heads, state), {}
        if state is None:
            return self._banded(heads, None, heads.k, heads.v), {}
        assert isinstance(state, WindowState)
        if heads.chunk.tokens == 1:
            state.append(heads.k, heads.v, heads.chunk)
            return self._one_token(heads, state), {}
        # the chunk's first queries still see tokens that the chunk's last ones push out: read before writing
        history = None if heads.chunk.offset == 0 else state.history(heads.chunk)
        state.append(heads.k, heads.v, heads.chunk)
        return self._banded(heads, history, *state.sinks()), {}

    def _banded(self, heads: Heads, history: tuple[Tensor, Tensor] | None, sink_k: Tensor, sink_v: Tensor) -> Tensor:
        spec, k, v = self.spec, heads.k, heads.v
        if history is not None:
            k, v = torch.cat([history[0], k], dim=2), torch.cat([history[1], v], dim=2)
        q_sink = None if spec.rebased_distance is None else heads.q_sink(spec.rebased_distance)
        given = (heads.q, k, v, sink_k[:, :, : spec.sinks], sink_v[:, :, : spec.sinks], heads.chunk.positions)
        how: dict[str, Any] = {"size": spec.size, "scale": heads.scale, "q_sink": q_sink}
        if (kernels := kernels_for("window", heads.q, heads.dropout)) is not None:
            return kernels.window_attention(*given, **how, counts=heads.chunk.count, out=heads.out)
        return banded_attention(*given, **how, dropout=heads.dropout)

    def _one_token(self, heads: Heads, state: WindowState) -> Tensor:
        spec = self.spec
        assert state.k is not None and state.v is not None
        held = state.held_positions(heads.chunk.ends - 1)
        visible = (held >= 0)[:, None, None, :]
        if spec.rebased_distance is None:
            return masked_attention(heads.q, state.k, state.v, visible, heads.scale, heads.dropout)
        b, h, _, d = heads.q.shape
        g, sinks = state.k.shape[1], min(spec.sinks, state.k.shape[2])
        q, q_sink = (x.reshape(b, g, h // g, d) for x in (heads.q, heads.q_sink(spec.rebased_distance)))
        logits = torch.cat(
            [q_sink @ state.k[:, :, :sinks].transpose(-1, -2), q @ state.k[:, :, sinks:].transpose(-1, -2)], dim=-1
        )
        return softmax_attention(logits, state.v, visible, heads.scale, heads.dropout).reshape(b, h, 1, d)

    def shares_decode(self, state: State) -> bool:
        return True

    def one_token(self, heads: Heads, state: State) -> OneToken:
        spec, chunk = self.spec, heads.chunk
        if spec.decode == "full":  # the state holds every token; a last piece of the prompt sees its window only
            count = make_room(heads, state)
            assert state.k is not None and state.v is not None
            near = (chunk.starts + 1 - spec.size).clamp_min(0)
            start = near if chunk.prompt_len is None else torch.where(chunk.starts < chunk.prompt_len, near, 0)
            return OneToken(state.k, state.v, count, start, spec.sinks)
        q_sink = None if spec.rebased_distance is None else heads.q_sink(spec.rebased_distance)
        if isinstance(state, StaticWindowState):
            state._allocate(heads.k, heads.v, chunk)
            assert state.k is not None and state.v is not None
            return OneToken(state.k, state.v, chunk.starts, None, spec.sinks, q_sink, ring=True)
        state.append(heads.k, heads.v, chunk)
        assert state.k is not None and state.v is not None
        # slots fill in order, and stay filled
        count = (chunk.starts + 1).clamp_max(state.k.shape[2])
        return OneToken(state.k, state.v, count, None, spec.sinks, q_sink)

    def over_everything(self, heads: Heads, k: Tensor, v: Tensor, stored: bool) -> Tensor:
        """Each query's window, from k and v of all tokens up to the chunk's last (`stored`), or of the chunk's own."""
        chunk = heads.chunk
        if chunk.tokens == 1:
            kernels = None if keeps_gradients(heads.q, k, v) else kernels_for("decode", heads.q, heads.dropout)
            if kernels is None:
                return self._masked(heads.q, k, v, chunk.positions, None, heads)
            count = chunk.starts + 1
            near = (count - self.spec.size).clamp_min(0)
            return token_attention(kernels, heads.q, k, v, count, heads.scale, near, self.spec.sinks)
        history = None
        if stored and chunk.offset != 0:
            back = torch.arange(self.spec.size - 1, 0, -1, device=k.device)
            before = (chunk.starts[:, None] - back).clamp_min(0)
            history = take(k, before), take(v, before)
        return self._banded(heads, history, k, v)

    def _phased(self, heads: Heads, state: State | None) -> Tensor:
        """decode="full": prompt queries see the window, queries behind the prompt see everything."""
        chunk = heads.chunk
        k, v = heads.k, heads.v
        if state is not None:
            state.append(k, v, chunk)
            assert state.k is not None and state.v is not None
            k, v = state.k, state.v
        decoding = chunk.decoding
        if chunk.tokens == 1:
            return self._masked(heads.q, k, v, chunk.positions, decoding, heads)
        out = self.over_everything(heads, k, v, stored=state is not None)
        if decoding is None:
            return out
        first = 0 if torch.compiler.is_compiling() else first_true_column(decoding)
        if first == chunk.tokens:
            return out
        late = self._masked(heads.q[:, :, first:], k, v, chunk.positions[:, first:], decoding[:, first:], heads)
        return torch.cat([out[:, :, :first], late], dim=2)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, decoding: Tensor | None, heads: Heads) -> Tensor:
        columns = torch.arange(k.shape[2], device=k.device)
        n = positions[:, :, None]
        near = (columns > n - self.spec.size) | (columns < self.spec.sinks)
        if decoding is not None:
            near = near | decoding[:, :, None]
        return masked_attention(q, k, v, ((columns <= n) & near)[:, None], heads.scale, heads.dropout)


def first_true_column(flags: Tensor) -> int:
    """First column of [B, T] that is true in any row, T where none is."""
    columns = flags.any(dim=0).nonzero()
    return int(columns[0]) if len(columns) else flags.shape[1]


class WindowState(State):
    """Slot n holds content position n while n < sinks + size; after that the window's slots are a ring.

    Slots are addressed by content position, per row, so that left padding never takes one, and what a slot holds
    follows from the row's length alone: nothing but keys and values is stored.
    """

    def __init__(self, spec: Window) -> None:
        super().__init__()
        self.spec = spec

    @property
    def slots(self) -> int:
        return self.spec.sinks + self.spec.size

    def slot(self, positions: Tensor) -> Tensor:
        """The slot of each content position."""
        s = self.spec.sinks
        return torch.where(positions < s, positions, s + (positions - s) % self.spec.size)

    def held_positions(self, newest: Tensor) -> Tensor:
        """Content position in each slot when `newest` [B] is the last one taken in; -1: empty. [B, slots]."""
        assert self.k is not None
        slots = torch.arange(self.k.shape[2], device=newest.device)
        s, newest = self.spec.sinks, newest[:, None]
        ring = newest - (newest - slots) % self.spec.size
        held = torch.where(slots < s, slots, torch.where(ring >= s, ring, -1))
        return torch.where(held <= newest, held, -1)

    def history(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Keys and values of the size - 1 tokens before the chunk, in order; positions before 0 are arbitrary."""
        assert self.k is not None and self.v is not None
        before = chunk.starts[:, None] - torch.arange(self.spec.size - 1, 0, -1, device=self.k.device)
        index = self.slot(before.clamp_min(0))
        return take(self.k, index), take(self.v, index)

    def sinks(self) -> tuple[Tensor, Tensor]:
        assert self.k is not None and self.v is not None
        return self.k[:, :, : self.spec.sinks], self.v[:, :, : self.spec.sinks]

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        self._allocate(k, v, chunk)
        assert self.k is not None and self.v is not None
        if chunk.tokens == 1:
            slot = self.slot(chunk.starts).expand(k.shape[0])
            write_at(self.k, k, slot)
            write_at(self.v, v, slot)
            return
        column = self.held_positions(chunk.ends - 1) - chunk.starts[:, None]
        # a slot whose newest position lies in this chunk takes it from there, any other keeps what it has
        new, column = (column >= 0)[:, None, :, None], column.clamp_min(0)
        self._store(torch.where(new, take(k, column), self.k), torch.where(new, take(v, column), self.v))

    def _allocate(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        held = 0 if self.k is None else self.k.shape[2]
        more = min(held + chunk.tokens, self.slots) - held
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_zeros(*x.shape[:2], more, x.shape[3]) for x in (k, v))
        elif more:
            self.k, self.v = (torch.cat([x, x.new_zeros(*x.shape[:2], more, x.shape[3])], dim=2) for x in (self.k, self.v))

    def _store(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v


class StaticWindowState(WindowState):
    """All slots from the start, written in place."""

    def __init__(self, spec: Window, max_tokens: int) -> None:
        super().__init__(spec)
        self.max_tokens = max_tokens

    @property
    def slots(self) -> int:
        return min(self.spec.sinks + self.spec.size, self.max_tokens)

    def _allocate(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        if self.k is None or self.v is None:
            self.k, self.v = static_zeros(k, self.slots), static_zeros(v, self.slots)

    def _store(self, k: Tensor, v: Tensor) -> None:
        assert self.k is not None and self.v is not None
        self.k.copy_(k)
        self.v.copy_(v)

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()
