"""Adds attention to a set of keys to attention to others, by their LSE: one kernel that reads both outputs once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import ceil_div, check_counted, launch
from .quantize import power_of_2

ROWS = 32
"""Rows of a program."""


@triton.jit(do_not_specialize=["heads", "length"])
def merge_kernel(
    out, out_strides, lse, lse_strides, new, new_strides, new_lse, new_lse_strides, into, into_strides, heads, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`into` = the weighted mean of `out` and `new` (B, H, S, DIM); `lse` (B, H, S) = the LSE of both.

    Grid: chunks of ROWS rows x heads x batch, in one dimension.
    """
    chunks = tl.cdiv(length, ROWS)
    program = tl.program_id(0)
    index = (program // chunks).to(tl.int64)
    batch, head = index // heads, index % heads
    rows = (program % chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = rows < length
    elements = inside[:, None] & (columns < DIM)
    at = lse + batch * lse_strides[0] + head * lse_strides[1] + rows * lse_strides[2]
    added_at = new_lse + batch * new_lse_strides[0] + head * new_lse_strides[1] + rows * new_lse_strides[2]
    old, added = tl.load(at, mask=inside, other=0.0), tl.load(added_at, mask=inside, other=0.0)
    # the new set's share, exp(added) / (exp(old) + exp(added)); NaN stays NaN
    weight = tl.where(added == -float("inf"), 0.0, 1.0 / (1.0 + tl.exp(old - added)))[:, None]
    x = tl.load(out + batch * out_strides[0] + head * out_strides[1] + rows[:, None] * out_strides[2] + columns, mask=elements, other=0.0)
    y = tl.load(new + batch * new_strides[0] + head * new_strides[1] + rows[:, None] * new_strides[2] + columns, mask=elements, other=0.0)
    merged = tl.where(weight < 0.5, x + weight * (y - x), y - (1.0 - weight) * (y - x))
    tl.store(into + batch * into_strides[0] + head * into_strides[1] + rows[:, None] * into_strides[2] + columns, merged, mask=elements)
    tl.debug_barrier()  # every warp loads the LSE of all rows: the new one must not be stored before
    larger, smaller = tl.maximum(old, added), tl.minimum(old, added)
    nothing = larger == -float("inf")
    both = larger + tl.log(1.0 + tl.exp(tl.where(nothing, 0.0, smaller - larger)))
    is_nan = (old != old) | (added != added)
    tl.store(at, tl.where(is_nan, float("nan"), tl.where(nothing, larger, both)), mask=inside)


def merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor, into: torch.Tensor) -> None:
    """Add attention to a set of keys.

    Args:
        out: float32 (B, H, S, Dv), unit last stride: normalised, for the keys before.
        lse: float32 (B, H, S), natural log. It becomes the LSE of all keys.
        new, new_lse: the same for the keys that are added.
        into: (B, H, S, Dv), unit last stride, of any float dtype: the output for all keys. It may be `out`.
    """
    if out.numel() == 0:
        return
    check_counted("out", out)
    batch, heads, length, dim = out.shape
    grid = (ceil_div(length, ROWS) * heads * batch,)
    tensors = (x for pair in ((out, lse), (new, new_lse)) for x in pair)
    arguments = [part for x in (*tensors, into) for part in (x, x.stride())]
    launch(merge_kernel, grid, *arguments, heads, length, dim, power_of_2(dim), ROWS)
