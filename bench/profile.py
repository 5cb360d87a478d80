"""Profiles one call with Nsight Compute: what its kernels keep busy, what they wait for, and a verdict by a rule that
is printed.

The profiled process runs `bench.profiled`. It encloses one call in the CUDA profiler's start and stop, so that nothing
else is measured, and marks quantization and forward as NVTX ranges. ncu replays each kernel a few dozen times. Its
counters are from runs without other kernels. Its durations must not be quoted: `--clock-control none` leaves the clock
at the power cap.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from . import adapters, cases, command_line, report
from .command_line import UsageError, input_file, output_file
from .machine import PROGRAM, module, module_folder
from .sheet import Sheet

HELP = "one case's kernels under Nsight Compute, and what bounds them"

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "WarpStateStats",
    "SchedulerStats",
    "LaunchStats",
    "Occupancy",
)

MUCH = 50.0
"""Percent of a unit's peak from which on the unit can be what bounds a kernel."""

SATURATED = 70.0
"""Percent of a memory's peak from which on the memory bounds a kernel."""

STALL = "smsp__average_warps_issue_stalled_"
STALLED = "_per_issue_active.ratio"


@dataclass(frozen=True)
class Counters:
    """Nsight Compute's counters of one kernel.

    Percentages are of the unit's peak while an SM has work; for DRAM and L2, over the whole time.

    Attributes:
        microseconds: duration under the profiler.
        sm_clock_ghz: SM clock while it ran.
        tensor, xu, fma, alu: busy pipes. XU computes exponentials, but also conversions.
        issue: used issue slots of all four schedulers together.
        shared: wavefronts of shared memory.
        conflicts: percentage of these wavefronts that bank conflicts added.
        dram, l2: throughput.
        l2_hits: percentage of requested sectors that hit.
        occupancy: resident warps, percent.
        registers: registers of a thread at launch.
        shared_bytes: shared memory of a block.
        local_loads: instructions that read spilled registers.
        stalls: why a warp's next instruction waits, in cycles per issued instruction, the longest first.
    """

    kernel: str
    microseconds: float
    sm_clock_ghz: float
    tensor: float
    xu: float
    fma: float
    alu: float
    issue: float
    shared: float
    conflicts: float
    dram: float
    l2: float
    l2_hits: float
    occupancy: float
    registers: float
    shared_bytes: float
    local_loads: float
    stalls: tuple[tuple[str, float], ...]


ACTIVE, ELAPSED = ".avg.pct_of_peak_sustained_active", ".avg.pct_of_peak_sustained_elapsed"

METRICS = {
    "microseconds": "gpu__time_duration.sum",
    "sm_clock_ghz": "gpc__cycles_elapsed.avg.per_second",
    "tensor": "sm__pipe_tensor_cycles_active" + ACTIVE,
    "xu": "sm__inst_executed_pipe_xu" + ACTIVE,
    "fma": "sm__pipe_fma_cycles_active" + ACTIVE,
    "alu": "sm__pipe_alu_cycles_active" + ACTIVE,
    "issue": "smsp__issue_active" + ACTIVE,
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput" + ELAPSED,
    "l2": "lts__throughput" + ELAPSED,
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "occupancy": "sm__warps_active" + ACTIVE,
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "local_loads": "smsp__sass_inst_executed_op_local_ld.sum",
}
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
TO_BASE = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6, "hz": 1e-9, "Khz": 1e-6, "Mhz": 1e-3, "Ghz": 1.0}
"""Factors from units to microseconds or GHz."""


@dataclass(frozen=True)
class Verdict:
    """What bounds a kernel, and the rule that says so, with its numbers."""

    name: str
    rule: str


def judge(c: Counters) -> Verdict:
    """The verdict of the first of these rules that holds."""
    units = {"tensor": c.tensor, "XU": c.xu, "issue": c.issue, "ALU": c.alu, "FMA": c.fma}
    busiest = max(units, key=lambda name: units[name])
    others = ", ".join(f"{name} {value:.0f} %" for name, value in units.items() if name != busiest)
    first = f"{busiest} {units[busiest]:.0f} % is the busiest and ≥ {MUCH:.0f} % ({others})"
    if c.dram > SATURATED:
        return Verdict("memory-bound", f"DRAM {c.dram:.0f} % > {SATURATED:.0f} %")
    if units[busiest] >= MUCH:
        if busiest != "tensor":
            return Verdict(f"{'exponential' if busiest == 'XU' else busiest}-bound", first)
        if c.dram < MUCH:
            return Verdict("compute-bound", f"{first}, DRAM {c.dram:.0f} % < {MUCH:.0f} %")
        return Verdict("compute- and memory-bound", f"{first}, DRAM {c.dram:.0f} % ≥ {MUCH:.0f} %")
    if c.l2 > SATURATED:
        return Verdict("L2-bound", f"no unit of an SM reaches {MUCH:.0f} %, L2 {c.l2:.0f} % > {SATURATED:.0f} %")
    if c.shared > SATURATED:
        return Verdict("shared-memory-bound", f"no unit of an SM reaches {MUCH:.0f} %, shared memory {c.shared:.0f} % > {SATURATED:.0f} %")
    reason, cycles = c.stalls[0] if c.stalls else ("unknown", 0.0)
    return Verdict(
        "latency-bound", f"nothing is saturated: {busiest} {units[busiest]:.0f} %, DRAM {c.dram:.0f} %; longest wait: {reason}, {cycles:.1f} cycles"
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def parse(text: str) -> list[Counters]:
    """Every kernel in the CSV that `ncu --csv --page raw` prints: a line of names, a line of units, and one line per
    kernel.

    Raises:
        UsageError: the text isn't such a CSV, or a counter is missing.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise UsageError("no kernel in it: it isn't what ncu --csv --page raw prints, or nothing was profiled")
    names, units = rows[0], dict(zip(rows[0], rows[1], strict=True))
    missing = [metric for metric in (*METRICS.values(), WAVEFRONTS, CONFLICTS) if metric not in units]
    if missing:
        raise UsageError(f"no counter {missing[0]} in it; this version of ncu, or this GPU, calls it differently")
    found = []
    for row in rows[2:]:
        cells = dict(zip(names, row, strict=True))
        # "n/a" or nothing: this kernel doesn't use the unit
        values = {name: _number(cells[metric]) if cells[metric] not in ("", "n/a") else 0.0 for name, metric in METRICS.items()}
        for name in ("microseconds", "sm_clock_ghz"):
            values[name] *= TO_BASE[units[METRICS[name]]]
        stalls = {
            name.removeprefix(STALL).removesuffix(STALLED).replace("_", " "): _number(cells[name])
            for name in names
            if name.startswith(STALL) and name.endswith(STALLED) and "selected" not in name and cells[name] not in ("", "n/a")
        }
        wavefronts = _number(cells[WAVEFRONTS])
        conflicts = 100 * _number(cells[CONFLICTS]) / wavefronts if wavefronts else 0.0
        longest = tuple(sorted(stalls.items(), key=lambda pair: -pair[1]))
        found.append(Counters(cells["Kernel Name"], conflicts=conflicts, stalls=longest, **values))
    return found


def target(case: cases.Case, peer: str, distribution: str) -> list[str]:
    """The words after `python` that run the profiled call."""
    return [*module("profiled"), json.dumps({"case": asdict(case), "peer": peer, "distribution": distribution})]


def ncu() -> str:
    """The path of Nsight Compute.

    Raises:
        UsageError: it isn't installed.
    """
    found = shutil.which("ncu")
    if found is None:
        raise UsageError("ncu isn't here; install Nsight Compute, which comes with the CUDA toolkit, and put it on the PATH")
    return found


def command(ncu: str, profiled: Sequence[str], clock_control: str, nvtx: str | None) -> list[str]:
    """The command line: ncu, which runs Python with the words `profiled`."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    ranges = ["--nvtx", "--nvtx-include", f"{nvtx}/"] if nvtx else []
    words = ["--clock-control", clock_control, "--profile-from-start", "off", *sections, *ranges, "--csv", "--page", "raw"]
    return [ncu, *words, sys.executable, *profiled]


def measure(profiled: Sequence[str], clock_control: str, nvtx: str | None) -> str:
    """The CSV that ncu prints.

    Raises:
        UsageError: ncu isn't installed, or it failed.
    """
    done = subprocess.run(command(ncu(), profiled, clock_control, nvtx), cwd=module_folder(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        hint = "; try --clock-control none" if clock_control != "none" else ""
        raise UsageError(f"ncu failed{hint}: {(done.stderr + done.stdout)[-1500:].strip()}")
    return done.stdout


def short(kernel: str) -> str:
    """A kernel's name without arguments and namespaces."""
    return kernel.split("(")[0].removeprefix("void ").replace("fp8attn::", "")


PERCENT = ("tensor", "xu", "fma", "alu", "issue", "shared", "conflicts", "dram", "l2", "l2_hits", "occupancy")


def table(found: Sequence[Counters], title: str) -> Sheet:
    """A table with a column for each kernel."""
    headers = [short(c.kernel) for c in found]
    made = report.table_of(title, ("",), headers, "Percent of the unit's peak. Stalls: cycles per instruction issued.")
    made.add_row("µs under the profiler", *(f"{c.microseconds:.1f}" for c in found))
    made.add_row("SM clock, GHz", *(f"{c.sm_clock_ghz:.2f}" for c in found))
    for name in PERCENT:
        made.add_row(name.replace("_", " "), *(f"{getattr(c, name):.1f}" for c in found))
    for name in ("registers", "shared_bytes", "local_loads"):
        made.add_row(name.replace("_", " "), *(f"{getattr(c, name):.0f}" for c in found))
    for i in range(3):
        made.add_row(f"stall {i + 1}", *(f"{c.stalls[i][0]} {c.stalls[i][1]:.2f}" if len(c.stalls) > i else "–" for c in found))
    made.add_row("verdict", *(judge(c).name for c in found), style="bold")
    return made


def record(c: Counters) -> dict[str, object]:
    """One flat JSON object."""
    verdict = judge(c)
    return asdict(c) | {"stalls": dict(c.stalls), "verdict": verdict.name, "rule": verdict.rule}


DEFAULTS = tuple(f"D{dim} full 4k" for dim in (64, 128, 256))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", metavar="NAME", help=f"repeatable; default: {', '.join(DEFAULTS)}")
    parser.add_argument("--peer", metavar="NAME", help=f"whose kernels (default: fp8attn cuda); `{PROGRAM} peers` lists them")
    parser.add_argument("--distribution", choices=cases.DISTRIBUTIONS, help="of the inputs (default: normal)")
    parser.add_argument("--clock-control", choices=("none", "base"), help="default: none; base needs rights that virtual machines lack")
    parser.add_argument("--nvtx", choices=("quantize", "forward"), help="only kernels of this range of an end-to-end call")
    parser.add_argument("--from", dest="source", type=input_file, metavar="FILE.csv", help="judge what ncu --csv --page raw printed, don't measure")
    parser.add_argument("--raw", type=output_file, metavar="FILE.csv", help="keep ncu's CSV")
    command_line.add_json(parser)
    parser.epilog = f"Cases: {', '.join(by_name())}."


def by_name() -> dict[str, cases.Case]:
    """All cases of all suites, by name."""
    return {case.name: case for suite in cases.SUITES.values() for case in suite}


OF_MEASURING = ("case", "peer", "distribution", "clock_control", "nvtx", "raw")


def texts_of(arguments: argparse.Namespace) -> dict[str, str]:
    """ncu's CSV by case, or that of the given file.

    Raises:
        UsageError: a requested case or peer doesn't exist, ncu isn't installed, or it failed.
    """
    if arguments.source is not None:
        given = [name for name in OF_MEASURING if getattr(arguments, name) is not None]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} says how to measure; with --from nothing is")
        return {str(arguments.source): arguments.source.read_text(errors="replace")}
    everything, peer = by_name(), arguments.peer or "fp8attn cuda"
    wanted = list(dict.fromkeys(arguments.case or DEFAULTS))
    for name in wanted:
        if name not in everything:
            raise UsageError(f"no case is named {name!r}; there are {', '.join(everything)}")
    if peer not in {one.name for one in adapters.PEERS}:
        raise UsageError(f"no peer is named {peer!r}; there are {', '.join(one.name for one in adapters.PEERS)}")
    ncu()
    adapters.here([one for one in adapters.PEERS if one.name == peer])
    texts = {}
    with report.progress("profile") as bar:
        task = bar.add_task(f"cases: {len(wanted)}", total=len(wanted))
        for name in wanted:
            bar.update(task, description=f"{name}, {peer}, under Nsight Compute")
            profiled = target(everything[name], peer, arguments.distribution or "normal")
            texts[name] = measure(profiled, arguments.clock_control or "none", arguments.nvtx)
            bar.advance(task)
    return texts


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    texts = texts_of(arguments)
    found = {name: parse(text) for name, text in texts.items()}
    if arguments.raw is not None:
        arguments.raw.write_text("\n".join(texts.values()))
    for name, kernels in found.items():
        report.console().print(table(kernels, name))
        for c in kernels:
            verdict = judge(c)
            report.say(f"{short(c.kernel)}: {verdict.name}: {verdict.rule}")
        about = {"case": name, "peer": None if arguments.source else arguments.peer or "fp8attn cuda"}
        report.append(arguments.json, (report.json_line("profile", record(c), about) for c in kernels))
    return 0
