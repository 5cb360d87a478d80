"""The order of tiles of queries in the persistent kernels of both backends, and the largest sizes that kernels can count."""

from __future__ import annotations

import torch

from .call import Call

MOST_TOKENS = 1 << 30
"""A sequence must have fewer. Kernels count tokens in 32 bits, and add the lengths of two sequences."""

LEAST_ROWS = 16
"""Tokens of the smallest tile."""

MOST_TILES = 1 << 29
"""Tiles of LEAST_ROWS tokens; all heads of an argument together must have fewer. The largest grid has four times as many programs, all in x, where
2^31 - 1 is the limit. In y and z it is 65,535: no number that the user chooses goes there."""

MOST_CHANNELS = 1 << 31
"""All heads of values that TMA loads must have fewer together: they are one dimension of its boxes, whose coordinates have 32 bits."""

L2_BYTES = 8 << 20
"""Of keys and values that surely stay in L2 while they are worked on."""

HEAD_CTAS = 5
"""Teams that work on one head at a time: they read its keys at about the same time, so that L2 has them for all but the first."""


def unsupported_size(name: str, x: torch.Tensor) -> str | None:
    """Why kernels can't count the tokens of x (B, H, S, D), or its tiles, or None if they can."""
    batch, heads, length, _ = x.shape
    if length >= MOST_TOKENS:
        return f"{name} has {length} tokens; kernels take fewer than {MOST_TOKENS}"
    tiles = batch * heads * -(-length // LEAST_ROWS)
    if tiles >= MOST_TILES:
        return f"{name} has {tiles} tiles of {LEAST_ROWS} tokens in {batch} x {heads} heads; kernels take fewer than {MOST_TILES}"
    return None


def unsupported_sizes(call: Call) -> str | None:
    """Why kernels can't count a call's tokens or tiles, or None if they can."""
    return unsupported_size("query", call.q) or unsupported_size("key", call.k)


def unsupported_boxes(call: Call) -> str | None:
    """Why TMA can't count a call's tokens, tiles or channels, or None if it can."""
    channels = call.batch * call.kv_heads * call.value_dim
    reason = unsupported_sizes(call)
    if reason is None and channels >= MOST_CHANNELS:
        return f"value has {channels} channels in {call.batch} x {call.kv_heads} heads; TMA takes fewer than {MOST_CHANNELS}"
    return reason


def heads_side_by_side(call: Call, teams: int) -> int:
    """Heads whose tiles the schedule mixes: many, so that long tiles come first, but no more than L2 serves.

    Of a call that isn't causal all tiles are as long, and the heads of one key/value head are enough.
    """
    sharing = call.q_heads // call.kv_heads
    if call.causal == "none":
        return sharing
    heads = call.batch * call.kv_heads
    in_l2 = L2_BYTES // (call.kv_length * (call.head_dim + call.value_dim))
    mixed = max(in_l2, teams // HEAD_CTAS // sharing, 1)
    groups = -(-heads // mixed)  # as large as each other: a small one at the end would have long tiles late
    return sharing * -(-heads // groups)
