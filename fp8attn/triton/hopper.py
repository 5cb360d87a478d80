"""The Hopper kernel, in Gluon: TMA, wgmma, warp specialisation, persistent.

One producer warp per team streams K and V through a ring of shared-memory stages. Each consumer warpgroup owns 64 query
rows and runs the whole inner loop of attention on them. Consumers don't synchronise with each other: while one computes
its softmax, another keeps the tensor cores busy. P stays in registers from accumulator to operand, because V's keys are
stored in the order that makes the two register layouts the same (fp8attn.layout).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import Call, empty_lse, empty_output
from ..device import Device
from ..layout import units_of
from ..schedule import heads_in_l2
from .configs import ROWS, HopperConfig, Traits
from .launch import ceil_div, launch
from .tile import (
    E4M3_MAX,
    INT8_MAX,
    LARGEST_SCORE,
    LOG2E,
    NOTHING,
    SCALE_BLOCK,
    add_bias,
    add_sink,
    bias_row,
    cap_scores,
    code_step,
    hide,
    inverse,
    load_rows_of,
    log_sum_exp,
    pack_codes,
    permute_keys,
    score_factor,
    set_nonfinite_keys,
    set_nonfinite_rows,
    whole_blocks,
)
from .varlen import load_tile_entry, offsets_of, table_of

TABLE: gl.constexpr = gl.constexpr(10)  # of the tensors that consumers take, the table of tiles
E4M3_ONE: gl.constexpr = gl.constexpr(0x38)  # the code of 1
ONES: gl.constexpr = gl.constexpr(8)  # channels of ones beside V's, the fewest that a tensor core multiplies


@gluon.constexpr_function
def score_layout(C: Traits):
    """Register layout of a consumer's scores: products of e4m3 or int8."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.config.block_n, 32])


@gluon.constexpr_function
def lane_layout():
    """Register layout of (64, 4) sums: one for each lane of a row's quad."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def output_layout(channels: int):
    """Register layout of so many channels of a consumer's output."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, channels, 32])


@gluon.constexpr_function
def rows_layout(rows: int, width: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a TMA box of (B, H, S, D)."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], gl.float8e4nv)


@gluon.constexpr_function
def values_layout(channels: int, keys: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a TMA box of (B · Hkv · Dv, S_padded)."""
    return gl.NVMMASharedLayout.get_default_for([channels, keys], gl.float8e4nv)


# cached, because every launch calls them
host_rows_layout = functools.cache(rows_layout)
host_values_layout = functools.cache(values_layout)


@gluon.jit
def tile_at(position, shape, offsets, table, C: gl.constexpr):
    """The tile at a position in the schedule.

    Heads are processed in groups. Inside a group the last tiles go first: in a causal call these are the long ones. The
    table of packed sequences has the heavy tiles first.

    Returns:
        batch and head; the first row of the tile, and the lengths and window offsets of its sequence; and where the
        sequence lies: its number, and its first query, key, and page of keys.
    """
    batches, q_heads, kv_heads, q_length, kv_length, group, tiles = shape
    first = position // (group * tiles) * group
    inside = position % (group * tiles)
    heads = gl.minimum(group, batches * q_heads - first)
    head = first + inside % heads
    if table is None:
        batch = head // q_heads
        row = (tiles - 1 - inside // heads) * C.config.tile_rows
        return batch, head % q_heads, row, (q_length, kv_length), offsets, (batch, 0, 0, 0)
    else:
        sequence, row, q_begin, q_length, k_begin, kv_length, page = load_tile_entry(table, inside // heads)
        return (
            head // q_heads,
            head % q_heads,
            row,
            (q_length, kv_length),
            offsets_of(offsets, q_length, kv_length),
            (sequence, q_begin, k_begin, page),
        )


@gluon.jit
def place_in(turn, TEAM: gl.constexpr, C: gl.constexpr):
    """This team's position in round `turn` of the schedule.

    The order of teams alternates, so that no team always gets the longer tiles.
    """
    ctas = gl.num_programs(0)
    teams = ctas * C.config.teams
    team = TEAM * ctas + gl.program_id(0)
    return turn * teams + gl.where(turn % 2 == 0, team, teams - 1 - team)


@gluon.jit
def blocks_of(first, rows: gl.constexpr, lengths, offsets, C: gl.constexpr):
    """tile.whole_blocks of so many rows from `first` on, which exists."""
    q_length, kv_length = lengths
    last = gl.minimum(first + rows, q_length) - 1
    return whole_blocks(first, last, offsets, kv_length, C.config.block_n, C.causal, C.window)


@gluon.jit
def produce(descriptors, buffers, barriers, shape, positions, offsets, TEAM: gl.constexpr, C: gl.constexpr):
    """One warp: loads the queries of every tile of a team, and its blocks of K and V, in the order in which the
    consumers need them."""
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, table = descriptors
    sQ0, sQ1, sK0, sK1, sV0, sV1, sOnes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    batches, q_heads, kv_heads, _, _, _, _ = shape
    BLOCK_N: gl.constexpr = C.config.block_n
    STAGES: gl.constexpr = C.config.stages
    MEMBERS: gl.constexpr = C.config.members
    block = 0
    for turn in range(0, gl.cdiv(positions, gl.num_programs(0) * C.config.teams)):
        position = place_in(turn, TEAM, C)
        if position < positions:
            batch, head, row, lengths, own_offsets, begins = tile_at(position, shape, offsets, table, C)
            _, q_begin, k_begin, page = begins
            kv_head = head // (q_heads // kv_heads)
            for c in gl.static_range(TEAM * MEMBERS, (TEAM + 1) * MEMBERS):
                my_row = row + (c - TEAM * MEMBERS) * 64
                mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(c), 64 * (C.d0 + C.d1))
                tma.async_copy_global_to_shared(q0_desc, [batch, head, q_begin + my_row, 0], q_full.index(c), sQ0.index(c))
                if C.d1 > 0:
                    tma.async_copy_global_to_shared(q1_desc, [batch, head, q_begin + my_row, C.d0], q_full.index(c), sQ1.index(c))
            begin, _, _, blocks = blocks_of(row, C.config.tile_rows, lengths, own_offsets, C)
            for n in range(begin, blocks):
                stage = TEAM * STAGES + block % STAGES
                free = (block // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), free)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (C.d0 + C.d1))
                tma.async_copy_global_to_shared(k0_desc, [batch, kv_head, k_begin + n * BLOCK_N, 0], k_full.index(stage), sK0.index(stage))
                if C.d1 > 0:
                    tma.async_copy_global_to_shared(k1_desc, [batch, kv_head, k_begin + n * BLOCK_N, C.d0], k_full.index(stage), sK1.index(stage))
                mbarrier.wait(v_empty.index(stage), free)
                mbarrier.expect(v_full.index(stage), BLOCK_N * (C.dv0 + C.dv1))
                channel = (batch * kv_heads + kv_head) * C.value_dim
                tma.async_copy_global_to_shared(v0_desc, [channel, page * SCALE_BLOCK + n * BLOCK_N], v_full.index(stage), sV0.index(stage))
                if C.dv1 > 0:
                    tma.async_copy_global_to_shared(
                        v1_desc, [channel + C.dv0, page * SCALE_BLOCK + n * BLOCK_N], v_full.index(stage), sV1.index(stage)
                    )
                block += 1


@gluon.jit
def release(barriers, n, blocks, block, TEAM: gl.constexpr, STAGES: gl.constexpr):
    """Free the blocks that are loaded for later rows of the team, and that this consumer doesn't need."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    for _ in range(n, blocks):
        stage = TEAM * STAGES + block % STAGES
        phase = block // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage))
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage))
        block += 1
    return block


@gluon.jit
def start_scores(sq, buffers, stage, C: gl.constexpr):
    """Issue Q·Kᵀ for the keys of one stage."""
    _, _, sK0, sK1, _, _, _ = buffers
    BLOCK_N: gl.constexpr = C.config.block_n
    x = gl.full([64, BLOCK_N], 0, gl.int32 if C.int8 else gl.float32, score_layout(C))
    x = warpgroup_mma(sq[0], sK0.index(stage).reshape((BLOCK_N, C.d0)).permute((1, 0)), x, use_acc=False, is_async=True)
    if C.d1 > 0:
        x = warpgroup_mma(sq[1], sK1.index(stage).reshape((BLOCK_N, C.d1)).permute((1, 0)), x, is_async=True)
    return x


@gluon.constexpr_function
def folds_factor(C: Traits):
    """Whether the factors of scores are part of the exponent's multiply-add: nothing else is done to scores, and the
    factor bounds them."""
    return C.folded and C.k_group != 1


@gluon.constexpr_function
def largest_factor(C: Traits):
    """Scores whose factor is below this are below LARGEST_SCORE."""
    largest = INT8_MAX.value if C.int8 else E4M3_MAX.value
    return LARGEST_SCORE.value / (largest * largest * C.head_dim)


@gluon.jit
def load_largest_scales(k_scale, stride, begin, end, C: gl.constexpr):
    """(128,), of which the maximum is the largest scale of the key blocks from `begin` to `end` - 1; inf if one marks a
    non-finite key of int8, or is NaN."""
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    largest = gl.full([128], 0.0, gl.float32, lanes.type.layout)
    if C.k_group == 0:
        begin = 0
        end = 1
    else:
        begin = begin * C.config.block_n // SCALE_BLOCK
        end = gl.cdiv(end * C.config.block_n, SCALE_BLOCK)
    for first in range(begin, end, 128):
        scale = gl.load(k_scale + (first + lanes) * stride, mask=first + lanes < end, other=0.0)
        largest = gl.maximum(largest, gl.where(scale >= 0.0, scale, float("inf")))
    return largest


@gluon.jit
def start_values(acc, alpha, p, sV, C: gl.constexpr):
    """Issue P·V for one part of V's channels: into a fresh accumulator if C.two_level, else added to acc · alpha."""
    LAYOUT: gl.constexpr = acc.type.layout
    p = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
    if C.two_level:
        fresh = gl.full(acc.shape, 0.0, gl.float32, LAYOUT)
        return warpgroup_mma(p, sV.permute((1, 0)), fresh, use_acc=False, is_async=True)
    else:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT))[:, None]
        return warpgroup_mma(p, sV.permute((1, 0)), acc * alpha, is_async=True)


@gluon.jit
def start_sums(p, sOnes):
    """Issue P times ones: sums of rows."""
    LAYOUT: gl.constexpr = output_layout(ONES)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)
    return warpgroup_mma(p, sOnes.permute((1, 0)), gl.full([64, ONES], 0.0, gl.float32, LAYOUT), use_acc=False, is_async=True)


@gluon.jit
def of_one_channel(sums):
    """Of sums (64, ONES), whose channels are the same, one that each lane has: (64, ONES // 2)."""
    first, _ = gl.split(gl.reshape(sums, (64, ONES // 2, 2)))
    return gl.convert_layout(first, lane_layout(), assert_trivial=True)


@gluon.jit
def add_values(acc, alpha, fresh, C: gl.constexpr):
    """acc · alpha + P·V."""
    if C.two_level:
        return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None] + fresh
    else:
        return fresh


@gluon.jit
def attend(
    m, l, acc0, acc1, n, block, sq, row_factor, keys, bias, mask, k, buffers, barriers, TEAM: gl.constexpr, C: gl.constexpr,
    MASKED: gl.constexpr, POSITIVE: gl.constexpr,
):  # fmt: skip
    """64 queries attend to key block n. It is the team's `block`-th block overall.

    Args:
        l: (64, ONES // 2), sums of P, the same in all columns.
        keys: tuple of values that determine scales and visibility of keys, see `consume`.
        bias: pointer to the score bias of the 64 queries, or None.
        mask: pointer to the head's (Sq, Sk), or None.
        k: pointer to the head's rows if they are int8.
        MASKED: some rows may not see some of the keys.
        POSITIVE: no m is negative, scores that fold their factor are below LARGEST_SCORE, and int8 keys are finite.
    """
    sQ0, sQ1, sK0, sK1, sV0, sV1, sOnes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    k_stride, k_scale, k_scale_stride, most, bias_factor, softcap, shift, mask_strides, rows, q_length, kv_length, offsets = keys
    FOLDED: gl.constexpr = folds_factor(C)
    BLOCK_N: gl.constexpr = C.config.block_n
    STAGES: gl.constexpr = C.config.stages
    stage = TEAM * STAGES + block % STAGES
    phase = block // STAGES & 1

    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score_layout(C)))
    if C.k_group == 1:
        column = n * BLOCK_N + columns
        key_scale = gl.load(k_scale + column.to(gl.int64) * k_scale_stride, mask=column < kv_length, other=1.0)
    else:
        index = n * BLOCK_N // SCALE_BLOCK if C.k_group == SCALE_BLOCK else 0
        block_scale = gl.load(k_scale + index * k_scale_stride)
        if C.int8 and not POSITIVE:
            any_nonfinite = block_scale < 0
            block_scale = gl.abs(block_scale)

    mbarrier.wait(k_full.index(stage), phase)
    x = start_scores(sq, buffers, stage, C)
    factor = score_factor(row_factor, 1.0 if C.k_group == 1 else block_scale, C.positive)
    large = False
    if FOLDED and not POSITIVE:
        large = ~(most * block_scale < largest_factor(C))
    # wait for V here, while the tensor core works; a wait for K behind P·V would cost registers that spill
    mbarrier.wait(v_full.index(stage), phase)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(k_empty.index(stage))

    s = x.to(gl.float32) if C.int8 else x
    if C.k_group == 1:
        s *= key_scale[None, :]
    elif C.int8 and not POSITIVE:
        s = set_nonfinite_keys(s, any_nonfinite, k, n * BLOCK_N + columns, k_stride, kv_length)
    if not FOLDED:
        s *= factor[:, None]
    if bias is not None:
        s = add_bias(s, bias, bias_factor, n * BLOCK_N + columns, kv_length)
    if C.softcap:
        s = cap_scores(s, shift, softcap)
    if MASKED:
        s = hide(s, rows[:, None], n * BLOCK_N, columns[None, :], q_length, kv_length, offsets, mask, mask_strides, C.window, True)
    y, m, alpha = code_step(s, factor, m, large, FOLDED, POSITIVE)
    p = pack_codes(gl.convert_layout(permute_keys(y), gl.DotOperandLayout(0, acc0.type.layout, 4), assert_trivial=True))

    fresh_l = start_sums(p, sOnes)
    fresh = start_values(acc0, alpha, p, sV0.index(stage), C)
    fresh, fresh_l = warpgroup_mma_wait(0, deps=(fresh, fresh_l))
    acc0 = add_values(acc0, alpha, fresh, C)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + of_one_channel(fresh_l)
    if C.dv1 > 0:
        # nothing moves above this line: the second part's fresh accumulator reuses the registers of the first's
        acc0 = warpgroup_mma_wait(0, deps=(acc0,))
        fresh = warpgroup_mma_wait(0, deps=(start_values(acc1, alpha, p, sV1.index(stage), C),))
        acc1 = add_values(acc1, alpha, fresh, C)
    mbarrier.arrive(v_empty.index(stage))
    return m, l, acc0, acc1


@gluon.jit
def load_channels(pointer, stride, START: gl.constexpr, WIDTH: gl.constexpr, DIM: gl.constexpr):
    """One number for each channel START …, spread over the warpgroup: it takes one or two registers until the end of
    the tile."""
    channels = START + gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(pointer + channels * stride, mask=channels < DIM, other=0.0)


@gluon.jit
def store_part(acc, factor, weight, scale, mean, out, out_stride, rows, q_length, START: gl.constexpr, DIM: gl.constexpr):
    """Normalise, descale and store channels START … of 64 rows. factor, weight: as in forward.store_part. `mean` may be
    None."""
    L: gl.constexpr = acc.type.layout
    C: gl.constexpr = gl.SliceLayout(0, L)
    R: gl.constexpr = gl.SliceLayout(1, L)
    value = acc * gl.convert_layout(factor, R)[:, None] * gl.convert_layout(scale, C)[None, :]
    if mean is not None:
        value += gl.convert_layout(weight, R)[:, None] * gl.convert_layout(mean, C)[None, :]
    channels = START + gl.arange(0, acc.shape[1], layout=C)
    rows = gl.convert_layout(rows, R)
    pointers = out + rows[:, None].to(gl.int64) * out_stride + channels[None, :]
    gl.store(pointers, value.to(out.dtype.element_ty), mask=(rows < q_length)[:, None] & (channels < DIM)[None, :])


@gluon.jit
def consume(buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ME: gl.constexpr, C: gl.constexpr):
    """One warpgroup: attention of 64 queries of every tile."""
    sQ0, sQ1, sK0, sK1, sV0, sV1, sOnes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q, k, q_scale, k_scale, v_scale, v_mean, bias, mask, sinks, means, table, out, lse = tensors
    q_strides, k_strides, q_scale_strides, k_scale_strides, v_scale_strides, mask_strides, out_strides = strides
    _, q_heads, kv_heads, q_tokens, _, _, _ = shape
    R: gl.constexpr = gl.SliceLayout(1, score_layout(C))
    O0: gl.constexpr = output_layout(C.dv0)
    O1: gl.constexpr = output_layout(max(C.dv1, 16))
    STAGES: gl.constexpr = C.config.stages
    sq0 = sQ0.index(ME).reshape((64, C.d0))
    sq = (sq0, sQ1.index(ME).reshape((64, C.d1)) if C.d1 > 0 else sq0)
    TEAM: gl.constexpr = ME // C.config.members
    MEMBER: gl.constexpr = ME % C.config.members
    block = 0
    for turn in range(0, gl.cdiv(positions, gl.num_programs(0) * C.config.teams)):
        position = place_in(turn, TEAM, C)
        if position < positions:
            batch, head, tile_row, lengths, own_offsets, begins = tile_at(position, shape, offsets, table, C)
            q_length, kv_length = lengths
            sequence, q_begin, k_begin, page = begins
            kv_head = (head // (q_heads // kv_heads)).to(gl.int64)
            batch = batch.to(gl.int64)
            head = head.to(gl.int64)
            if table is not None:
                q_begin = q_begin.to(gl.int64)
                k_begin = k_begin.to(gl.int64)
                page = page.to(gl.int64)
            sequence = sequence.to(gl.int64)
            first = tile_row + MEMBER * 64
            rows = first + gl.arange(0, 64, layout=R)

            index = rows * 0 if C.q_group == 0 else rows // C.q_group
            pointers = q_scale + batch * q_scale_strides[0] + head * q_scale_strides[1] + (q_begin + index.to(gl.int64)) * q_scale_strides[2]
            row_scale = gl.load(pointers, mask=rows < q_length, other=0.0)

            m = gl.full([64], NOTHING, gl.float32, R)
            l = gl.full([64, ONES // 2], 0.0, gl.float32, lane_layout())
            acc0 = gl.full([64, C.dv0], 0.0, gl.float32, O0)
            acc1 = gl.full([64, C.dv1], 0.0, gl.float32, O1) if C.dv1 > 0 else acc0

            # the team loads the blocks loaded_begin … loaded - 1; some row of this consumer sees those from `begin` to
            # seen - 1, and all its rows see all keys of those from `edge` to whole - 1
            loaded_begin, _, _, loaded = blocks_of(tile_row, C.config.tile_rows, lengths, own_offsets, C)
            begin, edge, whole, seen = blocks_of(first, 64, lengths, own_offsets, C)
            seen = gl.where(first < q_length, seen, loaded_begin)
            whole = 0 if mask is not None else gl.minimum(whole, seen)
            if C.window:
                begin = gl.minimum(begin, seen)
                edge = gl.minimum(edge, seen)
                block = release(barriers, loaded_begin, begin, block, TEAM, STAGES)
            scale_base = k_scale + batch * k_scale_strides[0] + kv_head * k_scale_strides[1]
            scale_base += (k_begin if C.k_group == 1 else page) * k_scale_strides[2]
            BOUNDED: gl.constexpr = mask is None and (folds_factor(C) or (C.int8 and C.k_group != 1))
            scales = load_largest_scales(scale_base, k_scale_strides[2], begin, seen, C) if BOUNDED else row_scale
            value_base = v_scale + sequence * v_scale_strides[0] + kv_head * v_scale_strides[1]
            scale0 = load_channels(value_base, v_scale_strides[2], 0, C.dv0, C.value_dim)
            scale1 = load_channels(value_base, v_scale_strides[2], C.dv0, C.dv1, C.value_dim) if C.dv1 > 0 else scale0
            mean0 = None
            mean1 = None
            if v_mean is not None:
                channel_means = v_mean + (sequence * kv_heads + kv_head) * C.value_dim
                mean0 = load_channels(channel_means, 1, 0, C.dv0, C.value_dim)
                mean1 = load_channels(channel_means, 1, C.dv0, C.dv1, C.value_dim) if C.dv1 > 0 else mean0
            row_factor = row_scale * (softmax_scale * LOG2E)
            most = gl.max(row_factor, 0) if folds_factor(C) else 0.0
            if BOUNDED:
                largest = gl.max(scales, 0)
                bounded = most * largest < largest_factor(C) if folds_factor(C) else largest < float("inf")
                whole = gl.where(bounded, whole, edge)
            bias_base = bias
            if bias is not None:
                bias_base = bias_row(bias, batch * q_heads + head, first, q_length, kv_length)
            mask_base = mask
            if mask is not None:
                mask_base += batch * mask_strides[0] + head * mask_strides[1]
            k_base = k
            if C.int8:
                k_base += batch * k_strides[0] + kv_head * k_strides[1] + k_begin * k_strides[2]
            bias_factor = softmax_scale * LOG2E
            mean_base = means
            if means is not None:
                mean_base += (batch * q_heads + head) * q_tokens + q_begin
            shift = load_rows_of(mean_base, rows, q_length)
            keys = (
                k_strides[2], scale_base, k_scale_strides[2], most, bias_factor, softcap, shift, mask_strides, rows, q_length, kv_length, own_offsets,
            )  # fmt: skip
            mbarrier.wait(q_full.index(ME), turn & 1)
            if C.window:
                for n in range(begin, edge):
                    m, l, acc0, acc1 = attend(
                        m, l, acc0, acc1, n, block, sq, row_factor, keys, bias_base, mask_base, k_base, buffers, barriers, TEAM, C, True, False,
                    )  # fmt: skip
                    block += 1
            opening = gl.minimum(whole, edge + 1)
            for n in range(edge, opening):
                m, l, acc0, acc1 = attend(
                    m, l, acc0, acc1, n, block, sq, row_factor, keys, bias_base, mask_base, k_base, buffers, barriers, TEAM, C, False, False,
                )  # fmt: skip
                block += 1
            # once no m is negative, none will be; in the rare other case, the masked loop handles the rest
            if whole > opening:
                of_rows = m
                if table is not None:  # rows behind the sequence are the next one's
                    of_rows = gl.where(rows < q_length, m, 0.0)
                whole = gl.where(gl.min(of_rows, 0) >= 0.0, whole, opening)
            for n in range(opening, whole):
                m, l, acc0, acc1 = attend(
                    m, l, acc0, acc1, n, block, sq, row_factor, keys, bias_base, mask_base, k_base, buffers, barriers, TEAM, C, False, True,
                )  # fmt: skip
                block += 1
            for n in range(whole, seen):
                m, l, acc0, acc1 = attend(
                    m, l, acc0, acc1, n, block, sq, row_factor, keys, bias_base, mask_base, k_base, buffers, barriers, TEAM, C, True, False,
                )  # fmt: skip
                block += 1
            mbarrier.arrive(q_empty.index(ME))
            block = release(barriers, seen, loaded, block, TEAM, STAGES)

            l = gl.convert_layout(gl.max(l, 1), R)
            if C.int8:
                l = set_nonfinite_rows(l, q + batch * q_strides[0] + head * q_strides[1] + q_begin * q_strides[2], rows, q_strides[2], q_length)
            weight = gl.where(l == 0, 0.0, 1.0)
            factor = inverse(l)
            if sinks is not None:
                sink = gl.load(sinks + head)
                if not C.softcap:
                    sink -= shift
                m, kept, l, alpha = add_sink(m, l, sink)
                factor = inverse(l) * alpha
                weight = inverse(l) * kept
            out_base = out + batch * out_strides[0] + head * out_strides[1] + q_begin * out_strides[2]
            store_part(acc0, factor, weight, scale0, mean0, out_base, out_strides[2], rows, q_length, 0, C.value_dim)
            if C.dv1 > 0:
                store_part(acc1, factor, weight, scale1, mean1, out_base, out_strides[2], rows, q_length, C.dv0, C.value_dim)
            if lse is not None:
                value = log_sum_exp(m, l)
                if means is not None and not C.softcap:
                    value += shift
                gl.store(lse + (batch * q_heads + head) * q_tokens + q_begin + rows, value, mask=rows < q_length)


@gluon.jit(do_not_specialize=["batches", "q_heads", "kv_heads", "q_length", "kv_length", "group", "tiles", "first_offset", "last_offset"])
def hopper_kernel(
    q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, tensors, strides, batches, q_heads, kv_heads, q_length, kv_length, group,
    tiles, first_offset, last_offset, softcap, softmax_scale, C: gl.constexpr,
):  # fmt: skip
    """Grid: at most one CTA per SM; see `run` for the arguments. Descriptors of absent parts are None.

    Lengths aren't passed in tuples, because Triton compiles a tuple element of 1 in as a constant. With one key, most
    of P is then 0 at compile time, and ptxas 12.8 packs two equal pairs of e4m3 into a register and writes only one
    half of it.
    """
    descriptors = (q0_desc, q1_desc, k0_desc, k1_desc, v0_desc, v1_desc, tensors[TABLE])
    shape = (batches, q_heads, kv_heads, q_length, kv_length, group, tiles)
    positions = tiles * batches * q_heads
    offsets = (first_offset, last_offset)
    BLOCK_N: gl.constexpr = C.config.block_n
    STAGES: gl.constexpr = C.config.teams * C.config.stages
    CONSUMERS: gl.constexpr = C.config.consumers
    TEAMS: gl.constexpr = C.config.teams
    E4M3: gl.constexpr = gl.float8e4nv
    ROWS_TYPE: gl.constexpr = gl.int8 if C.int8 else E4M3
    sQ0 = gl.allocate_shared_memory(ROWS_TYPE, [CONSUMERS, 1, 1, 64, C.d0], rows_layout(64, C.d0))
    sK0 = gl.allocate_shared_memory(ROWS_TYPE, [STAGES, 1, 1, BLOCK_N, C.d0], rows_layout(BLOCK_N, C.d0))
    sV0 = gl.allocate_shared_memory(E4M3, [STAGES, C.dv0, BLOCK_N], values_layout(C.dv0, BLOCK_N))
    sQ1 = sQ0
    sK1 = sK0
    sV1 = sV0
    if C.d1 > 0:
        sQ1 = gl.allocate_shared_memory(ROWS_TYPE, [CONSUMERS, 1, 1, 64, C.d1], rows_layout(64, C.d1))
        sK1 = gl.allocate_shared_memory(ROWS_TYPE, [STAGES, 1, 1, BLOCK_N, C.d1], rows_layout(BLOCK_N, C.d1))
    if C.dv1 > 0:
        sV1 = gl.allocate_shared_memory(E4M3, [STAGES, C.dv1, BLOCK_N], values_layout(C.dv1, BLOCK_N))
    sOnes = gl.allocate_shared_memory(E4M3, [ONES, BLOCK_N], values_layout(ONES, BLOCK_N))
    ones = gl.full([ONES, BLOCK_N], E4M3_ONE, gl.uint8, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    sOnes.store(ones.to(E4M3, bitcast=True))  # as bytes: ptxas 12.8 packs two equal pairs of e4m3 into one half of a register
    fence_async_shared()
    buffers = (sQ0, sQ1, sK0, sK1, sV0, sV1, sOnes)

    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=C.config.members)
        mbarrier.init(v_empty.index(i), count=C.config.members)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)

    ZERO: gl.constexpr = gl.constexpr(0)
    ONE: gl.constexpr = gl.constexpr(1)
    TWO: gl.constexpr = gl.constexpr(2)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ZERO, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ZERO, C)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2 and TEAMS == 2:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ZERO, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ONE, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ZERO, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ONE, C)),
            ],
            [4, 1, 1],
            [C.config.registers, 24, 24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ZERO, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ONE, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ZERO, C)),
            ],
            [4, 1],
            [C.config.registers, 24],
        )
    elif TEAMS == 1:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ZERO, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ONE, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, TWO, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ZERO, C)),
            ],
            [4, 4, 1],
            [C.config.registers, C.config.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ZERO, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, ONE, C)),
                (consume, (buffers, barriers, tensors, strides, shape, positions, offsets, softcap, softmax_scale, TWO, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ZERO, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, ONE, C)),
                (produce, (descriptors, buffers, barriers, shape, positions, offsets, TWO, C)),
            ],
            [4, 4, 1, 1, 1],
            [C.config.registers, C.config.registers, 24, 24, 24],
        )


def rows_descriptor(x: torch.Tensor, rows: int, width: int) -> TensorDescriptor | None:
    """A descriptor of TMA boxes of rows x width in (B, H, S, D), with zeros outside; None if the width is 0."""
    if width == 0:
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width], host_rows_layout(rows, width))


def values_descriptor(v: torch.Tensor, channels: int, keys: int) -> TensorDescriptor | None:
    """A descriptor of TMA boxes of channels x keys in (B · Hkv · Dv, S_padded); None if there are no channels."""
    if channels == 0:
        return None
    v = v.view(-1, v.shape[3])
    return TensorDescriptor(v, list(v.shape), list(v.stride()), [channels, keys], host_values_layout(channels, keys))


def run(call: Call, config: HopperConfig, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the Hopper kernel.

    Args:
        warmup: compile only.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), empty unless call.return_lse.
    """
    out = empty_output(call.q, call.value_dim, call.out_dtype)
    lse = empty_lse(call.q, call.return_lse)
    if out.numel() == 0:
        return out, lse
    assert call.q_scale is not None
    traits = Traits.of(call, config, device)
    tiles = ceil_div(call.q_length, config.tile_rows) if call.varlen is None else units_of(call.varlen.q, config.tile_rows)
    ctas = min(ceil_div(tiles * call.batch * call.q_heads, config.teams), device.sm_count)
    launch(
        hopper_kernel,
        (ctas,),
        rows_descriptor(call.q, ROWS, traits.d0),
        rows_descriptor(call.q, ROWS, traits.d1),
        rows_descriptor(call.k, config.block_n, traits.d0),
        rows_descriptor(call.k, config.block_n, traits.d1),
        values_descriptor(call.v, traits.dv0, config.block_n),
        values_descriptor(call.v, traits.dv1, config.block_n),
        (
            call.q if traits.int8 else None,
            call.k if traits.int8 else None,
            call.q_scale,
            call.k_scale,
            call.v_scale,
            call.v_mean,
            call.bias,
            call.mask_bytes,
            call.sinks,
            call.mean_scores,
            table_of(call, config.tile_rows, device, warmup=warmup),
            out,
            lse if call.return_lse else None,
        ),
        (
            call.q.stride(),
            call.k.stride(),
            call.q_scale.stride(),
            call.k_scale.stride(),
            call.v_scale.stride(),
            (0, 0, 0, 0) if call.attn_mask is None else call.attn_mask.stride(),
            out.stride(),
        ),
        call.batch,
        call.q_heads,
        call.kv_heads,
        call.q_length,
        call.kv_length,
        heads_in_l2(call, ctas * config.teams),
        tiles,
        *call.window_offsets,
        float(call.softcap),
        call.softmax_scale,
        traits,
        num_warps=4,
        warmup=warmup,
    )
    return out, lse
