"""Calibration of models of transformers and diffusers, tiny and with random weights, as these libraries run them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

import fp8attn
from fp8attn import Recipe
from fp8attn.calibration import CapturedCalls
from models import TOKENS, prompt

RECIPES = (Recipe(recent=128), Recipe())
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the package transformers")


def model_of(transformers: ModuleType, kind: str, layers: int = 2, attn_implementation: str = "sdpa") -> torch.nn.Module:
    torch.manual_seed(0)
    decoder = SIZES | TOKENS | {"num_hidden_layers": layers, "attn_implementation": attn_implementation}
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=64, num_key_value_heads=2, **decoder))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(intermediate_size=64, num_key_value_heads=1, head_dim=16, **decoder))
    elif kind == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{names.get(name, name): value for name, value in decoder.items()}))
    else:
        sides = {"layers": layers, "attention_heads": 4, "ffn_dim": 64}
        config = transformers.BartConfig(
            vocab_size=64, d_model=64, max_position_embeddings=128, attn_implementation=attn_implementation, decoder_start_token_id=1,
            forced_eos_token_id=None, **TOKENS, **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()},
        )  # fmt: skip
        model = transformers.BartForConditionalGeneration(config)
    return model.eval().requires_grad_(False)


def generated(model: torch.nn.Module, padded: bool = False, **options) -> torch.Tensor:
    return model.generate(**prompt(9, 4 if padded else 0), max_new_tokens=3, do_sample=False, **options)


@pytest.mark.parametrize("options", ({}, {"cache_implementation": "static"}), ids=("dynamic", "static"))
@pytest.mark.parametrize("padded", (False, True), ids=("full", "padded"))
@pytest.mark.parametrize("kind", ("llama", "qwen3", "gpt2", "bart"))
def test_generate(transformers: ModuleType, kind: str, padded: bool, options: dict) -> None:
    """Prefill and decode of every layer are captured and calibrated, and the calibration serves prompts with and without padding."""
    model = model_of(transformers, kind, layers=1)
    expected = {each: generated(model, each, **options) for each in (False, True)}
    with fp8attn.capture(model) as calls:
        assert torch.equal(generated(model, padded, **options), expected[padded])
    assert not calls.report.left_out
    layers = calls.report.recorded
    assert len(layers) == (3 if kind == "bart" else 1) and all("attn" in layer for layer in layers)
    assert all(count == (1 if "encoder.layers" in layer else 3) for layer, count in layers.items())
    calibration = fp8attn.calibrate(calls, recipes=RECIPES)
    assert list(calibration.layers) == list(layers)
    for each, tokens in expected.items():
        with calibration.applied(model, strict=True, backend="reference") as report:
            out = generated(model, each, **options)
        assert torch.equal(out, tokens), "the reference backend is exact"
        assert set(report.replaced) == set(layers) and not report.fallbacks


def captured(model: torch.nn.Module, padded: bool) -> CapturedCalls:
    with fp8attn.capture(model) as calls:
        generated(model, padded)
    return calls


def test_layers_whose_numbers_of_heads_change(transformers: ModuleType) -> None:
    """Newer releases of transformers pass query heads of one key/value head as queries where they decode with a mask."""
    packs = hasattr(importlib.import_module("transformers.integrations.sdpa_attention"), "pack_gqa")
    calls = captured(model_of(transformers, "llama"), padded=True)
    assert {call.query.shape[1] for call in calls} == ({2, 4} if packs else {4})
    for choice in fp8attn.calibrate(calls, recipes=RECIPES).layers.values():
        assert choice.tried == () and choice.tried_masked[0] is None and len(choice.tried_masked[1].relative_l2) == (2 if packs else 4)
        assert choice.recipe == choice.masked == Recipe() and choice.within


def test_a_mask_at_last(transformers: ModuleType) -> None:
    """Calibrated without padding, to recipes that keep keys and take no mask; then there is padding."""
    model = model_of(transformers, "llama")
    calibration = fp8attn.calibrate(captured(model, padded=False), recipes=RECIPES)
    assert {choice.recipe for choice in calibration.layers.values()} == {RECIPES[0]}
    assert {choice.masked for choice in calibration.layers.values()} == {RECIPES[1]}
    with calibration.applied(model, strict=True, backend="modelled") as report:
        generated(model, padded=True)
    assert report.replaced.total() == 6


def test_generate_in_threads(transformers: ModuleType) -> None:
    """As with a streamer, and several at once."""
    model = model_of(transformers, "llama")
    expected = {padded: generated(model, padded) for padded in (False, True)}
    answers: list[tuple[bool, torch.Tensor]] = []

    def run_all() -> None:
        def run(padded: bool) -> None:
            answers.append((padded, generated(model, padded)))

        threads = [threading.Thread(target=run, args=(padded,)) for padded in (False, True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with fp8attn.capture(model, calls_per_layer=20) as calls:
        run_all()
    assert calls.report.recorded == {"model.layers.0.self_attn": 9, "model.layers.1.self_attn": 9}
    with fp8attn.calibrate(calls, recipes=RECIPES).applied(model, strict=True, backend="reference") as report:
        run_all()
    assert report.replaced == {"model.layers.0.self_attn": 9, "model.layers.1.self_attn": 9}
    assert len(answers) == 6 and all(torch.equal(out, expected[padded]) for padded, out in answers)


def test_other_implementations_are_named(transformers: ModuleType) -> None:
    model = model_of(transformers, "llama", attn_implementation="eager")
    with pytest.warns(UserWarning, match="_attn_implementation is 'eager'; load the model with attn_implementation='sdpa'"), fp8attn.capture(model):
        generated(model)


def test_compiled_after_calibration(transformers: ModuleType, compiled_calls: Callable) -> None:
    model = model_of(transformers, "llama")
    calls = captured(model, padded=False)
    with fp8attn.capture(model) as more:  # torch.compile makes transformers pass masks
        model(**prompt(9, 4))
    calibration = fp8attn.calibrate([*calls, *more], recipes=RECIPES)
    compiled, found = compiled_calls(model)
    with calibration.applied(compiled, backend="reference") as report:
        out = compiled(**prompt(9), use_cache=False).logits
    torch.testing.assert_close(out, model(**prompt(9), use_cache=False).logits, atol=1e-5, rtol=1e-5)
    assert report.compiled_by_fp8attn == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert not any("scaled_dot_product" in call for call in found)


@pytest.fixture
def compiled_calls() -> Iterator[Callable]:
    """Compile a model with a backend that keeps what the graphs call."""
    torch.compiler.reset()

    def compiled(model: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
        found: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
            found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        return torch.compile(model, backend=backend), found

    yield compiled
    torch.compiler.reset()


def test_diffusion_transformer() -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval().requires_grad_(False)  # fmt: skip

    def step(time: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        image, text, pooled = (torch.randn(shape, generator=generator) for shape in ((1, 16, 4), (1, 6, 32), (1, 32)))
        ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
        return model(image, encoder_hidden_states=text, pooled_projections=pooled, timestep=torch.tensor([time]), **ids).sample

    with pytest.warns(UserWarning, match="calls_per_layer is 4"), fp8attn.capture(model) as calls:
        outs = [step(time / 10) for time in range(10)]
    assert calls.report.recorded == {"transformer_blocks.0.attn": 3, "single_transformer_blocks.0.attn": 3}
    with fp8attn.calibrate(calls, recipes=RECIPES).applied(model, strict=True, backend="reference") as report:
        torch.testing.assert_close(step(0.3), outs[3], atol=1e-5, rtol=1e-5)
    assert report.replaced.total() == 2
