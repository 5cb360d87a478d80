"""Reading Nsight Compute: on its output for six kernels on an H100, kept with the columns that are read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

import fp8attn
from bench import __main__ as command
from bench import cases, profile, profiled
from fp8attn.device import CEILINGS

RECORDED = Path(__file__).with_name("ncu_h100.csv")
"""ncu 2025.3.1, NVIDIA H100 80GB HBM3, `full 4k`: the CUDA kernel at D 64, 128 and 256, Triton's and the quantizer's three at D 128."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, profile.Counters]:
    return {profile.short(c.kernel): c for c in profile.parse(RECORDED.read_text())}


CUDA = {
    64: "hopper_forward<hopper_64_64_4_4_112_0_1_0>",
    128: "hopper_forward<hopper_128_128_3_4_160_0_1_0>",
    256: "hopper_forward<hopper_256_256_2_2_240_0_1_0>",
}


def test_counters_are_read(recorded: dict[str, profile.Counters]) -> None:
    c = recorded[CUDA[64]]
    assert c.microseconds == pytest.approx(607.04) and c.sm_clock_ghz == pytest.approx(1.843, abs=1e-3)
    assert (c.tensor, c.xu, c.issue, c.alu) == (50.40, 26.89, 61.46, 40.58)
    assert c.registers == 96 and c.shared_bytes == 92160 and c.local_loads == 0 and recorded["hopper_kernel"].local_loads == 1_348_304
    assert c.conflicts == pytest.approx(100 * 536_453 / 55_082_352, rel=1e-3)
    assert [name for name, _ in c.stalls[:2]] == ["wait", "dispatch stall"] and not any("selected" in name for name, _ in c.stalls)


@pytest.mark.parametrize(
    "kernel, verdict",
    (
        (CUDA[64], "issue-bound"),
        (CUDA[128], "compute-bound"),
        (CUDA[256], "compute-bound"),
        ("hopper_kernel", "exponential-bound"),
        ("gather_kernel", "memory-bound"),
        ("finish_kernel", "latency-bound"),
        ("write_kernel", "memory-bound"),
    ),
)
def test_verdicts_of_recorded_kernels(kernel: str, verdict: str, recorded: dict[str, profile.Counters]) -> None:
    assert profile.judge(recorded[kernel]).name == verdict


@pytest.mark.parametrize("dim, tensor, issue, consumers", ((64, 264, 304, 4), (128, 520, 329, 3)))
def test_verdicts_agree_with_the_cycle_budget(dim: int, tensor: int, issue: int, consumers: int, recorded: dict[str, profile.Counters]) -> None:
    """docs/hopper-kernel.md: clk of a block of 64 queries x 128 keys on the tensor cores, and in a scheduler's issue slots."""
    c = recorded[CUDA[dim]]
    assert (profile.judge(c).name == "issue-bound") == (issue > tensor)
    # clk of the budget over the counter's share is the time of a block; what issues outside the main loop isn't in the budget
    assert 0.85 < (issue / c.issue) / (tensor / c.tensor) < 1


@pytest.mark.parametrize("dim", CUDA)
def test_the_tensor_counter_is_the_flops(dim: int, recorded: dict[str, profile.Counters]) -> None:
    """The products' FLOPs, and those of the eight columns of ones, at the rate that was measured."""
    case = next(case for case in cases.PREFILL if case.name == f"D{dim} full 4k")
    c = recorded[CUDA[dim]]
    clk = case.flops * (2 * dim + 8) / (2 * dim) / CEILINGS["NVIDIA H100 80GB HBM3"].tensor_flop_per_clk / 132
    elapsed = c.microseconds * c.sm_clock_ghz * 1e3
    assert 0.9 < clk / elapsed / (c.tensor / 100) < 1  # an SM is idle at a kernel's start and end


def test_rules_in_order(recorded: dict[str, profile.Counters]) -> None:
    c = dataclasses.replace(recorded[CUDA[128]], tensor=60.0, xu=40.0, issue=30.0, alu=20.0, fma=10.0, dram=10.0, l2=10.0, shared=10.0)
    said = profile.judge(c)
    assert said.name == "compute-bound" and "tensor 60 %" in said.rule and "XU 40 %" in said.rule and "DRAM 10 % < 50 %" in said.rule
    for change, name in (
        (dict(dram=71.0), "memory-bound"),
        (dict(xu=61.0), "exponential-bound"),
        (dict(alu=61.0), "ALU-bound"),
        (dict(fma=61.0), "FMA-bound"),
        (dict(tensor=49.0, l2=71.0), "L2-bound"),
        (dict(tensor=49.0, shared=71.0), "shared-memory-bound"),
        (dict(tensor=49.0), "latency-bound"),
        (dict(dram=60.0), "compute- and memory-bound"),
    ):
        assert profile.judge(dataclasses.replace(c, **change)).name == name, change


@pytest.mark.parametrize("text", ("", "==ERROR== no\n", '"ID","Kernel Name"\n"",""\n"0","x"\n'))
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no kernel in it|no counter"):
        profile.parse(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.jsonl"
    assert command.main(["profile", "--from", str(RECORDED), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "issue-bound" in printed and "memory-bound: DRAM 74 % > 70 %" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 7 and lines[0]["verdict"] == "issue-bound" and lines[0]["stalls"]["wait"] == 1.23
    assert command.main(["profile", "--case", "nonsense"]) == 2
    assert "no case is named 'nonsense'" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert command.main(["profile"]) == 2
    assert "ncu isn't here" in capsys.readouterr().err
    words = profile.command("ncu", profile.target(cases.TINY[0], "fp8attn cuda", "normal"), "none", "forward")
    assert words[1:5] == ["--clock-control", "none", "--profile-from-start", "off"] and "forward/" in words
    assert json.loads(words[-1])["case"]["name"] == "tiny full"


def test_quantizing_and_attending_are_ranges_while_profiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    q = torch.randn(1, 1, 16, 32, device=device, dtype=torch.bfloat16)
    operators = fp8attn.api.ops.library_ops
    with profiled.named_ranges():
        fp8attn.sdpa(q, q, q, backend="triton")
    assert said == ["quantize", "end", "forward", "end"]
    fp8attn.sdpa(q, q, q, backend="triton")
    assert len(said) == 4 and fp8attn.api.ops.library_ops is operators
