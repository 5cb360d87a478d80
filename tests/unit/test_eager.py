"""Calls like one before: that they launch what the first one launched, bit for bit, and which calls are none of them. Without a GPU, by the binding
for CPU tensors."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import struct
import subprocess
import sys
import threading
import traceback
import unittest.mock
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import emulation
import fp8attn
from bench.profiled import named_ranges
from fp8attn import (
    PagedBatch,
    Quantized,
    api,
    eager,
    explaining,
    ops,
    paged_copies,
    paged_ops,
    paged_tensors_ops,
    prepare,
    problem_ops,
    recording,
    varlen_ops,
)
from fp8attn import triton as triton_kernels
from fp8attn.call import Problem, empty_lse, empty_output
from fp8attn.cuda import build
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.append import AppendConfig
from fp8attn.cuda.build import BuildError
from fp8attn.cuda.decode import DecodeConfig
from fp8attn.cuda.decode_tensors import DecodeTensorsConfig
from fp8attn.cuda.general_quantize import GeneralQuantizeConfig, UnsmoothLseConfig
from fp8attn.cuda.prefill import PrefillConfig
from fp8attn.cuda.quantize import QuantizeConfig
from fp8attn.device import ARCHITECTURES
from fp8attn.layout import tiles_of
from fp8attn.quantization import quantize
from fp8attn.reference import Scoring
from fp8attn.schedule import TABLE_HEADER, TILE_PITCH
from repeating import Repeats
from strategies import Case, cases

H100 = ARCHITECTURES[90]
PACKAGE = Path(fp8attn.__file__).parent
CPU = torch.device("cpu")

pytestmark = [pytest.mark.anywhere, emulation.emulates]


class AnyInstance(dict):
    """The launcher that writes down its Params, for every config."""

    def __missing__(self, config) -> int:
        library = emulation.binding()[1]
        name = {QuantizeConfig: "record_quantize", GeneralQuantizeConfig: "record_general_quantize", UnsmoothLseConfig: "record_unsmooth_lse"}
        name |= {DecodeConfig: "record_decode", DecodeTensorsConfig: "record_decode", PrefillConfig: "record_prefill", AppendConfig: "record_append"}
        launcher = getattr(library, name.get(type(config), "record"))
        return ctypes.cast(launcher, ctypes.c_void_p).value or 0


def function(*tensors: torch.Tensor | None, number: int = 0) -> None:
    """A launch of Triton's, which writes nothing, in a recording."""
    recorder = recording.current()
    assert recorder is not None
    words = [number, *(0 if x is None else x.data_ptr() for x in tensors)]
    recorder._operators.record_function.default(77, (3, 1, 1, 128, 64), True, words, [i for i, x in enumerate(words) if i and x])


def quantized_by_a_function(q, k, v, recipe, by_triton=False):
    """ops.quantized: by definition, in plain torch; in a recording by a launch that writes nothing."""
    if recording.current() is None:
        return quantize(q, k, v, recipe)
    with unittest.mock.patch.object(recording, "current", return_value=None), torch.utils._python_dispatch._disable_current_modes():
        like = quantize(*(None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() for x in (q, k, v)), recipe)
    made = [None if x is None else dataclasses.replace(x, **{name: _empty_like(getattr(x, name)) for name in eager.TENSORS}) for x in like]
    function(q, k, v, *(getattr(x, name) for x in made if x is not None for name in eager.TENSORS))
    return tuple(made)


def varlen_quantized_by_a_function(k, v, cu_seqlens_k, seqused_k, recipe):
    """fp8attn::varlen_quantize in a recording."""
    made = varlen_ops._fake_quantize(k, v, cu_seqlens_k, seqused_k, recipe)
    function(k, v, cu_seqlens_k, seqused_k, *(x for x in made if x.numel()))
    return made


def packed_by_the_operator(q, k, v, recipe, packed):
    """As prepare has it where calls aren't direct."""
    query = None if q is None else ops.QUANTIZERS["quantize"](q, None, None, recipe)[0]
    with unittest.mock.patch.object(ops, "is_direct", return_value=False):
        return query, *prepare._packed_operands(None, k, v, recipe, (None, packed), False)[1:]


TABLE = 9
"""The number of the launch that writes the table of tiles."""


def table_by_a_function(call, rows, device, units):
    """triton.varlen.table_of, which nobody reads here. Its launch gets lengths, `rows` and the table."""
    table = torch.empty(1 + tiles_of(call.varlen.q, rows, call.q_heads // call.kv_heads, units), TILE_PITCH, dtype=torch.int32, device=call.q.device)
    if (recorder := recording.current()) is not None:
        tensors = call.varlen.q.cu_seqlens, call.varlen.k.cu_seqlens, call.varlen.k.seqused
        words = [TABLE, *(0 if x is None else x.data_ptr() for x in tensors), rows, table.data_ptr()]
        recorder._operators.record_function.default(77, (3, 1, 1, 128, 64), True, words, [i for i in (1, 2, 3, 5) if words[i]])
    return table


def lse_by_a_function(lse, q, *others, **options):
    function(lse, q, out := torch.empty_like(lse))
    return out


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What plain torch computes here is a launch in recordings, as on a GPU. Packed keys and values aren't computed at
    all: it takes seconds, and nobody reads them."""
    monkeypatch.setattr(varlen_ops.quantize_ref, "quantize_packed", varlen_ops.quantize_ref.empty_packed)
    for name in ("unsmoothed_lse", "varlen_unsmoothed_lse"):
        monkeypatch.setitem(ops.implementations, name, lse_by_a_function)
    unsmoothed = ops.unsmoothed_lse
    monkeypatch.setattr(ops, "unsmoothed_lse", lambda *x: (unsmoothed if recording.current() is None else lse_by_a_function)(*x))


def _empty_like(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are an H100's."""
    library = build.Library(emulation.binding()[0], AnyInstance())
    emulation.binding()[1].expect_words(0)  # no launch has fewer
    monkeypatch.setattr(build, "load_with", lambda *_: library)
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "_failures", {})
    for module in (prepare, explaining, ops, problem_ops):
        monkeypatch.setattr(module, "device_of", lambda device: H100)
    monkeypatch.setattr(ops, "has_kernels", lambda device: False)
    monkeypatch.setattr(ops, "_by_triton", lambda call: (empty_output(call.q, call.value_dim, call.out_dtype), empty_lse(call.q, call.return_lse)))
    monkeypatch.setattr(ops, "quantized", quantized_by_a_function)
    monkeypatch.setitem(ops.QUANTIZERS, "quantize", quantized_by_a_function)
    monkeypatch.setitem(ops.implementations, "varlen_quantize", varlen_quantized_by_a_function)
    packed = varlen_ops.QUANTIZERS["varlen_quantize"]
    monkeypatch.setitem(
        varlen_ops.QUANTIZERS, "varlen_quantize", lambda *x: packed(*x) if recording.current() is None else packed_by_the_operator(*x)
    )
    monkeypatch.setattr(triton_kernels.varlen, "table_of", table_by_a_function)
    monkeypatch.setattr(build, "load_binding", lambda: library.operators)
    chosen = api.choose_backend
    for module in (api, explaining):
        monkeypatch.setattr(module, "choose_backend", lambda backend, device: backend if device == CPU else chosen(backend, device))


def told() -> emulation.Params:
    """Params of the last launch."""
    _, library = emulation.binding()
    buffer = ctypes.create_string_buffer(library.params_size())
    library.recorded(buffer)
    return emulation.Params.from_buffer_copy(buffer, emulation.MAPS)


def launched(addresses: bool = True) -> tuple[int, bytes]:
    """CTAs and Params of the last launch, but for the addresses of what it was given to write; or without any address."""
    _, library = emulation.binding()
    buffer = ctypes.create_string_buffer(library.params_size())
    ctas = library.recorded(buffer)
    p = emulation.Params.from_buffer(buffer, emulation.MAPS)
    p.out = None
    for name in (
        "lse",
        "lse_mean",
        "counter",
        "parts",
        "part_rows",
        "partials_ready",
        "mean_scores",
        "ready",
        "mask_bits",
        "block_mask",
        "tile_table",
    ):
        setattr(p, name, bool(getattr(p, name)))
    forgotten = range(4) if not addresses else (3,)
    for i in forgotten:
        buffer[i * emulation.MAP : i * emulation.MAP + 8] = bytes(8)
    if not addresses:
        for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
            setattr(p, name, None)
        p.v_mean = bool(p.v_mean)
    return ctas, buffer.raw


def described(x: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple:
    if isinstance(x, tuple):
        return tuple(map(described, x))
    return x.shape, x.stride(), x.dtype, x.device, x.is_inference(), x.requires_grad


def alike(call: Callable[[], torch.Tensor], hit: bool | None = True, addresses: bool = True) -> None:
    """The first call, the second, which is recorded, and the third, which is repeated, launch the same."""
    eager.forget()
    with pytest.MonkeyPatch.context() as patch:
        repeats = Repeats(patch)
        first, params = call(), launched(addresses)
        assert not any(repeats.hits)
        second = call()
        assert not any(repeats.hits)
        assert launched(addresses) == params
        if hit:
            patch.setattr(ops, "plan_cuda", lambda *_, **__: pytest.fail("it plans"))
            patch.setattr(problem_ops, "plan_one_launch", lambda *_: pytest.fail("it plans"))
        third = call()
        assert hit is None or repeats.last() == hit
    assert described(first) == described(second) == described(third)
    assert launched(addresses) == params


@given(case=cases(), moved=st.sampled_from(("", "q", "k", "qk")), backend=st.sampled_from(("cuda", "auto")))
def test_launches_the_same(case: Case, moved: str, backend: str) -> None:
    """Of quantized operands: Params of every kind of call, tensor maps and strides included."""
    quantized = fp8attn.quantize(*case.tensors(CPU), recipe=case.recipe)
    q, k, v = (dataclasses.replace(x, data=emulation.elsewhere(x.data, 3)) if name in moved else x for name, x in zip("qkv", quantized, strict=True))
    options = case.options(CPU)
    call = prepare.call_of(q, k, v, **options)
    config = ops.plan_cuda(call, first=backend == "auto")
    if isinstance(config, str):
        return
    alike(lambda: fp8attn.sdpa(q, k, v, **options, out_dtype=case.out_dtype, backend=backend))


@given(case=cases(), backend=st.sampled_from(("cuda", "auto")), return_lse=st.booleans())
def test_quantizing_and_attending_at_once_launches_the_same(case: Case, backend: str, return_lse: bool) -> None:
    dtype = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
    case = dataclasses.replace(case, head_dim=64, value_dim=64, dtype=dtype, scale=abs(case.scale or 0.125))
    q, k, v = case.tensors(CPU)
    options = case.options(CPU)
    hit = not isinstance(problem_ops.plan_one_launch(Problem(q, k, v, case.scale, attn_mask=options["attn_mask"]), H100), str)
    once = options["attn_mask"] is None  # else what is quantized lies elsewhere every time
    options |= dict(out_dtype=case.out_dtype, return_lse=return_lse)
    alike(lambda: fp8attn.sdpa(q, k, v, **options, backend=backend), hit=hit or None, addresses=once)


@pytest.mark.parametrize("backend", ("cuda", "auto"))
@pytest.mark.parametrize("options", ({}, {"is_causal": True, "out_dtype": torch.float32}))
def test_attending_to_what_was_just_quantized_launches_the_same(backend: str, options: dict) -> None:
    q, k, v = (torch.randn(1, 3, 600, 96, dtype=torch.float16) for _ in range(3))
    alike(lambda: fp8attn.sdpa(q, k, v, backend=backend, **options), addresses=False)


def quantized_by() -> tuple[int, bytes]:
    """CTAs and QuantizeParams of the last launch, but for the addresses of what it was given to write."""
    _, library = emulation.binding()
    p = emulation.QuantizeParams()
    library.recorded_quantize(ctypes.byref(p))
    for name in ("k_data", "k_scale", "k_mean", "v_data", "v_scale", "v_mean", "ready", "chunk_stats"):
        setattr(p, name, bool(getattr(p, name)))
    return p.ready, bytes(p)


@pytest.mark.parametrize("backend", ("cuda", "auto"))
@pytest.mark.parametrize(
    "shape, options, early",
    (
        ((1, 3, 700, 128), {}, False),  # few tiles, which CTAs share
        ((1, 20, 700, 128), {"is_causal": True}, False),
        ((2, 20, 1100, 128), {"is_causal": True, "out_dtype": torch.float32}, True),
        ((2, 40, 800, 64), {"scale": 0.3}, True),
        ((1, 3, 700, 128), {"recipe": fp8attn.PRECISE}, False),
        ((2, 20, 1100, 128), {"attn_mask": torch.ones(1100, 1100, dtype=torch.bool)}, False),
        ((2, 20, 1100, 128), {"attn_mask": torch.ones(20, 1100, 1104).bfloat16()[..., :1100], "recipe": fp8attn.PRECISE}, False),
        ((2, 20, 1100, 128), {"is_causal": True, "recipe": fp8attn.PRECISE}, True),
        ((1, 3, 4700, 128), {}, False),  # longer than a cluster holds
        ((1, 8, 2100, 256), {"is_causal": True, "return_lse": True}, True),
        ((1, 3, 700, 128), {"return_lse": True}, False),
        ((2, 20, 1100, 128), {"return_lse": True, "recipe": fp8attn.PRECISE}, True),
    ),
)
def test_quantizing_and_then_attending_launches_the_same(
    backend: str, shape: tuple[int, ...], options: dict, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quantizer's launch too, and that attention waits for what it says."""
    q, k, v = (torch.randn(shape).bfloat16() for _ in range(3))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    seen: list[tuple[int, bytes]] = []

    def call() -> torch.Tensor:
        out = fp8attn.sdpa(q, k, v, backend=backend, **options)
        seen.append(quantized_by())
        return out

    alike(call, addresses=False)
    assert seen[0] == seen[2]
    p = emulation.Params.from_buffer_copy(launched()[1], emulation.MAPS)
    assert bool(seen[0][0]) == bool(p.ready) == early
    assert bool(p.lse) == bool(p.lse_mean) == ("return_lse" in options)
    assert (p.ready_ctas > 0) == early and (not early or p.counter)
    monkeypatch.setattr(prepare, "device_of", lambda device: H100)
    said = fp8attn.explain(q, k, v, backend=backend, **options).because
    assert ("attention begins with heads whose key and value are quantized" in said) == early


class Traced:
    """Operators of the binding. Before one is called, notes the files of fp8attn that the call has passed, outermost first."""

    def __init__(self, of: Any, routes: list[list[str]]) -> None:
        self._of, self._routes = of, routes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name != "default":
            return Traced(found, self._routes)

        def call(*arguments: Any) -> Any:
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            self._routes.append([str(file) for file, _ in itertools.groupby(files) if PACKAGE in file.parents])
            return found(*arguments)

        return call


@pytest.mark.parametrize(
    "shape, quantizes, options",
    (
        ((2, 20, 1100, 128), False, {}),  # two launches
        ((1, 24, 577, 64), False, {"return_lse": True}),  # one launch
        ((1, 3, 700, 128), False, {"recipe": fp8attn.PRECISE, "is_causal": True}),
        ((2, 20, 1100, 128), False, {"attn_mask": torch.ones(1100, 1100, dtype=torch.bool)}),
        ((1, 4, 300, 64), True, {}),
    ),
)
def test_a_call_passes_few_files_and_none_twice(shape: tuple[int, ...], quantizes: bool, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """From sdpa to each launch."""
    operands = tuple(torch.randn(shape).bfloat16() for _ in range(3))
    if quantizes:
        operands = quantize(*operands, fp8attn.Recipe())
    routes: list[list[str]] = []
    library = build.load_with(None, None, 90)
    monkeypatch.setattr(build, "load_with", lambda *_: build.Library(Traced(library.operators, routes), library.launchers))
    eager.forget()
    fp8attn.sdpa(*operands, backend="cuda", **options)
    assert routes
    for route in routes:
        assert route[0] == str(PACKAGE / "api.py") and len(route) <= 8 and len(set(route)) == len(route), route


@pytest.mark.parametrize("shape", ((1, 3, 400), (2, 8, 1100)))
def test_ctas_that_share_tiles_launch_the_same(shape: tuple[int, int, int]) -> None:
    """With few tiles, and with more than a round of them."""
    batch, heads, length = shape
    q = torch.randn(batch, heads, length, 128).bfloat16()
    k = torch.randn(batch, heads, 128, 128).bfloat16().repeat(1, 1, 40, 1)
    quantized = quantize(q, k, k, fp8attn.Recipe())
    call = prepare.call_of(*quantized)
    splits = cuda_run.splits_of(call, cuda_run.choose(call, H100), H100)
    assert splits > 1
    alike(lambda: fp8attn.cuda_sdpa(*quantized))
    _, params = launched()
    p = emulation.Params.from_buffer_copy(params, emulation.MAPS)
    assert p.stream_k_ranges == splits and p.parts and p.partials_ready and not p.counter and not p.part_rows


def operands(batch: int = 2, heads: int = 4, length: int = 300) -> tuple[Quantized, Quantized, Quantized]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, 64, generator=generator).bfloat16() for _ in range(3))
    return quantize(q, k, v, fp8attn.Recipe())


def kept(*arguments: Any, **options: Any) -> Callable[[], torch.Tensor]:
    """A call that is repeated from now on."""

    def call() -> torch.Tensor:
        return fp8attn.cuda_sdpa(*arguments, **options)

    call(), call()
    return call


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Repeats:
    return Repeats(monkeypatch)


def test_granularities_that_are_expanded() -> None:
    """Scales of a whole tensor or head are strides of zero, as torch expands them."""
    recipe = fp8attn.Recipe(q="tensor", k="tensor", v="tensor")
    for batch, heads in ((2, 4), (1, 4), (2, 1), (1, 1)):
        for granularity in ("tensor", "head"):
            q, k, v = (torch.randn(batch, heads, 70, 64) for _ in range(3))
            quantized = fp8attn.quantize(q, k, v, recipe=dataclasses.replace(recipe, q=granularity, k=granularity, v=granularity))
            alike(lambda operands=quantized: fp8attn.cuda_sdpa(*operands))


class OtherDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class OtherFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", (OtherDispatch, OtherFunctions))
def test_modes_see_the_operators_of_the_library(mode: type, repeats: Repeats) -> None:
    call = kept(*operands())
    call()
    assert repeats.last()
    with mode():
        call()
    assert not repeats.last()
    call()
    assert repeats.last()


def test_transforms_and_tracers_see_the_operators_of_the_library(repeats: Repeats) -> None:
    call = kept(*operands())

    def inside(x: torch.Tensor) -> torch.Tensor:
        call()
        return x.sum()

    for transformed in (torch.func.vmap(inside), torch.func.grad(inside)):
        transformed(torch.ones(3))
        assert not repeats.last()
    torch.jit.trace(inside, torch.ones(3), check_trace=False)
    assert not repeats.last()
    call()
    assert repeats.last()


def test_what_is_compiled_has_the_operators_of_the_library(repeats: Repeats) -> None:
    call = kept(*(x := operands()))
    expected = call()
    targets = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    out = torch.compile(lambda q, k, v: fp8attn.cuda_sdpa(q, k, v), fullgraph=True, backend=backend)(*x)
    assert described(out) == described(expected)
    assert any("fp8attn.cuda_forward" in name for name in targets) and not [name for name in targets if "repeat" in name]


def test_what_is_profiled_goes_by_the_operators_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which is a range."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    call = kept(*operands())
    with named_ranges():
        call()
    assert said == ["forward"]
    call()
    assert said == ["forward"]


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("name", ("data", "scale", "mean"))
def test_subclasses_are_refused(name: str, repeats: Repeats) -> None:
    """After a call that differs in nothing else."""
    q, k, v = operands()
    kept(q, k, v)
    odd = dataclasses.replace(v, **{name: getattr(v, name).as_subclass(Subclass)})
    with pytest.raises(TypeError, match=f"value.{name} is a Subclass, a subclass of torch.Tensor"):
        fp8attn.cuda_sdpa(q, k, odd)
    assert not any(repeats.hits)


def test_a_tangent_is_refused(repeats: Repeats) -> None:
    """Of forward-mode AD, inside and outside of torch.func."""
    q, k, v = (torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3))
    call = kept(q, k, v)
    call()
    assert repeats.last()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="key has a tangent"):
        fp8attn.cuda_sdpa(q, forward_ad.make_dual(k, k), v)
    with forward_ad.dual_level():
        call()
    with pytest.raises(RuntimeError, match="query has a tangent"):
        torch.func.jvp(lambda q: fp8attn.cuda_sdpa(q, k, v), (q,), (q,))
    call()
    assert repeats.last()


@pytest.mark.parametrize("plain", (False, True))
def test_what_requires_grad(plain: bool, repeats: Repeats) -> None:
    q, k, v = (torch.randn(1, 2, 70, 64).bfloat16() for _ in range(3)) if plain else operands()
    call = kept(q, k, v)
    call()
    assert repeats.last()
    if plain:
        q.requires_grad_()
        with pytest.raises(RuntimeError, match="query requires grad"):
            call()
    else:
        q.scale.requires_grad_()
        with pytest.raises(RuntimeError, match=r"query.scale requires grad"):
            call()
    assert not repeats.last()
    with torch.no_grad():
        call()
    assert not repeats.last()


ERRORS: dict[str, Callable[[Quantized, Quantized, Quantized], dict[str, Any]]] = {
    "dropout": lambda q, k, v: dict(dropout_p=0.5),
    "scale": lambda q, k, v: dict(scale=float("nan")),
    "scale of another type": lambda q, k, v: dict(scale="1"),
    "causal alignment": lambda q, k, v: dict(causal_alignment="left"),
    "causal mask twice": lambda q, k, v: dict(is_causal=True, attn_mask=torch.ones(300, 300, dtype=torch.bool)),
    "mask of other keys": lambda q, k, v: dict(attn_mask=torch.ones(300, 299, dtype=torch.bool)),
    "mask of integers": lambda q, k, v: dict(attn_mask=torch.ones(300, 300, dtype=torch.int32)),
    "mask that is no tensor": lambda q, k, v: dict(attn_mask=[1.0]),
    "mask that requires grad": lambda q, k, v: dict(attn_mask=torch.ones(300, 300, requires_grad=True)),
    "dtype": lambda q, k, v: dict(out_dtype=torch.int8),
    "recipe": lambda q, k, v: dict(recipe="fast"),
    "scale of what isn't stored": lambda q, k, v: dict(q_scale=1.0),
    "heads": lambda q, k, v: dict(zip(("key", "value"), operands(heads=2)[1:], strict=True)),
    "length": lambda q, k, v: dict(value=dataclasses.replace(v, length=299)),
    "layout": lambda q, k, v: dict(key=v),
    "rotated": lambda q, k, v: dict(query=dataclasses.replace(q, rotated=16)),
    "batch": lambda q, k, v: dict(query=operands(batch=3)[0]),
    "no tensor": lambda q, k, v: dict(query=[1.0]),
    "another kind": lambda q, k, v: dict(key=torch.zeros(2, 4, 300, 64)),
    "int8": lambda q, k, v: dict(query=dataclasses.replace(q, data=q.data.view(torch.int8))),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_stay_as_they_are(name: str) -> None:
    """After calls that differ in nothing else, and where the wrong call is made again and again."""
    q, k, v = operands()
    arguments = dict(query=q, key=k, value=v) | ERRORS[name](q, k, v)
    eager.forget()
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as expected:
        fp8attn.cuda_sdpa(**arguments)
    kept(q, k, v)
    kept(q, k, v, attn_mask=torch.ones(300, 300))
    kept(query=q, key=k, value=v)
    for _ in range(4):
        with pytest.raises(expected.type) as caught:
            fp8attn.cuda_sdpa(**arguments)
        assert str(caught.value) == str(expected.value)


def test_tensors_elsewhere_are_another_call(repeats: Repeats) -> None:
    """On another device, and with metadata that changed inside of a Quantized."""
    q, k, v = operands()
    call = kept(q, k, v)
    call()
    assert repeats.last()
    meta = [dataclasses.replace(x, data=x.data.to("meta"), scale=x.scale.to("meta"), mean=None) for x in (q, k, v)]
    for _ in range(3):
        with pytest.raises(fp8attn.BackendUnavailable, match="tensors are on meta"):
            fp8attn.cuda_sdpa(*meta)
    assert not repeats.last()
    q.data.data = emulation.elsewhere(q.data, 3)
    alike(call)
    k.scale.data = k.scale.data.transpose(1, 2).contiguous().transpose(1, 2)
    alike(call)


@pytest.mark.parametrize("options", (dict(scale=torch.tensor(0.125)), dict(is_causal=[1]), dict(is_causal=torch.ones(1))))
def test_options_of_other_types_are_refused_every_time(repeats: Repeats, options: dict) -> None:
    """Also when the same call without them is kept."""
    q, k, v = operands()
    call = kept(q, k, v)
    for _ in range(4):
        with pytest.raises(TypeError, match=f"{next(iter(options))} is a"):
            fp8attn.cuda_sdpa(q, k, v, **options)
        assert not repeats.last()
    call()
    assert repeats.last()


@pytest.mark.parametrize("name", ("is_causal", "enable_gqa"))
def test_numbers_that_equal_flags_are_refused(name: str, repeats: Repeats) -> None:
    """1 and True have one hash, and are equal."""
    x = operands()
    kept(*x, **{name: True})()
    assert repeats.last()
    with pytest.raises(TypeError, match=f"{name} is a"):
        fp8attn.cuda_sdpa(*x, **{name: 1})
    assert not repeats.last()


def test_other_options_are_other_calls() -> None:
    """Kept side by side."""
    q, k, v = operands()
    several = [{}, dict(is_causal=True), dict(scale=0.5), dict(out_dtype=torch.float32), dict(is_causal=True, causal_alignment="bottom_right")]
    several += [dict(scale=-0.5), dict(scale=0.0)]
    expected = []
    for options in several:
        fp8attn.cuda_sdpa(q, k, v, **options)
        expected.append(launched())
    assert len(set(expected)) == len(several) - 1  # both alignments are one: lengths are equal
    with pytest.MonkeyPatch.context() as patch:
        repeats = Repeats(patch)
        for _ in range(3):
            for options, params in zip(several, expected, strict=True):
                fp8attn.cuda_sdpa(q, k, v, **options)
                assert launched() == params
        assert repeats.hits == [False] * len(several) + [True] * 2 * len(several)


def shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """The same elements at the same strides, `count` bytes off a multiple of 16."""
    return torch.zeros(x.numel() + count, dtype=torch.uint8)[count:].view(x.dtype).view(x.shape).copy_(x)


def test_other_tensors_are_other_calls() -> None:
    """Kept side by side: the same options and shapes, other strides and alignments."""
    q, k, v = operands()
    several = [(q, k, v)]
    several += [(dataclasses.replace(q, data=x), k, v) for x in (q.data.transpose(1, 2).contiguous().transpose(1, 2), shifted(q.data, 8))]
    several += [(q, dataclasses.replace(k, data=x), v) for x in (k.data.transpose(1, 2).contiguous().transpose(1, 2), shifted(k.data, 8))]
    several.append((q, dataclasses.replace(k, scale=k.scale.transpose(1, 2).contiguous().transpose(1, 2)), v))
    several.append((q, k, dataclasses.replace(v, mean=None)))
    several.append((q, k, dataclasses.replace(v, scale=torch.ones(2, 4, 1).expand(2, 4, 64))))
    expected = []
    for x in several:
        fp8attn.cuda_sdpa(*x)
        expected.append(launched())
    assert len({params[emulation.MAPS :] for _, params in expected}) == len(several)
    with pytest.MonkeyPatch.context() as patch:
        repeats = Repeats(patch)
        for _ in range(3):
            for x, params in zip(several, expected, strict=True):
                fp8attn.cuda_sdpa(*x)
                assert launched() == params
        assert repeats.hits[-len(several) :] == [True] * len(several)


@pytest.mark.parametrize("backend", ("cuda", "auto"))
def test_tiles_that_are_shared_by_a_counter(backend: str) -> None:
    """Of a causal call with more of them than SMs; zero at every launch, whatever the memory held before."""
    x = operands(1, 300, 64)
    alike(lambda: fp8attn.sdpa(*x, is_causal=True, backend=backend))
    assert emulation.Params.from_buffer_copy(launched()[1], emulation.MAPS).counter
    _, library = emulation.binding()
    for _ in range(20):
        for size in (4, 64, 256, 320, 512):  # the allocator may give one of these back
            torch.full((size,), 0x55, dtype=torch.uint8)
        fp8attn.sdpa(*x, is_causal=True, backend=backend)
        assert library.counter() == 0


def test_another_mask_is_another_call(repeats: Repeats) -> None:
    """Of other strides, shape, type or address; without one, too. What a mask shows is nothing to a launch."""
    q, k, v = operands()
    mask = torch.ones(300, 304, dtype=torch.bfloat16)[:, :300]
    kept(q, k, v, attn_mask=mask)()
    assert repeats.last()
    others = (
        mask.contiguous(), mask.contiguous().mT, mask.half(), mask > 0, mask[:1], mask.expand(2, 4, 300, 300),
        torch.ones(300, 304, dtype=torch.bfloat16)[:, 1:301], None,
    )  # fmt: skip
    for other in others:
        alike(lambda other=other: fp8attn.cuda_sdpa(q, k, v, attn_mask=other))
    first = [launched()[1] for other in others if fp8attn.cuda_sdpa(q, k, v, attn_mask=other) is not None]
    kept(q, k, v, attn_mask=mask)
    assert [launched()[1] for other in others if fp8attn.cuda_sdpa(q, k, v, attn_mask=other) is not None] == first and len(set(first)) == len(others)
    mask.fill_(-torch.inf)
    fp8attn.cuda_sdpa(q, k, v, attn_mask=mask)
    assert repeats.last()


@pytest.mark.parametrize("options", (dict(return_lse=True), dict(recipe=fp8attn.Recipe(two_level=True))))
def test_lse_of_quantized_operands_and_other_recipes_are_kept(repeats: Repeats, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "unsmoothed_lse", None)
    monkeypatch.setitem(ops.implementations, "unsmoothed_lse", lambda lse, *_, **__: function(lse, out := torch.empty_like(lse)) or out)
    x = operands()
    alike(lambda: fp8attn.cuda_sdpa(*x, **options))


def test_an_equal_recipe_is_the_same_call(repeats: Repeats) -> None:
    operands_of_it = operands()
    for _ in range(3):
        fp8attn.cuda_sdpa(*operands_of_it, recipe=fp8attn.Recipe())
    assert repeats.last()
    fp8attn.cuda_sdpa(*operands_of_it)
    assert repeats.last()


def test_another_recipe_is_another_call(repeats: Repeats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept side by side; of the same plain tensors."""
    asked: list[bool] = []
    monkeypatch.setattr(
        cuda_run, "library_of", lambda config, device, original=cuda_run.library_of: asked.append(config.int8) or original(config, device)
    )
    q, k, v = (torch.randn(2, 20, 1100, 128).bfloat16() for _ in range(3))
    for _ in range(2):
        fp8attn.cuda_sdpa(q, k, v), fp8attn.cuda_sdpa(q, k, v, recipe=fp8attn.Recipe(qk="int8"))
    assert not any(repeats.hits) and set(asked[: len(asked) // 4]) == {False} and set(asked) == {False, True}
    for recipe in (fp8attn.Recipe(), fp8attn.PRECISE):
        fp8attn.cuda_sdpa(q, k, v, recipe=recipe)
        assert repeats.last()
    fp8attn.cuda_sdpa(q, k, v, recipe=fp8attn.Recipe(rotate=256))  # of Triton's quantizer: nothing to keep
    assert repeats.hits == [False] * 4 + [True] * 2 + [False]


@pytest.mark.parametrize(
    "options", ({}, dict(heads_last=True), dict(mask=torch.bool), dict(is_causal=True, return_lse=True, out_dtype=torch.float32))
)
def test_what_is_warmed_up_is_repeated(repeats: Repeats, options: dict) -> None:
    fp8attn.warmup(((1, 4, 300, 128), (1, 2, 700, 128)), device="cpu", backend="cuda", enable_gqa=True, **options)
    assert not any(repeats.hits)
    q, k, v = (torch.randn(1, 300 if heads == 4 else 700, heads, 128).bfloat16().transpose(1, 2) for heads in (4, 2, 2))
    if not options.pop("heads_last", False):
        q, k, v = (x.contiguous() for x in (q, k, v))
    mask = torch.ones(300, 700, dtype=torch.bool) if options.pop("mask", None) else None
    fp8attn.cuda_sdpa(q, k, v, mask, enable_gqa=True, **options)
    assert repeats.last()


@pytest.mark.parametrize("options", (dict(window=(40, 0)), dict(window=[-1, 17], causal_alignment="bottom_right"), dict(softcap=30.0)))
def test_windows_and_soft_caps_are_kept(repeats: Repeats, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.implementations, "unsmoothed_lse", lambda lse, *_, **__: function(lse, out := torch.empty_like(lse)) or out)
    x = operands()
    kept(*x)()
    assert repeats.last()
    alike(lambda: fp8attn.cuda_sdpa(*x, **options))
    for other in (dict(window=(41, 0)), dict(softcap=31.0)):
        fp8attn.cuda_sdpa(*x, **other)
        assert not repeats.last()


@pytest.mark.parametrize("plain", (False, True))
@pytest.mark.parametrize("options", ({}, dict(window=(40, 0)), dict(return_lse=True)))
def test_sinks_are_kept(plain: bool, options: dict, repeats: Repeats, without_torch: None) -> None:
    """Those of the call are read. What they are is nothing to a launch."""
    x = tuple(torch.randn(2, 20, 600, 128).bfloat16() for _ in range(3)) if plain else operands()
    heads = x[0].shape[1]
    sinks = torch.zeros(heads)
    alike(lambda: fp8attn.cuda_sdpa(*x, sinks=sinks, **options), addresses=not plain)
    for other in (torch.ones(heads), sinks.fill_(3.0)):
        fp8attn.cuda_sdpa(*x, sinks=other, **options)
        assert repeats.last() and told().sinks == other.data_ptr()
    fp8attn.cuda_sdpa(*x, **options)
    assert not repeats.last()
    for wrong, said in ((torch.zeros(heads + 1), "sinks has shape"), (torch.zeros(heads).half(), "sinks is torch.float16")):
        for _ in range(3):
            with pytest.raises((TypeError, ValueError), match=said):
                fp8attn.cuda_sdpa(*x, sinks=wrong, **options)
    with pytest.raises(RuntimeError, match="sinks requires grad"):
        fp8attn.cuda_sdpa(*x, sinks=torch.zeros(heads, requires_grad=True), **options)


def packed(lengths: tuple[int, ...] = (130, 0, 17, 40), heads: int = 4, kv_heads: int = 2, dim: int = 64) -> tuple[torch.Tensor, ...]:
    """q, k, v and cu_seqlens of packed sequences."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v = (torch.randn(tokens, n, dim, generator=generator).bfloat16() for n in (heads, kv_heads, kv_heads))
    return q, k, v, torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32)


PACKED: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": dict(is_causal=True),
    "window": dict(window=(40, 0)),
    "soft cap": dict(softcap=30.0),
    "sinks": dict(sinks=torch.zeros(4)),
    "LSE": dict(return_lse=True, is_causal=True),
    "used keys": dict(seqused_k=torch.tensor([100, 0, 17, 7], dtype=torch.int32)),
    "longest": dict(max_seqlen_q=300, max_seqlen_k=300, out_dtype=torch.float32, scale=0.3),
}


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("backend", ("cuda", "auto"))
@pytest.mark.parametrize("stored", (False, True))
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_launch_the_same(name: str, stored: bool, backend: str) -> None:
    """Of plain and of quantized operands."""
    q, k, v, cu_seqlens = packed()
    options = dict(PACKED[name])
    if stored:
        used = options.pop("seqused_k", None)
        q, k, v = fp8attn.quantize(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, seqused_k=used)
    alike(lambda: fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, backend=backend, **options), addresses=stored)
    p = told()
    assert p.tile_table and p.counter == p.tile_table + 4 * TABLE_HEADER.index("taken") and bool(p.sinks) == ("sinks" in options)
    capped = "sinks" in options or "softcap" in options
    assert bool(p.q_scale) == stored and bool(p.mean_scores) == (stored and capped) and bool(p.lse) == ("return_lse" in options)
    assert bool(p.lse_mean) == (not stored and (capped or bool(p.lse)))


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("stored", (False, True))
def test_lengths_of_this_call_are_read(stored: bool, repeats: Repeats) -> None:
    """Not those of the recorded one: kernels get the addresses of this call's lengths."""
    _, library = emulation.binding()
    library.expect_words(6)
    used = torch.tensor([100, 0, 17, 7], dtype=torch.int32)
    for i, lengths in enumerate(((130, 0, 17, 40), (7, 80, 0, 100), (0, 0, 0, 187), (1, 2, 3, 181))):
        q, k, v, cu_seqlens_q = packed(lengths)
        cu_seqlens_k = cu_seqlens_q.clone()
        of_q, of_k = cu_seqlens_q, cu_seqlens_k
        if stored:  # which hold their lengths
            query = fp8attn.quantize(q, cu_seqlens_q=cu_seqlens_q)
            q, (k, v) = query, fp8attn.quantize(None, k, v, cu_seqlens_k=cu_seqlens_k, seqused_k=used)
            of_q, of_k = ((None, None), (cu_seqlens_q, None))[i % 2]
        fp8attn.varlen_sdpa(q, k, v, of_q, of_k, seqused_k=None if stored else used, backend="cuda")
        assert repeats.last() == (i > 1)
        if i > 1:  # the last function writes the table of tiles
            number, *addresses, _, table = library.launched_function()[7:13]
            assert number == TABLE and addresses == [x.data_ptr() for x in (cu_seqlens_q, cu_seqlens_k, used)]
            assert told().tile_table == table
    used.fill_(0)
    fp8attn.varlen_sdpa(q, k, v, of_q, of_k, seqused_k=None if stored else used, backend="cuda")
    assert repeats.last()


@pytest.mark.usefixtures("without_torch")
def test_other_packed_calls_are_planned_anew(repeats: Repeats) -> None:
    q, k, v, cu_seqlens = packed()
    sinks, used = torch.zeros(4), torch.full((4,), 5, dtype=torch.int32)
    lengths = cu_seqlens, cu_seqlens

    def call(*operands: Any, **options: Any) -> torch.Tensor:
        return fp8attn.varlen_sdpa(*(operands or (q, k, v, *lengths)), backend="cuda", **options)

    for _ in range(3):
        call()
    assert repeats.last()
    more = torch.tensor([0, 50, 100, 120, 150, 187], dtype=torch.int32)
    quantized = fp8attn.quantize(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    others: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: call(q[:180], k, v, *lengths), lambda: call(q, k[:180], v[:180], *lengths), lambda: call(q, k, v, more, more),
        lambda: call(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, *lengths), lambda: call(is_causal=True), lambda: call(sinks=sinks),
        lambda: call(seqused_k=used), lambda: call(max_seqlen_q=300), lambda: call(max_seqlen_k=300), lambda: call(max_seqlen_k=299),
        lambda: call(window=(3, 0)), lambda: call(softcap=1.0), lambda: call(scale=1.0), lambda: call(return_lse=True),
        lambda: call(out_dtype=torch.float32), lambda: call(*quantized, None, None), lambda: call(quantized[0], k, v, None, cu_seqlens),
        lambda: call(q.half(), k.half(), v.half(), *lengths), lambda: call(q.new_zeros(q.numel() + 1)[1:].view(q.shape), k, v, *lengths),
    )  # fmt: skip
    for other in others:
        other()
        assert not repeats.last()
    for other in others:
        other()
    for other in (*others, call):
        other()
        assert repeats.last()
    fp8attn.varlen_sdpa(q, k, v, *lengths, backend="auto")
    assert not repeats.last()
    eager.forget()
    call()
    assert not repeats.last()


WRONG_PACKED: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "lengths of int64": (lambda x: dict(cu_seqlens_q=x.long()), "cu_seqlens_q is torch.int64"),
    "no lengths": (lambda x: dict(cu_seqlens_k=None), "cu_seqlens_k is None"),
    "lengths of fewer": (lambda x: dict(cu_seqlens_k=x[:-1]), "cu_seqlens_k is of 3 sequences"),
    "lengths that aren't contiguous": (lambda x: dict(cu_seqlens_q=x.repeat_interleave(2)[::2]), "cu_seqlens_q has strides"),
    "lengths that are no tensor": (lambda x: dict(cu_seqlens_q=x.tolist()), "cu_seqlens_q is a list"),
    "used keys of others": (lambda x: dict(seqused_k=x), "seqused_k has shape"),
    "longest of another type": (lambda x: dict(max_seqlen_q=True), "max_seqlen_q is a bool"),
    "a negative longest": (lambda x: dict(max_seqlen_k=-1), "max_seqlen_k is -1"),
    "a flag that is a number": (lambda x: dict(is_causal=0), "is_causal is a int"),
    "a recipe for other calls": (lambda x: dict(recipe=fp8attn.Recipe(smooth_q=True)), "recipe.smooth_q"),
    "recipe": (lambda x: dict(recipe="fast"), "recipe is a str"),
    "sinks of other heads": (lambda x: dict(sinks=torch.zeros(3)), "sinks has shape"),
}


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("name", WRONG_PACKED)
def test_errors_of_packed_sequences_stay_as_they_are(name: str) -> None:
    """After calls that differ in nothing else; also where numbers are equal and types aren't."""
    q, k, v, cu_seqlens = packed()
    right = dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, backend="cuda")
    for options in ({}, dict(max_seqlen_q=1), dict(seqused_k=cu_seqlens[1:].contiguous()), dict(sinks=torch.zeros(4))):
        for _ in range(3):
            fp8attn.varlen_sdpa(**right, **options)
    wrong, said = WRONG_PACKED[name]
    for _ in range(3):
        with pytest.raises((TypeError, ValueError), match=said):
            fp8attn.varlen_sdpa(**(right | wrong(cu_seqlens)))


@pytest.mark.usefixtures("without_torch")
def test_lengths_of_other_operands_are_refused(repeats: Repeats) -> None:
    """Quantized operands hold their lengths. Other ones must not be given, not even with the same numbers."""
    q, k, v, cu_seqlens = packed()
    quantized = fp8attn.quantize(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    for _ in range(3):
        fp8attn.varlen_sdpa(*quantized, cu_seqlens, None, backend="cuda")
    assert repeats.last()
    for _ in range(3):
        with pytest.raises(ValueError, match="cu_seqlens_q isn't the tensor that q was quantized with"):
            fp8attn.varlen_sdpa(*quantized, cu_seqlens.clone(), None, backend="cuda")


APPEND, ATTEND = 5, 6
"""The numbers of Triton's launches for a cache."""


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are on an H100. Triton's launches, which do nothing, get the addresses of all tensors."""

    def append(storage, key, value, batch, recipe, device, stage):
        if recording.current() is not None:
            function(key, value, *batch.tensors(), *storage.tensors(), number=APPEND)

    def attend(call, device, out_dtype):
        out, lse = call.q.new_empty(call.q.shape, dtype=out_dtype), call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
        if recording.current() is not None:
            function(call.q, *call.batch.tensors(), *call.storage.tensors(), out, lse, number=ATTEND)
        return out, lse

    monkeypatch.setattr(paged_ops, "device_of", lambda device: H100)
    monkeypatch.setattr(paged_ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(triton_kernels.paged_append, "append", append)
    monkeypatch.setattr(triton_kernels.paged_attention, "attend", attend)


@dataclasses.dataclass
class Step:
    """A step of three sequences of a cache, each with tensors of its own."""

    tokens: int = 1
    pages: int = 5
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = fp8attn.KVCache(3, self.pages, 2, 64, device="cpu")
        self.batch = PagedBatch(torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 200, dtype=torch.int32), **self.options)
        self.query, self.key, self.value = (torch.zeros(3, heads, self.tokens, 64).bfloat16() for heads in (8, 2, 2))

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        return [*self.batch.tensors(), *self.cache.storage.tensors()]

    def append(self, backend: str = "triton") -> None:
        assert self.cache.append(self.key, self.value, self.batch, backend=backend) is None

    def attend(self, new: bool = False, backend: str = "cuda", **options: Any) -> Any:
        return fp8attn.paged_sdpa(self.query, self.cache, self.batch, (self.key, self.value) if new else None, backend=backend, **options)


def addresses_of(tensors: list[torch.Tensor | None]) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


@pytest.mark.usefixtures("cached")
def test_appends_are_kept(repeats: Repeats) -> None:
    """One plan serves the caches of all layers: kernels get the addresses of this call's cache, and write to it."""
    _, library = emulation.binding()
    for i in range(5):
        step = Step()
        library.expect_words(18 if i > 1 else 0)
        step.append()
        assert repeats.last() == (i > 1)
        if i > 1:
            assert library.launched_function()[7:25] == [APPEND, *addresses_of([step.key, step.value, *step.tensors])]
    step.append(backend="modelled")
    assert not repeats.last()


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("tokens", (1, 70))
def test_appends_by_the_cuda_kernel_are_kept(tokens: int, repeats: Repeats) -> None:
    _, library = emulation.binding()
    for i in range(4):
        step = Step(tokens=tokens, options=dict(sequences=torch.arange(3).int()))
        step.append(backend="cuda")
        assert repeats.last() == (i > 1)
        buffer = ctypes.create_string_buffer(ctypes.sizeof(emulation.AppendParams))
        library.recorded_append(buffer)
        p, storage = emulation.AppendParams.from_buffer_copy(buffer), step.cache.storage
        given = dict(zip(("page_table", "lengths", "counts", "sequences", "cu_seqlens"), step.batch.tensors(), strict=True))
        given |= dict(k=step.key, v=step.value, recent_k=storage.k, recent_v=storage.v, k_pages=storage.pages.k, v_pages=storage.pages.v)
        for name, x in given.items():
            assert getattr(p, name) == (None if x is None else x.data_ptr()), name


def decoded() -> emulation.DecodeParams:
    """DecodeParams of the last launch."""
    _, library = emulation.binding()
    buffer = ctypes.create_string_buffer(library.decode_params_size())
    library.recorded_decode(buffer)
    return emulation.DecodeParams.from_buffer_copy(buffer)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("options", ({}, dict(return_lse=True, scale=0.3), dict(out_dtype=torch.float32)))
@pytest.mark.parametrize("of_batch", ({}, dict(max_length=300), dict(counts=torch.ones(3, dtype=torch.int32), sequences=torch.arange(3).int())))
def test_decode_steps_are_kept(of_batch: dict, options: dict, repeats: Repeats) -> None:
    """The CUDA kernel's."""
    firsts = []
    for i in range(4):
        step = Step(options=of_batch)
        found = step.attend(**options)
        assert repeats.last() == (i > 1)
        out, *lse = found if isinstance(found, tuple) else (found,)
        p, storage = decoded(), step.cache.storage
        for name, x in zip(("page_table", "lengths", "counts", "sequences", None, "k", "k_scale", "v", "v_page_scale"), step.tensors, strict=False):
            if name is None:  # cu_seqlens, which it doesn't take
                continue
            assert getattr(p, name) == (None if x is None else x.data_ptr()), name
        assert (p.q, p.out) == (step.query.data_ptr(), out.data_ptr()) and all(p.lse == x.data_ptr() for x in lse)
        assert (p.recent_k, p.recent_v, p.tickets) == tuple(x.data_ptr() for x in (storage.k, storage.v, storage.tickets))
        assert bytes(p.maps)[:8] == step.cache.storage.pages.k.data_ptr().to_bytes(8, sys.byteorder)
        firsts.append((described(found), bytes(p)[emulation.DecodeParams.q_strides.offset :]))
    assert len({*firsts}) == 1


@pytest.mark.usefixtures("cached")
def test_a_step_that_appends_and_attends_is_one_call(repeats: Repeats) -> None:
    _, library = emulation.binding()
    for i in range(4):
        step = Step()
        repeats.hits.clear()
        library.expect_words(18 if i > 1 else 0)  # an append has no more
        out, _ = step.attend(new=True, return_lse=True, backend="triton")
        assert repeats.hits == [True] if i > 1 else not any(repeats.hits)
        if i > 1:
            assert library.launched_function()[7:25] == [ATTEND, *addresses_of([step.query, *step.tensors, out])]


@pytest.mark.usefixtures("cached")
def test_other_calls_of_a_cache_are_planned_anew(repeats: Repeats) -> None:
    ones = torch.ones(3, dtype=torch.int32)
    for _ in range(3):
        Step().append(), Step().attend()
        hits = repeats.hits[-2:]
    assert hits == [True, True]
    narrow = Step()
    narrow.batch = dataclasses.replace(narrow.batch, page_table=torch.zeros(3, 8, dtype=torch.int32)[:, :4])
    others: tuple[Callable[[], Any], ...] = (
        Step(tokens=2).append, Step(options=dict(counts=ones)).append, Step(options=dict(sequences=ones)).append, Step(pages=6).append,
        Step(tokens=2).attend, Step(options=dict(counts=ones)).attend, Step(options=dict(max_length=300)).attend, Step(pages=6).attend,
        narrow.append, narrow.attend, lambda: Step().attend(scale=0.3), lambda: Step().attend(return_lse=True),
        lambda: Step().attend(backend="triton"), lambda: Step().attend(out_dtype=torch.float16), lambda: Step().attend(new=True, backend="triton"),
    )  # fmt: skip
    for other in others:
        repeats.hits.clear()
        other()
        assert not repeats.hits[0]
    for other in others:
        other()
    for other in others:
        other()
        assert repeats.last()
    eager.forget()
    Step().attend()
    assert not repeats.last()


@pytest.mark.usefixtures("cached")
def test_a_long_prefill_is_one_call(repeats: Repeats) -> None:
    """Which appends pages, attends, and appends the last tokens."""
    for i in range(4):
        repeats.hits.clear()
        Step(tokens=70).attend(new=True, backend="triton")
        assert repeats.hits == [i > 1]


@pytest.mark.usefixtures("cached")
def test_windows_caps_sinks_and_packed_steps_are_kept(repeats: Repeats) -> None:
    """Other windows and soft caps are other calls. Sinks are one more tensor."""
    for option in (dict(window=(5, 0)), dict(window=(6, 0)), dict(softcap=2.0), {}):
        for i in range(4):
            Step().attend(new=True, backend="triton", **option)
            assert repeats.last() == (i > 1)
    for i in range(3):
        Step().attend(new=True, backend="triton", sinks=torch.zeros(8))
        assert repeats.last() == (i > 0)
    for window in ((5, 0), (6, 0)):
        for i in range(4):
            step = Step()
            batch = dataclasses.replace(step.batch, cu_seqlens=torch.tensor([0, 1, 2, 3], dtype=torch.int32))
            query, key, value = (x.squeeze(2) for x in (step.query, step.key, step.value))
            fp8attn.paged_sdpa(query, step.cache, batch, (key, value), window=window, backend="triton")
            assert repeats.last() == (i > 1)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cached`, for caches of other engines."""

    def write(cache, key, value, slots, device):
        if recording.current() is not None:
            function(key, value, slots, cache.k, cache.v, cache.k_scale, cache.v_scale, number=APPEND)

    def append(cache, key, value, batch, device):
        if recording.current() is not None:
            function(key, value, *batch.tensors()[:3], cache.k, cache.v, cache.k_scale, cache.v_scale, number=APPEND)

    def attend(query, cache, batch, how, device, out_dtype):
        out, lse = query.new_empty(query.shape, dtype=out_dtype), query.new_empty(query.shape[:3], dtype=torch.float32)
        if recording.current() is not None:
            function(query, *batch.tensors()[:3], cache.k, cache.v, cache.k_scale, cache.v_scale, how.sinks, out, lse, number=ATTEND)
        return out, lse

    monkeypatch.setattr(paged_ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(triton_kernels.paged_tensors, "write", write)
    monkeypatch.setattr(triton_kernels.paged_tensors, "append", append)
    monkeypatch.setattr(triton_kernels.paged_tensors, "attend", attend)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("fp8", (False, True))
def test_calls_on_caches_of_other_engines_are_kept(fp8: bool, repeats: Repeats) -> None:
    """One plan serves the caches of all layers. Other windows, soft caps and lengths of the longest sequence are other calls."""
    _, library = emulation.binding()

    def call(written: bool, attended: bool, **options: Any) -> None:
        """Write and attend, whichever is repeated."""
        k, v = (torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        scales = [torch.ones(2), torch.ones(5, 16, 2)] if fp8 else [None, None]
        cache = fp8attn.PagedTensors(*(x.to(torch.float8_e4m3fn) if fp8 else x for x in (k, v)), *scales)
        batch = PagedBatch(torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 20, dtype=torch.int32), max_length=options.pop("max_length", None))
        query, new, slots, sinks = torch.zeros(3, 8, 1, 64).bfloat16(), torch.zeros(3, 2, 64).bfloat16(), torch.zeros(3).long(), torch.ones(8)
        tensors = [cache.k, cache.v, *scales]
        library.expect_words(8 if written else 0)
        assert fp8attn.write_to_pages(new, new, cache, slots, backend="triton") is None
        assert repeats.last() == written
        if written:
            assert library.launched_function()[7:15] == [APPEND, *addresses_of([new, new, slots, *tensors])]
        library.expect_words(12 if attended else 0)
        out, lse = fp8attn.paged_sdpa(query, cache, batch, sinks=sinks, return_lse=True, backend="triton", **options)
        assert repeats.last() == attended
        if attended:
            assert library.launched_function()[7:19] == [ATTEND, *addresses_of([query, *batch.tensors()[:3], *tensors, sinks, out, lse])]

    for i in range(4):
        call(i > 1, i > 1)
    for options in (dict(window=(5, 0)), dict(softcap=2.0), dict(max_length=30), dict(scale=0.3)):
        for i in range(3):
            call(True, i > 1, **options)


@pytest.mark.usefixtures("foreign")
def test_new_tokens_for_caches_of_other_engines_are_one_call(repeats: Repeats) -> None:
    """Which writes and attends; and one that writes a batch's tokens alone."""
    _, library = emulation.binding()

    def inputs() -> tuple[fp8attn.PagedTensors, PagedBatch, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        k, v = (torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        batch = PagedBatch(torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 20, dtype=torch.int32))
        new = torch.zeros(3, 2, 1, 64).bfloat16(), torch.zeros(3, 2, 1, 64).bfloat16()
        return fp8attn.PagedTensors(k, v), batch, torch.zeros(3, 8, 1, 64).bfloat16(), new

    for i in range(4):
        cache, batch, query, new = inputs()
        repeats.hits.clear()
        library.expect_words(10 if i > 1 else 0)  # of what is written, fewer than of attention
        fp8attn.paged_sdpa(query, cache, batch, new, backend="triton")
        assert repeats.hits == [True] if i > 1 else not any(repeats.hits)
    for i in range(4):
        cache, batch, _, new = inputs()
        library.expect_words(10 if i > 1 else 0)
        assert fp8attn.write_to_pages(*new, cache, batch, backend="triton") is None
        assert repeats.last() == (i > 1)
        if i > 1:
            assert library.launched_function()[7:17] == [APPEND, *addresses_of([*new, *batch.tensors()[:3], cache.k, cache.v, None, None])]


@pytest.mark.parametrize("fp8", (False, True))
def test_decode_steps_from_caches_of_other_engines_are_kept(fp8: bool, repeats: Repeats, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernel's, whose tensor maps are of this call's cache."""
    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: H100)
    for i in range(4):
        k, v = (torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        scales = [torch.ones(2), torch.ones(2)] if fp8 else [None, None]
        cache = fp8attn.PagedTensors(*(x.to(torch.float8_e4m3fn) if fp8 else x for x in (k, v)), *scales)
        batch = PagedBatch(torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 20, dtype=torch.int32))
        query, sinks = torch.zeros(3, 8, 1, 64).bfloat16(), torch.ones(8)
        out, lse = fp8attn.paged_sdpa(query, cache, batch, sinks=sinks, window=(9, 0), return_lse=True, backend="cuda")
        assert repeats.last() == (i > 1)
        p = decoded()
        given = dict(q=query, k=cache.k, v=cache.v, k_scale=scales[0], v_scale=scales[1], sinks=sinks, out=out, lse=lse)
        given |= dict(zip(("page_table", "lengths", "counts", "sequences"), batch.tensors(), strict=False))
        for name, x in given.items():
            assert getattr(p, name) == (None if x is None else x.data_ptr()), name
        assert bytes(p.maps)[:8] == cache.k.data_ptr().to_bytes(8, sys.byteorder) and (p.page, p.left, p.right) == (16, 9, 0)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("recipe", (None, fp8attn.Recipe()), ids=("e4m3", "half"))
@pytest.mark.parametrize("is_packed, passes", ((False, 1), (True, 1), (True, 3)))
def test_calls_whose_rows_are_copied_are_kept(
    is_packed: bool, passes: int, recipe: fp8attn.Recipe | None, repeats: Repeats, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """All launches of all passes, with one workspace."""

    def place(q, cache, batch, room, spans, results, number) -> None:
        if recording.current() is not None:
            function(q, batch.lengths, spans.keys, *results)

    def copy(cache, batch, room, spans, copies) -> None:
        if recording.current() is not None:
            function(cache.k, batch.page_table, spans.keys, copies.k, copies.v)

    def store_lse(packed, queries, lse) -> None:
        if recording.current() is not None:
            function(packed, queries, lse)

    monkeypatch.setattr(triton_kernels.paged_copies, "place", place)
    monkeypatch.setattr(triton_kernels.paged_copies, "copy", copy)
    monkeypatch.setattr(triton_kernels.paged_copies, "store_lse", store_lse)
    monkeypatch.setattr(triton_kernels.varlen, "table_of", table_by_a_function)
    monkeypatch.setattr(paged_tensors_ops, "device_of", lambda device: dataclasses.replace(H100, sm_count=4))
    if passes > 1:
        monkeypatch.setattr(paged_copies, "MOST_BYTES", 2 * 512 * 2 * 2 * 64 - 1)
        monkeypatch.setattr(paged_copies, "QUERIES_OF_PASS", 1)
    monkeypatch.setattr(paged_tensors_ops, "PACKED_ROWS", {True: 384, False: 384})
    for i in range(4):
        k = torch.zeros(40, 16, 2, 64).to(torch.bfloat16 if recipe else torch.float8_e4m3fn)
        scales = () if recipe else (torch.ones(2), torch.ones(2))
        cache = fp8attn.PagedTensors(k, k, *scales, recipe=recipe)
        batch = PagedBatch(torch.zeros(2, 32, dtype=torch.int32), torch.full((2,), 300, dtype=torch.int32))
        query = torch.zeros(2, 8, 200, 64).bfloat16()
        if is_packed:
            query = query[0, :, :].transpose(0, 1).contiguous()
            batch = dataclasses.replace(batch, cu_seqlens=torch.tensor([0, 1, 200], dtype=torch.int32), max_count=199)
        plan = paged_tensors_ops.plan_attention("cuda", query, cache, batch, Scoring(0.125))
        assert isinstance(plan, paged_tensors_ops.Packing) and plan.room.passes == passes
        fp8attn.paged_sdpa(query, cache, batch, return_lse=True, backend="cuda")
        assert repeats.last() == (i > 1)


@pytest.mark.usefixtures("without_torch", "cached")
@pytest.mark.parametrize("name", ("packed", "append", "attend"))
def test_modes_see_the_operators_of_other_functions_too(name: str, repeats: Repeats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their calls are kept as those of sdpa, and as many."""
    q, k, v, cu_seqlens = packed()
    step = Step()
    calls = {"append": step.append, "attend": step.attend}
    call = calls.get(name, lambda: fp8attn.varlen_sdpa(q, k, v, cu_seqlens, cu_seqlens, backend="cuda"))
    for _ in range(3):
        call()
    assert repeats.last()
    for mode in (OtherDispatch, OtherFunctions):
        with mode():
            call()
        assert not repeats.last()

    def inside(x: torch.Tensor) -> torch.Tensor:
        call()
        return x.sum()

    torch.func.vmap(inside)(torch.ones(3))
    assert not repeats.last()
    with torch.inference_mode():
        call()
    assert repeats.last()
    with forward_ad.dual_level():
        call()
    assert not repeats.last()
    monkeypatch.setattr(eager, "MOST", 3)
    for i in range(1, 6):
        fp8attn.cuda_sdpa(*operands(1, 1, 20), scale=1.0 * i)
        assert len(eager._launches) <= 3
    call()
    assert not repeats.last()


WRONG_STEPS: dict[str, tuple[Callable[[Step], Any], str]] = {
    "keys alone": (lambda s: fp8attn.paged_sdpa(s.query, s.cache, s.batch, (s.key, None), backend="cuda"), "value is a NoneType"),
    "no new tokens": (lambda s: fp8attn.paged_sdpa(s.query, s.cache, s.batch, (None, None), backend="cuda"), "key is a NoneType"),
    "lengths of int64": (lambda s: s.attend_to(lengths=s.batch.lengths.long()), "lengths is torch.int64"),
    "a table without strides": (lambda s: s.attend_to(page_table=torch.zeros(4, 3, dtype=torch.int32).t()), "page_table has shape"),
    "max_length": (lambda s: s.attend_to(max_length=-1), "max_length is -1"),
    "scale": (lambda s: s.attend(scale=True), "scale is a bool"),
    "dtype": (lambda s: s.attend(out_dtype=torch.int8), "out_dtype is torch.int8"),
    "a flag": (lambda s: s.attend(return_lse=0), "return_lse is a int"),
    "backend": (lambda s: s.attend(backend="other"), "backend is 'other'"),
    "heads": (lambda s: s.attend_with(query=s.query[:, :7]), "query has 7 heads"),
    "queries of another dtype": (lambda s: s.attend_with(query=s.query.half()), "query is torch.float16"),
    "queries that require grad": (lambda s: s.attend_with(query=s.query.requires_grad_()), "query requires grad"),
    "a batch that is none": (lambda s: s.attend_with(batch=s.batch.tensors()), "batch is a tuple"),
    "appended keys": (lambda s: s.append_with(key=s.key[:, :1]), "key has heads 1"),
    "appended values": (lambda s: s.append_with(value=s.value.float()), "value is torch.float32"),
    "a batch that is none, appended": (lambda s: s.append_with(batch=None), "batch is a NoneType"),
}


class WrongStep(Step):
    def attend_to(self, **others: Any) -> Any:
        return self.attend_with(batch=dataclasses.replace(self.batch, **others))

    def attend_with(self, **others: Any) -> Any:
        return fp8attn.paged_sdpa(**(dict(query=self.query, cache=self.cache, batch=self.batch, backend="cuda") | others))

    def append_with(self, **others: Any) -> None:
        self.cache.append(**(dict(key=self.key, value=self.value, batch=self.batch, backend="triton") | others))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("name", WRONG_STEPS)
def test_errors_of_a_cache_stay_as_they_are(name: str) -> None:
    """After calls that differ in nothing else."""
    for options in ({}, dict(scale=1.0), dict(return_lse=False)):
        for _ in range(3):
            Step().append(), Step().attend(**options)
    wrong, said = WRONG_STEPS[name]
    for _ in range(3):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=said):
            wrong(WrongStep())


def test_which_operands_there_are_is_part_of_a_call(repeats: Repeats) -> None:
    """Also of tensors with the same shape and dtype."""
    operators, _ = emulation.binding()
    x = torch.zeros(3)
    operators.record.default(CPU)
    recorded = [operators.recorded_tensor.default([3], [1], torch.float32, 0, False) for _ in range(2)]
    assert operators.keep.default(-5, [x, None, None], recorded[1:])
    assert len(operators.repeat.default(-5, [x, None, None])) == 1
    for others in ([None, x, None], [x, None], [x, None, x], [None, None, x], [x]):
        assert operators.repeat.default(-5, others) is None


def test_inference_mode_and_back(repeats: Repeats) -> None:
    q, k, v = operands()
    with torch.inference_mode():
        call = kept(q, k, v)
        assert call().is_inference() and repeats.last()
    assert not call().is_inference() and repeats.last()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    monkeypatch.setattr(eager, "MOST", 3)
    x = operands()
    for i in range(20):
        kept(*x, scale=1.0 + i)
        assert len(eager._launches) <= 3
    fp8attn.cuda_sdpa(*x, scale=20.0)
    assert repeats.last()


def test_what_the_binding_keeps_is_bounded(repeats: Repeats) -> None:
    x = operands()
    call = kept(*x)
    call()
    assert repeats.last()
    operators, _ = emulation.binding()
    for i in range(4096):
        operators.record.default(CPU)
        assert operators.keep.default(-1 - i, [torch.zeros(3)], [operators.recorded_tensor.default([3], [1], torch.float32, 0, False)]) is False
        operators.record.default(CPU)
        inputs, out = (operators.recorded_tensor.default([3], [1], torch.float32, 0, False) for _ in range(2))
        assert operators.keep.default(-1 - i, [torch.zeros(3)], [out])
    call()
    assert not repeats.last()
    call()
    assert repeats.last()


def test_lengths_that_never_come_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_run, "launch_of", planned := CountCalls(cuda_run.launch_of))
    for length in range(100, 110):
        fp8attn.cuda_sdpa(*operands(length=length))
    assert planned.count == 10


@pytest.mark.parametrize("wrong", ("strides", "device", "layout", "sinks"))
def test_a_second_call_is_refused_as_a_first_one_is(wrong: str, monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    """Though it would be recorded, with tensors that aren't the call's."""
    q, k, v = (torch.randn(1, 4, 300, 64).bfloat16() for _ in range(3))
    sinks = torch.zeros(4)
    bad = {
        "strides": (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, sinks),
        "device": (q, k.to("meta"), v, sinks),
        "layout": (q, k, v.to_sparse(), sinks),
        "sinks": (q, k, v, torch.zeros(3)),
    }[wrong]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return fp8attn.cuda_sdpa(q, k, v, sinks=sinks)

    with pytest.raises((TypeError, ValueError)) as first:
        call(*bad)
    call(q, k, v, sinks)
    with pytest.raises(type(first.value)) as second:
        call(*bad)
    assert str(second.value) == str(first.value)
    call(q, k, v, sinks)
    call(q, k, v, sinks)
    assert repeats.last()


def test_lengths_that_cannot_be_kept_leave_others(monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    """All have the same options. What can't be kept is tried once."""
    record, tried = recording.record, list[int]()

    def refuses_300(operators, implementations, number, tensors, outputs) -> bool:
        length = next(x.shape[2] for x in tensors if x is not None)
        tried.append(length)
        return length != 300 and record(operators, implementations, number, tensors, outputs)

    monkeypatch.setattr(recording, "record", refuses_300)
    for _ in range(4):
        for length in (300, 200, 100):
            fp8attn.cuda_sdpa(*operands(length=length))
    assert tried == [300, 200, 100] and repeats.hits == [False] * 6 + [False, True, True] * 2


@pytest.mark.parametrize("backend", ("auto", "cuda"))
def test_first_calls_are_checked_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They don't go through an operator, which would check again."""
    q, k, v = (torch.randn(1, 3, 700, 128).bfloat16() for _ in range(3))
    monkeypatch.setattr(ops, "library_ops", None)
    monkeypatch.setattr(ops.validate, "check_floats", lambda *_: pytest.fail("it checks again"))
    assert fp8attn.sdpa(q, k, v, backend=backend).shape == q.shape


class CountCalls:
    def __init__(self, function: Callable) -> None:
        self.function, self.count = function, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        return self.function(*arguments, **options)


def test_what_triton_runs_is_kept(monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    """Its kernels get this call's addresses, and are planned for the first call and the recording."""
    monkeypatch.setattr(ops, "plan_cuda", planned := CountCalls(lambda call, first: "not today"))

    def by_triton(call):
        out, lse = empty_output(call.q, call.value_dim, call.out_dtype), empty_lse(call.q, call.return_lse)
        if recording.current() is not None:
            rooms = [call.q.new_empty(300, dtype=torch.uint8), call.q.new_zeros(70, dtype=torch.int32), call.q.new_empty(3, dtype=torch.uint8)]
            function(call.q[:, 1:], call.k_scale, call.v_mean, call.attn_mask, out, *rooms, number=5)
        return out, lse

    monkeypatch.setattr(ops, "_by_triton", by_triton)
    _, library = emulation.binding()
    library.expect_words(9)
    for i in range(5):
        q, k, v = operands(1, 3, 20)
        mask = torch.zeros(1, 3, 20, 20)
        out = fp8attn.sdpa(q, k, v, mask)
        if i > 1:
            launched = library.launched_function()[:16]
            assert launched[:7] == [77, 3, 1, 1, 128, 64, 1] and launched[7] == 5
            assert launched[8:13] == [x.data_ptr() for x in (q.data[:, 1:], k.scale, v.mean, mask, out)]
            first, zeros, last = launched[13:]
            assert zeros % 16 == 0 and first >= zeros + 280 and last >= first + 300
    assert repeats.hits == [False] * 2 + [True] * 3 and planned.count == 1 + 1


def test_what_torch_computes_is_not_kept(monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    """A launch can't be all of it. It is planned for the first two calls and the recording, which isn't tried again."""
    monkeypatch.setattr(ops, "plan_cuda", planned := CountCalls(lambda call, first: "not today"))
    monkeypatch.setattr(ops, "_by_triton", lambda call: (empty_output(call.q, call.value_dim, call.out_dtype).fill_(3), empty_lse(call.q, False)))
    x = operands(1, 1, 20)
    for _ in range(5):
        assert (fp8attn.sdpa(*x) == 3).all()
    assert not any(repeats.hits) and planned.count == 5 + 1


def test_memory_of_others_is_not_kept(monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    """A launch that reads a tensor that is neither the call's nor made in it would read what may be gone."""
    other = torch.zeros(3)

    def by_triton(call):
        out, lse = empty_output(call.q, call.value_dim, call.out_dtype), empty_lse(call.q, call.return_lse)
        if recording.current() is not None:
            function(call.q, other, out)
        return out, lse

    monkeypatch.setattr(ops, "plan_cuda", lambda call, first: "not today")
    monkeypatch.setattr(ops, "_by_triton", by_triton)
    x = operands(1, 1, 20)
    for _ in range(5):
        fp8attn.sdpa(*x)
    assert not any(repeats.hits)


def test_arguments_of_a_kernel_are_packed_as_triton_passes_them() -> None:
    """Constants are no parameters; numbers fill the low bytes of their words."""
    recorded: list[tuple] = []
    operators = SimpleNamespace(record_function=SimpleNamespace(default=lambda *arguments: recorded.append(arguments)))
    metadata = dict(num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0, profile_scratch_size=0, num_warps=4, shared=99, name="f")
    kinds = {"x": "*fp32", "strides": ("i64", "i32", "constexpr"), "scale": "fp32", "flag": "i1", "none": "constexpr", "n": "i32"}
    compiled = SimpleNamespace(run=None, function=123, metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=kinds))
    x = torch.zeros(3)
    recorder = recording.Recorder(operators, CPU, {})
    recorder.kernel(compiled, (7, 2), (x, (1 << 40, -2, 1), 0.5, True, None, 6), True)
    words = [x.data_ptr(), 1 << 40, 0xFFFFFFFE, struct.unpack("<I", struct.pack("<f", 0.5))[0], 1, 6, 0, 0]
    assert recorded == [(123, (7, 2, 1, 128, 99), True, words, [0])]
    kinds["n"] = "tensordesc<fp8e4nv[64, 64]>"
    with pytest.raises(recording.NotRecordable, match="a kernel takes a tensordesc"):
        recorder.kernel(compiled, (7, 2), (x, (1 << 40, -2, 1), 0.5, True, None, 6), True)
    metadata["global_scratch_size"] = 8
    compiled.metadata = SimpleNamespace(**metadata)
    with pytest.raises(recording.NotRecordable, match="f is launched in a way of its own"):
        recorder.kernel(compiled, (7, 2), (), True)


@pytest.mark.parametrize("in_operator", (False, True))
@pytest.mark.parametrize("copies", (True, False))
def test_views_are_recorded_and_copies_are_not(copies: bool, in_operator: bool) -> None:
    """Functions that may be both tell by the tensor. Inside an operator, torch asks the mode for all of them."""

    def made(sizes: list[int], strides: list[int], dtype: torch.dtype, *_: object) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype)

    operators = SimpleNamespace(recorded_tensor=SimpleNamespace(default=made))
    x = torch.randn(4, 6).t() if copies else torch.randn(4, 6)
    either = (lambda: x.contiguous(), lambda: x.reshape(-1), lambda: x.flatten(), lambda: x.to(torch.float16 if copies else x.dtype))
    views = (lambda: x.expand(3, 4, 6)[..., 1:].transpose(0, 1), lambda: x.view(torch.int32).unbind())
    for function in either if copies else (*either, *views):
        with (
            pytest.raises(recording.NotRecordable, match="it calls aten") if copies else contextlib.nullcontext(),
            recording.Recorder(operators, CPU, {}),
            torch._C._AutoDispatchBelowAutograd() if in_operator else contextlib.nullcontext(),
        ):
            function()


def test_recording_does_not_import_dynamo() -> None:
    """It takes seconds, in the second call of a process."""
    program = """
import sys
from types import SimpleNamespace
import torch
from fp8attn import recording
made = torch.ones(3)
operators = SimpleNamespace(recorded_tensor=SimpleNamespace(default=lambda *arguments: made))
with recording.Recorder(operators, torch.device("cpu"), {}):
    found = torch.empty(3, device="cpu")
assert torch.equal(found, made)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("plain", (False, True))
def test_kernels_that_do_not_compile(plain: bool, monkeypatch: pytest.MonkeyPatch, repeats: Repeats) -> None:
    def fails(*_) -> build.Library:
        raise BuildError("no space left")

    x = tuple(torch.randn(1, 1, 20, 64).bfloat16() for _ in range(3)) if plain else operands(1, 1, 20)
    with monkeypatch.context() as patch:
        patch.setattr(build, "load_with", fails)
        for _ in range(4):
            with pytest.raises(BuildError, match="no space left"):
                fp8attn.cuda_sdpa(*x)
            with warnings.catch_warnings(record=True) as said:
                fp8attn.sdpa(*x)
            assert repeats.last() or "goes on with Triton" in str(said[0].message)
    assert repeats.hits == [False] * 5 + [True, False, True]  # Triton's launches are kept
    eager.forget()
    call = kept(*x)
    call()
    assert repeats.last()


def test_a_launch_that_fails_is_an_error_again(repeats: Repeats) -> None:
    call = kept(*operands())
    _, library = emulation.binding()
    library.fail_with(1)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the CUDA kernel wasn't launched: as the test says"):
                call()
    finally:
        library.fail_with(0)
    call()
    assert repeats.last()


def test_threads(repeats: Repeats) -> None:
    """Which keep calls and repeat them at once."""
    problems = [operands(length=length) for length in (100, 200, 300, 400)]
    wrong: list = []

    def work(i: int) -> None:
        for j in range(300):
            x = problems[(i + j) % len(problems)]
            out = fp8attn.cuda_sdpa(*x, scale=1.0 + j % 7)
            if out.shape != x[0].shape:
                wrong.append(out.shape)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(repeats.hits) == 1200 and sum(repeats.hits) > 1000
