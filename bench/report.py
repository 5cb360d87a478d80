"""Tables for people, JSON lines for programs, Markdown for documents."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.text import Text

from . import quantize
from .compare import Comparison, summary
from .errors import Errors
from .gates import Gates, Verdict
from .peers import END_TO_END, KERNEL
from .progress import Progress, Tick
from .run import Result
from .sheet import Sheet

INTERPRETED = (
    "Times are of Triton's interpreter on a CPU and mean nothing for speed; what is computed from them isn't shown. Errors do mean what they say."
)
TIMED = (
    "Medians and percentiles of one interleaved run; a sample is the mean of the calls in one CUDA graph. "
    "× SDPA: the fastest PyTorch backend's median over this one's, more than 1 is faster. "
    "of limit: the least time that the GPU's busiest unit needs in e4m3, from measured ceilings, over the median. "
    "bad: |error| > rtol·|expected| + atol·rms(expected), gates.json says how much. –: refused, --json keeps the reason."
)

ERROR_HEADERS = ("max error", "mean error", "relative L2", "bad", "SQNR dB")


def console() -> Console:
    """Standard output: as wide as the terminal; without one, as COLUMNS says, or 80 columns."""
    return Console()


def progress(command: str) -> Progress:
    """The progress of a command."""
    return Progress(command)


def say(line: str, style: str | None = None) -> None:
    """Print a line to standard output unchanged. Without a terminal it isn't wrapped."""
    console().print(Text(line, style=style or ""), soft_wrap=True)


def table_of(
    title: str, left: Sequence[str], right: Sequence[str], caption: str | None = None, *, optional: Sequence[str] = (), words: Sequence[str] = ()
) -> Sheet:
    """An empty table.

    Args:
        left: headers of words before the numbers.
        right: headers of numbers.
        words: headers of words after the numbers.
        optional: headers of `right` that may be left out if there is no room, the least important first.
    """
    made = Sheet(title, caption, optional)
    for headers, justify in ((left, "left"), (right, "right"), (words, "left")):
        for header in headers:
            made.add_column(header, justify="right" if justify == "right" else "left")
    return made


def number_of(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def us_of(x: float | None) -> str:
    """Microseconds, with tenths if they are significant."""
    return number_of(x, ".1f" if x is None or x < 1e5 else ".0f")


def _error_cells(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return ("–",) * len(ERROR_HEADERS)
    return (f"{errors.max_abs:.4f}", f"{errors.mean_abs:.5f}", f"{errors.relative_l2:.4f}", f"{errors.bad_share:.3%}", f"{errors.sqnr_db:.1f}")


def gate_table(verdicts: Sequence[Verdict], gates: Gates) -> Sheet:
    """Each verdict with its errors and its broken limits."""
    limits = ", ".join(f"{name} ≤ {limit:g}" for name, limit in gates.limits.items())
    bad = f"bad: |error| > {gates.bad.rtol:g}·|expected| + {gates.bad.atol_rms:g}·rms(expected)"
    table = table_of("Gates", ("case, backend",), ERROR_HEADERS, f"Limits: {limits}; {bad}", words=("verdict",))
    for case in dict.fromkeys(verdict.case for verdict in verdicts):
        table.add_group(case.name)
        for verdict in (one for one in verdicts if one.case == case):
            said = Text("green", "green") if verdict.green else Text("red: " + ", ".join(verdict.broken), "red")
            table.add_row(verdict.backend, *_error_cells(verdict.errors), said)
    return table


def _by_case(results: Iterable[Result]) -> list[list[Result]]:
    """Results in groups of one case and one distribution."""
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault((result.case, result.distribution), []).append(result)
    return list(groups.values())


SPEED_HEADERS = ("p50 µs", "p90", "p99", "TFLOP/s", "× SDPA", "of limit")


def speed_tables(results: Sequence[Result], gpu: bool, launched: str = "") -> list[Sheet]:
    """One table for kernels alone and one from bfloat16 on. PyTorch's backends, which take bfloat16, are in both.

    Args:
        launched: how calls were launched, for the tables' titles.
    """
    tables = []
    for stage in (KERNEL, END_TO_END):
        headers = SPEED_HEADERS if gpu else SPEED_HEADERS[:1]
        optional = ("SQNR dB", "mean error", "p99", "bad", "max error", "p90")
        title, caption = stage.capitalize() + (f", {launched}" if launched else ""), TIMED if gpu else INTERPRETED
        table = table_of(title, ("case, backend",), (*headers, *ERROR_HEADERS), caption, optional=optional)
        for group in _by_case(results):
            there = [result for result in group if stage in result.stages]
            if there:
                first = there[0]
                table.add_group(first.case.name + ("" if first.distribution == "normal" else f", {first.distribution}"))
            for result in there:
                timing = result.timing
                times = ("–",) * 3 if timing is None else tuple(us_of(x) for x in (timing.p50_us, timing.p90_us, timing.p99_us))
                speeds = (number_of(result.tflops, ".0f"), number_of(result.against_sdpa, ".2f"), number_of(result.share_of_limit, ".0%"))
                own = "bold" if result.backend.startswith("fp8attn") else None
                table.add_row(result.backend, *(*times, *speeds)[: len(headers)], *_error_cells(result.errors), style=own)
        tables.append(table)
    return tables


def peer_table(needs: dict[str, str | None]) -> Sheet:
    """The peers that this machine has, and what the missing ones need."""
    table = table_of("Peers", ("peer", "here", "needs"), ())
    for name, need in needs.items():
        table.add_row(name, "yes" if need is None else "no", need or "", style=None if need is None else "dim")
    return table


def quantize_table(results: Sequence[quantize.Result], gpu: bool) -> Sheet:
    """Microseconds and bandwidth of the quantizer."""
    caption = "Bytes: q and k read once, v twice, results written once. Copy: bytes read and written by torch's copy_ in the same run."
    headers = ("p50 µs", "p90", "p99", "MB", "GB/s", "copy GB/s", "of copy") if gpu else ("p50 µs", "p90", "p99", "MB")
    table = table_of("Quantizing q, k and v", ("case",), headers, caption if gpu else INTERPRETED, optional=("p99", "p90"))
    for r in results:
        times = (us_of(x) for x in (r.timing.p50_us, r.timing.p90_us, r.timing.p99_us))
        speeds = (f"{r.traffic / 1e6:.1f}", f"{r.gb_per_s:.0f}", f"{r.copy_gb_per_s:.0f}", f"{r.gb_per_s / r.copy_gb_per_s:.0%}")
        table.add_row(r.case.name, *(*times, *speeds)[: len(headers)])
    return table


def compare_table(comparison: Comparison) -> Sheet:
    """Two runs, row by row."""
    headers = ("before µs", "after µs", "×", "noise")
    table = table_of("Before and after", ("case", "backend"), headers, summary(comparison), words=("verdict",))
    style = {"faster": "green", "slower": "red", "no change": None}
    for c in comparison.changes:
        cells = (us_of(c.before_us), us_of(c.after_us), f"{c.ratio:.3f}", f"±{c.noise * 100:.1f} %", c.verdict)
        table.add_row(c.case, c.backend, *cells, style=style[c.verdict])
    return table


def json_line(benchmark: str, record: dict[str, Any], machine: dict[str, Any]) -> str:
    """One line of strict JSON. Non-finite numbers, which JSON doesn't have, become null."""
    line = {"benchmark": benchmark, **record, **machine}
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}, allow_nan=False) + "\n"


def append(file: Path | None, lines: Iterable[str]) -> None:
    """Append lines to a file as soon as they are known, so that an interrupted run leaves its results."""
    if file is not None:
        with file.open("a") as stream:
            stream.writelines(lines)


class Recorded(Protocol):
    """A result that is a line of a results file."""

    def record(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Recorded)


def measure_each(
    bar: Progress, doing: str, works: Sequence[tuple[str, Callable[[Tick], Iterable[R]]]], turns: int, file: Path | None, about: dict[str, Any]
) -> list[R]:
    """Measure one work after the other, with progress, and append its results to a file.

    Args:
        bar: of the command that the results are of.
        doing: what the progress says before the first work.
        works: a name, and what measures it, calling the tick once for each of its `turns`.
        about: the machine.
    """
    results: list[R] = []
    task = bar.add_task(doing, total=turns * len(works))
    for i, (name, measure) in enumerate(works):
        bar.update(task, completed=i * turns, description=name)
        found = [*measure(bar.ticks(task, f"{name}, "))]
        append(file, (json_line(bar.command, result.record(), about) for result in found))
        results += found
    return results
