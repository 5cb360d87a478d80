"""The LSE of K as it was, from that of K without its mean: a kernel that reads queries once.

What the mean adds to every score of a row is the product of the row with it. The mean is rotated back, so that queries
are multiplied as they are stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import reference
from ..device import Device
from ..layout import units_of
from ..recipe import Packed
from .forward import load_rows
from .half_keys import load_mean, mean_scores
from .launch import begin, ceil_div, check_counted, launch
from .quantize import power_of_2
from .varlen import packed_arguments, unit_of_head, units_in

ROWS = 64
"""Queries of a program; of float32 half as many."""


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "length", "sequences"])
def unsmooth_lse_kernel(
    q, q_strides, k_mean, lse, out, cu_seqlens, q_heads, kv_heads, length, sequences, softmax_scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add to `lse` (B, Hq, Sq), contiguous, what k_mean (B, Hkv, D), contiguous, adds to scores.

    Grid: chunks of ROWS queries x heads x batch, in one dimension. Of packed sequences, batch is 1 and chunks are
    places; k_mean is (N, Hkv, D).
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
    tl.store(out + at, tl.load(lse + at, mask=inside, other=0.0) + mean_scores(queries, mean) * softmax_scale, mask=inside)


def unsmoothed_lse(
    lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float, rotated: int, device: Device, *, packed: Packed | None = None,
    warmup: bool = False,
) -> torch.Tensor:  # fmt: skip
    """reference.unsmoothed_lse by a kernel.

    Args:
        packed: the sequences of packed queries, whose k_mean is (N, Hkv, D).
        warmup: compile only.
    """
    if packed is None and lse.numel() == 0:
        return reference.unsmoothed_lse(lse, q, k_mean, softmax_scale, rotated)
    check_counted("query", q)
    batch, heads, length, dim = q.shape
    if device.emulated and q.dtype == torch.bfloat16:  # the interpreter can't multiply bfloat16
        q = q.float()
    out, rows = torch.empty_like(lse), ROWS if q.element_size() == 2 else ROWS // 2
    chunks = ceil_div(length, rows) if packed is None else units_of(packed, rows)
    cu_seqlens, _, sequences, _ = packed_arguments(packed)
    launch(
        unsmooth_lse_kernel, (chunks * heads * batch,),
        q, q.stride(), k_mean.contiguous(), lse, out, cu_seqlens, heads, k_mean.shape[1], length, sequences, softmax_scale,
        dim, power_of_2(dim), rotated, rows, device.has_dependent_launch,
        warmup=warmup, dependent=device.has_dependent_launch, num_warps=4 if power_of_2(dim) * q.element_size() <= 256 else 8,
    )  # fmt: skip
    return out
