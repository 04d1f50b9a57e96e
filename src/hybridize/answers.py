"""Teacher-forced answers: batches of prompts, the NLL of their answer tokens, and whether greedy decoding would give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridize.data.needles import Prompt

Item = TypeVar("Item")


@dataclass
class Batch:
    """Prompts behind each other's padding on the right.

    ids [B, T]; lengths, prompt_len [B]; columns, targets, real [B, A]: where each answer token is predicted, what it is,
    and whether it is one (answers differ in length).
    """

    ids: Tensor
    lengths: Tensor
    prompt_len: Tensor
    columns: Tensor
    targets: Tensor
    real: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, T], 1 for real tokens."""
        return (torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]).long()


def collate(prompts: Sequence[Prompt], device: torch.device | str) -> Batch:
    """Right-pad prompts to one batch; padding is never visible to a real token."""
    lengths = torch.tensor([len(p.ids) for p in prompts])
    starts = torch.tensor([p.prompt_len for p in prompts])
    answers = lengths - starts
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
    steps = torch.arange(int(answers.max()))
    real = steps < answers[:, None]
    places = (starts[:, None] + steps).clamp_max(lengths[:, None] - 1)
    batch = Batch(ids, lengths, starts, places - 1, ids.gather(1, places), real)
    return Batch(*(tensor.to(device) for tensor in vars(batch).values()))


def batches(prompts: Sequence[Prompt], tokens: int, device: torch.device | str, rows: int | None = None) -> Iterator[Batch]:
    """Batches of at most `tokens` padded tokens and `rows` prompts (at least one each), in the given order."""
    for chosen in within_tokens(prompts, lambda prompt: len(prompt.ids), tokens, rows):
        yield collate(chosen, device)


def within_tokens(
    items: Iterable[Item], width: Callable[[Item], int], tokens: int, rows: int | None = None
) -> Iterator[list[Item]]:
    """Neighbours whose padded widths are at most `tokens` together, and at most `rows` of them (at least one each)."""
    chosen: list[Item] = []
    widest = 0
    for item in items:
        wider = max(widest, width(item))
        if chosen and (wider * (len(chosen) + 1) > tokens or len(chosen) == rows):
            yield chosen
            chosen, wider = [], width(item)
        chosen.append(item)
        widest = wider
    if chosen:
        yield chosen


def left_pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token ids behind padding on the left, and their mask, both [B, T]: how generate takes rows of unequal length."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(rows):
        ids[row, longest - len(each) :], mask[row, longest - len(each) :] = torch.tensor(each), 1
    return ids.to(device), mask.to(device)


def filler(tokenizer: Any) -> int:
    """What fills up a row that ended early: padding, else the end token, neither of which decodes to text; else 0."""
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return 0 if found is None else found


def answer_logits(model: Any, hidden: Tensor, batch: Batch) -> Tensor:
    """fp32 logits [B, A, V] at the answers' predicting columns, from normed hidden states [B, T, E]."""
    picked = hidden.gather(1, batch.columns[..., None].expand(-1, -1, hidden.shape[-1]))
    return model.lm_head(picked).float()


def answer_log_probability(logits: Tensor, batch: Batch) -> Tensor:
    """Log probability of each row's whole answer, nats, [B]."""
    each = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    return (each * batch.real).sum(1)


def answer_nll(logits: Tensor, batch: Batch) -> Tensor:
    """Mean NLL of each row's answer tokens, nats, [B]."""
    return -answer_log_probability(logits, batch) / batch.real.sum(1)


def answer_hits(logits: Tensor, batch: Batch) -> Tensor:
    """Whether every answer token is the argmax: what greedy decoding would have written, [B] bool."""
    return ((logits.argmax(-1) == batch.targets) | ~batch.real).all(dim=1)


@torch.no_grad()
def run_answers(model: Any, batch: Batch) -> Tensor:
    """Answer logits of a batch under the model's plan; hybrids and base models alike."""
    phase = {"prompt_len": batch.prompt_len} if getattr(getattr(model, "plan", None), "phased", False) else {}
    # right padding is never visible to real tokens, so no mask is built for it
    hidden = model.model(input_ids=batch.ids, use_cache=False, **phase).last_hidden_state
    return answer_logits(model, hidden, batch)


@torch.no_grad()
def greedy_texts(model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[str]:
    """Greedy answers to prompts of unequal length in one left-padded batch, row i cut at `new_tokens[i]` tokens.

    A row that ends early is filled up with the padding or end token, never with one that decodes to text.
    """
    answers = greedy_tokens(model, rows, new_tokens, pad_token_id=filler(tokenizer))
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


@torch.no_grad()
def greedy_tokens(
    model: Any, rows: Sequence[Sequence[int]], new_tokens: Sequence[int], pad_token_id: int | None = None
) -> list[list[int]]:
    """Greedy answers in one left-padded batch, row i cut at `new_tokens[i]`; without padding no end token ends a row."""
    ids, mask = left_pad(rows, model.device)
    ends = {"pad_token_id": pad_token_id} if pad_token_id is not None else {"pad_token_id": 0, "eos_token_id": None}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max(new_tokens), do_sample=False, **ends)
    return [row[:room] for row, room in zip(out[:, ids.shape[1] :].tolist(), new_tokens, strict=True)]
