"""From a checked call to what kernels take: operands quantized, and a `Problem` or a `Call`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from . import ops, problem_ops, rotation, varlen_ops
from .ambient import autocast_dtype
from .call import GROUPS, Call, Problem
from .cuda import configs, fused_small
from .device import device_of
from .recipe import DEFAULT_RECIPE, FUSED_RECIPES, PRECISE, Packed, ProductType, Quantized, Recipe, frozen
from .validate import Arguments, Checked, Operand, Stored, cast, check


def autocast(q: Any, k: Any, v: Any, out_dtype: torch.dtype | None) -> tuple[Any, Any, Any, torch.dtype | None]:
    """Operands and `out_dtype` as autocast has them, if it is on."""
    if not is_compiling() and not _is_any_autocast_enabled():
        return q, k, v, out_dtype
    device = getattr(q, "device", None)
    if not isinstance(device, torch.device) or (dtype := autocast_dtype(device)) is None:
        return q, k, v, out_dtype
    return *(cast(x, dtype) for x in (q, k, v)), out_dtype or dtype


def quantized_operands(
    query: torch.Tensor | None, key: torch.Tensor | None, value: torch.Tensor | None, recipe: Recipe, modelled: bool = False,
    packed: tuple[Packed | None, Packed | None] = (None, None),
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:  # fmt: skip
    """The quantize operators, with their results as `Quantized`, or None for a tensor that isn't given.

    Args:
        modelled: compute in plain torch, on any device.
        packed: where sequences lie in query, and in key and value.
    """
    of_q, of_k = packed
    if of_k is not None and key is not None and value is not None:
        return _packed_operands(query, key, value, recipe, (of_q, of_k), modelled)
    name = "modelled_quantize" if modelled else "quantize"
    if ops.is_direct(query, key, value):
        q, k, v = ops.QUANTIZERS[name](query, key, value, recipe)
        return q if q is None or of_q is None else replace(q, packed=of_q), k, v
    tensors = getattr(ops.library_ops, name)(
        query, key, value, recipe.q, recipe.k, recipe.v, recipe.smooth_k, recipe.smooth_v, recipe.smooth_q, recipe.rotate, recipe.qk
    )  # fmt: skip
    q = k = v = None
    if query is not None:
        means, bias = (tensors[2], None if key is None else tensors[9]) if recipe.smooth_q else (None, None)
        part = rotation.part_of(query.shape[3], recipe.rotate)
        q = Quantized(tensors[0], tensors[1], recipe.q, "rows", query.shape[2], means, part, bias, of_q)
    if key is not None:
        k_mean, part = tensors[5] if recipe.smooth_k else None, rotation.part_of(key.shape[3], recipe.rotate)
        k = Quantized(tensors[3], tensors[4], recipe.k, "rows", key.shape[2], k_mean, part)
        v = Quantized(tensors[6], tensors[7], recipe.v, "values", key.shape[2], tensors[8] if recipe.smooth_v else None)
    return q, k, v


def _packed_operands(
    query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, recipe: Recipe, packed: tuple[Packed | None, Packed], modelled: bool
) -> tuple[Quantized | None, Quantized, Quantized]:
    """`quantized_operands` of packed keys and values: all three at once where no operator is called."""
    name = "modelled_varlen_quantize" if modelled else "varlen_quantize"
    of_q, of_k = packed
    if ops.is_direct(query, key, value):
        q, k, v = varlen_ops.QUANTIZERS[name](query, key, value, recipe, of_k)
        return None if q is None else replace(q, packed=of_q), k, v
    q = None if query is None else quantized_operands(query, None, None, recipe, modelled, (of_q, None))[0]
    operator = getattr(ops.library_ops, name)
    k_data, k_scale, k_mean, v_data, v_scale, v_mean = operator(key, value, of_k.cu_seqlens, of_k.seqused, recipe.text)
    part = rotation.part_of(key.shape[3], recipe.rotate)
    return (
        q,
        Quantized(k_data, k_scale, recipe.k, "rows", of_k.tokens, k_mean if recipe.smooth_k else None, part, packed=of_k),
        Quantized(v_data, v_scale, recipe.v, "values", of_k.tokens, v_mean if recipe.smooth_v else None, packed=of_k),
    )


def imported(key: Stored, value: Stored) -> tuple[Quantized, Quantized]:
    token_scale, values = ops.library_ops.import_kv(key.data, key.scale, key.granularity, value.data)
    length = key.shape[2]
    return Quantized(key.data, token_scale, "token", "rows", length), Quantized(values, value.scale, value.granularity, "values", length)


def operands_of(checked: Checked) -> tuple[Operand, Operand, Operand]:
    """The operands, what the user quantized as `Quantized`."""
    query, key, value = checked.query, checked.key, checked.value
    if isinstance(key, Stored) and isinstance(value, Stored):
        key, value = imported(key, value)
    assert not isinstance(query, Stored) and not isinstance(key, Stored) and not isinstance(value, Stored)
    return query, key, value


@frozen
class Prepared:
    """A checked call, its operands quantized; query as it came if the attention kernel quantizes it."""

    query: Quantized | torch.Tensor
    key: Quantized
    value: Quantized
    checked: Checked
    recipe: Recipe


def prepare(checked: Checked, recipe: Recipe, chosen: str = "auto") -> Prepared:
    query, key, value = operands = operands_of(checked)
    q, k, v, recipe_beside = to_quantize(operands, recipe)
    if q is not None and isinstance(key, Quantized) and isinstance(value, Quantized):
        prepared = Prepared(q, key, value, checked, recipe_beside)
        if kernel_quantizes_query(prepared, chosen):
            return prepared
    if q is not None or k is not None:
        packed = (None, None) if checked.varlen is None else (checked.varlen.q, checked.varlen.k)
        q_quantized, k_quantized, v_quantized = quantized_operands(q, k, v, recipe_beside, chosen == "modelled", packed)
        query, key, value = q_quantized or query, k_quantized or key, v_quantized or value
    assert isinstance(query, Quantized) and isinstance(key, Quantized) and isinstance(value, Quantized)
    if query.mean is not None and query.bias is None:
        query = replace(query, bias=ops.library_ops.score_bias(query.mean, key.data, key.scale, key.granularity))
    return Prepared(query, key, value, checked, recipe)


def kernel_quantizes_query(p: Prepared, chosen: str) -> bool:
    """Whether the attention kernel quantizes a query whose key and value are quantized already.

    Never in traced calls: the answer depends on strides and addresses, which torch.compile doesn't know.
    """
    query = p.query
    if chosen not in ops.FUSING or p.checked.varlen is not None or is_compiling() or not isinstance(query, torch.Tensor):
        return False
    if not is_fused_recipe(p.recipe) or not configs.may_quantize(query, p.value.shape[3]):
        return False
    return not isinstance(ops.plan_cuda(call_from(p, True), first=True), str)


def to_quantize(
    operands: tuple[Operand, Operand, Operand], recipe: Recipe
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Recipe]:
    """q, k and v of the operands that aren't quantized yet, else None; and the recipe by which they are."""
    q, k, v = (x if isinstance(x, torch.Tensor) else None for x in operands)
    if q is None and k is None:
        return q, k, v, recipe
    return q, k, v, _beside([x for x in operands[:2] if isinstance(x, Quantized)], recipe)


def _beside(quantized: list[Quantized], recipe: Recipe) -> Recipe:
    """The recipe for an operand whose partner in Q·Kᵀ is quantized already: stored and rotated as that is."""
    for x in quantized:
        like: ProductType = "int8" if x.data.dtype == torch.int8 else "e4m3"
        if rotation.part_of(x.shape[3], recipe.rotate) != x.rotated or recipe.qk != like:
            recipe = replace(recipe, qk=like, rotate=rotation.named(x.shape[3], x.rotated))
    return recipe


def call_from(p: Prepared, return_lse: bool) -> Call:
    """What a backend's forward operator attends to."""
    query, key, value, checked, recipe = p.query, p.key, p.value, p.checked, p.recipe
    k_scale, v_scale = key.scale, value.scale
    if checked.varlen is None:
        batch, kv_heads = query.shape[0], key.shape[1]
        k_scale, v_scale = _of_every_head(key, batch, kv_heads, 1), _of_every_head(value, batch, kv_heads, value.shape[3])
    bias = mean_scores = lse_mean = q_scale = None
    of_mean = key.mean is not None and bool(checked.softcap or checked.sinks is not None)
    if isinstance(query, torch.Tensor):
        q, q_group = query, GROUPS[recipe.q]
        lse_mean = key.mean.contiguous() if key.mean is not None and (return_lse or of_mean) else None
    else:
        q, q_group, bias = query.data, 1 if checked.varlen is not None else GROUPS[query.granularity], query.bias
        q_scale = query.scale if checked.varlen is not None else _of_every_head(query, query.shape[0], query.shape[1], 1)
        if of_mean:
            mean_scores = unsmoothed(p, torch.zeros(query.shape[:3], dtype=torch.float32, device=query.device))
    return Call(
        q, q_scale, q_group, key.data, k_scale, GROUPS[key.granularity], value.data, v_scale, value.mean, checked.attn_mask, bias, key.length,
        checked.softmax_scale, checked.causal, recipe.compute, recipe.two_level, checked.out_dtype, return_lse, checked.window, checked.softcap,
        checked.sinks, mean_scores, lse_mean, checked.varlen,
    )  # fmt: skip


def _of_every_head(x: Quantized, batch: int, heads: int, n: int) -> torch.Tensor:
    """A scale as (B, H, …), of `tensor` and `head` (B, H, n)."""
    return x.scale.expand(batch, heads, n) if x.granularity in ("tensor", "head") else x.scale


def unsmoothed(p: Prepared, lse: torch.Tensor) -> torch.Tensor:
    """The LSE of K as it was, of that of K without its mean."""
    assert isinstance(p.query, Quantized)
    # from query as it came, where it did: its own rounding times a large mean would be the LSE's largest error
    scale, granularity, rotated = None, "token", 0
    if isinstance(p.checked.query, torch.Tensor):
        q, rotated = p.checked.query, p.query.rotated
    elif p.query.mean is None:
        q, scale, granularity = p.query.data, p.query.scale, p.query.granularity
    else:
        q = dequantized(replace(p.query, packed=None))
    if p.checked.varlen is not None:
        return ops.library_ops.varlen_unsmoothed_lse(
            lse, q, p.key.mean, p.checked.varlen.q.cu_seqlens, p.checked.softmax_scale, rotated, scale, granularity, scale=p.checked.scale
        )  # fmt: skip
    return ops.library_ops.unsmoothed_lse(lse, q, p.key.mean, p.checked.softmax_scale, rotated, scale, granularity, scale=p.checked.scale)


def dequantized(x: Quantized) -> torch.Tensor:
    """float32 (B, H, S, D), as fp8attn.quantization.dequantize."""
    if x.packed is not None:
        packed = x.packed
        return ops.library_ops.varlen_dequantize(
            x.data, x.scale, x.granularity, x.layout, x.mean, packed.cu_seqlens, packed.seqused, packed.tokens
        )  # fmt: skip
    return ops.library_ops.dequantize(x.data, x.scale, x.granularity, x.layout, x.length, x.mean)


def problem_of(checked: Checked, chosen: str, recipe: Recipe, return_lse: bool) -> Problem | None:
    """A call in which the attention kernel may quantize one or more of q, k and v, for the operator that quantizes and
    attends; None for other calls.

    The answer depends only on what torch.compile knows.
    """
    if chosen not in ops.FUSING or not checked.is_float or not is_fused_recipe(recipe):
        return None
    query, key, value = checked.floats
    packed = checked.varlen is not None
    if not ((checked.attn_mask is None and not packed and fused_small.may_take(query, key, value)) or configs.may_quantize(query, value.shape[3])):
        return None
    problem = Problem(
        query, key, value, checked.softmax_scale, recipe.qk, checked.causal, checked.out_dtype, return_lse, checked.attn_mask, checked.window,
        checked.softcap, checked.sinks, checked.varlen,
    )  # fmt: skip
    return None if packed and problem_ops.unsupported_fused_q(problem, device_of(query.device)) is not None else problem


def is_fused_recipe(recipe: object) -> bool:
    """Whether the recipe is one of recipe.FUSED_RECIPES.

    Identity is checked first, because comparing fields takes a microsecond, in every call. Don't use this in traced
    calls: torch.compile doesn't guard an argument's identity.
    """
    return recipe is DEFAULT_RECIPE or recipe is PRECISE or (type(recipe) is Recipe and recipe == FUSED_RECIPES[recipe.qk])


def call_of(*args, **kwargs) -> Call:
    """The `Call` that backends get for these arguments of `sdpa`: benchmarks and tests call backends with it."""
    a = Arguments(*args, **kwargs)
    return call_from(prepare(check(a), a.recipe, "triton"), a.return_lse)
