"""How long calls take: CUDA graphs and events on a GPU, the wall clock in the interpreter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

Run = Callable[[int], object]
"""One call on the input set of this number, modulo the number of sets."""

SAMPLE_MILLISECONDS = 1.0
"""A sample is so many calls that it takes this long, where MOST_CALLS allow."""

MOST_CALLS = 256

WARM_UP_CALLS = 3

CYCLES_PER_SECOND = 2e9
"""No less than a GPU's clock, to make it wait for a time."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: percentiles over samples, each the mean of `calls` calls back to back."""

    p50_us: float
    p90_us: float
    p99_us: float
    samples: int
    calls: int
    method: str

    @classmethod
    def of(cls, microseconds: Sequence[float], calls: int, method: str) -> Timing:
        p50, p90, p99 = (float(p) for p in np.percentile(microseconds, (50, 90, 99)))
        return cls(p50, p90, p99, len(microseconds), calls, method)


def tflops(flops: int, microseconds: float) -> float:
    """TFLOP/s."""
    return flops / microseconds / 1e6


def input_sets(bytes_of_one: int, device: torch.device) -> int:
    """Copies of the inputs that calls of one sample walk over.

    Calls that all read the same few megabytes would find them in L2, where a model's next layer wouldn't find its own. Together the copies
    are twice L2's size, so that e4m3's half of the bytes is past it too, as far as MOST_CALLS allow: a problem of 100 KB is warm whatever is done.
    What a call writes for itself on the way, as quantized inputs, stays warm: it is so in use. Outputs share the memory of their graph.
    """
    if device.type != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(math.ceil(2 * l2 / bytes_of_one), 1), MOST_CALLS)


@dataclass(frozen=True)
class Work:
    """What a peer repeats in its turn: `calls` calls, `milliseconds` in all; `launch_seconds` of CPU time unless it is a graph."""

    replay: Callable[[], object]
    calls: int
    milliseconds: float
    launch_seconds: float
    method: str


def captured(run: Run, calls: int) -> Callable[[], object]:
    """The replay of a graph of calls on input sets 0, 1, …; memory that calls free goes to the graph's later calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    return graph.replay


def looped(run: Run, calls: int) -> Callable[[], object]:
    """The same calls, launched one by one."""

    def replay() -> None:
        for i in range(calls):
            run(i)

    return replay


def warm_up(run: Run) -> None:
    """Compile, load and plan what a call needs, on a side stream, as capture wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(WARM_UP_CALLS):
            run(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def work_of(run: Run, sets: int) -> Work:
    """`run` captured, or looped if it can't be."""
    warm_up(run)
    make, method = captured, "CUDA graph"
    try:
        replay = captured(run, sets)
    except RuntimeError:
        torch.cuda.synchronize()
        make, method = looped, "back to back"
        replay = looped(run, sets)
    start = time.perf_counter()
    replay()
    launch = time.perf_counter() - start
    torch.cuda.synchronize()
    first = Work(replay, sets, SAMPLE_MILLISECONDS, 0.0 if make is captured else launch, method)
    milliseconds = float(np.median(turn(first, 2 * SAMPLE_MILLISECONDS))) * sets / 1e3
    calls = min(sets * math.ceil(SAMPLE_MILLISECONDS / milliseconds), MOST_CALLS)
    if calls <= sets:
        return Work(replay, sets, milliseconds, first.launch_seconds, method)
    more = calls / sets
    return Work(make(run, calls), calls, milliseconds * more, first.launch_seconds * more, method)


def turn(work: Work, milliseconds: float) -> list[float]:
    """Microseconds of a call in each of the replays that fill a time budget, at least two."""
    count = max(math.ceil(milliseconds / work.milliseconds), 2)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    if work.launch_seconds:
        torch.cuda._sleep(int((count + 1) * work.launch_seconds * CYCLES_PER_SECOND))  # meanwhile all is launched
    work.replay()  # untimed: the launch of the next ones hides behind it, and the previous peer's cache lines go
    events[0].record()
    for event in events[1:]:
        work.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / work.calls for start, end in pairwise(events)]


def time_all(runs: Mapping[str, Run], sets: int, rounds: int, milliseconds: float, device: torch.device) -> dict[str, Timing]:
    """Every peer's timing, from rounds in which each takes its turn, so that a clock that falls or rises falls or rises for all.

    Every second round goes backwards: a power-capped card slows whoever comes after a kernel that drew much.

    Args:
        sets: number of input sets.
        milliseconds: of each peer in each round; on a CPU, where kernels are interpreted, a turn is one call.
    """
    if device.type != "cuda":
        return _time_on_cpu(runs, rounds)
    works = {name: work_of(run, sets) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name in list(works)[:: 1 if i % 2 == 0 else -1]:
            samples[name] += turn(works[name], milliseconds)
    return {name: Timing.of(samples[name], work.calls, work.method) for name, work in works.items()}


def _time_on_cpu(runs: Mapping[str, Run], rounds: int) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(0)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(0)
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Timing.of(times, 1, "wall clock") for name, times in samples.items()}
