"""Places of rows of caches of other engines, and copies of e4m3 ones, as fp8attn/paged_copies.py defines them; and the
LSE of queries that attended to them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import device_of
from ..paged_copies import Copies, Room, Spans
from ..paged_tensors import PagedTensors, counted_window
from ..pages import PAGE, PagedBatch, tokens_of
from .launch import ceil_div, launch
from .paged_append import page_number
from .paged_tensors import Traits, bytes_of, load_slots, place_of, scale_arguments
from .quantize_steps import power_of_2
from .tile import E4M3_NAN, SCALE_BLOCK, is_finite, key_of_slot
from .varlen import SEARCH, begins_of, first_unit, spans_of, unit_at

PROGRAMS = 64
"""Programs that copy, for each multiprocessor: they have several blocks where there are more."""

CLEARING = 4
"""Programs that place rows and clear queries, for each multiprocessor."""

CLEARED: tl.constexpr = tl.constexpr(16)  # queries that are cleared at a time
PIECE: tl.constexpr = tl.constexpr(32)  # tokens of a block that are copied at a time


@triton.jit
def new_tokens_of(row, cu_seqlens, lengths, length, inside):
    """Of rows of a batch, a tensor or a number: the first new token among packed ones, how many were given, and the
    tokens of the sequence, below 0 if there are none; 0 where not `inside`."""
    if cu_seqlens is None:
        begin = row * 0
        given = tl.where(inside, length, 0)
    else:
        begin, given = spans_of(cu_seqlens, None, row, length, inside)
    return begin, given, tl.load(lengths + row, mask=inside, other=0)


@triton.jit
def round_up(n):
    return tl.cdiv(n, SCALE_BLOCK) * SCALE_BLOCK


@triton.jit
def copied_tokens(given, count, end, limits):
    """Of rows, tensors or numbers: how many of `count` new tokens attend to copies; the first token that is copied, and
    how many are. limits: few, most, longest and beyond of paged_copies.Room, and the window's left side."""
    few, most, longest, beyond, left = limits
    used = tl.minimum(end, longest + beyond)
    seeing = tl.where(given > most, 0, tl.maximum(count - (end - used), 0))
    first = tl.where(left < 0, 0, tl.maximum(used - seeing - left, 0) // SCALE_BLOCK * SCALE_BLOCK)
    return seeing, first, tl.where((given > few) & (seeing > 0), used - first, 0)


@triton.jit
def real_tokens(row, counts, given, end, inside):
    """How many of the `given` new tokens of rows, a tensor or a number, are tokens of `end`."""
    count = given if counts is None else tl.load(counts + row, mask=inside, other=0)
    return tl.maximum(tl.minimum(tl.minimum(count, given), end), 0)


@triton.jit
def wanted_before(row, cu_seqlens, lengths, counts, length, limits):
    """The tokens that rows before one would take."""
    lanes = tl.arange(0, SEARCH)
    found = tl.zeros([SEARCH], tl.int64)
    for first in range(0, row, SEARCH):
        index = first + lanes
        _, given, end = new_tokens_of(index, cu_seqlens, lengths, length, index < row)
        _, _, copied = copied_tokens(given, real_tokens(index, counts, given, end, index < row), end, limits)
        found += round_up(copied)
    return tl.sum(found, 0)


@triton.jit
def clear_queries(out, lse, first_row, row_step, lse_at, first, real, given, step, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """One head's queries from `first` on, CLEARED at a time: NaN before `real`, then zeros and -inf. `row_step`: rows
    between two queries."""
    channels = tl.arange(0, WIDTH)
    for start in range(first, given, step):
        query = start + tl.arange(0, CLEARED)
        at = (first_row + query.to(tl.int64) * row_step) * DIM
        where = (query < given)[:, None] & (channels < DIM)[None, :]
        value = tl.where(query < real, float("nan"), 0.0)
        tl.store(
            out + at[:, None] + channels[None, :], (value[:, None] + tl.zeros([CLEARED, WIDTH], tl.float32)).to(out.dtype.element_ty), mask=where
        )
        tl.store(lse + lse_at + query, tl.where(query < real, float("nan"), -float("inf")), mask=query < given)


@triton.jit
def load_tokens(token, used, there, table, table_width, k, k_strides, v, v_strides, every_page, page, finite, C: tl.constexpr):
    """Codes of one head's tokens (N,), keys (N, width) and values (N, value width): NaN and zeros of those that make
    rows NaN which see them."""
    index, slot = place_of(token, page, C)
    number, exists = page_number(table, tl.where(token < there, index, table_width), table_width, every_page)
    exists = exists & (token < used)
    key = load_slots(k, k_strides, number, slot, exists, C.dim, C.width)
    value = load_slots(v, v_strides, number, slot, exists, C.value_dim, C.value_width)
    bad = (tl.max(((value & E4M3_NAN) == E4M3_NAN).to(tl.int32), 1) > 0) | (exists == 0) | (finite == 0)
    return tl.where(bad[:, None], E4M3_NAN, key).to(tl.uint8), tl.where(bad[:, None], 0, value).to(tl.uint32)


@triton.jit
def store_keys(to, token, count, key, C: tl.constexpr):
    """Store keys (N, width) of tokens (N,), counted from the first that is copied."""
    columns = tl.arange(0, C.width)
    tl.store(to + token.to(tl.int64)[:, None] * C.dim + columns[None, :], key, mask=(token < count)[:, None] & (columns < C.dim)[None, :])


@triton.jit(
    do_not_specialize=[
        "rows_of_batch",
        "q_heads",
        "kv_heads",
        "length",
        "left",
        "right",
        "few",
        "most",
        "longest",
        "beyond",
        "room",
        "of_pass",
        "number",
        "chunks",
    ]
)
def place_kernel(
    lengths, counts, cu_seqlens, q_starts, queries, k_starts, keys, firsts, ends, out, lse, rows_of_batch, q_heads, kv_heads, length,
    left, right, few, most, longest, beyond, room, of_pass, number, chunks, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: chunks x kv_heads x rows of the batch, in one dimension.

    Queries that are no tokens get zeros and -inf, and NaN those behind the tokens that a row has room for.

    Args:
        q_starts, queries, k_starts, keys, firsts, ends: of paged_copies.Spans.
        out, lse: (B, Hq, S, Dv) and (B, Hq, S); or packed, (T, Hq, Dv) and (Hq, T). DIM: Dv. WIDTH: a power of two.
        few, most, longest, beyond, room, of_pass: of paged_copies.Room, `room` its tokens. number: of the pass.
    """
    program = tl.program_id(0)
    chunk = program % chunks
    head = (program // chunks % kv_heads).to(tl.int64)
    row = (program // chunks // kv_heads).to(tl.int64)
    begin, given, end = new_tokens_of(row, cu_seqlens, lengths, length, row < rows_of_batch)
    limits = few, most, longest, beyond, left
    count = real_tokens(row, counts, given, end, row < rows_of_batch)
    seeing, first, keys_of_row = copied_tokens(given, count, end, limits)
    of_row = wanted_before(row, cu_seqlens, lengths, counts, length, limits) - number.to(tl.int64) * of_pass
    of_this = (given > few) & (of_row >= 0) & (of_row < of_pass)
    if (head == 0) & (chunk == 0):
        placed = of_this & (keys_of_row > 0)
        tl.store(q_starts + row, (row * q_heads * length).to(tl.int32))
        tl.store(queries + row, tl.where(placed, seeing, 0))
        tl.store(k_starts + row, tl.minimum(tl.maximum(of_row, 0), room).to(tl.int32))
        tl.store(keys + row, tl.where(placed, keys_of_row, 0))
        tl.store(firsts + row, first)
        tl.store(ends + row, tl.where((right < 0) & (end > longest), 0, tl.minimum(tl.maximum(end, 0), longest)))
        if row == rows_of_batch - 1:
            tl.store(q_starts + rows_of_batch, rows_of_batch * q_heads * length)
            tl.store(k_starts + rows_of_batch, tl.minimum(tl.maximum(of_row + round_up(keys_of_row), 0), room).to(tl.int32))
    group = q_heads // kv_heads
    if cu_seqlens is not None:  # tokens behind the last row
        tail = begins_of(cu_seqlens, rows_of_batch, length, rows_of_batch >= 0) + (row * chunks + chunk) * CLEARED
        for own in range(0, group):
            q_head = head * group + own
            clear_queries(out, lse, q_head, q_heads, q_head * length, tail, 0, length, rows_of_batch * chunks * CLEARED, DIM, WIDTH)
    if of_this:
        for own in range(0, group):
            q_head = head * group + own
            if cu_seqlens is None:
                first_row, step, lse_at = (row * q_heads + q_head) * length, 1, (row * q_heads + q_head) * length
            else:
                first_row, step, lse_at = begin.to(tl.int64) * q_heads + q_head, q_heads, q_head * length + begin
            clear_queries(out, lse, first_row, step, lse_at, seeing + chunk * CLEARED, count, given, chunks * CLEARED, DIM, WIDTH)


@triton.jit(do_not_specialize=["rows_of_batch", "kv_heads", "table_stride", "table_width", "every_page", "page", "room", "programs"])
def copy_kernel(
    k, k_strides, v, v_strides, k_scale, k_scale_strides, v_scale, v_scale_strides, page_table, k_starts, keys, firsts, ends,
    copied_k, copied_k_scale, copied_v, copied_v_scale, rows_of_batch, kv_heads, table_stride, table_width, every_page, page, room, programs,
    C: tl.constexpr,
):  # fmt: skip
    """Grid: kv_heads x programs, in one dimension. A program copies every programs-th piece of all places' blocks.

    Args:
        k, v: (P, page, Hkv, D or Dv), strides of this order; bytes of e4m3 codes.
        k_scale, v_scale: strides over rows of the batch, pages, slots and heads.
        k_starts, keys, firsts, ends: of paged_copies.Spans.
        copied_k, copied_k_scale, copied_v, copied_v_scale: of paged_copies.Copies, values as words of four codes.
        room: tokens of paged_copies.Room.
    """
    VALUE_WIDTH: tl.constexpr = C.value_width
    PIECES: tl.constexpr = SCALE_BLOCK // PIECE
    WORDS: tl.constexpr = SCALE_BLOCK // 4
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    tokens = tl.load(k_starts + rows_of_batch)
    pieces = tl.where(tokens > 0, first_unit(tokens, rows_of_batch, SCALE_BLOCK) * PIECES, 0)
    channels, words = tl.arange(0, VALUE_WIDTH), tl.arange(0, PIECE // 4)
    pages = room // SCALE_BLOCK + rows_of_batch
    k += head * k_strides[2]
    v += head * v_strides[2]
    copied_k += head * room * C.dim
    copied_v += head * C.value_dim * pages * WORDS
    for piece in range(tl.program_id(0) // kv_heads, pieces, programs):
        place = piece // PIECES
        part = piece - place * PIECES
        row, block, begin, count = unit_at(place, k_starts, keys, rows_of_batch, room, SCALE_BLOCK)
        if block * SCALE_BLOCK < count:
            own_k_scale = tl.load(k_scale + row * k_scale_strides[0] + head * k_scale_strides[3])
            own_v_scale = tl.load(v_scale + row * v_scale_strides[0] + head * v_scale_strides[3])
            finite = (is_finite(own_k_scale) != 0) & (is_finite(own_v_scale) != 0)
            if part == 0:
                tl.store(copied_k_scale + head * pages + place, tl.where(finite, own_k_scale, 1.0))
            if (part == 0) & (block == 0):
                at = copied_v_scale + (row * kv_heads + head) * C.value_dim + channels
                tl.store(at, tl.where(finite, own_v_scale, 0.0) + tl.zeros([VALUE_WIDTH], tl.float32), mask=channels < C.value_dim)
            first, end, table = tl.load(firsts + row), tl.load(ends + row), page_table + row * table_stride
            used, to = first + count, copied_k + begin.to(tl.int64) * C.dim
            # a word has four slots
            slot = block * SCALE_BLOCK + part * PIECE + 4 * words
            t0, t1, t2, t3 = key_of_slot(slot), key_of_slot(slot + 1), key_of_slot(slot + 2), key_of_slot(slot + 3)
            k0, v0 = load_tokens(first + t0, used, end, table, table_width, k, k_strides, v, v_strides, every_page, page, finite, C)
            k1, v1 = load_tokens(first + t1, used, end, table, table_width, k, k_strides, v, v_strides, every_page, page, finite, C)
            k2, v2 = load_tokens(first + t2, used, end, table, table_width, k, k_strides, v, v_strides, every_page, page, finite, C)
            k3, v3 = load_tokens(first + t3, used, end, table, table_width, k, k_strides, v, v_strides, every_page, page, finite, C)
            store_keys(to, t0, count, k0, C)
            store_keys(to, t1, count, k1, C)
            store_keys(to, t2, count, k2, C)
            store_keys(to, t3, count, k3, C)
            at = copied_v + channels.to(tl.int64)[:, None] * (pages * WORDS) + place * WORDS + part * (PIECE // 4) + words[None, :]
            tl.store(at, tl.trans(v0 | v1 << 8 | v2 << 16 | v3 << 24), mask=(channels < C.value_dim)[:, None])


def place(
    q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, room: Room, spans: Spans, results: tuple[torch.Tensor, torch.Tensor], number: int = 0,
    *, warmup: bool = False,
) -> None:  # fmt: skip
    """paged_copies.place by a kernel, into `spans`.

    Args:
        q: (B, Hq, S, D), or packed (T, Hq, D).
        cache: only sizes are read.
        results: output and LSE, (B, Hq, S, Dv) and (B, Hq, S), or (T, Hq, Dv) and (Hq, T), contiguous. Queries of
            placed rows that are no tokens are cleared, and packed ones of no row.
        number: of the pass.
        warmup: compile only.
    """
    rows, kv_heads, dim, device = batch.lengths.shape[0], cache.kv_heads, cache.v.shape[3], device_of(q.device)
    chunks = max(min(ceil_div(room.most, CLEARED.value), ceil_div(CLEARING * device.sm_count, rows * kv_heads)), 1)
    launch(
        place_kernel, (chunks * kv_heads * rows,),
        batch.lengths, batch.counts, batch.cu_seqlens, spans.q, spans.queries, spans.k, spans.keys, spans.firsts, spans.ends, *results,
        rows, q.shape[1], kv_heads, tokens_of(q), *counted_window(room.window), room.few, room.most, room.longest, room.beyond, room.tokens,
        room.of_pass, number, chunks, dim, power_of_2(dim), num_warps=1, warmup=warmup,
    )  # fmt: skip


def copy(cache: PagedTensors, batch: PagedBatch, room: Room, spans: Spans, copies: Copies, *, warmup: bool = False) -> None:
    """paged_copies.copy by a kernel, into `copies`, of an e4m3 cache. warmup: compile only."""
    rows, kv_heads, device, table = batch.lengths.shape[0], cache.kv_heads, device_of(cache.k.device), batch.page_table
    pieces = (room.tokens // PAGE + rows) * (PAGE // PIECE.value)
    programs = max(min(pieces, ceil_div(PROGRAMS * device.sm_count, kv_heads)), 1)
    k, v, copied_k = (bytes_of(x) for x in (cache.k, cache.v, copies.k))
    launch(
        copy_kernel, (kv_heads * programs,),
        k, k.stride(), v, v.stride(), *scale_arguments(cache), table, spans.k, spans.keys, spans.firsts, spans.ends,
        copied_k, copies.k_scale, copies.v.view(torch.int32), copies.v_scale,
        rows, kv_heads, table.stride(0), table.shape[1], cache.k.shape[0], cache.page, room.tokens, programs, Traits.of(cache, device),
        num_warps=max(power_of_2(max(cache.k.shape[3], cache.v.shape[3])) * PIECE.value // 2048, 1), warmup=warmup,
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_heads", "length", "tokens"])
def lse_kernel(packed, queries, lse, q_heads, length, tokens, N: tl.constexpr):
    """The LSE (B, Hq, S) of rows whose queries were packed, each in S of all tokens of a head.

    Grid: chunks of N queries x heads x rows of the batch, in one dimension.

    Args:
        packed: (1, Hq, tokens).
        queries: of paged_copies.Spans.
    """
    chunks = tl.cdiv(length, N)
    program = tl.program_id(0)
    head = (program // chunks % q_heads).to(tl.int64)
    row = (program // chunks // q_heads).to(tl.int64)
    query = program % chunks * N + tl.arange(0, N)
    own = query < tl.load(queries + row)
    found = tl.load(packed + head * tokens + row * q_heads * length + query, mask=own, other=0.0)
    tl.store(lse + (row * q_heads + head) * length + query, found, mask=own)


def store_lse(packed: torch.Tensor, queries: torch.Tensor, lse: torch.Tensor, *, warmup: bool = False) -> None:
    """Store the LSE of packed queries (1, Hq, T) to lse (B, Hq, S). `queries`: of paged_copies.Spans."""
    rows, heads, length = lse.shape
    launch(
        lse_kernel, (ceil_div(length, 1024) * heads * rows,), packed, queries, lse, heads, length, packed.shape[2], 1024,
        num_warps=4, warmup=warmup,
    )  # fmt: skip
