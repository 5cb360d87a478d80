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
  page alone, and the order in which pages are attended to changes float32 sums only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
from .recipe import E4M3, SCALE_BLOCK, Quantized, Recipe
from .reference import LARGEST_FACTOR, LOG2E, P_OFFSET, smoothing_shift

PAGE = SCALE_BLOCK
"""Tokens of a page."""

LEAST_CHANNEL = 2.0**-4
"""V's channel scales are at least this fraction of the head's largest one. A channel that happens to be small in the
first page may grow: its values would otherwise raise the scale of whole pages."""

RECENT = 192
"""Last tokens of a sequence that a cache keeps in half precision. Token t is at index t % RECENT. They include the
incomplete page and at least RECENT - PAGE tokens before the last one, so that a sequence can be cut back by as many."""

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


@dataclass(frozen=True, eq=False)
class Storage:
    """The tensors of a KV cache, all on one device. N sequences, P pages.

    Attributes:
        pages: of all sequences.
        k_mean: float32 (N, Hkv, D), rotated; v_mean, v_scale: float32 (N, Hkv, Dv). Statistics of each sequence's first
            page; means that aren't removed are zero.
        k, v: (N, Hkv, RECENT, D) and (N, Hkv, RECENT, Dv), the last tokens as they came.
        page_table: int32 (N, P): the numbers of each sequence's pages.
        lengths: int32 (N): the sequences' tokens.
        tickets: int32 (N, 1 + Hkv), zeros between launches: how many programs have finished.
    """

    pages: Pages
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    v_scale: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    tickets: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return [x for field in fields for x in ([field] if isinstance(field, torch.Tensor) else vars(field).values())]

    def statistics(self, sequence: int) -> Statistics:
        """What the pages of a sequence share."""
        part = slice(sequence, sequence + 1)
        return Statistics(self.k_mean[part], self.v_mean[part], self.v_scale[part])


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens of some sequences: what is appended to a cache, or attends to it. B sequences.

    Attributes:
        sequences: int32 (B), the sequences' numbers.
        counts: int32 (B), how many new tokens each has, at most S.
        k, v: (B, Hkv, S, D) and (B, Hkv, S, Dv), the new keys and values; or None in attention to those of the cache.
    """

    sequences: torch.Tensor
    counts: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None


def append(storage: Storage, step: Step, recipe: Recipe) -> None:
    """Append new tokens to a cache: the definition of what kernels write. The page table has the numbers of pages that
    become complete."""
    assert step.k is not None and step.v is not None
    for row, (sequence, count) in enumerate(zip(step.sequences.tolist(), step.counts.tolist(), strict=True)):
        old = int(storage.lengths[sequence])
        new = old + count
        first = old // PAGE * PAGE
        before = torch.arange(first, old, device=step.k.device) % RECENT
        k, v = (torch.cat([kept[sequence][:, before], x[row, :, :count].to(kept.dtype)], 1) for kept, x in ((storage.k, step.k), (storage.v, step.v)))
        for page in range(old // PAGE, new // PAGE):
            part = slice(page * PAGE - first, (page + 1) * PAGE - first)
            key, value = k[None, :, part], v[None, :, part]
            if page == 0:
                found = first_statistics(key, value, recipe)
                for kept, x in ((storage.k_mean, found.k_mean), (storage.v_mean, found.v_mean), (storage.v_scale, found.v_scale)):
                    kept[sequence] = 0.0 if x is None else x[0]
            made = quantize_pages(key, value, storage.statistics(sequence), recipe)
            number = int(storage.page_table[sequence, page])
            for name in Pages.__dataclass_fields__:
                getattr(storage.pages, name)[number] = getattr(made, name)[0]
        last = torch.arange(max(old, new - RECENT), new, device=step.k.device)
        storage.k[sequence][:, last % RECENT], storage.v[sequence][:, last % RECENT] = k[:, last - first], v[:, last - first]
        storage.lengths[sequence] = new


def attend_paged(
    q: torch.Tensor, storage: Storage, step: Step, recent: tuple[torch.Tensor, torch.Tensor], recipe: Recipe, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of attention to a cache: `attend` for each sequence.

    Args:
        q: (B, Hq, S, D), the queries of the last `step.counts` tokens of each sequence, which the cache has already.
        recent: `Storage.k` and `Storage.v`, as they were before step.k and step.v were appended if these are given.

    Returns:
        out float32 (B, Hq, S, Dv) and the natural-log LSE float32 (B, Hq, S); zeros and -inf past the counts.
    """
    out = q.new_zeros(*q.shape[:3], storage.v.shape[3], dtype=torch.float32)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    for row, (sequence, count) in enumerate(zip(step.sequences.tolist(), step.counts.tolist(), strict=True)):
        if count == 0:
            continue
        length = int(storage.lengths[sequence])
        first = length - count
        start = first // PAGE * PAGE
        kept = torch.arange(start, length if step.k is None else first, device=q.device) % RECENT
        parts = [x[sequence][:, kept] for x in recent]
        if step.k is not None and step.v is not None:
            parts = [torch.cat([x, y[row, :, :count]], 1) for x, y in zip(parts, (step.k, step.v), strict=True)]
        numbers_of_pages = storage.page_table[sequence, : (length - 1) // PAGE].long()
        pages = Pages(*(getattr(storage.pages, name)[numbers_of_pages] for name in Pages.__dataclass_fields__))
        seen = Sequence(pages, storage.statistics(sequence), parts[0], parts[1], start)
        out[row, :, :count], lse[row, :, :count] = attend(q[row, :, :count], first, seen, recipe, softmax_scale)
    return out, lse


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
        pages: the sequence's whole pages in order, or None if the queries see none.
        statistics: (1, Hkv, …), what these pages share, or None.
        k, v: (Hkv, n, D) and (Hkv, n, Dv), tokens in half precision: at least those from the start of the first query's
            page on, to the last token.
        start: position of the first of these.
    """

    pages: Pages | None
    statistics: Statistics | None
    k: torch.Tensor
    v: torch.Tensor
    start: int


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


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest score of each row (…, M, N) that isn't NaN: (…, M, 1)."""
    return torch.where(x.isnan(), -math.inf, x).amax(-1, keepdim=True)


def _exponentials(x: torch.Tensor, m: torch.Tensor, offset: float) -> torch.Tensor:
    return torch.exp2((x - m.masked_fill(m == -math.inf, 0.0)) + offset)


def _by_pages(q: Quantized, sequence: Sequence, count: int, softmax_scale: float) -> Sums:
    """Attention of quantized queries (1, Hq, M, D) to the first `count` pages."""
    pages = sequence.pages
    assert pages is not None
    _, heads, rows, _ = q.shape
    group = heads // pages.k.shape[1]
    q_rows, row_factor = numbers(q)[0], q.scale[0] * (softmax_scale * LOG2E)
    keys = numbers(Quantized(pages.k, pages.k_scale.unsqueeze(-1), "block", "rows", PAGE))
    order = slots(PAGE, pages.v.device)
    sums = Sums.empty(heads, rows, pages.v.shape[2], q_rows.device)
    smallest = 1 / LARGEST_FACTOR if softmax_scale > 0 else -LARGEST_FACTOR
    for page in range(count):
        k, scale = (x[page].repeat_interleave(group, 0) for x in (keys, pages.k_scale.abs()))
        x = product(q_rows, k.transpose(-2, -1)) * (row_factor * scale.unsqueeze(-1)).clamp(smallest, LARGEST_FACTOR).unsqueeze(-1)
        m = _largest(x)
        p = _exponentials(x, m, P_OFFSET)
        v = torch.empty(pages.v.shape[1], PAGE, pages.v.shape[2], device=x.device)
        v[:, order] = pages.v[page].transpose(-2, -1).float()
        acc = product(p.to(E4M3).float(), v.repeat_interleave(group, 0)) * pages.v_scale[page].repeat_interleave(group).view(-1, 1, 1)
        sums.add(m, p.sum(-1, keepdim=True) * 2.0**-P_OFFSET, acc * 2.0**-P_OFFSET)
    return sums


def _own_page(q: torch.Tensor, sequence: Sequence, first: int, last: int, softmax_scale: float) -> Sums:
    """Attention of queries (Hq, M, D), of which row i is at position first + i, to keys in half precision.

    These are the keys from `first`, the start of the page, to `last`, the last token that there is.
    """
    group = q.shape[0] // sequence.k.shape[0]
    part = slice(first - sequence.start, last + 1 - sequence.start)
    k, v = (x[:, part].float().repeat_interleave(group, 0) for x in (sequence.k, sequence.v))
    count = k.shape[1]
    # always the same shape, so that the order of summation doesn't depend on how many tokens there are
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, PAGE - count)) for x in (k, v))
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    k = torch.where(bad.unsqueeze(-1), torch.nan, k)
    q = torch.where(q.isfinite(), q.float(), torch.nan)
    x = product(q, k.transpose(-2, -1)) * (softmax_scale * LOG2E)
    tokens = torch.arange(PAGE, device=q.device)
    x = x.masked_fill((tokens > tokens[: q.shape[1]].unsqueeze(-1)) | (tokens >= count), -math.inf)
    m = _largest(x)
    p = _exponentials(x, m, 0.0)
    return Sums(m, p.sum(-1, keepdim=True), product(p, finite_or_zero(v)))


def attend(q: torch.Tensor, first: int, sequence: Sequence, recipe: Recipe, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: attention of consecutive queries of one sequence to what comes before them, and to themselves.

    A row's bits don't depend on the other queries: rows are computed page by page, each at its place in its page.

    Args:
        q: (Hq, n, D), any float dtype.
        first: position of the first query.

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
        if page > 0:
            sums = _by_pages(quantize_q(tile.unsqueeze(0), recipe), sequence, page, softmax_scale)
            _restore(sums, tile, sequence.statistics, recipe, softmax_scale)
        own = _own_page(tile, sequence, page * PAGE, high - 1, softmax_scale)
        sums.add(own.m, own.l, own.acc)
        out[:, rows] = (sums.acc / sums.l.masked_fill(sums.l == 0, 1.0))[:, inside]
        lse[:, rows] = ((sums.m + sums.l.log2()) / LOG2E).squeeze(-1)[:, inside]
    return out, lse


def _restore(sums: Sums, q: torch.Tensor, shared: Statistics | None, recipe: Recipe, softmax_scale: float) -> None:
    """Make sums over pages those of K and V as they were: with V's channel scales, and the means."""
    assert shared is not None
    group = q.shape[0] // shared.v_scale.shape[1]
    sums.acc = sums.acc * shared.v_scale[0].repeat_interleave(group, 0).unsqueeze(-2)
    if shared.v_mean is not None:
        sums.acc = sums.acc + sums.l * shared.v_mean[0].repeat_interleave(group, 0).unsqueeze(-2)
    if shared.k_mean is not None:
        rotated = rotation.rotate_queries(q.unsqueeze(0), rotation.part_of(q.shape[-1], recipe.rotate))
        sums.m = sums.m + smoothing_shift(rotated, shared.k_mean, softmax_scale)[0].unsqueeze(-1) * LOG2E


def modelled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, *, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of a whole causal call: q (B, Hq, Sq, D) are the last queries of k (B, Hkv, Sk, D) and v (B, Hkv, Sk,
    Dv), Sq <= Sk.

    Returns:
        out float32 (B, Hq, Sq, Dv) and the natural-log LSE float32 (B, Hq, Sq).
    """
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    found = []
    for query, key, value in zip(q, k, v, strict=True):
        pages, shared = quantize_sequence(key, value, recipe) or (None, None)
        found.append(attend(query, key.shape[1] - query.shape[1], Sequence(pages, shared, key, value, 0), recipe, scale))
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
