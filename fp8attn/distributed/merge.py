"""Attention over a union of key sets, added up one set after another."""

from __future__ import annotations

import math

import torch

from .. import ops
from .. import triton as triton_kernels

Added = tuple[int, int, torch.Tensor, torch.Tensor]


def merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor, into: torch.Tensor) -> None:
    """Add attention to a set of keys: `triton.merge.merge`, in plain torch where there is no GPU."""
    if ops.has_kernels(out.device):
        with ops.current(out.device):
            triton_kernels.merge.merge(out, lse, new, new_lse, into)
        return
    # the new set's share, exp(new) / (exp(old) + exp(new)); NaN stays NaN
    weight = torch.where(new_lse == -math.inf, torch.zeros_like(lse), torch.sigmoid(new_lse - lse))
    into.copy_(out.lerp(new, weight.unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, new_lse))


class Accumulator:
    """Output and LSE of the keys attended to so far, in float32.

    `reference.combine` is the definition. Here, sets come one at a time, and each is added when the next one comes: the
    last one is written in the dtype of the result.
    """

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        """For queries q (B, H, S, D), and values of `value_dim` channels."""
        self._shape, self._device = (*q.shape[:3], value_dim), q.device
        self._total: tuple[torch.Tensor, torch.Tensor] | None = None
        self._last: Added | None = None

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a set of keys for the rows `start` to `stop`.

        Args:
            out: float32 (B, H, stop - start, Dv), normalised. It may be kept and written.
            lse: float32 (B, H, stop - start), natural log; -inf for rows that see none of these keys.
        """
        if self._total is None and stop - start == self._shape[2]:
            self._total = out, lse
            return
        total, total_lse = self._summed()
        if self._last is not None:
            self._add(self._last, total_lse, total, total)
        self._last = start, stop, out, lse

    def result(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, H, S, Dv) and LSE float32 (B, H, S); zeros and -inf for rows that have seen no key."""
        total, lse = self._summed()
        if self._last is None:
            return total.to(dtype), lse
        out, (start, stop, *_) = total if dtype == torch.float32 else torch.empty_like(total, dtype=dtype), self._last
        if out is not total:
            for rows in (slice(0, start), slice(stop, None)):
                out[:, :, rows] = total[:, :, rows]
        self._add(self._last, lse, total, out)
        self._total, self._last = (out, lse), None
        return out, lse

    def _summed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of all sets but the last one."""
        if self._total is None:
            self._total = (
                torch.zeros(self._shape, dtype=torch.float32, device=self._device),
                torch.full(self._shape[:3], -math.inf, dtype=torch.float32, device=self._device),
            )
        return self._total

    @staticmethod
    def _add(added: Added, lse: torch.Tensor, total: torch.Tensor, into: torch.Tensor) -> None:
        start, stop, new, new_lse = added
        rows = (slice(None), slice(None), slice(start, stop))
        merge(total[rows], lse[rows], new, new_lse, into[rows])
