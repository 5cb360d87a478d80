"""Calls at the sizes of models, on a GPU that does other work meanwhile: no bit moves between calls, and outputs in half precision are the
float32 ones rounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8attn
from fp8attn import PRECISE, KVCache, PagedBatch, PagedTensors, Recipe
from fp8attn.recipe import DEFAULT_RECIPE

pytestmark = pytest.mark.gpu

CALLS = 8
"""Of a test, beside other work."""

Attend = Callable[..., Any]
"""A call. It takes what `sdpa` takes by name: `out_dtype` and `return_lse`."""


class Drawn:
    """Tensors of a seed."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
        self.dtype, self.generator = dtype, torch.Generator("cuda").manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype or self.dtype, device="cuda", generator=self.generator)

    def numbers(self, count: int) -> torch.Tensor:
        """0 to count - 1, in any order."""
        return torch.randperm(count, device="cuda", generator=self.generator).int()


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def dense(*shape: int, group: int = 1, keys: int = 0, stored: bool = False, has_sinks: bool = False, **options: Any) -> Attend:
    """A call of `sdpa`. shape: of k, (B, H, S, D). keys: their number, if it isn't S. stored: quantized before."""
    drawn, (batch, heads, length, dim) = Drawn(), shape
    q, k, v = drawn(batch, heads * group, length, dim), drawn(batch, heads, keys or length, dim), drawn(batch, heads, keys or length, dim)
    if has_sinks:
        options["sinks"] = drawn(heads * group, dtype=torch.float32)
    if stored:
        q, k, v = fp8attn.quantize(q, k, v, recipe=options.get("recipe", DEFAULT_RECIPE))
        options.setdefault("out_dtype", torch.bfloat16)
    return lambda **more: fp8attn.sdpa(q, k, v, enable_gqa=group > 1, **{**options, **more})


LENGTHS = (200, 4097, 1, 900, 0, 12_000, 577, 63, 128, 2500, 33, 7000)


def varlen(
    dim: int = 128, heads: int = 8, group: int = 4, lengths: tuple[int, ...] = LENGTHS, stored: bool = False, has_sinks: bool = False, **options: Any
) -> Attend:
    """A call of `varlen_sdpa`."""
    drawn, tokens = Drawn(), sum(lengths)
    cu_seqlens = ints(0, *itertools.accumulate(lengths))
    q, k, v = drawn(tokens, heads * group, dim), drawn(tokens, heads, dim), drawn(tokens, heads, dim)
    if has_sinks:
        options["sinks"] = drawn(heads * group, dtype=torch.float32)
    if stored:
        recipe = options.get("recipe", DEFAULT_RECIPE)
        query = fp8attn.quantize(q, cu_seqlens_q=cu_seqlens, recipe=recipe)
        key, value = fp8attn.quantize(None, k, v, cu_seqlens_k=cu_seqlens, recipe=recipe)
        return lambda **more: fp8attn.varlen_sdpa(query, key, value, None, None, **{"out_dtype": torch.bfloat16, **options, **more})
    return lambda **more: fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, **{**options, **more})


class Cached:
    """A cache with tokens of sequences, whose pages are shuffled."""

    def __init__(self, lengths: tuple[int, ...], dim: int, kv_heads: int, recipe: Recipe) -> None:
        self.drawn, self.lengths, longest = Drawn(), ints(*lengths), max(lengths)
        rows, width = len(lengths), -(-longest // 128)
        self.cache = KVCache(rows, rows * width, kv_heads, dim, recipe=recipe, dtype=torch.bfloat16, device="cuda")
        self.table = self.drawn.numbers(rows * width).view(rows, width)
        tokens = self.drawn(2, rows, kv_heads, longest, dim)
        self.cache.append(*tokens, PagedBatch(self.table, self.lengths, self.lengths))
        self.tokens = tokens


def decode(
    dim: int = 128,
    queries: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    lengths: tuple[int, ...] = (4096,) * 16,
    has_sinks: bool = False,
    recipe: Recipe = DEFAULT_RECIPE,
    **options: Any,
) -> Attend:
    """A call of `paged_sdpa` whose tokens are in the cache."""
    held = Cached(lengths, dim, kv_heads, recipe)
    q, batch = held.drawn(len(lengths), heads, queries, dim), PagedBatch(held.table, held.lengths)
    if has_sinks:
        options["sinks"] = held.drawn(heads, dtype=torch.float32)
    return lambda **more: fp8attn.paged_sdpa(q, held.cache, batch, **{**options, **more})


def prefill(
    dim: int = 128,
    heads: int = 32,
    kv_heads: int = 8,
    lengths: tuple[int, ...] = (4096, 1000, 2048, 3071),
    packed: bool = False,
    before: int = 0,
    has_sinks: bool = False,
    recipe: Recipe = DEFAULT_RECIPE,
    **options: Any,
) -> Attend:
    """A call of `paged_sdpa` with new tokens, all of the sequences' but `before`; packed or padded."""
    held = Cached(lengths, dim, kv_heads, recipe)
    counts, longest = held.lengths - before, max(lengths) - before
    k, v = held.tokens[..., before:, :]
    q = held.drawn(len(lengths), heads, longest, dim)
    batch = PagedBatch(held.table, held.lengths, counts)
    if packed:
        each = [length - before for length in lengths]
        q, k, v = (torch.cat([x[row, :, :n].transpose(0, 1) for row, n in enumerate(each)]).contiguous() for x in (q, k, v))
        batch = PagedBatch(held.table, held.lengths, cu_seqlens=ints(0, *itertools.accumulate(each)), max_count=longest)
    if has_sinks:
        options["sinks"] = held.drawn(heads, dtype=torch.float32)
    return lambda **more: fp8attn.paged_sdpa(q, held.cache, batch, (k, v), **{**options, **more})


def tensors(dim: int = 128, dtype: torch.dtype = torch.float8_e4m3fn, heads: int = 32, kv_heads: int = 8, queries: int = 1, **options: Any) -> Attend:
    """A call of `paged_sdpa` on another engine's cache."""
    drawn, rows, width, page = Drawn(), 16, 256, 16
    k, v = (drawn(rows * width, page, kv_heads, dim).to(dtype) for _ in range(2))
    scales = (0.5, 0.25) if dtype == torch.float8_e4m3fn else ()
    q, table = drawn(rows, heads, queries, dim), drawn.numbers(rows * width).view(rows, width)
    batch = PagedBatch(table, ints(*(4096 - 77 * i for i in range(rows))))
    return lambda **more: fp8attn.paged_sdpa(q, PagedTensors(k, v, *scales), batch, **{**options, **more})


CASES: dict[str, tuple[Attend, tuple, dict[str, Any]]] = {
    "24 heads of 4608": (dense, (1, 24, 4608, 128), {}),
    "24 heads of 4608, int8": (dense, (1, 24, 4608, 128), dict(recipe=PRECISE)),
    "encoder": (dense, (8, 16, 577, 64), {}),
    "encoder of head dim 80": (dense, (4, 16, 1030, 80), {}),
    "short": (dense, (16, 8, 256, 64), {}),
    "1k, causal": (dense, (16, 16, 1024, 128), dict(is_causal=True)),
    "GQA of 6000, causal": (dense, (1, 8, 6000, 128), dict(group=4, is_causal=True)),
    "GQA of 6000, causal, int8": (dense, (1, 8, 6000, 128), dict(group=4, is_causal=True, recipe=PRECISE)),
    "16k, causal": (dense, (1, 16, 16_384, 128), dict(is_causal=True)),
    "head dim 64, 16k": (dense, (1, 16, 16_384, 64), {}),
    "head dim 64, causal": (dense, (4, 32, 4096, 64), dict(is_causal=True)),
    "head dim 256": (dense, (2, 8, 4096, 256), {}),
    "head dim 256, causal, int8": (dense, (2, 8, 4096, 256), dict(is_causal=True, recipe=PRECISE)),
    "head dim 192": (dense, (2, 8, 3000, 192), dict(is_causal=True)),
    "window": (dense, (1, 16, 16_384, 128), dict(is_causal=True, window=(1023, 0))),
    "soft cap": (dense, (2, 16, 4096, 128), dict(is_causal=True, softcap=50.0)),
    "soft cap, head dim 256": (dense, (2, 8, 4096, 256), dict(is_causal=True, softcap=50.0)),
    "sinks": (dense, (2, 8, 4096, 64), dict(group=8, is_causal=True, has_sinks=True)),
    "sinks and a window": (dense, (2, 8, 4096, 64), dict(group=8, is_causal=True, has_sinks=True, window=(127, 0))),
    "few queries": (dense, (2, 8, 100, 128), dict(keys=20_000, group=4)),
    "stored": (dense, (1, 24, 4608, 128), dict(stored=True)),
    "stored, causal": (dense, (1, 24, 4608, 128), dict(stored=True, is_causal=True)),
    "stored, head dim 256": (dense, (2, 8, 4096, 256), dict(stored=True, is_causal=True)),
    "Triton": (dense, (1, 24, 4608, 128), dict(backend="triton")),
    "packed": (varlen, (), {}),
    "packed, causal": (varlen, (), dict(is_causal=True)),
    "packed, causal, int8": (varlen, (), dict(is_causal=True, recipe=PRECISE)),
    "packed, head dim 64": (varlen, (64,), dict(is_causal=True)),
    "packed, head dim 256": (varlen, (256, 4, 2), dict(is_causal=True)),
    "packed, head dim 256, int8": (varlen, (256, 4, 2), dict(recipe=PRECISE)),
    "packed, window": (varlen, (), dict(is_causal=True, window=(1023, 0))),
    "packed, soft cap": (varlen, (), dict(is_causal=True, softcap=50.0)),
    "packed, sinks": (varlen, (64,), dict(is_causal=True, has_sinks=True)),
    "packed, stored": (varlen, (), dict(is_causal=True, stored=True)),
    "packed encoders": (varlen, (64, 12, 1, (577, 33, 400) * 20), {}),
    "decode": (decode, (), {}),
    "decode, int8": (decode, (), dict(recipe=PRECISE)),
    "decode, head dim 64": (decode, (64,), dict(heads=64)),
    "decode, head dim 256": (decode, (256,), dict(heads=16)),
    "decode, one sequence of 32k": (decode, (), dict(lengths=(32_768,))),
    "decode, ragged": (decode, (), dict(lengths=(200, 12_000, 5, 3000, 129) * 8)),
    "decode, five queries": (decode, (128, 5), {}),
    "decode, window and sinks": (decode, (64,), dict(heads=64, window=(127, 0), has_sinks=True)),
    "decode, soft cap": (decode, (256,), dict(heads=16, softcap=50.0)),
    "decode by Triton": (decode, (), dict(backend="triton")),
    "prefill": (prefill, (), {}),
    "prefill, int8": (prefill, (), dict(recipe=PRECISE)),
    "prefill, head dim 64": (prefill, (64,), {}),
    "prefill, head dim 256": (prefill, (256, 16), {}),
    "prefill, head dim 256, soft cap": (prefill, (256, 16), dict(softcap=50.0)),
    "prefill, a chunk": (prefill, (), dict(before=768)),
    "prefill, window and sinks": (prefill, (64, 64), dict(window=(127, 0), has_sinks=True)),
    "prefill, packed": (prefill, (), dict(packed=True)),
    "prefill, packed, int8": (prefill, (), dict(packed=True, recipe=PRECISE)),
    "prefill, packed, head dim 64": (prefill, (64,), dict(packed=True)),
    "prefill, packed, head dim 256": (prefill, (256, 16), dict(packed=True)),
    "prefill, packed, a chunk and decode steps": (prefill, (), dict(packed=True, before=1920, lengths=(1921,) * 20 + (4500,))),
    "prefill, short units": (prefill, (), dict(before=4080, lengths=(4096,) * 20)),
    "prefill, short units, head dim 64, packed": (prefill, (64, 64), dict(packed=True, before=2000, lengths=(2016, 2032, 2005) * 8)),
    "prefill, one consumer, head dim 256": (prefill, (256, 16), dict(before=8192, lengths=(8192 + 512,))),
    "prefill, split keys": (prefill, (), dict(before=16_000, lengths=(16_050,))),
    "prefill, split keys, packed, sinks": (prefill, (64, 64), dict(packed=True, before=8000, lengths=(8016, 8010), has_sinks=True)),
    "prefill, split keys, head dim 256": (prefill, (256, 16), dict(before=8000, lengths=(8100,))),
    "another engine's cache": (tensors, (), {}),
    "another engine's cache of bfloat16": (tensors, (128, torch.bfloat16), {}),
    "another engine's cache, head dim 256": (tensors, (256,), dict(heads=16, queries=3)),
}
"""Calls by name: what makes them, and its arguments."""

INEXACT = {"Triton", "decode by Triton"}
"""Calls whose float32 output other kernels compute: Triton chooses a config by the output's type, too."""


def made(name: str) -> Attend:
    make, arguments, options = CASES[name]
    return make(*arguments, **options)


class Other:
    """Work on another stream: products, which take SMs, and copies, which take memory's bandwidth."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.factors = torch.randn(2, 2048, 2048, dtype=torch.bfloat16, device="cuda")
        self.bytes = torch.empty(2, 32 << 20, dtype=torch.uint8, device="cuda")

    def begin(self, rounds: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(rounds):
                self.factors[0] @ self.factors[1]
                self.bytes[0].copy_(self.bytes[1])


@pytest.fixture
def other() -> Iterator[Other]:
    yield Other()
    torch.cuda.synchronize()


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN is equal to itself."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", CASES)
def test_no_bit_moves_beside_other_work(name: str, other: Other) -> None:
    """Of the output and the LSE. Memory of outputs is used again, so an element that isn't written would have another one's bits."""
    attend = made(name)
    expected = [x.clone() for x in attend(return_lse=True)]
    torch.cuda.synchronize()
    for i in range(CALLS):
        other.begin(i % 4 * 4)
        found = attend(return_lse=True)
        for x, y in zip(found, expected, strict=True):
            moved = bits(x) != bits(y)
            assert not moved.any(), f"call {i}: {int(moved.sum())} of {moved.numel()} bytes"
        for x in found:
            x.fill_(torch.nan)
        del found, x


@pytest.mark.parametrize("name", [name for name in CASES if name not in INEXACT])
def test_half_precision_is_float32_rounded(name: str) -> None:
    attend = made(name)
    half, exact = attend(), attend(out_dtype=torch.float32)
    assert half.dtype == torch.bfloat16 and exact.dtype == torch.float32
    moved = half != exact.to(torch.bfloat16)
    assert not moved.any(), f"{int(moved.sum())} of {moved.numel()} elements, up to {float((half - exact).abs().max())}"
