"""The oracles: exact attention against PyTorch, the pipeline against exact attention and by hand, and what combines partial results."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_same_pattern, relative
from fp8attn import Quantized, Recipe, reference
from fp8attn.quantization import dequantize, of_every_query, quantize, quantize_kv, quantize_q, values_layout
from fp8attn.recipe import E4M3, ComputeType, ProductType, Rotation
from strategies import MASKS, Case, cases

MODERATE = ("normal", "outliers", "one sign", "tiny", "zeros", "constant", "duplicated keys")
"""Distributions whose scores are below a few hundred, so that exponentials keep most of their scores' bits."""

HALF_STEP = {"e4m3": (2.0**-4, 2.0**-10), "f16": (2.0**-11, 2.0**-25)}
"""Largest rounding error of normal numbers, relative, and of subnormal ones, absolute."""

BLOCKS = reference.Arithmetic(64)
BASE_TWO = reference.Scoring(math.log(2))
"""Scores in base 2 are products of q and k."""


def per_query_head(x: torch.Tensor, case: Case) -> torch.Tensor:
    return x[:, torch.arange(case.q_heads, device=x.device) // case.group]


def visible(case: Case, device: torch.device) -> torch.Tensor:
    """bool (B, Hq, Sq, Sk): which keys a row sees."""
    seen = torch.ones(case.batch, case.q_heads, case.q_length, case.kv_length, dtype=torch.bool, device=device)
    if case.mask == "causal":
        return seen.tril()
    if case.mask == "bottom right":
        return seen.tril(case.kv_length - case.q_length)
    mask = case.attn_mask(device)
    if mask is None:
        return seen
    return seen & (mask if mask.dtype == torch.bool else mask > -torch.inf)


def dense_scores(case: Case, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float64 (B, Hq, Sq, Sk): scaled, masked with -inf. `bias`: Quantized's."""
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), per_query_head(k, case).double())
    if bias is not None:
        scores = scores + of_every_query(bias.double(), case.q_length)[..., : case.kv_length]
    scores = scores * (q.shape[3] ** -0.5 if case.scale is None else case.scale)
    mask = case.attn_mask(q.device)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    return scores.masked_fill(~visible(case, q.device), -torch.inf)


def scoring_of(case: Case) -> reference.Scoring | None:
    return None if case.scale is None else reference.Scoring(case.scale)


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.attention in float64."""
    causal: Any = case.causal
    options.setdefault("attn_mask", case.attn_mask(q.device))
    return reference.attention(q, k, v, causal=causal, scoring=scoring_of(case), dtype=torch.float64, **options)


def pipe(case: Case, quantized: Any, block_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.pipeline of a case's quantized q, k and v."""
    causal: Any = case.causal
    mask = case.attn_mask(quantized[0].device)
    q, k, v = quantized
    return reference.pipeline(q, k, v, mask, arithmetic=reference.Arithmetic(block_n, case.recipe.compute), causal=causal, scoring=scoring_of(case))


@pytest.mark.parametrize("mask", MASKS)
@given(case=cases(distributions=MODERATE))
def test_attention_is_pytorchs(mask: str, case: Case, device: torch.device) -> None:
    """In float64 to 1e-12: a few hundred roundings of 1e-16."""
    case = dataclasses.replace(case, mask=mask)
    q, k, v = (x.double() for x in case.tensors(device))
    seen = visible(case, device)
    bias = case.attn_mask(device)
    bias = seen if bias is None or bias.dtype == torch.bool else bias.double()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=case.scale, enable_gqa=True)
    out, lse = attend(case, q, k, v)
    assert out.dtype == lse.dtype == torch.float64
    rows = seen.any(-1)
    assert relative(out[rows], expected[rows]) <= 1e-12
    assert (out[~rows] == 0).all() and (lse[~rows] == -torch.inf).all()
    torch.testing.assert_close(lse, dense_scores(case, q, k).logsumexp(-1), rtol=1e-12, atol=1e-12)


@given(case=cases(distributions=MODERATE), elements=st.sampled_from((1, 1000, 30000)))
def test_chunks_do_not_matter(case: Case, elements: int, device: torch.device) -> None:
    """Up to the order in which a matrix product of another height adds up."""
    q, k, v = case.tensors(device)
    whole = attend(case, q, k, v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "CHUNK_ELEMENTS", elements)
        chunks = attend(case, q, k, v)
    for x, y in zip(whole, chunks, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_length, kv_length", ((0, 5), (5, 0), (0, 0)))
def test_no_tokens(device: torch.device, q_length: int, kv_length: int) -> None:
    q, k, v = (torch.randn(2, 3, n, 16, device=device) for n in (q_length, kv_length, kv_length))
    for out, lse in (reference.attention(q, k, v), reference.pipeline(quantize_q(q, Recipe()), *quantize_kv(k, v, Recipe()), arithmetic=BLOCKS)):
        assert out.shape == q.shape and (out == 0).all()
        assert lse.shape == q.shape[:3] and (lse == -torch.inf).all()


@pytest.mark.parametrize("mask", MASKS)
@given(case=cases(distributions=("normal", "outliers")), which=st.integers(0, 2), bad=st.sampled_from((torch.nan, torch.inf, -torch.inf)))
def test_nan_reaches_the_rows_that_attend_and_no_others(mask: str, case: Case, which: int, bad: float, device: torch.device) -> None:
    """In both oracles; what the others get doesn't depend on the bad token."""
    case = dataclasses.replace(case, mask=mask)
    tensors = case.tensors(device)
    batch, head, token = (case.seed % size for size in tensors[which].shape[:3])
    at = (batch, head, token, case.seed % tensors[which].shape[3])
    tensors[which][at] = bad
    seen = visible(case, device)
    reached = torch.zeros_like(seen[..., 0])
    if which == 0:
        reached[batch, head, token] = seen[batch, head, token].any()
    else:
        heads = slice(head * case.group, (head + 1) * case.group)
        reached[batch, heads] = seen[batch, heads, :, token]
    exact = attend(case, *tensors)
    quantized: Any = quantize(*tensors, case.recipe)
    for out, lse in (exact, pipe(case, quantized, 64)):
        assert torch.equal(out.isnan().any(-1), reached) and torch.equal(out.isnan().all(-1), reached)
        assert torch.equal(lse.isnan(), reached)
    tensors[which][at] = 0
    for x, y in zip(exact, attend(case, *tensors), strict=True):
        torch.testing.assert_close(x[~reached], y[~reached], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@given(case=cases(distributions=MODERATE), block_n=st.sampled_from((16, 48, 128, 512)))
def test_pipeline_rounds_probabilities_and_nothing_else(mask: str, case: Case, block_n: int, device: torch.device) -> None:
    """Each P by half a step of its format, or of its format's subnormals where the row's largest is 2^8; the rest is float32.

    So outputs with other key blocks differ by no more than twice that.
    """
    case = dataclasses.replace(case, mask=mask)
    quantized: Any = quantize(*case.tensors(device), case.recipe)
    q, k, v = quantized
    out, lse = pipe(case, quantized, block_n)
    assert out.dtype == lse.dtype == torch.float32
    stored_q, stored_k, stored_v = (dequantize(dataclasses.replace(x, mean=None)) for x in quantized)
    scores = dense_scores(case, stored_q, stored_k, q.bias)
    rows = visible(case, device).any(-1)
    p = torch.where(rows.unsqueeze(-1), scores.softmax(-1), 0.0)
    values = per_query_head(stored_v, case).double()
    expected, magnitude = p @ values, p @ values.abs()
    relative_step, absolute_step = HALF_STEP[case.recipe.compute]
    underflow = absolute_step * 2.0**-reference.P_OFFSET * p.amax(-1, keepdim=True) * (visible(case, device).double() @ values.abs())
    slack = 2.0**-21 * (1 + scores.masked_fill(scores == -torch.inf, 0.0).abs().amax(-1, keepdim=True))
    bound = relative_step * magnitude + underflow + slack * magnitude
    if v.mean is not None:
        mean = torch.where(rows.unsqueeze(-1), per_query_head(v.mean, case).double().unsqueeze(-2), 0.0)
        expected, bound = expected + mean, bound + 2.0**-23 * mean.abs()
    assert ((out.double() - expected).abs() <= bound + 1e-30).all()
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


def integers(*shape: int, low: int, high: int, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float().to(device)


def stored(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Quantized, Quantized, Quantized]:
    """Numbers that e4m3 holds, with scales of one."""
    one = torch.ones(1, 1, 1, device=q.device)
    assert all(torch.equal(x.to(E4M3).float(), x) for x in (q, k, v))
    return (
        Quantized(q.to(E4M3), one, "tensor", "rows", q.shape[2]),
        Quantized(k.to(E4M3), one, "tensor", "rows", k.shape[2]),
        Quantized(values_layout(v.to(E4M3)), one, "tensor", "values", v.shape[2]),
    )


def powers_of_two(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integer scores from -7 to 7: with a softmax scale of ln 2 every P is a power of two, from 2^-6 to 2^8, that e4m3 holds."""
    q, k = integers(1, 2, 40, 16, low=-1, high=1, device=device, seed=0), integers(1, 2, 200, 16, low=-1, high=1, device=device, seed=1)
    q[..., 7:] = 0
    return q, k, integers(1, 2, 200, 24, low=-8, high=8, device=device, seed=2)


@pytest.mark.parametrize("compute", ("e4m3", "f16"))
@pytest.mark.parametrize("causal", ("none", "top_left", "bottom_right"))
@pytest.mark.parametrize("block_n", (1, 16, 48, 128, 512))
def test_pipeline_is_exact_where_probabilities_are(device: torch.device, block_n: int, causal: reference.Causal, compute: ComputeType) -> None:
    q, k, v = powers_of_two(device)
    out, lse = reference.pipeline(*stored(q, k, v), arithmetic=reference.Arithmetic(block_n, compute), causal=causal, scoring=BASE_TWO)
    exact, exact_lse = reference.attention(q, k, v, causal=causal, scoring=BASE_TWO, dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    # where a causal row sees nothing of a block m is -64, and float32 has steps of 2^-17 where the logarithm of its sum is
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=2**-18)


@pytest.mark.parametrize("compute, probability", (("e4m3", E4M3), ("f16", torch.float16)))
@pytest.mark.parametrize("below", (0.0, 0.25, 0.4375, 1.625, 3.25, 9.0, 13.0, 14.5, 15.0, 15.75, 17.0, 17.5, 18.0, 20.0))
def test_rounding_of_one_probability(device: torch.device, below: float, compute: ComputeType, probability: torch.dtype) -> None:
    """Of two keys, one `below` powers of two under the other: 2^8 stays, 2^(8 - below) is rounded in the sum with V, not in the divisor."""
    q, k, v = (torch.zeros(1, 1, n, 16, device=device) for n in (1, 2, 2))
    q[..., :2] = 1
    k[0, 0, 1, 0], k[0, 0, 1, 1] = -(below // 4 * 4), -(below % 4)
    v[0, 0, 0], v[0, 0, 1] = 1.0, -448.0
    exact = 2.0 ** (8 - below)
    rounded = float(torch.tensor(exact).to(probability))
    expected = (256.0 - 448.0 * rounded) / (256.0 + exact)
    # all keys at once, or in blocks with the larger first: the smaller is rounded
    for block_n in (1, 2):
        out, lse = reference.pipeline(*stored(q, k, v), arithmetic=reference.Arithmetic(block_n, compute), scoring=BASE_TWO)
        torch.testing.assert_close(out, torch.full_like(out, expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(1 + 2.0**-below)), rtol=1e-5, atol=1e-6)
    # in blocks with the smaller first: each is 2^8 when it is rounded
    out, _ = reference.pipeline(*stored(q, k.flip(2), v.flip(2)), arithmetic=reference.Arithmetic(1, compute), scoring=BASE_TWO)
    torch.testing.assert_close(out, torch.full_like(out, (256.0 - 448.0 * exact) / (256.0 + exact)), rtol=1e-5, atol=1e-6)


@given(largest=st.lists(st.one_of(st.floats(-600, 600), st.just(-math.inf)), min_size=1, max_size=40), keys=st.integers(1, 1 << 20))
def test_sums_of_p_are_bounded(largest: list[float], keys: int) -> None:
    """Whatever blocks' maxima are, all keys having the largest score of theirs: m is between its block's and the row's, and no further than FALL
    below the row's; what is 0 or more stays so."""
    m = torch.tensor(-math.inf, dtype=torch.float64)
    l, top = torch.zeros_like(m), -math.inf
    for i, score in enumerate(largest):
        m_new, top = reference.lowest(m).clamp(min=score), max(top, score)
        assert score <= m_new <= top and m_new >= top - reference.FALL and (m < 0 or m_new >= 0)
        if m_new > -math.inf:
            l = l * torch.exp2(m - m_new) + keys * torch.exp2(score - m_new + reference.P_OFFSET)
        m = m_new
        assert 0 <= l <= (i + 1) * keys * 2.0 ** (reference.FALL + reference.P_OFFSET)


def error_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> float:
    """Relative L2 error of the pipeline against exact attention."""
    quantized: Any = quantize(q, k, v, recipe)
    return relative(reference.pipeline(*quantized, arithmetic=reference.Arithmetic(128, recipe.compute))[0], reference.attention(q, k, v)[0])


COARSE = Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False)


def normal(device: torch.device, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 128, generator=generator).to(device) for n in (rows, length, length))
    return q, k, v


def test_error_on_normal_input(device: torch.device) -> None:
    """Measured: 0.051, and 0.046 with P in half, which leaves the error of the stored q, k and v."""
    q, k, v = normal(device, 1024, 1024)
    error = error_of(q, k, v, Recipe())
    assert 0.045 <= error <= 0.053
    assert error_of(q, k, v, Recipe(compute="f16")) < error


@pytest.mark.parametrize("dim, limit", ((64, 0.0367), (128, 0.0375)))
def test_error_of_int8_products(device: torch.device, dim: int, limit: float) -> None:
    """Measured: 0.0364 and 0.0372, most of it P's and V's e4m3; 0.028 with P in half."""
    q, k, v = (x[..., :dim] for x in normal(device, 1024, 1024))
    assert error_of(q, k, v, Recipe(qk="int8")) <= limit
    assert error_of(q, k, v, Recipe(qk="int8", compute="f16")) <= 0.029


def test_smoothing_helps_with_outlier_channels(device: torch.device) -> None:
    q, k, v = normal(device, 512, 512)
    k[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0], device=device)
    v[..., 9] += 50
    assert error_of(q, k, v, Recipe()) <= 0.5 * error_of(q, k, v, COARSE)
    for rougher in (Recipe(smooth_k=False), Recipe(smooth_v=False)):
        assert error_of(q, k, v, Recipe()) < error_of(q, k, v, rougher)


@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("rotate", (0, 16, 256))
@pytest.mark.parametrize("qk, part", (("e4m3", 0.4), ("int8", 0.9)))
def test_smoothing_helps_with_biased_queries(device: torch.device, qk: ProductType, part: float, rotate: Rotation, dim: int) -> None:
    """Measured at D 64: 0.150 becomes 0.027 (rotated by 16 channels 0.142, by all 0.129), int8's 0.062 0.023 (rotated 0.035); a bias of K changes
    none of them."""
    q, k, v = (x[..., :dim] for x in normal(device, 512, 512))
    bias = torch.tensor([10.0, -20.0, 30.0, -50.0], device=device)
    q, biased = q.clone(), k.clone()
    q[..., :4] += bias
    biased[..., :4] += bias
    recipe = Recipe(qk=qk, rotate=rotate)
    smooth = replace(recipe, smooth_q=True)
    for keys in (k, biased):
        assert error_of(q, keys, v, smooth) <= min(part * error_of(q, keys, v, recipe), 0.04)


def test_what_means_add_is_needed(device: torch.device) -> None:
    q, k, v = normal(device, 40, 40)
    recipe = Recipe(smooth_q=True)
    with pytest.raises(ValueError, match=r"q is smoothed and q\.bias is None"):
        reference.pipeline(quantize_q(q, recipe), *quantize_kv(k, v, recipe), arithmetic=BLOCKS)


@pytest.mark.parametrize("smooth_v", (False, True))
def test_error_on_values_of_one_sign(device: torch.device, smooth_v: bool) -> None:
    """Rounding errors of many keys average out, and the mean of V doesn't."""
    q, k, v = normal(device, 4096, 64)
    assert error_of(q, k, v.abs(), Recipe(smooth_v=smooth_v)) <= 0.005


@given(case=cases(distributions=MODERATE), parts=st.lists(st.integers(0, 300), max_size=5))
def test_combining_parts_of_the_keys(case: Case, parts: list[int], device: torch.device) -> None:
    """Some of them empty, some hidden from some rows."""
    q, k, v = case.tensors(device)
    borders = [0, *sorted(min(x, case.kv_length) for x in parts), case.kv_length]
    mask = case.attn_mask(device)
    mask = visible(case, device) if mask is None or mask.dtype == torch.bool else mask.expand(visible(case, device).shape)
    free = dataclasses.replace(case, mask="none")
    whole = attend(free, q, k, v, attn_mask=mask)
    results = [
        attend(free, q, k[:, :, start:stop], v[:, :, start:stop], attn_mask=mask[..., start:stop]) for start, stop in itertools.pairwise(borders)
    ]
    out, lse = reference.combine(torch.stack([x for x, _ in results]), torch.stack([x for _, x in results]))
    assert_same_pattern(lse, whole[1])
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole[1], rtol=1e-12, atol=1e-12)


def test_combining_nothing_and_nan(device: torch.device) -> None:
    outs = torch.ones(3, 4, 8, device=device)
    lses = torch.zeros(3, 4, device=device)
    outs[:, 0], lses[:, 0] = 0.0, -torch.inf
    outs[1, 1], lses[1, 1] = torch.nan, torch.nan
    outs[1:, 2], lses[1:, 2] = 0.0, -torch.inf
    out, lse = reference.combine(outs, lses)
    assert (out[0] == 0).all() and lse[0] == -torch.inf
    assert out[1].isnan().all() and lse[1].isnan()
    assert torch.equal(out[2], outs[0, 2]) and lse[2] == 0
    torch.testing.assert_close(lse[3], lses.new_tensor(3.0).log())


@given(case=cases(distributions=("normal", "channel bias")))
def test_smoothing_shift_restores_the_lse(case: Case, device: torch.device) -> None:
    """Float32's share: 2^-24 of the products that a shift adds up, a few times over."""
    q, k, v = (x.float() for x in case.tensors(device))
    mean = k.mean(2)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    _, lse = attend(case, q, k, v)
    _, smoothed = attend(case, q, k.double() - mean.double().unsqueeze(-2), v)
    shift = reference.smoothing_shift(q, mean, scale)
    assert shift.dtype == torch.float32 and shift.shape == lse.shape
    largest = float((q.abs() * per_query_head(mean, case).abs().unsqueeze(-2)).sum(-1).max()) * abs(scale)
    torch.testing.assert_close(smoothed + shift.double(), lse, rtol=0, atol=2.0**-20 * largest + 1e-12)


@pytest.mark.parametrize(
    "causal, q_length, kv_length, keys_seen",
    (
        ("none", 3, 5, (5, 5, 5)),
        ("top_left", 3, 5, (1, 2, 3)),
        ("bottom_right", 3, 5, (3, 4, 5)),
        ("none", 4, 2, (2, 2, 2, 2)),
        ("top_left", 4, 2, (1, 2, 2, 2)),
        ("bottom_right", 4, 2, (0, 0, 1, 2)),
        ("top_left", 3, 3, (1, 2, 3)),
        ("bottom_right", 3, 3, (1, 2, 3)),
    ),
)
def test_causal_alignment(causal: reference.Causal, q_length: int, kv_length: int, keys_seen: tuple[int, ...]) -> None:
    """Rows see the first keys, this many; also when only some rows and keys are asked about."""
    expected = torch.arange(kv_length) >= torch.tensor(keys_seen).unsqueeze(-1)
    rows, keys = torch.arange(q_length), torch.arange(kv_length)
    offset = reference.causal_offset(causal, q_length, kv_length)
    assert [max(min(row + offset + 1, kv_length), 0) for row in range(q_length)] == list(keys_seen)
    assert torch.equal(reference.hidden_keys(None, causal, rows, keys, q_length, kv_length), expected)
    assert torch.equal(reference.hidden_keys(None, causal, rows[1:], keys[1:], q_length, kv_length), expected[1:, 1:])


def test_hidden_keys_by_mask() -> None:
    rows, keys = torch.arange(2), torch.arange(3)
    allowed = torch.tensor([[True, False, True], [True, True, False]])
    bias = torch.tensor([[0.0, -torch.inf, 3.0], [-1e30, 2.0, -torch.inf]])
    for mask in (allowed, bias):
        assert torch.equal(reference.hidden_keys(mask, "none", rows, keys, 2, 3), ~allowed)
        assert torch.equal(reference.hidden_keys(mask[None, None], "none", rows, keys, 2, 3), ~allowed[None, None])
        with_causal = torch.tensor([[False, True, True], [False, False, True]])
        assert torch.equal(reference.hidden_keys(mask, "top_left", rows, keys, 2, 3), with_causal)
