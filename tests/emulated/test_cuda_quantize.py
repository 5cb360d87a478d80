"""The CUDA quantizer of K and V: the definition's bytes, on a CPU too; which calls it takes; its budget."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import GPU
from hypothesis import given
from hypothesis import strategies as st

import emulation
import fp8attn
from closeness import assert_alike, on_grid
from forked import in_another_process
from fp8attn import Quantized, Recipe, ops
from fp8attn.call import HALVES
from fp8attn.cuda import build, quantize, run
from fp8attn.cuda.build import BuildError
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.layout import padded_length
from fp8attn.quantization import (
    TOKEN_CHUNK,
    chunk_shapes,
    chunk_statistics,
    partial_statistics,
    quantize_kv,
    sample_size,
    sample_step,
    statistics,
)
from fp8attn.quantization import quantize as quantize_all
from fp8attn.recipe import E4M3, FUSED_RECIPES, ProductType
from quantizing import BAD_PLACES, MAGNITUDES, Problem, assert_same, cancelling, normal
from strategies import FINITE, Case

H100 = ARCHITECTURES[90]
RESERVED_SHARED = 1024
"""Bytes of every CTA that the system keeps (CUDA C++ Programming Guide, compute capability 9.0)."""

LONGEST = {64: 8192, 128: 4096, 192: 2560, 256: 2048}
"""Tokens of the longest head that a cluster holds, by head dim. Longer ones take three launches."""

PRODUCTS: tuple[ProductType, ...] = ("e4m3", "int8")

Quantizer = Callable[[torch.Tensor, torch.Tensor, ProductType], tuple[Quantized, Quantized]]


@pytest.fixture(scope="module")
def emulated() -> Quantizer:
    """fp8attn.cuda.run.quantize_kv, emulated."""
    return by(emulation.quantizer())


def by(library: build.Library) -> Quantizer:
    """Quantization by a library's kernel."""

    def quantizer(k: torch.Tensor, v: torch.Tensor, qk: ProductType) -> tuple[Quantized, Quantized]:
        assert quantize.unsupported_call(k, v, FUSED_RECIPES[qk], dataclasses.replace(H100, sm_count=1)) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: library)
            return run.quantize_kv(k, v, qk, H100)

    return quantizer


def by_cuda(k: torch.Tensor, v: torch.Tensor, qk: ProductType = "e4m3") -> tuple[Quantized, Quantized]:
    device = device_of(k.device)
    if quantize.unsupported_config(quantize.INSTANCES[0], device) is not None:
        pytest.skip("needs sm_90")
    assert quantize.unsupported_call(k, v, FUSED_RECIPES[qk], dataclasses.replace(device, sm_count=1)) is None
    return run.quantize_kv(k, v, qk, device)


def check(quantizer: Quantizer, k: torch.Tensor, v: torch.Tensor, qk: ProductType = "e4m3") -> None:
    """Bit for bit, of such keys whose rotation needs no rounding."""
    check_bytes(quantizer, like(k, on_grid(k)), v, qk)


def check_bytes(quantizer: Quantizer, k: torch.Tensor, v: torch.Tensor, qk: ProductType = "e4m3") -> None:
    for actual, expected in zip(quantizer(k, v, qk), quantize_kv(k, v, FUSED_RECIPES[qk]), strict=True):
        assert_same(actual, expected)


def check_rounded(quantizer: Quantizer, k: torch.Tensor, v: torch.Tensor, share: float, qk: ProductType = "e4m3") -> None:
    """Of any keys."""
    (key, value), (expected_key, expected_value) = quantizer(k, v, qk), quantize_kv(k, v, FUSED_RECIPES[qk])
    assert_same(value, expected_value)
    assert_alike(key, expected_key, share)


def check_sums(quantizer: Quantizer, k: torch.Tensor, v: torch.Tensor) -> None:
    """Of `wide` keys. Without its mean a single one is zero, or what its rotation cut off."""
    if k.shape[2] == 1:
        check(quantizer, k, v)
    else:
        check_rounded(quantizer, k, v, 0.01)


def like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y, stored as x is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(y)


@st.composite
def problems(draw, most: int) -> Problem:
    """Of lengths with up to `most` token_chunks to a head, or a few more than a cluster holds."""
    dim = draw(st.sampled_from((64, 64, 128, 128, 192, 256)))
    longest = min(LONGEST[dim], most * TOKEN_CHUNK)
    if draw(st.integers(0, 3)) == 0:
        longest = LONGEST[dim] + 2 * TOKEN_CHUNK
    edges = [n + i for n in range(TOKEN_CHUNK, longest, TOKEN_CHUNK) for i in (-1, 0, 1)]
    length = draw(st.one_of(st.integers(1, TOKEN_CHUNK), st.integers(TOKEN_CHUNK + 1, longest), st.sampled_from([1, *edges, longest])))
    case = Case(
        batch=draw(st.integers(1, 2)), kv_heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 2)), q_length=5, kv_length=length, head_dim=dim,
        value_dim=dim, dtype=draw(st.sampled_from(HALVES)), layout=draw(st.sampled_from(("bhsd", "bshd", "padded"))), mask="none",
        distribution=draw(st.sampled_from(FINITE)), recipe=draw(st.sampled_from([*FUSED_RECIPES.values()])), scale=None, out_dtype=torch.float32,
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    return Problem(case, draw(st.sampled_from(MAGNITUDES)), draw(st.tuples(*[st.sampled_from(BAD_PLACES)] * 3)))


@pytest.mark.anywhere
@emulation.emulates
@given(problem=problems(4))
def test_emulated_it_writes_the_bytes_of_the_definition(emulated: Quantizer, problem: Problem) -> None:
    check(emulated, *problem.tensors(torch.device("cpu"))[1:], problem.case.recipe.qk)


@pytest.mark.gpu
@given(problem=problems(16))
def test_writes_the_bytes_of_the_definition(device: torch.device, problem: Problem) -> None:
    check(by_cuda, *problem.tensors(device)[1:], problem.case.recipe.qk)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, length", (pytest.param(64, 8100, marks=pytest.mark.compiles), (128, 2048)))
@pytest.mark.parametrize("recipe", FUSED_RECIPES.values(), ids=FUSED_RECIPES.keys())
def test_writes_the_bytes_of_triton(device: torch.device, recipe: Recipe, dim: int, length: int) -> None:
    """Called as others are, Q beside them, which Triton quantizes."""
    k, v = not_finite((2, 4, length, dim), torch.bfloat16, device)
    k = on_grid(k)
    if ops.unsupported_cuda_quantize(k, v, recipe, device_of(device)) is not None:
        pytest.skip(str(ops.unsupported_cuda_quantize(k, v, recipe, device_of(device))))
    q = normal((2, 4, 300, dim), device=device)[0]
    for actual, expected in zip(ops.quantized(q, k, v, recipe), ops.quantized(q, k, v, recipe, by_triton=True), strict=True):
        assert_same(actual, expected)
    for actual, expected in zip(fp8attn.quantize(q, k, v, recipe=recipe), quantize_all(q, k, v, recipe), strict=True):
        assert_same(actual, expected)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dim", LONGEST)
def test_emulated_the_longest(emulated: Quantizer, dim: int) -> None:
    for length in (LONGEST[dim], LONGEST[dim] - 130, LONGEST[dim] + 1, LONGEST[dim] + 700):
        check(emulated, *normal((1, 1, length, dim), torch.float16), PRODUCTS[length % 256 == 0])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (1, 40))
@pytest.mark.parametrize("dim", LONGEST)
def test_the_longest(device: torch.device, dim: int, heads: int) -> None:
    """Also of more clusters than run at a time, and of longer heads."""
    for length in (LONGEST[dim], LONGEST[dim] - 130, TOKEN_CHUNK + 1, TOKEN_CHUNK, 77, LONGEST[dim] + 1, 4 * LONGEST[dim] - 9):
        for qk in PRODUCTS:
            check(by_cuda, *normal((1, heads, length, dim), device=device), qk)


def wide(shape: tuple[int, ...], device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """Numbers whose sums depend on their order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return tuple((x * 2.0 ** torch.randint(-20, 20, shape, generator=generator)).to(device, torch.bfloat16) for x in normal(shape, torch.float32))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("length", (1, 7, 300, 512, 513, 1300, 3000, 4096, 8193, 40_000))
def test_emulated_the_order_of_sums(emulated: Quantizer, length: int) -> None:
    for _ in range(3 if length < TOKEN_CHUNK else 1):  # whatever shared memory holds at first
        check_sums(emulated, *wide((1, 1, length, 64)))
    check_sums(emulated, *cancelling((1, 1, length, 64)))


@pytest.mark.gpu
@pytest.mark.parametrize("length", (1, 7, 300, 512, 513, 1300, 3000, 4096, 8193, 40_000))
@pytest.mark.parametrize("dim", (64, 128))
def test_the_order_of_sums(device: torch.device, dim: int, length: int) -> None:
    check_sums(by_cuda, *wide((2, 8, length, dim), device))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dtype, qk", [*zip(HALVES, PRODUCTS, strict=True)])
def test_emulated_rotation_rounds_in_the_last_bits(emulated: Quantizer, dtype: torch.dtype, qk: ProductType) -> None:
    check_rounded(emulated, *normal((1, 2, 600, 128), dtype), 1e-4, qk)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", LONGEST)
@pytest.mark.parametrize("qk", PRODUCTS)
def test_rotation_rounds_in_the_last_bits(device: torch.device, qk: ProductType, dim: int, dtype: torch.dtype) -> None:
    check_rounded(by_cuda, *normal((2, 8, 2000, dim), dtype, device), 1e-5, qk)


def not_finite(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Of K a NaN and infinities in the sample and outside of it; of V in tokens of several token_chunks and slices, a channel, the last token."""
    k, v = normal(shape, dtype, device)
    length, dim = shape[2:]
    sampled, later = sample_step(length), min(TOKEN_CHUNK + 70, length - 2)
    k[0, 0, 3, 5], k[0, 0, sampled, 7], k[0, 0, later, dim - 1], k[0, -1, length - 1, 0] = torch.nan, torch.inf, -torch.inf, torch.inf
    k[0, -1, 0, 9] = torch.nan
    v[0, 0, 7, 3], v[0, 0, later, dim - 2], v[0, -1, length - 1, dim - 1], v[-1, -1, :, 9] = torch.inf, torch.nan, -torch.inf, torch.nan
    v[-1, 0, 200] = torch.nan
    return k, v


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length, dim", ((600, 64), (1024, 64), (8300, 64), (600, 256), (1024, 256), (2100, 256)))
@pytest.mark.parametrize("qk", PRODUCTS)
@pytest.mark.one_in(3)
def test_emulated_what_is_not_finite(emulated: Quantizer, qk: ProductType, dim: int, length: int, dtype: torch.dtype) -> None:
    check(emulated, *not_finite((1, 2, length, dim), dtype), qk)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", (600, 1024, 2000, 9000))
@pytest.mark.parametrize("dim", LONGEST)
@pytest.mark.parametrize("qk", PRODUCTS)
def test_what_is_not_finite(device: torch.device, qk: ProductType, dim: int, length: int, dtype: torch.dtype) -> None:
    check(by_cuda, *not_finite((2, 3, length, dim), dtype, device), qk)


@pytest.mark.gpu
@pytest.mark.parametrize("dim, length", ((64, 1000), (64, 8000), (128, 2048), (128, 4096), (128, 4608), (64, 16_384), (256, 2001), (256, 4097)))
@pytest.mark.parametrize("qk", PRODUCTS)
def test_same_bits_a_hundred_times(device: torch.device, qk: ProductType, dim: int, length: int) -> None:
    """A bit that moves is a race."""
    k, v = not_finite((4, 16, length, dim), torch.bfloat16, device)

    def all_bytes() -> torch.Tensor:
        return torch.cat([x.reshape(-1).view(torch.uint8) for y in by_cuda(k, v, qk) for x in (y.data, y.scale, y.mean)])

    first, different = all_bytes(), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(100):
        different += (all_bytes() != first).sum()
    assert int(different) == 0


@pytest.mark.gpu
def test_in_a_graph_and_on_a_stream(device: torch.device) -> None:
    """Replayed with other numbers in the same place; twice at a time."""
    k, v = normal((2, 4, 1500, 128), device=device)
    other_k, other_v = (on_grid(x) for x in normal((2, 4, 1501, 128), device=device))
    expected, stream = quantize_kv(other_k[:, :, 1:], other_v[:, :, 1:], Recipe()), torch.cuda.Stream(device)
    by_cuda(k, v)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = by_cuda(k, v)
    k.copy_(other_k[:, :, 1:])
    v.copy_(other_v[:, :, 1:])
    for _ in range(3):
        graph.replay()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        beside = by_cuda(k, v)
    torch.cuda.synchronize(device)
    for actual in (captured, beside):
        for x, y in zip(actual, expected, strict=True):
            assert_same(x, y)


@pytest.mark.gpu
def test_attention_is_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sdpa from half, whoever quantizes K and V; and that it is this quantizer that does."""
    if quantize.unsupported_config(quantize.INSTANCES[0], device_of(device)) is not None:
        pytest.skip("needs sm_90")
    k, v = (on_grid(x) for x in normal((2, 4, 1400, 128), device=device))
    q = normal((2, 8, 1400, 128), device=device)[0]
    taken: list[bool] = []
    monkeypatch.setattr(run, "quantizer_of", lambda *x, original=run.quantizer_of: taken.append(True) or original(*x))
    actual = fp8attn.sdpa(q, k, v, is_causal=True, enable_gqa=True, backend="cuda")
    assert taken == [True]
    monkeypatch.setattr(ops, "unsupported_cuda_quantize", lambda *_: "the test wants Triton's")
    assert torch.equal(actual, fp8attn.sdpa(q, k, v, is_causal=True, enable_gqa=True, backend="cuda")) and taken == [True]


@emulation.emulates
@pytest.mark.skipif(GPU, reason="Triton quantizes what is on the CPU where it is interpreted; on a GPU the next test compares the kernels themselves")
def test_emulated_means_of_queries_meet_rotated_keys(emulated: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoothed queries, whose means' part of the scores is made of keys that another kernel has quantized."""
    recipe = Recipe(smooth_q=True)
    (q, v), k = normal((1, 2, 600, 64)), on_grid(normal((1, 2, 601, 64))[0][:, :, 1:])
    expected = ops.quantized(q, k, v, recipe, by_triton=True)
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(ops, "unsupported_cuda_quantize", lambda *_: None)
    quantized = emulated(k, v, "e4m3")
    monkeypatch.setattr(run, "quantize_kv", lambda *_: quantized)
    for x, y in zip(ops.quantized(q, k, v, recipe), expected, strict=True):
        assert_same(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [dim if dim == 128 else pytest.param(dim, marks=pytest.mark.thorough) for dim in LONGEST])
def test_means_of_queries_meet_rotated_keys(device: torch.device, dim: int) -> None:
    """Likewise; and attention to them."""
    recipe = Recipe(smooth_q=True)
    q, k, v = (x.to(device) for x in (*normal((2, 4, 1024, dim)), normal((2, 4, 1024, dim), torch.bfloat16)[0].flip(2)))
    k = on_grid(k)
    if ops.unsupported_cuda_quantize(k, v, recipe, device_of(device)) is not None:
        pytest.skip(str(ops.unsupported_cuda_quantize(k, v, recipe, device_of(device))))
    for actual, expected in zip(ops.quantized(q, k, v, recipe), ops.quantized(q, k, v, recipe, by_triton=True), strict=True):
        assert_same(actual, expected)
    exact = fp8attn.reference_sdpa(q, k, v, out_dtype=torch.float32)
    error = torch.linalg.vector_norm(fp8attn.sdpa(q, k, v, recipe=recipe, out_dtype=torch.float32) - exact) / torch.linalg.vector_norm(exact)
    assert error < 0.06


def check_parts(library: build.Library | None, k: torch.Tensor, v: torch.Tensor, cuts: tuple[int, ...], qk: ProductType) -> None:
    """Of the parts of a sequence between `cuts`: the statistics of V's chunks, and the bytes by statistics of the whole, in slots of a buffer."""
    recipe, device = FUSED_RECIPES[qk], H100 if library is not None else device_of(k.device)
    given = statistics([partial_statistics(k[:, :, a:b], v[:, :, a:b], a, k.shape[2]) for a, b in itertools.pairwise(cuts)], k.shape[2], recipe)
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        for a, b in itertools.pairwise(cuts):
            some_k, some_v = k[:, :, a:b], v[:, :, a:b]
            sums, extremes = (torch.empty(shape, device=k.device) for shape in chunk_shapes(some_v))
            stats = run.measure_part(some_v, (sums, extremes), device)
            expected = chunk_statistics(some_v)
            assert torch.equal(sums, expected.sums), "sums differ"
            assert torch.equal(extremes, expected.extremes), "extremes differ"
            expected_key, expected_value = quantize_kv(some_k, some_v, recipe, given)
            for heads in (slice(None), slice(1, None)):  # the first heads, or the others
                key, value = (
                    dataclasses.replace(x, data=x.data[:, heads], scale=x.scale[:, heads], mean=x.mean[:, heads].contiguous())
                    for x in (expected_key, expected_value)
                )
                into_key = dataclasses.replace(key, data=torch.zeros_like(key.data), scale=torch.zeros_like(key.scale.contiguous()))
                into_value = dataclasses.replace(value, data=torch.zeros_like(value.data.contiguous()), scale=value.scale.contiguous())
                run.write_part(into_key, into_value, some_k[:, heads], some_v[:, heads], stats[:, heads].contiguous(), device)
                assert_same(into_key, key)
                assert_same(into_value, value)


PARTS = (((1, 2, 1300, 64), (0, 512, 1300)), ((2, 2, 1536, 128), (0, 1024, 1536)), ((1, 3, 700, 128), (0, 77, 700)), ((1, 2, 1100, 256), (0, 1100)))


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("shape, cuts", PARTS, ids=str)
def test_emulated_parts_of_a_sequence(shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    dtype, qk = HALVES[shape[1] % 2], PRODUCTS[shape[2] % 8 > 0]
    k, v = not_finite(shape, dtype) if shape[2] > 1000 else normal(shape, dtype)
    check_parts(emulation.quantizer(), like(k, on_grid(k)), v, cuts, qk)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, cuts", (*PARTS, ((1, 8, 9000, 128), (0, 4608, 9000))), ids=str)
@pytest.mark.parametrize("qk", PRODUCTS)
def test_parts_of_a_sequence(device: torch.device, qk: ProductType, shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    if quantize.unsupported_config(quantize.INSTANCES[0], device_of(device)) is not None:
        pytest.skip("needs sm_90")
    k, v = not_finite(shape, torch.bfloat16, device) if shape[2] > 1000 else normal(shape, device=device)
    check_parts(None, like(k, on_grid(k)), v, cuts, qk)


PART_MUTANTS = {
    "sums of another chunk": ("p.v_sums[chunk * p.head_dim", "p.v_sums[coord.pair * p.head_dim"),
    "maxima for minima": ("p.v_extremes[2 * chunk * p.head_dim + of_head] = low", "p.v_extremes[2 * chunk * p.head_dim + of_head] = high"),
    "half of the channels": ("channel - (THREADS - CHANNELS));", "(channel - (THREADS - CHANNELS)) / 2);"),
}


def test_mutants_of_parts_change_what_is_there() -> None:
    emulation.assert_anchored(("quantize_long.cuh", *mutation) for mutation in PART_MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", PART_MUTANTS)
def test_the_emulation_sees_what_is_wrong_in_parts(name: str) -> None:
    k, v = normal((1, 2, 1300, 64))
    with pytest.raises(AssertionError):
        check_parts(emulation.quantizer(("quantize_long.cuh", *PART_MUTANTS[name])), on_grid(k), v, (0, 1024, 1300), "e4m3")


def read_guarded() -> None:
    """Where nothing behind K and V can be read."""
    quantizer = by(emulation.quantizer())
    for shape, qk in zip(((1, 2, 601, 64), (2, 1, 1100, 128), (1, 2, 4097, 128), (2, 1, 2100, 256)), 2 * PRODUCTS, strict=True):
        k, v = normal(shape)
        check_bytes(quantizer, emulation.guarded(on_grid(k)), emulation.guarded(v), qk)


@pytest.mark.anywhere
@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_cuda_quantize as test; test.read_guarded()")


SYNCS = {
    "the cluster is there": ("  ptx::cluster_wait();", "  "),
    "sums of the sample": ("  __syncthreads();\n  if (thread >= channels) return;", "  if (thread >= channels) return;"),
    "keys that aren't finite, of one token chunk": ("  if (thread < BLOCKS) shared.own.nonfinite[thread] = {};  // it is of V's tokens\n", ""),
    "the sample of one token chunk": ("const int apart = sample_step(coord.length);", "const int apart = 1;"),
    "the sample lay there": ("  __syncthreads();  // `warps` overlaps `sampled`, which has been read\n", ""),
    "moments of all warps": ("  mine.sync();\n  static_assert(WARPS == 8", "  static_assert(WARPS == 8"),
    "what there is to tell": ("  mine.sync();\n}\n\n// Measures V's tile", "}\n\n// Measures V's tile"),
    "facts": ("  ptx::mbarrier_wait(&shared.stats_full, 0);\n", ""),
    "shifts of all channels": ("/ 32, threadIdx.x % 32);\n  __syncthreads();\n", "/ 32, threadIdx.x % 32);\n"),
    "tokens before their codes": ("    __syncwarp();  // the warp has read the group\n", ""),
    "codes of all runs": ("  __syncwarp();\n  // the lanes of a chunk", "  // the lanes of a chunk"),
    "runs of few tokens": ("1 + (coord.count > KEYS) + ", "1 + "),
    "blocks of few tokens": ("n < groups() && left(n) > 0", "n < groups() && left(n) >= KEYS"),
    "blocks by turns": ("n >> log_slices() << log_slices()", "n >> log_slices()"),
    "values before keys": ("  __syncthreads();\n\n  // Its coordinates", "  // Its coordinates"),
    "magnitudes of all warps": ("  __syncthreads();\n}\n\n// Stores the scales", "}\n\n// Stores the scales"),
    "magnitudes of all slices": ("shared.of_warps[warp][n + slice]", "shared.of_warps[warp][n]"),
    "a part before the next": ("    __syncthreads();  // the tile has been read\n", ""),
    "copies of values": ("    wait_for_copies(n);\n    if ((n + 1) * KEYS <= coord.count)", "    if ((n + 1) * KEYS <= coord.count)"),
    "copies of keys": ("    wait_for_copies(n);\n    const int left", "    const int left"),
    "rows that don't exist": ("chunk_of(tile, n * KEYS + row, chunk) = {~0u, ~0u, ~0u, ~0u};", ";"),
    "keys that aren't finite": ("      words = nan_where_nonfinite<T>(words);\n    });", "    });"),
    "int8's hidden keys of all slices": ("slice < keys.part.slices; ++slice) nonfinite |=", "slice < 1; ++slice) nonfinite |="),
    "int8's hidden keys of either row": ("INT8 && nonfinite[i]", "INT8 && nonfinite[0]"),
    "int8's marks of blocks": ("has_nonfinite_key ? -scale : scale", "scale"),
    "int8's steps": ("const float scale = row_scale_of<INT8>(largest)", "const float scale = scale_of(largest)"),
    "copies of a token chunk's values": ("    ptx::cp_async_wait_but<0>();\n    __syncthreads();", "    __syncthreads();"),
    "a token chunk's values that aren't finite": ("      mine.write_nan<T>(shared.tile);\n      __syncthreads();", "      __syncthreads();"),
    "what a token chunk's keys are written by": ("    __syncthreads();\n    write_key_part<", "    write_key_part<"),
    "the tokens of the sample": ("is_sample ? sample_step(coord.length) : 1", "1"),
    "finite values of a token chunk": ("found.add_finite(at(i), bad);", "found.add_finite(at(i), uint4{});"),
    "marks of a token chunk's tokens": ("if (any(bad)) atomicOr", "if (false) atomicOr"),
    "more token chunks than lanes": ("const int chunk = i + group + j;", "const int chunk = group + j;"),
    "order of lanes": ("lanes[i] + lanes[i + N / 2]", "lanes[2 * i] + lanes[2 * i + 1]"),
}
"""Lines of the kernel that wait, by what for, and what would be there without; some of int8; and one that adds in the definition's order."""


def file_of(name: str) -> str:
    """The file that a line of SYNCS is in."""
    (file,) = (file for file, text in emulation.included("quantize.cuh", emulation.sources()).items() if SYNCS[name][0] in text)
    return file


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored((file_of(name), *SYNCS[name]) for name in SYNCS)


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", SYNCS)
def test_the_emulation_sees_what_is_missing(name: str) -> None:
    quantizer = by(emulation.quantizer((file_of(name), *SYNCS[name])))

    def check_several() -> None:
        for length, dim in (
            *((n, 128) for n in range(1900, 1908)),
            *((n, 256) for n in range(2049, 2053)),
            (20_000, 64),
            *3 * ((2500, 192),),
            (300, 128),
        ):
            k, v = not_finite((1, 2, length, dim), torch.bfloat16)
            check_rounded(quantizer, wide((1, 2, length, dim))[0], v, 0.01)
            if name == "rows that don't exist" or "keys that aren't finite" in name:
                check(quantizer, 40 + k, v)  # whose mean is larger than what is left of any
            if "int8" in name:
                check(quantizer, k, v, "int8")
        for _ in range(3):  # whatever shared memory holds at first
            check_rounded(quantizer, *wide((1, 1, 7, 64)), 0.01)
        check_rounded(quantizer, *cancelling((1, 1, 700, 64)), 0.01)

    with pytest.raises(AssertionError, match=r"differ|in other places|come to an end"):
        check_several()


@pytest.mark.parametrize("dim", LONGEST)
def test_takes(dim: int) -> None:
    for heads, length in ((1, 1), (132, TOKEN_CHUNK), (1, TOKEN_CHUNK + 1), (1, LONGEST[dim])):
        k = torch.zeros(1, heads, length, dim, dtype=torch.float16)
        for qk in PRODUCTS:
            assert quantize.unsupported_call(k, k, Recipe(q="block", qk=qk), H100) is None
        assert quantize.choose(k).token_chunks >= quantize.token_chunks_of(k) and not quantize.choose(k).is_long
        assert quantize.ctas_of(k) <= quantize.LARGEST_CLUSTER and quantize.choose(k).stats_bytes(1) == 0
    for length in (LONGEST[dim] + 1, 1 << 20):
        k = torch.zeros(1, 1, 1, dim, dtype=torch.float16).expand(1, 3, length, dim)
        assert quantize.choose(k).is_long
        assert quantize.choose(k).stats_bytes(3 * quantize.ctas_of(k)) == 3 * quantize.ctas_of(k) * quantize.CHUNK_STATS_BYTES


@pytest.mark.parametrize(
    "k, v, dtype, recipe, reason",
    (
        ((1, 2, 600, 64), (1, 2, 600, 64), torch.float32, Recipe(), "torch.float32 and torch.float32; it takes bfloat16 or float16"),
        ((1, 2, 600, 64), (1, 2, 600, 128), torch.float16, Recipe(), "the same of both"),
        ((1, 2, 600, 96), (1, 2, 600, 96), torch.float16, Recipe(), "head dim is 96; it takes multiples of 64 up to 256"),
        ((0, 2, 600, 64), (0, 2, 600, 64), torch.float16, Recipe(), "key has shape (0, 2, 600, 64)"),
        ((1, 2, 600, 64), (1, 2, 600, 64), torch.float16, Recipe(k="token"), "recipe.k is 'token'; it takes 'block'"),
        ((1, 2, 600, 64), (1, 2, 600, 64), torch.float16, Recipe(smooth_v=False), "recipe.smooth_v is False"),
        ((1, 2, 600, 64), (1, 2, 600, 64), torch.float16, Recipe(rotate=256), "recipe.rotate is 256; it takes 64"),
        ((1, 2, 600, 64), (1, 2, 600, 64), torch.float16, Recipe(qk="int8", rotate=0), "recipe.rotate is 0; it takes 64"),
    ),
)
def test_refusals_say_why(k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, recipe: Recipe, reason: str) -> None:
    assert reason in (quantize.unsupported_call(torch.zeros(k, dtype=dtype), torch.zeros(v, dtype=dtype), recipe, H100) or "")


def test_needs_rows_at_multiples_of_16_bytes_and_hopper() -> None:
    k, v = normal((1, 1, 600, 64))
    shifted = torch.zeros(1, 1, 600, 68, dtype=torch.bfloat16)[..., 4:]
    assert "value doesn't start at a multiple of 16 bytes" in (quantize.unsupported_call(k, shifted, Recipe(), H100) or "")
    assert "needs sm_90" in (quantize.unsupported_call(k, v, Recipe(), ARCHITECTURES[100]) or "")
    assert "shared memory" in (quantize.unsupported_config(quantize.INSTANCES[0], dataclasses.replace(H100, shared_memory=49152)) or "")


def test_what_it_fills_is_like_the_definitions() -> None:
    """Stored as K is, rows at multiples of 16 bytes."""
    k, v = normal((2, 3, 600, 64))
    for x in (k, k.transpose(1, 2).contiguous().transpose(1, 2)):
        for qk in PRODUCTS:
            for actual, expected in zip(quantize.empty(x, v, qk), quantize_kv(x, v, FUSED_RECIPES[qk]), strict=True):
                for name in ("data", "scale", "mean"):
                    one, other = getattr(actual, name), getattr(expected, name)
                    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert (actual.granularity, actual.layout, actual.length) == (expected.granularity, expected.layout, expected.length)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dtype", HALVES)
def test_the_binding_tells_it_all(dtype: torch.dtype) -> None:
    """Bit for bit what Python makes of the same arguments."""
    operators, library = emulation.binding()
    k, v = normal((2, 3, 700, 128), dtype)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    key, value = quantize.empty(k, v, "e4m3")
    tensors = (k, v, key.data, key.scale, key.mean, value.data, value.scale, value.mean)
    launcher = ctypes.cast(library.record_quantize, ctypes.c_void_p).value
    for ready, stats_bytes in ((None, 0), (torch.zeros(2, 3, dtype=torch.int32), 0), (None, 576 * 24)):
        operators.quantize.default(launcher, 24, sample_size(700), stats_bytes, *tensors, ready)
        emulation.assert_quantizer_told(library, 24, emulation.quantize_params(tensors, sample_size(700), ready), stats_bytes > 0)
    assert value.data.shape == (2, 3, 128, padded_length(700)) and value.data.dtype == E4M3


def test_who_quantizes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA K and V where it takes them and nobody wants Triton, which quantizes Q, and all if CUDA doesn't compile."""
    q, k, v = (torch.randn(1, 1, 40, 32, device=device, dtype=torch.float16) for _ in range(3))
    expected = ops.quantized(q, k, v, Recipe(), by_triton=True)
    made: list[tuple] = []

    def quantize_kv_by_cuda(k: torch.Tensor, v: torch.Tensor, qk: ProductType, device: object) -> tuple[Quantized, Quantized]:
        made.append((k, v))
        if len(made) > 2:
            raise BuildError("no compiler")
        return quantize_kv(k, v, Recipe())

    monkeypatch.setattr(run, "quantize_kv", quantize_kv_by_cuda)
    for count, options in ((1, {}), (1, {"by_triton": True})):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "unsupported_cuda_quantize", lambda *_: None)
            for actual, wanted in zip(ops.quantized(q, k, v, Recipe(), **options), expected, strict=True):
                assert_same(actual, wanted)
        assert len(made) == count
    ops.quantized(q, k, v, Recipe())
    assert len(made) == 1
    monkeypatch.setattr(ops, "unsupported_cuda_quantize", lambda *_: None)
    assert ops.quantized(None, k, v, Recipe())[0] is None and len(made) == 2
    ops.quantized(q, None, None, Recipe())
    assert len(made) == 2
    with pytest.warns(UserWarning, match="goes on with Triton: no compiler"):
        results = ops.quantized(q, k, v, Recipe())
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)
