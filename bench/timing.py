"""Times calls: with CUDA graphs and events on a GPU, with the wall clock in the interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .machine import Sensors, typical
from .progress import Tick, no_tick

Run = Callable[[int], object]
"""One call on an input set, given by its number modulo the number of sets."""

SAMPLE_MILLISECONDS = 1.0
"""A sample has as many calls as take this long, up to MOST_CALLS."""

MOST_CALLS = 256

WARM_UP_CALLS = 3

FLUSH_MILLISECONDS = 0.1
"""Approximate time to overwrite L2. It counts for a turn's length, but not for its samples."""

CYCLES_PER_SECOND = 2e9
"""Upper bound of a GPU's clock, to make it wait for at least a given time."""


Cache = Literal["rotate", "cold", "warm"]
"""What calls find in L2. `rotate`: each has another input set, and all sets together have twice L2's size. `cold`:
nothing, because L2 is overwritten before every call, which is a sample of its own. `warm`: their own inputs."""

Launch = Literal["graph", "eager"]
"""`graph`: calls are captured, so that CPU time isn't counted. `eager`: calls are launched one by one, and CPU time
counts if it is longer."""


@dataclass(frozen=True)
class Protocol:
    """How everything is timed.

    Attributes:
        rounds: turns of each peer.
        milliseconds: length of a turn on a GPU.
        lead_in: milliseconds of the same work before a turn, untimed. A power-capped card's clock depends on what it
            did just before.
        settle: milliseconds of everyone's turns before the first round, uncounted. A card that was idle starts at a
            higher clock, which falls during the first turns, more for some peers than for other peers.
    """

    rounds: int = 5
    milliseconds: float = 25.0
    lead_in: float = 25.0
    cache: Cache = "rotate"
    launch: Launch = "graph"
    settle: float = 0.0

    @property
    def turn_seconds(self) -> float:
        """Least duration of one turn on a GPU."""
        return (self.milliseconds + self.lead_in) / 1e3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: statistics over samples. Each sample is the mean of `calls` calls back to back.

    Attributes:
        p50_us, p90_us, p99_us, mean_us, std_us: over all samples of all rounds.
        round_us: the median of each round. Their spread is the noise between rounds: the card's clock and temperature.
        method: how calls were launched.
    """

    p50_us: float
    p90_us: float
    p99_us: float
    mean_us: float
    std_us: float
    round_us: tuple[float, ...]
    samples: int
    calls: int
    method: str

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]], calls: int, method: str) -> Timing:
        """The statistics of samples.

        Args:
            rounds: microseconds of each round's samples.
        """
        samples = np.concatenate([np.asarray(one, dtype=float) for one in rounds])
        p50, p90, p99 = (float(p) for p in np.percentile(samples, (50, 90, 99)))
        medians = tuple(float(np.median(one)) for one in rounds)
        return cls(p50, p90, p99, float(samples.mean()), float(samples.std()), medians, len(samples), calls, method)


def tflops(flops: int, microseconds: float) -> float:
    """TFLOP/s."""
    return flops / microseconds / 1e6


def input_sets(bytes_of_one: int, device: torch.device) -> int:
    """Number of copies of the inputs that the calls of one sample walk over.

    If all calls read the same few megabytes, they would find them in L2, where a model's next layer wouldn't find its
    inputs. The copies together have twice L2's size, so that their e4m3 halves exceed L2, too. MOST_CALLS limits them:
    a problem of 100 KB stays warm in any case. Data that a call writes for itself, such as quantized inputs, stays
    warm, as it does in use. Outputs share the memory of their graph.
    """
    if device.type != "cuda":
        return 1
    return min(max(math.ceil(2 * l2_bytes(device) / bytes_of_one), 1), MOST_CALLS)


@dataclass(frozen=True)
class Work:
    """What a peer repeats in its turn.

    Attributes:
        calls: number of calls.
        milliseconds: time of all of them.
        launch_seconds: CPU time that a wait must hide.
        flush: tensor that is written before every replay, or None.
    """

    replay: Callable[[], object]
    calls: int
    milliseconds: float
    launch_seconds: float
    method: str
    flush: torch.Tensor | None = None


def writes(replay: Callable[[], object], answer: torch.Tensor) -> bool:
    """Whether a replay writes the tensor that was returned at capture.

    Kernels that are launched on another stream aren't in a graph.
    """
    stored = answer.view(torch.uint8)
    stored.fill_(0xFF)  # NaN in every type
    replay()
    return not bool((stored == 0xFF).all())


def captured(run: Run, calls: int) -> Callable[[], object]:
    """The replay of a graph of calls on input sets 0, 1, … Memory that calls free is used by the graph's later calls.

    Raises:
        RuntimeError: the calls can't be captured, or not completely.
    """
    graph, answer = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for i in range(calls):
            answer = None  # free its memory for the next call
            answer = run(i)
    if isinstance(answer, torch.Tensor) and not writes(graph.replay, answer):
        raise RuntimeError("the graph doesn't write the answer")
    return graph.replay


def looped(run: Run, calls: int) -> Callable[[], object]:
    """The same calls, launched one by one."""

    def replay() -> None:
        for i in range(calls):
            run(i)

    return replay


def warm_up(run: Run) -> None:
    """Compile, load and plan what a call needs, on a side stream, as capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(WARM_UP_CALLS):
            run(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def work_of(run: Run, sets: int, protocol: Protocol, device: torch.device) -> Work:
    """`run` captured; or looped if capture isn't possible or not wanted."""
    warm_up(run)
    make, method = captured, "CUDA graph"
    if protocol.launch == "eager":
        make, method = looped, "eager"
        replay = looped(run, sets)
    else:
        try:
            replay = captured(run, sets)
        except RuntimeError:
            torch.cuda.synchronize()
            make, method = looped, "back to back"
            replay = looped(run, sets)
    start = time.perf_counter()
    replay()
    launch = time.perf_counter() - start if method == "back to back" else 0.0
    torch.cuda.synchronize()
    if protocol.cache == "cold":
        flush = torch.empty(2 * l2_bytes(device), dtype=torch.int8, device=device)
        first = Work(replay, sets, SAMPLE_MILLISECONDS, launch, f"{method}, cold L2", flush)
        return dataclasses.replace(first, milliseconds=float(np.median(turn(first, 2 * SAMPLE_MILLISECONDS))) / 1e3 + FLUSH_MILLISECONDS)
    first = Work(replay, sets, SAMPLE_MILLISECONDS, launch, method)
    milliseconds = float(np.median(turn(first, 2 * SAMPLE_MILLISECONDS))) * sets / 1e3
    calls = min(sets * math.ceil(SAMPLE_MILLISECONDS / milliseconds), MOST_CALLS)
    if calls <= sets:
        return dataclasses.replace(first, milliseconds=milliseconds)
    more = calls / sets
    return Work(make(run, calls), calls, milliseconds * more, launch * more, method)


def turn(work: Work, milliseconds: float, lead_in: float = 0.0, busy: Callable[[], object] | None = None) -> list[float]:
    """Microseconds of a call in each of the replays that fill a time budget, at least two.

    Args:
        lead_in: milliseconds of replays before them, at least one replay.
        busy: called while the GPU works.
    """
    count = max(math.ceil(milliseconds / work.milliseconds), 2)
    before = max(math.ceil(lead_in / work.milliseconds), 1)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    if work.launch_seconds:
        torch.cuda._sleep(int((count + before) * work.launch_seconds * CYCLES_PER_SECOND))  # everything is launched in the meantime
    for _ in range(before):
        work.replay()  # untimed: it hides the launch of the next ones, and evicts the previous peer's cache lines
    for start, end in zip(starts, ends, strict=True):
        if work.flush is not None:
            work.flush.zero_()
        start.record()
        work.replay()
        end.record()
    if busy is not None:
        busy()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 / work.calls for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Timed:
    """A peer's timing, and the readings of the GPU's sensors in its turns."""

    timing: Timing
    readings: dict[str, float | None]


def in_turn(names: Sequence[str], index: int) -> list[str]:
    """The order of turns in a round.

    Every round has a different order, because a power-capped card slows a kernel that follows one with a high power
    draw. With two peers, every second round is reversed. With more, no peer has two turns in a row.
    """
    if len(names) < 3:
        return list(names) if index % 2 == 0 else list(names)[::-1]
    order: list[str] = []
    for i in range(index + 1):
        before, order = order, random.Random(i).sample(names, len(names))
        if before and before[-1] == order[0]:
            order[0], order[1] = order[1], order[0]
    return order


def time_all(runs: Mapping[str, Run], sets: int, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> dict[str, Timed]:
    """All peers' timings, from rounds in which each takes its turn, so that changes of the clock affect all of them.

    On a CPU, where kernels are interpreted, a turn is one call.

    Args:
        sets: number of input sets that calls walk over.
        tick: called for every turn, which counts as 1.

    Returns:
        By name, without peers that ran out of memory: captured calls retain theirs.
    """
    sensors = Sensors(device)
    turns = {}
    for name, run in runs.items():
        tick(f"{name}, made ready", 0.0)
        with contextlib.suppress(torch.OutOfMemoryError):
            turns[name] = turns_of(run, sets, protocol, device)
    settled(turns.values(), protocol.settle)
    samples: dict[str, list[list[float]]] = {name: [] for name in turns}
    readings: dict[str, list[dict[str, float | None]]] = {name: [] for name in turns}
    for i in range(protocol.rounds):
        last = i == protocol.rounds - 1
        for name in in_turn(list(turns), i):
            tick(f"{name}, round {i + 1} of {protocol.rounds}", 0.0)
            # a slow reading once at the end of a peer's turns, a quick one in each turn
            read = (lambda name=name: readings[name].append(sensors.read())) if sensors.quick or last else None
            samples[name].append(turns[name].take(read))
            tick(name, 1.0)
    return {name: Timed(Timing.of(samples[name], one.calls, one.method), typical(readings[name])) for name, one in turns.items()}


@dataclass(frozen=True)
class Turns:
    """A peer's turns. `take` runs one and gives microseconds of a call in each of its samples."""

    take: Callable[[Callable[[], object] | None], list[float]]
    calls: int
    method: str


def settled(turns: Collection[Turns], milliseconds: float) -> None:
    """Run whole uncounted rounds until so many milliseconds have passed."""
    start = time.perf_counter()
    while turns and (time.perf_counter() - start) * 1e3 < milliseconds:
        for one in turns:
            one.take(None)


def turns_of(run: Run, sets: int, protocol: Protocol, device: torch.device) -> Turns:
    """A run prepared for its turns."""
    if device.type != "cuda":
        run(0)
        return Turns(lambda busy: [_wall_clock(run)], 1, "wall clock")
    work = work_of(run, 1 if protocol.cache != "rotate" else sets, protocol, device)
    return Turns(lambda busy: turn(work, protocol.milliseconds, protocol.lead_in, busy), work.calls, work.method)


def _wall_clock(run: Run) -> float:
    start = time.perf_counter()
    run(0)
    return (time.perf_counter() - start) * 1e6
