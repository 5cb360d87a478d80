"""The quantizers' kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import (
    begin,
)
from .quantize_steps import (
    BLOCK,
    CHANNELS,
    GROUPS_PER_LOAD,
    LANES,
    NAN_CODE,
    SLICE,
    TOKEN_CHUNK,
    coarse,
    gather_token_chunk,
    hidden_tokens,
    inverse_of,
    largest_magnitude,
    load_vector,
    removable,
    sample_mean,
    sample_of,
    store_vector,
    sum_lanes,
    token_chunk_extremes,
    token_chunk_statistics,
    token_chunk_sum,
    write_queries,
    write_rows,
    write_values,
)
from .tile import (
    key_of_slot,
    scale_of,
)
from .varlen import (
    first_unit,
    spans_of,
    unit_of_head,
    units_in,
)


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
            mean = sample_mean(base, sample_step, k_strides[2], length, inverse_sample_size, C.k_dim, C.widths[1], C.part)
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
        mean = sample_mean(k, sample_step, k_strides[2], length, inverse_sample_size, C.k_dim, C.widths[1], C.part)
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
