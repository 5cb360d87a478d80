"""Launching the CUDA kernels."""

from __future__ import annotations

import torch

from ..call import Call, empty_lse, empty_output
from ..device import Device
from ..schedule import heads_side_by_side
from . import build
from .configs import KEYS, ROWS, HopperConfig, choose, serving, why_not

__all__ = ["choose", "forward", "serving", "why_not"]


def forward(call: Call, device: Device, config: HopperConfig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the instance `config`, or the one chosen for the call; `why_not` has said that there is one.

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
    tiles = -(-call.q_length // config.tile_rows) * call.batch * call.q_heads
    ctas = min(tiles, device.sm_count)
    # tiles of a causal call are of many lengths: whoever is free takes the next
    counter = out.new_zeros(1, dtype=torch.int32) if call.causal != "none" and tiles > ctas else None
    library = build.load()
    library.hopper(
        library.instances.index(config), ROWS, KEYS, config.panel, config.value_dim, ctas, heads_side_by_side(call, ctas),
        call.q, call.q_scale, call.q_group, call.k, call.k_scale, call.k_group, call.v, call.v_scale, call.v_mean,
        call.attn_mask, call.kv_length, call.softmax_scale, call.causal_offset, out, lse if call.return_lse else None, counter,
    )  # fmt: skip
    return out, lse
