"""Switched models under the hooks of accelerate: hooks of modules, and offloading of weights."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

import fp8attn
from fp8attn import integrations
from models import decoder, prompt

MODELLED = dict(min_keys=0, decode="fp8attn", backend="modelled")


@pytest.fixture(scope="module")
def accelerate() -> ModuleType:
    return pytest.importorskip("accelerate", reason="needs the package accelerate")


@pytest.fixture
def model() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    return decoder(transformers, "Llama")


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompt(12), use_cache=False).logits


@pytest.mark.parametrize("first", ("patch", "hooks"))
def test_weights_are_offloaded_in_a_patched_model(accelerate: ModuleType, model: nn.Module, first: str) -> None:
    """In either order, also when one of them ends before the other."""
    model.set_attn_implementation("sdpa")
    exact = logits(model)
    with fp8attn.patch(model, **MODELLED):
        expected = logits(model)
    if first == "patch":
        patched = fp8attn.patch(model, **MODELLED)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        patched = fp8attn.patch(model, **MODELLED)
    assert all(x.is_meta for name, x in model.named_parameters() if "proj" in name), "weights are away between forwards"
    torch.testing.assert_close(logits(model), expected)
    assert patched.report.replaced == {f"model.layers.{i}.self_attn": 1 for i in range(2)}
    patched.undo()
    torch.testing.assert_close(logits(model), exact)
    accelerate.hooks.remove_hook_from_submodules(model)


def test_a_registered_implementation_is_called_under_hooks(accelerate: ModuleType, model: nn.Module) -> None:
    report = integrations.transformers.register("fp8attn_modelled", **MODELLED)
    model.set_attn_implementation("fp8attn_modelled")
    expected = logits(model)
    report.clear()
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    torch.testing.assert_close(logits(model), expected)
    assert report.replaced.total() == 2


def test_autocast_casts_as_for_sdpa(model: nn.Module) -> None:
    """The output has autocast's dtype, by FP8's numerics of bfloat16 tensors."""
    model.set_attn_implementation("sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(model)
        with fp8attn.patch(model, **MODELLED) as report:
            found = logits(model)
    assert found.dtype == expected.dtype == torch.bfloat16 and report.replaced.total() == 2
    assert 1e-4 < float((found.float() - expected.float()).norm() / expected.float().norm()) < 0.2
