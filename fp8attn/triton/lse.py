"""The LSE of K as it was, from that of K without its mean: a kernel that reads queries once.

What the mean adds to every score of a row is the product of the row with it. The mean is rotated back, so that queries
are multiplied as they came. Quantized queries are rotated, as the mean is: their codes are multiplied with it, and the
product with the row's scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..call import GROUPS
from ..device import INTERPRETING, Device
from ..layout import units_of
from ..recipe import INT8_NAN, Packed, Quantized
from .forward import load_rows
from .half_keys import load_mean, mean_scores
from .launch import begin, ceil_div, check_counted, launch
from .quantize_steps import power_of_2
from .tile import half_of_code
from .varlen import packed_arguments, unit_of_head, units_in

ROWS = 64
"""Queries of a program; of float32, half as many."""

NAN: tl.constexpr = tl.constexpr(INT8_NAN)

CODES: tl.constexpr = tl.constexpr(tl.float32 if INTERPRETING else tl.bfloat16)
"""The type in which codes are multiplied. bfloat16 has the values of all of them, and float32's range for the mean. The
interpreter can't multiply it."""


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "length", "sequences"])
def unsmooth_lse_kernel(
    q, q_strides, q_scale, scale_strides, k_mean, lse, out, cu_seqlens, q_heads, kv_heads, length, sequences, softmax_scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add to `lse` (B, Hq, Sq), contiguous, what k_mean (B, Hkv, D), contiguous, adds to scores.

    Grid: chunks of ROWS queries x heads x batch, in one dimension. Of packed sequences, batch is 1 and chunks are
    places; k_mean is (N, Hkv, D). GROUP: -1 if q is not quantized; else rows under one q_scale, 0: all rows of a head.
    e4m3 is passed as bytes where the compiler doesn't support it.
    """
    begin(DEPENDENT)
    chunks = units_in(cu_seqlens, sequences, length, ROWS)
    program = tl.program_id(0)
    index = (program // chunks).to(tl.int64)
    batch, head, _, chunk, sequence, first, own_length = unit_of_head(program % chunks, index, cu_seqlens, None, sequences, q_heads, length, ROWS)
    rows = chunk * ROWS + tl.arange(0, ROWS)
    inside = rows < own_length
    queries = load_rows(q + batch * q_strides[0] + head * q_strides[1] + first * q_strides[2], rows, q_strides[2], own_length, 0, WIDTH, DIM, True)
    mean = load_mean(k_mean + (sequence * kv_heads + head // (q_heads // kv_heads)) * DIM, DIM, WIDTH, PART)
    at = index * length + first + rows
    before = tl.load(lse + at, mask=inside, other=0.0)
    if GROUP >= 0:
        group = (first + rows) // GROUP if GROUP > 0 else rows * 0
        scales = tl.load(q_scale + batch * scale_strides[0] + head * scale_strides[1] + group.to(tl.int64) * scale_strides[2], mask=inside, other=0.0)
        if queries.dtype == tl.int8:
            codes = tl.where(queries == NAN, float("nan"), queries.to(tl.float32)).to(CODES)
            scales = tl.abs(scales)  # negative if a row is non-finite
        elif queries.dtype == tl.uint8:
            codes = half_of_code(queries).to(CODES)
        else:
            codes = queries.to(CODES)
        tl.store(out + at, before + mean_scores(codes, mean) * (scales * softmax_scale), mask=inside)
    else:
        tl.store(out + at, before + mean_scores(queries, mean) * softmax_scale, mask=inside)


def unsmoothed_lse(
    lse: torch.Tensor, q: torch.Tensor | Quantized, k_mean: torch.Tensor, softmax_scale: float, rotated: int, device: Device, *,
    packed: Packed | None = None, warmup: bool = False,
) -> torch.Tensor:  # fmt: skip
    """reference.unsmoothed_lse by a kernel.

    Args:
        q: not quantized, or without a mean. If quantized, `rotated` is 0, because q is rotated as k_mean is.
        packed: the sequences of packed queries, whose k_mean is (N, Hkv, D).
        warmup: compile only.
    """
    rows_of = q if isinstance(q, torch.Tensor) else q.data
    batch, heads, length, dim = rows_of.shape
    scale, group = lse, -1
    if isinstance(q, Quantized):
        group = GROUPS[q.granularity]
        scale = q.scale if group else q.scale.expand(batch, heads, 1)
        if rows_of.dtype != torch.int8 and (device.emulated or not device.has_fp8_units):
            rows_of = rows_of.view(torch.uint8)
    if packed is None and lse.numel() == 0:
        return torch.empty_like(lse)
    check_counted("query", rows_of)
    if device.emulated and rows_of.dtype == torch.bfloat16:  # the interpreter can't multiply bfloat16
        rows_of = rows_of.float()
    out, rows = torch.empty_like(lse), ROWS // 2 if rows_of.element_size() == 4 else ROWS
    chunks = ceil_div(length, rows) if packed is None else units_of(packed, rows)
    cu_seqlens, _, sequences, _ = packed_arguments(packed)
    launch(
        unsmooth_lse_kernel, (chunks * heads * batch,),
        rows_of, rows_of.stride(), scale, scale.stride(), k_mean.contiguous(), lse, out, cu_seqlens, heads, k_mean.shape[1], length, sequences,
        softmax_scale, group, dim, power_of_2(dim), rotated, rows, device.has_dependent_launch,
        warmup=warmup, dependent=device.has_dependent_launch, num_warps=4 if power_of_2(dim) * rows_of.element_size() <= 256 else 8,
    )  # fmt: skip
    return out
