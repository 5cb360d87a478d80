"""Collectives of byte buffers, and the ring that passes a buffer on while attention to the last one runs.

All buffers are uint8 (bytes,) on the tensors' device. On GPUs, transfers are issued on a stream of their own, so that
they wait for what was launched before them and for nothing that is launched after.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Transfer:
    """A transfer under way. `wait` gives the received buffer, to be used on the current stream."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, works: Sequence[dist.Work], stream: torch.cuda.Stream | None) -> None:
        self._sent, self._received, self._works, self._stream = sent, received, works, stream

    def wait(self) -> torch.Tensor:
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for work in self._works:
                work.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._received.device).wait_stream(self._stream)
        return self._received


@contextlib.contextmanager
def _on_side_stream(*buffers: torch.Tensor):
    """Make the side stream current, which waits for the current one. Yields it, or None without a GPU."""
    device = buffers[0].device
    if device.type != "cuda":
        yield None
        return
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for buffer in buffers:
        buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        yield stream


def start_shift(sent: torch.Tensor, size: int, group: dist.ProcessGroup) -> Transfer:
    """Begin to send a buffer to the next rank of a ring, and to receive one of `size` bytes from the previous rank."""
    received = sent.new_empty(size)
    rank, ranks = group.rank(), group.size()
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks))
    if size:
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks))
    with _on_side_stream(sent, received) as stream:
        works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(sent, received, works, stream)


def start_gather(sent: torch.Tensor, size: int, group: dist.ProcessGroup) -> Transfer:
    """Begin to gather the buffers of all ranks, each of which is at most `size` bytes long. They are received one
    after another, `size` bytes each."""
    padded = sent
    if sent.numel() < size:
        padded = sent.new_empty(size)
        padded[: sent.numel()] = sent
    received = sent.new_empty(size * group.size())
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    with _on_side_stream(padded, received) as stream:
        works = [gather(received, padded, group=group, async_op=True)] if size else []
    return Transfer(padded, received, works, stream)


def exchange(sent: torch.Tensor, sizes: Sequence[int], received_sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-to-all: the buffers that the ranks have for this one.

    Args:
        sent: the buffers for all ranks, one after another.
        sizes: their bytes.
        received_sizes: bytes of the buffer from every rank.
    """
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, list(received_sizes), list(sizes), group=group)
    return list(received.split(list(received_sizes)))
