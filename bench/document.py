"""Turns a results file into a report: Markdown tables, and pictures next to them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import plot, report
from .command_line import UsageError, input_file, output_folder, require_matplotlib
from .machine import PROGRAM
from .peers import END_TO_END, KERNEL
from .progress import Tick, no_tick
from .readme import markdown_table
from .report import number_of

HELP = "a results file of `run` as a folder with report.md and its pictures, PNG and SVG"

Record = dict[str, Any]

SHARES = {"against_sdpa": ".2f", "share_of_limit": ".0%", "relative_l2": ".4f"}
"""Numbers that are reported for the first of fp8attn's rows, and their formats."""


def _cases(records: Sequence[Record]) -> list[list[Record]]:
    """Records in groups of one case and one distribution."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["case"], record["distribution"]), []).append(record)
    return list(groups.values())


def markdown(records: Sequence[Record]) -> str:
    """Tables for kernels alone and from bfloat16 on.

    Each has one row per case with each backend's median µs and TFLOP/s; and for fp8attn's first timed row, its speed
    relative to PyTorch's fastest backend, its fraction of the hardware's limit and its error. A list of what was
    refused, and why, follows.
    """
    first = records[0]
    versions = ", ".join(f"{name} {first[name]}" for name in ("driver", "torch", "triton") if first.get(name))
    where = first["gpu"] or "Triton's interpreter on a CPU: the times mean nothing for speed"
    parts = [f"{where}; {versions}; commit {first['commit'][:7]}, {first['date'][:10]}\n"]
    for stage in (KERNEL, END_TO_END):
        there = [record for record in records if stage in record["stages"]]
        backends = list(dict.fromkeys(record["backend"] for record in there if record["p50_us"] is not None))
        head = ["case", "inputs", *(f"{name}, µs (TFLOP/s)" for name in backends), "× fastest SDPA", "of limit", "relative L2"]
        rows = []
        for group in _cases(there):
            cells = {r["backend"]: f"{r['p50_us']:.1f} ({r['tflops']:.0f})" for r in group if r["p50_us"] is not None}
            own = next((r for r in group if r["backend"].startswith("fp8attn") and r["p50_us"] is not None), {})
            shares = [number_of(own.get(key), form) for key, form in SHARES.items()]
            rows.append([group[0]["case"], group[0]["distribution"], *(cells.get(name, "–") for name in backends), *shares])
        parts.append(f"**{stage.capitalize()}**\n\n{markdown_table(head, rows, 2)}\n")
    refusals = dict.fromkeys((record["backend"], record["refused"].splitlines()[0]) for record in records if record["refused"])
    if refusals:
        parts.append("**Not timed**\n\n" + "\n".join(f"- {backend}: {why}" for backend, why in refusals) + "\n")
    return "\n".join(parts)


def markdown_of(source: Path) -> str:
    """The tables of a results file.

    Raises:
        UsageError: the file isn't a results file of `run`.
    """
    try:
        return markdown([json.loads(line) for line in source.read_text().splitlines()])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"{source} isn't a results file of {PROGRAM} run: {error!r}") from error


def write(source: Path, folder: Path, tick: Tick = no_tick) -> list[Path]:
    """Write report.md and all pictures for which there are results.

    Args:
        tick: called for every kind of picture, which counts as 1.

    Raises:
        UsageError: the file isn't a results file of `run`.
    """
    text = markdown_of(source)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in plot.KINDS:
        tick(f"{kind}.svg and {kind}.png", 0.0)
        try:
            for suffix in ("svg", "png"):
                plot.draw(folder / f"{kind}.{suffix}", source, kind)
                written.append(folder / f"{kind}.{suffix}")
            text += f"\n![{kind}]({kind}.svg)\n"
        except UsageError:
            pass  # nothing of this kind was measured
        tick(kind, 1.0)
    (folder / "report.md").write_text(text)
    return [folder / "report.md", *written]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=input_file, metavar="FILE.jsonl")
    parser.add_argument("--to", type=output_folder, required=True, metavar="FOLDER")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    require_matplotlib()
    with report.progress("report") as bar:
        task = bar.add_task("pictures", total=len(plot.KINDS))
        written = write(arguments.source, arguments.to, bar.ticks(task))
    for path in written:
        print(path)
    return 0
