"""From a spec to the module that runs it."""

from __future__ import annotations

from hybridize.operators.contract import Operator
from hybridize.operators.full import FullAttention
from hybridize.operators.specs import Full, OperatorSpec
from hybridize.operators.window import WindowAttention


def build_operator(spec: OperatorSpec) -> Operator:
    return FullAttention(spec) if isinstance(spec, Full) else WindowAttention(spec)
