"""Attention over a union of key sets, added up one set after another."""

from __future__ import annotations

import math

import torch


class Accumulator:
    """Output and LSE of the keys attended to so far, in float32.

    `reference.combine` is the definition. Here, sets come one at a time, and the sum is in place.
    """

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        """For queries q (B, H, S, D), and values of `value_dim` channels."""
        self._shape, self._device = (*q.shape[:3], value_dim), q.device
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a set of keys for the rows `start` to `stop`.

        Args:
            out: float32 (B, H, stop - start, Dv), normalised. It may be kept and written.
            lse: float32 (B, H, stop - start), natural log; -inf for rows that see none of these keys.
        """
        if self._out is None and stop - start == self._shape[2]:
            self._out, self._lse = out, lse
            return
        total_out, total_lse = self.result()
        rows, old = total_out[:, :, start:stop], total_lse[:, :, start:stop]
        # weight of the new set: exp(lse) / (exp(old) + exp(lse)); NaN stays NaN
        weight = torch.where(lse == -math.inf, torch.zeros_like(lse), torch.sigmoid(lse - old))
        rows.lerp_(out, weight.unsqueeze(-1))
        old.copy_(torch.logaddexp(old, lse))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out float32 (B, H, S, Dv) and LSE float32 (B, H, S); zeros and -inf for rows that have seen no key."""
        if self._out is None or self._lse is None:
            self._out = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
            self._lse = torch.full(self._shape[:3], -math.inf, dtype=torch.float32, device=self._device)
        return self._out, self._lse
