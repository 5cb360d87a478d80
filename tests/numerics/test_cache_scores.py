"""Windows, soft caps and sinks of a KV cache, and packed tokens: kernels as the oracle, the oracle as exact attention, each sequence as alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from closeness import relative
from fp8attn import KVCache, PagedBatch, PageTable, Recipe, pages, reference
from fp8attn.device import device_of
from fp8attn.pages import PAGE, RECENT_QUERIES, PagedCall, Storage
from fp8attn.reference import Scoring
from fp8attn.triton import paged_attention
from paging import Problem, Sequences, assert_attends, batched, bits, modelled, problems

PLAIN = Problem(400, 1, 2, 32, 32, torch.float16, "normal", Recipe(), 0)
FEW = max(settings().max_examples // 3, 1)

lefts = st.one_of(st.sampled_from((-1, 0, 127, 128, 129, 10**6)), st.integers(1, 400))


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is done to scores. Few kinds of them, because kernels are compiled for each."""

    left: int
    kind: str

    def of(self, problem: Problem, device: torch.device | None = None) -> Scoring:
        softcap = 2.0 if self.kind in ("all", "capped") else 0.0
        sinks = sinks_of(problem, device) if self.kind in ("all", "sinks") else None
        return Scoring(problem.dim**-0.5, (self.left, 0), softcap, sinks)


scores = st.one_of(
    st.builds(Scores, lefts, st.just("window")),
    st.builds(Scores, st.just(-1), st.just("sinks")),
    st.builds(Scores, st.integers(0, 400), st.sampled_from(("all", "capped"))),
)


def sinks_of(problem: Problem, device: torch.device | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(problem.seed)
    return torch.randn(problem.kv_heads * problem.group, generator=g).to(device)


def options_of(how: Scoring) -> dict:
    return dict(window=how.window, softcap=how.softcap, sinks=how.sinks, scale=how.softmax_scale, return_lse=True, out_dtype=torch.float32)


@settings(max_examples=FEW)
@given(problem=problems, queries=st.integers(1, 90), splits=st.integers(1, 3), given_keys=st.booleans(), scores=scores)
def test_the_kernel_attends_as_the_oracle(
    device: torch.device, problem: Problem, queries: int, splits: int, given_keys: bool, scores: Scores
) -> None:
    """Two sequences with different numbers of queries."""
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors(device))
    both = Sequences(problem, device, 2)
    queries = min(queries, problem.length, 90 if given_keys else RECENT_QUERIES)
    before, counts = problem.length - queries, [queries, (queries + 1) // 2]
    both.append(k[:, :, :before], v[:, :, :before], [0, 1], backend="modelled")
    new = k[:, :, before:], v[:, :, before:]
    storage = both.cache.storage
    old = Storage.of([x.clone() if x is storage.k or x is storage.v else x for x in storage.tensors()])
    both.append(*new, [0, 1], counts, backend="modelled")
    shown = (old, new) if given_keys else (storage, None)
    how = scores.of(problem, device)
    options = how.softmax_scale, how.window, how.softcap, how.sinks
    call = PagedCall(q[:, :, before:], *shown, both.batch([0, 1], counts), both.cache.recipe, *options)
    out, lse = paged_attention.attend(call, device_of(device), torch.float32, splits=splits)
    assert_attends(out, lse, pages.attend_paged(call), problem.dtype, not GPU)
    assert not out[1, :, counts[1] :].any() and bool((lse[1, :, counts[1] :] == -torch.inf).all())


def exact(problem: Problem, how: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attention(*batched(*problem.tensors()), causal="bottom_right", scoring=how)


@given(problem=problems, scores=scores)
def test_error_is_that_of_fp8(problem: Problem, scores: Scores) -> None:
    problem = dataclasses.replace(problem, distribution="normal" if problem.distribution in ("outliers", "biased") else problem.distribution)
    how, left = scores.of(problem), scores.left
    out, lse = modelled(*problem.tensors(), problem.recipe, how)
    wanted, wanted_lse = exact(problem, how)
    assert relative(out, wanted[0]) < 0.09
    torch.testing.assert_close(lse, wanted_lse[0], rtol=0.05, atol=0.25)
    first = torch.arange(problem.length) - left if left >= 0 else torch.zeros(problem.length)
    half = first >= torch.arange(problem.length) // PAGE * PAGE  # the window is in the own page
    half[:PAGE] = True
    torch.testing.assert_close(out[:, half], wanted[0][:, half], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[:, half], wanted_lse[0][:, half], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
@pytest.mark.parametrize("left", (-1, 0, 5, 127, 128, 200, 300))
@pytest.mark.parametrize("softcap, sinks", ((0.0, False), (1.5, True), (1.5, False), (0.0, True)))
def test_exact_where_nothing_is_rounded(qk: str, left: int, softcap: float, sinks: bool) -> None:
    """Keys that K's mean takes all of: which keys are seen, and the order of mean, soft cap and sink, are right to float32's rounding."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.zeros(2, 400, 64), torch.randint(0, 2, (2, 400, 64), generator=g) * 2.0 - 1
    q = torch.zeros(4, 400, 64)
    q[..., 0], k[..., 0] = torch.randn(4, 400, generator=g), 3.0
    how = Scoring(0.3, (left, 0), softcap, torch.randn(4, generator=g) if sinks else None)
    out, lse = modelled(q, k, v, Recipe(rotate=0, smooth_k=True, smooth_v=False, qk=qk), how)
    wanted, wanted_lse = reference.attention(*batched(q, k, v), causal="bottom_right", scoring=how, dtype=torch.float64)
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ("modelled", "triton"))
def test_options_that_change_nothing(device: torch.device, backend: str) -> None:
    """A window that hides nothing, a high soft cap, and a sink of no weight."""
    q, k, v = batched(*PLAIN.tensors(device))
    answer = lambda **options: Sequences(PLAIN, device).attend(  # noqa: E731
        q, (k, v), backend=backend, return_lse=True, out_dtype=torch.float32, **options
    )
    plain = answer()
    for window in ((PLAIN.length, 0), (1 << 40, 0)):
        for x, y in zip(plain, answer(window=window), strict=True):
            # kernels of another window are other programs, whose float32 sums have another order
            assert torch.equal(x, y) if backend == "modelled" else relative(x, y) < 1e-5
    for options in (dict(softcap=1e4), dict(sinks=torch.full((2,), -torch.inf, device=device))):
        for x, y in zip(plain, answer(**options), strict=True):
            assert relative(x, y) < 1e-3  # a score's last bit decides how some P are rounded


@given(problem=problems, left=lefts, softcap=st.sampled_from((0.0, 2.0)))
def test_a_sink_is_one_more_key_without_a_value(problem: Problem, left: int, softcap: float) -> None:
    how = dataclasses.replace(Scores(left, "sinks").of(problem), softcap=softcap)
    assert how.sinks is not None
    without = modelled(*problem.tensors(), problem.recipe, dataclasses.replace(how, sinks=None))
    wanted, wanted_lse = reference.with_sinks(*batched(*without), how.sinks)
    out, lse = modelled(*problem.tensors(), problem.recipe, how)
    torch.testing.assert_close(out, wanted[0], rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(lse, wanted_lse[0], rtol=1e-5, atol=1e-5)


SLOW = pytest.mark.thorough


WINDOWS = ((-1, Recipe()), (128, fp8attn.PRECISE)), ((40, Recipe()), (200, Recipe()))


@pytest.mark.parametrize("backend", ("modelled", "triton"))
@pytest.mark.parametrize(
    "what, token, windows",
    [
        pytest.param(what, token, half, marks=() if GPU or (what, token, half) in (("k", 130, 0), ("v", 290, 1)) else SLOW)
        for what in "kv" for token in (5, 130, 290) for half in (0, 1)
    ],
)  # fmt: skip
def test_exactly_the_rows_that_see_it_are_nan(device: torch.device, backend: str, what: str, token: int, windows: int) -> None:
    for left, recipe in WINDOWS[windows]:
        problem = dataclasses.replace(PLAIN, recipe=recipe)
        tensors = dict(zip("qkv", problem.tensors(device), strict=True))
        tensors[what][0, token, 7] = torch.inf
        q, k, v = batched(*tensors.values())
        out, _ = Sequences(problem, device).attend(
            q, (k, v), window=(left, 0), softcap=5.0, return_lse=True, backend=backend
        )  # fmt: skip
        position = torch.arange(problem.length, device=device)
        sees = (position >= token) & ((position - left <= token) if left >= 0 else position >= 0)
        assert torch.equal(out[0].isnan().any(-1), sees.expand(2, -1)) and torch.equal(out[0].isnan().all(-1), sees.expand(2, -1))


@pytest.mark.parametrize("backend", ("modelled", "triton"))
def test_pages_outside_of_the_window_are_not_there(device: torch.device, backend: str) -> None:
    """Their numbers may be out of range, and what they hold anything. Rows are NaN that see a page without a number, and only they."""
    q, k, v = batched(*PLAIN.tensors(device))
    cache = Sequences(PLAIN, device)
    cache.append(k[:, :, :-20], v[:, :, :-20])
    options = dict(window=(100, 0), sinks=sinks_of(PLAIN, device), return_lse=True, out_dtype=torch.float32, backend=backend)
    batch = cache.grow([0], [20])
    expected = fp8attn.paged_sdpa(q[:, :, -20:], cache.cache, batch, (k[:, :, -20:], v[:, :, -20:]), **options)
    table = batch.page_table.clone()
    table[0, :2] = torch.tensor([-1, 1 << 30], dtype=torch.int32, device=device)
    found = fp8attn.paged_sdpa(q[:, :, -20:], cache.cache, dataclasses.replace(batch, page_table=table), **options)
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y) and bool(y.isfinite().all())
    table[0, 2] = 1 << 30  # of the tokens 256 to 383, which are the own page of the first four rows
    out, _ = fp8attn.paged_sdpa(q[:, :, -20:], cache.cache, dataclasses.replace(batch, page_table=table), **options)
    assert bool(out[:, :, 4:].isnan().all()) and torch.equal(out[:, :, :4], expected[0][:, :, :4])
    narrow = {**options, "window": (10, 0)}
    out, _ = fp8attn.paged_sdpa(q[:, :, -20:], cache.cache, dataclasses.replace(batch, page_table=table), **narrow)
    position = torch.arange(380, 400, device=device)
    sees = (position >= 384) & (position - 10 < 384)
    assert torch.equal(out[0].isnan().any(-1), sees.expand(2, -1))
    short = dataclasses.replace(batch, page_table=table[:, :1].contiguous())
    out, _ = fp8attn.paged_sdpa(q[:, :, -20:], cache.cache, short, **narrow)
    assert torch.equal(out[0].isnan().any(-1), sees.expand(2, -1))


@given(problem=problems, sizes=st.lists(st.one_of(st.integers(1, 5), st.integers(6, 200)), min_size=1, max_size=4), scores=scores)
def test_chunks_of_any_sizes_have_the_bits_of_one_prefill(device: torch.device, problem: Problem, sizes: list[int], scores: Scores) -> None:
    """Of decode, which is a chunk of one token, too."""
    q, k, v = problem.tensors(device)
    how = scores.of(problem, device)
    cache, found = Sequences(problem, device), []
    edges = [0, *(x for x in itertools.accumulate(sizes) if x < problem.length), problem.length]
    for first, last in itertools.pairwise(edges):
        query, key, value = batched(q[:, first:last], k[:, first:last], v[:, first:last])
        found.append(cache.attend(query, (key, value), backend="modelled", **options_of(how)))
    expected = modelled(q, k, v, problem.recipe, how)
    assert torch.equal(bits(torch.cat([out[0] for out, _ in found], 1)), bits(expected[0]))
    assert torch.equal(bits(torch.cat([lse[0] for _, lse in found], 1)), bits(expected[1]))


LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.sampled_from((127, 128, 129, 255)), st.integers(4, 300)), min_size=1, max_size=4)


@dataclasses.dataclass
class Packed:
    """Steps of several sequences with packed tokens, and of each of them alone."""

    problem: Problem
    device: torch.device
    rows: int

    def __post_init__(self) -> None:
        self.cache = KVCache(
            self.rows + 1, 24, self.problem.kv_heads, self.problem.dim, self.problem.value_dim, self.problem.recipe, self.problem.dtype, self.device
        )
        self.table = PageTable(self.rows + 1, 24, device=self.device)
        self.order = [*range(self.rows, 0, -1)]  # the number of each row's sequence
        self.lengths = [0] * self.rows
        self.tensors = [dataclasses.replace(self.problem, length=900, seed=self.problem.seed + i).tensors(self.device) for i in range(self.rows)]

    def step(self, sizes: list[int], more: int = 0) -> tuple[PagedBatch, list[torch.Tensor], list[slice]]:
        """The batch of a step, its packed q, k and v, of which `more` tokens are no row's, and each row's part of all its tokens."""
        spans = []
        for row, size in enumerate(sizes):
            spans.append(slice(self.lengths[row], self.lengths[row] + size))
            self.lengths[row] += size
            self.table.reserve(self.order[row], self.lengths[row])
            self.table.lengths[self.order[row]] = self.lengths[row]
        ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=self.device)  # noqa: E731
        packed = []
        for i in range(3):
            parts = [x[i][:, span].transpose(0, 1) for x, span in zip(self.tensors, spans, strict=True)]
            packed.append(torch.cat([*parts, torch.full_like(self.tensors[0][i][:, :more].transpose(0, 1), torch.nan)]))
        at = torch.tensor(self.order, device=self.device)
        cu_seqlens = ints([0, *itertools.accumulate(sizes)])
        batch = PagedBatch(self.table.table[at], self.table.lengths[at], None, ints(self.order), cu_seqlens=cu_seqlens)
        return batch, packed, spans


@settings(max_examples=max(FEW // 2, 1))
@given(problem=problems, first=LENGTHS, second=LENGTHS, scores=scores, appended=st.booleans(), more=st.sampled_from((0, 3, 150)))
@pytest.mark.parametrize("backend", ("modelled", "triton", pytest.param("auto", marks=pytest.mark.gpu)))
def test_packed_sequences_are_as_each_alone(
    device: torch.device, backend: str, problem: Problem, first: list[int], second: list[int], scores: Scores, appended: bool, more: int
) -> None:
    """Prefill, chunks and decode in one call. The pages are those of each sequence alone."""
    rows = min(len(first), len(second))
    packed, how = Packed(problem, device, rows), scores.of(problem, device)
    for sizes in (first[:rows], second[:rows], [1] * rows):
        batch, (q, k, v), spans = packed.step(sizes, more)
        packed.cache.check(batch, q.shape[0])
        if appended and max(sizes) <= RECENT_QUERIES:
            packed.cache.append(k, v, batch, backend=backend)
            out, lse = fp8attn.paged_sdpa(q, packed.cache, batch, backend=backend, **options_of(how))
        else:
            out, lse = fp8attn.paged_sdpa(q, packed.cache, batch, (k, v), backend=backend, **options_of(how))
        edges = [0, *itertools.accumulate(sizes)]
        assert not out[edges[-1] :].any() and bool((lse[:, edges[-1] :] == -torch.inf).all())
        for row, span in enumerate(spans):
            if span.stop > span.start:
                query, key, value = (x[:, : span.stop] for x in packed.tensors[row])
                wanted = tuple(x[:, span] for x in modelled(query, key, value, problem.recipe, how))
                part = slice(edges[row], edges[row + 1])
                found = out[part].transpose(0, 1), lse[:, part]
                if backend == "modelled":
                    assert torch.equal(bits(found[0]), bits(wanted[0])) and torch.equal(bits(found[1]), bits(wanted[1]))
                else:
                    assert_attends(*batched(*found), batched(*wanted), problem.dtype, not GPU)
    for row, sequence in enumerate(packed.order):
        alone, whole = Sequences(problem, device), tuple(x[:, : packed.lengths[row]] for x in packed.tensors[row][1:])
        alone.append(*batched(*whole), backend="modelled")
        numbers = packed.table.table[sequence, : packed.lengths[row] // PAGE].long()
        for x, y in zip(packed.cache.storage.pages.tensors(), alone.held(0).tensors(), strict=True):
            assert torch.equal(bits(x[numbers]), bits(y))
        last = torch.arange(packed.lengths[row] // PAGE * PAGE, packed.lengths[row], device=device)
        for x, y in zip((packed.cache.storage.k, packed.cache.storage.v), whole, strict=True):
            assert torch.equal(x[sequence][:, last % pages.RECENT], y[:, last])
    assert not packed.cache.storage.tickets.any()


@pytest.mark.gpu
def test_packed_sequences_have_the_bits_of_the_padded_call(device: torch.device) -> None:
    """Of the same tiles and splits: a decode step of sequences of several lengths, and a speculative one."""
    problem = Problem(900, 2, 4, 128, 128, torch.bfloat16, "normal", Recipe(), 1)
    for size in (1, 4):
        packed, rows = Packed(problem, device, 5), 5
        batch, (q, k, v), _ = packed.step([700, 3, 128, 300, 511])
        fp8attn.paged_sdpa(q, packed.cache, batch, (k, v))
        batch, (q, k, v), _ = packed.step([size] * rows)
        out, lse = fp8attn.paged_sdpa(q, packed.cache, batch, (k, v), window=(500, 0), return_lse=True)
        padded = q.view(rows, size, 8, 128).transpose(1, 2)
        plain = dataclasses.replace(batch, cu_seqlens=None)
        wanted, wanted_lse = fp8attn.paged_sdpa(padded, packed.cache, plain, window=(500, 0), return_lse=True, backend="triton")
        assert_attends(
            out.float().view(rows, size, 8, 128).transpose(1, 2), lse.view(8, rows, size).transpose(0, 1), (wanted.float(), wanted_lse),
            torch.bfloat16, False,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ("modelled", "triton"))
def test_packed_numbers_out_of_range_are_no_indices(device: torch.device, backend: str) -> None:
    """Also rows whose keys the cache has no more in half precision are NaN, and others are as they were."""
    packed = Packed(PLAIN, device, 3)
    batch, (q, k, v), _ = packed.step([300, 200, 130])
    right = fp8attn.paged_sdpa(q, packed.cache, batch, (k, v), backend=backend)
    late = fp8attn.paged_sdpa(q, packed.cache, batch, backend=backend)  # as if appended before: 192 tokens are left of each
    gone = torch.cat([torch.arange(n) // PAGE * PAGE < n - pages.RECENT for n in (300, 200, 130)]).to(device)
    assert torch.equal(late.isnan().any(-1), gone.unsqueeze(-1).expand(-1, 2)) and torch.equal(late[~gone], right[~gone])
    wrong = batch.cu_seqlens.clone()
    for edges, message in (([0, 300, 1 << 30, 630], "never fall"), ([0, 300, -5, 630], "never fall"), ([0, 300, 500, 631], "end with at most 630")):
        wrong.copy_(torch.tensor(edges, dtype=torch.int32))
        bad = dataclasses.replace(batch, cu_seqlens=wrong)
        with pytest.raises(ValueError, match=message):
            packed.cache.check(bad, 630)
        out = fp8attn.paged_sdpa(q, packed.cache, bad, backend=backend)
        assert out.shape == right.shape
    lengths = batch.lengths.clone()
    lengths[1] = 1 << 30
    out = fp8attn.paged_sdpa(q, packed.cache, dataclasses.replace(batch, lengths=lengths), backend=backend)
    assert bool(out[300:500].isnan().all()) and torch.equal(out[500:], late[500:])


def test_packed_calls_without_tokens(device: torch.device) -> None:
    cache, table = KVCache(2, 4, 1, 32, dtype=torch.float16, device=device), PageTable(2, 4, device=device)
    for backend in ("modelled", "triton"):
        for tokens in (0, 5):
            x = torch.ones(tokens, 1, 32, dtype=torch.float16, device=device)
            batch = table.batch(cu_seqlens=torch.zeros(3, dtype=torch.int32, device=device))
            out, lse = fp8attn.paged_sdpa(x, cache, batch, (x, x), return_lse=True, backend=backend)
            assert out.shape == (tokens, 1, 32) and lse.shape == (1, tokens) and not out.any() and bool((lse == -torch.inf).all())


def test_compiled_whole(device: torch.device) -> None:
    """fullgraph=True: packed tokens with a window, a soft cap and sinks; the same bits as eager."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        packed = Packed(PLAIN, device, 3)
        batches = [packed.step(sizes)[:2] for sizes in ([150, 3, 129], [1, 70, 1])]
        sinks = sinks_of(PLAIN, device)

        def attention(q, k, v, batch, cache=packed.cache, sinks=sinks):
            return fp8attn.paged_sdpa(q + 1, cache, batch, (k, v), window=(100, 0), softcap=3.0, sinks=sinks)

        function = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
        found.append([function(*tensors, batch) for batch, tensors in batches[:1]])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
