"""One decoded token a row: attention alone, the whole model behind long contexts, and with as many rows as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import logging

from hybridize.benchmark.attention import BACKENDS, only
from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.subject import STOCK, Subject
from hybridize.benchmark.timing import Ceilings, Step, Timing, captured, interleaved, release, speed
from hybridize.kernels.dispatch import kernels_for
from hybridize.operators.specs import Window

logger = logging.get_logger(__name__)
COMPILE = {"coordinate_descent_tuning": True}  # Inductor's own matrix-vector kernels, which read weights faster than cuBLAS's
ROOM = 8  # columns of a static cache beyond the context


def kernel_decode_rows(
    name: str, shape: Shape, context: int, window: Window, device: torch.device, dtype: torch.dtype, ceilings: Ceilings,
    seconds: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Attention of one token over `context` keys: SDPA's backends, our kernel, and our kernel over a window's ring."""
    scale, slots = shape.head_dim**-0.5, window.size + window.sinks
    q = torch.randn(1, shape.heads, 1, shape.head_dim, device=device, dtype=dtype)
    sets = [[torch.randn(1, shape.kv_heads, context, shape.head_dim, device=device, dtype=dtype) for _ in "kv"] for _ in "ab"]

    def sdpa(k: Tensor, v: Tensor, backend: str | None) -> Tensor:
        with only(backend):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    for backend in BACKENDS if device.type == "cuda" else (None,):
        variants[f"full {backend or 'sdpa'}"] = partial(sdpa, backend=backend)
    kernels = kernels_for("decode", q)
    if kernels is not None:
        none = q.new_empty(0)

        def ours(k: Tensor, v: Tensor, columns: int) -> Tensor:
            count = torch.full((1,), columns, device=device)
            held = ([x[:, :, :columns]] for x in (k, v))
            out: Tensor = kernels.one_token_attention(q, *held, [count], [none.long()], [none], [0], [False], [], scale)
            return out

        variants["full triton"] = partial(ours, columns=context)
        variants["window triton"] = partial(ours, columns=min(slots, context))
    jobs = {}
    for variant, run in variants.items():
        steps = [captured(partial(run, *each), device) for each in sets]
        jobs[variant] = lambda number, steps=steps: steps[number % 2]()
    times, rows = interleaved(jobs, device, seconds), []
    full = min((v for v in times if v.startswith("full") and v != "full triton"), key=lambda v: times[v].median)
    for variant, timing in times.items():
        columns = min(slots, context) if variant.startswith("window") else context
        floor = ceilings.floor(2.0 * columns * shape.kv_heads * shape.head_dim * dtype.itemsize, 0.0)
        row = {"shape": name, "what": "kernel_decode", "variant": variant, "context": context, "batch": 1}
        rows.append(row | speed(timing, times[full], full, floor))
    return rows


def decode_rows(of: Subject, contexts: Sequence[int], batch: int, stock: bool = True) -> list[dict[str, Any]]:
    """One decoded token a row behind each context, over static caches that would hold the longest.

    On a GPU the step is compiled once a plan and captured in a CUDA graph; transformers' own is as `generate` runs it.
    Plans of whole layers only: those of groups move weights, which a graph that was captured before would not see.
    """
    caches, steps = {}, {}
    for variant in of.plans:
        of.cut(variant)
        caches[variant] = static_cache(of.model, max(contexts) + ROOM, batch)
        steps[variant] = _step(of, caches[variant], batch, compiled=of.on_gpu)
    rows = []
    for context in contexts:
        found = _stock_step(of, context, batch) if stock else None
        jobs = steps if found is None else {**steps, STOCK: found}
        rows += _timed_steps(of, jobs, caches, [context] * batch, "decode", context)
        del found, jobs
    return rows


def _timed_steps(
    of: Subject, steps: dict[str, Step], caches: dict[str, Any], lengths: Sequence[int], what: str, context: int
) -> list[dict[str, Any]]:
    held = torch.tensor(lengths, device=of.device)

    def prepare(variant: str) -> None:
        if variant in caches:
            rewind(caches[variant], held)
            if not of.on_gpu:  # a graph knows its plan by itself
                of.cut(variant)

    jobs = {variant: lambda _, step=step: step() for variant, step in steps.items()}
    times, rows, batch = interleaved(jobs, of.device, of.seconds, prepare=prepare), [], len(lengths)
    for variant, timing in times.items():
        plan = of.plan(variant)
        held_bytes = sum(plan.cache_bytes(n, 1, of.dtype) for n in lengths)
        flops = 2.0 * batch * of.shape.step_parameters + sum(plan.decode_flops(n) for n in lengths)
        floor = of.ceilings.floor(of.shape.step_parameters * of.model.dtype.itemsize + held_bytes, flops)
        row = of.row(what, variant, context, batch) | speed(timing, times["base"], "base", floor)
        rows.append(row | {"tokens_per_second": batch / timing.median, "cache_bytes": held_bytes})
    return rows


def ragged_rows(of: Subject, context: int, batch: int) -> list[dict[str, Any]]:
    """A step of rows that are 1/batch, 2/batch, ... of the context long, side by side in one static cache."""
    caches, steps = {}, {}
    for variant in of.plans:
        of.cut(variant)
        caches[variant] = static_cache(of.model, context + ROOM, batch)
        steps[variant] = _step(of, caches[variant], batch, compiled=False)
    lengths = [max(1, context * (i + 1) // batch) for i in range(batch)]
    return _timed_steps(of, steps, caches, lengths, "decode_ragged", context)


def largest_batch_rows(of: Subject, context: int) -> list[dict[str, Any]]:
    """The most rows whose caches fit beside the weights, and the tokens a second of a step with that many; on a GPU."""
    found = {}
    for variant, plan in of.plans.items():
        of.cut(variant)
        release()
        free, _ = torch.cuda.mem_get_info()
        batch = int(0.97 * free / plan.cache_bytes(context + ROOM, 1, of.dtype))
        while batch:
            try:
                found[variant] = (batch, _timed_batch(of, context, batch))
                break
            except torch.OutOfMemoryError:
                batch = int(0.97 * batch)
                release()
    rows, most = [], found["base"][0]
    for variant, (batch, timing) in found.items():
        plan = of.plan(variant)
        moved = of.shape.step_parameters * of.model.dtype.itemsize + plan.cache_bytes(context, batch, of.dtype)
        flops = batch * (2.0 * of.shape.step_parameters + plan.decode_flops(context))
        row = of.row("batch_max", variant, context, batch) | {"value": batch, "unit": "rows", "baseline": "base"}
        row |= {"baseline_value": most, "ratio": batch / most, "spread": timing.spread, "rounds": timing.rounds}
        row |= {"of_limit": of.ceilings.floor(moved, flops) / timing.median, "step_ms": timing.median * 1000}
        rows.append(row | {"tokens_per_second": batch / timing.median})
    return rows


def _timed_batch(of: Subject, context: int, batch: int) -> Timing:
    cache = static_cache(of.model, context + ROOM, batch)
    step, held = _step(of, cache, batch, compiled=False), torch.full((batch,), context, device=of.device)
    return interleaved({"step": lambda _: step()}, of.device, of.seconds, prepare=lambda _: rewind(cache, held))["step"]


def static_cache(model: Any, columns: int, batch: int) -> Any:
    """A static cache in use, of random keys and values: what is in it changes what is computed, not how long it takes."""
    cache = model.new_cache(columns)
    with torch.inference_mode():
        model(torch.full((batch, 1), 2, device=model.device), past_key_values=cache)
        for layer in cache.layers:
            for state in layer.states:
                for tensor in state.tensors():
                    tensor.normal_()
    return cache


def rewind(cache: Any, lengths: Tensor) -> None:
    """Say that rows hold `lengths` [B] tokens."""
    with torch.inference_mode():
        cache.lengths.copy_(lengths)
        cache._columns.copy_(lengths.max())


def _step(of: Subject, cache: Any, batch: int, compiled: bool) -> Step:
    forward, tokens = of.model.forward, torch.full((batch, 1), 2, device=of.device)
    if compiled:
        forward = torch.compile(forward, fullgraph=True, dynamic=False, options=COMPILE)
    rewind(cache, torch.ones(batch, dtype=torch.int64, device=of.device))
    return captured(partial(forward, tokens, past_key_values=cache), of.device, of.on_gpu)


def _stock_step(of: Subject, context: int, batch: int) -> Step | None:
    """transformers' own decoding step over its growing cache, not captured; None, and said, where that cache does not fit."""
    needed = of.plans["base"].cache_bytes(context, batch, of.dtype) * (1 + 4 / of.shape.layers)
    if of.on_gpu:
        torch.cuda.empty_cache()
        if needed > 0.95 * torch.cuda.mem_get_info()[0]:
            logger.warning(f"hybridize bench: no row of {STOCK} at {context} tokens: its cache does not fit beside the others")
            return None
    stock, tokens = of.stock, torch.full((batch, 1), 2, device=of.device)
    cache = DynamicCache(config=stock.config)
    for layer in range(of.shape.layers):
        empty = torch.zeros(batch, of.shape.kv_heads, context, of.shape.head_dim, device=of.device, dtype=stock.dtype)
        cache.update(empty, empty.clone(), layer)

    def step() -> None:
        with torch.inference_mode():
            stock(tokens, past_key_values=cache, use_cache=True)
        cache.crop(context)

    return step
