"""The CUDA kernel that attends to a KV cache with few queries, sm_90: its configs, and the calls that it supports."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch

from ..device import Device
from ..pages import PAGE, PagedBatch, Storage
from ..reference import CAUSAL_WINDOW, Scoring
from .configs import KEYS, round_up

WARP = 32

GROUP = 8
"""Queries of the narrowest product by wgmma."""

TILES_OF_TICKET = 3
"""Tiles of rows of a key/value head that have ten bits each of one ticket."""

FEW_ROWS = 2 * GROUP
"""Rows of a key/value head with which other kernels are slower; half of them where these split keys."""

PART_PAGES = 16
"""Pages of a part of a row's keys at least, if parts are fixed: a power of two. With 8, steps of 4k tokens take 9 %
more time."""

MOST_FIXED_PARTS = 32
"""Fixed parts of a tile at most: a power of two. Longer rows have longer parts."""

FEW_QUERIES = 3
"""Queries of a row of the batch with which other kernels are slower, however many heads share keys."""

DTYPES = (torch.bfloat16, torch.float16)

ALIGNMENT = 16
"""Bytes at multiples of which rows of queries start."""

TILE_BYTES = 64
"""sizeof(DecodeTiles)."""


@dataclass(frozen=True)
class DecodeShape:
    """What instances of both decode kernels have: this one, and that for caches of other engines.

    Attributes:
        head_dim: channels of Q, K and V.
        stages: blocks of keys in flight.
        rows: of a tile at most.
        ctas: as many on each SM.
    """

    head_dim: int
    stages: int
    rows: int
    ctas: int


@dataclass(frozen=True)
class DecodeConfig(DecodeShape):
    """One instance of the kernel. The fields of C++'s DecodeConfig, in order. Blocks have 256 head_dim bytes.

    Attributes:
        int8: Q and K are int8, and are multiplied as int8.
        any_scores: takes windows, soft caps and sinks. What most calls don't have would take registers from their loop
            over pages.
    """

    int8: bool = False
    any_scores: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warpgroup attends, a warp loads, and one prefetches."""
        return 128 + 2 * WARP

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the accumulators: powers of two from GROUP on, the narrowest of which that has a call's rows is
        taken."""
        return tuple(GROUP << i for i in range((self.rows // GROUP).bit_length()))

    @property
    def shared_bytes(self) -> int:
        """sizeof(DecodeStorage), in bytes."""
        tiles = self.stages * 2 * KEYS * self.head_dim + self.rows * self.head_dim + round_up(self.rows * (KEYS + 4 * 4), 1024)
        return round_up(tiles + 4 * (2 * self.head_dim + 3 * self.rows) + (8 + 4 * 8) * self.stages + 2 * TILE_BYTES, 1024)

    @property
    def name(self) -> str:
        return "decode_" + "_".join(str(int(x)) for x in astuple(self))


HEAD_DIMS = (64, 128, 256)
"""Of the instances of both decode kernels."""

TILE_ROWS = 32
"""Rows of a tile of all of them."""

E4M3_INSTANCES = tuple(DecodeConfig(dim, stages, TILE_ROWS, ctas) for dim, stages, ctas in zip(HEAD_DIMS, (6, 3, 3), (2, 2, 1), strict=True))
"""Their stages fill the shared memory of an SM. Two CTAs with D 256 would have one stage each."""

GROUPS = tuple(
    tuple(replace(config, int8=int8, any_scores=any_scores) for config in E4M3_INSTANCES) for any_scores in (False, True) for int8 in (False, True)
)
"""Instances that are compiled together."""

INSTANCES = tuple(config for group in GROUPS for config in group)


def group(config: DecodeConfig) -> tuple[DecodeConfig, ...]:
    """The instances that are compiled together with one."""
    return next(group for group in GROUPS if config in group)


def rows_of_head(q: torch.Tensor, kv_heads: int, batch: PagedBatch) -> int:
    """Rows of a key/value head: the queries of all heads that share it, of a row of the batch that has the most."""
    return q.shape[1] // kv_heads * batch.most_queries(q)


def tiles_of(q: torch.Tensor, kv_heads: int, batch: PagedBatch, rows: int = TILE_ROWS) -> int:
    """Tiles of all rows of the batch and heads. `rows`: of a tile."""
    return batch.page_table.shape[0] * kv_heads * -(-rows_of_head(q, kv_heads, batch) // rows)


def most_blocks(batch: PagedBatch) -> int:
    """The most blocks of a tile."""
    return batch.page_table.shape[1] + 8


def choose(storage: Storage, how: Scoring) -> DecodeConfig:
    """The instance for a cache that the kernel supports."""
    any_scores = how.window != CAUSAL_WINDOW or how.softcap > 0 or how.sinks is not None
    wanted = storage.k.shape[3], storage.pages.k.dtype == torch.int8, any_scores
    return next(config for config in INSTANCES if (config.head_dim, config.int8, config.any_scores) == wanted)


def ctas_of(config: DecodeShape, device: Device) -> int:
    """The CTAs that share the blocks of a call: as many as run at once."""
    return config.ctas * device.sm_count


def part_height(config: DecodeShape, q: torch.Tensor, kv_heads: int, batch: PagedBatch) -> int:
    """Rows of a tile that partial results have room for."""
    return min(rows_of_head(q, kv_heads, batch), config.rows)


def tickets_of_head(config: DecodeShape, q: torch.Tensor, kv_heads: int, batch: PagedBatch) -> int:
    """Tickets of a key/value head: TILES_OF_TICKET tiles have one."""
    return -(-rows_of_head(q, kv_heads, batch) // (TILES_OF_TICKET * config.rows))


def part_log(batch: PagedBatch, blocks_of_page: int = 1) -> int:
    """log2 of the blocks of a fixed part at least; or -1 if parts aren't fixed."""
    return (PART_PAGES * blocks_of_page).bit_length() - 1 if batch.batch_invariant else -1


def places_of_parts(ctas: int, tiles: int, blocks: int, log: int) -> int:
    """How many parts of tiles there may be.

    Args:
        tiles: `tiles_of`.
        blocks: of a tile at most.
        log: `part_log`.
    """
    return 2 * ctas if log < 0 else tiles * min(max(blocks >> log, 1), MOST_FIXED_PARTS)


def few_queries(q: torch.Tensor, kv_heads: int, batch_invariant: bool) -> int:
    """The most queries of a row that have FEW_ROWS; or 1.

    Args:
        batch_invariant: the number must be that up to which `is_faster` holds.
    """
    return max(FEW_ROWS // (q.shape[1] // kv_heads), FEW_QUERIES if batch_invariant else 1)


def is_faster(q: torch.Tensor, storage: Storage, batch: PagedBatch, splits: bool) -> bool:
    """Whether other kernels are slower, as measured: with few rows or queries. splits: they split keys."""
    few = FEW_ROWS // 2 if splits else FEW_ROWS
    return rows_of_head(q, storage.k.shape[1], batch) <= few or batch.most_queries(q) <= FEW_QUERIES


def unsupported_rows(name: str, x: torch.Tensor) -> str | None:
    """The reason why rows of a tensor (…, D) can't be read 16 bytes at a time, or None if they can."""
    strides = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT or any(stride % ALIGNMENT for stride in strides):
        return f"{name} has strides {x.stride()}; it takes rows that start at multiples of {ALIGNMENT} bytes"
    return None


def unsupported_queries(
    q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], kv_heads: int, batch: PagedBatch, softmax_scale: float, device: Device,
    most_rows: int,
) -> str | None:  # fmt: skip
    """The reason why neither decode kernel supports queries, or None.

    Args:
        kv: K and V of the cache, whose last sizes are the head dims.
        most_rows: of a key/value head.
    """
    if device.emulated or device.arch != 90:
        return f"it needs sm_90; this is {'an emulation' if device.emulated else f'sm_{device.arch}'}, {device.name}"
    if q.dtype not in DTYPES:
        return f"query is {q.dtype}; it takes {' or '.join(map(str, DTYPES))}"
    dims = {x.shape[3] for x in kv}
    if len(dims) > 1 or not dims <= {*HEAD_DIMS}:
        return f"head dims are {sorted(dims)}; it takes one of {[*HEAD_DIMS]} for keys and values"
    if not softmax_scale > 0:
        return f"softmax_scale is {softmax_scale}; it takes positive ones"
    if batch.cu_seqlens is not None and batch.max_count is None:
        return "batch.max_count is None; of packed queries it must be told the most of a row"
    if q.numel() == 0 or rows_of_head(q, kv_heads, batch) > most_rows:
        most = f"{batch.most_queries(q)} of a row of the batch"
        return f"query has shape {tuple(q.shape)}, {most}; it takes 1 to {most_rows} of the heads that share a key/value head"
    return unsupported_rows("query", q)


def unsupported_call(q: torch.Tensor, storage: Storage, batch: PagedBatch, softmax_scale: float, device: Device) -> str | None:
    """The reason why the kernel doesn't support a call without new tokens, or None if it does."""
    kv_heads, rows = storage.k.shape[1], batch.page_table.shape[0]
    # a cache has one ticket for each of its heads
    reason = unsupported_queries(q, (storage.k, storage.v), kv_heads, batch, softmax_scale, device, TILES_OF_TICKET * TILE_ROWS)
    if reason is not None:
        return reason
    if rows > storage.k.shape[0]:
        return f"the batch has {rows} rows; it takes as many as the cache has sequences, {storage.k.shape[0]}"
    sizes = (storage.pages.k.shape[0] * kv_heads * max(PAGE, q.shape[-1]), storage.k.shape[0] * kv_heads * storage.k.shape[2])
    blocks = tiles_of(q, kv_heads, batch) * most_blocks(batch)
    if max(*sizes, blocks, q.numel()) >= 1 << 31:
        return f"the cache has {sizes[0]} rows of keys, and the call {blocks} blocks; it takes fewer than 2^31"
    return None
