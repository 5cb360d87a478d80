"""Stream-K for the last round of the Hopper kernel (tile/stream_k.h): when CTAs share the tiles after the last full
round.

All tiles must have the same number of key blocks. This follows Stream-K (Osama et al., PPoPP 2023, arXiv:2301.03598),
applied to the last round only. That round then takes no longer than its fraction of a full round. Calls with fewer
tiles than SMs gain, too. The reference score of P, and the order in which a tile's blocks are added up, then depend on
the number of tiles.
"""

from __future__ import annotations

LEAST_BLOCKS = 8
"""Fewest blocks in a CTA's range, before all ranges are made equally long. Afterwards, a range has more than half as
many."""

EXTRA_BLOCKS = 6
"""Cost of sharing in blocks: the time in which a CTA starts and ends a second work tile, stores a partial result, and
reduces those of other CTAs."""

MOST_SPLIT_CTAS = 16
"""CTAs for each tile, on average, at most. The CTA with a tile's last blocks reduces the partial results of all its
other CTAs."""


def split_ctas(tiles: int, blocks: int, sm_count: int) -> int:
    """Number of CTAs that share the tiles after the last full round; 1 if it is as fast without sharing.

    Args:
        tiles: tiles of the call.
        blocks: key blocks of a tile.
        sm_count: tiles of a round.
    """
    rest = tiles % sm_count
    if rest == 0:
        return 1
    size = max(-(-rest * blocks // min(sm_count, rest * MOST_SPLIT_CTAS)), LEAST_BLOCKS)
    return -(-rest * blocks // size) if size + EXTRA_BLOCKS <= blocks else 1


def saved(tiles: int, blocks: int, sm_count: int) -> float:
    """Time that sharing saves, in key blocks."""
    return (-(-tiles // sm_count) - rounds(tiles, blocks, sm_count)) * blocks


def rounds(tiles: int, blocks: int, sm_count: int) -> float:
    """Duration of a call, in rounds of one tile per SM."""
    whole, rest = divmod(tiles, sm_count)
    sharing = split_ctas(tiles, blocks, sm_count)
    return whole + (rest / sharing + EXTRA_BLOCKS / blocks if sharing > 1 else float(rest > 0))
