"""What packed sequences need, broken on purpose: comparisons with each sequence alone must see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from conftest import GPU

import fp8attn
from fp8attn import reference
from fp8attn.device import device_of
from fp8attn.quantization import quantize_kv, quantize_packed, sequences_of
from fp8attn.recipe import Packed, Recipe
from fp8attn.schedule import TABLE_HEADER
from fp8attn.triton import forward, lse, quantize_kernels, varlen
from fp8attn.triton import quantize as triton_quantize
from fp8attn.triton.configs import PortableConfig
from quantizing import assert_same
from ragged import TYPICAL, alone, table, varlen_call

pytestmark = pytest.mark.skipif(GPU, reason="compiled kernels keep the functions they were compiled with")

CASE = replace(TYPICAL, lengths=((70, 700), (0, 5), (3, 0), (40, 150), (130, 70), (40, 150)), kv_heads=1, group=1)
DEVICE = torch.device("cpu")

original_spans, original_entry, original_offsets = varlen.spans_of, varlen.load_tile_entry, varlen.offsets_of
original_unit, original_sample, original_above = varlen.unit_at, quantize_kernels.sample_of, varlen.tiles_above


@triton.jit
def first_token_of_all(cu_seqlens, seqused, sequences, tokens, inside):
    begin, length = original_spans(cu_seqlens, seqused, sequences, tokens, inside)
    return begin * 0, length


@triton.jit
def all_tokens_used(cu_seqlens, seqused, sequences, tokens, inside):
    return original_spans(cu_seqlens, None, sequences, tokens, inside)


@triton.jit
def trusts_the_lengths(cu_seqlens, seqused, sequences, tokens, inside):
    begin = tl.load(cu_seqlens + sequences, mask=inside, other=0)
    return begin, tl.load(cu_seqlens + sequences + 1, mask=inside, other=0) - begin


@triton.jit
def a_key_more(table, index):
    sequence, row, q_begin, q_length, k_begin, k_length, page = original_entry(table, index)
    return sequence, row, q_begin, q_length, k_begin, k_length + 1, page


@triton.jit
def a_row_more(table, index):
    sequence, row, q_begin, q_length, k_begin, k_length, page = original_entry(table, index)
    return sequence, row, q_begin, q_length + 1, k_begin, k_length, page


@triton.jit
def statistics_of_the_first(table, index):
    sequence, row, q_begin, q_length, k_begin, k_length, page = original_entry(table, index)
    return sequence * 0, row, q_begin, q_length, k_begin, k_length, page


@triton.jit
def aligned_to_the_top_left(window, q_length, kv_length):
    return original_offsets(window, q_length, q_length)


def pages_without_a_gap(begin, sequence, size):
    return begin // size


@triton.jit
def sampled_as_if_short(length):
    step, inverse = original_sample(length)
    return step * 0 + 1, inverse


@triton.jit
def mean_of_all_places(count):
    return 1.0 / (tl.maximum(count, 1) + 1).to(tl.float32)


@triton.jit
def ties_with_one_rank(work, q_length, kv_length, window, sharing, ROWS: tl.constexpr, UNITS: tl.constexpr):
    return original_above(tl.where(work < 0, work, work + 1), q_length, kv_length, window, sharing, ROWS, UNITS)


def check_forward(case=CASE) -> None:
    """Attention of each sequence, whose operands the definition has quantized."""
    q, k, v = case.tensors(DEVICE)
    starts_q, starts_k, used = case.starts(DEVICE)
    query = fp8attn.quantize(q, cu_seqlens_q=starts_q)
    where = Packed(starts_k, used, k.shape[0])
    key, value = quantize_packed(*(x.transpose(0, 1)[None] for x in (k, v)), Recipe(), where)
    call = varlen_call((query, key, value), q, {**case.options(DEVICE), "recipe": Recipe()})
    config = PortableConfig(32, 64, 2, 1)
    out, found_lse = forward.run(call, config, device_of(DEVICE))
    written = torch.zeros(out.shape[2], dtype=torch.bool)
    for rows, one in alone(call):
        expected, expected_lse = forward.run(one, config, device_of(DEVICE))
        assert torch.equal(out[:, :, rows], expected) and torch.equal(found_lse[:, :, rows], expected_lse)
        written[rows] = True
    assert out[:, :, ~written].isnan().all(), "rows of no sequence were written"


@pytest.fixture
def nan_where_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What isn't written stays NaN. In the table it is 0, so that no mutant reads memory that isn't a tensor's."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    original = forward.empty_output
    monkeypatch.setattr(forward, "empty_output", lambda *args: original(*args).fill_(torch.nan))


FORWARD_MUTANTS = {
    "a key of the next sequence": (forward, "load_tile_entry", a_key_more),
    "a row of the next sequence": (forward, "load_tile_entry", a_row_more),
    "values' means of the first sequence": (forward, "load_tile_entry", statistics_of_the_first),
    "aligned to the top left": (forward, "offsets_of", aligned_to_the_top_left),
    "pages of the sequence before": (varlen, "first_unit", pages_without_a_gap),
    "tokens of the first sequence": (varlen, "spans_of", first_token_of_all),
    "tiles on the place of others": (varlen, "tiles_above", ties_with_one_rank),
}


def test_attention_itself_passes(nan_where_empty: None) -> None:
    check_forward()


@pytest.mark.parametrize("name", FORWARD_MUTANTS)
def test_mutant_of_attention_is_seen(name: str, nan_where_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FORWARD_MUTANTS[name])
    with pytest.raises(AssertionError):
        check_forward()


def check_quantizer() -> None:
    case = replace(CASE, unused=5)
    _, k, v = (x.transpose(0, 1)[None].nan_to_num(5.0) for x in case.tensors(DEVICE))
    _, starts, used = case.starts(DEVICE)
    found = triton_quantize.quantize_packed(k, v, Recipe(), Packed(starts, used, k.shape[2]), device_of(DEVICE))
    for span, *parts in zip(case.spans[1], *map(sequences_of, found), strict=True):
        for x, expected in zip(parts, quantize_kv(k[:, :, span], v[:, :, span], Recipe()), strict=True):
            assert_same(x, expected)


QUANTIZER_MUTANTS = {
    "unused tokens": (varlen, "spans_of", all_tokens_used),
    "unused keys in the mean": (quantize_kernels, "spans_of", all_tokens_used),
    "pages without a gap": (quantize_kernels, "first_unit", pages_without_a_gap),
    "a sample of a short sequence": (quantize_kernels, "sample_of", sampled_as_if_short),
    "a mean of one token more": (quantize_kernels, "inverse_of", mean_of_all_places),
}


def test_the_quantizer_itself_passes() -> None:
    check_quantizer()


@pytest.mark.parametrize("name", QUANTIZER_MUTANTS)
def test_mutant_of_the_quantizer_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*QUANTIZER_MUTANTS[name])
    with pytest.raises(AssertionError):
        check_quantizer()


def check_lse() -> None:
    q, k, _ = CASE.tensors(DEVICE)
    starts, _, _ = CASE.starts(DEVICE)
    q4 = q.transpose(0, 1)[None]
    means = torch.randn(len(CASE.lengths), 1, 64, generator=torch.Generator().manual_seed(0))
    found = lse.unsmoothed_lse(torch.zeros(q4.shape[:3]), q4, means, 0.125, 64, device_of(DEVICE), packed=Packed(starts, None, q.shape[0]))
    for i, rows in enumerate(CASE.spans[0]):
        expected = reference.unsmoothed_lse(torch.zeros(1, 1, rows.stop - rows.start), q4[:, :, rows], means[i : i + 1], 0.125, 64)
        torch.testing.assert_close(found[:, :, rows], expected, rtol=1e-4, atol=1e-4)


@triton.jit
def unit_of_the_first(place, cu_seqlens, seqused, sequences, tokens, SIZE: tl.constexpr):
    sequence, unit, begin, length = original_unit(place, cu_seqlens, seqused, sequences, tokens, SIZE)
    return sequence * 0, unit, begin, length


def test_mutant_of_the_lse_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lse()
    monkeypatch.setattr(varlen, "unit_at", unit_of_the_first)
    with pytest.raises(AssertionError):
        check_lse()


def test_trust_in_lengths_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts outside of the tensor: the table must not hold them."""
    where = Packed(torch.tensor([0, 100, 350], dtype=torch.int32), None, 300)

    def is_inside() -> bool:
        found = table(where, where, 64, "none", (-1, 0), DEVICE)
        found = found[1 : 1 + int(found[0, TABLE_HEADER.index("tiles")])]
        return bool((found[:, 2] + found[:, 3] <= 300).all() and (found[:, 4] + found[:, 5] <= 300).all())

    assert is_inside()
    monkeypatch.setattr(varlen, "spans_of", trusts_the_lengths)
    assert not is_inside()
