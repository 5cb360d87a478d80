"""Errors against exact attention in float64, by distribution, length, head dim and mask, without timing."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import cases, command_line, report
from .adapters import here
from .cases import Case, Workload
from .command_line import UsageError, at_least, input_file
from .compiling import compile_first
from .errors import Errors, standard_error
from .gates import Gates
from .machine import machine
from .peers import Answer, Peer, Problem, answer
from .plot import STYLES, legend_below, load_pyplot, origin, results_of, save
from .progress import Tick, no_tick
from .readme import RESULTS, Record
from .rows import chosen
from .sheet import Sheet

HELP = "errors against float64 attention by distribution, length, head dim and mask: every recipe, and others' FP8 kernels"

PICTURE = RESULTS / "accuracy.svg"

LENGTHS = (128, 512, 2048, 16384, 65536, 131072, 524288)
LENGTHS_ON_CPU = (128, 512, 2048, 16384)
LONG_QUERIES, LONG_QUERIES_ON_CPU = 256, 32
"""Most queries of cases that vary the length. float64 attention of 512k queries would take hours."""

BY_LENGTH = ("normal", "one-sign", "sinks", "outliers", "recent")


def _keys(length: int) -> str:
    return f"{length // 1024}k keys" if length >= 1024 else f"{length} keys"


def by_length(length: int, queries: int) -> Case:
    return Case(f"{_keys(length)} D128", 1, 1, 1, min(queries, length), length, 128, 128, causal=False)


def by_distribution(length: int, heads: int, dim: int, causal: bool) -> Case:
    return cases.square(f"{_keys(length)} D{dim}{' causal' if causal else ''}", 1, heads, length, dim, causal)


def workloads(gpu: bool, keys: Sequence[int] | None = None) -> list[Workload]:
    """The workloads to measure. Without a GPU, small cases and few queries.

    Args:
        keys: only cases of few queries and so many keys.
    """
    queries = LONG_QUERIES if gpu else LONG_QUERIES_ON_CPU
    if keys:
        return [(by_length(length, queries), name) for name in BY_LENGTH for length in keys]
    dims, square, heads = ((64, 128, 256), 4096, 2) if gpu else ((64, 128), 1024, 1)
    found = [(by_distribution(square, heads, dim, causal), name) for name in cases.DISTRIBUTIONS for dim in dims for causal in (False, True)]
    lengths = LENGTHS if gpu else LENGTHS_ON_CPU
    return found + [(by_length(length, queries), name) for name in BY_LENGTH for length in lengths]


@dataclasses.dataclass(frozen=True)
class Result:
    """One row's errors on a case, or the reason why there are none.

    Attributes:
        errors: means over `seeds` draws of the inputs.
        standard_error: standard error of the mean of relative_l2; None for one draw.
    """

    case: Case
    distribution: str
    row: str
    errors: Errors | None
    refused: str | None
    seeds: int = 1
    standard_error: float | None = None

    def record(self) -> Record:
        """One flat JSON object, with errors to five digits."""
        case = {name: getattr(self.case, name) for name in ("q_heads", "q_length", "kv_length", "head_dim", "causal")}
        errors: dict[str, Any] = dict.fromkeys(Errors.__dataclass_fields__)
        if self.errors is not None:
            # cosines are close to one
            errors = {name: float(f"{x:.5g}") if name != "cosine" else round(x, 8) for name, x in dataclasses.asdict(self.errors).items()}
        draws = {"seeds": self.seeds, "standard_error": None if self.standard_error is None else float(f"{self.standard_error:.3g}")}
        return {"case": self.case.name, **case, "backend": self.row, "distribution": self.distribution, **errors, **draws, "refused": self.refused}


def effort(case: Case, rows: Sequence[Peer], gpu: bool, seeds: int) -> float:
    """Estimated seconds that all rows of a case take."""
    return seeds * sum(row.effort(case, gpu) for row in rows)


def measure(
    case: Case, distribution: str, rows: Sequence[Peer], gates: Gates, device: torch.device, seeds: int = 1, tick: Tick = no_tick
) -> list[Result]:
    """Every row's errors, averaged over `seeds` draws of the inputs. The first draw is the one that all commands use. A
    row that refuses one has no errors.

    Args:
        tick: called for every answer; in total, answers count as `effort`.
    """
    given: dict[str, list[Answer]] = {row.name: [] for row in rows}
    for seed in range(cases.SEED, cases.SEED + seeds):
        tick("the exact answer", 0.0)
        problem = Problem.of(case, distribution, device, rotate=False, seed=seed)
        expected = problem.expected(torch.float64)
        for row in rows:
            tick(row.name, 0.0)
            given[row.name].append(dataclasses.replace(answer(row, problem, expected, gates.bad), attention=None))  # it would retain its inputs
            tick(row.name, row.effort(case, device.type == "cuda"))
    results = []
    for name, answers in given.items():
        if any(one.unavailable for one in answers):
            continue
        refused = next((one.refused for one in answers if one.refused is not None), None)
        known = [one.errors for one in answers if one.errors is not None]
        errors = Errors.mean(known) if len(known) == seeds else None
        spread = standard_error([one.relative_l2 for one in known]) if errors is not None and seeds > 1 else None
        results.append(Result(case, distribution, name, errors, refused, seeds, spread))
    return results


def table(results: Sequence[Result], gpu: bool) -> Sheet:
    """All errors of every row."""
    where = "" if gpu else " Without a GPU recipes' rows are the pipeline's oracle, and lengths end where a CPU's patience does."
    if any(result.standard_error is not None for result in results):
        where = f" ±: standard error of the mean over draws.{where}"
    headers = ("RMSE", "relative L2", "cosine", "SQNR dB", "worst element")
    made = report.table_of("Errors against float64", ("inputs, case, row",), headers, f"–: refused, --json keeps the reason.{where}")
    for i, result in enumerate(results):
        if i == 0 or (result.case, result.distribution) != (results[i - 1].case, results[i - 1].distribution):
            made.add_group(f"{result.distribution}, {result.case.name}")
        e = result.errors
        about = "" if result.standard_error is None else f" ± {result.standard_error:.4f}"
        cells = (
            ("–",) * 5 if e is None else (f"{e.rmse:.2e}", f"{e.relative_l2:.4f}{about}", f"{e.cosine:.6f}", f"{e.sqnr_db:.1f}", f"{e.max_abs:.2e}")
        )
        made.add_row(result.row, *cells, style="bold" if result.row.startswith("fp8attn") else None)
    return made


DRAWN = (
    "fp8attn cuda end to end", "fp8attn triton end to end", "fp8attn rotated", "fp8attn not rotated", "fp8attn V not smoothed", "fp8attn f16",
    "cuDNN e4m3", "e4m3 one level", "FA3 e4m3, modelled", "FA3 e4m3 two-level", "SDPA flash",
)  # fmt: skip
"""Rows in the picture."""


def figure_of(records: Sequence[Record]) -> Any:
    """A figure of relative L2 error over the number of keys, with a panel for each distribution.

    Raises:
        UsageError: there is nothing to draw.
    """
    there = [r for r in records if r["case"].endswith("keys D128") and r["distribution"] in BY_LENGTH and r["relative_l2"]]
    names = list(dict.fromkeys(r["distribution"] for r in there))
    if not names:
        raise UsageError("no errors by length")
    figure, axes = load_pyplot().subplots(1, len(names), figsize=(4 * len(names), 5.2), sharey=True, squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        for row in DRAWN:
            mine = sorted((r["kv_length"], r["relative_l2"]) for r in there if (r["backend"], r["distribution"]) == (row, name))
            if mine:
                axis.plot(*zip(*mine, strict=True), **STYLES[row].of_line, label=row)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("keys")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("relative L2 error")
    legend_below(figure, axes[0], 4)
    figure.suptitle(f"{origin(there)}, head dim 128", fontsize=11)
    return figure


def records_of(source: Path) -> list[Record]:
    """The records of a results file of this command.

    Raises:
        UsageError: the file isn't one.
    """
    return results_of(source, "accuracy", ("case", "distribution", "relative_l2", "kv_length"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    parser.add_argument("--distribution", action="append", choices=cases.DISTRIBUTIONS, help="repeatable; default: all")
    command_line.add_peer(parser)
    parser.add_argument("--keys", type=at_least(1), action="append", help="only cases of few queries and so many keys, D 128; repeatable")
    parser.add_argument("--seeds", type=at_least(1), default=1, metavar="N", help="means over so many draws of the inputs")
    command_line.add_json(parser)
    parser.add_argument("--draw", type=input_file, metavar="FILE.jsonl", help=f"measure nothing: draw such a file as {PICTURE.name} beside it")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    if arguments.draw is not None:
        save(figure_of(records_of(arguments.draw)), command_line.sibling(arguments.draw, PICTURE.name))
        return 0
    gpu, gates = device.type == "cuda", Gates.load()
    wanted = [work for work in workloads(gpu, arguments.keys) if work[1] in (arguments.distribution or cases.DISTRIBUTIONS)]
    wanted = command_line.chosen(arguments.case, wanted, "--case", name=lambda work: work[0].name)
    rows, about = here(chosen(arguments.peer)), machine(device)
    results: list[Result] = []
    efforts = [effort(case, rows, gpu, arguments.seeds) for case, _ in wanted]
    with report.progress("accuracy") as bar:
        if gpu:
            compile_first((case for case, _ in wanted), rows, bar)
        task = bar.add_task(f"cases: {len(wanted)}, rows: {len(rows)}", total=sum(efforts), seconds=sum(efforts))
        for i, (case, distribution) in enumerate(wanted):
            bar.update(task, completed=sum(efforts[:i]))
            found = measure(case, distribution, rows, gates, device, arguments.seeds, bar.ticks(task, f"{distribution}, {case.name}, "))
            report.append(arguments.json, (report.json_line("accuracy", result.record(), about) for result in found))
            results += found
    report.console().print(table(results, gpu))
    return 0
