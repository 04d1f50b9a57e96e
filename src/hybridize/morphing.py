"""A model whose every layer runs the base's operator and a cheap one, with gates between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hybridize.operators.morph import Morph
from hybridize.operators.registry import branches_for, build_operator
from hybridize.operators.specs import OperatorSpec
from hybridize.plan import AttentionPlan


@contextmanager
def morphing(model: Any, cheap: OperatorSpec, gates: Tensor) -> Iterator[list[Morph]]:
    """Run every layer as gate * base + (1 - gate) * cheap until the `with` block ends, no weight of it trainable; gives the
    layers' operators.

    Args:
        model: a hybrid model; learned parameters that `cheap` needs are those it holds (`holding_branches`).
        gates: [L, G], or [L, 1] for one a layer, fp32.
    """
    base = AttentionPlan.base(model.plan.geometry)
    with model.holding_branches(), model.temporary_plan(base):
        attentions, made = list(model.attentions()), []
        before = [attention.operators for attention in attentions]
        for layer, attention in enumerate(attentions):
            groups = range(base.geometry.kv_heads)
            branches = branches_for(cheap, groups, attention.head_dim, attention.group_size, attention.held or {})
            near = build_operator(cheap, branches).to(attention.device)
            made.append(Morph(attention.operators[0], near, gates, layer))
            attention.operators = nn.ModuleList([made[-1]]).train(attention.training)
        parameters = [*model.parameters(), *(p for morph in made for p in morph.parameters())]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield made
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            for attention, operators in zip(attentions, before, strict=True):
                attention.operators = operators
