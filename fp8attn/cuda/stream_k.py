"""When CTAs of the Hopper kernel share the tiles behind the last full round (tile/stream_k.h), where each has as many blocks of keys.

Stream-K (Osama et al., PPoPP 2023, arXiv:2301.03598) for the last round, which then takes no longer than its part of one, and for calls with fewer
tiles than there are SMs. What P is rounded against, and the order in which a tile's blocks are added up, then depend on how many tiles there are.
"""

from __future__ import annotations

LEAST_BLOCKS = 8
"""Of a CTA's range, before all are made as long: then more than half of it."""

EXTRA_BLOCKS = 6
"""In the time of which a CTA begins and ends a second work_tile, hands over and takes over."""

MOST_SPLIT_CTAS = 16
"""CTAs for each tile, on average: the one with its last blocks takes over what all others have."""


def split_ctas(tiles: int, blocks: int, sm_count: int) -> int:
    """CTAs that share the tiles behind the last full round; 1 where it is as fast if each is one CTA's.

    Args:
        tiles: of the call. blocks: of a tile's keys. sm_count: tiles of a round.
    """
    rest = tiles % sm_count
    if rest == 0:
        return 1
    size = max(-(-rest * blocks // min(sm_count, rest * MOST_SPLIT_CTAS)), LEAST_BLOCKS)
    return -(-rest * blocks // size) if size + EXTRA_BLOCKS <= blocks else 1


def saved(tiles: int, blocks: int, sm_count: int) -> float:
    """Time that sharing saves, in blocks of keys."""
    return (-(-tiles // sm_count) - rounds(tiles, blocks, sm_count)) * blocks


def rounds(tiles: int, blocks: int, sm_count: int) -> float:
    """How long a call takes, in rounds of a tile for each SM."""
    whole, rest = divmod(tiles, sm_count)
    sharing = split_ctas(tiles, blocks, sm_count)
    return whole + (rest / sharing + EXTRA_BLOCKS / blocks if sharing > 1 else float(rest > 0))
