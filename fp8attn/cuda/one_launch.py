"""Quantization and attention in one launch: the kernel that takes a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device import Device
from . import fused_head, fused_small
from .fused_head import FusedHeadConfig
from .fused_small import FusedSmallConfig


class OneLaunch(NamedTuple):
    """An instance, and its grid.

    Attributes:
        config: the instance.
        splits: clusters, or CTAs, for a head of K and V, each of which quantizes it.
        ctas: of the grid.
    """

    config: FusedSmallConfig | FusedHeadConfig
    splits: int
    ctas: int

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return "fused_small" if isinstance(self.config, FusedSmallConfig) else "fused_head"


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, device: Device) -> OneLaunch | str:
    """The launch for a call of plain tensors, or why there is none."""
    reason = fused_small.unsupported_call(q, k, v, softmax_scale, device)
    if reason is None:
        return small(q, k)
    return fused_head.unsupported_call(q, k, v, softmax_scale, device) or by_heads(q, k, device)


def small(q: torch.Tensor, k: torch.Tensor) -> OneLaunch:
    """The launch of the fused small kernel. `fused_small.unsupported_call` must have returned None."""
    config = fused_small.choose(q)
    splits = fused_small.splits(config, q, k)
    return OneLaunch(config, splits, k.shape[0] * k.shape[1] * splits * config.cluster)


def by_heads(q: torch.Tensor, k: torch.Tensor, device: Device) -> OneLaunch:
    """The launch of the fused head kernel. `fused_head.unsupported_call` must have returned None."""
    config = fused_head.choose(q)
    splits = fused_head.splits(config, q, k, device)
    return OneLaunch(config, splits, k.shape[0] * k.shape[1] * splits)


def group(config: FusedSmallConfig | FusedHeadConfig) -> tuple[FusedSmallConfig | FusedHeadConfig, ...]:
    """The instances that an instance is compiled together with."""
    return fused_small.INSTANCES if isinstance(config, FusedSmallConfig) else fused_head.INSTANCES
