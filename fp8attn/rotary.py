"""Rotary position embeddings of a batch's new tokens (Su et al., arXiv:2104.09864): the definition in plain torch.

Which position a token has follows from the lengths of the batch, which are on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .pages import PagedBatch


class Angles(NamedTuple):
    """Cosines and sines of all positions.

    Attributes:
        cos, sin: (P, R / 2), contiguous: of the first R channels of a token at positions 0 … P - 1.
        interleaved: whether channels 2 i and 2 i + 1 are a pair, as in GPT-J; else i and i + R / 2, as in GPT-NeoX.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


@dataclass(frozen=True, eq=False)
class Places:
    """Where new tokens are in their sequences.

    Attributes:
        position: int64, (B, S), or (T,) of packed tokens.
        exists: bool, likewise: whether the token is one of its row's. Others have position 0.
    """

    position: torch.Tensor
    exists: torch.Tensor

    @classmethod
    def of(cls, batch: PagedBatch, length: int) -> Places:
        """Those of a call of `length` tokens, S or T. Nothing is read on the host."""
        token = torch.arange(length, device=batch.lengths.device)
        ends = batch.lengths.clamp(min=0).long()
        if not len(ends):
            of_rows = torch.zeros((length,) if batch.cu_seqlens is not None else (0, length), dtype=torch.long, device=token.device)
            return cls(of_rows, of_rows > 0)
        if batch.cu_seqlens is None:
            counts, end = (torch.full_like(ends, length) if batch.counts is None else batch.counts.long()).unsqueeze(1), ends.unsqueeze(1)
            own, exists = token, torch.ones_like(token, dtype=torch.bool)
        else:
            edges = batch.cu_seqlens.long().clamp(0, length)
            row = torch.searchsorted(edges[1:].contiguous(), token, right=True)
            exists = row < len(ends)
            row = row.clamp(max=len(ends) - 1)
            own, counts, end = token - edges[row], edges[row + 1] - edges[row], ends[row]
        counts = torch.minimum(counts.clamp(max=length), end).clamp(min=0)
        exists = exists & (own >= 0) & (own < counts)
        return cls(torch.where(exists, end - counts + own, 0), exists)


def turned(x: torch.Tensor, batch: PagedBatch, angles: Angles) -> torch.Tensor:
    """Queries or keys (B, H, S, D) or (T, H, D), turned by the angles of their positions, in float32 and rounded once.

    A token whose position has no angles is NaN. Tokens that are no row's, and channels from R on, are as they were.
    """
    packed = batch.cu_seqlens is not None
    places = Places.of(batch, x.shape[0 if packed else 2])
    inside = places.position < angles.cos.shape[0]
    cos, sin = (table.float()[places.position.clamp(max=table.shape[0] - 1)].masked_fill(~inside.unsqueeze(-1), torch.nan) for table in angles[:2])
    cos, sin, exists = (y.unsqueeze(1) for y in (cos, sin, places.exists.unsqueeze(-1)))  # heads
    pairs = cos.shape[-1]
    whole = x.float()
    if angles.interleaved:
        a, b = whole[..., 0 : 2 * pairs : 2], whole[..., 1 : 2 * pairs : 2]
    else:
        a, b = whole[..., :pairs], whole[..., pairs : 2 * pairs]
    new = a * cos - b * sin, b * cos + a * sin
    found = torch.stack(new, -1).flatten(-2) if angles.interleaved else torch.cat(new, -1)
    return torch.where(exists, torch.cat([found.to(x.dtype), x[..., 2 * pairs :]], -1), x)
