"""Calls with soft caps whose rows take every way through the Hopper kernel's softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from emulated import Operands, normal, quantized
from fp8attn import Recipe, reference, rotation
from fp8attn.call import Call
from fp8attn.cuda.configs import HopperConfig
from fp8attn.prepare import call_of

CAPS = (50.0, 0.1), (50.0, 1.0), (30.0, 5.0), (50.0, 40.0), (1e6, 1.0)
"""And by what queries are multiplied: scores far below the cap, below it, and at it."""


TENSOR_CORE_CAPS = (50.0, 0.1), (50.0, 1.0), (30.0, 5.0), (50.0, 12.0), (1e6, 1.0)
"""Where scores have 13 bits: those near the cap aren't far above it."""


def capped_calls(
    config: HopperConfig, device: torch.device, rows: int = 70, nonfinite: bool = False, caps: Sequence[tuple[float, float]] = CAPS
) -> Iterator[tuple[Operands, Call]]:
    """Calls of an instance: blocks whose largest score is lower than the last one's, and below zero; K's mean.

    Args:
        nonfinite: key 250 is NaN, which the first of 70 rows doesn't see, and the last one does.
        caps: and by what queries are multiplied.
    """
    recipe = Recipe(qk="int8" if config.int8 else "e4m3")
    for softcap, larger in caps:
        q, k, v = (x.to(device) for x in normal((1, 1, rows, config.head_dim), (1, 1, 450, config.head_dim), config.value_dim))
        q, k = larger * (q + 1), k - torch.linspace(-0.2, 0.8, 450, device=device)[:, None]
        if nonfinite:
            k[0, 0, 250, 5] = torch.nan
        operands = quantized(q, k, v, recipe)
        window = (400, 220 if nonfinite else 420)
        call = call_of(*operands, recipe=recipe, return_lse=True, out_dtype=torch.float32, softcap=softcap, window=window)
        mean, rotated = operands[1].mean, operands[1].rotated
        assert mean is not None
        shift = reference.smoothing_shift(rotation.rotate_queries(q, rotated), mean, call.softmax_scale)
        yield operands, dataclasses.replace(call, mean_scores=shift)
