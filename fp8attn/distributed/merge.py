"""Attention over a union of key sets, of which each is attended to alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import ops, reference
from .. import triton as triton_kernels
from ..call import empty_output
from ..triton.merge import RowsOfPart

MOST_PARTS = 4
"""Parts that are kept until one kernel merges them."""


def merge(parts: Sequence[RowsOfPart], rows: tuple[int, int], into: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge attention to sets of keys: `triton.merge.merge`, in plain torch where there is no GPU."""
    if ops.has_kernels(into.device):
        with ops.current(into.device):
            triton_kernels.merge.merge(parts, rows, into, lse)
        return
    written = slice(*rows)
    outs = into.new_zeros(len(parts), *into.shape, dtype=torch.float32)
    lses = lse.new_full((len(parts), *lse.shape), -math.inf)
    for i, part in enumerate(parts):
        outs[i, :, :, part.start : part.stop], lses[i, :, :, part.start : part.stop] = part.out, part.lse
    merged, merged_lse = reference.combine(outs[:, :, :, written], lses[:, :, :, written])
    into[:, :, written], lse[:, :, written] = merged.to(into.dtype), merged_lse


class Accumulator:
    """Output and LSE of keys that come set by set. `reference.combine` is the definition.

    Outputs of sets are kept until there are MOST_PARTS of them, and then merged in float32. So two sets are merged by
    one kernel, into the first one's output where only some rows have more than one.
    """

    def __init__(self, q: torch.Tensor, value_dim: int) -> None:
        """For queries q (B, H, S, D), and values of `value_dim` channels."""
        self._q, self._value_dim = q, value_dim
        self._parts: list[RowsOfPart] = []

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a set of keys for the rows `start` to `stop`.

        Args:
            out: (B, H, stop - start, Dv), normalised, of any float dtype. It may be kept and written.
            lse: float32 (B, H, stop - start), natural log; -inf for rows that see none of these keys.
        """
        if len(self._parts) == MOST_PARTS:
            self._parts = [RowsOfPart(0, self._q.shape[2], *self.result())]
        self._parts.append(RowsOfPart(start, stop, out, lse))

    def result(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, H, S, Dv) and LSE float32 (B, H, S); zeros and -inf for rows that have seen no key."""
        length, parts = self._q.shape[2], self._parts
        first = parts[0] if parts and (parts[0].start, parts[0].stop) == (0, length) else None
        if first is not None and len(parts) == 1:
            return first.out.to(dtype), first.lse
        if first is not None and first.out.dtype == dtype:
            rows = min(part.start for part in parts[1:]), max(part.stop for part in parts[1:])
            merge(parts, rows, first.out, first.lse)
            return first.out, first.lse
        out = empty_output(self._q, self._value_dim, dtype)
        lse = torch.empty(self._q.shape[:3], dtype=torch.float32, device=self._q.device)
        if not parts:
            return out.zero_(), lse.fill_(-math.inf)
        merge(parts, (0, length), out, lse)
        return out, lse
