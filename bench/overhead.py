"""What a call costs the CPU: repeated, at a length that is new, and beside PyTorch's, for calls that models make: of
`sdpa`, of packed sequences and of a KV cache."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import fp8attn
from fp8attn import PRECISE, KVCache, PagedBatch, Recipe
from fp8attn.pages import PAGE

from . import command_line, report
from .cases import Case, square
from .command_line import NO_GPU, UsageError, at_least, more_than_zero
from .machine import machine
from .peers import Problem
from .progress import Tick, no_tick
from .sheet import Sheet
from .timing import Protocol, time_all

HELP = "what a call costs the CPU: repeated, at a new length, and beside PyTorch"

FLUX = square("Flux 4608 H24 D128", 1, 24, 4608, 128)

CALLS = 20
"""Calls in a row whose CPU time is one sample. All their launches fit into the queue of a stream, so that no call waits
for the GPU."""

NEW_LENGTHS = 3
"""Lengths of a turn whose first and second calls are timed, after those of another one."""

STEP = 2
"""Tokens by which each length is shorter than the one before: kernels are the same."""


Call = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """A kind of call.

    Attributes:
        case: of `sdpa`, or of what `prepare` makes of it.
        options: arguments of `sdpa` beside the case's.
        padding: with a bool mask of padded keys.
        prepare: makes the call of a case on a device, where it isn't one of `sdpa`; else None.
    """

    name: str
    case: Case
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    padding: bool = False
    prepare: Callable[[Case, torch.device], Call] | None = None

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of `sdpa`."""
        found = self.case.options | self.options
        if self.padding:
            keys = torch.arange(self.case.kv_length, device=device)
            found["attn_mask"] = (keys < self.case.kv_length * 9 // 10).view(1, 1, 1, -1)
        return found


def drawn(device: torch.device, *shape: int) -> torch.Tensor:
    """N(0, 1) in bfloat16."""
    return torch.randn(*shape, dtype=torch.bfloat16, device=device)


def packed(case: Case, device: torch.device) -> Call:
    """varlen_sdpa of `case.batch` sequences of different lengths, `case.q_length` on average."""
    tokens = case.batch * case.q_length
    ends = [tokens * i * (i + 1) // (case.batch * (case.batch + 1)) for i in range(case.batch + 1)]  # each longer than the one before
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    q, k, v = (drawn(device, tokens, heads, case.head_dim) for heads in (case.q_heads, case.kv_heads, case.kv_heads))
    return functools.partial(fp8attn.varlen_sdpa, q, k, v, cu_seqlens, cu_seqlens, is_causal=case.causal)


def cache_of(case: Case, device: torch.device) -> tuple[KVCache, PagedBatch, tuple[torch.Tensor, torch.Tensor]]:
    """A cache of `case.batch` sequences of `case.kv_length` tokens, the last `case.q_length` of which are new, and the
    keys and values of these. What the cache holds takes the same time whatever it is: zeros."""
    pages = case.kv_length // PAGE + 1
    cache = KVCache(case.batch, case.batch * pages, case.kv_heads, case.head_dim, device=device)
    table = torch.arange(case.batch * pages, dtype=torch.int32, device=device).view(case.batch, pages)
    lengths = torch.full((case.batch,), case.kv_length, dtype=torch.int32, device=device)
    key, value = (drawn(device, case.batch, case.kv_heads, case.q_length, case.head_dim) for _ in range(2))
    return cache, PagedBatch(table, lengths), (key, value)


def decode_step(case: Case, device: torch.device) -> Call:
    """paged_sdpa, which appends the new tokens first."""
    cache, batch, new = cache_of(case, device)
    query = drawn(device, case.batch, case.q_heads, case.q_length, case.head_dim)
    return functools.partial(fp8attn.paged_sdpa, query, cache, batch, new)


def attend(case: Case, device: torch.device) -> Call:
    """paged_sdpa, of tokens that were appended before."""
    cache, batch, _ = cache_of(case, device)
    query = drawn(device, case.batch, case.q_heads, case.q_length, case.head_dim)
    return functools.partial(fp8attn.paged_sdpa, query, cache, batch)


def append(case: Case, device: torch.device) -> Call:
    """KVCache.append."""
    cache, batch, new = cache_of(case, device)
    return functools.partial(cache.append, *new, batch)


DECODE = Case("GQA 32/8 1 of 4000 B8 D128", 8, 32, 8, 1, 4000, 128, 128, False)

KINDS = (
    Kind("Flux 4608", FLUX),
    Kind("Flux 4608 LSE", FLUX, {"return_lse": True}),
    Kind("Flux 4608 PRECISE", FLUX, {"recipe": PRECISE}),
    Kind("Flux 4608 padding", FLUX, padding=True),
    Kind("ViT-L 577", square("ViT-L 577 B8 H16 D64", 8, 16, 577, 64)),
    Kind("GQA 6000 causal", square("GQA 32/8 6000 D128 causal", 1, 32, 6000, 128, True, 8)),
    Kind("D256 4096 causal", square("GQA 16/8 4096 D256 causal", 1, 16, 4096, 256, True, 8)),
    Kind("Wan 32760", square("Wan 32760 H12 D128", 1, 12, 32760, 128)),
    Kind("rotate=0 4096", square("H24 4096 D128", 1, 24, 4096, 128), {"recipe": Recipe(rotate=0)}),
    Kind("recent=256 8192", square("H16 8192 D128", 1, 16, 8192, 128), {"recipe": Recipe(recent=256)}),
    Kind("packed 8 x 1000", square("GQA 32/8 1000 B8 D128 causal", 8, 32, 1000, 128, True, 8), prepare=packed),
    Kind("decode step", DECODE, prepare=decode_step),
    Kind("decode, appended", DECODE, prepare=attend),
    Kind("append", DECODE, prepare=append),
)
"""Calls that models make; the lengths aren't powers of two."""


@dataclass(frozen=True)
class Overhead:
    """Microseconds of a kind of call. The CPU's are medians over all turns.

    Attributes:
        cpu_us: CPU time of a repeated call, without waiting for the GPU.
        new_length_us: CPU time of the first call of a length, kernels compiled.
        second_us: of the second one, which is recorded.
        eager_us, graph_us: of a call in a row of calls, launched one by one or in a CUDA graph.
        sdpa_cpu_us, sdpa_eager_us: the same of F.scaled_dot_product_attention in bfloat16.

    Of calls that aren't sdpa's, new_length_us, second_us, sdpa_cpu_us and sdpa_eager_us are None.
    """

    kind: Kind
    cpu_us: float
    new_length_us: float | None
    second_us: float | None
    eager_us: float
    graph_us: float
    sdpa_cpu_us: float | None
    sdpa_eager_us: float | None

    @property
    def of_launching(self) -> float:
        """Eager time over the larger of the graph's time and 40 us: 1 if launching costs nothing."""
        return self.eager_us / max(self.graph_us, 40.0)

    def record(self) -> dict[str, Any]:
        """One flat JSON object."""
        times = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "kind"}
        return {"kind": self.kind.name, **self.kind.case.record(), **times}


def warm(call: Callable[[], object]) -> None:
    """Make the calls before those that are repeated: the first one compiles, the second one is recorded."""
    for _ in range(3):
        call()


def cpu_us(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """The CPU time of a repeated call, in us: the mean of CALLS calls.

    Args:
        wait: waits until the GPU is idle.
    """
    warm(call)
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    found = (time.perf_counter() - start) * 1e6 / CALLS
    wait()
    return found


@dataclass(frozen=True)
class CpuSamples:
    """CPU times of a kind of call, in us, one or more of each turn: repeated, `F.scaled_dot_product_attention`'s, the
    first and the second calls of lengths."""

    repeated: list[float] = dataclasses.field(default_factory=list)
    sdpa: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    second: list[float] = dataclasses.field(default_factory=list)

    def take(self, kind: Kind, turn: int, device: torch.device, wait: Callable[[], None]) -> None:
        """Measure a turn. Turns have different lengths."""
        if kind.prepare is not None:
            call = kind.prepare(kind.case, device)
            self.repeated.append(cpu_us(call, wait))
            return
        arguments = kind.arguments(device)
        tensors = Problem.of(kind.case, "normal", device, rotate=False).sets[0]
        self.repeated.append(cpu_us(functools.partial(fp8attn.sdpa, *tensors, **arguments), wait))
        self.sdpa.append(cpu_us(functools.partial(F.scaled_dot_product_attention, *tensors, **sdpa_arguments(arguments)), wait))
        problems = []  # all before the first call: the CPU draws small ones, and finds nothing of fp8attn in its caches then
        for i in range(turn * (1 + NEW_LENGTHS), (turn + 1) * (1 + NEW_LENGTHS)):
            shorter = [x - STEP * (i + 1) if x == kind.case.kv_length else x for x in (kind.case.q_length, kind.case.kv_length)]
            case = dataclasses.replace(kind.case, q_length=shorter[0], kv_length=shorter[1])
            one = dataclasses.replace(kind, case=case)
            problems.append((Problem.of(case, "normal", device, rotate=False).sets[0], one.arguments(device)))
        for i, ((q, k, v), arguments) in enumerate(problems):
            for samples in (self.first, self.second):
                wait()
                start = time.perf_counter()
                fp8attn.sdpa(q, k, v, **arguments)
                if i > 0:
                    samples.append((time.perf_counter() - start) * 1e6)
        wait()


def sdpa_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of fp8attn.sdpa's keyword arguments that F.scaled_dot_product_attention has."""
    return {name: x for name, x in arguments.items() if name in ("attn_mask", "is_causal", "enable_gqa")}


def measure_cpu(kinds: Sequence[Kind], turns: int, device: torch.device, tick: Tick = no_tick) -> list[CpuSamples]:
    """CPU times of kinds of calls, which take turns: a machine's CPU may be slow for seconds.

    Args:
        tick: called for every turn of a kind, which counts as 1.
    """
    found = [CpuSamples() for _ in kinds]
    for turn in range(turns):
        for kind, samples in zip(kinds, found, strict=True):
            samples.take(kind, turn, device, functools.partial(torch.cuda.synchronize, device))
            tick(f"{kind.name}, round {turn + 1} of {turns}", 1)
    return found


def measure(kind: Kind, cpu: CpuSamples, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> Overhead:
    """All times of a kind of call.

    Args:
        tick: called for every turn, which counts as 1; there are three in a round.
    """
    repeated = statistics.median(cpu.repeated)
    if kind.prepare is not None:
        call = kind.prepare(kind.case, device)
        warm(call)
        eager = time_all({"eager": lambda i: call()}, 1, dataclasses.replace(protocol, launch="eager"), device, tick)
        graph = time_all({"graph": lambda i: call()}, 1, protocol, device, tick)
        return Overhead(kind, repeated, None, None, eager["eager"].timing.p50_us, graph["graph"].timing.p50_us, None, None)

    problem = Problem.of(kind.case, "normal", device, rotate=True)
    arguments = kind.arguments(device)
    for_sdpa, sets = sdpa_arguments(arguments), len(problem.sets)

    def ours(i: int) -> Any:
        return fp8attn.sdpa(*problem.sets[i % sets], **arguments)

    def theirs(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*problem.sets[i % sets], **for_sdpa)

    for run in (ours, theirs):
        warm(functools.partial(run, 0))
    eager = time_all({"eager": ours, "SDPA, eager": theirs}, sets, dataclasses.replace(protocol, launch="eager"), device, tick)
    graph = time_all({"graph": ours}, sets, protocol, device, tick)
    first, second, sdpa = (statistics.median(samples) for samples in (cpu.first, cpu.second, cpu.sdpa))
    return Overhead(
        kind, repeated, first, second, eager["eager"].timing.p50_us, graph["graph"].timing.p50_us, sdpa, eager["SDPA, eager"].timing.p50_us
    )


def table(results: Sequence[Overhead]) -> Sheet:
    """A row for every kind of call."""
    headers = ("CPU", "new length", "second", "eager", "graph", "SDPA CPU", "SDPA eager", "× SDPA")
    made = report.table_of(
        "Calls, µs", ("call",), headers,
        "CPU: of a repeated call. new length: the first call of a length, on the CPU, kernels compiled. second: the second one."
        " × SDPA: its eager time over ours.",
        optional=("SDPA CPU", "graph"),
    )  # fmt: skip
    for one in results:
        times = (one.cpu_us, one.new_length_us, one.second_us, one.eager_us, one.graph_us, one.sdpa_cpu_us, one.sdpa_eager_us)
        ratio = None if one.sdpa_eager_us is None else one.sdpa_eager_us / one.eager_us
        made.add_row(one.kind.name, *map(report.us_of, times), report.number_of(ratio, ".2f"))
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns that every row gets (default: %(default)s)")
    parser.add_argument("--milliseconds", type=more_than_zero, default=20.0, help="length of a turn (default: %(default)s)")
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    kinds = command_line.chosen(arguments.case, KINDS, "--case")
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    protocol, about = Protocol(arguments.rounds, arguments.milliseconds, arguments.milliseconds), machine(device)

    def measured(kind: Kind, cpu: CpuSamples, tick: Tick) -> list[Overhead]:
        return [measure(kind, cpu, protocol, device, tick)]

    with report.progress("overhead") as bar:
        task = bar.add_task("the CPU's time", total=arguments.rounds * len(kinds))
        cpu = measure_cpu(kinds, arguments.rounds, device, bar.ticks(task, "the CPU's time, "))
        works = [(kind.name, functools.partial(measured, kind, its)) for kind, its in zip(kinds, cpu, strict=True)]
        results = report.measure_each(bar, f"calls: {len(kinds)}", works, 3 * protocol.rounds, arguments.json, about)
    report.console().print(table(results))
    return 0
