"""The CUDA kernel that attends to a KV cache of another engine, sm_90: its configs, and the calls that it supports."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch

from ..device import Device
from ..paged_tensors import KEY_BLOCK, PagedTensors, by_token, capacity_of, counted_window, scale_strides
from ..pages import PAGE, PagedBatch
from ..reference import Scoring
from . import decode
from .configs import round_up
from .decode import E4M3_INSTANCES, GROUP, TILES_OF_TICKET, WARP, DecodeShape, unsupported_queries, unsupported_rows

LEAST_COPY = 8
"""Tokens of the smallest page: fewer rows have another swizzle."""

TILE_BYTES = 60
"""sizeof(DecodeTiles) of this kernel."""

MANY_ROWS = 16 * GROUP
"""Rows of a tile whose queries are the rows of products of two warpgroups."""

BESIDE_BLOCKS = 4
"""What a CTA does for such a tile beside its blocks takes about as long as so many of them."""

FEW_ROWS = {False: GROUP, True: 2 * GROUP}
"""Rows of a key/value head with which tiles of so many rows are slower; whether scales are per token, or tokens are in
half precision."""

MOST_ROWS = 1 << 24
"""Rows of a key/value head: times 256 query heads that share it, the kernel finds their queries without a division."""


@dataclass(frozen=True)
class DecodeTensorsConfig(DecodeShape):
    """One instance of the kernel. The fields of C++'s DecodeTensorsConfig, in order. Blocks have 64 tokens.

    Attributes:
        fp8: the cache is e4m3, else in the queries' dtype.
        by_token: scales are per token and head.
    """

    fp8: bool
    by_token: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup attends and a warp loads; or two warpgroups attend, one checks blocks, and one
        loads."""
        return 128 * 4 if self.has_many else 128 + WARP

    @property
    def row_bytes(self) -> int:
        """Bytes of a token, and of a query as it is multiplied."""
        return self.head_dim if self.fp8 else 2 * self.head_dim

    @property
    def shared_bytes(self) -> int:
        """sizeof(DecodeTensorsStorage), in bytes."""
        tokens = self.stages * 2 * KEY_BLOCK * self.row_bytes
        scales = 4 * 2 * KEY_BLOCK * (self.stages if self.by_token else 1)
        if self.has_many:
            rooms, slots = 1 if self.head_dim > 128 and not self.fp8 else 2, (2 if self.head_dim > 128 else 4) if self.fp8 else self.stages
            converted, handed = slots * 2 * KEY_BLOCK * self.head_dim if self.fp8 else 16, 9 * 128 * 16
            panels = tokens + rooms * self.rows * self.row_bytes + converted + 128 + handed
            nonfinite = (4 + KEY_BLOCK) * slots
            rest = 12 * rooms * self.rows + scales + nonfinite + 4 * self.stages + rooms * TILE_BYTES + 6 * 4
            return round_up(panels + round_up(rest + 1, 8) + 8 * 2 * (self.stages + slots + rooms), 1024)
        panels = round_up(tokens + self.rows * self.row_bytes, 1024)
        exchange = round_up(self.rows * (2 * KEY_BLOCK + 4 * 4), 1024)
        more = 4 * (4 * (self.rows if self.by_token else 1) + 1)
        rest = round_up(more + 4 * self.rows, 8) + 8 * self.rows + scales + 4 * self.stages + 2 * TILE_BYTES + 6 * 4
        return round_up(panels + exchange + round_up(rest + 1, 8) + 8 * 2 * self.stages, 1024)

    @property
    def has_many(self) -> bool:
        """Whether its products are of warpgroups."""
        return self.rows == MANY_ROWS

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a warpgroup's e4m3 accumulators: for finding tokens that are not finite, and for scores."""
        return (GROUP, KEY_BLOCK) if self.has_many and self.fp8 else ()

    @property
    def half_widths(self) -> tuple[int, ...]:
        """Widths of those in half precision: for scores of such a cache, and for P·V."""
        of_output = min(self.head_dim, 128)
        return () if not self.has_many else (of_output,) if self.fp8 else (KEY_BLOCK, of_output)

    @property
    def name(self) -> str:
        return "decode_tensors_" + "_".join(str(int(x)) for x in astuple(self))


FP8_INSTANCES = tuple(DecodeTensorsConfig(c.head_dim, 2 * c.stages, c.rows, c.ctas, True) for c in E4M3_INSTANCES)
"""Their stages fill the shared memory of an SM: of half as many tokens as those of the kernel for a KVCache, which are
as many bytes."""

BY_TOKEN_INSTANCES = tuple(replace(config, by_token=True) for config in FP8_INSTANCES)

HALF_INSTANCES = tuple(replace(config, stages=config.stages // 2, fp8=False) for config in FP8_INSTANCES)

MANY = tuple(
    tuple(replace(config, stages=stages, rows=MANY_ROWS, ctas=1) for config, stages in zip(few, most, strict=True))
    for few, most in ((FP8_INSTANCES, (12, 6, 2)), (BY_TOKEN_INSTANCES, (12, 6, 2)), (HALF_INSTANCES, (8, 4, 2)))
)
"""Instances for more rows than those have."""

GROUPS = (FP8_INSTANCES, BY_TOKEN_INSTANCES, HALF_INSTANCES, *MANY)
"""Instances that are compiled together."""

INSTANCES = tuple(config for group in GROUPS for config in group)


def group(config: DecodeTensorsConfig) -> tuple[DecodeTensorsConfig, ...]:
    """The instances that are compiled together with one."""
    return next(some for some in GROUPS if config in some)


def choose(q: torch.Tensor, cache: PagedTensors, batch: PagedBatch) -> DecodeTensorsConfig:
    """The instance for a call that the kernel supports."""
    few = FEW_ROWS[by_token(cache.k_scale) or not cache.is_fp8]
    return _instances_of(cache, batch)[-1 if decode.rows_of_head(q, cache.kv_heads, batch) > few else 0]


def _instances_of(cache: PagedTensors, batch: PagedBatch) -> list[DecodeTensorsConfig]:
    """The instances for a cache, for few rows first. Those for many give other bits: a batch whose rows don't depend on
    each other takes none, as its most queries choose."""
    wanted = cache.k.shape[3], cache.is_fp8, by_token(cache.k_scale)
    found = [config for config in INSTANCES if (config.head_dim, config.fp8, config.by_token) == wanted]
    return found[:1] if batch.batch_invariant else found


def copied_tokens(cache: PagedTensors, batch: PagedBatch) -> int:
    """Tokens of a copy, a power of two: a page of up to KEY_BLOCK, or a block of a larger one; 0 if blocks would have
    parts of pages. The only page of a row may have any size."""
    if batch.page_table.shape[1] <= 1 or cache.page % KEY_BLOCK == 0:
        return KEY_BLOCK
    return cache.page if KEY_BLOCK % cache.page == 0 and cache.page >= LEAST_COPY else 0


def numbers_of(cache: PagedTensors, batch: PagedBatch, how: Scoring, tickets_of_head: int) -> list[int]:
    """The numbers of DecodeParams that are this kernel's: page, copied_tokens, capacity, left, right, part_log,
    tickets_of_head, and the strides of K's and V's scales."""
    strides = [stride for x in cache.scales for stride in ((0, 0, 0, 0) if x is None else scale_strides(x))]
    tokens = cache.page, copied_tokens(cache, batch), capacity_of(cache, batch)
    return [*tokens, *counted_window(how.window), part_log(batch), tickets_of_head, *strides]


def part_log(batch: PagedBatch) -> int:
    """As of decode.py, in blocks of this kernel."""
    return decode.part_log(batch, PAGE // KEY_BLOCK)


def most_blocks(cache: PagedTensors, batch: PagedBatch) -> int:
    """The most blocks of a tile."""
    return capacity_of(cache, batch) // KEY_BLOCK + 2


def unsupported_call(q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, device: Device) -> str | None:
    """The reason why the kernel doesn't support a call, or None if it does."""
    most_rows = TILES_OF_TICKET * decode.TILE_ROWS if batch.batch_invariant else MOST_ROWS
    reason = unsupported_queries(q, (cache.k, cache.v), cache.kv_heads, batch, how.softmax_scale, device, most_rows)
    if reason is not None:
        return reason
    if not cache.is_fp8 and cache.k.dtype != q.dtype:
        return f"k is {cache.k.dtype}; it takes float8_e4m3fn or query's dtype, {q.dtype}"
    if by_token(cache.k_scale) != by_token(cache.v_scale):
        return "one of k_scale and v_scale is per token; it takes both or neither"
    if not copied_tokens(cache, batch):
        return f"pages have {cache.page} tokens; it takes powers of two from {LEAST_COPY} on, multiples of {KEY_BLOCK}, or one page a row"
    for name, x in (("k", cache.k), ("v", cache.v)):
        reason = unsupported_rows(name, x)
        if reason is not None:
            return reason
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            return f"{name} has strides {x.stride()}; it takes slots that are apart"
    blocks = decode.tiles_of(q, cache.kv_heads, batch) * (most_blocks(cache, batch) + BESIDE_BLOCKS)
    if max(blocks, q.numel(), cache.k.shape[0]) >= 1 << 31:
        return f"the call has {blocks} blocks of keys; it takes fewer than 2^31"
    return None
