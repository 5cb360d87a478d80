"""Caches of other engines: attention to them as they are, and writing tokens to them, as fp8attn/paged_tensors.py
defines them.

Attention is one launch for prefill and decode. The query heads that share a key/value head are the rows of one tile.
If there are few tiles, several programs share a tile's blocks of keys, and a second kernel adds their sums in the order
of the keys. e4m3 codes are multiplied as halves, which hold them exactly: tiles of few rows are bound by memory, and a
half that isn't finite shows itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import paged_tensors, reference
from ..device import Device
from ..paged_tensors import PagedTensors, by_token, capacity_of, counted_window, scale_strides
from ..pages import PagedBatch, empty_answer, tokens_of
from ..reference import Scoring
from .launch import ceil_div, launch
from .paged_append import page_number, row_strides
from .paged_attention import (
    INVERSE_OFFSET,
    Outputs,
    Tiling,
    check_invariant,
    finite_or_zero,
    quantized_rows,
    splits_of,
    store_sums,
    visible_blocks,
    work_of_program,
)
from .quantize_steps import power_of_2
from .tile import E4M3_NAN, LOG2E, P_OFFSET, cap_scores, e4m3_code, half_of_code, is_finite, probabilities, scale_of, score_factor
from .varlen import SEARCH

KEY_BLOCK: tl.constexpr = tl.constexpr(paged_tensors.KEY_BLOCK)
LARGEST_P: tl.constexpr = tl.constexpr(2.0**reference.P_OFFSET)

WRITTEN = 8
"""Tokens of a program that writes."""


@dataclass(frozen=True)
class Traits:
    """Everything that the kernels know at compile time.

    Attributes:
        dim, value_dim: D and Dv.
        width, value_width: the same, rounded up to powers of two.
        page: slots of a page if they are a power of two, else 0.
        codes: the cache is e4m3.
        k_by_token, v_by_token: scales are per token and head.
        softcap: scores are capped.
        native: the compiler supports e4m3.
        positive: softmax_scale > 0.
        part, int8: as of paged_append.Traits: queries aren't rotated.
    """

    dim: int
    value_dim: int
    width: int
    value_width: int
    page: int
    codes: bool
    k_by_token: bool
    v_by_token: bool
    softcap: bool
    native: bool
    positive: bool
    part: int = 0
    int8: bool = False

    @classmethod
    def of(cls, cache: PagedTensors, device: Device, how: Scoring | None = None) -> Traits:
        dim, value_dim = cache.k.shape[3], cache.v.shape[3]
        return cls(
            dim, value_dim, max(power_of_2(dim), 32), max(power_of_2(value_dim), 32), 0 if cache.page & (cache.page - 1) else cache.page,
            cache.is_fp8, by_token(cache.k_scale), by_token(cache.v_scale), how is not None and how.softcap > 0,
            device.has_fp8_units and not device.emulated, how is None or how.softmax_scale > 0,
        )  # fmt: skip


@triton.jit
def as_halves(x, C: tl.constexpr):
    """e4m3 codes, bytes or halves already, as float16."""
    if x.dtype == tl.uint8 and C.native:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif x.dtype == tl.uint8:
        return half_of_code(x)
    else:
        return x.to(tl.float16)


@triton.jit
def place_of(index, page, C: tl.constexpr):
    """The page and the slot of tokens, or of slots of all pages, by their index."""
    if C.page > 0:
        return index // C.page, index % C.page
    else:
        return index // page, index % page


@triton.jit
def keys_seen(position, real, end, left, right):
    """The first and the last key (M,) that rows see; `end` and -1 of rows that aren't real."""
    first = tl.where(left >= 0, tl.maximum(position - left, 0), 0)
    last = tl.where(right >= 0, position + tl.minimum(right, end - 1 - position), end - 1)
    return tl.where(real, first, end), tl.where(real, last, -1)


@triton.jit
def load_slots(x, strides, number, slot, inside, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """What one head has in slots (N,) of pages, as (N, WIDTH); zeros outside."""
    columns = tl.arange(0, WIDTH)
    at = number * strides[0] + slot.to(tl.int64) * strides[1]
    return tl.load(x + at[:, None] + columns[None, :], mask=inside[:, None] & (columns < DIM)[None, :], other=0)


@triton.jit
def load_scale(scale, strides, number, slot, inside, BY_TOKEN: tl.constexpr):
    """One head's scale of each slot (N,), or of all."""
    if BY_TOKEN:
        return tl.load(scale + number * strides[1] + slot.to(tl.int64) * strides[2], mask=inside, other=1.0)
    else:
        return tl.load(scale)


@triton.jit
def clean_codes(key, value, C: tl.constexpr):
    """Codes as halves, values that are NaN as zeros; and which tokens (N,) have such values. Keys that are NaN show in
    scores."""
    nan = (value & E4M3_NAN) == E4M3_NAN
    bad = tl.max(tl.where(nan, 1, 0), 1) > 0
    return as_halves(key, C), as_halves(tl.where(nan, 0, value), C), bad


@triton.jit
def clean_floats(key, value):
    """Keys and values with zeros where they aren't finite; and which tokens (N,) aren't."""
    finite_key, finite_value = is_finite(key.to(tl.float32)), is_finite(value.to(tl.float32))
    bad = tl.max(tl.where(finite_key, 0, 1), 1) + tl.max(tl.where(finite_value, 0, 1), 1) > 0
    return tl.where(finite_key, key, 0.0).to(key.dtype), tl.where(finite_value, value, 0.0).to(value.dtype), bad


@triton.jit
def scores(q, key, factor, k_scale, C: tl.constexpr):
    """Scores (M, N) in base 2 of queries and keys. factor: (M,)."""
    if C.codes:
        x = tl.dot(q, key.T)
        if C.k_by_token:
            return x * score_factor(factor[:, None], k_scale[None, :], C.positive)
        else:
            return x * score_factor(factor, k_scale, C.positive)[:, None]
    else:
        return tl.dot(q, key.to(q.dtype).T, input_precision="ieee") * factor[:, None]


@triton.jit
def weighted_values(p, value, v_scale, C: tl.constexpr):
    """P (M, N), rounded, times values (N, WIDTH); and the factors (M,) that the products lack."""
    if C.v_by_token:
        p = p * v_scale[None, :]
        scale = scale_of(tl.max(tl.abs(p), 1), LARGEST_P)
        rounded = as_halves(probabilities(p * tl.div_rn(1.0, scale)[:, None], False, C.native), C)
        return tl.dot(rounded, value), scale
    elif C.codes:
        return tl.dot(as_halves(probabilities(p, False, C.native), C), value), 1.0
    else:
        return tl.dot(p.to(value.dtype), value, input_precision="ieee"), 1.0


@triton.jit
def add_block(x, value, v_scale, m, l, acc, C: tl.constexpr):
    """Add attention to a block of keys to the sums. x: (M, N), -inf where hidden."""
    OFFSET: tl.constexpr = P_OFFSET if C.codes else 0.0
    UNIT: tl.constexpr = INVERSE_OFFSET if C.codes else 1.0
    largest = tl.max(x, 1)
    p = tl.exp2((x - finite_or_zero(largest)[:, None]) + OFFSET)
    m_new = tl.maximum(m, largest)
    alpha = tl.exp2(m - finite_or_zero(m_new))
    beta = tl.exp2(largest - finite_or_zero(m_new)) * UNIT
    fresh, factor = weighted_values(p, value, v_scale, C)
    return m_new, l * alpha + tl.sum(p, 1) * beta, acc * alpha[:, None] + fresh * (beta * factor)[:, None]


@triton.jit(
    do_not_specialize=[
        "rows_of_batch",
        "q_heads",
        "kv_heads",
        "length",
        "table_stride",
        "table_width",
        "every_page",
        "page",
        "capacity",
        "left",
        "right",
        "splits",
        "most",
    ]
)
def tensors_attention_kernel(
    q, q_strides, k, k_strides, v, v_strides, k_scale, k_scale_strides, v_scale, v_scale_strides, page_table, lengths, counts, cu_seqlens,
    sinks, out, lse, partial, partial_sums, rows_of_batch, q_heads, kv_heads, length, table_stride, table_width, every_page, page, capacity,
    left, right, splits, most, softmax_scale, softcap, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows x splits x kv_heads x batch, in one dimension. Packed queries are one row of the batch.

    Args:
        q: (B, Hq, S, D); or packed, as (1, Hq, T, D) with stride 0 of rows.
        k, v: (P, page, Hkv, D or Dv), strides of this order; bytes of e4m3 codes.
        k_scale, v_scale: strides over rows of the batch, pages, slots and heads; None of caches in half precision.
        out, lse, partial, partial_sums: as of paged_attention.attention_kernel.
        capacity: tokens that a row of the page table has pages for.
        most: queries of a row of the batch; one with more is NaN.
    """
    VALUE_WIDTH: tl.constexpr = C.value_width
    group = q_heads // kv_heads
    tiles, split, kv_head, batch, begin, own_length, most_real, query, head = work_of_program(
        cu_seqlens, rows_of_batch, length, group, kv_heads, splits, ROWS
    )
    end = tl.maximum(tl.load(lengths + batch), 0)
    count = most_real
    if counts is not None:
        count = tl.load(counts + batch)
    count = tl.maximum(tl.minimum(tl.minimum(count, most_real), end), 0)
    k += kv_head * k_strides[2]
    v += kv_head * v_strides[2]
    if C.codes:
        k_scale += batch * k_scale_strides[0] + kv_head * k_scale_strides[3]
        v_scale += batch * v_scale_strides[0] + kv_head * v_scale_strides[3]

    exists = query < own_length
    real = query < count
    first, last = keys_seen(end - count + query, real, end, left, right)
    columns = tl.arange(0, C.width)
    at = batch * q_strides[0] + head[:, None] * q_strides[1] + (begin + query)[:, None].to(tl.int64) * q_strides[2]
    x = tl.load(q + at + columns[None, :], mask=real[:, None] & (columns < C.dim)[None, :], other=0.0)
    factor = tl.full([ROWS], 1.0, tl.float32) * (softmax_scale * LOG2E)
    if C.codes:
        x, row_scale, bad_row = quantized_rows(x, C)
        x = as_halves(x, C)
        factor *= row_scale
    else:
        finite = is_finite(x.to(tl.float32))
        bad_row = tl.max(tl.where(finite, 0, 1), 1) > 0
        x = tl.where(finite, x, 0.0).to(x.dtype)

    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    if split == 0:
        if sinks is not None:
            m = tl.where(real, tl.load(sinks + head, mask=real, other=0.0) * LOG2E, m)
            l = tl.where(real, 1.0, l)
        # keys that the page table has no place for
        l = tl.where((last >= capacity) | (real & (own_length > most)), float("nan"), l)
    least = tl.min(first, 0) // KEY_BLOCK
    blocks = tl.maximum(tl.cdiv(tl.minimum(tl.max(last, 0) + 1, capacity), KEY_BLOCK) - least, 0)
    share = tl.cdiv(blocks, splits)
    for block in range(least + split * share, least + tl.minimum(split * share + share, blocks)):
        keys = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
        index, slot = place_of(keys, page, C)
        number, inside = page_number(page_table + batch * table_stride, tl.where(keys < end, index, table_width), table_width, every_page)
        key = load_slots(k, k_strides, number, slot, inside, C.dim, C.width)
        value = load_slots(v, v_strides, number, slot, inside, C.value_dim, C.value_width)
        key_scale = 1.0
        value_scale = 1.0
        if C.codes:
            key, value, bad = clean_codes(key, value, C)
            key_scale = load_scale(k_scale, k_scale_strides, number, slot, inside, C.k_by_token)
            value_scale = load_scale(v_scale, v_scale_strides, number, slot, inside, C.v_by_token)
            bad |= (is_finite(key_scale) == 0) | (is_finite(value_scale) == 0)
            value_scale = tl.where(is_finite(value_scale), value_scale, 0.0)
        else:
            key, value, bad = clean_floats(key, value)
        bad |= inside == 0
        s = scores(x, key, factor, key_scale, C)
        if C.softcap:
            s = cap_scores(s, factor * 0.0, softcap)
        visible = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
        s = tl.where(visible, tl.where(bad[None, :] | bad_row[:, None], float("nan"), s), -float("inf"))
        m, l, acc = add_block(s, value, value_scale, m, l, acc, C)
    if C.codes and not C.v_by_token:
        restore = tl.load(v_scale)
        acc *= tl.where(is_finite(restore), restore, 0.0)

    every = (tl.num_programs(0) // tiles // splits // kv_heads).to(tl.int64) * q_heads * length
    place = (batch if cu_seqlens is None else batch * 0, head, begin + query, exists, q_heads, length)
    store_sums(out, lse, partial, partial_sums, m, l, acc, cu_seqlens, place, split, every, C.value_dim)


def scale_arguments(cache: PagedTensors) -> list[torch.Tensor | tuple[int, ...] | None]:
    """K's scale and its strides, and V's; None of caches in half precision."""
    return [part for x in cache.scales for part in (x, None if x is None else scale_strides(x))]


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes, anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def attend(
    q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, device: Device, out_dtype: torch.dtype, *,
    splits: int | None = None, warmup: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """paged_tensors.attend by kernels.

    Args:
        splits: programs that share a tile's blocks; None: as many as fill the GPU.
        warmup: compile only.

    Returns:
        out (B, Hq, S, Dv) in `out_dtype` and the LSE, float32 (B, Hq, S); of packed queries (T, Hq, Dv) and (Hq, T).
    """
    kv_heads, value_dim, table = cache.kv_heads, cache.v.shape[3], batch.page_table
    check_invariant(batch)
    if q.numel() == 0 or batch.lengths.shape[0] == 0:
        out, lse = empty_answer(q, value_dim)
        return out.to(out_dtype), lse
    traits = Traits.of(cache, device, how)
    k, v = bytes_of(cache.k), bytes_of(cache.v)
    # the interpreter can't multiply bfloat16, and truncates to it instead of rounding
    if device.emulated and q.dtype == torch.bfloat16:
        q = q.float()
        k, v = (x.float() if x.dtype == torch.bfloat16 else x for x in (k, v))
    widest, capacity = max(traits.width, traits.value_width), capacity_of(cache, batch)
    tiling = Tiling.of(q, batch, kv_heads, widest)
    left, right = counted_window(how.window)
    if splits is None:
        most = capacity if batch.max_length is None else min(capacity, batch.max_length)
        span = -1 if left < 0 or right < 0 else left + right
        blocks = visible_blocks(ceil_div(most, paged_tensors.KEY_BLOCK), span, tiling, paged_tensors.KEY_BLOCK)
        splits = splits_of(q, batch, tiling.tiles, blocks, device)
    outputs = Outputs.empty(q, value_dim, torch.float32 if device.emulated else out_dtype, splits)
    operand = q if batch.cu_seqlens is None else q.transpose(0, 1).unsqueeze(0)
    warps = 8 if tiling.rows > 32 or widest > 128 else 4
    # Triton loads page numbers stages before keys: of four stages one has keys in flight, of six two have
    stages = 4 if tiling.rows > 32 or device.shared_memory < 160_000 else 6
    launch(
        tensors_attention_kernel, (tiling.tiles * splits,),
        operand, row_strides(operand), k, k.stride(), v, v.stride(), *scale_arguments(cache), table, batch.lengths, batch.counts,
        batch.cu_seqlens, how.sinks, *outputs.tensors(), batch.lengths.shape[0], q.shape[1], kv_heads, tokens_of(q), table.stride(0),
        table.shape[1], cache.k.shape[0], cache.page, capacity, left, right, splits, batch.most_queries(q), how.softmax_scale,
        how.softcap, tiling.rows, traits,
        num_warps=warps, num_stages=stages, warmup=warmup,
    )  # fmt: skip
    outputs.combine(traits.value_width, warmup)
    return outputs.out.to(out_dtype), outputs.lse


@triton.jit
def write_rows(
    x, rows, inside, into, at, scale, scale_at, BY_TOKEN: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Write one head's tokens, at `rows` (N,) of x, to `at` (N,) of `into`: e4m3 by scales at `scale_at` (N,), which
    tokens with a scale each get."""
    columns = tl.arange(0, WIDTH)
    where = inside[:, None] & (columns < DIM)[None, :]
    y = tl.load(x + rows[:, None] + columns[None, :], mask=where, other=0.0)
    if C.codes:
        y = y.to(tl.float32)
        if BY_TOKEN:
            own = scale_of(tl.max(tl.where(is_finite(y), tl.abs(y), 0.0), 1))
            tl.store(scale + scale_at, own, mask=inside)
        else:
            own = tl.load(scale + scale_at, mask=inside, other=1.0)
        y = e4m3_code(tl.where(is_finite(y), y, float("nan")) * tl.div_rn(1.0, own)[:, None], C.native)
    tl.store(into + at[:, None] + columns[None, :], y, mask=where)


@triton.jit
def row_of_token(token, cu_seqlens, rows_of_batch):
    """The row of the batch that packed tokens (N,) belong to; `rows_of_batch` behind the last one."""
    lanes = tl.arange(0, SEARCH)
    row = token * 0
    for first in range(0, rows_of_batch, SEARCH):
        end = tl.load(cu_seqlens + first + lanes + 1, mask=first + lanes < rows_of_batch, other=2147483647)
        row += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    return row


@triton.jit
def position_of_token(token, lengths, counts, cu_seqlens, rows_of_batch, length):
    """Of new tokens (N,) of a batch: the row of the batch, the position in its sequence, and whether there is one; else
    row and position are 0."""
    row = token // length
    own = token % length
    count = length
    if cu_seqlens is not None:
        row = row_of_token(token, cu_seqlens, rows_of_batch)
    exists = row < rows_of_batch
    row = tl.where(exists, row, 0)
    if cu_seqlens is not None:
        begin = tl.maximum(tl.load(cu_seqlens + row, mask=exists, other=0), 0)
        own = token - begin
        count = tl.minimum(tl.load(cu_seqlens + row + 1, mask=exists, other=0), length) - begin
    elif counts is not None:
        count = tl.load(counts + row, mask=exists, other=0)
    end = tl.maximum(tl.load(lengths + row, mask=exists, other=0), 0)
    count = tl.maximum(tl.minimum(tl.minimum(count, length), end), 0)
    exists &= (own >= 0) & (own < count)
    return row, tl.where(exists, end - count + own, 0), exists


@triton.jit
def slot_of_token(
    token, page_table, lengths, counts, cu_seqlens, rows_of_batch, length, table_stride, table_width, every_page, page, C: tl.constexpr
):
    """Where new tokens (N,) of a batch go: the row of the batch, the page, the slot, and whether there is one."""
    row, position, inside = position_of_token(token, lengths, counts, cu_seqlens, rows_of_batch, length)
    index, slot = place_of(position, page, C)
    number, exists = page_number(page_table + row.to(tl.int64) * table_stride, tl.where(inside, index, table_width), table_width, every_page)
    return row, number, slot, inside & exists


@triton.jit(
    do_not_specialize=["tokens", "length", "kv_heads", "every_page", "page", "rows_of_batch", "table_stride", "table_width"]
)  # fmt: skip
def write_tokens_kernel(
    new_k, new_k_strides, new_v, new_v_strides, slots, page_table, lengths, counts, cu_seqlens, k, k_strides, v, v_strides, k_scale,
    k_scale_strides, v_scale, v_scale_strides, tokens, length, kv_heads, every_page, page, rows_of_batch, table_stride, table_width,
    ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: chunks of ROWS tokens x kv_heads, in one dimension.

    Args:
        new_k, new_v: strides of (B, S, Hkv, D or Dv), or of (1, T, Hkv, D or Dv).
        slots: (T,); or None: tokens go where the batch's pages have slots for them.
        tokens, length: B * S and S, or T.
    """
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    token = tl.program_id(0) // kv_heads * ROWS + tl.arange(0, ROWS)
    if slots is not None:
        place = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
        inside = (place >= 0) & (place < every_page.to(tl.int64) * page)
        number, slot = place_of(tl.where(inside, place, 0), page, C)
        row = token * 0
    else:
        row, number, slot, inside = slot_of_token(
            token, page_table, lengths, counts, cu_seqlens, rows_of_batch, length, table_stride, table_width, every_page, page, C
        )
        inside &= token < tokens
    slot = slot.to(tl.int64)
    row = row.to(tl.int64)
    k_scale_at = number
    v_scale_at = number
    if C.codes:
        k_scale_at = row * k_scale_strides[0] + number * k_scale_strides[1] + slot * k_scale_strides[2] + head * k_scale_strides[3]
        v_scale_at = row * v_scale_strides[0] + number * v_scale_strides[1] + slot * v_scale_strides[2] + head * v_scale_strides[3]
    k_at = number * k_strides[0] + slot * k_strides[1] + head * k_strides[2]
    v_at = number * v_strides[0] + slot * v_strides[1] + head * v_strides[2]
    first = (token // length).to(tl.int64)
    own = (token % length).to(tl.int64)
    k_from = first * new_k_strides[0] + own * new_k_strides[1] + head * new_k_strides[2]
    v_from = first * new_v_strides[0] + own * new_v_strides[1] + head * new_v_strides[2]
    write_rows(new_k, k_from, inside, k, k_at, k_scale, k_scale_at, C.k_by_token, C.dim, C.width, C)
    write_rows(new_v, v_from, inside, v, v_at, v_scale, v_scale_at, C.v_by_token, C.value_dim, C.value_width, C)


def _write(
    cache: PagedTensors, new: list[torch.Tensor], slots: torch.Tensor | None, batch: PagedBatch | None, device: Device, warmup: bool
) -> None:  # fmt: skip
    """Write keys and values (B, S, Hkv, D or Dv) by slots of all of them, or of a batch."""
    rows, length = new[0].shape[:2]
    if rows * length == 0:
        return
    operands = [part for x in new for part in (x, x.stride())]
    old = [part for x in (cache.k, cache.v) for part in (bytes_of(x), x.stride())]
    table = None if batch is None else batch.page_table
    of_batch = [None] * 4 if batch is None else [batch.page_table, batch.lengths, batch.counts, batch.cu_seqlens]
    numbers = (0, 0, 0) if table is None else (table.shape[0], table.stride(0), table.shape[1])
    launch(
        write_tokens_kernel, (ceil_div(rows * length, WRITTEN) * cache.kv_heads,),
        *operands, slots, *of_batch, *old, *scale_arguments(cache), rows * length, length, cache.kv_heads, cache.k.shape[0], cache.page, *numbers,
        WRITTEN, Traits.of(cache, device),
        num_warps=4, warmup=warmup,
    )  # fmt: skip


def write(cache: PagedTensors, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, device: Device, *, warmup: bool = False) -> None:
    """paged_tensors.write by a kernel, in one launch. `warmup`: compile only."""
    _write(cache, [x.unsqueeze(0) for x in (k, v)], slots, None, device, warmup)


def append(cache: PagedTensors, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, device: Device, *, warmup: bool = False) -> None:
    """paged_tensors.append by a kernel, in one launch. `warmup`: compile only."""
    _write(cache, [x.unsqueeze(0) if x.dim() == 3 else x.transpose(1, 2) for x in (k, v)], None, batch, device, warmup)
