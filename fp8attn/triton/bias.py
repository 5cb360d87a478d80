"""The score bias of smoothed queries on tensor cores, as fp8attn.quantization.score_bias defines it: what means of
queries add to scores.

Means are rotated back to the basis of unrotated keys, so that K is multiplied as it is stored. float16 and bfloat16 are
exact in TF32. A mean is split into a sum of two TF32 numbers; the rest is as small as the rounding errors of a float32
sum (3xTF32, CUTLASS examples 27 and 28; with a half-precision factor, two of the three products suffice). A sum runs
over one head dim, in an order that doesn't depend on other heads or keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from .. import quantization as quantize_ref
from ..call import HALVES
from ..device import Device
from ..recipe import Quantized
from .launch import begin, ceil_div, launch
from .quantize_steps import load_tile, load_vector, power_of_2, sum_lanes, unrotated
from .tile import is_finite

TILES = {64: (64, 64), 128: (32, 32), 256: (16, 16)}
"""Numbers of means and of keys in a tile, by width: as many as fit into the smallest shared memory, with two TF32 parts
of each."""

HALVES_ON_HOPPER = {64: (64, 64), 128: (64, 64), 256: (64, 32)}
"""The same for half-precision keys on Hopper: they have one part, and shared memory is larger."""

PROGRAMS = 4
"""Programs per SM, if there are enough keys."""

LARGEST_BIAS: tl.constexpr = tl.constexpr(quantize_ref.LARGEST_BIAS)
TF32: tl.constexpr = tl.constexpr(-0x2000)  # mask of the float32 bits that TF32 keeps


@triton.jit
def high(x):
    """x truncated to TF32. The difference to x is exact."""
    return (x.to(tl.int32, bitcast=True) & TF32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["heads", "rows", "length", "pitch", "segment"])
def bias_kernel(
    means, k, k_strides, k_mean, bias, heads, rows, length, pitch, segment,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the score bias.

    Grid: (chunks of ROWS means) · (B · Hkv) in x, segments of keys in y.

    Args:
        means: (B · Hkv, rows, DIM), contiguous; `rows` covers all query heads that share a key/value head.
        bias: (B · Hkv, rows, pitch).
        segment: keys of one program, a multiple of KEYS.
    """
    begin(DEPENDENT)
    chunks = tl.cdiv(rows, ROWS)
    pair = (tl.program_id(0) // chunks).to(tl.int64)
    first_row = (tl.program_id(0) - tl.program_id(0) // chunks * chunks) * ROWS
    left = rows - first_row
    row = tl.arange(0, ROWS)
    mean = load_tile(means + (pair * rows + first_row) * DIM, row, DIM, left, DIM, WIDTH, True, False)
    of_mean = tl.zeros([ROWS], tl.float32)
    if k_mean is not None:
        # a fixed order: that of tl.sum depends on the register layout, which the compiler chooses by k's strides
        of_mean = sum_lanes(tl.trans(mean * load_vector(k_mean + pair * DIM, 1, 0.0, DIM, WIDTH)[None, :]))
    if PART > 0:
        mean = unrotated(mean, PART)
    mean_high = high(mean)
    mean_low = mean - mean_high
    k += pair // heads * k_strides[0] + pair % heads * k_strides[1]
    at = bias + (pair * rows + first_row + row[:, None]) * pitch
    first = tl.program_id(1) * segment
    for start in range(first, tl.minimum(first + segment, pitch), KEYS):
        keys = start + tl.arange(0, KEYS)
        x = load_tile(k, keys, k_strides[2], length, DIM, WIDTH, True, False)
        finite = tl.max(tl.where(is_finite(x), 0, 1), 1) == 0
        x = tl.where(finite[:, None], x, 0.0)
        if k.dtype.element_ty == tl.float32:
            x_high = high(x)
            sums = tl.dot(mean_high, tl.trans(x_high), input_precision="tf32")
            sums = tl.dot(mean_high, tl.trans(x - x_high), sums, input_precision="tf32")
            sums = tl.dot(mean_low, tl.trans(x_high), sums, input_precision="tf32")
        else:
            sums = tl.dot(mean_high, tl.trans(x), input_precision="tf32")
            sums = tl.dot(mean_low, tl.trans(x), sums, input_precision="tf32")
        sums -= of_mean[:, None]
        sums = tl.where((sums == sums) & (finite & (keys < length))[None, :], sums, 0.0)
        sums = tl.minimum(tl.maximum(sums, -LARGEST_BIAS), LARGEST_BIAS)
        tl.store(at + keys[None, :], sums, mask=(row < left)[:, None] & (keys < pitch)[None, :])


def with_bias(q: Quantized, k: torch.Tensor, k_quantized: Quantized, device: Device, *, warmup: bool = False) -> Quantized:
    """quantization.with_bias by a kernel.

    Args:
        warmup: compile only.
    """
    assert q.mean is not None
    if q.mean.numel() == 0 or k.numel() == 0:
        return quantize_ref.with_bias(q, k, k_quantized)
    batch, q_heads, groups, dim = q.mean.shape
    heads, length = k.shape[1:3]
    pitch = quantize_ref.bias_pitch(length)
    bias = q.mean.new_empty(batch, q_heads, groups, pitch)
    rows, width = q_heads // heads * groups, power_of_2(dim)
    at_once, keys = (HALVES_ON_HOPPER if device.arch // 10 == 9 and k.dtype in HALVES else TILES)[max(width, 64)]
    pairs, chunks, blocks = batch * heads, ceil_div(rows, at_once), ceil_div(length, keys)
    segments = min(blocks, ceil_div(PROGRAMS * device.sm_count, pairs * chunks))
    segment = ceil_div(blocks, segments) * keys
    launch(
        bias_kernel, (chunks * pairs, ceil_div(length, segment)),  # few segments: PROGRAMS for every SM at most
        q.mean, k, k.stride(), k_quantized.mean, bias, heads, rows, length, pitch, segment,
        dim, width, k_quantized.rotated, at_once, keys, device.has_dependent_launch,
        warmup=warmup, dependent=device.has_dependent_launch, num_warps=4 if width <= 64 else 8, enable_fp_fusion=False,
    )  # fmt: skip
    return replace(q, bias=bias)
