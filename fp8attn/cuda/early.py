"""Calls from bfloat16 or float16 in two launches: the quantizer of K and V, and attention that quantizes Q.

Attention may begin with heads whose keys and values are ready while others are still being quantized. A CTA that is
free takes the next tile, so that CTAs which begin later take fewer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..call import Call, Problem, empty_lse, empty_output
from ..device import Device
from ..recipe import Quantized, frozen
from . import build, configs, quantize, run
from .configs import HopperConfig


def overlaps_quantization(call: Call, config: HopperConfig, device: Device) -> bool:
    """Whether attention begins with heads that are ready while others are still being quantized.

    With no more tiles than SMs, all heads are wanted at once.
    """
    if call.tiles(config.tile_rows) <= device.sm_count or call.attn_mask is not None:  # a mask is read in between
        return False
    return call.head_dim >= 128 or not (call.has_first_key or call.softcap)  # else 2 to 3 % slower


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
    # nothing may run between the two launches, such as torch filling what it allocates (torch.utils.deterministic)
    out, lse = empty_output(q, call.value_dim, problem.out_dtype), empty_lse(q, problem.return_lse)
    launch = launch_of(call, device, config)
    writers = run.quantize_into(key, value, k, v, device, words=launch.memory.words)
    forward_when_ready(call, launch, out, lse, writers)
    return out, lse


class Launch(NamedTuple):
    """What is allocated, and known, before the quantizer is launched.

    Attributes:
        library: the kernels that the instance is among.
        arguments: of the launch, as of `run.launch_of`.
    """

    config: HopperConfig
    library: build.Library
    arguments: tuple[int | float, ...]
    memory: run.Memory


def launch_of(call: Call, device: Device, config: HopperConfig) -> Launch:
    """Of attention that overlaps quantization."""
    library = run.library_of(config, device)
    arguments, scratch = run.launch_of(call, device, config, library, run.splits_of(call, config, device))
    return Launch(config, library, arguments, run.memory_of(scratch._replace(counters=1), call.q, call.k.shape[0] * call.k.shape[1]))


def forward_when_ready(call: Call, launch: Launch, out: torch.Tensor, lse: torch.Tensor, writers: int) -> None:
    """Attention by an instance that quantizes q.

    It attends to a key/value head once `writers` CTAs have added 1 to the head's word of `ready`. It waits for nothing
    else, so the kernel that is launched right before it must be the quantizer.

    Args:
        out, lse: (B, Hq, Sq, Dv) and (B, Hq, Sq), which are written, lse if the call asks for it.
    """
    memory = launch.memory
    launch.library.operators.forward_when_ready.default(
        *launch.arguments,
        call.q,
        call.k,
        call.k_scale,
        call.v,
        call.v_scale,
        call.v_mean,
        out,
        lse if call.return_lse else None,
        call.lse_mean,
        memory.counter,
        memory.parts,
        memory.flags,
        memory.ready,
        writers,
        call.window_offsets[0] if launch.config.window else 0,
        call.softcap,
        call.sinks,
    )
