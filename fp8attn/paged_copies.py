"""Rows of a cache of another engine that have many queries, in the layout of packed sequences: where they lie, their
copies, and in plain torch what kernels write.

The kernels for packed sequences take half of the time that one needs which turns V's bytes around for every tile of
queries. So V of an e4m3 cache is turned around once for all of them. Codes stay as they are, and scales that are the
same for all tokens become one for each block of K, and one for each channel of V. Caches in half precision are
quantized, if they have a recipe.

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
        bytes_of_token = cache.kv_heads * (cache.k.shape[3] + cache.v.shape[3])
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
        k: (B + 1), the first copied token of each row, and the end of the last one.
        keys: (B), how many are copied.
        firsts: (B), the first one among the row's tokens: that of the block of the first one that a query sees.
        ends: (B), tokens of the row from this one on aren't there.
    """

    q: torch.Tensor
    queries: torch.Tensor
    k: torch.Tensor
    keys: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Spans:
        """Uninitialised. Each begins at a multiple of 16 bytes: Triton compiles other kernels for others."""
        numbers = torch.empty(6, (rows + 4) // 4 * 4, dtype=torch.int32, device=device)
        return cls(numbers[0, : rows + 1], numbers[1, :rows], numbers[2, : rows + 1], *numbers[3:, :rows])

    def varlen(self, tokens: tuple[int, int], batch: PagedBatch, longest: tuple[int, int]) -> Varlen:
        """The sequences of packed queries and keys, of which there are `tokens`. longest: the most of one."""
        starts = self.q if batch.cu_seqlens is None else batch.cu_seqlens
        return Varlen(Packed(starts, self.queries, tokens[0]), self.packed(tokens[1]), *longest)

    def packed(self, tokens: int) -> Packed:
        """The sequences of keys."""
        return Packed(self.k, self.keys, tokens)


@dataclass(frozen=True, eq=False)
class Copies:
    """Keys and values of an e4m3 cache as kernels for packed sequences take them. T tokens, B rows, N = T / 128 + B
    pages.

    Attributes:
        k: e4m3 (1, Hkv, T, D). A token that a row mustn't see, or that isn't finite, is NaN.
        k_scale: float32 (1, Hkv, N), of each page.
        v: e4m3 (1, Hkv, Dv, 128 N), keys in the order of layout.key_of_slot; zeros where tokens aren't finite.
        v_scale: float32 (B, Hkv, Dv).
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor

    @classmethod
    def empty(cls, cache: PagedTensors, rows: int, room: Room, device: torch.device) -> Copies:
        """Uninitialised."""
        heads, dim, value_dim, pages = cache.kv_heads, cache.k.shape[3], cache.v.shape[3], room.tokens // SCALE_BLOCK + rows
        k = torch.empty(1, heads, room.tokens, dim, dtype=E4M3, device=device)
        v = torch.empty(1, heads, value_dim, SCALE_BLOCK * pages, dtype=E4M3, device=device)
        k_scale, v_scale = (torch.empty(shape, dtype=torch.float32, device=device) for shape in ((1, heads, pages), (rows, heads, value_dim)))
        return cls(k, k_scale, v, v_scale)


def unsupported_cache(cache: PagedTensors) -> str | None:
    """The reason why rows of a cache aren't copied, or None if they are."""
    if not cache.is_fp8 and cache.recipe is None:
        return f"the cache is {cache.k.dtype} and has no recipe"
    if by_token(cache.k_scale) or by_token(cache.v_scale):
        return "scales are per token; it takes others"
    if cache.k.shape[3] % ROW_ALIGNMENT:
        return f"head dim is {cache.k.shape[3]}; it takes multiples of {ROW_ALIGNMENT}"
    return None


def place(q: torch.Tensor, batch: PagedBatch, room: Room, number: int = 0) -> Spans:
    """The definition of where a kernel places rows in pass `number`, for queries (B, Hq, S, D) or packed (T, Hq, D)."""
    rows, left = batch.lengths.shape[0], room.window[0]
    spans, length, begin = Spans.empty(rows, q.device), tokens_of(q), -number * room.of_pass
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
        is_placed = keys > 0 and 0 <= begin < room.of_pass
        spans.q[row], spans.k[row] = row * q.shape[1] * length, min(max(begin, 0), room.tokens)
        spans.queries[row], spans.keys[row] = (queries, keys) if is_placed else (0, 0)
        spans.firsts[row], spans.ends[row] = first, 0 if room.window[1] < 0 and end > room.longest else min(used, room.longest)
        begin += padded_length(keys)
    spans.q[rows], spans.k[rows] = rows * q.shape[1] * length, min(max(begin, 0), room.tokens)
    return spans


def gathered(x: torch.Tensor, table: torch.Tensor, tokens: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a row, (Hkv, N, D), and which of them are there, (N).

    Args:
        x: (P, page, Hkv, D).
        table: (M), the numbers of the row's pages.
        tokens: the first, the one behind the last, and the first one that isn't there.
    """
    token = torch.arange(*tokens[:2], device=table.device)
    # behind the last page of the table there is none
    numbers = torch.nn.functional.pad(table.long(), (0, 1), value=-1)
    number, (every, page) = numbers[(token // x.shape[1]).clamp(max=table.shape[0])], x.shape[:2]
    exists = (token < tokens[2]) & (number >= 0) & (number < every)
    return x[number.clamp(0, every - 1), token % page].transpose(0, 1), exists


def copy(cache: PagedTensors, batch: PagedBatch, room: Room, spans: Spans) -> Copies:
    """The definition of what the kernel copies of an e4m3 cache; zeros elsewhere."""
    copies = Copies.empty(cache, batch.lengths.shape[0], room, spans.k.device)
    for x in (copies.k, copies.v, copies.k_scale, copies.v_scale):
        x.view(torch.uint8).zero_()
    for row, count in enumerate(spans.keys.tolist()):
        if count == 0:
            continue
        begin, first, end = (int(x[row]) for x in (spans.k, spans.firsts, spans.ends))
        page, pages = first_unit(begin, row, SCALE_BLOCK), padded_length(count) // SCALE_BLOCK
        (k, exists), (v, _) = (gathered(x.view(torch.uint8), batch.page_table[row], (first, first + count, end)) for x in (cache.k, cache.v))
        scales = []
        for tensor, scale in zip((cache.k, cache.v), cache.scales, strict=True):
            assert scale is not None
            scales.append(scale.as_strided((row + 1, *tensor.shape[:3]), scale_strides(scale))[row, 0, 0])
        finite = scales[0].isfinite() & scales[1].isfinite()
        copies.v_scale[row] = torch.where(finite, scales[1], 0.0).unsqueeze(-1)
        copies.k_scale[0, :, page : page + pages] = torch.where(finite, scales[0], 1.0).unsqueeze(-1)
        bad = (~exists | ((v & E4M3_NAN) == E4M3_NAN).any(-1) | ~finite.unsqueeze(-1)).unsqueeze(-1)
        copies.k.view(torch.uint8)[0, :, begin : begin + count] = k.masked_fill(bad, E4M3_NAN)
        values = torch.nn.functional.pad(v.masked_fill(bad, 0), (0, 0, 0, SCALE_BLOCK * pages - count))
        own = slice(SCALE_BLOCK * page, SCALE_BLOCK * (page + pages))
        copies.v.view(torch.uint8)[0, :, :, own] = values[:, slots(SCALE_BLOCK * pages, values.device)].transpose(1, 2)
    return copies


def halves(cache: PagedTensors, batch: PagedBatch, room: Room, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache in half precision, (1, Hkv, T, D) and (1, Hkv, T, Dv), which a kernel quantizes:
    `quantization.quantize_packed` of them. Tokens that aren't there are NaN."""
    found = []
    for x in (cache.k, cache.v):
        y = x.new_zeros(1, cache.kv_heads, room.tokens, x.shape[3])
        for row, count in enumerate(spans.keys.tolist()):
            begin, first, end = (int(of[row]) for of in (spans.k, spans.firsts, spans.ends))
            tokens, exists = gathered(x, batch.page_table[row], (first, first + count, end))
            y[0, :, begin : begin + count] = tokens.masked_fill(~exists[:, None], torch.nan)
        found.append(y)
    return found[0], found[1]
