"""The public functions: check once, quantize, choose a backend, call its operator."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch.compiler import is_compiling

from . import dtensor, eager, hybrid, ops, problem_ops, varlen_ops
from .backends import choose_backend
from .call import empty_lse, empty_output
from .eager import Attention
from .paged import append_backend, cache_of_call, paged_sdpa
from .prepare import autocast, call_from, dequantized, imported, operands_of, prepare, problem_of, quantized_operands, unsmoothed
from .recipe import DEFAULT_RECIPE, Packed, Quantized, Recipe
from .reference import CAUSAL_WINDOW, Causal, Window, simplified
from .validate import (
    Arguments,
    Backend,
    Checked,
    Operand,
    Scale,
    VarlenArguments,
    check,
    check_floats,
    check_import,
    check_quantize,
    check_quantize_packed,
    check_varlen,
    checked_rows,
    checked_window,
)

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class ReferenceOptions(TypedDict, total=False):
        """Keyword arguments of `reference_sdpa` and `sdpa`."""

        causal_alignment: str
        window: Window | None
        softcap: float
        sinks: torch.Tensor | None
        q_scale: Scale | None
        k_scale: Scale | None
        v_scale: Scale | None
        out_dtype: torch.dtype | None

    class Options(ReferenceOptions, total=False):
        """Keyword arguments of `sdpa`."""

        recipe: Recipe
        backend: Backend

    class PreciseOptions(ReferenceOptions, total=False):
        """Keyword arguments of `reference_sdpa`."""

        dtype: torch.dtype


P = ParamSpec("P")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def quantize(
    query: torch.Tensor, key: None = None, value: None = None, *, recipe: Recipe = ..., cu_seqlens_q: torch.Tensor | None = ...
) -> Quantized: ...
@overload
def quantize(
    query: None, key: torch.Tensor, value: torch.Tensor, *, recipe: Recipe = ..., cu_seqlens_k: torch.Tensor | None = ...,
    seqused_k: torch.Tensor | None = ...,
) -> tuple[Quantized, Quantized]: ...  # fmt: skip
@overload
def quantize(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, recipe: Recipe = ..., cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ..., seqused_k: torch.Tensor | None = ...,
) -> tuple[Quantized, Quantized, Quantized]: ...  # fmt: skip
def quantize(query=None, key=None, value=None, *, recipe=DEFAULT_RECIPE, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None):
    """Quantize to e4m3, query and key perhaps to int8, as a recipe says.

    Keys and values go together: a token whose value isn't finite gets NaN in its key (see fp8attn.quantize).

    Args:
        query: (B, Hq, Sq, D), float16, bfloat16 or float32, unit last stride; or None. With cu_seqlens_q, packed:
            (Tq, Hq, D).
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), float16, bfloat16 or float32, unit last stride; or both None.
            All that are given have one dtype. Hq is a multiple of Hkv. With cu_seqlens_k, packed: (Tk, Hkv, D) and
            (Tk, Hkv, Dv).
        recipe: granularities, smoothing, rotation, and the formats in which query and key are stored. With `smooth_q`,
            query is quantized together with the keys that it attends to.
        cu_seqlens_q, cu_seqlens_k, seqused_k: where packed sequences lie, as of `varlen_sdpa`, which takes the results.
            Each sequence has scales and means of its own, and the bytes that it has alone.

    Returns:
        The `Quantized` of what was given: of query; of key and value; or of all three.

    Raises:
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    if packed:
        query, key, value, of_q, of_k = _packed(query, key, value, recipe, (cu_seqlens_q, cu_seqlens_k, seqused_k))
    elif seqused_k is not None:
        raise ValueError("seqused_k is given and cu_seqlens_k is None; it must be None, too")
    else:
        check_quantize(query, key, value, recipe)
        of_q = of_k = None
    results = tuple(x for x in quantized_operands(query, key, value, recipe, packed=(of_q, of_k)) if x is not None)
    return results[0] if len(results) == 1 else results


def _packed(query: Any, key: Any, value: Any, recipe: Recipe, lengths: tuple[Any, Any, Any]) -> tuple:
    """Packed operands of `quantize` as (1, H, T, D), or None, and where their sequences lie."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = lengths
    operands = {name: x for name, x in (("query", query), ("key", key), ("value", value)) if x is not None}
    tokens = {name: x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else 0 for name, x in operands.items()}
    packed: dict[str, Packed] = {}
    if cu_seqlens_q is not None:
        packed["q"] = Packed(cu_seqlens_q, None, tokens.get("query", 0))
    if cu_seqlens_k is not None:
        packed["k"] = Packed(cu_seqlens_k, seqused_k, tokens.get("key", 0))
    floats = check_quantize_packed(operands, recipe, packed)
    return *(floats.get(name) for name in ("query", "key", "value")), packed.get("q"), packed.get("k")


def import_kv(key: torch.Tensor, value: torch.Tensor, k_scale: Scale, v_scale: Scale) -> tuple[Quantized, Quantized]:
    """Make `Quantized` of keys and values that are quantized already, for example those of an FP8 cache.

    If several calls attend to the same keys and values, import them once and pass the results to each call.

    Keys are taken as they are; values are copied into the layout of quantized V. Keys get one scale per token, because
    a token whose value holds a NaN must turn into NaN the rows that attend to it, and no others.

    Args:
        key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), float8_e4m3fn, or uint8 that holds e4m3; unit last stride. key
            may instead be int8 from -127 to 127.
        k_scale: a number, or float32 with one element, (B, Hkv), (B, Hkv, Sk) or (B, Hkv, ceil(Sk / 128)).
        v_scale: a number, or float32 with one element, (B, Hkv) or (B, Hkv, Dv).

    Raises:
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad, or has a tangent.
    """
    return imported(*check_import(key, value, k_scale, v_scale))


if TYPE_CHECKING:

    @overload
    def sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[False] = ..., **options: Unpack[Options],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True], **options: Unpack[Options],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    @overload
    def sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: bool, **options: Unpack[Options],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


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
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention in FP8; means what torch.nn.functional.scaled_dot_product_attention means.

    Args:
        query: (B, Hq, Sq, D). One of: float16, bfloat16 or float32 with unit last stride; e4m3 (float8_e4m3fn, or uint8
            that holds it) or int8 from -127 to 127, with its scale; a `Quantized`. D is a multiple of 8 from 16 to 256.
        key: (B, Hkv, Sk, D), likewise; of query's dtype if both are floating point.
        value: (B, Hkv, Sk, Dv), of key's kind, but e4m3 if key is int8. Dv is a multiple of 8 from 16 to 256. Batch
            sizes and numbers of heads that are 1 are broadcast, without a copy. All three may be DTensors, sharded by
            batch or heads: each rank attends with its shards, and out is sharded as query is. Then `sinks` must be
            None.
        attn_mask: broadcastable to (B, Hq, Sq, Sk). bool: True means attend. float: added to the scaled scores; -inf
            hides a key, and every finite number is a score (a row that is finfo.min everywhere gives the mean of the
            values). Or a torch.nn.attention.bias.CausalBias, which means `is_causal`.
        dropout_p: must be 0.
        is_causal: row i sees keys j <= i, or j <= i + Sk - Sq if `causal_alignment` is `bottom_right`.
        scale: multiplies Q·Kᵀ; 1 / sqrt(D) by default.
        enable_gqa: every key/value head serves Hq / Hkv query heads.
        causal_alignment: `top_left`, as in PyTorch, or `bottom_right`.
        window: (left, right): row i sees the keys from j - left to j + right, where j is i, or i + Sk - Sq if
            `causal_alignment` is `bottom_right`. -1 is unlimited. With `is_causal`, right is 0. Only without attn_mask.
        softcap: scores (with `scale`) become softcap · tanh(score / softcap) before attn_mask is added. 0 caps nothing.
        sinks: float32 (Hq,), one more logit of each row of a head, which takes weight and has no value; or None. Not
            to be confused with Recipe.sinks, a number of first keys in half precision.
        recipe: numeric choices. For operands that are quantized already, only compute type and accumulation matter. A
            query in floating point is stored and rotated as its keys if these are quantized already; likewise keys as
            their query.
        q_scale, k_scale, v_scale: what restores operands that are quantized already: x ≈ x_fp8.float() * x_scale. A
            number, or float32 with one element, (B, H), q and k (B, H, S) or (B, H, ceil(S / 128)), v (B, H, Dv).
        out_dtype: float16, bfloat16 or float32. By default query's dtype, or bfloat16 if query is quantized. Under
            autocast, floating-point operands are cast as for F.scaled_dot_product_attention, and the default is
            autocast's dtype.
        return_lse: also return the natural log of the sum of exponentials of each row's scores.
        backend: `auto`, `triton`, `cuda`, `reference` or `modelled`. `auto` takes CUDA's Hopper kernel where it runs
            and can be compiled, and Triton for other calls on a GPU. For CPU tensors it takes the exact reference,
            which doesn't use the recipe. `modelled` has the numerics of the kernels in plain torch, on any device.
            With the default recipe and `PRECISE`, `auto` and `cuda` quantize and attend in one launch if
            fp8attn.cuda.one_launch has one for the call. If it doesn't, the attention kernel quantizes query. The bits
            are the same.

    Returns:
        out (B, Hq, Sq, Dv); with `return_lse` also LSE (B, Hq, Sq) float32, which includes sinks. A row without visible
        keys gives zeros and -inf, or its sink.

    Raises:
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad, or has a tangent.
        BackendUnavailable: the backend can't run here.
    """
    if type(query) is not torch.Tensor and dtensor.is_dtensor(query):
        return dtensor.attend_by_shards(
            sdpa, query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
            causal_alignment=causal_alignment, window=window, softcap=softcap, sinks=sinks, recipe=recipe, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, out_dtype=out_dtype, return_lse=return_lse, backend=backend,
        )  # fmt: skip
    query, key, value, out_dtype = autocast(query, key, value, out_dtype)
    like = None
    if not is_compiling() and type(recipe) is Recipe:
        options = (
            "sdpa", recipe.text, backend, is_causal, scale, enable_gqa, causal_alignment, None if window is None else repr(window), softcap,
            out_dtype, dropout_p, q_scale, k_scale, v_scale, return_lse,
        )  # fmt: skip
        like = eager.likeness_of(options, (query, key, value, attn_mask), (sinks,))
        repeated = eager.repeat(like)
        if repeated is not None:
            return eager.attention_of(repeated)
    return _attend(
        Arguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment=causal_alignment, window=window, softcap=softcap,
            sinks=sinks, recipe=recipe, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype, return_lse=return_lse,
            backend=backend,
        ),
        like,
    )  # fmt: skip


def _attend(a: Arguments, like: eager.Likeness | None) -> Attention:
    """`sdpa` of a call that wasn't kept; `like` is None of calls that won't be."""
    if (repeated := eager.record(like, functools.partial(_attend_to, a))) is not None:
        return eager.attention_of(repeated)
    checked = check(a)
    chosen = choose_backend(a.backend, checked.device)
    if chosen == "reference":
        if a.backend == "auto":
            _say_once_that_it_is_exact()
        return _by_reference(checked, a.return_lse, torch.float32)
    if is_compiling() and checked.is_float:
        return _traced(checked, a.recipe, a.return_lse, chosen)
    result = _run(checked, chosen, a.recipe, a.return_lse)
    if chosen != "modelled" and a.recipe.statistics != "page":
        eager.remember(like)
    return result


def _attend_to(a: Arguments, query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, sinks: torch.Tensor | None) -> Attention:
    """A call with other operands, which isn't kept."""
    return _attend(replace(a, query=query, key=key, value=value, attn_mask=attn_mask, sinks=sinks), None)


def _traced(checked: Checked, recipe: Recipe, return_lse: bool, chosen: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A call as one operator: how it is run depends on lengths, which a graph doesn't know."""
    out, lse = getattr(ops.library_ops, f"{chosen}_sdpa")(
        *checked.floats, checked.attn_mask, checked.softmax_scale, checked.causal, recipe.text, checked.out_dtype,
        return_lse, checked.window, checked.softcap, checked.sinks, scale=checked.scale,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _whole(
    chosen: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, softmax_scale: float, causal: Causal,
    recipe: str, out_dtype: torch.dtype, return_lse: bool, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The operator's implementation."""
    check_floats(q, k, v, attn_mask)
    of_rows = checked_rows(softmax_scale, causal, out_dtype, window, softcap, sinks, q)
    causal, of_rows = simplified(causal, of_rows, q.shape[2], k.shape[2])
    checked = Checked(q, k, v, attn_mask, causal, softmax_scale, out_dtype, None, of_rows, softcap, sinks)
    return _run_whole(checked, chosen, recipe, return_lse)


def _run_whole(checked: Checked, chosen: str, recipe: str, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`_run` as an operator: with an empty LSE where none is asked for."""
    result = _run(checked, chosen, Recipe.of_text(recipe), return_lse)
    return result if isinstance(result, tuple) else (result, empty_lse(checked.floats[0], False))


WHOLE: tuple[Backend, ...] = ("auto", "triton", "cuda", "modelled")
"""Backends with an operator that quantizes and attends."""


def _fake_whole(q, k, v, attn_mask, softmax_scale, causal, recipe, out_dtype, return_lse, window=CAUSAL_WINDOW, softcap=0.0, sinks=None):
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, return_lse)


for _name in WHOLE:
    ops.register(
        f"{_name}_sdpa(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float softmax_scale, str causal, str recipe, ScalarType out_dtype,"
        f" bool return_lse, {ops.OPTIONS}) -> (Tensor, Tensor)",
        functools.partial(_whole, _name),
        _fake_whole,
    )


def varlen_sdpa(
    q: Operand,
    k: Operand,
    v: Operand,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention in FP8 of N sequences of different lengths, packed into one tensor without padding.

    Each sequence attends to its own keys only, and has scales and means of its own: its rows are those of `sdpa` of the
    sequence alone, whatever lies beside it. Kernels read lengths on the GPU. The host doesn't, so nothing waits for the
    GPU, a CUDA graph can be replayed with other lengths, and torch.compile keeps one graph.

    Args:
        q: (Tq, Hq, D), float16, bfloat16 or float32 with unit last stride, or a `Quantized` that was packed. Tq is the
            tokens of all sequences. D is a multiple of 8 from 16 to 256.
        k: (Tk, Hkv, D), likewise. Hq is a multiple of Hkv.
        v: (Tk, Hkv, Dv), of k's kind.
        cu_seqlens_q: int32 (N + 1), contiguous, on q's device: queries of sequence i are q[cu_seqlens_q[i] :
            cu_seqlens_q[i + 1]]. A sequence may be empty. Tokens in no sequence are not read, and their rows of the
            results hold anything. None if q is Quantized.
        cu_seqlens_k: the same for k and v. None if k is Quantized.
        max_seqlen_q, max_seqlen_k: the most queries and keys of a sequence, or None. Tiles and the kernels that
            quantize K and V are chosen by them; results don't depend on them, but for rounding.
        seqused_k: int32 (N,): only the first seqused_k[i] keys of sequence i exist; or None.
        is_causal: row i of a sequence sees its keys j <= i + Sk - Sq: the mask is aligned to the bottom right.
        window: (left, right): row i sees the keys from j - left to j + right, where j is i + Sk - Sq. -1 is unlimited.
            With `is_causal`, right is 0.
        softcap, sinks, scale: as of `sdpa`.
        recipe: numeric choices. q's scales are per token, k's per token or block, v's per channel; `smooth_q` and keys
            in half precision aren't made for packed sequences.
        out_dtype: as of `sdpa`.
        return_lse: also return the natural log of the sum of exponentials of each row's scores.
        backend: as of `sdpa`. `cuda` takes e4m3 on Hopper, with K's scales per block and a positive scale; `auto` runs
            Triton for other calls. `reference` and `modelled` are plain torch, for which the host reads lengths.

    Returns:
        out (Tq, Hq, Dv); with `return_lse` also LSE (Hq, Tq) float32, which includes sinks. A row without visible keys
        gives zeros and -inf, or its sink.

    Raises:
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad, or has a tangent.
        BackendUnavailable: the backend can't run here.
    """
    q, k, v, out_dtype = autocast(q, k, v, out_dtype)
    like = None
    if not is_compiling() and type(recipe) is Recipe:
        cu_seqlens_q, _ = _unless_own(q, cu_seqlens_q, None)
        cu_seqlens_k, seqused_k = _unless_own(k, cu_seqlens_k, seqused_k)
        options = (
            "varlen_sdpa", recipe.text, backend, max_seqlen_q, max_seqlen_k, is_causal, None if window is None else repr(window), softcap, scale,
            out_dtype, return_lse,
        )  # fmt: skip
        like = eager.likeness_of(options, (q, k, v), (cu_seqlens_q, cu_seqlens_k, seqused_k, sinks))
        repeated = eager.repeat(like)
        if repeated is not None:
            return eager.attention_of(repeated)
    return _attend_packed(
        VarlenArguments(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, is_causal=is_causal,
            window=window, softcap=softcap, sinks=sinks, scale=scale, recipe=recipe, out_dtype=out_dtype, return_lse=return_lse, backend=backend,
        ),
        like,
    )  # fmt: skip


def _unless_own(x: object, cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Lengths that are given for an operand; None in place of those that it was quantized with, which mean the same."""
    if not isinstance(x, Quantized) or x.packed is None:
        return cu_seqlens, seqused
    return None if cu_seqlens is x.packed.cu_seqlens else cu_seqlens, None if seqused is x.packed.seqused else seqused


def _attend_packed(a: VarlenArguments, like: eager.Likeness | None) -> Attention:
    """`varlen_sdpa` of a call that wasn't kept; `like` as of `_attend`."""
    if (repeated := eager.record(like, functools.partial(_attend_packed_to, a))) is not None:
        return eager.attention_of(repeated)
    checked = check_varlen(a)
    chosen = choose_backend(a.backend, checked.device)
    if chosen == "reference":
        if a.backend == "auto":
            _say_once_that_it_is_exact()
        result = _by_reference(checked, a.return_lse, torch.float32)
    elif is_compiling() and checked.is_float:
        result = _traced_varlen(checked, a.recipe, a.return_lse, chosen)
    else:
        result = _run(checked, chosen, a.recipe, a.return_lse)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = out.squeeze(0).transpose(0, 1)
    found = out if lse is None else (out, lse.squeeze(0))
    if chosen not in ("reference", "modelled"):
        eager.remember(like)
    return found


def _attend_packed_to(a: VarlenArguments, q: Operand, k: Operand, v: Operand, *others: torch.Tensor | None) -> Attention:
    """A call with other operands, which isn't kept. `others`: cu_seqlens_q, cu_seqlens_k, seqused_k and sinks."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, sinks = others
    other = replace(a, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, sinks=sinks)
    return _attend_packed(other, None)


def _traced_varlen(checked: Checked, recipe: Recipe, return_lse: bool, chosen: str) -> Attention:
    """A call of packed sequences as one operator."""
    assert checked.varlen is not None
    out, lse = getattr(ops.library_ops, f"{chosen}_varlen_sdpa")(
        *checked.floats, *checked.varlen.arguments, checked.softmax_scale, checked.causal, recipe.text, checked.out_dtype, return_lse,
        checked.window, checked.softcap, checked.sinks, scale=checked.scale,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _whole_varlen(
    chosen: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None, longest_q: int, longest_k: int, softmax_scale: float, causal: Causal, recipe: str, out_dtype: torch.dtype,
    return_lse: bool, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The operator's implementation. The operators that it calls check what this one doesn't."""
    varlen = varlen_ops.varlen_of((cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k), q, k)
    checked = Checked(q, k, v, None, causal, softmax_scale, out_dtype, None, checked_window(window), softcap, sinks, varlen)
    return _run_whole(checked, chosen, recipe, return_lse)


def _fake_whole_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k, softmax_scale, causal, recipe, out_dtype, return_lse,
                       window=CAUSAL_WINDOW, softcap=0.0, sinks=None):  # fmt: skip
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, return_lse)


for _name in WHOLE:
    ops.register(
        f"{_name}_varlen_sdpa(Tensor q, Tensor k, Tensor v, {varlen_ops.LENGTHS}, float softmax_scale, str causal, str recipe, ScalarType out_dtype,"
        f" bool return_lse, {ops.OPTIONS}) -> (Tensor, Tensor)",
        functools.partial(_whole_varlen, _name),
        _fake_whole_varlen,
    )


def _run(checked: Checked, chosen: str, recipe: Recipe, return_lse: bool) -> Attention:
    """`sdpa` of a checked call by kernels, or their model."""
    if recipe.statistics == "page":
        return _by_pages(checked, recipe, return_lse, chosen)
    if recipe.has_half_keys:
        return _with_half_keys(checked, recipe, return_lse, chosen)
    problem = problem_of(checked, chosen, recipe, return_lse)
    if problem is not None:
        out, lse = problem_ops.attend_to_problem(problem, chosen, checked.scale)
        return (out, lse) if return_lse else out
    prepared = prepare(checked, recipe, chosen)
    out, lse = ops.attend_to_quantized(call_from(prepared, return_lse), chosen, checked.scale, made_here=checked.is_float)
    if not return_lse:
        return out
    if prepared.key.mean is None or checked.softcap or checked.sinks is not None or isinstance(prepared.query, torch.Tensor):
        return out, lse
    return out, unsmoothed(prepared, lse)


_said: set[str] = set()
"""What is said once in a process."""


def _say_once_that_it_is_exact() -> None:
    if is_compiling() or "exact" in _said:
        return
    _said.add("exact")
    warnings.warn(
        "fp8attn.sdpa computes attention of CPU tensors exactly, in float32, whatever the recipe; backend='modelled' computes it as FP8 kernels do,"
        " backend='reference' is exact without this warning",
        stacklevel=4,
    )


def _with_half_keys(checked: Checked, recipe: Recipe, return_lse: bool, chosen: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sdpa` by a recipe that keeps keys."""
    others = recipe.of_fp8_keys

    def to_fp8_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal) -> hybrid.Fp8Attention:
        part = Checked(q, k, v, None, causal, checked.softmax_scale, checked.out_dtype, checked.scale)
        problem = problem_of(part, chosen, others, True)
        if problem is not None:
            return *problem_ops.attend_to_problem(problem, chosen, part.scale), None
        prepared = prepare(part, others, chosen)
        return *ops.attend_to_quantized(call_from(prepared, True), chosen, part.scale), prepared.key.mean

    to_half_keys = ops.library_ops.modelled_half_keys if chosen == "modelled" else ops.attend_to_half_keys
    out, lse = hybrid.by_kernels(checked, recipe, return_lse, to_fp8_keys, to_half_keys)
    return out if lse is None or not return_lse else (out, lse)


def _by_pages(checked: Checked, recipe: Recipe, return_lse: bool, chosen: str) -> Attention:
    """`sdpa` by a recipe with statistics of pages: K and V are appended to a cache, and queries attend to it."""
    q, k, v = checked.floats
    if q.numel() == 0 or k.numel() == 0:
        out, lse = empty_output(q, v.shape[3], checked.out_dtype).zero_(), empty_lse(q, True).fill_(-torch.inf)
        return (out, lse) if return_lse else out
    call = cache_of_call(q, k, v, checked.causal, recipe)
    if call.first > 0:
        call.cache.append(k[:, :, : call.first], v[:, :, : call.first], call.before, backend=append_backend(chosen))
    return paged_sdpa(
        q, call.cache, call.batch, call.new, scale=checked.softmax_scale, return_lse=return_lse, out_dtype=checked.out_dtype, backend=chosen
    )


def _by(backend: Backend, function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Makes a function that is documented, and typed as sdpa is, sdpa by one backend."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "backend"]

    def made(documented: Callable[..., Any]) -> Function:
        @functools.wraps(documented)
        def attention(*args, **kwargs):
            if "backend" in kwargs:
                raise TypeError(f"backend is {kwargs['backend']!r}; it must not be given: {documented.__name__} has one")
            return function(*args, **kwargs, backend=backend)

        attention.__signature__ = inspect.signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
        return attention  # type: ignore[return-value]

    return made


@_by("triton", sdpa)
def triton_sdpa() -> None:
    """`sdpa` by the Triton kernels, with its arguments but `backend`."""


@_by("cuda", sdpa)
def cuda_sdpa() -> None:
    """`sdpa` by the CUDA kernels, with its arguments but `backend`.

    The Hopper kernel runs the calls that it takes. The portable kernel, for sm_80 and later, runs other calls. Kernels
    are compiled on first use.

    Raises:
        BackendUnavailable: they don't do what the call asks for, or can't run here.
        BuildError: they don't compile here.
    """


if TYPE_CHECKING:

    @overload
    def reference_sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[False] = ..., **options: Unpack[PreciseOptions],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def reference_sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True], **options: Unpack[PreciseOptions],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
    @overload
    def reference_sdpa(
        query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None = ..., dropout_p: float = ..., is_causal: bool = ...,
        scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: bool, **options: Unpack[PreciseOptions],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


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
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in plain torch, on any device: the oracle, and what `sdpa` runs on CPU tensors.

    Args and errors as in `sdpa`; quantized operands are restored first. Autocast changes nothing.
        dtype: what is computed in, float32 or float64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype is {dtype}; it must be float32 or float64")
    a = Arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal_alignment=causal_alignment, window=window, softcap=softcap,
        sinks=sinks, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype, return_lse=return_lse,
    )  # fmt: skip
    return _by_reference(check(a), return_lse, dtype)


def _by_reference(checked: Checked, return_lse: bool, dtype: torch.dtype) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _restored(checked)
    options = checked.softmax_scale, checked.causal, dtype, checked.out_dtype, checked.window, checked.softcap, checked.sinks
    if checked.varlen is None:
        out, lse = ops.library_ops.reference_forward(q, k, v, checked.attn_mask, *options, scale=checked.scale)
    else:
        out, lse = ops.library_ops.reference_varlen_forward(q, k, v, *checked.varlen.arguments, *options, scale=checked.scale)
    return (out, lse) if return_lse else out


def _restored(checked: Checked) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands in floating point, all three of one dtype. If query or key is rotated, the other is rotated, too."""
    if checked.is_float:
        return checked.floats
    query, key, value = operands_of(checked)
    rotated = max(x.rotated if isinstance(x, Quantized) else 0 for x in (query, key))
    q, k, v = (dequantized(x) if isinstance(x, Quantized) else x.float() for x in (query, key, value))
    if rotated and isinstance(query, torch.Tensor):
        q = ops.library_ops.rotate(query, rotated, float(rotated))
    if rotated and isinstance(key, torch.Tensor):
        k = ops.library_ops.rotate(key, rotated, 1.0)
    return q, k, v
