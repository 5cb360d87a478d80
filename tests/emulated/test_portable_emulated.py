"""The portable CUDA kernel where there is no GPU: every rung and what is shipped, emulated, against the oracle that models it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulation
from closeness import assert_matches_pipeline
from emulated import H100, ROW_KINDS, Emulated, check, low_mask, normal, quantized
from forked import in_another_process
from fp8attn import Recipe
from fp8attn.cuda import portable
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.oracle import oracle
from fp8attn.cuda.portable import BEST, LADDER, PortableConfig
from fp8attn.prepare import call_of

pytestmark = pytest.mark.anywhere

RUNGS = {**LADDER[64], **BEST[64]}
GENERAL = next(c for c in portable.INSTANCES if c.general and c.operands == "registers" and c.head_dim == 64 and c.e4m3_p)
HALF_SUMS = dataclasses.replace(RUNGS["10 native e4m3"], half_sums=True, producers=0, persistent=False)
CONFIGS = {
    **{name: RUNGS[name] for name in ("1 wmma-qk", "3 wmma-pv", "9 fast exp", "10 native e4m3", "11 register operands", "12 int8 qk")},
    "drift": BEST[128]["11 register operands"],
    "general": GENERAL,
    "window": dataclasses.replace(RUNGS["11 register operands"], window=True),
    "int8 window, drift": dataclasses.replace(BEST[128]["12 int8 qk"], window=True),
    "softcap": dataclasses.replace(RUNGS["11 register operands"], window=True, softcap=True),
    "int8 softcap, drift": dataclasses.replace(BEST[128]["12 int8 qk"], window=True, softcap=True),
    "window, producers": dataclasses.replace(RUNGS["9 fast exp"], window=True),
    "int8, drift": BEST[128]["12 int8 qk"],
    "int8 general": dataclasses.replace(GENERAL, int8=True),
    "int8 native": dataclasses.replace(RUNGS["10 native e4m3"], int8=True),
    "half sums": HALF_SUMS,
    "half sums, shared rows": dataclasses.replace(HALF_SUMS, warps=8, splits=2, keys=128),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.one_in(4)
def test_matches_the_pipeline(emulated: Emulated, config: PortableConfig) -> None:
    dim = config.head_dim
    if config.window:
        options: dict = dict(softcap=7.5, sinks=torch.tensor([3.0, -torch.inf])) if config.softcap else dict(sinks=torch.tensor([3.0, -torch.inf]))
        check(emulated, config, normal((1, 2, 150, dim), (1, 1, 300, dim)), None, is_causal=True, **options)
        check(emulated, config, normal((1, 2, 150, dim), (1, 1, 70, dim)), window=(60, -1), **options)  # later rows see their sink
    if config.softcap:
        check(emulated, config, normal((1, 1, 20, dim), (1, 1, 700, dim)), splits=3, softcap=2.0)
        return
    check(emulated, config, normal((1, 2, 70, dim), (1, 1, 300, dim)))
    check(emulated, config, normal((1, 1, 150, dim), (1, 1, 150, dim)), is_causal=True)
    check(emulated, config, normal((1, 1, 20, dim - 24), (1, 1, 33, dim - 24)))
    check(emulated, config, normal((1, 1, 5, dim), (1, 1, 140, dim)), moved=3)
    if config.window:
        for window in ((0, 0), (40, 70), (130, -1), (500, 5)):
            check(emulated, config, normal((1, 2, 150, dim), (1, 1, 300, dim)), window=window, causal_alignment="bottom_right")
        check(emulated, config, normal((1, 1, 300, dim), (1, 1, 150, dim)), window=(60, -1))  # later rows see nothing
        check(emulated, config, normal((1, 1, 20, dim), (1, 1, 700, dim)), splits=3, window=(130, 0), causal_alignment="bottom_right")
        check(emulated, config, normal((1, 2, 1, dim), (1, 1, 700, dim)), None, window=(130, 0), is_causal=True, causal_alignment="bottom_right")
    if config.drift or config.producers:
        check(emulated, config, normal((1, 1, 20, dim), (1, 1, 900, dim)))  # stages are filled again and again
    if config.general or not config.fused:
        mask = torch.rand(1, 1, 40, 200, generator=torch.Generator().manual_seed(1)) > 0.3
        mask[:, :, 3] = False
        check(emulated, config, normal((1, 1, 40, dim), (1, 1, 200, dim)), attn_mask=mask)
        check(emulated, config, normal((1, 1, 40, dim), (1, 1, 200, dim)), recipe=Recipe(q="token", k="token"), scale=-0.1)
        # groups of queries with means of their own, the last one short; keys that rows of the bias are rounded up from
        check(emulated, config, normal((1, 2, 150, dim), (1, 1, 201, dim)), recipe=Recipe(smooth_q=True))
        check(emulated, config, normal((1, 1, 40, dim), (1, 1, 200, dim)), attn_mask=mask, recipe=Recipe(smooth_q=True, rotate=256), scale=-0.1)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNFUSED_FAST = dataclasses.replace(RUNGS["3 wmma-pv"], fast_exp=True)
TAKE_MASKS = {
    **{name: CONFIGS[name] for name in ("1 wmma-qk", "3 wmma-pv", "general", "int8 general")},
    "unfused, fast exp": UNFUSED_FAST,
    "0 scalar, fast exp": dataclasses.replace(RUNGS["0 scalar"], fast_exp=True),
    "half P": dataclasses.replace(GENERAL, e4m3_p=False),
    "half sums": dataclasses.replace(HALF_SUMS, general=True),
}


def assert_low_numbers_are_scores(emulated: Emulated, config: PortableConfig) -> None:
    recipe = Recipe(compute="e4m3" if config.e4m3_p else "f16")
    tensors = normal((1, 2, 40, config.head_dim), (1, 1, 200, config.head_dim))
    for dtype in DTYPES:
        check(emulated, config, tensors, exact=True, recipe=recipe, attn_mask=low_mask(ROW_KINDS, 40, 200, dtype, 1))
    # 1e8 times log2 e is where the sum of a score and P's offset may be rounded up
    check(emulated, config, tensors, exact=True, recipe=recipe, attn_mask=torch.linspace(-1.8e8, -9e7, 40)[:, None].repeat(1, 200))


@pytest.mark.parametrize("config", TAKE_MASKS.values(), ids=TAKE_MASKS)
@pytest.mark.one_in(4)
def test_low_numbers_of_masks_are_scores(emulated: Emulated, config: PortableConfig) -> None:
    assert_low_numbers_are_scores(emulated, config)


LOW_MUTANTS = {
    "the lowest overflow": ("tile/mask.h", "ptx::max_nan(more, LOWEST_SCORE)", "more"),
    "a lost offset": ("tile/online_softmax.h", "if (ANY_SIZE && any_large(m)) make_relative(factor, m, origin, s);", ""),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(LOW_MUTANTS.values())


@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", LOW_MUTANTS)
def test_the_emulation_sees_low_numbers_lost(name: str) -> None:
    mutant = Emulated(LOW_MUTANTS[name])
    mutant.library(GENERAL)
    with pytest.raises(AssertionError):
        assert_low_numbers_are_scores(mutant, GENERAL)


def test_rows_of_low_numbers_shared_by_ctas(emulated: Emulated) -> None:
    """An LSE of such a row doesn't tell of how many keys it is: each range of keys counts as often as it has any."""
    q, k, v = normal((1, 1, 20, 64), (1, 1, 700, 64))
    mask = low_mask(("lowest", "low", "numbers"), 20, 700, torch.float32, 2)
    mask[0, 650:] = -torch.inf
    operands = quantized(q, k, v, Recipe())
    call = call_of(*operands, attn_mask=mask, out_dtype=torch.float32, return_lse=True)
    (alone, lse), (shared, shared_lse) = (emulated(call, GENERAL, splits) for splits in (1, 3))
    low = lse < -1e4
    assert low.sum() == 14
    torch.testing.assert_close(shared[low], alone[low], rtol=0, atol=2e-6)
    torch.testing.assert_close(shared, alone, rtol=0, atol=0.02)  # P of other rows are rounded next to other maxima
    torch.testing.assert_close(shared_lse, lse, rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("keys, splits", ((32, 1), (64, 1), (64, 2), (128, 1), (128, 2)))
@pytest.mark.one_in(3)
def test_half_sums_never_overflow(emulated: Emulated, keys: int, splits: int) -> None:
    """All keys alike and V's largest code everywhere: P and every product are as large as they can be, and sums below 65504, but not half of it."""
    config = dataclasses.replace(HALF_SUMS, keys=keys, splits=splits, warps=4 * splits)
    assert portable.fits(config, H100) and 65504 / 2 < 448 * 2**config.p_offset * keys // splits <= 65504
    q, k, v = torch.zeros(1, 1, 20, 64), torch.ones(1, 1, 256, 64), torch.ones(1, 1, 256, 64)
    call = call_of(*quantized(q, k, v, Recipe(smooth_v=False)), out_dtype=torch.float32, return_lse=True)
    out, lse = emulated(call, config)
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, torch.tensor(256.0).log().item()))


@pytest.mark.parametrize("name", ("3 wmma-pv", "9 fast exp", "11 register operands", "general"))
def test_ctas_share_keys(emulated: Emulated, name: str) -> None:
    """By ranges, some of them empty: keys that don't go round, rows that see the first range only."""
    config = CONFIGS[name]
    check(emulated, config, normal((1, 2, 20, 64), (1, 2, 700, 64)), splits=3)
    check(emulated, config, normal((2, 1, 20, 64), (2, 1, 600, 64)), splits=5, is_causal=True)
    if config.general or not config.fused:
        check(emulated, config, normal((2, 2, 20, 64), (2, 1, 600, 64)), splits=3, recipe=Recipe(smooth_q=True))


@pytest.mark.parametrize(
    "q_length, options", ((1, {}), (1, dict(is_causal=True)), (1, dict(is_causal=True, causal_alignment="bottom_right")), (6, {}))
)
def test_heads_of_one_key_head_share_a_tile(emulated: Emulated, q_length: int, options: dict) -> None:
    config = RUNGS["11 register operands"]
    for recipe in (Recipe(q="block"), Recipe(q="token")):
        check(emulated, config, normal((2, 6, q_length, 64), (2, 2, 600, 64)), splits=None, recipe=recipe, **options)
    tensors = (torch.randn(2, q_length, 6, 64).transpose(1, 2), torch.randn(2, 2, 50, 64), torch.randn(2, 2, 50, 64))
    operands = quantized(*tensors, Recipe())
    call = call_of(*operands, out_dtype=torch.float32, enable_gqa=True, return_lse=True, **options)
    expected, expected_lse = oracle(operands, call, config)
    assert_matches_pipeline(emulated(call, config)[0], expected, False, expected_lse)


def test_nobody_sees_a_key(emulated: Emulated) -> None:
    """Zeros and an LSE of -inf, from one CTA and from several."""
    operands = quantized(*normal((1, 1, 4, 64), (1, 1, 600, 64)), Recipe())
    call = call_of(*operands, attn_mask=torch.zeros(1, 1, 4, 600).bool(), out_dtype=torch.float32, return_lse=True)
    for splits in (1, 3):
        out, lse = emulated(call, GENERAL, splits)
        assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_nan_stays_in_its_rows_through_the_combine(emulated: Emulated) -> None:
    q, k, v = (torch.randn(1, 1, length, 64, generator=torch.Generator().manual_seed(1)) for length in (4, 600, 600))
    v[0, 0, 500, 7] = torch.nan
    mask = torch.ones(1, 1, 4, 600).bool()
    mask[:, :, 2:, 500] = False
    call = call_of(*quantized(q, k, v, Recipe()), attn_mask=mask, out_dtype=torch.float32)
    out, _ = emulated(call, GENERAL, 3)
    assert out[0, 0, :2].isnan().all() and out[0, 0, 2:].isfinite().all()


@pytest.mark.parametrize("name", ("12 int8 qk", "int8 general", "int8 native"))
def test_int8_that_is_not_finite(emulated: Emulated, name: str) -> None:
    """NaN for the query itself and for the queries that see the key, and for no others."""
    q, k, v = (torch.randn(1, 1, length, 64, generator=torch.Generator().manual_seed(2)) for length in (300, 300, 300))
    q[0, 0, 20, 3] = torch.inf
    k[0, 0, 250, 5] = torch.nan
    operands = quantized(q, k, v, Recipe(qk="int8"))
    call = call_of(*operands, is_causal=True, recipe=Recipe(qk="int8"), out_dtype=torch.float32)
    out, _ = emulated(call, CONFIGS[name], 1)
    expected = torch.arange(300) >= 250
    expected[20] = True
    assert torch.equal(out[0, 0].isnan().any(-1), expected) and torch.equal(out[0, 0].isnan().all(-1), expected)


def read_guarded(config: PortableConfig) -> None:
    """Attention where nothing behind what is given can be read: to keys of which the last block, and each warp's part of it, is short; of one row
    by several CTAs."""
    recipe = Recipe(qk="int8" if config.int8 else "e4m3")
    emulated = Emulated()
    decode = dict(is_causal=True, causal_alignment="bottom_right")
    for q_shape, kv_shape, splits, options in (((1, 2, 20, 64), (1, 1, 300, 64), 1, {}), ((2, 4, 1, 64), (2, 2, 1100, 64), None, decode)):
        operands = quantized(*normal(q_shape, kv_shape), recipe)
        call = call_of(*operands, recipe=recipe, out_dtype=torch.float32, enable_gqa=True, **options)
        given = {name: emulation.guarded(getattr(call, name)) for name in ("q", "q_scale", "k", "k_scale", "v", "v_scale", "v_mean")}
        out, _ = emulated(dataclasses.replace(call, **given), config, splits)
        assert_matches_pipeline(out, oracle(operands, call, config, splits or cuda_run.splits_of(call, config, H100))[0], False)


@emulation.emulates
@pytest.mark.parametrize("name", ("3 wmma-pv", "9 fast exp", "11 register operands", "general", "12 int8 qk", "int8 general"))
@pytest.mark.one_in(6)
def test_reads_nothing_behind_its_tensors(name: str) -> None:
    """In a process of its own, which such a read ends."""
    in_another_process(f"import test_portable_emulated as test; test.read_guarded(test.CONFIGS[{name!r}])")
