"""What a CUDA config computes, by the pipeline oracle: tests and searches hold it to that."""

from __future__ import annotations

import functools
import math

import torch

from .. import reference
from ..call import Call
from ..device import Device
from ..recipe import Quantized
from . import portable
from .configs import KEYS
from .portable import PortableConfig
from .render import Attending as Config


def key_splits(call: Call, config: Config, device: Device) -> int:
    """CTAs that share a tile where nobody says how many."""
    return portable.key_splits(portable.packed(call), config, device) if isinstance(config, PortableConfig) else 1


def oracle(quantized: tuple[Quantized, Quantized, Quantized], call: Call, config: Config, key_splits: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 and LSE of a call with these operands, key blocks, roundings and sums in the config's order; CTAs that share a tile have a
    range of its blocks each."""
    pipeline = functools.partial(reference.pipeline, *quantized, causal=call.causal, softmax_scale=call.softmax_scale)
    if not isinstance(config, PortableConfig):
        return pipeline(call.attn_mask, block_n=KEYS, exact=config.exact)
    pipeline = functools.partial(pipeline, block_n=config.keys, compute=call.compute)
    if config.splits * key_splits == 1:
        return pipeline(call.attn_mask)
    # warps that share rows have the same part of every block each, and maxima of their own
    keys = torch.arange(call.kv_length, device=call.q.device)
    blocks = math.ceil(call.kv_length / config.keys)
    share = math.ceil(blocks / key_splits) * config.keys
    owner = keys // share * config.splits + keys % config.keys // (config.keys // config.splits)
    parts = []
    for i in range(config.splits * key_splits):
        mine = (owner == i).expand(*call.q.shape[:3], call.kv_length)
        if call.attn_mask is None:
            mask = mine
        elif call.attn_mask.dtype == torch.bool:
            mask = call.attn_mask & mine
        else:
            mask = call.attn_mask.masked_fill(~mine, -torch.inf)
        parts.append(pipeline(mask))
    return reference.combine(*(torch.stack(x) for x in zip(*parts, strict=True)))
