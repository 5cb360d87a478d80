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
from .forward import load_rows
from .half_keys import load_mean, mean_scores
from .launch import ceil_div, check_counted, launch
from .quantize import begin, power_of_2

ROWS = 64
"""Queries of a program; of float32 half as many."""


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "length"])
def unsmooth_lse_kernel(
    q, q_strides, k_mean, lse, out, q_heads, kv_heads, length, softmax_scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add to `lse` (B, Hq, Sq), contiguous, what k_mean (B, Hkv, D), contiguous, adds to scores.

    Grid: chunks of ROWS queries x heads x batch, in one dimension.
    """
    begin(DEPENDENT)
    chunks = tl.cdiv(length, ROWS)
    program = tl.program_id(0)
    rows = program % chunks * ROWS + tl.arange(0, ROWS)
    index = (program // chunks).to(tl.int64)
    batch = index // q_heads
    head = index % q_heads
    queries = load_rows(q + batch * q_strides[0] + head * q_strides[1], rows, q_strides[2], length, 0, WIDTH, DIM, True)
    mean = load_mean(k_mean + (batch * kv_heads + head // (q_heads // kv_heads)) * DIM, DIM, WIDTH, PART)
    at = index * length + rows
    tl.store(out + at, tl.load(lse + at, mask=rows < length, other=0.0) + mean_scores(queries, mean) * softmax_scale, mask=rows < length)


def unsmoothed_lse(
    lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float, rotated: int, device: Device, *, warmup: bool = False
) -> torch.Tensor:
    """reference.unsmoothed_lse by a kernel.

    Args:
        warmup: compile only.
    """
    if lse.numel() == 0:
        return reference.unsmoothed_lse(lse, q, k_mean, softmax_scale, rotated)
    check_counted("query", q)
    batch, heads, length, dim = q.shape
    if device.emulated and q.dtype == torch.bfloat16:  # the interpreter can't multiply bfloat16
        q = q.float()
    out, rows = torch.empty_like(lse), ROWS if q.element_size() == 2 else ROWS // 2
    launch(
        unsmooth_lse_kernel, (ceil_div(length, rows) * heads * batch,),
        q, q.stride(), k_mean.contiguous(), lse, out, heads, k_mean.shape[1], length, softmax_scale,
        dim, power_of_2(dim), rotated, rows, device.has_dependent_launch,
        warmup=warmup, dependent=device.has_dependent_launch, num_warps=4 if power_of_2(dim) * q.element_size() <= 256 else 8,
    )  # fmt: skip
    return out
