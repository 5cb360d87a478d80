"""The CUDA kernel that attends to a KV cache with many queries, sm_90: its configs, and the calls that it supports."""

from __future__ import annotations

import functools
import itertools
from dataclasses import astuple, dataclass, replace

import torch

from ..call import unsupported_tma
from ..device import Device
from ..layout import tiles_of as packed_tiles
from ..pages import PAGE, PagedCall
from ..recipe import Packed, ProductType
from ..reference import Window
from ..rotation import part_of
from ..schedule import mixed_heads, unsupported_size
from .configs import KEYS, ONES, OUTPUT_BYTES, ROWS, round_up, unsupported_arch
from .decode import DTYPES, unsupported_rows

ROTATED = 64
"""Channels that the kernel rotates together."""

MOST_SPLITS = 16
"""CTAs that split the keys of a tile at most."""

SPLIT_PAGES = 8
"""Least number of pages for which another split is worth its partial sums."""

TILE_PAGES = 8
"""What a tile takes beside its pages, in pages."""

COMBINE_PAGES = 768
"""What it takes to combine splits, in pages times query rows of the fastest instance (H200, D 128)."""

UNLIMITED = 1 << 30
"""Keys before its own one that a query sees without a window."""

HALF_BLOCK = KEYS // 2
"""Tokens of a block in half precision, which has a page's bytes."""

UNITS = (16, 32, ROWS)
"""Rows of a unit of a tile, which are queries of one head: as many as a warp has at least, and a warpgroup at most."""


@dataclass(frozen=True)
class PrefillConfig:
    """One instance of the kernel. The fields of C++'s PrefillConfig, in order.

    Attributes:
        head_dim: channels of Q, K and V.
        consumers: warpgroups of 64 query rows.
        stages: pages in shared memory, each of 256 head_dim bytes.
        registers: registers of a consumer's thread.
        int8: Q and K are int8, and are multiplied as int8.
        packed: takes packed queries, and only these.
        capped: scores have a soft cap.
    """

    head_dim: int
    consumers: int
    stages: int
    registers: int
    int8: bool = False
    packed: bool = False
    capped: bool = False

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile, of one head or of several that share keys."""
        return self.consumers * ROWS

    @property
    def threads(self) -> int:
        """Threads of a CTA: those of the consumers and of the producer's warpgroup."""
        return 128 * (self.consumers + 1)

    @property
    def value_part(self) -> int:
        """Channels of one product of P with V."""
        return 128 if self.head_dim == 128 else 64

    @property
    def shared_bytes(self) -> int:
        """sizeof(PrefillStorage), in bytes."""
        tiles = self.consumers * ROWS * self.head_dim + self.stages * KEYS * (2 * self.head_dim + ONES)
        output = self.consumers * ROWS * self.staged_bytes
        tile = 56 + 8 * self.consumers + (8 if self.packed else 0)  # sizeof(PackedPagedTile) or sizeof(PagedTile)
        facts = 4 * self.consumers * (2 * self.head_dim + (self.head_dim if self.halves_first else 1) + 3 * ROWS) + 4 * tile + 16 * self.stages
        return round_up(tiles + output + round_up(facts, 8) + 8 * (3 * self.consumers + 2 + 5 * self.stages), 1024)

    @property
    def halves_first(self) -> bool:
        """Whether blocks in half precision come before pages: where the output is staged, there is room for queries as
        they came."""
        return 2 * self.head_dim <= self.staged_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of a row of the output in shared memory."""
        return OUTPUT_BYTES * (2 if self.head_dim > 64 else 1)

    @property
    def name(self) -> str:
        return "prefill_" + "_".join(str(int(x)) for x in astuple(self))


SPEEDS = {
    PrefillConfig(64, 3, 8, 160): 1.0,
    PrefillConfig(64, 2, 8, 232): 0.82,
    PrefillConfig(64, 1, 8, 255): 0.48,
    PrefillConfig(128, 3, 4, 160): 1.0,
    PrefillConfig(128, 2, 5, 232): 0.85,
    PrefillConfig(128, 1, 5, 255): 0.5,
    PrefillConfig(256, 2, 2, 240): 1.0,
    PrefillConfig(256, 1, 2, 255): 0.65,
}
"""Sizes of instances, and the speed of each relative to the fastest one of its head dim: rows in a tile's time (H200).
Fewer consumers are for calls of few tiles."""

GROUPS = tuple(
    tuple(replace(config, int8=int8, packed=packed, capped=capped) for config in SPEEDS if config.head_dim == dim)
    for dim, capped, packed, int8 in itertools.product(sorted({config.head_dim for config in SPEEDS}), *3 * ((False, True),))
)
"""Instances that are compiled together."""

INSTANCES = tuple(config for group in GROUPS for config in group)


def group(config: PrefillConfig) -> tuple[PrefillConfig, ...]:
    """The instances that are compiled together with one."""
    return next(group for group in GROUPS if config in group)


@functools.cache
def able(dim: int, qk: ProductType, packed: bool, capped: bool = False) -> dict[PrefillConfig, float]:
    """The instances for a head dim that the kernel supports, and their speeds."""
    variant = dict(int8=qk == "int8", packed=packed, capped=capped)
    return {replace(config, **variant): speed for config, speed in SPEEDS.items() if config.head_dim == dim}


def smallest(call: PagedCall) -> PrefillConfig:
    """The smallest instance for a call."""
    instances = able(call.q.shape[-1], call.recipe.qk, call.batch.cu_seqlens is not None, call.softcap > 0)
    return min(instances, key=lambda config: config.consumers)


def unit_of(most: int) -> int:
    """Rows of a unit where a row of the batch has at most so many queries: those of a short unit have all of them."""
    return next((rows for rows in UNITS if rows >= most), ROWS)


@dataclass(frozen=True)
class Work:
    """What of a call decides how many tiles there are, and how many CTAs split the keys of one.

    Attributes:
        rows: of the batch.
        queries: of a row; of packed queries, those of the row that has the most.
        tokens: packed queries of all rows; or None.
        heads: of the queries.
        kv_heads: of the keys.
        pages: that a tile sees at most.
    """

    rows: int
    queries: int
    tokens: int | None
    heads: int
    kv_heads: int
    pages: int

    @classmethod
    def of(cls, call: PagedCall) -> Work:
        q, batch, left = call.q, call.batch, call.window[0]
        tokens = None if batch.cu_seqlens is None else q.shape[0]
        pages = batch.most_pages if left < 0 else min(batch.most_pages, left // PAGE + 2)
        return cls(batch.lengths.shape[0], batch.most_queries(q), tokens, q.shape[1], call.storage.k.shape[1], pages)

    @property
    def sharing(self) -> int:
        """Query heads that share keys."""
        return self.heads // self.kv_heads

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return unit_of(self.queries)

    def tiles(self, rows: int) -> int:
        """Tiles of so many query rows each; of packed queries an estimate."""
        units = rows // self.unit
        full = self.rows * -(-(-(-self.queries // self.unit) * self.sharing) // units)  # if all rows have the most
        if self.tokens is not None:
            full = min(full, -(-self.tokens // self.unit) * self.sharing // units + self.rows)
        return full * self.kv_heads

    def splits(self, rows: int, device: Device) -> int:
        """CTAs that split the keys of a tile of so many query rows: where SMs would be idle, and keys are many."""
        return max(min(device.sm_count // max(self.tiles(rows), 1), self.pages // SPLIT_PAGES, MOST_SPLITS), 1)


def choose(work: Work, dim: int, qk: ProductType, device: Device, capped: bool = False) -> PrefillConfig:
    """The instance for queries that the kernel supports: the one that is done first, estimated by rows, pages and
    speed. Tiles behind a long prefix take the same time."""

    def time(measured: tuple[PrefillConfig, float]) -> float:
        config, speed = measured
        rows = config.tile_rows
        splits = work.splits(rows, device)
        rounds = -(-work.tiles(rows) * splits // device.sm_count)
        return rounds * rows / speed * (work.pages / splits + TILE_PAGES) + (COMBINE_PAGES if splits > 1 else 0)

    return min(able(dim, qk, work.tokens is not None, capped).items(), key=time)[0]


@dataclass(frozen=True)
class Tiling:
    """How a call's rows and keys become the work of CTAs.

    Attributes:
        config: the instance.
        work: of the call.
        splits: CTAs that split the keys of each tile.
    """

    config: PrefillConfig
    work: Work
    splits: int

    @classmethod
    def of(cls, call: PagedCall, device: Device, may_split: bool = True) -> Tiling:
        """Of a call that the kernel supports."""
        work = Work.of(call)
        work = work if may_split else replace(work, pages=0)
        config = choose(work, call.q.shape[-1], call.recipe.qk, device, call.softcap > 0)
        return cls(config, work, work.splits(config.tile_rows, device))

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows of a unit, query heads that share keys, and units of a tile."""
        return self.work.unit, self.work.sharing, self.config.tile_rows // self.work.unit

    def tiles(self, packed: Packed | None) -> int:
        """Tiles of all key/value heads; of packed queries, places of tiles."""
        return self.work.tiles(self.config.tile_rows) if packed is None else self.work.kv_heads * packed_tiles(packed, *self.tile)


def left_of(window: Window) -> int:
    """Keys before its own one that a query sees."""
    return min(window[0], UNLIMITED) if window[0] >= 0 else UNLIMITED


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Queries or new tokens as the kernel takes them: packed ones (T, H, D) as (1, H, T, D)."""
    return x if x.dim() == 4 else x.transpose(0, 1)[None]


def heads_in_l2(call: PagedCall, ctas: int) -> int:
    """Query heads whose tiles the schedule mixes: schedule.heads_in_l2."""
    batch, kv_heads, _, dim = (call.batch.lengths.shape[0], *call.storage.k.shape[1:])
    keys = max(call.batch.most_pages * PAGE, 1)
    heads, per_row = call.q.shape[1] // kv_heads, keys * 2 * dim
    # of packed queries, the tiles of a head come from all rows
    return mixed_heads(kv_heads, heads, batch * per_row, ctas) if call.q.dim() == 3 else mixed_heads(batch * kv_heads, heads, per_row, ctas)


def unsupported_call(call: PagedCall, device: Device) -> str | None:
    """The reason why the kernel doesn't support a call, or None if it does."""
    reason = unsupported_arch(device)
    if reason is not None:
        return reason
    q, storage = rows_of(call.q), call.storage
    dims = {storage.k.shape[3], storage.v.shape[3]}
    if q.dtype not in DTYPES or storage.k.dtype != q.dtype:
        return f"query is {q.dtype} and the cache's tokens are {storage.k.dtype}; it takes {' or '.join(map(str, DTYPES))} for both"
    if len(dims) > 1 or not dims <= {config.head_dim for config in INSTANCES}:
        return f"head dims are {sorted(dims)}; it takes one of {sorted({config.head_dim for config in SPEEDS})} for keys and values"
    if part_of(q.shape[3], call.recipe.rotate) != ROTATED:
        return f"the recipe has rotate={call.recipe.rotate}; with many queries it takes {ROTATED}"
    if not call.softmax_scale > 0:
        return f"softmax_scale is {call.softmax_scale}; it takes positive ones"
    if q.numel() == 0:
        return f"query has shape {tuple(call.q.shape)}; it takes at least one query"
    for name, x in (("query", q), *zip(("key", "value"), map(rows_of, call.new or ()), strict=False)):
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype}; it takes query's dtype, {q.dtype}"
        reason = unsupported_size(name, x) or unsupported_rows(name, x) or unsupported_tma(x, name)
        if reason is not None:
            return reason
    rows = storage.pages.k.shape[0] * storage.k.shape[1] * max(PAGE, q.shape[3])
    return f"the cache has {rows} rows of keys or values; it takes fewer than 2^31" if rows >= 1 << 31 else None
