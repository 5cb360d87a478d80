"""A KV cache's Triton kernels broken on purpose: the tests of parity must see each of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from conftest import GPU

import fp8attn
from closeness import relative
from fp8attn import PagedBatch
from fp8attn.triton import paged_append, paged_attention
from paging import Problem, Sequences, bits

pytestmark = pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")

original_row, original_number, original_tokens = paged_append.batch_row, paged_append.page_number, paged_append.load_tokens
original_page, original_copy = paged_attention.attend_to_page, paged_append.copy_tokens
original_sink, original_tile, original_unit = paged_attention.merge_sink, paged_attention.tile_at, paged_append.unit_at
original_cap = paged_attention.cap_scores


@triton.jit
def sees_its_own_page(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C: tl.constexpr):
    return original_page(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden & False, first, C)


@triton.jit
def forgets_the_page_scale_of_values(
    q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C: tl.constexpr
):
    m_new, l_new, acc_new = original_page(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C)
    kept = acc * tl.exp2(m - m_new)[:, None]
    return m_new, l_new, kept + (acc_new - kept) / tl.load(v_scale)


@triton.jit
def never_rescales(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C: tl.constexpr):
    m_new, l_new, acc_new = original_page(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C)
    return m_new, l_new, acc_new + acc * tl.where(m == -float("inf"), 0.0, 1.0 - tl.exp2(m - m_new))[:, None]


@triton.jit
def takes_any_page_number(table, page, width, every_page):
    number, exists = original_number(table, page, width, every_page)
    return number, exists | True


@triton.jit
def takes_the_next_page(table, page, width, every_page):
    return original_number(table, page + 1, width, every_page)


@triton.jit
def takes_rows_for_sequences(lengths, counts, sequences, row, length, every_sequence):
    _, exists, end, count = original_row(lengths, counts, sequences, row, length, every_sequence)
    return row, exists, end, count


@triton.jit
def takes_every_token(lengths, counts, sequences, row, length, every_sequence):
    sequence, exists, end, _ = original_row(lengths, counts, sequences, row, length, every_sequence)
    return sequence, exists, end, tl.minimum(length, end)


@triton.jit
def no_mean_of_keys(q, mean):
    return tl.sum(q, 1).to(tl.float32) * 0


@triton.jit
def keeps_too_few_tokens(new, stride, recent, old, end, DIM: tl.constexpr, WIDTH: tl.constexpr):
    original_copy(new, stride, recent, tl.maximum(old, end - 1), end, DIM, WIDTH)


@triton.jit
def scale_of_a_token(largest):
    return largest * 0 + 1


@triton.jit
def reads_the_ring_from_the_start(recent, new, stride, tokens, edge, end, DIM: tl.constexpr, WIDTH: tl.constexpr):
    return original_tokens(recent, new, stride, tokens - tokens // paged_append.RECENT * 64, edge, end, DIM, WIDTH)


@triton.jit
def sees_one_key_more(
    q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C: tl.constexpr
):  # fmt: skip
    return original_page(q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first - 1, C)


@triton.jit
def caps_scores_without_the_mean(x, shift, softcap):
    return original_cap(x, shift * 0, softcap)


@triton.jit
def a_sink_of_no_weight(m, l, acc, sink):
    m_new, _, acc = original_sink(m, l, acc, sink)
    return m_new, l * tl.exp2(m - m_new), acc


@triton.jit
def tiles_of_the_first_tokens(place, cu_seqlens, sequences, tokens, group, ROWS: tl.constexpr):
    sequence, tile, begin, length = original_tile(place, cu_seqlens, sequences, tokens, group, ROWS)
    return sequence, tile, begin * 0, length


@triton.jit
def pages_of_the_first_tokens(place, cu_seqlens, seqused, sequences, tokens, SIZE: tl.constexpr):
    sequence, unit, begin, length = original_unit(place, cu_seqlens, seqused, sequences, tokens, SIZE)
    return sequence, unit, begin * 0, length


@triton.jit
def never_a_second_page(place, cu_seqlens, seqused, sequences, tokens, SIZE: tl.constexpr):
    sequence, unit, begin, length = original_unit(place, cu_seqlens, seqused, sequences, tokens, SIZE)
    return sequence, unit * 0, begin, length


ATTENTION = {
    "own page in FP8": ("attend_to_page", sees_its_own_page),
    "page scale of V forgotten": ("attend_to_page", forgets_the_page_scale_of_values),
    "missing rescale": ("attend_to_page", never_rescales),
    "any page number": ("page_number", takes_any_page_number),
    "the next page": ("page_number", takes_the_next_page),
    "rows taken for sequences": ("batch_row", takes_rows_for_sequences),
    "counts forgotten": ("batch_row", takes_every_token),
    "K's mean forgotten": ("mean_scores", no_mean_of_keys),
    "another place in the ring": ("load_tokens", reads_the_ring_from_the_start),
    "a key before the window": ("attend_to_page", sees_one_key_more),
    "soft cap without K's mean": ("cap_scores", caps_scores_without_the_mean),
    "sink without weight": ("merge_sink", a_sink_of_no_weight),
    "packed queries of the first row": ("tile_at", tiles_of_the_first_tokens),
}
APPEND = {
    "page scale of V is one": ("page_scale", scale_of_a_token),
    "the last token alone": ("copy_tokens", keeps_too_few_tokens),
    "the next page": ("page_number", takes_the_next_page),
    "rows taken for sequences": ("batch_row", takes_rows_for_sequences),
    "counts forgotten": ("batch_row", takes_every_token),
    "packed tokens of the first row": ("unit_at", pages_of_the_first_tokens),
    "packed pages but the first": ("unit_at", never_a_second_page),
}


def packed_steps(both: Sequences, k: torch.Tensor, v: torch.Tensor) -> tuple[list[PagedBatch], list[tuple[torch.Tensor, ...]]]:
    """Steps of few and of many packed tokens, and these tokens."""
    batches, new = [], []
    for counts in ([3, 60], [257, 20]):
        batch = dataclasses.replace(both.grow([1, 0], counts), counts=None, cu_seqlens=both.ints(0, counts[0], sum(counts)))
        batches.append(dataclasses.replace(batch, lengths=batch.lengths.clone(), page_table=batch.page_table.clone()))
        new.append(tuple(torch.cat([x[0, :, : counts[0]], x[1, :, : counts[1]]], 1).transpose(0, 1) for x in (k, v)))
    return batches, new


def check(appending: bool) -> None:
    """The bytes, or the answers, of two sequences of different lengths whose V grows; a page of the second one is missing at the end."""
    problem = Problem(560, 1, 2, 32, 32, torch.float32, "grows", fp8attn.Recipe(), 3)
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors())
    k += 1
    found = []
    for backend in ("modelled", "triton"):
        both = Sequences(problem, torch.device("cpu"), 2)
        writes, reads = (backend, "modelled") if appending else ("modelled", backend)
        for first, last, fewer in ((0, 300, 200), (300, 310, 7), (310, 440, 130), (440, 500, 30)):
            counts = [last - first, fewer]
            both.append(k[:, :, first:last], v[:, :, first:last], [1, 0], counts, backend=writes)
        if appending:
            packed, new = packed_steps(both, k, v)
            for batch, (key, value) in zip(packed, new, strict=True):
                both.cache.append(key, value, batch, backend=writes)
            found.append([bits(x) for x in both.cache.storage.tensors()])
            continue
        batch = both.batch([1, 0], [60, 30])
        answers = [fp8attn.paged_sdpa(q[:, :, 440:500], both.cache, batch, return_lse=True, backend=reads)]
        batch.page_table[1, 1] = -1
        answers.append(fp8attn.paged_sdpa(q[:, :, 440:500], both.cache, batch, return_lse=True, backend=reads))
        options = dict(window=(200, 0), softcap=3.0, sinks=torch.tensor([0.5, -1.0]), return_lse=True, backend=reads)
        batch = both.batch([1, 0], [60, 30])
        answers.append(fp8attn.paged_sdpa(q[:, :, 440:500], both.cache, batch, **options))
        batch = dataclasses.replace(batch, counts=None, cu_seqlens=both.ints(0, 60, 90))
        answers.append(fp8attn.paged_sdpa(q[0, :, 410:500].transpose(0, 1), both.cache, batch, **options))
        found.append([x for pair in answers for x in pair])
    for expected, actual in zip(*found, strict=True):
        if appending:
            assert torch.equal(expected, actual)
        else:
            assert torch.equal(expected.isnan(), actual.isnan())
            assert relative(*(x.nan_to_num(0.0, 0.0, 0.0) for x in (actual, expected))) < 2e-4


@pytest.mark.parametrize("appending", (False, True))
def test_the_kernels_themselves_pass(appending: bool) -> None:
    check(appending)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.one_in(2)
def test_mutant_of_attention_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, *ATTENTION[name])
    with pytest.raises(AssertionError):
        check(False)


@pytest.mark.parametrize("name", APPEND)
@pytest.mark.one_in(2)
def test_mutant_of_appending_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_append, *APPEND[name])
    with pytest.raises(AssertionError):
        check(True)
