"""Attention to the keys that a recipe leaves in half precision (a layer's sinks and recent tokens), merged with the
result of the FP8 kernels for all other keys.

Every query has a few hundred such keys, whatever the length, so the kernel is bound by the bytes of q and of both
outputs. Softmax is exact, and P has V's precision. The result of the FP8 kernels is merged by its LSE (online softmax,
arXiv:1805.02867), as in `fp8attn.reference.combine`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..call import HalfKeys, empty_lse, empty_output
from ..device import Device
from .bias import high
from .forward import load_rows
from .launch import begin, ceil_div, check_counted, launch
from .quantize_steps import load_vector, power_of_2, unrotated
from .tile import LOG2E, inverse, is_finite

TILES = {256: (64, 32, 4, 3), 512: (64, 32, 4, 2), 1024: (32, 16, 8, 2)}
"""Query rows of a tile, keys of a block, warps and stages, by the largest number of bytes of a row. Small enough for
several programs per SM."""


@triton.jit
def attend(
    q, m, l, acc, lowest, keys, last, k, k_stride, v, v_stride, length, factor, sinks, recent,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Queries (M, WIDTH) attend to the half-precision keys among `keys` (N,).

    Args:
        lowest: (M,), no more than any product of a query with a key so far, unless CAREFUL.
        last: (M,), the last key that each query sees.
        MASKED: some queries may not attend to some of `keys`.
        CAREFUL: keys and values may be non-finite.
    """
    x = tl.dot(q, load_rows(k, keys, k_stride, length, 0, q.shape[1], DIM, MASKED).T)
    value = load_rows(v, keys, v_stride, length, 0, acc.shape[1], VALUE_DIM, MASKED)
    if CAREFUL:
        bad = tl.max(tl.where(is_finite(value.to(tl.float32)), 0, 1), 1)
        value = tl.where(is_finite(value.to(tl.float32)), value, 0.0)
        finite = is_finite(x) & (bad == 0)[None, :]
    else:
        lowest = tl.minimum(lowest, tl.min(x, 1))
    x *= factor
    if MASKED:
        until = last[:, None] - keys[None, :]
        kept = (until >= 0) & ((keys < sinks)[None, :] | (until < recent))
        x = tl.where(kept, x, -float("inf"))
    m_new = tl.maximum(m, tl.max(tl.where(finite, x, -float("inf")) if CAREFUL else x, 1))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(x - shift[:, None])
    if CAREFUL:
        p = tl.where(kept & (finite == 0), float("nan"), p)
    alpha = tl.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])
    return m_new, l, acc, lowest


@triton.jit
def attend_to_half_keys(
    q, k, k_stride, v, v_stride, rows, first_row, q_length, length, causal_offset, factor, sinks, recent,
    N: tl.constexpr, VALUE_WIDTH: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Queries (M, WIDTH), `rows` from `first_row` on, attend to the first `sinks` and the last `recent` keys that they
    see.

    Returns:
        m (M,) in base 2, sums of P relative to it (M,), sums of P·V (M, VALUE_WIDTH), and a lower bound of all products
        (M,).
    """
    M: tl.constexpr = q.shape[0]
    m = tl.full([M], -float("inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VALUE_WIDTH], tl.float32)
    lowest = tl.zeros([M], tl.float32)
    columns = tl.arange(0, N)
    last = tl.minimum(rows + causal_offset, length - 1)
    # number of keys that the first row sees, and that the last row sees, which is the most
    fewest = tl.maximum(tl.minimum(first_row + causal_offset + 1, length), 0)
    most = tl.maximum(tl.minimum(tl.minimum(first_row + M, q_length) + causal_offset, length), 0)
    # sinks are in blocks 0 … sinks_end (`sinks` is a multiple of N), recent keys in blocks recent_begin … recent_end;
    # in the first sinks_whole blocks and in a range of recent blocks from `whole` on, all rows attend to all keys
    sinks_end = tl.cdiv(tl.minimum(sinks, most), N)
    sinks_whole = tl.minimum(sinks, fewest) // N
    recent_begin = tl.maximum(fewest - recent, sinks) // N
    recent_end = tl.maximum(tl.cdiv(most, N) if recent > 0 else 0, recent_begin)
    tail = tl.minimum(tl.maximum(fewest // N, recent_begin), recent_end)
    whole = tl.minimum(tl.cdiv(tl.maximum(most - recent, sinks), N), tail)
    if CAREFUL:
        sinks_whole = 0
        whole = tail
    else:
        for i in range(0, sinks_whole + tail - whole):
            block = tl.where(i < sinks_whole, i, whole + i - sinks_whole)
            m, l, acc, lowest = attend(
                q, m, l, acc, lowest, block * N + columns, last, k, k_stride, v, v_stride, length, factor, sinks, recent,
                DIM, VALUE_DIM, False, False,
            )  # fmt: skip
    of_sinks = sinks_end - sinks_whole
    before_tail = of_sinks + whole - recent_begin
    for i in range(0, before_tail + recent_end - tail):
        block = tl.where(i < of_sinks, sinks_whole + i, tl.where(i < before_tail, recent_begin + i - of_sinks, tail + i - before_tail))
        m, l, acc, lowest = attend(
            q, m, l, acc, lowest, block * N + columns, last, k, k_stride, v, v_stride, length, factor, sinks, recent,
            DIM, VALUE_DIM, True, CAREFUL,
        )  # fmt: skip
    return m, l, acc, lowest


@triton.jit
def leading(x, like):
    """The leading bits of float32 x, as many as an operand of the type of `like` has on a tensor core. x minus them is
    exact."""
    if like.dtype == tl.float32:
        return high(x)
    else:
        return x.to(like.dtype)


@triton.jit
def load_mean(k_mean, DIM: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr):
    """A mean (WIDTH,) of keys that was rotated in parts of PART channels, rotated back: its products with queries as
    they came are what it adds to scores."""
    mean = load_vector(k_mean, 1, 0.0, DIM, WIDTH)
    if PART > 0:
        mean = tl.reshape(unrotated(mean[None, :], PART), (WIDTH,)) * PART
    return mean


@triton.jit
def mean_scores(q, mean):
    """Products (M,) of queries (M, WIDTH) with a mean (WIDTH,), as exact as in float32.

    A tensor core multiplies, with the mean as the sum of three operands (see bias.py). So the order of summation
    doesn't depend on layouts.
    """
    first = leading(mean, q)
    rest = mean - first.to(tl.float32)
    second = leading(rest, q)
    third = leading(rest - second.to(tl.float32), q)
    column = tl.arange(0, 16)[None, :]
    parts = tl.where(
        column == 0, first[:, None], tl.where(column == 1, second[:, None], tl.where(column == 2, third[:, None], tl.zeros_like(first)[:, None]))
    )
    if q.dtype == tl.float32:
        coarse = high(q)
        sums = tl.dot(q - coarse, parts, tl.dot(coarse, parts, input_precision="tf32"), input_precision="tf32")
    else:
        sums = tl.dot(q, parts)
    return tl.sum(sums, 1)


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "q_length", "kv_length", "causal_offset", "sinks", "recent"])
def half_keys_kernel(
    q,  # (B, Hq, Sq, D)
    k,  # (B, Hkv, Sk, D)
    v,  # (B, Hkv, Sk, Dv)
    fp8_out,  # (B, Hq, Sq, Dv): FP8 attention to all other keys; or None if there are none
    fp8_lse,  # (B, Hq, Sq) float32, contiguous: its LSE, for K without its mean; or None
    k_mean,  # (B, Hkv, D) float32, contiguous: that mean, rotated; or None
    out,  # (B, Hq, Sq, Dv)
    lse,  # (B, Hq, Sq) float32, contiguous; or None
    q_strides,
    k_strides,
    v_strides,
    fp8_out_strides,
    out_strides,
    q_heads,
    kv_heads,
    q_length,
    kv_length,
    causal_offset,
    softmax_scale,
    sinks,
    recent,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PART: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid: tiles of M queries x heads x batch, in one dimension.

    PART: channels that were rotated together in k_mean.
    """
    begin(DEPENDENT)
    tiles = tl.cdiv(q_length, M)
    program = tl.program_id(0)
    first_row = program % tiles * M
    head = (program // tiles) % q_heads
    batch = (program // tiles // q_heads).to(tl.int64)
    kv_head = (head // (q_heads // kv_heads)).to(tl.int64)
    head = head.to(tl.int64)
    rows = first_row + tl.arange(0, M)
    q = load_rows(q + batch * q_strides[0] + head * q_strides[1], rows, q_strides[2], q_length, 0, WIDTH, DIM, True)
    k += batch * k_strides[0] + kv_head * k_strides[1]
    v += batch * v_strides[0] + kv_head * v_strides[1]
    factor = softmax_scale * LOG2E
    m, l, acc, lowest = attend_to_half_keys(
        q, k, k_strides[2], v, v_strides[2], rows, first_row, q_length, kv_length, causal_offset, factor, sinks, recent,
        N, VALUE_WIDTH, DIM, VALUE_DIM, False,
    )  # fmt: skip
    # the first pass treats keys with scores of -inf as hidden, and a hidden key adds 0 · NaN = NaN if its value is NaN:
    # repeat with care
    if tl.max(tl.where(is_finite(lowest) & (tl.max(tl.where(is_finite(acc), 0, 1), 1) == 0), 0, 1), 0) > 0:
        m, l, acc, lowest = attend_to_half_keys(
            q, k, k_strides[2], v, v_strides[2], rows, first_row, q_length, kv_length, causal_offset, factor, sinks, recent,
            N, VALUE_WIDTH, DIM, VALUE_DIM, True,
        )  # fmt: skip

    index = (batch * q_heads + head) * q_length + rows
    channels = tl.arange(0, VALUE_WIDTH)
    inside = (rows < q_length)[:, None] & (channels < VALUE_DIM)[None, :]
    if fp8_out is not None:
        theirs = tl.load(fp8_lse + index, mask=rows < q_length, other=-float("inf")) * LOG2E
        if k_mean is not None:
            mean = load_mean(k_mean + (batch * kv_heads + kv_head) * DIM, DIM, WIDTH, PART)
            theirs += mean_scores(q, mean) * factor
        m_new = tl.maximum(m, theirs)
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m - shift), tl.exp2(theirs - shift)
        fp8_out += batch * fp8_out_strides[0] + head * fp8_out_strides[1]
        answer = tl.load(fp8_out + rows[:, None].to(tl.int64) * fp8_out_strides[2] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        m = m_new
        l = l * alpha + weight
        acc = acc * alpha[:, None] + answer * weight[:, None]
    value = acc * inverse(l)[:, None]
    out += batch * out_strides[0] + head * out_strides[1]
    tl.store(out + rows[:, None].to(tl.int64) * out_strides[2] + channels[None, :], value.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + index, (m + tl.log2(l)) / LOG2E, mask=rows < q_length)


def half_keys(call: HalfKeys, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """reference.with_half_keys by a kernel.

    Args:
        warmup: compile only.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), None unless call.return_lse.
    """
    q, k, v = call.q, call.k, call.v
    check_counted("query", q)
    check_counted("key", k)
    batch, heads, length, dim = q.shape
    value_dim = v.shape[3]
    # the interpreter truncates to bfloat16 instead of rounding
    out = empty_output(q, value_dim, torch.float32 if device.emulated else call.out_dtype)
    lse = empty_lse(q, True) if call.return_lse else None
    if out.numel() == 0:
        return out.to(call.out_dtype), lse
    if device.emulated and q.dtype == torch.bfloat16:  # the interpreter can't multiply bfloat16
        q, k, v = q.float(), k.float(), v.float()
    width, value_width = power_of_2(dim), power_of_2(value_dim)
    rows, keys, warps, stages = TILES[max(256, max(width, value_width) * q.element_size())]
    # with 64 rows, the sums are in tensor memory, and Triton 3.6 fails (TritonNvidiaGPUOptimizeTMemLayouts)
    if device.arch // 10 in (10, 11):
        rows = min(rows, 32)
    launch(
        half_keys_kernel, (ceil_div(length, rows) * heads * batch,),
        q, k, v, call.fp8_out, call.fp8_lse, call.k_mean, out, lse,
        q.stride(), k.stride(), v.stride(), (0, 0, 0, 0) if call.fp8_out is None else call.fp8_out.stride(), out.stride(),
        heads, k.shape[1], length, k.shape[2], call.causal_offset, call.softmax_scale, call.sinks, call.recent,
        dim, value_dim, width, value_width, call.rotated, rows, keys, device.has_dependent_launch,
        warmup=warmup, dependent=device.has_dependent_launch, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.to(call.out_dtype), lse
