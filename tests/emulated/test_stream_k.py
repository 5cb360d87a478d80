"""Tiles behind the last full round of the Hopper kernel, which CTAs share."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
from closeness import E4M3_STEP, assert_matches_pipeline
from fp8attn import Recipe
from fp8attn.call import Call
from fp8attn.cuda import configs, run, stream_k
from fp8attn.cuda.configs import GROUPS, INSTANCES, KEYS, ROWS, HopperConfig
from fp8attn.cuda.oracle import oracle, stream_k_work_tiles
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.recipe import ProductType

H100 = ARCHITECTURES[90]
SHARING = tuple(config for group in GROUPS.values() for config in group if config.stream_k)
ONE = next(config for config in SHARING if config.consumers == 1)


def call_like(batch: int, q_heads: int, kv_heads: int, q_length: int, kv_length: int) -> Call:
    """Of tensors that have these shapes and no more."""
    one = torch.zeros(1, 1, 1, 64)
    call = call_of(*quantize(one, one, one, Recipe()))
    return dataclasses.replace(call, q=one.expand(batch, q_heads, q_length, 64), k=one.expand(batch, kv_heads, kv_length, 64), kv_length=kv_length)


tiles, blocks, sm_counts = st.integers(1, 3000), st.integers(1, 5000), st.sampled_from((1, 2, 78, 114, 132))


@given(tiles=tiles, blocks=blocks, sm_count=sm_counts)
def test_sharing_pays(tiles: int, blocks: int, sm_count: int) -> None:
    """No slower than whole tiles; no range longer than a tile, none empty, none tiny; no more ranges than SMs, unless they would be long and there is
    a full round."""
    sharing, rest = stream_k.ranges(tiles, blocks, sm_count), tiles % sm_count
    assert sharing >= 1 and stream_k.rounds(tiles, blocks, sm_count) <= -(-tiles // sm_count)
    if sharing > sm_count:
        assert tiles > sm_count and rest * blocks > stream_k.MOST_BLOCKS * sm_count
    if sharing == 1:
        return
    size = -(-rest * blocks // sharing)
    # evened out, ranges may be shorter than asked for
    assert stream_k.LEAST_BLOCKS < 2 * size <= 2 * (blocks - stream_k.EXTRA_BLOCKS) and size * (sharing - 1) < rest * blocks
    assert sharing <= stream_k.MOST_RANGES * rest


@pytest.mark.parametrize(
    "heads, length, keys, sharing",
    (
        (16, 16384, 16384, 131),  # 1376 tiles of 192 rows: ten rounds and 56 tiles, 55 blocks a CTA
        (16, 1024, 1024, 1),  # eight blocks of keys
        (8, 192, 65536, 128),
        (132, 192, 65536, 1),
    ),
)
def test_which_calls_share(heads: int, length: int, keys: int, sharing: int) -> None:
    three = next(config for config in INSTANCES if config.head_dim == 128 and config.consumers == 3)
    call = call_like(1, heads, heads, length, keys)
    assert configs.stream_k_ranges(call, three, H100) == sharing
    assert configs.stream_k_ranges(dataclasses.replace(call, causal="top_left"), three, H100) == 1
    assert run.splits_of(call, next(config for config in INSTANCES if config.consumers == 4), H100) == 1


@given(
    groups=st.sampled_from(((1, 1, 1), (2, 3, 3), (1, 6, 2), (3, 4, 1))),
    q_length=st.integers(1, 700),
    keys=st.integers(1, 3000),
    more=st.integers(1, 40),
)
def test_each_block_of_a_shared_tile_is_somebodys(groups: tuple[int, int, int], q_length: int, keys: int, more: int) -> None:
    call, sm_count, blocks = call_like(*groups, q_length, keys), 20, -(-keys // KEYS)
    rest = call.tiles(ONE.tile_rows) % sm_count  # a call with more has full rounds of as many
    sharing = min(rest + more, rest * blocks)
    if call.tiles(ONE.tile_rows) < sm_count:
        sharing = min(sharing, sm_count)
    if rest == 0 or sharing <= rest:
        return
    seen: dict[tuple[int, int], int] = {}
    for head, row, begin, end in stream_k_work_tiles(call, ONE, sharing, sm_count):
        assert begin == seen.get((head, row), 0) < end
        seen[head, row] = end
    assert set(seen.values()) == {blocks} and all(row % ROWS == 0 for _, row in seen) and len(seen) == rest


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL:
    return emulation.library("work_tiles.cpp")


def check_work_tiles(emulated: ctypes.CDLL, shape: tuple[int, ...], ctas: int, sharing: int, parted: bool) -> None:
    """CTAs one after another, as a GPU with room for one would have them: nobody may wait for who comes later."""
    batch, q_heads, _, q_length, keys = shape
    blocks = -(-keys // KEYS)
    scores = torch.randn(batch * q_heads, q_length, blocks, generator=torch.Generator().manual_seed(3)) * 8
    out, rows = torch.full((batch * q_heads, q_length, 4, 16), torch.nan), torch.full((batch * q_heads, q_length, 2), torch.nan)
    parts, words = torch.full((sharing, ONE.partial_bytes // 4), torch.nan), torch.zeros(1 + sharing * 4, dtype=torch.int32)
    numbers = (ctypes.c_int * 7)(*shape, ctas, sharing if sharing > 1 else 0)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (scores, out, rows, parts, words)]
    assert emulated.sum_blocks(*pointers, numbers, parted) & 0xFF, "somebody waits for ever"
    maximum = scores.amax(-1)
    weights = torch.exp2(scores - maximum[..., None]).double()
    torch.testing.assert_close(rows[..., 0], maximum, rtol=0, atol=0)
    torch.testing.assert_close(rows[..., 1].double(), weights.sum(-1), rtol=1e-5, atol=0)
    sums = (weights * torch.arange(1, blocks + 1)).sum(-1)
    # a thread's elements are numbered from 1 on: two of one of its rows, then two of the row 8 below
    column, below = torch.arange(16), torch.arange(q_length) % 16 // 8
    expected = (column // 2 * 4 + column % 2 + 1 + 2 * below[:, None]).double()
    torch.testing.assert_close(out.double() / sums[..., None, None], expected[:, None].expand(batch * q_heads, -1, 4, -1), rtol=1e-5, atol=0)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("parted", (False, True))
@pytest.mark.parametrize(
    "shape, ctas, sharing",
    (
        ((1, 2, 2, 100, 1300), 4, 1),  # nobody shares
        ((1, 3, 3, 100, 1300), 4, 3),  # a round, and two tiles
        ((1, 3, 3, 100, 1300), 4, 4),
        ((2, 4, 2, 130, 1300), 5, 5),  # four rounds, and four tiles
        ((2, 4, 1, 70, 1290), 16, 1),
        ((2, 4, 1, 70, 1290), 40, 40),  # fewer tiles than CTAs
        ((1, 1, 1, 10, 2000), 16, 16),  # a block each
        ((1, 2, 1, 64, 640), 7, 7),
        ((1, 3, 3, 100, 1300), 4, 9),  # a round, and more ranges than CTAs
        ((2, 4, 2, 130, 1300), 5, 23),
    ),
)
def test_pieces_of_a_tile_come_together(emulated: ctypes.CDLL, shape: tuple[int, ...], ctas: int, sharing: int, parted: bool) -> None:
    check_work_tiles(emulated, shape, ctas, sharing, parted)


MUTANTS = {
    "their sums by their maxima": ("stream_k.h", "x.x * theirs_by[0]", "x.x"),
    "their sums of P by their maxima": ("softmax.h", "their_sum * theirs", "their_sum"),
    "maxima grow": ("softmax.h", "m = m_new;\n  sum", "sum"),
    "all others'": ("stream_k.h", "first / size", "first / size + 1"),
    "the one before": ("stream_k.h", "work_tile.range - 1;", "work_tile.range - 2;"),
    "ranges of two tiles": ("stream_k.h", "to.begin = max(begin - first, 0);", "to.begin = 0;"),
    "both work tiles": ("stream_k.h", "end = first + to.begin;", "end = begin;"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored((f"tile/{file}", right, wrong) for file, right, wrong in MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_without_it_pieces_do_not_come_together(name: str) -> None:
    file, right, wrong = MUTANTS[name]
    mutant = emulation.library("work_tiles.cpp", (f"tile/{file}", right, wrong))
    with pytest.raises(AssertionError):
        check_work_tiles(mutant, (2, 4, 2, 130, 1300), 5, 7, False)


CASES = (
    # heads, queries, CTAs that share; None: a round and a bit of tiles
    (2, 300, 13),
    (3, 64, 17),
    (2, 100, 12),
    (None, 150, 40),
    (None, 130, 132),
)
KEYS_OF_CASE = 690
"""Six blocks, the last one ragged; with more, P of more rows flip in the 13 bits of a sum of 256 products than the typical row of closeness.py."""


@pytest.mark.gpu
@pytest.mark.parametrize("heads, length, sharing", CASES)
@pytest.mark.parametrize("config", SHARING, ids=lambda c: c.name)
def test_has_the_oracles_answer(device: torch.device, config: HopperConfig, heads: int | None, length: int, sharing: int) -> None:
    """By tile and part, and the same bits again and again; rows that aren't finite among them."""
    properties = device_of(device)
    if configs.unsupported_config(config, properties) is not None:
        pytest.skip("needs sm_90")
    keys, tiles_of_head = KEYS_OF_CASE, -(-length // config.tile_rows)
    heads = properties.sm_count // tiles_of_head + 3 if heads is None else heads
    tiles = heads * tiles_of_head
    sharing = max(min(sharing, properties.sm_count), tiles % max(min(tiles, properties.sm_count), sharing))
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, heads, n, dim, generator=generator).to(device)
        for n, dim in ((length, config.head_dim), (keys, config.head_dim), (keys, config.value_dim))
    )
    q[0, 0, 7, 3], k[0, heads - 1, keys // 2, 0] = torch.nan, torch.inf
    q = q.bfloat16()
    operands = quantize(q, k, v, Recipe(qk="int8" if config.int8 else "e4m3"))
    # P of products of 256 flip nearly as often as float32 outputs allow
    dtype = torch.bfloat16 if config.head_dim > 128 else (torch.bfloat16, torch.float16, torch.float32)[config.consumers % 3]
    call = call_of(*operands, return_lse=True, out_dtype=dtype)
    taken = dataclasses.replace(call, q=q, q_scale=None) if config.fuse_q_quant else call
    out, lse = run.forward(taken, properties, config, sharing)
    expected, expected_lse = oracle(operands, call, dataclasses.replace(config, fuse_q_quant=False), sharing)
    assert_matches_pipeline(out, expected, emulated=False)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=E4M3_STEP, equal_nan=True)
    for _ in range(50):
        for x, y in zip(run.forward(taken, properties, config, sharing), (out, lse), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("qk", ("e4m3", "int8"))
def test_long_calls_share_by_themselves(device: torch.device, qk: ProductType) -> None:
    properties = device_of(device)
    if configs.unsupported_config(INSTANCES[0], properties) is not None:
        pytest.skip("needs sm_90")
    q, k, v = (torch.randn(1, 3, n, 128, generator=torch.Generator().manual_seed(n)).to(device) for n in (400, 9000, 9000))
    operands = quantize(q, k, v, Recipe(qk=qk))
    call = call_of(*operands, return_lse=True)
    config = configs.choose(call, properties)
    sharing = run.splits_of(call, config, properties)
    assert sharing > call.tiles(config.tile_rows)
    expected, _ = oracle(operands, call, config, sharing)
    assert_matches_pipeline(run.forward(call, properties)[0], expected, emulated=False)
