"""The fused kernel for many heads of few keys on Hopper: quantization with the default recipe and attention in one
launch.

Its configs, and the calls that it supports.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ..device import Device
from ..quantization import TOKEN_CHUNK
from .configs import KEYS, ONES, ROWS, round_up, unsupported_arch, unsupported_shared_memory
from .fused_small import row_tiles, unsupported_operands
from .quantize import MOMENTS, NONFINITE, THREADS, WARPS

VALUE_GROUP_BYTES = 2048
"""Bytes of V in half precision that a warp quantizes at a time."""


@dataclass(frozen=True)
class FusedHeadConfig:
    """One instance. The fields of C++'s FusedHeadConfig, in order.

    Attributes:
        head_dim: channels of Q, K and V.
        blocks: largest number of blocks of KEYS keys. All codes of a head are in a CTA's shared memory.
        exact: number of groups of 16 keys, in every eight, with exact exponentials; see HopperConfig.
    """

    head_dim: int
    blocks: int
    exact: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 2 * THREADS

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA, each with tiles of ROWS queries."""
        return self.threads // 128

    @property
    def longest(self) -> int:
        """Largest number of keys."""
        return self.blocks * KEYS

    @property
    def shared_bytes(self) -> int:
        """sizeof(FusedHeadStorage), in bytes."""
        token_chunks = -(-self.longest // TOKEN_CHUNK)
        kv = self.longest * (2 * self.head_dim + ONES)
        measured = (2 * WARPS + token_chunks + 1) * MOMENTS + NONFINITE
        values = WARPS * VALUE_GROUP_BYTES
        q = self.warpgroups * ROWS * self.head_dim
        facts = 4 * 4 * self.head_dim + token_chunks * NONFINITE + 2 * 4 * WARPS + 4 * self.blocks
        return round_up(kv + max(measured, values, q) + facts + self.warpgroups * (3 * 4 * ROWS + 32) + 16, 1024)

    @property
    def name(self) -> str:
        return "fused_head_" + "_".join(str(x) for x in astuple(self))


INSTANCES = (FusedHeadConfig(64, 6, 2),)
"""The compiled instances. With 1,024 keys, two launches are as fast: docs/journal/2026-11-28-a-head-a-cta.md."""

DIMS = frozenset(config.head_dim for config in INSTANCES)


def unsupported_config(config: FusedHeadConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
    return unsupported_arch(device) or unsupported_shared_memory(config.shared_bytes, device)


def splits(config: FusedHeadConfig, q: torch.Tensor, k: torch.Tensor, device: Device) -> int:
    """Number of CTAs for a head of K and V, each of which quantizes it: as many as multiprocessors are free for, and as
    have a query tile for every warpgroup."""
    heads, most = k.shape[0] * k.shape[1], -(-row_tiles(q, k) // config.warpgroups)
    return min(max(device.sm_count // heads, 1), most)


def unsupported_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, device: Device) -> str | None:
    """The reason why a call of plain tensors can't run in one launch, or None if it can."""
    reason = unsupported_operands(q, k, v, softmax_scale, DIMS, INSTANCES[0].longest)
    return reason or unsupported_config(choose(q), device)


def choose(q: torch.Tensor) -> FusedHeadConfig:
    """The instance for a call. `unsupported_call` must have returned None."""
    return next(c for c in INSTANCES if c.head_dim == q.shape[3])
