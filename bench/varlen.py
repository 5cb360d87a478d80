"""Packed sequences of different lengths, and windows, soft caps and sinks: attention of batches, beside FlashAttention-3
and beside the dense kernel at equal lengths."""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fp8attn

from . import adapters, command_line, report
from .command_line import NO_GPU, UsageError
from .machine import machine
from .peers import needs_gpu
from .progress import Tick, no_tick
from .sheet import Sheet
from .timing import Protocol, Run, input_sets, tflops, time_all

HELP = "packed sequences of different lengths, windows, soft caps and sinks, beside FlashAttention-3"

SEED = 20


@dataclass(frozen=True)
class Batch:
    """A packed batch of self attention, bfloat16 before it is quantized.

    Attributes:
        window: keys before a row's own that it attends to, in causal attention; -1: all.
        softcap: of the scores; 0: none.
        sinks: whether rows have a sink.
    """

    name: str
    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    dim: int
    causal: bool
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> int:
        """Of all visible pairs of a query and a key."""
        hidden = [max(n - 1 - self.window, 0) if self.window >= 0 else 0 for n in self.lengths]
        pairs = sum(n * (n + 1) // 2 - h * (h + 1) // 2 if self.causal else n * n for n, h in zip(self.lengths, hidden, strict=True))
        return 4 * pairs * self.q_heads * self.dim

    def record(self) -> dict[str, Any]:
        return {
            "batch": self.name, "sequences": len(self.lengths), "tokens": self.tokens, "longest": max(self.lengths), "q_heads": self.q_heads,
            "kv_heads": self.kv_heads, "head_dim": self.dim, "causal": self.causal, "window": self.window,
            "softcap": self.softcap, "sinks": self.sinks,
        }  # fmt: skip


def uniform(least: int, most: int, count: int) -> tuple[int, ...]:
    r = random.Random(SEED)
    return tuple(r.randint(least, most) for _ in range(count))


def log_normal(count: int) -> tuple[int, ...]:
    """Lengths like those of ShareGPT's conversations: a median of 700 tokens, and a long tail up to 16k."""
    r = random.Random(SEED)
    return tuple(min(max(round(r.lognormvariate(math.log(700), 1.1)), 4), 16_384) for _ in range(count))


LENGTHS: dict[str, tuple[int, ...]] = {
    "8 of 4k": (4096,) * 8,
    "64 of 200 to 12k": uniform(200, 12_000, 64),
    "one of 32k, 63 of 256": (*(256,) * 31, 32_768, *(256,) * 32),
    "128 like ShareGPT": log_normal(128),
}

BATCHES = tuple(
    Batch(f"{name}, D{dim}{' causal' if causal else ''}", lengths, 2048 // dim, 512 // dim, dim, causal)
    for name, lengths in LENGTHS.items()
    for dim, causal in ((64, True), (128, False), (128, True))
) + tuple(
    Batch(f"{name}, D{dim} causal", (length,) * (32_768 // length), 2048 // dim, 512 // dim, dim, True, **options)
    for name, length, dim, options in (
        ("2 of 16k", 16_384, 128, {}),
        ("2 of 16k, window 1k", 16_384, 128, {"window": 1023}),
        ("1 of 32k, window 4k", 32_768, 128, {"window": 4095}),
        ("4 of 8k", 8192, 128, {}),
        ("4 of 8k, sinks", 8192, 128, {"sinks": True}),
        ("4 of 8k, soft cap 30", 8192, 128, {"softcap": 30.0}),
        ("4 of 8k, soft cap 50", 8192, 128, {"softcap": 50.0}),
        ("4 of 8k, soft cap 50", 8192, 256, {"softcap": 50.0}),
        ("4 of 8k, window 128, sinks", 8192, 64, {"window": 127, "sinks": True}),
    )
)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a batch: sets of q, k and v (T, H, D), and the starts of sequences."""

    batch: Batch
    sets: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    starts: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(SEED)
        heads = batch.q_heads, batch.kv_heads, batch.kv_heads
        bytes_of_one = 2 * batch.tokens * sum(heads) * batch.dim
        sets = [
            tuple(torch.randn(batch.tokens, n, batch.dim, device=device, generator=generator).bfloat16() for n in heads)
            for _ in range(input_sets(bytes_of_one, device))
        ]
        starts = torch.tensor([0, *batch.lengths], dtype=torch.int32, device=device).cumsum(0).int()
        return cls(batch, sets, starts)  # type: ignore[arg-type]

    @property
    def longest(self) -> int:
        return max(self.batch.lengths)

    @property
    def options(self) -> dict[str, Any]:
        """Those of fp8attn that say what the batch's rows attend to."""
        batch = self.batch
        sinks = torch.linspace(-1, 1, batch.q_heads, device=self.starts.device) if batch.sinks else None
        window = None if batch.window < 0 else (batch.window, 0)
        return {"is_causal": batch.causal, "window": window, "softcap": batch.softcap, "sinks": sinks}


def from_bf16(x: Inputs) -> Run:
    """fp8attn.varlen_sdpa as users call it."""
    options = x.options | dict(max_seqlen_q=x.longest, max_seqlen_k=x.longest)
    return lambda i: fp8attn.varlen_sdpa(*x.sets[i % len(x.sets)], x.starts, x.starts, **options)


def kernel_alone(x: Inputs) -> Run:
    """fp8attn.varlen_sdpa of operands that are quantized already."""
    sets = [fp8attn.quantize(*tensors, cu_seqlens_q=x.starts, cu_seqlens_k=x.starts) for tensors in x.sets]
    options = x.options | dict(max_seqlen_q=x.longest, max_seqlen_k=x.longest)
    return lambda i: fp8attn.varlen_sdpa(*sets[i % len(sets)], None, None, **options)


def dense_by(backend: fp8attn.validate.Backend, x: Inputs) -> Run:
    """fp8attn.sdpa of a batch of one length, quantized already, beside which packing costs something.

    Raises:
        ValueError: the lengths differ.
    """
    if len({*x.batch.lengths}) > 1:
        raise ValueError("lengths differ")
    count = len(x.batch.lengths)
    sets = [fp8attn.quantize(*(y.unflatten(0, (count, -1)).transpose(1, 2) for y in tensors)) for tensors in x.sets]
    options = x.options

    def attention(i: int) -> object:
        q, k, v = sets[i % len(sets)]
        return fp8attn.sdpa(q, k, v, enable_gqa=True, backend=backend, **options)

    return attention


def flash3(function: Callable[..., Any], fp8: bool, x: Inputs, **more: Any) -> Run:
    """flash_attn_varlen_func of a FlashAttention-3; e4m3 with one scale per sequence and head.

    Args:
        more: arguments that this FlashAttention-3 alone has.
    """
    scales = torch.ones(len(x.batch.lengths), x.batch.kv_heads, device=x.starts.device)
    sets = [tuple(y.to(torch.float8_e4m3fn) for y in tensors) for tensors in x.sets] if fp8 else x.sets
    options: dict[str, Any] = dict(cu_seqlens_q=x.starts, cu_seqlens_k=x.starts, max_seqlen_q=x.longest, max_seqlen_k=x.longest)
    window = (x.batch.window, 0) if x.batch.window >= 0 else (-1, -1)
    options |= {"causal": x.batch.causal, "window_size": window, "softcap": x.batch.softcap}
    options |= {f"{name}_descale": scales for name in "qkv"} if fp8 else {}
    return lambda i: function(*sets[i % len(sets)], **options, **more)


def upstream_flash3(fp8: bool, x: Inputs) -> Run:
    """FlashAttention-3 by its authors.

    Raises:
        ValueError: rows have sinks.
    """
    if x.batch.sinks:
        raise ValueError("it has no sinks")
    return flash3(adapters.flash3().flash_attn_varlen_func, fp8, x)


def vllm_flash3(fp8: bool, x: Inputs) -> Run:
    """vLLM's FlashAttention-3, which has sinks, in bfloat16."""
    sinks = x.options["sinks"]
    return flash3(adapters.vllm_flash3(), fp8, x, s_aux=None if sinks is None else sinks.bfloat16())


@dataclass(frozen=True)
class Row:
    """A row of the results: what is timed, and what it needs."""

    name: str
    prepare: Callable[[Inputs], Run]
    needs: Callable[[], str | None] = needs_gpu


ROWS_OF_TABLE = (
    Row("fp8attn, kernel alone", kernel_alone),
    Row("fp8attn, from bf16", from_bf16),
    Row("fp8attn triton, dense", lambda x: dense_by("triton", x)),
    Row("fp8attn auto, dense", lambda x: dense_by("auto", x)),
    Row("FA3 bf16", functools.partial(upstream_flash3, False), adapters.needs_flash3),
    Row("FA3 e4m3", functools.partial(upstream_flash3, True), adapters.needs_flash3),
    Row("FA3 bf16 of vLLM", functools.partial(vllm_flash3, False), adapters.needs_vllm),
    Row("FA3 e4m3 two-level", functools.partial(vllm_flash3, True), adapters.needs_vllm),
)


@dataclass(frozen=True)
class Result:
    """One row's attention of one batch: the median, or why there is none."""

    batch: Batch
    row: str
    us: float | None = None
    refused: str | None = None

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        speed = None if self.us is None else tflops(self.batch.flops, self.us)
        return {**self.batch.record(), "backend": self.row, "p50_us": self.us, "tflops": speed, "refused": self.refused}


def measure(batch: Batch, rows: Sequence[Row], protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Result]:
    """Every row, from one interleaved run.

    Args:
        tick: called for every turn, which counts as 1.
    """
    inputs, runs, results = Inputs.of(batch, device), {}, []
    for row in rows:
        try:
            run = row.prepare(inputs)
            run(0)
        except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
            results.append(Result(batch, row.name, refused=str(error).splitlines()[0]))
        else:
            runs[row.name] = run
    timed = time_all(runs, len(inputs.sets), protocol, device, tick)
    for name in runs:
        results.append(Result(batch, name, timed[name].timing.p50_us) if name in timed else Result(batch, name, refused="out of memory"))
    return results


def table(results: Sequence[Result]) -> Sheet:
    """TFLOP/s: a row for each batch, a column for each row of the results."""
    names = list(dict.fromkeys(result.row for result in results))
    made = report.table_of("Packed sequences, TFLOP/s", ("batch",), names, "Medians of one interleaved run for each batch; –: refused.")
    for batch in dict.fromkeys(result.batch for result in results):
        by = {result.row: result for result in results if result.batch == batch}
        cells = [report.number_of(None if by[name].us is None else by[name].record()["tflops"], ".0f") for name in names]
        made.add_row(batch.name, *cells)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    command_line.add_peer(parser)
    command_line.add_turns(parser)
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    batches = command_line.chosen(arguments.case, BATCHES, "--case")
    rows: Sequence[Row] = command_line.chosen(arguments.peer, ROWS_OF_TABLE, "--peer", "row")
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    about, protocol = machine(device), Protocol(arguments.rounds, arguments.milliseconds, arguments.milliseconds)
    rows = adapters.here(rows)
    works = [(batch.name, functools.partial(measure, batch, rows, protocol, device)) for batch in batches]
    with report.progress("varlen") as bar:
        results = report.measure_each(bar, f"batches: {len(batches)}", works, protocol.rounds * len(rows), arguments.json, about)
    report.console().print(table(results))
    return 0
