"""From a spec to the module that runs it."""

from __future__ import annotations

from hybridize.operators.contract import Operator
from hybridize.operators.full import FullAttention
from hybridize.operators.snapkv import SnapKVAttention
from hybridize.operators.specs import Full, OperatorSpec, SnapKV
from hybridize.operators.window import WindowAttention


def build_operator(spec: OperatorSpec) -> Operator:
    if isinstance(spec, Full):
        return FullAttention(spec)
    return SnapKVAttention(spec) if isinstance(spec, SnapKV) else WindowAttention(spec)
