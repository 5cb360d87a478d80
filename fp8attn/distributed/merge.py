"""Attention over a union of key sets, of which each is attended to alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import ops, reference
from .. import triton as triton_kernels
from ..call import empty_output
from ..triton.merge import RowsOfPart
from .transport import launched

MOST_PARTS = 4
"""Parts that are kept until one kernel merges them."""


def merge(parts: Sequence[RowsOfPart], rows: tuple[int, int], into: torch.Tensor, lse: torch.Tensor, v_mean: torch.Tensor | None) -> None:
    """Merge attention to sets of keys: `triton.merge.merge`, in plain torch where there is no GPU."""
    if ops.has_kernels(into.device):
        with ops.current(into.device):
            triton_kernels.merge.merge(parts, rows, into, lse, v_mean)
        return
    written = slice(*rows)
    outs = into.new_zeros(len(parts), *into.shape, dtype=torch.float32)
    lses = lse.new_full((len(parts), *lse.shape), -math.inf)
    for i, part in enumerate(parts):
        outs[i, :, :, part.start : part.stop], lses[i, :, :, part.start : part.stop] = part.out, part.lse
    merged, merged_lse = reference.combine(outs[:, :, :, written], lses[:, :, :, written])
    if v_mean is not None:
        sees_keys = (merged_lse != -math.inf).unsqueeze(-1)
        merged = merged + sees_keys * v_mean.repeat_interleave(into.shape[1] // v_mean.shape[1], 1).unsqueeze(2)
    into[:, :, written], lse[:, :, written] = merged.to(into.dtype), merged_lse


class Accumulator:
    """Output and LSE of keys that come set by set. `reference.combine` is the definition.

    Outputs of sets are kept until there are MOST_PARTS of them, and then merged in float32. So two sets are merged by
    one kernel, and into the first one's output if that has all rows.
    """

    def __init__(self, q: torch.Tensor, value_dim: int, v_mean: torch.Tensor | None = None) -> None:
        """For queries q (B, H, S, D), and values of `value_dim` channels.

        Args:
            v_mean: float32 (B, Hkv, Dv), contiguous, the mean that all sets' values are without; or None.
        """
        self._q, self._value_dim, self._v_mean = q, value_dim, v_mean
        self._parts: list[RowsOfPart] = []
        self._launched: list[torch.cuda.Event | None] = []

    def add(self, start: int, stop: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add a set of keys for the rows `start` to `stop`, which the current stream attends to.

        Args:
            out: (B, H, stop - start, Dv), normalised, of any float dtype. It may be kept and written.
            lse: float32 (B, H, stop - start), natural log; -inf for rows that see none of these keys.
        """
        if len(self._parts) == MOST_PARTS:
            self._parts = [RowsOfPart(0, self._q.shape[2], *self._merged(torch.float32, None))]
            self._launched = [launched(self._q.device)]
        self._parts.append(RowsOfPart(start, stop, out, lse))
        self._launched.append(launched(self._q.device))

    def result(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, H, S, Dv) and LSE float32 (B, H, S); zeros and -inf for rows that have seen no key."""
        return self._merged(dtype, self._v_mean)

    def _wait(self) -> None:
        """Make the current stream wait for all sets, which other streams may have attended to."""
        if not self._q.is_cuda:
            return
        stream = torch.cuda.current_stream(self._q.device)
        for part, event in zip(self._parts, self._launched, strict=True):
            assert event is not None
            stream.wait_event(event)
            part.out.record_stream(stream)  # its memory must not be reused before this stream has read it
            part.lse.record_stream(stream)

    def _merged(self, dtype: torch.dtype, v_mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        length, parts = self._q.shape[2], self._parts
        self._wait()
        first = parts[0] if parts and (parts[0].start, parts[0].stop) == (0, length) else None
        rows = (0, length)
        if first is not None and v_mean is None and first.out.dtype == dtype:  # rows of no other set stay as they are
            rows = min([part.start for part in parts[1:]] + [length]), max([part.stop for part in parts[1:]] + [0])
        if first is not None and first.out.dtype == dtype:
            out, lse = first.out, first.lse
        else:
            out = empty_output(self._q, self._value_dim, dtype)
            lse = torch.empty(self._q.shape[:3], dtype=torch.float32, device=self._q.device)
        if not parts:
            return out.zero_(), lse.fill_(-math.inf)
        if rows[0] < rows[1]:
            merge(parts, rows, out, lse, v_mean)
        return out, lse
