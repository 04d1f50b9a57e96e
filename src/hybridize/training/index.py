"""RTPurbo's first stage (arXiv 2605.16928): an index learns the attention that it stands for; nothing else is trained.

    loss = KL(attention || softmax((Wq q).(Wk k)))      mean over queries, heads that retrieve, and layers

The projections start where (Wq q).(Wk k) is nearest to q.k / sqrt(D) in the mean over a few rows: with C the second moments of
queries and of centred keys (a key that all share moves no softmax), U the largest eigenvectors of Ck^1/2 Cq Ck^1/2,

    Wq = Ck^1/2 U / sqrt(D),   Wk = Ck^-1/2 U
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridize.data.mixture import Mixture
from hybridize.operators.contract import Heads
from hybridize.operators.indexed import Index, IndexedAttention
from hybridize.operators.teacher import Taught
from hybridize.training.recipe import Recipe
from hybridize.training.stages import Report, Transfer, masters, run_stage, select, teaching

START_ROWS = 4  # that the first values are computed from


def learn_index(model: Any, rows: Mixture, recipe: Recipe, folder: Path, report: Report | None = None) -> dict[str, Any]:
    """Train the index of every group that has one, under the model's plan; what `train` returns."""
    with masters(model), teaching(model):
        start_index(model, rows)
        select(model, "branches")
        rates = {"branch": recipe.branch_rate}
        return run_stage(Transfer(model), model, rows, recipe, folder, report, steps=recipe.steps, rates=rates)


@torch.no_grad()
def start_index(model: Any, rows: Mixture, count: int = START_ROWS) -> None:
    """First values of the projections, from queries and keys of the first `count` rows; the model is `teaching`."""
    moments: dict[Index, Moments] = {}

    def look(taught: Any, args: tuple[Any, ...]) -> None:
        for index, q, k in _groups(taught.student, args[0]):
            moments.setdefault(index, Moments(k.shape[-1], k.device)).add(q, k)

    operators = [operator for attention in model.attentions() for operator in attention.operators]
    taught = [x for x in operators if isinstance(x, Taught) and isinstance(x.student, IndexedAttention)]
    hooks = [x.register_forward_pre_hook(look) for x in taught]
    try:
        for i in range(min(count, len(rows))):
            model.model(input_ids=torch.tensor([rows[i].ids], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    scale = model.attentions()[0].scaling
    for index, found in moments.items():
        found.give(index, scale)


def _groups(operator: IndexedAttention, heads: Heads) -> Iterator[tuple[Index, Tensor, Tensor]]:
    """Of each group: its index, its queries that retrieve [N, D], its keys [N, D]; before RoPE."""
    q, k, which = heads.q_raw(), heads.k_raw(), operator.retrieving(heads)
    repeats = q.shape[1] // k.shape[1]
    for group, index in enumerate(operator.branches.values()):
        mine = which[which // repeats == group]
        assert isinstance(index, Index)
        yield index, q[:, mine].flatten(0, 2), k[:, group].flatten(0, 1)


class Moments:
    """Sums over tokens, fp64: of q q^T, of k and of k k^T."""

    def __init__(self, dim: int, device: torch.device) -> None:
        self.qq = torch.zeros(dim, dim, dtype=torch.float64, device=device)
        self.kk, self.k, self.count = self.qq.clone(), self.qq[0].clone(), 0

    def add(self, q: Tensor, k: Tensor) -> None:
        q, k = q.double(), k.double()
        self.qq += q.T @ q
        self.kk += k.T @ k
        self.k += k.sum(0)
        self.count += len(k)

    def give(self, index: Index, scale: float) -> None:
        """Set an index's projections; `scale`: of the attention's scores."""
        mean = self.k / self.count
        values, vectors = torch.linalg.eigh(self.kk / self.count - mean[:, None] * mean)
        values = values.clamp_min(values[-1] * 1e-6)  # directions that no key has
        root, back = (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T
        best = torch.linalg.eigh(root @ self.qq @ root)[1].flip(-1)[:, : index.map_k.shape[1]]
        to_q, to_k = scale * root @ best, back @ best
        even = (to_q.norm() / to_k.norm()).sqrt()  # one learning rate serves both
        for parameter, value in ((index.map_q, to_q / even), (index.map_k, to_k * even)):
            parameter.zero_()
            parameter[..., : value.shape[1]] = value.to(parameter.dtype)
