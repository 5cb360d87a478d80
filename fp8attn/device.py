"""What a GPU is and can do, as far as kernels and configs care."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """One GPU, or an architecture without a GPU at hand.

    Attributes:
        name: marketing name, the key of the shipped config tables.
        arch: compute capability as one integer, 90 for 9.0.
        sm_count: number of multiprocessors.
        shared_memory: bytes of shared memory that one thread block can have.
        emulated: whether this is Triton's interpreter, which computes what the architecture would.
    """

    name: str
    arch: int
    sm_count: int
    shared_memory: int
    emulated: bool = False

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may be launched before the one before it has ended, and waits for it by itself."""
        return self.arch >= 90 and not self.emulated

    @property
    def has_fp8_units(self) -> bool:
        """Whether the tensor cores multiply e4m3 (Ada, Hopper, Blackwell)."""
        return self.arch >= 89

    @property
    def has_short_accumulators(self) -> bool:
        """Whether FP8 tensor cores accumulate with fewer mantissa bits than float32.

        About 13 bits on Ada and Hopper (SageAttention2, arXiv:2411.10958, section 3.3; DeepSeek-V3, arXiv:2412.19437,
        section 3.3.2); the datacenter Blackwell accumulates in float32. Consumer Blackwell is treated as Ada.
        """
        return self.has_fp8_units and self.arch // 10 not in (10, 11)


SHARED_MEMORY = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Largest shared memory of one thread block in bytes, by architecture (CUDA C++ Programming Guide, compute capabilities)."""

ARCHITECTURES = {
    80: Device("NVIDIA A100-SXM4-80GB", 80, 108, SHARED_MEMORY[80]),
    89: Device("NVIDIA L40S", 89, 142, SHARED_MEMORY[89]),
    90: Device("NVIDIA H100 80GB HBM3", 90, 132, SHARED_MEMORY[90]),
    100: Device("NVIDIA B200", 100, 148, SHARED_MEMORY[100]),
    120: Device("NVIDIA GeForce RTX 5090", 120, 170, SHARED_MEMORY[120]),
}
"""A typical GPU of every architecture the kernels are compiled and tested for."""


@dataclass(frozen=True)
class Ceilings:
    """What one GPU was measured to do at most, each unit busy by itself.

    Attributes:
        tensor_flop_per_clk: of one SM's tensor cores on e4m3, float32 accumulators; a multiply-add is two.
        exact_exponentials_per_clk: ex2.approx results of one SM, float32.
        codes_per_clk: e4m3 codes of 2^x of one SM, written directly without the MUFU unit.
        clock_hz: that is sustained while the tensor cores are saturated: such a card is power-capped. Lighter work clocks higher.
        dram_bytes_per_s: read from device memory.
    """

    tensor_flop_per_clk: int
    exact_exponentials_per_clk: float
    codes_per_clk: float
    clock_hz: float
    dram_bytes_per_s: float


CEILINGS = {
    # 1630 TFLOP/s sustained; the clock is what that takes at 8192 FLOP/clk and SM
    "NVIDIA H100 80GB HBM3": Ceilings(8192, 16.0, 57.0, 1630e12 / (8192 * 132), 3.1e12),
}
"""By the GPU's name; micro-benchmarks, CUDA 13.0, 700 W. A GPU that nobody measured has none."""


def ceilings_of(device: Device) -> Ceilings | None:
    """The measured ceilings of a GPU, or None if there are none."""
    return None if device.emulated else CEILINGS.get(device.name)


INTERPRETER = Device("Triton interpreter", 90, 1, SHARED_MEMORY[90], emulated=True)
"""What kernels see on a machine without a GPU: an H100's numerics, one program at a time."""


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
    """The `Device` behind a torch device; CPU tensors run in Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)
