"""Kernels prove themselves on the machine they run on, once a process, device, dtype and head_dim, before they are trusted.

What a compiler makes of a kernel differs between chips and Triton versions, and a wrong kernel gives fluent wrong text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hybridize.kernels.decode import one_token_attention
from hybridize.kernels.indexed import indexed_attention, indexed_token_attention
from hybridize.kernels.matvec import matvec
from hybridize.kernels.opened import open_attention
from hybridize.kernels.rotary import rotate
from hybridize.kernels.window import window_attention
from hybridize.operators.choosing import chosen
from hybridize.operators.specs import Indexed

LIMIT = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-3}
ROWS, GROUPS, HEADS, TOKENS, SIZE, SINKS = 2, 2, 2, 150, 50, 4


def why_wrong(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None where attention's kernels agree with attention written out, outputs and gradients; else what is wrong."""

    def errors() -> dict[str, float]:
        given = (device, dtype, head_dim)
        found = _window_errors(*given) | _decode_errors(*given) | _token_errors(*given) | _rotary_errors(*given)
        return found | _indexed_errors(*given) | _opened_errors(*given) | _matvec_errors(device, dtype)

    return _verdict(device, errors, LIMIT[dtype])


def _verdict(device: torch.device, check: Callable[[], dict[str, float]], limit: float) -> str | None:
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            # a reference in half precision chooses other blocks, and the first call may come from a training step
            with torch.autocast(device.type, enabled=False):
                errors = check()
    except Exception as error:  # a compiler's failure can be of any type, and the reference is there
        return f"they fail on this device ({type(error).__name__}: {error})"
    wrong = {name: value for name, value in errors.items() if not value <= limit}  # NaN is wrong too
    if wrong:
        return "they differ from the reference on this device: " + ", ".join(f"{n} by {v:.1e}" for n, v in wrong.items())
    return None


def _window_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    shapes = (ROWS, GROUPS * HEADS), (ROWS, GROUPS), (ROWS, GROUPS)
    leaves = [torch.randn(*s, TOKENS, head_dim, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    weight = torch.randn(ROWS, GROUPS * HEADS, TOKENS, head_dim, device=device, dtype=dtype)
    n = torch.arange(TOKENS, device=device)
    seen = (n[None, :] <= n[:, None]) & ((n[:, None] - n[None, :] < SIZE) | (n[None, :] < SINKS))
    q, k, v = leaves
    forward_only = dtype == torch.float32 and device.type == "cuda"  # as kernels/dispatch.py runs them
    mine = window_attention(q, k, v, k[:, :, :SINKS], v[:, :, :SINKS], n[None], size=SIZE, scale=head_dim**-0.5)
    theirs = _written_out(q.float(), k.float(), v.float(), seen[None, None], head_dim**-0.5)
    pairs = [(mine, theirs)]
    if not forward_only:
        pairs += zip(
            torch.autograd.grad(mine, leaves, weight), torch.autograd.grad(theirs, leaves, weight.float()), strict=True
        )
    return {name: _error(*pair) for name, pair in zip(("window", "dq", "dk", "dv"), pairs, strict=False)}


def _decode_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    spans = [
        [torch.randn(ROWS, GROUPS, columns, head_dim, device=device, dtype=dtype) for _ in "kv"] for columns in (TOKENS, 40)
    ]
    q = torch.randn(ROWS, 2 * GROUPS * HEADS, 1, head_dim, device=device, dtype=dtype)
    counts = [torch.tensor([TOKENS - 9, 60], device=device), torch.tensor([40, 33], device=device)]
    none, scale = q.new_empty(0), head_dim**-0.5
    k, v = ([span[i] for span in spans] for i in range(2))
    mine = one_token_attention(q, k, v, counts, [none.long()] * 2, [none] * 2, [0, SINKS], [False] * 2, [], scale)
    theirs = []
    for part, keys, values, count in zip(q.chunk(2, dim=1), k, v, counts, strict=True):
        seen = torch.arange(keys.shape[2], device=device) < count[:, None, None, None]
        theirs.append(_written_out(part.float(), keys.float(), values.float(), seen, scale))
    return {"decode": _error(mine, torch.cat(theirs, dim=1))}


def _token_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    """A new token in a static cache: one row has room behind the others, the other's ring is full."""
    q, new_k, new_v = (torch.randn(ROWS, n, 1, head_dim, device=device, dtype=dtype) for n in (GROUPS * HEADS, GROUPS, GROUPS))
    k, v = (torch.randn(ROWS, GROUPS, SINKS + SIZE, head_dim, device=device, dtype=dtype) for _ in "kv")
    angle = torch.randn(ROWS, 1, head_dim // 2, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turned_q, turned_k = apply_rotary_pos_emb(q, new_k, cos, sin)
    count, none, scale = torch.tensor([SIZE // 2, SINKS + 2 * SIZE + 7], device=device), q.new_empty(0), head_dim**-0.5
    held = [x.clone() for x in (k, v)]
    for x, token in zip(held, (turned_k, new_v), strict=True):
        x[0, :, SIZE // 2], x[1, :, SINKS + 7] = token[0, :, 0], token[1, :, 0]
    mine = one_token_attention(
        q, [k], [v], [count], [none.long()], [none], [SINKS], [True], [new_k, new_v, cos, sin], scale
    )  # fmt: skip
    seen = torch.arange(k.shape[2], device=device) <= count[:, None, None, None]
    theirs = _written_out(turned_q.float(), held[0].float(), held[1].float(), seen, scale)
    written = max(_error(a, b.float()) for a, b in zip((k, v), held, strict=True))
    return {"new token": _error(mine, theirs), "what is written of it": written}


def _rotary_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    shapes = (ROWS, 2 * GROUPS), (ROWS, GROUPS)
    leaves = [torch.randn(*s, TOKENS, head_dim, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    angle = torch.randn(1, TOKENS, head_dim // 2, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k = leaves
    mine, theirs = rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    weights = [torch.randn_like(x) for x in mine]
    pairs = [*zip(mine, theirs, strict=True)]
    pairs += zip(*(torch.autograd.grad(out, leaves, weights) for out in (mine, theirs)), strict=True)
    return {"rotary": max(_error(a, b.float()) for a, b in pairs)}


def _indexed_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    """A chunk behind earlier tokens, and its last token alone; the second head of each group retrieves."""
    past, spec = 70, Indexed(top_p=0.7, block=16, sinks=SINKS)
    columns, which = past + TOKENS, torch.arange(1, GROUPS * HEADS, HEADS, device=device)
    shapes = (GROUPS * HEADS, TOKENS), (GROUPS, columns), (GROUPS, columns)
    leaves = [torch.randn(ROWS, *s, head_dim, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    index_q, index_k = (torch.randn(ROWS, *s, spec.dim, device=device, dtype=dtype) for s in shapes[:2])
    weight = torch.randn(ROWS, GROUPS, TOKENS, head_dim, device=device, dtype=dtype)
    starts, dense = torch.full((ROWS,), past, device=device), torch.tensor([0, past + 20], device=device)
    positions, scale = past + torch.arange(TOKENS, device=device)[None], head_dim**-0.5
    choice = spec.block, spec.sinks, spec.top_p, scale
    seen = chosen(index_q[:, which].float() @ index_k.float().transpose(-1, -2), positions, spec)
    everything = torch.arange(columns, device=device) <= positions[..., None]
    seen = seen | (everything & (positions < dense[:, None])[..., None])[:, None]
    q, k, v = leaves
    mine = indexed_attention(q, k, v, index_q, index_k, which, starts, dense, *choice)
    theirs = _written_out(q[:, which].float(), k.float(), v.float(), seen, scale)
    pairs = [(mine, theirs)]
    if not (dtype == torch.float32 and device.type == "cuda"):
        pairs += zip(
            torch.autograd.grad(mine, leaves, weight), torch.autograd.grad(theirs, leaves, weight.float()), strict=True
        )
    names = "indexed", "indexed dq", "indexed dk", "indexed dv"
    found = {name: _error(*pair) for name, pair in zip(names, pairs, strict=False)}
    last = q[:, :, -1:].detach(), k.detach(), v.detach(), index_q[:, :, -1:], index_k
    token = indexed_token_attention(*last, which, starts + TOKENS - 1, dense, *choice)
    return found | {"indexed token": _error(token, theirs[:, :, -1:])}


def _opened_errors(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, float]:
    """Every third token of a chunk behind earlier ones is open, fewer of them in the second row."""
    past, n = 70, torch.arange(TOKENS // 3, device=device)
    shapes = (GROUPS * HEADS, len(n)), (GROUPS, past + TOKENS), (GROUPS, past + TOKENS)
    leaves = [torch.randn(ROWS, *s, head_dim, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    weight = torch.randn(ROWS, *shapes[0], head_dim, device=device, dtype=dtype)
    at, counts = (past + 3 * n).expand(ROWS, -1), torch.tensor([len(n), len(n) // 2], device=device)
    real = (n < counts[:, None])[:, None, :, None]
    q, k, v = leaves
    mine = open_attention(q, k, v, at, counts, head_dim**-0.5)
    seen = torch.arange(past + TOKENS, device=device) <= at[:, None, :, None]
    theirs = _written_out(q.float(), k.float(), v.float(), seen, head_dim**-0.5) * real
    pairs = [(mine, theirs)]
    if not (dtype == torch.float32 and device.type == "cuda"):
        pairs += zip(
            torch.autograd.grad(mine, leaves, weight), torch.autograd.grad(theirs, leaves, weight.float()), strict=True
        )
    names = "opened", "opened dq", "opened dk", "opened dv"
    return {name: _error(*pair) for name, pair in zip(names, pairs, strict=False)}


def _matvec_errors(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    x, *weights = (torch.randn(n, 1500, device=device, dtype=dtype) for n in (1, 40, 24, 8))
    return {"matvec": _error(matvec(x, weights), x.float() @ torch.cat(weights).float().T)}


def _written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def _error(mine: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((mine.detach().float() - reference.detach()).norm() / reference.detach().norm())
