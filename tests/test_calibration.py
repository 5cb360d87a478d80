"""Calibration: every layer's calls are found, measured, and get the cheapest recipe that is good enough."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8attn.calibration
from bench.cases import recent
from fp8attn import Recipe
from fp8attn.calibration import AttentionCall, Calibration, calibrate, capture


class Layer(nn.Module):
    """Attention with two heads of 32, its keys' first channels `bias` away from zero."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
        self.bias = bias

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k = k + self.bias * (torch.arange(32, device=x.device) < 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if twice:
            out = out + F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device))
        return out.transpose(1, 2).flatten(2)


def model_and_input(device: torch.device, twice: bool = False) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(0.0), nn.LayerNorm(64), Layer(30.0)).to(device)
    if twice:
        model[0].forward = lambda x, forward=model[0].forward: forward(x, True)
    return model.eval(), 2 * torch.randn(1, 60, 64, device=device)


def captured(device: torch.device, twice: bool = False) -> tuple[nn.Module, torch.Tensor, list[AttentionCall]]:
    model, x = model_and_input(device, twice)
    with torch.no_grad(), capture(model) as calls:
        out = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), out), "a model that is captured answers as it does otherwise"
    return model, x, calls


def test_capture_names_layers_and_their_calls(device: torch.device) -> None:
    _, _, calls = captured(device, twice=True)
    assert [call.layer for call in calls] == ["0", "0#1", "2"]
    assert [call.is_causal for call in calls] == [True, False, True]
    assert calls[1].attn_mask is not None and calls[0].query.shape == (1, 2, 60, 32)


def test_capture_ends(device: torch.device) -> None:
    model, x, calls = captured(device)
    with torch.no_grad():
        model(x)
    assert len(calls) == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_cheapest_recipe_within_the_tolerance(device: torch.device) -> None:
    _, _, calls = captured(device)
    recipes = (Recipe(q="tensor", k="tensor", smooth_k=False, rotate=0), Recipe(), Recipe(k="token", rotate=256))
    found = calibrate(calls, tolerance=0.07, recipes=recipes)
    worst = {name: [max(errors.relative_l2) for errors in layer.tried] for name, layer in found.layers.items()}
    for name, layer in found.layers.items():
        good = [recipe for recipe, error in zip(recipes, worst[name], strict=True) if error <= 0.07]
        assert layer.within == bool(good) and layer.recipe == (good[0] if good else recipes[worst[name].index(min(worst[name]))])
    # the layers aren't alike: one needs its keys' mean taken away
    assert worst["2"][0] > 1.5 * worst["2"][1] and worst["0"][0] < 1.5 * worst["0"][1]
    strict = calibrate(calls, tolerance=1e-4, recipes=recipes[:1])
    assert not any(layer.within for layer in strict.layers.values())
    assert calibrate(calls, tolerance=10.0, recipes=recipes[:1]).recipe_for("2") == recipes[0]


def test_errors_mean_what_they_say(device: torch.device) -> None:
    _, _, calls = captured(device)
    for layer in calibrate(calls, recipes=(Recipe(),)).layers.values():
        errors = layer.tried[0]
        for l2, db, cosine in zip(errors.relative_l2, errors.sqnr_db, errors.cosine, strict=True):
            assert db == pytest.approx(-20 * math.log10(l2), abs=1e-6)
            assert 1 - l2**2 <= cosine < 1  # the angle's sine is at most the relative error
        assert all(0 < mass < 0.2 for mass in errors.attention_mass) and all(0 < l1 < 0.2 for l1 in errors.relative_l1)
        assert len(errors.relative_l2) == 2


def test_heads_are_told_apart_and_the_worst_call_counts(device: torch.device) -> None:
    """One head's keys have an outlier channel; one of a layer's two calls does."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 80, 64, generator=generator).to(device) for _ in range(3))
    rough = k.clone()
    rough[:, 1, ::7, 3] += 40
    coarse = (Recipe(q="tensor", k="tensor", smooth_k=False),)
    both = calibrate([AttentionCall("x", q, k, v), AttentionCall("x", q, rough, v)], recipes=coarse).layers["x"].tried[0]
    plain = calibrate([AttentionCall("x", q, k, v)], recipes=coarse).layers["x"].tried[0]
    assert both.relative_l2[1] > 1.5 * plain.relative_l2[1]
    assert all(a >= b for a, b in zip(both.relative_l2, plain.relative_l2, strict=True))


def test_smoothed_queries_are_judged_by_what_is_attended_with(device: torch.device) -> None:
    """Their means' part of the scores is exact, in the answers and in the mass."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 80, 64, generator=generator).to(device) for _ in range(3))
    q[..., :2] += 40
    plain, smooth = calibrate([AttentionCall("x", q, k, v)], recipes=(Recipe(), Recipe(smooth_q=True))).layers["x"].tried
    for field in ("relative_l2", "attention_mass"):
        assert all(0 < a < 0.6 * b for a, b in zip(getattr(smooth, field), getattr(plain, field), strict=True))


def test_kept_keys_are_judged_as_they_are(device: torch.device) -> None:
    """Of a layer that looks back; with a mask a recipe that keeps keys isn't a choice."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = recent(*(torch.randn(1, 2, 300, 64, generator=generator) for _ in range(3)), generator)
    q, k, v = (x.to(device) for x in (q, k, v))
    recipes = (Recipe(recent=128), Recipe())
    found = calibrate([AttentionCall("x", q, k, v, is_causal=True)], recipes=recipes).layers["x"]
    kept, plain = found.tried
    for field in ("relative_l2", "relative_l1", "attention_mass"):
        assert all(0 < a < 0.5 * b for a, b in zip(getattr(kept, field), getattr(plain, field), strict=True))
    assert found.recipe == recipes[0]
    mask = torch.ones(300, 300, dtype=torch.bool, device=device).tril()
    masked = calibrate([AttentionCall("x", q, k, v, attn_mask=mask)], recipes=recipes).layers["x"]
    assert masked.recipe == Recipe() and masked.tried[0].relative_l2 == (math.inf, math.inf)
    assert masked.tried[1].relative_l2 == pytest.approx(plain.relative_l2, rel=0.05)


def test_saved_and_loaded(device: torch.device, tmp_path: Path) -> None:
    _, _, calls = captured(device)
    calibration = calibrate(calls, recipes=(Recipe(), Recipe(rotate=256), Recipe(smooth_q=True)))
    calibration.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == calibration
    (tmp_path / "c.json").write_text((tmp_path / "c.json").read_text().replace('"rotate": 256', '"rotate": true'))
    with pytest.raises(ValueError, match=r"Recipe.rotate is True; it must be one of \(0, 16, 64, 256\)"):
        Calibration.load(tmp_path / "c.json")


def test_applied(device: torch.device) -> None:
    """The model's attention is fp8attn's, by the layer's recipe."""
    model, x, calls = captured(device)
    calibration = calibrate(calls, recipes=(Recipe(rotate=256),))
    seen = []
    original = fp8attn.calibration.sdpa

    def spy(*args, recipe, **kwargs):
        seen.append(recipe)
        return original(*args, recipe=recipe, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("fp8attn.calibration.sdpa", spy)
        exact = model(x)
        with calibration.applied(model, backend="reference"):
            out = model(x)
    assert seen == [Recipe(rotate=256)] * 2
    assert torch.allclose(out, exact, atol=1e-4)
    with pytest.raises(KeyError, match="layer is '1'; it must be one that was calibrated: 0, 2"):
        calibration.recipe_for("1")


def test_errors_of_arguments(device: torch.device) -> None:
    _, _, calls = captured(device)
    with pytest.raises(ValueError, match="calls is empty"):
        calibrate([])
    with pytest.raises(ValueError, match="recipes is empty"):
        calibrate(calls, recipes=())
    with pytest.raises(ValueError, match="tolerance is 0"):
        calibrate(calls, tolerance=0)
