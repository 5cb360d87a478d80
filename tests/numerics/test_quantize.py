"""Quantization: the fused kernels against the definition byte for byte, and what must hold of the quantize_ref."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

import fp8attn
from fp8attn import Quantized, Recipe, rotation
from fp8attn.device import device_of
from fp8attn.layout import GROUP, PADDING, key_of_slot, padded_length, slots
from fp8attn.quantization import (
    LANES,
    LARGEST_BIAS,
    LARGEST_CORRECTION,
    LARGEST_MEAN,
    MEAN_STEP,
    MEAN_STEPS,
    RUN,
    SAMPLE,
    SMALLEST_SCALE,
    TOKEN_CHUNK,
    centre,
    dequantize,
    encode,
    import_values,
    of_every_query,
    quantize,
    query_means,
    row_scales,
    rows_layout,
    scale_of,
    token_means,
    values_layout,
)
from fp8attn.recipe import (
    BIAS_ALIGNMENT,
    E4M3,
    E4M3_LARGEST,
    E4M3_MAX,
    E4M3_NAN,
    INT8_MAX,
    INT8_NAN,
    QUERY_GROUP,
    ROW_ALIGNMENT,
    ROW_GRANULARITIES,
    SCALE_BLOCK,
    VALUE_GRANULARITIES,
    Granularity,
    ProductType,
)
from fp8attn.triton import quantize as triton_quantize
from fp8attn.triton.bias import with_bias
from fp8attn.triton.tile import e4m3_code, permute_keys
from fp8attn.triton.tile import key_of_slot as kernels_key_of_slot
from quantizing import BAD, BAD_PLACES, MAGNITUDES, Problem, assert_same, at_limits, codes
from strategies import FINITE, Case, alike, cases, given_several, lengths, noted

SHORTS = {"one launch": 4096, "three launches": 0}
"""Lengths up to which the fused quantizer takes one launch."""

EDGES = (127, 128, 129, 511, 512, 513, 1025)
"""Lengths around whole blocks and whole token_chunks."""

Results = tuple[Any, Any, Any]  # Quantized of what is given, None of what isn't


def by_torch(q, k, v, recipe: Recipe) -> Results:
    return quantize(q, k, v, recipe)


def by_triton(q, k, v, recipe: Recipe) -> Results:
    device = device_of((k if q is None else q).device)
    q_quantized, k_quantized, v_quantized = triton_quantize.quantize(q, k, v, recipe, device)
    if q_quantized is not None and k_quantized is not None and recipe.smooth_q:
        q_quantized = with_bias(q_quantized, k, k_quantized, device)
    return q_quantized, k_quantized, v_quantized


QUANTIZERS = {"torch": by_torch, "triton": by_triton}


@st.composite
def problems(draw, distributions: tuple[str, ...] = FINITE, places: tuple[str, ...] = BAD_PLACES) -> Problem:
    case = draw(cases(distributions=distributions, masks=("none",)))
    q_length, kv_length = (draw(st.one_of(lengths, lengths, st.sampled_from(EDGES))) for _ in range(2))
    case = dataclasses.replace(case, q_length=q_length, kv_length=kv_length)
    return Problem(case, draw(st.sampled_from(MAGNITUDES)), draw(st.tuples(*[st.sampled_from(places)] * 3)))


def shortened(case: Case) -> Case:
    """Two blocks and four heads at most: the interpreter is slow."""
    return dataclasses.replace(case, group=1, q_length=min(case.q_length, 140), kv_length=min(case.kv_length, 140))


def normal(shape: tuple[int, ...], device: torch.device, count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(device) for _ in range(count))


def assert_bias(q: Quantized, k: torch.Tensor, k_quantized: Quantized) -> None:
    """What means of q add to the scores of k is their product, off by roundings, or truncations, of a sum of so many, in any order, before they are
    rotated or after, of k or of what is left of it without its mean."""
    keys = centre(rotation.rotate(k, k_quantized.rotated), k_quantized.mean)
    finite = keys.isfinite().all(-1, keepdim=True)
    group, dim = q.shape[1] // k.shape[1], k.shape[3]
    keys, whole = (torch.where(finite, x, 0.0).repeat_interleave(group, 1).double().mT for x in (keys, k))
    means = q.mean.double()
    expected, bound = means @ keys, means.abs() @ keys.abs()
    turned = means @ rotation.rotate(torch.eye(dim, device=k.device), k_quantized.rotated).double().mT
    bound = bound + turned.abs() @ whole.abs()
    if k_quantized.mean is not None:
        bound = bound + (means.abs() * k_quantized.mean.double().abs().repeat_interleave(group, 1).unsqueeze(-2)).sum(-1, keepdim=True)
    assert (q.bias[..., k.shape[2] :] == 0).all() and q.bias.shape[3] == -(-k.shape[2] // BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    assert (q.bias[..., : k.shape[2]].masked_select(~finite.repeat_interleave(group, 1).mT) == 0).all()
    off = (q.bias[..., : k.shape[2]].double() - expected.clamp(-LARGEST_BIAS, LARGEST_BIAS)).abs()
    # tensor cores may cut off a sum of every eight; one that overflows on its way is zero, or the largest
    assert ((off <= (dim / 8 + 8) * 2.0**-23 * bound + 2.0**-120) | (bound > 2.0**127)).all()
    assert (q.bias.abs() <= LARGEST_BIAS).all()


def assert_alike(actual: Results, expected: Results, k: torch.Tensor | None) -> None:
    """All that is stored, bit for bit, but for what means of queries add, whose sums have an order of their own."""
    for x, y in zip(actual, expected, strict=True):
        if y is not None and y.bias is not None:
            assert_bias(x, k, expected[1])
            x = dataclasses.replace(x, bias=y.bias)
        assert_same(x, y)


def element_scales(x: Quantized) -> torch.Tensor:
    """The scale of every element, broadcastable to (B, H, S, D)."""
    return x.scale.unsqueeze(-2) if x.layout == "values" else row_scales(x.multiplier, x.granularity, x.length).unsqueeze(-1)


def largest_code(x: Quantized) -> float:
    if x.layout == "values":
        return E4M3_MAX
    return INT8_MAX if x.data.dtype == torch.int8 else E4M3_LARGEST


def token_codes(x: Quantized) -> torch.Tensor:
    """Bytes (B, H, S, D) in the order of tokens, whatever the layout."""
    return codes(x) if x.layout == "rows" else rows_layout(x.data, x.length).view(torch.uint8)


def centred(x: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """What was encoded, float32, the difference rounded once. Queries' means go before they are rotated."""
    if is_smoothed_query(quantized):
        x = x.float() - of_every_query(query_means(x), x.shape[2])
    y = rotation.rotate(x, quantized.rotated)
    return y if quantized.mean is None or is_smoothed_query(quantized) else y - quantized.mean.unsqueeze(-2)


def is_smoothed_query(quantized: Quantized) -> bool:
    return quantized.mean is not None and quantized.mean.dim() == 4


def factor_of(quantized: Quantized, is_query: bool) -> int:
    """Of the scales: what rotated queries were divided by."""
    return max(quantized.rotated, 1) if is_query else 1


def scales_of_largest(quantized: Quantized, largest: torch.Tensor, is_query: bool) -> torch.Tensor:
    """Scales from the largest finite magnitudes under them: quotients in float64, which rounded to float32 are those of float32."""
    scale = (largest.double() / largest_code(quantized)).float().clamp(min=SMALLEST_SCALE)
    return torch.where(largest > 0, scale * factor_of(quantized, is_query), 1.0)


def bad_elements(x: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """What isn't finite of x (B, H, S, D) when it is encoded: if it was rotated, the parts with such an element."""
    bad = ~x.isfinite()
    part = quantized.rotated
    if part == 0:
        return bad
    return bad.unflatten(3, (-1, part)).any(-1, keepdim=True).expand(*x.shape[:3], -1, part).flatten(3)


@given_several(problems(), given_tensors=st.sampled_from(("q", "kv", "qkv", "qkv")), launches=st.sampled_from(tuple(SHORTS)))
def test_triton_writes_the_same_bytes(drawn: tuple[Problem, ...], given_tensors: str, launches: str, device: torch.device) -> None:
    for problem in noted(alike(drawn)):
        q, k, v = (x if name in given_tensors else None for name, x in zip("qkv", problem.tensors(device), strict=True))
        with mock.patch.multiple(triton_quantize, SHORT=SHORTS[launches], SHORT_PROGRAMS=10**6):
            results = by_triton(q, k, v, problem.case.recipe)
        assert_alike(results, quantize(q, k, v, problem.case.recipe), k)


@pytest.mark.parametrize("launches", SHORTS)
@pytest.mark.parametrize("granularity", (pytest.param("head", marks=pytest.mark.compiles), "block"))
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.one_in(3)
def test_edges_of_blocks_and_token_chunks(
    device: torch.device, length: int, granularity: Granularity, launches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a NaN in the first token and another in the last, or none; every tensor of another dtype; means far from the zeros behind the end."""
    monkeypatch.setattr(triton_quantize, "SHORT", SHORTS[launches])
    monkeypatch.setattr(triton_quantize, "SHORT_PROGRAMS", 10**6)
    q, k, v = normal((1, 1, length, 32), device, 3)
    q, k, v = q[..., :24].half(), (k[..., :24] + 20).bfloat16(), v - 30
    recipe = Recipe(q=granularity, k=granularity)
    for bad in (0.0, torch.nan):
        q[..., 0, 3] = k[..., 0, 4] = v[..., -1, 5] = bad
        for actual, expected in zip(by_triton(q, k, v, recipe), quantize(q, k, v, recipe), strict=True):
            assert_same(actual, expected)


@pytest.mark.parametrize("launches", SHORTS)
@pytest.mark.parametrize("granularity", ("tensor", "head", pytest.param("block", marks=pytest.mark.compiles), "token"))
def test_marks_of_int8_keys(device: torch.device, granularity: Granularity, launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in the second block's last key, in the third's first value and in a query: NaN scales of their own, else negative ones, of keys only."""
    monkeypatch.setattr(triton_quantize, "SHORT", SHORTS[launches])
    monkeypatch.setattr(triton_quantize, "SHORT_PROGRAMS", 10**6)
    q, k, v = normal((1, 2, 400, 32), device, 3)
    k[0, 1, 255, 3] = v[0, 1, 256, 4] = q[0, 1, 300, 5] = torch.nan
    recipe = Recipe(q=granularity, k=granularity, qk="int8")
    results = by_triton(q, k, v, recipe)
    for actual, expected in zip(results, quantize(q, k, v, recipe), strict=True):
        assert_same(actual, expected)
    assert (results[0].scale > 0).all() and results[2].scale.isfinite().all()
    marked = ~(results[1].scale > 0)
    where = {"tensor": [0], "head": [1], "block": [5, 6], "token": [655, 656]}[granularity]
    assert torch.nonzero(marked.flatten()).flatten().tolist() == where
    assert results[1].scale.isnan().any() == (granularity == "token")
    assert torch.nonzero(codes(results[1])[0, 1, :, 0] == 0x80).flatten().tolist() == [255, 256]


@pytest.mark.parametrize("launches", SHORTS)
def test_only_the_first_token_chunk_needs_care(device: torch.device, launches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quantize, "SHORT", SHORTS[launches])
    monkeypatch.setattr(triton_quantize, "SHORT_PROGRAMS", 10**6)
    k, v = normal((1, 1, 2 * TOKEN_CHUNK, 16), device, 2)
    v[..., 3, 5] = torch.inf
    for actual, expected in zip(by_triton(None, k, v, Recipe()), quantize(None, k, v, Recipe()), strict=True):
        assert_same(actual, expected)


def test_short_sequences_take_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(triton_quantize, "launch", lambda kernel, *arguments, **options: names.append(kernel.__name__))
    hardware = dataclasses.replace(device_of(device), sm_count=10)
    for heads, length, dim in ((1, triton_quantize.SHORT, 32), (1, triton_quantize.SHORT + 1, 32), (1, 8, 24), (20, 8, 32)):
        triton_quantize.quantize(*normal((1, heads, length, dim), device, 3), Recipe(), hardware)
    assert names == ["fused_small_kernel"] + ["gather_kernel", "finish_kernel", "write_kernel"] * 3


def test_calls_share_the_kernels_that_are_the_same_for_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that write keys and values don't depend on queries, nor does what is gathered on K's granularity."""
    found: dict[str, list[triton_quantize.Traits]] = {}
    monkeypatch.setattr(triton_quantize, "launch", lambda kernel, grid, *arguments, **_: found.setdefault(kernel.__name__, []).append(arguments[-1]))
    q, k, v = normal((1, 1, 2000, 64), device, 3)
    for recipe in (Recipe(), Recipe(k="token"), Recipe(q="block"), Recipe(qk="int8")):
        for queries in (q, None):
            triton_quantize.quantize(queries, k, v, recipe, device_of(device))
    assert {name: len({*traits}) for name, traits in found.items()} == {"gather_kernel": 4, "finish_kernel": 1, "write_kernel": 3}


def test_more_token_chunks_than_lanes(device: torch.device) -> None:
    k, v = normal((1, 1, TOKEN_CHUNK * (LANES + 1) + 200, 16), device, 2)
    for actual, expected in zip(by_triton(None, k, v, Recipe(k="head")), quantize(None, k, v, Recipe(k="head")), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("granularity", ("tensor", "token"))
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.compiles), pytest.param(torch.float32, marks=pytest.mark.thorough))
)
@pytest.mark.parametrize("magnitude", ("subnormal", "largest"))
@pytest.mark.parametrize("qk", ("e4m3", "int8"))
def test_limits_of_a_dtype(device: torch.device, qk: ProductType, magnitude: str, dtype: torch.dtype, granularity: Granularity) -> None:
    q, k, v = (at_limits(x.to(dtype), magnitude) for x in normal((1, 1, 140, 24), device, 3))
    recipe = Recipe(q=granularity, k=granularity, qk=qk)
    for actual, expected in zip(by_triton(q, k, v, recipe), quantize(q, k, v, recipe), strict=True):
        assert_same(actual, expected)
        assert dequantize(actual).isfinite().all()


@pytest.mark.parametrize("length", (5, 140, 512))
def test_zeros_of_both_signs(device: torch.device, length: int) -> None:
    """Which of two equal extremes is found first must not matter."""
    k, v = (x * 0 for x in normal((1, 1, length, 24), device, 2))
    for actual, expected in zip(by_triton(None, k, v, Recipe()), quantize(None, k, v, Recipe()), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("length", (6, 10, 14))
def test_means_between_two_steps(device: torch.device, length: int) -> None:
    """Sums of integers over lengths whose inverse isn't exact: a product that isn't rounded before it is added to gives another mean."""
    v = torch.randint(-63, 64, (1, 4, length, 64), generator=torch.Generator().manual_seed(length)).float().to(device)
    ties = (v.double().sum(2) / length % 1 == 0.5) & (v.abs().amax(2) >= 32)
    assert ties.any()
    assert_same(by_triton(v, v, v, Recipe())[2], quantize(None, v, v, Recipe())[2])


@pytest.mark.parametrize(
    "smooth_k, smooth_v",
    (
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((False, True), (True, False))),
        pytest.param(False, False, marks=pytest.mark.compiles),
        (True, True),
    ),
)
def test_public_function(device: torch.device, smooth_k: bool, smooth_v: bool) -> None:
    """Names what the operator returns as the definition does."""
    recipe = Recipe(smooth_k=smooth_k, smooth_v=smooth_v)
    q, k, v = normal((1, 2, 130, 48), device, 3)
    expected = quantize(q, k, v, recipe)
    for actual, x in zip(fp8attn.quantize(q, k, v, recipe=recipe), expected, strict=True):
        assert_same(actual, x)
    assert_same(fp8attn.quantize(q, recipe=recipe), expected[0])
    for actual, x in zip(fp8attn.quantize(None, k, v, recipe=recipe), expected[1:], strict=True):
        assert_same(actual, x)
    smooth = dataclasses.replace(recipe, smooth_q=True)
    assert_alike(fp8attn.quantize(q, k, v, recipe=smooth), quantize(q, k, v, smooth), k)


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("q_length, kv_length", ((0, 5), (5, 0), (0, 0)))
def test_no_tokens(device: torch.device, q_length: int, kv_length: int, by: str) -> None:
    q, k, v = (torch.randn(2, 3, n, 24, device=device) for n in (q_length, kv_length, kv_length))
    for x, quantized in zip((q, k, v), QUANTIZERS[by](q, k, v, Recipe()), strict=True):
        assert quantized.shape == x.shape and dequantize(quantized).shape == x.shape
        assert quantized.mean is None or not quantized.mean.isnan().any()


def all_roundings() -> torch.Tensor:
    """float32: every bfloat16 and float16, every e4m3 number and every tie between two, and the neighbours of both, of either sign."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    numbers = torch.arange(E4M3_NAN, dtype=torch.uint8).view(E4M3).float()
    borders = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, 480.0, 1e30])))
    borders = torch.cat((borders, borders.nextafter(torch.tensor(torch.inf)), borders.nextafter(torch.tensor(0.0))))
    return torch.cat((patterns.view(torch.bfloat16).float(), patterns.view(torch.float16).float(), borders, -borders))


def nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """The uint8 of the e4m3 number nearest to x, even in ties, from a table of the numbers."""
    numbers = torch.arange(E4M3_NAN, dtype=torch.uint8).view(E4M3).double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    magnitude = x.double().abs()
    code = torch.searchsorted(middles, magnitude)
    tie = (code < len(middles)) & (middles[code.clamp(max=len(middles) - 1)] == magnitude)
    code = code + (tie & (code % 2 == 1)) + 0x80 * x.signbit()
    return torch.where(x.isnan(), E4M3_NAN, code).to(torch.uint8)


@pytest.mark.parametrize("by", QUANTIZERS)
def test_encoding_int8(device: torch.device, by: str) -> None:
    """All of -127 … 127 and the ties between them: to nearest even."""
    x = torch.arange(-254, 255, device=device).float() / 2
    x = torch.nn.functional.pad(x, (0, 3)).view(1, 1, -1, 128).expand(1, 2, -1, -1).contiguous()
    q, k, _ = QUANTIZERS[by](x, x, x, Recipe(q="tensor", k="tensor", smooth_k=False, rotate=0, qk="int8"))
    for quantized in (q, k):
        assert quantized.scale.item() == 1.0 and torch.equal(quantized.data.float(), x.round())


@triton.jit
def encode_kernel(x, code, count, NATIVE: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(code + at, e4m3_code(tl.load(x + at, mask=at < count, other=0.0), NATIVE), mask=at < count)


@pytest.mark.parametrize("native", (False, pytest.param(True, marks=pytest.mark.gpu)))
def test_encoding(device: torch.device, native: bool) -> None:
    x = all_roundings()
    expected = nearest_codes(x).to(device)
    x = x.to(device)
    assert torch.equal(encode(x, torch.ones_like(x)).view(torch.uint8), expected)
    if native and not device_of(device).has_fp8_units:
        pytest.skip("this GPU doesn't convert to e4m3 by itself")
    code = torch.empty_like(expected)
    encode_kernel[(triton.cdiv(len(x), 4096),)](x, code, len(x), native)
    assert torch.equal(code, expected)


@given(problem=problems(places=("nowhere",)))
def test_round_trip(problem: Problem, device: torch.device) -> None:
    """Half an e4m3 step of each element, 2^-4 of it or 2^-10 scales, half a scale for int8, and three float32 roundings: 1 / scale, y / scale,
    code · scale. Values are halves before, and their errors cancel: another LARGEST_CORRECTION."""
    tensors = problem.tensors(device)
    for x, quantized in zip(tensors, by_torch(*tensors, problem.case.recipe), strict=True):
        factor = factor_of(quantized, x is tensors[0])
        y = centred(x, quantized).double() * factor
        integers = quantized.data.dtype == torch.int8
        restored = token_codes(quantized).view(quantized.data.dtype).double() * element_scales(quantized).double()
        bounded = restored.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).float()
        if factor == 1:
            assert torch.equal(dequantize(dataclasses.replace(quantized, mean=None)), bounded)
        scales = element_scales(quantized).double()
        half_step = scales.expand(y.shape) / 2 if integers else torch.maximum(2.0**-4 * y.abs(), 2.0**-10 * scales)
        if quantized.layout == "values":
            half_step = half_step + (2.0**-10 + (LARGEST_CORRECTION if quantized.length > TOKEN_CHUNK else 0.0)) * y.abs() + 2.0**-24 * scales
        assert ((restored - y).abs() <= half_step + 2.0**-22 * y.abs() + 2.0**-149).all()
        if quantized.mean is not None:
            whole = dequantize(quantized).double()
            mean = token_means(quantized.mean.double(), quantized.length)
            assert ((whole - (bounded.double() + mean)).abs() <= 2.0**-24 * whole.abs() + 2.0**-149).all()


def largest_under_each_scale(y: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Largest finite magnitude of y (B, H, S, D), in the scales' shape."""
    magnitude = torch.where(y.isfinite(), y.abs(), 0.0)
    if granularity == "tensor":
        return magnitude.max().reshape(1, 1, 1)
    if granularity == "block":
        return torch.stack([block.amax((2, 3)) for block in magnitude.split(SCALE_BLOCK, dim=2)], dim=2)
    return {
        "head": lambda: magnitude.amax((2, 3)).unsqueeze(-1),
        "token": lambda: magnitude.amax(3),
        "channel": lambda: magnitude.amax(2),
    }[granularity]()


@given(problem=problems())
def test_scales_are_the_largest_finite_magnitude_over_the_largest_code(problem: Problem, device: torch.device) -> None:
    """Rounded once, normal numbers, and exactly 1 where all is zero; the largest elements are stored as ±256 (values as ±448), or ±127.

    int8 keys that aren't finite mark their scale: with NaN if it is their own, by its sign if it isn't.
    """
    tensors = problem.tensors(device)
    nonfinite = ~tensors[2].isfinite().all(-1, keepdim=True)
    for x, quantized in zip(tensors, by_torch(*tensors, problem.case.recipe), strict=True):
        y = centred(x, quantized).masked_fill(bad_elements(x, quantized), torch.nan)
        largest = largest_under_each_scale(y, quantized.granularity)
        code = largest_code(quantized)
        expected = scales_of_largest(quantized, largest, x is tensors[0])
        hidden = y.isnan().any(-1, keepdim=True) | (nonfinite if x is tensors[1] else False)
        if code == INT8_MAX and x is tensors[1]:
            mark = largest_under_each_scale(hidden.float(), quantized.granularity) > 0
            expected = torch.where(mark, torch.nan if quantized.granularity == "token" else -expected, expected)
        torch.testing.assert_close(quantized.scale, expected, rtol=0, atol=0, equal_nan=True)
        spread = element_scales(dataclasses.replace(quantized, scale=largest))
        at_largest = (y.abs() == spread) & (spread >= SMALLEST_SCALE * code)
        if x is tensors[1] or code == INT8_MAX:
            at_largest &= ~hidden
        assert (token_codes(quantized).view(quantized.data.dtype).float().abs() == code)[at_largest].all()


@pytest.mark.parametrize("largest", (192.0, 224.0, 288.0, 320.0, 384.0, E4M3_MAX))
def test_other_codes_of_the_largest_element_have_larger_errors(largest: float, device: torch.device) -> None:
    x = normal((1, 4, 4096, 64), device, 5)[0].bfloat16().float()
    scale = scale_of(x.abs().amax(-1, keepdim=True), largest)
    as_it_is = dequantize(quantize(x, None, None, Recipe(rotate=0))[0]) - x
    assert as_it_is.norm() < 0.99 * (encode(x, scale).float() * scale - x).norm()


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("smooth", (pytest.param(False, marks=pytest.mark.compiles), True))
@pytest.mark.parametrize("granularity", ROW_GRANULARITIES)
def test_zero_tensors_and_heads_have_scale_one(device: torch.device, granularity: Granularity, smooth: bool, by: str) -> None:
    q, k, v = normal((1, 2, 140, 24), device, 3)
    for x in (q, k, v):
        x[:, 1] = 0
    recipe = Recipe(q=granularity, k=granularity, v="tensor" if granularity == "tensor" else "head", smooth_k=smooth, smooth_v=smooth)
    for quantized in QUANTIZERS[by](q, k, v, recipe):
        assert (quantized.scale[:, 0] != 1.0).all()
        assert granularity == "tensor" or (quantized.scale[:, 1] == 1.0).all()
        assert (codes(quantized)[:, 1] == 0).all() and (dequantize(quantized)[:, 1] == 0).all()
    zeros = torch.zeros_like(q)
    for quantized in QUANTIZERS[by](zeros, zeros, zeros, recipe):
        assert (quantized.scale == 1.0).all() and (codes(quantized) == 0).all()


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("granularity, ones", (("block", [1]), ("token", [7, 9, *range(128, 256)])))
def test_zero_blocks_tokens_and_channels_have_scale_one(device: torch.device, granularity: Granularity, ones: list[int], by: str) -> None:
    """And so has a token without a finite number."""
    x, v = normal((1, 1, 300, 24), device, 2)
    x[:, :, 7] = 0
    x[:, :, 9] = torch.nan
    x[:, :, 128:256] = 0
    v[..., 5] = 0
    recipe = Recipe(q=granularity, k=granularity, v="channel", smooth_k=False, smooth_v=False)
    q_quantized, k_quantized, v_quantized = QUANTIZERS[by](x, x, v, recipe)
    for quantized in (q_quantized, k_quantized):
        assert torch.nonzero(quantized.scale.flatten() == 1.0).flatten().tolist() == ones
        assert (codes(quantized)[:, :, 7] == 0).all() and (codes(quantized)[:, :, 128:256] == 0).all()
    assert torch.nonzero(v_quantized.scale.flatten() == 1.0).flatten().tolist() == [5]
    assert (codes(v_quantized)[:, :, 5] == 0).all()


@given(case=cases(masks=("none",)))
def test_means_of_queries(case: Case, device: torch.device) -> None:
    """Of every 64 queries, off by the roundings of a sum; what they add to scores is their product with keys as they were before rounding."""
    q, k, v = case.tensors(device)
    smoothed, keys, _ = by_torch(q, k, v, dataclasses.replace(case.recipe, smooth_q=True, rotate=0))
    groups = [group.double() for group in q.split(QUERY_GROUP, 2)]
    means = torch.stack([group.mean(2) for group in groups], 2)
    magnitudes = torch.stack([group.abs().mean(2) for group in groups], 2)
    assert smoothed.mean.shape == means.shape
    assert ((smoothed.mean.double() - means).abs() <= 2.0**-20 * magnitudes).all()
    assert_bias(smoothed, k, keys)


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("rotate", (*(pytest.param(part, marks=pytest.mark.compiles) for part in (0, 16)), 256))
def test_what_means_of_queries_add_is_finite(rotate: int, by: str, device: torch.device) -> None:
    """Nothing to the scores of keys that aren't; where products overflow, the largest there is."""
    q, k, v = normal((1, 1, 70, 32), device, 3)
    q, k = q + 3, k.clone()
    k[0, 0, 5, 7], k[0, 0, 9, 0] = torch.nan, -torch.inf
    q[0, 0, 3], q[0, 0, 64:, 2] = torch.nan, torch.inf
    k[0, 0, 11] = torch.finfo(torch.float32).max
    smoothed, _, _ = QUANTIZERS[by](q, k, v, Recipe(smooth_q=True, smooth_k=False, rotate=rotate))
    assert smoothed.mean.isfinite().all() and (smoothed.mean != 0).any()
    assert (smoothed.bias[..., [5, 9]] == 0).all() and (smoothed.bias[..., 11] == LARGEST_BIAS).all()
    assert smoothed.bias.isfinite().all()


@given(case=cases(masks=("none",), distributions=("normal", "outliers", "channel bias", "one sign", "tiny", "huge")))
def test_means(case: Case, device: torch.device) -> None:
    """K's are off by the roundings of a sum in 32 lanes, and one to bfloat16; V's are the nearest multiples of MEAN_STEP of their channel's largest
    power of two, or zero if they are less than MEAN_STEPS of them."""
    _, k, v = case.tensors(device)
    _, k_quantized, v_quantized = by_torch(None, k, v, dataclasses.replace(case.recipe, smooth_k=True, smooth_v=True, rotate=0))
    additions = 32 + -(-case.kv_length // 32)
    sample = k.double()[:, :, :: -(-case.kv_length // SAMPLE) | 1]
    slack = additions * 2.0**-24 * sample.abs().mean(2)
    assert torch.equal(k_quantized.mean, k_quantized.mean.bfloat16().float())
    assert ((k_quantized.mean.double() - sample.mean(2)).abs() <= slack + 2.0**-8 * k_quantized.mean.abs()).all()
    for rotate in (16, 256):  # the rotated mean, not the mean of what was rotated
        _, quantized, _ = by_torch(None, k, v, dataclasses.replace(case.recipe, smooth_k=True, rotate=rotate))
        assert torch.equal(quantized.mean, rotation.rotate(k_quantized.mean, quantized.rotated))
    _, exponent = torch.frexp(v.double().abs().amax(2))  # log2 of a power of two may come out just below
    step = MEAN_STEP * torch.exp2(exponent - 1.0)
    rounding = additions * 2.0**-24 * v.double().abs().mean(2)
    mean = v.double().mean(2)
    small = (v_quantized.mean == 0) & (mean.abs() < MEAN_STEPS * step + rounding)
    assert (small | ((v_quantized.mean.double() - mean).abs() <= step / 2 + rounding)).all()
    constant = (v == v[:, :, :1]).all(2)
    steps = (v_quantized.mean.double() / step).masked_fill(constant, 0)
    assert torch.equal(steps, steps.round())
    assert ((steps == 0) | (steps.abs() >= MEAN_STEPS)).all()


def test_values_near_zero_are_not_drowned_in_a_small_mean(device: torch.device) -> None:
    """Tokens whose values are a fiftieth of the others' keep their precision; a mean that is a good part of the largest values goes all the same."""
    (v,) = normal((1, 2, 256, 64), device, 1)
    v[:, :, :4] /= 50
    v[:, 1] += 3
    _, _, quantized = by_torch(None, v, v, Recipe())
    assert (quantized.mean[:, 0] == 0).double().mean() > 0.95 and (quantized.mean[:, 1] > 2).all()
    error = (dequantize(quantized) - v).double()
    assert error[:, 0, :4].square().mean().sqrt() < 0.05 * v[:, 0, :4].double().square().mean().sqrt()


@pytest.mark.parametrize(
    "length, sampled", ((1, 1), (128, 128), (129, 43), (384, 128), (385, 77), (512, 103), (1000, 112), (1024, 114), (1152, 128), (5000, 122))
)
def test_means_of_keys_are_of_a_sample(device: torch.device, length: int, sampled: int) -> None:
    """Tokens evenly spaced from the first on, an odd number of tokens apart, SAMPLE at most; what is between them can be anything."""
    spacing = -(-length // sampled)
    assert spacing % 2 == 1 and sampled <= SAMPLE
    (k,) = normal((1, 1, length, 16), device, 1)
    if length > 1:
        k[:, :, 0] = torch.nan  # counts as zero
    is_sampled = torch.arange(length, device=device) % spacing == 0
    k[:, :, ~is_sampled] = 1e9
    sample = k[:, :, is_sampled].double().nan_to_num(0.0)
    assert sample.shape[2] == sampled
    mean = by_torch(None, k, k, Recipe(rotate=0))[1].mean
    assert ((mean.double() - sample.mean(2)).abs() <= 64 * 2.0**-24 * sample.abs().mean(2) + 2.0**-8 * mean.abs()).all()


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.compiles) for dtype in (torch.float16, torch.float32))))
@pytest.mark.parametrize("length", (1, 129, 601))
def test_constant_channels_of_v_are_their_mean(device: torch.device, length: int, dtype: torch.dtype, by: str) -> None:
    (v,) = normal((1, 2, length, 40), device, 1)
    v = v.to(dtype)
    constants = torch.tensor([1.1, -300.0, 2.0**-20, 0.0, 1 / 3, 60000.0]).to(device, dtype)
    v[..., : len(constants)] = constants
    quantized = QUANTIZERS[by](None, v, v, Recipe())[2]
    assert torch.equal(quantized.mean[..., : len(constants)], constants.float().expand(1, 2, -1))
    assert (codes(quantized)[:, :, : len(constants)] == 0).all() and (quantized.scale[..., : len(constants)] == 1.0).all()
    assert torch.equal(dequantize(quantized)[..., : len(constants)], v[..., : len(constants)].float())


@pytest.mark.compiles
@pytest.mark.parametrize("by", QUANTIZERS)
def test_means_that_are_too_large_are_not_removed(device: torch.device, by: str) -> None:
    """Below LARGEST_MEAN no difference overflows; sums that overflow leave no mean, nor have channels that are rotated with theirs any."""
    (x,) = normal((1, 1, 200, 32), device, 1)
    x[..., 0] = LARGEST_MEAN
    x[..., 1] = LARGEST_MEAN / 2
    x[..., 2] = torch.finfo(torch.float32).max
    x[..., 3] = -torch.finfo(torch.float32).max
    _, k, v = QUANTIZERS[by](None, x, x, Recipe(rotate=0))
    _, rotated, _ = QUANTIZERS[by](None, x, x, Recipe(rotate=16))
    for quantized in (k, v):
        assert quantized.mean[0, 0, :4].tolist() == [0.0, LARGEST_MEAN / 2, 0.0, 0.0]
        assert dequantize(quantized).isfinite().all() and (quantized.mean[0, 0, 4:].abs() < 1).all()
    assert (rotated.mean[0, 0, :16] == 0).all() and (rotated.mean[0, 0, 16:] != 0).all()
    assert dequantize(rotated).isfinite().all() and (rotated.mean[0, 0, 16:].abs() < 1).all()


def anchored(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The case with a ±8 in every channel of every block's first two tokens: extremes that a zero elsewhere can't move."""
    tensors = case.tensors(device)
    for x in tensors:
        signs = 8 - 16 * (torch.arange(x.shape[3], device=device) % 2)
        x[:, :, ::SCALE_BLOCK] = signs.to(x.dtype)
        x[:, :, 1::SCALE_BLOCK] = -signs.to(x.dtype)
    return tensors


@given(
    case=cases(masks=("none",), distributions=("normal",)),
    lengths=st.tuples(*[st.one_of(st.integers(8, 128), st.integers(140, 256))] * 2),
    bad=st.sampled_from(BAD),
    data=st.data(),
)
def test_nan_and_infinity_change_nothing_else(case: Case, lengths: tuple[int, int], bad: float, data: st.DataObject, device: torch.device) -> None:
    """Instead of a zero they change their own byte, the bytes of the key whose value they are, and the scale of their own token."""
    # rotated, an element changes its row
    case = dataclasses.replace(case, q_length=lengths[0], kv_length=lengths[1], recipe=dataclasses.replace(case.recipe, rotate=0))
    tensors = anchored(case, device)
    which = data.draw(st.integers(0, 2), label="tensor")
    token = data.draw(st.integers(2, case.q_length - 1 if which == 0 else case.kv_length - 1).filter(lambda t: t % SCALE_BLOCK > 1), label="token")
    at = (-1, -1, token, data.draw(st.integers(0, tensors[which].shape[3] - 1), label="channel"))
    tensors[which][at] = 0
    before = by_torch(*tensors, case.recipe)
    tensors[which][at] = bad
    after = by_torch(*tensors, case.recipe)
    for index, (x, y) in enumerate(zip(before, after, strict=True)):
        others = torch.ones(x.shape, dtype=torch.bool, device=device)
        if index == which:
            # after smoothing the zero was minus the mean, and could be the largest of its token; int8 has no NaN but whole rows
            others[at if x.data.dtype == E4M3 and (x.granularity != "token" or x.mean is None) else at[:3]] = False
        if index == 1 and which == 2:
            others[at[:3]] = False
        assert torch.equal(token_codes(x)[others], token_codes(y)[others])
        assert torch.equal(element_scales(x).expand(x.shape)[others], element_scales(y).expand(x.shape)[others])
        assert x.mean is None or torch.equal(x.mean, y.mean)
        if x.bias is not None:  # K's mean isn't moved by a zero; its own key has no part in it any longer
            others = torch.arange(x.bias.shape[3], device=device) != (token if which == 1 else -1)
            assert torch.equal(x.bias[..., others], y.bias[..., others])


@given(problem=problems(distributions=("normal", "channel bias", "zeros")))
def test_nan_is_stored_where_it_must_be(problem: Problem, device: torch.device) -> None:
    """As 0x7F for each element of q and k that isn't finite, for all of a key whose value isn't, and never in v; as -128 for all of a row of int8."""
    q, k, v = problem.tensors(device)
    quantized = by_torch(q, k, v, problem.case.recipe)
    nonfinite = ~v.isfinite().all(-1, keepdim=True)
    bad = (bad_elements(q, quantized[0]), bad_elements(k, quantized[1]) | nonfinite, torch.zeros_like(v, dtype=torch.bool))
    for x, expected in zip(quantized, bad, strict=True):
        if x.data.dtype == torch.int8:
            assert torch.equal(x.data == INT8_NAN, expected.any(-1, keepdim=True).expand(x.shape))
        else:
            assert torch.equal(token_codes(x) == E4M3_NAN, expected) and not (codes(x) == 0xFF).any()
            assert x.scale.isfinite().all()
        assert torch.equal(dequantize(x).isnan(), expected if x.data.dtype == E4M3 else (x.data == INT8_NAN))
        assert x.mean is None or x.mean.isfinite().all()
    assert (token_codes(quantized[2])[~v.isfinite()] == 0).all()


def test_key_order_is_the_tensor_cores() -> None:
    """PTX ISA, mma.m16n8k32: of a group of 16 accumulator columns thread c of a quad holds 2c, 2c+1, 8+2c, 8+2c+1; of the operand's, 4c … 4c+3."""
    for group in (0, 16, 4096):
        for c in range(4):
            columns = [group + 2 * c, group + 2 * c + 1, group + 8 + 2 * c, group + 8 + 2 * c + 1]
            assert [key_of_slot(group + 4 * c + i) for i in range(4)] == columns
    keys = slots(PADDING)
    assert torch.equal(keys.sort().values, torch.arange(PADDING)) and torch.equal(keys // GROUP, torch.arange(PADDING) // GROUP)
    assert keys.tolist() == [key_of_slot(slot) for slot in range(PADDING)]


@triton.jit
def key_order_kernel(by_slot, by_permutation, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    columns = tl.arange(0, LENGTH)
    tl.store(by_slot + columns, kernels_key_of_slot(columns))
    p = permute_keys(tl.zeros([ROWS, LENGTH], tl.int32) + columns[None, :])
    tl.store(by_permutation + tl.arange(0, ROWS)[:, None] * LENGTH + columns[None, :], p)


def test_kernels_use_the_same_key_order(device: torch.device) -> None:
    by_slot = torch.empty(128, dtype=torch.int32, device=device)
    by_permutation = torch.empty(16, 128, dtype=torch.int32, device=device)
    key_order_kernel[(1,)](by_slot, by_permutation, 16, 128)
    expected = slots(128, device).int()
    assert torch.equal(by_slot, expected) and torch.equal(by_permutation, expected.expand(16, -1))


@pytest.mark.parametrize("length", (0, 1, 15, 16, 127, 128, 129, 300))
def test_values_layout(device: torch.device, length: int) -> None:
    """Slot by slot the byte of its key, zeros behind the end; and there is a way back."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randint(1, 256, (2, 3, length, 24), generator=generator, dtype=torch.uint8).to(device).view(E4M3)
    values = values_layout(rows)
    assert values.dtype == E4M3 and values.is_contiguous()
    assert values.shape == (2, 3, 24, padded_length(length)) and values.shape[3] % PADDING == 0 and values.shape[3] - length < PADDING
    stored, expected = values.view(torch.uint8), rows.view(torch.uint8)
    for slot in range(values.shape[3]):
        key = key_of_slot(slot)
        assert torch.equal(stored[..., slot], expected[:, :, key] if key < length else torch.zeros_like(stored[..., slot]))
    assert torch.equal(rows_layout(values, length).view(torch.uint8), expected)


def value_errors(v: torch.Tensor) -> torch.Tensor:
    """What quantizing adds to V, in runs of tokens: (B, H, runs, RUN, D)."""
    return (dequantize(quantize(None, v, v, Recipe(smooth_v=False))[2]) - v.float()).unflatten(2, (-1, RUN))


def to_nearest(v: torch.Tensor) -> torch.Tensor:
    """The same of V rounded to halves and those to nearest, by the same scales."""
    scale = scale_of(v.float().abs().amax(-2, keepdim=True))
    halves = (v.float() * (1 / scale)).half().float()
    return (encode(halves, torch.ones_like(scale)).float() * scale - v.float()).unflatten(2, (-1, RUN))


def test_errors_of_neighbouring_values_cancel(device: torch.device) -> None:
    """Over runs, not beyond; each value's own grows by 3 %, and the first of a run is rounded to nearest."""
    v = normal((1, 2, 64 * TOKEN_CHUNK, 16), device, 1)[0].bfloat16()
    errors, nearest = value_errors(v), to_nearest(v)
    assert 0.25 < errors.sum(-2).norm() / nearest.sum(-2).norm() < 0.31
    assert 1.02 < errors.norm() / nearest.norm() < 1.04
    assert torch.equal(errors[..., 0, :], nearest[..., 0, :])
    runs = errors.sum(-2)
    correlation = (runs[..., 1:, :] * runs[..., :-1, :]).mean() / runs.square().mean()
    assert correlation.abs() < 5 / runs.numel() ** 0.5


def test_few_values_are_rounded_to_nearest(device: torch.device) -> None:
    v = normal((1, 2, TOKEN_CHUNK, 16), device, 1)[0]
    assert torch.equal(value_errors(v), to_nearest(v))
    (v,) = normal((1, 2, TOKEN_CHUNK + RUN, 16), device, 1)
    assert not torch.equal(value_errors(v), to_nearest(v))


def test_small_values_pay_for_no_large_one(device: torch.device) -> None:
    """Every eighth token's values are a 256th of the others', whose residuals are larger: the cost is half a step and LARGEST_CORRECTION at most."""
    v = normal((1, 1, 2 * TOKEN_CHUNK, 16), device, 1)[0].clamp(min=0.1)
    v[:, :, 4::8] *= 2.0**-8
    errors = value_errors(v).flatten(2, 3)[:, :, 4::8]
    assert (errors.abs() <= (2.0**-4 + LARGEST_CORRECTION + 2.0**-10) * v[:, :, 4::8]).all()


def test_less_of_an_output_is_lost(device: torch.device) -> None:
    """Weights of N(0, 1) scores, no mask: what values cost an output falls by some 17 %; where weights vary slowly by more."""
    generator = torch.Generator().manual_seed(1)
    v = normal((1, 4, 8 * TOKEN_CHUNK, 32), device, 1)[0].bfloat16()
    scores = torch.randn(1, 4, 128, v.shape[2], generator=generator).to(device)
    slow = scores.unflatten(-1, (-1, 64))[..., :1].expand(-1, -1, -1, -1, 64).flatten(-2)
    ratios = []
    for weights in (scores.softmax(-1), slow.softmax(-1)):
        lost, before = (weights @ errors.flatten(2, 3) for errors in (value_errors(v), to_nearest(v)))
        ratios.append(lost.norm() / before.norm())
    assert 0.8 < ratios[0] < 0.88 and 0.25 < ratios[1] < 0.35, ratios


@pytest.mark.parametrize("by", QUANTIZERS)
@pytest.mark.parametrize("dim", (24, *(pytest.param(dim, marks=pytest.mark.compiles) for dim in (16, 40, 136, 256))))
def test_rows_are_aligned(device: torch.device, dim: int, by: str) -> None:
    (x,) = normal((2, 2, 5, dim), device, 1)
    for quantized in QUANTIZERS[by](x, x, x, Recipe())[:2]:
        assert quantized.shape == x.shape and quantized.data.stride(3) == 1
        assert quantized.data.data_ptr() % ROW_ALIGNMENT == 0 and all(stride % ROW_ALIGNMENT == 0 for stride in quantized.data.stride()[:3])


@pytest.mark.parametrize("by", QUANTIZERS)
def test_padding_is_zero_whatever_the_mean(device: torch.device, by: str) -> None:
    (v,) = normal((1, 2, 150, 24), device, 1)
    v += 50
    v[0, 0, 149, 3] = torch.nan
    quantized = QUANTIZERS[by](None, v, v, Recipe())[2]
    behind = slots(quantized.data.shape[3], device) >= 150
    assert (codes(quantized)[..., behind] == 0).all() and (codes(quantized)[..., ~behind] != 0).any()


def e4m3_bytes(shape: tuple[int, ...], nans: float, layout: str, generator: torch.Generator) -> torch.Tensor:
    """uint8, every code but NaN, and a part of the tokens with a NaN of either sign."""
    batch, heads, length, dim = shape
    magnitude, sign = (torch.randint(0, n, shape, generator=generator, dtype=torch.uint8) for n in (E4M3_NAN, 2))
    x = magnitude | (sign << 7)
    tokens = torch.rand(batch, heads, length, generator=generator) < nans
    channel = int(torch.randint(dim, (), generator=generator))
    x[..., channel] |= tokens.to(torch.uint8) * E4M3_NAN
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        return torch.nn.functional.pad(x, (0, 8, 2, 1), value=E4M3_NAN)[:, :, 2 : 2 + length, :dim]
    return x


@pytest.mark.parametrize("layout", ("bhsd", "bshd", "padded"))
@given_several(
    cases(masks=("none",)),
    as_bytes=st.booleans(),
    k_granularity=st.sampled_from(ROW_GRANULARITIES),
    v_granularity=st.sampled_from(VALUE_GRANULARITIES),
    nans=st.sampled_from((0.0, 0.1, 1.0)),
)
def test_import_kv(
    layout: str, drawn: tuple[Case, ...], as_bytes: bool, k_granularity: Granularity, v_granularity: Granularity, nans: float, device: torch.device
) -> None:
    """Keys are taken as they are, values in the layout of quantized V; a token with a NaN in its value has a scale of NaN."""
    for case in noted(alike(drawn)):
        check_import(layout, case, as_bytes, k_granularity, v_granularity, nans, device)


def check_import(
    layout: str, case: Case, as_bytes: bool, k_granularity: Granularity, v_granularity: Granularity, nans: float, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    batch, heads, length = 2, case.kv_heads, case.kv_length
    k = e4m3_bytes((batch, heads, length, case.head_dim), nans, layout, generator).to(device)
    v = e4m3_bytes((batch, heads, length, case.value_dim), nans, layout, generator).to(device)
    blocks = -(-length // SCALE_BLOCK)
    last = {"tensor": 1, "head": 1, "block": blocks, "token": length, "channel": case.value_dim}
    k_scale, v_scale = (
        (0.5 + torch.rand((1, 1, 1) if x == "tensor" else (batch, heads, last[x]), generator=generator)).to(device)
        for x in (k_granularity, v_granularity)
    )
    dtype = torch.uint8 if as_bytes else E4M3
    imported, values = fp8attn.import_kv(k.view(dtype), v.view(dtype), k_scale, v_scale)

    nonfinite = ((v & 0x7F) == E4M3_NAN).any(-1)
    assert torch.equal(codes(imported), k) and imported.data.data_ptr() == k.data_ptr()
    assert (imported.granularity, imported.layout, imported.length, imported.mean) == ("token", "rows", length, None)
    tokens = torch.arange(length, device=device)
    scale_of_token = {"tensor": tokens * 0, "head": tokens * 0, "block": tokens // SCALE_BLOCK, "token": tokens}[k_granularity]
    expected = k_scale[..., scale_of_token].expand(batch, heads, length).masked_fill(nonfinite, torch.nan)
    torch.testing.assert_close(imported.scale, expected, rtol=0, atol=0, equal_nan=True)
    assert (values.layout, values.length, values.mean) == ("values", length, None)
    assert torch.equal(values.scale, v_scale)
    assert torch.equal(token_codes(values), v.masked_fill((v & 0x7F) == E4M3_NAN, 0))
    for data, hidden in (import_values(v.view(dtype)), triton_quantize.import_values(v.view(E4M3), device_of(device))):
        assert torch.equal(data.view(torch.uint8), codes(values)) and torch.equal(hidden, nonfinite)


def test_importing_what_was_quantized_changes_nothing(device: torch.device) -> None:
    k, v = normal((1, 2, 200, 40), device, 2)
    _, k_quantized, v_quantized = by_torch(None, k, v, Recipe(smooth_k=False, smooth_v=False))
    rows = rows_layout(v_quantized.data, 200)
    imported, values = fp8attn.import_kv(k_quantized.data, rows, k_quantized.scale, v_quantized.scale)
    assert_same(values, v_quantized)
    assert torch.equal(dequantize(imported), dequantize(k_quantized))


@given_several(cases(masks=("none",)).map(shortened), part=2)
def test_same_bytes_again_and_from_any_layout(drawn: tuple[Case, ...], device: torch.device) -> None:
    for case in noted(alike(drawn)):
        case = dataclasses.replace(case, batch=1)
        first, *others = (by_triton(*dataclasses.replace(case, layout=x).tensors(device), case.recipe) for x in ("bhsd", "bhsd", "bshd", "padded"))
        for other in others:
            for actual, expected in zip(other, first, strict=True):
                assert_same(actual, expected)


@given_several(cases(masks=("none",)).map(shortened), part=2)
def test_batches_and_heads_are_independent(drawn: tuple[Case, ...], device: torch.device) -> None:
    """Bit for bit, unless a scale covers the whole tensor."""
    for case in noted(alike(drawn)):
        heads: dict[str, Any] = {name: "head" for name in "qkv" if getattr(case.recipe, name) == "tensor"}
        recipe = dataclasses.replace(case.recipe, **heads)
        q, k, v = case.tensors(device)
        alone = by_triton(q[-1:, -1:], k[-1:, -1:], v[-1:, -1:], recipe)
        for x, one in zip(by_triton(q, k, v, recipe), alone, strict=True):
            assert torch.equal(codes(one), codes(x)[-1:, -1:]) and torch.equal(one.scale, x.scale[-1:, -1:])
            assert x.mean is None or torch.equal(one.mean, x.mean[-1:, -1:])
            assert x.bias is None or torch.equal(one.bias, x.bias[-1:, -1:])


@pytest.mark.parametrize(
    "dim, smooth_k",
    (
        pytest.param(16, True, marks=pytest.mark.compiles),
        *(pytest.param(*problem, marks=pytest.mark.thorough) for problem in ((40, False), (64, False), (64, True), (96, True), (256, True))),
        (128, False),
    ),
)
def test_what_means_of_queries_add(dim: int, smooth_k: bool, device: torch.device) -> None:
    """Of more rows and keys than a program has, heads that share one of K's, in several batches; the same bits for each by itself, however its rows
    lie."""
    q, k, v = normal((2, 2, 300, dim), device, 3)
    q = torch.cat((q + 1, q - 1), 1)
    k[1, 1, 7, 3] = torch.nan
    k = 3 + k.half()
    recipe = Recipe(smooth_q=True, smooth_k=smooth_k)
    smoothed, keys, _ = by_triton(q, k, v, recipe)
    assert_bias(smoothed, k, keys)
    shifted = torch.nn.functional.pad(k, (1, 2))[..., 1:-2]
    alone, _, _ = by_triton(q[1:, 2:], shifted[1:, 1:], v[1:, 1:], recipe)
    assert torch.equal(alone.bias, smoothed.bias[1:, 2:]) and (alone.bias[..., 7] == 0).all() and (alone.bias[..., 8] != 0).all()


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
@pytest.mark.parametrize("granularity", ("token", "block", "head", "tensor"))
def test_the_operator_dequantizes_as_defined(device: torch.device, granularity: str, qk: str) -> None:
    """Rows with NaN and the largest numbers, of any strides."""
    x = torch.randn(2, 3, 150, 40, device=device)
    x[0, 1, 7, 3], x[1, 2, 149, 0], x[0, 0, 5] = torch.nan, torch.inf, 3e38
    query = quantize(x, None, None, Recipe(q=granularity, qk=qk, rotate=0))[0]
    assert query is not None
    data = query.data.transpose(1, 2).contiguous().transpose(1, 2)
    signed = -query.scale if qk == "int8" else query.scale  # as of non-finite keys
    for part in (query, dataclasses.replace(query, data=data), dataclasses.replace(query, scale=signed)):
        found = fp8attn.ops.library_ops.dequantize(part.data, part.scale, granularity, "rows", part.length, None)
        expected = dequantize(part)
        assert found.is_contiguous() and torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
