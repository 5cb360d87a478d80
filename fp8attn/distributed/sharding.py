"""Which tokens of a sequence a rank has, and the helpers that shard and gather them.

`contiguous`: rank r has the r-th run of tokens. `zigzag`: the sequence is cut into 2n chunks, and rank r of n has the
chunks r and 2n - 1 - r. With a causal mask, all ranks then have the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Sharding = Literal["contiguous", "zigzag"]
SHARDINGS: tuple[Sharding, ...] = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of a sequence.

    Attributes:
        first: position of the first token.
        length: number of tokens.
    """

    first: int
    length: int


Spans = tuple[Span, ...]
"""The tokens of a shard in the order in which the rank holds them."""


def balanced(total: int, parts: int) -> list[int]:
    """Lengths of `parts` runs of tokens, as torch.tensor_split makes them: they differ by at most 1, longer ones
    first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def check_sharding(sharding: object) -> None:
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding is {sharding!r}; it must be one of {SHARDINGS}")


def _chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Indices of a rank's chunks in zig-zag order."""
    return rank, 2 * ranks - 1 - rank


def shard_lengths(total: int, ranks: int, sharding: Sharding = "contiguous") -> list[int]:
    """Tokens of every rank, as `shard` gives them.

    Args:
        total: tokens of the sequence.
        ranks: number of ranks.
        sharding: `contiguous` or `zigzag`.

    Raises:
        ValueError: `sharding` is neither.
    """
    check_sharding(sharding)
    if sharding == "contiguous":
        return balanced(total, ranks)
    chunks = balanced(total, 2 * ranks)
    return [sum(chunks[i] for i in _chunks_of(rank, ranks)) for rank in range(ranks)]


def spans_of(lengths: Sequence[int], sharding: Sharding, name: str = "x") -> list[Spans]:
    """The tokens of every rank, by the ranks' numbers of tokens.

    Raises:
        ValueError: these aren't the lengths of shards in zig-zag order. `name` is what the error calls the tensor.
    """
    if sharding == "zigzag" and list(lengths) != (wanted := shard_lengths(sum(lengths), len(lengths), sharding)):
        raise ValueError(f"{name} has {list(lengths)} tokens on the ranks; in zig-zag order it must have {wanted}")
    total, ranks = sum(lengths), len(lengths)
    parts = list(lengths) if sharding == "contiguous" else balanced(total, 2 * ranks)
    starts = [sum(parts[:i]) for i in range(len(parts))]
    spans = [Span(first, length) for first, length in zip(starts, parts, strict=True)]
    if sharding == "contiguous":
        return [(span,) for span in spans]
    return [tuple(spans[i] for i in _chunks_of(rank, ranks)) for rank in range(ranks)]


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError("group is None and there is no default group; call torch.distributed.init_process_group before")
    return found


def groups_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """This rank's groups, the innermost one first.

    Raises:
        TypeError, ValueError: group or mesh isn't as `context_parallel_sdpa` says.
        RuntimeError: there is no group.
    """
    if mesh is None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a {type(group).__name__}; it must be a torch.distributed.ProcessGroup that this rank is in")
        return (group_of(group),)
    if group is not None:
        raise ValueError("group and mesh are given; only one of them can be")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} dimensions; it must have 1, or 2: the ring's and Ulysses'")
    return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)))


def shard(x: torch.Tensor, *, group: dist.ProcessGroup | None = None, dim: int = 2, sharding: Sharding = "contiguous") -> torch.Tensor:
    """The tokens of this rank.

    Args:
        x: a tensor with a dimension of all tokens, the same on every rank. For example q (B, H, S, D), or position ids.
        group: the ranks; the default group if None.
        dim: the dimension of tokens.
        sharding: `contiguous` or `zigzag`.

    Returns:
        x with S / n tokens, one more on the first ranks if n doesn't divide S. A view if `contiguous`.

    Raises:
        ValueError: `sharding` is neither.
        RuntimeError: there is no group.
    """
    check_sharding(sharding)
    members = group_of(group)
    lengths = shard_lengths(x.shape[dim], members.size(), sharding)
    parts = [x.narrow(dim, span.first, span.length) for span in spans_of(lengths, sharding)[members.rank()]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    x: torch.Tensor, *, group: dist.ProcessGroup | None = None, dim: int = 2, sharding: Sharding = "contiguous", lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """The tokens of all ranks in the order of the sequence, on every rank: the inverse of `shard`.

    Args:
        x: this rank's tensor. Its other dimensions and its dtype are the same on every rank.
        group, dim, sharding: as of `shard`.
        lengths: tokens of every rank. None: they are exchanged first, which waits for the device.

    Raises:
        ValueError: `sharding` is neither, or the shards can't be in zig-zag order.
        RuntimeError: there is no group.
    """
    check_sharding(sharding)
    members = group_of(group)
    if lengths is None:
        counts = [torch.empty(1, dtype=torch.int64, device=x.device) for _ in range(members.size())]
        dist.all_gather(counts, torch.tensor([x.shape[dim]], dtype=torch.int64, device=x.device), group=members)
        lengths = [int(count) for count in counts]
    places = spans_of(lengths, sharding)
    rows = x.movedim(dim, 0)
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=members)
    parts: dict[int, torch.Tensor] = {}
    for spans, part in zip(places, found, strict=True):
        start = 0
        for span in spans:
            if span.length:
                parts[span.first] = part[start : start + span.length]
            start += span.length
    ordered = [parts[first] for first in sorted(parts)] or [padded]
    return torch.cat(ordered).movedim(0, dim)
