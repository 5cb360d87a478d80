"""The operators as torch sees them: opcheck, torch.compile, inference mode, CUDA graphs, streams, threads, devices."""

from __future__ import annotations

import dataclasses
import functools
import threading

import pytest
import torch
from conftest import GPU, Attention
from torch.library import opcheck

import fp8attn
from fp8attn import Recipe, eager, ops
from fp8attn.backends import cuda_unavailable
from fp8attn.cuda.build import BuildError
from fp8attn.cuda.configs import INSTANCES
from fp8attn.ops import library_ops
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize_q

COMPILER = "inductor" if GPU else "aot_eager"
"""Without a GPU there may be no C++ compiler; what is under test, tracing with fake tensors, is the same."""

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")

E4M3_CHECKS = CHECKS[1:]
"""Of operators that take e4m3: whether inputs stay as they are torch would check by multiplying them, which e4m3 can't be."""


def untouched(operator, arguments: tuple) -> None:
    """What test_schema checks: no input changes, no output shares memory with one."""
    before = [x.clone() for x in arguments if isinstance(x, torch.Tensor)]
    outputs = operator(*arguments)
    inputs_ = [x for x in arguments if isinstance(x, torch.Tensor)]
    for x, y in zip(before, inputs_, strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
    storages = {x.untyped_storage().data_ptr() for x in inputs_}
    assert not [x for x in outputs if x.numel() and x.untyped_storage().data_ptr() in storages]


def fields_of(*operands: torch.Tensor, **options) -> tuple:
    """The arguments of a forward operator, as sdpa calls it."""
    call = call_of(*operands, **options)
    return tuple(getattr(call, field.name) for field in dataclasses.fields(call) if field.name != "lse_mean")


def inputs(device: torch.device, length: int = 200, dim: int = 64, value_dim: int = 40, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, 70, dim), (2, 2, length, dim), (2, 2, length, value_dim))
    return tuple(torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)


@pytest.mark.parametrize("given", ("q", pytest.param("kv", marks=[pytest.mark.compiles, pytest.mark.thorough]), "qkv"))
@pytest.mark.parametrize(
    "recipe",
    (
        Recipe(),
        Recipe(q="block", k="token", v="head", smooth_k=False, rotate=256, qk="int8"),
        Recipe(q="head", k="tensor", v="tensor", smooth_v=False),
        Recipe(smooth_q=True, rotate=0),
    ),
)
@pytest.mark.one_in(4)
def test_opcheck_quantize(device: torch.device, given: str, recipe: Recipe) -> None:
    q, k, v = inputs(device, value_dim=64)
    arguments = (q if "q" in given else None, *((k, v) if "k" in given else (None, None)))
    options = (recipe.q, recipe.k, recipe.v, recipe.smooth_k, recipe.smooth_v, recipe.smooth_q, recipe.rotate, recipe.qk)
    opcheck(library_ops.quantize, (*arguments, *options), test_utils=CHECKS)


def test_opcheck_score_bias(device: torch.device) -> None:
    q, k, _ = inputs(device, length=199)
    means = quantize_q(q, Recipe(smooth_q=True)).mean
    arguments = (means, k.to(torch.float8_e4m3fn), torch.ones(2, 2, 2, device=device), "block")
    opcheck(library_ops.score_bias, arguments, test_utils=E4M3_CHECKS)
    untouched(lambda *x: (library_ops.score_bias(*x),), arguments)


def test_opcheck_import_kv(device: torch.device) -> None:
    _, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(device))
    arguments = (k, torch.ones(2, 2, 2, device=device), "block", v)
    opcheck(library_ops.import_kv, arguments, test_utils=E4M3_CHECKS)
    untouched(library_ops.import_kv, arguments)


@pytest.mark.parametrize(
    "options, return_lse",
    (
        ({}, False),
        ({}, True),
        ({"is_causal": True, "causal_alignment": "bottom_right"}, True),
        ({"attn_mask": True}, False),
        ({"recipe": Recipe(smooth_q=True)}, True),
    ),
)
@pytest.mark.one_in(2)
def test_opcheck_forward(device: torch.device, sdpa: Attention, options: dict, return_lse: bool) -> None:
    q, k, v = inputs(device)
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.ones(70, 200, dtype=torch.bool, device=device).tril(100)
    arguments = fields_of(q, k, v, enable_gqa=True, return_lse=return_lse, **options)
    operator = {"triton": library_ops.triton_forward, "cuda": library_ops.cuda_forward}[sdpa.backend]
    opcheck(operator, arguments, test_utils=E4M3_CHECKS)
    untouched(operator, arguments)


@pytest.mark.parametrize(
    "options, dynamic",
    (
        pytest.param({}, False, marks=pytest.mark.thorough),
        ({}, True),
        pytest.param({"is_causal": True}, True, marks=pytest.mark.thorough),
        ({"return_lse": True}, False),
        ({"recipe": Recipe(k="token", smooth_v=False, smooth_q=True)}, True),
    ),
)
@pytest.mark.one_in(3)
def test_compiled_whole(device: torch.device, sdpa: Attention, options: dict, dynamic: bool) -> None:
    """fullgraph=True: no break anywhere from bfloat16 in to bfloat16 out; the same bits as eager, at a second length too."""
    torch._dynamo.reset()

    def attention(q, k, v):
        return fp8attn.sdpa(q + 1, k, v, enable_gqa=True, backend=sdpa.backend, **options)

    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend=COMPILER)
    for length in (200, 136):
        q, k, v = inputs(device, length)
        actual, expected = compiled(q, k, v), attention(q, k, v)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_inference_mode(device: torch.device) -> None:
    q, k, v = inputs(device)
    expected = fp8attn.triton_sdpa(q, k, v, enable_gqa=True)
    with torch.inference_mode():
        assert torch.equal(fp8attn.triton_sdpa(q, k, v, enable_gqa=True), expected)


def test_threads(device: torch.device) -> None:
    """Calls from many threads at once give each its own answer."""
    problems = [inputs(device, seed=seed) for seed in range(4)]
    expected = [fp8attn.triton_sdpa(*problem, enable_gqa=True) for problem in problems]
    answers: list = [None] * len(problems)

    def work(i: int) -> None:
        answers[i] = fp8attn.triton_sdpa(*problems[i], enable_gqa=True)

    if not GPU:
        pytest.skip("Triton's interpreter patches the language while it runs, for all threads")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for actual, wanted in zip(answers, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("value_dim", (40, 64))
@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"is_causal": True, "return_lse": True}))
def test_cuda_graph(device: torch.device, options: dict, value_dim: int) -> None:
    """Captured once, replayed with other inputs; what is captured repeats a call."""
    q, k, v = inputs(device, value_dim=value_dim)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fp8attn.sdpa(q, k, v, enable_gqa=True, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8attn.sdpa(q, k, v, enable_gqa=True, **options)
    others = inputs(device, value_dim=value_dim, seed=7)
    for x, other in zip((q, k, v), others, strict=True):
        x.copy_(other)
    graph.replay()
    eager.forget()
    expected = fp8attn.sdpa(*others, enable_gqa=True, **options)
    for actual, wanted in zip(captured, expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("length, value_dim", ((2048, 40), (500, 64)))
def test_side_stream(device: torch.device, length: int, value_dim: int) -> None:
    """Work goes to the current stream: it sees what was launched there before, and nothing of it runs elsewhere."""
    q, k, v = inputs(device, length, value_dim=value_dim)
    for _ in range(3):
        expected = fp8attn.sdpa(q * 2, k, v, enable_gqa=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        doubled = q * 2
        actual = fp8attn.sdpa(doubled, k, v, enable_gqa=True)
    stream.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_any_device_index() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = inputs(torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0
    elsewhere = tuple(x.to("cuda:0") for x in (q, k, v))
    for _ in range(4):
        out = fp8attn.sdpa(q, k, v, enable_gqa=True)
        assert out.device == q.device and torch.cuda.current_device() == 0
        assert torch.equal(out.cpu(), fp8attn.sdpa(*elsewhere, enable_gqa=True).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("cuda", "auto"))
@pytest.mark.parametrize("options", ({}, {"is_causal": True, "causal_alignment": "bottom_right"}, {"scale": -0.1}, {"out_dtype": torch.float32}))
@pytest.mark.parametrize("kind", ("quantized", "plain", "one launch"))
def test_calls_again_have_the_same_bits(device: torch.device, kind: str, options: dict, backend: str) -> None:
    """Also with other tensors at other addresses, and of threads at once."""
    if (missing := cuda_unavailable(device)) is not None:
        pytest.skip(missing)
    problems = [inputs(device, value_dim=64 if kind == "one launch" else 40, seed=seed) for seed in range(3)]
    if kind == "quantized":
        problems = [fp8attn.quantize(*x) for x in problems]

    def attention(x: tuple) -> torch.Tensor:
        return fp8attn.sdpa(*x, enable_gqa=True, backend=backend, **options)

    expected = []
    for x in problems:
        eager.forget()
        expected.append(attention(x))
    for _ in range(3):
        for x, wanted in zip(problems, expected, strict=True):
            assert torch.equal(attention(x), wanted)
    assert backend == "auto" or any(isinstance(launch, functools.partial) for launch in eager._launches.values())
    wrong: list[int] = []

    def work(i: int) -> None:
        for j in range(100):
            if not torch.equal(attention(problems[(i + j) % 3]), expected[(i + j) % 3]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_goes_on_with_triton_if_cuda_does_not_compile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(device)
    expected = fp8attn.triton_sdpa(q, k, v, enable_gqa=True)

    def fails(*arguments, **options):
        raise BuildError("the CUDA kernels don't compile here: no space left")

    monkeypatch.setattr(ops, "plan_cuda", lambda call, first=False: INSTANCES[0])
    monkeypatch.setattr(ops.cuda_run, "forward", fails)
    arguments = fields_of(q, k, v, enable_gqa=True)
    with pytest.warns(UserWarning, match="goes on with Triton: .*no space left"):
        out, _ = library_ops.auto_forward(*arguments)
    assert torch.equal(out, expected)
    with pytest.raises(BuildError):
        library_ops.cuda_forward(*arguments)


CU_SEQLENS = torch.tensor([0, 40, 70], dtype=torch.int32)


def packed_inputs() -> tuple[torch.Tensor, ...]:
    return tuple(x[0, :, :70].transpose(0, 1) for x in inputs(torch.device("cpu")))


@pytest.mark.anywhere
@pytest.mark.parametrize("recipe", (Recipe(), Recipe(rotate=0), Recipe(k="token", qk="int8")), ids=lambda recipe: recipe.text)
@pytest.mark.parametrize("is_packed", (False, True))
def test_calls_that_nobody_sees_run_no_operator(recipe: Recipe, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And have the bits of the operators."""

    def attention() -> torch.Tensor:
        if is_packed:
            return fp8attn.varlen_sdpa(*packed_inputs(), CU_SEQLENS, CU_SEQLENS, recipe=recipe, backend="modelled")
        return fp8attn.sdpa(*inputs(torch.device("cpu")), enable_gqa=True, recipe=recipe, backend="modelled")

    with monkeypatch.context() as patch:
        patch.setattr(ops, "is_plain", lambda: False)
        expected = attention()
    monkeypatch.setattr(ops, "library_ops", None)
    assert torch.equal(attention(), expected)


@pytest.mark.anywhere
@pytest.mark.parametrize("name, granularity", (("q", "block"), ("q", "head"), ("k", "head"), ("k", "tensor")))
def test_what_was_quantized_elsewhere_is_checked(name: str, granularity: str) -> None:
    """Packed sequences have scales of other granularities than these, whatever the shape of `scale`."""
    quantized = dict(zip("qkv", fp8attn.quantize(*packed_inputs(), cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS), strict=True))
    scale = torch.ones(1, quantized[name].shape[1], 70 // 128 + 2)
    quantized[name] = dataclasses.replace(quantized[name], granularity=granularity, scale=scale)
    with pytest.raises(ValueError, match="q_scale has shape" if name == "q" else "k_group is 0"):
        fp8attn.varlen_sdpa(*quantized.values(), None, None, backend="modelled")
