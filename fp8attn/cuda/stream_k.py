"""Stream-K for the last round of the Hopper kernel (tile/stream_k.h): into how many ranges the tiles after the last
full round are split.

All tiles must have the same number of key blocks. This follows Stream-K (Osama et al., PPoPP 2023, arXiv:2301.03598),
applied to the last round only. That round then takes no longer than its fraction of a full round. Calls with fewer
tiles than SMs gain, too. The reference score of P, and the order in which a tile's blocks are added up, then depend on
the number of tiles.
"""

from __future__ import annotations

LEAST_BLOCKS = 8
"""Fewest blocks in a range, before all ranges are made equally long. Afterwards, a range has more than half as
many."""

MOST_BLOCKS = 256
"""Most blocks in a range. Longer ones are split, so that CTAs which start late, because kernels of other streams held
their multiprocessors, take fewer. Tiles with more blocks are those of calls whose free CTAs take the next tile."""

EXTRA_BLOCKS = 6
"""Cost of a range in blocks: the time in which a CTA starts and ends a second work tile, stores a partial result, and
reduces those of other ranges."""

MOST_RANGES = 16
"""Ranges for each tile, on average, at most. The CTA with a tile's last range reduces the partial results of all its
others."""


def ranges(tiles: int, blocks: int, sm_count: int) -> int:
    """Number of ranges into which the tiles after the last full round are split; 1 if it is as fast to split none.

    Args:
        tiles: tiles of the call.
        blocks: key blocks of a tile.
        sm_count: tiles of a round.
    """
    rest = tiles % sm_count
    if rest == 0:
        return 1
    size = max(-(-rest * blocks // min(sm_count, rest * MOST_RANGES)), LEAST_BLOCKS)
    if tiles > sm_count and size > MOST_BLOCKS:
        size = max(-(-size // -(-size // MOST_BLOCKS)), -(-blocks // MOST_RANGES))
    split = -(-rest * blocks // size)
    return split if -(-split // sm_count) * (size + EXTRA_BLOCKS) <= blocks else 1


def rounds(tiles: int, blocks: int, sm_count: int) -> float:
    """Duration of a call, in rounds of one tile per SM."""
    whole, rest = divmod(tiles, sm_count)
    split = ranges(tiles, blocks, sm_count)
    of_cta = -(-split // sm_count)
    return whole + (of_cta * (rest / split + EXTRA_BLOCKS / blocks) if split > 1 else float(rest > 0))
