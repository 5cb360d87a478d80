"""Instances of the Hopper kernel, and calls that need a certain instance."""

from __future__ import annotations

import torch

from fp8attn import Recipe
from fp8attn.cuda.configs import GROUPS, VARLEN_GROUPS
from fp8attn.device import ARCHITECTURES
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize

H100 = ARCHITECTURES[90]


QUANTIZED = tuple(config for (_, _, fuse_q_quant), group in GROUPS.items() if not fuse_q_quant for config in group)


VARLEN, VARLEN_FUSED_Q = (
    tuple(config for (_, _, fuses), group in VARLEN_GROUPS.items() if fuses == fused for config in group) for fused in (False, True)
)


EVERY = tuple(config for group in GROUPS.values() for config in group)


def call(dim: int = 64, value_dim: int | None = None, length: int = 40, recipe: Recipe | None = None, **options):
    recipe = recipe or Recipe()
    q, k = torch.zeros(1, 2, length, dim), torch.zeros(1, 2, length, dim)
    # quantized by the definition, because Triton's interpreter would take seconds
    return call_of(*quantize(q, k, torch.zeros(1, 2, length, value_dim or dim), recipe), recipe=recipe, **options)
