"""What means of queries add to scores of keys, as fp8attn.quantize.score_bias defines it, by tensor cores.

Products are TF32's three (hi·hi, hi·lo, lo·hi), whatever torch allows its own: what is left of them is as small as a float32 sum's roundings.
K is read once, the means by every block of keys; a sum is over a head dim, in an order that no other head or key has a part in.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import quantize as definition
from ..device import Device
from ..recipe import BIAS_ALIGNMENT, Quantized
from .launch import ceil_div, launch
from .quantize import load_tile, load_vector, power_of_2
from .tile import is_finite

TILES = {64: (64, 64), 128: (32, 32), 256: (16, 32)}
"""Keys and means of a program's products by width: both parts of both operands, and the keys once more, in less than 99 KB of shared memory."""

LARGEST_BIAS: tl.constexpr = tl.constexpr(definition.LARGEST_BIAS)
LARGEST_FACTOR: tl.constexpr = tl.constexpr(2.0**127)  # more would be infinite once it is rounded to TF32, and the rest of it minus infinity


@triton.jit
def within(x, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit(do_not_specialize=["heads", "rows", "length", "pitch"])
def bias_kernel(
    means, k, k_strides, k_mean, bias, heads, rows, length, pitch,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of KEYS keys x (B · Hkv). means: (B · Hkv, rows, DIM), contiguous: of all heads that share one of k. bias: (B · Hkv, rows, pitch).
    ROWS: means that are multiplied at a time."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    x = load_tile(k + pair // heads * k_strides[0] + pair % heads * k_strides[1], keys, k_strides[2], length, DIM, WIDTH, True, True, PART)
    finite = tl.max(tl.where(is_finite(x), 0, 1), 1) == 0
    if k_mean is not None:
        x -= load_vector(k_mean + pair * DIM, 1, 0.0, DIM, WIDTH)[None, :]
    x = within(tl.where((finite & (keys < length))[:, None], x, 0.0), LARGEST_FACTOR)
    means += pair * rows * DIM
    bias += pair * rows * pitch
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mean = load_tile(means, row, DIM, rows, DIM, WIDTH, True, False)
        sums = tl.dot(mean, tl.trans(x), input_precision="tf32x3")
        sums = within(tl.where(sums == sums, sums, 0.0), LARGEST_BIAS)
        tl.store(bias + row[:, None].to(tl.int64) * pitch + keys[None, :], sums, mask=(row < rows)[:, None] & (keys < pitch)[None, :])


def with_bias(q: Quantized, k: torch.Tensor, k_quantized: Quantized, device: Device, *, warmup: bool = False) -> Quantized:
    """quantize.with_bias by a kernel.

    Args:
        warmup: compile only.
    """
    assert q.mean is not None
    if q.mean.numel() == 0 or k.numel() == 0:
        return definition.with_bias(q, k, k_quantized)
    batch, q_heads, groups, dim = q.mean.shape
    heads, length = k.shape[1:3]
    pitch = ceil_div(length, BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    bias = q.mean.new_empty(batch, q_heads, groups, pitch)
    width = power_of_2(dim)
    keys, at_once = TILES[max(width, 64)]
    resources: dict = dict(num_warps=4 if width <= 64 else 8, enable_fp_fusion=False)
    dependent = device.arch >= 90 and not device.emulated
    if dependent:
        resources["launch_pdl"] = True
    launch(
        bias_kernel, (ceil_div(length, keys), batch * heads),
        q.mean, k, k.stride(), k_quantized.mean, bias, heads, q_heads // heads * groups, length, pitch,
        dim, width, k_quantized.rotated, keys, at_once, dependent, warmup=warmup, **resources,
    )  # fmt: skip
    return replace(q, bias=bias)
