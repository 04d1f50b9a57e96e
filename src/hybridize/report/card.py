"""The model card of a converted folder: what it is, how to load it, what was kept and saved, under the base's licence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hybridize.files import write_text
from hybridize.plan import AttentionPlan


def write_card(
    path: str | Path, *, base: str, plan: AttentionPlan, rows: Sequence[dict[str, Any]], trained: bool = False
) -> Path:
    """Write README.md from the rows of a conversion's own proof (base and hybrid in one run)."""
    theirs, name = _card_of(base), Path(base).name
    how = "with a short fine-tune." if trained else "without training. The weights are the base's."
    data = ModelCardData(
        base_model=name if Path(base).exists() else base,  # a local path is nobody else's business
        library_name="hybridize",
        license=theirs.license,
        license_name=getattr(theirs, "license_name", None),
        license_link=getattr(theirs, "license_link", None),
        language=theirs.language,
        pipeline_tag="text-generation",
        tags=["hybrid-attention", "sliding-window", "long-context"],
    )
    text = f"""---
{data.to_yaml()}
---

# {name}, hybrid

{name} with the base's attention in {len(plan.kept_groups)} of {plan.geometry.layers * plan.geometry.kv_heads} KV groups
(layers {plan.kept_layers}) and {_operators(plan)} in the rest, made by hybridize {how}

```python
import hybridize  # or trust_remote_code=True
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")
```

## Kept and saved

{_table(rows)}

Needle: share of answers right in every token (95 % interval). Costs: share of the base's cache bytes and attention FLOPs at
the longest measured context. `metrics.json` has every cell; `report.html` shows it.

## Plan

```
{plan.map()}
```
"""
    return write_text(path, text)


def _card_of(base: str) -> ModelCardData:
    readme = Path(base) / "README.md"
    return ModelCard.load(readme).data if readme.is_file() else ModelCardData()


def _operators(plan: AttentionPlan) -> str:
    base = AttentionPlan.base(plan.geometry).specs()
    return " and ".join(spec.label() for spec in plan.specs() if spec not in base) or "nothing else"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    needles = [row for row in rows if row["task"] == "needle" and row["depth"] is None]
    lengths = sorted({row["context"] for row in needles})
    lines = [
        f"| | {' | '.join(f'needle {n}' for n in lengths)} | cache | prefill | decode |",
        "|" + " --- |" * (len(lengths) + 4),
    ]
    for selector in dict.fromkeys(row["selector"] for row in needles):
        mine = {row["context"]: row for row in needles if row["selector"] == selector}
        cells = [f"{mine[n]['score']:.2f} ({mine[n]['low']:.2f}–{mine[n]['high']:.2f})" if n in mine else "–" for n in lengths]
        first = next(iter(mine.values()))
        costs = [f"{100 * first[key]:.0f} %" for key in ("cache_ratio", "prefill_ratio", "decode_ratio")]
        lines.append(f"| {selector} | {' | '.join([*cells, *costs])} |")
    return "\n".join(lines)
