"""A teacher's most likely next tokens, written down once before a stage trains: no second model while it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybridize.data.mixture import Mixture, Row
from hybridize.errors import bad
from hybridize.plan import AttentionPlan

AT_ONCE = 2048  # tokens whose logits stand in memory together


@dataclass(frozen=True)
class TaughtRow(Row):
    """A row with the teacher's `top` tokens where it is learned: top_ids [N, K] and their logits [N, K], fp32."""

    top_ids: Tensor
    top_logits: Tensor


class TopRows:
    """The rows of a mixture with what `write_top` wrote of them.

    Raises:
        HybridizeError: a file of other rows.
    """

    def __init__(self, rows: Mixture, file: Path) -> None:
        self.rows, self.length = rows, rows.length
        with safe_open(str(file), "pt") as stored:
            self.ids, self.logits, self.ends = (stored.get_tensor(name) for name in ("ids", "logits", "ends"))
        if len(self.ends) != len(rows):
            raise bad("teacher", f"the logits of {len(self.ends)} rows", f"those of {len(rows)} rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TaughtRow:
        row = self.rows[index]
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return TaughtRow(row.ids, row.start, self.ids[part].long(), self.logits[part].float())


@torch.no_grad()
def write_top(
    model: Any, rows: Mixture, top: int, batch: int, file: Path, report: Callable[[int, int], None] | None = None
) -> int:
    """The `top` largest logits under the base's plan at every learned token of `rows`; how many tokens those are.

    `batch`: rows at once. The file: ids and logits [N, top] of all rows one behind the other, `ends` [rows].
    """
    ids: list[Tensor] = []
    logits: list[Tensor] = []
    ends: list[int] = []
    with model.temporary_plan(AttentionPlan.base(model.plan.geometry)):
        for first in range(0, len(rows), batch):
            chosen = [rows[i] for i in range(first, min(first + batch, len(rows)))]
            given = torch.tensor([row.ids for row in chosen], device=model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                hidden = model.model(input_ids=given, use_cache=False).last_hidden_state
                for row, states in zip(chosen, hidden, strict=True):
                    for part in states[row.start - 1 : -1].split(AT_ONCE):
                        found = model.lm_head(part).float().topk(top, dim=-1)
                        ids.append(found.indices.int().cpu())
                        logits.append(found.values.cpu())
                    ends.append((ends[-1] if ends else 0) + len(row.ids) - row.start)
            if report:
                report(len(ends), len(rows))
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"ids": torch.cat(ids), "logits": torch.cat(logits), "ends": torch.tensor(ends)}, file)
    return ends[-1]
