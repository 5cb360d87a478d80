"""Attention that begins with heads whose keys and values are ready while others are still being quantized: which calls do, what the quantizer says,
and that it has the bits of quantizing first. tests/mutants/test_cuda_mutants.py breaks it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import emulation
from fp8attn import sdpa
from fp8attn.call import HALVES, Call, Problem, empty_lse, empty_output
from fp8attn.cuda import build, configs, early, quantize, run
from fp8attn.cuda.configs import FUSED_Q_INSTANCES, HopperConfig
from fp8attn.device import Device, device_of
from fp8attn.quantization import quantize_kv
from fp8attn.recipe import DEFAULT_RECIPE, FUSED_RECIPES, ProductType, Quantized
from fp8attn.reference import Causal
from instances import H100
from quantizing import assert_same, normal

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def call_of(q: torch.Tensor, key: Quantized, value: Quantized, causal: Causal = "none") -> Call:
    return Problem(q, q, q, q.shape[3] ** -0.5, "e4m3", causal, q.dtype, True).call_of(key, value)


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
    key, value = quantize.empty(k, k, "e4m3")
    assert early.overlaps_quantization(call_of(q, key, value, causal), instance(dim, consumers), H100) is begins


def test_windows_and_caps_of_few_channels_do_not_overlap_quantization() -> None:
    for dim, consumers, begins in ((64, 4, False), (128, 3, True)):
        q = torch.empty(1, 64, 4096, dim, dtype=torch.bfloat16, device="meta")
        key, value = quantize.empty(q, q, "e4m3")
        for options in (dict(window=(9, 0)), dict(softcap=3.0)):
            call = Problem(q, q, q, 0.1, causal="top_left", **options).call_of(key, value)  # type: ignore[arg-type]
            assert early.overlaps_quantization(call, instance(dim, consumers), H100) is begins


def check_words(library: build.Library, heads: int, length: int, ctas: int) -> None:
    """`heads` heads of two batches, each quantized by `ctas` CTAs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: library)
        k, v = normal((2, heads, length, 128))
        expected, (key, value) = run.quantize_kv(k, v, "int8", H100), quantize.empty(k, v, "int8")
        words = torch.full((300 + 2 * heads,), 7, dtype=torch.int32)  # of the call before
        assert run.quantize_into(key, value, k, v, H100, words=words) == ctas
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
@pytest.mark.parametrize("causal", ("none", "bottom_right"))
@pytest.mark.parametrize("dtype", HALVES)
def test_the_binding_tells_it_all(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, causal: Causal) -> None:
    """Bit for bit what Python makes of the same arguments; and the counter, which every such call takes tiles from."""
    operators, library = emulation.binding()
    config = instance(128, 3)
    launcher = ctypes.cast(library.record, ctypes.c_void_p).value
    monkeypatch.setattr(run, "library_of", lambda *_: build.Library(operators, {config: launcher}))
    k, v = normal((2, 15, 2000, 128), dtype)
    key, value = quantize_kv(k, v, DEFAULT_RECIPE)
    q = normal((2, 30, 500, 128), dtype)[0]
    call, (out, lse) = call_of(q, key, value, causal), (empty_output(q, 128, dtype), empty_lse(q, True))
    launch = early.launch_of(call, H100, config)
    counter, parts, flags, ready, _ = launch.memory
    assert counter is not None and (parts is None) == (causal != "none") and ready.shape == (30,)
    early.forward_when_ready(call, launch, out, lse, 2)
    buffer = ctypes.create_string_buffer(library.params_size())
    ctas = library.recorded(buffer)
    tensors = q, None, call.k, call.k_scale, call.v, call.v_scale, call.v_mean, None, None, out, lse, call.lse_mean, counter, parts, flags
    p = emulation.params(emulation.ForwardArguments(*launch.arguments, *tensors), ready, 2)
    assert ctas == H100.sm_count
    assert buffer.raw[emulation.MAPS :].startswith(bytes(p))


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
    call = problems[0].call_of(*quantize.empty(problems[0].k, problems[0].v, qk))
    assert early.overlaps_quantization(call, configs.choose(call, properties), properties)
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
    monkeypatch.setattr(early, "forward_when_ready", lambda *x, original=early.forward_when_ready: taken.append(True) or original(*x))
    torch.cuda.synchronize(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream):
        captured = sdpa(q, k, v)
    assert taken
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


def test_calls_of_few_tiles_quantize_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of K and V, and then attention as it is."""
    steps: list[str] = []
    monkeypatch.setattr(run, "quantize_into", lambda *_, **__: steps.append("quantized"))
    monkeypatch.setattr(run, "forward", lambda *_: steps.append("attended") or (torch.empty(0), torch.empty(0)))
    q, k = (torch.zeros(1, 2, 300, 128, dtype=torch.bfloat16) for _ in range(2))
    early.quantize_and_attend(Problem(q, k, k, 0.1), H100)
    assert steps == ["quantized", "attended"]
