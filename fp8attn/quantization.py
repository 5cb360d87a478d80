"""The definition of quantization in plain torch. The fused kernels give the same bytes.

Where float32 addition depends on the order (the means), the order is part of the definition: see `lane_sum`.

Non-finite input never gives a finite answer, and spreads no further than it must:
- A scale is the largest finite magnitude divided by 256 (448 for values, 127 for int8). A mean is taken over the
  finite elements.
- A NaN or ±inf in q or k is stored as NaN, so the scores of its row or key are NaN. int8 has no NaN: the whole row
  becomes INT8_NAN.
- A non-finite key is left out of the score bias (what means of queries add to scores). Its scores are NaN without it.
- A token with a NaN or ±inf in v gets NaN in its whole *k* row, and zeros in place of these elements of v. So exactly
  the output rows that attend to the token come out NaN. A NaN in v itself would reach, through 0 · NaN, rows whose mask
  hides the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import rotation
from .ambient import product
from .layout import first_unit, padded_length, slots, units_of
from .recipe import (
    BIAS_ALIGNMENT,
    E4M3,
    E4M3_LARGEST,
    E4M3_MAX,
    E4M3_NAN,
    INT8_MAX,
    INT8_NAN,
    QUERY_GROUP,
    ROW_ALIGNMENT,
    SCALE_BLOCK,
    Granularity,
    Packed,
    ProductType,
    Quantized,
    Recipe,
)

TOKEN_CHUNK = 512
"""Tokens that one program adds up."""

LANES = 32
"""Running sums of one program. A lane sums the tokens whose index is congruent to it modulo LANES."""

SAMPLE = 128
"""Maximum number of tokens that K's mean is taken over, in sequences of more than TOKEN_CHUNK tokens."""

LARGEST_BIAS = 2.0**100
"""The score bias (over the softmax scale) is clamped to ± this. An infinite bias would hide its key."""

LARGEST_MEAN = 2.0**100
"""Means of at least this magnitude aren't removed. Below it, x - mean is finite for every finite float32 x."""

MEAN_STEP = 2.0**-5
"""V's means are rounded to multiples of this fraction of a power of two: the largest one that doesn't exceed the
channel's largest magnitude."""

MEAN_STEPS = 4.0
"""V's means below this many steps aren't removed."""

RUN = 64
"""Tokens of V whose errors cancel among themselves."""

FEEDBACK = 2.0**-3
"""Fraction of a run's accumulated rounding error that is added to the next token of V before it is rounded."""

LARGEST_CORRECTION = 2.0**-5
"""Bound of that correction as a fraction of the token's own value: a quarter to half a step of e4m3."""

ROUNDER = 1.5 * 2.0**23
"""x + ROUNDER · step - ROUNDER · step rounds float32 x to a multiple of step."""

FLOAT_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales are normal float32 numbers, so that their inverses are finite."""


def lane_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum x (…, N, D) over N in a fixed order: (…, D).

    Each of LANES lanes adds its rows, which are LANES apart, from the first on. A halving tree adds the lanes.
    """
    steps = -(-x.shape[-2] // LANES)
    padded = x.new_zeros(*x.shape[:-2], steps * LANES, x.shape[-1])
    padded[..., : x.shape[-2], :] = x
    lanes = x.new_zeros(*x.shape[:-2], LANES, x.shape[-1])
    for step in padded.unflatten(-2, (steps, LANES)).unbind(-3):
        lanes = lanes + step
    while lanes.shape[-2] > 1:
        half = lanes.shape[-2] // 2
        lanes = lanes[..., :half, :] + lanes[..., half:, :]
    return lanes.squeeze(-2)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum x (B, H, S, D) over tokens in a fixed order, (B, H, D): `lane_sum` inside every chunk of TOKEN_CHUNK tokens,
    then over the chunks."""
    return lane_sum(token_chunk_sums(x))


def token_chunk_sums(x: torch.Tensor) -> torch.Tensor:
    """`lane_sum` of every chunk of TOKEN_CHUNK tokens of x (B, H, S, D): (B, H, ceil(S / TOKEN_CHUNK), D)."""
    batch, heads, length, dim = x.shape
    token_chunks = -(-length // TOKEN_CHUNK)
    padded = x.new_zeros(batch, heads, token_chunks * TOKEN_CHUNK, dim)
    padded[:, :, :length] = x
    return lane_sum(padded.unflatten(2, (token_chunks, TOKEN_CHUNK)))


def finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    """x as float32, with non-finite elements replaced by zeros."""
    x = x.float()
    return torch.where(x.isfinite(), x, 0.0)


def value_mean(v: torch.Tensor) -> torch.Tensor:
    """Mean over tokens: (B, H, S, D) -> float32 (B, H, D). Non-finite elements count as zeros."""
    return ordered_sum(finite_or_zero(v)) * (1 / max(v.shape[2], 1))


def sample_step(length: int) -> int:
    """The sampling period: of this many tokens, one is sampled. An odd one, so that all columns of an image are."""
    return -(-length // SAMPLE) | 1


def sampled_before(position: int, length: int) -> int:
    """Number of sampled tokens before a position, in a sequence of `length` tokens."""
    return -(-position // sample_step(length))


def sample_size(length: int) -> int:
    """Number of tokens that are sampled."""
    return sampled_before(length, length)


def key_mean(k: torch.Tensor) -> torch.Tensor:
    """Mean over a sample of the tokens: (B, H, S, D) -> float32 (B, H, D). Non-finite elements count as zeros.

    Softmax doesn't change, whatever constant is subtracted. So a mean known to 9 to 15 % of a standard deviation serves
    as well as the exact one, and k is read only once. The sample is every sample_step-th token.
    """
    return mean_of_sample(k_sample(k, 0, k.shape[2]))


def k_sample(k: torch.Tensor, first: int, total: int) -> torch.Tensor:
    """The sampled tokens of a part of k, a view: (B, H, S, D) -> (B, H, N, D).

    Args:
        first: position of the part in its sequence.
        total: tokens of the sequence.
    """
    step = sample_step(total)
    return k[:, :, -first % step :: step]


def mean_of_sample(sample: torch.Tensor) -> torch.Tensor:
    """Mean of the sampled tokens (B, H, N, D): float32 (B, H, D). Its numbers are those of bfloat16, so that products
    with queries are exact."""
    return (lane_sum(finite_or_zero(sample)) * (1 / max(sample.shape[2], 1))).bfloat16().float()


def of_every_query(mean: torch.Tensor, length: int) -> torch.Tensor:
    """Means (or other values) of groups of queries, repeated for every query: (B, H, G, D) -> (B, H, length, D)."""
    return mean.repeat_interleave(QUERY_GROUP, 2)[:, :, :length]


def query_means(q: torch.Tensor) -> torch.Tensor:
    """Means of every QUERY_GROUP queries: (B, H, S, D) -> float32 (B, H, ceil(S / 64), D).

    Non-finite elements count as zeros.
    """
    batch, heads, length, dim = q.shape
    groups = -(-length // QUERY_GROUP)
    padded = q.new_zeros(batch, heads, groups * QUERY_GROUP, dim, dtype=torch.float32)
    padded[:, :, :length] = finite_or_zero(q)
    counts = (length - QUERY_GROUP * torch.arange(groups, device=q.device)).clamp(max=QUERY_GROUP)
    return removable(lane_sum(padded.unflatten(2, (groups, QUERY_GROUP))) * (1.0 / counts.float()).unsqueeze(-1))


def bias_pitch(kv_length: int) -> int:
    """Row length of Quantized.bias: kv_length rounded up to a multiple of BIAS_ALIGNMENT."""
    return -(-kv_length // BIAS_ALIGNMENT) * BIAS_ALIGNMENT


def score_bias(means: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The score bias: what means of queries add to scores, divided by the softmax scale.

    Args:
        means: float32 (B, Hq, G, D).
        keys: float32 (B, Hkv, Sk, D), rotated as the means are.

    Returns:
        float32 (B, Hq, G, Sk rounded up to a multiple of 4): zero for non-finite keys and past the last key.
    """
    batch, heads, groups, dim = means.shape
    kv_heads, length = keys.shape[1:3]
    pitch = bias_pitch(length)
    bias = means.new_empty(batch, heads, groups, pitch)
    bias[..., length:] = 0.0
    if bias.numel() == 0:
        return bias
    keys = torch.where(keys.isfinite().all(-1, keepdim=True), keys, 0.0).contiguous()
    # one head of K at a time: in a batched product, the order of summation depends on the batch size
    rows, products = means.reshape(batch, kv_heads, -1, dim), bias.view(batch, kv_heads, -1, pitch)
    for b in range(batch):
        for h in range(kv_heads):
            products[b, h, :, :length] = product(rows[b, h], keys[b, h].T)
    return bias.nan_to_num_(nan=0.0).clamp_(-LARGEST_BIAS, LARGEST_BIAS)


def with_bias(q: Quantized, k: torch.Tensor, k_quantized: Quantized) -> Quantized:
    """q, whose means were subtracted, with the bias that they add to the scores of k (B, Hkv, Sk, D). k isn't rounded
    for it."""
    assert q.mean is not None
    return replace(q, bias=score_bias(q.mean, centre(rotation.rotate(k, k_quantized.rotated), k_quantized.mean)))


def coarse(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`mean` (B, H, D) of x (B, H, S, D), rounded to a coarse grid. For a constant channel, the constant itself.

    bfloat16 values minus an arbitrary mean no longer lie symmetrically between e4m3 values, so the rounding of a
    channel gets a bias of about 3e-4 of its values. Over 16k keys that is a quarter of the error. A multiple of the
    spacing of the largest values keeps the differences on the grid of the values, ties included. Removing most of a
    mean serves as well as removing all of it.

    A mean that is small relative to the largest values is often the mean of a few hundred draws around zero. Subtracted
    from tokens with even smaller values, it would dominate them, and they would be rounded as coarsely as the mean is
    large. Language models attend to such tokens when no other token is relevant (value-state drains, arXiv:2410.13835).
    So a small mean isn't removed.
    """
    return coarse_between(mean, *extremes(x))


def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest finite elements of x (B, H, S, D) over tokens: float32 (B, H, D), (B, H, D).

    They are inf and -inf where there are none.
    """
    if x.numel() == 0:
        empty = x.new_full((*x.shape[:2], x.shape[3]), torch.inf, dtype=torch.float32)
        return empty, -empty
    x = x.float()
    return torch.where(x.isfinite(), x, torch.inf).amin(-2), torch.where(x.isfinite(), x, -torch.inf).amax(-2)


def coarse_between(mean: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """`coarse` of a mean (B, H, D), by the `extremes` of what it is the mean of."""
    largest = torch.maximum(high, -low).clamp(min=0.0)
    step = (largest.view(torch.int32) & 0x7F800000).view(torch.float32) * MEAN_STEP
    # + 0.0: -0.0 becomes +0.0, because either may come out as the minimum
    rounded = torch.where(mean.abs() < step * MEAN_STEPS, 0.0, (mean + step * ROUNDER) - step * ROUNDER)
    return torch.where(low == high, low + 0.0, rounded)


def removable(mean: torch.Tensor) -> torch.Tensor:
    """`mean`, or zero where it overflowed or is LARGEST_MEAN or more.

    Attention is the same whatever constant is removed.
    """
    return torch.where(mean.abs() < LARGEST_MEAN, mean, 0.0)


def centre(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """x - mean in float32: finite where x is finite, NaN elsewhere."""
    x = x.float()
    y = x if mean is None else x - mean.unsqueeze(-2)
    return torch.where(x.isfinite(), y, torch.nan)


def scale_of(largest: torch.Tensor, code: float = E4M3_MAX) -> torch.Tensor:
    """The scale that maps `largest` to `code`; 1 where all elements are zero."""
    # divide by a tensor: on GPUs, torch replaces division by a number with multiplication by its inverse
    scale = largest / torch.full_like(largest, code)
    return torch.where(largest > 0, scale.clamp(min=SMALLEST_SCALE), 1.0)


def encode(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y / scale rounded to e4m3, to nearest even, saturating. NaN becomes 0x7F."""
    data = (y * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return torch.where(y.isnan(), E4M3_NAN, data.view(torch.uint8)).view(E4M3)


def feedback(length: int) -> float:
    """The feedback factor: FEEDBACK, or 0 for up to TOKEN_CHUNK tokens, which one launch quantizes without time for
    feedback."""
    return FEEDBACK if length > TOKEN_CHUNK else 0.0


def encode_values(y: torch.Tensor, scale: torch.Tensor, gain: float | None = None) -> torch.Tensor:
    """Round V's y / scale to e4m3 so that errors of neighbouring tokens cancel. y: (B, H, S, D); scale: broadcastable
    to (B, H, D).

    An output is a weighted sum of V's rows, and its error is the weighted sum of their errors. With rounding to
    nearest, these errors are independent. Softmax's weights are positive, so their common part adds errors up; errors
    whose sum over every RUN of tokens is small cancel in that part. Therefore FEEDBACK times the residual of the
    earlier tokens in the run is added to a token before it is rounded. This makes a token's own error 2 % larger (Spang
    and Schultheiss, "Reduction of Quantizing Noise by Use of Feedback", 1962; their filter has one zero, this one is
    damped and restarts with every run, so that runs are independent). The part of the output's error that comes from V
    falls by 17 % for N(0, 1) scores, and by 57 % where weights vary slowly. The correction is bounded by
    LARGEST_CORRECTION: otherwise, large tokens would add errors to tokens of small values, which get attention when no
    other token is relevant.

    All arithmetic is in half precision, because hardware processes two channels of it at a time. Every operation
    rounds; the residual is rounded once per token. No code is negative zero.

    `gain`: the feedback factor; None for that of a sequence of y's length.
    """
    gain = feedback(y.shape[2]) if gain is None else gain
    z = (y * (1.0 / scale).unsqueeze(-2)).half()
    batch, heads, length, dim = z.shape
    padded = z.new_zeros(batch, heads, -(-length // RUN) * RUN, dim)
    padded[:, :, :length] = z
    runs = padded.unflatten(2, (-1, RUN))
    codes = torch.empty_like(runs, dtype=E4M3)
    residual = torch.zeros_like(runs[..., 0, :])
    for token, x in enumerate(runs.unbind(-2)):
        correction = torch.minimum(residual.abs(), x.abs() * LARGEST_CORRECTION).copysign(residual)
        code = (x + correction).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
        residual = (residual.float() + (x - code.half()).float() * gain).half()
        codes[..., token, :] = code
    return codes.flatten(2, 3)[:, :, :length]


def encode_int8(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y / scale, at most 127 in magnitude, rounded to int8, to nearest even. NaN becomes INT8_NAN."""
    return torch.where(y.isnan(), INT8_NAN, (y * (1.0 / scale)).round()).to(torch.int8)


def row_type(qk: ProductType) -> torch.dtype:
    """The dtype in which q and k are stored."""
    return torch.int8 if qk == "int8" else E4M3


def largest_code(qk: ProductType) -> float:
    """The code of the largest element under a scale of q or k."""
    return INT8_MAX if qk == "int8" else E4M3_LARGEST


def empty_rows(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """An uninitialised tensor for a quantized x (B, H, S, D). Its rows start at multiples of ROW_ALIGNMENT bytes.

    It is stored as (B, S, H, …) if x is, because an output is stored in the order of its queries.
    """
    batch, heads, length, dim = x.shape
    pitch = -(-dim // ROW_ALIGNMENT) * ROW_ALIGNMENT
    if x.stride(1) < x.stride(2):
        rows = x.new_empty(batch, length, heads, pitch, dtype=dtype).transpose(1, 2)
    else:
        rows = x.new_empty(batch, heads, length, pitch, dtype=dtype)
    return rows if pitch == dim else rows[..., :dim]


def scale_shape(granularity: Granularity, batch: int, heads: int, length: int, dim: int) -> tuple[int, int, int]:
    """Shape of the scales of a (B, H, S, D) tensor."""
    match granularity:
        case "tensor":
            return 1, 1, 1
        case "head":
            return batch, heads, 1
        case "block":
            return batch, heads, -(-length // SCALE_BLOCK)
        case "token":
            return batch, heads, length
        case "channel":
            return batch, heads, dim


def row_scales(scale: torch.Tensor, granularity: Granularity, length: int) -> torch.Tensor:
    """Scales of q or k, one per row: (B, H, S), or broadcastable to it."""
    if granularity == "block":
        return scale.repeat_interleave(SCALE_BLOCK, -1)[..., :length]
    return scale


def _largest(y: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Largest finite magnitude of y (B, H, S, D) under each scale, in the scales' shape."""
    magnitude = y.abs().nan_to_num(nan=0.0)
    batch, heads, length, dim = y.shape
    shape = scale_shape(granularity, batch, heads, length, dim)
    if y.numel() == 0:
        return y.new_zeros(shape)
    if granularity == "tensor":
        return magnitude.amax().view(shape)
    if granularity == "head":
        return magnitude.amax((-2, -1)).view(shape)
    if granularity == "channel":
        return magnitude.amax(-2)
    rows = magnitude.amax(-1)
    if granularity == "token":
        return rows
    blocks = shape[-1]
    padded = rows.new_zeros(batch, heads, blocks * SCALE_BLOCK)
    padded[..., :length] = rows
    return padded.view(batch, heads, blocks, SCALE_BLOCK).amax(-1)


def record_nonfinite(scale: torch.Tensor, nonfinite: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Scales of int8 keys that record the non-finite keys `nonfinite`, bool (B, H, S).

    A `token` scale becomes NaN. Any other scale becomes negative if it covers a non-finite key.
    """
    if granularity == "token":
        return scale.masked_fill(nonfinite, torch.nan)
    return torch.where(_largest(nonfinite.float().unsqueeze(-1), granularity) > 0, -scale, scale)


def _quantize_rows(
    x: torch.Tensor,
    granularity: Granularity,
    mean: torch.Tensor | None,
    nonfinite: torch.Tensor | None,
    part: int,
    factor: float,
    qk: ProductType,
) -> Quantized:
    """Quantize rows of q or k, (B, H, S, D).

    Args:
        x: (B, H, S, D), any float dtype.
        granularity: what one scale covers.
        mean: float32 (B, H, D) to subtract, in the rotated basis; or None.
        nonfinite: bool (B, H, S), keys whose values are non-finite; None for queries.
        part: number of channels that are rotated together.
        factor: a power of two by which the stored scales are multiplied.
        qk: type of the codes.
    """
    length = x.shape[2]
    y = centre(rotation.rotate(x, part), mean)
    largest = _largest(y, granularity)
    scale = scale_of(largest, largest_code(qk))
    kept = torch.where(largest > 0, scale * factor, 1.0)
    hidden = y.isnan().any(-1) if qk == "int8" else torch.zeros_like(y[..., 0], dtype=torch.bool)
    if nonfinite is not None:
        hidden = hidden | nonfinite
        if qk == "int8":
            kept = record_nonfinite(kept, hidden, granularity)
    y = y.masked_fill(hidden.unsqueeze(-1), torch.nan)
    data = empty_rows(x, row_type(qk))
    data.copy_((encode_int8 if qk == "int8" else encode)(y, row_scales(scale, granularity, length).unsqueeze(-1)))
    return Quantized(data, kept, granularity, "rows", length, mean, part)


def without_means(q: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (B, H, S, D) minus the means of their groups, in float32, and the means as `Quantized.mean` holds them.

    These are rotated if the recipe says so.
    """
    means = query_means(q)
    stored = rotation.rotate_queries(means, rotation.part_of(q.shape[-1], recipe.rotate))
    return q.float() - of_every_query(means, q.shape[2]), stored


def quantize_q(q: torch.Tensor, recipe: Recipe) -> Quantized:
    """Quantize queries (B, H, S, D) of any float dtype. Smoothed queries come without `bias`."""
    part = rotation.part_of(q.shape[-1], recipe.rotate)
    q, means = without_means(q, recipe) if recipe.smooth_q else (q, None)
    return replace(_quantize_rows(q, recipe.q, None, None, part, max(part, 1), recipe.qk), mean=means)


@dataclass(frozen=True, eq=False)
class Statistics:
    """What the quantization of keys and values takes from all tokens of a sequence.

    Attributes:
        k_mean: float32 (B, H, D), in the rotated basis, or None.
        v_mean: float32 (B, H, Dv), or None.
        v_scale: float32, in the shape of V's scales.
    """

    k_mean: torch.Tensor | None
    v_mean: torch.Tensor | None
    v_scale: torch.Tensor


@dataclass(frozen=True, eq=False)
class ChunkStatistics:
    """What is measured of every token chunk of values (B, H, S, Dv).

    Attributes:
        sums: float32 (B, H, ceil(S / 512), Dv), sums of finite elements over tokens.
        extremes: float32 (B, H, ceil(S / 512), 2, Dv), their minima and maxima; inf and -inf where there are none.
        careful: what a kernel that quantizes must be told of chunks that are incomplete or hold a non-finite element;
            None if that wasn't measured. Of Triton's kernels int32 (B, H, ceil(S / 512)), nonzero for such chunks; of
            the CUDA kernel uint8 (B, H, ceil(S / 512), bytes).
    """

    sums: torch.Tensor
    extremes: torch.Tensor
    careful: torch.Tensor | None = None


def chunk_shapes(v: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of ChunkStatistics.sums and .extremes of v (B, H, S, Dv)."""
    batch, heads, length, dim = v.shape
    chunks = -(-length // TOKEN_CHUNK)
    return (batch, heads, chunks, dim), (batch, heads, chunks, 2, dim)


def chunk_statistics(v: torch.Tensor) -> ChunkStatistics:
    """The statistics of the token chunks of v (B, H, S, Dv)."""
    chunks = [extremes(chunk) for chunk in v.split(TOKEN_CHUNK, 2) if chunk.shape[2]]
    empty = v.new_empty(*v.shape[:2], 0, 2, v.shape[3], dtype=torch.float32)
    found = torch.stack([torch.stack(pair, 2) for pair in chunks], 2) if chunks else empty
    return ChunkStatistics(token_chunk_sums(finite_or_zero(v)), found)


@dataclass(frozen=True, eq=False)
class PartialStatistics:
    """What a part of a sequence, consecutive tokens, contributes to its `Statistics`.

    Attributes:
        k_sample: (B, H, N, D), the part's tokens in the sample that K's mean is taken over, in k's dtype.
        v_sums, v_extremes: `sums` and `extremes` of the part's ChunkStatistics.
    """

    k_sample: torch.Tensor
    v_sums: torch.Tensor
    v_extremes: torch.Tensor


def partial_statistics(k: torch.Tensor, v: torch.Tensor, first: int, total: int) -> PartialStatistics:
    """The statistics of a part of a sequence: k (B, H, S, D), v (B, H, S, Dv).

    Args:
        first: position of the part in the sequence.
        total: tokens of the sequence.
    """
    chunks = chunk_statistics(v)
    return PartialStatistics(k_sample(k, first, total), chunks.sums, chunks.extremes)


def statistics(parts: Sequence[PartialStatistics], total: int, recipe: Recipe) -> Statistics:
    """The statistics of a sequence of `total` tokens, from those of its parts in their order.

    They are the same for any division into parts that begin at multiples of TOKEN_CHUNK tokens. Otherwise the order in
    which float32 sums of V are added depends on the division.
    """
    k_mean = v_mean = None
    if recipe.smooth_k:
        sample = torch.cat([part.k_sample for part in parts], 2)
        k_mean = removable(rotation.rotate(mean_of_sample(sample), rotation.part_of(sample.shape[3], recipe.rotate)))
    chunks = torch.cat([part.v_extremes for part in parts], 2)
    nothing = chunks.new_full((*chunks.shape[:2], chunks.shape[4]), torch.inf)
    low, high = (chunks[:, :, :, 0].amin(2), chunks[:, :, :, 1].amax(2)) if chunks.numel() else (nothing, -nothing)
    if recipe.smooth_v:
        mean = lane_sum(torch.cat([part.v_sums for part in parts], 2)) * (1 / max(total, 1))
        v_mean = removable(coarse_between(mean, low, high))
    # rounding is monotonic, so the extremes have the largest differences
    centred = (high, low) if v_mean is None else (high - v_mean, low - v_mean)
    largest = torch.maximum(centred[0], -centred[1]).clamp(min=0.0)
    if recipe.v == "head":
        largest = largest.amax(-1, keepdim=True)
    elif recipe.v == "tensor":
        largest = (largest.amax() if largest.numel() else largest.new_zeros(())).view(1, 1, 1)
    return Statistics(k_mean, v_mean, scale_of(largest))


def quantize_k(k: torch.Tensor, nonfinite: torch.Tensor, mean: torch.Tensor | None, recipe: Recipe) -> Quantized:
    """Quantize keys (B, H, S, D) of any float dtype, of which `nonfinite`, bool (B, H, S), have non-finite values.

    `mean`: float32 (B, H, D), rotated, is subtracted; or None.
    """
    return _quantize_rows(k, recipe.k, mean, nonfinite, rotation.part_of(k.shape[-1], recipe.rotate), 1.0, recipe.qk)


def quantize_kv(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, given: Statistics | None = None) -> tuple[Quantized, Quantized]:
    """Quantize keys (B, H, S, D) and values (B, H, S, Dv) together, of any float dtypes.

    Args:
        given: the statistics of the sequence that these tokens are a part of. None: they are the whole sequence.
    """
    length = v.shape[2]
    found = statistics([partial_statistics(k, v, 0, length)], length, recipe) if given is None else given
    nonfinite = ~v.isfinite().all(-1)
    k_quantized = quantize_k(k, nonfinite, found.k_mean, recipe)
    y = centre(v, found.v_mean).nan_to_num(nan=0.0)
    rows = encode_values(y, found.v_scale)
    return k_quantized, Quantized(values_layout(rows), found.v_scale, recipe.v, "values", length, found.v_mean)


def quantize(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, given: Statistics | None = None
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """Quantize q, or k and v, or all three. An operand that isn't given comes back as None. A smoothed q has a `bias`
    if k is given. `given`: as of `quantize_kv`."""
    q_quantized = None if q is None else quantize_q(q, recipe)
    if k is None or v is None:
        return q_quantized, None, None
    k_quantized, v_quantized = quantize_kv(k, v, recipe, given)
    if q_quantized is not None and recipe.smooth_q:
        q_quantized = with_bias(q_quantized, k, k_quantized)
    return q_quantized, k_quantized, v_quantized


def empty_packed(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed) -> tuple[Quantized, Quantized]:
    """Uninitialised results of `quantize_packed`."""
    heads, pages = k.shape[1], units_of(packed, SCALE_BLOCK)

    def numbers(there: bool, *shape: int) -> torch.Tensor | None:
        return k.new_empty(shape, dtype=torch.float32) if there else None

    scale, v_scale = numbers(True, 1, heads, packed.tokens if recipe.k == "token" else pages), numbers(True, packed.sequences, heads, v.shape[3])
    assert scale is not None and v_scale is not None
    k_mean, v_mean = (numbers(there, packed.sequences, heads, x.shape[3]) for there, x in ((recipe.smooth_k, k), (recipe.smooth_v, v)))
    part, rows = rotation.part_of(k.shape[3], recipe.rotate), empty_rows(k, row_type(recipe.qk))
    values = v.new_empty(1, heads, v.shape[3], pages * SCALE_BLOCK, dtype=E4M3)
    return (
        Quantized(rows, scale, recipe.k, "rows", packed.tokens, k_mean, part, packed=packed),
        Quantized(values, v_scale, recipe.v, "values", packed.tokens, v_mean, packed=packed),
    )


def sequences_of(x: Quantized) -> list[Quantized]:
    """The sequences of a packed operand, each as if it were alone. Rows, pages, scales and means are views."""
    packed, found = x.packed, []
    assert packed is not None
    for sequence, (begin, length) in enumerate(packed.spans()):
        page = first_unit(begin, sequence, SCALE_BLOCK)
        pages = slice(page, page + padded_length(length) // SCALE_BLOCK)
        tokens, own = slice(begin, begin + length), slice(sequence, sequence + 1)
        mean = None if x.mean is None else x.mean[own]
        if x.layout == "values":
            data, scale = x.data[..., SCALE_BLOCK * pages.start : SCALE_BLOCK * pages.stop], x.scale[own]
        else:
            data, scale = x.data[:, :, tokens], x.scale[..., tokens if x.granularity == "token" else pages]
        found.append(replace(x, data=data, scale=scale, length=length, mean=mean, packed=None))
    return found


def quantize_packed(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed) -> tuple[Quantized, Quantized]:
    """Quantize packed keys (1, H, T, D) and values (1, H, T, Dv): each sequence as `quantize_kv` does.

    Pages without tokens, and tokens that are in no sequence, are zero.
    """
    results = empty_packed(k, v, recipe, packed)
    for x in results:
        for tensor in (x.data, x.scale, x.mean):
            if tensor is not None:
                tensor.view(torch.uint8 if tensor.dtype == E4M3 else tensor.dtype).zero_()
    for (begin, length), *parts in zip(packed.spans(), *map(sequences_of, results), strict=True):
        tokens = slice(begin, begin + length)
        for part, alone in zip(parts, quantize_kv(k[:, :, tokens], v[:, :, tokens], recipe), strict=True):
            part.data.copy_(alone.data)
            part.scale.copy_(alone.scale)
            if part.mean is not None and alone.mean is not None:
                part.mean.copy_(alone.mean)
    return results


def values_layout(rows: torch.Tensor) -> torch.Tensor:
    """e4m3 (B, H, S, D) -> (B, H, D, S_padded): transposed, keys permuted inside groups of 16, zeros past the end."""
    batch, heads, length, dim = rows.shape
    padded = torch.zeros(batch, heads, padded_length(length), dim, dtype=torch.uint8, device=rows.device)
    padded[:, :, :length] = rows.view(torch.uint8)
    return padded[:, :, slots(padded.shape[2], rows.device)].transpose(-2, -1).contiguous().view(E4M3)


def rows_layout(values: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse of `values_layout`: (B, H, D, S_padded) -> (B, H, S, D)."""
    rows = torch.empty_like(values.view(torch.uint8).transpose(-2, -1), memory_format=torch.contiguous_format)
    rows[:, :, slots(values.shape[-1], values.device)] = values.view(torch.uint8).transpose(-2, -1)
    return rows[:, :, :length].view(E4M3)


def import_values(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The user's own e4m3 values (B, H, S, D) in the layout of quantized V, and the tokens that hold a NaN.

    Returns:
        data (B, H, D, S_padded) with zeros in place of NaN, and a bool (B, H, S).
    """
    code = v.view(torch.uint8)
    is_nan = (code & E4M3_NAN) == E4M3_NAN
    return values_layout(code.masked_fill(is_nan, 0).view(E4M3)), is_nan.any(-1)


def with_nan_scales(k: Quantized, tokens: torch.Tensor) -> Quantized:
    """k with one scale per token, NaN for `tokens` (bool (B, H, S)): output rows that attend to these come out NaN."""
    scale = row_scales(k.scale, k.granularity, k.length).expand(tokens.shape).masked_fill(tokens, torch.nan)
    return Quantized(k.data, scale, "token", "rows", k.length, k.mean)


def token_means(mean: torch.Tensor, length: int) -> torch.Tensor:
    """`Quantized.mean` for `length` tokens, broadcastable to (B, H, S, D)."""
    return of_every_query(mean, length) if mean.dim() == 4 else mean.unsqueeze(-2)


def numbers(x: Quantized) -> torch.Tensor:
    """The codes of quantized rows as float32 (B, H, S, D), without their scales; NaN where they are INT8_NAN."""
    return torch.where(x.data == INT8_NAN, torch.nan, x.data.float()) if x.data.dtype == torch.int8 else x.data.float()


def dequantize(x: Quantized) -> torch.Tensor:
    """The values (B, H, S, D) that `x` represents, in float32, with the mean added back."""
    if x.layout == "rows":
        # 127 times a scale that was rounded up may exceed the largest float32
        y = (numbers(x) * row_scales(x.multiplier, x.granularity, x.length).unsqueeze(-1)).clamp(-FLOAT_MAX, FLOAT_MAX)
    else:
        y = rows_layout(x.data, x.length).float() * x.scale.unsqueeze(-2)
    return y if x.mean is None else y + token_means(x.mean, x.length)


def dequantize_packed(x: Quantized) -> torch.Tensor:
    """`dequantize` of each sequence of a packed operand: (1, H, T, D), zeros where there is no sequence."""
    assert x.packed is not None
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for (begin, length), alone in zip(x.packed.spans(), sequences_of(x), strict=True):
        y[:, :, begin : begin + length] = dequantize(alone)
    return y
