"""Runs the CUDA kernels under compute-sanitizer: a problem of every shape class with every instance that can run it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from . import command_line, launched, report
from .command_line import UsageError, more_than_zero
from .ladder import lacking
from .machine import machine, module, module_folder
from .sheet import Sheet

HELP = "compute-sanitizer over a case of every shape class"

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

FOUND = 9
"""Exit code of a run with findings."""

SUMMARY = re.compile(r"(ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?.*)")


FINDING = re.compile(
    r"^=========  ?(?=(?:Error: |Warning: )?(?:Invalid|Uninitialized|Race|Potential|Barrier|Program hit))(.*)\n=========\s+(.*)", re.MULTILINE
)

PLACES = re.compile(r"\+?0x[0-9a-f]+|\(\d+,\d+,\d+\)")

SHAPES_DONE = re.compile(r": \d+ instances$", re.MULTILINE)

PRINTED = 100_000
"""Most findings that a tool prints; large enough that all are counted."""

SHOWN = 8
"""Number of kinds of findings in the table."""


def command(sanitizer: str, tool: str) -> list[str]:
    return [sanitizer, "--tool", tool, "--print-limit", str(PRINTED), "--error-exitcode", str(FOUND), sys.executable, *module("launched")]


def judged(code: int, output: str) -> tuple[int | None, str]:
    """The number of findings, None if the tool didn't finish; and its last words.

    Args:
        code: exit code.
        output: output of the tool and of the observed process.
    """
    found = SUMMARY.findall(output)
    if not found or code not in (0, FOUND):
        return None, (output.strip().splitlines() or ["no output"])[-1]
    words, errors, hazards = found[-1]
    return int(errors or hazards), words


def kinds(output: str) -> Counter[str]:
    """How often the tool found each kind of finding: its first two lines, which say what it is and in which kernel,
    without addresses and threads.

    Args:
        output: output of the tool and of the observed process.
    """
    return Counter(PLACES.sub("", f"{what.strip()} {where.strip()}") for what, where in FINDING.findall(output))


def watched(sanitizer: str, tool: str, seconds: float) -> tuple[int | None, str, str]:
    """The results of `judged`: findings and the tool's last words; and the whole output."""
    # torch's cache would hide accesses outside of a tensor
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command(sanitizer, tool), cwd=module_folder(), env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as late:
        output = "".join(part.decode(errors="replace") for part in (late.stdout, late.stderr) if isinstance(part, bytes))
        return None, f"not done after {seconds:.0f} s; {len(SHAPES_DONE.findall(output))} of {len(launched.SHAPES)} shapes were", output
    output = done.stdout + done.stderr
    return *judged(done.returncode, output), output


def table(judgements: Sequence[tuple[str, int | None, str, Counter[str]]]) -> Sheet:
    """A table of tools with their findings and last words, and below each its most frequent kinds of findings."""
    made = report.table_of("compute-sanitizer", ("tool",), ("findings",), "–: the tool didn't come to an end.", words=("its words",))
    for tool, findings, words, counted in judgements:
        made.add_row(tool, report.number_of(findings, "d"), words)
        for kind, times in counted.most_common(SHOWN):
            made.add_row("", str(times), kind)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default: all")
    parser.add_argument("--timeout", type=more_than_zero, default=1200.0, metavar="SECONDS", help="of one tool (default: %(default)s)")
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    reason = lacking(device)
    sanitizer = shutil.which("compute-sanitizer")
    if reason is None and sanitizer is None:
        reason = "compute-sanitizer isn't here; it comes with the CUDA toolkit; put it on the PATH"
    if reason is not None or sanitizer is None:
        raise UsageError(reason)
    tools, about = list(dict.fromkeys(arguments.tool or TOOLS)), machine(device)
    judgements = []
    with report.progress("sanitize") as bar:
        task = bar.add_task("compiling all instances", total=len(tools))
        launched.loaded(device)  # compile now, so that compilers aren't observed
        for tool in tools:
            bar.update(task, description=f"{tool}, {arguments.timeout:.0f} s at most")
            findings, words, output = watched(sanitizer, tool, arguments.timeout)
            judgements.append((tool, findings, words, kinds(output)))
            report.append(arguments.json, [report.json_line("sanitize", {"tool": tool, "findings": findings, "words": words}, about)])
            bar.advance(task)
    report.console().print(table(judgements))
    return 0 if all(findings == 0 for _, findings, *_ in judgements) else 1
