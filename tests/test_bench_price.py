"""python -m bench price: parts of a call by recipe, what they are compared with, and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench import __main__ as command
from bench import price, readme
from bench.cases import square
from bench.gates import Gates
from bench.machine import machine
from bench.peers import Attention, Problem
from bench.rows import RECIPES
from bench.timing import Protocol, Timing
from fp8attn import BackendUnavailable, Recipe

SMALL = square("small", 1, 2, 200, 64, causal=True)
SHORT = Protocol(rounds=2, milliseconds=1.0, lead_in=1.0)


def test_every_part_of_every_recipe_is_timed(device: torch.device) -> None:
    recipes = {price.DEFAULT: Recipe(), "int8, Q smoothed": RECIPES["int8, Q smoothed"], "per tensor": RECIPES["per tensor"]}
    prices = price.measure(SMALL, recipes, Gates.load().bad, SHORT, device)
    assert [p.recipe for p in prices] == [*recipes, price.BFLOAT16]
    for found in prices[:-1]:
        assert set(found.timings) == set(found.against_default) == set(price.PARTS) and found.plan and found.refused is None
        assert found.errors is not None and found.errors.relative_l2 < 0.08
        assert all(timing.p50_us > 0 for timing in found.timings.values())
        assert all(ratio > 0 and error >= 0 for ratio, error in found.against_default.values())
    bfloat16 = prices[-1]
    assert (
        not bfloat16.against_default
        and set(bfloat16.timings) == {"whole"}
        and bfloat16.against_bfloat16 == 1.0
        and bfloat16.plan in ("SDPA flash", "SDPA cuDNN")
    )
    assert price.table(prices).row_count == 4


def test_a_recipe_that_nobody_computes_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_recipe(recipe: Recipe, problem: Problem, original=price.by_recipe) -> Attention:
        if recipe.qk == "int8":
            raise BackendUnavailable("no int8 today")
        return original(recipe, problem)

    monkeypatch.setattr(price, "by_recipe", by_recipe)
    found = price.measure(SMALL, {"int8": Recipe(qk="int8"), price.DEFAULT: Recipe()}, Gates.load().bad, SHORT, device)
    assert found[0].refused == "BackendUnavailable: no int8 today" and not found[0].timings and found[1].timings
    assert found[0].record()["kernel_us"] is None and price.table(found).row_count == 3


def test_a_whole_name_is_one_recipe() -> None:
    assert [name for name in RECIPES if price.is_meant(name, "int8")] == ["int8"]
    assert [name for name in RECIPES if price.is_meant(name, "int8 r")] == ["int8 rotated"]
    assert len([name for name in RECIPES if price.is_meant(name, "token")]) == 2


def timing(us: float) -> Timing:
    return Timing.of([[us]], 1, "by hand")


def test_pytorch_is_over_the_whole() -> None:
    timed = {"default: kernel": 10.0, "default: whole": 12.0, "f16: kernel": 30.0, "f16: whole": 36.0, "bfloat16: whole": 18.0}
    ratios = {"default: kernel": (1.01, 0.01), "f16: kernel": (3.0, 0.1), "f16: whole": (2.9, 0.2)}
    prices = [price.Price(SMALL, name) for name in ("default", "f16", "bfloat16")]
    default, f16, bfloat16 = price.compared(prices, {name: timing(us) for name, us in timed.items()}, ratios)
    assert default.against_default == {"kernel": (1.01, 0.01)} and default.against_bfloat16 == 1.5
    assert f16.against_default == {"kernel": (3.0, 0.1), "whole": (2.9, 0.2)} and f16.against_bfloat16 == 0.5 and f16.us("quantize") is None
    assert f16.record()["kernel_against_default"] == 3.0 and f16.record()["kernel_standard_error"] == 0.1
    assert bfloat16.against_default == {} and bfloat16.against_bfloat16 == 1.0
    without = price.compared(prices[:2], {"f16: whole": timing(1.0)}, {})
    assert without[1].against_default == {} and without[1].against_bfloat16 is None


def test_ratios_are_of_rounds() -> None:
    """A clock that falls from round to round falls for both."""
    this, default = (Timing.of(rounds, 1, "by hand") for rounds in ([[11.0], [22.0], [36.0]], [[10.0], [20.0], [30.0]]))
    ratio, error = price.over(this, default)
    assert ratio == pytest.approx((1.1 + 1.1 + 1.2) / 3) and error == pytest.approx(0.1 / 3)
    assert price.over(default, default) == (1.0, 0.0) and price.over(timing(3.0), timing(2.0)) == (1.5, 0.0)


def test_what_has_no_part_in_the_default_has_no_ratio(device: torch.device) -> None:
    runs: dict[str, Attention] = {"f16: kernel": lambda i: torch.zeros(1, device=device)}
    assert price.by_twos(runs, "f16: kernel", 1, SHORT, device) is None


def test_the_documents_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    table = readme.if_measured("price", readme.price)
    assert "Not measured on a GPU yet: `python -m bench price" in table()
    about = machine(device) | {"driver": "1", "cudnn": 91900, "gpu": "a GPU"}
    default = price.Price(
        SMALL, "default", "cuda hopper", timings={"whole": timing(12.0)}, against_default={"whole": (1.0, 0.01)}, against_bfloat16=1.5
    )
    records = [default.record(), dataclasses.replace(default, recipe="f16", timings={}, against_default={}, refused="ValueError: no").record()]
    (tmp_path / "price.jsonl").write_text("".join(json.dumps(record | about) + "\n" for record in records))
    rows = [line for line in table().splitlines() if line.startswith("| small")]
    assert rows[0] == "| small | default | cuda hopper | – | – | – | – | 12 | 1.00 ± 0.01 | 1.50 | – |"
    assert rows[1].startswith("| small | f16 | ValueError: no | –")


def test_the_command(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["price", "--case", "D64", "--recipe", "int8", "--rounds", "2", "--milliseconds", "2", "--json", str(tmp_path / "price.jsonl")]
    if device.type != "cuda":
        assert command.main(words) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
        return
    assert command.main(words) == 0
    names = [json.loads(line)["recipe"] for line in (tmp_path / "price.jsonl").read_text().splitlines()]
    assert names == ["default", "int8", "bfloat16"]
    assert command.main(["price", "--recipe", "nobody's"]) == 2 and "nobody's" in capsys.readouterr().err
