"""The KV cache: appending in any order of sizes, forks and truncations give the bytes of quantizing at once, and attention the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from fp8attn import KVCache, PagedBatch, PageTable, pages
from fp8attn.device import device_of
from fp8attn.pages import PAGE, RECENT, RECENT_QUERIES
from fp8attn.triton import paged_attention
from fp8attn.validate import Backend
from paging import Problem, Sequences, assert_attends, batched, bits, modelled, problems

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(6, 70), st.integers(71, 400)), min_size=1, max_size=5)

HALF = max(settings().max_examples // 2, 1)
"""Examples of tests that compile kernels for most of them."""


def noise(problem: Problem, device: torch.device, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Other keys and values of a problem's heads."""
    g = torch.Generator().manual_seed(problem.seed + 1)
    shapes = (problem.kv_heads, tokens, problem.dim), (problem.kv_heads, tokens, problem.value_dim)
    k, v = (torch.randn(shape, generator=g).to(device, problem.dtype) for shape in shapes)
    return k, v


@given(problem=problems, sizes=SIZES)
def test_appending_in_any_sizes_is_quantizing_at_once(device: torch.device, problem: Problem, sizes: list[int]) -> None:
    _, k, v = problem.tensors(device)
    both, others = Sequences(problem, device, 2), batched(*noise(problem, device, 3))
    done = 0
    for size in sizes:
        size = min(size, problem.length - done)
        both.append(*batched(k[:, done : done + size], v[:, done : done + size]), sequences=[1], backend="modelled")
        both.append(*others, sequences=[0], backend="modelled")
        done += size
    both.assert_holds(1, k[:, :done], v[:, :done])


@settings(max_examples=HALF)
@given(problem=problems, sizes=SIZES, backwards=st.booleans(), bad=st.sampled_from((None, None, "k", "v")))
def test_the_kernel_writes_the_bytes_of_the_definition(
    device: torch.device, problem: Problem, sizes: list[int], backwards: bool, bad: str | None
) -> None:
    """Into every tensor, for several sequences of different lengths at once."""
    tensors = dict(zip("qkv", problem.tensors(device), strict=True))
    if bad is not None:
        tensors[bad][0, :: 1 + problem.seed % 200, problem.seed % 16] = (torch.nan, torch.inf)[problem.seed % 2]
    k, v = (torch.stack([tensors[name], tensors[name].flip(1)]) for name in "kv")
    caches = [Sequences(problem, device, 3) for _ in range(2)]
    done = 0
    for size in sizes:
        size = min(size, problem.length - done)
        counts = [size, size // 2] if backwards else [size, size]
        for cache, backend in zip(caches, ("modelled", "triton"), strict=True):
            part = [x[:, :, done : done + size] for x in (k, v)]
            cache.append(*part, sequences=[2, 0] if backwards else [0, 1], counts=counts, backend=backend)
        done += size
    for index, (x, y) in enumerate(zip(*(cache.cache.storage.tensors() for cache in caches), strict=True)):
        assert torch.equal(bits(x), bits(y)), index


@settings(max_examples=HALF)
@given(problem=problems, queries=st.integers(1, 90), splits=st.integers(1, 4), given_keys=st.booleans(), scale=st.sampled_from((0.2, -0.1)))
def test_the_kernel_attends_as_the_oracle(device: torch.device, problem: Problem, queries: int, splits: int, given_keys: bool, scale: float) -> None:
    """Decode, speculative steps and chunks, of two sequences with different numbers of queries."""
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors(device))
    both = Sequences(problem, device, 2)
    queries = min(queries, problem.length, 90 if given_keys else RECENT_QUERIES)
    before = problem.length - queries
    both.append(k[:, :, :before], v[:, :, :before], [0, 1], backend="modelled")
    counts = [queries, (queries + 1) // 2]
    new = k[:, :, before:], v[:, :, before:]
    storage = both.cache.storage
    old = pages.Storage.of([x.clone() if x is storage.k or x is storage.v else x for x in storage.tensors()])
    both.append(*new, [0, 1], counts, backend="modelled")
    shown = (old, new) if given_keys else (storage, None)
    call = pages.PagedCall(q[:, :, before:], *shown, both.batch([0, 1], counts), both.cache.recipe, scale)
    out, lse = paged_attention.attend(call, device_of(device), torch.float32, splits=splits)
    assert_attends(out, lse, pages.attend_paged(call), problem.dtype, not GPU)
    assert not out[1, :, counts[1] :].any()


@pytest.mark.parametrize("recipe", (fp8attn.Recipe(), fp8attn.PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("what", ("q", "k", "v"))
@pytest.mark.one_in(2)
def test_the_kernel_gives_nan_to_the_rows_of_the_oracle(device: torch.device, recipe: fp8attn.Recipe, what: str) -> None:
    for token in (5, 128, 290):
        problem = Problem(300, 1, 2, 32, 32, torch.float16, "normal", recipe, token)
        tensors = dict(zip("qkv", problem.tensors(device), strict=True))
        tensors[what][0, token, 7] = torch.inf
        q, k, v = batched(*tensors.values())
        answers = [Sequences(problem, device).attend(q, (k, v), return_lse=True, backend=backend) for backend in ("modelled", "triton")]
        for x, y in zip(*answers, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and bool(x.isnan().any())


@pytest.mark.parametrize("backend", ("triton", "auto"))
def test_decode_by_kernels_is_prefill_by_kernels(device: torch.device, backend: str) -> None:
    """Token by token, in steps of 16 and at once: what differs is the order of sums."""
    problem = Problem(300, 2, 2, 64, 64, torch.float16, "normal", fp8attn.Recipe(), 3)
    q, k, v = batched(*problem.tensors(device))
    options = dict(backend=backend, out_dtype=torch.float32, return_lse=True)
    whole = Sequences(problem, device).attend(q, (k, v), **options)
    for size in (1, 16):
        cache, first = Sequences(problem, device), 250
        cache.append(k[:, :, :first], v[:, :, :first])
        for start in range(first, first + 2 * size, size):
            part = slice(start, start + size)
            cache.append(k[:, :, part], v[:, :, part])
            assert_attends(*cache.attend(q[:, :, part], **options), tuple(x[:, :, part] for x in whole), torch.float32, not GPU)


@given(problem=problems, sizes=SIZES)
def test_attention_in_chunks_has_the_bits_of_attention_at_once(device: torch.device, problem: Problem, sizes: list[int]) -> None:
    q, k, v = problem.tensors(device)
    cache = Sequences(problem, device)
    edges = [0, *(x for x in itertools.accumulate(sizes) if x < problem.length), problem.length]
    found = []
    for first, last in itertools.pairwise(edges):
        query, key, value = batched(q[:, first:last], k[:, first:last], v[:, first:last])
        options = dict(return_lse=True, out_dtype=torch.float32, backend="modelled")
        if last - first <= RECENT_QUERIES and first % 2:
            cache.append(key, value, backend="modelled")
            found.append(cache.attend(query, **options))
        else:
            found.append(cache.attend(query, (key, value), **options))
    expected = modelled(q, k, v, problem.recipe)
    assert torch.equal(bits(torch.cat([out[0] for out, _ in found], 1)), bits(expected[0]))
    assert torch.equal(bits(torch.cat([lse[0] for _, lse in found], 1)), bits(expected[1]))


@given(problem=problems, draft=st.integers(1, 16), kept=st.integers(0, 16), on_device=st.booleans())
def test_rejected_tokens_leave_no_trace(device: torch.device, problem: Problem, draft: int, kept: int, on_device: bool) -> None:
    """A speculative step across any page's edge, cut back and continued by other tokens."""
    _, k, v = problem.tensors(device)
    cache, kept = Sequences(problem, device), min(kept, draft)
    cache.append(*batched(k, v), backend="modelled")
    more = noise(problem, device, draft + 20)
    cache.append(*batched(*(x[:, :draft] for x in more)), backend="modelled")
    if on_device:  # the pages stay its own, and a page that was complete is written again
        cache.table.lengths[0] -= draft - kept
        cache.lengths[0] -= draft - kept
    else:
        cache.truncate(0, problem.length + kept)
    cache.append(*batched(*(x[:, draft:] for x in more)), backend="modelled")
    cache.assert_holds(0, *(torch.cat([x, y[:, :kept], y[:, draft:]], 1) for x, y in zip((k, v), more, strict=True)))


@given(problem=problems, share=st.floats(0, 1))
def test_forks_share_pages_and_go_on_alone(device: torch.device, problem: Problem, share: float) -> None:
    _, k, v = problem.tensors(device)
    both = Sequences(problem, device, 2)
    both.append(*batched(k, v), sequences=[0], backend="modelled")
    free = both.table.free_pages
    both.fork(0, 1)
    assert both.table.free_pages == free
    both.assert_holds(1, k, v)
    cut = int(share * problem.length) // PAGE * PAGE
    both.truncate(1, cut)
    new_k, new_v = 2 - k[:, :90], v[:, :90] * 2
    both.append(*batched(new_k, new_v), sequences=[1], backend="modelled")
    both.assert_holds(0, k, v)
    both.assert_holds(1, torch.cat([k[:, :cut], new_k], 1), torch.cat([v[:, :cut], new_v], 1))
    both.truncate(0, 0), both.truncate(1, 0)
    assert both.table.free_pages == 12


@pytest.mark.parametrize("backend", ("modelled", "triton", "auto"))
def test_ragged_rows_and_shuffled_pages(device: torch.device, backend: str) -> None:
    """Lengths of 0, 1 and at pages' edges, in the rows of one call; what no sequence has is NaN, and never seen."""
    problem = Problem(400, 2, 2, 64, 64, torch.float16, "normal", fp8attn.Recipe(), 0)
    q, k, v = problem.tensors(device)
    lengths = [300, 0, 1, 127, 128, 129, 256, 400]
    expected, expected_lse = modelled(q, k, v, problem.recipe)
    cache = KVCache(8, 20, 2, 64, dtype=torch.float16, device=device)
    for x in cache.storage.tensors():
        if x.dtype != torch.int32:
            x.view(torch.uint8).fill_(0x7F) if x.dtype == torch.float8_e4m3fn else x.fill_(torch.nan)
    ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    free = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    table = [[free.pop() for _ in range(length // PAGE)] for length in lengths]
    batch = PagedBatch(ints([[*row, *[10**6] * 4][:4] for row in table]), ints(lengths), None, ints([5, 3, 0, 7, 1, 2, 4, 6]))
    whole = lambda x: x.expand(8, -1, -1, -1)[:, :, :400]  # noqa: E731
    prompts = PagedBatch(batch.page_table, batch.lengths, batch.lengths, batch.sequences)
    cache.check(prompts, 400)
    out, lse = fp8attn.paged_sdpa(whole(q), cache, prompts, (whole(k), whole(v)), return_lse=True, out_dtype=torch.float32, backend=backend)
    steps = PagedBatch(batch.page_table, batch.lengths, ints([4, 0, 1, 4, 4, 4, 4, 4]), batch.sequences)
    queries = torch.stack([q[:, max(length - 4, 0) : max(length - 4, 0) + 4] for length in lengths])
    last, last_lse = fp8attn.paged_sdpa(queries, cache, steps, return_lse=True, out_dtype=torch.float32, backend=backend)
    for row, length in enumerate(lengths):
        count = min(length, 4)
        for found, found_lse, first, last_row in ((out, lse, 0, length), (last, last_lse, length - count, length)):
            rows = last_row - first
            if rows:
                wanted = expected[None, :, first:last_row], expected_lse[None, :, first:last_row]
                exact_sums = not GPU or backend == "modelled"
                assert_attends(found[row : row + 1, :, :rows], found_lse[row : row + 1, :, :rows], wanted, problem.dtype, exact_sums)
            assert not found[row, :, rows:].any() and bool((found_lse[row, :, rows:] == -torch.inf).all())


@pytest.mark.parametrize("backend", ("modelled", "triton", "auto"))
def test_numbers_out_of_range_are_no_indices(device: torch.device, backend: str) -> None:
    """A page, a sequence or a length that isn't there gives NaN to the rows that would see it, and others are as they were."""
    problem = Problem(300, 1, 2, 64, 64, torch.float16, "normal", fp8attn.Recipe(), 5)
    q, k, v = (x.expand(4, -1, -1, -1) for x in problem.tensors(device))
    good, bad = (KVCache(4, 8, 1, 64, dtype=torch.float16, device=device) for _ in range(2))
    ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    table, lengths = ints([[0, 1], [2, 3], [4, 5], [6, 7]]), ints([300] * 4)
    right = fp8attn.paged_sdpa(q, good, PagedBatch(table, lengths), (k, v), backend=backend)
    wrong_table, wrong_lengths, sequences = table.clone(), lengths.clone(), ints([0, 1, 9, 3])
    wrong_table[1, 1] = 8
    wrong_lengths[3] = 1 << 30
    batch = PagedBatch(wrong_table, wrong_lengths, ints([300, 300, 300, 0]), sequences)
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] is 8; it must be 0 to 7"):
        bad.check(batch, 300)
    out = fp8attn.paged_sdpa(q, bad, batch, (k, v), backend=backend)
    assert torch.equal(out[0], right[0])
    assert torch.equal(out[1, :, :256], right[1, :, :256]) and bool(out[1, :, 256:].isnan().all())
    assert bool(out[2].isnan().all()) and not out[3].any()
    steps = PagedBatch(wrong_table, wrong_lengths, None, sequences)
    assert bool(fp8attn.paged_sdpa(q[:, :, :1], bad, steps, backend=backend)[3].isnan().all())


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_bytes_per_token(dim: int) -> None:
    cache = KVCache(1, 8192 // PAGE, 8, dim, device="meta")
    assert cache.nbytes / (8 * 8192) <= 1.06 * 2 * dim


@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_complete_pages_are_never_written_again(device: torch.device, seed: int) -> None:
    problem = Problem(500, 1, 1, 16, 16, torch.float32, "normal", fp8attn.Recipe(), seed)
    _, k, v = problem.tensors(device)
    cache = Sequences(problem, device)
    cache.append(*batched(k[:, :300], v[:, :300]))
    before = [x.clone() for x in cache.held(0).tensors()]
    cache.append(*batched(1e3 * k[:, 300:], 1e3 * v[:, 300:]))
    for x, y in zip(before, cache.held(0).tensors(), strict=True):
        assert torch.equal(bits(x), bits(y[:2]))


def test_last_tokens_that_a_cache_keeps(device: torch.device) -> None:
    """After any append, it has what RECENT_QUERIES queries see in half precision."""
    assert all((end - RECENT_QUERIES) // PAGE * PAGE >= end - RECENT for end in range(RECENT_QUERIES, 1000))
    cache, x = KVCache(1, 4, 1, 64, device=device), torch.zeros(1, 1, RECENT_QUERIES + 1, 64, dtype=torch.bfloat16, device=device)
    table = PageTable(1, 4, device=device)
    table.lengths += 100
    fp8attn.paged_sdpa(x[:, :, 1:], cache, table.batch(), backend="modelled")
    with pytest.raises(ValueError, match=r"query has 66 tokens and new is None; it must have at most 65"):
        fp8attn.paged_sdpa(x, cache, table.batch(), backend="modelled")


@pytest.mark.parametrize("backend", ("modelled", "triton", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("most", (None, 90))
def test_packed_rows_whose_tokens_a_cache_keeps_no_more_are_nan(backend: Backend, most: int | None, device: torch.device) -> None:
    """Queries of an earlier page than those that the cache has in half precision, with and without a bound of few queries."""
    length, count = 340, most or 250
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=g).to(device, torch.bfloat16) for _ in range(3))
    cache, table = KVCache(1, 4, 1, 64, device=device), PageTable(1, 4, device=device)
    table.reserve(0, length)
    before = table.batch()
    table.lengths += length
    cache.append(k, v, before, backend="modelled")
    starts = torch.tensor([0, count], dtype=torch.int32, device=device)
    batch = PagedBatch(table.table, table.lengths, cu_seqlens=starts, max_count=most)
    out = fp8attn.paged_sdpa(q[0, :, length - count :].transpose(0, 1), cache, batch, backend=backend)
    positions = torch.arange(length - count, length)
    assert torch.equal(out.isnan().all(-1)[:, 0].cpu(), positions // PAGE * PAGE < length - RECENT)


@pytest.mark.gpu
def test_lengths_change_between_replays(device: torch.device) -> None:
    """One graph decodes several steps across pages' edges, of sequences of different lengths, and cuts one back."""
    problem = Problem(700, 2, 4, 128, 128, torch.bfloat16, "normal", fp8attn.Recipe(), 7)
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors(device))
    both, twin = Sequences(problem, device, 2), Sequences(problem, device, 2)
    firsts = [250, 380]
    for cache in (both, twin):
        cache.append(k[:, :, :380], v[:, :, :380], [0, 1], firsts)
        for sequence in (0, 1):
            cache.table.reserve(sequence, 700)
    query, key, value = (torch.zeros_like(x[:, :, :1]) for x in (q, k, v))
    batch = both.table.batch(max_length=700)

    options = dict(out_dtype=torch.float32, return_lse=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        both.table.lengths += 1
        return fp8attn.paged_sdpa(query, both.cache, batch, (key, value), **options)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    both.table.lengths.copy_(both.ints(*firsts))
    done = [*firsts]
    for _ in range(12):
        for x, to in ((q, query), (k, key), (v, value)):
            to.copy_(torch.stack([x[row, :, done[row] : done[row] + 1] for row in (0, 1)]))
        graph.replay()
        new = key.clone(), value.clone()
        assert_attends(out, lse, twin.attend(query, new, [0, 1], backend="modelled", **options), problem.dtype, False)
        done = [n + 1 for n in done]
        if done[0] == 258:  # rejected
            both.table.lengths[0] -= 4
            twin.table.lengths[0] -= 4
            twin.lengths[0] -= 4
            done[0] -= 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("auto", "triton"))
def test_chunks_change_between_replays(device: torch.device, backend: str) -> None:
    """One graph appends and attends to chunks of two sequences, which begin anywhere in a page."""
    problem, size = Problem(700, 2, 4, 128, 128, torch.bfloat16, "normal", fp8attn.Recipe(), 8), 200
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors(device))
    both, twin = Sequences(problem, device, 2), Sequences(problem, device, 2)
    firsts = [0, 45]
    for cache in (both, twin):
        for sequence in (0, 1):
            cache.table.reserve(sequence, 700)
    query, key, value = (torch.zeros_like(x[:, :, :size]) for x in (q, k, v))
    batch = both.table.batch(max_length=700)
    options = dict(out_dtype=torch.float32, return_lse=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        both.table.lengths += size
        return fp8attn.paged_sdpa(query, both.cache, batch, (key, value), backend=backend, **options)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for cache in (both, twin):  # the first step has written tokens over these
        cache.append(k[:, :, :45], v[:, :, :45], [0, 1], firsts)
    both.table.lengths.copy_(both.ints(*firsts))
    for chunk in range(3):
        done = [first + size * chunk for first in firsts]
        for x, to in ((q, query), (k, key), (v, value)):
            to.copy_(torch.stack([x[row, :, done[row] : done[row] + size] for row in (0, 1)]))
        graph.replay()
        new = key.clone(), value.clone()
        assert_attends(out, lse, twin.attend(query, new, [0, 1], backend="modelled", **options), problem.dtype, False)
