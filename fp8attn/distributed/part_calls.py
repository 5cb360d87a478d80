"""Calls of attention to a part of the keys, and what is left to do when all parts have been attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import ops
from ..api import sdpa
from ..recipe import Quantized
from ..validate import Checked
from .merge import Accumulator
from .parts import Format, Part
from .sharding import Span
from .visibility import Visible, pieces


@dataclass(frozen=True, eq=False)
class PartCalls:
    """How a rank's queries attend to parts.

    Attributes:
        checked: the rank's arguments.
        form: what its tensors are.
        visible: which keys a query sees.
    """

    checked: Checked
    form: Format
    visible: Visible

    @property
    def part_dtype(self) -> torch.dtype:
        """The dtype of attention to a part: the output's, in which merging moves the fewest bytes. float32 where that
        would round or overflow more than one process does: exact attention, values with means of their own, and a
        dtype that isn't the input's."""
        dtype = self.checked.out_dtype
        return dtype if dtype == self.form.dtype and self.form.shared and not self.form.exact else torch.float32

    def attend(self, total: Accumulator, q: torch.Tensor | Quantized, runs: Sequence[Span], part: Part, first_row: int = 0) -> None:
        """Add attention to a part of the keys.

        Args:
            q: (B, Hq, S, D), all rows of the rank.
            runs: the tokens of its rows from `first_row` on.
        """
        checked, capped = self.checked, bool(self.checked.softcap)
        for piece in pieces(runs, part.spans, self.visible):
            start, stop = first_row + piece.start, first_row + piece.stop
            key, value = part.first_keys(piece.keys, self.form)
            if capped and isinstance(key, Quantized):  # a cap applies to whole scores
                key = replace(key, mean=part.k_mean)
            out, lse = sdpa(
                _rows(q, start, stop), key, value, is_causal=piece.causal != "none" and piece.window is None,
                causal_alignment="bottom_right" if piece.causal == "bottom_right" else "top_left", window=piece.window, softcap=checked.softcap,
                scale=checked.softmax_scale, enable_gqa=True, recipe=self.form.recipe, out_dtype=self.part_dtype, return_lse=True,
                backend=self.form.backend,
            )  # fmt: skip
            if part.k_mean is not None and not capped:
                floats = (q if isinstance(q, torch.Tensor) else checked.floats[0])[:, :, start:stop]
                lse = ops.library_ops.unsmoothed_lse(lse, floats, part.k_mean, checked.softmax_scale, self.form.rotated)
            total.add(start, stop, out, lse)


def _rows(q: torch.Tensor | Quantized, start: int, stop: int) -> torch.Tensor | Quantized:
    """Some rows of queries (B, H, S, D)."""
    if isinstance(q, torch.Tensor):
        return q[:, :, start:stop]
    return Quantized(q.data[:, :, start:stop], q.scale[..., start:stop], "token", "rows", stop - start, None, q.rotated)


def finished(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of all keys, with sinks if there are any. out (B, Hq, S, Dv), then float32."""
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(dtype), lse


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Hq, S, Dv) and LSE (B, Hq, S) of rows that have one more logit, whose value is zero. sinks (Hq,)."""
    logits = sinks.float()[:, None]
    weight = torch.sigmoid(lse - logits).masked_fill(lse == -torch.inf, 0.0)  # also beside a sink of -inf
    return out * weight.unsqueeze(-1), torch.logaddexp(lse, logits.expand_as(lse))
