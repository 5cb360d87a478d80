"""The order of query tiles in the persistent kernels of both backends, and the largest sizes that kernels can count."""

from __future__ import annotations

import torch

from .call import Call, Geometry

MOST_TOKENS = 1 << 30
"""A sequence must have fewer tokens. Kernels count tokens in 32 bits, and add the lengths of two sequences."""

LEAST_ROWS = 16
"""Tokens of the smallest tile."""

MOST_TILES = 1 << 29
"""All heads of an argument together must have fewer tiles of LEAST_ROWS tokens. The largest grid has four times as many
programs, all in x, where the limit is 2^31 - 1. In y and z the limit is 65,535, so no number that the user chooses goes
there."""

MOST_CHANNELS = 1 << 31
"""All heads of V that TMA loads must have fewer channels together. They are one dimension of its boxes, whose
coordinates have 32 bits."""

L2_BYTES = 8 << 20
"""Bytes of keys and values that surely stay in L2 while CTAs work on them."""

HEAD_CTAS = 5
"""Teams that work on one head at the same time. They read its keys at about the same time, so that all but the first
find them in L2."""

MOST_PARTS = 32
"""Parts of each tile of the decode kernel at most, if all tiles have as many. A warp adds up as many at once."""

TABLE_HEADER = ("tiles", "taken", "end")
"""The first row of the table of tiles of packed sequences, int32 each: the number of tiles, which are the rows behind
it; 0, from which attention kernels count the tiles that they take; and the first query behind the last sequence."""

TILE_FIELDS = ("sequence", "first_row", "q_begin", "q_length", "k_begin", "k_length", "page", "head")
"""What attention kernels know of a tile of packed sequences, int32 each: its sequence, its first row in it, the first
token and the number of tokens of the sequence in q and in k, its first page of keys (layout.first_unit), and where
tiles have rows of several heads, which of the query heads that share keys has the first row."""

TILE_PITCH = 8
"""int32 numbers of a row of the table: those of TILE_FIELDS in one memory sector."""


def unsupported_size(name: str, x: torch.Tensor) -> str | None:
    """The reason why kernels can't count the tokens or tiles of x (B, H, S, D), or None if they can."""
    batch, heads, length, _ = x.shape
    if length >= MOST_TOKENS:
        return f"{name} has {length} tokens; kernels take fewer than {MOST_TOKENS}"
    tiles = batch * heads * -(-length // LEAST_ROWS)
    if tiles >= MOST_TILES:
        return f"{name} has {tiles} tiles of {LEAST_ROWS} tokens in {batch} x {heads} heads; kernels take fewer than {MOST_TILES}"
    return None


def unsupported_sizes(call: Call) -> str | None:
    """The reason why kernels can't count a call's tokens or tiles, or None if they can."""
    return unsupported_size("query", call.q) or unsupported_size("key", call.k)


def unsupported_boxes(call: Call) -> str | None:
    """The reason why TMA can't count a call's tokens, tiles or channels, or None if it can."""
    channels = call.k.shape[0] * call.kv_heads * call.value_dim
    reason = unsupported_sizes(call)
    if reason is None and channels >= MOST_CHANNELS:
        return f"value has {channels} channels in {call.k.shape[0]} x {call.kv_heads} heads; TMA takes fewer than {MOST_CHANNELS}"
    return reason


def heads_in_l2(call: Geometry, teams: int) -> int:
    """Number of query heads whose tiles the schedule mixes: many, so that long tiles come first, but no more than L2
    can serve.

    Without a causal mask, all tiles take the same time, and the query heads of one key/value head are enough. In a
    window, a tile reads few keys of a head. Tiles of packed sequences take different times in any case.
    """
    sharing = call.q_heads // call.kv_heads
    if call.causal == "none" and call.varlen is None:
        return sharing
    keys = max(call.visible_keys(LEAST_ROWS) if call.has_first_key else call.longest_k, 1)
    return mixed_heads(call.batch * call.kv_heads, sharing, keys * (call.head_dim + call.value_dim), teams)


def mixed_heads(heads: int, sharing: int, head_bytes: int, teams: int) -> int:
    """`heads_in_l2` where tiles differ.

    Args:
        heads: key/value heads of all batches.
        sharing: query heads that share one.
        head_bytes: bytes of keys and values of one.
    """
    mixed = max(L2_BYTES // head_bytes, teams // HEAD_CTAS // sharing, 1)
    groups = -(-heads // mixed)  # of equal size: a small last group would run its long tiles late
    return sharing * -(-heads // groups)
