"""Properties of a GPU that kernels and configs depend on."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
"""Whether Triton's kernels run in its interpreter. The environment decides it when they are decorated."""


@dataclass(frozen=True)
class Device:
    """One GPU, or an architecture without a GPU at hand.

    Attributes:
        name: marketing name, the key of the tables of shipped configs.
        arch: compute capability as one integer, 90 for 9.0.
        sm_count: number of multiprocessors.
        shared_memory: maximum bytes of shared memory of one thread block.
        emulated: whether this is Triton's interpreter, which computes what the architecture would compute.
    """

    name: str
    arch: int
    sm_count: int
    shared_memory: int
    emulated: bool = False

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start before the previous one has ended, and wait for its results itself (programmatic
        dependent launch)."""
        return self.arch >= 90 and not self.emulated

    @property
    def has_fp8_units(self) -> bool:
        """Whether the tensor cores multiply e4m3 (Ada, Hopper, Blackwell)."""
        return self.arch >= 89

    @property
    def has_short_accumulators(self) -> bool:
        """Whether FP8 tensor cores accumulate with fewer mantissa bits than float32.

        They keep about 13 bits on Ada and Hopper (SageAttention2, arXiv:2411.10958, section 3.3; DeepSeek-V3,
        arXiv:2412.19437, section 3.3.2). Datacenter Blackwell accumulates in float32. Consumer Blackwell is treated as
        Ada.
        """
        return self.has_fp8_units and self.arch // 10 not in (10, 11)


SHARED_MEMORY = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Maximum shared memory of one thread block in bytes, by architecture (CUDA C++ Programming Guide, compute
capabilities)."""

ARCHITECTURES = {
    80: Device("NVIDIA A100-SXM4-80GB", 80, 108, SHARED_MEMORY[80]),
    89: Device("NVIDIA L40S", 89, 142, SHARED_MEMORY[89]),
    90: Device("NVIDIA H100 80GB HBM3", 90, 132, SHARED_MEMORY[90]),
    100: Device("NVIDIA B200", 100, 148, SHARED_MEMORY[100]),
    120: Device("NVIDIA GeForce RTX 5090", 120, 170, SHARED_MEMORY[120]),
}
"""A typical GPU of every architecture for which the kernels are compiled and tested."""


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of one GPU, each with only this unit busy.

    Attributes:
        tensor_flop_per_clk: FLOP per clock of one SM's tensor cores, e4m3 with float32 accumulators; a multiply-add
            counts as two.
        exact_exponentials_per_clk: float32 results of ex2.approx per clock and SM.
        codes_per_clk: e4m3 codes of 2^x per clock and SM, computed directly without the MUFU unit.
        clock_hz: the sustained clock while the tensor cores are saturated and the card is power-capped. Lighter work
            clocks higher.
        dram_bytes_per_s: bytes per second read from device memory.
    """

    tensor_flop_per_clk: int
    exact_exponentials_per_clk: float
    codes_per_clk: float
    clock_hz: float
    dram_bytes_per_s: float


CEILINGS = {
    # 1630 TFLOP/s sustained; the clock is the one that gives this rate at 8192 FLOP per clock and SM
    "NVIDIA H100 80GB HBM3": Ceilings(8192, 16.0, 57.0, 1630e12 / (8192 * 132), 3.1e12),
}
"""Ceilings by the GPU's name. Micro-benchmarks, CUDA 13.0, 700 W. GPUs that weren't measured have no entry."""


def ceilings_of(device: Device) -> Ceilings | None:
    """The measured ceilings of a GPU, or None if there are none."""
    return None if device.emulated else CEILINGS.get(device.name)


INTERPRETER = Device("Triton interpreter", 90, 1, SHARED_MEMORY[90], emulated=True)
"""The device that kernels see on a machine without a GPU: an H100's numerics, one program at a time."""


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)
    arch = properties.major * 10 + properties.minor
    return Device(
        name=properties.name,
        arch=arch,
        sm_count=properties.multi_processor_count,
        shared_memory=shared_memory or SHARED_MEMORY.get(arch, 101_376),
    )


def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device. CPU tensors run in Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)
