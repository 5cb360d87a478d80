"""The fused quantizer compared with the bandwidth of a copy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import fp8attn
from fp8attn import Quantized

from .cases import HIDDEN, TOKENS, Case, Tensors, inputs, square
from .timing import Protocol, Timing, time_all

COPIED_BYTES = 1 << 30
"""Bytes of the tensor that is copied on a GPU. The interpreter's run copies less, because its bandwidth means
nothing."""

ON_GPU = tuple(
    square(f"D{dim} {length // 1024}k", TOKENS // length, HIDDEN // dim, length, dim) for dim in (64, 128, 256) for length in (4096, 16384)
)
IN_INTERPRETER = tuple(square(f"D{dim} 256", 1, 2, 256, dim) for dim in (64, 128))


def cases(gpu: bool) -> tuple[Case, ...]:
    return ON_GPU if gpu else IN_INTERPRETER


def traffic(tensors: Tensors, quantized: tuple[Quantized, ...]) -> int:
    """Bytes that the algorithm must move: q and k are read once, v twice (for its statistics and for writing), and all
    results are written once."""
    q, k, v = tensors
    written = sum(x.data.nbytes + x.scale.nbytes + (0 if x.mean is None else x.mean.nbytes) for x in quantized)
    return q.nbytes + k.nbytes + 2 * v.nbytes + written


@dataclass(frozen=True)
class Result:
    """One case: bytes moved and their time, and a copy in the same run."""

    case: Case
    traffic: int
    timing: Timing
    copied: int
    copy_timing: Timing

    @property
    def gb_per_s(self) -> float:
        return self.traffic / self.timing.p50_us / 1e3

    @property
    def copy_gb_per_s(self) -> float:
        """Bytes read plus bytes written."""
        return self.copied / self.copy_timing.p50_us / 1e3

    def record(self) -> dict[str, Any]:
        return {
            **self.case.record(),
            **dataclasses.asdict(self.timing),
            "bytes": self.traffic,
            "gb_per_s": self.gb_per_s,
            "copy_gb_per_s": self.copy_gb_per_s,
            "share_of_copy": self.gb_per_s / self.copy_gb_per_s,
        }


def measure(case: Case, protocol: Protocol, device: torch.device) -> Result:
    """Quantize and copy in turns. The inputs are larger than L2, so one set of them is cold."""
    tensors = inputs(case, "normal", device)
    source = torch.ones((COPIED_BYTES if device.type == "cuda" else 1 << 24) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    runs = {"quantize": lambda i: fp8attn.quantize(*tensors), "copy": lambda i: target.copy_(source)}
    timed = time_all(runs, 1, protocol, device)
    return Result(case, traffic(tensors, fp8attn.quantize(*tensors)), timed["quantize"].timing, 2 * source.nbytes, timed["copy"].timing)
