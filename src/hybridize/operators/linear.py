"""Linear attention in a group's place: a state of fixed size, and beside it an exact window with sinks.

    out = window(q, k, v) + gate * read(S, phi(q))

gate starts at 0, so a conversion begins exactly at its window; without a window, or where the mean of both is asked for, it
starts at 1. One state serves all query heads of a group, since keys, write strengths and decays are the group's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridize.operators.contract import Chunk, Heads, OneToken, Operator, State
from hybridize.operators.learned import Learned, stacked
from hybridize.operators.linear_spec import Linear
from hybridize.operators.mixing import mixed_keys
from hybridize.operators.recurrence import chunked, recurrent
from hybridize.operators.window import WindowAttention

NOTHING = 1e-2  # weight of reading nothing, beside weights of at most 1 a token: where no key matches, the output fades
HALF_LIFE = 512  # tokens, of a decay at the start
JOINT_GATE = -math.log(9.0)  # sigmoid of it is 0.1, where LoLCATs starts
GATE_SCALE = 16  # log decays are logsigmoid(x) / 16, as in GLA


class Branch(Learned):
    """Learned parameters of one group, fp32 whatever the model runs in.

    Args:
        head_dim: D of the base. query_heads: R of the group.
    """

    def __init__(self, spec: Linear, head_dim: int, query_heads: int) -> None:
        super().__init__()
        self.spec = spec
        d, f32 = spec.dim, torch.float32
        self.map_q = nn.Parameter(torch.empty(query_heads, head_dim, d, dtype=f32))
        self.map_k = nn.Parameter(torch.empty(head_dim, d, dtype=f32))
        if spec.features == "power":
            self.mean_q = nn.Parameter(torch.empty(query_heads, d, dtype=f32))
            self.mean_k = nn.Parameter(torch.empty(d, dtype=f32))
        if spec.mixing > 1:
            self.mixing = nn.Parameter(torch.empty(spec.mixing, head_dim, dtype=f32))
        self.write = nn.Parameter(torch.empty(head_dim, dtype=f32))
        self.write_bias = nn.Parameter(torch.empty(1, dtype=f32))
        if spec.decay != "none":
            rates = spec.width if spec.decay == "channel" else 1
            if spec.decay != "head":
                self.decay = nn.Parameter(torch.empty(head_dim, rates, dtype=f32))
            self.decay_bias = nn.Parameter(torch.empty(rates, dtype=f32))
        self.gate = nn.Parameter(torch.empty(query_heads, dtype=f32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """One random projection for keys and queries, so that scores begin as the base's do; the rest neutral."""
        if self.is_meta:
            return
        nn.init.orthogonal_(self.map_k)
        with torch.no_grad():
            self.map_q.copy_(self.map_k.expand_as(self.map_q))
        for name in ("mean_q", "mean_k", "write", "write_bias", "decay", "mixing"):
            if hasattr(self, name):
                nn.init.zeros_(getattr(self, name))
        if self.spec.mixing > 1:
            nn.init.ones_(self.mixing[0])
        if self.spec.decay != "none":
            rate = torch.tensor(2.0).log() / HALF_LIFE * GATE_SCALE
            nn.init.constant_(self.decay_bias, float(-torch.log(torch.expm1(rate))))  # logsigmoid of it is -rate
        first = {"residual": 0.0 if self.spec.window else 1.0, "half": 1.0, "joint": JOINT_GATE}
        nn.init.constant_(self.gate, first[self.spec.mix])


class LinearAttention(Operator):
    """`branches`: by the group's number in the base, ascending, as the span's heads lie."""

    def __init__(self, spec: Linear, branches: Mapping[int, Branch] | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.near = None if spec.near is None else WindowAttention(spec.near)
        self.branches = nn.ModuleDict({str(group): branch for group, branch in (branches or {}).items()})

    def new_state(self, max_tokens: int | None) -> State:
        return LinearState(None if self.near is None else self.near.new_state(max_tokens), max_tokens is not None)

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert state is None or isinstance(state, LinearState)
        with torch.autocast(heads.q.device.type, enabled=False):
            read = self._read(heads, state)
        if self.near is None:
            return read.to(heads.q.dtype), {}
        near, aux = self.near(heads, None if state is None else state.near)
        out = near + read.to(near.dtype)
        return out / 2 if self.spec.mix == "half" else out, aux

    def shares_decode(self, state: State) -> bool:
        # a launch over static states rotates inside, so that rotated queries are nowhere else
        return self.near is not None and not self.spec.rope and self.spec.mix == "residual"

    def one_token(self, heads: Heads, state: State) -> OneToken:
        assert self.near is not None and isinstance(state, LinearState) and state.near is not None
        return self.near.one_token(heads, state.near)

    def beside(self, heads: Heads, state: State) -> Tensor:
        assert isinstance(state, LinearState)
        with torch.autocast(heads.v.device.type, enabled=False):
            return self._read(heads, state).to(heads.v.dtype)

    def _read(self, heads: Heads, state: LinearState | None) -> Tensor:
        """gate * read(S, phi(q)), fp32 [B, H, T, D]."""
        q, k, v, write, decay = self.inputs(heads, state)
        out = self._through(q, k, v, write, decay, heads.chunk, state)
        if self.spec.normalised:
            out = out[..., :-1] / (out[..., -1:] + NOTHING)
        return (out * self._stacked("gate")[None, :, :, None, None]).flatten(1, 2)

    def _through(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        write: Tensor,
        decay: Tensor | None,
        chunk: Chunk,
        state: LinearState | None,
    ) -> Tensor:
        """What queries read of a state that the chunk goes through, [B, G, R, T, D], and a column of weights behind, where
        scores are weights."""
        spec, delta = self.spec, self.spec.rule == "delta"
        if spec.normalised:
            v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)
        if state is not None and chunk.tokens == 1:
            out, after = recurrent(q, k, v, write, decay, state.memory_for(v, spec.width), spec.degree, delta)
            state.store(after)
            return out
        before = None if state is None or chunk.offset == 0 else state.memory_for(v, spec.width)
        out, kept = chunked(q, k, v, write, decay, before, spec.degree, delta, state is not None)
        if state is not None and kept is not None:
            state.store(kept)
        return out

    def inputs(self, heads: Heads, state: LinearState | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """q [B, G, R, T, d], k [B, G, T, d], v [B, G, T, D], write strength [B, G, T] (0: padding), log decay; fp32.

        Where keys are mixed, the state takes in the last of them.
        """
        spec, dtype = self.spec, torch.promote_types(heads.v.dtype, torch.float32)
        raw_q, raw_k = (heads.q, heads.k) if spec.rope else (heads.q_raw(), heads.k_raw())
        raw_q, raw_k, v = raw_q.to(dtype), raw_k.to(dtype), heads.v.to(dtype)
        if spec.mixing > 1:
            before = None if state is None or heads.chunk.offset == 0 else state.recent
            raw_k, recent = mixed_keys(raw_k, self._stacked("mixing"), before, heads.chunk)
            if state is not None:
                state.recent = state.kept(state.recent, recent)
        b, g, t, _ = raw_k.shape
        q = raw_q.reshape(b, g, -1, t, raw_q.shape[-1]) @ self._stacked("map_q")
        k = raw_k @ self._stacked("map_k")
        if spec.features == "hedgehog":
            q, k = (torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1) for x in (q, k))
        else:
            q = F.normalize(q - self._stacked("mean_q")[:, :, None], dim=-1)
            k = F.normalize(k - self._stacked("mean_k")[:, None], dim=-1)
        write = (raw_k @ self._stacked("write")[..., None])[..., 0] + self._stacked("write_bias")
        decay = self._log_decay(raw_k)
        write = write.sigmoid()
        if (valid := heads.chunk.valid) is not None:
            write = write * valid[:, None]
            if decay is not None:
                decay = decay * (valid[:, None] if decay.dim() == 3 else valid[:, None, :, None])
        return q, k, v, write, decay

    def _log_decay(self, raw_k: Tensor) -> Tensor | None:
        """Log decay of each token, [B, G, T] or, of each feature, [B, G, T, F]; None: nothing is forgotten."""
        spec = self.spec
        if spec.decay == "none":
            return None
        rate = self._stacked("decay_bias")[:, None].expand(raw_k.shape[0], -1, raw_k.shape[2], -1)
        if spec.decay != "head":
            rate = rate + raw_k @ self._stacked("decay")
        log = F.logsigmoid(rate) / GATE_SCALE
        return log if spec.decay == "channel" else log[..., 0]

    def _stacked(self, name: str) -> Tensor:
        return stacked(self.branches.values(), name)


class LinearState(State):
    """S [B, G, F, E] and, where keys are mixed, the last raw keys [B, G, M - 1, D], both fp32, and the window's own state.

    `static`: written in place.
    """

    def __init__(self, near: State | None, static: bool) -> None:
        super().__init__()
        self.near = near
        self.static = static
        self.memory: Tensor | None = None
        self.recent: Tensor | None = None

    def memory_for(self, v: Tensor, width: int) -> Tensor:
        """S, zeros at first, for values [B, G, T, E]."""
        if self.memory is None:
            self.store(v.new_zeros(*v.shape[:2], width, v.shape[-1]))
        assert self.memory is not None
        return self.memory

    def store(self, memory: Tensor) -> None:
        self.memory = self.kept(self.memory, memory)

    def kept(self, old: Tensor | None, new: Tensor) -> Tensor:
        """`new`, in the memory of `old` where that must not move."""
        if self.static and old is not None:
            return old.copy_(new)
        if self.static and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(new)
        return new

    def append(self, k: Tensor, v: Tensor, chunk: Chunk) -> None:
        raise NotImplementedError("the operator writes its state: what a key becomes is learned")

    def tensors(self) -> list[Tensor]:
        own = [x for x in (self.memory, self.recent) if x is not None]
        return ([] if self.near is None else self.near.tensors()) + own

    def select_rows(self, index: Tensor) -> None:
        if self.near is not None:
            self.near.select_rows(index)
        if self.memory is not None:
            self.memory = self.memory.index_select(0, index.to(self.memory.device))
        if self.recent is not None:
            self.recent = self.recent.index_select(0, index.to(self.recent.device))

    def reset(self) -> None:
        if self.near is not None:
            self.near.reset()
        for name in ("memory", "recent"):
            tensor = getattr(self, name)
            if self.static and tensor is not None:
                tensor.zero_()
            else:
                setattr(self, name, None)
