"""The README's tables, from the committed results: rendered between markers, so that no number in them was typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .machine import ROOT

README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"

Record = dict[str, Any]


def _lines(name: str) -> list[Record]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table whose first `words` columns hold words, the others numbers."""
    ruler = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def _machine(records: Sequence[Record]) -> str:
    """On what all of them were measured: one line."""
    first = records[0]
    assert all(record["commit"] == first["commit"] and record["gpu"] == first["gpu"] for record in records), "results of more than one run"
    cudnn = f"{first['cudnn'] // 10000}.{first['cudnn'] // 100 % 100}"
    return (
        f"{first['gpu']}, driver {first['driver']}, torch {first['torch']}, cuDNN {cudnn}, Triton {first['triton']},"
        f" {first['date'][:10]}, commit {first['commit'][:7]}"
    )


def _by_case(records: Sequence[Record], *keys: str) -> dict[tuple, dict[str, Record]]:
    """Records by case, and of each by backend, in the order of the file."""
    found: dict[tuple, dict[str, Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), {})[record["backend"]] = record
    return found


SMALL = {"small", "mission-256", "long", "B2 H8 S512 D64 causal", "B1 H8 S512 D64 full", "B2 H8 S512 D64 full"}
"""Cases that the README leaves to the results' file; of the mission shape it has one row."""


def speed() -> str:
    """Kernels alone beside cuDNN, and the whole path from bf16."""
    records = _lines("side_by_side")
    rows = []
    for (case,), by in _by_case(records, "case").items():
        if case in SMALL:
            continue
        kernel, triton, whole, cudnn = (by[name] for name in ("fp8attn cuda", "fp8attn triton", "fp8attn cuda end to end", "SDPA cuDNN"))
        flops = [f"{record['tflops']:.0f}" for record in (kernel, triton, cudnn)]
        ratio = kernel["tflops"] / cudnn["tflops"], cudnn["p50_us"] / whole["p50_us"]
        name = "B2 H8 S512 D64 full" if case == "mission" else case
        rows.append([name, *flops, f"{ratio[0]:.2f}", f"{whole['p50_us']:.0f}", f"{ratio[1]:.2f}", f"{kernel['relative_l2']:.4f}"])
    head = ("case", "CUDA, TFLOP/s", "Triton, TFLOP/s", "cuDNN bf16, TFLOP/s", "CUDA × cuDNN", "end to end, µs", "× cuDNN", "relative L2")
    return f"{_machine(records)}:\n\n{markdown_table(head, rows, 1)}"


def errors() -> str:
    """Relative L2 by distribution and length."""
    records = _lines("accuracy")
    backends = ("fp8attn cuda end to end", "fp8attn triton end to end", "SDPA cuDNN")
    rows = [[*key, *(f"{by[name]['relative_l2']:.4f}" for name in backends)] for key, by in _by_case(records, "distribution", "case").items()]
    return f"{_machine(records)}:\n\n{markdown_table(('inputs', 'keys', 'CUDA', 'Triton', 'SDPA cuDNN bf16'), rows, 2)}"


TABLES: dict[str, Callable[[], str]] = {"speed": speed, "errors": errors}


def _filling(content: str) -> Callable[[re.Match[str]], str]:
    """What stands between a pair of markers, replaced."""
    return lambda match: f"{match[1]}\n{content}\n{match[2]}"


def rendered(text: str) -> str:
    """A document with every `<!-- table: name -->` … `<!-- end -->` filled from the results.

    Raises:
        ValueError: a table of TABLES has no place in it, or more than one.
    """
    for name, render in TABLES.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        content = render()
        text, count = place.subn(_filling(content), text)
        if count != 1:
            raise ValueError(f"the document has {count} places for the table {name!r}; it must have one, <!-- table: {name} --> … <!-- end -->")
    return text


def write(path: Path = README) -> None:
    path.write_text(rendered(path.read_text()))
