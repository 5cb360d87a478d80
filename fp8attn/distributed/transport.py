"""Collectives of byte buffers, and the ring that passes a buffer on while attention to the last one runs.

All buffers are uint8 (bytes,) on the tensors' device. On GPUs, transfers are issued on a stream of their own, so that
they wait for what was launched before them and for nothing that is launched after.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist


@functools.cache
def _side_stream(device: torch.device, name: str = "transfers") -> torch.cuda.Stream:
    # with priority: a transfer's kernel starts while kernels that were launched before it still have CTAs to start
    return torch.cuda.Stream(device, priority=-1 if name == "transfers" else 0)


class Lanes:
    """Two streams of a GPU, for kernels that do not depend on each other: one's CTAs start where the other's end.

    Lane 0 is the stream that was current. Lane 1 waits for what was launched before.
    """

    def __init__(self, device: torch.device) -> None:
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = _side_stream(device, "attention")
            self._side.wait_stream(torch.cuda.current_stream(device))

    def lane(self, index: int) -> contextlib.AbstractContextManager[object]:
        """Make lane 0 or 1 current."""
        return torch.cuda.stream(self._side) if index and self._side is not None else contextlib.nullcontext()

    def join(self) -> None:
        """Make lane 0, which is current, wait for lane 1."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


class Transfer:
    """A transfer under way. `wait` gives the received buffer, to be used on the current stream."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, works: Sequence[dist.Work], stream: torch.cuda.Stream | None) -> None:
        self._sent, self.received, self._works, self._arrived = sent, received, works, None
        if stream is not None:
            with torch.cuda.stream(stream):
                self._wait_for_works()
            self._arrived = stream.record_event()

    def wait(self) -> torch.Tensor:
        if self._arrived is None:
            self._wait_for_works()
        else:
            torch.cuda.current_stream(self.received.device).wait_event(self._arrived)
        return self.received

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


def launched(device: torch.device) -> torch.cuda.Event | None:
    """What was launched on the current stream so far; None without a GPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def _on_side_stream(*buffers: torch.Tensor, after: torch.cuda.Event | None):
    """Make the side stream current, which waits for `after`. Yields it, or None without a GPU."""
    device = buffers[0].device
    if device.type != "cuda":
        yield None
        return
    stream = _side_stream(device)
    if after is not None:
        stream.wait_event(after)
    for buffer in buffers:
        buffer.record_stream(stream)
    with torch.cuda.stream(stream):
        yield stream


SLEEP_CYCLES = 30_000
"""About 20 µs: several times what NCCL's kernel needs from the end of quantization to its start."""


def let_transfers_start(device: torch.device) -> None:
    """Keep the current stream from launching attention before the kernel of a transfer that was issued has its
    multiprocessors. Both wait for the same quantizer, and attention's kernel takes all that are free until it ends."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)


class Ring:
    """Buffers of all ranks, passed around a ring. Iterating gives this rank's own, then those of the ranks before it.

    A buffer is sent on as soon as it has come, and not when attention to the one before is done. Attention's kernel
    takes all multiprocessors: only a transfer that waits for one already when the kernel is launched runs beside it.
    """

    SLOTS = 4
    """Buffers are received in so many places, in turns. One is free when attention to what was there is done, which is
    two steps before attention to what comes next."""

    def __init__(self, own: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
        """Begin to send `own`.

        Args:
            sizes: bytes of all buffers, in the order in which they come: own's first.
        """
        self._own, self._sizes, self._group = own, sizes, group
        self._slots = [own.new_empty(max(sizes)) for _ in range(min(self.SLOTS, len(sizes) - 1))]
        self._transfers: list[Transfer] = []
        self._used: list[torch.cuda.Event | None] = []
        for _ in range(2):
            self._start_next()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(len(self._sizes)):
            buffer = self._transfers[step - 1].wait() if step else self._own
            stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
            yield buffer
            self._used.append(None if stream is None else stream.record_event())
            self._start_next()

    def _start_next(self) -> None:
        index, rank, ranks = len(self._transfers), self._group.rank(), self._group.size()
        if index + 1 >= len(self._sizes):
            return
        sent = self._transfers[-1].received if index else self._own
        received = self._slots[index % self.SLOTS][: self._sizes[index + 1]]
        after = None  # nothing that `own`'s transfer doesn't wait for
        if index == 0:
            after = launched(sent.device)
        elif index >= self.SLOTS:
            after = self._used[index + 1 - self.SLOTS]
        with _on_side_stream(sent, received, after=after) as stream:
            if index and stream is None:
                self._transfers[-1].wait()
            operations = []
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=(rank + 1) % ranks))
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, received, group=self._group, group_peer=(rank - 1) % ranks))
            works = dist.batch_isend_irecv(operations) if operations else []
        self._transfers.append(Transfer(sent, received, works, stream))


def ring_steps(size: int, sees: Callable[[int, int], bool]) -> int:
    """Steps of a ring of `size` ranks until no rank sees what comes later; 0 if none sees any, also of its own.

    Args:
        sees: of a rank, and of the one that a buffer is from.
    """
    return max((step + 1 for step in range(size) for rank in range(size) if sees(rank, (rank - step) % size)), default=0)


def start_gather(sent: torch.Tensor, size: int, group: dist.ProcessGroup) -> Transfer:
    """Begin to gather the buffers of all ranks, each of which is at most `size` bytes long. They are received one
    after another, `size` bytes each."""
    padded = sent
    if sent.numel() < size:
        padded = sent.new_empty(size)
        padded[: sent.numel()] = sent
    return _start_gather(padded, sent.new_empty(size * group.size()), group)


def start_gather_slots(slots: torch.Tensor, group: dist.ProcessGroup) -> Transfer:
    """Begin to bring what the other ranks have written into their slots.

    Args:
        slots: (ranks, bytes), with a slot for every rank.
    """
    own = slots[group.rank()]
    return _start_gather(own if own.is_cuda else own.clone(), slots.view(-1), group)


def _start_gather(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> Transfer:
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    with _on_side_stream(sent, received, after=launched(sent.device)) as stream:
        # NCCL's kernel runs on the current stream if the call isn't asynchronous
        work = gather(received, sent, group=group, async_op=stream is None) if sent.numel() else None
    return Transfer(sent, received, [] if work is None else [work], stream)


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
