"""Timing that cannot flatter: jobs take turns in one run, medians with their spread, and the machine's own ceilings."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Job = Callable[[int], object]  # gets the round's number, to take turns between inputs
Step = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: median, lower and upper quartile over `rounds`."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """Quartile distance as a share of the median."""
        return (self.high - self.low) / self.median


def once(job: Job, number: int, device: torch.device) -> float:
    """Seconds of one run, on the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        job(number)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    job(number)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def interleaved(
    jobs: Mapping[str, Job],
    device: torch.device,
    seconds: float = 1.0,
    least: int = 5,
    warm_up: int = 2,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, Timing]:
    """Every job in turn, round after round and each round in another order, so that drift meets all of them alike.

    Args:
        seconds: of measuring for each job, about. least: rounds at least (at most 200). warm_up: rounds before, not counted.
        prepare: called with the job's name before each run, not timed.
    """
    names = list(jobs)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up):  # compile, allocate
        for name in names:
            prepare(name)
            once(jobs[name], number, device)
    spent, number = 0.0, 0
    while number < least or (spent < seconds * len(jobs) and number < 200):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            prepare(name)
            found[name].append(once(jobs[name], number, device))
            spent += found[name][-1]
        number += 1
    return {name: _timing(values) for name, values in found.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def speed(timing: Timing, baseline: Timing, name: str, floor: float) -> dict[str, Any]:
    """Value, ratio and distance to the limit of one timing."""
    return {
        "baseline": name,
        "value": timing.median * 1000,
        "unit": "ms",
        "baseline_value": baseline.median * 1000,
        "ratio": baseline.median / timing.median,
        "spread": timing.spread,
        "rounds": timing.rounds,
        "of_limit": floor / timing.median,
    }


def captured(run: Callable[[], object], device: torch.device, graph: bool = True) -> Step:
    """`run` as a CUDA graph, on a GPU; it must not wait for the device."""

    def eager() -> object:
        with torch.inference_mode():
            return run()

    if device.type != "cuda" or not graph:
        return eager
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            eager()
    torch.cuda.current_stream().wait_stream(stream)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        kept = eager()

    def replay() -> object:
        made.replay()
        return kept, run  # what the graph reads and writes lives as long as it does

    return replay


def release() -> None:
    """Give back what finished steps held: graphs and their caches refer to one another, and stay until they are collected."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Ceilings:
    """What this machine reached just now: bytes a second of a copy (read and write), FLOPs a second of a matmul."""

    copy: float
    matmul: float

    def floor(self, bytes_moved: float, flops: float) -> float:
        """The least seconds that work can take: the slower of its traffic and its arithmetic."""
        return max(bytes_moved / self.copy, flops / self.matmul)


def measured_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A copy far larger than any cache, and a large square matmul."""
    big, side = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.empty(big, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in "ab")
    out = torch.empty_like(a)
    times = interleaved(
        {"copy": lambda _: target.copy_(source), "matmul": lambda _: torch.matmul(a, b, out=out)}, device, 0.3, least=7
    )
    return Ceilings(2 * big / times["copy"].median, 2 * side**3 / times["matmul"].median)
