"""How long a process waits for the first call of every kind, with empty caches."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fp8attn
from fp8attn.cuda import build

from . import command_line, report
from .command_line import NO_GPU, UsageError
from .first_calls_child import FOLDERS, KINDS
from .machine import machine
from .progress import Tick, no_tick
from .sheet import Sheet

HELP = "how long a process waits for the first call of every kind, with empty caches"


@dataclass(frozen=True)
class Start:
    """Seconds until torch, and then fp8attn, is imported."""

    torch_s: float
    import_s: float


@dataclass(frozen=True)
class FirstCall:
    """A kind of call.

    Attributes:
        milliseconds: from the first call of this kind until the GPU has its answer.
        compiled: number of libraries and GPU binaries that it compiled.
        again_ms: of the second call.
    """

    kind: str
    milliseconds: float
    compiled: int
    again_ms: float


def measure(kinds: Sequence[str], tick: Tick = no_tick) -> Iterator[Start | FirstCall]:
    """What a new process measures, as it comes.

    Args:
        kinds: some of KINDS.
        tick: called for the imports and for every kind, which count as 1.

    Raises:
        RuntimeError: the process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {}
        for name in FOLDERS:
            caches[name] = str(Path(folder) / name.lower())
            Path(caches[name]).mkdir(mode=0o700)
        path = os.pathsep.join([str(Path(fp8attn.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        child = [sys.executable, str(Path(__file__).with_name("first_calls_child.py")), *kinds]
        with subprocess.Popen(child, env=os.environ | caches | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told = json.loads(line)
                tick(told.get("kind", "import"), 1.0)
                yield FirstCall(**told) if "kind" in told else Start(**told)
    if process.returncode:
        raise RuntimeError(f"the measuring process failed with exit code {process.returncode}")


def table(start: Start, calls: Sequence[FirstCall]) -> Sheet:
    """A row for every kind of call."""
    note = (
        f"One process, caches empty at its start. import torch: {start.torch_s:.2f} s; then import fp8attn: {start.import_s:.2f} s."
        " first, second: until the GPU has the answer. compiled: libraries and GPU binaries."
    )
    made = report.table_of("First calls, ms", ("call",), ("first", "compiled", "second"), note)
    for one in calls:
        made.add_row(one.kind, f"{one.milliseconds:,.1f}", str(one.compiled), f"{one.again_ms:.2f}")
    return made


def about(device: torch.device) -> dict[str, Any]:
    """The machine, and whether the kernels came with the package."""
    return machine(device) | {"prebuilt": build.prebuilt(build.Binding()) is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command_line.add_case(parser)
    command_line.add_json(parser)


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    kinds = command_line.chosen(arguments.case, list(KINDS), "--case", name=str)
    if device.type != "cuda":
        raise UsageError(NO_GPU)
    found: list[Start | FirstCall] = []
    with report.progress("first-calls") as bar:
        task = bar.add_task("calls", total=1 + len(kinds))
        for one in measure(kinds, bar.ticks(task)):
            found.append(one)
            report.append(arguments.json, [report.json_line("first-calls", asdict(one), about(device))])
    start, *calls = found
    assert isinstance(start, Start)
    report.console().print(table(start, [one for one in calls if isinstance(one, FirstCall)]))
    return 0
