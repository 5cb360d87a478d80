"""Quantization and attention in one launch, a head a CTA: which calls it takes, its grid, and that it has the bits of two
launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from hypothesis import given

import emulation
from closeness import on_grid
from emulated import Emulated
from fp8attn.cuda import fused_head, one_launch
from fp8attn.cuda.one_launch import OneLaunch
from fp8attn.device import ARCHITECTURES
from fp8attn.reference import Causal
from one_launch import (
    Halves,
    assert_bits_of_case,
    assert_bits_of_two_launches,
    assert_bits_of_what_is_not_finite,
    assert_emulated,
    assert_same_bits_a_thousand_times,
    halves,
)
from strategies import Case, cases

H100 = ARCHITECTURES[90]
CONFIG = fused_head.INSTANCES[0]


@pytest.mark.parametrize(
    "q, k, splits",
    (
        ((8, 16, 577, 64), (8, 16, 577, 64), 1),
        ((1, 100, 768, 64), (1, 100, 768, 64), 1),
        ((1, 24, 577, 64), (1, 24, 577, 64), 3),  # ten tiles are three for each of four warpgroups
        ((2, 8, 4096, 64), (2, 8, 513, 64), 8),
        ((1, 32, 600, 64), (1, 8, 600, 64), 10),
        ((1, 1, 1, 64), (1, 1, 520, 64), 1),
    ),
)
def test_takes(q: tuple[int, ...], k: tuple[int, ...], splits: int) -> None:
    """What the kernel for few heads doesn't take, with a CTA for every multiprocessor, as far as there are tiles."""
    tensors = halves(q, k)
    planned = one_launch.plan(*tensors, 0.125, H100)
    assert planned == OneLaunch(CONFIG, splits, k[0] * k[1] * splits) and planned.kernel == "fused_head"


@pytest.mark.parametrize(
    "q, k, dtype, scale, reason",
    (
        ((8, 16, 64, 64), (8, 16, 769, 64), torch.bfloat16, 0.1, "769 keys; it takes 1 to 768"),
        ((8, 16, 64, 128), (8, 16, 64, 128), torch.bfloat16, 0.1, "head dims are 128 and 128; it takes 64"),
        ((8, 16, 64, 64), (8, 16, 64, 64), torch.float32, 0.1, "it takes bfloat16 or float16"),
        ((8, 16, 64, 64), (8, 16, 64, 64), torch.float16, -0.1, "positive"),
    ),
)
def test_refusals_say_why(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, scale: float, reason: str) -> None:
    assert reason in str(one_launch.plan(*halves(q, k, dtype=dtype), scale, H100))


def test_needs_hopper() -> None:
    assert "needs sm_90" in str(one_launch.plan(*halves((8, 16, 64, 64), (8, 16, 64, 64)), 0.1, ARCHITECTURES[100]))


@pytest.mark.anywhere
@pytest.mark.parametrize("finite", (True, False))
@pytest.mark.parametrize(
    "q, k, causal, dtype, splits",
    (
        ((1, 4, 150, 64), (1, 2, 300, 64), "none", torch.bfloat16, 1),
        ((1, 2, 600, 64), (1, 1, 577, 64), "top_left", torch.float16, 2),  # two token chunks, and a block of 65 keys
        ((1, 1, 300, 64), (1, 1, 768, 64), "top_left", torch.bfloat16, 1),
        ((2, 1, 20, 64), (2, 1, 1, 64), "none", torch.float16, 1),
    ),
)
def test_emulated_it_quantizes_and_attends(
    emulated: Emulated, q: tuple[int, ...], k: tuple[int, ...], causal: Causal, dtype: torch.dtype, splits: int, finite: bool
) -> None:
    query, key, value = halves(q, k, dtype=dtype)
    if not finite:
        query[0, 0, 9, 1] = torch.nan
        key[0, 0, k[2] // 4, 3], value[0, 0, k[2] // 3, 5], value[-1, -1, k[2] // 2, :] = torch.inf, torch.nan, -torch.inf
    assert_emulated(emulated, OneLaunch(CONFIG, splits, k[0] * k[1] * splits), (query, key, value), causal)


@pytest.mark.anywhere
@pytest.mark.parametrize("length", (300, 577))
def test_emulated_tokens_behind_the_last_one_have_no_infinite_codes(emulated: Emulated, length: int) -> None:
    """Where V's means are large beside what is left of V, a zero would be."""
    query, key, value = halves((1, 1, 20, 64), (1, 1, length, 64))
    value = 1024 + 4 * value.sign()
    assert_emulated(emulated, OneLaunch(CONFIG, 1, 1), (query, key, value), "none")


FUSED_HEAD = "fused_head.cuh"

MUTANTS: dict[str, emulation.Mutation] = {
    "K's sample of one token chunk": (FUSED_HEAD, "of_keys ? sample_step(p.kv_length) : 1", "1"),
    "the second token chunk left out": (
        "tile/token_chunk_values.h",
        "sum[i] += token_chunks[i].sum[channel];",
        "sum[i] += i == 0 ? token_chunks[i].sum[channel] : 0;",
    ),
    "extremes of the first token chunk": ("tile/token_chunk_values.h", "high, token_chunks[i], channel);", "high, token_chunks[0], channel);"),
    "no feedback": (FUSED_HEAD, "length > TOKEN_CHUNK ? FEEDBACK : 0.0f", "0.0f"),
    "feedback in one token chunk": (FUSED_HEAD, "length > TOKEN_CHUNK ? FEEDBACK : 0.0f", "FEEDBACK"),
    "tokens of another run": (FUSED_HEAD, "from += RUN * stride) raw[i]", "from += 2 * RUN * stride) raw[i]"),
    "tokens that don't exist": (FUSED_HEAD, "uint4{~0u, ~0u, ~0u, ~0u};", "uint4{};"),
    "values that aren't finite": (FUSED_HEAD, "raw[i] = nan_where_nonfinite<T>(raw[i]);", ""),
    "keys of such values": (FUSED_HEAD, "[keys.key(0, 0) / LANES]);", "[0]);"),
    "channels not swapped back": (FUSED_HEAD, "swaps ? of_channel[1 - c] : of_channel[c]", "of_channel[c]"),
    "the second round of runs left out": (FUSED_HEAD, "item += WARPS)", "item += 2 * WARPS)"),
    "scale of a warp": (FUSED_HEAD, "of_block = fmaxf(of_block, largest[i]);", "of_block = largest[i];"),
    "scale of another block": (FUSED_HEAD, "prepare(min(n + 1, last));", "prepare(n);"),
    "queries before all keys are there": (FUSED_HEAD, "if (n == first) __syncthreads();", ""),
    "queries of the first head": (FUSED_HEAD, "kv_head * group + index - row * group", "kv_head * group"),
    "one split's queries twice": (FUSED_HEAD, "(n * p.splits + split) * warpgroups", "n * p.splits * warpgroups"),
    "rows of the last tile left out": (FUSED_HEAD, "/ 32 * rows < p.q_length", "/ 32 * rows < p.q_length - 1"),
    "an LSE without the mean": (FUSED_HEAD, "{mean_scores[f.row], mean_scores[f.row + 8]}", "{}"),
    "codes without a fence": (
        FUSED_HEAD,
        "    write_keys<C>(p, shared, mine, k, keys, blocks);\n    ptx::fence_proxy_async();",
        "    write_keys<C>(p, shared, mine, k, keys, blocks);",
    ),
    "another column": ("tile/key_block.h", "keys + 2 * step * (column_bytes / 16)", "keys + step * (column_bytes / 16)"),
}


def test_mutants_change_a_source() -> None:
    emulation.assert_anchored(MUTANTS.values())


def mutant_calls() -> Iterator[tuple[Halves, Causal, int]]:
    """Calls that show each mutant: with one token chunk and two, scales that differ, more than one query head, splits,
    what isn't finite, and a single tile of values whose means are large."""
    query, key, value = halves((1, 1, 20, 64), (1, 1, 300, 64))
    yield (query, key, 1024 + 4 * value.sign()), "none", 1
    for length, causal in ((577, "none"), (300, "top_left")):
        query, key, value = halves((1, 4, 321, 64), (1, 2, length, 64))
        steps = torch.linspace(0.2, 3, length)[:, None]
        key = on_grid((key * steps + 4).to(query.dtype))
        value = (value * steps + torch.linspace(-3, 3, 64)).to(query.dtype)
        yield (query, key, value), cast(Causal, causal), 2
        value = value.clone()
        value[0, 0, 200, 5] = torch.nan
        yield (query, key, value), cast(Causal, causal), 1


def check(emulated: Emulated) -> None:
    for tensors, causal, splits in mutant_calls():
        assert_emulated(emulated, OneLaunch(CONFIG, splits, tensors[1].shape[1] * splits), tensors, causal)


@pytest.mark.anywhere
@emulation.emulates
def test_the_case_of_the_mutants_is_right() -> None:
    check(Emulated())


@pytest.mark.thorough
@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check(Emulated(MUTANTS[name]))


@pytest.mark.gpu
@given(case=cases(masks=("none", "causal", "bottom right")))
def test_has_the_bits_of_two_launches(case: Case, device: torch.device) -> None:
    assert_bits_of_case("fused_head", case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ("none", "top_left", "bottom_right"))
@pytest.mark.parametrize("q, k", (((8, 16, 577, 64), (8, 16, 577, 64)), ((1, 4, 700, 64), (1, 2, 768, 64)), ((40, 8, 197, 64), (40, 8, 257, 64))))
def test_what_is_not_finite(device: torch.device, q: tuple[int, ...], k: tuple[int, ...], causal: str) -> None:
    assert_bits_of_what_is_not_finite("fused_head", *halves(q, k, device), causal)


@pytest.mark.gpu
@pytest.mark.parametrize("length", (300, 577))
def test_tokens_behind_the_last_one_have_no_infinite_codes(device: torch.device, length: int) -> None:
    query, key, value = halves((2, 8, length, 64), (2, 8, length, 64), device)
    assert_bits_of_two_launches("fused_head", query, key, 1024 + 4 * value.sign(), "none")


@pytest.mark.gpu
def test_same_bits_a_thousand_times(device: torch.device) -> None:
    assert_same_bits_a_thousand_times("fused_head", *halves((8, 16, 577, 64), (8, 16, 577, 64), device))
