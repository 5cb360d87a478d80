"""python -m bench models: what is built, what is timed, and the table."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8attn
from bench import __main__ as command
from bench import models
from bench.models import CASES, NOTHING, ROWS, SDPA, Case, Protocol, Result

SHORT = Protocol(rounds=2, milliseconds=1.0)
(VIT,) = [case for case in CASES if case.name.startswith("ViT")]


def has(case: Case) -> Case:
    return pytest.param(case, marks=pytest.mark.skipif(case.lacking is not None, reason=f"needs {case.lacking}"), id=case.name)


class Twice(nn.Module):
    """A list of layers, and a list of other things."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.parts = nn.ModuleList((nn.Linear(4, 4), nn.Identity()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.parts[0](x)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES) and len({row.name for row in ROWS}) == len(ROWS)


def test_copies_share_weights_but_not_modules() -> None:
    model = Twice()
    copied = models.with_the_same_weights(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert not {id(x) for x in model.modules()} & {id(x) for x in copied.modules()}


def test_layers_of_lists_are_compiled() -> None:
    model = Twice()
    models.compile_layers(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["layers.0", "layers.1", "layers.2"]


def test_attention_ratio_leaves_out_the_rest() -> None:
    """Of 10 ms 6 are attention. With 3 ms of attention the model takes 7."""
    rows = [Result("x", SDPA, "eager", 10.0, against_sdpa=1.0), Result("x", "fp8attn", "eager", 7.0, against_sdpa=10 / 7)]
    nothing = Result("x", NOTHING, "eager", 4.0, against_sdpa=2.5)
    assert models.attention_ratio(rows[1], [*rows, nothing]) == pytest.approx(2.0)
    assert models.attention_ratio(rows[0], [*rows, nothing]) == pytest.approx(1.0)
    assert models.attention_ratio(rows[1], rows) is None and models.attention_ratio(nothing, [*rows, nothing]) is None


@pytest.mark.parametrize("case", [has(case) for case in CASES if case.library == "diffusers"])
def test_models_before_change_nothing(case: Case) -> None:
    """Models of diffusers whose backend isn't set take that of the model that was set last."""
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    (row,) = [row for row in ROWS if row.name == "fp8attn"]
    (before,) = [other for other in CASES if other.name.startswith("Wan")]
    with row.switch(models.built(before, before.tiny, torch.device("cpu"))[0]) as unused:
        model, inputs = models.built(case, case.tiny, torch.device("cpu"))
        with fp8attn.patch(model, min_keys=0, backend="reference") as used:
            models.output_of(model, inputs)
    assert used.replaced.total() > 0 and not used.fallbacks and not unused.replaced
    assert registry.get_active_backend()[0].value == models.NATIVE


@pytest.mark.thorough
@pytest.mark.parametrize("case", [has(case) for case in CASES])
def test_every_model_is_built_and_switched(case: Case) -> None:
    """Tiny: every row is within bfloat16's and FP8's error, and fp8attn computes calls."""
    rows = [row for row in ROWS if row.name in (SDPA, "fp8attn")]
    sdpa, own = models.measure(case, case.tiny, rows, "eager", dataclasses.replace(SHORT, rounds=1), torch.device("cpu"))
    assert sdpa.relative_l2 is not None and own.relative_l2 is not None and own.calls is not None
    assert sdpa.relative_l2 < 0.01 and 1e-4 < own.relative_l2 < 0.1
    assert own.calls[0] > 0 and own.calls[1] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("case", [has(case) for case in CASES])
def test_real_sizes_are_built(case: Case) -> None:
    """Without memory: one layer of each kind."""
    size = models.size_of(case, 1, gpu=True)
    with torch.device("meta"):
        model = case.build(importlib.import_module(case.library), size)
    assert sum(x.numel() for x in model.parameters()) > 1e7


@pytest.mark.skipif(VIT.lacking is not None, reason=f"needs {VIT.lacking}")
@pytest.mark.anywhere
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "device_here", lambda: torch.device("cpu"))
    file = tmp_path / "models.jsonl"
    assert command.main(["models", "--case", "ViT", "--rounds", "2", "--milliseconds", "1", "--json", str(file)]) == 0
    lines = {line["row"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert {SDPA, "SDPA flash", "fp8attn", "fp8attn int8", NOTHING} <= lines.keys()
    assert all(line["ms"] > 0 and len(line["round_ms"]) == 2 and line["launch"] == "eager" for line in lines.values())
    assert lines["fp8attn"]["calls"] == [1, 0] and lines["fp8attn"]["relative_l2"] < 0.02 and lines[NOTHING]["relative_l2"] is None
    assert "no attention" in capsys.readouterr().out
    assert command.main(["models", "--case", "nobody's"]) == 2 and command.main(["models", "--peer", "nobody's"]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(VIT.lacking is not None, reason=f"needs {VIT.lacking}")
@pytest.mark.parametrize("launch", ("eager", "compiled"))
def test_measures(device: torch.device, launch: str) -> None:
    """On a GPU a short model's attention stays with PyTorch by default."""
    found = {result.row: result for result in models.measure(VIT, VIT.tiny, ROWS[:4], launch, SHORT, device)}
    assert found[SDPA].ms and found["fp8attn"].ms and found["fp8attn"].peak_bytes
    assert launch == "compiled" or found["fp8attn"].calls == (0, 1)
