"""Copies of rows of an e4m3 cache of another engine that have many queries, in the layout of packed sequences: their
tensors, and in plain torch what the kernel writes.

The kernels for packed sequences take half of the time that one needs which turns V's bytes around for every tile of
queries. So V is turned around once for all of them. Codes stay as they are, and scales that are the same for all tokens
become one for each block of K, and one for each channel of V.

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
    longest: int
    beyond: int
    of_row: int
    tokens: int
    passes: int
    of_pass: int

    @classmethod
    def of(cls, q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, window: Window, few: int) -> Room:
        """For queries (B, Hq, S, D), or packed (T, Hq, D)."""
        longest = capacity_of(cache, batch)
        if batch.max_length is not None:
            longest = min(longest, batch.max_length)
        beyond = min(max(window[1], 0), batch.most_queries(q))
        of_row, rows = padded_length(longest + beyond), batch.lengths.shape[0]
        copied = rows if batch.cu_seqlens is None else min(rows, tokens_of(q) // (few + 1))
        bytes_of_token = cache.kv_heads * (cache.k.shape[3] + cache.v.shape[3])
        wanted, most = copied * of_row, MOST_BYTES // bytes_of_token // SCALE_BLOCK * SCALE_BLOCK
        if wanted <= most:
            return cls(window, few, longest, beyond, of_row, wanted, 1, wanted + 1)
        of_pass = max(most - of_row, 1)
        return cls(window, few, longest, beyond, of_row, most, wanted // of_pass + 1, of_pass)

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
        keys: (B), how many are copied.
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
        k: e4m3 (1, Hkv, T, D). A token that a row mustn't see, or that isn't finite, is NaN.
        k_scale: float32 (1, Hkv, N), of each page.
        v: e4m3 (1, Hkv, Dv, 128 N), keys in the order of layout.key_of_slot; zeros where tokens aren't finite.
        v_scale: float32 (B, Hkv, Dv).
    """

    spans: Spans
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor

    @classmethod
    def empty(cls, cache: PagedTensors, batch: PagedBatch, room: Room, device: torch.device) -> Copies:
        """Uninitialised."""
        heads, rows = cache.kv_heads, batch.lengths.shape[0]
        dim, value_dim, pages = cache.k.shape[3], cache.v.shape[3], room.tokens // SCALE_BLOCK + rows
        k = torch.empty(1, heads, room.tokens, dim, dtype=E4M3, device=device)
        v = torch.empty(1, heads, value_dim, SCALE_BLOCK * pages, dtype=E4M3, device=device)
        k_scale, v_scale = (torch.empty(shape, dtype=torch.float32, device=device) for shape in ((1, heads, pages), (rows, heads, value_dim)))
        return cls(Spans.empty(rows, device), k, k_scale, v, v_scale)

    def varlen(self, tokens: int, batch: PagedBatch, longest: tuple[int, int]) -> Varlen:
        """The sequences of `tokens` packed queries, and their keys. longest: the most queries and keys of one."""
        starts = self.spans.q if batch.cu_seqlens is None else batch.cu_seqlens
        return Varlen(Packed(starts, self.spans.queries, tokens), Packed(self.spans.k, self.spans.keys, self.k.shape[2]), *longest)


def unsupported_cache(cache: PagedTensors) -> str | None:
    """The reason why rows of a cache can't be copied, or None if they can."""
    if not cache.is_fp8:
        return f"k is {cache.k.dtype}; it takes e4m3"
    if by_token(cache.k_scale) or by_token(cache.v_scale):
        return "scales are per token; it takes others"
    if cache.k.shape[3] % ROW_ALIGNMENT:
        return f"head dim is {cache.k.shape[3]}; it takes multiples of {ROW_ALIGNMENT}"
    return None


def copy(q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, room: Room, number: int = 0) -> Copies:
    """The definition of what the kernel writes in pass `number`, for queries (B, Hq, S, D) or packed (T, Hq, D); zeros
    elsewhere."""
    copies, rows, most = Copies.empty(cache, batch, room, q.device), batch.lengths.shape[0], batch.most_queries(q)
    for x in (copies.k.view(torch.uint8), copies.k_scale, copies.v.view(torch.uint8), copies.v_scale):
        x.zero_()
    spans, length, begin = copies.spans, tokens_of(q), -number * room.of_pass
    edges = None if batch.cu_seqlens is None else batch.cu_seqlens.clamp(0, length).tolist()
    lengths, counts = batch.lengths.clamp(min=0).tolist(), None if batch.counts is None else batch.counts.tolist()
    for row in range(rows):
        given = length if edges is None else max(edges[row + 1] - edges[row], 0)
        end = lengths[row]
        count = max(min(given if counts is None else counts[row], given, end), 0)
        keys = min(end, room.longest + room.beyond)
        queries = max(count - (end - keys), 0)
        copied = given > room.few and 0 <= begin < room.of_pass
        spans.q[row], spans.queries[row] = row * q.shape[1] * length, queries if copied else 0
        spans.k[row], spans.keys[row] = min(max(begin, 0), room.tokens), keys if copied else 0
        if copied:
            nonfinite = given > most or (room.window[1] < 0 and end > room.longest)
            _copy_row(copies, cache, row, batch.page_table[row], (keys, queries, room.window[0]), room.longest, nonfinite)
        begin += padded_length(keys) if given > room.few else 0
    spans.q[rows], spans.k[rows] = rows * q.shape[1] * length, room.tokens
    return copies


def _copy_row(
    copies: Copies, cache: PagedTensors, row: int, table: torch.Tensor, seen: tuple[int, int, int], longest: int, nonfinite: bool
) -> None:  # fmt: skip
    """Copy one row's keys from the first one on that is seen. seen: keys, queries, and the left side of the window."""
    keys, queries, left = seen
    begin = int(copies.spans.k[row])
    page = first_unit(begin, row, SCALE_BLOCK)
    scales = []
    for x, scale in zip((cache.k, cache.v), cache.scales, strict=True):
        assert scale is not None
        scales.append(scale.as_strided((row + 1, *x.shape[:3]), scale_strides(scale))[row, 0, 0])
    finite = scales[0].isfinite() & scales[1].isfinite()
    copies.v_scale[row] = torch.where(finite, scales[1], 0.0).unsqueeze(-1)
    first = max(keys - queries - left, 0) // SCALE_BLOCK * SCALE_BLOCK if left >= 0 else 0
    for start in range(first, keys, SCALE_BLOCK):
        token = torch.arange(start, start + SCALE_BLOCK, device=table.device)
        inside = token < min(keys, longest)
        # behind the last page of the table there is none
        numbers = torch.nn.functional.pad(table.long(), (0, 1), value=-1)
        number = numbers[(token // cache.page).clamp(max=table.shape[0])]
        exists = inside & (number >= 0) & (number < cache.k.shape[0])
        k, v = (x.view(torch.uint8)[number.clamp(0, cache.k.shape[0] - 1), token % cache.page].transpose(0, 1) for x in (cache.k, cache.v))
        bad = ~exists | ((v & E4M3_NAN) == E4M3_NAN).any(-1) | ~finite.unsqueeze(-1) | nonfinite
        of_page = page + (start // SCALE_BLOCK)
        count = min(keys - start, SCALE_BLOCK)
        copies.k.view(torch.uint8)[0, :, begin + start : begin + start + count] = k.masked_fill(bad.unsqueeze(-1), E4M3_NAN)[:, :count]
        own = v.masked_fill(bad.unsqueeze(-1), 0)[:, slots(SCALE_BLOCK, v.device)].transpose(1, 2)
        copies.v.view(torch.uint8)[0, :, :, SCALE_BLOCK * of_page : SCALE_BLOCK * (of_page + 1)] = own
        copies.k_scale[0, :, of_page] = torch.where(finite, scales[0], 1.0)
