"""The process that Nsight Compute profiles: one warmed-up call, between the profiler's start and stop. bench.profile
starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fp8attn import api

from . import adapters
from .cases import Case
from .peers import Problem

WARM_UP_CALLS = 3


def nothing(*_: object) -> None:
    """In place of functions that look calls up, or keep them."""


@contextmanager
def named_ranges() -> Iterator[None]:
    """Inside, calls go through operators, and quantization and attention are NVTX ranges.

    Outside, ranges cost nothing.
    """
    by_operators = mock.patch.multiple(api.ops, library_ops=Ranged(api.ops.library_ops), is_plain=lambda: False)
    not_kept = mock.patch.multiple(api.eager, repeat=nothing, record=nothing, remember=nothing)
    with by_operators, not_kept:
        yield


class Ranged:
    """fp8attn's operators, each in an NVTX range: `quantize`, or `forward` for any backend."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._library, name)
        label = "forward" if name.endswith("_forward") else name

        def ranged(*args: Any, **options: Any) -> Any:
            torch.cuda.nvtx.range_push(label)
            try:
                return operator(*args, **options)
            finally:
                torch.cuda.nvtx.range_pop()

        return ranged


def main(words: str) -> None:
    """Run the profiled call.

    Args:
        words: a JSON object with the fields of `case`, the `peer`'s name and the `distribution`.
    """
    asked = json.loads(words)
    device = torch.device("cuda", torch.cuda.current_device())
    peer = next(peer for peer in adapters.PEERS if peer.name == asked["peer"])
    attention = peer.prepare(Problem.of(Case(**asked["case"]), asked["distribution"], device, rotate=False))
    with named_ranges():
        for _ in range(WARM_UP_CALLS):
            attention(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        attention(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
