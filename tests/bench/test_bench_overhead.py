"""python -m bench overhead: what is called, what of it is timed, and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import fp8attn
from bench import __main__ as command
from bench import overhead
from bench.cases import square
from bench.overhead import KINDS, Kind, Overhead
from bench.timing import Protocol

CPU = torch.device("cpu")
SMALL = Kind("small", square("small", 1, 2, 200, 64), padding=True)


def test_kinds_are_calls_that_sdpa_takes() -> None:
    """With every kind's arguments, on small tensors; names are unique."""
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        if kind.prepare is not None:
            continue
        heads = kind.case.q_heads // kind.case.kv_heads
        small = dataclasses.replace(kind, case=dataclasses.replace(kind.case, batch=1, q_heads=heads, kv_heads=1, q_length=40, kv_length=40))
        q = torch.randn(1, heads, 40, kind.case.head_dim)
        out = fp8attn.sdpa(q, q[:, :1], q[:, :1], **small.arguments(CPU), backend="modelled")
        assert isinstance(out, tuple) == ("return_lse" in kind.options)


PREPARED = tuple(kind for kind in KINDS if kind.prepare is not None)


@pytest.mark.parametrize("kind", PREPARED, ids=lambda kind: kind.name)
def test_prepared_calls_run(kind: Kind) -> None:
    """Of small tensors, twice. Only an append has no output; the others' is finite."""
    assert kind.prepare is not None
    lengths = dict(q_length=40, kv_length=40) if kind.case.causal else dict(q_length=1, kv_length=140)
    case = dataclasses.replace(kind.case, batch=3, q_heads=2, kv_heads=1, head_dim=16, value_dim=16, **lengths)
    call = kind.prepare(case, CPU)
    for _ in range(2):
        out = call()
        assert out is None if kind.name == "append" else isinstance(out, torch.Tensor) and out.isfinite().all()


def test_packed_lengths_differ() -> None:
    case = dataclasses.replace(square("small", 3, 2, 40, 16), kv_heads=1)
    _, _, _, cu_seqlens, same = overhead.packed(case, CPU).args  # type: ignore[attr-defined]
    assert cu_seqlens is same and cu_seqlens.tolist() == [0, 20, 60, 120]


def test_padding_hides_the_last_tenth() -> None:
    mask = SMALL.arguments(CPU)["attn_mask"]
    assert mask.shape == (1, 1, 1, 200) and mask.dtype == torch.bool and mask.sum() == 180 and bool(mask[..., :180].all())


def test_cpu_time_is_of_calls_and_not_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 3e-6

    def wait() -> None:
        now[0] += 1.0

    assert overhead.cpu_us(call, wait) == pytest.approx(3.0)


def test_inputs_of_new_lengths_come_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each turn, whose lengths no other turn has. The first length's calls aren't counted."""
    events: list[str] = []
    of = overhead.Problem.of
    monkeypatch.setattr(overhead.Problem, "of", lambda case, *x, **options: events.append(f"draw {case.kv_length}") or of(case, *x, **options))
    monkeypatch.setattr(overhead.fp8attn, "sdpa", lambda q, k, v, **options: events.append(f"call {k.shape[2]}"))
    samples = overhead.CpuSamples()
    for turn, expected in enumerate(([198, 196, 194, 192], [190, 188, 186, 184])):
        events.clear()
        samples.take(SMALL, turn, CPU, lambda: None)
        repeated = ["draw 200"] + ["call 200"] * (3 + overhead.CALLS)
        assert events == repeated + [f"draw {n}" for n in expected] + [f"call {n}" for n in expected for _ in range(2)]
    assert len(samples.first) == len(samples.second) == 2 * overhead.NEW_LENGTHS and len(samples.repeated) == len(samples.sdpa) == 2


def test_kinds_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int]] = []
    monkeypatch.setattr(overhead.CpuSamples, "take", lambda self, kind, turn, *rest: turns.append((kind.name, turn)))
    two = [SMALL, dataclasses.replace(SMALL, name="other")]
    assert len(overhead.measure_cpu(two, 2, CPU)) == 2
    assert turns == [("small", 0), ("other", 0), ("small", 1), ("other", 1)]


def test_table_and_record() -> None:
    one = Overhead(SMALL, 30.0, 200.0, 300.0, 60.0, 50.0, 20.0, 90.0)
    assert one.of_launching == pytest.approx(1.2)
    made = overhead.table([one])
    assert made.row_count == 1
    assert overhead.table([one, Overhead(KINDS[-1], 30.0, None, None, 60.0, 50.0, None, None)]).row_count == 2
    assert json.loads(json.dumps(one.record()))["kind"] == "small" and one.record()["sdpa_eager_us"] == 90.0


def measured(kind: Kind, device: torch.device) -> Overhead:
    (cpu,) = overhead.measure_cpu([kind], 2, device)
    return overhead.measure(kind, cpu, Protocol(rounds=2, milliseconds=1.0, lead_in=1.0), device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PREPARED, ids=lambda kind: kind.name)
def test_measures_prepared_calls(kind: Kind, device: torch.device) -> None:
    found = measured(kind, device)
    assert found.cpu_us > 0 and found.eager_us > 0 and found.graph_us > 0 and found.new_length_us is found.sdpa_cpu_us is None


@pytest.mark.gpu
def test_measures(device: torch.device) -> None:
    found = measured(SMALL, device)
    assert all(
        x > 0 for x in (found.cpu_us, found.new_length_us, found.second_us, found.eager_us, found.graph_us, found.sdpa_cpu_us, found.sdpa_eager_us)
    )


def test_the_command(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["overhead", "--case", "ViT", "--rounds", "2", "--milliseconds", "2", "--json", str(tmp_path / "overhead.jsonl")]
    if device.type != "cuda":
        assert command.main(words) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
        return
    assert command.main(words) == 0
    (line,) = (tmp_path / "overhead.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "ViT-L 577"
    assert command.main(["overhead", "--case", "nobody's"]) == 2 and "nobody's" in capsys.readouterr().err
