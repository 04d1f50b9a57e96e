"""From a spec to the module that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybridize.operators.contract import Operator
from hybridize.operators.full import FullAttention
from hybridize.operators.joint import JointAttention
from hybridize.operators.linear import Branch, LinearAttention
from hybridize.operators.snapkv import SnapKVAttention
from hybridize.operators.specs import Full, Linear, OperatorSpec, SnapKV
from hybridize.operators.window import WindowAttention


def build_operator(spec: OperatorSpec, branches: Mapping[int, Branch] | None = None) -> Operator:
    """`branches`: what `branches_for` made; without, an operator that only makes states."""
    if isinstance(spec, Full):
        return FullAttention(spec)
    if isinstance(spec, Linear):
        return (JointAttention if spec.mix == "joint" else LinearAttention)(spec, branches)
    return SnapKVAttention(spec) if isinstance(spec, SnapKV) else WindowAttention(spec)


def branches_for(
    spec: OperatorSpec, groups: Iterable[int], head_dim: int, query_heads: int, had: Mapping[int, Branch]
) -> dict[int, Branch]:
    """Learned parameters for each group: those it `had`, where they still mean the same, else new ones."""
    if not isinstance(spec, Linear):
        return {}
    made = {}
    for group in groups:
        branch = had.get(group)
        if branch is None or branch.spec.learned != spec.learned:
            branch = Branch(spec, head_dim, query_heads)
        branch.spec = spec
        made[group] = branch
    return made
