"""Into content layout and back: padding goes behind each row's real tokens before the first layer, and back after the last."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridize.cache import HybridCache
from hybridize.errors import bad
from hybridize.operators.contract import Chunk


def open_chunk(
    hidden: Tensor, attention_mask: Tensor | None, cache: HybridCache | None, prompt_len: Tensor | None
) -> tuple[Chunk, Tensor | None]:
    """The chunk of one call, and the column order that puts real tokens first ([B, T]; None: no padding)."""
    batch, tokens = hidden.shape[:2]
    past = cache.get_seq_length() if cache is not None else 0
    valid = None
    if attention_mask is not None:
        # a static cache's length is on the device: only the mask's last columns can be asked for
        widths = (tokens, past + tokens) if isinstance(past, int) else (tokens, attention_mask.shape[-1])
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] not in widths:
            raise bad("attention_mask", f"shape {tuple(attention_mask.shape)}", f"[{batch}, {' or '.join(map(str, widths))}]")
        valid = attention_mask[:, -tokens:].to(device=hidden.device, dtype=torch.bool)
        if tokens == 1 and (cache is None or not isinstance(past, int)):
            valid = None  # one token alone, or one step of a static cache: it is real
        elif not torch.compiler.is_compiling() and bool(valid.all()):
            valid = None
    order = None if valid is None else (~valid).to(torch.uint8).argsort(dim=1, stable=True)
    count = None if valid is None else valid.sum(dim=1)
    if cache is None:
        positions = torch.arange(tokens, device=hidden.device)[None]
        prompt_len = None if prompt_len is None else prompt_len.to(hidden.device)
        return Chunk(positions, 0, count, prompt_len, batch), order
    if prompt_len is not None:
        cache.start_prompt(prompt_len.to(hidden.device))
    return cache.begin(batch, tokens, count, hidden.device), order


def to_content(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the columns of x [B, T, E] by order [B, T]."""
    return x.gather(1, order[..., None].expand_as(x))


def rows_to_content(ids: Tensor, order: Tensor) -> Tensor:
    """Reorder the columns of ids [B or 1, T] by order [B, T]."""
    return ids.expand_as(order).gather(1, order)
