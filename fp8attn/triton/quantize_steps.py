"""Steps of the quantizers' kernels: a part of a tensor, what it is measured for, its codes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from .. import layout, rotation
from .. import quantization as quantize_ref
from ..device import INTERPRETING
from ..recipe import E4M3_NAN, SCALE_BLOCK
from .feedback import feed_back
from .tile import (
    E4M3_LARGEST,
    INT8_MAX,
    ROUNDER,
    e4m3_code,
    int8_code,
    is_finite,
    scale_of,
)

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
MEAN_STEP: tl.constexpr = tl.constexpr(quantize_ref.MEAN_STEP)
LARGEST_MEAN: tl.constexpr = tl.constexpr(quantize_ref.LARGEST_MEAN)
BLOCK: tl.constexpr = tl.constexpr(SCALE_BLOCK)
NAN_CODE: tl.constexpr = tl.constexpr(E4M3_NAN)
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
        queries: dict[str, Any] = {} if self.q_dim else {"q_group": 1, "int8": False}
        return replace(self, k_group=1, smooth_v=False, **queries)

    @functools.cached_property
    def of_scales(self) -> Traits:
        """Those that finish_kernel depends on."""
        keys: dict[str, Any] = {} if self.k_extremes else {"k_dim": 0, "smooth_k": False}
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
    base, first, stride, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EXTREMES: tl.constexpr, CAREFUL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sums, minima and maxima by lane and channel, (LANES, WIDTH), over TOKEN_CHUNK tokens.

    CAREFUL: only finite elements count, and rows may lie past the end.
    """
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.full([LANES, WIDTH], float("inf"), tl.float32)
    high = tl.full([LANES, WIDTH], -float("inf"), tl.float32)
    for i in tl.range(0, TOKEN_CHUNK // LANES, loop_unroll_factor=UNROLL):
        rows = first + i * LANES + tl.arange(0, LANES)
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
        total, low, high = sum_token_chunk(base, first, stride, length, DIM, WIDTH, PART, True, False, UNROLL)
        # a non-finite element makes the sum non-finite
        careful = tl.max(tl.where(is_finite(total), 0, 1))
    if careful == 1:
        total, low, high = sum_token_chunk(base, first, stride, length, DIM, WIDTH, PART, True, True, UNROLL if UNROLL < 4 else 4)
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
def in_bfloat16(x):
    """x (float32, no NaN) rounded to the nearest even number of bfloat16. Triton's interpreter cuts bits off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def sample_mean(base, step, stride, length, inverse_size, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """The mean that is removed from one head's k, (WIDTH,): quantization.key_mean, rotated in parts of PART
    channels."""
    total = tl.zeros([LANES, WIDTH], tl.float32)
    for i in tl.range(0, tl.cdiv(length, step * LANES), loop_unroll_factor=4):
        rows = (i * LANES + tl.arange(0, LANES)) * step
        x = load_tile(base, rows, stride, length, DIM, WIDTH, True, False)
        total += tl.where(is_finite(x), x, 0.0)
    mean = in_bfloat16(sum_lanes(total) * inverse_size)
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
    step = tl.cdiv(length, SAMPLE) | 1
    return step, inverse_of(tl.cdiv(length, step))
