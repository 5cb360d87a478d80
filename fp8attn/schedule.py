"""In which order tiles of queries are worked on: what both backends' persistent kernels are told."""

from __future__ import annotations

from .call import Call

L2_BYTES = 8 << 20
"""Of keys and values that surely stay in L2 while they are worked on."""

SHARERS = 5
"""Teams that work on one head at a time: they read its keys at about the same time, so that L2 has them for all but the first."""


def heads_side_by_side(call: Call, teams: int) -> int:
    """Heads whose tiles the schedule mixes: many, so that long tiles come first, but no more than L2 serves.

    Of a call that isn't causal all tiles are as long, and the heads of one key/value head are enough.
    """
    sharing = call.q_heads // call.kv_heads
    if call.causal == "none":
        return sharing
    heads = call.batch * call.kv_heads
    in_l2 = L2_BYTES // (call.kv_length * (call.head_dim + call.value_dim))
    mixed = max(in_l2, teams // SHARERS // sharing, 1)
    groups = -(-heads // mixed)  # as large as each other: a small one at the end would have long tiles late
    return sharing * -(-heads // groups)
