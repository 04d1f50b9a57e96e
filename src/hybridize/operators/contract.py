"""What an operator is given and what it must answer. No operator knows transformers' cache, masks or families.

Rows reach operators in *content layout*: the model moves padding behind each row's real tokens before the first layer
and back after the last, so a token's column in a chunk is its content position minus the row's length so far, a causal
mask alone hides padding, and a left-padded row sees exactly what the row alone sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn


@dataclass
class Chunk:
    """The tokens of one forward call, for all layers.

    Args:
        positions: content position of each query, [B, T], or [1, T] where all rows agree.
        offset: tokens before this chunk where that is one host number for all rows, else None.
        count: real tokens of each row in this chunk, [B]; None where all T are.
        prompt_len: [B]; a query at a position below its row's prompt_len is prefill. None: every query is.
        batch: B.
    """

    positions: Tensor
    offset: int | None
    count: Tensor | None
    prompt_len: Tensor | None
    batch: int

    @property
    def tokens(self) -> int:
        return self.positions.shape[1]

    @property
    def starts(self) -> Tensor:
        """Content length of each row before this chunk, [B] or [1]."""
        return self.positions[:, 0]

    @property
    def ends(self) -> Tensor:
        """Content length of each row after this chunk, [B] or [1]."""
        return self.starts + (self.tokens if self.count is None else self.count)

    @property
    def valid(self) -> Tensor | None:
        """Which columns are real tokens, [B, T]; None: all."""
        if self.count is None:
            return None
        return torch.arange(self.tokens, device=self.count.device) < self.count[:, None]

    @property
    def decoding(self) -> Tensor | None:
        """Which real queries lie behind their row's prompt, [B, T]; None: no query does."""
        if self.prompt_len is None:
            return None
        behind = self.positions >= self.prompt_len[:, None]
        return behind if self.valid is None else behind & self.valid

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Chunk:
        """Copy to the device of a layer (model split over devices)."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        return replace(self, positions=self.positions.to(device), count=move(self.count), prompt_len=move(self.prompt_len))


@dataclass
class Heads:
    """One span of groups of one layer: q [B, H, T, D], k and v [B, G, T, D], rotated as the base rotates.

    `hidden` [B, T, E] is the normed input of the layer; `q_raw`, `k_raw` (before RoPE, after q/k norm) and `q_sink`
    (q_raw rotated at min(position, window + sinks)) are functions, so that only an operator that asks pays for them.
    `out` [B, H, T, D]: this span's part of the layer's output, where an operator may write what it returns (without
    gradients only); None: in memory of its own.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    chunk: Chunk
    scale: float
    dropout: float
    hidden: Tensor
    q_raw: Callable[[], Tensor]
    k_raw: Callable[[], Tensor]
    q_sink: Callable[[int], Tensor]
    out: Tensor | None = None


@dataclass
class OneToken:
    """What one new token a row sees of a span: columns start <= c < count, and c < sinks, of k and v [B, G, S, D].

    count, start: [B] or [1] int64; start None: every filled column. q_sink [B, H, 1, D]: queries for the sinks where those
    are re-based. A static state's k, v and count do not have the token yet: the kernel writes it behind the others, or, in
    a `ring` that is full, over the one that leaves the window, and sees it.
    """

    k: Tensor
    v: Tensor
    count: Tensor
    start: Tensor | None = None
    sinks: int = 0
    q_sink: Tensor | None = None
    ring: bool = False


class Operator(nn.Module):
    """forward(heads, state) -> (out [B, H, T, D], aux): aux is a dict of tensors that the layer returns, never keeps."""

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def shares_decode(self, state: State) -> bool:
        """Whether `one_token` serves this state as it is; else the operator is run by itself."""
        return False

    def one_token(self, heads: Heads, state: State) -> OneToken:
        """Say what one new token a row sees, for a kernel that serves all spans of a layer at once.

        A growing state takes the token in; a static one leaves that to the kernel, and heads.q and heads.k are not looked at.
        """
        raise NotImplementedError

    def beside(self, heads: Heads, state: State) -> Tensor | None:
        """What is added to the span's part of a shared launch, [B, H, 1, D]; None: nothing."""
        return None

    def error(self, heads: Heads, wanted: Tensor) -> Tensor:
        """How far this operator is from the teacher's output `wanted` [B, H, T, D] on a whole prompt; a scalar, fp32."""
        given, _ = self(heads, None)
        with torch.autocast(wanted.device.type, enabled=False):
            wanted32 = wanted.float()
            return (given.float() - wanted32).pow(2).mean() / wanted32.pow(2).mean().clamp_min(1e-12)

    def new_state(self, max_tokens: int | None) -> State:
        """An empty state; `max_tokens` None for a growing one, else a static, compilable one."""
        raise NotImplementedError


class State:
    """What one span of one layer remembers. The base class holds keys and values [B, G, S, D]; subclasses say which."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        """Take in the chunk's keys and values [B, G, T, D]."""
        raise NotImplementedError

    @property
    def prompt_is_closed(self) -> bool:
        """Whether tokens of the prompt were dropped for good, so that no other prompt can follow."""
        return False

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.k, self.v) if tensor is not None]

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows (beam search, best of n)."""
        if self.k is not None and self.v is not None:
            self.k, self.v = (t.index_select(0, index.to(t.device)) for t in (self.k, self.v))

    def reset(self) -> None:
        self.k = self.v = None


def write_at(target: Tensor, source: Tensor, start: Tensor) -> None:
    """In place: target[b, :, start[b] + t] = source[b, :, t]. target [B, G, S, D], source [B, G, T, D], start [B]."""
    rows = torch.arange(target.shape[0], device=source.device)[:, None]
    columns = start[:, None] + torch.arange(source.shape[2], device=source.device)
    target[rows, :, columns] = source.transpose(1, 2)  # a compiled graph writes this in place; scatter_ would copy the cache


def take(source: Tensor, index: Tensor) -> Tensor:
    """source[b, :, index[b]] for source [B, G, S, D] and index [B, N] or [1, N]: [B, G, N, D]."""
    if index.shape[0] == 1:
        return source.index_select(2, index[0])
    b, g, _, d = source.shape
    return source.gather(2, index[:, None, :, None].expand(b, g, index.shape[1], d))
