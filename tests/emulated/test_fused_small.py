"""Quantization and attention in one launch: which calls it takes, its budget, and that it has the bits of two launches."""

from __future__ import annotations

import ctypes

import pytest
import torch
from conftest import Attention
from hypothesis import given
from torch.library import opcheck

import emulation
import fp8attn
from closeness import on_grid
from emulated import Emulated
from fp8attn import Recipe
from fp8attn.cuda import fused_small, one_launch
from fp8attn.device import ARCHITECTURES
from fp8attn.ops import library_ops
from fp8attn.quantization import coarse, removable, sample_step, value_mean
from fp8attn.recipe import FUSED_RECIPES
from fp8attn.reference import Causal
from one_launch import assert_bits_of_case, assert_bits_of_what_is_not_finite, assert_emulated, assert_same_bits_a_thousand_times, halves
from strategies import Case, cases

H100 = ARCHITECTURES[90]


@pytest.mark.parametrize(
    "q, k, clusters",
    (
        ((2, 8, 512, 64), (2, 8, 512, 64), 1),
        ((1, 8, 100, 64), (1, 2, 300, 64), 1),
        ((1, 2, 700, 64), (1, 1, 512, 64), 3),
        ((1, 1, 1, 64), (1, 1, 1, 64), 1),
    ),
)
def test_takes(q: tuple[int, ...], k: tuple[int, ...], clusters: int) -> None:
    tensors = halves(q, k)
    assert fused_small.unsupported_call(*tensors, 0.125, H100) is None
    assert fused_small.splits(fused_small.choose(tensors[0]), *tensors[:2]) == clusters


@pytest.mark.parametrize(
    "q, k, dtype, scale, reason",
    (
        ((1, 2, 64, 64), (1, 2, 513, 64), torch.bfloat16, 0.1, "513 keys"),
        ((1, 2, 64, 64), (1, 2, 0, 64), torch.bfloat16, 0.1, "0 keys"),
        ((1, 2, 0, 64), (1, 2, 9, 64), torch.bfloat16, 0.1, "query has shape"),
        ((1, 2, 64, 128), (1, 2, 64, 128), torch.bfloat16, 0.1, "head dims are 128 and 128; it takes 64"),
        ((1, 2, 64, 64), (1, 2, 64, 64), torch.float32, 0.1, "it takes bfloat16 or float16"),
        ((1, 2, 64, 64), (1, 2, 64, 64), torch.float16, -0.1, "positive"),
        ((4, 8, 64, 64), (4, 8, 64, 64), torch.float16, 0.1, "32 clusters of 4 CTAs; 30 run at a time"),
        ((1, 2, 16384, 64), (1, 2, 64, 64), torch.float16, 0.1, "64 clusters"),
    ),
)
def test_refusals_say_why(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, scale: float, reason: str) -> None:
    assert reason in (fused_small.unsupported_call(*halves(q, k, dtype=dtype), scale, H100) or "")


def test_needs_rows_at_multiples_of_16_bytes_and_hopper() -> None:
    q, k, v = halves((1, 2, 64, 64), (1, 2, 64, 64))
    shifted = torch.zeros(1, 2, 64, 68, dtype=torch.bfloat16)[..., 4:]
    assert "key doesn't start at a multiple of 16 bytes" in (fused_small.unsupported_call(q, shifted, v, 0.1, H100) or "")
    assert "needs sm_90" in (fused_small.unsupported_call(q, k, v, 0.1, ARCHITECTURES[100]) or "")


@pytest.mark.anywhere
@emulation.emulates
def test_takes_from_v_what_the_definition_takes() -> None:
    """Compiled for the CPU: channels whose means are large and small beside their values, constant, zero, and too large to take."""
    library = emulation.library("shifts.cpp")
    generator = torch.Generator().manual_seed(0)
    for length in (1, 7, 512):
        v = torch.randn(1, 1, length, 64, generator=generator) + torch.arange(64) / 16
        v[..., 3], v[..., 4], v[..., 5] = 2.5, 0.0, 1e35
        mean = value_mean(v)
        expected = removable(coarse(mean, v)).flatten()
        assert length < 512 or ((expected[:3] == 0).all() and (expected[32:] != 0).all())
        arguments = [x.flatten().contiguous() for x in (mean, v.amin(-2), v.amax(-2), torch.empty(64))]
        library.shifts(*(ctypes.c_void_p(x.data_ptr()) for x in arguments), 64)
        assert torch.equal(arguments[3].view(torch.int32), expected.view(torch.int32))


@pytest.mark.anywhere
@pytest.mark.parametrize(
    "q, k, causal, dtype",
    (
        ((1, 4, 150, 64), (1, 2, 300, 64), "none", torch.bfloat16),
        ((1, 1, 600, 64), (1, 1, 512, 64), "top_left", torch.float16),
        ((2, 1, 20, 64), (2, 1, 1, 64), "none", torch.float16),
    ),
)
def test_emulated_it_quantizes_and_attends(emulated: Emulated, q: tuple[int, ...], k: tuple[int, ...], causal: Causal, dtype: torch.dtype) -> None:
    """With rows that aren't finite."""
    query, key, value = halves(q, k, dtype=dtype)
    query[0, 0, 9, 1] = torch.nan
    if k[2] > 77:
        key[0, 0, 77, 3], value[0, 0, 200, 5] = torch.inf, torch.nan
    assert_emulated(emulated, one_launch.small(query, key), (query, key, value), causal)


SAMPLE_MUTANTS = {
    "all tokens": ("fused_small.cuh", "lanes, sample_step(p.kv_length));", "lanes);"),
    "over another number of tokens": ("fused_small.cuh", "inverse_sample_of(p.kv_length)", "p.inverse_length"),
    "in another phase": ("tile/quantize.h", "int phase = lane % apart;", "int phase = lane * 2 % apart;"),
    "of one token in each lane": ("tile/quantize.h", "if (phase >= apart) phase -= apart;", "phase -= apart;"),
    "another one beside infinity": ("tile/quantize.h", "(lane + i * LANES) % apart == 0", "i % apart == 0"),
}
"""Of K's mean."""


def test_mutants_of_the_sample_change_what_is_there() -> None:
    emulation.assert_anchored(SAMPLE_MUTANTS.values())


def assert_of_a_sample(emulated: Emulated, length: int) -> None:
    """Of keys that are far from the sampled ones. One of these is infinite, which counts as zero, and no query sees it."""
    query, key, value = halves((1, 1, 70, 64), (1, 1, length, 64))
    is_sampled = torch.arange(length) % sample_step(length) == 0
    key[:, :, ~is_sampled] += 16 * torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()
    key[0, 0, 30 * sample_step(length)] = torch.inf
    assert_emulated(emulated, one_launch.small(query, key), (query, on_grid(key), value), "top_left")


@pytest.mark.anywhere
@pytest.mark.parametrize("length", (129, 300, 512))
def test_emulated_means_of_keys_are_of_a_sample(emulated: Emulated, length: int) -> None:
    assert_of_a_sample(emulated, length)


@pytest.mark.anywhere
@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLE_MUTANTS)
def test_the_emulation_sees_a_wrong_sample(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_of_a_sample(Emulated(SAMPLE_MUTANTS[name]), 300)


@pytest.mark.parametrize("options", (("none", False), ("top_left", True)))
@pytest.mark.one_in(2)
def test_opcheck(device: torch.device, options: tuple[str, bool]) -> None:
    q, k, v = halves((2, 4, 70, 64), (2, 2, 200, 64), device)
    arguments = (q, k, v, 0.125, "int8" if options[1] else "e4m3", options[0], torch.float32, options[1])
    opcheck(library_ops.auto_forward_from_fp16, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("recipe", FUSED_RECIPES.values(), ids=FUSED_RECIPES.keys())
def test_the_operator_goes_on_in_two_launches(device: torch.device, sdpa: Attention, recipe: Recipe) -> None:
    """Where it doesn't take a call: here for its head dim."""
    q, k, v = halves((1, 4, 70, 72), (1, 2, 200, 72), device)
    quantized = fp8attn.quantize(q, k, v, recipe=recipe)
    expected = sdpa(*quantized, is_causal=True, enable_gqa=True, out_dtype=torch.float32, return_lse=True)
    operator = {"triton": library_ops.auto_forward_from_fp16, "cuda": library_ops.cuda_forward_from_fp16}[sdpa.backend]
    if sdpa.backend == "triton" and device.type == "cuda":
        pytest.skip("auto takes CUDA there")
    out, lse = operator(q, k, v, 72**-0.5, recipe.qk, "top_left", torch.float32, True)
    assert torch.equal(out, expected[0])
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-2)  # of queries as they came, not rounded to FP8


@pytest.mark.parametrize("options", ({}, {"is_causal": True, "return_lse": True, "scale": 0.2, "out_dtype": torch.float32}))
def test_sdpa_takes_the_operator(device: torch.device, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    """With the bits of quantizing first, compiled whole too; other recipes, masks and what is quantized already go on as they were."""
    monkeypatch.setattr(fp8attn.api, "choose_backend", lambda backend, device: "auto")
    q, k, v = halves((1, 4, 70, 64), (1, 2, 200, 64), device)
    taken = []
    monkeypatch.setattr(fused_small, "may_take", lambda *tensors, original=fused_small.may_take: taken.append(original(*tensors)) or taken[-1])
    actual = fp8attn.sdpa(q, k, v, enable_gqa=True, **options)
    assert taken == [True]
    recipe = Recipe(two_level=True)
    expected = fp8attn.sdpa(q, k, v, enable_gqa=True, recipe=recipe, **options)
    for other in (dict(recipe=recipe), dict(attn_mask=torch.ones(70, 200, dtype=torch.bool, device=device))):
        fp8attn.sdpa(q, k, v, enable_gqa=True, **other)
    fp8attn.sdpa(*fp8attn.quantize(q, k, v), enable_gqa=True)
    assert taken == [True]
    monkeypatch.undo()
    monkeypatch.setattr(fp8attn.api, "choose_backend", lambda backend, device: "auto")
    torch._dynamo.reset()
    compiled_sdpa = torch.compile(lambda *x: fp8attn.sdpa(*x, enable_gqa=True, **options), fullgraph=True, backend="aot_eager")
    actual, compiled, expected = (x if isinstance(x, tuple) else (x,) for x in (actual, compiled_sdpa(q, k, v), expected))
    assert all(map(torch.equal, actual, compiled)) and torch.equal(actual[0], expected[0])
    # One kernel adds K's mean to the LSE where quantizing first has its own for it: the sums' order differs.
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("broken", (dict(query=torch.zeros(1, 2, 3)), dict(scale="1"), dict(dropout_p=0.5), dict(out_dtype=torch.int8)))
def test_errors_are_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch, broken: dict) -> None:
    q, k, v = halves((1, 2, 70, 64), (1, 2, 200, 64), device)
    arguments = dict(query=q, key=k, value=v) | {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in broken.items()}
    messages = []
    for backend in ("auto", "triton"):
        monkeypatch.setattr(fp8attn.api, "choose_backend", lambda *_, backend=backend: backend)
        with pytest.raises((TypeError, ValueError)) as caught:
            fp8attn.sdpa(**arguments)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.gpu
@given(case=cases(masks=("none", "causal", "bottom right")))
def test_has_the_bits_of_two_launches(case: Case, device: torch.device) -> None:
    assert_bits_of_case("fused_small", case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ("none", "top_left", "bottom_right"))
@pytest.mark.parametrize("q, k", (((2, 8, 512, 64), (2, 8, 512, 64)), ((1, 4, 700, 64), (1, 2, 512, 64)), ((1, 8, 333, 64), (1, 1, 385, 64))))
def test_what_is_not_finite(device: torch.device, q: tuple[int, ...], k: tuple[int, ...], causal: str) -> None:
    assert_bits_of_what_is_not_finite("fused_small", *halves(q, k, device), causal)


@pytest.mark.gpu
def test_same_bits_a_thousand_times(device: torch.device) -> None:
    assert_same_bits_a_thousand_times("fused_small", *halves((2, 8, 511, 64), (2, 8, 487, 64), device))
