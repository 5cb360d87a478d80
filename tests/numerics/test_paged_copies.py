"""Copies of rows of other engines' caches: the kernel copies what the definition says, attention to copies is attention to the cache, and
calls of prompts, chunks and steps take both kernels together."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from closeness import E4M3_STEP, assert_matches_pipeline, relative
from copying import check_copies, drawn_call, in_passes, ints, nonfinite, packed, room_of
from foreign import E4M3, Call, Case
from fp8attn import PagedBatch, eager, ops, paged_copies, paged_tensors, paged_tensors_ops, reference
from fp8attn.cuda.configs import KEYS
from fp8attn.pages import tokens_of
from fp8attn.quantization import quantize_q

GROUPS_OF_ROWS = st.sampled_from(("tensor", "head", "row"))

any_cases = st.builds(
    Case,
    lengths=st.lists(st.sampled_from((0, 1, 70, 127, 128, 129, 257, 300)), min_size=1, max_size=4).map(tuple),
    queries=st.sampled_from((5, 40, 150)),
    page=st.sampled_from((16, 48, 256)),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 3)),
    dim=st.sampled_from((32, 64, 128)),
    value_dim=st.sampled_from((64, 72, 128)),
    dtype=st.sampled_from((E4M3, E4M3, torch.bfloat16, torch.float16)),
    scales=st.tuples(GROUPS_OF_ROWS, GROUPS_OF_ROWS),
    layout=st.sampled_from(("tokens first", "heads first", "both in a page")),
    window=st.sampled_from(((-1, 0), (-1, 0), (20, 0), (130, 5), (-1, -1))),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
    qk=st.sampled_from(("e4m3", "int8")),
)


drawn_counts = st.lists(st.sampled_from((0, 1, 3, 40)), min_size=2, max_size=4)


@settings(max_examples=30)
@given(case=any_cases, counts=drawn_counts, how=st.integers(0, 2**20))
def test_the_kernel_copies_what_the_definition_says(device: torch.device, case: Case, counts: list[int], how: int) -> None:
    """All of it, in every pass, and clears queries that attend to nothing."""
    call, few = drawn_call(case, device, counts, how)
    if call.q.numel() == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        room = in_passes(patch, call, few) if how % 3 == 0 else room_of(call, few)
    check_copies(call, room, how % room.passes)


def test_kernels_are_not_compiled_again_for_other_numbers_of_rows(device: torch.device) -> None:
    """Their launches are looked up by addresses modulo 16, too."""
    for rows in range(1, 9):
        spans = paged_copies.Spans.empty(rows, device)
        parts = [getattr(spans, field.name) for field in fields(spans)]
        assert [x.shape[0] - rows for x in parts] == [1, 0, 1, 0, 0, 0]
        assert not any(x.data_ptr() % 16 for x in parts) and all(x.is_contiguous() for x in parts)


def by_oracle(call: Call, exact: bool | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention to copies of e4m3 by the oracle of the kernels for packed sequences, and which queries it is of: as the call has them."""
    q, device, tokens = call.q, call.q.device, tokens_of(call.q)
    room = room_of(call, 0)
    spans = paged_copies.place(q, call.batch, room)
    copies = paged_copies.copy(call.cache, call.batch, room, spans)
    codes = quantize_q(paged_tensors_ops._as_batch(q).contiguous(), paged_tensors.QUERIES)
    if q.dim() == 3:
        codes = replace(codes, data=codes.data.transpose(1, 2).contiguous().transpose(1, 2))
    one = paged_tensors_ops._call_of(q, (call.batch, spans, room), copies, codes, call.how, torch.float32)
    arithmetic = reference.Arithmetic(KEYS, exact=exact, caps_codes=exact is not None)
    out, lse = ops.of_sequences(one, functools.partial(ops.modelled, one, arithmetic))
    if q.dim() == 3:
        found = torch.zeros(tokens, dtype=torch.bool, device=device)
        assert call.batch.cu_seqlens is not None
        for begin, count in zip(call.batch.cu_seqlens.tolist(), spans.queries.tolist(), strict=False):
            found[begin : begin + count] = True
        return out[0].transpose(0, 1), lse[0], found
    rows, heads, length = q.shape[:3]
    places = torch.arange(rows, device=device)[:, None] * heads * length + torch.arange(length, device=device)
    found = torch.arange(length, device=device) < spans.queries[:, None]
    return out[0][:, places].transpose(0, 1), lse[0][:, places].transpose(0, 1), found


def by_recipe(call: Call, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention to halves by a recipe: `varlen_sdpa` of placed tokens and their queries, (n, Hq, Dv) and (n, Hq), and which these are."""
    q, how, starts = call.q, call.how, call.batch.cu_seqlens
    room = room_of(call, 0)
    spans = paged_copies.place(q, call.batch, room)
    counts = spans.queries.tolist()
    found = torch.zeros(q.shape[:1] if starts is not None else (q.shape[0], q.shape[2]), dtype=torch.bool)
    for row, count in enumerate(counts):
        own, begin = (found[row], 0) if starts is None else (found, int(starts[row]))
        own[begin : begin + count] = True
    found, everything = found.to(q.device), how.window == (-1, -1)
    out, lse = fp8attn.varlen_sdpa(
        (q if starts is not None else q.transpose(1, 2))[found],
        *(x[0].transpose(0, 1) for x in paged_copies.halves(call.cache, call.batch, room, spans)),
        ints([0, *itertools.accumulate(counts)], q.device), spans.k, seqused_k=spans.keys, is_causal=how.window == (-1, 0),
        window=None if everything else how.window, softcap=how.softcap, sinks=how.sinks, recipe=call.cache.recipe, out_dtype=torch.float32,
        return_lse=True, backend=backend,
    )  # type: ignore[misc]  # fmt: skip
    return out, lse.transpose(0, 1), found


def parts(x: tuple[torch.Tensor, torch.Tensor], where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of some queries of a call: of a batch those of (B, S), of packed ones those of (T,)."""
    out, lse = x
    return (out[where], lse.transpose(0, 1)[where]) if where.dim() == 1 else (out.transpose(1, 2)[where], lse.transpose(1, 2)[where])


@settings(max_examples=20)
@given(case=any_cases, counts=drawn_counts, how=st.integers(0, 2**20))
def test_attention_to_copies_is_attention_to_the_cache(device: torch.device, case: Case, counts: list[int], how: int) -> None:
    """Up to the rounding of P, in other blocks; and it is NaN where that is."""
    call, _ = drawn_call(replace(case, value_dim=case.dim), device, counts, how)
    call = replace(call, batch=replace(call.batch, max_length=None))
    if call.q.numel() == 0:
        return
    is_fp8 = call.cache.is_fp8
    if is_fp8:
        *found, where = by_oracle(call)
        out, lse = parts((found[0], found[1]), where)
    else:
        out, lse, where = by_recipe(call, "modelled")
    wanted, wanted_lse = parts(paged_tensors.attend(call.q, call.cache, call.batch, call.how), where)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(lse.isnan(), wanted_lse.isnan())
    error = 1e-4 if is_fp8 else 0.1
    torch.testing.assert_close(lse.nan_to_num(0.0, 0.0, 0.0), wanted_lse.nan_to_num(0.0, 0.0, 0.0), rtol=error, atol=error)
    if wanted.numel():
        assert relative(out.nan_to_num(), wanted.nan_to_num()) <= (0.03 if is_fp8 else 0.08)


LONG = Case((900, 513, 2048), 513, 64, 2, 2, 128, 128, query_dtype=torch.bfloat16)

CALLS = {
    "a batch": LONG,
    "prompts": replace(LONG, lengths=(513, 513), scales=("row", "row")),
    "counts": replace(LONG, ragged=True),
    "a window": replace(LONG, window=(200, 0), sinks=True),
    "both sides": replace(LONG, window=(100, 7)),
    "all keys": replace(LONG, window=(-1, -1), softcap=5.0),
    "64 channels": replace(LONG, dim=64, value_dim=64, group=4, layout="heads first"),
    "256 channels": replace(LONG, dim=256, value_dim=256, page=16),
}

HALF = replace(LONG, dtype=torch.bfloat16, qk="e4m3")

HALF_CALLS = {
    "a batch": HALF,
    "prompts in int8": replace(HALF, lengths=(513, 513), qk="int8"),
    "counts": replace(HALF, ragged=True, dtype=torch.float16),
    "a window": replace(HALF, window=(200, 0), sinks=True),
    "both sides": replace(HALF, window=(100, 7)),
    "all keys": replace(HALF, window=(-1, -1), softcap=5.0),
    "64 channels": replace(HALF, dim=64, value_dim=64, group=4, layout="heads first", qk="int8"),
    "256 channels": replace(HALF, dim=256, value_dim=256, page=16),
}

COUNTS = {
    "of several queries": ([513, 5, 4], 513),
    "of all kinds": ([513, 1, 3], None),
    "of a known most": ([400, 513, 1], 513),
    "as many each": ([300, 300, 300], 300),
}


def answer(call: Call, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    how = call.how
    return fp8attn.paged_sdpa(
        call.q, call.cache, call.batch, window=how.window, softcap=how.softcap, sinks=how.sinks, out_dtype=torch.float32, return_lse=True,
        backend=backend,
    )  # type: ignore[return-value]  # fmt: skip


def is_copied(call: Call) -> bool:
    how = call.how
    options = dict(window=how.window, softcap=how.softcap, sinks=how.sinks)
    return fp8attn.explain_paged(call.q, call.cache, call.batch, **options).kernel == "hopper"


@pytest.fixture
def few_tiles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 384 queries of a key/value head are copied however few tiles of queries there are."""
    monkeypatch.setattr(paged_tensors_ops, "_unsupported_tiles", lambda *_: None)
    monkeypatch.setattr(paged_tensors_ops, "PACKED_ROWS", {True: 384, False: 384})


def check_on_a_gpu(call: Call) -> None:
    """A call is close to the oracle of the cache. Where rows are copied it is what the pipeline's oracle says, or `varlen_sdpa` of the copies."""
    plan = paged_tensors_ops.plan_attention("auto", call.q, call.cache, call.batch, call.how)
    assert isinstance(plan, paged_tensors_ops.Packing) and is_copied(call)
    out, lse = answer(call)
    wanted, wanted_lse = paged_tensors.attend(call.q, call.cache, call.batch, call.how)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(lse.isnan(), wanted_lse.isnan()) and torch.equal(lse.isinf(), wanted_lse.isinf())
    assert relative(out.nan_to_num(), wanted.nan_to_num()) <= (0.06 if call.cache.is_fp8 else 0.08)
    oracle = by_oracle(call, plan.config.exact) if call.cache.is_fp8 else by_recipe(call, "cuda")
    where = oracle[2].clone()
    if call.batch.cu_seqlens is not None:
        edges = call.batch.cu_seqlens.tolist()
        for begin, end in itertools.pairwise(edges):
            where[begin:end] &= end - begin > plan.room.few
    if not call.cache.is_fp8:
        copied = where[oracle[2]]
        for x, y in zip(parts((out, lse), where), oracle, strict=False):
            assert x.numel() and torch.equal(x.isnan(), y[copied].isnan()) and torch.equal(x.nan_to_num(), y[copied].nan_to_num())
        return
    (found, found_lse), (expected, expected_lse) = parts((out, lse), where), parts((oracle[0], oracle[1]), where)
    assert found.numel()
    assert_matches_pipeline(found, expected, False, expected_lse)
    error = (found_lse - expected_lse).abs()  # P's codes are what is added up
    error = error[error.isfinite()]
    assert float(error.max()) <= math.log1p(E4M3_STEP) and float(error.median()) <= 2e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("name", CALLS)
def test_rows_of_many_queries_are_copied(device: torch.device, name: str) -> None:
    check_on_a_gpu(CALLS[name].call(device))


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("name", HALF_CALLS)
def test_rows_in_half_precision_are_quantized_by_the_recipe(device: torch.device, name: str) -> None:
    check_on_a_gpu(HALF_CALLS[name].call(device))


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("name", ("a batch", "a window", "64 channels"))
@pytest.mark.parametrize("calls", (CALLS, HALF_CALLS), ids=("e4m3", "half"))
def test_packed_rows_of_many_queries_are_copied(device: torch.device, calls: dict[str, Case], name: str, counts: str) -> None:
    """Beside rows of few, which aren't."""
    numbers, most = COUNTS[counts]
    check_on_a_gpu(packed(calls[name].call(device), numbers, 0 if counts == "as many each" else 5, most))


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("case", (LONG, HALF), ids=("e4m3", "half"))
def test_what_is_not_there_or_not_finite_reaches_the_rows_that_see_it(device: torch.device, case: Case, seed: int) -> None:
    check_on_a_gpu(nonfinite(case.call(device), seed))
    check_on_a_gpu(nonfinite(packed(case.call(device), [513, 2, 513], 3, None), seed))


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("case", (LONG, HALF), ids=("e4m3", "half"))
def test_passes_have_the_bits_of_one(device: torch.device, case: Case) -> None:
    for call in (case.call(device), packed(case.call(device), [513, 2, 513], 3, None)):
        with pytest.MonkeyPatch.context() as patch:
            expected = answer(call)
            room = in_passes(patch, call, 0)
            assert room.passes > 1
            eager.forget()
            found = answer(call)
            plan = paged_tensors_ops.plan_attention("auto", call.q, call.cache, call.batch, call.how)
            assert isinstance(plan, paged_tensors_ops.Packing) and plan.room.passes > 1
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.usefixtures("few_tiles_too")
@pytest.mark.parametrize("case", (LONG, HALF), ids=("e4m3", "half"))
def test_lengths_and_counts_change_between_replays(device: torch.device, case: Case) -> None:
    """One graph attends to prompts, chunks and steps, and repeated calls are the first ones."""
    call = packed(case.call(device), [513, 2, 500], 0, 513)
    eager.forget()
    for _ in range(3):  # compiled, recorded, repeated
        first = answer(call)
    assert [*eager._seen.values()] == ["kept"]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = answer(call)
    assert call.batch.cu_seqlens is not None
    for lengths, counts in (
        ((900, 513, 2048), (513, 2, 500)),
        ((513, 3, 600), (513, 1, 501)),
        ((64, 513, 2000), (1, 513, 500)),
        ((9, 8, 7), (5, 5, 5)),
    ):
        call.batch.lengths.copy_(ints(lengths, device))
        call.batch.cu_seqlens.copy_(ints([0, *itertools.accumulate(counts)], device))
        graph.replay()
        wanted, wanted_lse = paged_tensors.attend(call.q, call.cache, call.batch, call.how)
        assert torch.equal(found[1].isinf(), wanted_lse.isinf()) and relative(found[0], wanted) <= (0.06 if call.cache.is_fp8 else 0.08)
    call.batch.lengths.copy_(ints((900, 513, 2048), device))
    call.batch.cu_seqlens.copy_(ints((0, 513, 515, 1015), device))
    for x, y in zip(answer(call), first, strict=True):
        assert torch.equal(x, y)


def test_what_is_not_copied(device: torch.device) -> None:
    """Rows of few queries, other caches, and batches whose rows don't depend on each other; and far too many long rows for few queries."""
    call = LONG.call(device)
    other = replace(LONG, dtype=torch.bfloat16).call(device)
    by_token = replace(LONG, scales=("token", "token")).call(device)
    wide = PagedBatch(call.batch.page_table.repeat(100, 200), call.batch.lengths.repeat(100), cu_seqlens=ints([0] * 300 + [400], device))
    for q, cache, batch, said in (
        (call.q[:, :, :192], call.cache, call.batch, "up to 192 queries; it takes more than 192"),
        (call.q, other.cache, call.batch, "the cache is torch.bfloat16 and has no recipe"),
        (call.q, by_token.cache, call.batch, "scales are per token"),
        (call.q, call.cache, replace(call.batch, batch_invariant=True), "batch_invariant"),
        (call.q[0].transpose(0, 1)[:400].contiguous(), call.cache, wide, "passes; there are 400 queries"),
    ):
        planned = paged_tensors_ops.plan_packing(q, cache, batch, call.how)
        assert isinstance(planned, str) and said in planned, planned
