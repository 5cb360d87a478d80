"""Every check of the arguments, once. An error names the argument, what it was and what it must be."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch

from .recipe import BIAS_ALIGNMENT, E4M3, QUERY_GROUP, SCALE_BLOCK, Granularity, Quantized, Recipe
from .reference import Causal

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E4M3_BYTES = (E4M3, torch.uint8)
MIN_DIM, MAX_DIM, DIM_STEP = 16, 256, 8

Operand = torch.Tensor | Quantized


class BackendUnavailable(RuntimeError):
    """The chosen backend can't run here; the message says why and what to do."""


def is_stored(x: Operand) -> TypeGuard[torch.Tensor]:
    """Whether x is quantized by the user: e4m3, as such or as bytes, or int8."""
    return isinstance(x, torch.Tensor) and (x.dtype in E4M3_BYTES or x.dtype == torch.int8)


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """What the user quantized, bytes of e4m3 as e4m3."""
    return x if x.dtype == torch.int8 else x.view(E4M3)


def check_operand(name: str, x: Operand, layout: str) -> None:
    """q, k or v by itself: type, rank, dtype, strides, head dim."""
    if isinstance(x, Quantized):
        if x.layout != layout:
            raise ValueError(f"{name} is Quantized in the layout {x.layout!r}; it must be {layout!r}")
    elif not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor or a fp8attn.Quantized")
    elif x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, heads, length, head_dim)")
    elif x.dtype not in FLOATS and (not is_stored(x) or (x.dtype == torch.int8 and layout == "values")):
        stored = f"e4m3 as {E4M3_BYTES}{'' if layout == 'values' else ' or int8'}"
        raise TypeError(f"{name} is {x.dtype}; it must be one of {FLOATS}, or {stored} with its scale")
    elif x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"{name} has strides {x.stride()}; the last must be 1. Nothing is copied silently: call .contiguous()")
    dim = x.shape[3]
    if not MIN_DIM <= dim <= MAX_DIM or dim % DIM_STEP:
        raise ValueError(f"{name} has head_dim {dim}; it must be a multiple of {DIM_STEP} from {MIN_DIM} to {MAX_DIM}")


def check_shapes(query: Operand, key: Operand, value: Operand, enable_gqa: bool) -> None:
    """q, k and v against each other: devices, batch, heads, lengths, dims, dtypes."""
    q, k, v = query.shape, key.shape, value.shape
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}; it must be on query's device, {query.device}")
        if x.shape[0] != q[0]:
            raise ValueError(f"{name} has batch {x.shape[0]}; it must be query's, {q[0]}")
    if v[1] != k[1]:
        raise ValueError(f"value has {v[1]} heads; it must have as many as key, {k[1]}")
    if v[2] != k[2]:
        raise ValueError(f"value has length {v[2]}; it must be key's, {k[2]}")
    if k[3] != q[3]:
        raise ValueError(f"key has head_dim {k[3]}; it must be query's, {q[3]}")
    if q[1] != k[1]:
        if not enable_gqa:
            raise ValueError(f"query has {q[1]} heads and key {k[1]}; they must be equal unless enable_gqa=True")
        if k[1] == 0 or q[1] % k[1]:
            raise ValueError(f"query has {q[1]} heads; with enable_gqa it must be a multiple of key's {k[1]}")
    if is_stored(key) != is_stored(value) or isinstance(key, Quantized) != isinstance(value, Quantized):
        kinds = [x.data.dtype if isinstance(x, Quantized) else x.dtype for x in (key, value)]
        raise TypeError(f"key is {kinds[0]} and value {kinds[1]}; both must be float, both quantized with scales, or both Quantized")


def check_options(
    query: Operand, key: Operand, value: Operand, dropout_p: float, attn_mask: torch.Tensor | None, causal: Causal, scale: float | None
) -> None:
    """Everything that isn't a shape of q, k, v."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0: fp8attn is for inference")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")
    if torch.is_grad_enabled():
        for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise RuntimeError(f"{name} requires grad; fp8attn has no backward: call it under torch.no_grad(), or detach {name}")
    if attn_mask is None:
        return
    if causal != "none":
        raise ValueError("attn_mask is given and is_causal is True; only one of them can be: fold the causal mask into attn_mask")
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; it must be a torch.Tensor or None")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise TypeError(f"attn_mask is {attn_mask.dtype}; it must be bool (True: attend) or one of {FLOATS} (added to the scores)")
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask is on {attn_mask.device}; it must be on query's device, {query.device}")
    full = (*query.shape[:3], key.shape[2])
    padded = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(padded) != 4 or any(have not in (1, want) for have, want in zip(padded, full, strict=False)):
        raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}; it must broadcast to (batch, heads, Sq, Sk) = {full}")


def check_bias(query: Quantized, kv_length: int) -> None:
    """That means of queries, and what they add to the scores of keys, are of these queries and as many keys."""
    if query.bias is None:
        return
    batch, heads, length, dim = query.shape
    groups = -(-length // QUERY_GROUP)
    if query.mean is None or tuple(query.mean.shape) != (batch, heads, groups, dim):
        shape = None if query.mean is None else tuple(query.mean.shape)
        raise ValueError(f"query has a bias and a mean of shape {shape}; it must be {(batch, heads, groups, dim)}")
    wanted = (batch, heads, groups, -(-kv_length // BIAS_ALIGNMENT) * BIAS_ALIGNMENT)
    if tuple(query.bias.shape) != wanted:
        raise ValueError(
            f"query.bias has shape {tuple(query.bias.shape)}; it must be {wanted}: a smoothed query attends to the keys that it was quantized with"
        )
    if query.bias.dtype != torch.float32:
        raise TypeError(f"query.bias is {query.bias.dtype}; it must be float32")
    if query.bias.device != query.device:
        raise ValueError(f"query.bias is on {query.bias.device}; it must be on query's device, {query.device}")
    if not query.bias.is_contiguous():
        raise ValueError(f"query.bias has strides {query.bias.stride()}; it must be contiguous")


def check_recipe(recipe: Recipe) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it must be a fp8attn.Recipe")


def _kept_by(recipe: Recipe) -> str:
    return f"recipe keeps keys (sinks={recipe.sinks}, recent={recipe.recent})"


def check_keeps_none(recipe: Recipe) -> None:
    """For what is quantized as a whole."""
    if recipe.keeps_keys:
        raise ValueError(f"{_kept_by(recipe)}; it must keep none: such recipes are sdpa's, of query, key and value as they are")


def check_kept(
    query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands, if a recipe can keep some of their keys as they are."""
    if attn_mask is not None:
        raise ValueError(f"attn_mask is given and {_kept_by(recipe)}; it must be None")
    kept: list[torch.Tensor] = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if isinstance(x, Quantized) or is_stored(x):
            raise TypeError(f"{name} is quantized already and {_kept_by(recipe)}; it must be one of {FLOATS}")
        if x.dtype != (kept or [x])[0].dtype:
            raise TypeError(f"{name} is {x.dtype} and {_kept_by(recipe)}; it must be query's {kept[0].dtype}")
        kept.append(x)
    return kept[0], kept[1], kept[2]


def check_causal(is_causal: bool, causal_alignment: str) -> Causal:
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment is {causal_alignment!r}; it must be 'top_left' (as in PyTorch) or 'bottom_right'")
    if not is_causal:
        return "none"
    return "top_left" if causal_alignment == "top_left" else "bottom_right"


def named_scale(name: str, x: torch.Tensor, scale: torch.Tensor | float | None, for_values: bool) -> tuple[torch.Tensor, Granularity]:
    """The scale of what the user quantized, in the shape that `Quantized` has it, and what it covers."""
    batch, heads, length, dim = x.shape
    if scale is None:
        raise ValueError(f"{name} is {x.dtype} and {name}_scale is None; it must be the float32 multiplier that restores {name}")
    if isinstance(scale, (int, float)):
        scale = torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=x.device)
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        what = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise TypeError(f"{name}_scale is {what}; it must be a float or a float32 tensor")
    if scale.device != x.device:
        raise ValueError(f"{name}_scale is on {scale.device}; it must be on {name}'s device, {x.device}")
    blocks = -(-length // SCALE_BLOCK)
    shapes: list[tuple[tuple[int, ...], Granularity]] = [((batch, heads), "head"), ((batch, heads, 1), "head")]
    if for_values:
        shapes.append(((batch, heads, dim), "channel"))
    else:
        shapes += [((batch, heads, length), "token"), ((batch, heads, blocks), "block")]
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1), "tensor"
    for shape, granularity in shapes:
        if tuple(scale.shape) == shape:
            return (scale.unsqueeze(-1) if scale.dim() == 2 else scale), granularity
    wanted = ", ".join(f"{shape} ({granularity})" for shape, granularity in shapes)
    raise ValueError(f"{name}_scale has shape {tuple(scale.shape)}; it must have one element (tensor), or shape {wanted}")
