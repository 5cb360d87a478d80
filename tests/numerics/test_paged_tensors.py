"""Caches of other engines: the kernel attends as the oracle, which is exact attention to what they hold; what is written; and what is never read."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from closeness import relative
from foreign import E4M3, KINDS, LAYOUTS, Call, Case, assert_close, cases, has_fp8_sums
from fp8attn import PagedBatch, PagedTensors, paged_tensors
from fp8attn.device import device_of
from fp8attn.triton import paged_tensors as kernels

BACKENDS = ("modelled", "triton")
BY_TOKEN = Case(scales=("token", "token"))


def answer(call: Call, backend: str, **change: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the public function."""
    how, given = call.how, {"query": call.q, "cache": call.cache, "batch": call.batch} | change
    options = dict(window=how.window, softcap=how.softcap, sinks=how.sinks, out_dtype=torch.float32, return_lse=True, backend=backend)
    return fp8attn.paged_sdpa(**given, **options)  # type: ignore[arg-type, return-value]


def check(case: Case, splits: int, device: torch.device) -> None:
    """The kernel attends as the oracle."""
    call = case.call(device)
    found = kernels.attend(call.q, call.cache, call.batch, call.how, device_of(device), torch.float32, splits=splits)
    assert_close(found, paged_tensors.attend(call.q, call.unrounded(), call.batch, call.how), case.dtype)


@settings(max_examples=12)
@given(case=cases, splits=st.integers(1, 3))
def test_the_kernel_attends_as_the_oracle(device: torch.device, case: Case, splits: int) -> None:
    check(case, splits, device)


@pytest.mark.thorough
@settings(max_examples=100)
@given(case=cases, splits=st.integers(1, 5))
def test_the_kernel_attends_as_the_oracle_in_many_cases(device: torch.device, case: Case, splits: int) -> None:
    check(case, splits, device)


@pytest.mark.parametrize("layout, kind", [*zip(LAYOUTS, ("tensor", "row", "token", torch.float16, "head"), strict=True)])
def test_the_oracle_is_exact_attention_to_what_a_cache_holds(device: torch.device, layout: str, kind: str | torch.dtype) -> None:
    """Up to the rounding of Q and P to e4m3: of every layout, with windows, soft caps and sinks."""
    case = Case((300, 1, 129), 7, 32, layout=layout, seed=3)
    case = replace(case, scales=(kind, kind)) if isinstance(kind, str) else replace(case, dtype=kind)
    bound = 0.06 if isinstance(kind, str) else 1e-3
    for options in ({}, {"window": (40, 0)}, {"window": (-1, -1), "softcap": 4.0}, {"sinks": True}):
        call = replace(case, **options).call(device)
        out, lse = answer(call, "modelled")
        for row, (k, v) in enumerate(call.tokens):
            count = min(k.shape[1], 7)
            expected, expected_lse = fp8attn.reference_sdpa(
                call.q[row : row + 1, :, :count].float(), k[None], v[None], enable_gqa=True, window=call.how.window, sinks=call.how.sinks,
                causal_alignment="bottom_right", softcap=call.how.softcap, return_lse=True,
            )  # fmt: skip
            assert relative(out[row, :, :count], expected[0]) <= bound, (options, row)
            torch.testing.assert_close(lse[row, :, :count], expected_lse[0], rtol=bound, atol=2 * bound)
            assert not out[row, :, count:].any() and bool((lse[row, :, count:] == -torch.inf).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", (Case((40,) * 5), Case((40,) * 5, dtype=torch.float16, page=48, sinks=True)), ids=("e4m3", "half"))
def test_numbers_out_of_range_are_no_indices(device: torch.device, backend: str, case: Case) -> None:
    """A page or a length that isn't there gives NaN to the rows that see it, and to no other."""
    call = replace(case, queries=30).call(device)
    right, _ = answer(call, backend)
    table, lengths, page = call.batch.page_table.clone(), call.batch.lengths.clone(), case.page
    every, width = call.cache.k.shape[0], table.shape[1]
    table[1, 40 // page] = every
    table[2, 0] = -1
    table[0, -1] = 1 << 30  # no token is there
    lengths[3] = 1 << 30
    lengths[4] = -5
    out, lse = answer(call, backend, batch=PagedBatch(table, lengths))
    assert torch.equal(out[0], right[0]) and torch.equal(out.isnan().any(-1), lse.isnan())
    first = max(40 // page * page - 10, 0)  # the query that sees the first token of the missing page
    assert torch.equal(out[1, :, :first], right[1, :, :first]) and bool(out[1, :, first:].isnan().all())
    assert bool(out[2:4].isnan().all()) and not out[4].any()
    # a window that begins behind the missing page
    near = dataclasses.replace(call, how=replace(call.how, window=(3, 0)))
    assert bool(answer(near, backend, batch=PagedBatch(table, lengths))[0][2, :, -4:].isfinite().all() if page < 37 else True)
    # one token more than the table has pages for
    lengths.fill_(width * page + 1)
    out, _ = answer(call, backend, batch=PagedBatch(call.batch.page_table, lengths))
    assert bool(out[:, :, -1].isnan().all())


@pytest.mark.parametrize(
    "kind, what",
    [(kind, what) for kind in ("token", "row") for what in ("q", "k", "v", "k_scale", "v_scale")] + [(torch.float16, what) for what in "qkv"],
)
def test_what_is_not_finite_reaches_the_rows_that_see_it(device: torch.device, kind: str | torch.dtype, what: str) -> None:
    case = replace(BY_TOKEN, scales=(kind, kind)) if isinstance(kind, str) else Case(dtype=kind)
    call = replace(case, lengths=(70, 70), queries=12).call(device)
    token, number, slot = 65, int(call.batch.page_table[1, 65 // 16]), 65 % 16
    expected = torch.zeros(2, 6, 12, dtype=torch.bool, device=device)
    if what == "q":
        call.q[1, 4, 5, 3] = torch.inf
        expected[1, 4, 5] = True
    elif what in ("k", "v"):
        x = getattr(call.cache, what)
        if kind == torch.float16:
            x[number, slot, 1, 7] = -torch.inf
        else:
            x.view(torch.uint8)[number, slot, 1, 7] = 0xFF
        expected[1, 3:, token - 58 :] = True
    else:
        scale = getattr(call.cache, what)
        scale[(number, slot, 1) if kind == "token" else (1, 1)] = torch.nan
        expected[1, 3:, (token - 58 if kind == "token" else 0) :] = True
    for backend in BACKENDS:
        out, lse = answer(call, backend)
        assert torch.equal(out.isnan().all(-1), expected) and torch.equal(out.isnan().any(-1), expected) and torch.equal(lse.isnan(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", (BY_TOKEN, Case(dtype=torch.float16)), ids=("e4m3", "half"))
def test_a_query_is_the_same_in_a_prefill_and_in_a_step(device: torch.device, backend: str, case: Case) -> None:
    call = replace(case, lengths=(150, 90), queries=90).call(device)
    whole = answer(call, backend)
    for earlier in (0, 30, 80):
        lengths = call.batch.lengths - earlier
        query = call.q[:, :, 89 - earlier : 90 - earlier]
        step = answer(call, backend, query=query, batch=replace(call.batch, lengths=lengths))
        assert_close(step, tuple(x[:, :, 89 - earlier : 90 - earlier] for x in whole), case.dtype)


@settings(max_examples=12)
@given(case=cases, counts=st.lists(st.integers(0, 40), min_size=3, max_size=3))
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_are_as_each_alone(device: torch.device, backend: str, case: Case, counts: list[int]) -> None:
    """With any numbers of queries, and zeros behind the last one."""
    call = replace(case, ragged=False, queries=40).call(device)
    numbers = [min(pair) for pair in zip(counts, case.lengths, strict=False)]
    numbers += [0] * (len(case.lengths) - len(numbers))
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    cache = call.cache if backend == "modelled" else call.unrounded()
    query_dtype = call.q.dtype if cache is call.cache else torch.float32
    wanted, wanted_lse = paged_tensors.attend(call.q.to(query_dtype), cache, replace(call.batch, counts=ints(numbers)), call.how)
    edges = [0, *itertools.accumulate(numbers)]
    parts = [call.q[row, :, :n].transpose(0, 1) for row, n in enumerate(numbers)]
    q = torch.cat([*parts, torch.full_like(call.q[0, :, :3].transpose(0, 1), torch.nan)])
    packed = replace(call.batch, cu_seqlens=ints(edges), max_count=max(*numbers, 1) if case.seed % 2 else None)
    out, lse = answer(replace(call, q=q), backend, batch=packed, scale=call.how.softmax_scale)
    assert out.shape == (*q.shape[:2], wanted.shape[3]) and lse.shape == (q.shape[1], q.shape[0])
    assert not out[-3:].any() and bool((lse[:, -3:] == -torch.inf).all())
    for row, (first, last) in enumerate(itertools.pairwise(edges)):
        found = out[first:last].transpose(0, 1), lse[:, first:last]
        expected = wanted[row, :, : last - first], wanted_lse[row, :, : last - first]
        if backend == "modelled":
            assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, expected, strict=True))
        elif last > first:
            assert_close(found, expected, case.dtype)


def written(case: Case, device: torch.device, tokens: int, slots: list[int]) -> tuple[PagedTensors, tuple[torch.Tensor, ...]]:
    """An empty cache of a case, and new keys, values and slots."""
    call = replace(case, lengths=(1, 1)).call(device)
    g = torch.Generator().manual_seed(case.seed)
    k, v = (torch.randn(case.kv_heads, tokens, dim, generator=g) * 3.0 for dim in (case.dim, case.value_dim))
    k[0, ::3, 1], v[0, 1::4], v[-1, ::5, 2] = torch.inf, 0.0, 1e4
    k, v = (x.to(device, case.query_dtype if case.dtype == E4M3 else case.dtype).transpose(0, 1) for x in (k, v))
    return call.cache, (k, v, torch.tensor(slots, device=device))


SLOTS = st.lists(st.integers(-3, 200), min_size=1, max_size=20, unique=True)


@settings(max_examples=10)
@given(case=cases, slots=SLOTS, wide=st.booleans())
def test_the_kernel_writes_the_bytes_of_the_definition(device: torch.device, case: Case, slots: list[int], wide: bool) -> None:
    """And nothing else: into every layout, with every scale, to slots that aren't there, too."""
    case = replace(case, scales=tuple("head" if kind == "row" else kind for kind in case.scales))
    found = []
    for backend in BACKENDS:
        cache, (k, v, at) = written(case, device, len(slots), slots)
        fp8attn.write_to_pages(k, v, cache, at if wide else at.int(), backend=backend)
        found.append(cache.tensors())
    for x, y in zip(*found, strict=True):
        assert torch.equal(*(z.contiguous().view(-1).view(torch.uint8) for z in (x, y)))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@settings(max_examples=12)
@given(case=cases, counts=st.lists(st.integers(0, 6), min_size=3, max_size=3), packed=st.booleans(), missing=st.booleans())
def test_the_kernel_writes_a_batch_s_tokens_where_its_pages_are(
    device: torch.device, case: Case, counts: list[int], packed: bool, missing: bool
) -> None:
    """As the definition does, which finds slots one by one: with counts and packed tokens, and pages that aren't there."""
    rows = len(case.lengths)
    edges = [0, *itertools.accumulate(min(pair) for pair in zip(counts[:rows] + [1] * rows, case.lengths, strict=False))]
    found = []
    for backend in (*BACKENDS, "by slots"):
        call = replace(case, queries=6).call(device)
        g = torch.Generator().manual_seed(case.seed)
        total = edges[-1] + 2 if packed else 6
        k, v = (torch.randn(rows, case.kv_heads, total, dim, generator=g) * 3.0 for dim in (case.dim, case.value_dim))
        k, v = (x.to(device, call.q.dtype) for x in (k, v))
        batch, table = call.batch, call.batch.page_table.clone()
        if missing:
            table[0, 0] = call.cache.k.shape[0]
        batch = replace(batch, page_table=table, counts=None) if packed else replace(batch, page_table=table)
        if packed:
            k, v = (x[0].transpose(0, 1) for x in (k, v))
            batch = replace(batch, cu_seqlens=torch.tensor(edges, dtype=torch.int32, device=device))
        if backend == "by slots":
            for row, (k_scale, v_scale) in enumerate(zip(*(scales_of_rows(x, rows) for x in (call.cache.k_scale, call.cache.v_scale)), strict=True)):
                write_row(PagedTensors(call.cache.k, call.cache.v, k_scale, v_scale), (k, v), batch, row)
        else:
            assert fp8attn.write_to_pages(k, v, call.cache, batch, backend=backend) is None
        found.append(call.cache.tensors())
    for x, y, z in zip(*found, strict=True):
        assert torch.equal(bytes_of(x), bytes_of(y)) and torch.equal(bytes_of(x), bytes_of(z))


def scales_of_rows(scale: torch.Tensor | float | None, rows: int) -> list[torch.Tensor | float | None]:
    """A scale as each row of a batch has it."""
    return [*scale] if isinstance(scale, torch.Tensor) and scale.dim() == 2 else [scale] * rows


def write_row(cache: PagedTensors, new: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch, row: int) -> None:
    """Write the new tokens of one row of a batch by their slots."""
    end, table = int(batch.lengths[row]), batch.page_table[row].tolist()
    if batch.cu_seqlens is None:
        count = min(new[0].shape[2] if batch.counts is None else int(batch.counts[row]), end)
        parts = [x[row, :, :count].transpose(0, 1) for x in new]
    else:
        first, last = batch.cu_seqlens[row : row + 2].tolist()
        count = last - first
        parts = [x[first:last] for x in new]
    slots = []
    for position in range(end - count, end):
        number = table[position // cache.page]
        slots.append(number * cache.page + position % cache.page if 0 <= number < cache.k.shape[0] else -1)
    fp8attn.write_to_pages(*parts, cache, torch.tensor(slots, dtype=torch.long, device=cache.k.device), backend="modelled")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", (BY_TOKEN, Case(dtype=torch.float16, page=48)), ids=("e4m3", "half"))
def test_new_tokens_are_written_and_attended_to(device: torch.device, backend: str, case: Case) -> None:
    """By one call, of a batch and of packed tokens, as by two."""
    for packed in (False, True):
        found = []
        for in_one_call in (False, True):
            call = replace(case, queries=3, lengths=(70, 4, 33)).call(device)
            g = torch.Generator().manual_seed(7)
            k, v = (torch.randn(3, 2, 3, 64, generator=g).to(device, call.q.dtype) for _ in range(2))
            if packed:
                q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, k, v))
                call = replace(call, q=q, batch=replace(call.batch, cu_seqlens=torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=device)))
            if not in_one_call:
                fp8attn.write_to_pages(k, v, call.cache, call.batch, backend=backend)
            out, lse = answer(call, backend, new=(k, v) if in_one_call else None)
            found.append((out, lse, *call.cache.tensors()))
        assert bool(found[0][0].isfinite().all())
        for x, y in zip(*found, strict=True):
            assert torch.equal(bytes_of(x), bytes_of(y))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_written_is_attended_to(device: torch.device, backend: str) -> None:
    """A prompt and a token of a cache with a scale per token, against exact attention to what was written."""
    g = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2, 71, 2, 64, generator=g).to(device, torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 4, 71, 64, generator=g).to(device, torch.bfloat16)
    pages = torch.full((6, 2, 32, 2, 64), 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    scales = torch.full((2, 6, 32, 2), torch.nan, device=device)
    cache = PagedTensors(pages[:, 0], pages[:, 1], scales[0], scales[1])
    table = torch.tensor([[4, 1, 3], [0, 5, 2]], dtype=torch.int32, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    found = []
    for first, last in ((0, 70), (70, 71)):
        at = torch.arange(first, last, device=device)
        slots = table[:, at // 32].long() * 32 + at % 32
        fp8attn.write_to_pages(*(x[:, first:last].flatten(0, 1) for x in (k, v)), cache, slots.flatten(), backend=backend)
        lengths.fill_(last)
        found.append(fp8attn.paged_sdpa(q[:, :, first:last], cache, PagedBatch(table, lengths), out_dtype=torch.float32, backend=backend))
    expected = fp8attn.reference_sdpa(q.float(), *(x.transpose(1, 2).float() for x in (k, v)), is_causal=True, enable_gqa=True)
    assert relative(torch.cat(found, 2), expected) < 0.06


@pytest.mark.parametrize("what", ("queries", "heads", "rows"))
def test_empty_calls(device: torch.device, what: str) -> None:
    call = Case().call(device)
    rows, heads, queries = (0 if what == name else n for name, n in (("rows", 4), ("heads", 6), ("queries", 3)))
    batch = PagedBatch(call.batch.page_table[:rows], call.batch.lengths[:rows])
    for backend in BACKENDS:
        out, lse = answer(call, backend, query=call.q[:rows, :heads, :queries], batch=batch)
        assert out.shape == (rows, heads, queries, 64) and lse.shape == (rows, heads, queries)


@pytest.mark.gpu
@pytest.mark.parametrize("group", (1, 7, 8))
def test_more_rows_than_16_bits_count(device: torch.device, group: int) -> None:
    """Of a cache in half precision, which isn't copied."""
    length = 66_000 // group // group + 500 if group > 1 else 66_000
    call = Case((length,), length, 64, 1, group, dtype=torch.bfloat16, window=(60, 0)).call(device)
    assert length * group * group > 1 << 16 or group == 1
    assert fp8attn.explain_paged(call.q, call.cache, call.batch, window=(60, 0)).kernel == "decode_tensors"
    assert_close(answer(call, "auto"), paged_tensors.attend(call.q, call.cache, call.batch, call.how), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("case", KINDS)
def test_lengths_change_between_replays(device: torch.device, case: Case) -> None:
    """One graph attends, while lengths change."""
    case = replace(case, lengths=(250, 1, 65, 128), queries=1)
    call = case.call(device)
    answer(call, "auto")  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = answer(call, "auto")
    for lengths in (case.lengths, (3, 0, 65, 100), (249, 1, 64, 127)):
        call.batch.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert_close((out, lse), answer(call, "modelled"), case.dtype, has_fp8_sums(call))


@pytest.mark.gpu
@pytest.mark.parametrize("case", KINDS)
def test_repeated_calls_are_the_first_ones(device: torch.device, case: Case) -> None:
    """The launch cache, also with another layer's tensors."""
    for seed in range(5):
        call = replace(case, seed=seed).call(device)
        assert_close(answer(call, "auto"), answer(call, "modelled"), case.dtype, has_fp8_sums(call))
        found = []
        for backend in ("auto", "modelled"):
            cache, new = written(replace(case, seed=seed), device, 5, [3, 9, -1, 17, 1])
            fp8attn.write_to_pages(*new[:2], cache, new[2], backend=backend)
            found.append(cache.tensors())
        for x, y in zip(*found, strict=True):
            assert torch.equal(*(z.contiguous().view(-1).view(torch.uint8) for z in (x, y)))
