"""Pictures of a results file: speed over length, error over speed, and the roofline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8attn.device import ARCHITECTURES, CEILINGS

from . import report
from .cases import HIDDEN, TOKENS, Case
from .command_line import UsageError, checkout, input_file, picture_file, require_matplotlib, sibling
from .machine import PROGRAM
from .peers import KERNEL
from .readme import RESULTS

HELP = "speed over length, error against speed, or a roofline, from a results file"

SOURCE = RESULTS / "side_by_side.jsonl"
PICTURE = RESULTS / "speed.svg"

DIMS = (64, 128, 256)

Record = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How a row is drawn, the same in every picture."""

    colour: str
    marker: str
    line: Any = "-"
    open: bool = False

    @property
    def of_points(self) -> dict[str, Any]:
        """matplotlib's arguments for markers alone."""
        face = "none" if self.open else self.colour
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": face, "markeredgecolor": self.colour, "linestyle": ""}

    @property
    def of_line(self) -> dict[str, Any]:
        """matplotlib's arguments for a line with markers."""
        return self.of_points | {"linestyle": self.line, "linewidth": 1.4, "markersize": 6}


DASHED, DOTTED, DASH_DOTTED, LONG = "--", ":", "-.", (0, (8, 2))

# Okabe and Ito's palette, with darker colours for white paper; distinguishable with colour blindness, except for wine
# and grey
VERMILLION, ORANGE, BLUE, SKY, GREEN, PINK = "#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
BLACK, GREY, BROWN, INDIGO, WINE = "#000000", "#666666", "#7F4A00", "#332288", "#882255"

STYLES = {
    # kernels
    "fp8attn cuda": Style(VERMILLION, "o"),
    "fp8attn cuda int8": Style(ORANGE, "h", DASHED, open=True),
    "fp8attn triton": Style(BLUE, "s"),
    "cuDNN e4m3": Style(BLACK, "P"),
    "FA3 e4m3": Style(GREEN, "D"),
    "FA3 e4m3 two-level": Style(PINK, "X", DOTTED),
    "Sage2": Style(BROWN, "p", LONG),
    "FlashInfer e4m3": Style(SKY, "*"),
    "SDPA cuDNN": Style(BLACK, "^", DASHED, open=True),
    "FA3 bf16": Style(GREEN, "d", DASH_DOTTED, open=True),
    "SDPA flash": Style(GREY, "v", DASHED, open=True),
    "FlexAttention": Style(WINE, "<", DASH_DOTTED, open=True),
    "FlashInfer bf16": Style(SKY, ">", DASHED, open=True),
    # rows of errors
    "fp8attn cuda end to end": Style(VERMILLION, "o"),
    "fp8attn triton end to end": Style(BLUE, "s", DOTTED, open=True),
    "fp8attn rotated": Style(ORANGE, "h", DASHED),
    "fp8attn not rotated": Style(BROWN, "p", DASH_DOTTED),
    "fp8attn V not smoothed": Style(WINE, "<", DOTTED, open=True),
    "fp8attn f16": Style(SKY, ">", DASH_DOTTED, open=True),
    "e4m3 one level": Style(GREEN, "D"),
    "FA3 e4m3, modelled": Style(INDIGO, "x", LONG),
}
"""Rows that are drawn, in this order. Rows of one picture with the same colour differ in marker and line."""


def records_of(source: Path) -> list[Record]:
    """The timed lines of a results file.

    Raises:
        UsageError: it isn't a results file.
    """
    try:
        lines = [json.loads(line) for line in source.read_text().splitlines()]
        return [line for line in lines if line.get("tflops") is not None and KERNEL in line.get("stages", ())]
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise UsageError(f"{source} isn't a results file of {PROGRAM} run: {error!r}") from error


def results_of(source: Path, command: str, fields: Sequence[str]) -> list[Record]:
    """The records of a results file of a command, each of which has these fields.

    Raises:
        UsageError: it isn't one.
    """
    try:
        records = [json.loads(line) for line in source.read_text().splitlines()]
        for record in records:
            for field in fields:
                record[field]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} isn't a results file of {PROGRAM} {command}: {error!r}") from error
    return records


def drawn(records: Sequence[Record]) -> list[str]:
    """Backends that have a style and a row."""
    there = {record["backend"] for record in records}
    return [name for name in STYLES if name in there]


def series(records: Sequence[Record], backend: str, dim: int, causal: bool) -> tuple[list[int], list[float]]:
    """Lengths and TFLOP/s of one backend at one head dim, for 16k tokens in total and hidden size 2048."""
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
    """matplotlib's pyplot, without a display.

    Raises:
        UsageError: matplotlib isn't installed.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    # text stays text, and equal results give equal bytes
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fp8attn", "font.family": "sans-serif"})
    from matplotlib import pyplot

    return pyplot


def legend_below(figure: Any, axes: Sequence[Any], columns: int) -> None:
    """A legend of all axes below them, in as many columns as fit.

    The figure's layout must be constrained, which leaves room for it.
    """
    shown: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    for count in range(min(len(shown), columns), 0, -1):
        legend = figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=count, handlelength=3.5)
        if legend.get_window_extent(figure.canvas.get_renderer()).width < figure.bbox.width:
            return
        if count > 1:
            legend.remove()


def save(figure: Any, to: Path) -> None:
    """Write and close a figure. The suffix of `to` determines the format."""
    figure.savefig(to, dpi=110, metadata={"Date": None} if to.suffix == ".svg" else None)
    load_pyplot().close(figure)


def speed(records: Sequence[Record]) -> Any:
    """A figure of TFLOP/s over length by head dim, full and causal.

    Raises:
        ValueError: there is no row to draw.
    """
    backends = [name for name in drawn(records) if any(series(records, name, dim, causal)[0] for dim in DIMS for causal in (False, True))]
    dims = [dim for dim in DIMS if any(series(records, name, dim, False)[0] for name in backends)]
    if not dims:
        raise ValueError(f"no row of {TOKENS // 1024}k tokens and hidden size {HIDDEN}")
    pyplot = load_pyplot()
    size = (4 * len(dims), 6.6)
    figure, axes = pyplot.subplots(2, len(dims), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    for row, causal in enumerate((False, True)):
        for column, dim in enumerate(dims):
            axis = axes[row][column]
            for name in backends:
                axis.plot(*series(records, name, dim, causal), **STYLES[name].of_line, label=name)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1024, 2048, 4096, 16384], ["1k", "2k", "4k", "16k"])
            axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=11)
            axis.grid(alpha=0.3)
        axes[row][0].set_ylabel("TFLOP/s, kernel alone")
    axes[0][0].set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("queries and keys")
    legend_below(figure, axes.flat, min(2 * len(dims), 5))
    figure.suptitle(f"{origin(records)}, 16k tokens, hidden 2048", fontsize=11)
    return figure


def error(records: Sequence[Record]) -> Any:
    """A figure of relative L2 error over TFLOP/s, for the longest square case of every head dim.

    Raises:
        ValueError: there is no row to draw.
    """
    square = [r for r in records if r["q_length"] == r["kv_length"] and not r["causal"] and r["distribution"] == "normal" and r["relative_l2"]]
    longest = {dim: max(r["q_length"] for r in square if r["head_dim"] == dim) for dim in sorted({r["head_dim"] for r in square})}
    if not longest:
        raise ValueError("no timed square case without a mask on N(0,1) inputs")
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(longest), figsize=(4 * len(longest), 4.2), sharey=True, squeeze=False, layout="constrained")
    for axis, (dim, length) in zip(axes[0], longest.items(), strict=True):
        rows = [r for r in square if (r["head_dim"], r["q_length"]) == (dim, length)]
        for name in drawn(rows):
            mine = [r for r in rows if r["backend"] == name]
            axis.plot([r["tflops"] for r in mine], [r["relative_l2"] for r in mine], **STYLES[name].of_points, markersize=9, label=name)
        axis.set_yscale("log")
        axis.set_xlim(left=0)
        axis.set_title(f"{rows[0]['case']}", fontsize=11)
        axis.set_xlabel("TFLOP/s, kernel alone")
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("relative L2 error")
    legend_below(figure, axes[0], 2 * len(longest))
    figure.suptitle(f"{origin(records)}: lower right is better", fontsize=11)
    return figure


def roofline(records: Sequence[Record]) -> Any:
    """A figure of TFLOP/s of fp8attn's kernels and of other kernels over FLOP per byte, under the measured ceilings.

    Raises:
        ValueError: there is no row to draw, or the GPU's ceilings weren't measured.
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
    figure, axis = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    intensity = [1.0, tensor / bandwidth, 1e5]
    above: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "fontsize": 9}
    axis.plot(intensity, [bandwidth, tensor, tensor], color="black", linewidth=1.5)
    axis.annotate(f"e4m3 tensor cores, {tensor:.0f} TFLOP/s sustained", (1e5, tensor), ha="right", **above)
    axis.annotate(f"device memory, {bandwidth:.1f} TB/s", (4, bandwidth), va="bottom", fontsize=9)
    for dim in sorted({r["head_dim"] for r in records}):
        exact = 4 * dim * ceilings.exact_exponentials_per_clk * per_second
        if exact < tensor:
            axis.axhline(exact, color=GREY, linestyle=":", linewidth=1)
            axis.annotate(f"exact exponentials, D {dim}: {exact:.0f}", (1.5, exact), color=GREY, **above)
    for name in [name for name in drawn(records) if name in ("fp8attn cuda", "fp8attn triton", "cuDNN e4m3", "FA3 e4m3", "SDPA cuDNN")]:
        cases = [(case_of(r), r["tflops"]) for r in records if r["backend"] == name]
        x, y = [case.flops / case.least_bytes for case, _ in cases], [tflops for _, tflops in cases]
        axis.plot(x, y, **STYLES[name].of_points, markersize=5, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(1, 3 * tensor)
    axis.set_xlabel("FLOP a byte that must move")
    axis.set_ylabel("TFLOP/s, kernel alone")
    axis.grid(alpha=0.3)
    legend_below(figure, [axis], 5)
    figure.suptitle(origin(records), fontsize=11)
    return figure


KINDS: dict[str, Callable[[Sequence[Record]], Any]] = {"speed": speed, "error": error, "roofline": roofline}


def figure_of(source: Path, kind: str) -> Any:
    """A figure of one kind from a results file.

    Raises:
        UsageError: the file has no results for this kind.
    """
    try:
        return KINDS[kind](records_of(source))
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError) as why:
        raise UsageError(f"{source}: {why if isinstance(why, ValueError) else repr(why)}") from why


def draw(to: Path, source: Path = SOURCE, kind: str = "speed") -> None:
    """Draw one picture. The suffix of `to`, .png or .svg, determines the format.

    Raises:
        UsageError: the file has no results for this kind.
    """
    save(figure_of(source, kind), to)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=KINDS, default="speed", help="default: %(default)s")
    parser.add_argument("--source", type=input_file, metavar="FILE.jsonl", help=f"default, in a checkout: bench/results/{SOURCE.name}")
    parser.add_argument("--to", type=picture_file, metavar="FILE", help=".svg or .png; default, in a checkout: bench/results/, the kind's name")


def main(arguments: argparse.Namespace, device: torch.device) -> int:
    if arguments.source is None or arguments.to is None:
        checkout("plot without --source and --to")
    to = arguments.to or sibling(PICTURE, f"{arguments.kind}.svg")
    with report.progress("plot") as bar:
        bar.add_task(f"{arguments.kind}, to {to}", total=None)
        draw(to, arguments.source or SOURCE, arguments.kind)
    return 0
