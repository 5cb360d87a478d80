"""The benchmarks' tables for people: at any width no number is cut, and what isn't shown is named."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import bench
from bench import (
    accuracy,
    adapters,
    cases,
    compare,
    decode,
    distributed,
    first_calls,
    ladder,
    masks,
    model,
    models,
    needle,
    overhead,
    plot,
    price,
    profile,
    quantize,
    report,
    run,
    sanitize,
    search,
    trace,
    varlen,
)
from bench.errors import Errors
from bench.gates import Gates, Verdict
from bench.limits import Limit
from bench.sheet import Sheet
from bench.timing import Timing
from fp8attn.cuda.configs import SPEEDS

FOLDER = Path(bench.__file__).parent
WIDTHS = (80, 100, 120, 176)
GOOD = Errors(max_abs=12.3456, mean_abs=0.01234, rmse=0.0234, relative_l2=0.0512, bad_share=0.12345, sqnr_db=-26.4, cosine=0.999123)


def timing(us: float) -> Timing:
    return Timing.of([[us, 1.01 * us], [1.02 * us]], 4, "by hand")


def side_by_side(gpu: bool) -> list[Sheet]:
    """Every peer on two cases, one slow, one refused."""
    results = []
    for case in (cases.PREFILL[0], cases.GQA[1]):
        for i, peer in enumerate(adapters.PEERS):
            known = dict(errors=GOOD, timing=timing(10.0**i + 0.25), against_sdpa=1234.5 / 10**i, limit=Limit(5.0, 4.0, 3.0))
            results.append(run.Result(case, peer.name, peer.stages, "outliers", **(known if i else dict(errors=None, refused="no [bold]reason"))))
    return report.speed_tables(results, gpu)


def prices() -> list[price.Price]:
    ratios = {part: price.Ratio(1.0123, 0.0012, 1410.0, 1455.0) for part in price.PARTS}
    timings = {part: timing(123456.7) for part in price.PARTS}
    found = [price.Price(price.CASES[0], name, "cuda hopper, general", GOOD, timings, ratios, 1.234) for name in (price.DEFAULT, *price.RECIPES)]
    return [*found, price.Price(price.CASES[0], price.BFLOAT16, refused="RuntimeError: no [/kernel] takes it " * 4)]


def rungs() -> list[ladder.Result]:
    case = ladder.CASES[1]
    found = [
        ladder.Result(case, name, config, GOOD, timing(6055.8), 1.25, 10.5, 12.3, {"registers": 255, "spill_stores": 1024})
        for name, config in ladder.rungs(case.head_dim).items()
    ]
    return [*found, ladder.Result(case, "fp8attn Hopper kernel", None, GOOD, timing(139.1), None, 43.5)]


def masked() -> list[masks.Result]:
    names = (masks.WITHOUT, *(row.name for row in masks.ROWS_OF_TABLE))
    return [
        masks.Result(masks.CASES[0], kind, name, 0.25, 0.5, GOOD, timing(16068.4), 12.34) for kind in masks.MASKS for name in names
    ]  # fmt: skip


def errors_of(seeds: int) -> list[accuracy.Result]:
    spread = None if seeds == 1 else 0.0123
    found = [accuracy.Result(cases.PREFILL[0], "channel-bias", row, GOOD, None, seeds, spread) for row in accuracy.DRAWN]
    return [*found, accuracy.Result(cases.GQA[0], "normal", "nobody", None, "refused")]


def needles() -> list[needle.Result]:
    return [needle.Result(keys, share, row, 1024, 1.0, GOOD, None) for keys in needle.LENGTHS for share in needle.SHARES for row in accuracy.DRAWN]


def speeds_by_search() -> list[search.Outcome]:
    return [search.Outcome(config, "timed", None, 1234.5, 0.987) for config in list(SPEEDS)[:3]]


def verdicts() -> list[Verdict]:
    return [
        Verdict(cases.GQA[1], "fp8attn cuda int8 rotated end to end", GOOD, ()),
        Verdict(cases.SEEDS[0], "fp8attn triton", GOOD, ("relative_l2", "bad_share", "ValueError: x[:, 0] isn't [/finite]")),
        Verdict(cases.SEEDS[0], "compiler", None, ("nvcc: error: " + "long/path/" * 12,)),
    ]


def rows_of_ranks(ranks: int = 2) -> list[distributed.Result]:
    case = dataclasses.replace(cases.PREFILL[0], name="H24 D128 causal 1024k")
    numbers = dict(sent=1_234_567_890, attention_us=123456.7, transfer_us=12345.6, relative_l2=0.0512)
    return [distributed.Result(case, row, ranks, 123456.7 * (i + 1), **numbers) for i, row in enumerate(distributed.ROWS)]


def forwards() -> list[models.Result]:
    words = dict(ms=12345.67, relative_l2=0.0512, against_sdpa=1.234, peak_bytes=1 << 36, calls=(1234, 1234))
    return [models.Result(case.name, row.name, "compiled", **words) for case in models.CASES for row in models.ROWS]


KERNELS = profile.parse((Path(__file__).with_name("ncu_h100.csv")).read_text())

SAMPLES: dict[str, Callable[[], list[Sheet]]] = {
    "report.gate_table": lambda: [report.gate_table(verdicts(), Gates.load())],
    "report.speed_tables": lambda: [*side_by_side(True), *side_by_side(False)],
    "report.peer_table": lambda: [report.peer_table({peer.name: "an NVIDIA GPU, and pip install x[y]" for peer in adapters.PEERS})],
    "report.quantize_table": lambda: [
        report.quantize_table([quantize.Result(case, 10**9, timing(180.5), 2 * 10**9, timing(900.0)) for case in quantize.ON_GPU], gpu)
        for gpu in (True, False)
    ],
    "report.compare_table": lambda: [report.compare_table(compare.compare(plot.SOURCE, plot.SOURCE))],
    "accuracy.table": lambda: [accuracy.table(errors_of(1), True), accuracy.table(errors_of(16), False)],
    "ladder.table": lambda: [ladder.table(rungs())],
    "masks.table": lambda: [masks.table(masked())],
    "decode.table": lambda: [decode.table([decode.Result(case, row, timing(16068.4), GOOD) for case in decode.CASES for row in decode.ROWS])],
    "model.table": lambda: [model.table([model.Result(row, 2.10166, 0.000149, 0.0000745, 0.99516) for row in accuracy.DRAWN], "a model " * 20)],
    "distributed.table": lambda: [distributed.table(rows_of_ranks())],
    "distributed.trace_table": lambda: [
        distributed.trace_table(
            rows_of_ranks()[0].case, [distributed.Traced(row, 0, dict.fromkeys(trace.ORDER, 123456.7)) for row in distributed.OWN]
        )
    ],
    "distributed.scaling": lambda: [distributed.scaling([rows_of_ranks(), rows_of_ranks(4)])],
    "distributed.simulation": lambda: [distributed.simulation(rows_of_ranks(), 50e9)],
    "models.table": lambda: [models.table(forwards(), gpu) for gpu in (True, False)],
    "needle.table": lambda: [needle.table(needles())],
    "first_calls.table": lambda: [
        first_calls.table(first_calls.Start(2.1, 0.3), [first_calls.FirstCall(kind, 12345.6, 12, 12.34) for kind in first_calls.KINDS])
    ],
    "varlen.table": lambda: [varlen.table([varlen.Result(batch, row.name, 12345.6) for batch in varlen.BATCHES for row in varlen.ROWS_OF_TABLE])],
    "overhead.table": lambda: [
        overhead.table([overhead.Overhead(kind, 32.1, 1234.5, 1234.5, 12345.6, 12345.6, 28.9, 12345.6) for kind in overhead.KINDS])
    ],
    "price.table": lambda: [price.table(prices())],
    "profile.table": lambda: [profile.table(KERNELS, "D64 full 4k")],
    "sanitize.table": lambda: [sanitize.table([("memcheck", 12345, "ERROR SUMMARY: 12345 errors", Counter({"Invalid read of " * 9: 12345}))])],
    "search.table_of": lambda: [search.table_of("cuda", speeds_by_search(), cases.PREFILL[0].flops)],
}
"""Of every function that makes tables, some with the longest names and numbers that it has to show."""


def printed(sheet: Sheet, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(sheet)
    return stream.getvalue()


def plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def squeezed(text: str) -> str:
    """Without white space and the lines of tables, so that folded words are found."""
    return re.sub(r"[\s│┃]", "", text)


def test_every_function_that_makes_a_table_has_a_sample() -> None:
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.returns is not None and "Sheet" in ast.unparse(node.returns):
                found.add(f"{path.stem}.{node.name}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Table", "rich.table.Table"):
                assert path.name == "sheet.py", f"{path.name} makes a table that may be cut"
    assert found - {"report.table_of"} == set(SAMPLES)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("maker", SAMPLES)
def test_no_number_is_cut_at_any_width(maker: str, width: int) -> None:
    for sheet in SAMPLES[maker]():
        text = printed(sheet, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        note = re.findall(r"Left out for want of room: (.*?); \d+ columns", " ".join(text.split()))
        left_out = f", {note[0]}, " if note else ""
        there = Counter(text.split())
        for column in sheet.columns:
            header = str(column.header)
            cells = [plain(cell) for cell in column.cells]
            if f", {header}, " in left_out:
                assert header in sheet.optional, f"{header} is left out"
            elif column.justify == "right":
                for number, times in Counter(word for cell in cells for word in cell.split()).items():
                    assert there[number] >= times, f"{header}: {number} is there {there[number]} times and must be {times} times"
            for cell in () if column.justify == "right" else cells:
                folded = [part for part in cell.split() if part not in text and squeezed(part)[:12] not in squeezed(text)]
                assert not folded, f"{header}: {folded} isn't there"


@pytest.mark.parametrize("maker", SAMPLES)
def test_a_wide_terminal_shows_everything_in_one_table(maker: str) -> None:
    for sheet in SAMPLES[maker]():
        text = printed(sheet, 400)
        assert "Left out" not in text and text.count("┏") == 1


def test_what_is_left_out_is_the_least_important_and_named() -> None:
    kernels = printed(side_by_side(True)[0], 80)
    note = " ".join(kernels[kernels.index("Left out") :].split())
    assert re.match(r"Left out for want of room: p90, p99, .*SQNR dB; (\d+) columns would show all \(COLUMNS=\1\), and --json has them\.", note)
    for header in ("p50 µs", "TFLOP/s", "× SDPA", "of limit"):
        assert header not in note
    enough = int(re.findall(r"COLUMNS=(\d+)", note)[0])
    assert "Left out" not in printed(side_by_side(True)[0], enough) and "Left out" in printed(side_by_side(True)[0], enough - 1)


def test_columns_that_all_matter_are_split_over_tables() -> None:
    text = printed(profile.table(KERNELS, "D64 full 4k"), 80)
    assert text.count("┏") > 1 and "Left out" not in text and text.count("µs under the") == text.count("┏")


@pytest.mark.parametrize("width", (1, 7, 20, 40))
def test_narrower_than_a_number_it_is_folded(width: int) -> None:
    sheet = report.table_of("title", ("name",), ("p50 µs",))
    sheet.add_row("fp8attn triton end to end", "1234567.8")
    text = printed(sheet, width)
    assert "…" not in text
    if width == 40:
        assert "1234567.8" in text


def test_names_are_no_markup() -> None:
    sheet = report.table_of("title", ("name",), ("number",))
    sheet.add_row("transformer-engine[pytorch] [/bold]", "1")
    assert "transformer-engine[pytorch] [/bold]" in printed(sheet, 80)


def test_a_pipe_has_80_columns_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert report.console().width == 80
    monkeypatch.setenv("COLUMNS", "133")
    assert report.console().width == 133


def test_a_line_is_not_broken_in_a_pipe(capsys: pytest.CaptureFixture) -> None:
    line = "short of × 1.15: " + "a long case, " * 20 + "[red]"
    report.say(line)
    assert capsys.readouterr().out == line + "\n"


def test_microseconds_have_tenths_where_these_mean_something() -> None:
    assert [report.us_of(x) for x in (None, 0.04, 99999.94, 2277067.9)] == ["–", "0.0", "99999.9", "2277068"]


def test_results_files_have_what_tables_leave_out() -> None:
    """The note says so."""
    record = run.Result(cases.TINY[0], "x", (), "normal", GOOD, timing(1.0)).record()
    assert {"p90_us", "p99_us", *dataclasses.asdict(GOOD)} <= set(json.loads(report.json_line("run", record, {})))
