"""Repeated calls on a GPU have the bits of calls that aren't repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import PRECISE, KVCache, PagedBatch, Recipe, eager
from repeating import Repeats

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "one launch": dict(shape=(2, 4, 300, 64)),
    "causal": dict(is_causal=True),
    "LSE": dict(return_lse=True),
    "LSE of float32": dict(return_lse=True, dtype=torch.float32),
    "GQA": dict(group=4, is_causal=True),
    "bool mask": dict(mask=torch.bool),
    "added mask": dict(mask=torch.bfloat16),
    "PRECISE": dict(recipe=PRECISE),
    "no rotation": dict(recipe=Recipe(rotate=0)),
    "rotation of 256": dict(recipe=Recipe(rotate=256), return_lse=True),
    "smoothed queries": dict(recipe=Recipe(smooth_q=True)),
    "recent keys": dict(recipe=Recipe(recent=256), is_causal=True),
    "sinks and recent keys": dict(recipe=Recipe(sinks=128, recent=128), return_lse=True),
    "token scales": dict(recipe=Recipe(k="token")),
    "head dim 80": dict(shape=(2, 6, 700, 80)),
    "head dim 40 of float16": dict(shape=(2, 6, 700, 40), dtype=torch.float16),
    "head dim 256": dict(shape=(1, 4, 900, 256)),
    "one query": dict(queries=1),
    "long": dict(shape=(1, 3, 9000, 128)),
    "Triton": dict(backend="triton", recipe=Recipe(compute="f16")),
    "stored": dict(stored=True),
    "stored, LSE": dict(stored=True, return_lse=True),
    "stored int8, sinks": dict(stored=True, has_sinks=True, recipe=PRECISE, return_lse=True),
    "sinks": dict(has_sinks=True),
    "sinks and a window": dict(has_sinks=True, window=(200, 0), return_lse=True),
    "sinks of float32": dict(has_sinks=True, dtype=torch.float32, return_lse=True),
}


def call(kind: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
    """Outputs of a call with new tensors."""
    options = dict(kind)
    batch, heads, length, dim = options.pop("shape", (2, 6, 1111, 128))
    group, queries = options.pop("group", 1), options.pop("queries", length)
    dtype, mask = options.pop("dtype", torch.bfloat16), options.pop("mask", None)
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda", generator=generator)

    q, k, v = drawn(batch, heads * group, queries, dim), drawn(batch, heads, length, dim), drawn(batch, length, heads, dim).transpose(1, 2)
    if mask is not None:
        added = drawn(batch, 1, queries, length)
        options["attn_mask"] = added > 0 if mask == torch.bool else added.to(mask)
    if options.pop("has_sinks", False):
        options["sinks"] = drawn(heads * group).float()
    if options.pop("stored", False):
        q, k, v = fp8attn.quantize(q, k, v, recipe=options.get("recipe", Recipe()))
    found = fp8attn.sdpa(q, k, v, enable_gqa=group > 1, **options)
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls were repeated, one after the other."""
    return Repeats(monkeypatch).hits


@pytest.mark.parametrize("name", KINDS)
def test_has_the_bits_of_the_first_call(name: str, hits: list[bool]) -> None:
    """And so has the second one, which is recorded."""
    firsts = []
    for seed in (0, 1, 2):
        eager.forget()
        firsts.append(call(KINDS[name], seed))
    eager.forget()
    hits.clear()
    _, recorded, *again = (call(KINDS[name], seed) for seed in (0, 1, 0, 1, 2))
    assert hits == [False] * 2 + [True] * 3
    for first, repeated in zip((firsts[1], *firsts), (recorded, *again), strict=True):
        assert len(first) == len(repeated) and all(map(torch.equal, first, repeated))


@pytest.mark.parametrize("name", ("default", "recent keys", "no rotation", "bool mask"))
def test_in_a_graph(name: str) -> None:
    """Captured, and replayed with other contents."""
    eager.forget()
    for seed in (0, 1):
        call(KINDS[name], seed)
    stream = torch.cuda.Stream()
    tensors = [torch.randn(2, 6, 1111, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    options = {key: value for key, value in KINDS[name].items() if key != "mask"}
    if "mask" in KINDS[name]:
        options["attn_mask"] = torch.rand(2, 1, 1111, 1111, device="cuda") > 0.5
    with torch.cuda.stream(stream):
        for _ in range(3):
            fp8attn.sdpa(*tensors, **options)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = fp8attn.sdpa(*tensors, **options)
    for x in tensors:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    eager.forget()
    assert torch.equal(out, fp8attn.sdpa(*tensors, **options))


PACKED: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": dict(is_causal=True),
    "LSE": dict(is_causal=True, return_lse=True),
    "window": dict(window=(200, 0), return_lse=True),
    "soft cap": dict(softcap=20.0),
    "sinks": dict(has_sinks=True, is_causal=True, return_lse=True),
    "used keys": dict(has_used=True, is_causal=True),
    "longest": dict(max_seqlen_q=2000, max_seqlen_k=2000),
    "Triton": dict(backend="triton", recipe=Recipe(compute="f16"), is_causal=True),
    "no smoothing": dict(recipe=Recipe(smooth_k=False, smooth_v=False), return_lse=True),
    "int8": dict(recipe=PRECISE, is_causal=True),
    "int8, soft cap, sinks": dict(recipe=PRECISE, softcap=20.0, has_sinks=True, return_lse=True),
    "float16 of head dim 64": dict(dim=64, dtype=torch.float16),
    "stored": dict(stored=True, is_causal=True),
    "stored, used keys": dict(stored=True, has_used=True),
    "stored, LSE": dict(stored=True, return_lse=True),
    "stored, soft cap": dict(stored=True, softcap=20.0, is_causal=True),
    "stored, int8": dict(stored=True, recipe=PRECISE, is_causal=True, return_lse=True),
    "stored, sinks": dict(stored=True, has_sinks=True, is_causal=True, return_lse=True),
}
"""Calls of varlen_sdpa that are repeated."""

TOKENS = 2500
LENGTHS = ((700, 1, 0, 1300, 499), (0, 2500, 0, 0, 0), (500, 500, 500, 500, 400), (128, 128, 256, 1988, 0))
"""Of five packed sequences; those of the third have tokens behind them that are in none."""


def packed_call(kind: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
    """Outputs of the tokens that are in a sequence, of a call with new tensors and lengths."""
    options = dict(kind)
    dim, dtype, stored = options.pop("dim", 128), options.pop("dtype", torch.bfloat16), options.pop("stored", False)
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(TOKENS, heads, dim, dtype=dtype, device="cuda", generator=generator) for heads in (8, 2, 2))
    lengths = torch.tensor(LENGTHS[seed % len(LENGTHS)], dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).cuda()
    used = (lengths // 2).cuda() if options.pop("has_used", False) else None
    if options.pop("has_sinks", False):
        options["sinks"] = torch.randn(8, device="cuda", generator=generator)
    recipe = options.get("recipe", Recipe())
    if stored:
        query = fp8attn.quantize(q, cu_seqlens_q=cu_seqlens, recipe=recipe)
        key, value = fp8attn.quantize(None, k, v, cu_seqlens_k=cu_seqlens, seqused_k=used, recipe=recipe)
        found = fp8attn.varlen_sdpa(query, key, value, None, None, **options)
    else:
        found = fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, seqused_k=used, **options)
    tokens = int(lengths.sum())  # rows behind them hold anything
    return (found[0][:tokens], found[1][:, :tokens]) if isinstance(found, tuple) else (found[:tokens],)


def assert_same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> None:
    assert len(first) == len(second) and all(map(torch.equal, first, second))
    assert [x.stride() for x in first] == [x.stride() for x in second]


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_have_the_bits_of_the_first_call(name: str, hits: list[bool]) -> None:
    """Whatever the lengths of the call that was recorded."""
    firsts = []
    for seed in range(len(LENGTHS)):
        eager.forget()
        firsts.append(packed_call(PACKED[name], seed))
    eager.forget()
    hits.clear()
    for seed in (3, 2):
        packed_call(PACKED[name], seed)
    again = [packed_call(PACKED[name], seed) for seed in range(len(LENGTHS))]
    assert hits == [False] * 2 + [True] * len(LENGTHS)
    for first, repeated in zip(firsts, again, strict=True):
        assert_same(first, repeated)


def test_changed_lengths_are_honoured(hits: list[bool]) -> None:
    """In the tensors of earlier calls; those out of range read nothing outside."""
    q, k, v = (torch.randn(TOKENS, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, 1000, TOKENS], dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, is_causal=True)

    eager.forget()
    for _ in range(3):
        call()
    cu_seqlens.copy_(torch.tensor([0, 300, TOKENS]))
    repeated = call()
    assert hits[-1]
    eager.forget()
    assert torch.equal(repeated, call())
    call()
    cu_seqlens.copy_(torch.tensor([-5, 1 << 30, TOKENS]))
    call()
    torch.cuda.synchronize()
    assert hits[-1]


STEPS: dict[str, dict[str, Any]] = {
    "decode": {},
    "decode by Triton": dict(backend="triton"),
    "sixteen sequences": dict(sequences=16),
    "LSE": dict(return_lse=True),
    "three tokens": dict(tokens=3),
    "counts and sequences": dict(tokens=2, has_counts=True),
    "int8": dict(recipe=PRECISE),
    "float16 of head dim 64": dict(dim=64, dtype=torch.float16, out_dtype=torch.float32),
    "float32": dict(dtype=torch.float32),
    "max_length": dict(max_length=700),
    "appended before": dict(new=False, return_lse=True),
}
"""Steps of paged_sdpa that are repeated."""


class Steps:
    """A cache of sequences, to which each step appends tokens. Two with the same kind and seed take the same steps."""

    def __init__(self, kind: dict[str, Any], seed: int) -> None:
        options = dict(kind)
        self.sequences, self.tokens, self.dim = options.pop("sequences", 3), options.pop("tokens", 1), options.pop("dim", 128)
        self.dtype, self.new, self.has_counts = options.pop("dtype", torch.bfloat16), options.pop("new", True), options.pop("has_counts", False)
        self.max_length = options.pop("max_length", None)
        self.generator = torch.Generator("cuda").manual_seed(seed)
        pages = 6
        self.cache = KVCache(self.sequences, self.sequences * pages, 2, self.dim, recipe=options.pop("recipe", Recipe()), dtype=self.dtype)
        self.options = options
        numbers = torch.randperm(self.sequences * pages, device="cuda", generator=self.generator)
        self.table = numbers.int().view(self.sequences, pages)
        self.lengths = torch.arange(self.sequences, dtype=torch.int32, device="cuda") % 3 * 37 + 250
        self.cache.append(self.drawn(2, 450), self.drawn(2, 450), PagedBatch(self.table, self.lengths, counts=self.lengths))

    def drawn(self, heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(self.sequences, heads, tokens, self.dim, dtype=self.dtype, device="cuda", generator=self.generator)

    def step(self) -> tuple[torch.Tensor, ...]:
        """Outputs, and copies of what the cache holds."""
        counts = sequences = None
        if self.has_counts:
            counts = torch.full((self.sequences,), self.tokens, dtype=torch.int32, device="cuda")
            counts[0] = 1
            sequences = torch.arange(self.sequences, dtype=torch.int32, device="cuda")
        self.lengths = self.lengths + (self.tokens if counts is None else counts)
        batch = PagedBatch(self.table, self.lengths, counts, sequences, self.max_length)
        query, new = self.drawn(8, self.tokens), (self.drawn(2, self.tokens), self.drawn(2, self.tokens))
        if not self.new:
            self.cache.append(*new, batch)
        found = fp8attn.paged_sdpa(query, self.cache, batch, new if self.new else None, **self.options)
        held = [x.view(torch.uint8).clone() for x in self.cache.storage.tensors()]
        return *(found if isinstance(found, tuple) else (found,)), *held


def hidden(x: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN is equal to itself."""
    return x.contiguous().view(torch.uint8)


OF_THEIR_OWN = ("float16 of head dim 64", "float32")
"""Steps by kernels that the others don't compile."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.compiles] if name in OF_THEIR_OWN else []) for name in STEPS])
def test_steps_have_the_bits_of_first_calls(name: str, hits: list[bool]) -> None:
    """And write the same bytes to caches, over the end of a page. A plan serves several caches."""
    expected = []
    for seed in (0, 1):
        steps, found = Steps(STEPS[name], seed), []
        for _ in range(10):
            eager.forget()
            found.append(steps.step())
        expected.append(found)
    eager.forget()
    both = [Steps(STEPS[name], seed) for seed in (0, 1)]
    hits.clear()
    again = [[steps.step() for steps in both] for _ in range(10)]
    assert all(hits[-10:]) and not any(hits[:2])
    for i, pair in enumerate(again):
        for seed, repeated in enumerate(pair):
            for first, second in zip(expected[seed][i], repeated, strict=True):
                assert torch.equal(hidden(first), hidden(second)), (i, seed)


def test_numbers_out_of_range_touch_nothing(hits: list[bool]) -> None:
    """Of a repeated step: rows whose page or sequence isn't there are NaN, and append nothing."""
    steps = Steps({}, 0)
    for _ in range(3):
        steps.step()
    assert hits[-1]
    before = [x.view(torch.uint8).clone() for x in steps.cache.storage.tensors()]
    table, lengths = torch.full_like(steps.table, 1 << 30), steps.lengths.clone()
    query, new = steps.drawn(8, 1), (steps.drawn(2, 1), steps.drawn(2, 1))
    out = fp8attn.paged_sdpa(query, steps.cache, PagedBatch(table, lengths), new)
    assert hits[-1] and out.isnan().all()
    lengths.fill_(-3)
    out = fp8attn.paged_sdpa(query, steps.cache, PagedBatch(table, lengths), new)
    torch.cuda.synchronize()
    assert hits[-1] and not out.any()
    after = [x.view(torch.uint8) for x in steps.cache.storage.tensors()]
    assert all(map(torch.equal, before[:7], after[:7])) and torch.equal(before[9], after[9])


def test_steps_and_packed_calls_in_a_graph() -> None:
    """Captured when they are repeated, and replayed with other contents."""
    steps = Steps({}, 0)
    table, lengths = steps.table, steps.lengths.clone()
    batch, query, new = PagedBatch(table, lengths), steps.drawn(8, 1), (steps.drawn(2, 1), steps.drawn(2, 1))
    q, k, v = (torch.randn(TOKENS, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    cu_seqlens = torch.tensor([0, 1000, TOKENS], dtype=torch.int32, device="cuda")

    def calls() -> tuple[torch.Tensor, torch.Tensor]:
        return fp8attn.paged_sdpa(query, steps.cache, batch, new), fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, is_causal=True)

    eager.forget()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            calls()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = calls()
    for x in (query, *new, q, k, v):
        x.normal_()
    lengths += 1
    cu_seqlens.copy_(torch.tensor([0, 300, TOKENS]))
    graph.replay()
    torch.cuda.synchronize()
    eager.forget()
    for found, expected in zip(captured, calls(), strict=True):
        assert torch.equal(found, expected)
