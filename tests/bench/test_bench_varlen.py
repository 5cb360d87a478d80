"""python -m bench varlen: lengths, operations, rows that are refused, and the table."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import varlen
from bench.timing import Protocol
from bench.varlen import BATCHES, LENGTHS, ROWS_OF_TABLE, Batch, Inputs, Result, Row

CPU = torch.device("cpu")
SMALL = Batch("small", (20, 40, 7), 2, 1, 32, True)
EQUAL = dataclasses.replace(SMALL, name="equal", lengths=(30, 30))
SHORT = Protocol(rounds=1, milliseconds=1.0, lead_in=1.0)


def test_batches_are_those_that_were_asked_for() -> None:
    assert len({batch.name for batch in BATCHES}) == len(BATCHES) > 3 * len(LENGTHS)
    with_options = [batch for batch in BATCHES if batch.window >= 0 or batch.softcap or batch.sinks]
    assert all(dataclasses.replace(batch, window=-1, softcap=0.0, sinks=False).flops >= batch.flops for batch in with_options)
    assert len(LENGTHS["64 of 200 to 12k"]) == 64 and 200 <= min(LENGTHS["64 of 200 to 12k"]) <= max(LENGTHS["64 of 200 to 12k"]) <= 12_000
    assert sorted(LENGTHS["one of 32k, 63 of 256"]) == [256] * 63 + [32_768]
    like = sorted(LENGTHS["128 like ShareGPT"])
    assert 400 < like[64] < 1200 and like[-1] > 4 * like[64]
    assert varlen.uniform(1, 9, 5) == varlen.uniform(1, 9, 5) and varlen.log_normal(3) == varlen.log_normal(3)


def test_operations_are_those_of_visible_pairs() -> None:
    pairs = sum(sum(row + 1 for row in range(n)) for n in SMALL.lengths)
    assert SMALL.flops == 2 * 2 * 32 * 2 * pairs
    assert dataclasses.replace(SMALL, causal=False).flops == 2 * 2 * 32 * 2 * sum(n * n for n in SMALL.lengths)
    windowed = sum(sum(min(row + 1, 8) for row in range(n)) for n in SMALL.lengths)
    assert dataclasses.replace(SMALL, window=7).flops == 2 * 2 * 32 * 2 * windowed


@pytest.mark.parametrize("options", ({}, {"window": 9}, {"softcap": 2.0}, {"sinks": True}), ids=str)
def test_every_row_computes_the_same(options: dict[str, Any]) -> None:
    """Of equal lengths; other ones have no dense call. Without a GPU these are the reference's."""
    own = [row for row in ROWS_OF_TABLE if row.name.startswith("fp8attn") and "triton" not in row.name]
    inputs = Inputs.of(dataclasses.replace(EQUAL, **options), CPU)
    outs = {row.name: row.prepare(inputs)(0) for row in own}
    dense = outs.pop("fp8attn auto, dense").transpose(1, 2).flatten(0, 1).float()  # type: ignore[attr-defined]
    for out in outs.values():
        torch.testing.assert_close(out.float(), dense, rtol=0.05, atol=0.15)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lengths differ"):
        varlen.dense_by("auto", Inputs.of(SMALL, CPU))


def test_rows_that_cannot_run_say_why() -> None:
    """And the others are timed, and stand in the table."""
    absent = Row("absent", lambda x: varlen.flash3(importlib.import_module("no_such_module").function, True, x))
    rows = (ROWS_OF_TABLE[1], Row("dense", lambda x: varlen.dense_by("auto", x)), absent)
    found = varlen.measure(SMALL, rows, SHORT, CPU)
    by = {result.row: result for result in found}
    assert by["dense"].refused == "lengths differ" and "no_such_module" in (by["absent"].refused or "")
    assert (by["fp8attn, from bf16"].us or 0) > 0 and by["fp8attn, from bf16"].record()["tflops"] > 0
    made = varlen.table([*found, Result(EQUAL, "dense", 5.0), Result(EQUAL, "absent"), Result(EQUAL, "fp8attn, from bf16", 2.0)])
    assert made.row_count == 2


def test_flash_attention_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []

    class Module:
        @staticmethod
        def flash_attn_varlen_func(*tensors, **options):
            seen.append((tensors, options))

    inputs = Inputs.of(SMALL, CPU)
    for name in ("fa3_fwd_interface", "vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, name, Module)
    for row in ROWS_OF_TABLE[-4:]:
        row.prepare(inputs)(0)
    (plain, options), (_, scaled), _, (codes, vllm) = seen
    assert plain[0].dtype == torch.bfloat16 and codes[0].dtype == torch.float8_e4m3fn and vllm["fa_version"] == 3 and "fa_version" not in scaled
    assert options["max_seqlen_q"] == 40 and options["cu_seqlens_k"].tolist() == [0, 20, 60, 67] and options["causal"] is True
    assert options["window_size"] == (-1, -1) and options["softcap"] == 0.0
    assert scaled["k_descale"].shape == (3, 1) and not any(name.endswith("descale") for name in options)

    capped = Inputs.of(dataclasses.replace(SMALL, window=7, softcap=3.0), CPU)
    varlen.upstream_flash3(False, capped)(0)
    assert seen[-1][1]["window_size"] == (7, 0) and seen[-1][1]["softcap"] == 3.0
    with_sinks = Inputs.of(dataclasses.replace(SMALL, sinks=True), CPU)
    with pytest.raises(ValueError, match="sinks"):
        varlen.upstream_flash3(False, with_sinks)
    varlen.vllm_flash3(False, with_sinks)(0)
    assert seen[-1][1]["s_aux"].dtype == torch.bfloat16 and seen[-1][1]["s_aux"].shape == (2,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["varlen"]) == 2
    assert "GPU" in capsys.readouterr().err
