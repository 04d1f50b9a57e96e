"""Attention transfer inside a layer: the base's operator answers, another one learns to (LoLCATs, arXiv 2410.10254)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.operators.contract import Heads, Operator, State


class Taught(Operator):
    """Gives the teacher's output, and in aux "error": how far the student is from it, in the student's own measure."""

    def __init__(self, teacher: Operator, student: Operator) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, heads: Heads, state: State | None) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            wanted, _ = self.teacher(heads, state)
        return wanted, {"error": self.student.error(heads, wanted)}
