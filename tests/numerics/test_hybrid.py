"""Recipes that keep keys in half precision: the kernel against its definition, the whole against FP8 attention to the others, invariances."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import GPU, Attention
from hypothesis import strategies as st

import fp8attn
from closeness import assert_same_pattern, relative
from fp8attn import Recipe, hybrid, ops, reference
from fp8attn.device import device_of
from fp8attn.reference import HalfKeyCounts
from fp8attn.triton import half_keys as kernel
from strategies import Case, alike, cases, given_several, noted

MASKS = ("none", "causal", "bottom right")
KEPT = st.tuples(st.sampled_from((0, 0, 128, 256)), st.sampled_from((0, 128, 128, 256))).filter(any)
LENGTHS = st.one_of(st.integers(1, 90), st.integers(91, 700), st.sampled_from((128, 256, 384, 513)))


def drawn_cases(distributions: tuple[str, ...] = ("normal", "outliers", "channel bias", "one sign")) -> st.SearchStrategy:
    """Cases with a recipe that keeps keys, long enough that there are others."""

    def keeping(case: Case, kept: tuple[int, int], q_length: int, kv_length: int) -> Case:
        recipe = dataclasses.replace(case.recipe, sinks=kept[0], recent=kept[1])
        return dataclasses.replace(case, recipe=recipe, q_length=q_length, kv_length=kv_length, batch=1)

    return st.builds(keeping, cases(distributions=distributions, masks=MASKS), KEPT, LENGTHS, LENGTHS)


def rounding(case: Case, device: torch.device) -> float:
    """Of operands: P is rounded as V is; float32 is multiplied as TF32, which cuts off. The interpreter's bfloat16 is float32."""
    if device_of(device).emulated:
        return 2.0**-10 if case.dtype == torch.float16 else 2.0**-20
    return {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-9}[case.dtype]


def score_size(case: Case, q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest that the terms of a score may add up to."""
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return abs(scale) * float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max())


def score_error(case: Case, q: torch.Tensor, k: torch.Tensor, device: torch.device) -> float:
    """What scores may be off by: products of halves are exact."""
    return score_size(case, q, k) * (2.0**-10 if case.dtype == torch.float32 and not device_of(device).emulated else 2.0**-20)


def split(case: Case, recipe: Recipe) -> list[tuple[slice, str, slice, str]]:
    """Rows, their mask; their other keys, theirs."""
    parts = hybrid.parts(case.q_length, case.kv_length, case.causal)
    return [(rows, causal, *hybrid.fp8_keys(rows.stop - rows.start, case.kv_length, causal, recipe)) for rows, causal in parts]


def test_the_recipe_of_fp8_keys_is_made_once() -> None:
    for recipe in (Recipe(recent=128), Recipe(sinks=128, qk="int8"), Recipe(statistics="page")):
        assert recipe.of_fp8_keys is recipe.of_fp8_keys
        assert recipe.of_fp8_keys == dataclasses.replace(recipe, recent=0, sinks=0, statistics="sequence")
    assert Recipe().of_fp8_keys == Recipe()


@given_several(drawn_cases(), part=2)
def test_every_key_is_attended_to_once(drawn: tuple[Case, ...]) -> None:
    for case in noted(drawn):
        keys = torch.arange(case.kv_length)
        for rows, causal, others, fp8_causal in split(case, case.recipe):
            queries = torch.arange(rows.stop - rows.start)
            kept = reference.half_key_mask(queries, keys, causal, len(queries), case.kv_length, case.recipe.sinks, case.recipe.recent)
            assert fp8_causal in ("none", "bottom_right")
            seen = ~reference.hidden_keys(None, fp8_causal, queries, keys[others] - others.start, len(queries), others.stop - others.start)
            by_fp8 = torch.zeros_like(kept)
            by_fp8[:, others] = seen
            offset = reference.causal_offset(causal, len(queries), case.kv_length)
            assert torch.equal(kept ^ by_fp8, keys <= queries[:, None] + offset) and not (kept & by_fp8).any()


@given_several(drawn_cases())
def test_kernel_is_its_definition(drawn: tuple[Case, ...], device: torch.device) -> None:
    """Whatever the others' answer is that it is given, and whatever K lost."""
    for case in noted(alike(drawn)):
        q, k, v = case.tensors(device)
        generator = torch.Generator().manual_seed(case.seed)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        part = fp8attn.rotation.part_of(case.head_dim, case.recipe.rotate)
        mean = torch.randn(1, case.kv_heads, case.head_dim, generator=generator).to(device)
        others = torch.randn(1, case.q_heads, case.q_length, case.value_dim, generator=generator).to(device, case.out_dtype)
        shift = reference.smoothing_shift(q, mean, scale)
        lse = 3 * torch.randn(1, case.q_heads, case.q_length, generator=generator).to(device)
        nothing = torch.rand(lse.shape, generator=generator).to(device) < 0.1
        lse, others = lse.masked_fill(nothing, -math.inf), others.masked_fill(nothing.unsqueeze(-1), 0.0)
        given = others, lse - shift, fp8attn.rotation.rotate(mean, part)
        options = case.recipe.sinks, case.recipe.recent, scale
        out, found = ops.library_ops.half_keys(q, k, v, *given, part, *options, case.causal, torch.float32, True)
        sinks, recent, _ = options
        expected, expected_lse = reference.with_half_keys(
            q, k, v, (others, lse), HalfKeyCounts(sinks, recent), causal=case.causal, softmax_scale=scale, dtype=torch.float64
        )  # fmt: skip
        # what K lost is multiplied as exactly as float32
        of_scores = score_error(case, q, k, device) + score_size(case, q, mean.unsqueeze(-2)) * 2.0**-20
        assert relative(out, expected) <= rounding(case, device) + of_scores
        torch.testing.assert_close(found.double(), expected_lse, rtol=1e-5, atol=1e-5 + of_scores)


@given_several(drawn_cases(), part=4)
def test_is_fp8_and_half_precision_merged(drawn: tuple[Case, ...], device: torch.device, sdpa: Attention) -> None:
    """FP8 attention to the other keys, which is held to its oracle elsewhere, and the definition of the rest."""
    for case in noted(alike(drawn)):
        q, k, v = case.tensors(device)
        options = dict(scale=case.scale, enable_gqa=True, return_lse=True, out_dtype=torch.float32)
        mask = dict(is_causal=case.causal != "none", causal_alignment="bottom_right" if case.causal == "bottom_right" else "top_left")
        out, lse = sdpa(q, k, v, recipe=case.recipe, **options, **mask)
        expected, expected_lse = [], []
        for rows, causal, keys, fp8_causal in split(case, case.recipe):
            others = None
            if keys.start < keys.stop:
                others = sdpa(
                    q[:, :, rows], k[:, :, keys], v[:, :, keys], recipe=case.recipe.of_fp8_keys, **options,
                    is_causal=fp8_causal != "none", causal_alignment="bottom_right",
                )  # fmt: skip
            one, one_lse = reference.with_half_keys(
                q[:, :, rows], k, v, others, HalfKeyCounts(case.recipe.sinks, case.recipe.recent), causal=causal, softmax_scale=case.scale,
                dtype=torch.float64,
            )  # fmt: skip
            expected.append(one), expected_lse.append(one_lse)
        of_scores = score_error(case, q, k, device) + score_size(case, q, k) * 2.0**-20
        assert relative(out, torch.cat(expected, 2)) <= rounding(case, device) + of_scores
        want = torch.cat(expected_lse, -1)
        assert torch.equal(lse.isinf(), want.isinf())
        torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5 + of_scores)


def test_layers_that_look_back_gain(device: torch.device, sdpa: Attention) -> None:
    """Most of the weight on the last keys of each query: what is left is the few others' error."""
    generator = torch.Generator().manual_seed(0)
    length = 400
    q, k, v = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(3))
    q[..., 0], k[..., 0] = 8.0, torch.arange(length) / 16 - length / 16  # a score falls with every token
    q, k, v = (x.to(device, torch.float16) for x in (q, k, v))
    exact, _ = reference.attention(q, k, v, causal="top_left", dtype=torch.float64)
    found = [relative(sdpa(q, k, v, is_causal=True, recipe=recipe, out_dtype=torch.float32), exact) for recipe in (Recipe(), Recipe(recent=128))]
    assert found[0] > 0.03 and found[1] < found[0] / 8, found


def test_sinks_gain(device: torch.device, sdpa: Attention) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 500, 64, generator=generator) for _ in range(3))
    q, v = q + 1, v.clone()
    k[:, :, :4] = 10 / 8
    v[:, :, :4] /= 50
    q, k, v = (x.to(device, torch.float16) for x in (q, k, v))
    exact, _ = reference.attention(q, k, v, dtype=torch.float64)
    found = [relative(sdpa(q, k, v, recipe=recipe, out_dtype=torch.float32), exact) for recipe in (Recipe(), Recipe(sinks=128))]
    assert found[1] < found[0], found


@pytest.mark.parametrize("alignment", ("top_left", "bottom_right"))
def test_keeping_all_is_attention_in_half_precision(device: torch.device, sdpa: Attention, alignment: str) -> None:
    q, k, v = (torch.randn(1, 2, length, 64, device=device, dtype=torch.float16) for length in (300, 200, 200))
    options = dict(is_causal=True, causal_alignment=alignment)
    out = sdpa(q, k, v, recipe=Recipe(recent=256), **options)
    exact = fp8attn.reference_sdpa(q, k, v, **options)
    assert relative(out, exact) <= 1e-3
    if alignment == "top_left":
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=4e-3, atol=4e-3)


def test_what_keys_have_in_common_changes_nothing(device: torch.device, sdpa: Attention) -> None:
    """Scores of smoothed keys lack it, those of kept keys don't: both are weighed right."""
    q, k, v = (torch.randn(1, 1, 330, 64, device=device) for _ in range(3))
    common = 3 * torch.randn(64, device=device)
    for recipe in (Recipe(sinks=128, recent=128), Recipe(recent=128, rotate=256), Recipe(recent=128, qk="int8"), Recipe(recent=128, rotate=0)):
        errors = []
        for keys in (k, k + common):
            exact, exact_lse = reference.attention(q, keys, v, causal="top_left", dtype=torch.float64)
            out, lse = sdpa(q, keys, v, is_causal=True, recipe=recipe, return_lse=True)
            errors.append(relative(out, exact))
            assert float((lse - exact_lse).abs().max()) < 0.1
        assert errors[1] < 1.3 * errors[0] + 2e-3, errors


@pytest.mark.parametrize("what", ("q", "k", "v"))
@pytest.mark.parametrize("value", (math.nan, -math.inf))
@pytest.mark.one_in(2)
def test_not_finite(device: torch.device, sdpa: Attention, what: str, value: float) -> None:
    """Exactly the rows that attend to it come out NaN, whoever attends."""
    tensors = {name: torch.randn(4, 1, 300, 64, device=device, dtype=torch.float16) for name in "qkv"}
    for i, token in enumerate((5, 127, 150, 290)):
        tensors[what][i, 0, token, 7] = value
    q, k, v = (tensors[name] for name in "qkv")
    out, lse = sdpa(q, k, v, is_causal=True, recipe=Recipe(sinks=128, recent=128), return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, causal="top_left")
    assert_same_pattern(out, expected)
    assert torch.equal(lse.isnan(), expected_lse.isnan())


def test_rows_without_keys(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (torch.randn(1, 2, length, 64, device=device, dtype=torch.float16) for length in (300, 180, 180))
    out, lse = sdpa(q, k, v, is_causal=True, causal_alignment="bottom_right", recipe=Recipe(recent=128), return_lse=True)
    assert bool((out[:, :, :120] == 0).all()) and bool((lse[:, :, :120] == -math.inf).all())
    assert bool(lse[:, :, 120:].isfinite().all())
    for length in (0, 1):
        out, lse = sdpa(q, k[:, :, :length], v[:, :, :length], recipe=Recipe(sinks=128), return_lse=True)
        torch.testing.assert_close(out, v[:, :, :1].expand_as(out) if length else torch.zeros_like(out), rtol=2e-3, atol=1e-4)
        assert bool(lse.isinf().all()) == (length == 0)
    assert sdpa(q[:, :, :0], k, v, recipe=Recipe(recent=128)).shape == (1, 2, 0, 64)


@pytest.mark.compiles
def test_same_bits_again_and_from_any_layout(device: torch.device, sdpa: Attention) -> None:
    x = torch.randn(3, 1, 400, 2, 80, device=device, dtype=torch.float16)
    q, k, v = (y.transpose(1, 2) for y in x)
    k = k + 2
    options = dict(is_causal=True, recipe=Recipe(sinks=128, recent=128), return_lse=True)
    first = sdpa(q, k, v, **options)
    for others in ((q, k, v), tuple(y.contiguous() for y in (q, k, v)), tuple(F.pad(y, (0, 8))[..., :80] for y in (q, k, v))):
        again = sdpa(*others, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_operator(device: torch.device) -> None:
    if not ops.has_kernels(device):
        pytest.skip("no kernels")
    q, k, v = (torch.randn(1, heads, 200, 32, device=device, dtype=torch.float16) for heads in (4, 2, 2))
    lse, mean = torch.randn(1, 4, 200, device=device), torch.randn(1, 2, 32, device=device)
    for others in ((q, lse, mean), (q, lse, None), (None, None, None)):
        torch.library.opcheck(ops.library_ops.half_keys, (q, k, v, *others, 16, 128, 0, 0.2, "top_left", torch.float16, others[2] is not None))


def test_compiled_by_torch(device: torch.device) -> None:
    """One graph, the same bits."""
    q, k, v = (torch.randn(1, 2, 300, 64, device=device, dtype=torch.float16) for _ in range(3))
    backend = "auto" if GPU else "triton"

    def attention(q, k, v):
        return fp8attn.sdpa(q, k, v, is_causal=True, recipe=Recipe(recent=128), backend=backend)

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v))


SDPA = "auto" if GPU else "triton"


def test_explained(device: torch.device) -> None:
    q = torch.zeros(1, 2, 500, 64, device=device, dtype=torch.bfloat16)
    plan = fp8attn.explain(q, q, q, is_causal=True, recipe=Recipe(sinks=128, recent=256), backend=SDPA)
    assert plan.because[-1] == "128 first keys and 256 last ones in half precision, by Triton" and plan.kernel != "half_keys"
    plan = fp8attn.explain(q, q, q, is_causal=True, recipe=Recipe(recent=512), backend=SDPA)
    assert plan.kernel == "half_keys" and "there are no others" in plan.because


original_attend, original_half_keys = kernel.attend, kernel.attend_to_half_keys


@triton.jit
def attends_to_one_more(
    q, m, l, acc, lowest, keys, last, k, k_stride, v, v_stride, length, factor, sinks, recent,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    return original_attend(
        q, m, l, acc, lowest, keys, last, k, k_stride, v, v_stride, length, factor, sinks, recent + 1, DIM, VALUE_DIM, MASKED, CAREFUL
    )  # fmt: skip


@triton.jit
def never_masks(
    q, m, l, acc, lowest, keys, last, k, k_stride, v, v_stride, length, factor, sinks, recent,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    return original_attend(
        q, m, l, acc, lowest, keys, last + length, k, k_stride, v, v_stride, length, factor, length, recent, DIM, VALUE_DIM, MASKED, CAREFUL
    )  # fmt: skip


@triton.jit
def never_careful(
    q, k, k_stride, v, v_stride, rows, first_row, q_length, length, causal_offset, factor, sinks, recent,
    N: tl.constexpr, VALUE_WIDTH: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    return original_half_keys(
        q, k, k_stride, v, v_stride, rows, first_row, q_length, length, causal_offset, factor, sinks, recent, N, VALUE_WIDTH, DIM, VALUE_DIM, False
    )  # fmt: skip


@triton.jit
def forgets_the_mean(q, mean):
    return tl.zeros([q.shape[0]], tl.float32)


MUTANTS = {
    "one recent key more": ("attend", attends_to_one_more),
    "no mask": ("attend", never_masks),
    "K's mean forgotten": ("mean_scores", forgets_the_mean),
    "0 · NaN": ("attend_to_half_keys", never_careful),
}


@pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 330, 32, generator=generator) for _ in range(3))
    k = k + 1
    if name == "0 · NaN":  # of which all later rows are
        v[0, 0, 60] = math.nan

    def is_right() -> bool:
        out = fp8attn.triton_sdpa(q, k, v, is_causal=True, recipe=Recipe(recent=128), out_dtype=torch.float32)
        keys, _ = hybrid.fp8_keys(330, 330, "top_left", Recipe(recent=128))
        others = fp8attn.triton_sdpa(q, k[:, :, keys], v[:, :, keys], is_causal=True, causal_alignment="bottom_right", return_lse=True)
        expected, _ = reference.with_half_keys(q, k, v, others, HalfKeyCounts(0, 128), causal="top_left", dtype=torch.float64)
        return torch.equal(out.isnan(), expected.isnan()) and relative(out.nan_to_num(), expected.nan_to_num()) < 1e-5

    assert is_right()
    attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(kernel, attribute, mutant)
    assert not is_right()
