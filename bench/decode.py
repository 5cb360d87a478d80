"""Decoding from KV caches in pages that are shuffled, and prefill, beside FlashAttention-3 and PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fp8attn import KVCache, PagedBatch, PagedTensors, paged_sdpa, quantize, reference, sdpa
from fp8attn.cuda.prefill import Tiling
from fp8attn.cuda.run import prefill_from_pages
from fp8attn.device import device_of
from fp8attn.pages import PAGE, RECENT_QUERIES, PagedCall
from fp8attn.quantization import encode, scale_of
from fp8attn.recipe import DEFAULT_RECIPE

from . import adapters, command_line, report
from .command_line import NO_GPU, UsageError
from .errors import Bad, Errors
from .gates import Gates
from .machine import machine
from .peers import needs_gpu, needs_nothing
from .progress import Tick, no_tick
from .sheet import Sheet
from .timing import Protocol, Run, Timing, input_sets, time_all

HELP = "decoding from a paged KV cache: share of the memory's bandwidth, beside FlashAttention-3 and PyTorch"

PEAK_BYTES_PER_SECOND = 3.35e12
"""Of an H100 SXM's memory, by NVIDIA's data sheet."""

SEED = 46

CHECKED = 256
"""Queries of each sequence at most, the last ones, of which the error is told."""


@dataclass(frozen=True)
class DecodeCase:
    """One step of several sequences.

    Attributes:
        lengths: tokens of each sequence, those of the step included.
        window: keys before a query's own that it sees; -1: all.
        sinks: whether there is a logit per head beside each row's scores.
    """

    name: str
    lengths: tuple[int, ...]
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    queries: int = 1
    window: int = -1
    sinks: bool = False

    @property
    def is_prefill(self) -> bool:
        """Whether there are more queries than a cache keeps tokens for: their keys and values are given."""
        return self.queries > RECENT_QUERIES

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values, one each."""
        return 2 * sum(self.lengths) * self.kv_heads * self.dim

    @property
    def append_bytes(self) -> int:
        """Bytes that appending the queries' keys and values reads in bfloat16 and writes as codes."""
        return 2 * self.queries * len(self.lengths) * self.kv_heads * self.dim * 3


def ragged(count: int, least: int, most: int) -> tuple[int, ...]:
    """Different lengths, in random order."""
    step = (most - least) / (count - 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED)).tolist()
    return tuple(round(least + step * i) for i in order)


CASES = (
    DecodeCase("32 × 4k", (4096,) * 32),
    DecodeCase("1 × 32k", (32768,)),
    DecodeCase("1 × 128k", (131072,)),
    DecodeCase("1 × 1k", (1024,)),
    DecodeCase("64 ragged 0.2–12k", ragged(64, 200, 12000)),
    DecodeCase("128 × 2k 64/8", (2048,) * 128, q_heads=64),
    DecodeCase("32 × 4k 64/8 D64", (4096,) * 32, q_heads=64, dim=64),
    DecodeCase("16 × 4k 16/8 D256", (4096,) * 16, q_heads=16, dim=256),
    DecodeCase("32 × 4k 4 queries", (4096,) * 32, queries=4),
    DecodeCase("32 × 4k 16 queries", (4096,) * 32, queries=16),
    DecodeCase("1 × 32k 16 queries", (32768,), queries=16),
)


PREFILL = (
    DecodeCase("prefill 4 × 4k", (4096,) * 4, 16, 16, queries=4096),
    DecodeCase("prefill 16k", (16384,), 16, 16, queries=16384),
    DecodeCase("prefill 64k", (65536,), 16, 16, queries=65536),
    DecodeCase("prefill 128k", (131072,), 8, 8, queries=131072),
    DecodeCase("prefill 16k 32/8", (16384,), queries=16384),
    DecodeCase("prefill 16k D64", (16384,), 32, 32, 64, queries=16384),
    DecodeCase("prefill 16k D256", (16384,), 8, 8, 256, queries=16384),
    DecodeCase("chunk of 2k, 64k 32/8", (65536,), queries=2048),
    DecodeCase("prefill 4 × 4k 16/8", (4096,) * 4, 16, queries=4096),
    DecodeCase("8 chunks of 1k, 4k 32/8", (4096,) * 8, queries=1024),
    # turns of a chat
    DecodeCase("chunk of 100, 32k 32/8", (32768,), queries=100),
    DecodeCase("32 chunks of 100, 4k 32/8", (4096,) * 32, queries=100),
    # layers of Mistral 7B, Gemma 3 12B and gpt-oss
    DecodeCase("prefill 16k 32/8, window 4k", (16384,), queries=16384, window=4095),
    DecodeCase("prefill 16k 16/8 D256, window 1k", (16384,), 16, 8, 256, queries=16384, window=1023),
    DecodeCase("prefill 16k 64/8 D64, sinks", (16384,), 64, 8, 64, queries=16384, sinks=True),
    DecodeCase("prefill 16k 64/8 D64, window 128, sinks", (16384,), 64, 8, 64, queries=16384, window=127, sinks=True),
)


@dataclass(frozen=True)
class Inputs:
    """Queries (B, Hq, Sq, D) and a cache of bfloat16 pages (P, 128, Hkv, D), which FlashAttention-3 takes.

    Attributes:
        table: int32 (B, M): the numbers of each sequence's pages, shuffled.
        lengths: int32 (B).
        sinks: float32 (Hq,), or None.
    """

    case: DecodeCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, case: DecodeCase, device: torch.device, seed: int) -> Inputs:
        g = torch.Generator(device).manual_seed(seed)
        pages = [math.ceil(length / PAGE) for length in case.lengths]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

        numbers = torch.randperm(sum(pages), generator=g, device=device, dtype=torch.int32)
        table = torch.zeros(len(pages), max(pages) + 1, dtype=torch.int32, device=device)
        for row, part in enumerate(numbers.split(pages)):
            table[row, : len(part)] = part
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        q, shape = normal(len(pages), case.q_heads, case.queries, case.dim), (sum(pages), PAGE, case.kv_heads, case.dim)
        sinks = torch.linspace(-1, 1, case.q_heads, device=device) if case.sinks else None
        return cls(case, q, normal(*shape), normal(*shape), table, lengths, sinks)

    @property
    def window(self) -> tuple[int, int]:
        return self.case.window, 0

    @property
    def options(self) -> dict[str, Any]:
        """Those of fp8attn that say what queries attend to."""
        return {"window": self.window, "sinks": self.sinks}

    def sequence(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """Keys or values of one sequence: (1, Hkv, S, D)."""
        length = self.case.lengths[row]
        return x[self.table[row, : math.ceil(length / PAGE)].long()].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)

    def sequences(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values of all sequences, (B, Hkv, S, D).

        Raises:
            ValueError: lengths differ.
        """
        if len({*self.case.lengths}) > 1:
            raise ValueError("lengths differ")
        return torch.cat([self.sequence(x, row) for row in range(len(self.case.lengths))])

    def exact(self) -> torch.Tensor:
        """The exact answer of the last CHECKED queries, float32."""
        found, scoring = [], reference.Scoring(self.case.dim**-0.5, self.window, 0.0, self.sinks)
        for row in range(len(self.case.lengths)):
            k, v = (self.sequence(x, row) for x in (self.k, self.v))
            found.append(reference.attention(self.q[row : row + 1, :, -CHECKED:], k, v, causal="bottom_right", scoring=scoring)[0])
        return torch.cat(found)


def filled(inputs: Inputs) -> tuple[KVCache, PagedBatch]:
    """fp8attn's cache of the same keys and values, in the same pages. Of a prefill, without the queries' tokens."""
    case, device = inputs.case, inputs.q.device
    cache = KVCache(len(case.lengths), inputs.k.shape[0], case.kv_heads, case.dim, device=device)
    rows = torch.arange(len(case.lengths), dtype=torch.int32, device=device)
    for row in range(len(case.lengths)):
        one = slice(row, row + 1)
        left_out = case.queries if case.is_prefill else 0
        length = case.lengths[row] - left_out
        if length == 0:
            continue
        batch = PagedBatch(inputs.table[one], inputs.lengths[one] - left_out, None, rows[one])
        cache.append(inputs.sequence(inputs.k, row)[:, :, :length], inputs.sequence(inputs.v, row)[:, :, :length], batch)
    return cache, PagedBatch(inputs.table, inputs.lengths, max_length=max(case.lengths))


def _own(backend: str, sets: Sequence[Inputs], batch_invariant: bool = False) -> Run:
    caches = [(cache, replace(batch, batch_invariant=batch_invariant)) for cache, batch in map(filled, sets)]
    new: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(sets)
    if sets[0].case.is_prefill:  # the same tokens are appended again and again
        first = -sets[0].case.queries
        new = [(x.sequences(x.k)[:, :, first:].contiguous(), x.sequences(x.v)[:, :, first:].contiguous()) for x in sets]
    return lambda i: paged_sdpa(sets[i % len(sets)].q, *caches[i % len(sets)], new[i % len(sets)], backend=backend, **sets[i % len(sets)].options)


def _prefill_alone(sets: Sequence[Inputs]) -> Run:
    """The CUDA kernel of a prefill whose tokens are appended already."""

    def call(inputs: Inputs) -> PagedCall:
        cache, batch = filled(inputs)
        first = -inputs.case.queries
        k, v = (inputs.sequences(x)[:, :, first:].contiguous() for x in (inputs.k, inputs.v))
        cache.append(k, v, batch)
        return PagedCall(inputs.q, cache.storage, (k, v), batch, cache.recipe, inputs.case.dim**-0.5, **inputs.options)

    calls, device = [call(inputs) for inputs in sets], device_of(sets[0].q.device)
    tiling = Tiling.of(calls[0], device, may_split=False)
    return lambda i: prefill_from_pages(calls[i % len(calls)], device, tiling, torch.bfloat16)[0]


def _dense(quantized: bool, sets: Sequence[Inputs]) -> Run:
    """fp8attn without a cache, with statistics of all tokens. quantized: keys and values already are."""
    tensors: list[tuple[Any, Any, Any]] = [(x.q, x.sequences(x.k), x.sequences(x.v)) for x in sets]
    if quantized:
        tensors = [(q, *quantize(None, k, v)) for q, k, v in tensors]
    options = sets[0].options | {"enable_gqa": sets[0].case.q_heads != sets[0].case.kv_heads}
    return lambda i: sdpa(*tensors[i % len(sets)], is_causal=True, causal_alignment="bottom_right", **options)


def _by_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (P, page, Hkv, D) in e4m3, and a scale per token and head."""
    scale = scale_of(x.abs().amax(-1).float())
    return encode(x.float(), scale.unsqueeze(-1)), scale


def _tensors(kind: str, backend: str, sets: Sequence[Inputs]) -> Run:
    """fp8attn, of caches that it reads as other engines have them: (pages, page, Hkv, D).

    Args:
        kind: `bf16`; `recipe`: the same, which queries may attend to in FP8; `tensor` or `token`: e4m3, with a scale
            for each.
    """

    def prepared(inputs: Inputs) -> tuple[PagedTensors, PagedBatch]:
        batch = PagedBatch(inputs.table, inputs.lengths, max_length=max(inputs.case.lengths))
        if kind in ("bf16", "recipe"):
            return PagedTensors(inputs.k, inputs.v, recipe=DEFAULT_RECIPE if kind == "recipe" else None), batch
        quantized = _by_token if kind == "token" else adapters.per_tensor
        (k, k_scale), (v, v_scale) = (quantized(x) for x in (inputs.k, inputs.v))
        return PagedTensors(k, v, k_scale, v_scale), batch

    caches = [prepared(inputs) for inputs in sets]
    return lambda i: paged_sdpa(sets[i % len(sets)].q, *caches[i % len(sets)], backend=backend, **sets[i % len(sets)].options)


def _append(sets: Sequence[Inputs]) -> Run:
    """One more token of each sequence, or a prefill's tokens; the same ones in each call."""
    caches = [filled(inputs) for inputs in sets]
    more = 0 if sets[0].case.is_prefill else 1
    steps = [dataclasses.replace(batch, lengths=batch.lengths + more, max_length=None) for _, batch in caches]
    new = [x.q[:, : x.case.kv_heads, : x.case.queries if x.case.is_prefill else 1].contiguous() for x in sets]

    def append(i: int) -> None:
        i %= len(sets)
        caches[i][0].append(new[i], new[i], steps[i])

    return append


def _of_flash3(fp8: bool, inputs: Inputs, q: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Queries, keys and values for a FlashAttention-3, and its options of them: with one scale per tensor in FP8."""
    tensors = [q, inputs.k, inputs.v]
    if not fp8:
        return tensors, {}
    quantized, shape = [adapters.per_tensor(x) for x in tensors], (len(inputs.case.lengths), inputs.case.kv_heads)
    return [x for x, _ in quantized], {f"{name}_descale": scale.expand(shape) for name, (_, scale) in zip("qkv", quantized, strict=True)}


def _flash3(fp8: bool, sets: Sequence[Inputs]) -> Run:
    """flash_attn_with_kvcache of FlashAttention-3, with one scale per tensor in FP8.

    Raises:
        ValueError: rows have sinks.
    """
    if sets[0].case.sinks:
        raise ValueError("it has no sinks")
    function = adapters.flash3().flash_attn_with_kvcache

    def call(inputs: Inputs) -> Callable[[], torch.Tensor]:
        tensors, options = _of_flash3(fp8, inputs, inputs.q.transpose(1, 2).contiguous())
        options |= dict(cache_seqlens=inputs.lengths, page_table=inputs.table, causal=True, window_size=inputs.window)
        return lambda: function(*tensors, **options).transpose(1, 2)

    calls = [call(inputs) for inputs in sets]
    return lambda i: calls[i % len(calls)]()


def _vllm_flash3(fp8: bool, sets: Sequence[Inputs]) -> Run:
    """flash_attn_varlen_func of vLLM's FlashAttention-3 with a table of pages, and one scale per tensor in FP8."""
    function = adapters.vllm_flash3()

    def call(inputs: Inputs) -> Callable[[], torch.Tensor]:
        case, rows = inputs.case, len(inputs.case.lengths)
        tensors, options = _of_flash3(fp8, inputs, inputs.q.transpose(1, 2).flatten(0, 1).contiguous())
        starts = torch.arange(0, (rows + 1) * case.queries, case.queries, dtype=torch.int32, device=inputs.q.device)
        options |= dict(max_seqlen_q=case.queries, cu_seqlens_q=starts, max_seqlen_k=max(case.lengths), seqused_k=inputs.lengths)
        options |= dict(window_size=inputs.window, s_aux=None if inputs.sinks is None else inputs.sinks.bfloat16())
        return lambda: function(*tensors, block_table=inputs.table, causal=True, **options).unflatten(0, (rows, case.queries)).transpose(1, 2)

    calls = [call(inputs) for inputs in sets]
    return lambda i: calls[i % len(calls)]()


def _sdpa(sets: Sequence[Inputs]) -> Run:
    """PyTorch's SDPA of keys and values that are contiguous, for sequences of one length, without windows and sinks.

    Raises:
        ValueError: lengths differ, or there is a window or sinks.
    """
    case = sets[0].case
    if case.window >= 0 or case.sinks:
        raise ValueError("it has no windows and sinks")
    dense = [[x.sequences(y) for y in (x.k, x.v)] for x in sets]
    mask = None
    if case.queries > 1:
        mask = torch.ones(case.queries, case.lengths[0], dtype=torch.bool, device=sets[0].q.device).tril(case.lengths[0] - case.queries)

    def attend(i: int) -> torch.Tensor:
        i %= len(sets)
        k, v = dense[i]
        return F.scaled_dot_product_attention(sets[i].q, k, v, attn_mask=mask, enable_gqa=case.q_heads != case.kv_heads)

    return attend


@dataclass(frozen=True)
class Row:
    """One way to decode.

    Attributes:
        prepare: makes the call of some inputs.
        kv_bytes: of an element of keys and values that it reads.
        attends: whether it gives an answer; or else it appends.
        needs: what it lacks here, or None.
    """

    name: str
    prepare: Callable[[Sequence[Inputs]], Run]
    kv_bytes: int = 1
    attends: bool = True
    needs: Callable[[], str | None] = needs_nothing


ROWS = (
    Row("fp8attn cuda", functools.partial(_own, "cuda"), needs=needs_gpu),
    Row("fp8attn cuda batch-invariant", functools.partial(_own, "cuda", batch_invariant=True), needs=needs_gpu),
    Row("fp8attn triton", functools.partial(_own, "triton")),
    Row("fp8attn tensors e4m3", functools.partial(_tensors, "tensor", "cuda"), needs=needs_gpu),
    Row("fp8attn tensors e4m3 by token", functools.partial(_tensors, "token", "cuda"), needs=needs_gpu),
    Row("fp8attn tensors bf16", functools.partial(_tensors, "bf16", "cuda"), 2, needs=needs_gpu),
    Row("fp8attn tensors e4m3 triton", functools.partial(_tensors, "tensor", "triton")),
    Row("fp8attn tensors bf16 triton", functools.partial(_tensors, "bf16", "triton"), 2),
    Row("fp8attn append", _append, attends=False),
    Row("FA3 e4m3", functools.partial(_flash3, True), needs=adapters.needs_flash3),
    Row("FA3 bf16", functools.partial(_flash3, False), 2, needs=adapters.needs_flash3),
    Row("FA3 e4m3 two-level", functools.partial(_vllm_flash3, True), needs=adapters.needs_vllm),
    Row("FA3 bf16 of vLLM", functools.partial(_vllm_flash3, False), 2, needs=adapters.needs_vllm),
    Row("SDPA bf16", _sdpa, 2),
)


LEAST_SHOWN = (
    "SDPA bf16", "relative L2", "FA3 bf16", "fp8attn append", "fp8attn tensors bf16 triton", "fp8attn tensors e4m3 triton",
    "fp8attn tensors e4m3 by token", "fp8attn triton", "fp8attn cuda batch-invariant",
)  # fmt: skip
"""Columns that a narrow table leaves out, the first one first."""

PREFILL_ROWS = (
    Row("fp8attn dense", functools.partial(_dense, False)),
    Row("fp8attn dense, quantized", functools.partial(_dense, True)),
    Row("fp8attn cuda, appended", _prefill_alone, needs=needs_gpu),
    Row("fp8attn tensors bf16 by a recipe", functools.partial(_tensors, "recipe", "cuda"), 2, needs=needs_gpu),
    *(row for row in ROWS if not any(part in row.name for part in ("by token", "e4m3 triton", "bf16 triton", "SDPA", "invariant"))),
)


@dataclass(frozen=True)
class Result:
    """One row's time of a case."""

    case: DecodeCase
    row: Row
    timing: Timing | None = None
    errors: Errors | None = None
    refused: str | None = None

    @property
    def us(self) -> float | None:
        """The median."""
        return None if self.timing is None else self.timing.p50_us

    @property
    def share(self) -> float | None:
        """The bytes of keys and values over what the memory moves in that time: those that decoding reads, or that
        appending a prefill reads and writes."""
        if self.us is None or self.row.attends == self.case.is_prefill:
            return None
        moved = self.case.kv_bytes * self.row.kv_bytes if self.row.attends else self.case.append_bytes
        return moved / (self.us * 1e-6) / PEAK_BYTES_PER_SECOND

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        case = {field.name: getattr(self.case, field.name) for field in dataclasses.fields(DecodeCase) if field.name not in ("name", "lengths")}
        return {
            "case": self.case.name,
            "batch": len(self.case.lengths),
            "tokens": sum(self.case.lengths),
            **case,
            "backend": self.row.name,
            "p50_us": self.us,
            "p90_us": None if self.timing is None else self.timing.p90_us,
            "round_us": None if self.timing is None else self.timing.round_us,
            "method": None if self.timing is None else self.timing.method,
            "share_of_peak": self.share,
            "relative_l2": None if self.errors is None else self.errors.relative_l2,
            "refused": self.refused,
        }


def measure(case: DecodeCase, rows: Sequence[Row], bad: Bad, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Result]:
    """Every row, from one interleaved run.

    Args:
        tick: called for every turn, which counts as 1.
    """
    sets = [Inputs.of(case, device, SEED + i) for i in range(input_sets(case.kv_bytes, device))]
    expected = sets[0].exact()
    runs: dict[str, Run] = {}
    errors: dict[str, Errors] = {}
    refused: dict[str, str] = {}
    for row in rows:
        try:
            run = row.prepare(sets)
            out = run(0)
            if row.attends:
                assert isinstance(out, torch.Tensor)
                errors[row.name] = Errors.of(out[:, :, -CHECKED:], expected, bad)
            runs[row.name] = run
        except Exception as error:
            refused[row.name] = f"{type(error).__name__}: {error}".strip()
    timed = time_all(runs, len(sets), protocol, device, tick)
    lacking = {name: "out of memory beside the others" for name in runs if name not in timed}
    reasons = refused | lacking
    return [Result(case, row, timed[row.name].timing if row.name in timed else None, errors.get(row.name), reasons.get(row.name)) for row in rows]


def table(results: Sequence[Result]) -> Sheet:
    """A table: a row for each case; for each way to decode microseconds and the share of the memory's bandwidth."""
    names = list(dict.fromkeys(result.row.name for result in results))
    note = f"µs (share of {PEAK_BYTES_PER_SECOND / 1e12:.2f} TB/s by the bytes of keys and values). Medians of one interleaved run each; –: refused."
    optional = [name for name in LEAST_SHOWN if name in (*names, "relative L2")]
    made = report.table_of("Decoding", ("case",), (*names, "relative L2"), note, optional=optional)
    for case in dict.fromkeys(result.case for result in results):
        by = {result.row.name: result for result in results if result.case == case}
        cells = [report.us_of(by[name].us) + ("" if by[name].share is None else f" ({by[name].share:.0%})") for name in names]
        own = next((result.errors for result in by.values() if result.errors is not None), None)
        made.add_row(case.name, *cells, report.number_of(None if own is None else own.relative_l2, ".4f"))
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    command_line.add_peer(parser)
    command_line.add_turns(parser)
    command_line.add_json(parser)
    parser.add_argument("--prefill", action="store_true", help="prefill of a KVCache beside the same without a cache")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    cases = command_line.chosen(arguments.case, PREFILL if arguments.prefill else CASES, "--case")
    rows: Sequence[Row] = command_line.chosen(arguments.peer, PREFILL_ROWS if arguments.prefill else ROWS, "--peer", "row")
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    rows = adapters.here(rows)
    gates, about = Gates.load(), machine(device)
    protocol = Protocol(arguments.rounds, arguments.milliseconds, arguments.milliseconds)

    def measured(case: DecodeCase, tick: Tick) -> list[Result]:
        torch.cuda.empty_cache()  # of the case before
        return measure(case, rows, gates.bad, protocol, device, tick)

    works = [(case.name, functools.partial(measured, case)) for case in cases]
    with report.progress("decode") as bar:
        results = report.measure_each(bar, f"cases: {len(cases)}", works, protocol.rounds * len(rows), arguments.json, about)
    report.console().print(table(results))
    for result in results:
        if result.refused is not None:
            report.say(f"{result.case.name}, {result.row.name}: {result.refused}", "dim")
    return 0
