"""Launching the CUDA kernels."""

from __future__ import annotations

import torch

from ..call import Call, empty_lse, empty_output
from ..device import Device
from ..schedule import heads_side_by_side
from . import build, configs, portable
from .configs import KEYS, ROWS, HopperConfig
from .portable import PortableConfig
from .render import Config


def why_not(call: Call, device: Device) -> str | None:
    """Why no instance of either kernel runs a call, or None if one does."""
    return None if configs.why_not(call, device) is None else portable.why_not(call, device)


def why_not_first(call: Call, device: Device) -> str | None:
    """Why `auto` doesn't take these kernels for a call, or None if it does: where the Hopper kernel runs, and Q and K are e4m3. On other GPUs
    nobody has measured the portable kernel beside Triton's, and on Hopper Triton's e4m3 kernel is faster; nor int8 on any."""
    return "nobody has measured the CUDA kernels of int8 beside Triton's" if call.int8 else configs.why_not(call, device)


def choose(call: Call, device: Device) -> Config:
    """The instance that runs a call, `why_not` having said that there is one: the Hopper kernel's where one does."""
    return configs.choose(call, device) if configs.why_not(call, device) is None else portable.choose(call, device)


def library_of(config: Config, device: Device) -> build.Library:
    """The kernels that an instance is among, compiled if this is their first use on this machine.

    Raises:
        BuildError: they can't be.
    """
    if isinstance(config, HopperConfig):
        return build.load_with(config, configs.INT8_INSTANCES if config.int8 else build.INSTANCES, device.arch)
    return build.load_with(config, portable.group(config.head_dim, device, config.int8), device.arch)


def forward(call: Call, device: Device, config: Config | None = None, key_splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the instance `config`, or the one chosen for the call; `why_not` has said that there is one.

    Args:
        key_splits: CTAs that share a tile, of the portable kernel; None: as many as fill the GPU.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), empty if not asked for.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    out = empty_output(call.q, call.value_dim, call.out_dtype)
    lse = empty_lse(call.q, call.return_lse)
    if out.numel() == 0:
        return out, lse
    if call.kv_length == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    config = choose(call, device) if config is None else config
    to, parts, part_lse = out, None, None
    if isinstance(config, PortableConfig):
        boxes = (0, 0, 0, 0)
        call, heads = portable.packed(call), call.q_heads
        to = portable.rows_of_heads(out, heads // call.q_heads) if call.q_heads < heads else out
        splits = portable.key_splits(call, config, device) if key_splits is None else key_splits
        if splits > 1:
            parts = torch.empty(splits, *to.shape, dtype=torch.float32, device=out.device)
            part_lse = torch.empty(parts.shape[:-1], dtype=torch.float32, device=out.device)
        tiles = -(-call.q_length // config.tile_rows) * call.batch * call.q_heads
        ctas = min(tiles, device.sm_count * config.ctas) if config.persistent else splits * tiles
    else:
        tiles = -(-call.q_length // config.tile_rows) * call.batch * call.q_heads
        boxes = (ROWS, KEYS, config.panel, config.value_dim)
        ctas = min(tiles, device.sm_count)
    # tiles of a causal call are of many lengths: whoever is free takes the next
    counter = out.new_zeros(1, dtype=torch.int32) if call.causal != "none" and tiles > ctas else None
    library = library_of(config, device)
    library.forward(
        library.instances.index(config), *boxes, ctas, heads_side_by_side(call, min(ctas, device.sm_count)),
        call.q, call.q_scale, call.q_group, call.k, call.k_scale, call.k_group, call.v, call.v_scale, call.v_mean,
        call.attn_mask, call.kv_length, call.softmax_scale, call.causal_offset, to, lse if call.return_lse else None, counter,
        parts, part_lse,
    )  # fmt: skip
    return out, lse
