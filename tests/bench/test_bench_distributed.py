"""python -m bench distributed: what is counted, the simulation, the tables, and the command with two processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as command
from bench import distributed
from bench.cases import Case, square
from bench.distributed import ALL_GATHER, MESH, ONE, ONE_BF16, RING, RING_BF16, ROWS, ULYSSES, ULYSSES_BF16, Counted, Result, Turn
from fp8attn.distributed import context_parallel

CASE = square("small", 1, 4, 1024, 64)


def result(row: str, us: float | None = 100.0, **fields) -> Result:
    return Result(CASE, row, 1 if "one" in row else 2, us, **fields)


def test_overlap_is_the_share_of_transfers_that_attention_hides() -> None:
    assert result(RING, 100.0, attention_us=100.0, transfer_us=40.0).overlap == 1.0
    assert result(RING, 140.0, attention_us=100.0, transfer_us=40.0).overlap == 0.0
    assert result(RING, 110.0, attention_us=100.0, transfer_us=40.0).overlap == pytest.approx(0.75)
    assert result(RING, 90.0, attention_us=100.0, transfer_us=40.0).overlap == 1.0
    assert result(ULYSSES).overlap is None and result(RING, attention_us=1.0, transfer_us=0.0).overlap is None


def test_records_are_flat() -> None:
    record = result(RING, 110.0, sent=1000, attention_us=100.0, transfer_us=40.0, relative_l2=0.05).record()
    assert json.loads(json.dumps(record)) == CASE.record() | {
        "backend": RING, "ranks": 2, "us": 110.0, "sent": 1000, "attention_us": 100.0, "transfer_us": 40.0, "relative_l2": 0.05,
        "refused": None, "spread": None, "idle_us": None, "overlap": pytest.approx(0.75),
    }  # fmt: skip


def test_a_ring_without_transfers_keeps_its_buffer() -> None:
    """And what is sent is counted; afterwards the transfers are the library's again."""
    before = context_parallel.Ring
    buffer, group = torch.zeros(10, dtype=torch.uint8), SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    with Counted(silent=True) as counted:
        assert all(x is buffer for x in context_parallel.Ring(buffer, [10, 9, 8], group))  # type: ignore[arg-type]
    assert (counted.sent, counted.sizes) == (19, [10, 9, 8]) and context_parallel.Ring is before


def test_bytes_of_bfloat16() -> None:
    """Of two ranks: the ring sends this rank's keys and values; Ulysses half of them, of the queries and of the output."""
    x = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    shard = SimpleNamespace(group=SimpleNamespace(size=lambda: 2), q=x, k=x, v=x)
    assert distributed.bf16_bytes(RING_BF16, shard) == 2 * x.nbytes == distributed.bf16_bytes(ULYSSES_BF16, shard)  # type: ignore[arg-type]


def test_the_simulation_is_bound_by_attention_or_by_the_link() -> None:
    """In the limits: attention is shared by all ranks, or every step takes as long as its transfer. FP8 halves the bytes."""
    fast = distributed.simulated_us(CASE, 8, 800.0, math.inf, latency_us=0.0)
    assert fast == pytest.approx(100.0)
    shard_bytes = 4 * 1024 / 8 * 128
    slow = distributed.simulated_us(CASE, 8, 0.0, 1e6, latency_us=0.0)
    assert slow == pytest.approx(7 * shard_bytes)
    assert distributed.simulated_us(CASE, 8, 0.0, 1e6, latency_us=0.0, half_bytes=False) == pytest.approx(2 * slow)
    assert distributed.simulated_us(CASE, 2, 400.0, math.inf, latency_us=7.0) == pytest.approx(207.0)
    assert distributed.simulated_2d_us(CASE, 16, 1600.0, math.inf, math.inf, latency_us=0.0) == pytest.approx(100.0)
    # between machines a rank passes on as much as in a ring of all ranks, in one step instead of 15
    assert distributed.simulated_2d_us(CASE, 16, 0.0, math.inf, 1e6, latency_us=0.0) == pytest.approx(4 * 1024 / 16 * 128)


def test_the_tables() -> None:
    results = [
        result(ONE, 200.0, sent=0, relative_l2=0.05),
        result(RING, 110.0, spread=0.012, idle_us=130.0, sent=1_000_000, attention_us=100.0, transfer_us=40.0, relative_l2=0.05),
        result(ULYSSES, None, refused="4 heads aren't a multiple of 3 ranks"), result(ONE_BF16, 300.0), result(RING_BF16, 220.0, sent=2_000_000),
    ]  # fmt: skip
    cells = [list(column.cells) for column in distributed.table(results).columns]
    assert [column[1] for column in cells] == [RING, "110.0", "1.2%", "1.82", "2.00", "130.0", "1.00", "75%", "0.0500"]
    assert [column[2] for column in cells] == [ULYSSES, *["–"] * 8]
    made = distributed.simulation(results, 50e9)
    assert made is not None and made.row_count == len(distributed.SIMULATED)
    assert distributed.simulation([results[0]], 50e9) is None


def test_rows_that_do_not_fit_say_why() -> None:
    assert distributed.unsupported_row(ULYSSES, CASE, 3) == "4 heads aren't a multiple of 3 ranks"
    assert distributed.unsupported_row(RING_BF16, Case("x", 1, 4, 4, 1001, 1001, 64, 64, False), 2) == "1001 tokens aren't a multiple of 4"
    assert distributed.unsupported_row(MESH, CASE, 2) == "2 ranks aren't a ring of groups of 2"
    assert distributed.unsupported_row(MESH, CASE, 3) == "3 ranks aren't a ring of groups of 2"
    assert all(distributed.unsupported_row(row, CASE, 4) is None for row in ROWS)


def test_the_scaling_over_ranks() -> None:
    """Efficiency is the speedup over one GPU by the number of ranks. The simulation takes the link of the same ranks."""
    two = [result(ONE, 200.0), result(RING, 125.0, attention_us=100.0, transfer_us=40.0), result(ULYSSES, None, refused="heads")]
    four = [Result(CASE, RING, 4, 80.0, transfer_us=60.0), Result(CASE, ULYSSES, 4, 100.0)]
    made = distributed.scaling([two, four])
    assert made is not None
    rows = list(zip(*(column.cells for column in made.columns), strict=True))
    assert [row[:5] for row in rows] == [
        (RING, "2", "125.0", "1.60", "80%"), (RING, "4", "80.0", "2.50", "62%"), (ULYSSES, "4", "100.0", "2.00", "50%"),
    ]  # fmt: skip
    assert rows[1][5] == f"{200 / distributed.simulated_us(CASE, 4, 200.0, 4 * 1024 / 4 * 128 * 3 / 60e-6):.2f}" and rows[2][5] == "–"
    assert distributed.scaling([two]) is None and distributed.scaling([two[1:], four]) is None


def test_turns_of_all_rows_are_as_long() -> None:
    for us in (1.0, 44e3, 23e3, 900e3):
        turn = Turn.of(us)
        assert 0 <= turn.lead_in * us - distributed.LEAD_IN_US < us and 0 <= turn.calls * us - distributed.TURN_US < us
    by_name = {case.name: case for case in (*distributed.LONG, *distributed.ON_GPUS)}
    assert by_name["H24 D128 full 1024k"].flops >= 4 * distributed.LONG_FLOPS > by_name["H40 D128 full 128k"].flops


@pytest.mark.anywhere
def test_the_command_with_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows attend to the same; FP8's rings send half as many bytes as bfloat16's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "distributed.jsonl"
    assert command.main(["distributed", "--case", "full", "--rounds", "1", "--json", str(file)]) == 0
    assert "Simulated ring" in (out := capsys.readouterr().out) and "2 ranks" in out
    found = {record["backend"]: record for record in map(json.loads, file.read_text().splitlines())}
    assert list(found) == list(ROWS) and found.pop(MESH)["refused"] and all(record["us"] > 0 for record in found.values())
    for row in (ONE, RING, ULYSSES, ALL_GATHER):
        assert 0.01 < found[row]["relative_l2"] < 0.08
    for row in (ONE_BF16, RING_BF16, ULYSSES_BF16):
        assert found[row]["relative_l2"] < 0.005
    assert found[RING]["attention_us"] > 0 and found[RING]["transfer_us"] > 0 and 0 <= found[RING]["overlap"] <= 1
    assert command.main(["distributed", "--case", "nobody's"]) == 2 and "nobody's" in capsys.readouterr().err


@pytest.mark.anywhere
@pytest.mark.thorough
def test_the_command_with_two_and_four_processes(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of four; one GPU is timed once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "distributed.jsonl"
    ranks = ["distributed", "--case", "causal", "--peer", "one GPU", "--peer", "2-D", "--peer", "ring", "--rounds", "1", "--ranks", "2", "4"]
    assert command.main([*ranks, "--json", str(file)]) == 0 and "Scaling" in capsys.readouterr().out
    more = [json.loads(line) for line in file.read_text().splitlines()]
    mesh = next(record for record in more if record["backend"] == MESH and record["ranks"] == 4)
    assert mesh["us"] > 0 and 0.01 < mesh["relative_l2"] < 0.08 and mesh["sent"] > 0
    assert sum(record["backend"] == ONE for record in more) == 1
