"""Calls from bfloat16 or float16 in two launches: the quantizer of K and V, and attention that quantizes Q.

Attention may begin with heads whose keys and values are ready while others are still being quantized. CTAs can't split
tiles then, so it does this only if it gains more time than splitting tiles would.
"""

from __future__ import annotations

import torch

from ..call import Call, Problem, empty_lse, empty_output
from ..device import Device
from ..recipe import Quantized, frozen
from . import configs, quantize, run, stream_k
from .configs import KEYS, HopperConfig

EARLY_BLOCKS = 13
"""K/V blocks that attention computes in the time that it gains by beginning before all keys and values are quantized.
12 to 16 us at D 128 and 256, on an H100."""


def overlaps_quantization(call: Call, config: HopperConfig, device: Device) -> bool:
    """Whether attention begins with heads that are ready while others are still being quantized.

    Then CTAs don't split tiles, and a CTA that is free takes the next tile. So there must be more tiles than SMs.
    """
    tiles = call.tiles(config.tile_rows)
    if tiles <= device.sm_count or call.attn_mask is not None:  # a mask is read in between
        return False
    if call.head_dim < 128 and (call.has_first_key or call.softcap):  # 2 to 3 % slower
        return False
    nobody_would = configs.stream_k_ctas(call, config, device) == 1
    return nobody_would or stream_k.saved(tiles, -(-call.kv_length // KEYS), device.sm_count) <= EARLY_BLOCKS


@frozen
class Planned:
    """How a problem runs in two launches.

    Attributes:
        key, value: uninitialised, for the quantizer to fill.
        call: attention to them.
        config: its instance.
        overlaps: whether attention begins with heads that are ready while others are still being quantized.
    """

    key: Quantized
    value: Quantized
    call: Call
    config: HopperConfig
    overlaps: bool


def plan(problem: Problem, device: Device) -> Planned:
    """How `quantize_and_attend` runs a problem."""
    key, value = quantize.empty(problem.k, problem.v, problem.qk)
    call = problem.call_of(key, value)
    config = configs.choose(call, device)
    return Planned(key, value, call, config, overlaps_quantization(call, config, device))


def quantize_and_attend(problem: Problem, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization and attention; the attention kernel quantizes q.

    `configs.unsupported_q_quant` and `quantize.unsupported_call` must return None for the problem.

    Returns:
        out (B, Hq, Sq, D); LSE (B, Hq, Sq), empty if not asked for.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    q, k, v, planned = problem.q, problem.k, problem.v, plan(problem, device)
    key, value, call, config = planned.key, planned.value, planned.call, planned.config
    if not planned.overlaps:
        run.quantize_into(key, value, k, v, device)
        return run.forward(call, device, config)
    heads = k.shape[0] * k.shape[1]
    counters = q.new_zeros(1 + heads, dtype=torch.int32)
    ready = counters[1:]
    # nothing may run between the two launches, such as torch filling what it allocates (torch.utils.deterministic)
    out, lse = empty_output(q, call.value_dim, problem.out_dtype), empty_lse(q, problem.return_lse)
    run.quantize_into(key, value, k, v, device, ready=ready)
    forward_when_ready(call, device, config, out, lse, counters, ready, quantize.ctas_of(k))
    return out, lse


def forward_when_ready(
    call: Call,
    device: Device,
    config: HopperConfig,
    out: torch.Tensor,
    lse: torch.Tensor,
    counter: torch.Tensor,
    ready: torch.Tensor,
    cluster: int,
) -> None:
    """Attention by an instance that quantizes q.

    It attends to a key/value head once `cluster` CTAs have added 1 to the head's word of `ready`. It waits for nothing
    else, so the kernel that is launched right before it must be the quantizer.

    Args:
        out, lse: (B, Hq, Sq, Dv) and (B, Hq, Sq), which are written, lse if the call asks for it.
        counter: int32, the first of which is read and is 0.
        ready: `run.quantize_into`'s.
    """
    library = run.library_of(config, device)
    arguments, _ = run.launch_of(call, device, config, library, split_ctas=1)
    library.operators.forward_when_ready.default(
        *arguments,
        call.q,
        call.k,
        call.k_scale,
        call.v,
        call.v_scale,
        call.v_mean,
        out,
        lse if call.return_lse else None,
        call.lse_mean,
        counter,
        ready,
        cluster,
        call.window_offsets[0] if config.window else 0,
        call.softcap,
        call.sinks,
    )
