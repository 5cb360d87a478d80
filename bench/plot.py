"""Speed over length as a picture, from a results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .readme import RESULTS

SOURCE = RESULTS / "side_by_side.jsonl"
PICTURE = RESULTS / "speed.svg"

BACKENDS = {
    # colours of Okabe and Ito, told apart by the colour-blind, and markers for print
    "fp8attn cuda": ("#D55E00", "o", "-"),
    "fp8attn triton": ("#0072B2", "s", "-"),
    "SDPA cuDNN": ("#000000", "^", "--"),
    "SDPA flash": ("#009E73", "v", "--"),
}
"""What is drawn, in this order: colour, marker, line."""


def series(records: list[dict[str, Any]], backend: str, dim: int, causal: bool) -> tuple[list[int], list[float]]:
    """Lengths and TFLOP/s of one backend at one head dim, 16k tokens in all, hidden 2048."""
    found = {
        record["q_length"]: record["tflops"]
        for record in records
        if record["backend"] == backend
        and (record["head_dim"], record["causal"]) == (dim, causal)
        and record["tflops"] is not None
        and record["q_length"] == record["kv_length"]
        and record["q_heads"] == record["kv_heads"]
        and (record["batch"] * record["q_length"], record["q_heads"] * dim) == (16384, 2048)
    }
    lengths = sorted(found)
    return lengths, [found[length] for length in lengths]


def draw(to: Path, source: Path = SOURCE) -> None:
    """TFLOP/s over length by head dim, full and causal; the format is `to`'s suffix.

    Raises:
        ValueError: the file has no row to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    # text stays text, and the same results give the same bytes
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fp8attn", "font.family": "sans-serif"})
    from matplotlib import pyplot

    records = [json.loads(line) for line in source.read_text().splitlines()]
    dims = [dim for dim in (64, 128, 256) if any(series(records, backend, dim, False)[0] for backend in BACKENDS)]
    if not dims:
        raise ValueError(f"{source} has no row of 16k tokens and hidden size 2048")
    figure, axes = pyplot.subplots(2, len(dims), figsize=(4 * len(dims), 6), sharex=True, sharey=True, squeeze=False)
    for row, causal in enumerate((False, True)):
        for column, dim in enumerate(dims):
            axis = axes[row][column]
            for backend, (colour, marker, line) in BACKENDS.items():
                lengths, speeds = series(records, backend, dim, causal)
                axis.plot(lengths, speeds, color=colour, marker=marker, linestyle=line, label=backend)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1024, 2048, 4096, 16384], ["1k", "2k", "4k", "16k"])
            axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}", fontsize=11)
            axis.grid(alpha=0.3)
        axes[row][0].set_ylabel("TFLOP/s, kernel alone")
    axes[0][0].set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("queries and keys")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(BACKENDS), frameon=False)
    figure.suptitle(f"{records[0]['gpu']}, 16k tokens, hidden 2048, commit {records[0]['commit'][:7]}", fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110, metadata={"Date": None} if to.suffix == ".svg" else None)
    pyplot.close(figure)
