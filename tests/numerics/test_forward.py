"""The kernels of every backend against the oracles and against PyTorch, and what must hold of any attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from conftest import GPU, Attention
from hypothesis import strategies as st

import fp8attn
from closeness import E4M3_STEP, assert_matches_pipeline, relative, score_step
from fp8attn import Quantized, Recipe, reference
from fp8attn.call import Call
from fp8attn.cuda import configs as hopper
from fp8attn.cuda import portable
from fp8attn.cuda.configs import ADDED_INSTANCES, INSTANCES, INT8_ADDED_INSTANCES, INT8_MASKED_INSTANCES, MASKED_INSTANCES
from fp8attn.cuda.render import Config
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import empty_rows, quantize, sample_size, sample_step
from fp8attn.recipe import FUSED_RECIPES, ProductType
from fp8attn.triton import configs
from running import run_call
from strategies import Case, alike, cases, given_several, noted

INT8 = Recipe(qk="int8")
SMOOTH_Q, INT8_SMOOTH_Q = Recipe(smooth_q=True), Recipe(smooth_q=True, qk="int8")


def quantized_call(case: Case, device: torch.device) -> tuple[tuple[Quantized, Quantized, Quantized], Call]:
    """Quantized by the definition: its kernels write the same bytes."""
    quantized = quantize(*case.tensors(device), case.recipe)
    return quantized, call_of(*quantized, **case.options(device), recipe=case.recipe, out_dtype=case.out_dtype, return_lse=True)


def run_case(case: Case, device: torch.device, sdpa: Attention, config: configs.Config | Config | None = None):
    """out, lse, the oracle's and the device that ran it."""
    quantized, call = quantized_call(case, device)
    properties = device_of(device)
    out, lse, *expected = run_call(quantized, call, properties, sdpa, config)
    return out, lse, *expected, properties


def run_by(sdpa: Attention, drawn: tuple[Case, ...]) -> Iterator[Case]:
    """The cases of an example, for Triton those alike."""
    return noted(alike(drawn) if sdpa.backend == "triton" else drawn)


def full_mask(case: Case, device: torch.device) -> torch.Tensor | None:
    """attn_mask (B, Hq, Sq, Sk) or None."""
    mask = case.attn_mask(device)
    return None if mask is None else mask.expand(case.batch, case.q_heads, case.q_length, case.kv_length)


@given_several(cases())
def test_matches_the_pipeline(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    for case in run_by(sdpa, drawn):
        quantized, call = quantized_call(case, device)
        properties = device_of(device)
        out, lse, oracle, oracle_lse = run_call(quantized, call, properties, sdpa)
        assert out.dtype == case.out_dtype and out.shape[3] == case.value_dim
        assert_matches_pipeline(out, oracle, properties.emulated, oracle_lse)
        # sums of rounded P move with every P that flips
        atol = 5e-3 if sdpa.backend == "triton" else E4M3_STEP
        atol = 1e-4 if properties.emulated else atol + score_step(quantized[0], quantized[1], call.softmax_scale)
        torch.testing.assert_close(lse, oracle_lse, rtol=1e-5 if properties.emulated else 1e-3, atol=atol)


@given_several(cases(), data=st.data())
def test_configs_agree(drawn: tuple[Case, ...], data: st.DataObject, device: torch.device, sdpa: Attention) -> None:
    """Any config that fits matches the oracle with its key blocks."""
    config: configs.Config | Config | None = None
    for case in run_by(sdpa, drawn):
        quantized, call = quantized_call(case, device)
        properties = device_of(device)
        if sdpa.backend == "cuda":
            able = [*portable.serving(call, properties)]
            if hopper.unsupported_call(call, properties) is None:
                int8 = hopper.INT8_INSTANCES + INT8_MASKED_INSTANCES + INT8_ADDED_INSTANCES
                instances = int8 if call.int8 else INSTANCES + MASKED_INSTANCES + ADDED_INSTANCES
                able += [c for c in instances if c.head_dim >= case.head_dim and c.value_dim >= case.value_dim and c.does(call)]
            config = data.draw(st.sampled_from(able))
        elif properties.emulated:
            rows = (16, 32, 64) if case.recipe.smooth_q else (16, 32, 64, 128)
            config = configs.PortableConfig(*(data.draw(st.sampled_from(x)) for x in (rows, (32, 64, 128))), 1, 1)
        elif config is None:
            config = data.draw(st.sampled_from(configs.candidates(call, properties)))
        out, _, oracle, oracle_lse = run_call(quantized, call, properties, sdpa, config)
        assert_matches_pipeline(out, oracle, properties.emulated, oracle_lse)


@given_several(cases(distributions=("normal", "outliers", "one sign", "channel bias")))
def test_is_as_close_to_pytorch_as_fp8_allows(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """Its error against F.sdpa in float32 is the oracle's, which is FP8 rounding and nothing else."""
    for case in run_by(sdpa, drawn):
        out, _, oracle, _, properties = run_case(dataclasses.replace(case, out_dtype=torch.float32), device, sdpa)
        q, k, v = (x.float() for x in case.tensors(device))
        options = case.options(device)
        alignment = options.pop("causal_alignment")
        mask = full_mask(case, device)
        if options["is_causal"] and alignment == "bottom_right":
            options["is_causal"] = False
            mask = torch.ones(case.q_length, case.kv_length, dtype=torch.bool, device=device).tril(case.kv_length - case.q_length)
            mask = mask.expand(case.batch, case.q_heads, -1, -1)
        if mask is not None:
            # PyTorch's efficient backend takes masks with a unit last stride only
            mask = mask.contiguous() if mask.dtype == torch.bool else mask.contiguous().float()
        options["attn_mask"] = mask
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        seen = expected.isfinite().all(-1, keepdim=True)  # PyTorch's math path gives NaN to rows without visible keys, others zeros
        out, oracle, expected = (x.masked_fill(~seen, 0) for x in (out, oracle, expected))
        assert relative(out, expected) <= 1.1 * relative(oracle, expected) + (1e-5 if properties.emulated else 2e-3)


@given_several(cases(distributions=("normal", "channel bias"), masks=("none", "causal", "bool")))
def test_error_is_fp8s_own(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """An absolute ceiling, so that oracle and kernel can't be wrong together: 2^-4 for each of the four rounded tensors."""
    drawn = tuple(dataclasses.replace(case, out_dtype=torch.float32, scale=None, recipe=Recipe()) for case in drawn)
    for case in run_by(sdpa, drawn):
        out, _, _, _, _ = run_case(case, device, sdpa)
        exact, _ = reference.attention(*case.tensors(device), full_mask(case, device), causal=case.causal, dtype=torch.float64)
        limit = 0.25 if case.distribution == "normal" else 0.5
        assert relative(out, exact) <= limit


@given_several(cases(distributions=("normal", "channel bias")), part=2)
def test_lse_against_float64(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """From end to end: scores of e4m3 operands are off by |q||k| / 16 at most, and so is the log of their exponentials' sum; rounded P add their
    own."""
    for case in noted(alike(drawn)):
        q, k, v = case.tensors(device)
        _, lse = sdpa(q, k, v, **case.options(device), return_lse=True, recipe=case.recipe)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        _, exact = reference.attention(q, k, v, full_mask(case, device), causal=case.causal, scoring=reference.Scoring(scale), dtype=torch.float64)
        assert torch.equal(lse.isinf(), exact.isinf())
        smoothed = k.double() - k.double().mean(2, keepdim=True) if case.recipe.smooth_k else k.double()
        bound = abs(scale) * float(q.double().norm(dim=-1).max() * smoothed.norm(dim=-1).max()) / 8 + (
            1e-3 if sdpa.backend == "triton" else E4M3_STEP
        )
        assert float((lse.double() - exact).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) <= bound


def exact_problem(device: torch.device, kv_length: int, seed: int, row_type: torch.dtype) -> tuple[Quantized, Quantized, Quantized]:
    """Small integers with scales of one: every score is exact however few bits the tensor core keeps."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float().to(device)

    q, k, v = integers(1, 2, 200, 64), integers(1, 2, kv_length, 64), integers(1, 2, kv_length, 64)
    one = torch.ones(1, 1, 1, device=device)
    values = fp8attn.import_kv(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn), 1.0, 1.0)[1]
    return (
        Quantized(q.to(row_type), one, "tensor", "rows", 200),
        Quantized(k.to(row_type), one, "tensor", "rows", kv_length),
        values,
    )


@pytest.mark.parametrize("row_type", (torch.float8_e4m3fn, torch.int8))
@pytest.mark.parametrize("is_causal", (pytest.param(False, marks=pytest.mark.compiles), True))
@pytest.mark.parametrize("kv_length", (96, 1000))
def test_exact_scores(device: torch.device, sdpa: Attention, kv_length: int, is_causal: bool, row_type: torch.dtype) -> None:
    """Where scores are exact, no P flips, and what is left is the tensor core's sum of one key block: 2^-13 a term at most."""
    q, k, v = exact_problem(device, kv_length, kv_length, row_type)
    call = call_of(q, k, v, is_causal=is_causal, out_dtype=torch.float32)
    out, _, expected, _ = run_call((q, k, v), call, device_of(device), sdpa)
    # of 1000 keys the model of 13-bit accumulators (reference.chained) is off by 1.00e-3
    assert relative(out, expected) <= (1e-6 if device_of(device).emulated else 1.1e-3)


@pytest.mark.parametrize("smooth", (pytest.param(False, marks=pytest.mark.compiles), True))
@pytest.mark.parametrize("value", (1.1, -300.0, 2.0**-20))
def test_constant_values_come_back_exactly(device: torch.device, sdpa: Attention, value: float, smooth: bool) -> None:
    q, k = (torch.randn(1, 2, 150, 64, device=device) for _ in range(2))
    v = torch.full((1, 2, 150, 40), value, device=device)
    out = sdpa(q, k, v, recipe=Recipe(smooth_v=smooth), is_causal=True)
    if smooth:
        assert torch.equal(out, v)
    else:
        torch.testing.assert_close(out, v, rtol=2.0**-4, atol=0.0)


@given_several(cases(distributions=("normal",), masks=("causal", "bottom right")))
def test_future_keys_cannot_matter(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """Bytes, scales and NaN behind the causal border change no bit before it."""
    drawn = tuple(dataclasses.replace(case, recipe=dataclasses.replace(case.recipe, k="token")) for case in drawn)
    for case in run_by(sdpa, drawn):
        q, k, v = quantize(*case.tensors(device), case.recipe)
        offset = reference.causal_offset(case.causal, case.q_length, case.kv_length)
        row = case.q_length // 2
        border = max(row + offset + 1, 0)  # rows up to `row` see keys before it
        options = dict(is_causal=True, causal_alignment=case.causal, enable_gqa=True, return_lse=True, recipe=Recipe(compute=case.recipe.compute))
        k_data, k_scale = empty_rows(k.data, k.data.dtype), k.scale.clone()  # not clone(): with other strides another kernel may run
        k_data.copy_(k.data)
        k_data.view(torch.uint8)[:, :, border:] ^= 0x55
        k_scale[:, :, border:] = torch.nan
        after = sdpa(q, dataclasses.replace(k, data=k_data, scale=k_scale, mean=None), v, **options)
        before = sdpa(q, dataclasses.replace(k, mean=None), v, **options)
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[:, :, : row + 1], y[:, :, : row + 1])


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("where", ("query", "key", "value"))
@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize(
    "recipe",
    (
        *(Recipe(), INT8, Recipe(qk="int8", k="token"), SMOOTH_Q),
        *(pytest.param(recipe, marks=pytest.mark.compiles) for recipe in (Recipe(qk="int8", k="head", q="tensor"), INT8_SMOOTH_Q)),
    ),
    ids=str,
)
@pytest.mark.one_in(8)
def test_nan_reaches_the_rows_that_attend_and_no_others(
    device: torch.device, sdpa: Attention, recipe: Recipe, where: str, bad: float, is_causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, 200, 64, generator=generator).to(device) for name in ("query", "key", "value")}
    tensors[where][0, 1, 77, 5] = bad
    out, lse = sdpa(*tensors.values(), is_causal=is_causal, recipe=recipe, return_lse=True)
    expected = torch.zeros(1, 2, 200, dtype=torch.bool, device=device)
    if where == "query":
        expected[0, 1, 77] = True
    else:
        expected[0, 1, 77 if is_causal else 0 :] = True
    assert torch.equal(out.isnan().any(-1), expected) and torch.equal(out.isnan().all(-1), expected) and torch.equal(lse.isnan(), expected)
    exact = fp8attn.reference_sdpa(*tensors.values(), is_causal=is_causal)
    assert relative(out[~expected], exact[~expected]) < 0.08  # marks change nothing else


@pytest.mark.parametrize("recipe", (Recipe(), INT8), ids=str)
def test_nan_that_a_mask_hides(device: torch.device, sdpa: Attention, recipe: Recipe) -> None:
    """A cache's keys behind the end of what is valid may be anything; so may a query that sees no key."""
    q, k, v = (torch.randn(1, 2, 200, 64, device=device) for _ in range(3))
    mask = torch.ones(200, 200, dtype=torch.bool, device=device)
    mask[:, 150:] = False
    mask[3] = False
    expected = sdpa(q, k.clone(), v, mask, recipe=dataclasses.replace(recipe, smooth_k=False, smooth_v=False))
    k[:, :, 150:190], k[:, :, 190:] = torch.nan, 0
    q[:, :, 3] = torch.nan
    out = sdpa(q, k, v, mask, recipe=dataclasses.replace(recipe, smooth_k=False, smooth_v=False))
    assert out.isfinite().all() and (out[:, :, 3] == 0).all()
    assert relative(out[:, :, 4:], expected[:, :, 4:]) < 0.05


def test_nan_in_e4m3_of_the_users_own(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (torch.randn(1, 1, 150, 64, device=device).to(torch.float8_e4m3fn) for _ in range(3))
    v.view(torch.uint8)[0, 0, 100, 7] = 0xFF
    out = sdpa(q, k, v, is_causal=True, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    assert not out[:, :, :100].isnan().any() and out[:, :, 100:].isnan().all()


def test_rows_without_keys_are_zero(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (torch.randn(2, 2, n, 64, device=device) for n in (130, 70, 70))
    mask = torch.ones(130, 70, dtype=torch.bool, device=device)
    mask[3] = False
    out, lse = sdpa(q, k, v + 5, mask, return_lse=True)
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -torch.inf).all() and lse[:, :, 4].isfinite().all()
    out, lse = sdpa(q, k, v + 5, is_causal=True, causal_alignment="bottom_right", return_lse=True)
    assert (out[:, :, :60] == 0).all() and (lse[:, :, :60] == -torch.inf).all() and lse[:, :, 60:].isfinite().all()


@pytest.mark.parametrize("dim", (16, 64, 128))
@pytest.mark.parametrize("kv_length", (1, 2, 128, 129))
@pytest.mark.one_in(3)
def test_loops_of_one_turn(device: torch.device, sdpa: Attention, kv_length: int, dim: int) -> None:
    """A mask and few keys: every loop over keys but one is empty, and what one key block leaves unfinished must not reach the output."""
    generator = torch.Generator().manual_seed(kv_length)
    q, k, v = (torch.randn(2, 3, n, dim, generator=generator).to(device) for n in (299, kv_length, kv_length))
    mask = (torch.rand(2, 3, 299, kv_length, generator=generator) < 0.7).to(device)
    for _ in range(3 if device.type == "cuda" else 1):  # shared memory holds what the kernel before left there
        out, lse = sdpa(q, k, v, mask, return_lse=True)
        exact, exact_lse = reference.attention(q, k, v, mask)
        assert torch.equal(lse.isinf(), exact_lse.isinf()) and relative(out, exact) <= 0.1
        assert (out[~mask.any(-1)] == 0).all()


@pytest.mark.parametrize("shape", ((2, 3, 5, 0), (2, 3, 0, 5), (0, 3, 5, 5), (1, 1, 1, 1)))
def test_empty_and_single(device: torch.device, sdpa: Attention, shape: tuple[int, int, int, int]) -> None:
    batch, heads, q_length, kv_length = shape
    q, k, v = (torch.randn(batch, heads, n, 64, device=device) for n in (q_length, kv_length, kv_length))
    out, lse = sdpa(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    if kv_length == 0:
        assert (out == 0).all() and (lse == -torch.inf).all()
    if shape == (1, 1, 1, 1):
        torch.testing.assert_close(out, v)


@given_several(cases(distributions=("normal", "outliers")), part=2)
def test_deterministic_and_layouts_bitwise_equal(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """From end to end."""
    for case in noted(alike(drawn)):
        results = []
        for layout in ("bhsd", "bshd", "padded", *(["bhsd"] if device.type == "cuda" else [])):  # the interpreter has one order
            q, k, v = dataclasses.replace(case, layout=layout).tensors(device)
            results.append(sdpa(q, k, v, **case.options(device), recipe=case.recipe, return_lse=True))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@given_several(cases(distributions=("normal",), masks=("none", "causal", "bool broadcast")), part=2)
def test_batches_and_heads_are_independent(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """From end to end, bit for bit, unless a scale covers the whole tensor; or CTAs share a tile, for which keys are too few here."""
    for case in noted(alike(drawn)):
        granularity = {"tensor": "head"}
        recipe = dataclasses.replace(case.recipe, **{name: granularity.get(getattr(case.recipe, name), getattr(case.recipe, name)) for name in "qkv"})
        q, k, v = case.tensors(device)
        options = case.options(device)
        whole = sdpa(q, k, v, **options, recipe=recipe)
        b, h = case.batch - 1, case.kv_heads - 1
        heads = slice(h * case.group, (h + 1) * case.group)
        alone = sdpa(q[b : b + 1, heads], k[b : b + 1, h : h + 1], v[b : b + 1, h : h + 1], **options, recipe=recipe)
        assert torch.equal(whole[b : b + 1, heads], alone)


@pytest.mark.parametrize("qk", ("e4m3", pytest.param("int8", marks=pytest.mark.compiles)))
def test_permuting_keys_with_their_values(device: torch.device, qk: ProductType) -> None:
    """Changes the order of rounding, nothing else: with half operands next to nothing. K's mean would be that of other keys."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 300, 64, generator=generator).to(device) for _ in range(3))
    order = torch.randperm(300, generator=generator).to(device)
    recipe = Recipe(k="head", compute="f16", qk=qk, smooth_k=False)
    straight = fp8attn.triton_sdpa(q, k, v, recipe=recipe)
    permuted = fp8attn.triton_sdpa(q, k[:, :, order], v[:, :, order], recipe=recipe)
    assert relative(permuted, straight) <= 2e-3


@pytest.mark.parametrize("recipe", (Recipe(), INT8), ids=str)
def test_adding_a_constant_to_keys(device: torch.device, sdpa: Attention, recipe: Recipe) -> None:
    """Smoothing takes it away, bit for bit where float32 can: all numbers are multiples of 2^-6 below 64, means integers, also rotated."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randint(-64, 65, (1, 2, 256, 64), generator=generator).float().to(device) / 64 for _ in range(3))
    step, half = sample_step(256), sample_size(256) // 2
    k[:, :, step * half :: step] = -k[:, :, : step * half : step]
    out = sdpa(q, k, v, recipe=recipe)
    moved = sdpa(q, k + torch.arange(64.0, device=device), v, recipe=recipe)
    assert torch.equal(out, moved)
    rough = sdpa(q, k + torch.arange(64.0, device=device), v, recipe=dataclasses.replace(recipe, smooth_k=False))
    assert relative(rough, out) > 0.05


@pytest.mark.parametrize("recipe", (SMOOTH_Q, INT8_SMOOTH_Q), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.one_in(2)
def test_adding_a_constant_to_queries(device: torch.device, sdpa: Attention, recipe: Recipe, is_causal: bool) -> None:
    """Smoothing takes it away, as queries come and beside keys that are quantized already; and of the LSE nothing is missing."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, 200, 64, generator=generator).to(device) for _ in range(3))
    q[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0], device=device)
    exact, exact_lse = reference.attention(q, k, v, causal="top_left" if is_causal else "none")
    options = dict(is_causal=is_causal, return_lse=True)
    out, lse = sdpa(q, k, v, recipe=recipe, **options)
    # rotation alone makes int8 half as rough
    rough, rough_lse = sdpa(q, k, v, recipe=dataclasses.replace(recipe, smooth_q=False, rotate=0), **options)
    # a causal call's first rows are single values, and as exact as these without
    assert relative(out, exact) < (0.7 if is_causal else 0.5 if recipe.qk == "e4m3" else 0.75) * relative(rough, exact)
    assert (lse - exact_lse).abs().mean() < 0.5 * (rough_lse - exact_lse).abs().mean()
    quantized = fp8attn.quantize(q, k, v, recipe=recipe)
    assert torch.equal(sdpa(*quantized, out_dtype=q.dtype, **options)[0], out)
    # of keys that are quantized already their rounding is in what means add
    mixed, _ = sdpa(q, *quantized[1:], recipe=recipe, out_dtype=q.dtype, **options)
    restored = fp8attn.reference_sdpa(*quantized, is_causal=is_causal, out_dtype=q.dtype)
    for coarse in (mixed, restored):
        assert relative(coarse, exact) < 1.1 * relative(rough, exact)


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
@pytest.mark.parametrize("scores", ({}, {"sinks": 0.5}, {"softcap": 5.0}, {"is_causal": True, "window": (100, 0)}), ids=str)
def test_queries_beside_quantized_keys(device: torch.device, sdpa: Attention, qk: ProductType, scores: dict) -> None:
    """Quantized before attention or, by some kernels, inside of it: the answer is the same, and the LSE that of K with its mean."""
    generator, recipe = torch.Generator().manual_seed(3), FUSED_RECIPES[qk]
    q, k, v = (torch.randn(1, heads, n, 64, generator=generator).to(device, torch.bfloat16) for heads, n in ((4, 150), (2, 300), (2, 300)))
    k += 3
    options = scores | dict(enable_gqa=True, return_lse=True, recipe=recipe)
    if "sinks" in scores:
        options["sinks"] = torch.full((4,), scores["sinks"], device=device)
    query, key, value = quantize(q, k, v, recipe)
    out, lse = sdpa(q, key, value, out_dtype=torch.float32, **options)
    first, first_lse = sdpa(query, key, value, out_dtype=torch.float32, **options)  # that of queries as they were quantized
    # a cap applies to scores with K's mean, of queries as they were before rounding
    assert relative(out, first) < (0.04 if "softcap" in scores else 0.02)
    exact, exact_lse = fp8attn.reference_sdpa(q, k, v, out_dtype=torch.float32, **{name: x for name, x in options.items() if name != "recipe"})
    assert relative(out, exact) < min(1.05 * relative(first, exact), 0.08)
    assert relative(lse, exact_lse) < min(1.05 * relative(first_lse, exact_lse), 0.02)


@pytest.mark.parametrize("scores", ({}, {"softcap": 5.0}), ids=str)
def test_an_operator_quantizes_queries_first_where_no_kernel_does(device: torch.device, scores: dict) -> None:
    """Its LSE includes K's mean, whoever quantizes."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 72, generator=generator).to(device, torch.bfloat16) for n in (70, 200, 200))  # no CUDA kernel takes 72 channels
    query, key, value = quantize(q, k + 3, v, Recipe())
    expected = fp8attn.triton_sdpa(q, key, value, return_lse=True, **scores)
    call = call_of(query, key, value, return_lse=True, **scores)
    call = dataclasses.replace(call, q=q, q_scale=None, mean_scores=None, lse_mean=key.mean)
    for found, one in zip(fp8attn.ops.library_ops.auto_forward(*call.arguments), expected, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize(
    "layout, scale",
    (("bhsd", 0.1), *(pytest.param(*x, marks=() if GPU else pytest.mark.thorough) for x in (("bhsd", -0.1), ("bshd", 0.1))), ("bshd", -0.1)),
)
def test_smoothed_queries_of_shared_keys(device: torch.device, sdpa: Attention, layout: str, scale: float) -> None:
    """Heads and groups of queries each have means of their own; softmax scales of both signs."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(2, heads, n, 64, generator=generator).to(device) for heads, n in ((6, 150), (2, 130), (2, 130)))
    batches, heads, rows = torch.meshgrid(*(torch.arange(n, device=device) for n in (2, 6, 150)), indexing="ij")
    q += (batches + heads - rows / 50).unsqueeze(-1)
    q = q if layout == "bhsd" else q.transpose(1, 2).contiguous().transpose(1, 2)
    exact, _ = reference.attention(q, k, v, scoring=reference.Scoring(scale))
    assert relative(sdpa(q, k, v, recipe=SMOOTH_Q, scale=scale, enable_gqa=True), exact) < 0.07


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
@pytest.mark.parametrize("weight", (5.0, 14.0, 24.0))
@pytest.mark.one_in(2)
def test_keys_beside_a_sink(device: torch.device, sdpa: Attention, qk: ProductType, weight: float) -> None:
    """Nearly all weight is a key's whose value is zero, beside which e4m3 rounds other keys' P to zero: those of other blocks are as large as they
    can be. How small that makes the answer isn't looked at: it hangs on the rounding of one large score."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(device) for n in (70, 700, 700))
    q += 1
    k -= k.mean(-1, keepdim=True)  # so that only the sink knows what queries have in common
    k[:, :, 0] = math.log(2**weight) / 8
    v[:, :, :128] = 0
    exact, _ = reference.attention(q, k, v, dtype=torch.float64)
    out = sdpa(q, k, v, recipe=Recipe(qk=qk))
    assert relative(F.normalize(out.double(), dim=-1), F.normalize(exact, dim=-1)) < 0.08


def test_blocks_of_negative_scores(device: torch.device, sdpa: Attention) -> None:
    """After blocks with positive ones, and before. Where m is positive scores are compared as integers, of which the most negative is the largest."""
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (70, 900, 900))
    q += 1
    for sign in (1, -1):
        signed = k + 0.6 * sign * (torch.arange(900, device=device) // 128 % 2 * 2 - 1)[:, None]
        operands = quantize(q, signed, v, Recipe())
        call = call_of(*operands, out_dtype=torch.float32)
        out, _, oracle, _ = run_call(operands, call, device_of(device), sdpa)
        assert_matches_pipeline(out, oracle, device_of(device).emulated)
        assert relative(out, reference.attention(q, signed, v)[0]) < 0.07


@pytest.mark.parametrize("falls", (True, False))
@pytest.mark.parametrize("slope", (0.05, 0.5, 3.0))
@pytest.mark.one_in(2)
def test_steep_scores(device: torch.device, sdpa: Attention, falls: bool, slope: float) -> None:
    """From one block of 128 keys to the next they change by up to 2^550: nothing overflows, and the answer is that of the keys that count."""
    q, k, v = (torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (40, 1500, 1500))
    distance = torch.arange(1500.0, device=device)
    bias = slope * (-distance if falls else distance).expand(1, 1, 40, -1)
    exact, exact_lse = reference.attention(q, k, v, bias, dtype=torch.float64)
    out, lse = sdpa(q, k, v, attn_mask=bias, return_lse=True)
    assert relative(out, exact) < 0.08
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=0.1)
    # and of those behind keys of which none counts
    hidden = bias.masked_fill(distance < 700, -torch.inf)
    assert relative(sdpa(q, k, v, attn_mask=hidden), reference.attention(q, k, v, hidden, dtype=torch.float64)[0]) < 0.08


def test_long_rows_of_one_sign(device: torch.device, sdpa: Attention) -> None:
    """Sums of one sign don't shrink with length: what one accumulation in 13 bits loses."""
    length = 1024 if device.type == "cpu" else 65536
    q = torch.randn(1, 1, 64, 64, device=device, generator=torch.Generator(device).manual_seed(5))
    k, v = torch.randn(1, 1, length, 64, device=device), torch.randn(1, 1, length, 64, device=device).abs()
    for smooth_v in (True, False):
        out = sdpa(q, k, v, recipe=Recipe(smooth_v=smooth_v), out_dtype=torch.float32)
        assert relative(out, fp8attn.reference_sdpa(q, k, v)) <= 0.005


@pytest.mark.parametrize("size", (2.0**-14, 2.0**-5, 1.0, 16.0, 256.0))
def test_int8_scores_of_every_size(device: torch.device, sdpa: Attention, size: float) -> None:
    """Of either sign, and of keys whose blocks' scales lie far apart; causal, so that blocks are hidden whole."""
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (300, 301, 301))
    common = torch.ones(64, device=device)
    k *= torch.where(torch.arange(301, device=device) // 128 == 1, 20.0, 1.0)[:, None]
    for towards in (-1, 1):
        operands = quantize(size * (q + 2 * common), k + towards * common, v, Recipe(qk="int8", smooth_k=False))
        for causal in ("none", "top_left"):
            call = call_of(*operands, is_causal=causal == "top_left", out_dtype=torch.float32)
            out, _, oracle, lse = run_call(operands, call, device_of(device), sdpa)
            assert_matches_pipeline(out, oracle, device_of(device).emulated, lse)
