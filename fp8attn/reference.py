"""The two oracles, and the combination of partial results.

`attention` is exact attention in float32 or float64. `pipeline` models the kernels: it takes the same quantized inputs,
walks the same key blocks and rounds P in the same place. A kernel differs from it by a few float32 roundings only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from . import rotation
from .ambient import product
from .quantization import numbers, of_every_query, row_scales, rows_layout
from .recipe import E4M3, E4M3_NAN, ComputeType, Packed, Quantized

Causal = Literal["none", "top_left", "bottom_right"]
"""What a window is relative to; `none`: every row sees all keys."""

Window = tuple[int, int]
"""(left, right): a row sees so many keys before the key that it is aligned to, and so many after it, and that key. -1
is unlimited."""

CAUSAL_WINDOW: Window = (-1, 0)
"""The window of a causal mask."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """Which keys a query of a cache sees, and what is done to its scores.

    Attributes:
        softmax_scale: factor of the scores.
        window: (left, right): a query at position p sees the keys p - left to p + right; -1 for no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: float32 (Hq,), a logit beside each row's scores, or None.
    """

    softmax_scale: float
    window: Window = CAUSAL_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


LOG2E = math.log2(math.e)
P_OFFSET = 8.0
"""P is computed as 2^(score - m + 8), where m is the largest score of its key block. So the largest P is 256, below
e4m3's maximum of 448, and P down to 2^-14 of the largest stay normal numbers."""

FALL = 64.0
"""How far m may be below the row's largest score so far. It keeps sums of P in float32's range."""

LARGEST_FACTOR = 2.0**100
"""Scale factors of scores are clamped to 2^±100, where their products with any dot product of e4m3 or int8 are
finite."""

LARGEST_SCORE = 2.0**20
"""Float32 rounds scores below this by less than a sixteenth. From it on, a rounded maximum and an unrounded product
differ by more than a code (`direct_code`) of P has room for."""

LOWEST_SCORE = -torch.finfo(torch.float32).max
"""The lowest value that an additive mask adds to a score in base 2. Only -inf hides a key. torch.finfo(dtype).min times
log2 e is beyond float32, so every finite number below -2.3587e38 adds this value. A score is rounded off next to it: a
row with no higher score weighs all its keys alike, as PyTorch does."""

CHUNK_ELEMENTS = 1 << 25
"""Number of scores that the exact oracle holds at a time."""


def causal_offset(causal: Causal, q_length: int, kv_length: int) -> int:
    """The causal offset: row i sees keys j <= i + offset. Without a causal mask the offset is past the last key."""
    return {"none": kv_length, "top_left": 0, "bottom_right": kv_length - q_length}[causal]


def window_offsets(causal: Causal, window: Window, q_length: int, kv_length: int) -> tuple[int, int]:
    """(first, last): row i sees the keys j with i + first <= j <= i + last.

    Where a side has no limit, the offset is past the first key of every row, or past the last.
    """
    if causal == "none":
        return -q_length, kv_length
    aligned = causal_offset(causal, q_length, kv_length)
    left, right = window
    first = -q_length if left < 0 else max(aligned - left, -q_length)
    return first, kv_length if right < 0 else min(aligned + right, kv_length)


def simplified(causal: Causal, window: Window, q_length: int, kv_length: int) -> tuple[Causal, Window]:
    """A window with its alignment; without one, `none`, if every row sees all keys. Then CTAs may split the keys."""
    first, last = window_offsets(causal, window, q_length, kv_length)
    return ("none", CAUSAL_WINDOW) if q_length - 1 + first <= 0 and last >= kv_length - 1 else (causal, window)


def hidden_keys(
    attn_mask: torch.Tensor | None, causal: Causal, rows: torch.Tensor, keys: torch.Tensor, q_length: int, kv_length: int,
    window: Window = CAUSAL_WINDOW,
) -> torch.Tensor:  # fmt: skip
    """Hidden keys: bool, broadcastable to (B, H, len(rows), len(keys)), True where the row doesn't see the key.

    attn_mask is already cut to these rows and keys. An additive mask hides a key with -inf.
    """
    first, last = window_offsets(causal, window, q_length, kv_length)
    rows = rows.unsqueeze(-1)
    hidden = (keys > rows + last) | (keys < rows + first)
    if attn_mask is not None:
        hidden = hidden | (~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf)
    return hidden


def _per_query_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, Hkv, …) -> (B, Hq, …): every key/value head serves a run of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _cut(attn_mask: torch.Tensor | None, rows: slice, keys: slice) -> torch.Tensor | None:
    """attn_mask cut to these rows and keys. A dimension of 1 is broadcast, not cut."""
    if attn_mask is None:
        return None
    attn_mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
    return attn_mask if attn_mask.shape[-1] == 1 else attn_mask[..., keys]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    causal: Causal = "none",
    scoring: Scoring | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of (B, H, S, D) tensors, computed in `dtype`.

    NaN and ±inf are treated as in the kernels: exactly the rows that attend to one come out NaN.

    Args:
        causal: what the window of `scoring` is relative to.
        scoring: a soft cap acts before attn_mask is added, and for sinks see `with_sinks`; None: scores times D^-0.5.

    Returns:
        out (B, Hq, Sq, Dv) and the natural-log LSE (B, Hq, Sq) in `dtype`; zeros and -inf for rows without visible
        keys.
    """
    batch, heads, q_length, dim = q.shape
    kv_length = k.shape[2]
    scoring = Scoring(dim**-0.5) if scoring is None else scoring
    sinks = scoring.sinks
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = q.new_zeros(batch, heads, q_length, v.shape[-1])
    lse = q.new_full((batch, heads, q_length), -math.inf)
    if out.numel() == 0 or kv_length == 0:
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
    nan = q.new_tensor(torch.nan)
    q = torch.where(q.isfinite(), q, nan)
    k = torch.where((k.isfinite().all(-1) & v.isfinite().all(-1)).unsqueeze(-1), k, nan)
    v = v.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    k, v = _per_query_head(k, heads), _per_query_head(v, heads)
    keys = torch.arange(kv_length, device=q.device)
    chunk = max(1, CHUNK_ELEMENTS // (batch * heads * kv_length))
    for start in range(0, q_length, chunk):
        rows = torch.arange(start, min(start + chunk, q_length), device=q.device)
        part = slice(start, start + len(rows))
        mask = _cut(attn_mask, part, slice(None))
        scores = capped(product(q[:, :, part], k.transpose(-2, -1)) * scoring.softmax_scale, scoring.softcap)
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask.to(dtype)
        scores = scores.masked_fill(hidden_keys(mask, causal, rows, keys, q_length, kv_length, scoring.window), -math.inf)
        largest = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(-1, keepdim=True)
        p = (scores - largest.masked_fill(largest == -math.inf, 0.0)).exp()
        total = p.sum(-1, keepdim=True)
        out[:, :, part] = product(p, v) / total.masked_fill(total == 0, 1.0)
        lse[:, :, part] = (largest + total.log()).squeeze(-1)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def of_each_sequence(
    q: torch.Tensor, value_dim: int, packed: Packed, attend: Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries (1, Hq, T, D), one sequence after the other: the definition, whatever `attend` is.

    Args:
        attend: of a sequence's number and its rows, out (1, Hq, Sq, Dv) and LSE (1, Hq, Sq).

    Returns:
        out (1, Hq, T, Dv) and LSE (1, Hq, T), float32 or float64 as `attend`'s; zeros and -inf for rows of no sequence.
    """
    results = [(slice(begin, begin + length), *attend(i, slice(begin, begin + length))) for i, (begin, length) in enumerate(packed.spans())]
    dtype = results[0][1].dtype if results else torch.float32
    out = torch.zeros(*q.shape[:3], value_dim, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    for rows, part, part_lse in results:
        out[:, :, rows], lse[:, :, rows] = part, part_lse
    return out, lse


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Scores (natural, not in base 2) under a soft cap; 0 caps nothing."""
    return softcap * (scores / softcap).tanh() if softcap else scores


def capped_base2(x: torch.Tensor, softcap: float) -> torch.Tensor:
    """Scores in base 2 under a soft cap; 0 caps nothing."""
    return torch.tanh(x / (LOG2E * softcap)) * (softcap * LOG2E) if softcap else x


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose rows have one more logit each, which takes weight and has no value.

    Args:
        out: (B, Hq, Sq, Dv), normalised.
        lse: (B, Hq, Sq), natural.
        sinks: (Hq,). -inf is none; +inf counts as NaN.

    Returns:
        out and the LSE that includes the sink. A row without visible keys has zeros and the sink.
    """
    sinks = sinks.to(lse.dtype)
    sinks = torch.where(sinks == math.inf, math.nan, sinks)[:, None]
    total = torch.logaddexp(lse, sinks)
    weight = (lse - total.masked_fill(total == -math.inf, 0.0)).exp()
    return out * weight.unsqueeze(-1), total


def lowest(m: torch.Tensor) -> torch.Tensor:
    """The lower bound of m (the score that P is relative to) for the next key block, from the last block's m.

    m of the next block is the larger of this bound and the block's largest score. In online softmax (Milakov and
    Gimelshein, arXiv:1805.02867), the bound is the largest score so far. But the sums are multiplied by 2^(m - m_new)
    in any case, and this factor may exceed 1. If m may also fall with the scores of its blocks, P are as large as their
    block allows, and so have the smallest rounding error. After a sink far above all other keys, e4m3 would hold these
    P as subnormal numbers or as zero.

    If m >= 0, it falls to 0 at most, because for such scores the kernels compare floats as integers. If m < 0, it falls
    to -FALL at most. Beyond ±FALL, m only grows.

    Args:
        m: m of the last block, in base 2; -inf if no key is visible so far.
    """
    return torch.where(m.abs() >= FALL, m, torch.where(m >= 0, torch.zeros_like(m), -FALL))


CODE_ROUND = 0.458
"""Mean of 8 (log2(1 + f) - f): how much too high, in code steps, e4m3 codes linear in the exponent are."""


def direct_code(y: torch.Tensor) -> torch.Tensor:
    """2^y as the e4m3 number whose code is nearest to 8 (y + 7).

    2^f is approximated by 1 + f, shifted so that the error is zero on average. This is Schraudolph's linear
    approximation per octave (Neural Computation 11, 1999), on 8-bit codes. y is at most 8.
    """
    code = (8 * (y + 7) - CODE_ROUND).round().clamp(min=0)
    return torch.where(y.isnan(), E4M3_NAN, code.nan_to_num(0.0)).to(torch.uint8).view(E4M3).float()


CODE = 2.0**-24
"""The smallest subnormal float16: a code times this has the code's bits."""

CAP_CODES = 192.0
"""`capped_codes`: code steps by which P is lower at the distance 1, if its slope stays that of the largest score."""

CAP_CUBIC = 53.0 / CAP_CODES
"""`capped_codes`: the cubic term counts as a quadratic one, as large as it is at this distance. The rest of it is below
an eighth of its size at 60 code steps, up to there."""

CAP_LEAST = 20.0
"""`capped_codes`: the least cap of a row that takes no tanh. Below, the quadratic is off by more than eight code steps
where P is a thousandth of the largest."""

CAP_LEAST_FALL = 0.75
"""`capped_codes`: the least slope of a row that takes no tanh, over CAP_CODES."""

CAP_LEAST_CURVE = -0.3
"""`capped_codes`: the least quadratic term of such a row. At the distance 1, codes have fallen by 134 then. That is the
distance of a hidden key, and 120 is the largest code."""

CAP_LARGEST_ORIGIN = 1024.0
"""`capped_codes`: bound of the distance of a row's largest score from zero. Float32 distances are exact enough then."""


def half_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c of float16, rounded once."""
    return (a.double() * b.double() + c.double()).half()


def capped_codes(scores: torch.Tensor, mean: torch.Tensor | float, m: torch.Tensor, softcap: float) -> torch.Tensor:
    """P under a soft cap as the e4m3 numbers of the Hopper kernel, most of which take no tanh.

    With u = score / softcap and C = softcap · log2 e, P's code is 8 (C tanh u - m + 15) by `direct_code`. Let t be tanh
    of a row's largest u in the block, and G = 8 C (1 - t²) the code's slope there. At a distance of x / G from that u,
    the code is lower by x + t x² / G + (t² - 1/3) x³ / G², and by terms of higher order. With d = x / CAP_CODES, this
    is CAP_CODES (d + second d²). Far below, where that is not accurate, P is zero, and d is clamped to 1.

    The sums are taken in float16 of 2^-24 times the code. Below 1024, such numbers are subnormal: sums are rounded to
    integers, and the bits of the last one are the code.

    Rows whose G is small, because scores are near the cap, or the cap is small, take tanh of every score.

    Args:
        scores: (…, N), natural, over the cap, -inf for hidden keys.
        mean: (…, 1), what K's mean adds to them.
        m: (…, 1), what P is relative to, in base 2.
    """
    largest = torch.where(scores.isnan(), -math.inf, scores).amax(-1, keepdim=True)
    sees = largest > -math.inf
    at = torch.where(sees, largest, torch.zeros_like(largest) + mean)
    t = at.tanh()
    derivative, by_tanh = 1 - t * t, softcap * 8 * LOG2E / CAP_CODES
    fall = derivative * by_tanh
    score = (t * (softcap * LOG2E) - m.masked_fill(m == -math.inf, 0.0)).masked_fill(~sees, -math.inf)
    code = (score * 8 + (8 * (P_OFFSET + 7) - CODE_ROUND)).clamp(min=0.0)
    top = code.ceil()
    above = (top - code) / CAP_CODES
    second = (t + CAP_CUBIC * (2 / 3 - derivative) / fall) / fall
    fits = (softcap >= CAP_LEAST) & (fall >= CAP_LEAST_FALL) & (second >= CAP_LEAST_CURVE) & (((at - mean) * fall + above).abs() < CAP_LARGEST_ORIGIN)
    d = torch.where(fits, (at - scores) * fall, (t - scores.tanh()) * by_tanh) + above
    d = d.masked_fill(scores == -math.inf, 1.0).clamp(0.0, 1.0).half()
    second = (-CAP_CODES * CODE * second).masked_fill(~fits, 0.0).half()
    sums = half_fma(d, second, torch.full_like(second, -CAP_CODES * CODE))
    codes = half_fma(d, sums, (CODE * top).half()).float() / CODE
    return torch.where(codes.isnan(), E4M3_NAN, codes.clamp(min=0.0).nan_to_num(0.0)).to(torch.uint8).view(E4M3).float()


TENSOR_CORE_BITS = 13
"""Mantissa bits of the terms that Hopper's FP8 tensor cores add in one instruction. Measured, see `chained`."""

TENSOR_CORE_TERMS = 32
"""FP8 products that one instruction adds to an accumulator (PTX ISA, wgmma, K of 8-bit types)."""


def chained(acc: torch.Tensor, p: torch.Tensor, v: torch.Tensor, bits: int) -> torch.Tensor:
    """acc + p @ v on a tensor core with narrow accumulators: acc (…, M, D), p (…, M, N), v (…, N, D).

    An instruction aligns the accumulator and 32 products to the largest of them, and truncates each `bits` bits below.
    With 13 bits, this model gives the loss that was measured on an H100 for softmax-like sums of |N(0, 1)| in one
    chain: 1.7 % at 1k keys, 13 % at 8k, 48 % at 64k.
    """
    for start in range(0, p.shape[-1], TENSOR_CORE_TERMS):
        part = slice(start, start + TENSOR_CORE_TERMS)
        terms = p[..., part].unsqueeze(-1) * v[..., part, :].unsqueeze(-3)
        largest = torch.maximum(acc.abs(), terms.abs().amax(-2))
        unit = torch.exp2(torch.frexp(largest)[1].float() - (1 + bits))
        acc = ((acc / unit).trunc() + (terms / unit.unsqueeze(-2)).trunc().sum(-2)) * unit
    return acc


def half_summed(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """P·V of a block, (…, M, N) and (…, N, Dv), on a tensor core that sums in half precision and rounds to nearest
    after every 32 keys."""
    total = p.new_zeros(*p.shape[:-1], v.shape[-1], dtype=torch.float16)
    for keys in zip(p.split(TENSOR_CORE_TERMS, -1), v.split(TENSOR_CORE_TERMS, -2), strict=True):
        total = (total.float() + product(*keys)).half()
    return total.float()


@dataclass(frozen=True)
class Arithmetic:
    """Key blocks and roundings of a kernel.

    Attributes:
        block_n: keys of a block.
        compute: type of P and V.
        exact: in every eight groups of 16 keys, the number of groups with exact exponentials, evenly spaced. The other
            groups' e4m3 codes come from `direct_code`. Rows are normalised by sums of rounded P. None: all exponentials
            are exact, and sums are of P before rounding.
        accumulator_bits: model FlashAttention-3's FP8 kernel: P·V of all key blocks is one chain in a tensor core's
            accumulator with this many mantissa bits (`chained`), and P is relative to the row's largest score so far.
            None: accumulate in float32, and P is relative to the m of `lowest`.
        p_offset: binary logarithm of the largest P.
        half_sums: sum P·V of a block in half precision (`half_summed`).
        caps_codes: P under a soft cap is that of `capped_codes`. Then `exact` is 0.
    """

    block_n: int
    compute: ComputeType = "e4m3"
    exact: int | None = None
    accumulator_bits: int | None = None
    p_offset: float = P_OFFSET
    half_sums: bool = False
    caps_codes: bool = False


def pipeline(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    attn_mask: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic,
    causal: Causal = "none",
    scoring: Scoring | None = None,
    mean_scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a kernel, in float32.

    Args:
        q, k, v: quantized (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv). Products of int8 are exact, below 2^24.
            A smoothed q has its `bias`.
        causal, scoring: as in `attention`.
        mean_scores: (B, Hq, Sq), what K's mean adds to the scores of each row. A soft cap and sinks need it: softmax
            then isn't the same for K without its mean.

    Returns:
        out float32 (B, Hq, Sq, Dv) and the natural-log LSE float32 (B, Hq, Sq) of the scores of the stored q and k;
        with mean_scores, of K as it was.

    Raises:
        ValueError: q is smoothed and has no bias.
    """
    if q.mean is not None and q.bias is None:
        raise ValueError("q is smoothed and q.bias is None; it must be what its means add to the scores of k")
    batch, heads, q_length, dim = q.shape
    kv_length = k.length
    scoring = Scoring(dim**-0.5) if scoring is None else scoring
    softmax_scale, softcap = scoring.softmax_scale, scoring.softcap
    block_n, exact, accumulator_bits = arithmetic.block_n, arithmetic.exact, arithmetic.accumulator_bits
    probability = E4M3 if arithmetic.compute == "e4m3" else torch.float16
    q_rows, k_rows = numbers(q), _per_query_head(numbers(k), heads)
    v_rows = _per_query_head(rows_layout(v.data, kv_length).float(), heads)
    row_factor = (row_scales(q.multiplier, q.granularity, q_length) * (softmax_scale * LOG2E)).expand(batch, heads, q_length)
    key_scale = row_scales(k.multiplier, k.granularity, kv_length).expand(batch, k.shape[1], kv_length)
    key_scale = _per_query_head(key_scale, heads)
    rows = torch.arange(q_length, device=q_rows.device)
    m = q_rows.new_full((batch, heads, q_length, 1), -math.inf)
    l = torch.zeros_like(m)
    acc = q_rows.new_zeros(batch, heads, q_length, v_rows.shape[-1])
    for start in range(0, kv_length, block_n):
        part = slice(start, min(start + block_n, kv_length))
        mask = _cut(attn_mask, slice(None), part)
        factor = row_factor.unsqueeze(-1) * key_scale[..., part].unsqueeze(-2)
        smallest = 1 / LARGEST_FACTOR if softmax_scale > 0 else -LARGEST_FACTOR
        x = product(q_rows, k_rows[:, :, part].transpose(-2, -1)) * factor.clamp(smallest, LARGEST_FACTOR)
        if q.bias is not None:
            x = x + of_every_query(q.bias[..., part], q_length) * (softmax_scale * LOG2E)
        if softcap:
            mean = 0.0 if mean_scores is None else mean_scores.unsqueeze(-1)
            natural = x / LOG2E + mean
            x = LOG2E * capped(natural, softcap)
        if mask is not None and mask.dtype != torch.bool:
            x = x + (mask.float() * LOG2E).clamp(min=LOWEST_SCORE)
        keys = torch.arange(part.start, part.stop, device=rows.device)
        hidden = hidden_keys(mask, causal, rows, keys, q_length, kv_length, scoring.window)
        x = x.masked_fill(hidden, -math.inf)
        largest = torch.where(x.isnan(), -math.inf, x).amax(-1, keepdim=True)
        m_new = torch.maximum(m if accumulator_bits is not None else lowest(m), largest)
        reference = m_new.masked_fill(m_new == -math.inf, 0.0)
        alpha = torch.exp2(m - reference)
        y = (x - reference) + arithmetic.p_offset  # in this order: next to a score of 2^24 or more the offset would be rounded off
        p = torch.exp2(y)
        rounded = p.to(probability).float()
        if exact is not None:
            direct = (
                capped_codes((natural / softcap).masked_fill(hidden, -math.inf), mean / softcap, m_new, softcap)
                if softcap and arithmetic.caps_codes
                else direct_code(y)
            )
            rounded = torch.where(keys // 16 * exact % 8 < exact, rounded, direct)
            p = rounded
        l = l * alpha + p.sum(-1, keepdim=True)
        if accumulator_bits is not None:
            acc = chained(acc * alpha, rounded, v_rows[:, :, part], accumulator_bits)
        else:
            acc = acc * alpha + (half_summed(rounded, v_rows[:, :, part]) if arithmetic.half_sums else product(rounded, v_rows[:, :, part]))
        m = m_new
    out = acc / l.masked_fill(l == 0, 1.0) * _per_query_head(v.scale.expand(batch, v.shape[1], -1), heads).unsqueeze(-2)
    if v.mean is not None:
        out = out + (_per_query_head(v.mean, heads).unsqueeze(-2)).masked_fill(l == 0, 0.0)
    lse = ((m - arithmetic.p_offset + l.log2()) / LOG2E).squeeze(-1)
    if mean_scores is not None and not softcap:
        lse = lse + mean_scores
    return (out, lse) if scoring.sinks is None else with_sinks(out, lse, scoring.sinks)


def half_key_mask(rows: torch.Tensor, keys: torch.Tensor, causal: Causal, q_length: int, kv_length: int, sinks: int, recent: int) -> torch.Tensor:
    """The keys that Recipe(sinks=..., recent=...) leaves in half precision for each row: bool (len(rows),
    len(keys))."""
    last = (rows + causal_offset(causal, q_length, kv_length)).clamp(max=kv_length - 1).unsqueeze(-1)
    return (keys <= last) & ((keys < sinks) | (keys > last - recent))


class HalfKeyCounts(NamedTuple):
    """Numbers of first and of last keys of a row that stay in half precision, as of `Recipe`."""

    sinks: int
    recent: int


def with_half_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8: tuple[torch.Tensor, torch.Tensor] | None, counts: HalfKeyCounts, *,
    causal: Causal = "none", softmax_scale: float | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of (B, H, S, D) tensors: exact for the half-precision keys of a recipe, merged with that to its FP8
    keys.

    Args:
        fp8: attention to the FP8 keys, (B, Hq, Sq, Dv), and its natural-log LSE (B, Hq, Sq), for scores of unsmoothed
            K; None if there are none.

    Returns:
        out (B, Hq, Sq, Dv) and the natural-log LSE (B, Hq, Sq) in `dtype`; zeros and -inf for rows without visible
        keys.
    """
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    kept = half_key_mask(rows, keys, causal, q.shape[2], k.shape[2], *counts).expand(1, 1, -1, -1)
    out, lse = attention(q, k, v, kept, scoring=None if softmax_scale is None else Scoring(softmax_scale), dtype=dtype)
    if fp8 is None:
        return out, lse
    return combine(torch.stack((out, fp8[0].to(dtype))), torch.stack((lse, fp8[1].to(dtype))))


def smoothing_shift(q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """The amount that K's mean, (B, Hkv, D), adds to every score of a row of q, (B, Hq, Sq, D): float32 (B, Hq, Sq).

    Softmax doesn't depend on it; the LSE does.
    """
    mean = _per_query_head(k_mean, q.shape[1]).unsqueeze(-2)
    return softmax_scale * (q.float() * mean).sum(-1)


def unsmoothed_lse(lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float, rotated: int) -> torch.Tensor:
    """The LSE for scores of unsmoothed K.

    Args:
        lse: float32 (B, Hq, Sq), the LSE for scores of K without its mean.
        q: (B, Hq, Sq, D), not rotated.
        k_mean: float32 (B, Hkv, D), rotated by `rotated` channels (see Quantized.rotated).
    """
    return lse + smoothing_shift(rotation.rotate_queries(q, rotated), k_mean, softmax_scale)


def combine(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of key sets, from attention over each set.

    Args:
        outs: (N, …, D), normalised outputs.
        lses: (N, …), their natural-log LSE.

    Returns:
        out (…, D) and LSE (…), as if all keys had been attended to at once.
    """
    largest = lses.amax(0)
    weights = (lses - largest.masked_fill(largest == -math.inf, 0.0)).exp()
    total = weights.sum(0)
    out = (outs * weights.unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, largest + total.log()
