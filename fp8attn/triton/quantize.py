"""Fused quantization: q is read once, k and v twice, and all are written as e4m3, v transposed and key-permuted.

Byte for byte what fp8attn.quantize defines. Three launches: `gather_kernel` takes statistics of blocks of k and v and quantizes
q, `finish_kernel` makes means and scales of them, `write_kernel` quantizes k and v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import quantize as definition
from ..call import GROUPS
from ..device import Device
from ..layout import padded_length
from ..recipe import E4M3, E4M3_NAN, SCALE_BLOCK, Granularity, Quantized, Recipe
from .launch import launch
from .tile import e4m3_code, is_finite, key_of_slot, scale_of

STRIP: tl.constexpr = tl.constexpr(definition.STRIP)
LANES: tl.constexpr = tl.constexpr(definition.LANES)
CHANNELS: tl.constexpr = tl.constexpr(32)  # of one program of finish_kernel
MEAN_STEP: tl.constexpr = tl.constexpr(definition.MEAN_STEP)
ROUNDER: tl.constexpr = tl.constexpr(definition.ROUNDER)
LARGEST_MEAN: tl.constexpr = tl.constexpr(definition.LARGEST_MEAN)
BLOCK: tl.constexpr = tl.constexpr(SCALE_BLOCK)
NAN_CODE: tl.constexpr = tl.constexpr(E4M3_NAN)


@dataclass(frozen=True)
class Traits:
    """All that the kernel knows at compile time: its one constexpr argument.

    Attributes:
        q_group, k_group: rows under one scale that the kernel makes, 1 or SCALE_BLOCK; 0 if scales are given.
        k_extremes: whether K needs its channels' extremes, for scales of heads or of the tensor.
        native: the architecture converts to e4m3 by itself.
    """

    q_dim: int
    k_dim: int
    v_dim: int
    q_group: int
    k_group: int
    smooth_k: bool
    smooth_v: bool
    k_extremes: bool
    native: bool

    @property
    def k_stats(self) -> bool:
        """Whether K needs statistics; V always does."""
        return self.k_dim > 0 and (self.smooth_k or self.k_extremes)

    @property
    def widths(self) -> tuple[int, int, int]:
        q, k, v = (max(16, triton.next_power_of_2(dim)) for dim in (self.q_dim, self.k_dim, self.v_dim))
        return q, k, v


@triton.jit
def load_tile(base, rows, row_stride, length, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Rows of a (length, DIM) matrix as float32 (…, WIDTH), zeros outside. CHECK: rows may reach the end."""
    columns = tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if CHECK:
        return tl.load(pointers, mask=(rows[:, None] < length) & (columns[None, :] < DIM), other=0.0).to(tl.float32)
    elif WIDTH > DIM:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def sum_lanes(total):
    """(lanes, N) -> (N,) by a halving tree, the order of quantize.ordered_sum."""
    lanes: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if lanes == 1:
        return tl.reshape(total, (N,))
    else:
        low, high = tl.split(tl.permute(tl.reshape(total, (2, lanes // 2, N)), (1, 2, 0)))
        return sum_lanes(low + high)


@triton.jit
def sum_strip(base, strip, stride, length, DIM: tl.constexpr, WIDTH: tl.constexpr, EXTREMES: tl.constexpr, CAREFUL: tl.constexpr):
    """Lanes' sums, minima and maxima (LANES, WIDTH) of a strip's channels. CAREFUL: of its finite elements; rows may not exist."""
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.full([LANES, WIDTH], float("inf"), tl.float32)
    high = tl.full([LANES, WIDTH], -float("inf"), tl.float32)
    for step in tl.range(0, STRIP, LANES, loop_unroll_factor=4):
        rows = strip * STRIP + step + tl.arange(0, LANES)
        x = load_tile(base, rows, stride, length, DIM, WIDTH, CAREFUL)
        if CAREFUL:
            counts = is_finite(x) & (rows < length)[:, None]
            total += tl.where(counts, x, 0.0)
            low = tl.minimum(low, tl.where(counts, x, float("inf")))
            high = tl.maximum(high, tl.where(counts, x, -float("inf")))
        else:
            total += x
            if EXTREMES:
                low = tl.minimum(low, x)
                high = tl.maximum(high, x)
    return total, low, high


@triton.jit
def gather_strip(base, strip, stride, length, sums, extremes, flag, DIM: tl.constexpr, WIDTH: tl.constexpr, EXTREMES: tl.constexpr):
    """Statistics of one strip of tokens: sums (LANES, DIM), extremes (2, DIM), and whether it needs care: ragged, or not all finite."""
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.zeros([LANES, WIDTH], tl.float32)
    high = tl.zeros([LANES, WIDTH], tl.float32)
    careful = 1
    if (strip + 1) * STRIP <= length:
        total, low, high = sum_strip(base, strip, stride, length, DIM, WIDTH, EXTREMES, False)
        # an element that isn't finite leaves a sum that isn't
        careful = tl.max(tl.where(is_finite(total), 0, 1))
    if careful == 1:
        total, low, high = sum_strip(base, strip, stride, length, DIM, WIDTH, EXTREMES, True)
    tl.store(flag, careful)
    columns = tl.arange(0, WIDTH)
    lanes = tl.arange(0, LANES)
    tl.store(sums + lanes[:, None] * DIM + columns[None, :], total, mask=(columns < DIM)[None, :])
    if EXTREMES:
        tl.store(extremes + columns, tl.min(low, 0), mask=columns < DIM)
        tl.store(extremes + DIM + columns, tl.max(high, 0), mask=columns < DIM)


@triton.jit
def finish_head(
    sums, extremes, pair, first, strips, inverse_length, mean_out, largest_out, scale_out,
    DIM: tl.constexpr, SMOOTH: tl.constexpr, EXTREMES: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    """One head's means, largest magnitudes and scales of channels first …, from the statistics of its strips; None isn't stored."""
    WIDTH: tl.constexpr = CHANNELS
    columns = first + tl.arange(0, WIDTH)
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.full([WIDTH], float("inf"), tl.float32)
    high = tl.full([WIDTH], -float("inf"), tl.float32)
    for strip in tl.range(0, strips, loop_unroll_factor=4):
        index = pair * strips + strip
        if SMOOTH:
            pointers = sums + (index * LANES + lanes[:, None]) * DIM + columns[None, :]
            total += tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
        if EXTREMES:
            pointers = extremes + index * 2 * DIM + columns
            low = tl.minimum(low, tl.load(pointers, mask=columns < DIM, other=float("inf")))
            high = tl.maximum(high, tl.load(pointers + DIM, mask=columns < DIM, other=-float("inf")))
    mean = tl.zeros([WIDTH], tl.float32)
    if SMOOTH:
        mean = sum_lanes(total) * inverse_length
        if COARSE:
            # quantize.coarse
            largest = tl.maximum(tl.maximum(high, -low), 0.0)
            step = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * MEAN_STEP
            mean = tl.where(low == high, low, (mean + step * ROUNDER) - step * ROUNDER)
        mean = tl.where(tl.abs(mean) < LARGEST_MEAN, mean, 0.0)
        tl.store(mean_out + pair * DIM + columns, mean, mask=columns < DIM)
    if EXTREMES:
        # rounding is monotonic: the extremes of x - mean are those of x, minus the mean
        largest = tl.maximum(tl.maximum(high - mean, mean - low), 0.0)
        if largest_out is not None:
            tl.store(largest_out + pair * DIM + columns, largest, mask=columns < DIM)
        if scale_out is not None:
            tl.store(scale_out + pair * DIM + columns, scale_of(largest), mask=columns < DIM)


@triton.jit
def store_rows(
    y, rows, length, hidden, scale_out, scale_block, scale_stride, out, out_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Scale, encode and store a tile of q or k. CAREFUL: y may be NaN, `hidden` rows (M,) become NaN, rows may not exist."""
    magnitude = tl.abs(y)
    if CAREFUL:
        magnitude = tl.where(y == y, magnitude, 0.0)
    if GROUP == 1:
        scale = scale_of(tl.max(magnitude, 1))
        tl.store(scale_out + rows * scale_stride, scale, mask=rows < length)
        y *= tl.div_rn(1.0, scale)[:, None]
    elif GROUP == BLOCK:
        scale = scale_of(tl.max(magnitude))
        tl.store(scale_out + scale_block * scale_stride, scale)
        y *= tl.div_rn(1.0, scale)
    else:
        y *= tl.div_rn(1.0, tl.load(scale_out))
    columns = tl.arange(0, WIDTH)
    pointers = out + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    inside = (columns < DIM)[None, :]
    if CAREFUL:
        y = tl.where(hidden[:, None], float("nan"), y)
        inside &= (rows < length)[:, None]
    tl.store(pointers, e4m3_code(y, NATIVE), mask=inside)


@triton.jit
def load_vector(vector, DIM: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    return tl.load(vector + columns, mask=columns < DIM, other=0.0)[None, :]


@triton.jit
def write_kv_block(
    k, v, k_stride, v_stride, k_mean, v_mean, k_scale, k_scale_stride, v_scale, v_scale_stride, k_data, k_data_stride, v_data,
    block, length, padded, C: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Quantize one block of one head's tokens. CAREFUL: it is ragged, or not all finite."""
    K_WIDTH: tl.constexpr = C.widths[1]
    V_WIDTH: tl.constexpr = C.widths[2]
    slots = block * BLOCK + tl.arange(0, BLOCK)
    rows = key_of_slot(slots)

    y = load_tile(v, rows, v_stride, length, C.v_dim, V_WIDTH, CAREFUL)
    hidden = rows >= length
    if CAREFUL:
        hidden = tl.max(tl.where(is_finite(y), 0, 1), 1) > 0
    if C.smooth_v:
        y -= load_vector(v_mean, C.v_dim, V_WIDTH)
    columns = tl.arange(0, V_WIDTH)
    scale = tl.load(v_scale + columns * v_scale_stride, mask=columns < C.v_dim, other=1.0)
    y *= tl.div_rn(1.0, scale)[None, :]
    if CAREFUL:
        # a token's NaN goes into its key; behind the end there are zeros, not -mean
        y = tl.where(is_finite(y) & (rows < length)[:, None], y, 0.0)
    pointers = v_data + columns[:, None].to(tl.int64) * padded + slots[None, :]
    tl.store(pointers, tl.trans(e4m3_code(y, C.native)), mask=(columns < C.v_dim)[:, None])

    y = load_tile(k, rows, k_stride, length, C.k_dim, K_WIDTH, CAREFUL)
    if CAREFUL:
        y = tl.where(is_finite(y), y, float("nan"))
    if C.smooth_k:
        y -= load_vector(k_mean, C.k_dim, K_WIDTH)
    if CAREFUL:
        y = tl.where((rows < length)[:, None], y, 0.0)  # rows behind the end don't widen the block's scale
    store_rows(
        y, rows, length, hidden, k_scale, block, k_scale_stride, k_data, k_data_stride,
        C.k_dim, K_WIDTH, C.k_group, C.native, CAREFUL,
    )  # fmt: skip


@triton.jit
def write_q_block(q, q_stride, q_scale, q_scale_stride, q_data, q_data_stride, block, length, C: tl.constexpr):
    """Quantize one block of one head's queries."""
    WIDTH: tl.constexpr = C.widths[0]
    rows = block * BLOCK + tl.arange(0, BLOCK)
    careful = 1
    if (block + 1) * BLOCK <= length:
        y = load_tile(q, rows, q_stride, length, C.q_dim, WIDTH, False)
        if tl.sum(y * 0.0) == 0.0:  # NaN * 0 and inf * 0 are NaN
            careful = 0
            store_rows(y, rows, length, rows < 0, q_scale, block, q_scale_stride, q_data, q_data_stride, C.q_dim, WIDTH, C.q_group, C.native, False)
    if careful == 1:
        y = load_tile(q, rows, q_stride, length, C.q_dim, WIDTH, True)
        y = tl.where(is_finite(y), y, float("nan"))
        store_rows(y, rows, length, rows < 0, q_scale, block, q_scale_stride, q_data, q_data_stride, C.q_dim, WIDTH, C.q_group, C.native, True)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "kv_pairs", "q_length", "kv_length"])
def gather_kernel(
    q, k, v, q_strides, k_strides, v_strides, q_data, q_data_strides, q_scale, q_scale_strides,
    k_sums, k_extremes, v_sums, v_extremes, flags, q_heads, kv_heads, kv_pairs, q_length, kv_length, C: tl.constexpr,
):  # fmt: skip
    """Statistics of every strip of k and v: sums (B, Hkv, strips, LANES, D), extremes (…, 2, D), flags (…, 2); and q quantized.

    Grid: strips of k, strips of v, blocks of q, in one dimension. Dims of 0 in C: there is no q, or no k and v.
    """
    item = tl.program_id(0)
    strips = tl.cdiv(kv_length, STRIP)
    kv_items = kv_pairs * strips
    if item < 2 * kv_items:
        index = (item % kv_items).to(tl.int64)
        pair = index // strips
        strip = item % kv_items % strips
        if item < kv_items:
            if C.k_stats:
                base = k + pair // kv_heads * k_strides[0] + pair % kv_heads * k_strides[1]
                extremes = k_extremes
                if C.k_extremes:
                    extremes += index * 2 * C.k_dim
                gather_strip(
                    base, strip, k_strides[2], kv_length, k_sums + index * LANES * C.k_dim, extremes, flags + 2 * index,
                    C.k_dim, C.widths[1], C.k_extremes,
                )  # fmt: skip
        else:
            if C.v_dim > 0:
                base = v + pair // kv_heads * v_strides[0] + pair % kv_heads * v_strides[1]
                gather_strip(
                    base, strip, v_strides[2], kv_length, v_sums + index * LANES * C.v_dim, v_extremes + index * 2 * C.v_dim,
                    flags + 2 * index + 1, C.v_dim, C.widths[2], True,
                )  # fmt: skip
    else:
        if C.q_dim > 0:
            q_blocks = tl.cdiv(q_length, BLOCK)
            item -= 2 * kv_items
            pair = (item // q_blocks).to(tl.int64)
            batch = pair // q_heads
            head = pair % q_heads
            write_q_block(
                q + batch * q_strides[0] + head * q_strides[1], q_strides[2],
                q_scale + batch * q_scale_strides[0] + head * q_scale_strides[1], q_scale_strides[2],
                q_data + batch * q_data_strides[0] + head * q_data_strides[1], q_data_strides[2],
                item % q_blocks, q_length, C,
            )  # fmt: skip


@triton.jit(do_not_specialize=["strips"])
def finish_kernel(
    k_sums, k_extremes, v_sums, v_extremes, k_mean, v_mean, k_largest, v_largest, v_scale, strips, inverse_length, C: tl.constexpr
):  # fmt: skip
    """Means, largest magnitudes and V's channel scales, (B, Hkv, D) each; None isn't stored. Grid: (B · Hkv) x 2 x D / CHANNELS."""
    pair = tl.program_id(0).to(tl.int64)
    first = tl.program_id(2) * CHANNELS
    if tl.program_id(1) == 0:
        if C.k_stats:
            finish_head(k_sums, k_extremes, pair, first, strips, inverse_length, k_mean, k_largest, None, C.k_dim, C.smooth_k, C.k_extremes, False)
    else:
        finish_head(v_sums, v_extremes, pair, first, strips, inverse_length, v_mean, v_largest, v_scale, C.v_dim, C.smooth_v, True, True)


@triton.jit(do_not_specialize=["heads", "length"])
def write_kernel(
    k, v, k_strides, v_strides, k_mean, v_mean, k_scale, v_scale, k_scale_strides, v_scale_strides, k_data, k_data_strides, v_data,
    flags, heads, length, padded, C: tl.constexpr,
):  # fmt: skip
    """Quantize k and v. Grid: blocks x (B · Hkv)."""
    block = tl.program_id(0)
    # backwards: the heads that were read last are still in L2
    pair = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    flags += 2 * (pair * tl.cdiv(length, STRIP) + block * BLOCK // STRIP)
    careful = 1
    if C.k_stats:
        careful = tl.load(flags) | tl.load(flags + 1)
    batch = pair // heads
    head = pair % heads
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    k_scale += batch * k_scale_strides[0] + head * k_scale_strides[1]
    v_scale += batch * v_scale_strides[0] + head * v_scale_strides[1]
    k_data += batch * k_data_strides[0] + head * k_data_strides[1]
    v_data += pair * C.v_dim * padded
    if C.smooth_k:
        k_mean += pair * C.k_dim
    if C.smooth_v:
        v_mean += pair * C.v_dim
    if careful == 0:
        write_kv_block(
            k, v, k_strides[2], v_strides[2], k_mean, v_mean, k_scale, k_scale_strides[2], v_scale, v_scale_strides[2],
            k_data, k_data_strides[2], v_data, block, length, padded, C, False,
        )  # fmt: skip
    else:
        write_kv_block(
            k, v, k_strides[2], v_strides[2], k_mean, v_mean, k_scale, k_scale_strides[2], v_scale, v_scale_strides[2],
            k_data, k_data_strides[2], v_data, block, length, padded, C, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "length"])
def import_values_kernel(v, v_strides, v_data, hidden, heads, length, padded, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """quantize.import_values on bytes: v_data (B, H, D, S_padded), hidden (B, H, S) bytes. Grid: blocks x (B · H)."""
    pair = tl.program_id(1).to(tl.int64)
    v += pair // heads * v_strides[0] + pair % heads * v_strides[1]
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = key_of_slot(slots)
    columns = tl.arange(0, WIDTH)
    pointers = v + rows[:, None].to(tl.int64) * v_strides[2] + columns[None, :]
    code = tl.load(pointers, mask=(rows[:, None] < length) & (columns[None, :] < DIM), other=0)
    is_nan = (code & NAN_CODE) == NAN_CODE
    tl.store(hidden + pair * length + rows, tl.max(is_nan.to(tl.int32), 1).to(tl.uint8), mask=rows < length)
    pointers = v_data + (pair * DIM + columns)[:, None] * padded + slots[None, :]
    tl.store(pointers, tl.trans(tl.where(is_nan, 0, code)), mask=(columns < DIM)[:, None])


WARPS = 8


def quantize(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, device: Device, *, warmup: bool = False
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """quantize.quantize by the fused kernel: q, or k and v, or all three.

    Args:
        warmup: compile only.
    """
    if any(x is not None and x.numel() == 0 for x in (q, k)):
        return definition.quantize(q, k, v, recipe)
    like = q if q is not None else k
    assert like is not None

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    given = ("tensor", "head")
    batch, kv_heads, kv_length, k_dim = (like.shape[0], 1, 0, 0) if k is None else k.shape
    v_dim = 0 if v is None else v.shape[3]
    _, q_heads, q_length, q_dim = (0, 1, 0, 0) if q is None else q.shape
    strips = triton.cdiv(kv_length, definition.STRIP)
    pairs = batch * kv_heads if k is not None else 0
    traits = Traits(
        q_dim, k_dim, v_dim, GROUPS[recipe.q], GROUPS[recipe.k], recipe.smooth_k, recipe.smooth_v,
        k_extremes=recipe.k in given, native=device.has_fp8_units and not device.emulated,
    )  # fmt: skip
    width = max(traits.widths)
    resources = dict(warmup=warmup, num_warps=WARPS if width <= 128 else 16, maxnreg=65536 // (64 * WARPS) if width <= 128 else 128)

    q_data = q_scale = k_sums = k_extremes = v_sums = v_extremes = flags = None
    if q is not None:
        q_data = definition.empty_rows(q.shape, q.device)
        if recipe.q in given:
            q_scale = _reduced_scale(q.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax(-2), recipe.q)
        else:
            q_scale = new(*definition.scale_shape(recipe.q, *q.shape))
    if k is not None:
        k_sums = new(pairs, strips, definition.LANES, k_dim) if traits.k_stats else None
        k_extremes = new(pairs, strips, 2, k_dim) if traits.k_extremes else None
        v_sums = new(pairs, strips, definition.LANES, v_dim)
        v_extremes = new(pairs, strips, 2, v_dim)
        flags = new(pairs, strips, 2, dtype=torch.int32)
    q_items = batch * q_heads * triton.cdiv(q_length, SCALE_BLOCK) if q is not None else 0
    launch(
        gather_kernel, (2 * pairs * strips + q_items,),
        q, k, v, _strides(q), _strides(k), _strides(v), _bytes(q_data), _strides(q_data), q_scale, _scale_strides(q, q_scale),
        k_sums, k_extremes, v_sums, v_extremes, flags, q_heads, kv_heads, pairs, q_length, kv_length, traits, **resources,
    )  # fmt: skip
    q_quantized = None if q is None else Quantized(q_data, q_scale, recipe.q, "rows", q_length)
    if k is None or v is None:
        return q_quantized, None, None

    k_mean = new(batch, kv_heads, k_dim) if recipe.smooth_k else None
    v_mean = new(batch, kv_heads, v_dim) if recipe.smooth_v else None
    k_largest = new(batch, kv_heads, k_dim) if traits.k_extremes else None
    v_largest = None if recipe.v == "channel" else new(batch, kv_heads, v_dim)
    v_scale = new(batch, kv_heads, v_dim) if recipe.v == "channel" else None
    launch(
        finish_kernel, (pairs, 2, triton.cdiv(max(k_dim, v_dim), CHANNELS.value)),
        k_sums, k_extremes, v_sums, v_extremes, k_mean, v_mean, k_largest, v_largest, v_scale, strips, 1 / kv_length, traits,
        warmup=warmup, num_warps=4,
    )  # fmt: skip
    k_scale = new(*definition.scale_shape(recipe.k, *k.shape)) if k_largest is None else _reduced_scale(k_largest, recipe.k)
    if v_largest is not None:
        v_scale = _reduced_scale(v_largest, recipe.v)

    k_data = definition.empty_rows(k.shape, k.device)
    v_data = new(batch, kv_heads, v_dim, padded_length(kv_length), dtype=E4M3)
    launch(
        write_kernel, (triton.cdiv(kv_length, SCALE_BLOCK), pairs),
        k, v, k.stride(), v.stride(), k_mean, v_mean, k_scale, v_scale, _scale_strides(k, k_scale), _scale_strides(v, v_scale, v_dim),
        _bytes(k_data), k_data.stride(), _bytes(v_data), flags, kv_heads, kv_length, v_data.shape[3], traits, **resources,
    )  # fmt: skip
    return (
        q_quantized,
        Quantized(k_data, k_scale, recipe.k, "rows", kv_length, k_mean),
        Quantized(v_data, v_scale, recipe.v, "values", kv_length, v_mean),
    )


def _reduced_scale(largest: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Scales of heads or of the tensor from channels' largest magnitudes (B, H, D)."""
    return definition.scale_of(largest.amax(-1, keepdim=True) if granularity == "head" else largest.amax().view(1, 1, 1))


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 1) if x is None else x.stride()


def _scale_strides(x: torch.Tensor | None, scale: torch.Tensor | None, last: int = -1) -> tuple[int, ...]:
    """Strides of x's scale as if it had one for every head, and `last` for each."""
    return (0, 0, 0) if x is None or scale is None else scale.expand(x.shape[0], x.shape[1], last).stride()


def _bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.view(torch.uint8)


def import_values(v: torch.Tensor, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize.import_values by a fused kernel."""
    batch, heads, length, dim = v.shape
    if v.numel() == 0:
        return definition.import_values(v)
    data = torch.empty(batch, heads, dim, padded_length(length), dtype=E4M3, device=v.device)
    hidden = torch.empty(batch, heads, length, dtype=torch.bool, device=v.device)
    launch(
        import_values_kernel, (triton.cdiv(length, SCALE_BLOCK), batch * heads),
        v.view(torch.uint8), v.stride(), data.view(torch.uint8), hidden.view(torch.uint8), heads, length, data.shape[3],
        dim, max(16, triton.next_power_of_2(dim)), warmup=warmup, num_warps=8,
    )  # fmt: skip
    return data, hidden
