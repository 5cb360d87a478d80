"""The work of a query tile on a key block. Shared by the Triton and Gluon kernels of this folder."""

import triton
import triton.language as tl

from .. import layout, recipe, reference
from .. import quantization as quantize_ref
from ..device import INTERPRETING

LOG2E: tl.constexpr = tl.constexpr(reference.LOG2E)
P_OFFSET: tl.constexpr = tl.constexpr(reference.P_OFFSET)
LARGEST_FACTOR: tl.constexpr = tl.constexpr(reference.LARGEST_FACTOR)
SCALE_BLOCK: tl.constexpr = tl.constexpr(recipe.SCALE_BLOCK)
QUERY_GROUP: tl.constexpr = tl.constexpr(recipe.QUERY_GROUP)
BIAS_ALIGNMENT: tl.constexpr = tl.constexpr(recipe.BIAS_ALIGNMENT)
E4M3_MAX: tl.constexpr = tl.constexpr(recipe.E4M3_MAX)
E4M3_LARGEST: tl.constexpr = tl.constexpr(recipe.E4M3_LARGEST)
E4M3_NAN: tl.constexpr = tl.constexpr(recipe.E4M3_NAN)
INT8_MAX: tl.constexpr = tl.constexpr(recipe.INT8_MAX)
INT8_NAN: tl.constexpr = tl.constexpr(recipe.INT8_NAN)
FALL: tl.constexpr = tl.constexpr(reference.FALL)
LOWEST_SCORE: tl.constexpr = tl.constexpr(reference.LOWEST_SCORE)
# float32 numbers of this size are 16 apart: m - P_OFFSET would be rounded to m or to m - 16
FAR: tl.constexpr = tl.constexpr(2.0**27)
CODE: tl.constexpr = tl.constexpr(reference.CODE)
CODE_ROUND: tl.constexpr = tl.constexpr(reference.CODE_ROUND)
LARGEST_SCORE: tl.constexpr = tl.constexpr(reference.LARGEST_SCORE)
ROUNDER: tl.constexpr = tl.constexpr(quantize_ref.ROUNDER)
FLOAT_MAX: tl.constexpr = tl.constexpr(quantize_ref.FLOAT_MAX)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(quantize_ref.SMALLEST_SCALE)
NOTHING: tl.constexpr = tl.constexpr(-quantize_ref.FLOAT_MAX)  # not -inf, because -inf - -inf is NaN

PACK_CODES_PTX: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high;
    cvt.rn.relu.f16x2.f32 low, $2, $1;
    cvt.rn.relu.f16x2.f32 high, $4, $3;
    prmt.b32 $0, low, high, 0x6420;
}""")
"""PTX for four codes. Output: their bytes $0. Inputs: $1 to $4, codes times CODE. The first operand of a conversion
becomes the upper half (PTX ISA, cvt)."""

# the interpreter runs plain Python functions as they are; all other functions need triton.language as a global
key_of_slot = layout.key_of_slot if INTERPRETING else triton.jit(layout.key_of_slot)


@triton.jit
def score_factor(row_factor, key_scale, POSITIVE: tl.constexpr):
    """Row factor times a key block's scale, clamped so that its product with any e4m3 dot product is finite."""
    factor = tl.minimum(row_factor * key_scale, LARGEST_FACTOR)
    if POSITIVE:
        return tl.maximum(factor, 1 / LARGEST_FACTOR)
    return tl.maximum(factor, -LARGEST_FACTOR)


@triton.jit
def origin_of(m, FOLDED: tl.constexpr):
    """The value that is subtracted from scores in the exponent of P.

    It is m - P_OFFSET, or m if float32 can't represent that and scores are unfolded. In the second case P is at most 1,
    and scores are multiples of 16, so that the next smaller P is at most 2^-16.
    """
    if FOLDED:
        return m - P_OFFSET
    return m - tl.where(tl.abs(m) < FAR, P_OFFSET, 0.0)


@triton.jit
def next_largest(x, factor, m, FOLDED: tl.constexpr, POSITIVE: tl.constexpr):
    """What P of a key block is relative to: (M,), the block's largest scores, or the bound of reference.lowest.

    Args:
        x: (M, N) scores divided by `factor` if FOLDED, else the scores. -inf where hidden.
        factor: (M,), positive.
        m: (M,), the same of the last block; NOTHING if no key is visible so far.
        POSITIVE: no m is negative. Then scores are compared as integers, whose order is that of floats from zero up.
            The hardware compares two new integers per instruction, but only one new float.
    """
    if POSITIVE:
        largest = tl.max(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    else:
        largest = tl.max(x, 1)
    if FOLDED:
        largest = largest * factor
    below = 0.0 if POSITIVE else tl.where(m >= 0, 0.0, -FALL)
    return tl.maximum(tl.where(tl.abs(m) >= FALL, m, below), largest)


@triton.jit
def softmax_step(x, factor, m, FOLDED: tl.constexpr):
    """One key block of online softmax in base 2. x, factor, m: see `next_largest`.

    Returns:
        p = 2^(score - m + P_OFFSET) (M, N); the new m; the factors (M,) for the sums so far; and sums of p, (M, 4), one
        for each lane of the quad that owns a row in tensor-core layouts. These are added up only once, at the end.
    """
    m_new = next_largest(x, factor, m, FOLDED, False)
    shift = origin_of(m_new, FOLDED)
    alpha = tl.exp2(origin_of(m, FOLDED) - shift)
    if FOLDED:
        x = x * factor[:, None]
    p = tl.exp2(x - shift[:, None])
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    return p, m_new, alpha, tl.sum(tl.sum(tl.reshape(p, (M, N // 8, 4, 2)), 3), 1)


@triton.jit
def difference(x, y):
    """x - y of numbers that were rounded.

    A compiler may fuse other differences with the product before. A score and the maximum of scores would then differ
    by rounding, and a code has no room for that from scores of 2^24 on.
    """
    return tl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def code_step(x, factor, m, large, FOLDED: tl.constexpr, POSITIVE: tl.constexpr):
    """One key block of online softmax in base 2, P as codes. x, factor, m, POSITIVE: see `next_largest`.

    Args:
        large: whether scores may be LARGEST_SCORE or more, if FOLDED. Then products of x and `factor` are rounded, as
            m is, before m is subtracted.

    Returns:
        y (M, N), reference.direct_code's codes times CODE before they are rounded: `pack_codes` makes P of them; the
        new m; and the factors (M,) for the sums so far.
    """
    m_new = next_largest(x, factor, m, FOLDED, POSITIVE)
    alpha = tl.exp2(m - m_new)
    largest_code: tl.constexpr = (8 * (P_OFFSET + 7) - CODE_ROUND) * CODE
    if FOLDED:
        step = factor * (8 * CODE)
        top = m_new * (-8 * CODE) + largest_code
        if large:
            x = tl.where(x == -float("inf"), x, difference(x * factor[:, None], m_new[:, None]))
            # constants in the layouts of step and top
            step = tl.where(large, 8 * CODE, step)
            top = tl.where(large, largest_code, top)
        y = x * step[:, None] + top[:, None]
    else:
        y = difference(x, m_new[:, None]) * (8 * CODE) + largest_code
    return y, m_new, alpha


@triton.jit
def pack_codes(y):
    """The e4m3 numbers whose codes are y / CODE, rounded to nearest even, at least 0; NaN for NaN. y: float32, at most
    126 CODE, in the layout of a tensor core's operand.

    A half that is CODE times an integer below 1024 is subnormal, and its bits are the integer. So one conversion rounds
    two numbers.
    """
    codes = tl.inline_asm_elementwise(PACK_CODES_PTX, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4)
    return codes.to(tl.float8e4nv, bitcast=True)


@triton.jit
def first_key(row, first_offset, kv_length):
    """The first key that a row sees."""
    return tl.minimum(tl.maximum(row + first_offset, 0), kv_length)


@triton.jit
def end_of_keys(row, last_offset, kv_length):
    """The end of the keys that a row sees."""
    return tl.minimum(tl.maximum(row + last_offset + 1, 0), kv_length)


@triton.jit
def whole_blocks(first, last, offsets, kv_length, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The blocks of N keys of a tile of the rows from `first` to `last`.

    Args:
        offsets: of Call.window_offsets.

    Returns:
        begin, whole, end_whole, end: a row sees keys of the blocks begin … end - 1 only, and all rows see all keys of
        the blocks whole … end_whole - 1. There may be none of either.
    """
    end = kv_length
    end_whole = kv_length
    if CAUSAL:
        end = end_of_keys(last, offsets[1], kv_length)
        end_whole = end_of_keys(first, offsets[1], kv_length)
    end = tl.cdiv(end, N)
    end_whole = end_whole // N
    begin = 0
    whole = 0
    if WINDOW:
        begin = tl.minimum(first_key(first, offsets[0], kv_length) // N, end)
        whole = tl.minimum(tl.cdiv(first_key(last, offsets[0], kv_length), N), end)
        end_whole = tl.maximum(end_whole, whole)
    return begin, whole, end_whole, end


@triton.jit
def hide(
    x, rows, start, columns, q_length, kv_length, offsets, mask, mask_strides, WINDOW: tl.constexpr, BY_ARITHMETIC: tl.constexpr
):  # fmt: skip
    """Scores (M, N) with the mask added and -inf where `rows` (M, 1) don't see the keys start + `columns` (1, N).

    Args:
        offsets: of Call.window_offsets.
        mask: pointer to the (Sq, Sk) matrix of the tile's head, or None. Float masks hide with -inf, boolean ones with
            0. A finite number adds at least LOWEST_SCORE.
        WINDOW: rows have a first key. There is no mask then.
        BY_ARITHMETIC: don't use predicates. M x N of them would be computed ahead of the scores, and spill. It needs a
            minimum that drops NaN, as the hardware's does; NumPy's, which the interpreter uses, doesn't.
    """
    # compare columns, not keys: compilers widen the loop variable to 64 bits, which M x N comparisons must avoid
    limit = tl.minimum(rows + offsets[1], kv_length - 1) - start
    if mask is None and BY_ARITHMETIC:
        inside = (limit.to(tl.float32) + 0.5) - columns.to(tl.float32)
        if WINDOW:
            # half a key's distance inside of the window's nearer end: keys are visible up to a distance from its middle
            N: tl.constexpr = x.shape[1]
            last = tl.minimum(tl.maximum(limit, -1), N).to(tl.float32)
            first = tl.minimum(tl.maximum(rows + offsets[0] - start, 0), N).to(tl.float32)
            inside = (last - first) * 0.5 + 0.5 - tl.abs(columns.to(tl.float32) - (first + last) * 0.5)
        return tl.minimum(x, inside * float("inf"))
    elif mask is None:
        hidden = columns > limit
        if WINDOW:
            hidden |= columns < rows + offsets[0] - start
        return tl.where(hidden, -float("inf"), x)
    else:
        hidden = columns > limit
        keys = start + columns
        pointers = mask + rows.to(tl.int64) * mask_strides[2] + keys.to(tl.int64) * mask_strides[3]
        value = tl.load(pointers, mask=(rows < q_length) & (keys < kv_length), other=0)
        if value.dtype.is_floating():
            value = value.to(tl.float32)
            hidden |= value == -float("inf")
            more = value * LOG2E
            if mask.dtype.element_ty != tl.float16:  # the lowest float16 times log2 e is far from overflowing
                # the maximum also keeps the product from being fused with the sum: equal mask values must add the same
                # to all scores
                more = tl.maximum(more, LOWEST_SCORE, propagate_nan=tl.PropagateNan.ALL)
            x += more
        else:
            hidden |= value == 0
        return tl.where(hidden, -float("inf"), x)


@triton.jit
def tanh(x):
    """Hyperbolic tangent: near 0 a polynomial, whose relative error is 1e-7; else 1 - 2 / (1 + e^2x), whose error is
    2e-7."""
    z = x * x
    near = x * (1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
    far = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def cap_scores(x, shift, softcap):
    """Scores (M, N) under a soft cap, in base 2. shift: (M,), what is missing from the natural scores of a row."""
    return tanh(x * (1 / (LOG2E * softcap)) + (shift / softcap)[:, None]) * (softcap * LOG2E)


@triton.jit
def load_rows_of(numbers, rows, length):
    """A number of each of `rows` (M,); zeros if `numbers` is None. numbers: (length,), the head's."""
    if numbers is None:
        return rows.to(tl.float32) * 0.0
    else:
        return tl.load(numbers + rows, mask=rows < length, other=0.0)


@triton.jit
def add_sink(m, l, sink):
    """One more logit of each row, `sink` (M,), for scores like those of m and l (M,).

    Returns:
        m; the sums of the keys' P, and with the sink's; the factors for sums of P·V.
    """
    sink *= LOG2E
    m_new = tl.maximum(m, sink)
    alpha = tl.exp2(m - m_new)
    l *= alpha
    return m_new, l, l + tl.exp2(sink - m_new + P_OFFSET), alpha


@triton.jit
def bias_row(bias, index, row, q_length, kv_length):
    """Pointer to the score bias of a row's group of queries. index: of batch and head in (B, Hq, G, Sk rounded up), 64
    bits."""
    group = tl.minimum(row, q_length - 1) // QUERY_GROUP
    pitch = tl.cdiv(kv_length, BIAS_ALIGNMENT) * BIAS_ALIGNMENT
    return bias + (index * tl.cdiv(q_length, QUERY_GROUP) + group) * pitch


@triton.jit
def add_bias(x, bias, factor, keys, kv_length):
    """Scores (M, N) of a group of queries plus their score bias times `factor`. bias: pointer to the group's row. keys:
    (N,)."""
    return x + (tl.load(bias + keys, mask=keys < kv_length, other=0.0) * factor)[None, :]


@triton.jit
def set_nonfinite_keys(x, any_nonfinite, k, keys, stride, kv_length):
    """int8 scores (M, N) with NaN for those of `keys` (N,) that are INT8_NAN.

    If `any_nonfinite` is false, there are none. k: pointer to the head's rows.
    """
    if any_nonfinite:
        first = tl.load(k + keys.to(tl.int64) * stride, mask=keys < kv_length, other=0)
        x = tl.where((first == INT8_NAN)[None, :], float("nan"), x)
    return x


@triton.jit
def set_nonfinite_rows(l, q, rows, stride, q_length):
    """Sums (M,) of P with NaN for those of `rows` (M,) that are INT8_NAN and see a key. q: pointer to the head's
    rows."""
    first = tl.load(q + rows.to(tl.int64) * stride, mask=rows < q_length, other=0)
    return tl.where((first == INT8_NAN) & (l != 0), float("nan"), l)


@triton.jit
def permute_keys(p):
    """P with its columns in the key order of quantized V.

    In tensor-core layouts this moves nothing: it renames the accumulator's registers to the operand's (see
    fp8attn.layout).
    """
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    p = tl.reshape(p, (M, N // 16, 2, 4, 2))  # half, thread, pair
    return tl.reshape(tl.permute(p, (0, 1, 3, 2, 4)), (M, N))


@triton.jit
def log_sum_exp(m, l):
    """Natural-log LSE; -inf for rows without visible keys."""
    return (m - P_OFFSET + tl.log2(l)) / LOG2E


@triton.jit
def inverse(l):
    """1 / l; 0 for rows without visible keys."""
    return tl.where(l == 0, 0.0, 1.0 / l)


@triton.jit
def is_finite(x):
    return tl.abs(x) <= FLOAT_MAX


@triton.jit
def scale_of(largest, CODE: tl.constexpr = E4M3_MAX):
    """quantization.scale_of."""
    return tl.where(largest > 0, tl.maximum(tl.div_rn(largest, CODE), SMALLEST_SCALE), 1.0)


@triton.jit
def e4m3_code(y, NATIVE: tl.constexpr):
    """The e4m3 bytes of float32 y: to nearest even, saturating; 0x7F for NaN.

    NATIVE: the architecture has an instruction for it.
    """
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # cvt.rn.satfinite
    else:
        clamped = tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX)
        bits = clamped.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # normal numbers: round the 23-bit mantissa to 3 bits, then rebias the exponent from 127 to 7
        normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - ((127 - 7) << 23)) >> 20
        # below 2^-6 codes are multiples of 2^-9, the spacing of float32 at 2^14: one addition rounds
        subnormal = (tl.abs(clamped) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
        code = (tl.where(magnitude < ((127 - 6) << 23), subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
        return tl.where(y == y, code, E4M3_NAN)


@triton.jit
def direct_codes(y):
    """reference.direct_code: the e4m3 bytes of 2^y, y (M, N) up to P_OFFSET. Rounded to nearest even."""
    code = tl.maximum(y * 8 + (8 * 7 - CODE_ROUND), 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(y == y, (code + ROUNDER).to(tl.uint32, bitcast=True).to(tl.uint8), E4M3_NAN)


@triton.jit
def int8_code(y):
    """float32 y, at most 127 in magnitude, as int8 bytes, rounded to nearest even; INT8_NAN for NaN."""
    code = (y + ROUNDER).to(tl.uint32, bitcast=True).to(tl.uint8)  # the last bits of the sum are y in two's complement
    return tl.where(y == y, code, INT8_NAN & 0xFF)


@triton.jit
def half_of_code(code):
    """e4m3 bytes as float16, exactly, without conversion instructions."""
    code = code.to(tl.uint16)
    half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == E4M3_NAN, float("nan"), half)


@triton.jit
def operand(x, HALF: tl.constexpr):
    """Stored e4m3 as the operand that the tensor core multiplies; int8 unchanged. e4m3 is stored as bytes if the
    compiler doesn't support it."""
    if x.dtype == tl.int8:
        return x
    elif x.dtype == tl.uint8:
        return half_of_code(x)
    elif HALF:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def probabilities(p, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """float32 P as an operand: half, e4m3, or halves that hold e4m3 numbers if the tensor core is emulated."""
    if HALF:
        return p.to(tl.float16)
    elif NATIVE:
        return p.to(tl.float8e4nv)
    else:
        return half_of_code(e4m3_code(p, False))
