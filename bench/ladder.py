"""The ladder: the gain of each feature of the portable CUDA kernel, from one interleaved run with other kernels for
comparison."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fp8attn
from fp8attn import Recipe
from fp8attn.call import Call
from fp8attn.cuda import build, portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.portable import BEST, LADDER, PortableConfig
from fp8attn.device import Device, device_of
from fp8attn.prepare import call_of

from . import command_line, profile, report
from .cases import Case, square
from .command_line import NO_GPU, UsageError, at_least, input_file, more_than_zero, picture_file
from .errors import Bad, Errors
from .gates import Gates
from .machine import machine, module
from .peers import PYTORCH, Attention, Problem, answer, poison
from .plot import BLUE, legend_below, load_pyplot, origin, results_of, save
from .progress import Tick, no_tick
from .readme import RESULTS
from .sheet import Sheet
from .timing import Protocol, Timing, tflops, time_all

HELP = "what each feature of the portable CUDA kernel is worth"

CASES = (square("B2 H8 S512 D64", 2, 8, 512, 64), square("B1 H16 S4096 D128", 1, 16, 4096, 128))

PICTURE = RESULTS / "ladder.png"
LIGHT = "#BBBBBB"


@dataclass(frozen=True)
class Result:
    """One rung, or one peer, on one case.

    Attributes:
        config: the rung's config; None for a peer.
        against_previous, against_first: median of the previous rung and of rung 0, divided by this one's; more than 1
            is faster.
        conflicts: percentage of shared-memory wavefronts that bank conflicts added, by Nsight Compute; None if not
            measured.
        resources: ptxas's numbers for the kernel: registers of a thread, bytes of stack and spills.
        refused: why there is no timing, or None.
    """

    case: Case
    rung: str
    config: PortableConfig | None
    errors: Errors | None = None
    timing: Timing | None = None
    against_previous: float | None = None
    against_first: float | None = None
    conflicts: float | None = None
    resources: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: str | None = None

    @property
    def tflops(self) -> float | None:
        return None if self.timing is None else tflops(self.case.flops, self.timing.p50_us)

    def record(self) -> dict[str, Any]:
        """One flat JSON object; fields that don't apply are null."""
        timing: dict[str, Any] = dict.fromkeys(Timing.__dataclass_fields__) if self.timing is None else dataclasses.asdict(self.timing)
        errors: dict[str, Any] = dict.fromkeys(Errors.__dataclass_fields__) if self.errors is None else dataclasses.asdict(self.errors)
        return {
            **self.case.record(),
            "rung": self.rung,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            **timing,
            "tflops": self.tflops,
            "against_previous": self.against_previous,
            "against_first": self.against_first,
            "conflicts": self.conflicts,
            "registers": self.resources.get("registers"),
            "stack": self.resources.get("stack"),
            "spills": self.resources.get("spill_stores"),
            "shared_bytes": None if self.config is None else self.config.shared_bytes,
            **errors,
            "refused": self.refused,
        }


def rungs(dim: int) -> dict[str, PortableConfig]:
    """The rungs at a head dim: the ladder, and the best configs on the GPU on which they were tuned."""
    return {**LADDER[dim], **BEST[dim]}


def recipe_of(config: PortableConfig) -> Recipe:
    """The recipe that quantizes a rung's inputs."""
    return Recipe(qk="int8") if config.int8 else Recipe()


def configs(device: Device) -> tuple[PortableConfig, ...]:
    """The configs that are compiled for all cases, at once."""
    everything = (config for case in CASES for config in rungs(case.head_dim).values())
    return tuple(config for config in dict.fromkeys(everything) if portable.fits(config, device))


def measure(case: Case, bad: Bad, protocol: Protocol, device: torch.device, tick: Tick = no_tick) -> list[Result]:
    """Every rung of a case in order, then the Hopper kernel if the device has it, then PyTorch's backends.

    Args:
        tick: called for every turn, which counts as 1.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    properties = device_of(device)
    compiled = configs(properties)
    build.load(compiled, properties.arch)
    meta = build.built(compiled, properties.arch) or {"resources": {}}
    every = rungs(case.head_dim)
    problem = Problem.of(case, "normal", device, rotate=True)
    expected = problem.expected()
    recipes = set(map(recipe_of, every.values()))
    quantized = {recipe: [call_of(*tensors, recipe=recipe, **case.options) for tensors in problem.sets] for recipe in recipes}

    def attention(calls: Sequence[Call], config: PortableConfig | None = None) -> Attention:
        return lambda i: cuda_run.forward(calls[i % len(calls)], properties, config)[0]

    runs: dict[str, Attention] = {}
    results: list[Result] = []
    for name, config in every.items():
        reason = portable.unsupported_config(config, properties)
        if reason is not None:
            results.append(Result(case, name, config, refused=reason))
            continue
        poison(problem)
        runs[name] = attention(quantized[recipe_of(config)], config)
        results.append(Result(case, name, config, Errors.of(runs[name](0), expected, bad), resources=meta["resources"].get(config.name, {})))
    calls = quantized[Recipe()]
    if not isinstance(cuda_run.choose(calls[0], properties), PortableConfig):
        name = "fp8attn Hopper kernel"
        runs[name] = attention(calls)
        results.append(Result(case, name, None, Errors.of(runs[name](0), expected, bad)))
    for peer in PYTORCH:
        given = answer(peer, problem, expected, bad)
        if given.attention is not None:
            runs[peer.name] = given.attention
        results.append(Result(case, peer.name, None, given.errors, refused=given.refused))
    timed = time_all(runs, len(problem.sets), protocol, device, tick)
    return _compared(results, {name: found.timing for name, found in timed.items()})


def _compared(results: list[Result], timings: dict[str, Timing]) -> list[Result]:
    """The results with timings, and with speeds relative to the previous rung and to rung 0."""
    found: list[Result] = []
    first = previous = None
    for result in results:
        timing = timings.get(result.rung)
        if timing is not None:
            result = dataclasses.replace(
                result,
                timing=timing,
                against_previous=previous / timing.p50_us if previous is not None and result.config is not None else None,
                against_first=first / timing.p50_us if first is not None else None,
            )
            if result.config is not None:
                previous = timing.p50_us
                first = timing.p50_us if first is None else first
        found.append(result)
    return found


def with_conflicts(results: Sequence[Result], counters: Sequence[profile.Counters]) -> list[Result]:
    """The rungs with the bank conflicts that Nsight Compute counted for their kernels."""
    found = []
    for result in results:
        config = result.config
        counted = [c.conflicts for c in counters if config is not None and re.search(rf"\b{config.name}\b", c.kernel)]
        found.append(dataclasses.replace(result, conflicts=counted[0] if counted else None))
    return found


def figure_of(records: Sequence[dict[str, Any]]) -> Any:
    """A figure of the TFLOP/s of every rung and peer, with a panel for each case.

    Raises:
        ValueError: nothing was timed.
    """
    timed = [record for record in records if record["tflops"] is not None]
    names = list(dict.fromkeys(record["case"] for record in timed))
    if not names:
        raise ValueError("no rung was timed")
    figure, axes = load_pyplot().subplots(1, len(names), figsize=(7 * len(names), 6.3), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        rows = [record for record in timed if record["case"] == name]
        for label, colour, is_rung in (("rungs of the portable kernel", BLUE, True), ("other kernels", LIGHT, False)):
            mine = [(i, row) for i, row in enumerate(rows) if (row["config"] is not None) == is_rung]
            bars = axis.barh([i for i, _ in mine], [row["tflops"] for _, row in mine], color=colour, label=label)
            axis.bar_label(bars, [f"{row['tflops']:.0f}  ({row['p50_us']:.1f} µs)" for _, row in mine], padding=3, fontsize=8)
        axis.set_yticks(range(len(rows)), [row["rung"] for row in rows])
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("TFLOP/s, kernel alone")
    legend_below(figure, axes[0], 2)
    figure.suptitle(origin(timed), fontsize=11)
    return figure


def draw(records: Sequence[dict[str, Any]], to: Path) -> None:
    """Draw the picture. The suffix of `to` determines the format.

    Raises:
        ValueError: nothing was timed.
    """
    save(figure_of(records), to)


def table(results: Sequence[Result]) -> Sheet:
    """A table of rungs in order, then peers."""
    headers = (
        "p50 µs", "p90", "samples", "× previous", "× rung 0", "TFLOP/s", "conflicts, %", "registers", "shared bytes", "spills", "relative L2",
        "max error",
    )  # fmt: skip
    caption = "Medians of one interleaved run; –: a peer, or refused."
    optional = ("samples", "p90", "max error", "shared bytes", "spills", "registers")
    rows = report.table_of(f"The ladder, {results[0].case.name}", ("rung",), headers, caption, optional=optional)
    for r in results:
        if r.config is None and (r is results[0] or results[results.index(r) - 1].config is not None):
            rows.add_section()
        times = ("–", "–", "–") if r.timing is None else (report.us_of(r.timing.p50_us), report.us_of(r.timing.p90_us), str(r.timing.samples))
        speeds = (report.number_of(r.against_previous, ".2f"), report.number_of(r.against_first, ".2f"), report.number_of(r.tflops, ".0f"))
        shared = None if r.config is None else r.config.shared_bytes
        numbers = (*(report.number_of(n, "d") for n in (r.resources.get("registers"), shared, r.resources.get("spill_stores"))),)
        conflicts = report.number_of(r.conflicts, ".1f")
        errors = ("–", "–") if r.errors is None else (f"{r.errors.relative_l2:.4f}", f"{r.errors.max_abs:.4f}")
        rows.add_row(r.rung, *times, *speeds, conflicts, *numbers, *errors)
    return rows


def lacking(device: torch.device) -> str | None:
    """The reason why the ladder can't be measured here, or None."""
    if device.type != "cuda":
        return NO_GPU
    return fp8attn.backends.cuda_unavailable(device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns that every rung gets (default: %(default)s)")
    parser.add_argument(
        "--milliseconds", type=more_than_zero, default=130.0, help="length of a turn (default: %(default)s, 100 samples of the slowest rung)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="count conflicts of shared memory's banks under Nsight Compute, in a process of its own"
    )
    command_line.add_json(parser)
    parser.add_argument("--picture", type=picture_file, metavar="FILE", help=f"draw a bar chart; the docs' is {PICTURE.name}")
    parser.add_argument("--draw", type=input_file, metavar="FILE.jsonl", help=f"measure nothing: draw such a file as {PICTURE.name} beside it")


def records_of(source: Path) -> list[dict[str, Any]]:
    """The records of a results file of this command.

    Raises:
        UsageError: the file isn't one.
    """
    return results_of(source, "ladder", ("rung", "config", "tflops"))


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    if arguments.draw is not None:
        draw(records_of(arguments.draw), command_line.sibling(arguments.draw, PICTURE.name))
        return 0
    works = command_line.chosen(arguments.case, CASES, "--case")
    reason = lacking(device)
    if reason is not None:
        raise UsageError(reason)
    if arguments.profile:
        profile.ncu()
    gates, about = Gates.load(), machine(device)
    protocol = Protocol(arguments.rounds, arguments.milliseconds)
    records, tables = [], []
    with report.progress("ladder") as bar:
        turns = {case: protocol.rounds * (len(rungs(case.head_dim)) + 1 + len(PYTORCH)) for case in works}
        task = bar.add_task("compiling every rung", total=sum(turns.values()))
        for i, case in enumerate(works):
            bar.update(task, completed=sum(turns[one] for one in works[:i]))
            results = measure(case, gates.bad, protocol, device, bar.ticks(task, f"{case.name}, "))
            if arguments.profile:
                bar.update(task, description=f"{case.name}, under Nsight Compute")
                counted = profile.measure([*module("launched"), json.dumps(dataclasses.asdict(case))], "none", None)
                results = with_conflicts(results, profile.parse(counted))
            report.append(arguments.json, (report.json_line("ladder", result.record(), about) for result in results))
            records += [result.record() | about for result in results]
            tables.append(table(results))
    for made in tables:
        report.console().print(made)
    if arguments.picture is not None:
        draw(records, arguments.picture)
    return 0
