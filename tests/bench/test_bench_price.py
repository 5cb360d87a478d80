"""python -m bench price: parts of a call by recipe, what they are compared with, and the table."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import price, readme, report, summary
from bench.cases import square
from bench.gates import Gates
from bench.machine import machine
from bench.peers import Attention, Problem
from bench.price import Ratio
from bench.rows import RECIPES
from bench.timing import Protocol, Timing
from fp8attn import BackendUnavailable, Recipe

SMALL = square("small", 1, 2, 200, 64, causal=True)
SHORT = Protocol(rounds=2, milliseconds=1.0, lead_in=1.0)


@pytest.mark.thorough
def test_every_part_of_every_recipe_is_timed(device: torch.device) -> None:
    recipes = {price.DEFAULT: Recipe(), "int8, Q smoothed": RECIPES["int8, Q smoothed"], "per tensor": RECIPES["per tensor"]}
    prices = price.measure(SMALL, recipes, Gates.load().bad, SHORT, device)
    assert [p.recipe for p in prices] == [*recipes, price.BFLOAT16]
    for found in prices[:-1]:
        assert set(found.timings) == set(found.against_default) == set(price.PARTS) and found.plan and found.refused is None
        assert found.errors is not None and found.errors.relative_l2 < 0.08
        assert all(timing.p50_us > 0 for timing in found.timings.values())
        assert all(ratio.mean > 0 and ratio.standard_error >= 0 for ratio in found.against_default.values())
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
    ratios = {"default: kernel": Ratio(1.01, 0.01), "f16: kernel": Ratio(3.0, 0.1, 1410.0, 1455.0), "f16: whole": Ratio(2.9, 0.2)}
    prices = [price.Price(SMALL, name) for name in ("default", "f16", "bfloat16")]
    default, f16, bfloat16 = price.compared(prices, {name: timing(us) for name, us in timed.items()}, ratios)
    assert default.against_default == {"kernel": (1.01, 0.01, None, None)} and default.against_bfloat16 == 1.5
    assert (
        f16.against_default == {"kernel": (3.0, 0.1, 1410.0, 1455.0), "whole": (2.9, 0.2, None, None)}
        and f16.against_bfloat16 == 0.5
        and f16.us("quantize") is None
    )
    assert f16.record()["kernel_against_default"] == 3.0 and f16.record()["kernel_standard_error"] == 0.1
    assert (f16.record()["kernel_clock_mhz"], f16.record()["kernel_default_clock_mhz"], f16.record()["quantize_clock_mhz"]) == (1410.0, 1455.0, None)
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
        SMALL, "default", "cuda hopper", timings={"whole": timing(12.0)}, against_default={"whole": Ratio(1.0, 0.01)}, against_bfloat16=1.5
    )
    records = [default.record(), dataclasses.replace(default, recipe="f16", timings={}, against_default={}, refused="ValueError: no").record()]
    (tmp_path / "price.jsonl").write_text("".join(json.dumps(record | about) + "\n" for record in records))
    rows = [line for line in table().splitlines() if line.startswith("| small")]
    assert rows[0] == "| small | default | cuda hopper | – | – | – | – | 12 | 1.00 ± 0.01 | 1.50 | – |"
    assert rows[1].startswith("| small | f16 | ValueError: no | –")


def lines_of_a_run(**changes: object) -> list[dict[str, Any]]:
    """What `price --recipe int8` records of three cases."""
    about = machine(torch.device("cpu")) | {"driver": "1", "cudnn": 91900, "gpu": "a GPU"}
    found: list[dict[str, Any]] = []
    for case, kernel, whole, faster in ((64, 1.15, 1.05, 1.6), (128, 1.06, 1.01, 1.4), (128, 1.174, 1.03, 1.7), (256, 1.0, 1.02, 1.2)):
        shape = square(f"D{case} {kernel}", 1, 2, 4096, case)
        for name, ratios in (("default", (0.997, 1.002)), ("int8", (kernel, whole))):
            against = {part: Ratio(ratio, 0.004) for part, ratio in zip(("kernel", "whole"), ratios, strict=True)}
            one = price.Price(shape, name, "cuda hopper", against_default=against, against_bfloat16=faster)
            found.append({"benchmark": "price"} | one.record() | about)
        found.append({"benchmark": "price"} | price.Price(shape, price.BFLOAT16, "SDPA cuDNN").record() | about)
    (one_summary,) = price.summaries(found)
    return [*found, json.loads(report.json_line(price.SUMMARY, one_summary | changes, about))]


def test_a_summary_is_of_every_case() -> None:
    """In one line: ratio and standard error by case, their range, from bfloat16 on, too, and what the default beside itself is."""
    *found, line = lines_of_a_run()
    assert line["recipe"] == "int8" and line["benchmark"] == "price summary" and line["gpu"] == "a GPU"
    assert line["kernel"] == {"D64 1.15": [1.15, 0.004], "D128 1.06": [1.06, 0.004], "D128 1.174": [1.174, 0.004], "D256 1.0": [1.0, 0.004]}
    assert (line["kernel_least"], line["kernel_most"], line["whole_least"], line["whole_most"]) == (1.0, 1.174, 1.01, 1.05)
    assert line["against_bfloat16"]["D256 1.0"] == 1.2 and line["kernel_noise"]["D64 1.15"] == [0.997, 0.004]
    said = summary.sentence(line)
    assert said.startswith("int8 over the default: kernel × 1.000 to 1.174 (D64 1.15 1.150 ± 0.004, ") and "\n" not in said
    assert "; from bf16 × 1.010 to 1.050 (D64 1.15 1.050 ± 0.004, " in said and said.endswith("; the default beside itself × 0.997 to 1.002")
    (nothing,) = price.summaries([found[1] | {"kernel_against_default": None, "whole_standard_error": None}])
    assert nothing["kernel"] == nothing["whole"] == {} and nothing["kernel_least"] is None
    assert summary.sentence(nothing) == "int8 over the default: nothing was timed"


def test_the_documents_say_what_the_run_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    lines = lines_of_a_run()

    def said(*lines: dict[str, Any]) -> str:
        (tmp_path / "price_int8.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return readme.rendered("<!-- table: int8_price -->\nby hand: 2 %\n<!-- end -->", {"int8_price": readme.int8_price})

    text = said(*lines)
    assert "by hand" not in text and said(*lines[:-1]) == text, "a file without a summary says the same"
    assert "over the default's: the kernel alone 1.15 at D 64, 1.06 to 1.17 at D 128, 1.00 at D 256; from bfloat16" in text
    assert "quantization included, 1.05 at D 64, 1.01 to 1.03 at D 128, 1.02 at D 256." in text
    assert "1.20 to 1.70 times as fast as PyTorch's fastest backend" in text and "the default beside itself: 1.00." in text
    assert "| D128 1.174 | 1.174 ± 0.004 | 1.030 ± 0.004 | 1.70 |" in text
    assert text == readme.rendered(text, {"int8_price": readme.int8_price})
    table = readme.price("price_int8")
    assert table.count("| int8 |") == table.count("| default |") == 4, "the summary is no row"
    with pytest.raises(ValueError, match="the summary of 'int8' isn't of the lines above it"):
        said(*lines_of_a_run(kernel_most=1.04))
    with pytest.raises(ValueError, match=r"price_int8.jsonl doesn't have the price of 'int8'; python -m bench price --recipe int8 measures it"):
        said(*(line for line in lines if line["recipe"] != "int8"))
    with pytest.raises(ValueError, match="more than one commit"):
        said(lines[0] | {"commit": "another"}, *lines[1:-1])


def test_the_command(device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["price", "--case", "D64 full", "--recipe", "int8", "--rounds", "2", "--milliseconds", "2", "--json", str(tmp_path / "price.jsonl")]
    if device.type != "cuda":
        assert command.main(words) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err
        return
    assert command.main(words) == 0
    names = [json.loads(line)["recipe"] for line in (tmp_path / "price.jsonl").read_text().splitlines()]
    assert names == ["default", "int8", "bfloat16", "int8"], "the last line is the summary"
    assert command.main(["price", "--recipe", "nobody's"]) == 2 and "nobody's" in capsys.readouterr().err
