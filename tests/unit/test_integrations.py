"""Models of transformers and diffusers, tiny and with random weights, switched over in one line; and any module by patch."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8attn
from fp8attn import Recipe, integrations
from fp8attn.calibration import replacing
from fp8attn.integrations.switching import MIN_KEYS, Policy, Report
from models import DECODERS, SIZES, decoder, encoder, prompt, transformer_of

EXACT = dict(min_keys=0, decode="fp8attn", backend="reference")
"""Every call by fp8attn, exactly."""

MODELLED = dict(min_keys=0, decode="fp8attn", backend="modelled")
"""Every call with the numerics of the FP8 kernels."""

CAPPED = ("Gemma2",)
"""Models with a soft cap, which stay eager beside padding on a CPU."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture
def diffusers() -> Iterator[ModuleType]:
    """A model's backend becomes that of all models that have none of their own."""
    module = pytest.importorskip("diffusers", reason="needs the package diffusers")
    registry = pytest.importorskip("diffusers.models.attention_dispatch")._AttentionBackendRegistry
    before = registry._active_backend
    yield module
    registry._active_backend = before


def logits(model: nn.Module, implementation: str, padded: bool) -> torch.Tensor:
    """Of the tokens that aren't padding."""
    model.set_attn_implementation(implementation)
    inputs = prompt(12, 5 if padded else 0)
    with torch.no_grad():
        return model(**inputs).logits[inputs["attention_mask"].bool()]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_language_models_run_precise_by_default(transformers: ModuleType) -> None:
    found = []
    for recipes in ((), (fp8attn.PRECISE,), (Recipe(),)):
        integrations.transformers.register("fp8attn_modelled", *recipes, **MODELLED)
        found.append(logits(decoder(transformers, "Llama"), "fp8attn_modelled", False))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("padded", (False, True), ids=("full", "padded"))
@pytest.mark.parametrize("kind", DECODERS)
def test_language_models_switch_over(transformers: ModuleType, kind: str, padded: bool) -> None:
    """Exactly by the reference; with FP8's numerics within FP8's error of the model's eager attention. Every layer is reported."""
    model = decoder(transformers, kind)
    expected = logits(model, "eager", padded)
    report = integrations.transformers.register("fp8attn_exact", **EXACT)
    assert error(logits(model, "fp8attn_exact", padded), expected) < 2e-5
    layers = {f"{kind.removesuffix('Text')}Attention {i}" for i in range(2)}
    stays = kind in CAPPED and padded
    if stays:
        assert not report.replaced and report.fallbacks.keys() == layers
        assert all("eager" in reason for reasons in report.fallbacks.values() for reason in reasons)
    else:
        assert report.replaced == dict.fromkeys(layers, 1) and not report.fallbacks
    integrations.transformers.register("fp8attn_modelled", **MODELLED)
    found = error(logits(model, "fp8attn_modelled", padded), expected)
    assert found < 2e-5 if stays else 1e-4 < found < 0.2


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the calls of `fp8attn.sdpa` from now on, by their names."""
    given: list[dict[str, Any]] = []
    original = replacing.sdpa

    def sdpa(*arguments: Any, **options: Any) -> Any:
        given.append(inspect.signature(original).bind(*arguments, **options).arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(replacing, "sdpa", sdpa)
    return given


def test_windows_caps_and_sinks_are_those_of_kernels(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding no mask is read: `fp8attn.sdpa` gets the window, the soft cap and the sinks."""
    given = recorded_calls(monkeypatch)
    integrations.transformers.register("fp8attn_exact", **EXACT)
    for kind, windows in (("Mistral", [(3, 0)] * 2), ("Gemma3Text", [(3, 0), None]), ("Gemma2", [(3, 0), None]), ("GptOss", [(3, 0), None])):
        model = decoder(transformers, kind)
        given.clear()
        logits(model, "fp8attn_exact", padded=False)
        assert [call["window"] for call in given] == windows, kind
        assert all(call["is_causal"] and call["attn_mask"] is None for call in given), kind
        assert {call["softcap"] for call in given} == {5.0 if kind == "Gemma2" else 0.0}
        assert {call["sinks"] is not None for call in given} == {kind == "GptOss"}
        given.clear()
        logits(model, "fp8attn_exact", padded=True)
        assert len(given) == 2 * (kind not in CAPPED) and all(call["attn_mask"] is not None and call["window"] is None for call in given), kind


def test_a_window_to_both_sides(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModernBERT's."""
    if not hasattr(transformers, "ModernBertConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no ModernBERT")
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**SIZES, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0)
    model, ids = transformers.ModernBertModel(config).eval().requires_grad_(False), prompt(30)["input_ids"]
    model.set_attn_implementation("sdpa")
    expected = model(input_ids=ids)[0]
    given = recorded_calls(monkeypatch)
    integrations.transformers.register("fp8attn_exact", **EXACT)
    model.set_attn_implementation("fp8attn_exact")
    assert error(model(input_ids=ids)[0], expected) < 1e-5
    assert [(call["window"], call["is_causal"], call["attn_mask"]) for call in given] == [(None, False, None), ((3, 3), False, None)]


@pytest.mark.parametrize("static", (False, True), ids=("dynamic", "static"))
def test_windows_beside_a_cache(transformers: ModuleType, static: bool) -> None:
    """Of chunks behind others, and of a static cache, whose rest is hidden."""
    model, ids = decoder(transformers, "Mistral"), prompt(12)["input_ids"]
    integrations.transformers.register("fp8attn_exact", **EXACT)
    found = []
    for implementation in ("sdpa", "fp8attn_exact"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=20) if static else transformers.DynamicCache(config=model.config)
        found.append(torch.cat([model(input_ids=chunk, past_key_values=cache).logits for chunk in ids.split((7, 4, 1), 1)], 1))
    assert error(found[1], found[0]) < 2e-5


def test_a_mask_that_a_model_changes_is_no_window(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, a part, and the mask itself after a change in place."""
    given = recorded_calls(monkeypatch)
    model, ids = decoder(transformers, "Mistral"), prompt(12)["input_ids"][:1]
    integrations.transformers.register("fp8attn_exact", **EXACT)
    model.set_attn_implementation("fp8attn_exact")
    layer = model.model.layers[0].self_attn
    changes = (lambda mask: mask.clone(), lambda mask: mask[:, :, :], lambda mask: mask.logical_and_(mask), lambda mask: mask)
    seen: list[bool] = []
    for change in changes:
        hook = layer.register_forward_pre_hook(
            lambda _, arguments, options, change=change: (arguments, options | {"attention_mask": change(options["attention_mask"])}),
            with_kwargs=True,
        )
        given.clear()
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        hook.remove()
        seen.append(given[0]["window"] is not None)
    assert seen == [False, False, False, True]


def test_calls_with_a_window_that_go_to_pytorch_have_its_mask(transformers: ModuleType) -> None:
    model = decoder(transformers, "Mistral")
    expected = logits(model, "sdpa", padded=False)
    report = integrations.transformers.register("fp8attn_few", min_keys=13, backend="reference")
    assert torch.equal(logits(model, "fp8attn_few", padded=False), expected) and not report.replaced


@pytest.mark.parametrize("kind", ("Llama", "Mistral", "Gemma2", "GptOss"))
@pytest.mark.one_in(2)
def test_a_switched_model_is_compiled_whole(transformers: ModuleType, kind: str) -> None:
    """Without a graph break, in as many graphs over lengths as with SDPA; its answers are the eager model's."""
    torch._dynamo.reset()  # graphs of other tests count, too
    model = decoder(transformers, kind)
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
        run("fp8attn_exact")
        if kind in ("Llama", "Mistral"):  # SDPA has neither soft caps nor sinks
            run("sdpa")
            assert graphs.count("fp8attn_exact") == graphs.count("sdpa")
    assert graphs


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
        # not all releases tell all parts
        told = all(part.config._attn_implementation == "fp8attn_exact" for part in model.modules() if hasattr(part, "set_attn_implementation"))
        assert error(model(**inputs)[0], expected) < 1e-5
        model.set_attn_implementation("sdpa")
        with fp8attn.patch(model, **EXACT) as patched:
            assert error(model(**inputs)[0], expected) < 1e-5
    calls = {"bert": 2, "vit": 2, "whisper": 6, "t5": 6}[kind]
    # older releases multiply matrices in T5, and don't ask the interface in BERT
    assert told or kind in ("bert", "t5")
    assert patched.replaced.total() == calls or (kind == "t5" and not told)
    assert not patched.fallbacks and not report.fallbacks
    assert report.replaced.total() == (calls if told else 0)


def test_layers_have_the_names_that_the_model_gives_them(transformers: ModuleType) -> None:
    model = decoder(transformers, "Llama")
    report = integrations.transformers.register("fp8attn_exact", model=model, **EXACT)
    logits(model, "fp8attn_exact", padded=True)
    assert report.replaced == {f"model.layers.{i}.self_attn": 1 for i in range(2)}


@pytest.mark.parametrize("mask", ("causal", "bool", "additive", "none"))
def test_soft_caps_by_flex_attention(transformers: ModuleType, mask: str) -> None:
    """As the model's own eager attention computes them, with grouped keys."""
    from torch.nn.attention.flex_attention import flex_attention

    from fp8attn.integrations.transformers import _Call, _eager, _flex

    module = decoder(transformers, "Gemma2").model.layers[0].self_attn
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, heads, 11, 16) for heads in (4, 1, 1))
    shown = torch.rand(2, 1, 11, 11) > 0.3
    shown[..., 0] = True
    given = {"bool": shown, "additive": torch.randn(2, 1, 11, 11)}.get(mask)
    call = _Call(module, q, k, v, given, {"softcap": 1.5, "scaling": 0.7, "dropout": 0.0, "is_causal": mask == "causal"})
    torch.testing.assert_close(_flex(call, flex_attention)[0], _eager(call)[0])


@pytest.mark.parametrize("mask", ("none", "bool", "additive", "of heads"))
@pytest.mark.parametrize("softcap, sinks", ((1.5, False), (0.0, True), (1.5, True)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_query_without_repeated_keys(transformers: ModuleType, mask: str, softcap: float, sinks: bool, dtype: torch.dtype) -> None:
    """A step of decoding with a soft cap, sinks, or both, and grouped keys: as the exact reference."""
    from fp8attn.integrations.transformers import _Call, _of_one_query

    torch.manual_seed(5)
    q = torch.randn(2, 1, 6, 16).transpose(1, 2).to(dtype)
    k, v = (torch.randn(2, 3, 21, 16).to(dtype) for _ in range(2))
    shown = torch.rand(2, 1, 1, 21) > 0.3
    given = {"bool": shown, "additive": torch.randn(2, 1, 1, 21), "of heads": torch.rand(2, 6, 1, 21) > 0.3}.get(mask)
    of_heads = torch.randn(6) if sinks else None
    call = _Call(nn.Module(), q, k, v, given, {"softcap": softcap or None, "scaling": 0.7, "s_aux": of_heads})
    assert call.is_one_query and not dataclasses.replace(call, query=q.expand(2, 6, 3, 16)).is_one_query
    expected = fp8attn.reference_sdpa(
        *(x.float() for x in (q, k, v)), given, scale=0.7, softcap=softcap, sinks=of_heads, enable_gqa=True
    )  # fmt: skip
    actual = _of_one_query(call)
    assert actual.dtype == dtype and actual.is_contiguous()
    assert error(actual.float(), expected.transpose(1, 2)) < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("family", ("Gemma2", "GptOss"))
def test_steps_of_decoding_are_the_eager_model_s(transformers: ModuleType, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its eager attention, by which keys are repeated."""
    import fp8attn.integrations.transformers as integration

    model = decoder(transformers, family)
    prompt, step = torch.arange(14).view(2, 7) % 11, torch.tensor([[3], [5]])
    found = {}
    for name in ("eager", "fp8attn_exact"):
        if name == "fp8attn_exact":
            integrations.transformers.register(name, backend="reference")
        model.set_attn_implementation(name)
        with torch.no_grad():
            past = model(prompt, use_cache=True).past_key_values
            with monkeypatch.context() as patch:
                patch.setattr(integration, "_eager", lambda call: pytest.fail("it repeats keys"))
                found[name] = model(step, past_key_values=past).logits
    assert error(found["fp8attn_exact"], found["eager"]) < 2e-5


def test_learned_sinks_stay_eager_where_calls_are_short(transformers: ModuleType) -> None:
    model = decoder(transformers, "GptOss")
    expected = logits(model, "eager", padded=True)
    report = integrations.transformers.register("fp8attn_exact", backend="reference")
    assert error(logits(model, "fp8attn_exact", padded=True), expected) < 2e-5
    assert not report.replaced and all(reasons == {"fewer than min_keys=2048 keys": 1} for reasons in report.fallbacks.values())


def test_names_of_transformers_are_its_own(transformers: ModuleType) -> None:
    with pytest.raises(ValueError, match="name is 'sdpa'; it must be a name that transformers doesn't have itself"):
        integrations.transformers.register("sdpa")


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
    assert str(patched.report).startswith("no call of attention. Likely cause: ")


def test_patch_lasts_without_its_result() -> None:
    """As long as the model, which it doesn't keep."""
    model, (q, k, v) = Attending(), tensors()
    report = fp8attn.patch(model, min_keys=0, backend="modelled").report
    gc.collect()
    assert torch.equal(model(q, k, v), fp8attn.sdpa(q, k, v, backend="modelled")) and report.replaced == {"": 1}
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None and "fp8attn" in str(report)


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


@pytest.fixture
def activated() -> Iterator[None]:
    yield
    integrations.torch.deactivate()


@pytest.mark.usefixtures("activated")
def test_torch_computes_every_call_of_the_process() -> None:
    """In another thread, in nn.MultiheadAttention and in a graph of torch.compile, until it is deactivated."""
    q, k, v = tensors()
    module, x = nn.MultiheadAttention(32, 2, batch_first=True).eval().requires_grad_(False), torch.randn(1, 20, 32)
    exact, exact_module = F.scaled_dot_product_attention(q, k, v), module(x, x, x, need_weights=False)[0]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    report = integrations.torch.activate(min_keys=0, backend="modelled")
    assert torch.nn.attention.current_flash_attention_impl() == "FP8ATTN"
    expected, found = fp8attn.sdpa(q, k, v, backend="modelled"), []
    thread = threading.Thread(target=lambda: found.append(F.scaled_dot_product_attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected) and not torch.equal(expected, exact)
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    assert 1e-4 < error(module(x, x, x, need_weights=False)[0], exact_module) < 0.2
    assert report.replaced == {"20 queries, 30 keys, 2 heads of 16": 2, "20 queries, 20 keys, 2 heads of 16": 1} and not report.fallbacks
    integrations.torch.deactivate()
    integrations.torch.deactivate()
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), exact)
    assert torch.nn.attention.current_flash_attention_impl() is None and torch.backends.mha.get_fastpath_enabled() == fast_path


@pytest.mark.usefixtures("activated")
def test_torch_leaves_the_rest_to_pytorch() -> None:
    q, k, v = tensors()
    mask = torch.rand(20, 30) > 0.2
    report = integrations.torch.activate(min_keys=25, backend="reference")
    for x in (q, k, v):
        x.requires_grad_()
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0
    with torch.no_grad():
        for given, options in (((q, k, v), dict(is_causal=True)), ((k, q, q), {}), (tensors(1), {}), ((q, k, v), dict(attn_mask=mask))):
            torch.testing.assert_close(F.scaled_dot_product_attention(*given, **options), fp8attn.reference_sdpa(*given, **options))
    name = "20 queries, 30 keys, 2 heads of 16"
    assert report.replaced == {name: 1}, "the CPU's operator takes masks"
    assert report.fallbacks == {
        name: {"gradients are recorded": 1, "causal attention with other numbers of queries than keys": 1},
        "30 queries, 20 keys, 2 heads of 16": {"fewer than min_keys=25 keys": 1},
        "1 queries, 30 keys, 2 heads of 16": {"one query; decode='fp8attn' computes it in FP8": 1},
    }


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("logsumexp", (False, True))
def test_torch_gives_the_lse_if_it_is_wanted(logsumexp: bool) -> None:
    """Code that calls the operators directly gets NaN otherwise, and not a number that is wrong."""
    q, k, v = tensors()
    integrations.torch.activate(min_keys=0, backend="reference", logsumexp=logsumexp)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    if logsumexp:
        torch.testing.assert_close(lse, fp8attn.reference_sdpa(q, k, v, return_lse=True)[1])
    else:
        assert lse.shape == q.shape[:3] and lse.isnan().all()


@pytest.mark.usefixtures("activated")
def test_another_activation_replaces_the_first_one() -> None:
    q, k, v = tensors()
    first, second = (integrations.torch.activate(min_keys=0, backend="reference") for _ in range(2))
    F.scaled_dot_product_attention(q, k, v)
    assert second.replaced.total() == 1 and not first.replaced
    with pytest.raises(TypeError, match="logsumexp is 1; it must be a bool"):
        integrations.torch.activate(logsumexp=1)
    with pytest.raises(ValueError, match="min_keys is -1"):
        integrations.torch.activate(min_keys=-1)


@pytest.mark.gpu
@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("causal", (False, True))
def test_torch_on_a_gpu(device: torch.device, causal: bool) -> None:
    """The operators that F.scaled_dot_product_attention chooses are fp8attn's; gradients and masks are PyTorch's."""
    q, k, v = (torch.randn(1, heads, 600, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    report = integrations.torch.activate(min_keys=0)
    with torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert torch.equal(out, fp8attn.sdpa(q, k, v, is_causal=causal, enable_gqa=True))
    compiled = torch.compile(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(), out)
    F.scaled_dot_product_attention(q.requires_grad_(), k, v, is_causal=causal, enable_gqa=True).sum().backward()
    assert q.grad is not None and report.replaced.total() >= 2
    assert {reason for reasons in report.fallbacks.values() for reason in reasons} == {"gradients are recorded"}


def by_comfyui(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **options) -> torch.Tensor:
    """What ComfyUI's attention functions compute."""
    if not options.get("skip_reshape"):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    out = F.scaled_dot_product_attention(q, k, v, mask)
    return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("mask", (None, (20, 30), (2, 20, 30), (2, 1, 20, 30)), ids=str)
def test_comfyui(mask: tuple[int, ...] | None, split: bool) -> None:
    """All layouts and masks, by name and by place; the function is called as ComfyUI's wrapper calls it."""
    override = integrations.comfyui.override(min_keys=0, backend="reference")
    q, k, v = (torch.randn(2, 4, n, 16) if split else torch.randn(2, n, 64) for n in (20, 30, 30))
    shown = None if mask is None else torch.rand(mask) > 0.3
    for options in (
        {"skip_reshape": split},
        {"skip_reshape": split, "skip_output_reshape": True, "transformer_options": {}, "_inside_attn_wrapper": True},
    ):
        torch.testing.assert_close(override(by_comfyui, q, k, v, 4, mask=shown, **options), by_comfyui(q, k, v, 4, shown, **options))
    torch.testing.assert_close(override(by_comfyui, q, k, v, 4, shown, None, split), by_comfyui(q, k, v, 4, shown, skip_reshape=split))
    assert override.report.replaced == {"20 queries, 30 keys, 4 heads of 16": 3} and not override.report.fallbacks


@pytest.mark.parametrize(
    "options, reason",
    (
        ({"attn_precision": torch.float32}, "attn_precision is float32"),
        ({"low_precision_attention": False}, "low_precision_attention is False"),
        ({"sinks": 3}, "unknown argument sinks"),
        ({}, "fewer than min_keys=2048 keys"),
    ),
)
def test_comfyui_computes_the_rest(options: dict, reason: str) -> None:
    override = integrations.comfyui.override(backend="modelled")
    q, k, v = (torch.randn(2, n, 64) for n in (20, 30, 30))
    assert torch.equal(override(by_comfyui, q, k, v, 4, **options), by_comfyui(q, k, v, 4))
    assert not override.report.replaced and override.report.fallbacks == {"20 queries, 30 keys, 4 heads of 16": {reason: 1}}


def test_recipes_with_half_precision_keys_take_masks_without_them() -> None:
    policy = Policy(Recipe(recent=128, qk="int8"))
    assert policy.recipe_for("", False) == Recipe(recent=128, qk="int8") and policy.recipe_for("", True) == Recipe(qk="int8")
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


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.qkv = Attending(), nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + self.inner(q, k, v).transpose(1, 2).flatten(2)


class Layers(nn.Sequential):
    def __init__(self, count: int) -> None:
        super().__init__(*(Layer() for _ in range(count)))


def test_layers_that_are_compiled_one_by_one_share_a_graph() -> None:
    """Of all lengths, as their names aren't in it."""
    model, graphs = Layers(10).eval().requires_grad_(False), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with fp8attn.patch(model, **MODELLED) as report:
        inputs = [torch.randn(1, length, 32) for length in (20, 24, 30)]
        expected = [model(x) for x in inputs]
        assert report.replaced == {f"{i}.inner": 3 for i in range(10)}
        for layer in model:
            layer.compile(backend=backend, dynamic=True, fullgraph=True)
        assert all(torch.equal(model(x), y) for x, y in zip(inputs, expected, strict=True))
    assert len(graphs) == 1


def test_layers_of_transformers_share_a_graph(transformers: ModuleType) -> None:
    model, graphs = decoder(transformers, "Llama"), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    integrations.transformers.register("fp8attn_modelled", **MODELLED)
    model.set_attn_implementation("fp8attn_modelled")
    inputs = prompt(12) | {"use_cache": False}
    with torch.no_grad():
        expected = model(**inputs).logits
        for layer in model.model.layers:
            layer.compile(backend=backend, dynamic=True)
        torch.testing.assert_close(model(**inputs).logits, expected)
    assert len(graphs) == 1


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
        (dict(recipe="int8"), TypeError, "recipe is a str; it must be a Recipe or a Calibration"),
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
