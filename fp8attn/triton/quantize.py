"""Fused quantization: reads q and k once and v twice, and writes all of them as bytes, v transposed and with permuted
keys.

The result is byte for byte the one that fp8attn.quantize defines. There are three launches. `gather_kernel` computes
statistics of token chunks of v and k's mean, and quantizes q. `finish_kernel` computes v's means and scales.
`write_kernel` quantizes k and v. If a scale covers a head of k or more, k is read twice, too. For few tokens, the
launches would take longer than the work, so `fused_small_kernel` does everything in one. bias.py computes the score
bias.

Every kernel is a programmatic dependent of the previous one, and lets the next one start at once. It waits before it
first touches memory (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from .. import layout, rotation
from .. import quantization as quantize_ref
from ..call import GROUPS
from ..device import INTERPRETING, Device
from ..layout import padded_length, units_of
from ..recipe import E4M3, E4M3_NAN, SCALE_BLOCK, Granularity, Packed, Quantized, Recipe
from .feedback import feed_back
from .fit import fitted_codes
from .launch import begin, ceil_div, check_counted, launch
from .tile import (
    E4M3_LARGEST,
    FLOAT_MAX,
    INT8_MAX,
    ROUNDER,
    SMALLEST_SCALE,
    e4m3_code,
    int8_code,
    is_finite,
    key_of_slot,
    scale_of,
)
from .varlen import first_unit, packed_arguments, spans_of, unit_of_head, units_in

TOKEN_CHUNK: tl.constexpr = tl.constexpr(quantize_ref.TOKEN_CHUNK)
LANES: tl.constexpr = tl.constexpr(quantize_ref.LANES)
SAMPLE: tl.constexpr = tl.constexpr(quantize_ref.SAMPLE)
CHANNELS: tl.constexpr = tl.constexpr(32)  # channels of one program of finish_kernel
# the interpreter runs plain Python functions as they are
sign_bit = rotation.sign_bit if INTERPRETING else triton.jit(rotation.sign_bit)

# channels of v of one program of fused_small_kernel: with 16-bit elements, one memory sector
SLICE: tl.constexpr = tl.constexpr(16)
GROUPS_PER_LOAD: tl.constexpr = tl.constexpr(
    quantize_ref.TOKEN_CHUNK // quantize_ref.LANES
)  # groups of a token chunk that one program of fused_small_kernel loads together, for speed
# channels of a row that a thread loads: butterflies among them need no shuffle
OF_THREAD: tl.constexpr = tl.constexpr(8)
SHORT = 1024  # largest number of keys for which fused_small_kernel may be faster,
SHORT_PROGRAMS = 4  # and largest number of its programs per SM
MEAN_STEP: tl.constexpr = tl.constexpr(quantize_ref.MEAN_STEP)
LARGEST_MEAN: tl.constexpr = tl.constexpr(quantize_ref.LARGEST_MEAN)
BLOCK: tl.constexpr = tl.constexpr(SCALE_BLOCK)
NAN_CODE: tl.constexpr = tl.constexpr(E4M3_NAN)
FIT_DIM: tl.constexpr = tl.constexpr(quantize_ref.FIT_DIM)
MEAN_STEPS: tl.constexpr = tl.constexpr(quantize_ref.MEAN_STEPS)
GROUP: tl.constexpr = tl.constexpr(layout.GROUP)
RUN: tl.constexpr = tl.constexpr(quantize_ref.RUN)
FEEDBACK: tl.constexpr = tl.constexpr(quantize_ref.FEEDBACK)
TREE: tl.constexpr = tl.constexpr(4)  # lanes of query sums that are added by exchanges between threads
QUERY_GROUP: tl.constexpr = tl.constexpr(quantize_ref.QUERY_GROUP)


def power_of_2(dim: int) -> int:
    """The smallest power of two that is at least 16 and `dim`. triton.next_power_of_2 takes as long as triton.cdiv."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Traits:
    """Everything that the kernel knows at compile time: its one constexpr argument.

    Attributes:
        q_group, k_group: rows under one scale that the kernel computes, 1 or SCALE_BLOCK; 0 if scales are given.
        int8: Q and K become int8, not e4m3.
        smooth_q: the kernel removes means of queries.
        k_extremes: whether the extremes of K's channels are computed, for scales of heads or of the tensor.
        part: channels of Q and K that are rotated together, 0 for no rotation.
        native: the architecture has instructions that convert to e4m3.
        dependent: the architecture has programmatic dependent launch.
    """

    q_dim: int
    k_dim: int
    v_dim: int
    q_group: int
    k_group: int
    smooth_q: bool
    smooth_k: bool
    smooth_v: bool
    part: int
    int8: bool
    k_extremes: bool
    native: bool
    dependent: bool

    @property
    def work_tiles(self) -> int:
        """Parts of a block of q that are quantized one after another, with as many times fewer registers. 1 if the
        kernel computes block scales or means."""
        if self.q_group == SCALE_BLOCK or self.smooth_q:
            return 1
        return max(self.widths[0] // 64, 1)

    @property
    def q_factor(self) -> float:
        """Factor of Q's scales, which compensates for the division in the rotation."""
        return float(max(self.part, 1))

    @functools.cached_property
    def of_statistics(self) -> Traits:
        """Those that gather_kernel depends on, so that calls that differ in others share it."""
        queries = {} if self.q_dim else {"q_group": 1, "int8": False}
        return replace(self, k_group=1, smooth_v=False, **queries)

    @functools.cached_property
    def of_scales(self) -> Traits:
        """Those that finish_kernel depends on."""
        keys = {} if self.k_extremes else {"k_dim": 0, "smooth_k": False}
        return replace(self, q_dim=0, q_group=1, k_group=1, smooth_q=False, part=0, int8=False, native=True, **keys)

    @functools.cached_property
    def of_codes(self) -> Traits:
        """Those that write_kernel depends on."""
        return replace(self, q_dim=0, q_group=1, smooth_q=False, k_extremes=False)

    @functools.cached_property
    def widths(self) -> tuple[int, int, int]:
        q, k, v = (power_of_2(dim) for dim in (self.q_dim, self.k_dim, self.v_dim))
        return q, k, v


@triton.jit
def butterfly(x, DISTANCE: tl.constexpr):
    """A butterfly of rows (M, WIDTH): of two channels DISTANCE apart, the first becomes their sum, the second their
    difference."""
    M: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if DISTANCE < OF_THREAD:
        low, high = tl.split(tl.permute(tl.reshape(x, (M, WIDTH // (2 * DISTANCE), 2, DISTANCE)), (0, 1, 3, 2)))
        return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (M, WIDTH))
    else:
        columns = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], x.shape)
        # exact, because it is a single instruction
        return tl.fma(x, tl.where(columns & DISTANCE == 0, 1.0, -1.0), tl.gather(x, columns ^ DISTANCE, 1))


@triton.jit
def with_signs(x, PART: tl.constexpr):
    """Rows (M, WIDTH) divided by PART, with the signs of a rotation of PART channels."""
    signs = (1 - 2 * sign_bit(tl.arange(0, x.shape[1]) % PART)).to(tl.float32) * (1.0 / PART)
    return tl.fma(x, tl.broadcast_to(signs[None, :], x.shape), 0.0)  # no zero is negative, so no sum of zeros will be


@triton.jit
def transformed(x, PART: tl.constexpr):
    """The Walsh-Hadamard transform of every PART channels of rows (M, WIDTH)."""
    for level in tl.static_range(8):
        if (1 << level) < PART:
            x = butterfly(x, 1 << level)
    return x


@triton.jit
def rotated(x, PART: tl.constexpr):
    """rotation.rotate of rows (M, WIDTH), in parts of PART channels."""
    # with_signs makes zeros of either sign from the smallest float32 numbers
    return transformed(with_signs(x, PART), PART) + 0.0


@triton.jit
def unrotated(y, PART: tl.constexpr):
    """The rows x (M, WIDTH) for which y is rotation.rotate_queries of x."""
    return with_signs(transformed(y, PART), PART)


@triton.jit
def load_tile(
    base, rows, row_stride, length, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, ONCE: tl.constexpr, PART: tl.constexpr = 0
):  # fmt: skip
    """Rows of a (length, DIM) matrix as float32 (…, WIDTH), zeros outside.

    CHECK: rows may lie past the end. ONCE: L2 may evict them first. PART: channels that are rotated together, 0 for no
    rotation.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    columns = tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if CHECK:
        x = tl.load(pointers, mask=(rows[:, None] < length) & (columns[None, :] < DIM), other=0.0, eviction_policy=POLICY).to(tl.float32)
    elif WIDTH > DIM:
        x = tl.load(pointers, mask=columns[None, :] < DIM, other=0.0, eviction_policy=POLICY).to(tl.float32)
    else:
        x = tl.load(pointers, eviction_policy=POLICY).to(tl.float32)
    if PART > 0:
        x = rotated(x, PART) if base.dtype.element_ty == tl.float32 else transformed(with_signs(x, PART), PART)
    return x


@triton.jit
def sum_lanes(total):
    """(lanes, N) -> (N,) by a halving tree, in the order of quantization.ordered_sum."""
    lanes: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if lanes == 1:
        return tl.reshape(total, (N,))
    else:
        low, high = tl.split(tl.permute(tl.reshape(total, (2, lanes // 2, N)), (1, 2, 0)))
        return sum_lanes(low + high)


@triton.jit
def sum_token_chunk(
    base, first, step, stride, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EXTREMES: tl.constexpr, CAREFUL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums, minima and maxima by lane and channel, (LANES, WIDTH), over TOKEN_CHUNK tokens: groups of LANES tokens,
    `step` tokens apart.

    CAREFUL: only finite elements count, and rows may lie past the end.
    """
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.full([LANES, WIDTH], float("inf"), tl.float32)
    high = tl.full([LANES, WIDTH], -float("inf"), tl.float32)
    for i in tl.range(0, TOKEN_CHUNK // LANES, loop_unroll_factor=UNROLL):
        rows = first + i * step + tl.arange(0, LANES)
        x = load_tile(base, rows, stride, length, DIM, WIDTH, CAREFUL, False, PART)
        if CAREFUL:
            counts = is_finite(x) & (rows < length)[:, None]
            total += tl.where(counts, x, 0.0)
            if EXTREMES:
                low = tl.minimum(low, tl.where(counts, x, float("inf")))
                high = tl.maximum(high, tl.where(counts, x, -float("inf")))
        else:
            total += x
            if EXTREMES:
                low = tl.minimum(low, x)
                high = tl.maximum(high, x)
    return total, low, high


@triton.jit
def token_chunk_statistics(base, token_chunk, stride, length, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, UNROLL: tl.constexpr):
    """Statistics of one token chunk: sums, minima and maxima (WIDTH,) of its finite elements, and whether it needs
    care.

    It needs care if it is incomplete or has non-finite elements.
    """
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.zeros([LANES, WIDTH], tl.float32)
    high = tl.zeros([LANES, WIDTH], tl.float32)
    careful = 1
    first = token_chunk * TOKEN_CHUNK
    if first + TOKEN_CHUNK <= length:
        total, low, high = sum_token_chunk(base, first, LANES, stride, length, DIM, WIDTH, PART, True, False, UNROLL)
        # a non-finite element makes the sum non-finite
        careful = tl.max(tl.where(is_finite(total), 0, 1))
    if careful == 1:
        total, low, high = sum_token_chunk(base, first, LANES, stride, length, DIM, WIDTH, PART, True, True, UNROLL if UNROLL < 4 else 4)
    return sum_lanes(total), tl.min(low, 0), tl.max(high, 0), careful


@triton.jit
def gather_token_chunk(base, token_chunk, stride, length, sums, extremes, flag, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """Store the statistics of one token chunk: sums (DIM,), extremes (2, DIM), and whether it needs care. `sums` and
    `flag` may be None."""
    total, low, high, careful = token_chunk_statistics(base, token_chunk, stride, length, DIM, WIDTH, PART, 4 if WIDTH <= 128 else 2)
    columns = tl.arange(0, WIDTH)
    tl.store(extremes + columns, low, mask=columns < DIM)
    tl.store(extremes + DIM + columns, high, mask=columns < DIM)
    if sums is not None:
        tl.store(sums + columns, total, mask=columns < DIM)
    if flag is not None:
        tl.store(flag, careful)


@triton.jit
def removable(mean):
    """quantize.removable."""
    return tl.where(tl.abs(mean) < LARGEST_MEAN, mean, 0.0)


@triton.jit
def sample_mean(base, step, stride, length, inverse_size, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, UNROLL: tl.constexpr):
    """The mean that is removed from one head's k, (WIDTH,): quantization.key_mean, rotated in parts of PART
    channels."""
    total = tl.zeros([LANES, WIDTH], tl.float32)
    careful = 1
    if (TOKEN_CHUNK - LANES) * step + LANES <= length:
        total, _, _ = sum_token_chunk(base, 0, step * LANES, stride, length, DIM, WIDTH, 0, False, False, UNROLL)
        careful = tl.max(tl.where(is_finite(total), 0, 1))
    if careful == 1:
        total, _, _ = sum_token_chunk(base, 0, step * LANES, stride, length, DIM, WIDTH, 0, False, True, 4)
    mean = sum_lanes(total) * inverse_size
    if PART > 0:
        mean = tl.reshape(rotated(mean[None, :], PART), (WIDTH,))
    return removable(mean)


@triton.jit
def token_chunk_extremes(extremes, token_chunks, columns, DIM: tl.constexpr):
    """Minima and maxima of channels over all token chunks."""
    lanes = tl.arange(0, LANES)
    low = tl.full([LANES, columns.shape[0]], float("inf"), tl.float32)
    high = tl.full([LANES, columns.shape[0]], -float("inf"), tl.float32)
    for first in range(0, token_chunks, LANES):
        token_chunk = (first + lanes)[:, None]
        inside = (token_chunk < token_chunks) & (columns < DIM)[None, :]
        pointers = extremes + token_chunk * 2 * DIM + columns[None, :]
        low = tl.minimum(low, tl.load(pointers, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(pointers + DIM, mask=inside, other=-float("inf")))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def token_chunk_sum(sums, token_chunks, columns, DIM: tl.constexpr):
    """Sums of channels over all token chunks."""
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES, columns.shape[0]], tl.float32)
    for first in range(0, token_chunks, LANES):
        token_chunk = (first + lanes)[:, None]
        total += tl.load(sums + token_chunk * DIM + columns[None, :], mask=(token_chunk < token_chunks) & (columns < DIM)[None, :], other=0.0)
    return sum_lanes(total)


@triton.jit
def largest_magnitude(low, high, mean):
    """Largest magnitude of x - mean, from x's extremes. Exact, because rounding is monotonic."""
    return tl.maximum(tl.maximum(high - mean, mean - low), 0.0)


@triton.jit
def coarse(mean, low, high):
    """quantization.coarse."""
    largest = tl.maximum(tl.maximum(high, -low), 0.0)
    step = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * MEAN_STEP
    rounded = tl.where(tl.abs(mean) < step * MEAN_STEPS, 0.0, (mean + step * ROUNDER) - step * ROUNDER)
    return tl.where(low == high, low + 0.0, rounded)


@triton.jit
def store_rows(
    y, rows, length, hidden, scale_out, scale_block, scale_stride, out, out_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, FACTOR: tl.constexpr, IS_KEY: tl.constexpr, C: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Scale, encode and store a tile of q or k.

    FACTOR: multiplies the stored scales, except scales of zeros. CAREFUL: y may hold NaN, `hidden` rows (M,) become
    NaN, and rows may lie past the end.
    """
    CODE: tl.constexpr = INT8_MAX if C.int8 else E4M3_LARGEST
    FITTED: tl.constexpr = GROUP == 1 and not C.int8 and DIM <= FIT_DIM
    magnitude = tl.abs(y)
    if CAREFUL:
        magnitude = tl.where(y == y, magnitude, 0.0)
        if C.int8:
            hidden |= tl.max(tl.where(y == y, 0, 1), 1) > 0
    if GROUP == 1:
        largest = tl.max(magnitude, 1)
        scale = scale_of(largest, CODE)
        kept = tl.where(largest > 0, scale * FACTOR, 1.0)
        if C.int8 and IS_KEY and CAREFUL:
            kept = tl.where(hidden, float("nan"), kept)
        if not FITTED:
            tl.store(scale_out + rows * scale_stride, kept, mask=rows < length)
        y *= tl.div_rn(1.0, scale)[:, None]
    elif GROUP == BLOCK:
        largest = tl.max(magnitude)
        scale = scale_of(largest, CODE)
        kept = tl.where(largest > 0, scale * FACTOR, 1.0)
        if C.int8 and IS_KEY and CAREFUL:
            kept = tl.where(tl.max(hidden.to(tl.int32)) > 0, -kept, kept)
        tl.store(scale_out + scale_block * scale_stride, kept)
        y *= tl.div_rn(1.0, scale)
    else:
        y *= tl.div_rn(1.0, tl.abs(tl.load(scale_out)) * (1.0 / FACTOR))
    columns = tl.arange(0, WIDTH)
    pointers = out + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    inside = (columns < DIM)[None, :]
    if CAREFUL:
        y = tl.where(hidden[:, None], float("nan"), y)
        inside &= (rows < length)[:, None]
    if FITTED:
        codes, fit = fitted_codes(y, C.native, CAREFUL)
        kept = tl.minimum(tl.maximum(kept * fit, SMALLEST_SCALE), FLOAT_MAX)  # the scale of zeros stays 1
        tl.store(scale_out + rows * scale_stride, kept, mask=rows < length)
        tl.store(pointers, codes, mask=inside)
    else:
        tl.store(pointers, int8_code(y) if C.int8 else e4m3_code(y, C.native), mask=inside)


@triton.jit
def load_vector(vector, stride, behind, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """A vector as (WIDTH,), with `behind` from DIM on."""
    columns = tl.arange(0, WIDTH)
    return tl.load(vector + columns * stride, mask=columns < DIM, other=behind)


@triton.jit
def store_vector(vector, x, DIM: tl.constexpr):
    columns = tl.arange(0, x.shape[0])
    tl.store(vector + columns, x, mask=columns < DIM)


@triton.jit
def write_rows(
    x, x_stride, shift, rows, hidden, whole, scale_out, scale_block, scale_stride, out, out_stride, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, FACTOR: tl.constexpr, IS_KEY: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Quantize one block of one head's q or k.

    Args:
        shift: (1, WIDTH) or a number, which is subtracted.
        rows: (BLOCK,) tokens of the block in any order.
        hidden: (BLOCK,) bool, rows that become NaN.
        whole: whether all rows exist and none is hidden.
    """
    careful = 1
    if whole:
        # L2 should hold v for later, not this
        y = load_tile(x, rows, x_stride, length, DIM, WIDTH, False, True, C.part)
        if tl.sum(y * 0.0) == 0.0:  # NaN * 0 and inf * 0 are NaN
            careful = 0
            store_rows(
                y - shift, rows, length, hidden, scale_out, scale_block, scale_stride, out, out_stride, DIM, WIDTH, GROUP, FACTOR, IS_KEY, C, False
            )
    if careful == 1:
        y = load_tile(x, rows, x_stride, length, DIM, WIDTH, True, True, C.part)
        y = tl.where(is_finite(y), y, float("nan")) - shift
        y = tl.where((rows < length)[:, None], y, 0.0)  # rows past the end must not increase the block's scale
        store_rows(y, rows, length, hidden, scale_out, scale_block, scale_stride, out, out_stride, DIM, WIDTH, GROUP, FACTOR, IS_KEY, C, True)


@triton.jit
def write_values(
    v, v_stride, shift, scale, out, token_chunk, length, padded, pitch,
    DIM: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Quantize a token chunk of some channels of one head's v (quantization.encode_values). All its runs advance
    together, token by token.

    Args:
        shift: (1, WIDTH) or a number, which is subtracted.
        scale: (WIDTH,).
        out: the channels' codes, four per word.
        padded, pitch: codes of a channel, and from one channel to the next.
        CAREFUL: the token chunk is incomplete, or has non-finite tokens.
    """
    columns = tl.arange(0, WIDTH)
    inverse = tl.div_rn(1.0, scale)[None, :]
    gain = tl.where(length > TOKEN_CHUNK, FEEDBACK, 0.0).to(tl.float16)
    # without feedback the order of tokens doesn't matter, so process no more groups than there are, two at a time
    groups = tl.where(length <= TOKEN_CHUNK // 2, 2, 4)
    runs = token_chunk * TOKEN_CHUNK + tl.arange(0, TOKEN_CHUNK // RUN) * (groups * GROUP)
    residual = tl.zeros([TOKEN_CHUNK // RUN, WIDTH], tl.float16)
    zeros = tl.zeros([TOKEN_CHUNK // RUN, WIDTH], tl.int32)
    before0, before1, before2, before3 = zeros, zeros, zeros, zeros
    for group in range(groups):
        first = runs + group * GROUP
        words0, words1, words2, words3 = zeros, zeros, zeros, zeros
        # a conversion by integers takes about 20 instructions; 16 of them in a row take 13 s to compile
        for token in tl.range(GROUP, loop_unroll_factor=GROUP if NATIVE else 1):
            rows = first + token
            x = (load_tile(v, rows, v_stride, length, DIM, WIDTH, CAREFUL, False) - shift) * inverse
            if CAREFUL:
                # a token's NaN goes into its key instead; codes past the end are zero, not -mean
                x = tl.where(is_finite(x) & (rows < length)[:, None], x, 0.0)
            code, residual = feed_back(x, residual, gain, NATIVE)
            # layout.key_of_slot: a word holds two adjacent tokens, and the two tokens 8 places after them
            byte = code << (8 * (token % 2 + token // 8 * 2))
            word = token // 2 % 4
            words0 |= tl.where(word == 0, byte, 0)
            words1 |= tl.where(word == 1, byte, 0)
            words2 |= tl.where(word == 2, byte, 0)
            words3 |= tl.where(word == 3, byte, 0)
        if group % 2 == 1:  # 32 bytes, which L2 writes at once
            low = tl.join(tl.join(before0, before1), tl.join(before2, before3))
            words = tl.permute(tl.join(low, tl.join(tl.join(words0, words1), tl.join(words2, words3))), (0, 1, 4, 3, 2))
            at = (first - GROUP)[:, None] // 4 + columns[None, :].to(tl.int64) * (pitch // 4)
            pointers = out + at[:, :, None] + tl.arange(0, GROUP // 2)[None, None, :]
            exists = (columns < DIM)[None, :, None]
            if CAREFUL:
                exists &= (first < padded)[:, None, None]
            tl.store(pointers, tl.reshape(words, (TOKEN_CHUNK // RUN, WIDTH, GROUP // 2)), mask=exists)
        before0, before1, before2, before3 = words0, words1, words2, words3


@triton.jit
def hidden_tokens(v, rows, v_stride, length, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Which of `rows` of one head's v are non-finite: 0 or 1."""
    values = load_tile(v, rows, v_stride, length, DIM, WIDTH, True, False)
    return tl.max(tl.where(is_finite(values), 0, 1), 1)


@triton.jit
def sum_queries(q, q_stride, first, length, LANE: tl.constexpr, DISTANCE: tl.constexpr, C: tl.constexpr):
    """Sums of a group of queries in TREE lanes from LANE on, (TREE, WIDTH), after the halving tree has added lanes down
    to DISTANCE apart.

    Rows are loaded so that the first levels need no exchange. Loading all lanes at once would distribute them over all
    warps, and spill.
    """
    WIDTH: tl.constexpr = C.widths[0]
    if DISTANCE < LANES:
        low = sum_queries(q, q_stride, first, length, LANE, 2 * DISTANCE, C)
        return low + sum_queries(q, q_stride, first, length, LANE + DISTANCE, 2 * DISTANCE, C)
    else:
        total = tl.zeros([TREE, WIDTH], tl.float32)
        for step in tl.static_range(QUERY_GROUP // LANES):
            rows = first + step * LANES + LANE + tl.arange(0, TREE)
            x = load_tile(q, rows, q_stride, length, C.q_dim, WIDTH, True, False)
            total += tl.where(is_finite(x), x, 0.0)
        return total


@triton.jit
def query_mean(q, q_stride, q_mean, group, length, C: tl.constexpr):
    """quantize.query_means of one group of one head's q, (WIDTH,). It is stored, rotated, to q_mean (G, Dq)."""
    WIDTH: tl.constexpr = C.widths[0]
    total = sum_queries(q, q_stride, group * QUERY_GROUP, length, 0, TREE, C)
    count = tl.maximum(tl.minimum(length - group * QUERY_GROUP, QUERY_GROUP), 1)
    mean = removable(sum_lanes(total) * tl.div_rn(1.0, count.to(tl.float32)))
    if group * QUERY_GROUP < length:
        kept = mean
        if C.part > 0:
            kept = tl.reshape(rotated(mean[None, :], C.part), (WIDTH,)) * C.q_factor
        store_vector(q_mean + group * C.q_dim, kept, C.q_dim)
    return mean


@triton.jit
def write_queries(
    q, q_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, item, heads, length, C: tl.constexpr
):  # fmt: skip
    """Quantize one block of q: number `item` of (B · Hq) x blocks."""
    blocks = tl.cdiv(length, BLOCK)
    pair = (item // blocks).to(tl.int64)
    batch = pair // heads
    head = pair % heads
    block = item % blocks
    rows = block * BLOCK + tl.arange(0, BLOCK)
    q += batch * q_strides[0] + head * q_strides[1]
    q_scale += batch * q_scale_strides[0] + head * q_scale_strides[1]
    q_data += batch * q_data_strides[0] + head * q_data_strides[1]
    if C.smooth_q:
        q_mean += pair * tl.cdiv(length, QUERY_GROUP) * C.q_dim
        tl.static_assert(BLOCK == 2 * QUERY_GROUP)
        first = query_mean(q, q_strides[2], q_mean, 2 * block, length, C)
        second = query_mean(q, q_strides[2], q_mean, 2 * block + 1, length, C)
        y = load_tile(q, rows, q_strides[2], length, C.q_dim, C.widths[0], True, True)
        y -= tl.where((rows % BLOCK < QUERY_GROUP)[:, None], first[None, :], second[None, :])
        if C.part > 0:
            y = rotated(y, C.part)
        y = tl.where(is_finite(y), y, float("nan"))
        y = tl.where((rows < length)[:, None], y, 0.0)  # as in write_rows
        store_rows(
            y, rows, length, rows < 0, q_scale, block, q_scale_strides[2], q_data, q_data_strides[2],
            C.q_dim, C.widths[0], C.q_group, C.q_factor, False, C, True,
        )  # fmt: skip
    else:
        PIECES: tl.constexpr = C.work_tiles
        for work_tile in tl.range(PIECES, loop_unroll_factor=1):
            some = rows if PIECES == 1 else block * BLOCK + work_tile * (BLOCK // PIECES) + tl.arange(0, BLOCK // PIECES)
            write_rows(
                q, q_strides[2], 0.0, some, some < 0, (block + 1) * BLOCK <= length, q_scale, block, q_scale_strides[2], q_data, q_data_strides[2],
                length, C.q_dim, C.widths[0], C.q_group, C.q_factor, False, C,
            )  # fmt: skip


@triton.jit
def inverse_of(count):
    """1 / max(count, 1), as the host computes it."""
    return (1.0 / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def sample_of(length):
    """quantization.sample_step, and the inverse of quantization.sample_size."""
    step = tl.maximum(tl.cdiv(length, SAMPLE), 1)
    size = length // (step * LANES) * LANES + tl.minimum(length % (step * LANES), LANES)
    return step, inverse_of(size)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "kv_pairs", "q_length", "kv_length", "sample_step", "sequences"])
def gather_kernel(
    q, k, v, q_strides, k_strides, v_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, k_mean, k_extremes,
    v_sums, v_extremes, v_flags, cu_seqlens, seqused, q_heads, kv_heads, kv_pairs, q_length, kv_length, sample_step, inverse_sample_size, sequences,
    C: tl.constexpr,
):  # fmt: skip
    """Compute statistics of every token chunk of v and k's mean and extremes, and quantize q.

    Statistics of v: sums (B, Hkv, token_chunks, Dv), extremes (…, 2, Dv), flags (…). Of packed sequences, token chunks
    are places, B is 1 for them, and kv_pairs are the heads of all sequences.

    Grid, in one dimension, long programs first: token chunks of v, token chunks of k if C.k_extremes, heads of k if
    C.smooth_k, blocks of q. Dims of 0 in C mean that there is no q, or no k and v.
    """
    begin(C.dependent)
    item = tl.program_id(0)
    token_chunks = units_in(cu_seqlens, sequences, kv_length, TOKEN_CHUNK)
    k_first = (kv_pairs if cu_seqlens is None else kv_heads) * token_chunks
    mean_first = k_first + (kv_pairs * token_chunks if C.k_extremes else 0)
    q_first = mean_first + (kv_pairs if C.smooth_k else 0)
    if item < k_first:
        if C.v_dim > 0:
            index = item.to(tl.int64)
            batch, head, _, token_chunk, _, first, length = unit_of_head(
                item % token_chunks, index // token_chunks, cu_seqlens, seqused, sequences, kv_heads, kv_length, TOKEN_CHUNK
            )
            if token_chunk * TOKEN_CHUNK < length:
                base = v + batch * v_strides[0] + head * v_strides[1] + first * v_strides[2]
                gather_token_chunk(
                    base, token_chunk, v_strides[2], length, v_sums + index * C.v_dim, v_extremes + index * 2 * C.v_dim,
                    v_flags + index, C.v_dim, C.widths[2], 0,
                )  # fmt: skip
    elif item < mean_first:
        if C.k_extremes:
            index = (item - k_first).to(tl.int64)
            pair = index // token_chunks
            base = k + pair // kv_heads * k_strides[0] + pair % kv_heads * k_strides[1]
            extremes = k_extremes + index * 2 * C.k_dim
            gather_token_chunk(base, (item - k_first) % token_chunks, k_strides[2], kv_length, None, extremes, None, C.k_dim, C.widths[1], C.part)
    elif item < q_first:
        if C.smooth_k:
            pair = (item - mean_first).to(tl.int64)
            base = k + pair % kv_heads * k_strides[1]
            length = kv_length
            if cu_seqlens is None:
                base += pair // kv_heads * k_strides[0]
            else:
                first, length = spans_of(cu_seqlens, seqused, pair // kv_heads, kv_length, pair < kv_pairs)
                base += first.to(tl.int64) * k_strides[2]
                sample_step, inverse_sample_size = sample_of(length)
            mean = sample_mean(base, sample_step, k_strides[2], length, inverse_sample_size, C.k_dim, C.widths[1], C.part, 4)
            store_vector(k_mean + pair * C.k_dim, mean, C.k_dim)
    else:
        if C.q_dim > 0:
            write_queries(q, q_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, item - q_first, q_heads, q_length, C)


@triton.jit(do_not_specialize=["token_chunks", "heads", "length", "sequences"])
def finish_kernel(
    k_mean, k_extremes, k_largest, v_sums, v_extremes, v_mean, v_largest, v_scale, cu_seqlens, seqused, token_chunks, inverse_length, heads, length,
    sequences, C: tl.constexpr,
):  # fmt: skip
    """Compute v's means and scales, and the largest magnitudes of k and v, (B, Hkv, D) each. Outputs that are None
    aren't stored.

    Grid: (B · Hkv) x D / CHANNELS; of packed sequences, their number is B.
    """
    begin(C.dependent)
    pair = tl.program_id(0).to(tl.int64)
    chunk = pair * token_chunks
    if cu_seqlens is not None:
        sequence = (pair // heads).to(tl.int32)
        first, own_length = spans_of(cu_seqlens, seqused, sequence, length, sequence < sequences)
        chunk = pair % heads * units_in(cu_seqlens, sequences, length, TOKEN_CHUNK) + first_unit(first, sequence, TOKEN_CHUNK)
        token_chunks = tl.cdiv(own_length, TOKEN_CHUNK)
        inverse_length = inverse_of(own_length)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if C.k_extremes:
        low, high = token_chunk_extremes(k_extremes + chunk * 2 * C.k_dim, token_chunks, columns, C.k_dim)
        mean = tl.zeros([CHANNELS], tl.float32)
        if C.smooth_k:
            mean = tl.load(k_mean + pair * C.k_dim + columns, mask=columns < C.k_dim, other=0.0)
        tl.store(k_largest + pair * C.k_dim + columns, largest_magnitude(low, high, mean), mask=columns < C.k_dim)
    inside = columns < C.v_dim
    low, high = token_chunk_extremes(v_extremes + chunk * 2 * C.v_dim, token_chunks, columns, C.v_dim)
    mean = tl.zeros([CHANNELS], tl.float32)
    if C.smooth_v:
        mean = token_chunk_sum(v_sums + chunk * C.v_dim, token_chunks, columns, C.v_dim) * inverse_length
        mean = removable(coarse(mean, low, high))
        tl.store(v_mean + pair * C.v_dim + columns, mean, mask=inside)
    largest = largest_magnitude(low, high, mean)
    if v_largest is not None:
        tl.store(v_largest + pair * C.v_dim + columns, largest, mask=inside)
    if v_scale is not None:
        tl.store(v_scale + pair * C.v_dim + columns, scale_of(largest), mask=inside)


@triton.jit(do_not_specialize=["heads", "length", "sequences"])
def write_kernel(
    k, v, k_strides, v_strides, k_mean, v_mean, k_scale, v_scale, k_scale_strides, v_scale_strides, k_data, k_data_strides, v_data,
    v_flags, cu_seqlens, seqused, heads, length, padded, sequences, C: tl.constexpr,
):  # fmt: skip
    """Quantize k and v.

    Grid: (token chunks of v, which take longest, and blocks of k) x (B · Hkv), in one dimension; of packed sequences,
    their places x Hkv.
    """
    begin(C.dependent)
    token_chunks = units_in(cu_seqlens, sequences, length, TOKEN_CHUNK)
    items = token_chunks + units_in(cu_seqlens, sequences, length, BLOCK)
    # heads in reverse order, because the last ones read are still in L2
    from_last = tl.num_programs(0) - 1 - tl.program_id(0)
    of_head = (from_last // items).to(tl.int64)
    item = items - 1 - from_last % items
    if item < token_chunks:
        batch, head, pair, token_chunk, sequence, first, own_length = unit_of_head(
            item, of_head, cu_seqlens, seqused, sequences, heads, length, TOKEN_CHUNK
        )
        v += batch * v_strides[0] + head * v_strides[1] + first * v_strides[2]
        v_data += of_head * C.v_dim * (padded // 4)
        own_padded = padded
        if cu_seqlens is not None:
            v_data += first_unit(first, sequence, BLOCK) * (BLOCK // 4)
            own_padded = tl.cdiv(own_length, BLOCK) * BLOCK
        if token_chunk * TOKEN_CHUNK < own_length:
            v_shift = 0.0
            if C.smooth_v:
                v_shift = load_vector(v_mean + pair * C.v_dim, 1, 0.0, C.v_dim, C.widths[2])[None, :]
            v_scale += (pair // heads) * v_scale_strides[0] + head * v_scale_strides[1]
            scale = load_vector(v_scale, v_scale_strides[2], 1.0, C.v_dim, C.widths[2])
            if tl.load(v_flags + of_head * token_chunks + item) == 0:
                write_values(
                    v, v_strides[2], v_shift, scale, v_data, token_chunk, own_length, own_padded, padded, C.v_dim, C.widths[2], C.native, False
                )
            else:
                write_values(
                    v, v_strides[2], v_shift, scale, v_data, token_chunk, own_length, own_padded, padded, C.v_dim, C.widths[2], C.native, True
                )
    else:
        batch, head, pair, block, sequence, first, own_length = unit_of_head(
            item - token_chunks, of_head, cu_seqlens, seqused, sequences, heads, length, BLOCK
        )
        flag = of_head * token_chunks + block * BLOCK // TOKEN_CHUNK
        k_scale += batch * k_scale_strides[0] + head * k_scale_strides[1]
        if cu_seqlens is not None:
            flag += first_unit(first, sequence, TOKEN_CHUNK)
            k_scale += (first if C.k_group == 1 else first_unit(first, sequence, BLOCK)) * k_scale_strides[2]
        if block * BLOCK < own_length:
            careful = tl.load(v_flags + flag)
            v += batch * v_strides[0] + head * v_strides[1] + first * v_strides[2]
            k += batch * k_strides[0] + head * k_strides[1] + first * k_strides[2]
            k_data += batch * k_data_strides[0] + head * k_data_strides[1] + first * k_data_strides[2]
            k_shift = 0.0
            if C.smooth_k:
                k_shift = load_vector(k_mean + pair * C.k_dim, 1, 0.0, C.k_dim, C.widths[1])[None, :]
            rows = block * BLOCK + tl.arange(0, BLOCK)
            hidden = rows < 0
            if careful != 0:
                hidden = hidden_tokens(v, rows, v_strides[2], own_length, C.v_dim, C.widths[2]) > 0
            write_rows(
                k, k_strides[2], k_shift, rows, hidden, careful == 0, k_scale, block, k_scale_strides[2], k_data, k_data_strides[2], own_length,
                C.k_dim, C.widths[1], C.k_group, 1.0, True, C,
            )  # fmt: skip


@triton.jit(noinline=True)
def small_values(v, v_strides, v_mean, v_data, v_scale, item, kv_heads, length, padded, inverse_length, C: tl.constexpr):
    """Quantize a slice of the channels of one head's v."""
    slices: tl.constexpr = (C.v_dim + SLICE - 1) // SLICE
    pair = (item // slices).to(tl.int64)
    channel = item % slices * SLICE
    v += pair // kv_heads * v_strides[0] + pair % kv_heads * v_strides[1] + channel
    token_chunks = tl.cdiv(length, TOKEN_CHUNK)
    sums = tl.zeros([LANES, SLICE], tl.float32)
    low = tl.full([SLICE], float("inf"), tl.float32)
    high = tl.full([SLICE], -float("inf"), tl.float32)
    careful = 0
    for token_chunk in range(token_chunks):
        total, chunk_low, chunk_high, chunk_careful = token_chunk_statistics(v, token_chunk, v_strides[2], length, SLICE, SLICE, 0, GROUPS_PER_LOAD)
        sums = tl.where((tl.arange(0, LANES) == token_chunk)[:, None], total[None, :], sums)
        low = tl.minimum(low, chunk_low)
        high = tl.maximum(high, chunk_high)
        careful |= chunk_careful
    mean = tl.zeros([SLICE], tl.float32)
    if C.smooth_v:
        mean = removable(coarse(sum_lanes(sums) * inverse_length, low, high))
        store_vector(v_mean + pair * C.v_dim + channel, mean, SLICE)
    scale = scale_of(largest_magnitude(low, high, mean))
    store_vector(v_scale + pair * C.v_dim + channel, scale, SLICE)
    v_data += (pair * C.v_dim + channel) * (padded // 4)
    for token_chunk in range(token_chunks):
        if careful == 0:
            write_values(v, v_strides[2], mean[None, :], scale, v_data, token_chunk, length, padded, padded, SLICE, SLICE, C.native, False)
        else:
            write_values(v, v_strides[2], mean[None, :], scale, v_data, token_chunk, length, padded, padded, SLICE, SLICE, C.native, True)


@triton.jit(noinline=True)
def small_keys(
    k, v, k_strides, v_strides, k_mean, k_data, k_data_strides, k_scale, k_scale_strides, item, kv_heads, length, sample_step, inverse_sample_size,
    C: tl.constexpr,
):  # fmt: skip
    """Quantize block `item` of k: number of a head times blocks, plus number of a block."""
    blocks = tl.cdiv(length, BLOCK)
    pair = (item // blocks).to(tl.int64)
    batch = pair // kv_heads
    head = pair % kv_heads
    block = item % blocks
    k += batch * k_strides[0] + head * k_strides[1]
    v += batch * v_strides[0] + head * v_strides[1]
    shift = 0.0
    if C.smooth_k:
        mean = sample_mean(k, sample_step, k_strides[2], length, inverse_sample_size, C.k_dim, C.widths[1], C.part, GROUPS_PER_LOAD)
        if block == 0:
            store_vector(k_mean + pair * C.k_dim, mean, C.k_dim)
        shift = mean[None, :]
    rows = block * BLOCK + tl.arange(0, BLOCK)
    hidden = hidden_tokens(v, rows, v_strides[2], length, C.v_dim, C.widths[2])
    write_rows(
        k, k_strides[2], shift, rows, hidden > 0, ((block + 1) * BLOCK <= length) & (tl.max(hidden) == 0),
        k_scale + batch * k_scale_strides[0] + head * k_scale_strides[1], block, k_scale_strides[2],
        k_data + batch * k_data_strides[0] + head * k_data_strides[1], k_data_strides[2], length,
        C.k_dim, C.widths[1], C.k_group, 1.0, True, C,
    )  # fmt: skip


@triton.jit(noinline=True)
def small_queries(
    q, q_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, item, heads, length, C: tl.constexpr
):  # fmt: skip
    """write_queries."""
    write_queries(q, q_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, item, heads, length, C)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "kv_pairs", "q_length", "kv_length", "sample_step"])
def fused_small_kernel(
    q, k, v, q_strides, k_strides, v_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, k_mean, k_data, k_data_strides,
    k_scale, k_scale_strides, v_mean, v_data, v_scale, q_heads, kv_heads, kv_pairs, q_length, kv_length, padded, sample_step,
    inverse_sample_size, inverse_length, C: tl.constexpr,
):  # fmt: skip
    """The whole quantization in one launch: every program computes the means that it needs.

    Grid, in one dimension: slices of v's channels of all heads, blocks of k, blocks of q. v_mean and v_scale are
    (B, Hkv, Dv).
    """
    begin(C.dependent)
    item = tl.program_id(0)
    blocks = tl.cdiv(kv_length, BLOCK)
    slices: tl.constexpr = (C.v_dim + SLICE - 1) // SLICE
    q_first = kv_pairs * (slices + blocks)
    if item < kv_pairs * slices:
        small_values(v, v_strides, v_mean, v_data, v_scale, item, kv_heads, kv_length, padded, inverse_length, C)
    elif item < q_first:
        item -= kv_pairs * slices
        small_keys(
            k, v, k_strides, v_strides, k_mean, k_data, k_data_strides, k_scale, k_scale_strides, item, kv_heads, kv_length, sample_step,
            inverse_sample_size, C,
        )  # fmt: skip
    else:
        if C.q_dim > 0:
            small_queries(q, q_strides, q_data, q_data_strides, q_scale, q_scale_strides, q_mean, item - q_first, q_heads, q_length, C)


@triton.jit(do_not_specialize=["heads", "length"])
def import_values_kernel(v, v_strides, v_data, hidden, heads, length, padded, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """quantization.import_values on bytes: v_data (B, H, D, S_padded), hidden (B, H, S) bytes.

    Grid: blocks x (B · H), in one dimension.
    """
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    pair = (program // blocks).to(tl.int64)
    v += pair // heads * v_strides[0] + pair % heads * v_strides[1]
    slots = program % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = key_of_slot(slots)
    columns = tl.arange(0, WIDTH)
    pointers = v + rows[:, None].to(tl.int64) * v_strides[2] + columns[None, :]
    code = tl.load(pointers, mask=(rows[:, None] < length) & (columns[None, :] < DIM), other=0)
    is_nan = (code & NAN_CODE) == NAN_CODE
    tl.store(hidden + pair * length + rows, tl.max(is_nan.to(tl.int32), 1).to(tl.uint8), mask=rows < length)
    pointers = v_data + (pair * DIM + columns)[:, None] * padded + slots[None, :]
    tl.store(pointers, tl.trans(tl.where(is_nan, 0, code)), mask=(columns < DIM)[:, None])


WARPS = 8

GIVEN = ("tensor", "head")
"""Granularities whose scales are computed before rows are written."""


@functools.lru_cache(1024)
def traits_of(q_dim: int, k_dim: int, v_dim: int, recipe: Recipe, device: Device) -> Traits:
    """The `Traits` of a call. Dims of absent operands are 0."""
    there = k_dim > 0
    return Traits(
        q_dim, k_dim, v_dim, GROUPS[recipe.q], GROUPS[recipe.k], smooth_q=recipe.smooth_q and q_dim > 0,
        smooth_k=recipe.smooth_k and there, smooth_v=recipe.smooth_v and there,
        part=rotation.part_of(k_dim or q_dim, recipe.rotate), int8=recipe.qk == "int8",
        k_extremes=recipe.k in GIVEN and there, native=device.has_fp8_units and not device.emulated,
        dependent=device.has_dependent_launch,
    )  # fmt: skip


def _resources(traits: Traits, with_values: bool, warmup: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the launches that compute statistics, that write k and v, and of all others."""
    width = max(traits.widths)
    resources = dict(warmup=warmup, dependent=traits.dependent, num_warps=WARPS if width <= 128 else 16, maxnreg=128)
    if traits.int8 or traits.part > 0 or with_values or traits.smooth_q:
        # int8 is rounded by an addition. Fused with the product before it, a tie of the rounded product would no longer
        # be a tie. The same holds for values and their correction. And the products that start a rotation, and means of
        # queries, would not be rounded where they are subnormal
        resources["enable_fp_fusion"] = False
    gathering = resources
    if (width <= 64 and not traits.smooth_q) or traits.work_tiles > 1:
        # as many programs at a time as registers allow, except for a few words
        gathering = resources | dict(num_warps=WARPS, maxnreg=80 if width <= 128 else 128)
    return gathering, resources | dict(maxnreg=80) if width <= 64 else resources, resources


def quantize(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Recipe,
    device: Device,
    *,
    warmup: bool = False,
    given: quantize_ref.Statistics | None = None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """quantization.quantize by the fused kernels: q, or k and v, or all three. A smoothed q comes without `bias`.

    Args:
        warmup: compile only.
        given: the statistics of the sequence that k and v are a part of. None: they are the whole sequence.
    """
    # these scales are of q without its means, which aren't computed yet
    if q is not None and recipe.smooth_q and recipe.q in GIVEN:
        centred, means = quantize_ref.without_means(q, recipe)
        q_quantized, k_quantized, v_quantized = quantize(centred, k, v, replace(recipe, smooth_q=False), device, warmup=warmup, given=given)
        assert q_quantized is not None
        return replace(q_quantized, mean=means), k_quantized, v_quantized
    if any(x is not None and x.numel() == 0 for x in (q, k)):
        return quantize_ref.quantize(q, k, v, recipe, given)
    like = q if q is not None else k
    assert like is not None
    for name, x in (("query", q), ("key", k)):
        if x is not None:
            check_counted(name, x)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    batch, kv_heads, kv_length, k_dim = (like.shape[0], 1, 0, 0) if k is None else k.shape
    v_dim = 0 if v is None else v.shape[3]
    _, q_heads, q_length, q_dim = (0, 1, 0, 0) if q is None else q.shape
    token_chunks = ceil_div(kv_length, quantize_ref.TOKEN_CHUNK)
    pairs = batch * kv_heads if k is not None else 0
    traits = traits_of(q_dim, k_dim, v_dim, recipe, device)
    gathering, writing, resources = _resources(traits, v is not None, warmup)

    row_type, largest_code = quantize_ref.row_type(recipe.qk), quantize_ref.largest_code(recipe.qk)
    q_data = q_scale = q_mean = None
    q_items = 0
    if q is not None:
        q_data = quantize_ref.empty_rows(q, row_type)
        if recipe.q in GIVEN:
            values = rotation.rotate(q, traits.part)
            q_scale = _reduced_scale(values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-2), recipe.q, largest_code, traits.q_factor)
        else:
            q_scale = new(*quantize_ref.scale_shape(recipe.q, *q.shape))
        if traits.smooth_q:
            q_mean = new(batch, q_heads, ceil_div(q_length, quantize_ref.QUERY_GROUP), q_dim)
        q_items = batch * q_heads * ceil_div(q_length, SCALE_BLOCK)
    queries = (_bytes(q_data), _strides(q_data), q_scale, _scale_strides(q, q_scale), q_mean)
    q_quantized = None if q is None else Quantized(q_data, q_scale, recipe.q, "rows", q_length, q_mean, traits.part)
    sample = (quantize_ref.sample_step(kv_length), 1 / max(quantize_ref.sample_size(kv_length), 1))
    k_mean = new(batch, kv_heads, k_dim) if traits.smooth_k else None
    v_mean = new(batch, kv_heads, v_dim) if traits.smooth_v else None
    blocks = ceil_div(kv_length, SCALE_BLOCK)

    programs = pairs * (v_dim // SLICE.value + blocks) + q_items
    in_one = kv_length <= SHORT and programs <= SHORT_PROGRAMS * device.sm_count and v_dim % SLICE.value == 0
    if k is not None and v is not None and in_one and recipe.v == "channel" and not traits.k_extremes and given is None:
        k_data = quantize_ref.empty_rows(k, row_type)
        k_scale = new(*quantize_ref.scale_shape(recipe.k, *k.shape))
        v_data = new(batch, kv_heads, v_dim, padded_length(kv_length), dtype=E4M3)
        v_scale = new(batch, kv_heads, v_dim)
        launch(
            fused_small_kernel, (programs,),
            q, k, v, _strides(q), k.stride(), v.stride(), *queries, k_mean, _bytes(k_data), k_data.stride(), k_scale, _scale_strides(k, k_scale),
            v_mean, _words(v_data), v_scale, q_heads, kv_heads, pairs, q_length, kv_length, v_data.shape[3], *sample, 1 / kv_length, traits,
            **resources,
        )  # fmt: skip
        return (
            q_quantized,
            Quantized(k_data, k_scale, recipe.k, "rows", kv_length, k_mean, traits.part),
            Quantized(v_data, v_scale, recipe.v, "values", kv_length, v_mean),
        )

    k_extremes = v_sums = v_extremes = v_flags = None
    if k is not None:
        k_extremes = new(pairs, token_chunks, 2, k_dim) if traits.k_extremes else None
        v_sums = new(pairs, token_chunks, v_dim)
        v_extremes = new(pairs, token_chunks, 2, v_dim)
        v_flags = new(pairs, token_chunks, dtype=torch.int32)
    kv_items = pairs * token_chunks * (2 if traits.k_extremes else 1) + (pairs if traits.smooth_k else 0)
    launch(
        gather_kernel, (kv_items + q_items,),
        q, k, v, _strides(q), _strides(k), _strides(v), *queries, k_mean, k_extremes, v_sums, v_extremes, v_flags,
        None, None, q_heads, kv_heads, pairs, q_length, kv_length, *sample, 0, traits.of_statistics, **gathering,
    )  # fmt: skip
    if k is None or v is None:
        return q_quantized, None, None
    if given is not None and given.k_mean is not None:
        k_mean = given.k_mean.contiguous()

    k_largest = new(batch, kv_heads, k_dim) if traits.k_extremes else None
    v_largest = None if recipe.v == "channel" else new(batch, kv_heads, v_dim)
    v_scale = new(batch, kv_heads, v_dim) if recipe.v == "channel" else None
    launch(
        finish_kernel, (pairs, ceil_div(max(k_dim, v_dim), CHANNELS.value)),
        k_mean if traits.k_extremes else None, k_extremes, k_largest, v_sums, v_extremes, v_mean, v_largest, v_scale, None, None, token_chunks,
        1 / kv_length, kv_heads, kv_length, 0, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    if k_largest is None:
        k_scale = new(*quantize_ref.scale_shape(recipe.k, *k.shape))
    else:
        k_scale = _reduced_scale(k_largest, recipe.k, largest_code)
        if traits.int8:
            k_scale = quantize_ref.record_nonfinite(k_scale, ~(k.isfinite().all(-1) & v.isfinite().all(-1)), recipe.k)
    if v_largest is not None:
        v_scale = _reduced_scale(v_largest, recipe.v, quantize_ref.E4M3_MAX)
    if given is not None:
        v_scale, v_mean = given.v_scale, None if given.v_mean is None else given.v_mean.contiguous()

    v_data = new(batch, kv_heads, v_dim, padded_length(kv_length), dtype=E4M3)
    key = Quantized(quantize_ref.empty_rows(k, row_type), k_scale, recipe.k, "rows", kv_length, k_mean, traits.part)
    value = Quantized(v_data, v_scale, recipe.v, "values", kv_length, v_mean)
    _write(key, value, k, v, v_flags, traits, writing)
    return q_quantized, key, value


def quantize_packed(
    k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed, device: Device, *, warmup: bool = False
) -> tuple[Quantized, Quantized]:
    """quantization.quantize_packed by the fused kernels: each sequence has the bytes that `quantize` gives it alone.

    K's scales are those of tokens or blocks, V's those of channels.

    Args:
        warmup: compile only.
    """
    check_counted("key", k)
    key, value = quantize_ref.empty_packed(k, v, recipe, packed)
    heads, v_dim = k.shape[1], v.shape[3]
    chunks, blocks = units_of(packed, quantize_ref.TOKEN_CHUNK), units_of(packed, SCALE_BLOCK)
    pairs = packed.sequences * heads
    traits = traits_of(0, k.shape[3], v_dim, recipe, device)
    gathering, writing, resources = _resources(traits, True, warmup)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return k.new_empty(shape, dtype=dtype)

    v_sums, v_extremes, v_flags = new(heads, chunks, v_dim), new(heads, chunks, 2, v_dim), new(heads, chunks, dtype=torch.int32)
    cu_seqlens, seqused, sequences, tokens = packed_arguments(packed)
    launch(
        gather_kernel, (heads * chunks + (pairs if traits.smooth_k else 0),),
        None, k, v, _strides(None), k.stride(), v.stride(), None, _strides(None), None, _scale_strides(None, None), None, key.mean, None,
        v_sums, v_extremes, v_flags, cu_seqlens, seqused, 1, heads, pairs, 0, tokens, 1, 1.0, sequences, traits.of_statistics,
        **gathering,
    )  # fmt: skip
    launch(
        finish_kernel, (pairs, ceil_div(v_dim, CHANNELS.value)),
        None, None, None, v_sums, v_extremes, value.mean, None, value.scale, cu_seqlens, seqused, 0, 1.0, heads, tokens, sequences, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    launch(
        write_kernel, (heads * (chunks + blocks),),
        k, v, k.stride(), v.stride(), key.mean, value.mean, key.scale, value.scale, key.scale.stride(), value.scale.stride(),
        _bytes(key.data), key.data.stride(), _words(value.data), v_flags, cu_seqlens, seqused, heads, tokens, value.data.shape[3], sequences,
        traits.of_codes, **writing,
    )  # fmt: skip
    return key, value


def chunk_statistics(v: torch.Tensor, device: Device) -> quantize_ref.ChunkStatistics:
    """quantization.chunk_statistics by the kernel."""
    batch, heads, length, dim = v.shape
    if v.numel() == 0:
        return quantize_ref.chunk_statistics(v)
    check_counted("value", v)
    token_chunks, traits = ceil_div(length, quantize_ref.TOKEN_CHUNK), traits_of(0, 0, dim, Recipe(), device)
    sums = v.new_empty(batch, heads, token_chunks, dim, dtype=torch.float32)
    extremes = v.new_empty(batch, heads, token_chunks, 2, dim, dtype=torch.float32)
    careful = v.new_empty(batch, heads, token_chunks, dtype=torch.int32)
    launch(
        gather_kernel, (batch * heads * token_chunks,),
        None, None, v, _strides(None), _strides(None), v.stride(), None, _strides(None), None, _scale_strides(None, None), None, None, None,
        sums, extremes, careful, None, None, 1, heads, batch * heads, 0, length, 1, 1.0, 0, traits.of_statistics, warmup=False,
        dependent=traits.dependent, num_warps=WARPS, maxnreg=80 if max(traits.widths) <= 128 else 128, enable_fp_fusion=False,
    )  # fmt: skip
    return quantize_ref.ChunkStatistics(sums, extremes, careful)


def statistics(parts: Sequence[quantize_ref.PartialStatistics], total: int, recipe: Recipe, device: Device) -> quantize_ref.Statistics:
    """quantization.statistics by the kernels: two launches behind three concatenations."""
    sample, sums, extremes = (
        torch.cat(tensors, 2) for tensors in zip(*((part.k_sample, part.v_sums, part.v_extremes) for part in parts), strict=True)
    )
    if sums.numel() == 0 or (recipe.smooth_k and sample.numel() == 0):
        return quantize_ref.statistics(parts, total, recipe)
    batch, heads, token_chunks, v_dim = sums.shape
    pairs, count = batch * heads, sample.shape[2]

    def new(there: bool, dim: int) -> torch.Tensor | None:
        return sums.new_empty(batch, heads, dim) if there else None

    k_mean, v_mean = new(recipe.smooth_k, sample.shape[3]), new(recipe.smooth_v, v_dim)
    v_scale, v_largest = new(recipe.v == "channel", v_dim), new(recipe.v != "channel", v_dim)
    if k_mean is not None:
        # the sample is a short sequence, of which all tokens are sampled. Programs of its token chunks have no values
        traits = traits_of(0, sample.shape[3], 0, replace(recipe, k="block"), device)
        gathering, _, _ = _resources(traits, True, False)
        launch(
            gather_kernel, (pairs * ceil_div(count, quantize_ref.TOKEN_CHUNK) + pairs,),
            None, sample, None, _strides(None), sample.stride(), _strides(None), None, _strides(None), None, _scale_strides(None, None), None, k_mean,
            None, None, None, None, None, None, 1, heads, pairs, 0, count, 1, 1 / count, 0, traits.of_statistics, **gathering,
        )  # fmt: skip
    traits = traits_of(0, 0, v_dim, recipe, device)
    traits = replace(traits, smooth_v=recipe.smooth_v)  # of keys that aren't there, it says no
    _, _, resources = _resources(traits, True, False)
    launch(
        finish_kernel, (pairs, ceil_div(v_dim, CHANNELS.value)),
        None, None, None, sums, extremes, v_mean, v_largest, v_scale, None, None, token_chunks, 1 / total, heads, total, 0, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    if v_scale is None:
        assert v_largest is not None
        v_scale = _reduced_scale(v_largest, recipe.v, quantize_ref.E4M3_MAX)
    return quantize_ref.Statistics(k_mean, v_mean, v_scale)


def quantize_into(
    key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, careful: torch.Tensor | None, recipe: Recipe, device: Device
) -> None:
    """Quantize k and v by statistics of a sequence that they are a part of.

    Args:
        key, value: their means and V's scales are given. K's rows and scales, of tokens or blocks, and V are written.
        careful: as of ChunkStatistics, of v; None: it is measured.
    """
    assert recipe.k not in GIVEN
    if k.numel() == 0:
        return
    check_counted("key", k)
    if careful is None:
        careful = chunk_statistics(v, device).careful
    assert careful is not None
    traits = traits_of(0, k.shape[3], v.shape[3], recipe, device)
    _write(key, value, k, v, careful, traits, _resources(traits, True, False)[1])


def _write(
    key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, careful: torch.Tensor, traits: Traits, options: dict[str, Any]
) -> None:
    """Launch write_kernel. Rows, K's scales of tokens or blocks, and values are written; all else is given."""
    batch, heads, length, _ = k.shape
    launch(
        write_kernel, (batch * heads * (ceil_div(length, quantize_ref.TOKEN_CHUNK) + ceil_div(length, SCALE_BLOCK)),),
        k, v, k.stride(), v.stride(), key.mean, value.mean, key.scale, value.scale, _scale_strides(k, key.scale),
        _scale_strides(v, value.scale, v.shape[3]), _bytes(key.data), key.data.stride(), _words(value.data), careful, None, None, heads, length,
        value.data.shape[3], 0, traits.of_codes, **options,
    )  # fmt: skip


def _reduced_scale(largest: torch.Tensor, granularity: Granularity, code: float, factor: float = 1.0) -> torch.Tensor:
    """Scales of heads or of the tensor that map to `code`, times `factor`, from channels' largest magnitudes
    (B, H, D)."""
    largest = largest.amax(-1, keepdim=True) if granularity == "head" else largest.amax().view(1, 1, 1)
    return torch.where(largest > 0, quantize_ref.scale_of(largest, code) * factor, 1.0)


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 1) if x is None else x.stride()


def _scale_strides(x: torch.Tensor | None, scale: torch.Tensor | None, last: int = -1) -> tuple[int, ...]:
    """Strides of x's scale, expanded to all heads, with `last` scales for each head (-1: as it is)."""
    return (0, 0, 0) if x is None or scale is None else scale.expand(x.shape[0], x.shape[1], last).stride()


def _bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.view(torch.uint8)


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def import_values(v: torch.Tensor, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """quantization.import_values by a fused kernel."""
    batch, heads, length, dim = v.shape
    if v.numel() == 0:
        return quantize_ref.import_values(v)
    check_counted("value", v)
    data = torch.empty(batch, heads, dim, padded_length(length), dtype=E4M3, device=v.device)
    hidden = torch.empty(batch, heads, length, dtype=torch.bool, device=v.device)
    launch(
        import_values_kernel, (batch * heads * ceil_div(length, SCALE_BLOCK),),
        v.view(torch.uint8), v.stride(), data.view(torch.uint8), hidden.view(torch.uint8), heads, length, data.shape[3],
        dim, power_of_2(dim), warmup=warmup, num_warps=8,
    )  # fmt: skip
    return data, hidden
