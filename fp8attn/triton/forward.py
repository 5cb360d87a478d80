"""The portable forward kernel: every feature, every architecture from sm_80 on, and Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..call import Call, empty_lse, empty_output
from ..device import Device
from .configs import PortableConfig, Traits
from .launch import check_counted, launch
from .tile import (
    LOG2E,
    NOTHING,
    QUERY_GROUP,
    SCALE_BLOCK,
    add_bias,
    add_sink,
    bias_row,
    cap_scores,
    hide,
    inverse,
    load_rows_of,
    log_sum_exp,
    operand,
    permute_keys,
    probabilities,
    score_factor,
    set_nonfinite_keys,
    set_nonfinite_rows,
    softmax_step,
    whole_blocks,
)
from .varlen import load_tile_entry, offsets_of, table_of


@triton.jit
def load_rows(base, rows, stride, length, START: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr):
    """Columns START … START+WIDTH of some rows of a (length, DIM) matrix; zeros outside.

    CHECK: rows may lie past the end.
    """
    columns = START + tl.arange(0, WIDTH)
    pointers = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if CHECK:
        return tl.load(pointers, mask=(rows[:, None] < length) & (columns[None, :] < DIM), other=0.0)
    elif START + WIDTH > DIM:
        return tl.load(pointers, mask=columns[None, :] < DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_values(base, start, pitch, START: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Channels START … START+WIDTH of a key block of V, as (block_n, WIDTH). V's padding makes every block complete."""
    channels = START + tl.arange(0, WIDTH)
    pointers = base + channels[None, :].to(tl.int64) * pitch + (start + tl.arange(0, C.config.block_n))[:, None]
    if C.value_dim < START + WIDTH:
        return tl.load(pointers, mask=channels[None, :] < C.value_dim, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def add_values(acc, alpha, p, v, C: tl.constexpr):
    """acc · alpha + P·V for one part of V's channels."""
    v = operand(v, C.half)
    if C.two_level:
        return acc * alpha[:, None] + tl.dot(p, v)
    else:
        return tl.dot(p, v, acc * alpha[:, None])


@triton.jit
def attend(
    q0, q1, row_factor, m, l, acc0, acc1, start, k_base, k_stride, k_scale, k_scale_stride, v_base, kv_padded,
    bias, bias_factor, softcap, shift, mask, mask_strides, rows, q_length, kv_length, offsets, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of queries attends to the keys start … start+block_n. MASKED: some rows may not see some of these keys."""
    columns = tl.arange(0, C.config.block_n)
    keys = start + columns
    x = tl.dot(q0, operand(load_rows(k_base, keys, k_stride, kv_length, 0, C.d0, C.head_dim, MASKED), C.half).T)
    if C.d1 > 0:
        x = tl.dot(q1, operand(load_rows(k_base, keys, k_stride, kv_length, C.d0, C.d1, C.head_dim, MASKED), C.half).T, x, out_dtype=x.dtype)
    if C.int8:
        x = x.to(tl.float32)
    if C.k_group == 1:
        x *= tl.load(k_scale + keys.to(tl.int64) * k_scale_stride, mask=keys < kv_length, other=1.0)[None, :]
        factor = score_factor(row_factor, 1.0, C.positive)
    else:
        index = start // SCALE_BLOCK if C.k_group == SCALE_BLOCK else 0
        block_scale = tl.load(k_scale + index * k_scale_stride)
        if C.int8:
            x = set_nonfinite_keys(x, block_scale < 0, k_base, keys, k_stride, kv_length)
            block_scale = tl.abs(block_scale)
        factor = score_factor(row_factor, block_scale, C.positive)
    if not C.folded:
        x *= factor[:, None]
    if bias is not None:
        x = add_bias(x, bias, bias_factor, keys, kv_length)
    if C.softcap:
        x = cap_scores(x, shift, softcap)
    if MASKED:
        x = hide(x, rows[:, None], start, columns[None, :], q_length, kv_length, offsets, mask, mask_strides, C.window, False)

    p, m, alpha, lanes = softmax_step(x, factor, m, C.folded)
    l = l * alpha[:, None] + lanes
    p = permute_keys(probabilities(p, C.half, C.native))
    acc0 = add_values(acc0, alpha, p, load_values(v_base, start, kv_padded, 0, C.dv0, C), C)
    if C.dv1 > 0:
        acc1 = add_values(acc1, alpha, p, load_values(v_base, start, kv_padded, C.dv0, C.dv1, C), C)
    return m, l, acc0, acc1


@triton.jit
def store_part(
    acc, factor, weight, v_scale, v_scale_stride, v_mean, out, out_stride, rows, q_length, START: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Normalise, descale and store channels START … START+WIDTH.

    Args:
        factor: (M,), normalises sums of P·V.
        weight: (M,), of all keys of a row: 1; 0 without visible keys; less beside a sink.
    """
    channels = START + tl.arange(0, WIDTH)
    inside = channels < C.value_dim
    value = acc * factor[:, None] * tl.load(v_scale + channels * v_scale_stride, mask=inside, other=0.0)[None, :]
    if v_mean is not None:
        mean = tl.load(v_mean + channels, mask=inside, other=0.0)
        value += weight[:, None] * mean[None, :]
    pointers = out + rows[:, None].to(tl.int64) * out_stride + channels[None, :]
    tl.store(pointers, value.to(out.dtype.element_ty), mask=(rows < q_length)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "q_length", "kv_length", "first_offset", "last_offset"])
def forward_kernel(
    q,  # (B, Hq, Sq, D): e4m3 or int8
    q_scale,  # (B, Hq, n)
    k,  # (B, Hkv, Sk, D): as q
    k_scale,  # (B, Hkv, n)
    v,  # (B, Hkv, Dv, S_padded): e4m3, contiguous, keys permuted
    v_scale,  # (B, Hkv, Dv)
    v_mean,  # (B, Hkv, Dv) float32, contiguous: the mean removed from V; or None
    bias,  # (B, Hq, ceil(Sq / 64), Sk rounded up) float32, contiguous: the score bias of smoothed queries; or None
    mask,  # (B, Hq, Sq, Sk): bool as bytes, or float; or None
    sinks,  # (Hq,) float32, contiguous: one more logit of each row; or None
    mean_scores,  # (B, Hq, Sq) float32, contiguous: what K's mean adds to the scores of a row; or None
    tiles,  # the table of tiles of packed sequences (varlen.table_of), or None
    out,  # (B, Hq, Sq, Dv)
    lse,  # (B, Hq, Sq) float32, contiguous; or None
    q_strides,
    q_scale_strides,
    k_strides,
    k_scale_strides,
    v_scale_strides,
    mask_strides,
    out_strides,
    q_heads,
    kv_heads,
    q_length,
    kv_length,
    kv_padded,
    first_offset,  # row i sees the keys from i + first_offset
    last_offset,  # to i + last_offset; of packed sequences, these two are the window (Call.window_offsets)
    softcap,  # a float; 0 caps nothing
    softmax_scale,
    C: tl.constexpr,  # Traits
):
    """Grid: query tiles x heads x batch, in one dimension; of packed sequences, heads x places in the table."""
    BLOCK_M: tl.constexpr = C.config.block_m
    BLOCK_N: tl.constexpr = C.config.block_n
    DV0: tl.constexpr = C.dv0
    DV1: tl.constexpr = C.dv1
    program = tl.program_id(0)
    q_tokens = q_length  # of a row of mean_scores and lse
    q_begin = 0
    k_begin = 0
    v_begin = 0
    k_block = 0
    offsets = (first_offset, last_offset)
    if tiles is None:
        count = tl.cdiv(q_length, BLOCK_M)
        # the last tiles of a causal head see the most keys, so they run first
        first = (count - 1 - program % count) * BLOCK_M
        head = (program // count) % q_heads
        batch = (program // count // q_heads).to(tl.int64)
        sequence = batch
    else:
        head = program % q_heads
        sequence, first, q_begin, q_length, k_begin, kv_length, page = load_tile_entry(tiles, program // q_heads)
        batch = (program * 0).to(tl.int64)
        sequence = sequence.to(tl.int64)
        q_begin = q_begin.to(tl.int64)
        k_begin = k_begin.to(tl.int64)
        v_begin = page.to(tl.int64) * SCALE_BLOCK
        k_block = k_begin if C.k_group == 1 else page.to(tl.int64)
        offsets = offsets_of(offsets, q_length, kv_length)
    kv_head = (head // (q_heads // kv_heads)).to(tl.int64)
    head = head.to(tl.int64)
    kv_index = batch * kv_heads + kv_head
    rows = first + tl.arange(0, BLOCK_M)

    q += batch * q_strides[0] + head * q_strides[1] + q_begin * q_strides[2]
    q0 = load_rows(q, rows, q_strides[2], q_length, 0, C.d0, C.head_dim, True)
    q1 = q0
    if C.d1 > 0:
        q1 = load_rows(q, rows, q_strides[2], q_length, C.d0, C.d1, C.head_dim, True)
    q_scale += batch * q_scale_strides[0] + head * q_scale_strides[1] + q_begin * q_scale_strides[2]
    index = rows * 0 if C.q_group == 0 else rows // C.q_group
    row_scale = tl.load(q_scale + index.to(tl.int64) * q_scale_strides[2], mask=rows < q_length, other=1.0)
    q0 = operand(q0, C.half)
    q1 = operand(q1, C.half)
    row_factor = row_scale * (softmax_scale * LOG2E)

    k += batch * k_strides[0] + kv_head * k_strides[1] + k_begin * k_strides[2]
    k_scale += batch * k_scale_strides[0] + kv_head * k_scale_strides[1] + k_block * k_scale_strides[2]
    v += kv_index * C.value_dim * kv_padded + v_begin
    if bias is not None:
        tl.static_assert(QUERY_GROUP % BLOCK_M == 0)
        bias = bias_row(bias, batch * q_heads + head, first, q_length, kv_length)
    if mask is not None:
        mask += batch * mask_strides[0] + head * mask_strides[1]
    m = tl.full([BLOCK_M], NOTHING, tl.float32)
    l = tl.zeros([BLOCK_M, 4], tl.float32)
    acc0 = tl.zeros([BLOCK_M, DV0], tl.float32)
    acc1 = acc0
    if DV1 > 0:
        acc1 = tl.zeros([BLOCK_M, DV1], tl.float32)

    if mean_scores is not None:
        mean_scores += (batch * q_heads + head) * q_tokens + q_begin
    shift = load_rows_of(mean_scores, rows, q_length)
    last = tl.minimum(first + BLOCK_M, q_length) - 1
    begin, whole, end_whole, end = whole_blocks(first, last, offsets, kv_length, BLOCK_N, C.causal, C.window)
    if mask is not None:
        end_whole = 0
    if C.window:
        for start in range(begin * BLOCK_N, whole * BLOCK_N, BLOCK_N):
            m, l, acc0, acc1 = attend(
                q0, q1, row_factor, m, l, acc0, acc1, start, k, k_strides[2], k_scale, k_scale_strides[2], v, kv_padded,
                bias, softmax_scale * LOG2E, softcap, shift, mask, mask_strides, rows, q_length, kv_length, offsets, C, True,
            )  # fmt: skip
    for start in range(whole * BLOCK_N, end_whole * BLOCK_N, BLOCK_N):
        m, l, acc0, acc1 = attend(
            q0, q1, row_factor, m, l, acc0, acc1, start, k, k_strides[2], k_scale, k_scale_strides[2], v, kv_padded,
            bias, softmax_scale * LOG2E, softcap, shift, mask, mask_strides, rows, q_length, kv_length, offsets, C, False,
        )  # fmt: skip
    for start in range(end_whole * BLOCK_N, end * BLOCK_N, BLOCK_N):
        m, l, acc0, acc1 = attend(
            q0, q1, row_factor, m, l, acc0, acc1, start, k, k_strides[2], k_scale, k_scale_strides[2], v, kv_padded,
            bias, softmax_scale * LOG2E, softcap, shift, mask, mask_strides, rows, q_length, kv_length, offsets, C, True,
        )  # fmt: skip

    l = tl.sum(l, 1)
    if C.int8:
        l = set_nonfinite_rows(l, q, rows, q_strides[2], q_length)
    weight = tl.where(l == 0, 0.0, 1.0)
    factor = inverse(l)
    if sinks is not None:
        sink = tl.load(sinks + head)
        if not C.softcap:
            sink -= shift
        m, kept, l, alpha = add_sink(m, l, sink)
        factor = inverse(l) * alpha
        weight = inverse(l) * kept
    out += batch * out_strides[0] + head * out_strides[1] + q_begin * out_strides[2]
    v_scale += sequence * v_scale_strides[0] + kv_head * v_scale_strides[1]
    if v_mean is not None:
        v_mean += (sequence * kv_heads + kv_head) * C.value_dim
    store_part(acc0, factor, weight, v_scale, v_scale_strides[2], v_mean, out, out_strides[2], rows, q_length, 0, C.dv0, C)
    if C.dv1 > 0:
        store_part(acc1, factor, weight, v_scale, v_scale_strides[2], v_mean, out, out_strides[2], rows, q_length, C.dv0, C.dv1, C)
    if lse is not None:
        value = log_sum_exp(m, l)
        if mean_scores is not None and not C.softcap:
            value += shift
        tl.store(lse + (batch * q_heads + head) * q_tokens + q_begin + rows, value, mask=rows < q_length)


def run(call: Call, config: PortableConfig, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the portable kernel.

    Args:
        warmup: compile only.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), empty unless call.return_lse.

    Raises:
        ValueError: the call has more tokens or tiles than kernels can count.
    """
    check_counted("query", call.q)
    check_counted("key", call.k)
    # the interpreter truncates to bfloat16 instead of rounding
    out = empty_output(call.q, call.value_dim, torch.float32 if device.emulated else call.out_dtype)
    lse = empty_lse(call.q, call.return_lse)
    if out.numel() == 0:
        return out.to(call.out_dtype), lse
    assert call.q_scale is not None
    traits = Traits.of(call, config, device)
    launch(
        forward_kernel,
        (call.tiles(config.block_m),),
        stored(call.q, traits),
        call.q_scale,
        stored(call.k, traits),
        call.k_scale,
        stored(call.v, traits),
        call.v_scale,
        call.v_mean,
        call.bias,
        call.mask_bytes,
        call.sinks,
        call.mean_scores,
        table_of(call, config.block_m, device, warmup=warmup),
        out,
        lse if call.return_lse else None,
        call.q.stride(),
        call.q_scale.stride(),
        call.k.stride(),
        call.k_scale.stride(),
        call.v_scale.stride(),
        (0, 0, 0, 0) if call.attn_mask is None else call.attn_mask.stride(),
        out.stride(),
        call.q_heads,
        call.kv_heads,
        call.q_length,
        call.kv_length,
        call.v.shape[3],
        *call.window_offsets,
        float(call.softcap),
        call.softmax_scale,
        traits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        warmup=warmup,
    )
    return out.to(call.out_dtype), lse


def stored(x: torch.Tensor, traits: Traits) -> torch.Tensor:
    """e4m3 in a form that the compiler supports: as its own type, or as bytes. int8 is returned unchanged."""
    return x if x.dtype == torch.int8 else x.view(torch.float8_e4m3fn if traits.native else torch.uint8)
