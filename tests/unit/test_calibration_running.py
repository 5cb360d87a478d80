"""Calibration of a model that runs: in one call, by parts of a diffusion model's steps, and applied by the integrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn import PRECISE, Calibration, Recipe, integrations
from fp8attn.calibration.streaming import timestep_of
from models import decoder, prompt

ALL = dict(min_keys=0, decode="fp8attn", backend="modelled")
RECIPES = (Recipe(), PRECISE)

MEANS = torch.zeros(16)
MEANS[:4] = torch.tensor([10.0, -20.0, 30.0, -50.0])
"""Queries with such means are rounded coarsely in e4m3."""


class Layer(nn.Module):
    """Attention whose queries have means from a timestep on."""

    def __init__(self, since: float) -> None:
        super().__init__()
        self.since, self.qkv = since, nn.Linear(32, 96)
        nn.init.normal_(self.qkv.weight, std=32**-0.5)

    def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
        q, k, v = self.qkv(F.layer_norm(x, (32,))).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q + (MEANS if t >= self.since else 0), k, v)
        return x + out.transpose(1, 2).flatten(2)


class Denoiser(nn.Module):
    """Layer `later` has large means in the first steps only, which have large timesteps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.later, self.always = Layer(1e9), Layer(500.0), Layer(-1.0)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor | float) -> torch.Tensor:
        t = float(timestep)
        return self.always(self.later(self.plain(x, t), t), t)


class Pipeline:
    """Runs a model in every step, as a pipeline of diffusers does."""

    def __init__(self) -> None:
        self.transformer, self.text_encoder = Denoiser(), nn.Identity()

    def __call__(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for t in torch.linspace(1000, 0, steps):
            x = self.transformer(x, timestep=t.view(1))
        return x


X = torch.randn(1, 200, 32, generator=torch.Generator().manual_seed(1))


def test_a_model_is_calibrated_as_its_recorded_calls_are() -> None:
    """Whatever form its inputs have."""
    model = Denoiser()
    with fp8attn.capture(model) as calls:
        model(X, 700.0)
    expected = fp8attn.calibrate(calls, recipes=RECIPES)
    assert [expected.recipe_for(name) for name in ("plain", "later", "always")] == [Recipe(), PRECISE, PRECISE]
    for inputs in ((X, 700.0), {"x": X, "timestep": torch.tensor([700.0])}, [(X, 700.0)], lambda model: model(X, 700.0)):
        found = fp8attn.calibrate(model, inputs, recipes=RECIPES)
        assert found.layers == expected.layers and not found.by_step
        assert {name: cost.calls for name, cost in found.costs.items()} == dict.fromkeys(expected.layers, 1)
        assert all(cost.sdpa is None for cost in found.costs.values()), "a CPU's times mean nothing"
    assert fp8attn.calibrate(nn.Sequential(Denoised()), X, recipes=RECIPES).layers.keys() == {"0.model.plain", "0.model.later", "0.model.always"}


class Denoised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, 1.0)


def test_parts_of_the_steps_have_recipes_of_their_own(tmp_path: Path) -> None:
    """Saved, loaded by one line, and applied by patch to the pipeline, in eager calls by timestep."""
    pipeline = Pipeline()
    calibration = fp8attn.calibrate(pipeline, {"x": X, "steps": 8}, recipes=RECIPES, step_ranges=2)
    first, second = calibration.by_step
    assert (first.first, second.last) == (1000.0, 0.0) and first.last > 500 > second.first
    for name, of_first, of_second in (("plain", Recipe(), Recipe()), ("later", PRECISE, Recipe())):
        layer = f"transformer.{name}"
        assert (first.layers[layer].recipe, second.layers[layer].recipe) == (of_first, of_second)
        assert calibration.recipe_for(layer) == of_first, "the worst step decides"
        assert (calibration.recipe_for(layer, timestep=900.0), calibration.recipe_for(layer, timestep=499.0)) == (of_first, of_second)
        assert calibration.costs[layer].calls == 8
    calibration.save(tmp_path / "pipeline.json")
    loaded = Calibration.load(tmp_path / "pipeline.json")
    assert loaded == calibration
    model = pipeline.transformer
    with fp8attn.patch(pipeline, loaded, **ALL) as report:
        found = {t: model(X, torch.tensor([t])) for t in (900.0, 100.0)}
    for t, part in ((900.0, first), (100.0, second)):
        by_hand = Calibration(0.06, RECIPES, {name.removeprefix("transformer."): choice for name, choice in part.layers.items()})
        with fp8attn.patch(model, by_hand, **ALL):
            assert torch.equal(model(X, torch.tensor([t])), found[t])
    assert report.replaced == dict.fromkeys(calibration.layers, 2) and not report.fallbacks


def test_layers_without_a_recipe_stay_with_pytorch() -> None:
    model = Denoiser()
    calibration = fp8attn.calibrate(model, (X, 700.0), recipes=RECIPES)
    del calibration.layers["plain"]
    with fp8attn.patch(model, calibration, **ALL) as report:
        model(X, 700.0)
    assert report.replaced == {"later": 1, "always": 1} and report.fallbacks == {"plain": {"the layer isn't in the calibration": 1}}


def test_a_calibrated_model_is_compiled_whole() -> None:
    """With the recipes of its layers in the graph."""
    model = Denoised().model
    calibration = fp8attn.calibrate(model, (X, 700.0), recipes=RECIPES)
    with fp8attn.patch(model, calibration, **ALL):
        expected = model(X, 700.0)
        assert torch.equal(torch.compile(lambda x: model(x, 700.0), backend="eager", fullgraph=True)(X), expected)
    with fp8attn.patch(model, **ALL):
        assert not torch.equal(model(X, 700.0), expected)


def test_few_calls_of_many_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At even distances; no tensor is kept."""
    seen: list[float] = []
    monkeypatch.setattr("fp8attn.calibration.streaming.errors_of", lambda call, recipes: seen.append(float(call.query.mean())) or [ERRORS])
    ERRORS = fp8attn.calibration.HeadErrors((0.01,), (0.01,), (40.0,), (1.0,), (0.0,))
    calibration = fp8attn.calibrate(Pipeline(), {"x": X, "steps": 33}, recipes=RECIPES[:1], calls_per_layer=3, step_ranges=2)
    assert len(seen) < 3 * 33 / 2 and all(cost.calls == 33 for cost in calibration.costs.values())
    assert len(calibration.by_step) == 2


def test_table_and_plot(tmp_path: Path) -> None:
    calibration = fp8attn.calibrate(Pipeline(), {"x": X, "steps": 4}, recipes=RECIPES, step_ranges=2)
    table = calibration.table()
    assert "[0] Recipe()" in table and "[1] Recipe(qk='int8')" in table and "tolerance 0.06" in table
    assert sum(line.startswith("transformer.later") for line in table.splitlines()) == 3, "for all steps, and for each part"
    pytest.importorskip("matplotlib")
    calibration.plot(tmp_path / "errors.svg")
    assert "<svg" in (tmp_path / "errors.svg").read_text()


def test_files_of_version_2_are_read(tmp_path: Path) -> None:
    calibration = fp8attn.calibrate(Denoiser(), (X, 700.0), recipes=RECIPES)
    calibration.save(tmp_path / "new.json")
    found = json.loads((tmp_path / "new.json").read_text())
    (tmp_path / "old.json").write_text(json.dumps({**{name: found[name] for name in found if name not in ("by_step", "costs")}, "version": 2}))
    assert Calibration.load(tmp_path / "old.json").layers == calibration.layers
    found["costs"]["plain"]["calls"] = -1
    (tmp_path / "wrong.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"costs\['plain'\].calls is -1; it must be an integer of 0 or more"):
        Calibration.load(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    "arguments, options, kind, message",
    (
        ((nn.Identity(), X), {}, ValueError, "model made no call that can be measured. Likely cause: "),
        ((Denoiser(),), {}, TypeError, "inputs is None; it must be what the model is called with"),
        ((Denoiser(), 3), {}, TypeError, "inputs has a int; it must be a dict, a tuple, a tensor, a function, or a list of them"),
        ((3, X), {}, TypeError, "model is a int; it must be a torch.nn.Module, or a pipeline with one of transformer, "),
        (([], X), {}, TypeError, "inputs is given, and model is a list of calls"),
        ((Denoiser(), (X, 1.0)), {"step_ranges": 0}, ValueError, "step_ranges is 0; it must be a positive integer"),
        ((Denoiser(), (X, 1.0)), {"step_ranges": 2}, ValueError, "step_ranges is 2; .* an argument timestep, with as many values: it had 1"),
        ((Denoiser(), (X, 1.0)), {"calls_per_layer": True}, ValueError, "calls_per_layer is True; it must be a positive integer"),
    ),
)
def test_errors_name_the_argument(arguments: tuple, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fp8attn.calibrate(*arguments, **{"recipes": RECIPES[:1]} | options)


def test_timesteps_are_found_by_name_and_by_place() -> None:
    def forward(self, x, timestep=None): ...

    for args, kwargs, expected in (
        ((0, 1, 7), {}, 7.0),
        ((0, 1), {"timestep": torch.tensor([5, 6])}, 5.0),
        ((0, 1), {}, None),
        ((0, 1, "x"), {}, None),
    ):
        assert timestep_of(forward, args, kwargs) == expected


def test_transformers_takes_a_calibration_with_its_model() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    model = decoder(transformers, "Llama")
    inputs = prompt(12, 5) | {"use_cache": False}
    model.set_attn_implementation("sdpa")
    calibration = fp8attn.calibrate(model, inputs, recipes=RECIPES, tolerance=0.2)
    assert calibration.layers.keys() == {f"model.layers.{i}.self_attn" for i in range(2)}
    with pytest.raises(TypeError, match="recipe is a Calibration, and model is None"):
        integrations.transformers.register(recipe=calibration)
    for other in (integrations.comfyui.override, integrations.torch.activate):
        with pytest.raises(TypeError, match="recipe is a Calibration; it must be a Recipe"):
            other(calibration)
    with torch.no_grad(), fp8attn.patch(model, calibration, **ALL):
        expected = model(**inputs).logits
    report = integrations.transformers.register("fp8attn_calibrated", calibration, model=model, **ALL)
    model.set_attn_implementation("fp8attn_calibrated")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits[inputs["attention_mask"].bool()], expected[inputs["attention_mask"].bool()])
    assert report.replaced.keys() == calibration.layers.keys()


@pytest.mark.gpu
def test_times_are_measured_on_a_gpu(device: torch.device) -> None:
    q = torch.randn(1, 2, 512, 64, device=device, dtype=torch.bfloat16)

    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    calibration = fp8attn.calibrate(Attending(), [q, q], recipes=RECIPES)
    (cost,) = calibration.costs.values()
    assert cost.calls == 2 and cost.sdpa is not None and cost.sdpa > 0 and all(ms is not None and ms > 0 for ms in cost.milliseconds)
    assert "ms by PyTorch" in calibration.table()
