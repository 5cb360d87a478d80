"""Operators of packed sequences: schema, implementation, fake implementation, as fp8attn.ops has those of all others.

Operands are (1, H, T, D), and what each sequence has one of is (N, H, …): see `Quantized.packed`. No operator reads
lengths on the host, but for those of plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import quantization as quantize_ref
from . import reference, validate
from .ambient import shielded
from .call import Call, Problem, Varlen, empty_lse, empty_output
from .ops import (
    FORWARDS,
    OPTIONS,
    QUERY_SCALES,
    Forward,
    current,
    laid_out,
    modelled_packed,
    quantized_packed,
    register,
    unsmoothed_packed_lse,
)
from .problem_ops import FROM_FP16, FromFp16
from .recipe import ComputeType, Granularity, Layout, Packed, Quantized, Recipe
from .reference import CAUSAL_WINDOW, Causal

LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, SymInt longest_q, SymInt longest_k"
"""`Varlen.arguments`."""


def varlen_of(lengths: Sequence[Any], q: torch.Tensor, k: torch.Tensor) -> Varlen:
    """The inverse of `Varlen.arguments`, checked, for q (1, Hq, Tq, D) and k (1, Hkv, Tk, D)."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k = lengths
    varlen = Varlen(Packed(cu_seqlens_q, None, q.shape[2]), Packed(cu_seqlens_k, seqused_k, k.shape[2]), longest_q, longest_k)
    validate.check_lengths(varlen, q.device)
    return varlen


def _quantize(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None, recipe: str, modelled: bool = False
) -> tuple[torch.Tensor, ...]:
    packed, of_text = Packed(cu_seqlens_k, seqused_k, k.shape[2]), Recipe.of_text(recipe)
    validate.check_varlen_recipe(of_text)
    validate.check_packed_floats(k, v, packed)
    _, key, value = (modelled_packed if modelled else quantized_packed)(None, k, v, of_text, packed)
    return _tensors_of(key, value)


QUANTIZERS = {"varlen_quantize": shielded(quantized_packed), "modelled_varlen_quantize": shielded(modelled_packed)}
"""What operators do with q, or None, and k and v that were checked, a recipe and sequences of k and v."""


def _tensors_of(key: Quantized, value: Quantized) -> tuple[torch.Tensor, ...]:
    tensors = key.data, key.scale, key.mean, value.data, value.scale, value.mean
    return tuple(key.scale.new_empty(0) if x is None else x for x in tensors)


def _fake_quantize(k, v, cu_seqlens_k, seqused_k, recipe):
    return _tensors_of(*quantize_ref.empty_packed(k, v, Recipe.of_text(recipe), Packed(cu_seqlens_k, seqused_k, k.shape[2])))


for _name, _quantizer in (("varlen_quantize", _quantize), ("modelled_varlen_quantize", functools.partial(_quantize, modelled=True))):
    register(
        f"{_name}(Tensor k, Tensor v, Tensor cu_seqlens_k, Tensor? seqused_k, str recipe) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _quantizer,
        _fake_quantize,
    )


register(
    f"varlen_unsmoothed_lse(Tensor lse, Tensor q, Tensor k_mean, Tensor cu_seqlens_q, float softmax_scale, int rotated, {QUERY_SCALES}) -> Tensor",
    unsmoothed_packed_lse,
    lambda lse, q, k_mean, cu_seqlens_q, softmax_scale, rotated, q_scale=None, granularity="token": torch.empty_like(lse),
)


def call_of(
    q: torch.Tensor, q_scale: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor, k_group: int, v: torch.Tensor, v_scale: torch.Tensor,
    v_mean: torch.Tensor | None, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None, longest_q: int,
    longest_k: int, softmax_scale: float, causal: Causal, compute: ComputeType, two_level: bool | None, out_dtype: torch.dtype,
    return_lse: bool, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    mean_scores: torch.Tensor | None = None,
) -> Call:  # fmt: skip
    """The checked call of a forward operator's arguments: `Call`'s fields, but for those that packed sequences don't
    have."""
    varlen = varlen_of((cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k), q, k)
    call = Call(
        q, q_scale, 1, k, k_scale, k_group, v, v_scale, v_mean, None, None, k.shape[2], softmax_scale, causal, compute, two_level, out_dtype,
        return_lse, validate.checked_window(window), softcap, sinks, mean_scores, varlen=varlen,
    )  # fmt: skip
    validate.check_call(call)
    return call


def forward_by(backend: Forward) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A forward operator's implementation, with the arguments of `call_of`."""

    @functools.wraps(call_of)
    def forward(*arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
        call = call_of(*arguments, **options)
        with current(call.q.device):
            return backend(call)

    return forward


def _fake_forward(q, q_scale, k, k_scale, k_group, v, v_scale, v_mean, cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k, softmax_scale,
                  causal, compute, two_level, out_dtype, return_lse, window=CAUSAL_WINDOW, softcap=0.0, sinks=None,
                  mean_scores=None):  # fmt: skip
    return empty_output(q, v.shape[2], out_dtype), empty_lse(q, return_lse)


for _name, _backend in FORWARDS.items():
    register(
        f"{_name}_varlen_forward(Tensor q, Tensor q_scale, Tensor k, Tensor k_scale, int k_group, Tensor v, Tensor v_scale, Tensor? v_mean,"
        f" {LENGTHS}, float softmax_scale, str causal, str compute, bool? two_level, ScalarType out_dtype, bool return_lse, {OPTIONS},"
        " Tensor? mean_scores=None) -> (Tensor, Tensor)",
        forward_by(_backend),
        _fake_forward,
    )


def _checked_floats(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[Any]) -> Varlen:
    """The sequences of an operator that takes plain tensors, all checked. lengths: Varlen.arguments."""
    varlen = varlen_of(lengths, q, k)
    validate.check_floats(q, k[:, :, :0], v[:, :, :0], None)
    validate.check_packed_floats(k, v, varlen.k)
    return varlen


def from_fp16_by(run: FromFp16) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Implementation of an operator that quantizes packed sequences and attends."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        seqused_k: torch.Tensor | None, longest_q: int, longest_k: int, softmax_scale: float, causal: Causal, out_dtype: torch.dtype,
        return_lse: bool, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0, sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        varlen = _checked_floats(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k))
        of_rows = validate.checked_rows(softmax_scale, causal, out_dtype, window, softcap, sinks, q)
        return run(Problem(q, k, v, softmax_scale, "e4m3", causal, out_dtype, return_lse, None, of_rows, softcap, sinks, varlen))

    return forward


def _fake_from_fp16(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k, softmax_scale, causal, out_dtype, return_lse,
                    window=CAUSAL_WINDOW, softcap=0.0, sinks=None):  # fmt: skip
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, return_lse)


for _name, _run in FROM_FP16.items():
    register(
        f"{_name}_varlen_forward_from_fp16(Tensor q, Tensor k, Tensor v, {LENGTHS}, float softmax_scale, str causal, ScalarType out_dtype,"
        f" bool return_lse, {OPTIONS}) -> (Tensor, Tensor)",
        from_fp16_by(_run),
        _fake_from_fp16,
    )


def _reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, seqused_k: torch.Tensor | None,
    longest_q: int, longest_k: int, softmax_scale: float, causal: Causal, dtype: torch.dtype, out_dtype: torch.dtype,
    window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    varlen = _checked_floats(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k))
    of_rows = validate.checked_rows(softmax_scale, causal, out_dtype, window, softcap, sinks, q)
    spans, scoring = varlen.k.spans(), reference.Scoring(softmax_scale, of_rows, softcap, sinks)

    def attend(sequence: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        begin, length = spans[sequence]
        keys = slice(begin, begin + length)
        return reference.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal=causal, scoring=scoring, dtype=dtype)

    return laid_out(q, reference.of_each_sequence(q, v.shape[3], varlen.q, attend), out_dtype, True)


def _fake_reference_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, longest_q, longest_k, softmax_scale, causal, dtype, out_dtype,
                            window=CAUSAL_WINDOW, softcap=0.0, sinks=None):  # fmt: skip
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, True)


register(
    f"reference_varlen_forward(Tensor q, Tensor k, Tensor v, {LENGTHS}, float softmax_scale, str causal, ScalarType dtype, ScalarType out_dtype,"
    f" {OPTIONS}) -> (Tensor, Tensor)",
    _reference_forward,
    _fake_reference_forward,
    ("CompositeExplicitAutograd",),
)


def _dequantize(
    data: torch.Tensor, scale: torch.Tensor, granularity: Granularity, layout: Layout, mean: torch.Tensor | None, cu_seqlens: torch.Tensor,
    seqused: torch.Tensor | None, tokens: int,
) -> torch.Tensor:  # fmt: skip
    x = Quantized(data, scale, granularity, layout, tokens, mean, packed=Packed(cu_seqlens, seqused, tokens))
    validate.check_quantized("x", x, layout, packed=True)
    return quantize_ref.dequantize_packed(x)


def _fake_dequantize(data, scale, granularity, layout, mean, cu_seqlens, seqused, tokens):
    return torch.empty(Quantized(data, scale, granularity, layout, tokens).shape, dtype=torch.float32, device=data.device)


register(
    "varlen_dequantize(Tensor data, Tensor scale, str granularity, str layout, Tensor? mean, Tensor cu_seqlens, Tensor? seqused, SymInt tokens)"
    " -> Tensor",
    _dequantize,
    _fake_dequantize,
    ("CompositeExplicitAutograd",),
)
