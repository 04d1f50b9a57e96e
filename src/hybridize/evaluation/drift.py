"""Drift in long generation: how a plan departs from its base as the answer grows, because every error stays in the context.

The base writes a long sampled continuation of each prompt once. Along that path a plan is asked, token by token, whether it
would choose what the base chooses (`agreement`) and how likely it finds the path (`perplexity`). Left alone it writes a chain
of sums greedily; a step is right when its total follows from the total before (`step_accuracy`).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from hybridize.evaluation.cells import Cell

EDGES = (0, 128, 512, 1024, 2048, 4096, 8192)
STEP = re.compile(r"^(\d+) \+ (\d+) = (\d+)$")


def chain_prompt(rng: random.Random, shown: int = 12) -> str:
    """A running total with `shown` right steps, to be gone on with; each line starts with the total before."""
    total = rng.randint(1, 9)
    lines = ["Add the next small number to the total, one step a line."]
    for _ in range(shown):
        step = rng.randint(1, 9)
        lines.append(f"{total} + {step} = {total + step}")
        total += step
    return "\n".join([*lines, f"{total} +"])


def text_prompt(rng: random.Random, text: str, words: int = 150) -> str:
    """A stretch of the text, to be gone on with."""
    all_words = text.split()
    start = rng.randrange(max(1, len(all_words) - words))
    return " ".join(all_words[start : start + words])


def drift_prompts(tokenizer: Any, text: str, count: int, seed: int) -> dict[str, list[list[int]]]:
    """{"text", "chain"}: `count` prompts each, cut to one length a kind, so that all positions are alike."""
    makers = {"text": lambda rng: text_prompt(rng, text), "chain": chain_prompt}
    made = {}
    for kind, make in makers.items():
        rows = [make(random.Random(f"{seed}/{kind}/{i}")) for i in range(count)]
        ids = [tokenizer(row, add_special_tokens=False, verbose=False)["input_ids"] for row in rows]
        shortest = min(map(len, ids))
        made[kind] = [row[-shortest:] for row in ids]  # the end must stay: it is where the answer goes on
    return made


@torch.no_grad()
def base_path(model: Any, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[list[int]]:
    """A sampled continuation (temperature 1, top-p 0.95) of each prompt, `tokens` long, never ended early."""
    ids = torch.tensor(prompts, device=model.device)
    torch.manual_seed(seed)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_p=0.95,
        top_k=0, temperature=1.0, pad_token_id=0,
    )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


@torch.no_grad()
def path_choices(
    model: Any, prompts: Sequence[Sequence[int]], path: Sequence[Sequence[int]], rows: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Along the path: the model's own choice [N, T] (argmax ids) and the NLL of the path's token [N, T], nats."""
    start, choices, nll = len(prompts[0]), [], []
    phased = getattr(getattr(model, "plan", None), "phased", False)
    for first in range(0, len(prompts), rows):
        pairs = zip(prompts[first : first + rows], path[first : first + rows], strict=True)
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in pairs], device=model.device)
        phase = {"prompt_len": torch.full((len(ids),), start, device=ids.device)} if phased else {}
        hidden = model.model(input_ids=ids, use_cache=False, **phase).last_hidden_state[:, start - 1 : -1]
        for row in range(len(ids)):
            logits = model.lm_head(hidden[row]).float()
            choices.append(logits.argmax(-1).cpu())
            nll.append(torch.nn.functional.cross_entropy(logits, ids[row, start:], reduction="none").cpu())
    return torch.stack(choices), torch.stack(nll)


def path_cells(kind: str, choices: torch.Tensor, nll: torch.Tensor, base_choices: torch.Tensor) -> list[Cell]:
    """Agreement and perplexity by position behind the prompt: a value a prompt."""
    tokens = choices.shape[1]
    edges = [edge for edge in EDGES if edge < tokens] + [tokens]
    same, cells = (choices == base_choices).double(), []
    for low, high in itertools.pairwise(edges):
        where: dict[str, Any] = {"context": tokens, "positions": (low, high)}
        agreement, nats = same[:, low:high].mean(1).tolist(), nll[:, low:high].double().mean(1).tolist()
        cells.append(Cell(f"drift_{kind}", "agreement", "mean", tuple(agreement), **where))
        cells.append(Cell(f"drift_{kind}", "perplexity", "nats", tuple(nats), (float(high - low),) * len(nats), **where))
    return cells


@torch.no_grad()
def free_chain(model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
    """Greedy chains, `tokens` long, left to themselves."""
    ids = torch.tensor(prompts, device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.batch_decode(out[:, ids.shape[1] :])


def chain_cell(tokenizer: Any, prompts: Sequence[Sequence[int]], chains: Sequence[str], tokens: int) -> Cell:
    """step_accuracy: the share of a chain's lines that are sums, right, and go on from the line before."""
    values = []
    for prompt, chain in zip(prompts, chains, strict=True):
        lines = (tokenizer.decode(prompt) + chain).split("\n")[1:-1]  # the last line may be cut
        written = lines[-chain.count("\n") :] if chain.count("\n") else []
        values.append(_right_steps(lines, len(written)))
    return Cell("drift_chain", "step_accuracy", "mean", tuple(values), context=tokens)


def _right_steps(lines: Sequence[str], written: int) -> float:
    if not written:
        return 0.0
    right = 0
    for i in range(len(lines) - written, len(lines)):
        step, before = STEP.match(lines[i].strip()), STEP.match(lines[i - 1].strip()) if i else None
        if step and before:
            a, b, total = map(int, step.groups())
            right += a == int(before[3]) and a + b == total
    return right / written
