"""The Triton kernels of caches of other engines broken on purpose: the comparisons with the definition must see each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from conftest import GPU

from foreign import Case, assert_close
from fp8attn import PagedTensors, paged_tensors
from fp8attn.device import device_of
from fp8attn.triton import paged_tensors as kernels

pytestmark = pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")

DEVICE = torch.device("cpu")
CASES = (
    Case((140, 33), 5, 32, scales=("token", "token"), layout="both in a page", ragged=True, seed=1),
    Case((140, 34), 5, 16, scales=("row", "head"), layout="heads first", window=(30, 0), seed=2),
)

original_seen, original_place, original_scale = kernels.keys_seen, kernels.place_of, kernels.load_scale
original_slots, original_number, original_add = kernels.load_slots, kernels.page_number, kernels.add_block
original_codes, original_weighted = kernels.clean_codes, kernels.weighted_values


@triton.jit
def sees_the_next_key(position, real, end, left, right):
    first, last = original_seen(position, real, end, left, right)
    return first, tl.where(real, tl.minimum(last + 1, end - 1), last)


@triton.jit
def a_window_of_one_key_more(position, real, end, left, right):
    first, last = original_seen(position, real, end, left, right)
    return tl.maximum(first - 1, 0), last


@triton.jit
def queries_past_the_counts(position, real, end, left, right):
    return original_seen(position, real | True, end, left, right)


@triton.jit
def the_first_slots_of_pages(index, page, C: tl.constexpr):
    number, slot = original_place(index, page, C)
    return number, slot * 0


@triton.jit
def takes_any_page_number(table, page, width, every_page):
    number, exists = original_number(table, page, width, every_page)
    return number, exists | True


@triton.jit
def one_scale_of_all_tokens(scale, strides, number, slot, inside, BY_TOKEN: tl.constexpr):
    found = original_scale(scale, strides, number, slot, inside, BY_TOKEN)
    return found * 0 + tl.max(found) if BY_TOKEN else found


@triton.jit
def scales_of_other_slots(scale, strides, number, slot, inside, BY_TOKEN: tl.constexpr):
    return original_scale(scale, strides, number, slot ^ 1, inside, BY_TOKEN)


@triton.jit
def values_that_are_nan_stay(key, value, C: tl.constexpr):
    key, _, bad = original_codes(key, value, C)
    return key, kernels.as_halves(value, C), bad


@triton.jit
def nan_unseen(key, value, C: tl.constexpr):
    key, value, bad = original_codes(key, value, C)
    return key, value, bad & False


@triton.jit
def never_rescales(x, value, v_scale, m, l, acc, C: tl.constexpr):
    m_new, l_new, acc_new = original_add(x, value, v_scale, m, l, acc, C)
    return m_new, l_new, acc_new + acc * tl.where(m == -float("inf"), 0.0, 1.0 - tl.exp2(m - m_new))[:, None]


@triton.jit
def unrounded(p, value, v_scale, C: tl.constexpr):
    if C.v_by_token:
        p = p * v_scale[None, :]
    return tl.dot(p, value.to(tl.float32)), 1.0


@triton.jit
def a_factor_forgotten(p, value, v_scale, C: tl.constexpr):
    found, _ = original_weighted(p, value, v_scale, C)
    return found, 1.0


ATTENTION = {
    "the next key": ("keys_seen", sees_the_next_key),
    "a window of one key more": ("keys_seen", a_window_of_one_key_more),
    "queries past the counts": ("keys_seen", queries_past_the_counts),
    "the first slot of each page": ("place_of", the_first_slots_of_pages),
    "any page number": ("page_number", takes_any_page_number),
    "one scale for all tokens": ("load_scale", one_scale_of_all_tokens),
    "scales of other slots": ("load_scale", scales_of_other_slots),
    "values that are NaN": ("clean_codes", values_that_are_nan_stay),
    "NaN unseen": ("clean_codes", nan_unseen),
    "missing rescale": ("add_block", never_rescales),
    "P not rounded": ("weighted_values", unrounded),
    "factor of scales per token forgotten": ("weighted_values", a_factor_forgotten),
}


def check_attention() -> None:
    """A cache with a missing page, and with a value that is NaN and that some of the queries don't see."""
    for case in CASES:
        call = case.call(DEVICE)
        for x in call.cache.tensors():  # page 0, which is read in place of a missing one, has finite tokens
            if x.dim() > 2:
                x[0].copy_(torch.zeros_like(x[0], dtype=torch.float32))
        call.batch.page_table[1, 32 // case.page] = call.cache.k.shape[0]
        at = call.batch.page_table[0, 138 // case.page], 138 % case.page, 0
        call.cache.v.view(torch.uint8)[at] = 0x7F
        found = kernels.attend(call.q, call.cache, call.batch, call.how, device_of(DEVICE), torch.float32, splits=2)
        assert_close(found, paged_tensors.attend(call.q, call.cache, call.batch, call.how), case.dtype)


def test_attention_itself_passes() -> None:
    check_attention()


@pytest.mark.parametrize("name", ATTENTION)
def test_mutant_of_attention_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, *ATTENTION[name])
    with pytest.raises((AssertionError, IndexError)):
        check_attention()


@triton.jit
def codes_without_nan(y, NATIVE: tl.constexpr):
    return original_code(tl.where(y == y, y, 0.0), NATIVE)


@triton.jit
def scale_of_the_largest_code(largest):
    return largest * 0 + 1.0


original_code = kernels.e4m3_code
WRITING = {
    "NaN written as zero": ("e4m3_code", codes_without_nan),
    "scale of a token is one": ("scale_of", scale_of_the_largest_code),
    "the first slot of each page": ("place_of", the_first_slots_of_pages),
}


def check_writing() -> None:
    case = replace(CASES[0], lengths=(1, 1), page=16)
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 2, 64, generator=g) for _ in range(2))
    k[3, 0, 5] = torch.inf
    found = []
    for write in (paged_tensors.write, lambda *arguments: kernels.write(*arguments, device_of(DEVICE))):
        cache: PagedTensors = case.call(DEVICE).cache
        write(cache, k, v, torch.tensor([5, 17, -1, 40, 1 << 40, 2, 47, 33, 8]))
        found.append(cache.tensors())
    for x, y in zip(*found, strict=True):
        assert torch.equal(*(z.contiguous().view(-1).view(torch.uint8) for z in (x, y)))


def test_writing_itself_passes() -> None:
    check_writing()


@pytest.mark.parametrize("name", WRITING)
def test_mutant_of_writing_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, *WRITING[name])
    with pytest.raises(AssertionError):
        check_writing()


original_slot, original_row = kernels.slot_of_token, kernels.row_of_token


@triton.jit
def all_tokens_count(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C: tl.constexpr):
    return original_slot(token, table, lengths, None, edges, rows, length, stride, width, every, page, C)


@triton.jit
def scales_of_the_first_row(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C: tl.constexpr):
    row, number, slot, inside = original_slot(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C)
    return row * 0, number, slot, inside


@triton.jit
def a_slot_too_early(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C: tl.constexpr):
    row, number, slot, inside = original_slot(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C)
    return row, number, tl.maximum(slot - 1, 0), inside


@triton.jit
def pages_of_the_first_row(token, table, lengths, counts, edges, rows, length, stride, width, every, page, C: tl.constexpr):
    return original_slot(token, table, lengths, counts, edges, rows, length, 0, width, every, page, C)


@triton.jit
def packed_tokens_of_the_row_before(token, cu_seqlens, rows_of_batch):
    return tl.maximum(original_row(token, cu_seqlens, rows_of_batch) - 1, 0)


APPENDING = {
    "counts forgotten": ("slot_of_token", all_tokens_count),
    "scales of the first row": ("slot_of_token", scales_of_the_first_row),
    "a slot too early": ("slot_of_token", a_slot_too_early),
    "pages of the first row": ("slot_of_token", pages_of_the_first_row),
    "packed tokens of the row before": ("row_of_token", packed_tokens_of_the_row_before),
    "any page number": ("page_number", takes_any_page_number),
}


def check_appending() -> None:
    """With counts and a missing page, and packed tokens, some of which are no row's."""
    case = replace(CASES[1], lengths=(40, 34, 7), scales=("row", "row"))
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 2, 5, 64, generator=g) for _ in range(2))
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    for change in (dict(counts=ints(5, 2, 0)), dict(cu_seqlens=ints(0, 2, 2, 4))):
        found = []
        new = (k, v) if "counts" in change else tuple(x[0].transpose(0, 1) for x in (k, v))
        for append in (paged_tensors.append, lambda *arguments: kernels.append(*arguments, device_of(DEVICE))):
            call = case.call(DEVICE)
            call.batch.page_table[0, 36 // case.page] = call.cache.k.shape[0]
            append(call.cache, *new, replace(call.batch, **change))
            found.append(call.cache.tensors())
        for x, y in zip(*found, strict=True):
            assert torch.equal(*(z.contiguous().view(-1).view(torch.uint8) for z in (x, y)))


def test_appending_itself_passes() -> None:
    check_appending()


@pytest.mark.parametrize("name", APPENDING)
def test_mutant_of_appending_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, *APPENDING[name])
    with pytest.raises(AssertionError):
        check_appending()
