"""Whole models: time to the first token, a decoding step, the largest batch, a training step; base and hybrid in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridize.benchmark.attention import speed
from hybridize.benchmark.shapes import Shape
from hybridize.benchmark.timing import Ceilings, interleaved
from hybridize.plan import AttentionPlan


def prefill_rows(
    name: str, shape: Shape, model: Any, plans: Mapping[str, AttentionPlan], context: int, ceilings: Ceilings, seconds: float
) -> list[dict[str, Any]]:
    """Time to the first token's logits of one prompt, cache included, and the peak of memory on a GPU."""
    ids = torch.randint(2, shape.vocabulary, (2, context), generator=torch.Generator().manual_seed(0)).to(model.device)
    peak: dict[str, int] = {}

    def prepare(plan_name: str) -> None:
        _cut(model, plans[plan_name])
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def job(plan_name: str) -> Callable[[int], None]:
        def run(number: int) -> None:
            with torch.inference_mode():
                model(ids[number % 2 :][:1], past_key_values=model.new_cache(), logits_to_keep=1)
            if model.device.type == "cuda":
                peak[plan_name] = torch.cuda.max_memory_allocated()

        return run

    times = interleaved({n: job(n) for n in plans}, model.device, seconds, least=3, prepare=prepare)
    rows = []
    for n, timing in times.items():
        weights = shape.layers * shape.layer_parameters
        floor = ceilings.floor(weights * model.dtype.itemsize, 2.0 * weights * context + plans[n].prefill_flops(context))
        row = {"shape": name, "what": "prefill", "variant": n, "context": context, "batch": 1}
        rows.append(row | speed(timing, times["base"], "base", floor) | {"peak_bytes": peak.get(n)})
    return rows


def decode_rows(
    name: str,
    shape: Shape,
    model: Any,
    plans: Mapping[str, AttentionPlan],
    context: int,
    batch: int,
    ceilings: Ceilings,
    seconds: float,
) -> list[dict[str, Any]]:
    """One decoded token a row behind `context` tokens, over static caches; captured in a CUDA graph on a GPU.

    Plans of whole layers only: those of groups move weights, which a graph that was captured before would not see.
    """
    steps, caches = {}, {}
    for n, plan in plans.items():
        _cut(model, plan)
        caches[n] = filled_cache(model, context, batch)
        steps[n] = _step(model, caches[n], context, batch)
    on_gpu = model.device.type == "cuda"  # a graph knows its plan by itself
    times = interleaved(steps, model.device, seconds, prepare=lambda n: None if on_gpu else _cut(model, plans[n]))
    rows = []
    dtype = str(model.dtype).removeprefix("torch.")
    for n, plan in plans.items():
        moved = shape.step_parameters * model.dtype.itemsize + plan.cache_bytes(context, batch, dtype)
        floor = ceilings.floor(moved, 2.0 * batch * shape.step_parameters + batch * plan.decode_flops(context))
        row = {"shape": name, "what": "decode", "variant": n, "context": context, "batch": batch}
        row |= speed(times[n], times["base"], "base", floor)
        rows.append(row | {"tokens_per_second": batch / times[n].median, "cache_bytes": caches[n].bytes()})
    return rows


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
