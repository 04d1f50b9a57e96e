"""Full causal attention: the base's own operator, with a state that grows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.operators.contract import Chunk, Heads, OneToken, Operator, State, write_at
from hybridize.operators.dense import causal_attention, masked_attention
from hybridize.operators.specs import Full


class FullAttention(Operator):
    """softmax(q k^T) v over every earlier token."""

    def __init__(self, spec: Full) -> None:
        super().__init__()
        self.spec = spec

    def new_state(self, max_tokens: int | None) -> State:
        return GrowingState() if max_tokens is None else StaticState(max_tokens)

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        chunk = heads.chunk
        if state is not None:
            state.append(heads.k, heads.v, chunk)
        if state is None or (chunk.offset == 0 and chunk.tokens > 1):
            return causal_attention(heads.q, heads.k, heads.v, heads.scale, heads.dropout), {}
        return attend_history(heads, state), {}

    def shares_decode(self, state: State) -> bool:
        return True

    def one_token(self, heads: Heads, state: State) -> OneToken:
        count = make_room(heads, state)
        assert state.k is not None and state.v is not None
        return OneToken(state.k, state.v, count)


def make_room(heads: Heads, state: State) -> Tensor:
    """Columns that hold tokens, for OneToken: a growing state takes the new one in, a static one only has room for it."""
    if isinstance(state, StaticState):
        state.allocate(heads.k, heads.v)
        return heads.chunk.starts
    state.append(heads.k, heads.v, heads.chunk)
    return heads.chunk.starts + 1


def attend_history(heads: Heads, state: State) -> Tensor:
    """Attention over everything a growing or static state holds, the chunk itself included."""
    chunk = heads.chunk
    assert state.k is not None and state.v is not None
    if isinstance(state, GrowingState) and chunk.tokens == 1 and chunk.offset is not None:
        return causal_attention(heads.q, state.k, state.v, heads.scale, heads.dropout)
    columns = torch.arange(state.k.shape[2], device=state.k.device)
    visible = columns <= chunk.positions[:, None, :, None]  # column n holds content position n
    return masked_attention(heads.q, state.k, state.v, visible, heads.scale, heads.dropout)


class GrowingState(State):
    """Column n holds content position n; columns past a row's length hold nothing that is ever visible."""

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        self.k, self.v = extended(self.k, k, chunk, None), extended(self.v, v, chunk, None)


class StaticState(State):
    """The same columns in memory of a fixed size, written in place (CUDA graphs, torch.compile)."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    def allocate(self, k: Tensor, v: Tensor) -> None:
        if self.k is None or self.v is None:
            self.k, self.v = static_zeros(k, self.max_tokens), static_zeros(v, self.max_tokens)

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        self.k, self.v = extended(self.k, k, chunk, self.max_tokens), extended(self.v, v, chunk, self.max_tokens)

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()


def extended(held: Tensor | None, new: Tensor, chunk: Chunk, max_tokens: int | None) -> Tensor:
    """What a state holds of every token, column n of content position n, with the chunk's behind it.

    Args:
        held: [B, G, S, D], None for nothing yet. new: [B, G, T, D].
        max_tokens: columns of memory that is written in place; None: memory that grows.
    """
    if max_tokens is not None:
        held = static_zeros(new, max_tokens) if held is None else held
    elif held is None:
        return new.clone(memory_format=torch.contiguous_format)  # a view would pin the whole projection output of the prefill
    else:
        held = torch.cat([held, new], dim=2)
        if chunk.offset is not None:
            return held
    # rows differ in length, or the memory is there already: the new tokens behind each row's last
    write_at(held, new, chunk.starts.expand(new.shape[0]))
    return held


def static_zeros(like: Tensor, tokens: int) -> Tensor:
    """Zeros [B, G, tokens, D] whose address a compiled graph may rely on."""
    b, g, _, d = like.shape
    zeros = like.new_zeros(b, g, tokens, d)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(zeros)
    return zeros
