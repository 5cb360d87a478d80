"""Appends tokens to a KV cache in one launch: `pages.append` by a kernel, byte for byte.

A program quantizes one page that becomes complete. The last program of a head to finish stores the head's last tokens
in half precision, because the other programs may still read tokens that these replace. Programs count themselves by
tickets, which are zero again afterwards.

Packed tokens have no tickets: they complete one page of a sequence at most, or their pages and their last tokens are
two launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import pages, rotation
from ..device import Device
from ..pages import PagedBatch, Stage, Storage, tokens_of
from ..recipe import Recipe
from ..reference import Scoring
from .feedback import feed_back
from .launch import ceil_div, launch
from .quantize_steps import (
    BLOCK,
    FEEDBACK,
    GROUP,
    LANES,
    RUN,
    coarse,
    largest_magnitude,
    load_vector,
    power_of_2,
    removable,
    rotated,
    store_rows,
    store_vector,
    sum_lanes,
)
from .tile import FLOAT_MAX, is_finite, scale_of
from .varlen import spans_of, unit_at

RECENT: tl.constexpr = tl.constexpr(pages.RECENT)
LEAST_CHANNEL: tl.constexpr = tl.constexpr(pages.LEAST_CHANNEL)
LARGEST_EXPONENT: tl.constexpr = tl.constexpr(pages.LARGEST_EXPONENT)
COPIED: tl.constexpr = tl.constexpr(64)  # tokens that are copied together

FEW_TOKENS = 16
"""Up to so many new tokens, pages are seldom completed."""

FEW_REGISTERS = 64
"""Of a thread then. What a page takes is spilled, and four programs fit an SM instead of one."""


@dataclass(frozen=True)
class Traits:
    """Everything that the kernels know at compile time.

    Attributes:
        dim, value_dim: D and Dv.
        width, value_width: the same, rounded up to powers of two.
        part: channels of Q and K that are rotated together.
        int8: Q and K are int8.
        smooth_k, smooth_v: whether means are removed.
        native: the compiler supports e4m3.
        positive: softmax_scale > 0.
        window: queries don't see all keys before their own.
        softcap: scores are capped.
    """

    dim: int
    value_dim: int
    width: int
    value_width: int
    part: int
    int8: bool
    smooth_k: bool
    smooth_v: bool
    native: bool
    positive: bool = True
    window: bool = False
    softcap: bool = False

    @property
    def accumulated(self) -> int:
        """Channels whose registers attention takes: K's or V's, whichever are more. A soft cap takes twice as many."""
        return max(self.width, self.value_width) << self.softcap

    @classmethod
    def of(cls, storage: Storage, recipe: Recipe, device: Device, how: Scoring = Scoring(1.0)) -> Traits:  # noqa: B008
        dim, value_dim = storage.k.shape[3], storage.v.shape[3]
        return cls(
            dim, value_dim, max(power_of_2(dim), 32), max(power_of_2(value_dim), 32), rotation.part_of(dim, recipe.rotate),
            recipe.qk == "int8", recipe.smooth_k, recipe.smooth_v, device.has_fp8_units and not device.emulated, how.softmax_scale > 0,
            how.window[0] >= 0, how.softcap > 0,
        )  # fmt: skip


@triton.jit
def load_tokens(recent, new, stride, tokens, edge, end, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens (N,) of one head as (N, WIDTH), zeros outside: from `recent` (RECENT, DIM) before `edge`, from `new` from
    it on.

    Args:
        new: pointer to token `edge`; or None if `end` is no more than `edge`.
        stride: of tokens in `new`.
        end: position behind the last token.
    """
    columns = tl.arange(0, WIDTH)
    inside = (columns < DIM)[None, :] & (tokens >= 0)[:, None]
    x = tl.load(recent + (tokens % RECENT)[:, None] * DIM + columns[None, :], mask=inside & ((tokens < edge) & (tokens < end))[:, None], other=0.0)
    if new is not None:
        here = inside & ((tokens >= edge) & (tokens < end))[:, None]
        x = tl.where(here, tl.load(new + (tokens - edge)[:, None].to(tl.int64) * stride + columns[None, :], mask=here, other=0.0), x)
    return x


@triton.jit
def first_page_sums(recent, new, stride, edge, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The mean, least and largest (WIDTH,) of the finite elements of a sequence's first page."""
    total = tl.zeros([LANES, WIDTH], tl.float32)
    low = tl.full([LANES, WIDTH], float("inf"), tl.float32)
    high = tl.full([LANES, WIDTH], -float("inf"), tl.float32)
    for step in tl.static_range(BLOCK // LANES):
        x = load_tokens(recent, new, stride, tl.arange(0, LANES) + step * LANES, edge, BLOCK, DIM, WIDTH).to(tl.float32)
        total += tl.where(is_finite(x), x, 0.0)
        low = tl.minimum(low, tl.where(is_finite(x), x, float("inf")))
        high = tl.maximum(high, tl.where(is_finite(x), x, -float("inf")))
    return sum_lanes(total) * (1.0 / BLOCK), tl.min(low, 0), tl.max(high, 0)


@triton.jit
def key_statistics(recent, new, stride, edge, C: tl.constexpr):
    """pages.first_statistics: K's mean (WIDTH,)."""
    WIDTH: tl.constexpr = C.width
    mean = tl.zeros([WIDTH], tl.float32)
    if C.smooth_k:
        mean, _, _ = first_page_sums(recent, new, stride, edge, C.dim, WIDTH)
        if C.part > 0:
            mean = tl.reshape(rotated(mean[None, :], C.part), (WIDTH,))
        mean = removable(mean)
    return mean


@triton.jit
def value_statistics(recent, new, stride, edge, C: tl.constexpr):
    """pages.first_statistics: V's mean and channel scales (WIDTH,)."""
    WIDTH: tl.constexpr = C.value_width
    mean, low, high = first_page_sums(recent, new, stride, edge, C.value_dim, WIDTH)
    if C.smooth_v:
        mean = removable(coarse(mean, low, high))
    else:
        mean = tl.zeros([WIDTH], tl.float32)
    largest = largest_magnitude(low, high, mean)
    return mean, scale_of(tl.maximum(largest, tl.max(largest, 0) * LEAST_CHANNEL))


@triton.jit
def page_scale(largest):
    """pages.page_scale."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    exponent = tl.minimum(tl.maximum(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT)
    return tl.where(largest > 0, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def write_values(recent, new, stride, first, edge, mean, channel_scale, scale_out, out, C: tl.constexpr):
    """Quantize a page of one head's V, from token `first` on, to `out`, the codes of (Dv, 128), four per word."""
    WIDTH: tl.constexpr = C.value_width
    RUNS: tl.constexpr = BLOCK // RUN
    tokens = first + tl.arange(0, BLOCK)
    x = load_tokens(recent, new, stride, tokens, edge, first + BLOCK, C.value_dim, C.value_width).to(tl.float32)
    magnitude = tl.where(is_finite(x), tl.abs(x - mean[None, :]), 0.0)
    largest = tl.max(tl.max(magnitude, 0) * tl.div_rn(1.0, channel_scale), 0)
    scale = page_scale(tl.minimum(largest, FLOAT_MAX))
    tl.store(scale_out, scale)
    inverse = tl.div_rn(1.0, channel_scale * scale)[None, :]
    columns = tl.arange(0, C.value_width)
    runs = tl.arange(0, RUNS) * RUN
    residual = tl.zeros([RUNS, WIDTH], tl.float16)
    gain = (first * 0.0 + FEEDBACK).to(tl.float16)
    for group in range(RUN // GROUP):
        words0 = tl.zeros([RUNS, WIDTH], tl.int32)
        words1 = words0
        words2 = words0
        words3 = words0
        for token in tl.range(GROUP, loop_unroll_factor=GROUP if C.native else 1):
            rows = first + runs + group * GROUP + token
            y = load_tokens(recent, new, stride, rows, edge, first + BLOCK, C.value_dim, C.value_width).to(tl.float32)
            y = tl.where(is_finite(y), y - mean[None, :], 0.0) * inverse
            code, residual = feed_back(y, residual, gain, C.native)
            byte = code << (8 * (token % 2 + token // 8 * 2))  # layout.key_of_slot
            word = token // 2 % 4
            words0 |= tl.where(word == 0, byte, 0)
            words1 |= tl.where(word == 1, byte, 0)
            words2 |= tl.where(word == 2, byte, 0)
            words3 |= tl.where(word == 3, byte, 0)
        at = out + columns[None, :] * (BLOCK // 4) + (runs + group * GROUP)[:, None] // 4
        tl.store(at, words0, mask=(columns < C.value_dim)[None, :])
        tl.store(at + 1, words1, mask=(columns < C.value_dim)[None, :])
        tl.store(at + 2, words2, mask=(columns < C.value_dim)[None, :])
        tl.store(at + 3, words3, mask=(columns < C.value_dim)[None, :])


# Calls, not inlined: Triton's time for memory operations grows with the cube of a function's length.


@triton.jit(noinline=True)
def write_page_of_keys(k, k_stride, v, v_stride, recent_k, recent_v, page, old, out, scale, mean_out, C: tl.constexpr):
    """Quantize a page of one head's K; and of the first page, store the mean that all pages share."""
    if old < BLOCK:  # the first page becomes complete in this launch
        mean = key_statistics(recent_k, k, k_stride, old, C)
        if page == 0:
            store_vector(mean_out, mean, C.dim)
    else:
        mean = load_vector(mean_out, 1, 0.0, C.dim, C.width)
    first = page * BLOCK
    rows = tl.arange(0, BLOCK)
    values = load_tokens(recent_v, v, v_stride, first + rows, old, first + BLOCK, C.value_dim, C.value_width).to(tl.float32)
    hidden = tl.max(tl.where(is_finite(values), 0, 1), 1) > 0
    y = load_tokens(recent_k, k, k_stride, first + rows, old, first + BLOCK, C.dim, C.width).to(tl.float32)
    if C.part > 0:
        y = rotated(y, C.part)
    y = tl.where(is_finite(y), y - mean[None, :], float("nan"))
    store_rows(y, rows, BLOCK, hidden, scale, 0, 1, out, C.dim, C.dim, C.width, BLOCK, 1.0, True, C, True)


@triton.jit(noinline=True)
def write_page_of_values(v, v_stride, recent_v, page, old, out, scale, mean_out, channel_scale_out, C: tl.constexpr):
    """Quantize a page of one head's V; and of the first page, store the mean and channel scales that all pages
    share."""
    if old < BLOCK:
        mean, channel_scale = value_statistics(recent_v, v, v_stride, old, C)
        if page == 0:
            store_vector(mean_out, mean, C.value_dim)
            store_vector(channel_scale_out, channel_scale, C.value_dim)
    else:
        mean = load_vector(mean_out, 1, 0.0, C.value_dim, C.value_width)
        channel_scale = load_vector(channel_scale_out, 1, 1.0, C.value_dim, C.value_width)
    write_values(recent_v, v, v_stride, page * BLOCK, old, mean, channel_scale, scale, out, C)


@triton.jit
def copy_tokens(new, stride, recent, old, end, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the last new tokens of one head, as they came."""
    start = tl.maximum(old, end - RECENT)
    columns = tl.arange(0, WIDTH)
    for block in range(0, tl.cdiv(end - start, COPIED)):
        tokens = start + block * COPIED + tl.arange(0, COPIED)
        inside = (tokens < end)[:, None] & (columns < DIM)[None, :]
        x = tl.load(new + (tokens - old)[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)
        tl.store(recent + (tokens % RECENT)[:, None] * DIM + columns[None, :], x, mask=inside)


@triton.jit
def batch_row(lengths, counts, sequences, row, length, every_sequence):
    """pages.PagedBatch.rows: of one row, its sequence, 0 if its number is out of range, and whether it is not; its
    tokens; and how many of them are new."""
    sequence = row.to(tl.int32)
    count = length
    if sequences is not None:
        sequence = tl.load(sequences + row)
    if counts is not None:
        count = tl.load(counts + row)
    end = tl.maximum(tl.load(lengths + row), 0)
    exists = (sequence >= 0) & (sequence < every_sequence)
    return tl.where(exists, sequence, 0).to(tl.int64), exists, end, tl.maximum(tl.minimum(tl.minimum(count, length), end), 0)


@triton.jit
def rows_of_tokens(x, strides, row, head, begin):
    """Pointer to a head's first token of a row: x (B, H, S, D), or packed (1, H, T, D) with stride 0 of rows."""
    return x + row * strides[0] + head * strides[1] + begin.to(tl.int64) * strides[2]


@triton.jit
def page_number(table, page, width, every_page):
    """The number of a sequence's page, 0 if it is out of range, and whether it is not."""
    number = tl.load(table + page, mask=page < width, other=-1)
    exists = (number >= 0) & (number < every_page)
    return tl.where(exists, number, 0).to(tl.int64), exists


@triton.jit
def comes_last(tickets, programs):
    """Whether this is the last one of some programs to come here."""
    ticket = 0
    if programs > 1:
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets, 1)
    return ticket == programs - 1


@triton.jit
def page_of_program(cu_seqlens, rows, length, most_pages, kv_heads):
    """The work of a program in a grid of pages x kv_heads x rows, in one dimension. Of packed tokens `most_pages` are
    those of all rows, and the grid is pages x kv_heads.

    Returns:
        the row of the batch, the head, the number of the page among the row's new ones, the row's first token among
        packed ones, and how many tokens it has.
    """
    program = tl.program_id(0)
    head = (program // most_pages % kv_heads).to(tl.int64)
    row = program // most_pages // kv_heads
    page = program % most_pages
    begin = row * 0
    if cu_seqlens is not None:
        row, page, begin, length = unit_at(page, cu_seqlens, None, rows, length, BLOCK)
    return row.to(tl.int64), head, page, begin, length


@triton.jit(do_not_specialize=["rows", "kv_heads", "length", "most_pages", "table_stride", "table_width", "every_page", "every_sequence", "most"])
def append_kernel(
    k, v, k_strides, v_strides, page_table, lengths, counts, sequences, cu_seqlens, k_pages, k_scale, v_pages, v_scale, k_mean, v_mean,
    channel_scale, recent_k, recent_v, tickets, rows, kv_heads, length, most_pages, table_stride, table_width, every_page, every_sequence,
    most, PAGES: tl.constexpr, TOKENS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: pages that may become complete, at least one, x heads x rows, in one dimension; of packed tokens, pages of
    all rows x heads. Without PAGES, heads x rows. The tensors are those of pages.PagedBatch and pages.Storage; v_pages
    has words of four codes.

    Args:
        most, PAGES, TOKENS: pages.Stage. Of packed tokens both only if a row completes one page at most.
    """
    row, head, step, begin, own_length = page_of_program(cu_seqlens if PAGES else None, rows, length, most_pages, kv_heads)
    if cu_seqlens is not None and not PAGES:
        begin, own_length = spans_of(cu_seqlens, None, row, length, row < rows)
    sequence, exists, end, count = batch_row(lengths, counts, sequences, row, own_length, every_sequence)
    if exists & (count > 0) & (count <= most):
        old = end - count
        page = old // BLOCK + step
        pair = sequence * kv_heads + head
        k = rows_of_tokens(k, k_strides, row, head, begin)
        v = rows_of_tokens(v, v_strides, row, head, begin)
        recent_k += pair * RECENT * C.dim
        recent_v += pair * RECENT * C.value_dim
        if PAGES:
            number, has_page = page_number(page_table + row * table_stride, page, table_width, every_page)
            if has_page & (page < end // BLOCK):
                index = number * kv_heads + head
                write_page_of_keys(
                    k, k_strides[2], v, v_strides[2], recent_k, recent_v, page, old, k_pages + index * BLOCK * C.dim, k_scale + index,
                    k_mean + pair * C.dim, C,
                )  # fmt: skip
                write_page_of_values(
                    v, v_strides[2], recent_v, page, old, v_pages + index * C.value_dim * (BLOCK // 4), v_scale + index,
                    v_mean + pair * C.value_dim, channel_scale + pair * C.value_dim, C,
                )  # fmt: skip
        if TOKENS:
            is_last = step == 0
            if PAGES and cu_seqlens is None:
                is_last = comes_last(tickets + pair, most_pages)
            if is_last:
                tl.debug_barrier()
                copy_tokens(k, k_strides[2], recent_k, old, end, C.dim, C.width)
                copy_tokens(v, v_strides[2], recent_v, old, end, C.value_dim, C.value_width)
                tl.store(tickets + pair, 0)


def append(
    storage: Storage, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, recipe: Recipe, device: Device, stage: Stage = Stage(), *,  # noqa: B008
    warmup: bool = False,
) -> None:  # fmt: skip
    """pages.append by a kernel, in one launch; in two of more packed tokens than a page has. `warmup`: compile only."""
    if k.numel() == 0 or batch.lengths.shape[0] == 0:
        return
    packed, length, rows = batch.cu_seqlens is not None, tokens_of(k), batch.lengths.shape[0]
    if packed:
        if stage == Stage() and length > pages.PAGE:
            for one in (Stage(tokens=False), Stage(pages=False)):
                append(storage, k, v, batch, recipe, device, one, warmup=warmup)
            return
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    sequences, kv_heads = storage.k.shape[:2]
    most_pages = 1 if not stage.pages else ceil_div(length, pages.PAGE) if not packed else length // pages.PAGE + rows
    programs = most_pages * kv_heads * (1 if packed and stage.pages else rows)
    cached = storage.pages
    is_few = (ceil_div(length, rows) if packed else length) <= FEW_TOKENS
    options: dict[str, Any] = {"maxnreg": FEW_REGISTERS} if is_few and stage.pages and not device.emulated else {}
    launch(
        append_kernel, (programs,),
        k, v, row_strides(k), row_strides(v), *batch.tensors(), cached.k.view(torch.uint8), cached.k_scale, cached.v.view(torch.int32),
        cached.v_scale, storage.k_mean, storage.v_mean, storage.v_scale, storage.k, storage.v, storage.tickets, rows, kv_heads, length,
        most_pages, batch.page_table.stride(0), batch.page_table.shape[1], cached.k.shape[0], sequences, stage.most, stage.pages, stage.tokens,
        Traits.of(storage, recipe, device), num_warps=8, enable_fp_fusion=False, warmup=warmup, **options,
    )  # fmt: skip


def row_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of x (B, H, S, D), where all rows of the batch are in x (1, H, T, D): the first is 0 then."""
    return x.stride() if x.shape[0] != 1 else (0, *x.stride()[1:])
