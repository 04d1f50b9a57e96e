"""One layer's attention alone: our window against FlexAttention's, full attention by every backend, and both side by side."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.timing import Ceilings, Job, captured, interleaved, speed
from hybridize.kernels.dispatch import kernels_for
from hybridize.operators.banded import banded_attention
from hybridize.operators.gated import open_attention, open_by_rule
from hybridize.operators.specs import Full, Window

L2 = 64 << 20  # inputs of one round are not in the cache when their turn comes again
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def attention_rows(
    name: str,
    shape: Shape,
    context: int,
    window: Window,
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    *,
    backward: bool = False,
    seconds: float = 1.0,
    opened: float | None = None,
) -> list[dict[str, Any]]:
    """Speed rows (design.md's format) of kernel_forward, and of kernel_backward (its forward included) where asked.

    `opened`: also a window without sinks with, beside it, everything for this share of the queries, evenly spread (L2A).
    """
    sets = _inputs(shape, context, device, dtype)
    rows = []
    for what in ("kernel_forward", "kernel_backward") if backward else ("kernel_forward",):
        jobs = {
            variant: (_both if what == "kernel_backward" else _forward)(run, sets, device)
            for variant, run in _variants(shape, context, window, device, dtype, opened).items()
        }
        times = interleaved(jobs, device, seconds)
        full = "full cudnn" if "full cudnn" in times else "full sdpa"
        for variant, timing in times.items():
            share = opened if opened is not None and variant.endswith("open") else 0.0
            flops, moved = _work(shape, context, window, variant, dtype, what == "kernel_backward", share)
            head = {"shape": name, "what": what, "variant": variant, "context": context, "batch": 1}
            for baseline in dict.fromkeys((full, "window flex")):
                if baseline in times and baseline != variant:
                    rows.append(head | speed(timing, times[baseline], baseline, ceilings.floor(moved, flops)))
            if variant == full:
                rows.append(head | speed(timing, timing, variant, ceilings.floor(moved, flops)))
    return rows


def _inputs(shape: Shape, context: int, device: torch.device, dtype: torch.dtype) -> list[list[Tensor]]:
    bytes_each = context * (shape.heads + 2 * shape.kv_heads) * shape.head_dim * dtype.itemsize
    generator = torch.Generator(device).manual_seed(0)
    sets = []
    for _ in range(max(2, min(8, -(-L2 // bytes_each)))):
        made = []
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads):
            x = torch.randn(1, context, heads, shape.head_dim, generator=generator, device=device, dtype=dtype)
            made.append(x.transpose(1, 2).requires_grad_())
        sets.append(made)
    return sets


def _forward(run: Callable[..., Tensor], sets: list[list[Tensor]], device: torch.device) -> Job:
    """In a CUDA graph on a GPU: a kernel's time, without what it takes to call it."""
    steps = [captured(functools.partial(run, *each), device) for each in sets]
    return lambda number: steps[number % len(sets)]()


def _both(run: Callable[..., Tensor], sets: list[list[Tensor]], device: torch.device) -> Job:
    def both(number: int) -> None:
        leaves = sets[number % len(sets)]
        out = run(*leaves)
        torch.autograd.grad(out, leaves, out.detach())

    return both


def _variants(
    shape: Shape, context: int, window: Window, device: torch.device, dtype: torch.dtype, opened: float | None
) -> dict[str, Callable[..., Tensor]]:
    scale = shape.head_dim**-0.5
    positions = torch.arange(context, device=device)[None]

    def full(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
        with only(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sink_k, sink_v = k[:, :, : window.sinks], v[:, :, : window.sinks]
        return banded_attention(q, k, v, sink_k, sink_v, positions, size=window.size, scale=scale)

    def ours(q: Tensor, k: Tensor, v: Tensor, kernels: Any, out: Tensor | None = None) -> Tensor:
        sinks = (x[:, :, : window.sinks] for x in (k, v))
        return kernels.window_attention(q, k, v, *sinks, positions, size=window.size, scale=scale, out=out)

    def mixed(q: Tensor, k: Tensor, v: Tensor, kernels: Any, backend: str | None) -> Tensor:
        """As a layer of such groups runs (attention.py): two launches, joined in the layer's own memory where it may be."""
        first = shape.heads // shape.kv_heads
        joined = None if torch.is_grad_enabled() else torch.empty_like(q)
        far = full(q[:, :first], k[:, :1], v[:, :1], backend)
        near = ours(q[:, first:], k[:, 1:], v[:, 1:], kernels, None if joined is None else joined[:, first:])
        if joined is None:
            return torch.cat([far.transpose(1, 2), near.transpose(1, 2)], dim=2).transpose(1, 2)
        joined[:, :first].copy_(far)
        return joined

    def beside(q: Tensor, k: Tensor, v: Tensor, near: Callable[..., Tensor]) -> Tensor:
        """Both halves of a gated layer's attention; their inputs are other tensors there, of the same sizes."""
        few = open_attention(q.index_select(2, places[0]), k, v, places, counts, scale)
        return near(q, k, v).index_add(2, places[0], few)

    found: dict[str, Callable[..., Tensor]] = {}
    on_gpu = device.type == "cuda"
    for backend in BACKENDS if on_gpu else ():
        found[f"full {backend}"] = functools.partial(full, backend=backend)
    if not on_gpu:
        found["full sdpa"] = full
    probe = torch.empty(1, shape.heads, 1, shape.head_dim, device=device, dtype=dtype)
    kernels = kernels_for("window", probe)
    if kernels is None:
        found["window reference"] = reference
    else:
        found["window triton"] = functools.partial(ours, kernels=kernels)
        best = "cudnn" if on_gpu else None
        found["1 group full"] = functools.partial(mixed, kernels=kernels, backend=best)
    if opened is not None:
        places = open_by_rule("position", opened, positions, 0)[0].nonzero().T
        counts = torch.full((1,), places.shape[1], device=device)
        half = found["window reference" if kernels is None else "window triton"]
        found[f"window + {opened:.0%} open"] = functools.partial(beside, near=half)
    if on_gpu:
        found["window flex"] = _flex(context, window, device, scale)
    return found


@contextlib.contextmanager
def only(backend: str | None) -> Iterator[None]:
    """SDPA on one backend of BACKENDS; None: on whichever PyTorch picks."""
    with contextlib.nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        yield


def _flex(context: int, window: Window, device: torch.device, scale: float) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q - k < window.size) | (k < window.sinks))

    mask = create_block_mask(seen, None, None, context, context, device=device, _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)


def _work(
    shape: Shape, context: int, window: Window, variant: str, dtype: torch.dtype, backward: bool, opened: float
) -> tuple[float, float]:
    """(FLOPs on visible pairs, bytes in and out): backward has 2.5 times the forward's matmuls, and its forward."""
    groups_full = shape.kv_heads if variant.startswith("full") else 1 if variant.startswith("1 group") else 0
    pairs = groups_full * Full().visible_pairs(context) + (shape.kv_heads - groups_full) * window.visible_pairs(context)
    few = opened * shape.kv_heads * Full().visible_pairs(context)
    flops = 4.0 * shape.head_dim * (shape.heads // shape.kv_heads) * (pairs + few)
    moved = 2.0 * context * (shape.heads + shape.kv_heads) * shape.head_dim * dtype.itemsize
    return (3.5 * flops, 3 * moved) if backward else (flops, moved)
