"""Quantized queries in float32, for what K's mean adds to their scores: a kernel instead of plain torch, because the
launch cache repeats launches only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..call import GROUPS
from ..recipe import INT8_NAN, Quantized
from .forward import load_rows
from .launch import ceil_div, launch
from .quantize import FLOAT_MAX, power_of_2
from .tile import half_of_code

ROWS = 32
"""Rows of a program."""

NAN: tl.constexpr = tl.constexpr(INT8_NAN)


@triton.jit(do_not_specialize=["heads", "length"])
def dequantize_kernel(
    data, data_strides, scale, scale_strides, out, heads, length, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """quantization.dequantize of rows without a mean: out (B, H, S, DIM), contiguous. e4m3 is passed as bytes.

    Grid: chunks of ROWS rows x (B · H), in one dimension. GROUP: rows under one scale; 0: all rows of a head.
    """
    chunks = tl.cdiv(length, ROWS)
    program = tl.program_id(0)
    pair = (program // chunks).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows = program % chunks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = rows < length
    codes = load_rows(data + batch * data_strides[0] + head * data_strides[1], rows, data_strides[2], length, 0, WIDTH, DIM, True)
    group = rows // GROUP if GROUP > 0 else rows * 0
    scales = tl.load(scale + batch * scale_strides[0] + head * scale_strides[1] + group.to(tl.int64) * scale_strides[2], mask=inside, other=0.0)
    if codes.dtype == tl.int8:
        x = tl.where(codes == NAN, float("nan"), codes.to(tl.float32))
        scales = tl.abs(scales)  # negative if a row is non-finite
    else:
        x = half_of_code(codes).to(tl.float32)
    y = x * scales[:, None]
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -FLOAT_MAX), FLOAT_MAX), y)
    at = (pair * length + rows)[:, None] * DIM + columns[None, :]
    tl.store(out + at, y, mask=inside[:, None] & (columns < DIM)[None, :])


def dequantize(x: Quantized, *, warmup: bool = False) -> torch.Tensor:
    """quantization.dequantize of rows without a mean, float32 (B, H, S, D); the numbers are the same.

    Args:
        warmup: compile only.
    """
    batch, heads, length, dim = x.data.shape
    group = GROUPS[x.granularity]
    scale = x.scale if group else x.scale.expand(batch, heads, 1)
    out = torch.empty(batch, heads, length, dim, dtype=torch.float32, device=x.device)
    data = x.data if x.data.dtype == torch.int8 else x.data.view(torch.uint8)
    launch(
        dequantize_kernel, (ceil_div(length, ROWS) * heads * batch,),
        data, data.stride(), scale, scale.stride(), out, heads, length, group, dim, power_of_2(dim), ROWS, warmup=warmup, num_warps=4,
    )  # fmt: skip
    return out
