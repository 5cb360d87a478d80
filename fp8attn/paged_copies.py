"""Copies of rows of a cache of another engine that have many queries, in the layout of packed sequences: their tensors,
and in plain torch what the kernel writes.

The kernels for packed sequences take half of the time that one needs which turns V's bytes around for every tile of
queries. So V of an e4m3 cache is turned around once for all of them. Codes stay as they are, and scales that are the
same for all tokens become one for each block of K, and one for each channel of V. Tokens in half precision are copied
as they are, and are quantized then, if the cache has a recipe.

The host doesn't know how long rows are. Where all that may be copied takes more than MOST_BYTES, rows are copied and
attended to in several passes, which use the same memory. The device decides which row is whose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .call import Varlen
from .layout import first_unit, padded_length, slots
from .paged_tensors import PagedTensors, by_token, capacity_of, scale_strides
from .pages import PagedBatch, tokens_of
from .quantization import ROW_ALIGNMENT
from .recipe import E4M3, E4M3_NAN, SCALE_BLOCK, Packed
from .reference import Window

MOST_BYTES = 1 << 29
"""Bytes of the copies of one call at most."""

QUERIES_OF_PASS = 512
"""Queries of a call, of all its rows, for each pass at least: one that has nothing to do takes 10 us."""


@dataclass(frozen=True)
class Room:
    """How many tokens copies have room for.

    Attributes:
        window: of the call, as of `reference.Scoring`.
        few: rows of the batch with at most so many new tokens are not copied.
        most: rows with more have NaN.
        longest: no row has more tokens that there are pages for.
        beyond: tokens behind the `longest`, which aren't there, that a row has room for: those that a query sees which
            comes before them.
        of_row: the largest room of a row.
        tokens: of the copies of a pass.
        passes: how many there are.
        of_pass: a row that begins behind so many tokens of others is of the next pass.
    """

    window: Window
    few: int
    most: int
    longest: int
    beyond: int
    of_row: int
    tokens: int
    passes: int
    of_pass: int

    @classmethod
    def of(cls, q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, window: Window, few: int) -> Room:
        """For queries (B, Hq, S, D), or packed (T, Hq, D)."""
        longest, most = capacity_of(cache, batch), batch.most_queries(q)
        if batch.max_length is not None:
            longest = min(longest, batch.max_length)
        left, right = window
        beyond = min(max(right, 0), most)
        tokens = longest + beyond if left < 0 else min(longest + beyond, most + left + SCALE_BLOCK - 1)
        of_row, rows = padded_length(tokens), batch.lengths.shape[0]
        copied = rows if batch.cu_seqlens is None else min(rows, tokens_of(q) // (few + 1))
        bytes_of_number = 1 if cache.is_fp8 else cache.k.element_size() + 1  # as it is, and quantized
        bytes_of_token = bytes_of_number * cache.kv_heads * (cache.k.shape[3] + cache.v.shape[3])
        wanted, room = copied * of_row, MOST_BYTES // bytes_of_token // SCALE_BLOCK * SCALE_BLOCK
        if wanted <= room:
            return cls(window, few, most, longest, beyond, of_row, wanted, 1, wanted + 1)
        of_pass = max(room - of_row, 1)
        return cls(window, few, most, longest, beyond, of_row, room, wanted // of_pass + 1, of_pass)

    def unsupported(self, queries: int) -> str | None:
        """The reason why it isn't worth while for so many queries of all rows, or None if it is."""
        if self.passes > 1 and (self.tokens < self.of_row or self.passes * QUERIES_OF_PASS > queries):
            return f"rows of up to {self.of_row} tokens would take {self.passes} passes; there are {queries} queries"
        return None


@dataclass(frozen=True, eq=False)
class Spans:
    """Where rows of a batch lie, int32, contiguous. Rows of other passes have no queries and keys.

    Attributes:
        q: (B + 1), the first query of each row, in steps of S of all Hq heads; of packed queries not used.
        queries: (B), how many of a row's queries attend to copies: not those behind the tokens that it has room for.
        k: (B + 1), the first copied token of each row.
        keys: (B), how many are copied: from the block of the first one on that a query sees.
    """

    q: torch.Tensor
    queries: torch.Tensor
    k: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Spans:
        """Uninitialised."""
        numbers = torch.empty(4, rows + 1, dtype=torch.int32, device=device)
        return cls(numbers[0], numbers[1, :rows], numbers[2], numbers[3, :rows])


@dataclass(frozen=True, eq=False)
class Copies:
    """Keys and values as kernels for packed sequences take them. T tokens, B rows, N = T / 128 + B pages.

    Attributes:
        k: (1, Hkv, T, D), the cache's dtype. A token that isn't there is NaN; in e4m3 also one that isn't finite.
        v: in e4m3 (1, Hkv, Dv, 128 N), keys in the order of layout.key_of_slot, zeros where tokens aren't finite; in
            half precision (1, Hkv, T, Dv), zeros where tokens aren't there.
        k_scale: float32 (1, Hkv, N), of each page; None in half precision.
        v_scale: float32 (B, Hkv, Dv); None in half precision.
    """

    spans: Spans
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def empty(cls, cache: PagedTensors, batch: PagedBatch, room: Room, device: torch.device) -> Copies:
        """Uninitialised."""
        heads, rows, tokens = cache.kv_heads, batch.lengths.shape[0], room.tokens
        (dim, value_dim), dtype = (x.shape[3] for x in (cache.k, cache.v)), E4M3 if cache.is_fp8 else cache.k.dtype
        k, spans = torch.empty(1, heads, tokens, dim, dtype=dtype, device=device), Spans.empty(rows, device)
        if not cache.is_fp8:
            return cls(spans, k, torch.empty(1, heads, tokens, value_dim, dtype=dtype, device=device))
        pages = tokens // SCALE_BLOCK + rows
        v = torch.empty(1, heads, value_dim, SCALE_BLOCK * pages, dtype=dtype, device=device)
        k_scale, v_scale = (torch.empty(shape, dtype=torch.float32, device=device) for shape in ((1, heads, pages), (rows, heads, value_dim)))
        return cls(spans, k, v, k_scale, v_scale)

    def varlen(self, tokens: int, batch: PagedBatch, longest: tuple[int, int]) -> Varlen:
        """The sequences of `tokens` packed queries, and their keys. longest: the most queries and keys of one."""
        starts = self.spans.q if batch.cu_seqlens is None else batch.cu_seqlens
        return Varlen(Packed(starts, self.spans.queries, tokens), Packed(self.spans.k, self.spans.keys, self.k.shape[2]), *longest)


def unsupported_cache(cache: PagedTensors) -> str | None:
    """The reason why rows of a cache aren't copied, or None if they are."""
    if not cache.is_fp8 and cache.recipe is None:
        return f"the cache is {cache.k.dtype} and has no recipe"
    if by_token(cache.k_scale) or by_token(cache.v_scale):
        return "scales are per token; it takes others"
    if cache.k.shape[3] % ROW_ALIGNMENT:
        return f"head dim is {cache.k.shape[3]}; it takes multiples of {ROW_ALIGNMENT}"
    return None


def copy(q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, room: Room, number: int = 0) -> Copies:
    """The definition of what the kernel writes in pass `number`, for queries (B, Hq, S, D) or packed (T, Hq, D); zeros
    elsewhere."""
    copies, rows, left = Copies.empty(cache, batch, room, q.device), batch.lengths.shape[0], room.window[0]
    for x in (copies.k, copies.v, copies.k_scale, copies.v_scale):
        if x is not None:
            x.view(torch.uint8).zero_()
    spans, length, begin = copies.spans, tokens_of(q), -number * room.of_pass
    edges = None if batch.cu_seqlens is None else batch.cu_seqlens.clamp(0, length).tolist()
    lengths, counts = batch.lengths.clamp(min=0).tolist(), None if batch.counts is None else batch.counts.tolist()
    for row in range(rows):
        given = length if edges is None else max(edges[row + 1] - edges[row], 0)
        end = lengths[row]
        count = max(min(given if counts is None else counts[row], given, end), 0)
        used = min(end, room.longest + room.beyond)
        queries = 0 if given > room.most else max(count - (end - used), 0)
        first = max(used - queries - left, 0) // SCALE_BLOCK * SCALE_BLOCK if left >= 0 else 0
        keys = used - first if given > room.few and queries > 0 else 0
        copied = keys > 0 and 0 <= begin < room.of_pass
        spans.q[row], spans.queries[row] = row * q.shape[1] * length, queries if copied else 0
        spans.k[row], spans.keys[row] = min(max(begin, 0), room.tokens), keys if copied else 0
        if copied:
            there = 0 if room.window[1] < 0 and end > room.longest else min(used, room.longest)
            of_row = _RowTokens.of(cache, batch.page_table[row], (first, used, there))
            (_copy_codes if cache.is_fp8 else _copy_halves)(copies, cache, row, of_row)
        begin += padded_length(keys)
    spans.q[rows], spans.k[rows] = rows * q.shape[1] * length, room.tokens
    return copies


@dataclass(frozen=True)
class _RowTokens:
    """A row's tokens that are copied, N of them.

    Attributes:
        k, v: (Hkv, N, D) and (Hkv, N, Dv), of the cache's dtype, of e4m3 bytes. Anything where there is no token.
        exists: bool (N).
    """

    k: torch.Tensor
    v: torch.Tensor
    exists: torch.Tensor

    @classmethod
    def of(cls, cache: PagedTensors, table: torch.Tensor, tokens: tuple[int, int, int]) -> _RowTokens:
        """tokens: the first, the one behind the last, and the one behind the last that is there."""
        token = torch.arange(*tokens[:2], device=table.device)
        # behind the last page of the table there is none
        numbers = torch.nn.functional.pad(table.long(), (0, 1), value=-1)
        number, every = numbers[(token // cache.page).clamp(max=table.shape[0])], cache.k.shape[0]
        at = number.clamp(0, every - 1), token % cache.page
        k, v = ((x.view(torch.uint8) if cache.is_fp8 else x)[at].transpose(0, 1) for x in (cache.k, cache.v))
        return cls(k, v, (token < tokens[2]) & (number >= 0) & (number < every))


def _copy_halves(copies: Copies, cache: PagedTensors, row: int, x: _RowTokens) -> None:
    """Copy one row of a cache in half precision."""
    begin = int(copies.spans.k[row])
    missing, own = ~x.exists[:, None], slice(begin, begin + x.k.shape[1])
    copies.k[0, :, own], copies.v[0, :, own] = x.k.masked_fill(missing, torch.nan), x.v.masked_fill(missing, 0.0)


def _copy_codes(copies: Copies, cache: PagedTensors, row: int, x: _RowTokens) -> None:
    """Copy one row of an e4m3 cache."""
    assert copies.k_scale is not None and copies.v_scale is not None
    begin, count = int(copies.spans.k[row]), x.k.shape[1]
    first, pages = first_unit(begin, row, SCALE_BLOCK), padded_length(count) // SCALE_BLOCK
    scales = []
    for tensor, scale in zip((cache.k, cache.v), cache.scales, strict=True):
        assert scale is not None
        scales.append(scale.as_strided((row + 1, *tensor.shape[:3]), scale_strides(scale))[row, 0, 0])
    finite = scales[0].isfinite() & scales[1].isfinite()
    copies.v_scale[row] = torch.where(finite, scales[1], 0.0).unsqueeze(-1)
    copies.k_scale[0, :, first : first + pages] = torch.where(finite, scales[0], 1.0).unsqueeze(-1)
    bad = (~x.exists | ((x.v & E4M3_NAN) == E4M3_NAN).any(-1) | ~finite.unsqueeze(-1)).unsqueeze(-1)
    copies.k.view(torch.uint8)[0, :, begin : begin + count] = x.k.masked_fill(bad, E4M3_NAN)
    values = torch.nn.functional.pad(x.v.masked_fill(bad, 0), (0, 0, 0, SCALE_BLOCK * pages - count))
    own = slice(SCALE_BLOCK * first, SCALE_BLOCK * (first + pages))
    copies.v.view(torch.uint8)[0, :, :, own] = values[:, slots(SCALE_BLOCK * pages, values.device)].transpose(1, 2)
