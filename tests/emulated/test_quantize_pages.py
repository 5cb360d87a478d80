"""The CUDA quantizer of a cache's pages: each row has the bytes that its gathered tokens have, on a CPU too."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
from closeness import on_grid
from copying import drawn_call, nonfinite, packed, room_of
from foreign import Call, Case
from forked import in_another_process
from fp8attn import paged_copies
from fp8attn.call import HALVES
from fp8attn.cuda import build, quantize, run
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.paged_copies import Room, Spans
from fp8attn.quantization import TOKEN_CHUNK, quantize_packed, sequences_of
from fp8attn.recipe import Quantized
from packed_batches import untouched
from quantizing import assert_same

H100 = ARCHITECTURES[90]


def quantized(call: Call, room: Room, spans: Spans, library: build.Library | None) -> tuple[Quantized, Quantized]:
    """By an emulated library, or on a GPU. Results are in memory that was used before."""
    cache, device = call.cache, H100 if library is not None else device_of(call.q.device)
    assert cache.recipe is not None
    assert quantize.unsupported_call(cache.k.transpose(1, 2), cache.v.transpose(1, 2), cache.recipe, device) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "empty_packed", untouched)
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        found = run.empty_pages(cache, spans.packed(room.tokens), cache.recipe.qk)
        run.quantize_pages(cache, call.batch.page_table, spans, found, device)
    return found


def check(call: Call, few: int, library: build.Library | None, number: int = 0) -> None:
    call.cache.k.copy_(on_grid(call.cache.k))
    room = room_of(call, few)
    spans = paged_copies.place(call.q, call.batch, room, number % room.passes)
    assert call.cache.recipe is not None
    found = quantized(call, room, spans, library)
    expected = quantize_packed(*paged_copies.halves(call.cache, call.batch, room, spans), call.cache.recipe, spans.packed(room.tokens))
    for x, y in zip(found, expected, strict=True):
        for actual, wanted in zip(sequences_of(x), sequences_of(y), strict=True):
            if wanted.length:
                assert_same(actual, wanted)


cases = st.builds(
    Case,
    lengths=st.lists(st.one_of(st.integers(0, 5), st.sampled_from((127, 128, 129, 511, 512, 513)), st.integers(0, 1300)), min_size=1, max_size=4).map(
        tuple
    ),
    queries=st.sampled_from((5, 300)),
    page=st.sampled_from((1, 16, 48, 64, 256)),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 3)),
    dim=st.sampled_from((64, 128, 192, 256)),
    dtype=st.sampled_from(HALVES),
    layout=st.sampled_from(("tokens first", "heads first", "both in a page", "both in a row")),
    window=st.sampled_from(((-1, 0), (-1, 0), (20, 0), (130, 5), (-1, -1))),
    ragged=st.booleans(),
    seed=st.integers(0, 99),
    qk=st.sampled_from(("e4m3", "int8")),
)


@pytest.fixture(scope="module")
def emulated() -> build.Library:
    return emulation.quantizer()


@pytest.mark.anywhere
@emulation.emulates
@given(case=cases, counts=st.lists(st.sampled_from((0, 1, 40, 200)), min_size=2, max_size=4), how=st.integers(0, 2**10))
def test_emulated_rows_have_the_bytes_of_their_tokens(emulated: build.Library, case: Case, counts: list[int], how: int) -> None:
    check(*drawn_call(replace(case, value_dim=case.dim), torch.device("cpu"), counts, how), emulated, how)


LONG = Case((3000, 9, 0, 1030), 1030, 64, 2, 1, 128, 128, torch.bfloat16, qk="e4m3", window=(900, 0))

GPU_CASES = (
    LONG, replace(LONG, qk="int8", dtype=torch.float16, page=16), replace(LONG, dim=64, page=48, layout="both in a row"),
    replace(LONG, dim=256, page=256, layout="heads first", window=(-1, 0)), replace(LONG, lengths=(12_000, 1031, 5000), window=(-1, -1)),
    replace(LONG, lengths=(1030,) * 60, kv_heads=1, page=1030),
    replace(LONG, lengths=(9000, 4000), kv_heads=8, dim=256, window=(-1, -1)),  # more items than CTAs
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(GPU_CASES)))
def test_rows_have_the_bytes_of_their_tokens(device: torch.device, number: int) -> None:
    if quantize.unsupported_config(quantize.OF_PAGES, device_of(device)) is not None:
        pytest.skip("needs sm_90")
    case = replace(GPU_CASES[number], value_dim=GPU_CASES[number].dim)
    check(case.call(device), 0, None)
    check(nonfinite(case.call(device), number), 0, None)
    check(packed(case.call(device), [1030] + [2] * (len(case.lengths) - 1), 3, None), 2, None)


MUTANTS = {
    "tokens of the first page": ("tile/token_chunk.h", "__ldcg(table + n)", "__ldcg(table)"),
    "the table of the first row": ("tile/token_chunk.h", "p.page_table + sequence * p.table_stride", "p.page_table"),
    "other slots": ("tile/token_chunk.h", "(token - n * p.page) * strides[2]", "(token - n * p.page ^ 1) * strides[2]"),
    "from the first token on": ("tile/token_chunk.h", "first = __ldcg(p.firsts + sequence) + begin", "first = begin"),
    "tokens behind the last one": ("tile/token_chunk.h", "i < count && token < end ?", "i < count ?"),
    "missing tokens are zero": ("tile/token_chunk.h", "MISSING_CHUNK = {~0u, ~0u, ~0u, ~0u}", "MISSING_CHUNK = {0, 0, 0, 0}"),
    "samples side by side": ("tile/token_chunk.h", "token = first + i * apart", "token = first + i"),
    "keys of the first slice": ("tile/token_chunk_keys.h", "tokens.chunk(first + i, channel)", "tokens.chunk(first + i, channel % CHANNELS)"),
    "values of the first slice": (
        "tile/token_chunk_values.h",
        "tokens.chunk(token(n, i), channel + chunk * 8)",
        "tokens.chunk(token(n, i), chunk * 8)",
    ),
}


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_wrong(name: str) -> None:
    library = emulation.quantizer(MUTANTS[name])
    cases = (
        Case((1300, 0, 40, 600), 300, 16, 2, 1, 128, 128, torch.float16, qk="e4m3", window=(200, 0)),
        Case((30, 600, 700), 30, 48, qk="e4m3", dtype=torch.float16, window=(-1, -1)),
    )

    def check_several() -> None:
        for case in cases:
            for seed in (0, 1, 2):
                check(nonfinite(case.call(torch.device("cpu")), seed), 0, library)
                check(case.call(torch.device("cpu")), 0, library)

    with pytest.raises(AssertionError):
        check_several()


@pytest.mark.anywhere
@emulation.emulates
def test_the_binding_tells_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, library = emulation.binding()
    launcher = ctypes.cast(library.record_quantize, ctypes.c_void_p).value
    monkeypatch.setattr(build, "load_with", lambda *_: build.Library(operators, {quantize.OF_PAGES: launcher}))
    for case in (replace(LONG, page=48, layout="heads first", qk="int8", dtype=torch.float16), replace(LONG, dim=64, value_dim=64)):
        call = case.call(torch.device("cpu"))
        room, cache = room_of(call, 0), call.cache
        spans = paged_copies.place(call.q, call.batch, room)
        found = run.empty_pages(cache, spans.packed(room.tokens), case.qk or "e4m3")
        run.quantize_pages(cache, call.batch.page_table, spans, found, H100)
        ctas = (room.tokens // TOKEN_CHUNK + len(case.lengths)) * case.kv_heads * case.dim // 64
        tensors = call.batch.page_table, spans.k, spans.keys, spans.firsts, spans.ends
        pages = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
        expected = emulation.quantize_pages_params(ctas, torch.empty(0), *pages, tensors, *quantize.filled(*found))
        emulation.assert_quantizer_told(library, ctas, expected)


def read_guarded() -> None:
    """Whatever lengths and page tables say, nothing behind K and V is read."""
    library = emulation.quantizer()
    call = Case((700, 30), 300, 16, dtype=torch.float16, qk="e4m3").call(torch.device("cpu"))
    cache = replace(call.cache, k=emulation.guarded(call.cache.k), v=emulation.guarded(call.cache.v))
    for numbers, length in ((1 << 30, 700), (-1, 700), (cache.k.shape[0], 1 << 30), (-(1 << 31), 9000)):
        call.batch.page_table[0, 2::3], call.batch.lengths[0] = numbers, length
        check(replace(call, cache=cache), 0, library)


@pytest.mark.anywhere
@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_quantize_pages as test; test.read_guarded()")
