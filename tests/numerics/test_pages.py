"""Page-local quantization: what comes later changes nothing, chunks don't matter, and the error is FP8's own."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from closeness import assert_same_pattern, relative
from fp8attn import PRECISE, Recipe, pages, reference
from fp8attn.pages import PAGE, Pages, Sequence
from fp8attn.quantization import Statistics
from fp8attn.reference import Scoring
from paging import Problem, assert_attends, assert_equal_pages, bits, modelled, problems


def exact(problem: Problem) -> torch.Tensor:
    q, k, v = (x.unsqueeze(0) for x in problem.tensors())
    return reference.attention(q, k, v, causal="bottom_right", dtype=torch.float64)[0][0]


@given(problem=problems, share=st.floats(0, 1))
def test_later_tokens_change_no_bit(problem: Problem, share: float) -> None:
    q, k, v = problem.tensors()
    seen = int(share * problem.length)
    before = modelled(q, k, v, problem.recipe)
    for x in (q, k, v):
        x[:, seen:] = x[:, seen:] * 3 + 5
    after = modelled(q, k, v, problem.recipe)
    assert torch.equal(bits(before[0][:, :seen]), bits(after[0][:, :seen]))
    assert torch.equal(bits(before[1][:, :seen]), bits(after[1][:, :seen]))
    whole = seen // PAGE
    if whole:
        first, second = (pages.quantize_sequence(*(x[:, :n] for x in (k, v)), problem.recipe) for n in (whole * PAGE, problem.length))
        assert first is not None and second is not None
        assert_equal_pages(first[0], Pages(*(getattr(second[0], name)[:whole] for name in Pages.__dataclass_fields__)))


@given(problem=problems, cuts=st.lists(st.integers(1, 559), max_size=4))
def test_chunks_of_any_sizes_give_the_same_bits(problem: Problem, cuts: list[int]) -> None:
    """Each chunk sees what a cache would hold: whole pages quantized one by one, and the last tokens in half precision."""
    q, k, v = problem.tensors()
    expected = modelled(q, k, v, problem.recipe)
    edges = [0, *sorted({cut for cut in cuts if cut < problem.length}), problem.length]
    shared: Statistics | None = None
    kept: list[Pages] = []
    for first, last in itertools.pairwise(edges):
        for page in range(first // PAGE, last // PAGE):
            part = [x[:, page * PAGE : (page + 1) * PAGE].unsqueeze(0) for x in (k, v)]
            shared = pages.first_statistics(*part, problem.recipe) if shared is None else shared
            kept.append(pages.quantize_pages(*part, shared, problem.recipe))
        all_pages = Pages(*(torch.cat([getattr(page, name) for page in kept]) for name in Pages.__dataclass_fields__)) if kept else None
        start = first // PAGE * PAGE
        sequence = Sequence(all_pages, shared, k[:, start:last], v[:, start:last], start)
        out, lse = pages.attend(q[:, first:last], first, sequence, problem.recipe, Scoring(problem.dim**-0.5))
        assert torch.equal(bits(out), bits(expected[0][:, first:last]))
        assert torch.equal(bits(lse), bits(expected[1][:, first:last]))


@given(problem=problems)
def test_error_is_that_of_fp8(problem: Problem) -> None:
    problem = dataclasses.replace(problem, distribution="normal" if problem.distribution == "outliers" else problem.distribution)
    if problem.distribution == "biased" and not (problem.recipe.smooth_k and problem.recipe.smooth_v):
        return
    out, _ = modelled(*problem.tensors(), problem.recipe)
    assert relative(out, exact(problem)) < 0.09
    own = problem.length if problem.length < PAGE else PAGE
    assert relative(out[:, :own], exact(problem)[:, :own]) < 1e-5  # queries of the first page see half precision only


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
def test_exact_where_nothing_is_rounded(qk: str) -> None:
    """One key of each page and channels of +-1: what is left is float32's rounding, so scales, means and merging are right."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randint(0, 2, (2, 400, 64), generator=g) * 2.0 - 1 for _ in range(2))
    q = torch.zeros(4, 400, 64)
    q[..., 0] = 1.0
    recipe = Recipe(rotate=0, smooth_k=True, smooth_v=False, qk=qk)
    k[..., 1:] = 0.0
    k[:, :, 0] = 3.0  # the mean takes all of it: scores of pages are those of the mean alone
    out, lse = modelled(q, k, v, recipe)
    wanted, wanted_lse = reference.attention(*(x.unsqueeze(0) for x in (q, k, v)), causal="bottom_right", dtype=torch.float64)
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse[0], rtol=1e-5, atol=1e-5)


@given(x=st.floats(2.0**-100, 2.0**100, width=32))
@settings(max_examples=200)
def test_page_scale_is_the_smallest_power_of_two(x: float) -> None:
    scale = float(pages.page_scale(torch.tensor([x]))[0])
    assert math.frexp(scale)[0] == 0.5 and x / scale <= 448 < 2 * x / scale


def test_page_scale_of_nothing_is_one() -> None:
    assert float(pages.page_scale(torch.zeros(1))[0]) == 1.0
    assert bool(torch.isfinite(pages.page_scale(torch.tensor([torch.finfo(torch.float32).max]))).all())


@pytest.mark.parametrize("recipe", (Recipe(), PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("what", ("q", "k", "v"))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_exactly_the_rows_that_attend_to_it_are_nan(recipe: Recipe, what: str, value: float) -> None:
    for token in (5, 127, 128, 290):
        tensors = {name: torch.randn(1, 300, 32) for name in "qkv"}
        tensors[what][0, token, 7] = value
        out, lse = modelled(*(tensors[name] for name in "qkv"), recipe)
        wanted, wanted_lse = reference.attention(*(tensors[name].unsqueeze(0) for name in "qkv"), causal="bottom_right")
        assert_same_pattern(out.unsqueeze(0), wanted)
        assert torch.equal(lse.isnan(), wanted_lse[0].isnan())


def test_recipes_that_pages_do_not_take_say_why() -> None:
    assert pages.unsupported_recipe(Recipe()) is None and pages.unsupported_recipe(PRECISE) is None
    for changed in (dict(q="head"), dict(k="token"), dict(v="head"), dict(smooth_q=True), dict(compute="f16"), dict(sinks=128), dict(recent=128)):
        assert next(iter(changed)) in (pages.unsupported_recipe(Recipe(**changed)) or "")


PAGE_WISE = Recipe(statistics="page")


def drawn(device: torch.device, length: int, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, dim, generator=g).to(device, torch.float16) for heads in (4, 2, 2))
    return q, k + 1, v + 0.5


@pytest.mark.parametrize("backend", ("modelled", "triton"))
@pytest.mark.parametrize("recipe", (PAGE_WISE, dataclasses.replace(PRECISE, statistics="page")), ids=("e4m3", "int8"))
@pytest.mark.one_in(2)
def test_later_tokens_change_no_bit_of_a_causal_call(device: torch.device, recipe: Recipe, backend: str) -> None:
    """As they do with statistics of all tokens."""
    q, k, v = drawn(device, 300)
    options = dict(is_causal=True, enable_gqa=True, return_lse=True, backend=backend)
    before = fp8attn.sdpa(q, k, v, recipe=recipe, **options)
    by_sequence = fp8attn.sdpa(q, k, v, recipe=recipe.of_fp8_keys, **options)
    for x in (k, v):
        x[:, :, 200:] = 3 * x[:, :, 200:] + 5
    after = fp8attn.sdpa(q, k, v, recipe=recipe, **options)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, :, :200], y[:, :, :200]) and not torch.equal(x, y)
    assert not torch.equal(by_sequence[0][:, :, :200], fp8attn.sdpa(q, k, v, recipe=recipe.of_fp8_keys, **options)[0][:, :, :200])


@pytest.mark.parametrize("backend", ("modelled", "triton", "auto"))
@pytest.mark.parametrize("rows, alignment", ((300, "top_left"), (300, "bottom_right"), (140, "top_left"), (140, "bottom_right"), (3, "bottom_right")))
@pytest.mark.one_in(2)
def test_causal_calls_are_the_oracle_s(device: torch.device, rows: int, alignment: str, backend: str) -> None:
    q, k, v = drawn(device, 300)
    q = q[:, :, -rows:]
    options = dict(return_lse=True, backend=backend, out_dtype=torch.float32)
    found, lse = fp8attn.sdpa(q, k, v, is_causal=True, enable_gqa=True, causal_alignment=alignment, recipe=PAGE_WISE, **options)
    seen = rows if alignment == "top_left" else 300
    expected, expected_lse = pages.modelled(q, k[:, :, :seen], v[:, :, :seen], PAGE_WISE)
    if backend == "auto" and device.type == "cpu":  # which is exact there
        expected, expected_lse = reference.attention(q, k, v, causal=alignment)
    if backend == "modelled":
        assert torch.equal(found, expected) and torch.equal(lse, expected_lse)
    assert_attends(found, lse, (expected, expected_lse), torch.float16, device.type == "cpu")


def test_chunks_of_a_causal_call_are_those_of_a_cache(device: torch.device) -> None:
    """The last queries alone, with all keys: the same bits."""
    q, k, v = drawn(device, 300)
    options = dict(is_causal=True, enable_gqa=True, causal_alignment="bottom_right", recipe=PAGE_WISE, backend="modelled")
    whole = fp8attn.sdpa(q, k, v, **options)
    for rows in (1, 70, 200):
        assert torch.equal(fp8attn.sdpa(q[:, :, -rows:], k, v, **options), whole[:, :, -rows:])


def test_calls_without_tokens(device: torch.device) -> None:
    q, k, v = drawn(device, 9)
    out, lse = fp8attn.sdpa(q[:, :, :0], k, v, is_causal=True, enable_gqa=True, recipe=PAGE_WISE, return_lse=True, backend="modelled")
    assert out.shape == (2, 4, 0, 64) and lse.shape == (2, 4, 0)


def test_compiled(device: torch.device) -> None:
    q, k, v = drawn(device, 200)

    def attention(q, k, v):
        return fp8attn.sdpa(q + 1, k, v, is_causal=True, enable_gqa=True, recipe=PAGE_WISE, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), attention(q, k, v))


def test_explained(device: torch.device) -> None:
    q, k, v = drawn(device, 200)
    plan = fp8attn.explain(q, k, v, is_causal=True, enable_gqa=True, recipe=PAGE_WISE, backend="triton")
    assert (plan.backend, plan.kernel) == ("triton", "paged") and any("statistics of pages" in reason for reason in plan.because)


def test_integrations_take_it_for_causal_calls() -> None:
    """Other calls have the recipe without pages."""
    assert PAGE_WISE.of_call(False, True) is PAGE_WISE
    assert PAGE_WISE.of_call(False, False) == PAGE_WISE.of_call(True, True) == Recipe()
    assert Recipe(recent=128).of_call(False, False) == Recipe(recent=128) and Recipe(recent=128).of_call(True, True) == Recipe()
