"""Merges attention to several sets of keys by their LSE: one kernel that reads each output once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import ceil_div, check_counted, launch
from .quantize_steps import power_of_2

ROWS = 32
"""Rows of a program."""


@dataclass(frozen=True, eq=False)
class RowsOfPart:
    """Attention of some rows to a set of keys.

    Attributes:
        start, stop: the rows.
        out: (B, H, stop - start, Dv), unit last stride, normalised, of any float dtype.
        lse: float32 (B, H, stop - start), natural log; -inf for rows that see none of these keys.
    """

    start: int
    stop: int
    out: torch.Tensor
    lse: torch.Tensor


@triton.jit(do_not_specialize=["heads", "group", "first", "last"])
def merge_kernel(
    outs, out_strides, lses, lse_strides, starts, stops, added, into, into_strides, into_lse, into_lse_strides, heads, group, first, last,
    COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`into` = the weighted mean of COUNT `outs` (B, H, stop - start, DIM) in the rows from `first` to `last`, plus
    `added` (B, H / group, DIM), which may be None; `into_lse` = the LSE of all. `into` may be one of `outs`.

    Grid: chunks of ROWS rows x heads x batch, in one dimension.
    """
    chunks = tl.cdiv(last - first, ROWS)
    program = tl.program_id(0)
    index = (program // chunks).to(tl.int64)
    batch, head = index // heads, index % heads
    rows = (first + program % chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    for i in tl.static_range(COUNT):
        there = (rows >= starts[i]) & (rows < stops[i]) & (rows < last)
        at = lses[i] + batch * lse_strides[i][0] + head * lse_strides[i][1] + (rows - starts[i]) * lse_strides[i][2]
        largest = tl.maximum(largest, tl.load(at, mask=there, other=-float("inf")))
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.static_range(COUNT):
        there = (rows >= starts[i]) & (rows < stops[i]) & (rows < last)
        at = lses[i] + batch * lse_strides[i][0] + head * lse_strides[i][1] + (rows - starts[i]) * lse_strides[i][2]
        weight = tl.exp(tl.load(at, mask=there, other=-float("inf")) - largest)  # NaN stays NaN
        at = outs[i] + batch * out_strides[i][0] + head * out_strides[i][1] + (rows - starts[i])[:, None] * out_strides[i][2] + columns
        x = tl.load(at, mask=there[:, None] & (columns < DIM), other=0.0).to(tl.float32)
        mean += weight[:, None] * x
        total += weight
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    if added is not None:
        shift = tl.load(added + index // group * DIM + columns, mask=columns < DIM, other=0.0)
        mean += tl.where(total == 0.0, 0.0, 1.0)[:, None] * shift[None, :]
    inside = rows < last
    tl.debug_barrier()  # every warp loads the LSE of all rows: the new one must not be stored before
    to = into + batch * into_strides[0] + head * into_strides[1] + rows[:, None] * into_strides[2] + columns
    tl.store(to, mean.to(into.dtype.element_ty), mask=inside[:, None] & (columns < DIM))
    to = into_lse + batch * into_lse_strides[0] + head * into_lse_strides[1] + rows * into_lse_strides[2]
    tl.store(to, largest + tl.log(total), mask=inside)


def merge(parts: Sequence[RowsOfPart], rows: tuple[int, int], into: torch.Tensor, lse: torch.Tensor, v_mean: torch.Tensor | None) -> None:
    """Merge attention to sets of keys.

    Args:
        parts: attention to each set, in the order in which they are added.
        rows: the first row that is written, and the end.
        into: (B, H, S, Dv), unit last stride, of any float dtype: the output for all keys. It may be the first part's.
        lse: float32 (B, H, S), the LSE of all keys; the first part's if `into` is.
        v_mean: float32 (B, Hkv, Dv), contiguous, the mean that values are without, which is added to rows that see a
            key; or None.
    """
    batch, heads, _, dim = into.shape
    first, last = rows
    if first >= last or into.numel() == 0:
        return
    check_counted("out", into)
    outs, lses = [part.out for part in parts], [part.lse for part in parts]
    launch(
        merge_kernel, (ceil_div(last - first, ROWS) * heads * batch,),
        tuple(outs), tuple(x.stride() for x in outs), tuple(lses), tuple(x.stride() for x in lses), tuple(part.start for part in parts),
        tuple(part.stop for part in parts), v_mean, into, into.stride(), lse, lse.stride(), heads, 1 if v_mean is None else heads // v_mean.shape[1],
        first, last, len(parts), dim, power_of_2(dim), ROWS,
    )  # fmt: skip
