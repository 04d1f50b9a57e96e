"""From a spec to the module that runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridize.operators.contract import Operator
from hybridize.operators.full import FullAttention
from hybridize.operators.gated import GatedWindow
from hybridize.operators.indexed import Index, IndexedAttention
from hybridize.operators.joint import JointAttention
from hybridize.operators.learned import Learned
from hybridize.operators.linear import Branch, LinearAttention
from hybridize.operators.snapkv import SnapKVAttention
from hybridize.operators.specs import Full, Gated, Indexed, Linear, OperatorSpec, SnapKV
from hybridize.operators.window import WindowAttention


def build_operator(
    spec: OperatorSpec, branches: Mapping[int, Any] | None = None, members: Sequence[Any] | None = None
) -> Operator:
    """The operator of a span of groups.

    Args:
        branches: what `branches_for` made; without, an operator that only makes states.
        members: the groups' own specs, where they differ in what `spec.shared` leaves out.
    """
    if isinstance(spec, Full):
        return FullAttention(spec)
    if isinstance(spec, Gated):
        return GatedWindow(spec)
    if isinstance(spec, Linear):
        return (JointAttention if spec.mix == "joint" else LinearAttention)(spec, branches)
    if isinstance(spec, Indexed):
        return IndexedAttention(spec.shared, branches, members)
    return SnapKVAttention(spec) if isinstance(spec, SnapKV) else WindowAttention(spec)


def branches_for(
    spec: OperatorSpec, groups: Iterable[int], head_dim: int, query_heads: int, had: Mapping[int, Learned]
) -> dict[int, Learned]:
    """Learned parameters for each group: those it `had`, where they still mean the same, else new ones."""
    if not isinstance(spec, Linear) and not (isinstance(spec, Indexed) and spec.select == "index"):
        return {}
    made: dict[int, Learned] = {}
    for group in groups:
        branch = had.get(group)
        if branch is None or branch.spec.learned != spec.learned:
            given: Any = (spec, head_dim, query_heads)
            branch = Branch(*given) if isinstance(spec, Linear) else Index(*given)
        branch.spec = spec
        made[group] = branch
    return made
