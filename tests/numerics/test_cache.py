"""The KV cache: appending in any order of sizes, forks and truncations give the bytes of quantizing at once, and attention the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
from closeness import relative
from fp8attn import KVCache, pages
from fp8attn.device import device_of
from fp8attn.pages import PAGE, RECENT, Pages
from fp8attn.triton import paged_attention
from paging import Problem, assert_equal_pages, bits, modelled, problems

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(6, 70), st.integers(71, 400)), min_size=1, max_size=5)


def cache_for(problem: Problem, sequences: int = 1, num_pages: int = 12) -> KVCache:
    return KVCache(sequences, num_pages, problem.kv_heads, problem.dim, problem.value_dim, recipe=problem.recipe, dtype=problem.dtype, device="cpu")


def held(cache: KVCache, sequence: int) -> Pages:
    count = cache.lengths[sequence] // PAGE
    numbers = cache.storage.page_table[sequence, :count].long()
    return Pages(*(getattr(cache.storage.pages, name)[numbers] for name in Pages.__dataclass_fields__))


def batched(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.unsqueeze(0) for x in tensors)


def assert_holds(cache: KVCache, sequence: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """The pages are those of the tokens at once, and so are the last tokens."""
    made = pages.quantize_sequence(k, v, cache.recipe)
    assert cache.lengths[sequence] == k.shape[1] == int(cache.storage.lengths[sequence])
    if made is not None:
        assert_equal_pages(held(cache, sequence), made[0])
    tokens = torch.arange(max(k.shape[1] // PAGE * PAGE, 0), k.shape[1])
    assert torch.equal(cache.storage.k[sequence][:, tokens % RECENT], k[:, tokens])
    assert torch.equal(cache.storage.v[sequence][:, tokens % RECENT], v[:, tokens])


@given(problem=problems, sizes=SIZES)
def test_appending_in_any_sizes_is_quantizing_at_once(problem: Problem, sizes: list[int]) -> None:
    _, k, v = problem.tensors()
    cache, other = cache_for(problem, 2), torch.randn(1, problem.kv_heads, 3, max(problem.dim, problem.value_dim)).to(problem.dtype)
    done = 0
    for size in sizes:
        size = min(size, problem.length - done)
        cache.append(*batched(k[:, done : done + size], v[:, done : done + size]), sequences=[1])
        cache.append(other[..., : problem.dim], other[..., : problem.value_dim], sequences=[0])
        done += size
    assert_holds(cache, 1, k[:, :done], v[:, :done])


@settings(max_examples=15)
@given(problem=problems, sizes=SIZES, backwards=st.booleans(), bad=st.sampled_from((None, None, "k", "v")))
def test_the_kernel_writes_the_bytes_of_the_definition(problem: Problem, sizes: list[int], backwards: bool, bad: str | None) -> None:
    """Into every tensor, for several sequences of different lengths at once."""
    tensors = dict(zip("qkv", problem.tensors(), strict=True))
    if bad is not None:
        tensors[bad][0, :: 1 + problem.seed % 200, problem.seed % 16] = (torch.nan, torch.inf)[problem.seed % 2]
    k, v = (torch.stack([tensors[name], tensors[name].flip(1)]) for name in "kv")
    caches = [cache_for(problem, 3) for _ in range(2)]
    done = 0
    for size in sizes:
        size = min(size, problem.length - done)
        counts = [size, size // 2] if backwards else [size, size]
        for cache, backend in zip(caches, ("modelled", "triton"), strict=True):
            part = [x[:, :, done : done + size].to(x.dtype) for x in (k, v)]
            cache.append(*part, sequences=[2, 0] if backwards else [0, 1], counts=counts, backend=backend)
        done += size
    for name, x, y in zip(range(99), caches[0].storage.tensors(), caches[1].storage.tensors(), strict=False):
        assert torch.equal(bits(x), bits(y)), name


def tolerance(problem: Problem) -> float:
    """Of the kernel: P of the own page is rounded as V is, P of pages at most once to a neighbouring code; the interpreter's bfloat16 is float32."""
    if GPU:
        return {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 4e-3}[problem.dtype]
    return {torch.float16: 1e-3, torch.bfloat16: 2e-4, torch.float32: 2e-4}[problem.dtype]


@settings(max_examples=15)
@given(problem=problems, queries=st.integers(1, 90), splits=st.integers(1, 4), given_keys=st.booleans(), scale=st.sampled_from((0.2, -0.1)))
def test_the_kernel_attends_as_the_oracle(problem: Problem, queries: int, splits: int, given_keys: bool, scale: float) -> None:
    """Decode, speculative steps and chunks, of two sequences with different numbers of queries."""
    q, k, v = (torch.stack([x, x.flip(1)]) for x in problem.tensors())
    cache = cache_for(problem, 2)
    queries = min(queries, problem.length, 65 if not given_keys else 90)
    fewer = (queries + 1) // 2
    before = problem.length - queries
    cache.append(k[:, :, :before], v[:, :, :before])
    recent = cache.storage.k.clone(), cache.storage.v.clone()
    rows = [(0, queries), (1, fewer)]
    new = [x[:, :, before:] for x in (k, v)]
    cache.append(*new, counts=[queries, fewer])
    step = cache.step(rows, *new) if given_keys else cache.step(rows)
    recent = recent if given_keys else (cache.storage.k, cache.storage.v)
    query = q[:, :, before:]
    expected, expected_lse = pages.attend_paged(query, cache.storage, step, recent, cache.recipe, scale)
    out, lse = paged_attention.attend(
        query, cache.storage, step, recent, cache.recipe, scale, device_of(cache.device), most_tokens=problem.length, out_dtype=torch.float32,
        splits=splits,
    )  # fmt: skip
    assert relative(out, expected) <= tolerance(problem)
    assert not out[1, :, fewer:].any()
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", (fp8attn.Recipe(), fp8attn.PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("what", ("q", "k", "v"))
def test_the_kernel_gives_nan_to_the_rows_of_the_oracle(recipe: fp8attn.Recipe, what: str) -> None:
    for token in (5, 128, 290):
        problem = Problem(300, 1, 2, 32, 32, torch.float16, "normal", recipe, token)
        tensors = dict(zip("qkv", problem.tensors(), strict=True))
        tensors[what][0, token, 7] = torch.inf
        answers = []
        for backend in ("modelled", "triton"):
            cache = cache_for(problem)
            answers.append(fp8attn.paged_sdpa(*batched(tensors["q"]), cache, *batched(tensors["k"], tensors["v"]), return_lse=True, backend=backend))
        for x, y in zip(*answers, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and bool(x.isnan().any())


def test_decode_by_kernels_is_prefill_by_kernels() -> None:
    """Token by token, in steps of 16 and at once: what differs is the order of sums."""
    problem = Problem(300, 2, 2, 64, 64, torch.float16, "normal", fp8attn.Recipe(), 3)
    q, k, v = batched(*problem.tensors())
    whole = fp8attn.paged_sdpa(q, cache_for(problem), k, v, backend="triton", out_dtype=torch.float32)
    for size in (1, 16):
        cache = cache_for(problem)
        first = 250
        cache.append(k[:, :, :first], v[:, :, :first], backend="triton")
        for start in range(first, first + 2 * size, size):
            part = slice(start, start + size)
            cache.append(k[:, :, part], v[:, :, part], backend="triton")
            out = fp8attn.paged_sdpa(q[:, :, part], cache, backend="triton", out_dtype=torch.float32)
            assert relative(out, whole[:, :, part]) < 3e-4


@given(problem=problems, sizes=SIZES)
def test_attention_in_chunks_has_the_bits_of_attention_at_once(problem: Problem, sizes: list[int]) -> None:
    q, k, v = problem.tensors()
    cache = cache_for(problem)
    edges = [0, *(x for x in itertools.accumulate(sizes) if x < problem.length), problem.length]
    found = []
    for first, last in itertools.pairwise(edges):
        query, key, value = batched(q[:, first:last], k[:, first:last], v[:, first:last])
        if last - first <= RECENT - PAGE:
            cache.append(key, value)
            found.append(fp8attn.paged_sdpa(query, cache, return_lse=True, out_dtype=torch.float32))
        else:
            found.append(fp8attn.paged_sdpa(query, cache, key, value, return_lse=True, out_dtype=torch.float32))
    expected = modelled(q, k, v, problem.recipe)
    assert torch.equal(bits(torch.cat([out[0] for out, _ in found], 1)), bits(expected[0]))
    assert torch.equal(bits(torch.cat([lse[0] for _, lse in found], 1)), bits(expected[1]))


@given(problem=problems, draft=st.integers(1, 16), kept=st.integers(0, 16))
def test_rejected_tokens_leave_no_trace(problem: Problem, draft: int, kept: int) -> None:
    """A speculative step across any page's edge, cut back and continued by other tokens."""
    _, k, v = problem.tensors()
    cache, kept = cache_for(problem), min(kept, draft)
    cache.append(*batched(k, v))
    more = torch.randn(problem.kv_heads, draft + 20, problem.dim).to(problem.dtype), torch.randn(problem.kv_heads, draft + 20, problem.value_dim)
    more = more[0], more[1].to(problem.dtype)
    cache.append(*batched(*(x[:, :draft] for x in more)))
    cache.truncate(0, problem.length + kept)
    cache.append(*batched(*(x[:, draft:] for x in more)))
    whole = [torch.cat([x, y[:, :kept], y[:, draft:]], 1) for x, y in zip((k, v), more, strict=True)]
    assert_holds(cache, 0, *whole)


@given(problem=problems, share=st.floats(0, 1))
def test_forks_share_pages_and_go_on_alone(problem: Problem, share: float) -> None:
    _, k, v = problem.tensors()
    cache = cache_for(problem, 2)
    cache.append(*batched(k, v), sequences=[0])
    free = cache.free_pages
    cache.fork(0, 1)
    assert cache.free_pages == free
    assert_holds(cache, 1, k, v)
    cut = int(share * problem.length) // PAGE * PAGE
    cache.truncate(1, cut)
    new_k, new_v = 2 - k[:, :90], v[:, :90] * 2
    cache.append(*batched(new_k, new_v), sequences=[1])
    assert_holds(cache, 0, k, v)
    assert_holds(cache, 1, torch.cat([k[:, :cut], new_k], 1), torch.cat([v[:, :cut], new_v], 1))
    cache.truncate(0, 0), cache.truncate(1, 0)
    assert cache.free_pages == 12


def test_ragged_rows_and_shuffled_pages() -> None:
    problem = Problem(400, 2, 2, 64, 40, torch.float16, "normal", fp8attn.Recipe(), 0)
    q, k, v = problem.tensors()
    cache = cache_for(problem, 3, 20)
    cache.append(*batched(k[:, :200], v[:, :200]), sequences=[1])  # pages of the sequences alternate
    key, value = k.expand(3, -1, -1, -1)[:, :, :300], v.expand(3, -1, -1, -1)[:, :, :300]
    cache.truncate(1, 0)
    for x in (cache.storage.k, cache.storage.v):
        x.fill_(torch.nan)  # never seen
    out, lse = fp8attn.paged_sdpa(
        q.expand(3, -1, -1, -1)[:, :, :300], cache, key, value, sequences=[2, 0, 1], counts=[300, 0, 129], return_lse=True, out_dtype=torch.float32
    )  # fmt: skip
    expected, expected_lse = modelled(q, k, v, problem.recipe)
    for row, count in enumerate((300, 0, 129)):
        assert torch.equal(out[row, :, :count], expected[:, :count]) and torch.equal(lse[row, :, :count], expected_lse[:, :count])
        assert not out[row, :, count:].any() and bool((lse[row, :, count:] == -torch.inf).all())
    assert cache.lengths == (0, 129, 300)


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_bytes_per_token(dim: int) -> None:
    cache = KVCache(1, 8192 // PAGE, 8, dim, device="meta")
    assert cache.nbytes / (8 * 8192) <= 1.06 * 2 * dim


def filled() -> tuple[KVCache, torch.Tensor]:
    cache = KVCache(2, 4, 2, 64, device="cpu")
    x = torch.zeros(2, 2, 300, 64, dtype=torch.bfloat16)
    cache.append(x[:1], x[:1], sequences=[0])
    return cache, x


@pytest.mark.parametrize(
    "change, error, message",
    (
        (dict(sequences=0), ValueError, "sequences is 0"),
        (dict(num_pages=-1), ValueError, "num_pages is -1"),
        (dict(kv_heads=True), ValueError, "kv_heads is True"),
        (dict(head_dim=65), ValueError, "head_dim is 65"),
        (dict(value_dim=8), ValueError, "head_dim is 8"),
        (dict(recipe=fp8attn.Recipe(recent=128)), ValueError, "recipe has recent=128"),
        (dict(recipe="int8"), TypeError, "recipe is a str"),
        (dict(dtype=torch.float64), TypeError, "dtype is torch.float64"),
    ),
)
def test_wrong_caches(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        KVCache(**{**dict(sequences=1, num_pages=1, kv_heads=1, head_dim=64, device="cpu"), **change})


def test_wrong_appends() -> None:
    cache, x = filled()
    for arguments, options, error, message in (
        ((x, x[:, :1]), {}, ValueError, "value has heads 1; it must be 2"),
        ((x, x[..., :32]), {}, ValueError, "value has head_dim 32"),
        ((x.float(), x), {}, TypeError, "key is torch.float32; it must be the cache's torch.bfloat16"),
        ((x[:1], x[:1]), {}, ValueError, "key has batch 1; it must be the number of sequences, 2"),
        ((x, x), dict(sequences=[0, 0]), ValueError, "sequences is"),
        ((x, x), dict(sequences=[0, 2]), ValueError, "sequences is"),
        ((x, x), dict(counts=[1, 301]), ValueError, "counts is"),
        ((x[0], x), {}, TypeError, "key must be"),
        ((x, None), {}, TypeError, "value is a NoneType"),
        ((x, x), dict(backend="cudnn"), ValueError, "backend is 'cudnn'"),
        ((x.clone().requires_grad_(), x), {}, RuntimeError, "key requires grad"),
        ((x, x), {}, RuntimeError, "the cache has 2 free pages of 128 tokens; 4 are needed"),
    ):
        with pytest.raises(error, match=message):
            cache.append(*arguments, **options)
        assert cache.lengths == (300, 0) and cache.free_pages == 2


def test_wrong_attention() -> None:
    cache, x = filled()
    q = torch.zeros(1, 4, 60, 64, dtype=torch.bfloat16)
    only = dict(sequences=[0])
    for arguments, options, error, message in (
        ((q, "cache"), only, TypeError, "cache is a str"),
        ((q[:, :3], cache), only, ValueError, "query has 3 heads; it must be a multiple of the cache's 2"),
        ((q, cache, x[:1]), only, ValueError, "value is None"),
        ((q, cache, x[:1], x[:1]), only, ValueError, "key has shape"),
        ((q, cache), dict(sequences=[1]), ValueError, "query has 60 tokens for sequence 1, which has 0"),
        ((q.expand(1, 4, 60, 64).repeat(1, 1, 4, 1), cache), only, ValueError, "no longer kept in half precision"),
        ((q, cache), dict(scale=float("nan"), **only), ValueError, "scale is nan"),
        ((q, cache), dict(out_dtype=torch.int8, **only), TypeError, "out_dtype is torch.int8"),
        ((q, cache), dict(return_lse=1, **only), TypeError, "return_lse is a int"),
    ):
        with pytest.raises(error, match=message):
            fp8attn.paged_sdpa(*arguments, **options)


def test_wrong_truncations_and_forks() -> None:
    cache, x = filled()
    for sequence, length, message in ((2, 0, "sequence is 2"), (0, 301, "length is 301"), (0, 100, "or at least 128"), (0, -1, "length is -1")):
        with pytest.raises(ValueError, match=message):
            cache.truncate(sequence, length)
    with pytest.raises(ValueError, match="target is 0"):
        cache.fork(0, 0)
    with pytest.raises(ValueError, match="source is 7"):
        cache.fork(7, 1)
    cache.truncate(0, 128)
    assert cache.lengths == (128, 0) and cache.free_pages == 3


@settings(max_examples=5)
@given(seed=st.integers(0, 99))
def test_complete_pages_are_never_written_again(seed: int) -> None:
    problem = Problem(500, 1, 1, 16, 16, torch.float32, "normal", fp8attn.Recipe(), seed)
    _, k, v = problem.tensors()
    cache = cache_for(problem)
    cache.append(*batched(k[:, :300], v[:, :300]))
    before = [x.clone() for x in vars(held(cache, 0)).values()]
    cache.append(*batched(1e3 * k[:, 300:], 1e3 * v[:, 300:]))
    for x, y in zip(before, vars(held(cache, 0)).values(), strict=True):
        assert torch.equal(bits(x), bits(y[:2]))
