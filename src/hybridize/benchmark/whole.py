"""Whole models: time to the first token, a decoding step, the largest batch, a training step; base and hybrid in turns.

The base is the same model under the all-full plan; transformers' own class over the same weights is a row beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from hybridize.benchmark.attention import speed
from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.timing import Ceilings, Timing, interleaved
from hybridize.plan import AttentionPlan

STOCK = "stock transformers"
TRAINED_LOGITS = 1024  # a loss on every position would time the vocabulary, and not fit


def prefill_rows(
    name: str,
    shape: Shape,
    models: tuple[Any, Any],
    plans: Mapping[str, AttentionPlan],
    context: int,
    ceilings: Ceilings,
    seconds: float,
) -> list[dict[str, Any]]:
    """Time to the first token's logits of one prompt, cache included, and the peak of memory on a GPU."""
    stock, model = models
    ids = torch.randint(2, shape.vocabulary, (2, context), generator=torch.Generator().manual_seed(0)).to(model.device)
    peak: dict[str, int] = {}

    def run(variant: str, number: int) -> None:
        with torch.inference_mode():
            if variant == STOCK:
                stock(ids[number % 2 :][:1], use_cache=True, logits_to_keep=1)
            else:
                model(ids[number % 2 :][:1], past_key_values=model.new_cache(), logits_to_keep=1)
        if model.device.type == "cuda":
            peak[variant] = torch.cuda.max_memory_allocated()

    jobs = {variant: partial(run, variant) for variant in (*plans, STOCK)}
    times = interleaved(jobs, model.device, seconds, least=3, prepare=partial(_prepare, model, plans))
    weights, rows = shape.layers * shape.layer_parameters, []
    for variant, timing in times.items():
        flops = 2.0 * weights * context + plans.get(variant, plans["base"]).prefill_flops(context)
        floor = ceilings.floor(weights * model.dtype.itemsize, flops)
        row = {"shape": name, "what": "prefill", "variant": variant, "context": context, "batch": 1}
        rows.append(row | speed(timing, times["base"], "base", floor) | {"peak_bytes": peak.get(variant)})
    return rows


def train_rows(
    name: str,
    shape: Shape,
    models: tuple[Any, Any],
    plans: Mapping[str, AttentionPlan],
    context: int,
    ceilings: Ceilings,
    seconds: float,
) -> list[dict[str, Any]]:
    """Forward and backward of one prompt with gradient checkpointing, the loss on its last 1024 positions."""
    model = models[1]
    ids = torch.randint(2, shape.vocabulary, (2, context), generator=torch.Generator().manual_seed(0)).to(model.device)
    last = min(TRAINED_LOGITS, context)

    def run(number: int) -> None:
        rows = ids[number % 2 :][:1]
        logits = model(rows, use_cache=False, logits_to_keep=last).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, rows[0, context - last + 1 :]).backward()
        model.zero_grad(set_to_none=True)

    model.train()
    model.gradient_checkpointing_enable()
    try:
        prepare = partial(_prepare, model, plans)
        times = interleaved(dict.fromkeys(plans, run), model.device, seconds, least=3, prepare=prepare)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    weights, rows = shape.layers * shape.layer_parameters, []
    for variant, timing in times.items():
        # forward, forward again, and a backward of two matmuls for each (attention's has 2.5)
        flops = 8.0 * weights * context + 4.5 * plans[variant].prefill_flops(context)
        row = {"shape": name, "what": "train", "variant": variant, "context": context, "batch": 1}
        rows.append(row | speed(timing, times["base"], "base", ceilings.floor(0.0, flops)))
    return rows


def _prepare(model: Any, plans: Mapping[str, AttentionPlan], variant: str) -> None:
    if variant in plans:
        _cut(model, plans[variant])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def decode_rows(
    name: str,
    shape: Shape,
    models: tuple[Any, Any],
    plans: Mapping[str, AttentionPlan],
    context: int,
    batch: int,
    ceilings: Ceilings,
    seconds: float,
) -> list[dict[str, Any]]:
    """One decoded token a row behind `context` tokens, over static caches; captured in a CUDA graph on a GPU.

    Plans of whole layers only: those of groups move weights, which a graph that was captured before would not see.
    """
    stock, model = models
    steps, caches = {}, {}
    for n, plan in plans.items():
        _cut(model, plan)
        caches[n] = filled_cache(model, context, batch)
        steps[n] = _step(model, caches[n], context, batch)
    on_gpu = model.device.type == "cuda"  # a graph knows its plan by itself

    def prepare(variant: str) -> None:
        if not on_gpu and variant in plans:
            _cut(model, plans[variant])

    steps[STOCK] = _stock_step(stock, shape, context, batch)
    times = interleaved(steps, model.device, seconds, prepare=prepare)
    dtype, rows = str(model.dtype).removeprefix("torch."), []
    for n, timing in times.items():
        plan = plans.get(n, plans["base"])
        moved = shape.step_parameters * model.dtype.itemsize + plan.cache_bytes(context, batch, dtype)
        floor = ceilings.floor(moved, 2.0 * batch * shape.step_parameters + batch * plan.decode_flops(context))
        row = {"shape": name, "what": "decode", "variant": n, "context": context, "batch": batch}
        row |= speed(timing, times["base"], "base", floor) | {"tokens_per_second": batch / timing.median}
        rows.append(row | {"cache_bytes": caches[n].bytes() if n in caches else plan.cache_bytes(context, batch, dtype)})
    return rows


def largest_batch_rows(
    name: str, shape: Shape, models: tuple[Any, Any], plans: Mapping[str, AttentionPlan], context: int, seconds: float
) -> list[dict[str, Any]]:
    """The most rows whose caches fit beside the weights, and the tokens a second of a step with that many; on a GPU."""
    model, found = models[1], {}
    dtype = str(model.dtype).removeprefix("torch.")
    for n, plan in plans.items():
        _cut(model, plan)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        batch = int(0.97 * free / plan.cache_bytes(context + 8, 1, dtype))
        while batch:
            try:
                found[n] = (batch, _timed_batch(model, n, context, batch, seconds))
                break
            except torch.OutOfMemoryError:
                batch = int(0.97 * batch)
    rows, most = [], found["base"][0]
    for n, (batch, timing) in found.items():
        row = {"shape": name, "what": "batch_max", "variant": n, "context": context, "batch": batch, "value": batch}
        row |= {"unit": "rows", "baseline": "base", "baseline_value": most, "ratio": batch / most, "spread": timing.spread}
        rows.append(row | {"rounds": timing.rounds, "of_limit": None, "tokens_per_second": batch / timing.median})
    return rows


def _timed_batch(model: Any, variant: str, context: int, batch: int, seconds: float) -> Timing:
    step = _step(model, filled_cache(model, context, batch), context, batch)
    return interleaved({variant: step}, model.device, seconds)[variant]


def _cut(model: Any, plan: AttentionPlan) -> None:
    if model.plan.assignment != plan.assignment or model.plan.operators != plan.operators:
        model.set_plan(plan)


def filled_cache(model: Any, context: int, batch: int) -> Any:
    """A static cache that holds `context` tokens a row, without a prefill: what is in it does not change its speed."""
    cache = model.new_cache(context + 8)
    token = torch.full((batch, 1), 2, device=model.device)
    with torch.inference_mode():
        model(token, past_key_values=cache)
    _rewind(cache, context)
    return cache


def _rewind(cache: Any, context: int) -> None:
    with torch.inference_mode():
        cache.lengths.fill_(context)
        cache._columns.fill_(context)


def _step(model: Any, cache: Any, context: int, batch: int) -> Callable[[int], None]:
    tokens = torch.full((batch, 1), 2, device=model.device)

    def eager(_: int = 0) -> None:
        _rewind(cache, context)
        with torch.inference_mode():
            model(tokens, past_key_values=cache)

    if model.device.type != "cuda":
        return eager
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            eager()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    _rewind(cache, context)
    with torch.cuda.graph(graph), torch.inference_mode():
        model(tokens, past_key_values=cache)

    def replay(_: int) -> None:
        _rewind(cache, context)
        graph.replay()

    return replay


def _stock_step(stock: Any, shape: Shape, context: int, batch: int) -> Callable[[int], None]:
    """transformers' own decoding step over its growing cache, as `generate` runs it: not captured."""
    cache, tokens = DynamicCache(config=stock.config), torch.full((batch, 1), 2, device=stock.device)
    for layer in range(shape.layers):
        empty = torch.zeros(batch, shape.kv_heads, context, shape.head_dim, device=stock.device, dtype=stock.dtype)
        cache.update(empty, empty.clone(), layer)

    def step(_: int) -> None:
        with torch.inference_mode():
            stock(tokens, past_key_values=cache, use_cache=True)
        cache.crop(context)

    return step
