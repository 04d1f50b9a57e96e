"""What is timed: one set of weights under the base's plan, under a hybrid's, and as transformers' own class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.timing import Ceilings
from hybridize.plan import AttentionPlan

STOCK = "stock transformers"


@dataclass(frozen=True)
class Subject:
    """`plans` has "base", and hybrids under their names; `seconds` of measuring for each job."""

    name: str
    shape: Shape
    stock: Any
    model: Any
    plans: Mapping[str, AttentionPlan]
    ceilings: Ceilings
    seconds: float
    learned: dict[str, Any] = field(default_factory=dict)  # parameters beside the base's, which captured graphs read

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def cut(self, variant: str) -> None:
        """Bring the model under a variant's plan; transformers' own class has none."""
        plan = self.plans.get(variant)
        if plan is not None and (self.model.plan.assignment, self.model.plan.operators) != (plan.assignment, plan.operators):
            self.model.set_plan(plan, self.learned.get(variant))
            self.learned.setdefault(variant, self.model.branches())

    def plan(self, variant: str) -> AttentionPlan:
        """The plan that a variant computes: transformers' own class is the base."""
        return self.plans.get(variant, self.plans["base"])

    def prompts(self, context: int) -> torch.Tensor:
        """Two prompts [2, context], to take turns."""
        drawn = torch.randint(2, self.shape.vocabulary, (2, context), generator=torch.Generator("cpu").manual_seed(0))
        return drawn.to(self.device)

    def row(self, what: str, variant: str, context: int, batch: int = 1) -> dict[str, Any]:
        return {"shape": self.name, "what": what, "variant": variant, "context": context, "batch": batch}
