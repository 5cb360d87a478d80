"""The pipeline oracle for a CUDA config: its key blocks, roundings and splits.

Tests and searches compare kernels with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from .. import reference
from ..call import Call
from ..device import device_of
from ..recipe import Quantized
from .configs import KEYS, HopperConfig
from .fused_head import FusedHeadConfig
from .fused_small import FusedSmallConfig
from .portable import PortableConfig
from .render import Attending as Config


def stream_k_work_tiles(call: Call, config: HopperConfig, splits: int, sm_count: int) -> Iterator[tuple[int, int, int, int]]:
    """Work tiles of the tiles that are split, as in tile/stream_k.h: head (batch · Hq + head), first row, first block,
    end block.

    Work tiles of one tile are in order.
    """
    tiles, blocks = call.tiles(config.tile_rows), -(-call.kv_length // KEYS)
    rest = tiles % min(max(tiles, splits), sm_count)
    row_tiles, group, heads = -(-call.q_length // config.tile_rows), call.q_heads // call.kv_heads, call.batch * call.q_heads
    size = -(-rest * blocks // splits)
    for i in range(splits):
        start, end = i * size, min(i * size + size, rest * blocks)
        while start < end:
            to = min(end, (start // blocks + 1) * blocks)
            position = tiles - rest + start // blocks
            first = position // (group * row_tiles) * group
            inside, heads_in_group = position % (group * row_tiles), min(group, heads - first)
            row = (row_tiles - 1 - inside // heads_in_group) * config.tile_rows
            yield first + inside % heads_in_group, row, start % blocks, (to - 1) % blocks + 1
            start = to


def _owners(call: Call, config: PortableConfig | HopperConfig, splits: int) -> torch.Tensor:
    """The part of its row that each score belongs to.

    Each part has its own maximum. int, in a shape that expands to (B, Hq, Sq, Sk).
    """
    if isinstance(config, PortableConfig):
        # each of the warps that share rows has the same part of every block
        keys = torch.arange(call.kv_length, device=call.q.device)
        share = math.ceil(math.ceil(call.kv_length / config.keys) / splits) * config.keys
        return keys // share * config.splits + keys % config.keys // (config.keys // config.splits)
    found = torch.zeros(call.batch * call.q_heads, call.q_length, call.kv_length, dtype=torch.int32)
    parts: Counter[tuple[int, int]] = Counter()
    for head, row, begin, end in stream_k_work_tiles(call, config, splits, device_of(call.q.device).sm_count):
        found[head, row : row + config.tile_rows, begin * KEYS : end * KEYS] = parts[head, row]
        parts[head, row] += 1
    return found.view(call.batch, call.q_heads, call.q_length, call.kv_length).to(call.q.device)


def oracle(quantized: tuple[Quantized, Quantized, Quantized], call: Call, config: Config, splits: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """out float32 and LSE of a call with these operands, with the config's key blocks, roundings and order of sums.

    Args:
        splits: the result of fp8attn.cuda.run.splits_of.
    """
    if isinstance(config, PortableConfig):
        arithmetic = reference.Arithmetic(config.keys, call.compute, p_offset=config.p_offset, half_sums=config.half_sums)
    else:
        arithmetic = reference.Arithmetic(KEYS, exact=config.exact, caps_codes=isinstance(config, HopperConfig))
    # the part of K's mean that kernels which quantize q know themselves is the LSE's alone
    shift = None if call.mean_scores is None or call.softcap else call.mean_scores
    mean_scores = call.mean_scores if call.softcap else None
    scoring = replace(call.scoring, sinks=None)

    def pipeline(mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.pipeline(*quantized, mask, arithmetic=arithmetic, causal=call.causal, scoring=scoring, mean_scores=mean_scores)

    def whole(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lse = lse if shift is None else lse + shift
        return (out, lse) if call.sinks is None else reference.with_sinks(out, lse, call.sinks)

    parts_of_row = (config.splits if isinstance(config, PortableConfig) else 1) * splits
    if parts_of_row == 1 or isinstance(config, FusedSmallConfig | FusedHeadConfig):
        return whole(*pipeline(call.attn_mask))
    owner = _owners(call, config, splits)
    parts = []
    for i in range(int(owner.max()) + 1):
        mine = (owner == i).expand(*call.q.shape[:3], call.kv_length)
        if call.attn_mask is None:
            mask = mine
        elif call.attn_mask.dtype == torch.bool:
            mask = call.attn_mask & mine
        else:
            mask = call.attn_mask.masked_fill(~mine, -torch.inf)
        parts.append(pipeline(mask))
    return whole(*reference.combine(*(torch.stack(x) for x in zip(*parts, strict=True))))
