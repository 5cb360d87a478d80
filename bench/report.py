"""Tables for people, JSON lines for programs, Markdown for documents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import quantize
from .compare import Comparison, summary
from .errors import Errors
from .gates import Gates, Verdict
from .peers import END_TO_END, KERNEL
from .run import Result

WIDTH = 176
"""Columns of a table where no terminal says how many it has."""

INTERPRETED = (
    "Times are of Triton's interpreter on a CPU and mean nothing for speed: neither the microseconds nor what is computed from them. "
    "Errors do mean what they say."
)
TIMED = (
    "Medians and percentiles of one interleaved run; a sample is the mean of the calls in one CUDA graph. "
    "× SDPA: the fastest PyTorch backend's median over this one's, more than 1 is faster. "
    "of limit: the least time that the GPU's busiest unit needs in e4m3, from measured ceilings, over the median. "
    "bad: |error| > rtol·|expected| + atol·rms(expected), gates.json says how much. –: refused, --json keeps the reason."
)

ERROR_HEADERS = ("max error", "mean error", "relative L2", "bad", "SQNR dB")


def console() -> Console:
    """Standard output, wide enough for the tables where it isn't a terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def progress() -> Progress:
    """A bar on standard error, gone when done."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def table_of(title: str, left: Sequence[str], right: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", caption=caption, caption_justify="left")
    for header in left:
        table.add_column(header, no_wrap=True)
    for header in right:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def number_of(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _error_cells(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return ("–",) * len(ERROR_HEADERS)
    return (f"{errors.max_abs:.4f}", f"{errors.mean_abs:.5f}", f"{errors.relative_l2:.4f}", f"{errors.bad_share:.3%}", f"{errors.sqnr_db:.1f}")


def gate_table(verdicts: Sequence[Verdict], gates: Gates) -> Table:
    """Each verdict with its errors, and what is broken."""
    limits = ", ".join(f"{name} ≤ {limit:g}" for name, limit in gates.limits.items())
    bad = f"bad: |error| > {gates.bad.rtol:g}·|expected| + {gates.bad.atol_rms:g}·rms(expected)"
    table = table_of("Gates", ("case", "backend"), (*ERROR_HEADERS, "verdict"), f"Limits: {limits}; {bad}")
    for verdict in verdicts:
        color, text = ("green", "green") if verdict.green else ("red", "red: " + ", ".join(verdict.broken))
        table.add_row(verdict.case.name, verdict.backend, *_error_cells(verdict.errors), f"[{color}]{text}[/]")
    return table


def _by_case(results: Iterable[Result]) -> list[list[Result]]:
    """Results in runs of one case and one distribution."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault((result.case, result.distribution), []).append(result)
    return list(groups.values())


def speed_tables(results: Sequence[Result], gpu: bool) -> list[Table]:
    """One table for kernels alone and one from bfloat16 on; PyTorch's backends, which take bfloat16, stand in both."""
    tables = []
    for stage in (KERNEL, END_TO_END):
        headers = ("p50 µs", "p90", "p99", "TFLOP/s", "× SDPA", "of limit", *ERROR_HEADERS)
        table = table_of(stage.capitalize(), ("case", "backend"), headers, TIMED if gpu else INTERPRETED)
        for group in _by_case(results):
            table.add_section()
            for i, result in enumerate(r for r in group if stage in r.stages):
                timing = result.timing
                times = ("–",) * 3 if timing is None else tuple(f"{x:.1f}" for x in (timing.p50_us, timing.p90_us, timing.p99_us))
                speeds = (
                    number_of(result.tflops, ".0f" if gpu else ".4f"),
                    number_of(result.against_sdpa, ".2f" if gpu else ".4f"),
                    number_of(result.share_of_limit, ".0%"),
                )
                own = "bold" if result.backend.startswith("fp8attn") else None
                inputs = "" if result.distribution == "normal" else f", {result.distribution}"
                name = result.case.name + inputs if i == 0 else ""
                table.add_row(name, result.backend, *times, *speeds, *_error_cells(result.errors), style=own)
        tables.append(table)
    return tables


def peer_table(needs: dict[str, str | None]) -> Table:
    """Who can be compared here, and what the others need."""
    table = table_of("Peers", ("peer", "here", "needs"), ())
    for name, need in needs.items():
        table.add_row(name, "yes" if need is None else "no", "" if need is None else escape(need), style=None if need is None else "dim")
    return table


def quantize_table(results: Sequence[quantize.Result], gpu: bool) -> Table:
    """Microseconds and bandwidth of the quantizer."""
    caption = "Bytes: q and k read once, v twice, results written once. Copy: bytes read and written by torch's copy_ in the same run."
    headers = ("p50 µs", "p90", "p99", "MB", "GB/s", "copy GB/s", "of copy")
    table = table_of("Quantizing q, k and v", ("case",), headers, caption if gpu else INTERPRETED)
    for r in results:
        times = (f"{x:.1f}" for x in (r.timing.p50_us, r.timing.p90_us, r.timing.p99_us))
        form = ".0f" if gpu else ".3f"
        speeds = (f"{r.traffic / 1e6:.1f}", f"{r.gb_per_s:{form}}", f"{r.copy_gb_per_s:{form}}", f"{r.gb_per_s / r.copy_gb_per_s:.0%}")
        table.add_row(r.case.name, *times, *speeds)
    return table


def compare_table(comparison: Comparison) -> Table:
    """Two runs, row by row."""
    table = table_of("Before and after", ("case", "backend"), ("before µs", "after µs", "×", "noise", ""), summary(comparison))
    style = {"faster": "green", "slower": "red", "no change": None}
    for c in comparison.changes:
        cells = (f"{c.before_us:.1f}", f"{c.after_us:.1f}", f"{c.ratio:.3f}", f"±{c.noise * 100:.1f} %", c.verdict)
        table.add_row(c.case, c.backend, *cells, style=style[c.verdict])
    return table


def json_line(benchmark: str, record: dict[str, Any], machine: dict[str, Any]) -> str:
    """One line of strict JSON; numbers that aren't finite, which JSON doesn't have, become null."""
    line = {"benchmark": benchmark, **record, **machine}
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}, allow_nan=False) + "\n"


def append(file: Path | None, lines: Iterable[str]) -> None:
    """Add lines to a file as soon as they are known, so that a run that is cut short leaves what it measured."""
    if file is not None:
        with file.open("a") as stream:
            stream.writelines(lines)
