"""Packed sequences that are too short for FP8: by PyTorch's `varlen_attn`, in the model's dtype."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..reference import Window
from ..validate import HALVES

MIN_PACKED_KEYS = 512
"""The fewest keys of the longest of packed sequences for which FP8 is chosen. One H200, from bf16, `PRECISE` beside
PyTorch's `varlen_attn`, µs: 256 × 64 tokens 447 and 99 (16 heads of 80) or 352 and 194 (causal, 32/8 heads of 128);
64 × 256 235 and 119 or 213 and 325; 8 × 512 82 and 120 (causal, 128); 16 × 1024 252 and 350 or 275 and 616."""

try:
    from torch.nn.attention.varlen import varlen_attn

    _TAKES: frozenset[str] = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    _TAKES = frozenset()


def pytorch_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> bool:
    """Whether PyTorch's `varlen_attn` takes a call of q (Tq, Hq, D), k (Tk, Hkv, D) and v (Tk, Hkv, Dv)."""
    dim = q.shape[2]
    return (
        {"scale", "window_size"} <= _TAKES and q.is_cuda and q.dtype in HALVES and {k.dtype, v.dtype} == {q.dtype}
        and dim == v.shape[2] and dim <= 256 and dim % 8 == 0 and not softcap and sinks is None
    )  # fmt: skip


def by_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, longest: tuple[int, int],
    window: Window, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attention (Tq, Hq, D) of a call that `pytorch_takes`.

    Args:
        longest: the most queries and keys of a sequence.
        window: as of `varlen_sdpa`; (-1, 0) is causal.
    """
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _TAKES else {}  # 2.11 takes it unasked
    out = varlen_attn(q, k, v, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *longest, scale=scale, window_size=window, **options)
    assert isinstance(out, torch.Tensor)
    return out
