"""FlashAttention's functions, computed in FP8: code that is written for FlashAttention 2 runs by changing an import.

from fp8attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Layouts, causal alignment (bottom right) and windows are FlashAttention's. Arguments that fp8attn has no kernels for are
errors. Rows without visible keys are zero, and their LSE is -inf.
"""

from __future__ import annotations

import torch

from ..api import sdpa, varlen_sdpa
from ..recipe import DEFAULT_RECIPE, Recipe
from ..reference import Window
from ..validate import Backend

Attention = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""Output; or output, LSE and None in place of the probabilities."""

UNLIMITED: Window = (-1, -1)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    backend: Backend = "auto",
) -> Attention:
    """flash_attn.flash_attn_func by fp8attn.sdpa.

    Args:
        q: (B, Sq, Hq, D).
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv).
        dropout_p: must be 0.
        softmax_scale, window_size, softcap: as `scale`, `window` and `softcap` of fp8attn.sdpa.
        causal: row i sees keys j <= i + Sk - Sq.
        alibi_slopes: must be None.
        deterministic: results always are.
        return_attn_probs: also return the LSE (B, Hq, Sq), and None in place of the probabilities.
        sinks, recipe, backend: as of fp8attn.sdpa.

    Returns:
        out (B, Sq, Hq, Dv); with `return_attn_probs` (out, LSE, None).

    Raises:
        TypeError, ValueError, RuntimeError: as fp8attn.sdpa.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes)
    result = sdpa(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, scale=softmax_scale, enable_gqa=True,
        causal_alignment="bottom_right", window=_window(window_size), softcap=softcap, sinks=sinks, recipe=recipe, return_lse=return_attn_probs,
        backend=backend,
    )  # fmt: skip
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1], None
    return result.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    backend: Backend = "auto",
) -> Attention:
    """flash_attn.flash_attn_varlen_func by fp8attn.varlen_sdpa.

    Args:
        q: (Tq, Hq, D).
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as of fp8attn.varlen_sdpa.
        block_table: must be None.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as of `flash_attn_func`.
        return_attn_probs: also return the LSE (Hq, Tq), and None in place of the probabilities.
        sinks, recipe, backend: as of fp8attn.varlen_sdpa.

    Returns:
        out (Tq, Hq, Dv); with `return_attn_probs` (out, LSE, None).

    Raises:
        TypeError, ValueError, RuntimeError: as fp8attn.varlen_sdpa.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    result = varlen_sdpa(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, is_causal=causal,
        window=_window(window_size), softcap=softcap, sinks=sinks, scale=softmax_scale, recipe=recipe, return_lse=return_attn_probs,
        backend=backend,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result


def _check_unsupported(dropout_p: float, **absent: object) -> None:
    """Check arguments of FlashAttention that fp8attn doesn't have."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0: fp8attn is for inference")
    for name, x in absent.items():
        if x is not None:
            raise ValueError(f"{name} is given; it must be None: fp8attn has no kernels for it")


def _window(window_size: Window) -> Window | None:
    """A window_size as `window` of fp8attn.sdpa."""
    return None if tuple(window_size) == UNLIMITED else window_size
