"""The public functions: what they accept, what they refuse and with which words, what they say about themselves."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import GPU
from torch.nn.attention.bias import causal_lower_right

import fp8attn
from cache_errors import CACHE_ERRORS
from fp8attn import BackendUnavailable, Quantized, Recipe, api, backends, prepare, recipe, validate
from fp8attn.backends import cuda_unavailable
from fp8attn.quantization import dequantize, values_layout
from operator_errors import OPERATOR_ERRORS
from rotary_errors import ROTARY_ERRORS
from tensors_errors import TENSORS_ERRORS
from varlen_errors import VARLEN_ERRORS

E4M3 = torch.float8_e4m3fn
KEEPING = Recipe(recent=128)
META = torch.device("meta")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).bfloat16()


Q, K, V = bf16(2, 4, 6, 32), bf16(2, 2, 9, 32), bf16(2, 2, 9, 16)
Q8, K8, V8 = (x.to(E4M3) for x in (Q, K, V))
SCALES = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}


def call(query=Q, key=K, value=V, attn_mask=None, **options) -> Callable[[], object]:
    """A call of the checks that every backend's call goes through."""
    return lambda: fp8attn.reference_sdpa(query, key, value, attn_mask, **({"enable_gqa": True} | options))


def full(**options) -> Callable[[], object]:
    return lambda: fp8attn.sdpa(Q, K, V, **({"enable_gqa": True} | options))


def keeping(query=Q, **options) -> Callable[[], object]:
    return lambda: fp8attn.sdpa(query, K, V, enable_gqa=True, recipe=KEEPING, **options)


def by_pages(k="block", **options) -> Callable[[], object]:
    return lambda: fp8attn.sdpa(Q, K, V, enable_gqa=True, recipe=Recipe(statistics="page", k=k), **options)


def cached(**options) -> Callable[[], object]:
    return call(Q8, K8, V8, **(SCALES | options))


def quantized(layout: str = "rows") -> Quantized:
    return Quantized(K8, torch.ones(1, 1, 1), "tensor", layout, 9)


Q_16 = Quantized(Q8, torch.ones(1, 1, 1), "tensor", "rows", 6, rotated=16)
K_TENSOR = quantized()
V_TENSOR = Quantized(values_layout(V8), torch.ones(1, 1, 1), "tensor", "values", 9)
SMOOTH_Q = Recipe(smooth_q=True)
KV_SCALES = {"k_scale": 1.0, "v_scale": 1.0}
BIAS = torch.zeros(2, 4, 1, 12)


def smoothed(**fields) -> Quantized:
    """Q, its mean removed."""
    one = torch.ones(1, 1, 1)
    return dataclasses.replace(Quantized(Q8, one, "tensor", "rows", 6, torch.zeros(2, 4, 1, 32), bias=BIAS), **fields)


def needs_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


class Subclass(torch.Tensor):
    pass


def with_tangent(name: str) -> object:
    arguments = {"query": Q.float(), "key": K.float(), "value": V.float()}

    def attention(x: torch.Tensor) -> torch.Tensor:
        return fp8attn.sdpa(**(arguments | {name: x}), enable_gqa=True)

    return torch.func.jvp(attention, (arguments[name],), (arguments[name],))


def replaced(name: str, **fields) -> Callable[[], object]:
    """A call of quantized operands, fields of one replaced."""
    operands = {"query": dataclasses.replace(Q_16, rotated=0), "key": K_TENSOR, "value": V_TENSOR}
    return call(**(operands | {name: dataclasses.replace(operands[name], **fields)}))


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (call(query=[1.0]), TypeError, "query is a list; it must be a torch.Tensor"),
    (call(key=K[0]), ValueError, r"key has shape \(2, 9, 32\); it must be \(batch, heads, length, head_dim\)"),
    (call(value=V.double()), TypeError, "value is torch.float64; it must be one of"),
    (call(query=Q.transpose(2, 3)), ValueError, r"query has strides .*; the last must be 1"),
    (call(query=bf16(2, 4, 6, 20), key=bf16(2, 2, 9, 20)), ValueError, "query has head_dim 20; it must be a multiple of 8 from 16 to 256"),
    (call(value=bf16(2, 2, 9, 264)), ValueError, "value has head_dim 264; it must be"),
    (call(query=quantized("values")), ValueError, "query is Quantized in the layout 'values'; it must be 'rows'"),
    (call(key=K.to(META)), ValueError, "key is on meta; it must be on query's device, cpu"),
    (call(key=bf16(3, 2, 9, 32)), ValueError, "key has batch 3; it must be query's, 2, or 1"),
    (call(query=Q[:1], value=bf16(3, 2, 9, 16)), ValueError, "value has batch 3; it must be key's, 2, or 1"),
    (call(value=bf16(2, 4, 9, 16)), ValueError, "value has 4 heads; it must have as many as key, 2"),
    (call(value=V[:, :, :8]), ValueError, "value has length 8; it must be key's, 9"),
    (call(key=bf16(2, 2, 9, 64)), ValueError, "key has head_dim 64; it must be query's, 32"),
    (call(enable_gqa=False), ValueError, "query has 4 heads and key 2; they must be equal, or one of them 1, unless enable_gqa=True"),
    (call(query=bf16(2, 3, 6, 32)), ValueError, "query has 3 heads; with enable_gqa it must be a multiple of key's 2"),
    (call(value=V8.view(torch.int8)), TypeError, r"value is torch.int8; it must be one of .*, or e4m3 as \(.*uint8\) with its scale"),
    (
        call(
            query=Quantized(Q8.view(torch.int8), torch.ones(1, 1, 1), "tensor", "rows", 6),
            key=quantized(),
            value=dataclasses.replace(quantized("values"), data=values_layout(V8)),
        ),
        TypeError,
        "query is stored as torch.int8, key as torch.float8_e4m3fn; both must be quantized with recipes of the same `qk`",
    ),
    (call(key=K8, k_scale=1.0), TypeError, "key is torch.float8_e4m3fn and value torch.bfloat16; both must be"),
    (call(key=K.half()), TypeError, "key is torch.float16; it must be query's torch.bfloat16"),
    (call(value=V.float()), TypeError, "value is torch.float32; it must be query's torch.bfloat16"),
    (call(query=Q.as_subclass(Subclass)), TypeError, "query is a Subclass, a subclass of torch.Tensor; it must be a torch.Tensor"),
    (call(attn_mask=torch.ones(6, 9).as_subclass(Subclass)), TypeError, "attn_mask is a Subclass, a subclass of torch.Tensor"),
    (call(query=torch.nested.nested_tensor([torch.randn(4, 6, 32)] * 2)), TypeError, "query is a nested tensor; it must be a torch.Tensor"),
    (call(key=K.to_sparse()), TypeError, "key has the layout torch.sparse_coo; it must be torch.strided"),
    (call(attn_mask=causal_lower_right(6, 8)), ValueError, r"attn_mask is a CausalBias of lengths \(6, 8\); it must be of \(Sq, Sk\) = \(6, 9\)"),
    (call(attn_mask=causal_lower_right(6, 9), is_causal=True), ValueError, "attn_mask is given and is_causal is True"),
    (lambda: with_tangent("query"), RuntimeError, "query has a tangent; fp8attn has no forward-mode derivative"),
    (lambda: with_tangent("value"), RuntimeError, "value has a tangent"),
    (cached(k_scale=needs_grad(torch.ones(1))), RuntimeError, "k_scale requires grad"),
    (replaced("key", scale=needs_grad(torch.ones(1, 1, 1))), RuntimeError, "key.scale requires grad"),
    (replaced("query", data=Q8[0]), ValueError, r"query.data has shape \(4, 6, 32\); it must have 4 dimensions"),
    (replaced("query", data=Q8.transpose(2, 3)), ValueError, "query.data has strides .*; the last must be 1"),
    (replaced("query", data=Q), TypeError, "query.data is torch.bfloat16; it must be torch.float8_e4m3fn or torch.int8"),
    (replaced("key", scale=1.0), TypeError, "key.scale is a float; it must be a torch.Tensor"),
    (replaced("key", scale=torch.ones(2, 2, 9)), ValueError, r"key.scale has shape \(2, 2, 9\); it must be \(1, 1, 1\)"),
    (replaced("key", granularity="channel"), ValueError, "key.granularity is 'channel'; it must be one of"),
    (replaced("key", length=8), ValueError, r"key.length is 8 and key.data has shape \(2, 2, 9, 32\); it must hold 8 tokens"),
    (replaced("value", length=200), ValueError, r"value.length is 200 and value.data has shape \(2, 2, 16, 128\); it must hold 256 tokens"),
    (replaced("value", mean=torch.zeros(2, 2, 32)), ValueError, r"value.mean has shape \(2, 2, 32\); it must be \(2, 2, 16\)"),
    (
        replaced("value", data=V_TENSOR.data.transpose(0, 1).contiguous().transpose(0, 1)),
        ValueError,
        "value.data has strides .*; it must be contiguous",
    ),
    (
        lambda: fp8attn.reference_sdpa(dataclasses.replace(Q_16, rotated=0, data=Q8[:1]), K_TENSOR, V_TENSOR, enable_gqa=True),
        ValueError,
        "query is Quantized with batch 1 and 4 heads; it must have 2 and 4: expand it before",
    ),
    (replaced("query", rotated=8), ValueError, r"query.rotated is 8; with head_dim 32 it must be one of \[0, 16, 32\]"),
    (lambda: fp8attn.triton_sdpa(Q, K, V, backend="cuda"), TypeError, "backend is 'cuda'; it must not be given: triton_sdpa has one"),
    (lambda: fp8attn.reference_sdpa(Q, K, V, enable_gqa=True, dtype=torch.float16), TypeError, "dtype is torch.float16; it must be float32"),
    (call(dropout_p=0.1), ValueError, "dropout_p is 0.1; it must be 0"),
    (call(scale=float("nan")), ValueError, "scale is nan; it must be a finite number"),
    (call(query=needs_grad(Q)), RuntimeError, "query requires grad; fp8attn has no backward"),
    (call(attn_mask=needs_grad(torch.zeros(6, 9))), RuntimeError, "attn_mask requires grad"),
    (call(attn_mask=torch.ones(6, 9).bool(), is_causal=True), ValueError, "attn_mask is given and is_causal is True"),
    (call(attn_mask=[[True]]), TypeError, "attn_mask is a list; it must be a torch.Tensor or None"),
    (call(attn_mask=torch.ones(6, 9).int()), TypeError, "attn_mask is torch.int32; it must be bool"),
    (call(attn_mask=torch.ones(6, 9, device=META)), ValueError, "attn_mask is on meta; it must be on query's device"),
    (call(attn_mask=torch.ones(6, 8)), ValueError, r"attn_mask has shape \(6, 8\); it must broadcast to .* \(2, 4, 6, 9\)"),
    (call(attn_mask=torch.ones(1, 1, 1, 1, 1)), ValueError, "attn_mask has shape .*; it must broadcast"),
    (call(is_causal=True, causal_alignment="left"), ValueError, "causal_alignment is 'left'; it must be"),
    (call(window=5), TypeError, r"window is 5; it must be \(left, right\), two ints, or None"),
    (call(window=(1, 2, 3)), TypeError, r"window is \(1, 2, 3\); it must be"),
    (call(window=(1.0, 2)), TypeError, r"window is \(1.0, 2\); it must be"),
    (call(window=(True, False)), TypeError, r"window is \(True, False\); it must be"),
    (call(window=(-2, 0)), ValueError, r"window is \(-2, 0\); its numbers must be -1 \(unlimited\) or more"),
    (call(window=(1, 1), attn_mask=torch.ones(6, 9).bool()), ValueError, "window is .* and attn_mask is given; it must be None: fold the window"),
    (call(softcap="50"), TypeError, "softcap is a str; it must be a number"),
    (call(softcap=float("nan")), ValueError, "softcap is nan; it must be a finite number"),
    (call(softcap=-1.0), ValueError, r"softcap is -1.0; it must be 0 \(none\) or more"),
    (call(sinks=[0.0] * 4), TypeError, "sinks is a list; it must be a torch.Tensor"),
    (call(sinks=torch.zeros(4).double()), TypeError, "sinks is torch.float64; it must be torch.float32"),
    (call(sinks=torch.zeros(2)), ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
    (call(sinks=torch.zeros(4, device=META)), ValueError, "sinks is on meta; it must be on cpu"),
    (call(sinks=needs_grad(torch.zeros(4))), RuntimeError, "sinks requires grad; fp8attn has no backward"),
    (keeping(softcap=5.0), ValueError, r"softcap is given and recipe keeps keys .*; a recipe that keeps keys takes none"),
    (keeping(sinks=torch.zeros(4)), ValueError, r"sinks is given and recipe keeps keys .*; a recipe that keeps keys takes none"),
    (keeping(window=(1, 1)), ValueError, r"window is \(1, 1\) and recipe keeps keys .*; it must be None"),
    (full(recipe="fast", backend="reference"), TypeError, "recipe is a str; it must be a fp8attn.Recipe"),
    (full(out_dtype=torch.int8, backend="reference"), TypeError, "out_dtype is torch.int8; it must be"),
    (full(backend="metal"), ValueError, "backend is 'metal'; it must be"),
    (full(backend="cuda"), BackendUnavailable, "cuda: tensors are on cpu; move them to a GPU"),
    (call(Q_16, K_TENSOR, V_TENSOR), ValueError, "query is rotated, key isn't; both must be quantized"),
    (call(Q_16, dataclasses.replace(K_TENSOR, rotated=32), V_TENSOR), ValueError, "query is rotated by 16 channels, key by 32; both must"),
    (call(Q, K8, V8, **KV_SCALES, q_scale=1.0), ValueError, "q_scale is given, but its tensor isn't"),
    (call(q_scale=1.0), ValueError, "q_scale is given, but its tensor isn't float8_e4m3fn, uint8 or int8; it must be None"),
    (cached(k_scale=None), ValueError, "k is torch.float8_e4m3fn and k_scale is None; it must be"),
    (cached(q_scale=torch.ones(1).double()), TypeError, "q_scale is torch.float64; it must be torch.float32"),
    (cached(q_scale="1"), TypeError, "q_scale is a str; it must be a number or a float32 tensor"),
    (cached(q_scale=True), TypeError, "q_scale is a bool; it must be a number or a float32 tensor"),
    (call(scale="1"), TypeError, "scale is a str; it must be a number"),
    (call(is_causal=1), TypeError, "is_causal is a int; it must be a bool"),
    (cached(v_scale=torch.ones(1, device=META)), ValueError, "v_scale is on meta; it must be on v's device, cpu"),
    (cached(v_scale=torch.ones(2, 2, 9)), ValueError, r"v_scale has shape \(2, 2, 9\); it must have one element"),
    (lambda: fp8attn.quantize(Q, recipe=SMOOTH_Q), ValueError, "key is None and recipe.smooth_q is True; key and value must be given"),
    (
        call(query=smoothed(mean=None), key=K8, value=V8, **KV_SCALES),
        ValueError,
        r"query.bias is given and query.mean is None; it must have the shape \(2, 4, 1, 32\)",
    ),
    (
        call(query=smoothed(), key=K8[:, :, :3], value=V8[:, :, :3], **KV_SCALES),
        ValueError,
        r"query.bias has shape \(2, 4, 1, 12\); .* \(2, 4, 1, 4\)",
    ),
    (call(query=smoothed(bias=BIAS.half()), key=K8, value=V8, **KV_SCALES), TypeError, "query.bias is torch.float16; it must be torch.float32"),
    (
        call(query=smoothed(bias=torch.zeros(2, 4, 1, 24)[..., ::2]), key=K8, value=V8, **KV_SCALES),
        ValueError,
        r"query.bias has strides .*; it must be contiguous",
    ),
    (call(query=smoothed(bias=BIAS.to(META)), key=K8, value=V8, **KV_SCALES), ValueError, "query.bias is on meta; it must be on cpu"),
    (
        keeping(attn_mask=torch.ones(6, 9, dtype=torch.bool)),
        ValueError,
        r"attn_mask is given and recipe keeps keys \(sinks=0, recent=128\)",
    ),
    (by_pages(), ValueError, r"is_causal is False, and there are 6 queries and 9 keys; with recipe.statistics='page'"),
    (by_pages(k="token", is_causal=True), ValueError, "recipe has k='token'; for pages it must be 'block'"),
    (by_pages(softcap=5.0), ValueError, r"softcap is given and recipe keeps keys \(statistics='page'\)"),
    (keeping(query=quantized()), TypeError, "query is quantized already and recipe keeps keys"),
    (keeping(query=Q8, q_scale=1.0), TypeError, "query is quantized already and recipe keeps keys"),
    (keeping(query=Q.half()), TypeError, "key is torch.bfloat16; it must be query's torch.float16"),
    (lambda: fp8attn.quantize(Q, recipe=KEEPING), ValueError, r"recipe keeps keys \(sinks=0, recent=128\); it must keep none"),
    (lambda: Recipe(sinks=100), ValueError, r"Recipe.sinks is 100; it must be one of \(0, 128, 256"),
    (lambda: Recipe(recent=2048), ValueError, "Recipe.recent is 2048; it must be one of"),
    (lambda: fp8attn.quantize(Q8), TypeError, "query is quantized already"),
    (lambda: fp8attn.quantize(None, K), ValueError, "value is None; key and value are quantized together"),
    (lambda: fp8attn.quantize(Q, K, V, recipe="fast"), TypeError, "recipe is a str; it must be a fp8attn.Recipe"),
    (lambda: fp8attn.quantize(Q[:1], K, V), ValueError, "query has batch 1; it must be key's, 2"),
    (lambda: fp8attn.quantize(Q, K, V[:1]), ValueError, "value has batch 1; it must be key's, 2"),
    (lambda: fp8attn.quantize(Q, K, V[:, :1]), ValueError, "value has 1 heads; it must have as many as key, 2"),
    (lambda: fp8attn.quantize(bf16(2, 3, 6, 32), K, V), ValueError, "query has 3 heads; with enable_gqa it must be a multiple of key's 2"),
    (lambda: fp8attn.quantize(Q[:, :1], K, V), ValueError, "query has 1 heads; it must be a multiple of key's 2"),
    (lambda: fp8attn.quantize(bf16(2, 4, 6, 64), K, V), ValueError, "key has head_dim 32; it must be query's, 64"),
    (lambda: fp8attn.quantize(Q, K, V.half()), TypeError, "value is torch.float16; it must be query's torch.bfloat16"),
    (lambda: fp8attn.quantize(Q, K.to(META), V), ValueError, "key is on meta; it must be on query's device, cpu"),
    (lambda: fp8attn.quantize(None, needs_grad(K), V), RuntimeError, "key requires grad"),
    (lambda: fp8attn.import_kv(K8, V8[:1], 1.0, 1.0), ValueError, "value has batch 1; it must be key's, 2"),
    (lambda: fp8attn.import_kv(K8, V8[:, :1], 1.0, 1.0), ValueError, "value has heads 1; it must be key's, 2"),
    (lambda: fp8attn.import_kv(K8, V8[:, :, :3], 1.0, 1.0), ValueError, "value has length 3; it must be key's, 9"),
    (lambda: fp8attn.import_kv(K8, V8, needs_grad(torch.ones(1)), 1.0), RuntimeError, "k_scale requires grad"),
    (lambda: fp8attn.quantize(), ValueError, "query, key and value are None; at least"),
    (lambda: fp8attn.import_kv(K, V, 1.0, 1.0), TypeError, "key is torch.bfloat16; it must be float8_e4m3fn, uint8 or int8"),
    (lambda: Recipe(k="channel"), ValueError, r"Recipe.k is 'channel'; it must be one of"),
    (lambda: Recipe(rotate=True), ValueError, r"Recipe.rotate is True; it must be one of \(0, 16, 64, 256\)"),
    (lambda: Recipe(rotate=False), ValueError, "Recipe.rotate is False; it must be one of"),
    (lambda: Recipe(rotate=32), ValueError, "Recipe.rotate is 32; it must be one of"),
    (lambda: Recipe(smooth_k=1), ValueError, "Recipe.smooth_k is 1; it must be one of"),
    *VARLEN_ERRORS,
]


@pytest.mark.parametrize("sample", ERRORS, ids=lambda sample: sample[2][:40])
def test_errors_say_what_was_and_what_must_be(sample: tuple[Callable[[], object], type[Exception], str]) -> None:
    action, kind, message = sample
    with pytest.raises(kind, match=message):
        action()


def test_every_error_is_tested() -> None:
    """Every `raise` of the checks is reached by one of the samples, of a public function's or an operator's errors."""
    reached = set()
    for action, kind, _ in [*ERRORS, *OPERATOR_ERRORS, *CACHE_ERRORS, *TENSORS_ERRORS, *ROTARY_ERRORS]:
        try:
            action()
        except kind as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            assert trace is not None
            reached.add((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
    missing = []
    for module in (api, backends, prepare, validate, recipe):
        path = inspect.getfile(module)
        for node in ast.walk(ast.parse(Path(path).read_text())):
            if isinstance(node, ast.Raise) and not any((path, line) in reached for line in range(node.lineno, (node.end_lineno or 0) + 1)):
                missing.append(f"{Path(path).name}:{node.lineno}")
    # raised where there are neither a GPU nor the interpreter, and where there is a GPU; both are tested below
    source = inspect.getsource(backends).splitlines()
    missing = [place for place in missing if not (place.startswith("backends.py") and "raise BackendUnavailable(" in source[int(place[12:]) - 1])]
    assert not missing


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Recipe)])
def test_recipe_refuses(field: str) -> None:
    with pytest.raises(ValueError, match=f"Recipe.{field} is 'nonsense'; it must be one of"):
        Recipe(**{field: "nonsense"})


def test_inputs_that_require_grad_work_without_grad() -> None:
    with torch.no_grad():
        out = call(query=needs_grad(Q))()
    assert torch.equal(out, call()())


def test_signature_follows_pytorch() -> None:
    """The positional parameters are F.scaled_dot_product_attention's, in its order and with its defaults; the rest is keyword only."""
    expected = dict(query=inspect.Parameter.empty, key=inspect.Parameter.empty, value=inspect.Parameter.empty)
    expected |= dict(attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)
    for function in (fp8attn.sdpa, fp8attn.reference_sdpa):
        parameters = inspect.signature(function).parameters
        positional = {name: p.default for name, p in parameters.items() if p.kind == p.POSITIONAL_OR_KEYWORD}
        # PyTorch takes scale and enable_gqa by keyword only; code written for it doesn't notice
        assert list(positional) == list(expected) and positional == expected
        assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name not in expected)


def test_cpu_tensors_run_on_the_reference() -> None:
    options = dict(is_causal=True, enable_gqa=True)
    assert torch.equal(fp8attn.sdpa(Q, K, V, **options), fp8attn.reference_sdpa(Q, K, V, **options))
    expected = F.scaled_dot_product_attention(Q.double(), K.double(), V.double(), **options)
    torch.testing.assert_close(fp8attn.sdpa(Q, K, V, **options).double(), expected, rtol=2**-7, atol=1e-3)


SCALE_SHAPES = {"tensor": (1,), "head": (2, 2), "block": (2, 2, 1), "token": (2, 2, 9), "channel": (2, 2, 16)}


@pytest.mark.parametrize("rows_as", (E4M3, torch.uint8, torch.int8))
@pytest.mark.parametrize("granularity", ("tensor", "head", "block", "token"))
def test_what_the_user_quantized(device: torch.device, granularity: str, rows_as: torch.dtype) -> None:
    """The same as attention of what the bytes and scales stand for, within P's rounding."""
    generator = torch.Generator().manual_seed(1)
    k_scale = (0.5 + torch.rand(SCALE_SHAPES[granularity], generator=generator)).to(device)
    v_scale = (0.5 + torch.rand(SCALE_SHAPES["channel" if granularity == "token" else "head"], generator=generator)).to(device)
    if rows_as == torch.int8:
        q, k = ((x.to(device).float() * 30).round().clamp(-127, 127).to(torch.int8) for x in (Q, K))
        v, k_scale = V8.to(device), k_scale / 30
        numbers = q.float() / 30, k.float()
    else:
        q, k, v = (x.to(device).view(rows_as) for x in (Q8, K8, V8))
        numbers = Q8.to(device).float(), K8.to(device).float()
    q_scale = 0.5 / 30 if rows_as == torch.int8 else 0.5
    out = fp8attn.triton_sdpa(q, k, v, enable_gqa=True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    assert out.dtype == torch.bfloat16
    k_rows = k_scale if granularity == "token" else k_scale.reshape(1, 1, 1) if granularity == "tensor" else k_scale.reshape(2, 2, 1)
    v_rows = v_scale.reshape(2, 2, 1, -1)
    restored = (numbers[0] * 0.5, numbers[1] * k_rows.unsqueeze(-1), V8.to(device).float() * v_rows)
    expected = fp8attn.reference_sdpa(*restored, enable_gqa=True)
    assert float((out.float() - expected).norm() / expected.norm()) < 0.04
    exact = fp8attn.reference_sdpa(q, k, v, enable_gqa=True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=torch.float32)
    torch.testing.assert_close(exact, expected)


def test_quantized_and_floats_mix(device: torch.device) -> None:
    q, k, v = (x.to(device) for x in (Q, K, V))
    expected = fp8attn.triton_sdpa(q, k, v, enable_gqa=True)
    q8 = fp8attn.quantize(q)
    k8, v8 = fp8attn.quantize(None, k, v)
    assert isinstance(q8, Quantized)
    for query in (q, q8):
        for key, value in ((k, v), (k8, v8)):
            assert torch.equal(fp8attn.triton_sdpa(query, key, value, enable_gqa=True), expected)
    assert dequantize(q8).shape == q8.shape == q.shape


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_dtype_and_layout_of_the_output(device: torch.device, dtype: torch.dtype) -> None:
    q, k, v = (x.to(device, dtype) for x in (Q, K, V))
    out = fp8attn.triton_sdpa(q, k, v, enable_gqa=True)
    assert out.dtype == dtype and out.is_contiguous() and out.shape == (2, 4, 6, 16)
    q_bshd = q.transpose(1, 2).contiguous().transpose(1, 2)
    out_bshd = fp8attn.triton_sdpa(q_bshd, k, v, enable_gqa=True)
    assert out_bshd.transpose(1, 2).is_contiguous() and torch.equal(out_bshd, out)
    out, lse = fp8attn.triton_sdpa(q, k, v, enable_gqa=True, return_lse=True, out_dtype=torch.float32)
    assert out.dtype == torch.float32 and lse.dtype == torch.float32 and lse.shape == (2, 4, 6)


def test_inputs_stay_as_they_are(device: torch.device) -> None:
    tensors = [x.to(device) for x in (Q, K, V)]
    copies = [x.clone() for x in tensors]
    out = fp8attn.triton_sdpa(*tensors, enable_gqa=True)
    assert all(torch.equal(x, y) for x, y in zip(tensors, copies, strict=True))
    assert out.untyped_storage().data_ptr() not in {x.untyped_storage().data_ptr() for x in tensors}


def test_explain(device: torch.device) -> None:
    q, k, v = (x.to(device) for x in (Q, K, V))
    plan = fp8attn.explain(q, k, v, enable_gqa=True, backend="triton")
    assert plan.backend == "triton" and plan.kernel in ("portable", "hopper") and plan.config is not None and plan.because
    int8 = fp8attn.explain(q, k, v, enable_gqa=True, backend="triton", recipe=Recipe(qk="int8"))
    assert int8.compute == f"int8 and {plan.compute}"
    automatic = fp8attn.explain(q, k, v, enable_gqa=True)
    lacking = cuda_unavailable(q.device)
    assert automatic.backend == ("reference" if not GPU else "cuda" if lacking is None else "triton")
    assert "backend='auto'" in automatic.because[0]
    assert any(reason.startswith("cuda: ") for reason in automatic.because) == (lacking is not None)
    # of the CUDA kernels only the portable one computes so, and `auto` takes Triton's
    options = dict(enable_gqa=True, recipe=Recipe(compute="f16"))
    assert fp8attn.explain(q, k, v, **options).backend == ("triton" if GPU else "reference")
    if lacking is None:
        plan = fp8attn.explain(q, k, v, backend="cuda", **options)
        assert (plan.kernel, plan.compute) == ("portable", "f16") and any("compute" in reason for reason in plan.because)
    else:
        with pytest.raises(BackendUnavailable, match="cuda: "):
            fp8attn.explain(q, k, v, backend="cuda", **options)


def test_cuda_says_what_it_lacks() -> None:
    with pytest.raises(BackendUnavailable, match="cuda: tensors are on cpu; move them to a GPU"):
        fp8attn.cuda_sdpa(Q, K, V, enable_gqa=True)


def run_python(program: list[str], **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(fp8attn.__file__).resolve().parent.parent)
    return subprocess.run([sys.executable, *program], capture_output=True, text=True, check=False, env=inherited | {"PYTHONPATH": root} | environment)


def test_info() -> None:
    """python -m fp8attn prints what info() says, and says what works."""
    lines = fp8attn.info()
    assert {"python", "torch", "triton", "backend triton", "backend cuda", "backend reference"} <= lines.keys()
    done = run_python(["-m", "fp8attn"], **({} if GPU else {"TRITON_INTERPRET": "1"}))
    assert done.returncode == 0, done.stderr
    printed = [line.split(maxsplit=1)[0] for line in done.stdout.splitlines()]
    assert len(printed) == len(lines)
    for name, text in lines.items():
        assert any(line.startswith(name) and line.endswith(text) for line in done.stdout.splitlines()), name


def test_without_gpu_or_interpreter_the_error_says_what_to_do() -> None:
    program = (
        "import torch, fp8attn; x = torch.zeros(1, 1, 4, 16)\ntry: fp8attn.triton_sdpa(x, x, x)\nexcept fp8attn.BackendUnavailable as e: print(e)"
    )
    done = run_python(["-c", program], CUDA_VISIBLE_DEVICES="")
    assert "move them to a GPU, or set TRITON_INTERPRET=1" in done.stdout, done.stderr


def test_one_query_at_the_end_sees_all_keys() -> None:
    """So that calls of a decoder are not causal to kernels, which share keys among CTAs then."""
    q, k, v = (torch.randn(1, 2, n, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 300, 300))
    operands = fp8attn.quantize(q, k, v)
    options = dict(is_causal=True, causal_alignment="bottom_right")
    assert prepare.call_of(*operands, **options).causal == "none"
    assert prepare.call_of(*operands, is_causal=True).causal == "top_left"
    assert torch.equal(fp8attn.sdpa(*operands, **options), fp8attn.sdpa(*operands))
    assert fp8attn.sdpa(*operands, is_causal=True).allclose(v[:, :, :1].bfloat16(), atol=0.2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    (
        ((), {}, "shapes is empty"),
        ((((1, 2, 3, 64),),), {}, r"shapes has \(\(1, 2, 3, 64\),\); it must have tuples"),
        ((((1, 2, 3, 64), (1, 2, 0, 64)),), {}, "shapes has .*; it must have tuples"),
        ((((1, 2, 3, 64), (1, 2, 3, 64)),), dict(dtype=torch.float64), "dtype is torch.float64"),
        ((((1, 2, 3, 64), (1, 2, 3, 64)),), dict(query=3), "query is given"),
        ((((1, 2, 3, 64), (1, 2, 3, 32)),), {}, "key"),
        ((((1, 2, 3, 64), (1, 2, 3, 64)),), dict(backend="fast"), "backend is 'fast'"),
    ),
)
def test_warmup_says_what_is_wrong(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fp8attn.warmup(*arguments, **(dict(device="cpu", backend="modelled") | options))


def test_warmup_without_a_gpu() -> None:
    fp8attn.warmup(((1, 4, 20, 64), (1, 2, 30, 64)), ((1, 2, 8, 32), (1, 2, 9, 32), (1, 2, 9, 16)), device="cpu", backend="modelled", enable_gqa=True)


def test_every_argument_reaches_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a DTensor: a rank attends with what the call was made with."""
    reached: list[dict] = []
    monkeypatch.setattr(api.dtensor, "is_dtensor", lambda x: True)
    monkeypatch.setattr(api.dtensor, "attend_by_shards", lambda *operands, **options: reached.append(options))
    given = {name: object() for name in inspect.signature(fp8attn.sdpa).parameters}
    fp8attn.sdpa(**given)
    operands = ("query", "key", "value", "attn_mask")
    assert reached == [{name: x for name, x in given.items() if name not in operands}]
