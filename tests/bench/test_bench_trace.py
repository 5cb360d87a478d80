"""Where the time of a call goes, by its kernels."""

from __future__ import annotations

import itertools

import pytest

from bench import distributed
from bench.cases import square
from bench.distributed import Traced
from bench.trace import NOTHING, ORDER, Kernel, of_last_calls, part_of, shares

ATTENTION, MERGE, WRITE, COPY, NCCL = (
    "void fp8attn::hopper_forward<fp8attn::hopper_128>", "merge_kernel", "void fp8attn::write_kv<fp8attn::quantize_1_3>",
    "void at::native::elementwise_kernel", "ncclDevKernel_AllGather_RING_LL",
)  # fmt: skip


def test_what_kernels_are_for() -> None:
    assert [part_of(name) for name in (ATTENTION, MERGE, WRITE, COPY, NCCL, "Memset (Device)", "gather_kernel")] == [
        "attention", "merging", "quantization", "others", "transfers", "others", "quantization",
    ]  # fmt: skip


def test_time_counts_once() -> None:
    """For the first part of those that run: a transfer beside attention is hidden. Before the first kernel and between kernels nothing runs."""
    kernels = [Kernel(10, 30, WRITE), Kernel(25, 80, NCCL), Kernel(40, 70, ATTENTION), Kernel(60, 75, ATTENTION), Kernel(90, 95, COPY)]
    found = shares(kernels, 5)
    assert found == {"attention": 35, "merging": 0, "quantization": 20, "others": 5, "transfers": 15, NOTHING: 15}
    assert sum(found.values()) == 95 - 5 and list(found) == list(ORDER)
    assert set(shares([], 0).values()) == {0.0}


def test_the_last_calls_count() -> None:
    """From the end of the last kernel of the calls before: a pause in between counts."""
    calls = [[Kernel(at, at + 10, WRITE), Kernel(at + 10, at + length, ATTENTION)] for at, length in ((0, 100), (120, 60), (185, 60))]
    found = of_last_calls([*itertools.chain(*calls)], 3, 2)
    assert found["attention"] == 50 and found["quantization"] == 10 and found[NOTHING] == (20 + 5) / 2
    assert of_last_calls(calls[0], 1, 1)[NOTHING] == 0
    for kernels in ([], calls[0] + calls[1][:1]):
        with pytest.raises(ValueError, match="there must be a multiple of 2"):
            of_last_calls(kernels, 2, 1)


def test_the_table() -> None:
    us = dict.fromkeys(ORDER, 1.0) | {"attention": 200.0}
    made = distributed.trace_table(square("small", 1, 4, 1024, 64), [Traced("fp8attn ring", rank, us) for rank in (0, 1)])
    cells = [list(column.cells) for column in made.columns]
    assert [column[1] for column in cells] == ["fp8attn ring", "1", "200.0", *["1.0"] * 5, "205.0"]
