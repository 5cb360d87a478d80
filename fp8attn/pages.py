"""Page-local quantization in plain torch: the definition of a KV cache's bytes, and the oracle of attention to it.

A page is 128 consecutive tokens of one sequence, from a multiple of 128 on. Its bytes depend on its own tokens and on
the statistics of the sequence's first page. So later tokens change nothing, and a prefill in chunks of any sizes writes
the same bytes as a prefill at once.

A query attends to whole pages before its own page in FP8. It attends to the keys of its own page, up to its own
position, in half precision: statistics of that page would know later tokens. The first page is seen in FP8 by queries
of later pages only, for which all of it is past. That is why its statistics may serve all pages.

- K is rotated, loses the mean of the first page, and has one scale per page (and head).
- V loses the mean of the first page where that is large (`quantize.coarse`). Its scale is the product of two: one per
  channel, from the first page, and a power of two per page and head, which folds into the factor by which the kernel
  adds a page's P·V to the output. Error feedback runs inside runs of 64 tokens, so inside the page.
- P of a page is relative to the page's largest score, whatever came before. So P's codes depend on the query and the
  page alone, and the order in which pages are attended to changes float32 sums only. All codes are those of
  `reference.direct_code`, and rows are normalised by sums of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from . import rotation
from .ambient import product
from .layout import slots
from .quantization import (
    FEEDBACK,
    FLOAT_MAX,
    Statistics,
    centre,
    coarse,
    encode_values,
    extremes,
    finite_or_zero,
    lane_sum,
    numbers,
    quantize_k,
    quantize_q,
    removable,
    scale_of,
    values_layout,
)
from .recipe import SCALE_BLOCK, Packed, Quantized, Recipe
from .reference import CAUSAL_WINDOW, LARGEST_FACTOR, LOG2E, P_OFFSET, Scoring, Window, capped_base2, direct_code, smoothing_shift

PAGE = SCALE_BLOCK
"""Tokens of a page."""

LARGEST_LENGTH = 1 << 30
"""Tokens that kernels can count."""

LEAST_CHANNEL = 2.0**-4
"""V's channel scales are at least this fraction of the head's largest one. A channel that happens to be small in the
first page may grow: its values would otherwise raise the scale of whole pages."""

RECENT = 192
"""Last tokens of a sequence that a cache keeps in half precision. Token t is at index t % RECENT. They include the
incomplete page and at least RECENT - PAGE tokens before the last one, so that a sequence can be cut back by as many."""

RECENT_QUERIES = RECENT - PAGE + 1
"""After an append of this many tokens, the last RECENT ones include all that queries of these tokens see in half
precision."""

LARGEST_EXPONENT = 120
"""Bound of the exponents of V's page scales, so that their products with channel scales are normal numbers."""


@dataclass(frozen=True, eq=False)
class Pages:
    """Quantized pages. P pages, Hkv heads.

    Attributes:
        k: e4m3 or int8 (P, Hkv, 128, D), rotated. A non-finite key is NaN, in int8 INT8_NAN.
        k_scale: float32 (P, Hkv). With int8, negative if the page has a non-finite key.
        v: e4m3 (P, Hkv, Dv, 128), keys in the order of `layout.key_of_slot`.
        v_scale: float32 (P, Hkv), powers of two. Values are codes times this times `Statistics.v_scale`.
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in the order of the fields."""
        return [self.k, self.k_scale, self.v, self.v_scale]


@dataclass(frozen=True, eq=False)
class Storage:
    """The tensors of one layer's KV cache, all on one device. N sequences, P pages.

    Attributes:
        pages: of all sequences.
        k_mean: float32 (N, Hkv, D), rotated; v_mean, v_scale: float32 (N, Hkv, Dv). Statistics of each sequence's first
            page; means that aren't removed are zero.
        k, v: (N, Hkv, RECENT, D) and (N, Hkv, RECENT, Dv), the last tokens as they came.
        tickets: int32 (N, Hkv), zeros between launches: how many programs or CTAs have finished.
    """

    pages: Pages
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    v_scale: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def of(cls, tensors: Numbers[torch.Tensor]) -> Storage:
        """From what `tensors` returns."""
        count = len(fields(Pages))
        return cls(Pages(*tensors[:count]), *tensors[count:])

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in the order of the fields."""
        return [*self.pages.tensors(), self.k_mean, self.v_mean, self.v_scale, self.k, self.v, self.tickets]

    def statistics(self, sequence: int) -> Statistics:
        """What the pages of a sequence share."""
        part = slice(sequence, sequence + 1)
        return Statistics(self.k_mean[part], self.v_mean[part], self.v_scale[part])


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The sequences of one batch: which pages they have, how long they are, and how many of their tokens are new.

    It serves a `KVCache` and caches of other engines, `PagedTensors`, whose pages have a size of their own.

    The caller owns the tensors and may change them between calls, or between replays of a CUDA graph. Neither appending
    nor attention reads them on the host. One batch serves the caches of all layers. All tensors are on the device of
    these caches.

    What doesn't fit is never used as an index. A row whose page number, sequence or length is out of range gets NaN,
    and what it would append is dropped. `KVCache.check` raises instead.

    Attributes:
        page_table: int32 (B, M), unit last stride: the numbers of the pages of each row's sequence, in order. Numbers
            of a `KVCache`'s pages that aren't complete yet are not read.
        lengths: int32 (B), contiguous: the sequences' tokens, the new ones included.
        counts: int32 (B), contiguous: how many of a call's S tokens are real for each row, from the first on; they are
            the sequence's last ones. None: all S.
        sequences: int32 (B), contiguous: the number of each row's sequence in the caches, at most once each. None: row
            b has sequence b. It must be None for `PagedTensors`.
        max_length: no sequence is longer. It decides how many programs share a sequence. None: M pages.
        cu_seqlens: int32 (B + 1), contiguous: a call's tokens are packed, (T, H, D) instead of (B, H, S, D). Row b has
            the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, which are the sequence's last ones. It begins with 0 and
            never falls. Tokens from the last number on are no row's. `counts` must be None with it.
        max_count: no row has more packed tokens of a call; one that has gets NaN. The CUDA kernels for few queries need
            it to take packed ones. None: any number.
        batch_invariant: a row's output has the same bits whatever the other rows are, and however many. Its keys are
            split at places that follow from its own length. Of packed tokens only the CUDA kernels promise it.
    """

    page_table: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor | None = None
    sequences: torch.Tensor | None = None
    max_length: int | None = None
    cu_seqlens: torch.Tensor | None = None
    max_count: int | None = None
    batch_invariant: bool = False

    @property
    def options(self) -> tuple[int | None, int | None, bool]:
        """What isn't a tensor."""
        return self.max_length, self.max_count, self.batch_invariant

    def most_queries(self, q: torch.Tensor) -> int:
        """The largest number of queries of a row, of q (B, Hq, S, D) or packed (T, Hq, D)."""
        most = tokens_of(q)
        return most if self.max_count is None else min(most, self.max_count)

    @property
    def most_pages(self) -> int:
        """The largest number of complete pages of a sequence."""
        most = self.page_table.shape[1]
        return most if self.max_length is None else min(most, self.max_length // PAGE)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """All of them, in the order of the fields."""
        return self.page_table, self.lengths, self.counts, self.sequences, self.cu_seqlens

    def rows(self, length: int, sequences: int) -> list[Row]:
        """The rows on the host, for calls of `length` tokens, S or T, and caches of `sequences` sequences."""
        batch = self.lengths.shape[0]
        lengths = self.lengths.tolist()
        begins, counts = [0] * batch, [length] * batch if self.counts is None else self.counts.tolist()
        if self.cu_seqlens is not None:
            edges = self.cu_seqlens.clamp(0, length).tolist()
            begins, counts = edges[:-1], [max(end - begin, 0) for begin, end in itertools.pairwise(edges)]
        numbers = [*range(batch)] if self.sequences is None else self.sequences.tolist()
        found = []
        most = math.inf if self.max_count is None else self.max_count
        for row in range(batch):
            end = max(lengths[row], 0)
            sequence = numbers[row] if 0 <= numbers[row] < sequences and counts[row] <= most else None
            found.append(Row(sequence, end, max(min(counts[row], length, end), 0), self.page_table[row].tolist(), begins[row]))
        return found


@dataclass(frozen=True, eq=False)
class PagedCall:
    """Attention to a cache.

    Attributes:
        q: (B, Hq, S, D), the queries of the last tokens of each sequence, of which the pages have all whole ones.
        new: keys and values of these tokens, (B, Hkv, S, D) and (B, Hkv, S, Dv). `storage.k` and `storage.v` are then
            as they were before these were appended. None: `storage.k` and `storage.v` have these tokens.
        softmax_scale, window, softcap, sinks: as of `reference.Scoring`. The window is causal.

    If the batch has `cu_seqlens`, q is (T, Hq, D), and `new` are (T, Hkv, D) and (T, Hkv, Dv).
    """

    q: torch.Tensor
    storage: Storage
    new: tuple[torch.Tensor, torch.Tensor] | None
    batch: PagedBatch
    recipe: Recipe
    softmax_scale: float
    window: Window = CAUSAL_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def scoring(self) -> Scoring:
        """Which keys a query sees, and what is done to its scores."""
        return Scoring(self.softmax_scale, self.window, self.softcap, self.sinks)

    @property
    def packed(self) -> Packed | None:
        """Where the queries of each row of the batch lie, if they are packed."""
        starts = self.batch.cu_seqlens
        return None if starts is None else Packed(starts, None, self.q.shape[0])


@dataclass(frozen=True)
class Row:
    """One row of a `PagedBatch`.

    Attributes:
        sequence: its number, or None if it is out of range.
        length: its tokens, the new ones included.
        count: how many of them are new.
        page_numbers: of its pages.
        begin: its first new token among packed ones.
    """

    sequence: int | None
    length: int
    count: int
    page_numbers: list[int]
    begin: int = 0

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The row's new tokens of x, (B, H, S, D) or packed (T, H, D), as (H, count, D). `index`: of the row."""
        return x[index, :, : self.count] if x.dim() == 4 else x[self.begin : self.begin + self.count].transpose(0, 1)

    def part_of_lse(self, lse: torch.Tensor, index: int) -> torch.Tensor:
        """The row's part of an LSE, (B, H, S) or packed (H, T), as (H, count)."""
        return lse[index, :, : self.count] if lse.dim() == 3 else lse[:, self.begin : self.begin + self.count]

    def page(self, index: int, pages: int) -> int | None:
        """The number of a page among `pages`, or None if it is out of range."""
        number = self.page_numbers[index] if index < len(self.page_numbers) else -1
        return number if 0 <= number < pages else None


def tokens_of(x: torch.Tensor) -> int:
    """S of x (B, H, S, D), or T of packed x (T, H, D)."""
    return x.shape[2] if x.dim() == 4 else x.shape[0]


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """(B, Hq, S) of q (B, Hq, S, D), or (Hq, T) of packed q (T, Hq, D)."""
    return tuple(q.shape[:3]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def empty_answer(q: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and LSEs, float32, of queries that see nothing: (B, Hq, S, Dv) and (B, Hq, S), or packed (T, Hq, Dv) and
    (Hq, T)."""
    return q.new_zeros(*q.shape[:-1], value_dim, dtype=torch.float32), q.new_full(lse_shape(q), -math.inf, dtype=torch.float32)


EVERY_ROW = (1 << 31) - 1
"""`Stage.most` that leaves out no row."""


class Stage(NamedTuple):
    """What an append writes. Tokens are written after attention to `new` ones, which needs those that they replace.

    Attributes:
        most: rows with more new tokens are left out.
    """

    pages: bool = True
    tokens: bool = True
    most: int = EVERY_ROW


def append(storage: Storage, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch, recipe: Recipe, stage: Stage = Stage()) -> None:  # noqa: B008
    """Append new tokens to a cache: the definition of what kernels write.

    Args:
        k, v: (B, Hkv, S, D) and (B, Hkv, S, Dv), the new keys and values; or packed, (T, Hkv, D) and (T, Hkv, Dv).
        stage: what is written. Pages come before tokens.
    """
    number_of_pages = storage.pages.k.shape[0]
    for index, row in enumerate(batch.rows(tokens_of(k), storage.k.shape[0])):
        if row.sequence is None or row.count > stage.most:
            continue
        sequence, new, old = row.sequence, row.length, row.length - row.count
        first = old // PAGE * PAGE
        before = torch.arange(first, old, device=k.device) % RECENT
        both = ((storage.k, k), (storage.v, v))
        key, value = (torch.cat([kept[sequence][:, before], row.part(x, index).to(kept.dtype)], 1) for kept, x in both)
        for page in range(old // PAGE, new // PAGE) if stage.pages else ():
            tokens = slice(page * PAGE - first, (page + 1) * PAGE - first)
            part = key[None, :, tokens], value[None, :, tokens]
            if page == 0:
                found = first_statistics(*part, recipe)
                for kept, x in ((storage.k_mean, found.k_mean), (storage.v_mean, found.v_mean), (storage.v_scale, found.v_scale)):
                    kept[sequence] = 0.0 if x is None else x[0]
            number = row.page(page, number_of_pages)
            if number is not None:
                made = quantize_pages(*part, storage.statistics(sequence), recipe)
                for kept, x in zip(storage.pages.tensors(), made.tensors(), strict=True):
                    kept[number] = x[0]
        last = torch.arange(max(old, new - RECENT) if stage.tokens else new, new, device=k.device)
        storage.k[sequence][:, last % RECENT], storage.v[sequence][:, last % RECENT] = key[:, last - first], value[:, last - first]


def attend_paged(call: PagedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of attention to a cache: `attend` for each sequence.

    Returns:
        out float32 (B, Hq, S, Dv) and the natural-log LSE float32 (B, Hq, S); zeros and -inf past the counts. Of packed
        queries (T, Hq, Dv) and (Hq, T).
    """
    q, storage = call.q, call.storage
    out, lse = empty_answer(q, storage.v.shape[3])
    for index, row in enumerate(call.batch.rows(tokens_of(q), storage.k.shape[0])):
        if row.count > 0:
            row.part(out, index)[:], row.part_of_lse(lse, index)[:] = _attend_row(call, index, row)
    return out, lse


def _attend_row(call: PagedCall, index: int, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the new tokens of one row, out (Hq, n, Dv) and LSE (Hq, n); NaN of queries that see what isn't
    there."""
    storage, q, left = call.storage, row.part(call.q, index), call.window[0]
    number_of_pages, edge = storage.pages.k.shape[0], row.length - row.count
    position = torch.arange(edge, row.length, device=q.device)
    first = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    own = position // PAGE
    begin = int(first.min()) // PAGE
    numbers = [row.page(page, number_of_pages) for page in range(begin, min(int(own.max()), len(row.page_numbers)))]
    missing = (own > len(row.page_numbers)) & (first < own * PAGE)
    for page, number in enumerate(numbers, begin):
        if number is None:
            missing |= (first // PAGE <= page) & (page < own)
    if call.new is None:
        missing |= torch.maximum(first, own * PAGE) < row.length - RECENT
    out, lse = (x.fill_(math.nan) for x in empty_answer(q.unsqueeze(0), storage.v.shape[3]))
    if row.sequence is None or bool(missing.all()):
        return out[0], lse[0]
    # rows that see no page that is missing may come after ones that do, and read others' pages in place of it
    start = edge // PAGE * PAGE
    kept = torch.arange(start, row.length if call.new is None else edge, device=q.device) % RECENT
    parts = [x[row.sequence][:, kept] for x in (storage.k, storage.v)]
    if call.new is not None:
        parts = [torch.cat([x, row.part(y, index)], 1) for x, y in zip(parts, call.new, strict=True)]
    numbers += [None] * (int(own[~missing].max()) - begin - len(numbers))
    at = torch.tensor([number or 0 for number in numbers], dtype=torch.long, device=q.device)
    seen = Sequence(Pages(*(x[at] for x in storage.pages.tensors())), storage.statistics(row.sequence), parts[0], parts[1], start, begin)
    count = int((~missing).nonzero().max()) + 1
    found = attend(q[:, :count], edge, seen, call.recipe, call.scoring)
    for x, y in zip((out[0], lse[0]), found, strict=True):
        x[:, :count] = torch.where(missing[:count].view(1, -1, *[1] * (x.dim() - 2)), math.nan, y)
    return out[0], lse[0]


def unsupported_recipe(recipe: Recipe) -> str | None:
    """The reason why pages can't be quantized by a recipe, or None if they can."""
    wanted = {"q": "token", "k": "block", "v": "channel", "smooth_q": False, "compute": "e4m3", "sinks": 0, "recent": 0}
    for name, value in wanted.items():
        if getattr(recipe, name) != value:
            return f"recipe has {name}={getattr(recipe, name)!r}; for pages it must be {value!r}"
    return None


def first_statistics(k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> Statistics:
    """The statistics that all pages of a sequence share, from its first page: k (B, Hkv, 128, D), v (B, Hkv, 128, Dv).

    Only finite elements count.
    """
    k_mean = v_mean = None
    if recipe.smooth_k:
        mean = lane_sum(finite_or_zero(k)) * (1 / PAGE)
        k_mean = removable(rotation.rotate(mean, rotation.part_of(k.shape[3], recipe.rotate)))
    low, high = extremes(v)
    if recipe.smooth_v:
        v_mean = removable(coarse(lane_sum(finite_or_zero(v)) * (1 / PAGE), v))
        low, high = low - v_mean, high - v_mean
    largest = torch.maximum(high, -low).clamp(min=0.0)
    return Statistics(k_mean, v_mean, scale_of(torch.maximum(largest, largest.amax(-1, keepdim=True) * LEAST_CHANNEL)))


def page_scale(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two by which numbers up to `largest` must be divided to become at most 448; 1 for zero."""
    bits = largest.view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()  # 448 is 1.75 · 2^8
    exponent = exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return torch.where(largest > 0, ((exponent + 127) << 23).view(torch.float32), 1.0)


def quantize_pages(k: torch.Tensor, v: torch.Tensor, given: Statistics, recipe: Recipe) -> Pages:
    """Quantize whole pages.

    Args:
        k, v: (P, Hkv, 128, D) and (P, Hkv, 128, Dv), any float dtype.
        given: `first_statistics` of the sequence of each page.
    """
    key = quantize_k(k, ~v.isfinite().all(-1), given.k_mean, recipe)
    y = centre(v, given.v_mean).nan_to_num(nan=0.0)
    largest = (y.abs().amax(-2) * (1.0 / given.v_scale)).amax(-1).clamp(max=FLOAT_MAX)
    scale = page_scale(largest)
    codes = encode_values(y, given.v_scale * scale.unsqueeze(-1), FEEDBACK)
    return Pages(key.data, key.scale.squeeze(-1), values_layout(codes), scale)


def quantize_sequence(k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> tuple[Pages, Statistics] | None:
    """The whole pages of one sequence, k (Hkv, S, D) and v (Hkv, S, Dv), and what they share. None if S < 128."""
    count = k.shape[1] // PAGE
    if count == 0:
        return None
    k_pages, v_pages = (x[:, : count * PAGE].unflatten(1, (count, PAGE)).transpose(0, 1) for x in (k, v))
    shared = first_statistics(k_pages[:1], v_pages[:1], recipe)
    return quantize_pages(k_pages, v_pages, shared, recipe), shared


@dataclass(frozen=True, eq=False)
class Sequence:
    """What queries of one sequence attend to.

    Attributes:
        pages: the sequence's whole pages in order from `first_page` on, or None if the queries see none.
        statistics: (1, Hkv, …), what these pages share, or None.
        k, v: (Hkv, n, D) and (Hkv, n, Dv), tokens in half precision: at least those from the start of the first query's
            page on, to the last token.
        start: position of the first of these.
        first_page: the first page that a query sees, or an earlier one.
    """

    pages: Pages | None
    statistics: Statistics | None
    k: torch.Tensor
    v: torch.Tensor
    start: int
    first_page: int = 0


@dataclass(eq=False)
class Sums:
    """Running sums of online softmax over (Hq, M) rows: m in base 2 (Hq, M, 1), sums l of 2^(score - m), and of that
    times V."""

    m: torch.Tensor
    l: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def empty(cls, heads: int, rows: int, value_dim: int, device: torch.device) -> Sums:
        zeros = torch.zeros(heads, rows, 1 + value_dim, device=device)
        return cls(torch.full((heads, rows, 1), -math.inf, device=device), zeros[..., :1], zeros[..., 1:])

    def add(self, m: torch.Tensor, l: torch.Tensor, acc: torch.Tensor) -> None:
        """Add sums that are relative to m."""
        new = torch.maximum(self.m, m)
        reference = new.masked_fill(new == -math.inf, 0.0)
        alpha, beta = torch.exp2(self.m - reference), torch.exp2(m - reference)
        self.m, self.l, self.acc = new, self.l * alpha + l * beta, self.acc * alpha + acc * beta


def largest_score(x: torch.Tensor) -> torch.Tensor:
    """The largest score of each row (…, M, N) that isn't NaN: (…, M, 1)."""
    return torch.where(x.isnan(), -math.inf, x).amax(-1, keepdim=True)


def relative_scores(x: torch.Tensor, m: torch.Tensor, offset: float) -> torch.Tensor:
    """x - m + offset; -inf where nothing is visible."""
    return (x - m.masked_fill(m == -math.inf, 0.0)) + offset


def _by_pages(q: Quantized, shift: torch.Tensor | None, sequence: Sequence, own: int, how: Scoring) -> Sums:
    """Attention of a page's quantized queries (1, Hq, 128, D) to the pages before it, page `own`.

    Args:
        shift: float32 (Hq, 128, 1), what scores lack without K's mean. A soft cap sees it.
    """
    pages, (left, _) = sequence.pages, how.window
    assert pages is not None
    _, heads, rows, _ = q.shape
    group = heads // pages.k.shape[1]
    q_rows, row_factor = numbers(q)[0], q.scale[0] * (how.softmax_scale * LOG2E)
    keys = numbers(Quantized(pages.k, pages.k_scale.unsqueeze(-1), "block", "rows", PAGE))
    order = slots(PAGE, pages.v.device)
    sums = Sums.empty(heads, rows, pages.v.shape[2], q_rows.device)
    smallest = 1 / LARGEST_FACTOR if how.softmax_scale > 0 else -LARGEST_FACTOR
    tokens = torch.arange(PAGE, device=q_rows.device)
    position = (own * PAGE + tokens).unsqueeze(-1)
    for page in range(sequence.first_page, own):
        index = page - sequence.first_page
        k, scale = (x[index].repeat_interleave(group, 0) for x in (keys, pages.k_scale.abs()))
        x = product(q_rows, k.transpose(-2, -1)) * (row_factor * scale.unsqueeze(-1)).clamp(smallest, LARGEST_FACTOR).unsqueeze(-1)
        if how.softcap > 0:
            x = capped_base2(x if shift is None else x + shift * LOG2E, how.softcap)
        if left >= 0:
            x = x.masked_fill(page * PAGE + tokens < position - left, -math.inf)
        m = largest_score(x)
        p = direct_code(relative_scores(x, m, P_OFFSET))
        v = torch.empty(pages.v.shape[1], PAGE, pages.v.shape[2], device=x.device)
        v[:, order] = pages.v[index].transpose(-2, -1).float()
        acc = product(p, v.repeat_interleave(group, 0)) * pages.v_scale[index].repeat_interleave(group).view(-1, 1, 1)
        sums.add(m, p.sum(-1, keepdim=True) * 2.0**-P_OFFSET, acc * 2.0**-P_OFFSET)
    if shift is not None and how.softcap == 0:
        sums.m = sums.m + shift * LOG2E
    return sums


def _own_page(q: torch.Tensor, sequence: Sequence, first: int, last: int, how: Scoring) -> Sums:
    """Attention of queries (Hq, M, D), of which row i is at position first + i, to keys in half precision.

    These are the keys from `first`, the start of the page, to `last`, the last token that there is.
    """
    group, left = q.shape[0] // sequence.k.shape[0], how.window[0]
    part = slice(first - sequence.start, last + 1 - sequence.start)
    k, v = (x[:, part].float().repeat_interleave(group, 0) for x in (sequence.k, sequence.v))
    count = k.shape[1]
    # always the same shape, so that the order of summation doesn't depend on how many tokens there are
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, PAGE - count)) for x in (k, v))
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    k = torch.where(bad.unsqueeze(-1), torch.nan, k)
    q = torch.where(q.isfinite(), q.float(), torch.nan)
    x = capped_base2(product(q, k.transpose(-2, -1)) * (how.softmax_scale * LOG2E), how.softcap)
    tokens = torch.arange(PAGE, device=q.device)
    rows = tokens[: q.shape[1]].unsqueeze(-1)
    hidden = (tokens > rows) | (tokens >= count)
    if left >= 0:
        hidden = hidden | (tokens < rows - left)
    x = x.masked_fill(hidden, -math.inf)
    m = largest_score(x)
    p = torch.exp2(relative_scores(x, m, 0.0))
    return Sums(m, p.sum(-1, keepdim=True), product(p, finite_or_zero(v)))


def attend(q: torch.Tensor, first: int, sequence: Sequence, recipe: Recipe, how: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: attention of consecutive queries of one sequence to what comes before them, and to themselves.

    A row's bits don't depend on the other queries: rows are computed page by page, each at its place in its page.

    Args:
        q: (Hq, n, D), any float dtype.
        first: position of the first query.
        how: its window is causal.

    Returns:
        out float32 (Hq, n, Dv) and the natural-log LSE float32 (Hq, n).
    """
    heads, length, dim = q.shape
    value_dim = sequence.v.shape[2]
    out, lse = q.new_empty(heads, length, value_dim, dtype=torch.float32), q.new_empty(heads, length, dtype=torch.float32)
    end = first + length
    for page in range(first // PAGE, -(-end // PAGE)):
        low, high = max(first, page * PAGE), min(end, (page + 1) * PAGE)
        inside, rows = slice(low - page * PAGE, high - page * PAGE), slice(low - first, high - first)
        tile = torch.zeros(heads, PAGE, dim, dtype=q.dtype, device=q.device)
        tile[:, inside] = q[:, rows]
        sums = Sums.empty(heads, PAGE, value_dim, q.device)
        if page > sequence.first_page:
            shift = _shift(tile, sequence.statistics, recipe, how.softmax_scale)
            sums = _by_pages(quantize_q(tile.unsqueeze(0), recipe), shift, sequence, page, how)
            _restore(sums, sequence.statistics, heads)
        own = _own_page(tile, sequence, page * PAGE, high - 1, how)
        sums.add(own.m, own.l, own.acc)
        if how.sinks is not None:
            sums.add((how.sinks * LOG2E).view(-1, 1, 1), torch.ones_like(sums.l), torch.zeros_like(sums.acc))
        out[:, rows] = (sums.acc / sums.l.masked_fill(sums.l == 0, 1.0))[:, inside]
        lse[:, rows] = ((sums.m + sums.l.log2()) / LOG2E).squeeze(-1)[:, inside]
    return out, lse


def _shift(q: torch.Tensor, shared: Statistics | None, recipe: Recipe, softmax_scale: float) -> torch.Tensor | None:
    """What K's mean adds to the scores of queries (Hq, M, D): float32 (Hq, M, 1), or None if no mean is removed."""
    if shared is None or shared.k_mean is None:
        return None
    rotated = rotation.rotate_queries(q.unsqueeze(0), rotation.part_of(q.shape[-1], recipe.rotate))
    return smoothing_shift(rotated, shared.k_mean, softmax_scale)[0].unsqueeze(-1)


def _restore(sums: Sums, shared: Statistics | None, heads: int) -> None:
    """Make sums over pages those of V as it was: with V's channel scales, and the mean."""
    assert shared is not None
    group = heads // shared.v_scale.shape[1]
    sums.acc = sums.acc * shared.v_scale[0].repeat_interleave(group, 0).unsqueeze(-2)
    if shared.v_mean is not None:
        sums.acc = sums.acc + sums.l * shared.v_mean[0].repeat_interleave(group, 0).unsqueeze(-2)


def modelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, how: Scoring | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of a whole causal call: q (B, Hq, Sq, D) are the last queries of k (B, Hkv, Sk, D) and v (B, Hkv, Sk,
    Dv), Sq <= Sk.

    Returns:
        out float32 (B, Hq, Sq, Dv) and the natural-log LSE float32 (B, Hq, Sq).
    """
    how = Scoring(q.shape[3] ** -0.5) if how is None else how
    found = []
    for query, key, value in zip(q, k, v, strict=True):
        pages, shared = quantize_sequence(key, value, recipe) or (None, None)
        found.append(attend(query, key.shape[1] - query.shape[1], Sequence(pages, shared, key, value, 0), recipe, how))
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
