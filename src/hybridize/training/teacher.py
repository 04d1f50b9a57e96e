"""The model as it is before it is trained, under its base's plan: what a student's logits are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hybridize.plan import AttentionPlan


def frozen_teacher(model: Any, is_trained: Callable[[str], bool]) -> Any:
    """A model of its own that shares every weight which `is_trained` (by its name) says will stay; in eval mode.

    Weights are copied where the student's will move, and where the base's plan wants heads in another order.
    """
    memo = {id(p): p for name, p in model.named_parameters() if not is_trained(name)}
    teacher = copy.deepcopy(model, memo)
    for attention in teacher.attentions():
        attention.shares_weights = True  # what is reordered must be reordered in a copy
    teacher.set_plan(AttentionPlan.base(model.plan.geometry))
    return teacher.eval()
