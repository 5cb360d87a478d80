"""The Hopper kernel where there is no GPU: instances of every kind, emulated, against the oracle that models them; and broken so that only timing is
wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import emulation
from caps import capped_calls
from closeness import assert_matches_pipeline, on_grid
from emulated import H100, ROW_KINDS, Emulated, check, expected_of, low_mask, normal, quantized
from forked import in_another_process
from fp8attn import Recipe, reference, rotation
from fp8attn.call import HALVES, Call
from fp8attn.cuda import run
from fp8attn.cuda.configs import GROUPS, KEYS, ROWS, HopperConfig, Scores, instances
from fp8attn.device import Device
from fp8attn.prepare import call_of
from fp8attn.recipe import FUSED_RECIPES
from mutants import ADDED, EVERY, FINE_SOFTCAP_MUTANTS, GENERAL, INT8, MASKED, READY_MUTANTS, SOFTCAP, WINDOW

pytestmark = pytest.mark.anywhere

TWO_SMS = dataclasses.replace(H100, sm_count=2)
"""So that a CTA has several tiles."""


def of(scores: Scores, *shape: int, int8: bool = False, fuse_q_quant: bool = False) -> HopperConfig:
    """The instance for these scores with these head dims, and consumers if they are named, too."""
    able = (c for c in instances(scores, int8=int8, fuse_q_quant=fuse_q_quant) if c.scores == scores)
    return next(c for c in able if (c.head_dim, c.value_dim, c.consumers)[: len(shape)] == shape)


CHECKED = {
    "64, four consumers": of("plain", 64, 64, 4),
    "64, overlap": of("plain", 64, 64, 2),
    "96": of("plain", 96, 96, 3),
    "128, overlap": of("plain", 128, 128, 2),
    "192 and 128": of("plain", 192, 128),
    "192": of("plain", 192, 192),
    "256": of("plain", 256, 256, 1),
    "general 64": of("general", 64, 64),
    "general 256": of("general", 256, 256),
    "masked 64": of("masked", 64, 64),
    "masked 192": of("masked", 192, 192),
    "added 128": of("added", 128, 128),
    "added 256": of("added", 256, 256),
    "window 64": of("window", 64, 64, 4),
    "window 128": of("window", 128, 128, 3),
    "window 256": of("window", 256, 256, 2),
    "softcap 64": of("softcap", 64, 64, 4),
    "softcap 128": of("softcap", 128, 128, 3),
    "softcap 256": of("softcap", 256, 256, 2),
}
WITH_INT8 = "64, four consumers", "64, overlap", "96", "128, overlap", "192", "general 64", "masked 64", "added 128", "window 128", "softcap 128"
CHECKED |= {f"int8 {n}": of((c := CHECKED[n]).scores, c.head_dim, c.value_dim, c.consumers, int8=True) for n in WITH_INT8}

FUSED_Q = {
    "plain queries 64": of("plain", 64, 64, 4, fuse_q_quant=True),
    "plain queries 256": of("plain", 256, 256, 1, fuse_q_quant=True),
    "plain queries int8 128": of("plain", 128, 128, 2, fuse_q_quant=True, int8=True),
    "plain queries masked 128": of("masked", 128, 128, fuse_q_quant=True),
    "plain queries int8 added 64": of("added", 64, 64, fuse_q_quant=True, int8=True),
    "plain queries window 128": of("window", 128, 128, 2, fuse_q_quant=True),
    "plain queries softcap 64": of("softcap", 64, 64, 4, fuse_q_quant=True),
}


WINDOWS = (0, 0), (130, 0), (40, 70), (300, -1), (1000, 5)
"""Of one key; of keys of one or two blocks; some that end with the keys, or begin with them."""


def test_they_are_instances() -> None:
    shipped = {c for group in GROUPS.values() for c in group}
    assert shipped >= {*CHECKED.values(), *FUSED_Q.values()}


def shown(rows: int, keys: int) -> torch.Tensor:
    """(rows, keys), bool: of blocks of keys the first queries see one whole and some of others, the rest some of two; one block nobody; one query
    nothing."""
    row, block = torch.arange(rows)[:, None], torch.arange(keys) // KEYS
    first = row < ROWS
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(rows)) < 0.7
    mask = mask & torch.where(first, (block != 1) & (block != 4), block < 2) | first & (block == 0)
    mask[rows // 2] = False
    return mask


def added(rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(rows, keys, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return numbers.masked_fill(~shown(rows, keys), -torch.inf)


def tensors_of(config: HopperConfig, q_shape: tuple, k_shape: tuple, less: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the config's head dims, or of fewer channels; v's have means."""
    dim = config.head_dim - less
    q, k, v = normal((*q_shape, dim), (*k_shape, dim), config.value_dim - less)
    return q, k, v + torch.linspace(-3, 3, v.shape[3])


def assert_matches_under_caps(emulated: Emulated, config: HopperConfig) -> None:
    for operands, call in capped_calls(config, torch.device("cpu")):
        out, lse = emulated(call, config, device=TWO_SMS)
        expected, expected_lse = expected_of(operands, call, config, 1, TWO_SMS)
        assert_matches_pipeline(out, expected, True)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-2)


def assert_matches_the_pipeline(emulated: Emulated, config: HopperConfig) -> None:
    def held(q_shape: tuple, k_shape: tuple, less: int = 0, splits: int = 1, **options) -> torch.Tensor:
        return check(emulated, config, tensors_of(config, q_shape, k_shape, less), splits, device=TWO_SMS, exact=True, **options)

    if config.scores in ("plain", "general"):
        held((1, 2, 70), (1, 1, 300))
        held((2, 1, 600), (2, 1, 300), is_causal=True, out_dtype=torch.bfloat16)
        held((1, 1, 200), (1, 1, 130), less=16, is_causal=True, causal_alignment="bottom_right", out_dtype=torch.float16)
        held((1, 3, 400), (1, 1, 140))
    if config.int8 and config.scores == "plain":  # scores too large to stay sums
        q, k, v = tensors_of(config, (1, 1, 100), (1, 1, 300))
        check(emulated, config, (100 * q, k, v), device=TWO_SMS, exact=True)
    if config.scores == "plain":  # a warp whose steps are never int_max_ok, beside others whose are
        q, k, v = tensors_of(config, (1, 1, 100), (1, 1, 700))
        q[0, 0, 20, 3] = torch.nan
        check(emulated, config, (q, k, v), device=TWO_SMS, exact=True)
    if config.stream_k:
        held((1, 1, 60 + 2 * config.tile_rows), (1, 1, 1200), splits=2)
        held((1, 3, 40), (1, 3, 700), splits=5, sinks=torch.tensor([2.0, -torch.inf, 5.0]))
    if config.scores == "general":
        held((1, 2, 150), (1, 1, 201), recipe=Recipe(smooth_q=True))
        held((1, 1, 140), (1, 1, 300), recipe=Recipe(k="token"), scale=-0.1)
        held((1, 1, 140), (1, 1, 300), recipe=Recipe(k="token", smooth_q=True), attn_mask=shown(140, 300))
    sinks = torch.tensor([3.0, -torch.inf])
    options: dict = dict(softcap=7.5) if config.softcap else {}
    if config.scores in ("plain", "general", "window", "softcap"):
        held((1, 2, 300), (1, 1, 300), sinks=sinks, is_causal=True, **options)
    if config.scores in ("window", "softcap"):
        held((1, 2, 200), (1, 2, 70), sinks=sinks + 4, window=(60, -1), out_dtype=torch.bfloat16, **options)  # later rows see their sink
    if config.scores == "softcap":
        held((1, 1, 100), (1, 1, 300), softcap=0.5)
        held((1, 2, 300), (1, 1, 700), softcap=20.0, window=(130, 5), causal_alignment="bottom_right", recipe=Recipe(smooth_k=False))
        assert_matches_under_caps(emulated, config)
    if config.scores == "window":
        for window in WINDOWS:
            held((1, 2, 500), (1, 1, 700), window=window, causal_alignment="bottom_right")
        held((1, 1, 600), (1, 1, 200), window=(60, -1))  # later rows see nothing
        held((1, 1, 300), (1, 1, 700), is_causal=True, window=(150, -1), causal_alignment="bottom_right", out_dtype=torch.bfloat16)
    if config.scores == "masked":
        held((1, 2, 300), (1, 1, 700), attn_mask=shown(300, 700), sinks=sinks)
        held((2, 1, 300), (2, 1, 500), attn_mask=shown(2, 500)[:1])
    if config.scores == "added":
        held((1, 2, 300), (1, 1, 704), attn_mask=added(300, 704, torch.bfloat16))  # which boxes can be had of
        held((1, 2, 150), (1, 1, 300), attn_mask=added(150, 301, torch.float16)[:, 1:])
        held((1, 1, 150), (1, 1, 300), attn_mask=added(150, 300, torch.float32), recipe=Recipe(smooth_q=True), sinks=sinks[:1])
        for dtype in (torch.bfloat16, torch.float32):
            held((1, 1, 150), (1, 1, 304), attn_mask=low_mask(ROW_KINDS, 150, 304, dtype, 1))


@pytest.mark.parametrize("config", CHECKED.values(), ids=CHECKED)
@pytest.mark.one_in(4)
def test_matches_the_pipeline(emulated: Emulated, config: HopperConfig) -> None:
    assert_matches_the_pipeline(emulated, config)


def assert_nan_is_told(emulated: Emulated, config: HopperConfig) -> None:
    """NaN for the query itself that isn't finite and for the queries that see such a key, and for no others."""
    q, k, v = tensors_of(config, (1, 1, 300), (1, 1, 300))
    q[0, 0, 20, 3], k[0, 0, 250, 5] = torch.inf, torch.nan
    sees = torch.arange(300) >= 250
    causal: dict = dict(is_causal=True) if config.scores != "masked" else dict(attn_mask=torch.ones(300, 300).tril().bool())
    if config.scores == "window":  # whose last rows don't see the key; one before the first nonfinite key of a block is none of theirs
        k[0, 0, 150, 5] = torch.nan
        causal["window"], sees = (20, 0), (torch.arange(300) >= 250) & (torch.arange(300) <= 270)
        sees |= (torch.arange(300) >= 150) & (torch.arange(300) <= 170)
    if config.softcap:
        causal["softcap"] = 50.0
    out = check(emulated, config, (q, k, v), device=TWO_SMS, **causal)
    sees[20] = True
    assert torch.equal(out[0, 0].isnan().all(-1), sees)


@pytest.mark.parametrize(
    "name", ("int8 64, overlap", "int8 192", "int8 general 64", "int8 masked 64", "int8 window 128", "int8 softcap 128", "softcap 64")
)
@pytest.mark.one_in(3)
def test_what_is_not_finite(emulated: Emulated, name: str) -> None:
    assert_nan_is_told(emulated, CHECKED[name])


def broken(config: HopperConfig, *mutation: str) -> Emulated:
    """By a kernel that isn't right, but compiles."""
    file, right, wrong = mutation
    emulated = Emulated((file, right, wrong))
    emulated.library(config)
    return emulated


KINDS = {
    None: "64, four consumers",
    INT8: "int8 64, overlap",
    GENERAL: "general 64",
    MASKED: "masked 64",
    ADDED: "added 128",
    WINDOW: "window 128",
    SOFTCAP: "softcap 64",
}
MUTANTS = {name: mutant for name, mutant in EVERY.items() if mutant[0] in KINDS and not mutant[1].startswith("ptx/")}
MUTANTS |= {f"{SOFTCAP}: {name}": (SOFTCAP, *mutant) for name, mutant in FINE_SOFTCAP_MUTANTS.items()}


@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name: str) -> None:
    """As on a GPU."""
    kind, *mutation = MUTANTS[name]
    config = CHECKED[KINDS[kind]]
    emulated = broken(config, *mutation)
    with pytest.raises(AssertionError):  # noqa: PT012
        assert_matches_the_pipeline(emulated, config)
        if config.int8 or config.softcap:
            assert_nan_is_told(emulated, config)


@pytest.mark.parametrize("config", FUSED_Q.values(), ids=FUSED_Q)
@pytest.mark.one_in(3)
def test_plain_queries_have_the_bits_of_quantized_ones(emulated: Emulated, config: HopperConfig) -> None:
    # the order in which what a mean adds to scores is summed is the kernel's own
    recipe = dataclasses.replace(FUSED_RECIPES["int8" if config.int8 else "e4m3"], smooth_k=not config.window)
    for dtype, heads, causal in ((HALVES[0], 2, False), (HALVES[1], 1, config.scores == "plain")):
        q, k, v = (x.to(dtype) for x in tensors_of(config, (1, heads, 500), (1, 1, 300)))
        q = on_grid(q)
        q[0, 0, 77, 5] = torch.nan
        options: dict = dict(is_causal=causal, enable_gqa=True, out_dtype=torch.bfloat16, return_lse=True)
        if config.scores in ("window", "softcap"):
            options |= dict(window=(130, 20), is_causal=False, sinks=torch.arange(heads) - 1.0, softcap=7.5 if config.softcap else 0.0)
        elif config.scores != "plain":
            options["attn_mask"] = shown(500, 300) if config.scores == "masked" else added(500, 304, dtype)[:, :300]
        call = call_of(*quantized(q, k, v, recipe), recipe=recipe, **options)
        expected = emulated(call, dataclasses.replace(config, fuse_q_quant=False), 1, TWO_SMS)
        actual = emulated(dataclasses.replace(call, q=q, q_scale=None), config, 1, TWO_SMS)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ("plain queries 64", "plain queries window 128", "plain queries softcap 64"))
def test_scores_beside_plain_queries(emulated: Emulated, name: str) -> None:
    """The kernel itself computes what K's mean adds to scores; a launch before it does so of quantized queries."""
    config = FUSED_Q[name]
    q, k, v = (x.bfloat16() for x in tensors_of(config, (1, 2, 300), (1, 1, 200)))
    q, k = on_grid(q), k + 1
    operands = quantized(q, k, v, Recipe())
    options: dict = dict(is_causal=True, sinks=torch.tensor([1.0, 4.0]), softcap=7.5 if config.softcap else 0.0)
    call = call_of(*operands, enable_gqa=True, return_lse=True, out_dtype=torch.float32, **options)
    mean, rotated = operands[1].mean, operands[1].rotated
    assert mean is not None
    call = dataclasses.replace(call, mean_scores=reference.smoothing_shift(rotation.rotate_queries(q, rotated), mean, call.softmax_scale))
    assert call.mean_scores is not None and call.mean_scores.abs().max() > 1
    expected = emulated(call, dataclasses.replace(config, fuse_q_quant=False), 1, TWO_SMS)
    plain = dataclasses.replace(call, q=q, q_scale=None, mean_scores=None, lse_mean=mean)
    for x, y in zip(emulated(plain, config, 1, TWO_SMS), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", (CHECKED["192"], CHECKED["int8 64, overlap"], FUSED_Q["plain queries 64"]), ids=lambda c: c.name)
def test_same_bits_in_any_order(emulated: Emulated, config: HopperConfig) -> None:
    """Of warps, copies and products. A bit that moves is a race."""
    q, k, v = (x.bfloat16() for x in tensors_of(config, (1, 2, 700), (1, 2, 200)))
    recipe = FUSED_RECIPES["int8" if config.int8 else "e4m3"]
    call = call_of(*quantized(q, k, v, recipe), recipe=recipe, is_causal=True, out_dtype=torch.bfloat16)
    if config.fuse_q_quant:
        call = dataclasses.replace(call, q=q, q_scale=None)
    expected = emulated(call, config, device=TWO_SMS)[0]
    for _ in range(4):
        assert torch.equal(emulated(call, config, device=TWO_SMS)[0], expected)


@pytest.mark.parametrize("config", (CHECKED["128, overlap"], CHECKED["general 64"]), ids=lambda c: c.name)
def test_values_of_further_keys_change_nothing(emulated: Emulated, config: HopperConfig) -> None:
    """The first keys of a longer tensor, which end with a block or inside of one."""
    q, k, v = (x.bfloat16() for x in tensors_of(config, (1, 2, 200), (1, 2, 400)))
    for keys in (128, 256, 170):
        for causal in (False, True):
            call = call_of(*quantized(q, k, v, Recipe()), is_causal=causal, out_dtype=torch.bfloat16, return_lse=True)
            of_blocks = -(-keys // KEYS)
            call = dataclasses.replace(call, k=call.k[:, :, :keys], k_scale=call.k_scale[:, :, :of_blocks], kv_length=keys)
            first = call.v[..., : of_blocks * KEYS].contiguous()
            for x, y in zip(emulated(call, config, 1, TWO_SMS), emulated(dataclasses.replace(call, v=first), config, 1, TWO_SMS), strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)


def plain_call(heads: int, dim: int = 64, keys: int = 300, **options: Any) -> Call:
    """Of plain queries."""
    q, k, v = (x.bfloat16() for x in normal((2, 2 * heads, 400, dim), (2, heads, keys, dim)))
    operands = quantized(q, k, v, Recipe())
    call = call_of(*operands, enable_gqa=True, out_dtype=torch.bfloat16, return_lse=True, **options)
    return dataclasses.replace(call, q=q, q_scale=None, mean_scores=None, lse_mean=operands[1].mean)


def assert_waits(
    emulated: Emulated, config: HopperConfig = FUSED_Q["plain queries 64"], device: Device = TWO_SMS, heads: int = 3, **options: Any
) -> None:
    call = plain_call(heads, config.head_dim, **options)
    expected = emulated(call, config, None, device)
    for seed in range(4):  # head 0 is ready long before others with the last
        for x, y in zip(emulated.when_ready(call, config, device, seed), expected, strict=True):
            assert torch.equal(x, y)


def test_begins_with_heads_that_are_ready(emulated: Emulated) -> None:
    assert_waits(emulated)


def test_ranges_of_tiles_of_heads_that_are_ready(emulated: Emulated) -> None:
    """28 tiles are five rounds and three tiles, which five ranges of keys are made of."""
    config, five = FUSED_Q["plain queries 256"], dataclasses.replace(H100, sm_count=5)
    assert run.splits_of(plain_call(1, 256, 2000), config, five) == 5
    assert_waits(emulated, config, five, heads=1, keys=2000)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ("64", "window 128", "softcap 64"))
def test_scores_of_heads_that_are_ready(emulated: Emulated, name: str) -> None:
    """A launch that waits gets the window, the soft cap and the sinks of its call."""
    options: dict[str, Any] = dict(sinks=torch.linspace(-2, 3, 6))
    options |= {"64": {}, "window 128": dict(window=(130, 20)), "softcap 64": dict(softcap=7.5, window=(-1, 50))}[name]
    assert_waits(emulated, FUSED_Q[f"plain queries {name}"], **options)


@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("dim, name", [*((64, name) for name in READY_MUTANTS), *((256, name) for name in READY_MUTANTS if "mean" in name)])
def test_the_emulation_sees_who_does_not_wait(dim: int, name: str) -> None:
    config = FUSED_Q[f"plain queries {dim}"]
    with pytest.raises(AssertionError):
        assert_waits(broken(config, *READY_MUTANTS[name]), config)


def read_guarded() -> None:
    """Attention where nothing behind what is given can be read."""
    emulated = Emulated()
    for config in (*(CHECKED[name] for name in ("general 64", "masked 64", "added 256", "int8 64, overlap")), FUSED_Q["plain queries 64"]):
        q, k, v = (x.bfloat16() for x in tensors_of(config, (1, 2, 200), (1, 1, 300)))
        recipe = FUSED_RECIPES["int8" if config.int8 else "e4m3"]
        if config.scores == "general":
            recipe = Recipe(smooth_q=True, k="token")
        call = call_of(*quantized(q, k, v, recipe), recipe=recipe, enable_gqa=True, out_dtype=torch.float32)
        if config.scores == "masked":
            call = dataclasses.replace(call, attn_mask=shown(200, 300).expand(1, 2, 200, 300).contiguous())
        elif config.scores == "added":
            call = dataclasses.replace(call, attn_mask=added(200, 300, torch.float32).expand(1, 2, 200, 300).contiguous())
        if config.fuse_q_quant:
            call = dataclasses.replace(call, q=q, q_scale=None)
        names = ("q", "q_scale", "k", "k_scale", "v", "v_scale", "v_mean", "bias", "attn_mask")
        given = {name: emulation.guarded(getattr(call, name)) for name in names if getattr(call, name) is not None}
        guarded, expected = emulated(dataclasses.replace(call, **given), config)[0], emulated(call, config)[0]
        assert torch.equal(guarded, expected), config.name


@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_hopper_emulated as test; test.read_guarded()")


TIMING_MUTANTS = {
    "keys not waited for": ("64, overlap", "hopper_mainloop.h", "{ ptx::mbarrier_wait(&shared.k_full[at.stage], at.phase); };", "{};"),
    "values not waited for": (
        "64, overlap",
        "hopper_mainloop.h",
        "if constexpr (!S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);",
        "",
    ),
    "values not waited for behind scores": (
        "64, four consumers",
        "hopper_mainloop.h",
        "if constexpr (S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);",
        "",
    ),
    "scores read while they are made": ("64, overlap", "hopper_mainloop.h", "ptx::wgmma_wait<0>();\n      ptx::wgmma_touch(scores);", ""),
    "keys freed while scores are made": (
        "64, overlap",
        "hopper_mainloop.h",
        "ptx::wgmma_wait<0>();\n      ptx::wgmma_touch(scores);\n      if constexpr (!S::skips_blocks) {\n",
        "if constexpr (!S::skips_blocks) free_keys();\n      ptx::wgmma_wait<0>();\n"
        "      if constexpr (!S::skips_blocks) {\n        const auto free_keys = [] {};\n",
    ),
    "outputs read while they are made": (
        "64, overlap",
        "hopper_mainloop.h",
        "ptx::wgmma_wait<PENDING>();\n        ptx::wgmma_touch(fresh);\n        before_add();\n        rescale_and_add(o, alpha, fresh);",
        "before_add();\n        rescale_and_add(o, alpha, fresh);\n        ptx::wgmma_wait<PENDING>();",
    ),
    "products of a warp on a way of its own": (
        "64, overlap",
        "hopper_mainloop.h",
        "accumulate_pv(one, issue_next_qk, nothing);",
        "if (threadIdx.x / 32 % 4 == 2) accumulate_pv(one, issue_next_qk, nothing);\n        else accumulate_pv(one, issue_next_qk, nothing);",
    ),
    "values freed while they are multiplied": (
        "64, overlap",
        "hopper_mainloop.h",
        "behind();\n        ptx::wgmma_wait<PENDING>();",
        "if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);\n        behind();\n        ptx::wgmma_wait<PENDING>();\n"
        "        if (true) return rescale_and_add(o, alpha, fresh);",
    ),
    "the next scale written after values are said to be there": (
        "64, four consumers",
        "hopper_producer.h",
        "if constexpr (!S::prepares_late) shared.k_scale[stage].next = unit * next_scale;\n"
        "      ptx::mbarrier_expect(&shared.v_full[stage], KEYS * C.value_dim);",
        "ptx::mbarrier_expect(&shared.v_full[stage], KEYS * C.value_dim);\n"
        "      if constexpr (!S::prepares_late) shared.k_scale[stage].next = unit * next_scale;",
    ),
    "the next scale read where it may be another block's": (
        "64, four consumers",
        "hopper_mainloop.h",
        "accumulate_pv(none, [&] { k_scale = read(shared.k_scale[ring.stage].next); }, [&] { prepare(k_scale); });\n        issue_next_qk();",
        "accumulate_pv(none, nothing, nothing);\n        issue_next_qk();\n        prepare(read(shared.k_scale[ring.stage].next));",
    ),
    "queries freed while scores are made": (
        "64, four consumers",
        "hopper_mainloop.h",
        "softmax_step(after);\n    bool nonfinite",
        "if (elected) ptx::mbarrier_arrive(&shared.q_empty[consumer]);\n    softmax_step(after);\n"
        "    const bool elected = false;\n    bool nonfinite",
    ),
    "rows of the next tile too early": ("64, overlap", "hopper_mainloop.h", "ptx::warpgroup_sync(1 + consumer);  // channels'", "// channels'"),
    "an output stored before it is written": (
        "64, overlap",
        "tile/staged_output.h",
        "ptx::fence_proxy_async();\n      __syncwarp();",
        "ptx::fence_proxy_async();",
    ),
    "an output that engines don't see": ("64, overlap", "tile/staged_output.h", "ptx::fence_proxy_async();", ""),
    "ones that engines don't see": ("int8 64, overlap", "hopper.cuh", "ptx::fence_proxy_async();\n  __syncthreads();", "__syncthreads();"),
    "queries that engines don't see": (
        "plain queries 64",
        "hopper_mainloop.h",
        "      ptx::fence_proxy_async();\n    }\n  };",
        "    }\n  };",
    ),
    "an output written over while it is stored": ("192", "tile/staged_output.h", "first == 0 && !evenly", "false"),
    "bits freed before they are read": (
        "masked 64",
        "hopper_mainloop.h",
        "if (kv_block.hides(consumer)) shared.side",
        "free_keys();\n        if (kv_block.hides(consumer)) shared.side",
    ),
    "numbers of a mask freed before they are read": (
        "added 128",
        "tile/added_mask.h",
        "    if (p.mask_type == 1 + int(OutType::bf16))",
        "    free(consumer, at);\n    if (p.mask_type == 1 + int(OutType::bf16))",
    ),
}
"""Of an instance: file, what stands there, what it is broken into."""

WIDE_MUTANTS = {
    "parts added while they are made": ("int8 192", "tile/attend.h", "wgmma_wait<I == last ? 0 : 1>", "wgmma_wait<I == last ? 0 : 2>"),
    "values of the part before": ("int8 192", "tile/attend.h", "(I + 2) * VALUE_PART, KEYS", "(I + 1) * VALUE_PART, KEYS"),
    "sums of the part before": (
        "int8 192",
        "hopper_mainloop.h",
        "rescale_and_add<PART * VALUE_PART / 2>",
        "rescale_and_add<(PART > 0 ? PART - 1 : PART) * VALUE_PART / 2>",
    ),
    "the last keys taken for all of a block": (
        "int8 192",
        "hopper_mainloop.h",
        "!has_nonfinite_key && kv_block.index < wg_tile.whole &&",
        "!has_nonfinite_key &&",
    ),
}
"""The same of int8 with more than 128 channels, whose products with V come in parts and whose ordinary blocks have a way of their own."""


NONFINITE_MUTANTS = {
    "keys before the window": ("int8 window 128", "hopper_mainloop.h", "& ~first_bits(row_begin(row) - start - i)", ""),
    "a window's first key": ("int8 window 128", "hopper_mainloop.h", "row_begin(row) - start - i)", "row_begin(row) - start - i + 1)"),
    "the first 32 keys of a block": (
        "int8 192",
        "hopper_mainloop.h",
        "swizzled<PANEL>(i + int(threadIdx.x) % 32, 0)",
        "swizzled<PANEL>(int(threadIdx.x) % 32, 0)",
    ),
    "soft-capped rows": ("int8 softcap 128", "hopper_mainloop.h", "if (has_nonfinite_key) nan_rows", "if (!C.softcap && has_nonfinite_key) nan_rows"),
}
"""The same, of int8 keys that aren't finite."""


@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", NONFINITE_MUTANTS)
def test_keys_that_are_not_finite_are_told_from_others(name: str) -> None:
    kind, *mutation = NONFINITE_MUTANTS[name]
    with pytest.raises(AssertionError):
        assert_nan_is_told(broken(CHECKED[kind], *mutation), CHECKED[kind])


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored((file, right, wrong) for _, file, right, wrong in NONFINITE_MUTANTS.values())
    emulation.assert_anchored((file, right, wrong) for _, file, right, wrong in (TIMING_MUTANTS | WIDE_MUTANTS).values())
    emulation.assert_anchored(READY_MUTANTS.values())


@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", TIMING_MUTANTS | WIDE_MUTANTS)
def test_the_emulation_sees_what_comes_at_the_wrong_time(name: str) -> None:
    kind, *mutation = (TIMING_MUTANTS | WIDE_MUTANTS)[name]
    config = (CHECKED | FUSED_Q)[kind]
    mutant = broken(config, *mutation)

    def held(rows: int, keys: int, out_dtype: torch.dtype) -> None:
        mask = {"masked": shown(rows, keys), "added": added(rows, keys + 4, torch.bfloat16)[:, :keys]}.get(config.scores)
        q, k, v = (x.bfloat16() for x in tensors_of(config, (1, 3, rows), (1, 3, keys)))
        for _ in range(3):
            check(mutant, config, (q, k, v), device=TWO_SMS, out_dtype=out_dtype, attn_mask=mask)

    with pytest.raises(AssertionError):  # noqa: PT012
        held(500, 900, torch.float32)
        held(700, 100, torch.bfloat16)
