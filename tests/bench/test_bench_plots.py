"""The benchmarks' pictures: legends lie outside, texts don't cover each other, and whatever is drawn can be told apart, by the colour-blind too."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import __main__ as command
from bench import accuracy, adapters, ladder, models, peers, plot
from bench.command_line import UsageError
from bench.plot import STYLES, Style

pytest.importorskip("matplotlib", reason="plots need matplotlib")

RESULTS = plot.SOURCE.parent

FIGURES: dict[str, Callable[[], Any]] = {
    **{kind: lambda kind=kind: plot.figure_of(plot.SOURCE, kind) for kind in plot.KINDS},  # type: ignore[misc]
    "accuracy": lambda: accuracy.figure_of(accuracy.records_of(RESULTS / "accuracy.jsonl")),
    "ladder": lambda: ladder.figure_of(ladder.records_of(RESULTS / "ladder.jsonl")),
    "models": lambda: models.figure_of(models.records_of(RESULTS / "models.jsonl")),
}
"""Every picture that the bench draws, of the committed results."""


def everyone() -> list[dict[str, Any]]:
    """The committed results, with a row for each kernel that has a style."""
    records = [r for r in plot.records_of(plot.SOURCE) if r["backend"] == "fp8attn cuda"]
    names = [peer.name for peer in adapters.PEERS if peers.KERNEL in peer.stages and peer.name in STYLES]
    return [r | {"backend": name, "tflops": r["tflops"] * (1 - 0.05 * i)} for i, name in enumerate(names) for r in records]


FULL: dict[str, Callable[[], Any]] = FIGURES | {
    f"{kind}, everyone": lambda draw=draw: draw(everyone())  # type: ignore[misc]
    for kind, draw in plot.KINDS.items()
}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plot.load_pyplot().close("all")


@functools.cache
def picture_of(name: str) -> Any:
    """A figure of FULL, drawn once for all tests that look at it."""
    figure = FULL[name]()
    figure.draw_without_rendering()
    return figure


def boxes(figure: Any) -> tuple[Any, dict[str, Any]]:
    """Of a drawn figure the legend's box, and those of all axes with their labels and titles and of the title above."""
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    found = {f"axes {i}": axis.get_tightbbox(renderer) for i, axis in enumerate(figure.axes)}
    return legend.get_window_extent(renderer), found | {"title": figure._suptitle.get_window_extent(renderer)}


@pytest.mark.parametrize("name", FULL)
def test_the_legend_covers_nothing_and_is_whole(name: str) -> None:
    figure = picture_of(name)
    legend, others = boxes(figure)
    assert not [one for one, box in others.items() if legend.overlaps(box)]
    for box in (legend, *others.values()):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not any(axis.get_legend() for axis in figure.axes)
    for a, b in itertools.combinations(others.values(), 2):
        assert not a.overlaps(b)


@pytest.mark.parametrize("name", FULL)
def test_all_that_is_drawn_is_in_the_legend_once(name: str) -> None:
    figure = picture_of(name)
    labels = {label for axis in figure.axes for label in axis.get_legend_handles_labels()[1]}
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == len(set(texts)) and set(texts) == labels and len(labels) > 1


@pytest.mark.parametrize("name", FULL)
def test_texts_in_a_picture_dont_cover_each_other(name: str) -> None:
    figure = FULL[name]()
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    for axis in figure.axes:
        texts = [text for text in axis.texts if text.get_text()]
        for text in texts:
            box = text.get_window_extent(renderer)
            assert axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1, text.get_text()
        for a, b in itertools.combinations(texts, 2):
            assert not a.get_window_extent(renderer).overlaps(b.get_window_extent(renderer)), (a.get_text(), b.get_text())


VISION = {
    "all colours": np.eye(3),
    # what is left of linear RGB: Machado, Oliveira and Fernandes, 2009, severity 1
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TOLD_APART = 15.0
"""Of CIELAB's distances, those that lines a millimetre wide are told apart by; 2 is what can just be seen of large patches."""


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB of an sRGB colour as somebody sees it."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.clip(vision @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
    x, y, z = (np.cbrt(t) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in to_xyz @ linear / np.array([0.95047, 1, 1.08883]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(a: str, b: str) -> float:
    """Of two colours, for whom they are nearest."""
    return min(float(np.linalg.norm(lab(a, vision) - lab(b, vision))) for vision in VISION.values())


def test_distances_of_colours_are_cielabs() -> None:
    assert lab("#FFFFFF", VISION["all colours"]) == pytest.approx([100, 0, 0], abs=0.02)
    assert lab("#FF0000", VISION["all colours"]) == pytest.approx([53.24, 80.09, 67.20], abs=0.05)
    assert distance("#009E73", "#999999") < TOLD_APART < distance("#D55E00", "#0072B2")
    reds_and_greens = np.linalg.norm(lab("#C00000", VISION["no red"]) - lab("#406000", VISION["no red"]))
    assert reds_and_greens < np.linalg.norm(lab("#C00000", VISION["all colours"]) - lab("#406000", VISION["all colours"])) / 2


def shown_styles(figure: Any) -> dict[str, tuple[Style, dict[str, Any]]]:
    """Of every line with a label, its row's style and how it is in fact drawn."""
    found = {}
    for axis in figure.axes:
        for line in axis.get_lines():
            if line.get_label() in STYLES:
                drawn = {"color": line.get_color(), "marker": line.get_marker(), "markerfacecolor": line.get_markerfacecolor()}
                found[str(line.get_label())] = STYLES[str(line.get_label())], drawn
    return found


SETS = {
    "kernels": [peer.name for peer in adapters.PEERS if peers.KERNEL in peer.stages and peer.name in STYLES],
    "accuracy": list(accuracy.DRAWN),
}
"""Rows that can stand in one picture."""


@pytest.mark.parametrize("name", SETS)
def test_rows_of_a_picture_are_told_apart(name: str) -> None:
    """Each has a marker of its own; and a colour that everybody tells from another one's, or another kind of line, too."""
    assert len(SETS[name]) == {"kernels": 13, "accuracy": 11}[name]
    for a, b in itertools.combinations(SETS[name], 2):
        one, other = STYLES[a], STYLES[b]
        assert one.marker != other.marker, (a, b)
        assert distance(one.colour, other.colour) >= TOLD_APART or one.line != other.line, (a, b)
    for row in SETS[name]:
        assert distance(STYLES[row].colour, "#FFFFFF") > 2 * TOLD_APART, f"{row} is too light for white paper"


@pytest.mark.parametrize("name", [name for name in FULL if name not in ("ladder", "models")])
def test_what_is_drawn_has_its_rows_style(name: str) -> None:
    found = shown_styles(picture_of(name))
    assert len(found) >= 5
    for row, (style, drawn) in found.items():
        expected = {"color": style.colour, "marker": style.marker, "markerfacecolor": "none" if style.open else style.colour}
        assert drawn == expected, row


def test_rungs_and_other_kernels_are_told_apart() -> None:
    assert distance(plot.BLUE, ladder.LIGHT) > 2 * TOLD_APART
    figure = FIGURES["ladder"]()
    rungs, others = figure.axes[0].containers
    assert {bar.get_facecolor() for bar in rungs}.isdisjoint({bar.get_facecolor() for bar in others})
    records = [r for r in ladder.records_of(RESULTS / "ladder.jsonl") if r["case"] == ladder.CASES[0].name and r["tflops"] is not None]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [r["rung"] for r in records]
    heights = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bars in figure.axes[0].containers for bar in bars}
    assert [heights[i] for i in range(len(records))] == [r["tflops"] for r in records]


def test_models_bars_are_what_was_measured() -> None:
    figure, records = FIGURES["models"](), models.records_of(RESULTS / "models.jsonl")
    for axis in figure.axes:
        for bars, row in zip(axis.containers, models.BARS, strict=True):
            expected = [r["against_sdpa"] for r in records if (r["row"], r["launch"]) == (row, axis.get_title())]
            assert [bar.get_width() for bar in bars] == expected and len(expected) == 7
    assert distance(*models.BARS.values()) > TOLD_APART


def test_a_row_of_one_panel_alone_is_in_the_legend() -> None:
    records = plot.records_of(plot.SOURCE)
    there = [r for r in records if r["backend"] == "fp8attn cuda" or (r["backend"] == "Sage2" and r["head_dim"] == 128)]
    (legend,) = plot.speed(there).legends
    assert [text.get_text() for text in legend.get_texts()] == ["fp8attn cuda", "Sage2"]
    (legend,) = plot.error(there).legends
    assert [text.get_text() for text in legend.get_texts()] == ["fp8attn cuda", "Sage2"]


@pytest.mark.parametrize("picture, results", (("speed.svg", "side_by_side"), ("accuracy.svg", "accuracy"), ("models.svg", "models")))
def test_committed_pictures_are_of_the_committed_results(picture: str, results: str, tmp_path: Path) -> None:
    """Drawn again they have the same words and colours; where they stand depends on matplotlib."""
    figure = FIGURES["speed" if results == "side_by_side" else results]()
    plot.save(figure, tmp_path / picture)

    def content(path: Path) -> tuple[list[str], set[str]]:
        text = path.read_text()
        return sorted(re.findall(r"<text[^>]*>([^<]*[A-Za-z][^<]*)<", text)), set(re.findall(r"stroke: (#\w+)", text))

    assert content(tmp_path / picture) == content(RESULTS / picture)


def test_pictures_are_drawn_again_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("accuracy", "ladder", "models"):
        (tmp_path / f"{name}.jsonl").write_text((RESULTS / f"{name}.jsonl").read_text())
        assert command.main([name, "--draw", str(tmp_path / f"{name}.jsonl")]) == 0
    assert command.main(["plot", "--source", str(plot.SOURCE), "--to", str(tmp_path / "speed.png")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "accuracy.jsonl",
        "accuracy.svg",
        "ladder.jsonl",
        "ladder.png",
        "models.jsonl",
        "models.svg",
        "speed.png",
    }
    for words in (["ladder", "--draw"], ["models", "--draw"], ["plot", "--to", str(tmp_path / "x.svg"), "--source"], ["accuracy", "--draw"]):
        (tmp_path / "bad.jsonl").write_text("[1]\n")
        assert command.main([*words, str(tmp_path / "bad.jsonl")]) == 2
        assert "isn't a results file of python -m bench" in capsys.readouterr().err


def test_what_has_nothing_to_draw_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"tflops": 1.0, "stages": [peers.KERNEL], "backend": "fp8attn cuda"}) + "\n")
    for kind in plot.KINDS:
        with pytest.raises(UsageError, match=r"x\.jsonl: "):
            plot.figure_of(tmp_path / "x.jsonl", kind)
