"""Attention that begins with heads whose keys and values are ready while others are still being quantized: which calls do, what the quantizer says,
and that it has the bits of quantizing first. tests/mutants/test_cuda_mutants.py breaks it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import emulation
from fp8attn import sdpa
from fp8attn.call import HALVES, Problem, empty_lse, empty_output
from fp8attn.cuda import build, configs, early, quantize, run
from fp8attn.cuda.configs import FUSED_Q_INSTANCES, HopperConfig
from fp8attn.device import Device, device_of
from fp8attn.quantization import quantize_kv
from fp8attn.recipe import DEFAULT_RECIPE, FUSED_RECIPES, ProductType
from fp8attn.reference import Causal
from instances import H100
from quantizing import assert_same, normal

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def instance(head_dim: int, consumers: int) -> HopperConfig:
    return next(c for c in FUSED_Q_INSTANCES if (c.head_dim, c.consumers) == (head_dim, consumers))


@pytest.mark.parametrize(
    "heads, queries, keys, causal, dim, consumers, begins",
    (
        (256, 1024, 1024, "none", 128, 3, True),
        (30, 1024, 4096, "none", 128, 3, True),  # 180 tiles, of which ranges of keys are split
        (22, 1152, 4096, "none", 128, 3, False),
        (30, 1024, 4096, "top_left", 128, 3, True),
        (22, 1152, 4096, "top_left", 128, 3, False),  # 132 tiles, each at once
        (30, 1024, 4096, "none", 64, 4, False),
        (34, 1024, 4096, "none", 64, 4, True),  # which share none
    ),
)
def test_overlaps_quantization(heads: int, queries: int, keys: int, causal: Causal, dim: int, consumers: int, begins: bool) -> None:
    q, k = (torch.empty(1, heads, n, dim, dtype=torch.bfloat16, device="meta") for n in (queries, keys))
    problem = Problem(q, k, k, dim**-0.5, causal=causal)
    assert early.overlaps_quantization(problem, instance(dim, consumers), H100) is begins


def test_windows_and_caps_of_few_channels_do_not_overlap_quantization() -> None:
    for dim, consumers, begins in ((64, 4, False), (128, 3, True)):
        q = torch.empty(1, 64, 4096, dim, dtype=torch.bfloat16, device="meta")
        for options in (dict(window=(9, 0)), dict(softcap=3.0)):
            problem = Problem(q, q, q, 0.1, causal="top_left", **options)  # type: ignore[arg-type]
            assert early.overlaps_quantization(problem, instance(dim, consumers), H100) is begins


def check_words(library: build.Library, heads: int, length: int, ctas: int) -> None:
    """`heads` heads of two batches, each quantized by `ctas` CTAs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: library)
        k, v = normal((2, heads, length, 128))
        expected, (key, value) = run.quantize_kv(k, v, "int8", H100), quantize.empty(k, v, "int8")
        words = torch.full((300 + 2 * heads,), 7, dtype=torch.int32)  # of the call before
        library, config, numbers = run.quantizer_of(k, H100)
        library.operators.quantize.default(*numbers, k, v, *quantize.filled(key, value), words)
    assert quantize.writers_of(k, config) == ctas
    assert (words[:300] == 0).all(), "words before"
    assert (words[300:] == ctas).all(), "words of heads"
    for x, y in zip((key, value), expected, strict=True):
        assert_same(x, y)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("heads, length, ctas", ((3, 700, 4), (1, 4100, 36)))
def test_every_cta_says_that_it_is_done(heads: int, length: int, ctas: int) -> None:
    check_words(emulation.quantizer(), heads, length, ctas)


CLEARING = {
    "words of heads": ("tile/token_chunk.h", "if (threadIdx.x == 0) p.ready[coord.pair] = 0;", ""),
    "words before": ("tile/token_chunk.h", "i < p.cleared; i += THREADS", "i < min(p.cleared, THREADS); i += THREADS"),
}
"""What the quantizer clears, and changes of its source after which it doesn't."""


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(CLEARING.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", CLEARING)
def test_the_emulation_sees_what_is_not_cleared(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        check_words(emulation.quantizer(CLEARING[name]), 3, 700, 4)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("heads, causal", ((30, "none"), (30, "bottom_right"), (3, "none"), (3, "bottom_right")))
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_reads_what_the_quantizer_writes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, causal: Causal) -> None:
    """Where the quantizer writes it, and what it counts in; of many tiles and of few. All other parameters are those of a `Call` with these
    operands, bit for bit."""
    operators, library = emulation.binding()
    config = instance(128, 3)
    launchers = {config: library.record} | dict.fromkeys(quantize.INSTANCES, library.record_quantize)
    kernels = build.Library(operators, {c: ctypes.cast(f, ctypes.c_void_p).value or 0 for c, f in launchers.items()})
    monkeypatch.setattr(run, "library_of", lambda *_: kernels)
    monkeypatch.setattr(build, "load_with", lambda *_: kernels)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in normal((2, heads // 2, 2000, 128), dtype))
    q = normal((2, heads, 500, 128), dtype)[0] if heads > 3 else normal((2, heads // 2, 500, 128), dtype)[0]
    problem = Problem(q, k, v, 0.1, "e4m3", causal, dtype, True)
    monkeypatch.setattr(configs, "choose", lambda *_: config)
    early.quantize_and_attend(problem, H100)
    buffer = ctypes.create_string_buffer(library.params_size())
    ctas = library.recorded(buffer)
    told, quantizer = emulation.Params.from_buffer_copy(buffer, emulation.MAPS), emulation.QuantizeParams()
    library.recorded_quantize(ctypes.byref(quantizer))
    overlaps = early.overlaps_quantization(problem, config, H100)
    assert overlaps == (heads > 3)
    for name in ("k", "v"):
        assert getattr(told, name) == getattr(quantizer, f"{name}_data")
    for ours, theirs in (("k_scale", "k_scale"), ("lse_mean", "k_mean"), ("v_scale", "v_scale"), ("v_mean", "v_mean")):
        assert getattr(told, ours) == getattr(quantizer, theirs)
    if overlaps:
        assert told.ready == quantizer.ready == told.counter + 4 * quantizer.cleared
        assert told.ready_ctas == quantize.writers_of(k, quantize.choose(k))
    else:
        assert not told.ready and not told.ready_ctas
    if told.stream_k_ranges:
        assert told.partials_ready == quantizer.ready - 4 * quantizer.cleared + 4 * bool(told.counter)
        assert quantizer.cleared == bool(told.counter) + told.stream_k_ranges * 4 * config.consumers

    key, value = quantize_kv(k, v, DEFAULT_RECIPE)
    call, out = problem.call_of(key, value), empty_output(q, 128, dtype)
    (launcher, *numbers), scratch = run.launch_of(call, H100, config, kernels, run.splits_of(call, config, H100))
    tensors = q, None, call.k, call.k_scale, call.v, call.v_scale, call.v_mean, None, None, out, empty_lse(q, True), call.lse_mean
    memory = run.memory_of(scratch._replace(counters=1) if overlaps else scratch, out)
    wanted = emulation.params(emulation.ForwardArguments(launcher, *numbers, *tensors, *memory))
    for name, kind in wanted._fields_:
        if kind is ctypes.c_void_p or name in ("ready_ctas",):
            assert name in ("ready", "ready_ctas") or bool(getattr(told, name)) == bool(getattr(wanted, name)), name
        else:
            same = (list(x) if isinstance(x, ctypes.Array) else x for x in (getattr(told, name), getattr(wanted, name)))
            assert next(same) == next(same), name
    assert ctas == numbers[4]
    maps = emulation.tensor_maps(emulation.ForwardArguments(launcher, *numbers, *tensors, *memory))
    for i, name in enumerate(("q", "k", "v", "out")):
        at = i * emulation.MAP
        assert buffer.raw[at + 8 : at + emulation.MAP] == maps[at + 8 : at + emulation.MAP], name
        assert int.from_bytes(buffer.raw[at : at + 8], "little") == getattr(told, name), name


def first_and_then(problem: Problem, device: Device) -> Tensors:
    """What early.quantize_and_attend returns, of two launches that wait for each other."""
    call = problem.call_of(*run.quantize_kv(problem.k, problem.v, problem.qk, device))
    return run.forward(call, device, configs.choose(call, device))


SHAPES = (
    (16, 16, 1, 1024, 1024, 128), (4, 32, 1, 2048, 2048, 64), (8, 8, 1, 2048, 2048, 256), (3, 7, 3, 1300, 1700, 128), (3, 5, 4, 777, 3000, 64),
    (2, 9, 3, 1999, 1111, 256),
)  # fmt: skip
"""Batch, heads of keys, query heads of each, queries, keys and channels."""


@pytest.mark.gpu
@pytest.mark.parametrize("qk", FUSED_RECIPES)
@pytest.mark.parametrize("causal", ("none", "top_left", "bottom_right"))
@pytest.mark.parametrize("shape", SHAPES)
def test_has_the_bits_of_quantizing_first(device: torch.device, shape: tuple[int, int, int, int, int, int], causal: Causal, qk: ProductType) -> None:
    assert_has_the_bits_of_quantizing_first(device, shape, qk, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", ({"window": (300, 0)}, {"softcap": 5.0}, {"sinks": True}, {"window": (200, 100), "sinks": True}), ids=str)
@pytest.mark.parametrize("shape", (SHAPES[3], SHAPES[5]))
def test_scores_have_the_bits_of_quantizing_first(device: torch.device, shape: tuple[int, int, int, int, int, int], scores: dict[str, Any]) -> None:
    options = {"causal": "bottom_right"} | scores
    if scores.get("sinks"):
        options["sinks"] = torch.linspace(-2, 3, shape[1] * shape[2], device=device)
    assert_has_the_bits_of_quantizing_first(device, shape, "e4m3", **options)


def assert_has_the_bits_of_quantizing_first(
    device: torch.device, shape: tuple[int, int, int, int, int, int], qk: ProductType, **options: Any
) -> None:
    """Of other numbers each time, which lie where the last ones' did: what is read too early is of those. Some elements aren't finite."""
    batch, heads, group, queries, keys, dim = shape
    properties = device_of(device)
    if configs.unsupported_config(FUSED_Q_INSTANCES[0], properties) is not None:
        pytest.skip("needs sm_90")
    generator = torch.Generator(device).manual_seed(keys)
    dtype = HALVES[group % 2]
    problems, expected = [], []
    for i in range(3):
        q = torch.randn(batch, heads * group, queries, dim, generator=generator, device=device, dtype=dtype)
        k, v = (torch.randn(batch, heads, keys, dim, generator=generator, device=device, dtype=dtype) for _ in range(2))
        q[0, 0, 7, 3], k[0, heads - 1, keys - 1, i], v[batch - 1, 0, 5, i] = torch.nan, torch.inf, torch.nan
        problems.append(Problem(q, k, v, dim**-0.5, qk, out_dtype=dtype, return_lse=True, **options))
        expected.append(first_and_then(problems[-1], properties))
    assert early.overlaps_quantization(problems[0], configs.choose(problems[0], properties), properties)
    for i in range(30):
        actual = early.quantize_and_attend(problems[i % 3], properties)
        for x, y in zip(actual, expected[i % 3], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_in_a_graph_and_on_a_stream(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed with other numbers in the same place; and that it is this that `sdpa` does."""
    properties = device_of(device)
    if configs.unsupported_config(FUSED_Q_INSTANCES[0], properties) is not None:
        pytest.skip("needs sm_90")
    q, k, v, *others = (torch.randn(8, 16, 1024, 128, device=device, dtype=torch.bfloat16) for _ in range(6))
    sdpa(q, k, v)
    taken: list[bool] = []
    monkeypatch.setattr(early, "overlaps_quantization", lambda *x, original=early.overlaps_quantization: taken.append(original(*x)) or taken[-1])
    torch.cuda.synchronize(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream):
        captured = sdpa(q, k, v)
    assert taken and all(taken)
    for x, y in zip((q, k, v), others, strict=True):
        x.copy_(y)
    expected = first_and_then(Problem(*others, 128**-0.5), properties)[0]
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
            beside = sdpa(*others)
        torch.cuda.synchronize(device)
        assert torch.equal(captured, expected) and torch.equal(beside, expected)
