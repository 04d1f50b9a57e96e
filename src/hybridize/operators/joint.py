"""A window and a linear state under one normaliser, as LoLCATs mixes them (arXiv 2410.10254). A baseline to compare with.

    out = (c sum_near e^(s_j - m) v_j + sum_far phi(q).phi(k_j) v_j) / (c sum_near e^(s_j - m) + sum_far phi(q).phi(k_j))

m is the largest s_j of the window, c = sigmoid(gate) of each query head. A token is in one part only: the state takes it in
when it leaves the window, whose ring is the only place that it can then be read from.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridize.operators.banded import banded_mass
from hybridize.operators.contract import Heads, State, take
from hybridize.operators.linear import LinearAttention, LinearState
from hybridize.operators.window import WindowState


class JointAttention(LinearAttention):
    """Scores of both parts are never negative, and keys are rotated in both: the ring holds no others."""

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.near is not None and (state is None or isinstance(state, LinearState))
        chunk, size = heads.chunk, self.spec.window
        before = self._before(heads, state)
        k, v = (torch.cat([old, new], dim=2) for old, new in zip(before, (heads.k, heads.v), strict=True))
        near, aux = self.near(heads, None if state is None else state.near)
        with torch.autocast(heads.q.device.type, enabled=False):
            mass = banded_mass(heads.q.float(), k[:, :, 1:].float(), chunk.positions, size, heads.scale)
            far = self._far(replace(heads, k=k[:, :, : chunk.tokens], v=v[:, :, : chunk.tokens]), state)
            c = self._stacked("gate").sigmoid().flatten()[None, :, None]
            weight = (c * mass)[..., None].to(far.dtype)
            out = (weight * near + far[..., :-1]) / (weight + far[..., -1:])
        return out.to(heads.q.dtype), aux

    def _before(self, heads: Heads, state: LinearState | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the `size` tokens before the chunk, in order; positions before 0 are arbitrary."""
        b, g, _, d = heads.k.shape
        near = None if state is None or heads.chunk.offset == 0 else state.near
        if near is None or near.k is None or near.v is None:
            zeros = heads.k.new_zeros(b, g, self.spec.window, d)
            return zeros, zeros
        assert isinstance(near, WindowState)
        back = torch.arange(self.spec.window, 0, -1, device=heads.k.device)
        slots = near.slot((heads.chunk.starts[:, None] - back).clamp_min(0))
        return take(near.k, slots), take(near.v, slots)

    def _far(self, left: Heads, state: LinearState | None) -> Tensor:
        """[B, H, T, D + 1]: values and weights of the far part; `left`: the keys that leave the window, one a step."""
        q, k, v, write, decay = self.inputs(left, None)
        write = write * (left.chunk.positions >= self.spec.window)[:, None]
        return self._through(q, k, v, write, decay, left.chunk, state).flatten(1, 2)
