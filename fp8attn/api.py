"""The public functions: validate once, quantize, choose a backend, call its operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, overload

import torch

from . import eager, hybrid, ops, reference, rotation
from .call import GROUPS, Call
from .cuda import build, configs, early, short
from .cuda.configs import HopperConfig
from .cuda.portable import PortableConfig
from .device import device_of
from .quantize import dequantize
from .recipe import AT_ONCE, DEFAULT_RECIPE, E4M3, PRECISE, ProductType, Quantized, Recipe
from .reference import Causal
from .triton import run
from .validate import (
    BackendUnavailable,
    Operand,
    as_stored,
    check_bias,
    check_causal,
    check_keeps_none,
    check_kept,
    check_operand,
    check_options,
    check_recipe,
    check_shapes,
    is_stored,
    named_scale,
)

Backend = Literal["auto", "triton", "cuda", "reference"]


@dataclass(frozen=True)
class Plan:
    """What a call would run.

    Attributes:
        backend: `triton`, `cuda` or `reference`.
        kernel: the kernel's name.
        config: its config, or None for the reference.
        compute: what the tensor cores multiply, `e4m3`, `f16` or `float32`; `int8 and …` where Q·Kᵀ is of int8.
        because: why these and not the others, one reason a line.
    """

    backend: str
    kernel: str
    config: object
    compute: str
    because: tuple[str, ...]


def cuda_missing(device: torch.device) -> str | None:
    """Why the CUDA kernels can't run on a device's tensors and what to do, as far as is known without compiling them, or None."""
    if device.type != "cuda":
        return f"cuda: tensors are on {device}; move them to a GPU"
    properties = device_of(device)
    if properties.arch < 80:
        return f"cuda: the kernels need sm_80 or later, {properties.name} is sm_{properties.arch}"
    lacking = build.unavailable()
    return None if lacking is None else f"cuda: {lacking}"


def triton_missing(device: torch.device) -> str | None:
    """Why Triton kernels can't run on a device's tensors and what to do, or None if they can."""
    if ops.has_kernels(device):
        return None
    return f"triton: tensors are on {device}; move them to a GPU, or set TRITON_INTERPRET=1 before Python starts to interpret the kernels"


def choose_backend(backend: Backend, device: torch.device) -> str:
    """The backend that runs on a device's tensors; `auto` where the operator sees to it, call by call.

    Raises:
        BackendUnavailable: `backend` can't run here.
        ValueError: there is no such backend.
    """
    if backend == "auto":
        return "auto" if device.type == "cuda" else "reference"
    if backend == "reference":
        return backend
    if backend == "cuda":
        if device.type != "cuda":
            raise BackendUnavailable(cuda_missing(device))
        return backend
    if backend != "triton":
        raise ValueError(f"backend is {backend!r}; it must be 'auto', 'triton', 'cuda' or 'reference'")
    missing = triton_missing(device)
    if missing is not None:
        raise BackendUnavailable(missing)
    return backend


@overload
def quantize(query: torch.Tensor, key: None = None, value: None = None, *, recipe: Recipe = ...) -> Quantized: ...
@overload
def quantize(query: None, key: torch.Tensor, value: torch.Tensor, *, recipe: Recipe = ...) -> tuple[Quantized, Quantized]: ...
@overload
def quantize(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, recipe: Recipe = ...) -> tuple[Quantized, Quantized, Quantized]: ...
def quantize(query=None, key=None, value=None, *, recipe=DEFAULT_RECIPE):
    """Quantize to e4m3, query and key perhaps to int8, as a recipe says.

    Keys and values go together: a token whose value isn't finite gets NaN in its key (see fp8attn.quantize).

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16 or float32, unit last stride; or None.
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), likewise; or None, both.
        recipe: granularities, smoothing, rotation, what query and key are stored as. With `smooth_q`, query is quantized together with the keys
            that it attends to.

    Returns:
        The `Quantized` of what was given: of query; of key and value; or of all three.

    Raises:
        TypeError, ValueError: an argument isn't as above.
    """
    check_recipe(recipe)
    for name, x, layout in (("query", query, "rows"), ("key", key, "rows"), ("value", value, "values")):
        if x is not None:
            check_operand(name, x, layout)
            if isinstance(x, Quantized) or is_stored(x):
                raise TypeError(f"{name} is quantized already; it must be float16, bfloat16 or float32")
    if (key is None) != (value is None):
        raise ValueError(f"{'key' if key is None else 'value'} is None; key and value are quantized together")
    if query is None and key is None:
        raise ValueError("query, key and value are None; at least query, or key and value, must be tensors")
    check_keeps_none(recipe)
    if query is not None and key is None and recipe.smooth_q:
        raise ValueError("key is None and recipe.smooth_q is True; key and value must be given, or query to sdpa as it is, beside quantized ones")
    if key is not None:
        check_shapes(key, key, value, False)
        if query is not None and recipe.smooth_q:
            check_shapes(query, key, value, True)
    results = tuple(x for x in _quantize(query, key, value, recipe) if x is not None)
    return results[0] if len(results) == 1 else results


def _quantize(
    query: torch.Tensor | None, key: torch.Tensor | None, value: torch.Tensor | None, recipe: Recipe
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """The operator, its results as `Quantized`; None for what isn't given."""
    tensors = ops.library_ops.quantize(
        query, key, value, recipe.q, recipe.k, recipe.v, recipe.smooth_k, recipe.smooth_v, recipe.smooth_q, recipe.rotate, recipe.qk
    )  # fmt: skip
    q = k = v = None
    if query is not None:
        means, bias = (tensors[2], None if key is None else tensors[9]) if recipe.smooth_q else (None, None)
        q = Quantized(tensors[0], tensors[1], recipe.q, "rows", query.shape[2], means, rotation.part_of(query.shape[3], recipe.rotate), bias)
    if key is not None:
        k_mean, part = tensors[5] if recipe.smooth_k else None, rotation.part_of(key.shape[3], recipe.rotate)
        k = Quantized(tensors[3], tensors[4], recipe.k, "rows", key.shape[2], k_mean, part)
        v = Quantized(tensors[6], tensors[7], recipe.v, "values", key.shape[2], tensors[8] if recipe.smooth_v else None)
    return q, k, v


def import_kv(key: torch.Tensor, value: torch.Tensor, k_scale: torch.Tensor | float, v_scale: torch.Tensor | float) -> tuple[Quantized, Quantized]:
    """Keys and values that are quantized already, an FP8 cache say, as `Quantized`: do it once where they are used often.

    Keys are taken as they are; values are copied into the layout of quantized V. Keys get one scale per token, because
    a token whose value holds a NaN must turn into NaN the rows that attend to it, and no others.

    Args:
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), float8_e4m3fn or uint8 holding e4m3, unit last stride; key perhaps int8 from -127 to 127.
        k_scale: float, or float32 with one element, (B, Hkv), (B, Hkv, Sk) or (B, Hkv, ceil(Sk / 128)).
        v_scale: float, or float32 with one element, (B, Hkv) or (B, Hkv, Dv).

    Raises:
        TypeError, ValueError: an argument isn't as above.
    """
    check_operand("key", key, "rows")
    check_operand("value", value, "values")
    check_shapes(key, key, value, False)
    if not is_stored(key):
        raise TypeError(f"key is {key.dtype}; it must be float8_e4m3fn, uint8 or int8")
    k_restores, k_granularity = named_scale("k", key, k_scale, for_values=False)
    v_restores, v_granularity = named_scale("v", value, v_scale, for_values=True)
    data = as_stored(key)
    token_scale, values = ops.library_ops.import_kv(data, k_restores, k_granularity, value.view(E4M3))
    length = key.shape[2]
    return (
        Quantized(data, token_scale, "token", "rows", length),
        Quantized(values, v_restores, v_granularity, "values", length),
    )


@dataclass(frozen=True)
class _Prepared:
    """A validated call, its operands quantized."""

    query: Quantized
    key: Quantized
    value: Quantized
    attn_mask: torch.Tensor | None
    causal: Causal
    softmax_scale: float
    out_dtype: torch.dtype
    recipe: Recipe


def _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, out_dtype) -> Causal:
    check_operand("query", query, "rows")
    check_operand("key", key, "rows")
    check_operand("value", value, "values")
    check_shapes(query, key, value, enable_gqa)
    causal = check_causal(is_causal, causal_alignment)
    check_options(query, key, value, dropout_p, attn_mask, causal, scale)
    if out_dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"out_dtype is {out_dtype}; it must be float16, bfloat16 or float32")
    # the last query sees all keys, so that CTAs may share them
    return "none" if causal == "bottom_right" and query.shape[2] == 1 else causal


def _imported(query: Operand, key: Operand, value: Operand, q_scale, k_scale, v_scale) -> tuple[Operand, Operand, Operand]:
    """What the user quantized as Quantized; anything else as it is."""
    for name, x, restores in (("q", query, q_scale), ("k", key, k_scale), ("v", value, v_scale)):
        if restores is not None and not is_stored(x):
            raise ValueError(f"{name}_scale is given, but its tensor isn't float8_e4m3fn, uint8 or int8; it must be None")
    if is_stored(query):
        restores, granularity = named_scale("q", query, q_scale, for_values=False)
        query = Quantized(as_stored(query), restores, granularity, "rows", query.shape[2])
    if is_stored(key) and is_stored(value):
        key, value = import_kv(key, value, k_scale, v_scale)
    return query, key, value


def _check_pair(query: Operand, key: Operand) -> None:
    """That query and key were quantized alike."""
    types = tuple(x.data.dtype for x in (query, key) if isinstance(x, Quantized))
    if len(types) == 2 and types[0] != types[1]:
        raise TypeError(f"query is stored as {types[0]}, key as {types[1]}; both must be quantized with recipes of the same `qk`")
    in_query, in_key = (x.rotated if isinstance(x, Quantized) else 0 for x in (query, key))
    if in_query != in_key:
        how = f"query is rotated by {in_query} channels, key by {in_key}"
        if in_query == 0 or in_key == 0:
            how = "query is rotated, key isn't" if in_query else "key is rotated, query isn't"
        raise ValueError(f"{how}; both must be quantized with recipes of the same `rotate`")
    if isinstance(query, Quantized):
        check_bias(query, key.shape[2])


def _prepare(
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, recipe, q_scale, k_scale, v_scale, out_dtype
) -> _Prepared:
    causal = _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, out_dtype)
    check_keeps_none(recipe)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if isinstance(query, Quantized) or is_stored(query) else query.dtype
    query, key, value = _imported(query, key, value, q_scale, k_scale, v_scale)
    floats = tuple(x if isinstance(x, torch.Tensor) else None for x in (query, key, value))
    if any(x is not None for x in floats):
        # beside what isn't rotated, as what the user quantized, nothing can be
        beside = any(isinstance(x, Quantized) and x.rotated == 0 for x in (query, key))
        q, k, v = _quantize(floats[0], floats[1], floats[2], replace(recipe, rotate=0) if beside else recipe)
        query, key, value = q or query, k or key, v or value
    _check_pair(query, key)
    if query.mean is not None and query.bias is None:
        query = replace(query, bias=ops.library_ops.score_bias(query.mean, key.data, key.scale, key.granularity))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.length)
    softmax_scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    return _Prepared(query, key, value, attn_mask, causal, softmax_scale, out_dtype, recipe)


def _operator_arguments(p: _Prepared, return_lse: bool) -> tuple:
    """The arguments of a backend's forward operator, in the order of `Call`'s fields."""
    batch, q_heads = p.query.shape[:2]
    kv_heads = p.key.shape[1]
    return (
        p.query.data,
        p.query.scale.expand(batch, q_heads, -1),
        GROUPS[p.query.granularity],
        p.key.data,
        p.key.scale.expand(batch, kv_heads, -1),
        GROUPS[p.key.granularity],
        p.value.data,
        p.value.scale.expand(batch, kv_heads, p.value.shape[3]),
        p.value.mean,
        p.attn_mask,
        p.query.bias,
        p.key.length,
        p.softmax_scale,
        p.causal,
        p.recipe.compute,
        p.recipe.two_level,
        p.out_dtype,
        return_lse,
    )


def sdpa(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: str = "top_left",
    recipe: Recipe = DEFAULT_RECIPE,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention in FP8; means what torch.nn.functional.scaled_dot_product_attention means.

    Args:
        query: (B, Hq, Sq, D). float16, bfloat16 or float32 with unit last stride; or e4m3 (float8_e4m3fn, or uint8 holding
            it), or int8 from -127 to 127, with `q_scale`; or `Quantized`. D is a multiple of 8 from 16 to 256.
        key: (B, Hkv, Sk, D), likewise.
        value: (B, Hkv, Sk, Dv), of key's kind, but e4m3 where that is int8. Dv is a multiple of 8 from 16 to 256.
        attn_mask: broadcastable to (B, Hq, Sq, Sk). bool: True means attend; float: added to the scaled scores.
        dropout_p: must be 0.
        is_causal: row i sees keys j <= i, or j <= i + Sk - Sq if `causal_alignment` is `bottom_right`.
        scale: multiplies Q·Kᵀ; 1 / sqrt(D) by default.
        enable_gqa: every key/value head serves Hq / Hkv query heads.
        causal_alignment: `top_left`, as in PyTorch, or `bottom_right`.
        recipe: numeric choices; for operands that are quantized already only compute type and accumulation count. Beside one that isn't
            rotated the others aren't either.
        q_scale, k_scale, v_scale: what restores such operands: x ≈ x_fp8.float() * x_scale. A float, or float32 with one
            element, (B, H), q and k (B, H, S) or (B, H, ceil(S / 128)), v (B, H, Dv).
        out_dtype: float16, bfloat16 or float32; by default query's, bfloat16 if query is quantized.
        return_lse: also return the natural log of the sum of exponentials of each row's scores.
        backend: `auto`, `triton`, `cuda` or `reference`. `auto` takes CUDA's Hopper kernel where it runs and can be compiled, Triton
            for other calls on a GPU, and the exact reference for CPU tensors. `auto` and `cuda` quantize and attend in one launch where
            fp8attn.cuda.short says so, and elsewhere quantize query where they attend, if the recipe is the default or `PRECISE`: the bits are
            the same.

    Returns:
        out (B, Hq, Sq, Dv); with `return_lse` also LSE (B, Hq, Sq) float32. A row without visible keys gives zeros and -inf.

    Raises:
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
        BackendUnavailable: the backend can't run here.
    """
    options = None
    if not return_lse and _is_at_once(recipe):
        options = (recipe.qk, backend, is_causal, scale, enable_gqa, causal_alignment, out_dtype, dropout_p, q_scale, k_scale, v_scale)
        repeated = eager.repeat(query, key, value, attn_mask, options)
        if repeated is not None:
            return repeated
    check_recipe(recipe)
    check_operand("query", query, "rows")
    chosen = choose_backend(backend, query.device)
    if recipe.keeps_keys:
        causal = _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, out_dtype)
        kept = check_kept(query, key, value, attn_mask, recipe)
        if chosen != "reference":
            return _with_half_keys(*kept, causal, scale, recipe, out_dtype or kept[0].dtype, return_lse, chosen)
    if chosen == "reference":
        return reference_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
            causal_alignment=causal_alignment, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype, return_lse=return_lse,
        )  # fmt: skip
    plain = _plain(query, key, value, attn_mask, scale=scale, recipe=recipe, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    if chosen != "triton" and plain is not None:
        causal = _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, out_dtype)
        q, k, v, softmax_scale, qk, _ = plain
        out, lse, k_mean = _from_half(chosen)(q, k, v, softmax_scale, qk, causal, out_dtype or q.dtype, return_lse, attn_mask)
        if options is not None:
            eager.remember_from_half(q, k, v, attn_mask, options, softmax_scale, qk, causal, out)
        if not return_lse:
            return out
        source = rotation.rotate_queries(q, rotation.part_of(q.shape[3], recipe.rotate))
        return out, lse + reference.smoothing_shift(source, k_mean, softmax_scale)
    prepared = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, recipe, q_scale, k_scale, v_scale, out_dtype
    )  # fmt: skip
    operands = prepared.query, prepared.key, prepared.value
    if options is not None and not (operands[0] is query and operands[1] is key and operands[2] is value):
        options = (recipe.qk, backend, is_causal, scale, enable_gqa, causal_alignment, prepared.out_dtype, dropout_p, None, None, None)
        repeated = eager.repeat(*operands, attn_mask, options)
        if repeated is not None:
            return repeated
    arguments = _operator_arguments(prepared, return_lse)
    out, lse = _forward(chosen)(*arguments)
    if options is not None and chosen != "triton":
        eager.remember(*operands, attn_mask, options, arguments, chosen == "auto", out)
    if not return_lse:
        return out
    if prepared.key.mean is not None:
        # from query as it came, where it did: its own rounding times a large mean would be the LSE's largest error
        if isinstance(query, torch.Tensor) and not is_stored(query):
            source = rotation.rotate_queries(query, prepared.query.rotated)
        else:
            source = dequantize(prepared.query)
        lse = lse + reference.smoothing_shift(source, prepared.key.mean, prepared.softmax_scale)
    return out, lse


def _forward(chosen: str):
    """A backend's operator of attention to what is quantized."""
    return {"triton": ops.library_ops.triton_forward, "cuda": ops.library_ops.cuda_forward, "auto": ops.library_ops.auto_forward}[chosen]


def _from_half(chosen: str):
    """The operator that quantizes, too."""
    return {"cuda": ops.library_ops.cuda_forward_from_half, "auto": ops.library_ops.auto_forward_from_half}[chosen]


def _with_half_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: Causal, scale: float | None, recipe: Recipe, out_dtype: torch.dtype,
    return_lse: bool, chosen: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`sdpa` by a recipe that keeps keys."""
    others, softmax_scale = recipe.of_others, query.shape[3] ** -0.5 if scale is None else float(scale)

    def to_others(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> hybrid.Others:
        if chosen != "triton" and _plain(q, k, v, recipe=others) is not None:
            return _from_half(chosen)(q, k, v, softmax_scale, others.qk, causal, out_dtype, True)
        q8, k8, v8 = _quantize(q, k, v, others)
        assert q8 is not None and k8 is not None and v8 is not None
        prepared = _Prepared(q8, k8, v8, None, causal, softmax_scale, out_dtype, others)
        return *_forward(chosen)(*_operator_arguments(prepared, True)), prepared.key.mean

    out, lse = hybrid.by_kernels(query, key, value, causal, softmax_scale, recipe, out_dtype, return_lse, to_others)
    return (out, lse) if return_lse else out


def _plain(
    query: Operand, key: Operand, value: Operand, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
    causal_alignment="top_left", recipe=DEFAULT_RECIPE, q_scale=None, k_scale=None, v_scale=None, out_dtype=None, return_lse=False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, ProductType, torch.Tensor | None] | None:  # fmt: skip
    """q, k, v, softmax scale, recipe.qk and attn_mask of a call to `sdpa` of which the attention kernel may quantize something, by what torch.compile
    knows; or None."""
    if not _is_at_once(recipe) or any(x is not None for x in (q_scale, k_scale, v_scale)):
        return None
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        return None
    if not query.dim() == key.dim() == value.dim() == 4:
        return None
    if not ((attn_mask is None and short.may_take(query, key, value)) or configs.may_quantize(query, value.shape[3])):
        return None
    return query, key, value, query.shape[3] ** -0.5 if scale is None else float(scale), recipe.qk, attn_mask


def _is_at_once(recipe: object) -> bool:
    """Whether it's of recipe.AT_ONCE. Every call asks, and fields take a microsecond to compare."""
    return recipe is DEFAULT_RECIPE or recipe is PRECISE or (type(recipe) is Recipe and recipe == AT_ONCE[recipe.qk])


def triton_sdpa(query: Operand, key: Operand, value: Operand, *args, **kwargs):
    """`sdpa` by the Triton kernels."""
    return sdpa(query, key, value, *args, **kwargs, backend="triton")


def cuda_sdpa(query: Operand, key: Operand, value: Operand, *args, **kwargs):
    """`sdpa` by the CUDA kernels, which are compiled on first use: the Hopper kernel where it takes the call, else the portable one, sm_80 and later.

    Raises:
        BackendUnavailable: they don't do what the call asks for, or can't run here.
        BuildError: they don't compile here.
    """
    return sdpa(query, key, value, *args, **kwargs, backend="cuda")


def reference_sdpa(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_alignment: str = "top_left",
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in plain torch, on any device: the oracle, and what `sdpa` runs on CPU tensors.

    Args and errors as in `sdpa`; quantized operands are restored first.
        dtype: what is computed in, float32 or float64.
    """
    causal = _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, out_dtype)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if isinstance(query, Quantized) or is_stored(query) else query.dtype
    operands = _imported(query, key, value, q_scale, k_scale, v_scale)
    _check_pair(operands[0], operands[1])
    q, k, v = (dequantize(x) if isinstance(x, Quantized) else x for x in operands)
    out, lse = reference.attention(q, k, v, attn_mask, causal=causal, softmax_scale=scale, dtype=dtype)
    return (out.to(out_dtype), lse.float()) if return_lse else out.to(out_dtype)


def call_of(
    query: Operand, key: Operand, value: Operand, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
    causal_alignment="top_left", recipe=DEFAULT_RECIPE, q_scale=None, k_scale=None, v_scale=None, out_dtype=None, return_lse=False,
) -> Call:  # fmt: skip
    """What the backends get when `sdpa` is called with these arguments: for benchmarks and tests that call them directly."""
    prepared = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment, recipe, q_scale, k_scale, v_scale, out_dtype
    )  # fmt: skip
    return Call(*_operator_arguments(prepared, return_lse))


def explain(query: Operand, key: Operand, value: Operand, *args, backend: Backend = "auto", **kwargs) -> Plan:
    """What `sdpa` with these arguments would run, and why. Quantizes, but doesn't attend."""
    device = query.device
    chosen = choose_backend(backend, device)
    because = [f"backend={backend!r} on {device}"]
    if chosen == "reference":
        missing = [x for x in (cuda_missing(device), triton_missing(device)) if x is not None]
        return Plan("reference", "attention", None, "float32", tuple(because + missing))
    check_recipe(kwargs.get("recipe", DEFAULT_RECIPE))
    if kwargs.get("recipe", DEFAULT_RECIPE).keeps_keys:
        return _explain_half_keys(query, key, value, *args, backend=backend, **kwargs)
    properties = device_of(device)
    plain = _plain(query, key, value, *args, **kwargs)
    if chosen != "triton" and plain is not None and ops.why_not_one_launch(*plain) is None:
        return Plan("cuda", "short", short.choose(plain[0]), "e4m3", (*because, "quantized and attended in one launch"))
    call = call_of(query, key, value, *args, **kwargs)
    if chosen != "triton" and plain is not None and ops.why_not_half_q(*plain) is None:
        call = replace(call, q=plain[0], q_scale=None)
        because.append("query is quantized where it attends")
    scores = "int8 and " if call.int8 else ""
    if chosen != "triton":
        planned = ops.plan_cuda(call, first=chosen == "auto")
        if isinstance(planned, HopperConfig):
            if plain is not None and ops.why_not_two_launches(*plain) is None and early.begins_early(call, planned, properties):
                because.append("attention begins with heads whose key and value are quantized")
            return Plan("cuda", "hopper", planned, f"{scores}e4m3", tuple(because))
        if isinstance(planned, PortableConfig):
            because.append(f"not the Hopper kernel: {configs.why_not(call, properties)}")
            return Plan("cuda", "portable", planned, scores + ("e4m3" if planned.operands == "native" else "f16"), tuple(because))
        if chosen == "cuda":
            raise BackendUnavailable(f"cuda: {planned}; use backend='triton' or 'auto'")
        because.append(f"cuda: {planned}")
    reason = run.why_not_hopper(call, properties)
    compute = call.compute
    if compute == "e4m3" and not properties.has_fp8_units:
        compute = "f16"
        because.append(f"compute f16: {properties.name} has no FP8 tensor cores")
    kernel = "portable" if reason else "hopper"
    return Plan("triton", kernel, run.choose(call, properties), scores + compute, tuple(because + ([reason] if reason else [])))


def _explain_half_keys(query: Operand, key: Operand, value: Operand, *args, recipe: Recipe, backend: Backend, **kwargs) -> Plan:
    """`explain` for a recipe that keeps keys: of attention to the others."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    kwargs |= dict(zip(names, args, strict=False))
    q, k, v = check_kept(query, key, value, kwargs.get("attn_mask"), recipe)
    causal = check_causal(kwargs.pop("is_causal", False), kwargs.pop("causal_alignment", "top_left"))
    kept = f"{recipe.sinks} first keys and {recipe.recent} last ones in half precision, by Triton"
    rows, part_causal = next(hybrid.parts(q.shape[2], k.shape[2], causal))
    keys, others_causal = hybrid.other_keys(q[:, :, rows].shape[2], k.shape[2], part_causal, recipe)
    if keys.start >= keys.stop:
        return Plan("triton", "half_keys", None, "half", (f"backend={backend!r} on {q.device}", kept, "there are no others"))
    masked = {"is_causal": others_causal != "none", "causal_alignment": "bottom_right"}
    others = explain(q[:, :, rows], k[:, :, keys], v[:, :, keys], backend=backend, recipe=recipe.of_others, **kwargs, **masked)
    return replace(others, because=(*others.because, kept))
