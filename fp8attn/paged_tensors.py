"""KV caches of other engines in plain torch: what they hold, the oracle of attention to them, and what is written.

Such a cache is read as it is: nothing is converted, and no statistics are kept beside it. So its keys aren't rotated,
and nothing is in half precision but caches that are so as a whole.

- Blocks of keys begin at multiples of 64 tokens of a sequence, whatever the size of a cache's pages.
- Queries of an e4m3 cache are quantized to e4m3 with a scale per query. A score is the product of codes times the
  query's scale and the key's.
- P of a block is relative to the block's largest score that the query sees, and is rounded to e4m3: at most 256.
  Scales of V per token multiply P before, and the products of a query and a block have a scale that brings the largest
  one to 256. Other scales of V multiply the output.
- Caches in half precision are multiplied as they are, and P of a block, relative to its largest score, is rounded to
  their dtype.

So a query's codes of P don't depend on later tokens, on other queries, or on how keys are split over programs. Rows
with many queries may be attended to as packed sequences, by other rules: see paged_copies.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from typing import TypeGuard

import torch

from .ambient import product
from .pages import LARGEST_LENGTH, PagedBatch, Row, Sums, empty_answer, largest_score, relative_scores, tokens_of
from .quantization import encode, finite_or_zero, numbers, quantize_q, scale_of
from .recipe import E4M3, Recipe
from .reference import LARGEST_FACTOR, LOG2E, P_OFFSET, Scoring, Window, capped_base2

QUERIES = Recipe(rotate=0)
"""How queries of e4m3 caches are quantized."""


KEY_BLOCK = 64
"""Keys whose P is relative to one score."""


@dataclass(frozen=True, eq=False)
class PagedTensors:
    """The KV cache of another engine, for one layer, which `paged_sdpa` reads as it is.

    Token t of a sequence is in slot t % page of its page t // page. Strides are free but for the last one. So a cache
    with heads first, (P, Hkv, page, D), is given as its transpose(1, 2), and K and V in one tensor as two views. A
    cache without pages, (N, S, Hkv, D), is one whose N pages have S slots.

    Nothing is checked here, but by each call.

    Attributes:
        k: (P, page, Hkv, D), unit last stride: e4m3, also as its bytes (uint8), or float16, bfloat16 or float32. The
            page has any number of slots.
        v: (P, page, Hkv, Dv), likewise, of k's dtype.
        k_scale, v_scale: float32 and positive, what restores values: x ≈ x_fp8 * x_scale. A number or a tensor () for
            all; (Hkv,) per head; (B, Hkv) per row of the batch and head; (P, page, Hkv), any strides, per token and
            head. None for caches in half precision only. A number becomes a tensor.
        recipe: of caches in half precision only. Attention of many queries quantizes keys, values and queries by it,
            where the CUDA kernels take the call: fp8attn.Recipe() or fp8attn.PRECISE. Other queries attend in half
            precision, as all do without: None.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if isinstance(scale, (int, float)) and not isinstance(scale, bool) and isinstance(self.k, torch.Tensor):
                object.__setattr__(self, name, torch.full((), float(scale), dtype=torch.float32, device=self.k.device))

    @classmethod
    def of(cls, tensors: Numbers[torch.Tensor], recipe: str | None = None) -> PagedTensors:
        """From what `tensors` and `recipe_text` return."""
        k, v, *scales = tensors
        k_scale, v_scale = scales or (None, None)
        return cls(k, v, k_scale, v_scale, None if recipe is None else Recipe.of_text(recipe))

    @property
    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """K's scale and V's; None of caches in half precision."""
        k, v = (x if isinstance(x, torch.Tensor) else None for x in (self.k_scale, self.v_scale))
        return k, v

    def tensors(self) -> list[torch.Tensor]:
        """k and v, and of an e4m3 cache the scales."""
        return [x for x in (self.k, self.v, *self.scales) if x is not None]

    @property
    def recipe_text(self) -> str | None:
        """The text of the recipe, if there is one."""
        return None if self.recipe is None else self.recipe.text

    @property
    def is_fp8(self) -> bool:
        """Whether it holds e4m3."""
        return self.k.dtype.itemsize == 1

    @property
    def page(self) -> int:
        """Slots of a page."""
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[2]


def capacity_of(cache: PagedTensors, batch: PagedBatch) -> int:
    """Tokens that a row of a page table has pages for, as kernels count them."""
    return min(batch.page_table.shape[1] * cache.page, LARGEST_LENGTH)


def counted_window(window: Window) -> Window:
    """A window as kernels count its tokens."""
    left, right = (min(x, LARGEST_LENGTH) for x in window)
    return left, right


def by_token(scale: object) -> TypeGuard[torch.Tensor]:
    """Whether a scale is one per token and head."""
    return isinstance(scale, torch.Tensor) and scale.dim() == 3


def scale_strides(scale: torch.Tensor) -> tuple[int, int, int, int]:
    """Strides of a scale over rows of the batch, pages, slots and heads."""
    if scale.dim() == 3:
        return 0, scale.stride(0), scale.stride(1), scale.stride(2)
    row = scale.stride(0) if scale.dim() == 2 else 0
    return row, 0, 0, scale.stride(-1) if scale.dim() > 0 and scale.shape[-1] > 1 else 0


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The tokens of a sequence that its pages hold.

    Attributes:
        k, v: float32 (Hq, n, D) and (Hq, n, Dv); codes of an e4m3 cache. Zeros where they aren't finite.
        k_scale, v_scale: float32 (Hq, n), of each token; v_scale is None if V has no scales per token.
        out_scale: float32 (Hq, 1, 1), V's scale of all tokens.
        bad: bool (Hq, n), tokens that make the rows NaN that see them.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    out_scale: torch.Tensor
    bad: torch.Tensor


def _tokens(cache: PagedTensors, index: int, row: Row, end: int, heads: int) -> _Tokens:
    """The first `end` tokens of row `index` of a batch, for `heads` query heads."""
    found = [row.page(page, cache.k.shape[0]) for page in range(-(-end // cache.page))]
    tokens = torch.arange(end, device=cache.k.device)
    at = torch.tensor([-1 if number is None else number for number in found], dtype=torch.long, device=cache.k.device)[tokens // cache.page]
    slot, group = tokens % cache.page, heads // cache.kv_heads
    bad, parts, scales = (at < 0).expand(heads, -1), [], []
    for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        y = (x.view(E4M3) if cache.is_fp8 else x)[at.clamp(min=0), slot].float().transpose(0, 1).repeat_interleave(group, 0)
        of_head = torch.ones(heads, end, device=x.device)
        if isinstance(scale, torch.Tensor):
            strides = scale_strides(scale)
            spread = scale.as_strided((index + 1, *x.shape[:3]), strides)
            of_head = spread[index][at.clamp(min=0), slot].transpose(0, 1).repeat_interleave(group, 0)
        bad = bad | ~y.isfinite().all(-1) | ~of_head.isfinite()
        parts.append(y)
        scales.append(of_head)
    k, v = (torch.where(bad.unsqueeze(-1), 0.0, x) for x in parts)
    k_scale, v_scale = (torch.where(bad, 0.0, x) for x in scales)
    if by_token(cache.v_scale):
        return _Tokens(k, v, k_scale, v_scale, torch.ones(heads, 1, 1, device=k.device), bad)
    return _Tokens(k, v, k_scale, None, v_scale.amax(-1).view(heads, 1, 1) if end else k.new_ones(heads, 1, 1), bad)


def attend(q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle of attention to a cache of another engine.

    Args:
        q: (B, Hq, S, D), the queries of the last tokens of each sequence; or packed, (T, Hq, D).

    Returns:
        out float32 (B, Hq, S, Dv) and the natural-log LSE float32 (B, Hq, S); zeros and -inf past the counts. Of packed
        queries (T, Hq, Dv) and (Hq, T).
    """
    out, lse = empty_answer(q, cache.v.shape[3])
    for index, row in enumerate(batch.rows(tokens_of(q), batch.lengths.shape[0])):
        if row.count > 0 and row.sequence is None:
            row.part(out, index)[:], row.part_of_lse(lse, index)[:] = torch.nan, torch.nan
        elif row.count > 0:
            capacity = len(row.page_numbers) * cache.page
            tokens = _tokens(cache, index, row, min(row.length, capacity), q.shape[1])
            row.part(out, index)[:], row.part_of_lse(lse, index)[:] = _attend_row(row.part(q, index), tokens, row, capacity, (cache.k.dtype, how))
    return out, lse


def _attend_row(q: torch.Tensor, tokens: _Tokens, row: Row, capacity: int, how: tuple[torch.dtype, Scoring]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last queries (Hq, n, D) of one sequence. how: the cache's dtype, and what is done to scores."""
    dtype, (left, right), softcap, sinks = how[0], how[1].window, how[1].softcap, how[1].sinks
    softmax_scale, is_fp8 = how[1].softmax_scale, dtype.itemsize == 1
    position = torch.arange(row.length - row.count, row.length, device=q.device).unsqueeze(-1)
    first = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    last = (position + right).clamp(max=row.length - 1) if right >= 0 else torch.full_like(position, row.length - 1)
    sums = Sums.empty(q.shape[0], row.count, tokens.v.shape[2], q.device)
    if sinks is not None:
        sums.m, sums.l = (sinks * LOG2E).view(-1, 1, 1).expand_as(sums.m), torch.ones_like(sums.l)
    nonfinite = ~q.isfinite().all(-1, keepdim=True)
    q, factor = q.float().masked_fill(nonfinite, 0.0), torch.full(q.shape[:2], softmax_scale * LOG2E, device=q.device)
    if is_fp8:
        quantized = quantize_q(q.unsqueeze(0), QUERIES)
        q, factor = numbers(quantized)[0], quantized.scale[0] * (softmax_scale * LOG2E)
    smallest = 1 / LARGEST_FACTOR if softmax_scale > 0 else -LARGEST_FACTOR
    for start in range(0, tokens.k.shape[1], KEY_BLOCK):
        part = slice(start, start + KEY_BLOCK)
        keys = torch.arange(start, start + tokens.k[:, part].shape[1], device=q.device)
        factors = factor.unsqueeze(-1)
        if is_fp8:
            factors = (factors * tokens.k_scale[:, None, part]).clamp(smallest, LARGEST_FACTOR)
        x = capped_base2(product(q, tokens.k[:, part].transpose(-2, -1)) * factors, softcap)
        x = x.masked_fill(tokens.bad[:, None, part] | nonfinite, torch.nan).masked_fill((keys < first) | (keys > last), -torch.inf)
        m, offset = largest_score(x), P_OFFSET if is_fp8 else 0.0
        p = torch.exp2(relative_scores(x, m, offset))
        l = p.sum(-1, keepdim=True) * 2.0**-offset
        acc = _weighted(p, tokens.v[:, part], None if tokens.v_scale is None else tokens.v_scale[:, None, part], dtype)
        sums.add(m, l, acc * 2.0**-offset)
    out = sums.acc * tokens.out_scale / sums.l.masked_fill(sums.l == 0, 1.0)
    lse = ((sums.m + sums.l.log2()) / LOG2E).squeeze(-1)
    missing = (last >= capacity).squeeze(-1)
    out[:, missing], lse[:, missing] = torch.nan, torch.nan
    return out, lse


def _weighted(p: torch.Tensor, v: torch.Tensor, v_scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """P of a block (Hq, n, N), rounded, times V (Hq, N, Dv) and its scales (Hq, 1, N) of tokens."""
    if v_scale is None:
        return product(p.to(E4M3 if dtype.itemsize == 1 else dtype).float(), v)
    p = p * v_scale
    scale = scale_of(largest_score(p.abs()).clamp(min=0.0), 2.0**P_OFFSET)
    return product((p * (1.0 / scale)).to(E4M3).float(), v) * scale


def append(cache: PagedTensors, k: torch.Tensor, v: torch.Tensor, batch: PagedBatch) -> None:
    """Write a batch's new tokens to the slots that its pages have for them: the definition of what the kernel writes.

    Args:
        k, v: (B, Hkv, S, D) and (B, Hkv, S, Dv); or packed, (T, Hkv, D) and (T, Hkv, Dv).
    """
    every = cache.k.shape[0]
    for index, row in enumerate(batch.rows(tokens_of(k), batch.lengths.shape[0])):
        positions = range(row.length - row.count, row.length)
        numbers = [row.page(position // cache.page, every) for position in positions]
        slots = [-1 if number is None else number * cache.page + position % cache.page for number, position in zip(numbers, positions, strict=True)]
        k_scale, v_scale = (x if x is None or x.dim() != 2 else x[index] for x in cache.scales)
        own = PagedTensors(cache.k, cache.v, k_scale, v_scale)
        write(own, row.part(k, index).transpose(0, 1), row.part(v, index).transpose(0, 1), torch.tensor(slots, dtype=torch.long, device=k.device))


def write(cache: PagedTensors, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new tokens to a cache: the definition of what the kernel writes.

    Args:
        k, v: (T, Hkv, D) and (T, Hkv, Dv).
        slots: (T,), page number * page + slot in the page; a token whose slot is out of range is dropped.
    """
    there = (slots >= 0) & (slots < cache.k.shape[0] * cache.page)
    number, slot = (slots[there] // cache.page).long(), (slots[there] % cache.page).long()
    for x, into, scale in ((k[there], cache.k, cache.k_scale), (v[there], cache.v, cache.v_scale)):
        if not isinstance(scale, torch.Tensor):
            into[number, slot] = x
            continue
        if by_token(scale):
            scale[number, slot] = own = scale_of(finite_or_zero(x).abs().amax(-1))
        else:
            own = scale.expand(x.shape[:2])
        y = torch.where(x.isfinite(), x.float(), torch.nan)
        into.view(torch.uint8)[number, slot] = encode(y, own.unsqueeze(-1)).view(torch.uint8)
