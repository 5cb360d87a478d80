"""The Triton kernel that copies rows of other engines' caches, broken on purpose: the comparison with the definition
must see each mutant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from conftest import GPU

from copying import check_copies, in_passes, nonfinite, packed, room_of
from foreign import Case
from fp8attn.triton import paged_copies as kernels

pytestmark = pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")

DEVICE = torch.device("cpu")
CASE = Case((300, 129, 257), 40, 16, 2, 3, 64, 64, scales=("row", "head"), seed=1)

HALF = replace(CASE, dtype=torch.float16, qk="e4m3")

original_load, original_store, original_clear = kernels.load_tokens, kernels.store_keys, kernels.clear_queries
original_before, original_copied, original_finite = kernels.wanted_before, kernels.copied_tokens, kernels.is_finite
original_page, original_unit = kernels.page_number, kernels.unit_at


@triton.jit
def values_that_are_nan_unseen(token, used, there, table, width, k, k_strides, v, v_strides, every, page, finite, C: tl.constexpr):
    key, value = original_load(token, used, there, table, width, k, k_strides, v, v_strides, every, page, finite, C)
    return tl.where(key == 0x7F, 0, key).to(tl.uint8), value


@triton.jit
def tokens_behind_the_last(token, used, there, table, width, k, k_strides, v, v_strides, every, page, finite, C: tl.constexpr):
    return original_load(token, used + 1, there + 1, table, width, k, k_strides, v, v_strides, every, page, finite, C)


@triton.jit
def any_page(table, page, width, every_page):
    number, exists = original_page(table, page, width, every_page)
    return number, exists | True


@triton.jit
def keys_of_other_tokens(to, token, count, key, C: tl.constexpr):
    original_store(to, token ^ 1, count, key, C)


@triton.jit
def queries_that_stay(out, lse, first_row, row_step, lse_at, first, real, given, step, DIM: tl.constexpr, WIDTH: tl.constexpr):
    original_clear(out, lse, first_row, row_step, lse_at, first + 1, real, given, step, DIM, WIDTH)


@triton.jit
def zeros_in_place_of_nan(out, lse, first_row, row_step, lse_at, first, real, given, step, DIM: tl.constexpr, WIDTH: tl.constexpr):
    original_clear(out, lse, first_row, row_step, lse_at, first, 0, given, step, DIM, WIDTH)


@triton.jit
def rows_of_few_count(row, cu_seqlens, lengths, counts, length, limits):
    return original_before(row, cu_seqlens, lengths, counts, length, (-1, limits[1], limits[2], limits[3], limits[4]))


@triton.jit
def long_rows_count_whole(row, cu_seqlens, lengths, counts, length, limits):
    return original_before(row, cu_seqlens, lengths, counts, length, (limits[0], limits[1], 1 << 20, limits[3], limits[4]))


@triton.jit
def any_number_of_queries(given, count, end, limits):
    return original_copied(given, count, end, (limits[0], 1 << 20, limits[2], limits[3], limits[4]))


@triton.jit
def a_block_too_few(given, count, end, limits):
    return original_copied(given, count, end, (limits[0], limits[1], limits[2], limits[3], tl.maximum(limits[4] - 128, -1)))


@triton.jit
def blocks_of_the_first_row(place, cu_seqlens, seqused, sequences, tokens, size):
    row, block, begin, length = original_unit(place, cu_seqlens, seqused, sequences, tokens, size)
    return row * 0, block, begin, length


@triton.jit
def parts_of_blocks(n):
    return n


@triton.jit
def any_scale(x):
    return original_finite(x) | True


MUTANTS = {
    "NaN of values": ("load_tokens", values_that_are_nan_unseen),
    "tokens behind the last one": ("load_tokens", tokens_behind_the_last),
    "rows with too many queries": ("copied_tokens", any_number_of_queries),
    "a block that the window has": ("copied_tokens", a_block_too_few),
    "any page": ("page_number", any_page),
    "keys of other tokens": ("store_keys", keys_of_other_tokens),
    "tokens in order": ("key_of_slot", lambda slot: slot),
    "queries that stay": ("clear_queries", queries_that_stay),
    "zeros in place of NaN": ("clear_queries", zeros_in_place_of_nan),
    "rows of few queries": ("wanted_before", rows_of_few_count),
    "rows that are too long": ("wanted_before", long_rows_count_whole),
    "blocks of the first row": ("unit_at", blocks_of_the_first_row),
    "parts of blocks": ("round_up", parts_of_blocks),
    "scales that aren't finite": ("is_finite", any_scale),
}


def check() -> None:
    """Packed rows of few and of many queries, one of too many; lengths, pages, values and scales that aren't right; and passes."""
    for seed in range(6):
        one, half = (replace(case, window=(-1, 0) if seed % 2 else (150, 3)).call(DEVICE) for case in (CASE, HALF))
        for call, few in ((one, 0), (packed(CASE.call(DEVICE), [40, 2, 30], 3, 35), 2), (half, 0)):
            for x in (call.cache.k, call.cache.v):  # page 0, which is read in place of a missing one, has finite tokens
                x[0].view(torch.uint8).zero_()
            call = nonfinite(call, seed)
            check_copies(call, room_of(call, few))
    for length in (1 << 30, 420, -3, 290):
        call = packed(CASE.call(DEVICE), [40, 2, 30], 3, None)
        call.batch.lengths[0] = length
        check_copies(call, room_of(call, 2))
    with pytest.MonkeyPatch.context() as patch:
        call = CASE.call(DEVICE)
        room = in_passes(patch, call, 0)
    for number in range(room.passes):
        check_copies(call, room, number)


def test_copying_itself_passes() -> None:
    check()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_copying_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, *MUTANTS[name])
    with pytest.raises((AssertionError, IndexError)):
        check()
