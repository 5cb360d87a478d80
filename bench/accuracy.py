"""Errors against exact attention in float64, by distribution, length, head dim and mask, without timing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from . import cases, report
from .adapters import here
from .cases import Case, Workload
from .compiling import compile_first
from .errors import Errors, standard_error
from .gates import Gates
from .machine import machine
from .peers import Answer, Peer, Problem, answer
from .plot import legend_below, load_pyplot, origin, save
from .readme import RESULTS, Record
from .rows import chosen

HELP = "errors against float64 attention by distribution, length, head dim and mask: every recipe, and others' FP8 kernels"

PICTURE = RESULTS / "accuracy.svg"

LENGTHS = (128, 512, 2048, 16384, 65536, 131072, 524288)
LENGTHS_ON_CPU = (128, 512, 2048, 16384)
LONG_QUERIES = 256
"""At most, where length is what matters: float64 attention of 512k of them would take hours."""

BY_LENGTH = ("normal", "one-sign", "sinks", "outliers")


def _keys(length: int) -> str:
    return f"{length // 1024}k keys" if length >= 1024 else f"{length} keys"


def by_length(length: int, queries: int) -> Case:
    return Case(f"{_keys(length)} D128", 1, 1, 1, min(queries, length), length, 128, 128, causal=False)


def by_distribution(length: int, heads: int, dim: int, causal: bool) -> Case:
    return cases.square(f"{_keys(length)} D{dim}{' causal' if causal else ''}", 1, heads, length, dim, causal)


def workloads(gpu: bool) -> list[Workload]:
    """What is looked at; without a GPU, small cases and few queries."""
    dims, length, heads = ((64, 128, 256), 4096, 2) if gpu else ((64, 128), 1024, 1)
    found = [(by_distribution(length, heads, dim, causal), name) for name in cases.DISTRIBUTIONS for dim in dims for causal in (False, True)]
    lengths, queries = (LENGTHS, LONG_QUERIES) if gpu else (LENGTHS_ON_CPU, 32)
    return found + [(by_length(keys, queries), name) for name in BY_LENGTH for keys in lengths]


@dataclasses.dataclass(frozen=True)
class Result:
    """One row's errors on a case, or why there are none.

    Attributes:
        errors: means over `seeds` draws of the inputs.
        standard_error: of the mean of relative_l2, None of one draw.
    """

    case: Case
    distribution: str
    row: str
    errors: Errors | None
    refused: str | None
    seeds: int = 1
    standard_error: float | None = None

    def record(self) -> Record:
        """One flat JSON object, errors to five digits."""
        case = {name: getattr(self.case, name) for name in ("q_heads", "q_length", "kv_length", "head_dim", "causal")}
        errors: dict[str, Any] = dict.fromkeys(Errors.__dataclass_fields__)
        if self.errors is not None:
            # cosines lie next to one
            errors = {name: float(f"{x:.5g}") if name != "cosine" else round(x, 8) for name, x in dataclasses.asdict(self.errors).items()}
        draws = {"seeds": self.seeds, "standard_error": None if self.standard_error is None else float(f"{self.standard_error:.3g}")}
        return {"case": self.case.name, **case, "backend": self.row, "distribution": self.distribution, **errors, **draws, "refused": self.refused}


def measure(case: Case, distribution: str, rows: Sequence[Peer], gates: Gates, device: torch.device, seeds: int = 1) -> list[Result]:
    """Every row's errors; those of `seeds` draws of the inputs, the first of which is everyone's, are averaged. Who refuses one has none."""
    given: dict[str, list[Answer]] = {row.name: [] for row in rows}
    for seed in range(cases.SEED, cases.SEED + seeds):
        problem = Problem.of(case, distribution, device, rotate=False, seed=seed)
        expected = problem.expected(torch.float64)
        for row in rows:
            given[row.name].append(dataclasses.replace(answer(row, problem, expected, gates.bad), attention=None))  # which would keep its inputs
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


def table(results: Sequence[Result], gpu: bool) -> Table:
    """All errors of every row."""
    where = "" if gpu else " Without a GPU recipes' rows are the pipeline's oracle, and lengths end where a CPU's patience does."
    headers = ("RMSE", "relative L2", "cosine", "SQNR dB", "worst element")
    made = report.table_of("Errors against float64", ("inputs", "case", "row"), headers, f"–: refused, --json keeps the reason.{where}")
    for i, result in enumerate(results):
        new = i == 0 or (result.case, result.distribution) != (results[i - 1].case, results[i - 1].distribution)
        if new:
            made.add_section()
        e = result.errors
        about = "" if result.standard_error is None else f" ± {result.standard_error:.4f}"
        cells = (
            ("–",) * 5 if e is None else (f"{e.rmse:.2e}", f"{e.relative_l2:.4f}{about}", f"{e.cosine:.6f}", f"{e.sqnr_db:.1f}", f"{e.max_abs:.2e}")
        )
        names = (result.distribution, result.case.name) if new else ("", "")
        made.add_row(*names, result.row, *cells, style="bold" if result.row.startswith("fp8attn") else None)
    return made


DRAWN = {
    "fp8attn cuda end to end": ("#D55E00", "o", "-"),
    "fp8attn triton end to end": ("#0072B2", "s", "-"),
    "fp8attn rotated": ("#E69F00", "v", "-"),
    "fp8attn not rotated": ("#E69F00", "X", "--"),
    "fp8attn V not smoothed": ("#F0E442", "<", "-"),
    "fp8attn f16": ("#56B4E9", ">", "-"),
    "cuDNN e4m3": ("#000000", "P", "-"),
    "e4m3 one level": ("#009E73", "D", "-"),
    "FA3 e4m3, modelled": ("#009E73", "d", ":"),
    "FA3 e4m3 two-level": ("#CC79A7", "X", ":"),
    "SDPA flash": ("#999999", "^", "--"),
}
"""Rows in the picture: colour, marker, line."""


def draw(records: Sequence[Record], to: Path) -> None:
    """Relative L2 error over the number of keys, a panel for each distribution; the format is `to`'s suffix.

    Raises:
        ValueError: there is nothing to draw.
    """
    there = [r for r in records if r["case"].endswith("keys D128") and r["distribution"] in BY_LENGTH and r["relative_l2"]]
    names = list(dict.fromkeys(r["distribution"] for r in there))
    if not names:
        raise ValueError("no errors by length")
    figure, axes = load_pyplot().subplots(1, len(names), figsize=(4 * len(names), 3.8), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for row, (colour, marker, line) in DRAWN.items():
            mine = sorted((r["kv_length"], r["relative_l2"]) for r in there if (r["backend"], r["distribution"]) == (row, name))
            if mine:
                axis.plot(*zip(*mine, strict=True), color=colour, marker=marker, linestyle=line, label=row)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("keys")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("relative L2 error")
    legend_below(figure, axes[0][0], 5)
    figure.suptitle(f"{origin(there)}, head dim 128", fontsize=11)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    save(figure, to)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", default="", metavar="SUBSTRING", help="only cases with this in their names")
    parser.add_argument("--distribution", action="append", choices=cases.DISTRIBUTIONS, help="repeatable; default: all")
    parser.add_argument("--peer", action="append", metavar="SUBSTRING", help="only rows with this in their names; repeatable")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="means over so many draws of the inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    parser.add_argument("--draw", type=Path, metavar="FILE.jsonl", help=f"measure nothing: draw such a file as {PICTURE.name} beside it")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    gpu, gates, about = device.type == "cuda", Gates.load(), machine(device)
    try:
        if arguments.draw is not None:
            draw([json.loads(line) for line in arguments.draw.read_text().splitlines()], arguments.draw.with_name(PICTURE.name))
            return 0
        rows = chosen(arguments.peer)
        if arguments.seeds < 1:
            raise ValueError(f"--seeds is {arguments.seeds}; it must be 1 or more")
    except (OSError, ValueError) as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    rows = here(rows)
    wanted = [
        (case, name) for case, name in workloads(gpu) if arguments.case in case.name and name in (arguments.distribution or cases.DISTRIBUTIONS)
    ]
    results: list[Result] = []
    with report.progress() as bar:
        if gpu:
            compile_first((case for case, _ in wanted), rows, bar)
        task = bar.add_task("", total=len(wanted))
        for case, distribution in wanted:
            bar.update(task, description=f"{distribution}, {case.name}")
            found = measure(case, distribution, rows, gates, device, arguments.seeds)
            report.append(arguments.json, (report.json_line("accuracy", result.record(), about) for result in found))
            results += found
            bar.advance(task)
    report.console().print(table(results, gpu))
    return 0
