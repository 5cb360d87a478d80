"""python -m bench decode: its inputs, every row's answer, the share of the bandwidth, and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench import decode, readme, report
from bench.decode import CASES, ROWS, DecodeCase, Inputs, Result, Row
from bench.gates import Gates
from bench.timing import Protocol, Timing
from fp8attn.pages import PAGE

CPU = torch.device("cpu")
SMALL = DecodeCase("small", (200, 200), 4, 2, 64, queries=3)
RAGGED = DecodeCase("ragged", (130, 1, 257), 2, 1, 64)
SHORT = Protocol(rounds=1, milliseconds=1.0, lead_in=1.0)
BAD = Gates.load().bad


def test_pages_are_shuffled_and_each_is_one_sequence_s() -> None:
    inputs = Inputs.of(RAGGED, CPU, 0)
    used = [number for row, length in enumerate(RAGGED.lengths) for number in inputs.table[row, : -(-length // PAGE)].tolist()]
    assert sorted(used) == list(range(inputs.k.shape[0])) == list(range(6))
    assert [inputs.sequence(inputs.k, row).shape[2] for row in range(3)] == [*RAGGED.lengths]
    page = inputs.k[inputs.table[2, 1]]
    assert torch.equal(inputs.sequence(inputs.k, 2)[0, 0, PAGE : 2 * PAGE], page[:, 0])


@pytest.mark.parametrize("case", (SMALL, RAGGED), ids=lambda case: case.name)
def test_rows_attend_to_the_same(case: DecodeCase, device: torch.device) -> None:
    rows = [row for row in ROWS if row.needs() is None and "cuda" not in row.name]
    assert {row.name for row in rows} >= {"fp8attn triton", "fp8attn append", "SDPA bf16"}
    results = decode.measure(case, rows, BAD, SHORT, device)
    for result in results:
        if result.row.name == "SDPA bf16" and case is RAGGED:
            assert result.refused == "ValueError: lengths differ" and result.us is None
            continue
        assert result.refused is None and result.us is not None and result.us > 0
        assert result.row.attends == (result.errors is not None)
        assert result.errors is None or result.errors.relative_l2 < 0.06
    text = report.console()
    with text.capture() as captured:
        text.print(decode.table(results))
    assert case.name in captured.get()


def test_shares_of_the_peak() -> None:
    """4k keys of 8 heads of 128 channels, 32 times, are 268 MB, which an H100 reads in 80 µs."""
    timing = Timing(80.0, 80.0, 80.0, 80.0, 0.0, (80.0,), 1, 1, "CUDA graph")
    by = {row.name: Result(CASES[0], row, timing) for row in ROWS}
    assert by["fp8attn cuda"].share == pytest.approx(1.0, rel=2e-3) and by["FA3 bf16"].share == pytest.approx(2.0, rel=2e-3)
    assert by["fp8attn append"].share is None
    prefill = DecodeCase("prefill", (32768,), 32, 8, queries=32768)  # 201 MB are read and written
    by = {row.name: Result(prefill, row, timing) for row in decode.PREFILL_ROWS}
    assert by["fp8attn append"].share == pytest.approx(0.751, rel=2e-3) and by["fp8attn cuda"].share is None
    by = {row.name: Result(CASES[0], row, timing) for row in ROWS}
    record = by["FA3 e4m3"].record()
    assert record["case"] == "32 × 4k" and record["tokens"] == 131072 and record["share_of_peak"] == by["FA3 e4m3"].share


def test_a_row_that_fails_is_refused() -> None:
    def fails(_):
        raise RuntimeError("no")

    found = decode.measure(dataclasses.replace(SMALL, queries=1), [Row("x", fails)], BAD, SHORT, CPU)
    assert found[0].refused == "RuntimeError: no" and found[0].us is None


def test_peers_without_windows_or_sinks_are_refused() -> None:
    by = {row.name: row for row in ROWS}
    for options in ({"window": 9}, {"sinks": True}):
        case = dataclasses.replace(SMALL, **options)
        (found,) = decode.measure(case, [by["SDPA bf16"]], BAD, SHORT, CPU)
        assert found.refused == "ValueError: it has no windows and sinks"
    (found,) = decode.measure(dataclasses.replace(SMALL, sinks=True), [by["FA3 bf16"]], BAD, SHORT, CPU)
    assert found.refused == "ValueError: it has no sinks"


def test_lengths_of_ragged_sequences() -> None:
    lengths = next(case for case in CASES if "ragged" in case.name).lengths
    assert len(lengths) == 64 and min(lengths) == 200 and max(lengths) == 12000 and list(lengths) != sorted(lengths)


def test_the_table_of_the_documentation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timing = Timing(80.0, 80.0, 80.0, 80.0, 0.0, (80.0,), 1, 1, "CUDA graph")
    about = dict(gpu="X", driver="1", torch="2", cudnn=91900, triton="3", date="2026-11-26", commit="0123456789")
    results = [Result(CASES[0], row, None if row.name == "SDPA bf16" else timing) for row in ROWS]
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(result.record() | about) + "\n" for result in results))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    line = readme.decode().splitlines()[-1]
    assert line == "| 32 × 4k | 80.0 (100%) | 80.0 (100%) | 80.0 (100%) | 80.0 (100%) | 80.0 (200%) | 80.0 (100%) | 80.0 (200%) | – | 80.0 | – |"


def test_the_table_of_prefills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timing = Timing(80.0, 80.0, 80.0, 80.0, 0.0, (80.0,), 1, 1, "CUDA graph")
    about = dict(gpu="X", driver="1", torch="2", cudnn=91900, triton="3", date="2026-11-26", commit="0123456789")
    results = [Result(decode.PREFILL[0], row, None if "of vLLM" in row.name else timing) for row in decode.PREFILL_ROWS]
    (tmp_path / "prefill.jsonl").write_text("".join(json.dumps(result.record() | about) + "\n" for result in results))
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.prefill().splitlines()[-1] == "| prefill 4 × 4k | 80 | 80 | 1.00 | 80 (75%) | 80 | 80 | 80 | – |"
    (tmp_path / "prefill.jsonl").rename(tmp_path / "prefill_tensors.jsonl")
    assert readme.prefill_tensors().splitlines()[-1] == "| prefill 4 × 4k | 80 | 80 | 1.00 | 80 | – | – | 80 | 80 | – | – | – |"


@pytest.mark.parametrize("queries, options", (
    *(pytest.param(queries, {}, marks=pytest.mark.thorough) for queries in (200, 300)), (200, {"window": 60, "sinks": True}),
))  # fmt: skip
def test_rows_of_a_prefill_attend_to_the_same(queries: int, options: dict, device: torch.device) -> None:
    case = DecodeCase("prefill", (300, 300), 2, 1, 64, queries=queries, **options)
    rows = [row for row in decode.PREFILL_ROWS if row.needs() is None and "cuda" not in row.name and "tensors" not in row.name]
    names = ["fp8attn dense", "fp8attn dense, quantized", "fp8attn triton", "fp8attn append"]
    assert [row.name for row in rows if "fp8attn" in row.name] == names
    for result in decode.measure(case, rows, BAD, SHORT, device):
        assert result.refused is None and (result.share is None) == result.row.attends, result.refused
        assert result.errors is None or result.errors.relative_l2 < 0.06
