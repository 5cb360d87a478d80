"""Calls from bfloat16 or float16 in two launches: the quantizer of K and V, and attention that quantizes Q.

Attention may begin with heads whose keys and values are ready while others are still being quantized. A CTA that is
free takes the next tile, so that CTAs which begin later take fewer.
"""

from __future__ import annotations

import torch

from ..call import Problem, empty_lse, empty_output
from ..device import Device
from ..layout import padded_length
from . import configs, quantize, run
from .configs import HopperConfig


def overlaps_quantization(problem: Problem, config: HopperConfig, device: Device) -> bool:
    """Whether attention begins with heads that are ready while others are still being quantized.

    With no more tiles than SMs, all heads are wanted at once.
    """
    if problem.tiles(config.tile_rows) <= device.sm_count or problem.attn_mask is not None:  # a mask is read in between
        return False
    return problem.head_dim >= 128 or not (problem.has_first_key or problem.softcap)  # else 2 to 3 % slower


def quantize_and_attend(problem: Problem, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization and attention; the attention kernel quantizes q.

    `configs.unsupported_q_quant` and `quantize.unsupported_call` must return None for the problem.

    Returns:
        out (B, Hq, Sq, D); LSE (B, Hq, Sq), empty if not asked for.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    q, k, v, mask = problem.q, problem.k, problem.v, problem.attn_mask
    out, lse = empty_output(q, v.shape[3], problem.out_dtype), empty_lse(q, problem.return_lse)
    if out.numel() == 0:
        return out, lse
    config = configs.choose(problem, device)
    overlaps = overlaps_quantization(problem, config, device)
    library = run.library_of(config, device)
    arguments, scratch = run.launch_of(problem, device, config, library, configs.stream_k_ranges(problem, config, device))
    _, of_quantizer, quantizer = run.quantizer_of(k, device)
    counters, writers = (1, quantize.writers_of(k, of_quantizer)) if overlaps else (scratch.counters, 0)
    # one operator: nothing may run between the two launches, such as torch filling what it allocates
    # (torch.utils.deterministic)
    library.operators.quantize_and_attend.default(
        *arguments, [*quantizer, padded_length(k.shape[2]), writers], problem.int8, [counters, *scratch[1:]],
        problem.adds_mean, problem.window_offsets[0] if config.window else 0, problem.softcap,
        [q, k, v, None if mask is None else mask.expand(*q.shape[:3], k.shape[2]), problem.sinks], [out, lse if problem.return_lse else None],
    )  # fmt: skip
    return out, lse
