"""Context parallelism beside one GPU, and beside bf16: time, scaling, bytes on the wire, overlap; and what a model of it expects of more
ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn.distributed import context_parallel, gathered, shard_lengths
from fp8attn.distributed.sharding import Sharding, Spans, spans_of

from . import command_line, report, trace
from .cases import Case, inputs, square
from .command_line import UsageError, at_least, more_than_zero
from .machine import machine
from .progress import Progress
from .sheet import Sheet
from .timing import in_turn

HELP = "attention of sequences that are sharded over GPUs: time beside one GPU and bf16, bytes on the wire, overlap"

ON_GPUS = tuple(
    square(f"H{heads} D128 {'causal' if causal else 'full'} {length // 1024}k", 1, heads, length, 128, causal)
    for length in (65536, 131072)
    for heads in (24, 40)
    for causal in (False, True)
)
LONG = tuple(
    square(f"H24 D128 {'causal' if causal else 'full'} {length // 1024}k", 1, 24, length, 128, causal)
    for length in (262144, 1048576)
    for causal in (False, True)
)
"""Cases that --case chooses, and that aren't timed otherwise."""

ON_CPU = tuple(square(f"tiny {'causal' if causal else 'full'} 256", 1, 2, 256, 32, causal) for causal in (False, True))

ONE, ONE_BF16 = "fp8attn, one GPU", "bf16, one GPU"
AUTO = "fp8attn auto"
RING, ULYSSES, ALL_GATHER = "fp8attn ring", "fp8attn Ulysses", "fp8attn all-gather"
MESH = "fp8attn 2-D"
RING_BF16, ULYSSES_BF16 = "bf16 ring", "bf16 Ulysses"
ROWS = (ONE, AUTO, RING, ULYSSES, MESH, ALL_GATHER, ONE_BF16, RING_BF16, ULYSSES_BF16)
"""Rows of the table. In those of one GPU, each GPU computes the whole."""

OF_ONE = (ONE, ONE_BF16)
OWN: dict[str, context_parallel.Mode] = {AUTO: "auto", RING: "ring", ULYSSES: "ulysses", MESH: "ring", ALL_GATHER: "all_gather"}
"""Rows of `context_parallel_sdpa` and their modes; MESH's is the outer one."""

LEAD_IN_US, TURN_US = 300e3, 350e3
"""A sample is the mean of calls back to back that take TURN_US, behind such calls that take LEAD_IN_US. So a row's time
doesn't depend on how many of its calls fit between two pauses: for 0.1 s behind a pause, a power-capped card's clock is
5 to 15 % lower. All timed calls are launched while the GPU works, as a model's are."""

TRACED_CALLS = 8
"""Calls that a trace is the mean of, at most."""

LONG_FLOPS = 10**15
"""FLOPs of a rank, about 1 s, from which a sample is one call, and the call that is checked is the only warm-up."""

INNER = 2
"""Ranks of Ulysses in the mesh; the others are the ring's."""

SAMPLED_ROWS = 128
"""Query rows, the last ones of the first rank, whose error is measured."""

SIMULATED = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks of the simulation."""

INSIDE = 8
"""Ranks of one machine in the simulation."""

PATIENCE = 900.0
"""Seconds that the parent waits for a case: kernels are compiled in the first one."""


@dataclass(frozen=True)
class Shard:
    """A case on one rank.

    Attributes:
        mesh: of two dimensions, for MESH; None if the ranks make none.
        q, k, v: (B, H, tokens of this rank, D) in bfloat16.
        whole: of the first rank, the whole tensors; else None.
    """

    case: Case
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    sharding: Sharding
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: Spans
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def backend(self) -> Any:
        """Of fp8attn: its kernels on a GPU, their model on a CPU."""
        return "auto" if self.q.device.type == "cuda" else "modelled"


def sharding_of(case: Case) -> Sharding:
    """Zig-zag for causal cases, which balances the work."""
    return "zigzag" if case.causal else "contiguous"


def has_mesh(ranks: int) -> bool:
    """Whether ranks are a ring, of more than one, of groups of INNER."""
    return ranks % INNER == 0 and ranks > INNER


def mesh_of(ranks: int, device: torch.device) -> DeviceMesh | None:
    """INNER ranks of Ulysses inside of a ring, or None: `has_mesh`."""
    if not has_mesh(ranks):
        return None
    return init_device_mesh(device.type, (ranks // INNER, INNER), mesh_dim_names=("ring", "ulysses"))


def shard_of(case: Case, group: dist.ProcessGroup, device: torch.device, mesh: DeviceMesh | None = None) -> Shard:
    """A rank's part of a case. Every rank draws the whole, with the same seed."""
    whole = inputs(case, "normal", device)
    sharding = sharding_of(case)
    spans = spans_of(shard_lengths(case.q_length, group.size(), sharding), sharding)[group.rank()]
    q, k, v = (torch.cat([x[:, :, span.first : span.first + span.length] for span in spans], 2) for x in whole)
    return Shard(case, group, mesh, sharding, q, k, v, spans, whole)


@contextlib.contextmanager
def _bf16_backend(device: torch.device) -> Iterator[None]:
    """cuDNN's attention on a GPU."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else contextlib.nullcontext():
        yield


def bf16_ring(shard: Shard) -> torch.Tensor:
    """torch's context parallelism, with cuDNN's attention on a GPU."""
    from torch.distributed.tensor.experimental import _attention as torch_ring

    aten = torch.ops.aten
    torch_ring._cp_options.enable_load_balance = shard.case.causal  # head-tail order is zig-zag order
    ring = torch_ring._templated_ring_attention
    if shard.q.device.type == "cuda":
        return ring(
            shard.group, 2, aten._scaled_dot_product_cudnn_attention, query=shard.q, key=shard.k, value=shard.v, is_causal=shard.case.causal,
            attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, return_debug_mask=False,
        )[0]  # fmt: skip
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    return ring(shard.group, 2, cpu, query=shard.q, key=shard.k, value=shard.v, is_causal=shard.case.causal)[0]


def bf16_ulysses(shard: Shard) -> torch.Tensor:
    """Tokens traded for heads in bfloat16, one all-to-all for q, k and v together, and one for the output. Tokens stay in the order of the ranks
    (for its time, and not for its answer, in causal cases)."""
    n = shard.group.size()

    def traded(x: torch.Tensor) -> torch.Tensor:
        """(n, …) with one entry for each rank, exchanged."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=shard.group)
        return out

    batch, heads, tokens, dim = shard.q.shape
    sent = torch.stack((shard.q, shard.k, shard.v)).view(3, batch, n, heads // n, tokens, dim).movedim(2, 0).contiguous()
    q, k, v = traded(sent).movedim(0, 3).reshape(3, batch, heads // n, n * tokens, dim).unbind(0)
    with _bf16_backend(q.device):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=shard.case.causal)
    back = traded(out.view(batch, heads // n, n, tokens, dim).movedim(2, 0).contiguous())
    return back.movedim(0, 1).reshape(batch, heads, tokens, dim)


def attention_of(row: str, shard: Shard) -> Callable[[], torch.Tensor]:
    """A row's call on this rank."""
    options: dict[str, Any] = {"is_causal": shard.case.causal}
    if row == ONE:
        return lambda: fp8attn.sdpa(*shard.whole, **options, backend=shard.backend)
    if row == ONE_BF16:

        def one_bf16() -> torch.Tensor:
            with _bf16_backend(shard.q.device):
                return F.scaled_dot_product_attention(*shard.whole, **options)

        return one_bf16
    if row in OWN:
        where: dict[str, Any] = {"mesh": shard.mesh} if row == MESH else {"group": shard.group, "mode": OWN[row]}
        return lambda: context_parallel.context_parallel_sdpa(
            shard.q, shard.k, shard.v, **where, sharding=shard.sharding, backend=shard.backend, **options
        )  # type: ignore[return-value]
    return (lambda: bf16_ring(shard)) if row == RING_BF16 else (lambda: bf16_ulysses(shard))


def unsupported_row(row: str, case: Case, ranks: int) -> str | None:
    """Why a row can't run a case, or None."""
    if row == MESH and not has_mesh(ranks):
        return f"{ranks} ranks aren't a ring of groups of {INNER}"
    if "Ulysses" in row and case.q_heads % ranks:
        return f"{case.q_heads} heads aren't a multiple of {ranks} ranks"
    if row in (RING_BF16, ULYSSES_BF16) and case.q_length % (2 * ranks):
        return f"{case.q_length} tokens aren't a multiple of {2 * ranks}"
    return None


class Counted:
    """Replaces the transfers of fp8attn.distributed inside `with`.

    Attributes:
        sent: bytes that this rank sent.
        sizes: of the buffers of the ring that ran last, in the order in which they came.
    """

    def __init__(self, silent: bool = False) -> None:
        """`silent`: a ring's buffers aren't passed on; every step attends to this rank's own."""
        self.sent, self._silent = 0, silent
        self.sizes: list[int] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Counted:
        whole_ring, gather, exchange = context_parallel.Ring, context_parallel.start_gather, context_parallel.exchange
        gather_slots = gathered.start_gather_slots

        def ring(own: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Iterable[torch.Tensor]:
            self.sent += sum(sizes[:-1])
            self.sizes = [*sizes]
            return [own] * len(sizes) if self._silent else whole_ring(own, sizes, group)

        def start_gather(sent: torch.Tensor, size: int, group: dist.ProcessGroup) -> Any:
            self.sent += size * (group.size() - 1)
            return gather(sent, size, group)

        def exchanged(sent: torch.Tensor, sizes: Sequence[int], received_sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
            self.sent += sum(size for rank, size in enumerate(sizes) if rank != group.rank())
            return exchange(sent, sizes, received_sizes, group)

        def start_gather_slots(slots: torch.Tensor, group: dist.ProcessGroup) -> Any:
            self.sent += slots[0].nbytes * (group.size() - 1)
            return gather_slots(slots, group)

        replaced: dict[Any, dict[str, Any]] = {
            context_parallel: {"Ring": ring, "start_gather": start_gather, "exchange": exchanged},
            gathered: {"start_gather_slots": start_gather_slots},
        }
        for module, functions in replaced.items():
            self._patches.enter_context(mock.patch.multiple(module, **functions))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()


def bf16_bytes(row: str, shard: Shard) -> int:
    """Bytes that a rank sends in a bf16 row."""
    n = shard.group.size()
    kv, q = shard.k.nbytes + shard.v.nbytes, shard.q.nbytes
    return kv * (n - 1) if row == RING_BF16 else (kv + 2 * q) * (n - 1) // n


@dataclass(frozen=True)
class Turn:
    """How many calls a sample has.

    Attributes:
        lead_in: calls before it.
        calls: that are timed.
    """

    lead_in: int = 0
    calls: int = 1

    @classmethod
    def of(cls, us: float) -> Turn:
        """For calls that take so many microseconds."""
        return cls(math.ceil(LEAD_IN_US / us), math.ceil(TURN_US / us))


def sample_us(call: Callable[[], object], device: torch.device, turn: Turn) -> float:
    """Microseconds of a call, the mean of some back to back; one on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(turn.lead_in + turn.calls):
        if i == turn.lead_in:
            start_event.record()
        call()
    end_event.record()
    torch.cuda.synchronize(device)
    return start_event.elapsed_time(end_event) * 1e3 / turn.calls


def error_of(out: torch.Tensor, shard: Shard) -> float:
    """Relative L2 error of this rank's last rows against exact attention."""
    last = shard.spans[-1]
    count = min(SAMPLED_ROWS, last.length)
    end = last.first + last.length
    q, k, v = shard.whole
    keys = end if shard.case.causal else k.shape[2]
    group = q.shape[1] // k.shape[1]
    wrong = exact = 0.0
    for head in range(q.shape[1]):  # one by one: float32 copies of all keys of a long sequence don't fit
        k_head, v_head = (x[:, head // group, None, :keys] for x in (k, v))
        expected = fp8attn.reference_sdpa(
            q[:, head, None, end - count : end], k_head, v_head, is_causal=shard.case.causal, causal_alignment="bottom_right", out_dtype=torch.float32
        )
        wrong += float((out[:, head, None, -count:].float() - expected).square().sum())
        exact += float(expected.square().sum())
    return (wrong / exact) ** 0.5


@dataclass(frozen=True)
class Result:
    """One row's case.

    Attributes:
        ranks: number of ranks.
        us: the median over rounds of the slowest rank's time; of one GPU, of the slowest GPU's.
        spread: by how much the longest round exceeds the shortest, over the shortest.
        idle_us: the same of a call that begins when the GPUs are idle, so that they wait for the host.
        sent: bytes that a rank sends in a call.
        attention_us: of the ring without its transfers.
        transfer_us: of the ring's transfers alone.
        relative_l2: error of the last rows of the sequence's first rank.
        refused: why it wasn't timed.
    """

    case: Case
    row: str
    ranks: int
    us: float | None = None
    spread: float | None = None
    idle_us: float | None = None
    sent: int | None = None
    attention_us: float | None = None
    transfer_us: float | None = None
    relative_l2: float | None = None
    refused: str | None = None

    @property
    def overlap(self) -> float | None:
        """The fraction of the transfers' time that attention hid."""
        if self.us is None or self.attention_us is None or not self.transfer_us:
            return None
        return min(max((self.attention_us + self.transfer_us - self.us) / self.transfer_us, 0.0), 1.0)

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in ("case", "row")}
        return {**self.case.record(), "backend": self.row, **fields, "overlap": self.overlap}


def slowest_us(call: Callable[[], object], device: torch.device, turn: Turn, group: dist.ProcessGroup) -> float:
    """The largest of all ranks' `sample_us`, which they take together."""
    dist.barrier(group=group)
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, sample_us(call, device, turn), group=group)
    return max(found)


def turn_of(call: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> Turn:
    """The turn of a call that ranks make together, by its second run."""
    call()
    return Turn.of(slowest_us(call, device, Turn(), group))


class Request(NamedTuple):
    """What the ranks measure.

    Attributes:
        rounds: turns that every row gets.
        trace: whether fp8attn's rows are traced, too.
    """

    cases: Sequence[Case]
    rows: Sequence[str]
    rounds: int
    trace: bool = False


class Traced(NamedTuple):
    """Where a row's time goes on one rank: microseconds of every part of trace.ORDER."""

    row: str
    rank: int
    us: dict[str, float]


def traces_of(case: Case, rows: Sequence[str], group: dist.ProcessGroup, mesh: DeviceMesh | None, device: torch.device) -> list[Traced]:
    """The traces of fp8attn's rows on all ranks, for the first rank. Every rank of the group runs this."""
    shard, found = shard_of(case, group, device, mesh), []
    for row in rows:
        if (row not in OWN and row != ONE) or unsupported_row(row, case, group.size()) is not None:
            continue
        call = attention_of(row, shard)
        turn = turn_of(call, device, group)
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, trace.traced(call, turn.lead_in, min(turn.calls, TRACED_CALLS)), group=group)
        found += [Traced(row, rank, us) for rank, us in enumerate(parts)]
    return found


def trace_table(case: Case, traces: Sequence[Traced]) -> Sheet:
    """Where the time of fp8attn's rows goes."""
    made = report.table_of(
        f"Where the time goes, {case.name}", ("row", "rank"), (*trace.ORDER, "call"),
        "Microseconds of a call by the profiler. Where several kernels run, the time counts for the first of the columns: transfers are what"
        " nothing hides, and what a rank waits for another one.",
    )  # fmt: skip
    for one in traces:
        made.add_row(one.row, str(one.rank), *(report.us_of(one.us[part]) for part in trace.ORDER), report.us_of(sum(one.us.values())))
    return made


def measured(case: Case, rows: Sequence[str], rounds: int, group: dist.ProcessGroup, mesh: DeviceMesh | None, device: torch.device) -> list[Result]:
    """All rows of a case, in turns. Every rank of the group runs this.

    Each GPU computes the rows of one GPU alone, at the same time as the others: cards differ by some percent, a ring is
    as fast as the slowest, and so is this.
    """
    shard, ranks = shard_of(case, group, device, mesh), group.size()
    is_long = case.flops >= LONG_FLOPS * ranks
    refused = {row: unsupported_row(row, case, ranks) for row in rows}
    turns = [row for row in rows if refused[row] is None]
    runs = {row: attention_of(row, shard) for row in turns}
    errors: dict[str, float] = {}
    sent: dict[str, int] = {}
    for row in turns:
        with Counted() as counted:
            out = runs[row]()
        sent[row] = counted.sent if row in OWN else 0 if row in OF_ONE else bf16_bytes(row, shard)
        of_last = out[:, :, : shard.spans[-1].first + shard.spans[-1].length] if row in OF_ONE else out
        if not (row == ULYSSES_BF16 and case.causal):
            errors[row] = error_of(of_last, shard)
        del out, of_last
    parts = {"attention": _without_transfers(runs[RING]), "transfer": _transfers(runs[RING], shard)} if RING in turns else {}
    turn_of_name = {name: Turn() if is_long else turn_of(call, device, group) for name, call in (runs | parts).items()}
    samples: dict[str, list[float]] = {name: [] for name in turn_of_name}
    idle: dict[str, list[float]] = {row: [] for row in turns}
    for i in range(rounds):
        for row in in_turn(turns, i):
            idle[row].append(slowest_us(runs[row], device, Turn(), group))
            samples[row].append(idle[row][-1] if is_long else slowest_us(runs[row], device, turn_of_name[row], group))
        for name, call in parts.items():
            samples[name].append(slowest_us(call, device, turn_of_name[name], group))
    found = []
    for row in rows:
        if refused[row] is not None:
            found.append(Result(case, row, ranks, refused=refused[row]))
            continue
        attention, transfer = (statistics.median(samples[name]) if row == RING else None for name in ("attention", "transfer"))
        count, us, idle_us = 1 if row in OF_ONE else ranks, statistics.median(samples[row]), statistics.median(idle[row])
        spread = max(samples[row]) / min(samples[row]) - 1
        found.append(Result(case, row, count, us, spread, idle_us, sent.get(row), attention, transfer, errors.get(row)))
    return found


def _without_transfers(ring: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        with Counted(silent=True):
            ring()

    return call


def _transfers(ring: Callable[[], object], shard: Shard) -> Callable[[], None]:
    """The ring's transfers alone, with buffers of its size."""
    with Counted(silent=True) as counted:
        ring()
    buffer = shard.q.new_empty(counted.sizes[0], dtype=torch.uint8)

    def call() -> None:
        for _ in context_parallel.Ring(buffer, counted.sizes, shard.group):
            pass

    return call


def simulated_us(case: Case, ranks: int, one_us: float, bytes_per_s: float, latency_us: float = 20.0, half_bytes: bool = True) -> float:
    """Microseconds of a ring of many ranks, by a model.

    Attention takes 1 / ranks² of one GPU's time in each of `ranks` steps, and a step takes as long as the longer of attention and of the
    transfer of the next shard. The first step's transfer is hidden, too; the last step has none.

    Args:
        one_us: of the case on one GPU.
        bytes_per_s: of the link from one rank to the next.
        latency_us: of a step's launches.
        half_bytes: keys and values travel in FP8, and not in bfloat16.
    """
    tokens = case.kv_length / ranks
    shard_bytes = case.batch * case.kv_heads * tokens * (case.head_dim + case.value_dim) * (1 if half_bytes else 2)
    transfer, attention = shard_bytes / bytes_per_s * 1e6, one_us / ranks**2
    return (ranks - 1) * (max(attention, transfer) + latency_us) + attention


def simulated_2d_us(case: Case, ranks: int, one_us: float, link: float, network: float, latency_us: float = 20.0) -> float:
    """Microseconds of Ulysses inside of machines of INSIDE ranks, and a ring between the machines, by a model.

    A step of the ring passes as many bytes on as `simulated_us` does, and has INSIDE times as much attention.

    Args:
        link, network: bytes per second of a rank inside of a machine, and between machines.
    """
    machines, tokens = ranks // INSIDE, case.q_length / ranks
    rows = case.batch * tokens
    traded = rows * (case.q_heads * (case.head_dim + 2 * case.value_dim) + case.kv_heads * (case.head_dim + case.value_dim))
    transfer = case.batch * case.kv_heads * tokens * (case.head_dim + case.value_dim) / network * 1e6
    attention = one_us / ranks / machines
    return traded * (INSIDE - 1) / INSIDE / link * 1e6 + (machines - 1) * (max(attention, transfer) + latency_us) + attention


def rank_main(rank: int, ranks: int, port: int, request: Request, connection: Connection | None) -> None:
    """A rank's process: measures all cases, and the first rank sends the results."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    try:
        dist.init_process_group("nccl" if gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        group = dist.group.WORLD
        assert group is not None
        mesh = mesh_of(ranks, device) if MESH in request.rows else None
        for case in request.cases:
            found = measured(case, request.rows, request.rounds, group, mesh, device)
            traces = traces_of(case, request.rows, group, mesh, device) if request.trace else []
            if connection is not None:
                connection.send((found, traces))
            if gpu:
                torch.cuda.empty_cache()
        dist.destroy_process_group()
    except Exception:
        if connection is not None:
            connection.send(traceback.format_exc())
        raise


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def results_of(request: Request, ranks: int, bar: Progress) -> Iterator[tuple[list[Result], list[Traced]]]:
    """The results and traces of every case, from processes that are started for them.

    Raises:
        RuntimeError: a rank failed.
    """
    context, port = multiprocessing.get_context("spawn"), free_port()
    mine, theirs = context.Pipe()
    processes = [context.Process(target=rank_main, args=(rank, ranks, port, request, theirs if rank == 0 else None)) for rank in range(ranks)]
    task = bar.add_task(f"cases: {len(request.cases)}, ranks: {ranks}", total=len(request.cases))
    try:
        for process in processes:
            process.start()
        for case in request.cases:
            bar.update(task, description=case.name)
            if not mine.poll(PATIENCE):
                raise RuntimeError(f"the ranks have said nothing for {PATIENCE:.0f} s")
            found = mine.recv()
            if isinstance(found, str):
                raise RuntimeError(found)
            yield found
            bar.advance(task)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _over(a: float | None, b: float | None, form: str = ".2f") -> str:
    return "–" if a is None or b is None else format(a / b, form)


def table(results: Sequence[Result]) -> Sheet:
    """A row for each row of a case."""
    case, by = results[0].case, {result.row: result for result in results}
    ranks = max(result.ranks for result in results)
    headers = ("µs", "spread", "× one GPU", "× bf16 ring", "µs, idle before", "MB sent", "overlap", "relative L2")
    made = report.table_of(
        f"{case.name}, {ranks} ranks", ("row",), headers,
        "Medians of the slowest rank. Spread: by how much the longest round exceeds the shortest. × one GPU: the time of fp8attn on one GPU over"
        " this one. × bf16 ring: its time over this one."
        " Idle before: a call that begins when the GPUs are idle. MB sent: by one rank in a call. overlap: the share of the ring's transfers that"
        " attention hides.",
        optional=("overlap",),
    )  # fmt: skip
    one, ring = (by[row].us if row in by else None for row in (ONE, RING_BF16))
    for result in results:
        megabytes = None if result.sent is None else result.sent / 1e6
        made.add_row(
            result.row, report.us_of(result.us), report.number_of(result.spread, ".1%"), _over(one, result.us), _over(ring, result.us),
            report.us_of(result.idle_us), report.number_of(megabytes, ".2f"), report.number_of(result.overlap, ".0%"),
            report.number_of(result.relative_l2, ".4f"),
        )  # fmt: skip
    return made


def link_of(ring: Result) -> float | None:
    """Bytes per second that the ring's transfers alone reached; None if they weren't timed."""
    if not ring.transfer_us:
        return None
    case, steps = ring.case, max(ring.ranks - 1, 1)
    shard_bytes = case.batch * case.kv_heads * case.kv_length / ring.ranks * (case.head_dim + case.value_dim)
    return shard_bytes * steps / ring.transfer_us * 1e6


def simulation(results: Sequence[Result], network: float) -> Sheet | None:
    """The ring of 2 to 64 ranks, from what was measured on one GPU and on the link between two; None if it wasn't.

    Args:
        network: bytes per second between machines, for more ranks than one machine has.
    """
    by = {result.row: result for result in results}
    one, ring, bf16 = by.get(ONE), by.get(RING), by.get(ONE_BF16)
    if one is None or ring is None or one.us is None or not ring.transfer_us or not ring.sent:
        return None
    case, link = one.case, link_of(ring)
    assert link is not None
    headers = ("µs, link", "× one GPU", "µs, network", "× one GPU, network", "bf16 µs, network", "µs, 2-D", "× one GPU, 2-D")
    made = report.table_of(
        f"Simulated ring, {case.name}", ("ranks",), headers,
        f"A model, not a measurement: the measured link of {link / 1e9:.1f} GB/s between all ranks, or a network of {network / 1e9:.1f} GB/s."
        f" 2-D: Ulysses inside of machines of {INSIDE} ranks, a ring between them.",
    )  # fmt: skip
    for ranks in SIMULATED:
        near, far = simulated_us(case, ranks, one.us, link), simulated_us(case, ranks, one.us, network)
        other = None if bf16 is None or bf16.us is None else simulated_us(case, ranks, bf16.us, network, half_bytes=False)
        both = simulated_2d_us(case, ranks, one.us, link, network) if ranks > INSIDE else None
        cells = [report.us_of(near), _over(one.us, near, ".1f"), report.us_of(far), _over(one.us, far, ".1f"), report.us_of(other)]
        made.add_row(str(ranks), *cells, report.us_of(both), _over(one.us, both, ".1f"))
    return made


def scaling(results: Sequence[Sequence[Result]]) -> Sheet | None:
    """The rows of fp8attn over numbers of ranks, beside the simulated ring; None for fewer than two numbers, or without times of one GPU.

    Args:
        results: of one case, a sequence for each number of ranks.
    """
    one = next((result.us for some in results for result in some if result.row == ONE and result.us is not None), None)
    if one is None or len(results) < 2:
        return None
    case = results[0][0].case
    made = report.table_of(
        f"Scaling, {case.name}", ("row", "ranks"), ("µs", "× one GPU", "efficiency", "× one GPU, simulated"),
        "× one GPU: its time over this one. Efficiency: that over the number of ranks. Simulated: a ring by the model above, with the link that"
        " was measured for these ranks.",
        optional=("× one GPU, simulated",),
    )  # fmt: skip
    for row in OWN:
        for some in results:
            result = next((result for result in some if result.row == row and result.us is not None), None)
            if result is None or result.us is None:
                continue
            link = link_of(result)
            expected = None if link is None else simulated_us(case, result.ranks, one, link)
            cells = (report.us_of(result.us), _over(one, result.us), _over(one, result.us * result.ranks, ".0%"), _over(one, expected))
            made.add_row(row, str(result.ranks), *cells)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    command_line.add_peer(parser)
    parser.add_argument(
        "--ranks", type=at_least(2), nargs="+", metavar="N", help="numbers of processes, each timed (default: the GPUs, 2 without a GPU)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns that every row gets (default: %(default)s)")
    parser.add_argument(
        "--network", type=more_than_zero, default=50.0, metavar="GB/S", help="link between machines in the simulation (default: %(default)s)"
    )
    parser.add_argument("--trace", action="store_true", help="also show what the GPUs do in a call, by the profiler; needs GPUs")
    command_line.add_json(parser)


def _itself(row: str) -> str:
    return row


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    of_device = ON_GPUS if gpus else ON_CPU
    works = command_line.chosen(arguments.case, of_device + LONG * bool(gpus), "--case") if arguments.case else of_device
    rows = command_line.chosen(arguments.peer, ROWS, "--peer", "row", _itself)
    numbers = sorted(set(arguments.ranks or [max(gpus, 2)]))
    if gpus and numbers[-1] > gpus:
        raise UsageError(f"--ranks has {numbers[-1]}; there are {gpus} GPUs, and each rank needs one")
    about = machine(device)
    found: dict[Case, list[list[Result]]] = {case: [] for case in works}
    traced: list[Sheet] = []
    with report.progress("distributed") as bar:
        for i, ranks in enumerate(numbers):
            of_ranks = [row for row in rows if i == 0 or row not in OF_ONE]
            for results, traces in results_of(Request(works, of_ranks, arguments.rounds, arguments.trace and bool(gpus)), ranks, bar):
                traced += [trace_table(results[0].case, traces)] if traces else []
                report.append(arguments.json, (report.json_line("distributed", result.record(), about) for result in results))
                found[results[0].case].append(results)
    for by_ranks in found.values():
        of_one = [result for result in by_ranks[0] if result.row in OF_ONE]
        for results in by_ranks:
            with_one = results if results is by_ranks[0] else [*of_one, *results]
            for made in (table(with_one), simulation(with_one, arguments.network * 1e9)):
                if made is not None:
                    report.console().print(made)
        if (made := scaling(by_ranks)) is not None:
            report.console().print(made)
    for made in traced:
        report.console().print(made)
    if not gpus:
        report.say("Without a GPU the ranks are processes on one CPU: errors and bytes mean what they say, times mean nothing.")
    return 0
