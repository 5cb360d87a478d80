"""Copies of rows of other engines' caches: calls, and the comparison of the kernel with the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from foreign import Call, Case
from fp8attn import paged_copies
from fp8attn.paged_copies import Copies, Room, Spans
from fp8attn.pages import lse_shape, tokens_of
from fp8attn.triton import paged_copies as kernels


def ints(numbers: object, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.int32).to(device)


def packed(call: Call, counts: list[int], behind: int, most: int | None) -> Call:
    """The call with packed queries: so many of each row, of which some may be none of a sequence, and more behind them."""
    device, tokens = call.q.device, sum(counts) + behind
    g = torch.Generator().manual_seed(tokens)
    q = torch.randn(tokens, call.q.shape[1], call.q.shape[3], generator=g).to(device, call.q.dtype)
    edges = ints([0, *itertools.accumulate(counts)], device)
    return replace(call, q=q, batch=replace(call.batch, counts=None, cu_seqlens=edges, max_count=most))


def nonfinite(call: Call, seed: int) -> Call:
    """The call with a page or a length that isn't there, or a scale or a value that isn't finite."""
    table, lengths = call.batch.page_table.clone(), call.batch.lengths.clone()
    row, cache = seed % table.shape[0], call.cache
    match seed % 6:
        case 0:
            table[row, 0] = -1
        case 1:
            table[row, -2:] = 1 << 30
        case 2:
            lengths[row] = table.shape[1] * cache.page + 9
        case 3:
            lengths[row] = -3 if seed % 4 else 1 << 30
        case 4 if cache.is_fp8:
            cache.v.view(torch.uint8)[table[row, 0], 3 % cache.page, -1, 5] = 0xFF
        case 5 if cache.is_fp8:
            assert isinstance(cache.k_scale, torch.Tensor)
            cache.k_scale.view(-1)[-1] = torch.inf
        case of_half:
            (cache.v, cache.k)[of_half - 4][table[row, 0], 3 % cache.page, -1, 5] = (torch.nan, -torch.inf)[seed // 6 % 2]
    return replace(call, batch=replace(call.batch, page_table=table, lengths=lengths))


def drawn_call(case: Case, device: torch.device, counts: list[int], how: int) -> tuple[Call, int]:
    """A call of a case, and the queries of a row up to which it isn't copied. how: whether it is packed, and has what is not finite."""
    call = replace(case, ragged=case.ragged and how % 2 == 0).call(device)
    few = 0
    if how % 2:
        numbers = (counts * 4)[: len(case.lengths)]
        call, few = packed(call, numbers, 1 + how % 3, (None, 50, 10)[how % 3]), how % 4
    if how % 5 == 0:
        call = replace(call, batch=replace(call.batch, max_length=(128, 300)[how % 2]))
    return (nonfinite(call, how // 2) if how % 7 < 4 else call), few


def room_of(call: Call, few: int) -> Room:
    return Room.of(call.q, call.cache, call.batch, call.how.window, few)


def in_passes(patch: pytest.MonkeyPatch, call: Call, few: int) -> Room:
    """Room for little more than two rows."""
    cache = call.cache
    bytes_of_token = cache.kv_heads * (cache.k.shape[3] + cache.v.shape[3])
    patch.setattr(paged_copies, "MOST_BYTES", (2 * room_of(call, few).of_row + 128) * bytes_of_token)
    patch.setattr(paged_copies, "QUERIES_OF_PASS", 1)
    return room_of(call, few)


def cleared(call: Call, spans: Spans, room: Room, out: torch.Tensor, lse: torch.Tensor) -> None:
    """What becomes of queries that don't attend to copies, and are no other kernel's."""
    tokens, batch = tokens_of(call.q), call.batch
    edges = None if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    for row in range(len(batch.lengths)):
        given = tokens if edges is None else edges[row + 1] - edges[row]
        begin = 0 if edges is None else edges[row]
        of_row = (out[row].transpose(0, 1), lse[row]) if edges is None else (out[begin:], lse[:, begin:])
        end = max(int(batch.lengths[row]), 0)
        count = max(min(given if batch.counts is None else int(batch.counts[row]), given, end), 0)
        if given > room.few:
            first = int(spans.queries[row])
            of_row[0][first:count], of_row[1][:, first:count] = torch.nan, torch.nan
            of_row[0][count:given], of_row[1][:, count:given] = 0.0, -torch.inf
    if edges is not None:
        out[edges[-1] :], lse[:, edges[-1] :] = 0.0, -torch.inf


def check_copies(call: Call, room: Room, number: int = 0) -> None:
    """The kernel places and copies rows as the definition says in pass `number`, and clears queries that attend to nothing."""
    q, cache, batch, rows = call.q, call.cache, call.batch, len(call.batch.lengths)
    spans, copies = Spans.empty(rows, q.device), Copies.empty(cache, rows, room, q.device) if cache.is_fp8 else None
    results = torch.full((*q.shape[:-1], cache.v.shape[3]), 3.0, device=q.device), torch.full(lse_shape(q), 3.0, device=q.device)
    placed = paged_copies.place(q, batch, room, number)
    if copies is not None:
        for x in (copies.k, copies.k_scale, copies.v, copies.v_scale):
            x.view(torch.uint8).zero_()
    kernels.place(q, cache, batch, room, spans, results, number)
    for name in ("q", "queries", "k", "keys", "firsts", "ends"):
        assert torch.equal(getattr(spans, name), getattr(placed, name)), name
    if copies is not None:
        kernels.copy(cache, batch, room, placed, copies)
        wanted_copies = paged_copies.copy(cache, batch, room, placed)
        for name in ("k", "k_scale", "v", "v_scale"):
            assert torch.equal(getattr(copies, name).view(torch.uint8), getattr(wanted_copies, name).view(torch.uint8)), name
    if room.passes == 1:
        wanted = torch.full_like(results[0], 3.0), torch.full_like(results[1], 3.0)
        cleared(call, placed, room, *wanted)
        for x, y in zip(results, wanted, strict=True):
            assert torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)), "queries that attend to nothing"
