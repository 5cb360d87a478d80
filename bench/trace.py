"""What a GPU does in a call: the time of its kernels, by what they are for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("hopper_forward", "portable_forward", "attention_kernel", "forward_kernel", "fused_small", "fused_head"),
    "merging": ("merge_kernel",),
    "quantization": ("measure_kv", "finish_kv", "write_kv", "quantize", "gather_kernel", "finish_kernel", "write_kernel"),
    "transfers": ("nccl",),
}
"""What kernels are for, by what their names contain. The rest is `others`."""

NOTHING = "nothing"
"""Time in which no kernel runs."""

ORDER = ("attention", "merging", "quantization", "others", "transfers", NOTHING)
"""Where several kernels run, the time counts for the first of their parts: that of `transfers` is what nothing hides."""


class Kernel(NamedTuple):
    """A kernel that ran, or a copy.

    Attributes:
        start, end: microseconds.
    """

    start: float
    end: float
    name: str


def part_of(name: str) -> str:
    """What a kernel is for."""
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "others")


def shares(kernels: Sequence[Kernel], start: float) -> dict[str, float]:
    """Microseconds of every part, from `start` to the last kernel's end.

    Kernels on several streams may overlap.
    """
    found = dict.fromkeys(ORDER, 0.0)
    if not kernels:
        return found
    times = sorted({start, *(max(time, start) for kernel in kernels for time in kernel[:2])})
    for begin, end in itertools.pairwise(times):
        running = {part_of(kernel.name) for kernel in kernels if kernel.start < end and kernel.end > begin}
        found[next((part for part in ORDER if part in running), NOTHING)] += end - begin
    return found


def of_last_calls(kernels: Sequence[Kernel], calls: int, last: int) -> dict[str, float]:
    """Microseconds of every part of a call: the mean of the last of some calls, which all launch as many kernels.

    Args:
        kernels: of `calls` calls, by start.
        last: how many of them count.

    Raises:
        ValueError: the kernels can't be those of so many calls.
    """
    if not kernels or len(kernels) % calls:
        raise ValueError(f"there are {len(kernels)} kernels; there must be a multiple of {calls}, one or more for each call")
    first = len(kernels) // calls * (calls - last)
    start = max(kernel.end for kernel in kernels[:first]) if first else kernels[0].start
    return {part: us / last for part, us in shares(kernels[first:], start).items()}


def traced(call: Callable[[], object], lead_in: int, calls: int) -> dict[str, float]:
    """`of_last_calls` of calls on the current GPU.

    Args:
        lead_in: calls before those that count. They are traced, too: the profiler begins with a pause.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(lead_in + calls):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # a collective is there twice: as a kernel, and as a range
    kernels = [Kernel(event.time_range.start, event.time_range.end, event.name) for event in events if not event.name.startswith("nccl:")]
    return of_last_calls(sorted(kernels), lead_in + calls, calls)
