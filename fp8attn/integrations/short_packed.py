"""Packed sequences that are too short for FP8: by PyTorch's `varlen_attn`, in the model's dtype."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..reference import Window
from ..validate import HALVES

MIN_PACKED_KEYS = 512
"""The fewest keys of the longest of packed sequences for which FP8 is chosen. One H200, from bf16, `PRECISE` beside
PyTorch's `varlen_attn`, µs: 256 × 64 tokens 447 and 99 (16 heads of 80) or 352 and 194 (causal, 32/8 heads of 128);
64 × 256 235 and 119 or 213 and 325; 8 × 512 82 and 120 (causal, 128); 16 × 1024 252 and 350 or 275 and 616."""


@dataclass(frozen=True)
class VarlenAttn:
    """PyTorch's `varlen_attn`.

    Attributes:
        function: None if this release has none that takes scales and windows.
        asks_for_groups: whether grouped keys are an option; else they are taken as they are.
    """

    function: Callable[..., Any] | None
    asks_for_groups: bool = False

    @classmethod
    def find(cls) -> VarlenAttn:
        """That of this release. Its module imports Triton, so this isn't done before it is needed."""
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            return cls(None)
        options = inspect.signature(varlen_attn).parameters
        return cls(varlen_attn if {"scale", "window_size"} <= options.keys() else None, "enable_gqa" in options)

    def takes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> bool:
        """Whether it takes a call of q (Tq, Hq, D), k (Tk, Hkv, D) and v (Tk, Hkv, Dv)."""
        dim = q.shape[2]
        return (
            self.function is not None and q.is_cuda and q.dtype in HALVES and {k.dtype, v.dtype} == {q.dtype} and dim == v.shape[2]
            and dim <= 256 and dim % 8 == 0 and not softcap and sinks is None
        )  # fmt: skip

    def __call__(
        self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], cu_seqlens: tuple[torch.Tensor, torch.Tensor], longest: tuple[int, int],
        is_causal: bool, window: Window | None, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention (Tq, Hq, D) of a call that it `takes`.

        Args:
            operands: q, k and v.
            cu_seqlens: of queries, and of keys.
            longest: the most queries, and the most keys, of a sequence.
            is_causal, window, scale: as of `varlen_sdpa`. A causal window ends at 0.
        """
        assert self.function is not None
        q, k, _ = operands
        options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if self.asks_for_groups else {}
        visible = window or ((-1, 0) if is_causal else (-1, -1))
        out = self.function(*operands, *(x.contiguous() for x in cu_seqlens), *longest, scale=scale, window_size=visible, **options)
        assert isinstance(out, torch.Tensor)
        return out
