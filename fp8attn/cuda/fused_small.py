"""The fused kernel for few keys on Hopper: quantization with the default recipe and attention in one launch.

Its configs, and the calls that it supports.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ..call import HALVES, unsupported_tma
from ..device import Device
from .configs import KEYS, ONES, ROWS, round_up, unsupported_arch, unsupported_shared_memory

LONGEST = 512
"""Largest number of keys. All keys of a head must fit into a CTA's shared memory."""

SLICE = 16
"""Channels of K or V that one warpgroup processes: K's mean, V's codes."""

LANES = 32
"""Running sums of a mean."""

BLOCKS = LONGEST // KEYS


@dataclass(frozen=True)
class FusedSmallConfig:
    """One instance. The fields of C++'s FusedSmallConfig, in order.

    Attributes:
        head_dim: channels of Q, K and V.
        cluster: CTAs that share a head's keys and values.
        consumers: warpgroups of a CTA, with 64 query rows each. A cluster has one warpgroup for every SLICE channels of
            K and of V.
        exact: number of groups of 16 keys, in every eight, with exact exponentials; see HopperConfig.
    """

    head_dim: int
    cluster: int
    consumers: int
    exact: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * self.consumers

    @property
    def cluster_tiles(self) -> int:
        """Tiles of ROWS queries that a cluster processes."""
        return self.cluster * self.consumers

    @property
    def shared_bytes(self) -> int:
        """sizeof(FusedSmallStorage), in bytes."""
        slices = self.head_dim // SLICE
        kv = LONGEST * (2 * self.head_dim + ONES)
        q = self.consumers * ROWS * self.head_dim
        values = 4 * (2 * SLICE + LONGEST // LANES)
        warpgroups = self.consumers * (LANES * SLICE * (4 + 2 + 2) + 8 * SLICE + values + 16 + 12 * ROWS)
        facts = 12 * self.head_dim + slices * (4 * LONGEST // LANES) + 16 * BLOCKS
        return round_up(kv + q + warpgroups + facts + 8 * (3 + 2 * BLOCKS), 1024)

    @property
    def name(self) -> str:
        return "fused_small_" + "_".join(str(x) for x in astuple(self))


INSTANCES = (FusedSmallConfig(64, 4, 2, 2),)
"""The compiled instances."""

DIMS = frozenset(config.head_dim for config in INSTANCES)

CLUSTERED = 0.92
"""Fraction of a GPU's SMs that clusters of four can use: 30 clusters at a time on an H100 with 132 SMs, by
cudaOccupancyMaxActiveClusters."""


def unsupported_config(config: FusedSmallConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
    return unsupported_arch(device) or unsupported_shared_memory(config.shared_bytes, device)


def splits(config: FusedSmallConfig, q: torch.Tensor, k: torch.Tensor) -> int:
    """Number of clusters for a head of K and V, each of which quantizes it: enough that no warpgroup has a second query
    tile."""
    return -(-row_tiles(q, k) // config.cluster_tiles)


def row_tiles(q: torch.Tensor, k: torch.Tensor) -> int:
    """Tiles of ROWS queries that attend to one head of K and V."""
    return q.shape[1] // k.shape[1] * -(-q.shape[2] // ROWS)


def may_take(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a call of plain tensors may run in one launch, judged by the properties that torch.compile knows."""
    dim = q.shape[3]
    return dim in DIMS and v.shape[3] == dim and q.dtype in HALVES and q.dtype == k.dtype == v.dtype and k.shape[2] <= LONGEST


def unsupported_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, dims: frozenset[int], longest: int) -> str | None:
    """The reason why a kernel for these head dims and up to `longest` keys can't take plain tensors, or None if it
    can."""
    if q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        return f"query, key and value are {q.dtype}, {k.dtype} and {v.dtype}; it takes bfloat16 or float16"
    if q.shape[3] not in dims or v.shape[3] != q.shape[3]:
        return f"head dims are {q.shape[3]} and {v.shape[3]}; it takes {' or '.join(map(str, sorted(dims)))}"
    if not 0 < k.shape[2] <= longest:
        return f"there are {k.shape[2]} keys; it takes 1 to {longest}"
    if 0 in q.shape:
        return f"query has shape {tuple(q.shape)}"
    if not softmax_scale > 0:
        return f"scale is {softmax_scale}; it takes positive ones"
    for name, x in (("query", q), ("key", k), ("value", v)):
        reason = unsupported_tma(x, name)
        if reason is not None:
            return reason
    return None


def unsupported_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, device: Device) -> str | None:
    """The reason why a call of plain tensors can't run in one launch, or None if it can."""
    reason = unsupported_operands(q, k, v, softmax_scale, DIMS, LONGEST)
    if reason is not None:
        return reason
    config = choose(q)
    reason = unsupported_config(config, device)
    if reason is not None:
        return reason
    wanted, room = k.shape[0] * k.shape[1] * splits(config, q, k), int(device.sm_count * CLUSTERED) // config.cluster
    if wanted > room:
        return f"it would take {wanted} clusters of {config.cluster} CTAs; {room} run at a time"
    return None


def choose(q: torch.Tensor) -> FusedSmallConfig:
    """The instance for a call. `unsupported_call` must have returned None."""
    return next(c for c in INSTANCES if c.head_dim == q.shape[3])
