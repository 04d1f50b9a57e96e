"""Two operators side by side with a gate between them: what learned layer selection trains (FlashMorph, arXiv 2606.30562,
and DuoAttention's gates, arXiv 2410.10819)."""

from __future__ import annotations

from torch import Tensor

from hybridize.operators.contract import Heads, Operator, State


class Morph(Operator):
    """gate * base's + (1 - gate) * cheap: row `layer` of gates [L, G], or [L, 1] for one gate a layer, fp32.

    `shut`: the base's operator alone, as a teacher runs.
    """

    def __init__(self, base: Operator, cheap: Operator, gates: Tensor, layer: int) -> None:
        super().__init__()
        self.base, self.cheap, self.layer = base, cheap, layer
        self.held = (gates,)  # no parameter of this one: whoever made them trains them
        self.shut = False

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        full, aux = self.base(heads, None)
        if self.shut:
            return full, aux
        groups, (gates,) = heads.k.shape[1], self.held
        gate = gates[self.layer].expand(groups).repeat_interleave(heads.q.shape[1] // groups)[None, :, None, None]
        near, _ = self.cheap(heads, None)
        return (gate * full.float() + (1 - gate) * near.float()).to(heads.q.dtype), {}
