"""Q that the Hopper kernel quantizes on its way: its codes, which calls it takes, its budget, and that it has the bits of quantizing first."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
import fp8attn
from closeness import SHARE_OFF_GRID, assert_rows_alike, on_grid
from emulated import Emulated, normal
from fp8attn import Recipe, reference
from fp8attn.call import HALVES, Problem
from fp8attn.cuda import configs
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import FUSED_Q_DIMS, FUSED_Q_INSTANCES, GROUPS, KEYS, ROWS
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize, quantize_kv
from fp8attn.recipe import FUSED_RECIPES, ProductType
from fp8attn.reference import Causal
from strategies import Case, cases

H100 = ARCHITECTURES[90]
EVERY = tuple(config for (_, _, fuse_q_quant), group in GROUPS.items() if fuse_q_quant for config in group)


@pytest.fixture(scope="module")
def queries() -> ctypes.CDLL:
    """The kernel's quantization of one tile, compiled for the CPU."""
    return emulation.library("queries.cpp")


def rows_of(kind: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(100, dim)"""
    x = torch.randn(100, dim, generator=torch.Generator().manual_seed(dim))
    if kind == "not finite":
        x[40, 3], x[41, dim - 1], x[42, 8], x[99] = torch.nan, torch.inf, -torch.inf, torch.nan
    elif kind == "subnormal":
        x *= torch.finfo(dtype).tiny / 8
    elif kind == "largest":
        x = torch.finfo(dtype).max * x.sign()
    x[50] = 0
    return x.to(dtype)


def assert_as_defined(queries: ctypes.CDLL, q: torch.Tensor, recipe: Recipe) -> None:
    """Of (100, dim), rows from the 36th on, of which the last tile has 64, then 28 and nothing behind them."""
    dim, dtype = q.shape[1], q.dtype
    padded = torch.full((100, dim + 8), 7.0, dtype=dtype)
    padded[:, :dim] = q
    expected = quantize(q[None, None], None, None, recipe)[0]
    assert expected is not None
    for first in (36, 72):
        scale, codes = torch.empty(ROWS), torch.empty(ROWS, dim, dtype=torch.uint8)
        at, *to = (ctypes.c_void_p(x.data_ptr()) for x in (padded, scale, codes))
        assert queries.queries(at, ctypes.c_int64(padded.stride(0)), first, 100, dim, dtype == torch.float16, recipe.qk == "int8", *to)
        rows = min(100 - first, ROWS)
        assert torch.equal(codes[:rows], expected.data[0, 0, first:].view(torch.uint8)), "codes differ"
        assert torch.equal(scale[:rows], expected.scale[0, 0, first:]), "scales differ"
        assert not codes[rows:].any() and (scale[rows:] == 1).all()


@pytest.mark.anywhere
@pytest.mark.parametrize("dim", sorted(FUSED_Q_DIMS))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ("normal", "not finite", "subnormal", "largest"))
@pytest.mark.parametrize("recipe", FUSED_RECIPES.values(), ids=FUSED_RECIPES.keys())
def test_a_tile_becomes_what_the_definition_says(queries: ctypes.CDLL, recipe: Recipe, kind: str, dtype: torch.dtype, dim: int) -> None:
    assert_as_defined(queries, rows_of(kind, dim, dtype), recipe)


INT8_MUTANTS = {
    "rows that aren't finite": ("if (INT8 && is_hidden(y[i])) codes", "if (false) codes"),
    "of another member": ("y[0] != y[0]) >> thread % 32 / team * team &", "y[0] != y[0]) >> thread % 32 &"),
    "rounded down": ("__fadd_rn(__fmul_rn(y[i], factor), ROUNDER)", "floorf(__fmul_rn(y[i], factor)) + ROUNDER"),
    "steps of e4m3": ("const float restores = row_scale_of<INT8>", "const float restores = scale_of"),
}


E4M3_MUTANTS = {
    "another row's scale": ("scale[row(known())]", "scale[row(0)]"),
    "another row's factor": ("__shfl_sync(~0u, inverse, 2 * i, team)", "__shfl_sync(~0u, inverse, i, team)"),
    "the largest of one lane": ("op(x[0], __shfl_xor_sync(~0u, x[0], TEAM / 2))", "x[0]"),
    "the largest of half a row": ("keeps_upper ? lower : upper, distance", "keeps_upper ? upper : lower, distance"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(("tile/quantize.h", *mutation) for mutation in (INT8_MUTANTS | E4M3_MUTANTS).values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, mutants in (("int8", INT8_MUTANTS), ("e4m3", E4M3_MUTANTS)) for name in mutants])
def test_the_emulation_sees_what_is_wrong(kind: ProductType, name: str) -> None:
    mutant = emulation.library("queries.cpp", ("tile/quantize.h", *(INT8_MUTANTS | E4M3_MUTANTS)[name]))
    with pytest.raises(AssertionError, match="differ"):
        assert_as_defined(mutant, rows_of("not finite", 128 if kind == "int8" else 64, torch.bfloat16), FUSED_RECIPES[kind])


def test_a_tile_that_does_not_exist_is_not_read(queries: ctypes.CDLL) -> None:
    """Neither its rows nor the one before the head, which is where it would begin."""
    q, scale, codes = torch.ones(100, 64, dtype=torch.bfloat16), torch.empty(ROWS), torch.empty(ROWS, 64, dtype=torch.uint8)
    head, *to = (ctypes.c_void_p(x.data_ptr()) for x in (q[1:], scale, codes))
    for consumer in range(4):
        assert queries.queries(head, ctypes.c_int64(64), consumer * ROWS - 1, 0, 64, False, consumer % 2 == 0, *to)
        assert not codes.any() and (scale == 1).all()


@pytest.mark.parametrize(
    "shape, dtype, value_dim, scale, reason",
    (
        ((1, 2, 64, 128), torch.bfloat16, 128, 0.1, None),
        ((1, 2, 64, 72), torch.bfloat16, 72, 0.1, "head dims are 72 and 72; it takes bfloat16 or float16, and 64 or 128 or 256 for both"),
        ((1, 2, 64, 128), torch.bfloat16, 64, 0.1, "head dims are 128 and 64"),
        ((1, 2, 64, 64), torch.float32, 64, 0.1, "query is torch.float32"),
        ((1, 2, 64, 64), torch.float16, 64, -0.1, "positive"),
    ),
)
def test_refusals_say_why(shape: tuple[int, ...], dtype: torch.dtype, value_dim: int, scale: float, reason: str | None) -> None:
    found = configs.unsupported_q_quant(torch.zeros(shape, dtype=dtype), value_dim, scale, "e4m3", H100)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
def test_no_mask_is_added_at_head_dim_256(qk: ProductType) -> None:
    """Its instance would spill; such a query is quantized before."""
    q, mask = torch.zeros(1, 2, 64, 256, dtype=torch.bfloat16), torch.zeros(1, 2, 64, 64)
    assert "no instance as large for such a query and mask" in (configs.unsupported_q_quant(q, 256, 0.1, qk, H100, mask) or "")
    assert configs.unsupported_q_quant(q, 256, 0.1, qk, H100, mask > 0) is None


def test_needs_rows_at_multiples_of_16_bytes_and_hopper() -> None:
    shifted = torch.zeros(1, 2, 64, 68, dtype=torch.bfloat16)[..., 4:]
    assert "query doesn't start at a multiple of 16 bytes" in (configs.unsupported_q_quant(shifted, 64, 0.1, "int8", H100) or "")
    aligned = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    assert "needs sm_90" in (configs.unsupported_q_quant(aligned, 64, 0.1, "e4m3", ARCHITECTURES[100]) or "")


def assert_bits_of_quantizing_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: str, scale: float, out_dtype: torch.dtype, recipe: Recipe
) -> None:
    """Output and LSE, NaN included."""
    device = device_of(q.device)
    if configs.unsupported_config(FUSED_Q_INSTANCES[0], device) is not None:
        pytest.skip("needs sm_90")
    assert configs.unsupported_q_quant(q, v.shape[3], scale, recipe.qk, device, mask) is None
    alignment = "bottom_right" if causal == "bottom_right" else "top_left"
    options: dict = dict(attn_mask=mask, is_causal=causal != "none", causal_alignment=alignment, scale=scale)
    call = call_of(*quantize(q, k, v, recipe), **options, enable_gqa=True, out_dtype=out_dtype, return_lse=True)
    expected = cuda_run.forward(call, device)
    actual = cuda_run.forward(dataclasses.replace(call, q=q, q_scale=None), device)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@given(case=cases(), recipe=st.sampled_from([*FUSED_RECIPES.values()]))
def test_has_the_bits_of_quantizing_first(case: Case, recipe: Recipe, device: torch.device) -> None:
    dim = {16: 64, 24: 64, 40: 64, 72: 128, 96: 128, 136: 256, 192: 256}.get(case.head_dim, case.head_dim)
    dtype = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
    case = dataclasses.replace(case, head_dim=dim, value_dim=dim, dtype=dtype, recipe=recipe)
    q, k, v = case.tensors(device)
    mask = case.attn_mask(device)
    if dim == 256 and configs.scores_of_mask(mask) == "added":
        assert "no instance as large for such a query and mask" in (configs.unsupported_q_quant(q, dim, 0.125, recipe.qk, H100, mask) or "")
        return
    assert_bits_of_quantizing_first(on_grid(q), k, v, mask, case.causal, abs(case.scale or 0.125), case.out_dtype, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", sorted(FUSED_Q_DIMS))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("recipe", FUSED_RECIPES.values(), ids=FUSED_RECIPES.keys())
def test_numbers_on_no_grid_are_rotated_as_a_tensor_core_adds(device: torch.device, recipe: Recipe, dtype: torch.dtype, dim: int) -> None:
    """Then now and then a code of a row is the next one."""
    q, k, v = (torch.randn(1, 4, 700, dim, generator=torch.Generator().manual_seed(n)).to(device, dtype) for n in range(3))
    if configs.unsupported_config(FUSED_Q_INSTANCES[0], device_of(device)) is not None:
        pytest.skip("needs sm_90")
    call = call_of(*quantize(q, k, v, recipe), out_dtype=torch.float32, return_lse=True)
    actual, expected = (cuda_run.forward(c, device_of(device)) for c in (dataclasses.replace(call, q=q, q_scale=None), call))
    assert_rows_alike(actual[0], expected[0], SHARE_OFF_GRID)


def some_blocks(rows: int, generator: torch.Generator, added: bool) -> torch.Tensor:
    """A mask (rows, 512) that shows every group of rows about half of the blocks of keys, and not all of their keys; bool, or numbers to be added."""
    blocks = torch.rand(-(-rows // ROWS), 512 // KEYS, generator=generator) < 0.5
    shown = blocks.repeat_interleave(ROWS, 0)[:rows].repeat_interleave(KEYS, 1) & (torch.rand(rows, 512, generator=generator) < 0.7)
    return torch.randn(rows, 512, generator=generator).masked_fill(~shown, -torch.inf).to(torch.bfloat16) if added else shown


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ("none", "top_left", "bottom_right"))
@pytest.mark.parametrize("keys", (500, 100))
@pytest.mark.parametrize("config", EVERY, ids=lambda c: c.name)
def test_one_tile_after_another(device: torch.device, config: configs.HopperConfig, keys: int, causal: str) -> None:
    """More tiles than CTAs, the last of them short, perhaps of one block, of which there are more in flight than consumers remember tiles; rows
    that aren't finite."""
    sm_count = device_of(device).sm_count
    generator = torch.Generator().manual_seed(1)
    heads, rows = 8, (sm_count // 2 + 7) * config.tile_rows - 5
    dtype = HALVES[config.consumers % 2]
    q, k, v = (torch.randn(1, heads, n, config.head_dim, generator=generator).to(device, dtype) for n in (rows, keys, keys))
    q = on_grid(q).transpose(1, 2).contiguous().transpose(1, 2)
    q[0, 1, 77, 5], q[0, 3, rows - 1, 0] = torch.nan, torch.inf
    if configs.unsupported_config(config, device_of(device)) is not None:
        pytest.skip("needs sm_90")
    if config.skips_blocks and causal != "none":
        pytest.skip("a call has a mask or is causal")
    options: dict = dict(is_causal=causal != "none", causal_alignment="bottom_right" if causal == "bottom_right" else "top_left")
    if config.skips_blocks:
        options["attn_mask"] = some_blocks(rows, generator, config.scores == "added").to(device)[:, :keys]
    if config.softcap:
        options["softcap"] = 20.0
    # the order in which what a mean adds to scores is summed is the kernel's own
    recipe = dataclasses.replace(FUSED_RECIPES["int8" if config.int8 else "e4m3"], smooth_k=not config.window)
    call = call_of(*quantize(q, k, v, recipe), **options, out_dtype=torch.bfloat16, return_lse=True)
    expected = cuda_run.forward(call, device_of(device), dataclasses.replace(config, fuse_q_quant=False))
    half = dataclasses.replace(call, q=q, q_scale=None)
    for _ in range(20):  # a bit that moves is a race
        for x, y in zip(cuda_run.forward(half, device_of(device), config), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", ("plain", "masked", "added"))
@pytest.mark.parametrize("recipe", FUSED_RECIPES.values(), ids=FUSED_RECIPES.keys())
def test_sdpa_quantizes_it_so(device: torch.device, recipe: Recipe, scores: configs.Scores) -> None:
    q, k, v = (torch.randn(1, 4, 700, 128, generator=torch.Generator().manual_seed(n)).to(device, torch.bfloat16) for n in range(3))
    q, k = on_grid(q), on_grid(k)
    if configs.unsupported_config(FUSED_Q_INSTANCES[0], device_of(device)) is not None:
        pytest.skip("needs sm_90")
    mask = None if scores == "plain" else some_blocks(700, torch.Generator().manual_seed(3), scores == "added").to(device).repeat(1, 2)[:, :700]
    options: dict = dict(is_causal=mask is None, attn_mask=mask)
    plan = fp8attn.explain(q, k, v, **options, recipe=recipe)
    assert plan.config in configs.instances(scores, recipe.qk == "int8", True)
    # not by default, though the same on Hopper: all is quantized first, and LSE's part of K's mean is of q as it came, too
    first = dataclasses.replace(recipe, two_level=True)
    assert fp8attn.explain(q, k, v, **options, recipe=first).config not in EVERY
    (out, lse), (expected, expected_lse) = (fp8attn.sdpa(q, k, v, **options, recipe=r, return_lse=True) for r in (recipe, first))
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)  # one kernel adds K's mean where the other has its own for it


def assert_lse_includes_mean(emulated: Emulated, dim: int, qk: ProductType, dtype: torch.dtype, causal: Causal, masked: bool = False) -> None:
    """Of several tiles and heads that share keys, a mean that is larger than what is left; also of rows that see no key. The output stays."""
    q, k, v = (x.to(dtype) for x in normal((2, 4, 230, dim), (2, 2, 200, dim)))
    key, value = quantize_kv(k + 5, v, FUSED_RECIPES[qk])
    mask = (torch.arange(200) != 7).expand(1, 1, 230, 200) if masked else None
    call = Problem(q, k, v, 0.1, qk, causal, dtype, True, mask).call_of(key, value)
    config = configs.choose(call, H100)
    assert config.mean_by_products != masked
    two_sms = dataclasses.replace(H100, sm_count=2)  # so that a CTA has several tiles
    (out, lse), (same, without) = (emulated(x, config, 1, two_sms) for x in (call, dataclasses.replace(call, lse_mean=None)))
    assert torch.equal(out, same) and torch.equal(lse.isinf(), without.isinf()) and lse.isinf().any() == (causal != "none")
    expected = reference.unsmoothed_lse(without, q, key.mean, 0.1, key.rotated)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-4)
    assert (lse - without).nan_to_num(nan=0.0).abs().max() > 1


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("causal, masked", [("none", False), ("bottom_right", False), ("none", True)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("qk", FUSED_RECIPES)
@pytest.mark.parametrize("dim", sorted(FUSED_Q_DIMS))
@pytest.mark.one_in(6)
def test_the_lse_includes_the_mean_of_keys(emulated: Emulated, dim: int, qk: ProductType, dtype: torch.dtype, causal: Causal, masked: bool) -> None:
    assert_lse_includes_mean(emulated, dim, qk, dtype, causal, masked)


MEAN_MUTANTS = {
    "of the first head": ("tile/seq_len.h", "p.kv_heads + tile.kv_head) * DIM", "p.kv_heads) * DIM"),
    "of other rows": ("tile/quantize.h", "row(i + member() / (team / 2))", "row(i)"),
    "of the first quarter": ("hopper_mainloop.h", " + QUARTER * queries.member(), p.lse_mean", ", p.lse_mean"),
    "of a lane": ("tile/quantize.h", "reduce_over_team<team>(of_quarter, member(), sum)", "of_quarter[0]"),
    "a part's unit": ("tile/quantize.h", "product * (unit * PART)", "product * unit"),
    "of the upper row": ("hopper_mainloop.h", "of_row[f.row], of_row[f.row + 8]", "of_row[f.row], of_row[f.row]"),
}
"""Of what K's mean adds to the LSE, where threads multiply by it."""

MEAN_BY_PRODUCTS_MUTANTS = {
    "of the first head": MEAN_MUTANTS["of the first head"],
    "of the first part": ("tile/quantize.h", "mean.columns[(thread ^ 8 * j) % (8 * PARTS)]", "mean.columns[(thread ^ 8 * j) % 8]"),
    "of half the channels": ("tile/quantize.h", "words[j % orders].z, words[j % orders].w", "words[j % orders].x, words[j % orders].y"),
    "of upper rows": ("tile/quantize.h", "sums[0] + sums[3] : product", "sums[0] : product"),
    "of the first round": ("tile/quantize.h", "product = mine == j ?", "product = j == 0 ?"),
    "of one part": ("tile/quantize.h", "distance < PARTS; distance *= 2) product +=", "distance < 1; distance *= 2) product +="),
    "of other rows": ("tile/quantize.h", "products[row(i + mine)] = product * unit", "products[row(i)] = product * unit"),
    "of the tile before": ("hopper_mainloop.h", "(shared.mean.columns[round % 2], p.score_scale", "(shared.mean.columns[0], p.score_scale"),
    "without signs": ("tile/rotate.h", "SIGNS >> (4 * lane + i) & 1 ? -x[i] : x[i]", "x[i]"),
}
"""The same where tensor cores do."""

LATE_MEAN_MUTANTS = {"never read": ("hopper_mainloop.h", "if constexpr (S::multiplies_late) find_mean_scores();", "")}
"""The same where they do while the first scores are computed."""

FOUR_PARTS_MUTANTS = {
    "parts in one order": ("tile/quantize.h", "(thread ^ 8 * j) %", "thread %"),
    "of two parts": ("tile/quantize.h", "first < PARTS; first += 2", "first < 2; first += 2"),
}
"""The same of four parts."""


WRONG_MEANS = (
    *((256, True, mutant) for mutant in MEAN_MUTANTS.items()),
    *((dim, False, mutant) for dim in (128, 256) for mutant in MEAN_BY_PRODUCTS_MUTANTS.items()),
    *((128, False, mutant) for mutant in LATE_MEAN_MUTANTS.items()),
    *((256, False, mutant) for mutant in FOUR_PARTS_MUTANTS.items()),
)
"""Head dim, whether there is a mask, and a mutant that the test above must see."""


def test_mutants_of_the_mean_change_what_is_there() -> None:
    emulation.assert_anchored([mutant for _, _, (_, mutant) in WRONG_MEANS])


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("dim, masked, mutant", [pytest.param(*wrong, id=f"{wrong[0]}-{wrong[1]}-{wrong[2][0]}") for wrong in WRONG_MEANS])
def test_the_emulation_sees_a_wrong_mean(dim: int, masked: bool, mutant: tuple[str, tuple[str, str, str]]) -> None:
    with pytest.raises(AssertionError, match="close"):
        assert_lse_includes_mean(Emulated(mutant[1]), dim, "e4m3", torch.bfloat16, "none", masked)
