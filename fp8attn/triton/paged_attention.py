"""Attention to a KV cache: `pages.attend_paged` by kernels, for prefill and decode alike.

The queries of all query heads that share a key/value head are the rows of one tile. A program quantizes its rows,
attends to whole pages in FP8, and to the rows' own pages in half precision. If there are few tiles, several programs
share a tile's pages, and a second kernel adds their sums in the order of the pages. Where a program's pages begin and
end depends on lengths on the device; how many programs there are depends on what the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .. import pages
from ..device import Device
from ..pages import PagedCall, Storage
from .fit import fitted_codes
from .forward import load_rows
from .half_keys import load_mean, mean_scores
from .launch import ceil_div, launch
from .paged_append import RECENT, Traits, batch_row, load_tokens, page_number
from .quantize import BLOCK, FIT_DIM, rotated
from .tile import (
    E4M3_LARGEST,
    FLOAT_MAX,
    INT8_MAX,
    LOG2E,
    P_OFFSET,
    SMALLEST_SCALE,
    e4m3_code,
    half_of_code,
    int8_code,
    inverse,
    is_finite,
    operand,
    permute_keys,
    probabilities,
    scale_of,
    score_factor,
    set_nonfinite_keys,
)

HALF_BLOCK: tl.constexpr = tl.constexpr(64)  # keys in half precision of one step
INVERSE_OFFSET: tl.constexpr = tl.constexpr(2.0**-pages.P_OFFSET)  # makes sums of P those of 2^(score - m)

SPLIT_PAGES = 4
"""Least number of pages for which another program is worth its partial sums."""


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
    elif C.dim <= FIT_DIM:
        codes, fit = fitted_codes(y, C.native, True)
        kept = tl.minimum(tl.maximum(kept * fit, SMALLEST_SCALE), FLOAT_MAX)
        return (codes.to(tl.float8e4nv, bitcast=True) if C.native else half_of_code(codes)), kept, bad
    else:
        codes = e4m3_code(y, C.native)
        return (codes.to(tl.float8e4nv, bitcast=True) if C.native else half_of_code(codes)), kept, bad


@triton.jit
def finite_or_zero(m):
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def attend_to_page(q, row_factor, m, l, acc, k_page, k_scale, v_page, v_scale, exists, hidden, C: tl.constexpr):
    """Add attention to one page in FP8 to the sums. P is relative to the page's largest score alone.

    Args:
        exists: whether the page does; if not, rows that see it become NaN.
        hidden: (M,), rows that don't see the page.
    """
    keys = tl.arange(0, BLOCK)
    x = tl.dot(q, operand(load_rows(k_page, keys, C.dim, BLOCK, 0, C.width, C.dim, False), False).T)
    scale = tl.load(k_scale)
    if C.int8:
        x = set_nonfinite_keys(x.to(tl.float32), scale < 0, k_page, keys, C.dim, BLOCK)
    x *= score_factor(row_factor, tl.abs(scale), C.positive)[:, None]
    x = tl.where(hidden[:, None], -float("inf"), tl.where(exists, x, float("nan")))
    largest = tl.max(x, 1)
    p = tl.exp2((x - finite_or_zero(largest)[:, None]) + P_OFFSET)
    m_new = tl.maximum(m, largest)
    alpha = tl.exp2(m - finite_or_zero(m_new))
    beta = tl.exp2(largest - finite_or_zero(m_new)) * INVERSE_OFFSET
    l = l * alpha + tl.sum(p, 1) * beta
    channels = tl.arange(0, C.value_width)
    pointers = v_page + channels[None, :] * BLOCK + keys[:, None]
    value = tl.load(pointers, mask=(channels < C.value_dim)[None, :], other=0.0)
    fresh = tl.dot(permute_keys(probabilities(p, False, C.native)), operand(value, False))
    return m_new, l, acc * alpha[:, None] + fresh * (beta * tl.load(v_scale))[:, None]


@triton.jit
def attend_to_recent(q, m, l, acc, keys, visible, k, v, recent_k, recent_v, k_stride, v_stride, edge, end, factor, C: tl.constexpr):
    """Add attention to `keys` (N,) in half precision to the sums. visible: (M, N)."""
    key = load_tokens(recent_k, k, k_stride, keys, edge, end, C.dim, C.width)
    value = load_tokens(recent_v, v, v_stride, keys, edge, end, C.value_dim, C.value_width)
    bad = tl.max(tl.where(is_finite(key.to(tl.float32)), 0, 1), 1) + tl.max(tl.where(is_finite(value.to(tl.float32)), 0, 1), 1) > 0
    key = tl.where(bad[:, None], 0.0, key).to(q.dtype)
    value = tl.where(is_finite(value.to(tl.float32)), value, 0.0).to(q.dtype)
    x = tl.dot(q, key.T, input_precision="ieee") * factor
    x = tl.where(visible, tl.where(bad[None, :], float("nan"), x), -float("inf"))
    largest = tl.max(x, 1)
    p = tl.exp2(x - finite_or_zero(largest)[:, None])
    m_new = tl.maximum(m, largest)
    alpha, beta = tl.exp2(m - finite_or_zero(m_new)), tl.exp2(largest - finite_or_zero(m_new))
    l = l * alpha + tl.sum(p, 1) * beta
    return m_new, l, acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee") * beta[:, None]


@triton.jit
def work_of_program(length, group, kv_heads, splits, ROWS: tl.constexpr):
    """The work of a program in a grid of tiles of rows x splits x kv_heads x batch, in one dimension.

    Returns:
        the number of tiles; the program's split, head of keys and row of the batch; and of each of its rows (ROWS,) the
        query, which may not exist, and the query's head.
    """
    tiles = tl.cdiv(length * group, ROWS)
    program = tl.program_id(0)
    tile = program % tiles
    split = program // tiles % splits
    kv_head = (program // tiles // splits % kv_heads).to(tl.int64)
    batch = (program // tiles // splits // kv_heads).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    return tiles, split, kv_head, batch, rows // group, kv_head * group + rows % group


@triton.jit(do_not_specialize=["q_heads", "kv_heads", "length", "table_width", "every_page", "every_sequence", "splits"])
def attention_kernel(
    q, k, v, q_strides, k_strides, v_strides, page_table, lengths, counts, sequences, k_pages, k_scale, v_pages, v_scale, k_mean, v_mean,
    channel_scale, recent_k, recent_v, out, lse, partial, partial_sums, q_heads, kv_heads, length, table_stride, table_width, every_page,
    every_sequence, splits, softmax_scale, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows x splits x kv_heads x batch, in one dimension.

    Args:
        k, v: the new tokens; or None if all are in recent_k and recent_v.
        out, lse: (B, Hq, S, Dv) and float32 (B, Hq, S), contiguous.
        partial, partial_sums: float32 (splits, B, Hq, S, Dv) and (splits, 2, B, Hq, S), acc, m and l of each split; or
            None if there is one.
    """
    VALUE_WIDTH: tl.constexpr = C.value_width
    group = q_heads // kv_heads
    tiles, split, kv_head, batch, query, head = work_of_program(length, group, kv_heads, splits, ROWS)
    sequence, has_sequence, end, count = batch_row(lengths, counts, sequences, batch, length, every_sequence)
    pair = sequence * kv_heads + kv_head

    exists = query < length
    real = query < count
    position = tl.where(real, end - count + query, -1)
    columns = tl.arange(0, C.width)
    pointers = q + batch * q_strides[0] + head[:, None] * q_strides[1] + query[:, None].to(tl.int64) * q_strides[2] + columns[None, :]
    x = tl.load(pointers, mask=real[:, None] & (columns < C.dim)[None, :], other=0.0)
    operand_q, row_scale, bad = quantized_rows(x, C)
    own = tl.where(real, position // BLOCK, 0)  # number of pages that each row sees in FP8
    most = tl.minimum(tl.max(own, 0), table_width + 1)  # rows that would see more are NaN already

    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    share = tl.cdiv(most, splits)
    for page in range(split * share, tl.minimum(split * share + share, most)):
        number, has_page = page_number(page_table + batch * table_stride, page, table_width, every_page)
        index = number * kv_heads + kv_head
        m, l, acc = attend_to_page(
            operand_q, row_scale * (softmax_scale * LOG2E), m, l, acc, k_pages + index * BLOCK * C.dim, k_scale + index,
            v_pages + index * C.value_dim * BLOCK, v_scale + index, has_page, own <= page, C,
        )  # fmt: skip
    channels = tl.arange(0, C.value_width)
    inside = channels < C.value_dim
    if most > 0:  # what K and V lost comes back, once for all pages
        restore = tl.load(channel_scale + pair * C.value_dim + channels, mask=inside, other=0.0)
        mean = tl.load(v_mean + pair * C.value_dim + channels, mask=inside, other=0.0)
        acc = acc * restore[None, :] + l[:, None] * mean[None, :]
        m += mean_scores(x, load_mean(k_mean + pair * C.dim, C.dim, C.width, C.part)) * (softmax_scale * LOG2E)

    if split == splits - 1:
        edge = end
        if k is not None:
            edge = end - count
            k += batch * k_strides[0] + kv_head * k_strides[1]
            v += batch * v_strides[0] + kv_head * v_strides[1]
        first = tl.min(tl.where(real, position // BLOCK * BLOCK, end), 0)
        for start in tl.range(first, tl.max(position, 0) + 1, HALF_BLOCK, num_stages=1):
            keys = start + tl.arange(0, HALF_BLOCK)
            visible = (keys[None, :] <= position[:, None]) & (keys[None, :] >= (own * BLOCK)[:, None])
            m, l, acc = attend_to_recent(
                x, m, l, acc, keys, visible, k, v, recent_k + pair * RECENT * C.dim, recent_v + pair * RECENT * C.value_dim, k_strides[2],
                v_strides[2], edge, end, softmax_scale * LOG2E, C,
            )  # fmt: skip
    l = tl.where((bad & (l != 0)) | (real & (has_sequence == 0)), float("nan"), l)

    at = (batch * q_heads + head) * length + query
    where = exists[:, None] & inside[None, :]
    if partial is not None:
        every = (tl.num_programs(0) // tiles // splits // kv_heads).to(tl.int64) * q_heads * length
        tl.store(partial + (split * every + at)[:, None] * C.value_dim + channels[None, :], acc, mask=where)
        tl.store(partial_sums + 2 * split * every + at, m, mask=exists)
        tl.store(partial_sums + (2 * split + 1) * every + at, l, mask=exists)
    else:
        tl.store(out + at[:, None] * C.value_dim + channels[None, :], (acc * inverse(l)[:, None]).to(out.dtype.element_ty), mask=where)
        tl.store(lse + at, (m + tl.log2(l)) / LOG2E, mask=exists)


@triton.jit(do_not_specialize=["total", "splits"])
def combine_kernel(partial, partial_sums, out, lse, total, splits, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Add the sums of all splits, from the first to the last. Grid: chunks of ROWS of `total` rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    exists = rows < total
    inside = exists[:, None] & (channels < DIM)[None, :]
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(splits):
        at = split * tl.cast(total, tl.int64) + rows
        theirs = tl.load(partial_sums + at + split * tl.cast(total, tl.int64), mask=exists, other=-float("inf"))
        m_new = tl.maximum(m, theirs)
        alpha, beta = tl.exp2(m - finite_or_zero(m_new)), tl.exp2(theirs - finite_or_zero(m_new))
        l = l * alpha + tl.load(partial_sums + at + (split + 1) * tl.cast(total, tl.int64), mask=exists, other=0.0) * beta
        acc = acc * alpha[:, None] + tl.load(partial + at[:, None] * DIM + channels[None, :], mask=inside, other=0.0) * beta[:, None]
        m = m_new
    tl.store(out + rows[:, None] * DIM + channels[None, :], (acc * inverse(l)[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + rows, (m + tl.log2(l)) / LOG2E, mask=exists)


def tile_rows(rows: int, width: int) -> int:
    """Rows of a tile. rows: of a key/value head. width: channels, rounded up, of K or V, whichever is more."""
    return 16 if rows <= 16 else 32 if rows <= 32 or width > 128 else 64


def splits_of(tiles: int, blocks: int, device: Device) -> int:
    """Programs that share the blocks of keys of each tile. blocks: of the longest sequence."""
    return max(min(2 * device.sm_count // max(tiles, 1), ceil_div(blocks, SPLIT_PAGES)), 1)


def choose(q: torch.Tensor, storage: Storage, most_pages: int, traits: Traits, device: Device) -> Attention:
    """How to run attention of q (B, Hq, S, D). most_pages: of the longest sequence, or more."""
    batch, q_heads, length, _ = q.shape
    kv_heads = storage.k.shape[1]
    rows = length * (q_heads // kv_heads)
    tile = tile_rows(rows, max(traits.width, traits.value_width))
    splits = splits_of(ceil_div(rows, tile) * kv_heads * batch, most_pages, device)
    wide = max(traits.width, traits.value_width) > 128
    # a page of 128 keys takes 32 KB in flight with 128 channels, and 64 KB with 256
    stages = (2 if device.shared_memory < 160_000 else 3) - wide
    return Attention(traits, tile, splits, stages, 8 if wide else 4)


def combine(partial: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, width: int, warmup: bool) -> None:
    """Add the sums of all splits (splits, B, Hq, S, Dv) and (splits, 2, B, Hq, S) to out and lse. width: Dv, rounded up
    to a power of two."""
    launch(
        combine_kernel, (ceil_div(lse.numel(), 4),),
        partial, sums, out, lse, lse.numel(), partial.shape[0], 4, out.shape[3], width, num_warps=4, warmup=warmup,
    )  # fmt: skip


def attend(
    call: PagedCall, device: Device, out_dtype: torch.dtype, *, splits: int | None = None, warmup: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """pages.attend_paged by kernels.

    Args:
        splits: programs that share a tile's pages; None: `choose` decides.
        warmup: compile only.

    Returns:
        out (B, Hq, S, Dv) in `out_dtype` and the LSE, float32 (B, Hq, S).
    """
    q, storage, batch = call.q, call.storage, call.batch
    rows, q_heads, length, _ = q.shape
    sequences, kv_heads, _, value_dim = storage.v.shape
    traits = Traits.of(storage, call.recipe, device, call.softmax_scale)
    how = choose(q, storage, batch.most_pages, traits, device)
    how = how if splits is None else replace(how, splits=splits)
    k, v = (None, None) if call.new is None else call.new
    recent_k, recent_v = storage.k, storage.v
    # the interpreter can't multiply bfloat16, and truncates to it instead of rounding
    if device.emulated and q.dtype == torch.bfloat16:
        q, recent_k, recent_v = q.float(), recent_k.float(), recent_v.float()
        k, v = None if k is None else k.float(), None if v is None else v.float()
    out = torch.empty(rows, q_heads, length, value_dim, dtype=torch.float32 if device.emulated else out_dtype, device=q.device)
    lse = torch.empty(rows, q_heads, length, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out.to(out_dtype), lse
    partial = sums = None
    if how.splits > 1:
        partial = torch.empty(how.splits, *out.shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(how.splits, 2, *lse.shape, dtype=torch.float32, device=q.device)
    cached, table = storage.pages, batch.page_table
    stored = [x if x.dtype == torch.int8 or traits.native else x.view(torch.uint8) for x in (cached.k, cached.v)]
    nothing = (0, 0, 0, 0)
    launch(
        attention_kernel, (ceil_div(length * (q_heads // kv_heads), how.rows) * how.splits * kv_heads * rows,),
        q, k, v, q.stride(), nothing if k is None else k.stride(), nothing if v is None else v.stride(), *batch.tensors(),
        stored[0], cached.k_scale, stored[1], cached.v_scale, storage.k_mean, storage.v_mean, storage.v_scale, recent_k, recent_v,
        out, lse, partial, sums, q_heads, kv_heads, length, table.stride(0), table.shape[1], cached.k.shape[0], sequences, how.splits,
        call.softmax_scale, how.rows, traits, num_warps=how.warps, num_stages=how.stages, warmup=warmup,
    )  # fmt: skip
    if partial is not None and sums is not None:
        combine(partial, sums, out, lse, traits.value_width, warmup)
    return out.to(out_dtype), lse
