"""Pictures from a results file: speed over length, error against speed, and the roofline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8attn.device import ARCHITECTURES, CEILINGS

from .cases import HIDDEN, TOKENS, Case
from .peers import KERNEL
from .readme import RESULTS

HELP = "speed over length, error against speed, or a roofline, from a results file"

SOURCE = RESULTS / "side_by_side.jsonl"
PICTURE = RESULTS / "speed.svg"

Record = dict[str, Any]

STYLES = {
    # colours of Okabe and Ito, told apart by the colour-blind; markers and lines for print, dashed for bfloat16
    "fp8attn cuda": ("#D55E00", "o", "-"),
    "fp8attn cuda int8": ("#D55E00", "h", ":"),
    "fp8attn triton": ("#0072B2", "s", "-"),
    "cuDNN e4m3": ("#000000", "P", "-"),
    "FA3 e4m3": ("#009E73", "D", "-"),
    "FA3 e4m3 two-level": ("#009E73", "s", ":"),
    "Sage2": ("#CC79A7", "X", "-"),
    "FlashInfer e4m3": ("#56B4E9", "*", "-"),
    "SDPA cuDNN": ("#000000", "^", "--"),
    "FA3 bf16": ("#009E73", "d", "--"),
    "SDPA flash": ("#E69F00", "v", "--"),
    "FlexAttention": ("#CC79A7", "<", "--"),
    "FlashInfer bf16": ("#56B4E9", ">", "--"),
}
"""Kernels that are drawn, in this order: colour, marker, line."""


def records_of(source: Path) -> list[Record]:
    """A results file's lines that were timed."""
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    return [line for line in lines if line.get("tflops") is not None and KERNEL in line.get("stages", ())]


def drawn(records: Sequence[Record]) -> list[str]:
    """Backends with a style that have a row."""
    there = {record["backend"] for record in records}
    return [name for name in STYLES if name in there]


def series(records: Sequence[Record], backend: str, dim: int, causal: bool) -> tuple[list[int], list[float]]:
    """Lengths and TFLOP/s of one backend at one head dim, 16k tokens in all, hidden 2048."""
    found = {
        record["q_length"]: record["tflops"]
        for record in records
        if record["backend"] == backend
        and (record["head_dim"], record["causal"]) == (dim, causal)
        and record["tflops"] is not None
        and record["q_length"] == record["kv_length"]
        and record["q_heads"] == record["kv_heads"]
        and (record["batch"] * record["q_length"], record["q_heads"] * dim) == (TOKENS, HIDDEN)
    }
    lengths = sorted(found)
    return lengths, [found[length] for length in lengths]


def case_of(record: Record) -> Case:
    return Case(record["case"], *(record[name] for name in list(Case.__dataclass_fields__)[1:]))


def origin(records: Sequence[Record]) -> str:
    """GPU and commit of a file's records."""
    return f"{records[0]['gpu']}, commit {records[0]['commit'][:7]}"


def load_pyplot() -> Any:
    """matplotlib's pyplot, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    # text stays text, and the same results give the same bytes
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fp8attn", "font.family": "sans-serif"})
    from matplotlib import pyplot

    return pyplot


def legend_below(figure: Any, axis: Any, columns: int) -> None:
    """What one axis shows, below all of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(len(labels), columns), frameon=False)


def save(figure: Any, to: Path) -> None:
    """Write a figure, and let it go; the format is `to`'s suffix."""
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110, metadata={"Date": None} if to.suffix == ".svg" else None)
    load_pyplot().close(figure)


def speed(records: Sequence[Record]) -> Any:
    """TFLOP/s over length by head dim, full and causal.

    Raises:
        ValueError: there is no row to draw.
    """
    backends = drawn(records)
    dims = [dim for dim in (64, 128, 256) if any(series(records, name, dim, False)[0] for name in backends)]
    if not dims:
        raise ValueError(f"no row of {TOKENS // 1024}k tokens and hidden size {HIDDEN}")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, len(dims), figsize=(4 * len(dims), 6), sharex=True, sharey=True, squeeze=False)
    for row, causal in enumerate((False, True)):
        for column, dim in enumerate(dims):
            axis = axes[row][column]
            for name in backends:
                colour, marker, line = STYLES[name]
                axis.plot(*series(records, name, dim, causal), color=colour, marker=marker, linestyle=line, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1024, 2048, 4096, 16384], ["1k", "2k", "4k", "16k"])
            axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=11)
            axis.grid(alpha=0.3)
        axes[row][0].set_ylabel("TFLOP/s, kernel alone")
    axes[0][0].set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("queries and keys")
    legend_below(figure, axes[0][0], 6)
    figure.suptitle(f"{origin(records)}, 16k tokens, hidden 2048", fontsize=11)
    figure.tight_layout(rect=(0, 0.05 + 0.03 * (len(backends) > 6), 1, 1))
    return figure


def error(records: Sequence[Record]) -> Any:
    """Relative L2 error against TFLOP/s of the longest square case of every head dim.

    Raises:
        ValueError: there is no row to draw.
    """
    square = [r for r in records if r["q_length"] == r["kv_length"] and not r["causal"] and r["distribution"] == "normal" and r["relative_l2"]]
    longest = {dim: max(r["q_length"] for r in square if r["head_dim"] == dim) for dim in sorted({r["head_dim"] for r in square})}
    if not longest:
        raise ValueError("no timed square case without a mask on N(0,1) inputs")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(longest), figsize=(4 * len(longest), 3.8), sharey=True, squeeze=False)
    for axis, (dim, length) in zip(axes[0], longest.items(), strict=True):
        rows = [r for r in square if (r["head_dim"], r["q_length"]) == (dim, length)]
        for name in drawn(records):
            mine = [r for r in rows if r["backend"] == name]
            colour, marker, line = STYLES[name]
            face = colour if line == "-" else "none"
            x, y = [r["tflops"] for r in mine], [r["relative_l2"] for r in mine]
            axis.plot(x, y, color=colour, marker=marker, markerfacecolor=face, markersize=9, linestyle="", label=name)
        axis.set_yscale("log")
        axis.set_xlim(left=0)
        axis.set_title(f"{rows[0]['case']}", fontsize=11)
        axis.set_xlabel("TFLOP/s, kernel alone")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("relative L2 error")
    legend_below(figure, axes[0][0], 6)
    figure.suptitle(f"{origin(records)}: lower right is better", fontsize=11)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def roofline(records: Sequence[Record]) -> Any:
    """TFLOP/s of fp8attn's kernels and the fastest other over FLOP a byte, under the measured ceilings.

    Raises:
        ValueError: there is no row to draw, or nobody measured the GPU's ceilings.
    """
    if not records:
        raise ValueError("no timed row")
    gpu = records[0]["gpu"]
    device = next((device for device in ARCHITECTURES.values() if device.name == gpu), None)
    ceilings = CEILINGS.get(gpu)
    if device is None or ceilings is None:
        raise ValueError(f"nobody measured the ceilings of {gpu!r}; fp8attn/device.py has those of {', '.join(CEILINGS)}")
    per_second = ceilings.clock_hz * device.sm_count / 1e12
    tensor, bandwidth = ceilings.tensor_flop_per_clk * per_second, ceilings.dram_bytes_per_s / 1e12
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
    intensity = [1.0, tensor / bandwidth, 1e5]
    axis.plot(intensity, [bandwidth, tensor, tensor], color="black", linewidth=1.5)
    axis.annotate(f"e4m3 tensor cores, {tensor:.0f} TFLOP/s sustained", (1e5, tensor * 1.06), ha="right", fontsize=9)
    axis.annotate(f"device memory, {bandwidth:.1f} TB/s", (4, 1.2 * bandwidth), fontsize=9)
    for dim in sorted({r["head_dim"] for r in records}):
        exact = 4 * dim * ceilings.exact_exponentials_per_clk * per_second
        if exact < tensor:
            axis.axhline(exact, color="gray", linestyle=":", linewidth=1)
            axis.annotate(f"exact exponentials, D {dim}: {exact:.0f}", (1.5, exact * 1.05), fontsize=9, color="gray")
    for name in [name for name in drawn(records) if name in ("fp8attn cuda", "fp8attn triton", "cuDNN e4m3", "FA3 e4m3", "SDPA cuDNN")]:
        colour, marker, line = STYLES[name]
        cases = [(case_of(r), r["tflops"]) for r in records if r["backend"] == name]
        x, y = [case.flops / case.least_bytes for case, _ in cases], [tflops for _, tflops in cases]
        face = colour if line == "-" else "none"
        axis.plot(x, y, color=colour, marker=marker, markerfacecolor=face, markersize=5, linestyle="", label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(1, 3 * tensor)
    axis.set_xlabel("FLOP a byte that must move")
    axis.set_ylabel("TFLOP/s, kernel alone")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    figure.suptitle(origin(records), fontsize=11)
    figure.tight_layout()
    return figure


KINDS: dict[str, Callable[[Sequence[Record]], Any]] = {"speed": speed, "error": error, "roofline": roofline}


def draw(to: Path, source: Path = SOURCE, kind: str = "speed") -> None:
    """One picture; the format is `to`'s suffix, .png or .svg.

    Raises:
        ValueError: the file has nothing of the kind.
    """
    try:
        figure = KINDS[kind](records_of(source))
    except ValueError as why:
        raise ValueError(f"{source}: {why}") from why
    save(figure, to)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS, default="speed", help="default: %(default)s")
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="FILE.jsonl", help="default: %(default)s")
    parser.add_argument("--to", type=Path, metavar="FILE", help=f".svg or .png; default: {PICTURE}, or the kind's name beside it")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    try:
        draw(arguments.to or PICTURE.with_name(f"{arguments.kind}.svg"), arguments.source, arguments.kind)
    except (OSError, ValueError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0
