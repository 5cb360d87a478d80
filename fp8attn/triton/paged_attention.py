"""Attention to a KV cache: `pages.attend_paged` by kernels, for prefill and decode alike.

The queries of all query heads that share a key/value head are the rows of one tile. A program quantizes its rows,
attends to whole pages in FP8, and to the rows' own pages in half precision. If there are few tiles, several programs
share a tile's pages, and a second kernel adds their sums in the order of the pages. Where a program's pages begin and
end depends on lengths on the device; how many programs there are depends on what the host knows. Tiles of packed
queries have fixed places (layout.first_unit), so that nobody reads lengths on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .. import pages
from ..device import Device
from ..pages import LARGEST_LENGTH, PagedBatch, PagedCall, lse_shape, tokens_of
from ..validate import BackendUnavailable
from .forward import load_rows
from .half_keys import load_mean, mean_scores
from .launch import ceil_div, launch
from .paged_append import RECENT, Traits, batch_row, load_tokens, page_number, row_strides, rows_of_tokens
from .quantize_steps import BLOCK, rotated
from .tile import (
    E4M3_LARGEST,
    INT8_MAX,
    LOG2E,
    P_OFFSET,
    cap_scores,
    direct_codes,
    e4m3_code,
    half_of_code,
    int8_code,
    inverse,
    is_finite,
    operand,
    permute_keys,
    scale_of,
    score_factor,
    set_nonfinite_keys,
)
from .varlen import tile_at

HALF_BLOCK: tl.constexpr = tl.constexpr(64)  # keys in half precision of one step
INVERSE_OFFSET: tl.constexpr = tl.constexpr(2.0**-pages.P_OFFSET)  # makes sums of P those of 2^(score - m)

TOGETHER: tl.constexpr = tl.constexpr(8)  # splits whose sums are loaded together

SPLIT_PAGES = 4
"""Least number of pages for which another program is worth its partial sums."""

FIXED_SPLITS = 8
"""Programs that share a tile's keys where a row mustn't depend on others."""

FIXED_SPLIT_TOKENS = 16
"""The most queries of a row of which there are so many: partial results of more take too much memory."""


@dataclass(frozen=True)
class Attention:
    """How one call runs.

    Attributes:
        traits: of the cache and the recipe.
        rows: of a tile.
        splits: programs that share a tile's pages.
        stages: pages in flight.
        warps: of a program.
    """

    traits: Traits
    rows: int
    splits: int
    stages: int
    warps: int


@triton.jit
def quantized_rows(q, C: tl.constexpr):
    """Rows (M, WIDTH) of queries as operands of Q·Kᵀ, their scales (M,), and which of them are non-finite (M,):
    quantization.quantize_q."""
    CODE: tl.constexpr = INT8_MAX if C.int8 else E4M3_LARGEST
    FACTOR: tl.constexpr = 1.0 if C.part == 0 else C.part
    y = q.to(tl.float32)
    if C.part > 0:
        y = rotated(y, C.part)
    bad = tl.max(tl.where(is_finite(y), 0, 1), 1) > 0
    largest = tl.max(tl.where(is_finite(y), tl.abs(y), 0.0), 1)
    scale = scale_of(largest, CODE)
    kept = tl.where(largest > 0, scale * FACTOR, 1.0)
    y = tl.where(is_finite(y), y, float("nan")) * tl.div_rn(1.0, scale)[:, None]
    if C.int8:
        return int8_code(y).to(tl.int8, bitcast=True), kept, bad
    else:
        codes = e4m3_code(y, C.native)
        return (codes.to(tl.float8e4nv, bitcast=True) if C.native else half_of_code(codes)), kept, bad


@triton.jit
def finite_or_zero(m):
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def attend_to_page(
    q, row_factor, shift, softcap, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, first, C: tl.constexpr
):  # fmt: skip
    """Add attention to one page in FP8 to the sums. P is relative to the page's largest score alone.

    Args:
        shift: (M,), what natural scores lack without K's mean. A soft cap sees it.
        exists: whether the page does; if not, rows that see it become NaN.
        hidden: (M,), rows that don't see the page.
        first: (M,), the first key of the page that a row sees, which a window may limit.
    """
    keys = tl.arange(0, BLOCK)
    x = tl.dot(q, operand(load_rows(k_page, keys, C.dim, BLOCK, 0, C.width, C.dim, False), False).T)
    scale = tl.load(k_scale)
    if C.int8:
        x = set_nonfinite_keys(x.to(tl.float32), scale < 0, k_page, keys, C.dim, BLOCK)
    x *= score_factor(row_factor, tl.abs(scale), C.positive)[:, None]
    if C.softcap:
        x = cap_scores(x, shift, softcap)
    unseen = hidden[:, None]
    if C.window:
        unseen |= keys[None, :] < first[:, None]
    x = tl.where(unseen, -float("inf"), tl.where(exists, x, float("nan")))
    largest = tl.max(x, 1)
    codes = direct_codes((x - finite_or_zero(largest)[:, None]) + P_OFFSET)
    p = codes.to(tl.float8e4nv, bitcast=True) if C.native else half_of_code(codes)
    m_new = tl.maximum(m, largest)
    alpha = tl.exp2(m - finite_or_zero(m_new))
    beta = tl.exp2(largest - finite_or_zero(m_new)) * INVERSE_OFFSET
    l = l * alpha + tl.sum(p.to(tl.float32), 1) * beta
    channels = tl.arange(0, C.value_width)
    pointers = v_page + channels[None, :] * BLOCK + keys[:, None]
    value = tl.load(pointers, mask=(channels < C.value_dim)[None, :], other=0.0)
    fresh = tl.dot(permute_keys(p), operand(value, False))
    return m_new, l, acc * alpha[:, None] + fresh * (beta * tl.load(v_scale))[:, None]


@triton.jit
def attend_to_recent(
    q, m, l, acc, keys, visible, k, v, recent_k, recent_v, k_stride, v_stride, edge, end, factor, softcap, C: tl.constexpr
):  # fmt: skip
    """Add attention to `keys` (N,) in half precision to the sums. visible: (M, N)."""
    key = load_tokens(recent_k, k, k_stride, keys, edge, end, C.dim, C.width)
    value = load_tokens(recent_v, v, v_stride, keys, edge, end, C.value_dim, C.value_width)
    bad = tl.max(tl.where(is_finite(key.to(tl.float32)), 0, 1), 1) + tl.max(tl.where(is_finite(value.to(tl.float32)), 0, 1), 1) > 0
    key = tl.where(bad[:, None], 0.0, key).to(q.dtype)
    value = tl.where(is_finite(value.to(tl.float32)), value, 0.0).to(q.dtype)
    x = tl.dot(q, key.T, input_precision="ieee") * factor
    if C.softcap:
        x = cap_scores(x, tl.zeros([q.shape[0]], tl.float32), softcap)
    x = tl.where(visible, tl.where(bad[None, :], float("nan"), x), -float("inf"))
    largest = tl.max(x, 1)
    p = tl.exp2(x - finite_or_zero(largest)[:, None])
    m_new = tl.maximum(m, largest)
    alpha, beta = tl.exp2(m - finite_or_zero(m_new)), tl.exp2(largest - finite_or_zero(m_new))
    l = l * alpha + tl.sum(p, 1) * beta
    return m_new, l, acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee") * beta[:, None]


@triton.jit
def merge_sink(m, l, acc, sink):
    """One more logit of each row, `sink` (M,), which takes weight and has no value. The sums have no offset."""
    sink *= LOG2E
    m_new = tl.maximum(m, sink)
    alpha = tl.exp2(m - finite_or_zero(m_new))
    return m_new, l * alpha + tl.exp2(sink - finite_or_zero(m_new)), acc * alpha[:, None]


@triton.jit
def work_of_program(cu_seqlens, rows_of_batch, length, group, kv_heads, splits, ROWS: tl.constexpr):
    """The work of a program in a grid of tiles of rows x splits x kv_heads x batch, in one dimension. Of packed queries
    tiles are those of all rows of the batch, and the grid is tiles x splits x kv_heads.

    Returns:
        the number of tiles; the program's split, head of keys and row of the batch; the row's first query among packed
        ones, how many it has, and how many of these are of a sequence; and of each of its rows (ROWS,) the query, which
        may not exist, and the query's head.
    """
    tiles = tl.cdiv(length * group, ROWS) if cu_seqlens is None else length * group // ROWS + rows_of_batch + 1
    program = tl.program_id(0)
    tile = program % tiles
    split = program // tiles % splits
    kv_head = (program // tiles // splits % kv_heads).to(tl.int64)
    batch = program // tiles // splits // kv_heads
    begin = batch * 0
    real = length
    if cu_seqlens is not None:
        batch, tile, begin, length = tile_at(tile, cu_seqlens, rows_of_batch, length, group, ROWS)
        real = tl.where(batch < rows_of_batch, length, 0)
        batch = tl.minimum(batch, rows_of_batch - 1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    return tiles, split, kv_head, batch.to(tl.int64), begin, length, real, rows // group, kv_head * group + rows % group


@triton.jit
def store_sums(
    out, lse, partial, partial_sums, m, l, acc, cu_seqlens, place, split, every, DIM: tl.constexpr
):  # fmt: skip
    """Store the answers of a tile's rows, or where programs share its keys, their sums.

    Args:
        place: batch (a number), head and query (M,), whether it exists, query heads and the queries of a row of the
            batch. Packed queries are one row of the batch.
        every: rows of all tiles.
    """
    batch, head, query, exists, q_heads, length = place
    at = (batch * q_heads + head) * length + query
    lse_at = at
    if cu_seqlens is not None:
        at = query.to(tl.int64) * q_heads + head
    channels = tl.arange(0, acc.shape[1])
    where = exists[:, None] & (channels < DIM)[None, :]
    if partial is not None:
        tl.store(partial + (split * every + at)[:, None] * DIM + channels[None, :], acc, mask=where)
        tl.store(partial_sums + 2 * split * every + at, m, mask=exists)
        tl.store(partial_sums + (2 * split + 1) * every + at, l, mask=exists)
    else:
        tl.store(out + at[:, None] * DIM + channels[None, :], (acc * inverse(l)[:, None]).to(out.dtype.element_ty), mask=where)
        tl.store(lse + lse_at, (m + tl.log2(l)) / LOG2E, mask=exists)


@triton.jit(
    do_not_specialize=[
        "rows_of_batch",
        "q_heads",
        "kv_heads",
        "length",
        "table_stride",
        "table_width",
        "every_page",
        "every_sequence",
        "left",
        "splits",
        "most",
    ]
)
def attention_kernel(
    q, k, v, q_strides, k_strides, v_strides, page_table, lengths, counts, sequences, cu_seqlens, k_pages, k_scale, v_pages, v_scale, k_mean,
    v_mean, channel_scale, recent_k, recent_v, sinks, out, lse, partial, partial_sums, rows_of_batch, q_heads, kv_heads, length, table_stride,
    table_width, every_page, every_sequence, left, splits, most, softmax_scale, softcap, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows x splits x kv_heads x batch, in one dimension. Packed queries are one row of the batch.

    Args:
        q, k, v: (B, H, S, D); or packed, as (1, H, T, D) with stride 0 of rows.
        k, v: the new tokens; or None if all are in recent_k and recent_v.
        left: a query at position p sees the keys from p - left on, if C.window.
        most: queries of a row of the batch; one with more is NaN.
        out, lse: (B, Hq, S, Dv) and float32 (B, Hq, S), or (T, Hq, Dv) and (Hq, T), contiguous.
        partial, partial_sums: float32 (splits, *out.shape) and (splits, 2, rows of out), acc, m and l of each split; or
            None if there is one.
    """
    VALUE_WIDTH: tl.constexpr = C.value_width
    group = q_heads // kv_heads
    tiles, split, kv_head, batch, begin, own_length, most_real, query, head = work_of_program(
        cu_seqlens, rows_of_batch, length, group, kv_heads, splits, ROWS
    )
    sequence, has_sequence, end, count = batch_row(lengths, counts, sequences, batch, most_real, every_sequence)
    has_sequence &= own_length <= most
    pair = sequence * kv_heads + kv_head

    exists = query < own_length
    real = query < count
    position = tl.where(real, end - count + query, -1)
    columns = tl.arange(0, C.width)
    at = batch * q_strides[0] + head[:, None] * q_strides[1] + (begin + query)[:, None].to(tl.int64) * q_strides[2]
    x = tl.load(q + at + columns[None, :], mask=real[:, None] & (columns < C.dim)[None, :], other=0.0)
    operand_q, row_scale, bad = quantized_rows(x, C)
    own = tl.where(real, position // BLOCK, 0)  # the page of each row, which sees those before it in FP8
    first = position * 0  # key that each row sees
    least = 0
    if C.window:
        first = tl.maximum(position - left, 0)
        least = tl.min(tl.where(real, first, end), 0) // BLOCK
    most = tl.minimum(tl.max(own, 0), table_width)

    shift = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    if C.softcap:
        shift = mean_scores(x, load_mean(k_mean + pair * C.dim, C.dim, C.width, C.part)) * softmax_scale
    share = tl.cdiv(tl.maximum(most - least, 0), splits)
    for page in range(least + split * share, tl.minimum(least + split * share + share, most)):
        number, has_page = page_number(page_table + batch * table_stride, page, table_width, every_page)
        index = number * kv_heads + kv_head
        m, l, acc = attend_to_page(
            operand_q, row_scale * (softmax_scale * LOG2E), shift, softcap, m, l, acc, k_pages + index * BLOCK * C.dim, k_scale + index,
            v_pages + index * C.value_dim * BLOCK, v_scale + index, has_page, own <= page, first - page * BLOCK, C,
        )  # fmt: skip
    if most > least:  # what K and V lost comes back, once for all pages
        channels = tl.arange(0, C.value_width)
        inside = channels < C.value_dim
        restore = tl.load(channel_scale + pair * C.value_dim + channels, mask=inside, other=0.0)
        mean = tl.load(v_mean + pair * C.value_dim + channels, mask=inside, other=0.0)
        acc = acc * restore[None, :] + l[:, None] * mean[None, :]
        if not C.softcap:
            m += mean_scores(x, load_mean(k_mean + pair * C.dim, C.dim, C.width, C.part)) * (softmax_scale * LOG2E)

    missing = (own > table_width) & (first < own * BLOCK)  # rows that see a page behind the table
    if split == splits - 1:
        edge = end
        if k is None:
            missing |= tl.maximum(first, own * BLOCK) < end - RECENT  # or a token that the cache has no more in half precision
        else:
            edge = end - count
            k = rows_of_tokens(k, k_strides, batch, kv_head, begin)
            v = rows_of_tokens(v, v_strides, batch, kv_head, begin)
        start_key = tl.min(tl.where(real, tl.maximum(own * BLOCK, first), end), 0)
        for start in tl.range(start_key, tl.max(position, 0) + 1, HALF_BLOCK, num_stages=1):
            keys = start + tl.arange(0, HALF_BLOCK)
            visible = (keys[None, :] <= position[:, None]) & (keys[None, :] >= tl.maximum(own * BLOCK, first)[:, None])
            m, l, acc = attend_to_recent(
                x, m, l, acc, keys, visible, k, v, recent_k + pair * RECENT * C.dim, recent_v + pair * RECENT * C.value_dim, k_strides[2],
                v_strides[2], edge, end, softmax_scale * LOG2E, softcap, C,
            )  # fmt: skip
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=-float("inf"))
            m, l, acc = merge_sink(m, l, acc, sink)
    l = tl.where((bad & (l != 0)) | (real & (missing | (has_sequence == 0))), float("nan"), l)
    every = (tl.num_programs(0) // tiles // splits // kv_heads).to(tl.int64) * q_heads * length
    place = (batch if cu_seqlens is None else batch * 0, head, begin + query, exists, q_heads, length)
    store_sums(out, lse, partial, partial_sums, m, l, acc, cu_seqlens, place, split, every, C.value_dim)


@triton.jit(do_not_specialize=["total", "heads", "splits"])
def combine_kernel(partial, partial_sums, out, lse, total, heads, splits, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Add the sums of all splits, from the first to the last. Grid: chunks of ROWS of `total` rows.

    Args:
        heads: Hq of packed queries, (T, Hq) rows, whose LSE is (Hq, T); else 1.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    exists = rows < total
    inside = exists[:, None] & (channels < DIM)[None, :]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, splits, TOGETHER):
        for i in tl.static_range(TOGETHER):  # all loads may be in flight at once
            split, here = first + i, first + i < splits
            at = split * tl.cast(total, tl.int64) + rows
            theirs = tl.load(partial_sums + at + split * tl.cast(total, tl.int64), mask=exists & here, other=-float("inf"))
            m_new = tl.maximum(m, theirs)
            alpha, beta = tl.exp2(m - finite_or_zero(m_new)), tl.exp2(theirs - finite_or_zero(m_new))
            l = l * alpha + tl.load(partial_sums + at + (split + 1) * tl.cast(total, tl.int64), mask=exists & here, other=0.0) * beta
            acc = acc * alpha[:, None] + tl.load(partial + at[:, None] * DIM + channels[None, :], mask=inside & here, other=0.0) * beta[:, None]
            m = m_new
    tl.store(out + rows[:, None] * DIM + channels[None, :], (acc * inverse(l)[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + rows % heads * (total // heads) + rows // heads, (m + tl.log2(l)) / LOG2E, mask=exists)


def tile_rows(rows: int, width: int) -> int:
    """Rows of a tile. rows: of a key/value head. width: Traits.accumulated."""
    return 16 if rows <= 16 else 32 if rows <= 32 or width > 128 else 64


def splits_of(q: torch.Tensor, batch: PagedBatch, tiles: int, blocks: int, device: Device) -> int:
    """Programs that share the blocks of keys of each tile. blocks: of the longest sequence.

    Each program has an equal part of a row's own blocks. So their number alone decides where sums are split.
    """
    if batch.batch_invariant:
        return FIXED_SPLITS if tokens_of(q) <= FIXED_SPLIT_TOKENS else 1
    return max(min(2 * device.sm_count // max(tiles, 1), ceil_div(blocks, SPLIT_PAGES)), 1)


def check_invariant(batch: PagedBatch) -> None:
    """Check that these kernels keep what a batch promises.

    Raises:
        BackendUnavailable: it is invariant and packed: tiles are as high as suits the average row.
    """
    if batch.batch_invariant and batch.cu_seqlens is not None:
        raise BackendUnavailable("triton: batch_invariant is True with cu_seqlens; it must be False, or the CUDA kernels run, which need sm_90")


@dataclass(frozen=True)
class Tiling:
    """How the rows of a call become tiles.

    Attributes:
        rows: of a tile.
        tiles: of each split.
        queries: of a tile at most.
    """

    rows: int
    tiles: int
    queries: int

    @classmethod
    def of(cls, q: torch.Tensor, batch: PagedBatch, kv_heads: int, width: int) -> Tiling:
        """Of q (B, Hq, S, D), or packed (T, Hq, D). width: Traits.accumulated.

        Packed rows of a batch are taken to have as many queries as the average.
        """
        group, length, rows = q.shape[1] // kv_heads, tokens_of(q), batch.lengths.shape[0]
        if batch.cu_seqlens is None:
            tile = tile_rows(length * group, width)
            tiles = ceil_div(length * group, tile) * rows
        else:
            tile = tile_rows(ceil_div(length, max(rows, 1)) * group, width)
            tiles = length * group // tile + rows + 1
        return cls(tile, tiles * kv_heads, ceil_div(tile, group))


def visible_blocks(most: int, left: int, tiling: Tiling, block: int) -> int:
    """The most blocks of keys that a tile sees, of `most`. left: of a window, or -1."""
    return most if left < 0 else min(most, (left + tiling.queries) // block + 2)


def choose(call: PagedCall, traits: Traits, tiling: Tiling, device: Device) -> Attention:
    """How to run attention to a cache."""
    blocks = visible_blocks(call.batch.most_pages, call.window[0], tiling, pages.PAGE)
    wide = max(traits.width, traits.value_width) > 128
    # a page of 128 keys takes 32 KB in flight with 128 channels, and 64 KB with 256
    stages = (2 if device.shared_memory < 160_000 else 3) - wide
    # hazard: on Hopper, eight warps give wrong answers where they share tiles of 64 rows (Triton 3.6)
    warps = 8 if traits.accumulated > 128 else 4
    return Attention(traits, tiling.rows, splits_of(call.q, call.batch, tiling.tiles, blocks, device), stages, warps)


@dataclass(frozen=True, eq=False)
class Outputs:
    """What attention writes.

    Attributes:
        out, lse: (B, Hq, S, Dv) and float32 (B, Hq, S), or of packed queries (T, Hq, Dv) and (Hq, T), contiguous.
        partial, sums: float32 (splits, *out.shape) and (splits, 2, rows of out); None if no programs share keys.
        heads: Hq of packed queries, else 1.
    """

    out: torch.Tensor
    lse: torch.Tensor
    partial: torch.Tensor | None
    sums: torch.Tensor | None
    heads: int

    @classmethod
    def empty(cls, q: torch.Tensor, value_dim: int, dtype: torch.dtype, splits: int) -> Outputs:
        """Of queries (B, Hq, S, D), or packed (T, Hq, D)."""
        packed = q.dim() == 3
        out = torch.empty(*q.shape[:-1], value_dim, dtype=dtype, device=q.device)
        lse = torch.empty(lse_shape(q), dtype=torch.float32, device=q.device)
        partial = sums = None
        if splits > 1:
            partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
            sums = torch.empty(splits, 2, lse.numel(), dtype=torch.float32, device=q.device)
        return cls(out, lse, partial, sums, q.shape[1] if packed else 1)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Those that the attention kernel writes, in the order of the fields."""
        return self.out, self.lse, self.partial, self.sums

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those that are combined."""
        assert self.partial is not None and self.sums is not None
        return self.partial, self.sums

    def combine(self, width: int, warmup: bool = False) -> None:
        """Add the sums of all splits to the outputs, if programs share keys. width: Dv, rounded up to a power of
        two."""
        if self.partial is None:
            return
        launch(
            combine_kernel, (ceil_div(self.lse.numel(), 4),),
            self.partial, self.sums, self.out, self.lse, self.lse.numel(), self.heads, self.partial.shape[0], 4, self.out.shape[-1], width,
            num_warps=4, warmup=warmup,
        )  # fmt: skip


def attend(
    call: PagedCall, device: Device, out_dtype: torch.dtype, *, splits: int | None = None, warmup: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """pages.attend_paged by kernels.

    Args:
        splits: programs that share a tile's pages; None: `choose` decides.
        warmup: compile only.

    Returns:
        out (B, Hq, S, Dv) in `out_dtype` and the LSE, float32 (B, Hq, S); of packed queries (T, Hq, Dv) and (Hq, T).
    """
    q, storage, batch = call.q, call.storage, call.batch
    check_invariant(batch)
    sequences, kv_heads, _, value_dim = storage.v.shape
    if q.numel() == 0 or batch.lengths.shape[0] == 0:
        out, lse = pages.empty_answer(q, value_dim)
        return out.to(out_dtype), lse
    traits = Traits.of(storage, call.recipe, device, call.scoring)
    tiling = Tiling.of(q, batch, kv_heads, traits.accumulated)
    how = choose(call, traits, tiling, device)
    how = how if splits is None else replace(how, splits=splits)
    k, v = (None, None) if call.new is None else call.new
    recent_k, recent_v = storage.k, storage.v
    # the interpreter can't multiply bfloat16, and truncates to it instead of rounding
    if device.emulated and q.dtype == torch.bfloat16:
        q, recent_k, recent_v = q.float(), recent_k.float(), recent_v.float()
        k, v = None if k is None else k.float(), None if v is None else v.float()
    outputs = Outputs.empty(q, value_dim, torch.float32 if device.emulated else out_dtype, how.splits)
    cached, table = storage.pages, batch.page_table
    stored = [x if x.dtype == torch.int8 or traits.native else x.view(torch.uint8) for x in (cached.k, cached.v)]
    operands = [x if x is None or batch.cu_seqlens is None else x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    launch(
        attention_kernel, (tiling.tiles * how.splits,),
        *operands, *[(0, 0, 0, 0) if x is None else row_strides(x) for x in operands], *batch.tensors(), stored[0], cached.k_scale, stored[1],
        cached.v_scale, storage.k_mean, storage.v_mean, storage.v_scale, recent_k, recent_v, call.sinks, *outputs.tensors(),
        batch.lengths.shape[0], q.shape[1], kv_heads, tokens_of(q), table.stride(0), table.shape[1], cached.k.shape[0], sequences,
        min(call.window[0], LARGEST_LENGTH), how.splits, batch.most_queries(q), call.softmax_scale, call.softcap, how.rows, traits,
        num_warps=how.warps, num_stages=how.stages, warmup=warmup,
    )  # fmt: skip
    outputs.combine(traits.value_width, warmup)
    return outputs.out.to(out_dtype), outputs.lse
