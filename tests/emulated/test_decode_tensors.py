"""The decode kernel for caches of other engines, on a CPU too: the oracle's answers, whatever the layout, the pages, the scales and the lengths."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch

import emulation
from foreign import E4M3, Call, Case, assert_close, has_fp8_sums
from fp8attn import PagedBatch, paged_tensors
from fp8attn.cuda import build, decode_tensors, run
from fp8attn.device import ARCHITECTURES, Device, device_of
from paging import packed

H100 = ARCHITECTURES[90]

FP8 = Case((300, 140, 1, 0), queries=2, page=16, dim=64, value_dim=64, query_dtype=torch.bfloat16)
BY_TOKEN = replace(FP8, scales=("token", "token"))
HALF = replace(FP8, dtype=torch.bfloat16)
WIDE = dict(dim=128, value_dim=128)
WIDEST = dict(dim=256, value_dim=256)

CASES = {
    "e4m3": (FP8, 2),
    "one query": (replace(FP8, queries=1, page=128), 3),
    "e4m3, a scale for all": (replace(FP8, scales=("tensor", "row"), page=64), 1),
    "by token": (BY_TOKEN, 2),
    "by token, heads first": (replace(BY_TOKEN, layout="heads first", page=32, **WIDE), 2),
    "bf16": (HALF, 2),
    "fp16, pages of 8": (replace(HALF, dtype=torch.float16, page=8, layout="both in a page"), 2),
    "e4m3, 128 channels, sinks": (replace(FP8, sinks=True, layout="both in a row", **WIDE), 2),
    "bf16, 128 channels, window": (replace(HALF, window=(70, 0), page=256, queries=7, **WIDE), 3),
    "e4m3, 256 channels": (replace(FP8, lengths=(130,), queries=1, **WIDEST), 2),
    "bf16, 256 channels": (replace(HALF, lengths=(130,), queries=1, **WIDEST), 2),
    "by token, 256 channels": (replace(BY_TOKEN, lengths=(130,), queries=1, **WIDEST), 2),
    "e4m3, soft cap": (replace(FP8, softcap=3.0), 2),
    "bf16, soft cap and sinks": (replace(HALF, softcap=0.7, sinks=True, queries=5, **WIDE), 2),
    "by token, soft cap": (replace(BY_TOKEN, softcap=30.0, lengths=(130,)), 2),
    "both sides of a window": (replace(FP8, window=(5, 7), queries=9), 1),
    "later keys": (replace(HALF, window=(-1, -1), queries=9), 1),
    "some queries": (replace(FP8, ragged=True, queries=6, group=2), 2),
    "two groups of rows": (replace(HALF, queries=4), 2),
    "four groups of rows": (replace(BY_TOKEN, queries=8), 2),
    "three row tiles": (replace(FP8, lengths=(200, 90), queries=29, kv_heads=1, **WIDEST), 2),
    "many rows": (replace(FP8, queries=16), 2),
    "many rows, by token": (replace(BY_TOKEN, queries=13), 2),
    "many rows, by token, 128 channels": (replace(BY_TOKEN, lengths=(200, 90), queries=16, seed=3, **WIDE), 2),
    "many rows, bf16": (replace(HALF, queries=16, sinks=True), 2),
    "many rows, bf16, 128 channels, window": (replace(HALF, lengths=(300, 90), window=(70, 0), page=256, queries=20, **WIDE), 3),
    "many rows, 128 channels, soft cap": (replace(FP8, lengths=(200, 90), softcap=3.0, queries=16, layout="both in a page", **WIDE), 2),
    "many rows, three row tiles": (replace(FP8, lengths=(300, 90), queries=50, scales=("tensor", "row"), **WIDE), 3),
    "many rows, six row tiles": (replace(FP8, lengths=(200, 90), queries=110, kv_heads=1), 4),
    "many rows, more than 32 row tiles": (replace(FP8, lengths=(560,), queries=530, kv_heads=1, group=8, window=(20, 0)), 3),
    "many rows, groups of parts": (replace(FP8, lengths=(64 * 24, 100), queries=16, kv_heads=1, **WIDE), 7),
    "many rows, bf16, groups of parts": (replace(HALF, lengths=(64 * 24,), queries=9, kv_heads=1), 10),
    "many rows, some queries": (replace(FP8, ragged=True, lengths=(400, 140, 20), queries=16), 2),
    "many rows, e4m3, 256 channels": (replace(FP8, lengths=(200, 90), queries=20, **WIDEST), 3),
    "many rows, bf16, 256 channels": (replace(HALF, lengths=(200, 90), queries=20, **WIDEST), 3),
    "many rows, by token, 256 channels": (replace(BY_TOKEN, lengths=(200, 90), queries=20, **WIDEST), 3),
    "two warpgroups of rows, e4m3, 256 channels": (replace(FP8, lengths=(300,), queries=70, **WIDEST), 1),
    "two warpgroups of rows, bf16, 256 channels": (replace(HALF, lengths=(300,), queries=70, **WIDEST), 1),
    "two warpgroups of rows, by token, 256 channels": (replace(BY_TOKEN, lengths=(300,), queries=70, **WIDEST), 1),
    "many parts": (replace(HALF, lengths=(64 * 30, 5), queries=1), 40),
    "equal lengths": (replace(FP8, lengths=(300, 300)), 10),
    "many short": (replace(FP8, lengths=(3,) * 40, group=1), 2),
    "sinks, several parts": (replace(HALF, lengths=(700,), sinks=True, queries=2), 6),
}
"""By what is special, with the number of SMs that share the work."""


@pytest.fixture(params=(pytest.param("emulated", marks=pytest.mark.anywhere), "cuda"))
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "cuda" and (device.type != "cuda" or device_of(device).arch != 90):
        pytest.skip("needs a Hopper GPU")
    return request.param


def config_of(case: Case) -> decode_tensors.DecodeTensorsConfig:
    call = case.call(torch.device("cpu"))
    return decode_tensors.choose(call.q, call.cache, call.batch)


def library_of(backend: str, case: Case) -> build.Library | None:
    return emulation.tensors_decoder(config_of(case)) if backend == "emulated" else None


def place_of(backend: str, device: torch.device) -> torch.device:
    return torch.device("cpu") if backend == "emulated" else device


def attend(library: build.Library | None, call: Call, device: Device, out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the kernel; `library` None: compiled."""
    assert decode_tensors.unsupported_call(call.q, call.cache, call.batch, call.how, H100) is None
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        return run.attend_to_tensors(call.q, call.cache, call.batch, call.how, device, out_dtype)


@pytest.mark.parametrize("case", (FP8, HALF), ids=("e4m3", "bf16"))
def test_rows_of_more_queries_are_another_kernel_s(case: Case, backend: str, device: torch.device) -> None:
    """Nothing of them is written, and the others are as they are alone; also queries behind the last row."""
    call = replace(case, lengths=(140, 300, 70), queries=9).call(place_of(backend, device))
    edges = torch.tensor([0, 2, 11, 12], dtype=torch.int32, device=call.q.device)
    q = torch.cat([call.q[0, :, :2], call.q[1], call.q[2, :, :3]], 1).transpose(0, 1).contiguous()
    batch = replace(call.batch, cu_seqlens=edges, max_count=9)
    few = replace(batch, max_count=2)
    library = emulation.tensors_decoder(decode_tensors.choose(q, call.cache, few)) if backend == "emulated" else None
    results = torch.full(q.shape, 7.0, device=q.device), torch.full((q.shape[1], q.shape[0]), 7.0, device=q.device)
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        run.attend_to_tensors(q, call.cache, batch, call.how, replace(H100, sm_count=3), torch.float32, 2, results)
    out, lse = results
    assert bool((out[2:11] == 7.0).all()) and bool((lse[:, 2:11] == 7.0).all())
    expected = paged_tensors.attend(q, call.cache, batch, call.how)
    for rows in (slice(0, 2), slice(11, None)):
        assert_close((out[rows], lse[:, rows]), (expected[0][rows], expected[1][:, rows]), case.dtype)


def check(library: build.Library | None, case: Case, device: torch.device, sms: int) -> None:
    call = case.call(device)
    actual = attend(library, call, replace(H100, sm_count=H100.sm_count if library is None else sms))
    assert_close(actual, paged_tensors.attend(call.q, call.cache, call.batch, call.how), case.dtype, has_fp8_sums(call))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_oracle_s(name: str, backend: str, device: torch.device) -> None:
    case, sms = CASES[name]
    check(library_of(backend, case), case, place_of(backend, device), sms)


@pytest.mark.parametrize("case", (FP8, HALF), ids=("e4m3", "bf16"))
def test_a_cache_without_pages(case: Case, backend: str, device: torch.device) -> None:
    """Of any number of slots: (N, S, Hkv, D)."""
    case = replace(case, lengths=(77, 50), page=77)
    call = case.call(place_of(backend, device))
    call = dataclasses.replace(call, batch=replace(call.batch, page_table=call.batch.page_table[:, :1].clone()))
    actual = attend(library_of(backend, case), call, replace(H100, sm_count=2))
    assert_close(actual, paged_tensors.attend(call.q, call.cache, call.batch, call.how), case.dtype)


@pytest.mark.parametrize(
    "case, what",
    [(case, what) for case in (FP8, BY_TOKEN) for what in ("q", "k", "v", "k_scale", "v_scale")] + [(HALF, what) for what in "qkv"],
)
@pytest.mark.parametrize("group", (1, 3), ids=("few rows", "many rows"))
def test_what_is_not_finite_reaches_the_rows_that_see_it(case: Case, what: str, group: int, backend: str, device: torch.device) -> None:
    case = replace(case, lengths=(70, 70), queries=8, group=group)
    call = case.call(place_of(backend, device))
    token, number, slot = 65, int(call.batch.page_table[1, 65 // 16]), 65 % 16
    if what == "q":
        call.q[1, group, 5, 3] = torch.inf
    elif what in ("k", "v"):
        x = getattr(call.cache, what)
        if case.dtype == E4M3:
            x.view(torch.uint8)[number, slot, 1, 7] = 0xFF
        else:
            x[number, slot, 1, 7] = -torch.inf
    else:
        scale = getattr(call.cache, what)
        scale[(number, slot, 1) if case.scales[0] == "token" else (1,)] = torch.nan
    actual = attend(library_of(backend, case), call, replace(H100, sm_count=2))
    expected = paged_tensors.attend(call.q, call.cache, call.batch, call.how)
    assert token < 70 and bool(expected[0].isnan().any()) and bool(expected[0].isfinite().any())
    assert_close(actual, expected, case.dtype, has_fp8_sums(call))


@pytest.mark.parametrize("queries", (2, 12, 30), ids=("few rows", "many rows", "two warpgroups"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_output_is_rounded_once(dtype: torch.dtype, queries: int, backend: str, device: torch.device) -> None:
    """Also of the rows of a tile that aren't real."""
    case = replace(FP8, lengths=(300, 90, 7), queries=queries)
    call = case.call(place_of(backend, device))
    exact, rounded = (attend(library_of(backend, case), call, replace(H100, sm_count=3), dtype)[0] for dtype in (torch.float32, dtype))
    assert rounded.dtype == dtype and torch.equal(rounded, exact.to(dtype))


@pytest.mark.parametrize("queries", (2, 12), ids=("few rows", "many rows"))
@pytest.mark.parametrize("case", (FP8, HALF), ids=("e4m3", "bf16"))
def test_an_infinite_query_hides_nothing(case: Case, queries: int, backend: str, device: torch.device) -> None:
    """All of its scores are -inf, as those of keys that it doesn't see."""
    case = replace(case, lengths=(150, 70), queries=queries)
    call = case.call(place_of(backend, device))
    if case.dtype != E4M3:
        call.cache.k.abs_()
    call.q[0, 4, 1, 5] = -torch.inf
    actual = attend(library_of(backend, case), call, replace(H100, sm_count=2))
    assert bool(actual[0][0, 4, 1].isnan().all()) and int(actual[1].isnan().sum()) == 1
    assert_close(actual, paged_tensors.attend(call.q, call.cache, call.batch, call.how), case.dtype, has_fp8_sums(call))


@pytest.mark.parametrize("queries", (8, 29))
def test_many_rows_that_do_not_depend_on_other_rows(queries: int, backend: str, device: torch.device) -> None:
    """By tiles of fewer rows."""
    call = replace(FP8, lengths=(200, 90), queries=queries).call(place_of(backend, device))
    call = dataclasses.replace(call, batch=replace(call.batch, batch_invariant=True))
    config = decode_tensors.choose(call.q, call.cache, call.batch)
    assert not config.has_many
    actual = attend(emulation.tensors_decoder(config) if backend == "emulated" else None, call, replace(H100, sm_count=2))
    assert_close(actual, paged_tensors.attend(call.q, call.cache, call.batch, call.how), E4M3)


@pytest.mark.parametrize("case", (FP8, HALF), ids=("e4m3", "bf16"))
@pytest.mark.parametrize("queries", (2, 8), ids=("few rows", "many rows"))
def test_numbers_out_of_range_are_no_indices(case: Case, queries: int, backend: str, device: torch.device) -> None:
    case = replace(case, lengths=(140,) * 5, queries=queries)
    call = case.call(place_of(backend, device))
    table, lengths = call.batch.page_table.clone(), call.batch.lengths.clone()
    table[1, 3] = call.cache.k.shape[0]
    table[2, 0] = -1
    lengths[4] = -5
    for window, length in itertools.product(((-1, 0), (3, 0)), (1 << 30, (1 << 31) - 1)):
        lengths[3] = length
        changed = dataclasses.replace(call, batch=PagedBatch(table, lengths), how=replace(call.how, window=window))
        actual = attend(library_of(backend, case), changed, replace(H100, sm_count=3))
        for x, y in zip(actual, paged_tensors.attend(changed.q, changed.cache, changed.batch, changed.how), strict=True):
            assert torch.equal(x.isnan(), y.isnan())
        assert bool(actual[0][0].isfinite().all()) and bool(actual[0][3].isnan().all()) and not actual[0][4].any()


PACKED_CASES = {
    "e4m3": (FP8, (2, 2, 1, 0), 2),
    "rows without queries": (replace(FP8, queries=1), (0, 1, 1, 0), 2),
    "by token, 128 channels": (replace(BY_TOKEN, queries=2, **WIDE), (2, 1, 1, 2), 3),
    "bf16, a window": (replace(HALF, window=(70, 0), queries=5), (5, 1, 4, 2), 3),
    "several row tiles": (replace(FP8, lengths=(200, 90, 7), queries=29), (29, 3, 12), 2),
    "many parts": (replace(HALF, lengths=(64 * 30, 5), queries=1, sinks=True), (1, 1), 40),
    "256 channels, soft cap": (replace(FP8, lengths=(130, 60), queries=2, softcap=3.0, **WIDEST), (1, 2), 2),
    "many short": (replace(FP8, lengths=(3, 70) * 20, group=1, queries=2), (1, 2) * 20, 5),
}
"""By what is special, with the queries of each row, and the number of SMs."""


def check_packed(library: build.Library | None, case: Case, counts: tuple[int, ...], device: torch.device, sms: int) -> None:
    """Also of tokens of no row, and of rows that have more than the batch says, which are NaN."""
    call = case.call(device)
    for most in {max(counts), max(max(counts) - 1, 1)}:
        q, batch = packed(call.q, call.batch, counts, most)
        changed = dataclasses.replace(call, q=q, batch=batch)
        actual = attend(library, changed, replace(H100, sm_count=H100.sm_count if library is None else sms))
        expected = paged_tensors.attend(q, call.cache, batch, call.how)
        assert actual[0].shape == q.shape and actual[1].shape == q.shape[1::-1]
        assert not actual[0][sum(counts) :].any() and bool((actual[1][:, sum(counts) :] == -torch.inf).all())
        assert bool(actual[0].isnan().any()) == any(most < n and length > 0 for n, length in zip(counts, case.lengths, strict=True))
        assert_close(actual, expected, case.dtype, has_fp8_sums(changed))


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_queries(name: str, backend: str, device: torch.device) -> None:
    case, counts, sms = PACKED_CASES[name]
    check_packed(library_of(backend, case), case, counts, place_of(backend, device), sms)


PACKED_MUTANTS = {
    "queries of the first row": ("tile/paged_schedule.h", "query = row.begin + number;", "query = number;"),
    "rows with too many": ("tile/paged_schedule.h", "exists = exists && given <= p.q_length;", "exists = exists;"),
    "tokens that aren't there": ("tile/paged_schedule.h", "count = min(given, end),", "count = given,"),
    "the row's own numbers": ("tile/paged_schedule.h", "row.begin = theirs(begin)", "row.begin = begin"),
    "queries of no row": ("tile/paged_parts.h", "query < p.tokens; query", "query < 0; query"),
    "queries of a row with too many": ("tile/paged_parts.h", "batch, dim, number < row.count);", "batch, dim, false);"),
    "queries that are no tokens": ("tile/paged_parts.h", "number < given; ++number", "number < row.count; ++number"),
    "rows of the output": ("tile/paged_schedule.h", "head * p.out_strides[1] + query * p.out_strides[2]", "head + query * p.out_strides[2]"),
}
"""Mutants that only packed queries show. The last one shows without them."""

MUTANTS = {
    "missing rescale": ("tile/token_rows.h", "o[t][i] * alpha[i / 4][i % 2])", "o[t][i])"),
    "P of another block's largest score": ("tile/token_rows.h", "fresh[t][i], beta[i / 4][i % 2],", "fresh[t][i], 1.0f,"),
    "P relative to a warp's largest score": ("tile/token_rows.h", "exchange.largest(largest, f);", ""),
    "channels of V exchanged": ("tile/token_rows.h", "t % 2 ? 0x7362 : 0x5140", "t % 2 ? 0x7362 : 0x4051"),
    "tokens of V exchanged": ("tile/token_rows.h", "panel + odd +", "panel + even +"),
    "P not transposed": ("tile/token_rows.h", "= ptx::transposed(words[i]);", "= words[i];"),
    "P read before all have written it": (
        "tile/token_rows.h",
        "ptx::warpgroup_sync(1);\n    Products<TILES, GROUPS> fresh",
        "Products<TILES, GROUPS> fresh",
    ),
    "what is behind the last token": ("tile/token_rows.h", "remove_nonfinite(v);  //", ";  //"),
    "tokens behind the last one": ("tile/token_rows.h", " || token > of_row.y) score", ") score"),
    "values that other warps find": ("tile/token_rows.h", "more.nonfinite[warp] = nonfinite;", "more.nonfinite[warp] = warp == 3 && nonfinite;"),
    "values that are not finite": ("tile/token_rows.h", "multiply(nan_of_v, a, zeros);  //", "//"),
    "keys of the first step": ("tile/token_rows.h", "b[group] + 2 * i)", "b[group])"),
    "P of the other query": ("tile/token_rows.h", "e4m3x4(p[0], p[1],", "e4m3x4(p[1], p[0],"),
    "one token too few": ("tile/token_rows.h", "p.capacity - 1) / TOKENS + 1 - first, 1)", "p.capacity - 1) / TOKENS - first, 1)"),
    "page of another head": (
        "tensors_blocks.h",
        "p.k_map, &shared.full[stage], byte, slot_of_copy, found, tile.kv_head",
        "p.k_map, &shared.full[stage], byte, slot_of_copy, found, 0",
    ),
    "the page before": ("tensors_blocks.h", "? pages[page] : -1", "? pages[max(page - 1, 0)] : -1"),
    "the first slots of a page": (
        "tensors_blocks.h",
        "p.v_map, &shared.full[stage], byte, slot_of_copy, found,",
        "p.v_map, &shared.full[stage], byte, 0, found,",
    ),
    "copies one on another": ("tensors_blocks.h", "+ copy * copies.tokens * PANEL", "+ 0 * copies.tokens * PANEL"),
    "V's scale forgotten": ("tensors_blocks.h", "return restore * (", "return 1.0f * ("),
    "K's scale of the first head": (
        "tensors_blocks.h",
        "k = p.k_scale[tile.batch * p.k_scale_strides[0] + tile.kv_head *",
        "k = p.k_scale[0 *",
    ),
    "stage released by one warp": (
        "decode_tensors.cuh",
        "mbarrier_init(&empty[stage], DECODER_WARPS)",
        "mbarrier_init(&empty[stage], 1)",
    ),
    "channels of another lane": ("tile/token_rows.h", "const int byte = channel() *", "const int byte = (channel() ^ 4) *"),
    "queries written before all have read the last ones": ("decode_tensors.cuh", "ptx::warpgroup_sync(1);  // nobody reads", "// nobody reads"),
    "a sink in every part": ("tensors_blocks.h", "p.sinks == nullptr || tile.begin != 0 ||", "p.sinks == nullptr ||"),
    "a cap without its factor": ("tile/token_rows.h", "return softcap * LOG2E *", "return softcap *"),
    "a sink of every lane": ("decode_tensors.cuh", "if (sink != -INFINITE && f.row == 0) rows.l", "if (sink != -INFINITE) rows.l"),
}

BY_TOKEN_MUTANTS = {
    "scale of V forgotten": ("tile/token_rows.h", "s[group][2 * h + r] *= scales.v[h];", ";"),
    "scale of P forgotten": ("tile/token_rows.h", "beta[group][r] *= scale;", ";"),
    "scale of K forgotten": ("tile/token_rows.h", "factor[group][r] * scales.k[h], false)", "factor[group][r], false)"),
    "scales of other slots": ("tensors_blocks.h", "slot_of_copy, copy) + i % copies.tokens", "slot_of_copy, copy)"),
    "scales that may come later": ("tensors_blocks.h", "ptx::cp_async_arrive(&shared.full[stage]);", "ptx::mbarrier_arrive(&shared.full[stage]);"),
}

MANY_MUTANTS = {
    "sums of a group forgotten": ("tile/paged_parts.h", "rows_of_all[place + mine] = {largest, of_mine};", ";"),
    "parts in place of groups": ("tile/paged_parts.h", "step = final && grouped ? MEMBERS : 1;", "step = 1;"),
    "queries that are not finite": ("many_tensors.h", "if (!is_finite_row<C, T>(shared.q[room.stage], mine) && seen", "if (false && seen"),
    "sums of another unit": ("tile/many_rows.h", "of[i] *= kept[i / 2];", ";"),
    "l of another unit": ("tile/many_rows.h", "fmaf(l[h], kept[h], sum)", "l[h] + sum"),
    "a largest score of a lane": ("tile/many_rows.h", "x = op(x, __shfl_xor_sync(~0u, x, 1));", ""),
    "a largest score of every second token": ("tile/many_rows.h", "fmaxf(of_parity[0], of_parity[1])", "of_parity[0]"),
    "chunks exchanged": ("tile/checked_tokens.h", "(panel + at) = low", "(panel + at) = high"),
    "values that aren't swizzled": (
        "tile/checked_tokens.h",
        "ptx::swizzled<HALF_PANEL>(token(thread), 2 * (channel % HalfBlock::CHANNELS))",
        "128 * token(thread) + 2 * (channel % HalfBlock::CHANNELS)",
    ),
    "values written where others are read": ("many_tensors.h", "ptx::mbarrier_wait(&shared.taken[slot.stage], slot.phase ^ 1);", ""),
    "values that others still convert": (
        "many_tensors.h",
        "if (!is_checked) ptx::mbarrier_wait(&shared.checked[slot.stage], slot.phase);",
        "",
    ),
    "a tile's first values that others still convert": (
        "many_tensors.h",
        "ptx::mbarrier_wait(&shared.checked[slot.stage], slot.phase);\n      uint32_t unusual",
        "uint32_t unusual",
    ),
    "keys that may come later": ("many_tensors.h", "if (!is_checked) ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);", ""),
    "a look ahead without room": ("many_tensors.h", "!shares_blocks || Shape::slots >= 4;", "true;"),
    "tokens of the block before that are not finite": ("many_tensors.h", "if (more) unusual = ", "if (false) unusual = "),
    "a stage released before values are converted": ("many_tensors.h", "users + (C.fp8 ? DECODER_WARPS : 0)", "users"),
    "tokens that are not finite": ("many_tensors.h", ".warps[thread / 32] = any;", ".warps[thread / 32] = false;"),
    "of tokens 8 rows on": ("tile/checked_tokens.h", "(thread & 8 ? second : first)", "first"),
    "tokens that nobody sees": ("many_tensors.h", "Tokens::template convert<false>(v,", "Tokens::template convert<true>(v,"),
    "tokens in half precision that nobody sees": ("many_tensors.h", "Tokens::remove(v, thread);", ";"),
    "keys in half precision that are not finite": (
        "tile/checked_tokens.h",
        "for (const uint8_t* of : {k, v}) {",
        "for (const uint8_t* of : {v}) {",
    ),
    "rows of masked blocks": ("many_tensors.h", "if (start < by_all.first || start + TOKENS - 1 > by_all.last) Rows", "if (false) Rows"),
    "a row's last token": ("tile/many_rows.h", "token < begin || token > last", "token < begin || token >= last"),
    "a row's last block": ("many_tensors.h", "seen_blocks.first + seen_blocks.count);", "seen_blocks.first + seen_blocks.count - 1);"),
    "the next tile's first row": (
        "many_tensors.h",
        "last_seen(p, start + query_of(p, first_row), row.end)",
        "last_seen(p, start + row.count - 1, row.end)",
    ),
    "pages that aren't there": ("many_tensors.h", "bool found = shared.missing[ring.stage] >> (token >> copies.shift) & 1;", "bool found = false;"),
    "the row tile before": ("tile/paged_schedule.h", "row_tile = find_unit(", "row_tile = -1 + find_unit("),
    "row tiles beyond 32": ("tile/paged_schedule.h", "row_tile = find_unit(", "row_tile = 31 & find_unit("),
    "a row's largest magnitude of a lane": ("many_tensors.h", "of_two = __vmaxu2(of_two, __shfl_xor_sync(~0u, of_two, distance));", ";"),
    "signs among magnitudes": ("many_tensors.h", "return word & 0x7FFF7FFF;", "return word;"),
    "queries of the first row of a step": ("many_tensors.h", "if (find(first + i * STEP, from)) channels", "if (find(first, from)) channels"),
    "pages of another block": ("tensors_blocks.h", "exist >> mine & (", "exist & ("),
    "a sink of every lane of a row": ("tile/many_rows.h", "if (counts) l[h] += UNIT;", "l[h] += UNIT;"),
    "a sink of both warpgroups": ("many_tensors.h", "shares_blocks && number > 0 ? -INFINITE : sink_of", "sink_of"),
    "queries that wgmma doesn't see": ("many_tensors.h", "ptx::fence_proxy_async();  // wgmma reads queries", ""),
    "V's scale of no token": ("tile/many_rows.h", "x *= fabsf(of_token) <= -NOTHING ? of_token : 0.0f", "x *= 1.0f"),
    "P's scale of the block before": ("tile/many_rows.h", "kept[h] = before * inverse,", "kept[h] = before,"),
    "a scale that is forgotten": ("tile/many_rows.h", "of[i] *= scale[i / 2];", "of[i] *= 1.0f / UNIT;"),
    "blocks that both warpgroups attend to": ("many_tensors.h", "if (shares_blocks && block < upto) go_on();", ""),
    "the other warpgroup's sum": ("tile/many_rows.h", "l_of[h] * of_theirs[h]", "l_of[h]"),
    "the other warpgroup's output": ("many_tensors.h", "fmaf(theirs.z, factors.w,", "fmaf(theirs.z, 1.0f,"),
    "a tile found in a room that is in use": ("many_tensors.h", "ptx::mbarrier_wait(&shared.attended[room.stage], room.phase ^ 1);", ""),
    "tokens in half precision that are still multiplied": (
        "many_tensors.h",
        "rows.finish_products();\n          __syncwarp();\n          free_values(values);",
        "free_values(values);",
    ),
    "values that are still multiplied": (
        "many_tensors.h",
        "rows.finish_products();\n        __syncwarp();\n        if constexpr (C.by_token)",
        "__syncwarp();\n        if constexpr (C.by_token)",
    ),
    "rows of the first warpgroup": ("many_tensors.h", "+ first * TokenPanels<row_bytes<C>>::PANEL;", ";"),
}
"""Mutants that only many rows show."""

MUTANT_CASE = replace(FP8, lengths=(420, 140, 70), queries=2, kv_heads=2, group=4, sinks=True, window=(300, 0), softcap=5.0, seed=2, **WIDE)


def test_mutants_change_a_source() -> None:
    emulation.assert_anchored([*MUTANTS.values(), *BY_TOKEN_MUTANTS.values(), *PACKED_MUTANTS.values(), *MANY_MUTANTS.values()])


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", PACKED_MUTANTS)
def test_packed_mutant_is_seen(name: str) -> None:
    case, counts, sms = PACKED_CASES["several row tiles"]
    library = emulation.tensors_decoder(config_of(case), PACKED_MUTANTS[name])

    def check_all() -> None:
        check(library, case, torch.device("cpu"), sms)
        check_packed(library, case, counts, torch.device("cpu"), sms)
        check_packed(library, replace(case, lengths=(15, 90, 0)), (12, 3, 2), torch.device("cpu"), sms)

    with pytest.raises(AssertionError):
        check_all()


def test_the_cases_of_the_mutants_are_right(backend: str, device: torch.device) -> None:
    for case in (MUTANT_CASE, replace(MUTANT_CASE, scales=("token", "token"))):
        for page, sms in ((16, 3), (128, 1)):
            check(library_of(backend, case), replace(case, page=page), place_of(backend, device), sms)


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", (*MUTANTS, *BY_TOKEN_MUTANTS))
def test_mutant_is_seen(name: str) -> None:
    case = replace(MUTANT_CASE, scales=("token", "token")) if name in BY_TOKEN_MUTANTS else MUTANT_CASE
    library = emulation.tensors_decoder(config_of(case), (MUTANTS | BY_TOKEN_MUTANTS)[name])

    def check_all() -> None:
        check(library, case, torch.device("cpu"), 3)
        check(library, replace(case, page=128), torch.device("cpu"), 1)
        for token, window in ((65, case.window), (10, (3, 0))):  # a value that some queries see, and one that none sees
            call = replace(case, lengths=(70, 70), queries=8, group=1, window=window).call(torch.device("cpu"))
            call.cache.v.view(torch.uint8)[int(call.batch.page_table[1, token // 16]), token % 16, 1, 7] = 0xFF
            expected = paged_tensors.attend(call.q, call.cache, call.batch, call.how)
            assert_close(attend(library, call, replace(H100, sm_count=2)), expected, case.dtype)

    with pytest.raises(AssertionError):
        check_all()


MANY_CASES = {
    "e4m3": (replace(FP8, lengths=(420, 140, 70), queries=16, kv_heads=1, sinks=True, seed=2), 3),
    "e4m3, 128 channels, window, soft cap": (
        replace(FP8, lengths=(300, 64), queries=9, kv_heads=2, group=5, window=(150, 0), softcap=5.0, **WIDE),
        2,
    ),
    "by token": (replace(BY_TOKEN, lengths=(420, 70), queries=16, kv_heads=1, seed=4), 2),
    "bf16": (replace(HALF, lengths=(420, 70), queries=16, kv_heads=1, **WIDE), 1),
    "six row tiles": (replace(FP8, lengths=(200, 90), queries=110, kv_heads=1), 4),
    "groups of parts": (replace(FP8, lengths=(64 * 20,), queries=9, kv_heads=1), 10),
    "35 row tiles": (replace(FP8, lengths=(560,), queries=555, kv_heads=1, group=8, window=(20, 0)), 24),
    "256 channels": (replace(FP8, lengths=(200, 90), queries=20, kv_heads=1, **WIDEST), 1),
    "two tiles of rows": (replace(FP8, lengths=(250, 190), queries=70, kv_heads=1, group=2, **WIDE), 1),
}
"""What mutants of many rows are shown, with the number of SMs."""


def many_calls_are_right(libraries: dict[decode_tensors.DecodeTensorsConfig, build.Library]) -> None:
    """Also with values that are not finite, which all queries of a row see, or some; with a page that isn't there; and with
    an infinite query."""
    for case, sms in MANY_CASES.values():
        library = libraries[config_of(case)]
        check(library, case, torch.device("cpu"), sms)
        call = replace(case, lengths=(90,) * 4).call(torch.device("cpu"))
        bits = call.cache.v.view(torch.uint8 if case.dtype == E4M3 else torch.int16)
        for row, token in enumerate((20, 28, 85)):
            bits[int(call.batch.page_table[row, token // 16]), token % 16, 0, 7] = 0xFF if case.dtype == E4M3 else 0x7FC0
        if case.dtype != E4M3:
            call.cache.k[int(call.batch.page_table[2, 50 // 16]), 50 % 16, 0, 7] = -torch.inf  # a score of -inf, or NaN
        call.batch.page_table[3, 1] = -1
        assert_close(attend(library, call, replace(H100, sm_count=2)), paged_tensors.attend(call.q, call.cache, call.batch, call.how), case.dtype)
    for name in ("e4m3", "bf16"):
        case = replace(MANY_CASES[name][0], lengths=(90,))
        call = case.call(torch.device("cpu"))
        if name == "bf16":  # scores of -inf
            call.cache.k.abs_()
        call.q[0, 0, 3, 5] = -torch.inf
        expected = paged_tensors.attend(call.q, call.cache, call.batch, call.how)
        assert_close(attend(libraries[config_of(case)], call, replace(H100, sm_count=1)), expected, case.dtype)


def test_the_cases_of_many_rows_are_right() -> None:
    many_calls_are_right({config_of(case): emulation.tensors_decoder(config_of(case)) for case, _ in MANY_CASES.values()})


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", MANY_MUTANTS)
def test_mutant_of_many_rows_is_seen(name: str) -> None:
    libraries = {config_of(case): emulation.tensors_decoder(config_of(case), MANY_MUTANTS[name]) for case, _ in MANY_CASES.values()}
    with pytest.raises(AssertionError):
        many_calls_are_right(libraries)


def test_which_tiles_a_call_takes() -> None:
    """Those of few rows where they are faster."""
    cpu = torch.device("cpu")
    for case, most in ((FP8, 8), (replace(FP8, scales=("tensor", "row")), 8), (BY_TOKEN, 16), (HALF, 16)):
        for rows, has_many in ((most, False), (most + 1, True)):
            call = replace(case, lengths=(70,), queries=rows, group=1).call(cpu)
            assert decode_tensors.choose(call.q, call.cache, call.batch).has_many == has_many, (case, rows)


def test_unsupported_calls_say_why() -> None:
    cpu = torch.device("cpu")
    for case, reason in (
        (replace(FP8, query_dtype=torch.float32), "query is torch.float32"),
        (replace(FP8, dim=40), "head dims are"),
        (replace(FP8, page=48), "pages have 48 tokens"),
        (replace(FP8, page=4), "pages have 4 tokens"),
        (replace(FP8, scales=("token", "head")), "one of k_scale and v_scale"),
    ):
        call = case.call(cpu)
        assert reason in (decode_tensors.unsupported_call(call.q, call.cache, call.batch, call.how, H100) or ""), reason
    call = FP8.call(cpu)
    longest = torch.empty(4, 6, 1, 64, dtype=torch.bfloat16).expand(-1, -1, 5_592_406, -1)  # in groups of three
    assert "5592406 of a row of the batch; it takes 1 to 16777216" in (
        decode_tensors.unsupported_call(longest, call.cache, call.batch, call.how, H100) or ""
    )
    how, unaligned = replace(call.how, softmax_scale=-0.1), torch.zeros(4, 6, 3, 65, dtype=torch.bfloat16)[..., 1:]
    assert "softmax_scale is -0.1" in (decode_tensors.unsupported_call(call.q, call.cache, call.batch, how, H100) or "")
    assert "query has strides" in (decode_tensors.unsupported_call(unaligned, call.cache, call.batch, call.how, H100) or "")
    assert "it needs sm_90" in (decode_tensors.unsupported_call(call.q, call.cache, call.batch, call.how, ARCHITECTURES[100]) or "")
    one = call.cache.k[:, :, :1].expand(-1, -1, 2, -1)
    shared = dataclasses.replace(call.cache, k=one, v=one)
    assert "k has strides" in (decode_tensors.unsupported_call(call.q, shared, call.batch, call.how, H100) or "")
    rows = replace(FP8, queries=33).call(cpu)  # those for many rows have other bits
    invariant = replace(rows.batch, batch_invariant=True)
    assert decode_tensors.choose(rows.q, rows.cache, rows.batch).rows == 128 and decode_tensors.choose(rows.q, rows.cache, invariant).rows == 32
    assert "it takes 1 to 96 of the heads" in (decode_tensors.unsupported_call(rows.q, rows.cache, invariant, rows.how, H100) or "")
    half = replace(HALF, query_dtype=torch.float16).call(cpu)
    assert "k is torch.bfloat16" in (decode_tensors.unsupported_call(half.q.half(), half.cache, half.batch, half.how, H100) or "")
