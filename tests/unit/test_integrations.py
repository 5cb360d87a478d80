"""Models of transformers and diffusers, tiny and with random weights, switched over in one line; and any module by patch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn import Recipe, integrations
from fp8attn.integrations.switching import MIN_KEYS, Policy, Report
from models import TOKENS, prompt

EXACT = dict(min_keys=0, decode="fp8attn", backend="reference")
"""Every call by fp8attn, exactly."""

MODELLED = dict(min_keys=0, decode="fp8attn", backend="modelled")
"""Every call with the numerics of the FP8 kernels."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "intermediate_size": 64,
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "Gemma3Text": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
}
CAPPED = ("Gemma2", "GptOss")
"""Models with a soft cap, or with learned sinks, which fp8attn doesn't have."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture
def diffusers() -> Iterator[ModuleType]:
    """A model's backend becomes that of all models that have none of their own."""
    module = pytest.importorskip("diffusers", reason="needs the package diffusers")
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    before, _ = registry.get_active_backend()
    yield module
    registry.set_active_backend(before)


def decoder(transformers: ModuleType, kind: str) -> nn.Module:
    torch.manual_seed(0)
    name = {"Gemma3Text": "Gemma3"}.get(kind, kind)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **TOKENS, **DECODERS[kind])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    with torch.no_grad():  # weights so small as initial ones give scores that no cap or sink changes
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def logits(model: nn.Module, implementation: str, padded: bool) -> torch.Tensor:
    """Of the tokens that aren't padding."""
    model.set_attn_implementation(implementation)
    inputs = prompt(12, 5 if padded else 0)
    with torch.no_grad():
        return model(**inputs).logits[inputs["attention_mask"].bool()]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("padded", (False, True), ids=("full", "padded"))
@pytest.mark.parametrize("kind", DECODERS)
def test_language_models_switch_over(transformers: ModuleType, kind: str, padded: bool) -> None:
    """Exactly by the reference; with FP8's numerics within FP8's error of the model's eager attention. Every layer is reported."""
    model = decoder(transformers, kind)
    expected = logits(model, "eager", padded)
    report = integrations.transformers.register("fp8attn_exact", **EXACT)
    assert error(logits(model, "fp8attn_exact", padded), expected) < 2e-5
    layers = {f"{kind.removesuffix('Text')}Attention {i}" for i in range(2)}
    if kind in CAPPED:
        assert not report.replaced and report.fallbacks.keys() == layers
        assert all("eager" in reason for reasons in report.fallbacks.values() for reason in reasons)
    else:
        assert report.replaced == dict.fromkeys(layers, 1) and not report.fallbacks
    integrations.transformers.register("fp8attn_modelled", **MODELLED)
    found = error(logits(model, "fp8attn_modelled", padded), expected)
    assert found < 2e-5 if kind in CAPPED else 1e-4 < found < 0.2


def test_a_switched_model_is_compiled_whole(transformers: ModuleType) -> None:
    """Without a graph break, in as many graphs over lengths as with SDPA; its answers are the eager model's."""
    model = decoder(transformers, "Llama")
    integrations.transformers.register("fp8attn_exact", **EXACT)
    graphs: list[str] = []

    def run(implementation: str) -> None:
        def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs.append(implementation)
            return graph

        model.set_attn_implementation(implementation)
        compiled = torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, backend=backend, dynamic=True)
        for length in (12, 10, 8):
            ids = prompt(12)["input_ids"][:, :length]
            torch.testing.assert_close(compiled(ids), model(input_ids=ids, use_cache=False).logits)

    with torch.no_grad():
        run("sdpa")
        run("fp8attn_exact")
    assert graphs.count("fp8attn_exact") == graphs.count("sdpa") > 0


@pytest.mark.parametrize("options", ({}, {"cache_implementation": "static"}), ids=("dynamic", "static"))
@pytest.mark.parametrize("kind", ("Llama", "Mistral", "Gemma3Text"))
def test_generate_with_left_padding_gives_the_same_tokens(transformers: ModuleType, kind: str, options: dict) -> None:
    model = decoder(transformers, kind)
    report = integrations.transformers.register("fp8attn_exact", **EXACT)
    found = []
    for implementation in ("sdpa", "fp8attn_exact"):
        model.set_attn_implementation(implementation)
        found.append(model.generate(**prompt(12, 5), max_new_tokens=5, do_sample=False, **options))
    assert torch.equal(*found)
    assert set(report.replaced.values()) == {5} and not report.fallbacks


def encoder(transformers: ModuleType, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that isn't a decoder, and its inputs."""
    torch.manual_seed(0)
    ids = prompt(12, 5)
    sides = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES)), ids
    if kind == "vit":
        config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8)
        return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}
    if kind == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=64, d_model=64, max_source_positions=20, max_target_positions=20, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
            decoder_start_token_id=1, **sides, **TOKENS,
        )  # fmt: skip
        return transformers.WhisperModel(config), {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids["input_ids"]}
    config = transformers.T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5Model(config), {**ids, "decoder_input_ids": ids["input_ids"]}


@pytest.mark.parametrize("kind", ("bert", "vit", "whisper", "t5"))
def test_encoders_switch_over(transformers: ModuleType, kind: str) -> None:
    """Cross attention and position biases included; where a model doesn't ask the interface, patch reaches it."""
    model, inputs = encoder(transformers, kind)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected = model(**inputs)[0]
        report = integrations.transformers.register("fp8attn_exact", **EXACT)
        model.set_attn_implementation("fp8attn_exact")
        # transformers 5.17 doesn't tell T5's encoder and decoder
        told = all(part.config._attn_implementation == "fp8attn_exact" for part in model.modules() if hasattr(part, "set_attn_implementation"))
        assert error(model(**inputs)[0], expected) < 1e-5
        model.set_attn_implementation("sdpa")
        with fp8attn.patch(model, **EXACT) as patched:
            assert error(model(**inputs)[0], expected) < 1e-5
    calls = {"bert": 2, "vit": 2, "whisper": 6, "t5": 6}[kind]
    assert patched.replaced.total() == calls and not patched.fallbacks
    assert report.replaced.total() + sum(reasons.total() for reasons in report.fallbacks.values()) == (calls if told else 0)
    assert told or kind == "t5"
    if kind == "t5":
        assert all("a position bias" in reasons for reasons in report.fallbacks.values())


def test_names_of_transformers_are_its_own(transformers: ModuleType) -> None:
    with pytest.raises(ValueError, match="name is 'sdpa'; it must be a name that transformers doesn't have itself"):
        integrations.transformers.register("sdpa")


def transformer_of(diffusers: ModuleType, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A diffusion transformer, tiny, and its inputs."""
    torch.manual_seed(0)
    if kind == "wan":
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32,
            num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )  # fmt: skip
        inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([1]), "encoder_hidden_states": torch.randn(1, 7, 16)}
    elif kind == "flux":
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        )  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 7, 32), "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3),
        }  # fmt: skip
    else:
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
            caption_projection_dim=32, pooled_projection_dim=32, out_channels=4,
        )  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 32), "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([1.0]),
        }  # fmt: skip
    return model.eval().requires_grad_(False), inputs


def by_backend(model: nn.Module, inputs: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
    model.set_attention_backend(backend)
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("kind, calls", (("wan", 4), ("flux", 2)))
def test_diffusion_transformers_switch_over(diffusers: ModuleType, kind: str, calls: int) -> None:
    model, inputs = transformer_of(diffusers, kind)
    expected = by_backend(model, inputs, "native")
    report = integrations.diffusers.register("fp8attn_exact", min_keys=0, backend="reference")
    assert error(by_backend(model, inputs, "fp8attn_exact"), expected) < 1e-5
    assert report.replaced.total() == calls and not report.fallbacks
    few = integrations.diffusers.register("fp8attn_few", min_keys=8, backend="modelled")
    assert error(by_backend(model, inputs, "fp8attn_few"), expected) < 0.1
    assert few.replaced and (kind == "flux") == (not few.fallbacks), "cross attention to 7 tokens of text stays with PyTorch"


@pytest.mark.parametrize("kind, calls", (("wan", 4), ("flux", 2), ("sd3", 2)))
def test_patch_reaches_diffusion_transformers(diffusers: ModuleType, kind: str, calls: int) -> None:
    model, inputs = transformer_of(diffusers, kind)
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        with fp8attn.patch(model, **EXACT) as report:
            assert error(model(**inputs, return_dict=False)[0], expected) < 1e-5
    assert report.replaced.total() == calls and not report.fallbacks


def test_diffusers_gets_masks_and_the_lse(diffusers: ModuleType) -> None:
    """By its registry's function: (B, S, H, D), a mask of keys, the LSE (B, S, H)."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    report = integrations.diffusers.register("fp8attn_exact", min_keys=0, backend="reference")
    q, k, v = (torch.randn(2, n, 4, 16) for n in (9, 12, 12))
    keys = torch.rand(2, 12) > 0.3
    out, lse = dispatch_attention_fn(q, k, v, keys, backend="fp8attn_exact", attention_kwargs={"return_lse": True})
    expected, expected_lse = fp8attn.reference_sdpa(*(x.transpose(1, 2) for x in (q, k, v)), keys[:, None, None], return_lse=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))
    torch.testing.assert_close(dispatch_attention_fn(q, k, v, keys, backend="fp8attn_exact"), expected.transpose(1, 2))
    assert report.replaced == {"9 queries, 12 keys": 2} and not report.fallbacks


def test_names_of_diffusers_are_its_own(diffusers: ModuleType) -> None:
    with pytest.raises(ValueError, match="name is 'native'; it must be a name that diffusers doesn't have itself"):
        integrations.diffusers.register("native")
    with pytest.raises(ValueError, match="name is 'My backend'; it must be a word in lower case"):
        integrations.diffusers.register("My backend")


@pytest.mark.parametrize("library", ("transformers", "diffusers"))
def test_a_library_that_is_not_there_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=f"needs {library} .* or newer"):
        getattr(integrations, library).register("fp8attn_absent")


class Attending(nn.Module):
    """One call of attention a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


def tensors(q_length: int = 20, length: int = 30, dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(1, 2, n, dim, generator=generator) for n in (q_length, length, length))


def test_patch_for_good_and_undone() -> None:
    model, (q, k, v) = Attending(), tensors()
    exact = model(q, k, v)
    patched = fp8attn.patch(model, min_keys=0, backend="modelled")
    assert torch.equal(model(q, k, v), fp8attn.sdpa(q, k, v, backend="modelled"))
    patched.undo()
    patched.undo()
    assert torch.equal(model(q, k, v), exact) and patched.report.replaced == {"": 1}
    patched.report.clear()
    assert str(patched.report) == "no call of attention"


@pytest.mark.parametrize(
    "given, options, policy, reason",
    (
        (tensors(), dict(dropout_p=0.1), {}, "dropout_p is 0.1"),
        (tensors(1), {}, dict(decode="sdpa"), "one query; decode='fp8attn' computes it in FP8"),
        (tensors(), {}, dict(min_keys=31), "fewer than min_keys=31 keys"),
        (tensors(dim=20), {}, {}, "query has head_dim 20; it must be a multiple of 8 from 16 to 256"),
        (tuple(x.requires_grad_() for x in tensors()), {}, {}, "gradients are recorded"),
    ),
)
def test_what_goes_to_pytorch_is_reported(given: tuple[torch.Tensor, ...], options: dict, policy: dict, reason: str) -> None:
    model = Attending()
    torch.manual_seed(3)
    expected = model(*given, **options)
    with fp8attn.patch(model, **EXACT | policy) as report:
        torch.manual_seed(3)
        assert torch.equal(model(*given, **options), expected)
    assert not report.replaced and report.fallbacks == {"": {reason: 1}}
    assert str(report).splitlines()[1].split(maxsplit=2) == ["1", "PyTorch", reason] and "because" in str(report).splitlines()[0]


def test_skip_names_layers() -> None:
    model = nn.ModuleDict({"first": Attending(), "second": Attending()})
    model.forward = lambda *x: model["first"](*x) + model["second"](*x)  # type: ignore[method-assign]
    with fp8attn.patch(model, skip=("sec*",), **EXACT) as report:
        model(*tensors())
    assert report.replaced == {"first": 1} and report.fallbacks == {"second": {"skip names it": 1}}


def test_threads_and_multi_head_attention() -> None:
    model = nn.MultiheadAttention(32, 2, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(1, 20, 32)
    expected, _ = model(x, x, x, need_weights=False)
    outs: list[torch.Tensor] = []
    with fp8attn.patch(model, **EXACT) as report:
        threads = [threading.Thread(target=lambda: outs.append(model(x, x, x, need_weights=False)[0])) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert report.replaced.total() == 3 and all(torch.allclose(out, expected, atol=1e-6) for out in outs)


def test_recipes_with_half_precision_keys_take_masks_without_them() -> None:
    policy = Policy(Recipe(recent=128, qk="int8"))
    assert policy.recipe_for(None) == Recipe(recent=128, qk="int8") and policy.recipe_for(torch.ones(2, 2)) == Recipe(qk="int8")
    model, (q, k, v) = Attending(), tensors()
    mask = torch.rand(20, 30) > 0.2
    with fp8attn.patch(model, Recipe(recent=128), min_keys=0, backend="modelled"):
        assert torch.equal(model(q, k, v, attn_mask=mask), fp8attn.sdpa(q, k, v, mask, backend="modelled"))


def test_a_patched_model_is_compiled_whole() -> None:
    """One graph, also when the length changes; what goes to PyTorch stays in it."""
    model = Attending()
    with fp8attn.patch(model, **EXACT):
        compiled = torch.compile(lambda q, k, v: model(q, k, v), fullgraph=True, backend="eager", dynamic=True)
        for length in (30, 40, 50):
            given = tensors(20, length)
            torch.testing.assert_close(compiled(*given), F.scaled_dot_product_attention(*given))


def test_a_graph_under_autocast_computes_what_the_eager_call_does() -> None:
    """Mixed dtypes, which autocast makes one, go to fp8attn in both."""
    model, (q, k, v) = Attending(), tensors()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(q, k, v)

    with fp8attn.patch(model, **MODELLED) as report:
        expected = run(q, k.bfloat16(), v)
        assert report.replaced.total() == 1
        assert torch.equal(torch.compile(run, backend="eager", fullgraph=True)(q, k.bfloat16(), v), expected)
    assert not torch.equal(run(q, k.bfloat16(), v), expected), "it is FP8's answer"


@pytest.mark.parametrize(
    "change, kind, message",
    (
        (dict(recipe="int8"), TypeError, "recipe is a str; it must be a Recipe"),
        (dict(min_keys=-1), ValueError, "min_keys is -1; it must be an integer of 0 or more"),
        (dict(min_keys=True), ValueError, "min_keys is True"),
        (dict(decode="no"), ValueError, "decode is 'no'; it must be 'sdpa' or 'fp8attn'"),
        (dict(backend="gpu"), ValueError, "backend is 'gpu'"),
        (dict(skip="attn"), TypeError, "skip is 'attn'; it must be a collection of patterns of layer names"),
    ),
)
def test_errors_name_the_argument(change: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fp8attn.patch(Attending(), **change)


def test_defaults_leave_short_calls_alone() -> None:
    assert Policy().min_keys == MIN_KEYS == 2048 and Policy().decode == "sdpa"
    assert str(Report()) == "no call of attention"
