"""Checks of all arguments, each made once. An error names the argument, its value and what it must be.

`check` is for attention; `check_quantize` and `check_import` are for quantization. `check_call` and the other checks of
operators guarantee what the kernels rely on, because users can call the operators directly.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import KW_ONLY, replace
from numbers import Real
from typing import Any, Literal, TypeGuard

import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_compiling

from . import rotation
from .call import Call, Varlen
from .layout import padded_length, units_of
from .paged_tensors import PagedTensors
from .pages import PAGE, RECENT, PagedBatch, Storage, tokens_of, unsupported_recipe
from .quantization import bias_pitch, scale_shape
from .recipe import (
    DEFAULT_RECIPE,
    E4M3,
    FUSED_RECIPES,
    QUERY_GROUP,
    ROW_GRANULARITIES,
    SCALE_BLOCK,
    VALUE_GRANULARITIES,
    Granularity,
    Layout,
    Packed,
    Quantized,
    Recipe,
    frozen,
)
from .reference import CAUSAL_WINDOW, Causal, Scoring, Window, simplified
from .rotary import Angles

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
E4M3_BYTES = (E4M3, torch.uint8)
STORED = (*E4M3_BYTES, torch.int8)
MIN_DIM, MAX_DIM, DIM_STEP = 16, 256, 8

NUMBERS = (float, int, Real)
"""Types of real numbers. Those that are asked for first take a tenth of the time of Real."""

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
"""Tensors of other types may keep their elements elsewhere, or represent other values than they hold."""

Backend = Literal["auto", "triton", "cuda", "reference", "modelled"]
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "cuda", "reference", "modelled")
CAUSAL: tuple[Causal, ...] = ("none", "top_left", "bottom_right")

Operand = torch.Tensor | Quantized
Scale = torch.Tensor | float


class BackendUnavailable(RuntimeError):
    """The chosen backend can't run here. The message says why and what to do."""


@frozen
class Arguments:
    """The arguments of `fp8attn.sdpa`, in its order and with its defaults."""

    query: Operand
    key: Operand
    value: Operand
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    _: KW_ONLY
    causal_alignment: str = "top_left"
    window: Window | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    recipe: Recipe = DEFAULT_RECIPE
    q_scale: Scale | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    out_dtype: torch.dtype | None = None
    return_lse: bool = False
    backend: Backend = "auto"


@frozen
class VarlenArguments:
    """The arguments of `fp8attn.varlen_sdpa`, in its order and with its defaults."""

    q: Operand
    k: Operand
    v: Operand
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    _: KW_ONLY
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_k: torch.Tensor | None = None
    is_causal: bool = False
    window: Window | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scale: float | None = None
    recipe: Recipe = DEFAULT_RECIPE
    out_dtype: torch.dtype | None = None
    return_lse: bool = False
    backend: Backend = "auto"


@frozen
class Stored:
    """A tensor that the user quantized.

    Attributes:
        data: (B, H, S, D), e4m3 or int8.
        scale: float32, in the shape of `Quantized.scale` for `granularity`.
    """

    data: torch.Tensor
    scale: torch.Tensor
    granularity: Granularity

    @property
    def shape(self) -> torch.Size:
        """(B, H, S, D)."""
        return self.data.shape


@frozen
class Checked:
    """A call that passed every check, in the one form that all backends take.

    Attributes:
        query, key, value: tensors of one batch size; key and value have the same number of heads. Sizes of 1 are
            expanded without a copy.
        attn_mask: (B, Hq, Sq, Sk), bool or float, expanded; or None.
        causal: the alignment of the window; `none` if it would hide no key.
        window: keys that a row sees before and after the key that it is aligned to; -1 is unlimited.
        softcap: scores become softcap · tanh(score / softcap); 0 caps nothing.
        sinks: float32 (Hq,), contiguous; or None.
        softmax_scale: factor of Q·Kᵀ, ignored if `scale` is given.
        out_dtype: dtype of the output.
        scale: factor of Q·Kᵀ if torch.compile doesn't know its value, a float64 scalar tensor on the CPU; else None.
        varlen: the sequences of packed operands, which are (1, H, T, D), or None.
    """

    query: torch.Tensor | Quantized | Stored
    key: torch.Tensor | Quantized | Stored
    value: torch.Tensor | Quantized | Stored
    attn_mask: torch.Tensor | None
    causal: Causal
    softmax_scale: float
    out_dtype: torch.dtype
    scale: torch.Tensor | None = None
    window: Window = CAUSAL_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    varlen: Varlen | None = None

    @property
    def is_float(self) -> bool:
        """Whether none of query, key and value is quantized."""
        return isinstance(self.query, torch.Tensor) and isinstance(self.key, torch.Tensor) and isinstance(self.value, torch.Tensor)

    @property
    def floats(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value. Only for calls with `is_float`."""
        query, key, value = self.query, self.key, self.value
        assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        return query, key, value

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.query.data.device if isinstance(self.query, Stored) else self.query.device


def cast(x: Any, dtype: torch.dtype) -> Any:
    """An argument as autocast passes it on: a floating-point tensor is cast to `dtype`, anything else is returned as it
    is."""
    return x.to(dtype) if isinstance(x, torch.Tensor) and not is_causal_bias(x) and x.dtype in FLOATS else x


def is_stored(x: object) -> TypeGuard[torch.Tensor]:
    """Whether the user quantized x: e4m3, also as uint8 bytes, or int8."""
    return isinstance(x, torch.Tensor) and x.dtype in STORED


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """A tensor that the user quantized, with uint8 bytes viewed as e4m3."""
    return x if x.dtype == torch.int8 else x.view(E4M3)


def check(a: Arguments) -> Checked:
    """Check all arguments of attention but `backend`, which depends on the machine.

    Raises:
        TypeError, ValueError: an argument isn't as the docstring of fp8attn.sdpa says.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    check_recipe(a.recipe)
    check_operand("query", a.query, "rows")
    check_operand("key", a.key, "rows")
    check_operand("value", a.value, "values")
    stored_q, stored_k, stored_v = _check_kinds(a)
    batch, heads, kv_heads = _broadcast_sizes(a.query.shape, a.key.shape, a.value.shape, a.enable_gqa)
    attn_mask, causal, window = _check_masks(a, (batch, heads, a.query.shape[2], a.key.shape[2]))
    _check_options(a)
    check_scores(a.softcap, a.sinks, heads, a.query.device)
    check_no_gradients(a)
    if a.recipe.has_half_keys:
        _check_half_keys_call(a)
    if a.recipe.statistics == "page":
        _check_page_call(a.recipe, causal, a.query.shape[2], a.key.shape[2])
    query = expanded("query", _with_scale("q", a.query, a.q_scale, for_values=False) if stored_q else a.query, batch, heads)
    if isinstance(query, Stored):  # unlike keys and values, queries aren't converted
        query = Quantized(query.data, query.scale, query.granularity, "rows", query.shape[2])
    key = expanded("key", _with_scale("k", a.key, a.k_scale, for_values=False) if stored_k else a.key, batch, kv_heads)
    value = expanded("value", _with_scale("v", a.value, a.v_scale, for_values=True) if stored_v else a.value, batch, kv_heads)
    _check_pair(query, key)
    sinks = None if a.sinks is None else a.sinks.contiguous()
    softmax_scale, scale = _softmax_scale(a.scale, a.query.shape[3])
    return Checked(query, key, value, attn_mask, causal, softmax_scale, a.out_dtype or _default_dtype(query), scale, window, float(a.softcap), sinks)


def _default_dtype(query: torch.Tensor | Quantized | Stored) -> torch.dtype:
    """The dtype of the output of a query."""
    return query.dtype if isinstance(query, torch.Tensor) else torch.bfloat16


def _softmax_scale(scale: float | None, dim: int) -> tuple[float, torch.Tensor | None]:
    """`Checked.softmax_scale` and `Checked.scale`."""
    if scale is not None and is_compiling() and not _is_known(scale):
        return dim**-0.5, torch.ones((), dtype=torch.float64, device="cpu") * scale
    return dim**-0.5 if scale is None else float(scale), None


def check_varlen(a: VarlenArguments) -> Checked:
    """Check all arguments of attention of packed sequences but `backend`, which depends on the machine.

    Raises:
        TypeError, ValueError: an argument isn't as the docstring of fp8attn.varlen_sdpa says.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    check_recipe(a.recipe)
    check_varlen_recipe(a.recipe)
    query, key, value = (_check_packed_operand(name, getattr(a, name), "values" if name == "v" else "rows") for name in "qkv")
    if isinstance(key, Quantized) != isinstance(value, Quantized):
        kinds = [x.data.dtype if isinstance(x, Quantized) else x.dtype for x in (key, value)]
        raise TypeError(f"k is {kinds[0]} and v {kinds[1]}; both must be float, or both Quantized")
    for name, x in (("k", key), ("v", value)):
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}; it must be on q's device, {query.device}")
    _check_alike({name: x for name, x in (("q", query), ("k", key), ("v", value)) if isinstance(x, torch.Tensor)})
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(f"v has {value.shape[2]} tokens and {value.shape[1]} heads; it must have k's, {key.shape[2]} and {kv_heads}")
    if key.shape[3] != dim:
        raise ValueError(f"k has head_dim {key.shape[3]}; it must be q's, {dim}")
    _check_groups(heads, kv_heads)
    varlen = _checked_lengths(a, query, key)
    _check_pair(query, key)
    causal, window = _varlen_window(a)
    _check_flags(is_causal=a.is_causal, return_lse=a.return_lse)
    _check_scale_and_dtype(a.scale, a.out_dtype)
    check_scores(a.softcap, a.sinks, heads, query.device)
    for name in ("q", "k", "v", "sinks"):
        _check_no_gradient(name, getattr(a, name))
    softmax_scale, scale = _softmax_scale(a.scale, dim)
    sinks = None if a.sinks is None else a.sinks.contiguous()
    return Checked(
        query, key, value, None, causal, softmax_scale, a.out_dtype or _default_dtype(query), scale, window, float(a.softcap), sinks, varlen
    )


def unsupported_varlen_recipe(recipe: Recipe) -> str | None:
    """Why packed sequences can't be quantized by a recipe, or None if they can."""
    for name, wanted in (("q", ("token",)), ("k", ("block", "token")), ("v", ("channel",)), ("smooth_q", (False,)), ("statistics", ("sequence",))):
        if getattr(recipe, name) not in wanted:
            allowed = " or ".join(map(repr, wanted))
            return f"recipe.{name} is {getattr(recipe, name)!r}; it must be {allowed}: no other is made for packed sequences"
    if recipe.has_half_keys:
        return f"{_half_keys_of(recipe)}; it must keep none: such recipes aren't made for packed sequences"
    return None


def check_varlen_recipe(recipe: Recipe) -> None:
    """Check that packed sequences can be quantized by a recipe."""
    reason = unsupported_varlen_recipe(recipe)
    if reason is not None:
        raise ValueError(reason)


def _check_packed_operand(name: str, x: object, layout: Layout) -> torch.Tensor | Quantized:
    """Check a packed q, k or v on its own, and give it as (1, H, T, D)."""
    if isinstance(x, Quantized):
        if x.packed is None:
            raise ValueError(f"{name} is Quantized without cu_seqlens; it must be packed, by fp8attn.quantize with cu_seqlens_q or cu_seqlens_k")
        check_quantized(name, x, layout, packed=True)
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor or a fp8attn.Quantized")
    check_plain(name, x)
    if x.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, heads, head_dim)")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}; it must be one of {FLOATS}, or Quantized")
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(f"{name} has strides {x.stride()}; the last must be 1. Nothing is copied silently: call .contiguous()")
    _check_dim(name, x.shape[2])
    return x.transpose(0, 1).unsqueeze(0)


def _checked_lengths(a: VarlenArguments, query: torch.Tensor | Quantized, key: torch.Tensor | Quantized) -> Varlen:
    """The sequences of a call."""
    of_q = _packed("q", a.cu_seqlens_q, None, query)
    of_k = _packed("k", a.cu_seqlens_k, a.seqused_k, key)
    if of_q.sequences != of_k.sequences:
        raise ValueError(f"cu_seqlens_k is of {of_k.sequences} sequences; it must be of as many as cu_seqlens_q, {of_q.sequences}")
    for name, longest in (("max_seqlen_q", a.max_seqlen_q), ("max_seqlen_k", a.max_seqlen_k)):
        if longest is not None and (not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool)):
            raise TypeError(f"{name} is a {type(longest).__name__}; it must be an int or None")
        if longest is not None and not is_compiling() and longest < 0:
            raise ValueError(f"{name} is {longest}; it must be 0 or more")
    longest_q = of_q.tokens if a.max_seqlen_q is None else a.max_seqlen_q
    return Varlen(of_q, of_k, longest_q, of_k.tokens if a.max_seqlen_k is None else a.max_seqlen_k)


def _packed(name: str, cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None, x: torch.Tensor | Quantized) -> Packed:
    """Where the sequences of q or k lie: as the arguments say, or as `x` was quantized."""
    if isinstance(x, Quantized):
        assert x.packed is not None
        for what, given, own in (("cu_seqlens", cu_seqlens, x.packed.cu_seqlens), ("seqused", seqused, x.packed.seqused)):
            if given is not None and given is not own and not is_compiling():
                raise ValueError(f"{what}_{name} isn't the tensor that {name} was quantized with; it must be that tensor, or None")
        return x.packed
    if cu_seqlens is None:
        raise TypeError(f"cu_seqlens_{name} is None; it must be int32 (N + 1) for a {name} that isn't Quantized")
    packed = Packed(cu_seqlens, seqused, x.shape[2])
    _check_packed(name, packed, x.device)
    return packed


def _check_packed(name: str, packed: Packed, device: torch.device) -> None:
    """Check the tensors of a `Packed` of q or k."""
    _check_tensor(f"cu_seqlens_{name}", packed.cu_seqlens, (torch.int32,), None, device)
    if packed.cu_seqlens.dim() != 1 or packed.cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens_{name} has shape {tuple(packed.cu_seqlens.shape)}; it must be (sequences + 1,), of one sequence at least")
    _check_contiguous(f"cu_seqlens_{name}", packed.cu_seqlens)
    if packed.seqused is not None:
        _check_tensor(f"seqused_{name}", packed.seqused, (torch.int32,), (packed.sequences,), device)
        _check_contiguous(f"seqused_{name}", packed.seqused)


def _varlen_window(a: VarlenArguments) -> tuple[Causal, Window]:
    """The window of every sequence, and its alignment."""
    if a.window is None:
        return "bottom_right" if a.is_causal else "none", CAUSAL_WINDOW
    left, right = checked_window(a.window)
    window = (left, 0 if a.is_causal else right)
    return ("none", CAUSAL_WINDOW) if window == (-1, -1) else ("bottom_right", window)


def check_lengths(varlen: Varlen, device: torch.device) -> None:
    """Check the lengths that an operator got."""
    _check_packed("q", varlen.q, device)
    _check_packed("k", varlen.k, device)
    if varlen.q.sequences != varlen.k.sequences:
        raise ValueError(f"cu_seqlens_k is of {varlen.k.sequences} sequences; it must be of as many as cu_seqlens_q, {varlen.q.sequences}")
    for name, longest in (("longest_q", varlen.longest_q), ("longest_k", varlen.longest_k)):
        if longest < 0:
            raise ValueError(f"{name} is {longest}; it must be 0 or more")


def check_packed_floats(k: torch.Tensor, v: torch.Tensor, packed: Packed) -> None:
    """Check packed keys and values of an operator, (1, H, T, D)."""
    check_rows("k", k, FLOATS)
    check_rows("v", v, (k.dtype,))
    _, heads, tokens, dim = k.shape
    _check_tensor("k", k, FLOATS, (1, heads, tokens, dim), k.device)
    _check_tensor("v", v, FLOATS, (1, heads, tokens, v.shape[3]), k.device)
    check_dims(dim, v.shape[3])
    _check_packed("k", packed, k.device)


def _is_known(number: float) -> bool:
    """Whether torch.compile knows the value of a number."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

    return has_static_value(number)


def check_quantize_packed(operands: dict[str, object], recipe: Recipe, packed: dict[str, Packed]) -> dict[str, torch.Tensor]:
    """Check the arguments of fp8attn.quantize for packed sequences.

    Args:
        operands: query, key and value, those that are given.
        packed: q and k, those that are given.

    Returns:
        the operands as (1, H, T, D).

    Raises:
        TypeError, ValueError: an argument isn't as the docstring of fp8attn.quantize says.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    check_recipe(recipe)
    check_varlen_recipe(recipe)
    floats: dict[str, torch.Tensor] = {}
    for name, x in operands.items():
        found = _check_packed_operand(name, x, "values" if name == "value" else "rows")
        if isinstance(found, Quantized):
            raise TypeError(f"{name} is quantized already; it must be float16, bfloat16 or float32")
        _check_no_gradient(name, found)
        floats[name] = found
    for name in ("q", "k"):
        there = ("query" if name == "q" else "key") in operands
        if there != (name in packed):
            what = "query" if name == "q" else "key"
            raise ValueError(f"cu_seqlens_{name} is {'None' if there else 'given'}; it must be {'given' if there else 'None'}, as {what} is")
    if ("key" in floats) != ("value" in floats):
        raise ValueError(f"{'value' if 'key' in floats else 'key'} is None; key and value are quantized together")
    _check_alike(floats)
    if "key" in floats and floats["value"].shape[1:3] != floats["key"].shape[1:3]:
        tokens, heads = floats["value"].shape[2], floats["value"].shape[1]
        raise ValueError(f"value has {tokens} tokens and {heads} heads; it must have key's, {floats['key'].shape[2]} and {floats['key'].shape[1]}")
    for name, where in packed.items():
        _check_packed(name, where, next(iter(floats.values())).device)
    return floats


def check_quantize(query: object, key: object, value: object, recipe: Recipe) -> None:
    """Check the arguments of fp8attn.quantize.

    Raises:
        TypeError, ValueError: an argument isn't as the docstring of fp8attn.quantize says.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    check_recipe(recipe)
    floats: dict[str, torch.Tensor] = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None:
            continue
        check_operand(name, x, "values" if name == "value" else "rows")
        if not isinstance(x, torch.Tensor) or is_stored(x):
            raise TypeError(f"{name} is quantized already; it must be float16, bfloat16 or float32")
        floats[name] = x
    if (key is None) != (value is None):
        raise ValueError(f"{'key' if key is None else 'value'} is None; key and value are quantized together")
    if not floats:
        raise ValueError("query, key and value are None; at least query, or key and value, must be tensors")
    if recipe.has_half_keys:
        raise ValueError(f"{_half_keys_of(recipe)}; it must keep none: such recipes are sdpa's, of query, key and value as they are")
    if "key" not in floats and recipe.smooth_q:
        raise ValueError("key is None and recipe.smooth_q is True; key and value must be given, or query to sdpa as it is, beside quantized ones")
    _check_alike(floats)
    if "key" in floats:
        for name in ("query", "value"):
            if name in floats and floats[name].shape[0] != floats["key"].shape[0]:
                raise ValueError(f"{name} has batch {floats[name].shape[0]}; it must be key's, {floats['key'].shape[0]}")
        k, v = floats["key"].shape, floats["value"].shape
        if v[1] != k[1]:
            raise ValueError(f"value has {v[1]} heads; it must have as many as key, {k[1]}")
        _broadcast_sizes(floats["query"].shape if "query" in floats else k, k, v, True)
        if "query" in floats and k[1] != 0 and floats["query"].shape[1] % k[1]:
            raise ValueError(f"query has {floats['query'].shape[1]} heads; it must be a multiple of key's {k[1]}")
    for name, x in floats.items():
        _check_no_gradient(name, x)


def check_import(key: object, value: object, k_scale: object, v_scale: object) -> tuple[Stored, Stored]:
    """Check the arguments of fp8attn.import_kv, and give key and value with their scales.

    Raises:
        TypeError, ValueError: an argument isn't as the docstring of fp8attn.import_kv says.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    check_operand("key", key, "rows")
    check_operand("value", value, "values")
    for name, x in (("key", key), ("value", value)):
        if not is_stored(x):
            what = x.dtype if isinstance(x, torch.Tensor) else "Quantized"
            raise TypeError(f"{name} is {what}; it must be float8_e4m3fn{', uint8 or int8' if name == 'key' else ' or uint8'}")
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    _check_alike({"key": key, "value": value})
    for i, what in enumerate(("batch", "heads")):
        if key.shape[i] != value.shape[i]:
            raise ValueError(f"value has {what} {value.shape[i]}; it must be key's, {key.shape[i]}")
    _broadcast_sizes(key.shape, key.shape, value.shape, True)
    for name, x in (("key", key), ("value", value), ("k_scale", k_scale), ("v_scale", v_scale)):
        _check_no_gradient(name, x)
    stored_key, stored_value = _with_scale("k", key, k_scale, for_values=False), _with_scale("v", value, v_scale, for_values=True)
    return stored_key, stored_value


def check_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is a {type(recipe).__name__}; it must be a fp8attn.Recipe")


def check_backend(backend: object) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS}")


def check_plain(name: str, x: torch.Tensor) -> None:
    """Check that a tensor's elements lie where its address and strides say."""
    if type(x) not in PLAIN_TYPES:
        raise TypeError(
            f"{name} is a {type(x).__name__}, a subclass of torch.Tensor; it must be a torch.Tensor:"
            " pass what it stands for (DTensor.to_local(), a nested tensor padded, else .as_subclass(torch.Tensor) of what has elements of its own)"
        )
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; it must be a torch.Tensor: pad it, and hide the padding by attn_mask")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has the layout {x.layout}; it must be torch.strided: call .to_dense()")


def check_operand(name: str, x: object, layout: Layout) -> None:
    """Check q, k or v on its own: type, rank, dtype, strides, head dim."""
    if isinstance(x, Quantized):
        check_quantized(name, x, layout)
    elif not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor or a fp8attn.Quantized")
    else:
        check_plain(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, heads, length, head_dim)")
        if x.dtype not in FLOATS and (not is_stored(x) or (x.dtype == torch.int8 and layout == "values")):
            stored = f"e4m3 as {E4M3_BYTES}{'' if layout == 'values' else ' or int8'}"
            raise TypeError(f"{name} is {x.dtype}; it must be one of {FLOATS}, or {stored} with its scale")
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1. Nothing is copied silently: call .contiguous()")
    _check_dim(name, x.shape[3])


def _check_dim(name: str | None, dim: int) -> None:
    """Check the head dim of an argument, or of all operands."""
    if not MIN_DIM <= dim <= MAX_DIM or dim % DIM_STEP:
        what = "head_dim is" if name is None else f"{name} has head_dim"
        raise ValueError(f"{what} {dim}; it must be a multiple of {DIM_STEP} from {MIN_DIM} to {MAX_DIM}")


def check_quantized(name: str, x: Quantized, layout: Layout, *, packed: bool = False) -> None:
    """Check that the tensors of a `Quantized` have the dtypes, shapes and device that its attributes say.

    Args:
        packed: whether it must be packed. Otherwise it must not.
    """
    if (x.packed is not None) != packed:
        raise ValueError(f"{name} is Quantized with cu_seqlens; it must be quantized without: packed operands are varlen_sdpa's")
    if x.layout != layout:
        raise ValueError(f"{name} is Quantized in the layout {x.layout!r}; it must be {layout!r}")
    dtypes = (E4M3, torch.int8) if layout == "rows" else (E4M3,)
    granularities = ROW_GRANULARITIES if layout == "rows" else VALUE_GRANULARITIES
    check_rows(f"{name}.data", x.data, dtypes)
    if x.granularity not in granularities:
        raise ValueError(f"{name}.granularity is {x.granularity!r}; it must be one of {granularities}")
    pages = None if x.packed is None else units_of(x.packed, SCALE_BLOCK)
    padded = padded_length(x.length) if pages is None else SCALE_BLOCK * pages
    stored, wanted = (x.data.shape[2], x.length) if layout == "rows" else (x.data.shape[3], padded)
    if stored != (wanted if layout == "rows" else _stored_values(wanted, stored)):
        raise ValueError(f"{name}.length is {x.length} and {name}.data has shape {tuple(x.data.shape)}; it must hold {wanted} tokens")
    batch, heads, length, dim = x.shape
    scales = scale_shape(x.granularity, batch, heads, length, dim)
    if x.packed is not None and pages is not None:
        _check_packed("q" if name in ("q", "query") else "k", x.packed, x.device)
        if batch != 1:
            raise ValueError(f"{name}.data has shape {tuple(x.data.shape)}; packed, it must have 1 as its first size")
        batch = x.packed.sequences
        if x.granularity != "token":
            scales = (1, heads, pages) if layout == "rows" else (batch, heads, dim)
    _check_tensor(f"{name}.scale", x.scale, (torch.float32,), scales, x.device)
    if x.mean is not None and (layout == "values" or x.mean.dim() != 4):
        _check_tensor(f"{name}.mean", x.mean, (torch.float32,), (batch, heads, dim), x.device)
    if layout == "values":
        _check_contiguous(f"{name}.data", x.data)
        _check_contiguous(f"{name}.mean", x.mean)
    rotations = {rotation.part_of(dim, most) for most in rotation.NAMED}
    if x.rotated not in rotations:
        raise ValueError(f"{name}.rotated is {x.rotated}; with head_dim {dim} it must be one of {sorted(rotations)}")


def _stored_values(padded: int, stored: int) -> int:
    """How many tokens quantized values hold: `padded`, or `stored` if that is more and whole blocks. Further blocks
    aren't read."""
    return max(padded, stored // SCALE_BLOCK * SCALE_BLOCK)


def check_batch(batch: object, device: torch.device) -> None:
    """Check the tensors of a `PagedBatch`, not their numbers. `device`: that of the cache."""
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"batch is a {type(batch).__name__}; it must be a fp8attn.PagedBatch")
    table, lengths, counts, sequences, cu_seqlens = batch.tensors()
    _check_tensor("page_table", table, (torch.int32,), None, device)
    if table.dim() != 2 or table.shape[1] == 0 or table.stride(1) != 1:
        raise ValueError(f"page_table has shape {tuple(table.shape)} and strides {table.stride()}; it must be (B, M) with a unit last stride")
    for name, x in (("lengths", lengths), ("counts", counts), ("sequences", sequences)):
        if x is not None:
            _check_tensor(name, x, (torch.int32,), (table.shape[0],), device)
            _check_contiguous(name, x)
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens, (torch.int32,), (table.shape[0] + 1,), device)
        _check_contiguous("cu_seqlens", cu_seqlens)
        if counts is not None:
            raise ValueError("counts and cu_seqlens are given; one of them must be None")
    if batch.max_length is not None and (not isinstance(batch.max_length, int) or batch.max_length < 0):
        raise ValueError(f"max_length is {batch.max_length!r}; it must be None or an int of at least 0")
    if batch.max_count is not None and (type(batch.max_count) is not int or batch.max_count < 1 or cu_seqlens is None):
        given = "" if cu_seqlens is None else " with cu_seqlens"
        raise ValueError(f"max_count is {batch.max_count!r}{given}; it must be None, or an int of at least 1 with cu_seqlens")
    if not isinstance(batch.batch_invariant, bool):
        raise TypeError(f"batch_invariant is a {type(batch.batch_invariant).__name__}; it must be a bool")


def check_numbers_of_batch(batch: PagedBatch, length: int, sequences: int, num_pages: int) -> None:
    """Check the numbers in a `PagedBatch`, for calls of `length` tokens and a cache of `sequences` and `num_pages`."""
    table, lengths, counts, numbers, edges = (None if x is None else x.tolist() for x in batch.tensors())
    assert table is not None and lengths is not None
    if edges is not None:
        if edges[0] != 0 or edges != sorted(edges) or edges[-1] > length:
            raise ValueError(f"cu_seqlens is {edges}; it must begin with 0, never fall, and end with at most {length}")
        counts = [end - begin for begin, end in itertools.pairwise(edges)]
        if batch.max_count is not None and max(counts, default=0) > batch.max_count:
            raise ValueError(f"cu_seqlens is {edges}; with max_count {batch.max_count} no row may have more tokens")
    most = len(table[0]) * PAGE + PAGE - 1 if table else 0
    most = most if batch.max_length is None else min(most, batch.max_length)
    for row, of_row in enumerate(lengths):
        if not 0 <= of_row <= most:
            raise ValueError(f"lengths[{row}] is {of_row}; it must be 0 to {most}")
        count = length if counts is None else counts[row]
        if not 0 <= count <= min(length, of_row):
            raise ValueError(f"counts[{row}] is {count}; it must be 0 to {min(length, of_row)}, the tokens of the call and of the sequence")
        for page, number in enumerate(table[row][: of_row // PAGE]):
            if not 0 <= number < num_pages:
                raise ValueError(f"page_table[{row}, {page}] is {number}; it must be 0 to {num_pages - 1}")
    numbers = [*range(len(lengths))] if numbers is None else numbers
    if len({*numbers}) != len(numbers) or not all(0 <= number < sequences for number in numbers):
        raise ValueError(f"sequences is {numbers}; it must be different numbers from 0 to {sequences - 1}")


def check_storage(storage: Storage) -> None:
    """Check the tensors of a cache."""
    device, kept = storage.k.device, storage.k.dtype
    _check_tensor("pages.k", storage.pages.k, (E4M3, torch.int8), None, device)
    for name, x in (("pages.k", storage.pages.k), ("k", storage.k), ("v", storage.v)):
        if x.dim() != 4:
            raise ValueError(f"the cache's {name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    num_pages, heads, _, dim = storage.pages.k.shape
    sequences, value_dim = storage.k.shape[0], storage.v.shape[3]
    check_dims(dim, value_dim)
    expected = (
        ("pages.k", (E4M3, torch.int8), (num_pages, heads, PAGE, dim)),
        ("pages.k_scale", (torch.float32,), (num_pages, heads)),
        ("pages.v", (E4M3,), (num_pages, heads, value_dim, PAGE)),
        ("pages.v_scale", (torch.float32,), (num_pages, heads)),
        ("k_mean", (torch.float32,), (sequences, heads, dim)),
        ("v_mean", (torch.float32,), (sequences, heads, value_dim)),
        ("v_scale", (torch.float32,), (sequences, heads, value_dim)),
        ("k", FLOATS, (sequences, heads, RECENT, dim)),
        ("v", (kept,), (sequences, heads, RECENT, value_dim)),
        ("tickets", (torch.int32,), (sequences, heads)),
    )
    for (name, dtypes, shape), x in zip(expected, storage.tensors(), strict=True):
        _check_tensor(name, x, dtypes, shape, device)
        _check_contiguous(name, x)
    if num_pages == 0 or heads == 0:
        raise ValueError(f"pages.k has shape {tuple(storage.pages.k.shape)}; it must have at least one page and one head")


def check_new_tokens(key: object, value: object, batch: PagedBatch, length: int | None, storage: Storage) -> None:
    """Check keys and values of new tokens. `length`: how many they are; None: any number."""
    like, dims = (storage.k.dtype, storage.k.device), (storage.k.shape[3], storage.v.shape[3])
    _check_keys_and_values(key, value, like, batch, (storage.k.shape[1], length), dims)


def _check_keys_and_values(
    key: object, value: object, like: tuple[torch.dtype, torch.device], batch: PagedBatch, sizes: tuple[int, int | None], dims: tuple[int, int]
) -> None:  # fmt: skip
    """Check a batch's keys and values. `like`: their dtype and device. `sizes`: heads, and tokens or None. `dims`: of
    each."""
    heads, length = sizes
    _check_tokens("key", key, like, _shape_of_tokens(batch, heads, length, dims[0]))
    assert isinstance(key, torch.Tensor)
    _check_tokens("value", value, like, _shape_of_tokens(batch, heads, tokens_of(key), dims[1]))


def check_queries(query: object, batch: PagedBatch, storage: Storage) -> None:
    """Check queries of a cache's sequences."""
    heads = storage.k.shape[1]
    _check_tokens("query", query, (storage.k.dtype, storage.k.device), _shape_of_tokens(batch, None, None, storage.k.shape[3]))
    assert isinstance(query, torch.Tensor)
    if query.shape[1] % heads:
        raise ValueError(f"query has {query.shape[1]} heads; it must be a multiple of the cache's {heads}")


def check_turned(query: object, key: object, batch: object, angles: Angles) -> None:
    """Check what rotary position embeddings are applied to, and their angles."""
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query is a {type(query).__name__}; it must be a torch.Tensor")
    if query.dtype not in FLOATS:
        raise TypeError(f"query is {query.dtype}; it must be one of {FLOATS}")
    check_batch(batch, query.device)
    assert isinstance(batch, PagedBatch)
    dim = query.shape[-1] if query.dim() else 0
    _check_tokens("query", query, (query.dtype, query.device), _shape_of_tokens(batch, None, None, dim))
    if key is not None:
        _check_tokens("key", key, (query.dtype, query.device), _shape_of_tokens(batch, None, tokens_of(query), dim), "query")
    if not isinstance(angles.interleaved, bool):
        raise TypeError(f"interleaved is a {type(angles.interleaved).__name__}; it must be a bool")
    for name, x in (("cos", angles.cos), ("sin", angles.sin)):
        _check_tensor(name, x, tuple(dict.fromkeys((torch.float32, query.dtype))), None, query.device)
        if x.dim() != 2 or 0 in x.shape or 2 * x.shape[1] > dim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (positions, pairs of channels), of at most {dim // 2} pairs")
        _check_contiguous(name, x)
    if angles.sin.shape != angles.cos.shape or angles.sin.dtype != angles.cos.dtype:
        cos, sin = (f"{tuple(x.shape)}, {x.dtype}" for x in angles[:2])
        raise ValueError(f"sin is {sin}; it must be as cos, {cos}")


def check_paged_tensors(cache: PagedTensors, rows: int | None) -> None:
    """Check the cache of another engine. `rows`: of the batch; None if it is written to, by scales that no row has."""
    _check_tensor("cache.k", cache.k, (*E4M3_BYTES, *HALVES), None, None)
    _check_tensor("cache.v", cache.v, (cache.k.dtype,), None, cache.k.device)
    for name, x in (("k", cache.k), ("v", cache.v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"cache.{name} has shape {tuple(x.shape)}; it must be (pages, slots of a page, heads, head_dim), none of them 0")
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(f"cache.{name} has strides {x.stride()}; the last must be 1: a cache is read as it is")
        _check_dim(f"cache.{name}", x.shape[3])
    if cache.v.shape[:3] != cache.k.shape[:3]:
        raise ValueError(f"cache.v has shape {tuple(cache.v.shape)}; its pages, slots and heads must be cache.k's, {tuple(cache.k.shape[:3])}")
    _check_recipe_of_tensors(cache)
    pages, slots, heads, _ = cache.k.shape
    shapes: list[tuple[int, ...]] = [(), (1,), (heads,), (pages, slots, heads)]
    if rows is not None:
        shapes.append((rows, heads))
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if not cache.is_fp8:
            if scale is not None:
                raise ValueError(f"cache.{name} is given and cache.k is {cache.k.dtype}; it must be None")
            continue
        if scale is None:
            raise ValueError(f"cache.{name} is None and cache.k is {cache.k.dtype}; it must be the float32 multiplier that restores {name[0]}")
        _check_tensor(f"cache.{name}", scale, (torch.float32,), None, cache.k.device)
        assert isinstance(scale, torch.Tensor)
        if tuple(scale.shape) not in shapes:
            raise ValueError(f"cache.{name} has shape {tuple(scale.shape)}; it must be one of {', '.join(map(str, shapes))}")


def _check_recipe_of_tensors(cache: PagedTensors) -> None:
    """Check the recipe of the cache of another engine."""
    if cache.recipe is None:
        return
    if not isinstance(cache.recipe, Recipe):
        raise TypeError(f"cache.recipe is a {type(cache.recipe).__name__}; it must be a fp8attn.Recipe, or None")
    if cache.is_fp8:
        raise ValueError(f"cache.recipe is given and cache.k is {cache.k.dtype}; it must be None: the cache is quantized already")
    if cache.recipe not in FUSED_RECIPES.values():
        raise ValueError(f"cache.recipe is {cache.recipe}; it must be fp8attn.Recipe() or fp8attn.PRECISE: kernels of caches have no others")


def _check_rows_of_tensors(cache: PagedTensors, batch: PagedBatch) -> None:
    """Check the cache of another engine, and the batch of a call on it."""
    _check_tensor("cache.k", cache.k, (*E4M3_BYTES, *HALVES), None, None)
    check_batch(batch, cache.k.device)
    check_paged_tensors(cache, batch.lengths.shape[0])
    if batch.sequences is not None:
        raise ValueError("sequences is given; with fp8attn.PagedTensors it must be None: rows have pages only")


def _dtype_beside(name: str, x: object, cache: PagedTensors) -> torch.dtype:
    """The dtype that queries or new tokens have beside the cache of another engine: any float beside e4m3."""
    if not cache.is_fp8 or not isinstance(x, torch.Tensor):
        return cache.k.dtype
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} is {x.dtype}; it must be one of {FLOATS}")
    return x.dtype


def check_tensors_call(query: object, cache: PagedTensors, batch: PagedBatch, how: Scoring) -> None:
    """Check attention to the cache of another engine, but the scale of scores."""
    _check_rows_of_tensors(cache, batch)
    _check_tokens("query", query, (_dtype_beside("query", query, cache), cache.k.device), _shape_of_tokens(batch, None, None, cache.k.shape[3]))
    assert isinstance(query, torch.Tensor)
    if query.shape[1] % cache.kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads; it must be a multiple of the cache's {cache.kv_heads}")
    checked_window(how.window)
    check_scores(how.softcap, how.sinks, query.shape[1], query.device)
    _check_contiguous("sinks", how.sinks)


def check_written(key: object, value: object, cache: PagedTensors, slots: object) -> None:
    """Check new tokens for the cache of another engine."""
    check_paged_tensors(cache, None)
    dtypes = FLOATS if cache.is_fp8 else (cache.k.dtype,)
    for name, x, into in (("key", key, cache.k), ("value", value, cache.v)):
        _check_tensor(name, x, dtypes, None, cache.k.device)
        assert isinstance(x, torch.Tensor)
        dtypes = (x.dtype,)
        if x.dim() != 3 or x.shape[1:] != into.shape[2:]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, {into.shape[2]}, {into.shape[3]}), as the cache's heads")
        if x.shape[2] > 1 and x.stride(2) != 1:
            raise ValueError(f"{name} has strides {x.stride()}; the last must be 1. Nothing is copied silently: call .contiguous()")
        _check_no_gradient(name, x)
    assert isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
    if value.shape[0] != key.shape[0]:
        raise ValueError(f"value has {value.shape[0]} tokens; it must have key's {key.shape[0]}")
    _check_tensor("slots", slots, (torch.int32, torch.int64), (key.shape[0],), cache.k.device)
    assert isinstance(slots, torch.Tensor)
    _check_contiguous("slots", slots)


def check_appended(key: object, value: object, cache: PagedTensors, batch: PagedBatch, length: int | None) -> None:
    """Check a batch's new tokens for the cache of another engine: (B, Hkv, S, D) and (B, Hkv, S, Dv), or packed.
    `length`: how many they are; None: any number."""
    _check_rows_of_tensors(cache, batch)
    like, dims = (_dtype_beside("key", key, cache), cache.k.device), (cache.k.shape[3], cache.v.shape[3])
    _check_keys_and_values(key, value, like, batch, (cache.kv_heads, length), dims)


def checked_causal_scores(window: object, softcap: object, sinks: object, query: torch.Tensor) -> tuple[Window, float, torch.Tensor | None]:
    """What is done to scores of a `KVCache`, of queries (B, Hq, S, D) or packed (T, Hq, D)."""
    left, right = checked_window(window)
    if right != 0:
        raise ValueError(f"window is {(left, right)}; with a fp8attn.KVCache, which is causal, the second number must be 0")
    check_scores(softcap, sinks, query.shape[1], query.device)
    assert isinstance(softcap, (int, float)) and (sinks is None or isinstance(sinks, torch.Tensor))
    _check_contiguous("sinks", sinks)
    _check_no_gradient("sinks", sinks)
    return (left, right), float(softcap), sinks


def _shape_of_tokens(batch: PagedBatch, heads: int | None, length: int | None, dim: int) -> tuple[int | None, ...]:
    """The shape of a call's queries, keys or values; None accepts any size."""
    return (batch.lengths.shape[0], heads, length, dim) if batch.cu_seqlens is None else (length, heads, dim)


def _check_tokens(name: str, x: object, like: tuple[torch.dtype, torch.device], shape: tuple[int | None, ...], whose: str = "the cache") -> None:
    """Check queries, keys or values of a cache's sequences, (B, H, S, D), or packed (T, H, D). `like`: their dtype and
    device, which are `whose`; None in `shape` accepts any size."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    names = ("batch", "heads", "length", "head_dim") if len(shape) == 4 else ("length", "heads", "head_dim")
    if x.dim() != len(shape):
        packed = "with" if len(shape) == 3 else "without"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {packed} cu_seqlens it must be ({', '.join(names)})")
    check_operand(name, x if x.dim() == 4 else x.unsqueeze(0), "rows")
    dtype, device = like
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}; it must be {whose}'s {dtype}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; it must be on {whose}'s device, {device}")
    for what, have, want in zip(names, x.shape, shape, strict=True):
        if want is not None and have != want:
            raise ValueError(f"{name} has {what} {have}; it must be {want}")
    _check_no_gradient(name, x)


def _check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None, device: torch.device | None) -> None:
    """Check a tensor that isn't an operand. `shape` or `device` None accepts any."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
    check_plain(name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} is {x.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {tuple(shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}; it must be on {device}")


def _check_contiguous(name: str, x: torch.Tensor | None) -> None:
    if x is not None and not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}; it must be contiguous")


def _check_kinds(a: Arguments) -> tuple[bool, bool, bool]:
    """Check that q, k and v have compatible devices and dtypes, and that only tensors that the user quantized have a
    scale. Which of the three are such tensors."""
    query, key, value = a.query, a.key, a.value
    for name, x in (("key", key), ("value", value)):
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device}; it must be on query's device, {query.device}")
    stored_q, stored_k, stored_v = is_stored(query), is_stored(key), is_stored(value)
    for name, stored, restores in (("q", stored_q, a.q_scale), ("k", stored_k, a.k_scale), ("v", stored_v, a.v_scale)):
        if restores is not None and not stored:
            raise ValueError(f"{name}_scale is given, but its tensor isn't float8_e4m3fn, uint8 or int8; it must be None")
    if stored_k != stored_v or isinstance(key, Quantized) != isinstance(value, Quantized):
        kinds = [x.data.dtype if isinstance(x, Quantized) else x.dtype for x in (key, value)]
        raise TypeError(f"key is {kinds[0]} and value {kinds[1]}; both must be float, both quantized with scales, or both Quantized")
    operands = ("query", query, stored_q), ("key", key, stored_k), ("value", value, stored_v)
    _check_alike({name: x for name, x, stored in operands if not stored and isinstance(x, torch.Tensor)})
    return stored_q, stored_k, stored_v


def _check_alike(floats: dict[str, torch.Tensor]) -> None:
    """Check that tensors that are quantized together have one device and dtype. `floats`: the tensors by name."""
    first, like = next(iter(floats.items()), ("", None))
    for name, x in floats.items():
        if like is None or x is like:
            continue
        if x.device != like.device:
            raise ValueError(f"{name} is on {x.device}; it must be on {first}'s device, {like.device}")
        if x.dtype != like.dtype and not is_stored(x):
            raise TypeError(f"{name} is {x.dtype}; it must be {first}'s {like.dtype}")


def _broadcast_sizes(q: torch.Size, k: torch.Size, v: torch.Size, enable_gqa: bool) -> tuple[int, int, int]:
    """Batch size, query heads and key/value heads. A size of 1 fits any other, as in F.scaled_dot_product_attention."""
    batches = ("query", q[0]), ("key", k[0]), ("value", v[0])
    like, batch = next((one for one in batches if one[1] != 1), batches[0])
    for name, size in batches:
        if size not in (1, batch):
            raise ValueError(f"{name} has batch {size}; it must be {like}'s, {batch}, or 1")
    kv_heads = k[1] if k[1] != 1 else v[1]
    if v[1] not in (1, kv_heads):
        raise ValueError(f"value has {v[1]} heads; it must have as many as key, {k[1]}, or 1")
    if v[2] != k[2]:
        raise ValueError(f"value has length {v[2]}; it must be key's, {k[2]}")
    if k[3] != q[3]:
        raise ValueError(f"key has head_dim {k[3]}; it must be query's, {q[3]}")
    if q[1] == kv_heads or kv_heads == 1:
        return batch, q[1], kv_heads
    if q[1] == 1:
        return batch, kv_heads, kv_heads
    if not enable_gqa:
        raise ValueError(f"query has {q[1]} heads and key {kv_heads}; they must be equal, or one of them 1, unless enable_gqa=True")
    if kv_heads == 0 or q[1] % kv_heads:
        raise ValueError(f"query has {q[1]} heads; with enable_gqa it must be a multiple of key's {kv_heads}")
    return batch, q[1], kv_heads


def expanded(name: str, x: torch.Tensor | Quantized | Stored, batch: int, heads: int) -> torch.Tensor | Quantized | Stored:
    """x with `batch` entries and `heads` heads: sizes of 1 are expanded without a copy. x itself if it has them
    already.

    Raises:
        ValueError: x is a `Quantized` of other sizes: kernels read it as it lies in memory.
    """
    shape = x.shape
    if shape[0] == batch and shape[1] == heads:
        return x

    def expand(t: torch.Tensor) -> torch.Tensor:
        return t.expand(batch, heads, *t.shape[2:])

    if isinstance(x, torch.Tensor):
        return expand(x)
    if isinstance(x, Quantized):
        raise ValueError(f"{name} is Quantized with batch {x.shape[0]} and {x.shape[1]} heads; it must have {batch} and {heads}: expand it before")
    return replace(x, data=expand(x.data), scale=x.scale if x.granularity == "tensor" else expand(x.scale))


def _check_masks(a: Arguments, full: tuple[int, int, int, int]) -> tuple[torch.Tensor | None, Causal, Window]:
    """attn_mask, expanded to `full` = (B, Hq, Sq, Sk), and the window with its alignment."""
    _check_flags(is_causal=a.is_causal, enable_gqa=a.enable_gqa, return_lse=a.return_lse)
    if a.causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment is {a.causal_alignment!r}; it must be 'top_left' (as in PyTorch) or 'bottom_right'")
    causal: Causal = "none"
    if a.is_causal:
        causal = "top_left" if a.causal_alignment == "top_left" else "bottom_right"
    attn_mask: Any = a.attn_mask
    if attn_mask is not None and a.is_causal:
        raise ValueError("attn_mask is given and is_causal is True; only one of them can be: fold the causal mask into attn_mask")
    if attn_mask is not None and is_causal_bias(attn_mask):
        lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
        if lengths != full[2:]:
            raise ValueError(f"attn_mask is a CausalBias of lengths {lengths}; it must be of (Sq, Sk) = {full[2:]}")
        causal = "top_left" if attn_mask.variant.name == "UPPER_LEFT" else "bottom_right"
        attn_mask = None
    if attn_mask is not None:
        if a.window is not None:
            raise ValueError(f"window is {a.window!r} and attn_mask is given; it must be None: fold the window into attn_mask")
        attn_mask = _checked_mask(attn_mask, a.query.device, full)
    window = CAUSAL_WINDOW
    if a.window is not None:
        window = checked_window(a.window)
        if causal == "none":
            causal = "top_left" if a.causal_alignment == "top_left" else "bottom_right"
        else:
            window = (window[0], 0)
        if window == (-1, -1):
            causal = "none"
    if not is_compiling():
        causal, window = simplified(causal, window, full[2], full[3])
    elif causal == "bottom_right" and window == CAUSAL_WINDOW and full[2] == 1:  # other lengths would each be a graph
        causal = "none"
    return attn_mask, causal, window


def checked_window(window: object) -> Window:
    """window as two ints from -1 up."""
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(isinstance(x, int) and not isinstance(x, bool) for x in window):
        raise TypeError(f"window is {window!r}; it must be (left, right), two ints, or None")
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window is {window!r}; its numbers must be -1 (unlimited) or more")
    return left, right


def is_causal_bias(x: object) -> TypeGuard[Any]:
    """Whether x is a torch.nn.attention.bias.CausalBias.

    Compared by name: importing its module imports torch._dynamo, which takes two seconds.
    """
    return type(x).__name__ == "CausalBias" and type(x).__module__ == "torch.nn.attention.bias"


def _checked_mask(attn_mask: object, device: torch.device, full: tuple[int, int, int, int]) -> torch.Tensor:
    """attn_mask, checked and expanded to `full` = (B, Hq, Sq, Sk)."""
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; it must be a torch.Tensor or None")
    check_plain("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in FLOATS:
        raise TypeError(f"attn_mask is {attn_mask.dtype}; it must be bool (True: attend) or one of {FLOATS} (added to the scores)")
    if attn_mask.device != device:
        raise ValueError(f"attn_mask is on {attn_mask.device}; it must be on query's device, {device}")
    padded = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if len(padded) != 4 or any(have not in (1, want) for have, want in zip(padded, full, strict=False)):
        raise ValueError(f"attn_mask has shape {tuple(attn_mask.shape)}; it must broadcast to (batch, heads, Sq, Sk) = {full}")
    return attn_mask.expand(full)


def _check_options(a: Arguments) -> None:
    """Check dropout_p, scale and out_dtype."""
    if not isinstance(a.dropout_p, NUMBERS) or a.dropout_p != 0:
        raise ValueError(f"dropout_p is {a.dropout_p}; it must be 0: fp8attn is for inference")
    _check_scale_and_dtype(a.scale, a.out_dtype)


def _check_scale_and_dtype(scale: object, out_dtype: torch.dtype | None) -> None:
    if scale is not None:
        check_scale("scale", scale)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be float16, bfloat16 or float32")


def _check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is a {type(flag).__name__}; it must be a bool")


def check_scale(name: str, scale: object) -> None:
    """Check that a scale is a finite number.

    A number that torch.compile traces may have another value in the next call, so then only the operator checks it.
    """
    if not isinstance(scale, (*NUMBERS, torch.SymFloat)) or isinstance(scale, bool):
        raise TypeError(f"{name} is a {type(scale).__name__}; it must be a number")
    if not is_compiling() and not math.isfinite(scale):
        raise ValueError(f"{name} is {scale}; it must be a finite number")


def check_scores(softcap: object, sinks: object, heads: int, device: torch.device) -> None:
    """Check the soft cap of scores, and the sinks of `heads` query heads."""
    check_scale("softcap", softcap)
    if softcap < 0:  # type: ignore[operator]
        raise ValueError(f"softcap is {softcap}; it must be 0 (none) or more")
    if sinks is not None:
        _check_tensor("sinks", sinks, (torch.float32,), (heads,), device)


def check_no_gradients(a: Arguments) -> None:
    """Check that no derivative is expected. fp8attn doesn't compute derivatives."""
    for name in ("query", "key", "value", "attn_mask", "sinks", "q_scale", "k_scale", "v_scale"):
        x = getattr(a, name)
        if x is not None:
            _check_no_gradient(name, x)


def _check_no_gradient(name: str, x: object) -> None:
    """Check that no derivative by an argument, or by a tensor of a `Quantized`, is expected."""
    if isinstance(x, Quantized):
        for field in ("data", "scale", "mean", "bias"):
            _check_no_gradient(f"{name}.{field}", getattr(x, field))
    elif isinstance(x, torch.Tensor):
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} requires grad; fp8attn has no backward: call it under torch.no_grad(), or detach {name}")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(f"{name} has a tangent; fp8attn has no forward-mode derivative: detach {name}")


def _half_keys_of(recipe: Recipe) -> str:
    return f"recipe keeps keys ({half_keys_of(recipe)})"


def half_keys_of(recipe: Recipe) -> str:
    """Which keys a recipe leaves in half precision."""
    return "statistics='page'" if recipe.statistics == "page" else f"sinks={recipe.sinks}, recent={recipe.recent}"


def _check_page_call(recipe: Recipe, causal: Causal, q_length: int, kv_length: int) -> None:
    """Check that a recipe with statistics of pages takes a call."""
    reason = unsupported_recipe(recipe)
    if reason is not None:
        raise ValueError(reason)
    if (causal == "none" and q_length != 1) or q_length > kv_length:  # a single query that sees all keys is the last one
        raise ValueError(
            f"is_causal is {causal != 'none'}, and there are {q_length} queries and {kv_length} keys; with recipe.statistics='page' it must be True,"
            " and there must be no more queries than keys"
        )


def _check_half_keys_call(a: Arguments) -> None:
    """Check that the arguments allow a recipe that leaves some keys in half precision."""
    for name, given in (("softcap", a.softcap != 0), ("sinks", a.sinks is not None)):
        if given:
            raise ValueError(f"{name} is given and {_half_keys_of(a.recipe)}; a recipe that keeps keys takes none")
    if a.window is not None:
        raise ValueError(f"window is {a.window!r} and {_half_keys_of(a.recipe)}; it must be None")
    if a.attn_mask is not None and not is_causal_bias(a.attn_mask):
        raise ValueError(f"attn_mask is given and {_half_keys_of(a.recipe)}; it must be None")
    for name, x in (("query", a.query), ("key", a.key), ("value", a.value)):
        if isinstance(x, Quantized) or is_stored(x):
            raise TypeError(f"{name} is quantized already and {_half_keys_of(a.recipe)}; it must be one of {FLOATS}")


def _check_pair(query: torch.Tensor | Quantized | Stored, key: torch.Tensor | Quantized | Stored) -> None:
    """Check that query and key were quantized with the same `qk` and `rotate`."""
    if isinstance(query, torch.Tensor):
        return
    if not isinstance(key, torch.Tensor):
        if query.data.dtype != key.data.dtype:
            raise TypeError(f"query is stored as {query.data.dtype}, key as {key.data.dtype}; both must be quantized with recipes of the same `qk`")
        in_query, in_key = (x.rotated if isinstance(x, Quantized) else 0 for x in (query, key))
        if in_query != in_key:
            how = f"query is rotated by {in_query} channels, key by {in_key}"
            if in_query == 0 or in_key == 0:
                how = "query is rotated, key isn't" if in_query else "key is rotated, query isn't"
            raise ValueError(f"{how}; both must be quantized with recipes of the same `rotate`")
    if isinstance(query, Quantized):
        _check_smoothed(query, key.shape[2])


def _check_smoothed(query: Quantized, kv_length: int) -> None:
    """Check that the mean and bias of a smoothed query have the shapes for its queries and for this number of keys."""
    batch, heads, length, dim = query.shape
    groups = -(-length // QUERY_GROUP)
    if query.mean is not None:
        _check_tensor("query.mean", query.mean, (torch.float32,), (batch, heads, groups, dim), query.device)
    if query.bias is None:
        return
    if query.mean is None:
        raise ValueError(f"query.bias is given and query.mean is None; it must have the shape {(batch, heads, groups, dim)}")
    wanted = (batch, heads, groups, bias_pitch(kv_length))
    if tuple(query.bias.shape) != wanted:
        raise ValueError(
            f"query.bias has shape {tuple(query.bias.shape)}; it must be {wanted}: a smoothed query attends to the keys that it was quantized with"
        )
    _check_tensor("query.bias", query.bias, (torch.float32,), wanted, query.device)
    _check_contiguous("query.bias", query.bias)


def _with_scale(name: str, x: Operand, scale: object, for_values: bool) -> Stored:
    """x, which the user quantized, together with its scale."""
    assert isinstance(x, torch.Tensor)
    return Stored(as_stored(x), *named_scale(name, x, scale, for_values))


def named_scale(name: str, x: torch.Tensor, scale: object, for_values: bool) -> tuple[torch.Tensor, Granularity]:
    """The scale of a tensor that the user quantized, in the shape of `Quantized.scale`, and its granularity."""
    batch, heads, length, dim = x.shape
    if scale is None:
        raise ValueError(f"{name} is {x.dtype} and {name}_scale is None; it must be the float32 multiplier that restores {name}")
    if not isinstance(scale, torch.Tensor):
        if not isinstance(scale, (Real, torch.SymFloat)) or isinstance(scale, bool):
            raise TypeError(f"{name}_scale is a {type(scale).__name__}; it must be a number or a float32 tensor")
        number: Any = scale if isinstance(scale, torch.SymFloat) else float(scale)
        scale = torch.full((1, 1, 1), number, dtype=torch.float32, device=x.device)
    _check_tensor(f"{name}_scale", scale, (torch.float32,), None, None)
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


def check_call(c: Call, quantizes_q: bool = False) -> None:
    """Check what the kernels rely on. Users can call the operator directly.

    Args:
        quantizes_q: whether q may be bfloat16 or float16.

    Raises:
        TypeError, ValueError: a field isn't as the docstring of `Call` says.
    """
    stored = (E4M3, torch.int8)
    check_rows("q", c.q, (*stored, *HALVES) if quantizes_q else stored)
    k_types = stored if c.fuse_q_quant else (c.q.dtype,)
    check_rows("k", c.k, k_types)
    check_rows("v", c.v, (E4M3,))
    batch, heads, q_length, dim = c.q.shape
    kv_heads, kv_length, value_dim, device = c.k.shape[1], c.k.shape[2], c.v.shape[2], c.q.device
    _check_groups(heads, kv_heads)
    if c.kv_length != kv_length:
        raise ValueError(f"kv_length is {c.kv_length}; it must be k's, {kv_length}")
    padded, k_scales, sequences = padded_length(kv_length), _scales("k_group", c.k_group, kv_length), batch
    if c.varlen is not None:
        pages, sequences = units_of(c.varlen.k, SCALE_BLOCK), c.varlen.k.sequences
        padded, k_scales = pages * SCALE_BLOCK, kv_length if c.k_group == 1 else pages
        _check_packed_call(c)
    _check_tensor("k", c.k, k_types, (batch, kv_heads, kv_length, dim), device)
    _check_tensor("v", c.v, (E4M3,), (batch, kv_heads, value_dim, _stored_values(padded, c.v.shape[3])), device)
    check_dims(dim, value_dim)
    floats = (torch.float32,)
    if c.fuse_q_quant != (c.q_scale is None):
        raise TypeError(f"q_scale is {'None' if c.q_scale is None else 'given'} and q is {c.q.dtype}; quantized q has scales, others have none")
    if c.q_scale is not None:
        _check_tensor("q_scale", c.q_scale, floats, (batch, heads, _scales("q_group", c.q_group, q_length)), device)
    if c.lse_mean is not None:
        _check_tensor("lse_mean", c.lse_mean, floats, (batch, kv_heads, dim), device)
    _check_contiguous("lse_mean", c.lse_mean)
    _check_tensor("k_scale", c.k_scale, floats, (batch, kv_heads, k_scales), device)
    _check_tensor("v_scale", c.v_scale, floats, (sequences, kv_heads, value_dim), device)
    if c.v_mean is not None:
        _check_tensor("v_mean", c.v_mean, floats, (sequences, kv_heads, value_dim), device)
    _check_contiguous("v", c.v)
    _check_contiguous("v_mean", c.v_mean)
    if c.attn_mask is not None:
        _check_tensor("attn_mask", c.attn_mask, (torch.bool, *FLOATS), (batch, heads, q_length, kv_length), device)
    if c.bias is not None:
        _check_tensor("bias", c.bias, floats, (batch, heads, -(-q_length // QUERY_GROUP), bias_pitch(kv_length)), device)
        _check_contiguous("bias", c.bias)
    check_launch(c.softmax_scale, c.causal, c.out_dtype, c.window)
    check_scores(c.softcap, c.sinks, heads, device)
    _check_contiguous("sinks", c.sinks)
    if c.mean_scores is not None:
        _check_tensor("mean_scores", c.mean_scores, floats, (batch, heads, q_length), device)
    _check_contiguous("mean_scores", c.mean_scores)
    if c.attn_mask is not None and c.causal != "none":
        raise ValueError(f"attn_mask is given and causal is {c.causal!r}; it must be 'none'")


def _check_packed_call(c: Call) -> None:
    """Check what a call of packed operands doesn't have."""
    if c.q.shape[0] != 1:
        raise ValueError(f"q has shape {tuple(c.q.shape)}; packed, it must have 1 as its first size")
    if c.k_group not in (1, SCALE_BLOCK):
        raise ValueError(f"k_group is {c.k_group}; packed, it must be 1 or {SCALE_BLOCK}")
    if c.causal == "top_left":
        raise ValueError("causal is 'top_left'; packed, it must be 'none' or 'bottom_right'")


def _check_groups(heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads; they must be a multiple of k's {kv_heads}")


def check_dims(*dims: int) -> None:
    """Check the head dims of an operator's operands."""
    for dim in dims:
        _check_dim(None, dim)


def check_launch(softmax_scale: float, causal: str, out_dtype: torch.dtype, window: Window = CAUSAL_WINDOW) -> None:
    """Check the numbers and options of attention operators."""
    check_scale("softmax_scale", softmax_scale)
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; it must be one of {CAUSAL}")
    if checked_window(window) != CAUSAL_WINDOW and causal == "none":
        raise ValueError(f"window is {tuple(window)} and causal is 'none'; it must be {CAUSAL_WINDOW}, or causal 'top_left' or 'bottom_right'")
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {FLOATS}")


def checked_rows(
    softmax_scale: float, causal: str, out_dtype: torch.dtype, window: object, softcap: float, sinks: torch.Tensor | None, query: torch.Tensor
) -> Window:
    """The window of an operator's rows. Checks the operator's other arguments about them. query: (B, Hq, Sq, D)."""
    of_rows = checked_window(window)
    check_launch(softmax_scale, causal, out_dtype, of_rows)
    check_scores(softcap, sinks, query.shape[1], query.device)
    return of_rows


def _scales(name: str, group: int, length: int) -> int:
    """Number of scales of one head's rows."""
    if group not in (0, 1, SCALE_BLOCK):
        raise ValueError(f"{name} is {group}; it must be 0 (a head's rows), 1 or {SCALE_BLOCK}")
    return 1 if group == 0 else -(-length // group)


def check_rows(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check an operand of an operator: (B, H, S, D) with a unit last stride."""
    _check_tensor(name, x, dtypes, None, None)
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    if x.numel() and x.shape[3] > 1 and x.stride(3) != 1:  # PyTorch calls any empty tensor contiguous
        raise ValueError(f"{name} has strides {x.stride()}; the last must be 1")


def check_floats(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None) -> None:
    """Check the operands of operators that take unquantized tensors: the rules of `check`, but nothing is expanded."""
    check_rows("q", q, FLOATS)
    check_rows("k", k, (q.dtype,))
    check_rows("v", v, (q.dtype,))
    batch, heads, q_length, dim = q.shape
    kv_heads, kv_length, value_dim = k.shape[1], k.shape[2], v.shape[3]
    _check_groups(heads, kv_heads)
    _check_tensor("k", k, (q.dtype,), (batch, kv_heads, kv_length, dim), q.device)
    _check_tensor("v", v, (q.dtype,), (batch, kv_heads, kv_length, value_dim), q.device)
    check_dims(dim, value_dim)
    if attn_mask is not None:
        _check_tensor("attn_mask", attn_mask, (torch.bool, *FLOATS), (batch, heads, q_length, kv_length), q.device)


def check_score_bias(q_mean: torch.Tensor, k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity) -> None:
    """Check the arguments of the operator score_bias."""
    check_rows("k_data", k_data, (E4M3, torch.int8))
    batch, kv_heads, length, dim = k_data.shape
    check_quantized("k", Quantized(k_data, k_scale, k_granularity, "rows", length), "rows")
    _check_tensor("q_mean", q_mean, (torch.float32,), None, k_data.device)
    if q_mean.dim() != 4 or q_mean.shape[0] != batch or q_mean.shape[3] != dim or (kv_heads and q_mean.shape[1] % kv_heads):
        raise ValueError(f"q_mean has shape {tuple(q_mean.shape)}; it must be ({batch}, a multiple of {kv_heads}, groups of queries, {dim})")


def check_import_operands(k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity, v: torch.Tensor) -> None:
    """Check the arguments of the operator import_kv."""
    check_rows("k_data", k_data, (E4M3, torch.int8))
    check_rows("v", v, (E4M3,))
    batch, heads, length, _ = k_data.shape
    check_quantized("k", Quantized(k_data, k_scale, k_granularity, "rows", length), "rows")
    _check_tensor("v", v, (E4M3,), (batch, heads, length, v.shape[3]), k_data.device)


def check_half_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8_out: torch.Tensor | None, fp8_lse: torch.Tensor | None, k_mean: torch.Tensor | None
) -> None:
    """Check the tensors of the operator half_keys."""
    check_floats(q, k, v, None)
    if (fp8_out is None) != (fp8_lse is None):
        raise ValueError(f"{'fp8_out' if fp8_out is None else 'fp8_lse'} is None; fp8_out and fp8_lse go together")
    if fp8_out is not None and fp8_lse is not None:
        check_rows("fp8_out", fp8_out, FLOATS)
        _check_tensor("fp8_out", fp8_out, FLOATS, (*q.shape[:3], v.shape[3]), q.device)
        _check_tensor("fp8_lse", fp8_lse, (torch.float32,), tuple(q.shape[:3]), q.device)
        _check_contiguous("fp8_lse", fp8_lse)
    if k_mean is not None:
        _check_tensor("k_mean", k_mean, (torch.float32,), (*k.shape[:2], k.shape[3]), k.device)
        _check_contiguous("k_mean", k_mean)


def check_unsmoothed_lse(lse: torch.Tensor, query: torch.Tensor | Quantized, k_mean: torch.Tensor, packed: Packed | None = None) -> None:
    """Check the tensors of the operators unsmoothed_lse and varlen_unsmoothed_lse."""
    q, dtypes = (query, FLOATS) if isinstance(query, torch.Tensor) else (query.data, (E4M3, torch.int8))
    check_rows("q", q, dtypes)
    if isinstance(query, Quantized):
        check_quantized("q", query, "rows")
    _check_tensor("lse", lse, (torch.float32,), tuple(q.shape[:3]), q.device)
    _check_tensor("k_mean", k_mean, (torch.float32,), None, q.device)
    batch, heads, _, dim = q.shape
    if packed is not None:
        _check_packed("q", packed, q.device)
        _check_tensor("q", q, dtypes, (1, *q.shape[1:]), q.device)
        _check_contiguous("lse", lse)
        batch = packed.sequences
    if k_mean.dim() != 3 or k_mean.shape[0] != batch or k_mean.shape[2] != dim or k_mean.shape[1] == 0 or heads % k_mean.shape[1]:
        raise ValueError(f"k_mean has shape {tuple(k_mean.shape)}; it must be ({batch}, a divisor of {heads}, {dim})")
