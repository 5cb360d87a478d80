"""The least time that a GPU's units need for a problem, from measured ceilings. A kernel's time is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from fp8attn.device import Ceilings, Device, ceilings_of

from .cases import Case


@dataclass(frozen=True)
class Limit:
    """Microseconds of a case in e4m3 on one GPU, if each unit had the GPU to itself.

    The model counts what no schedule avoids: two products on the tensor cores, one exponential per visible score in the
    cheapest form that was measured, and inputs and outputs that cross device memory once. It leaves out starts and ends
    of tiles, launches, quantization, and all waiting of units for each other. So a kernel reaches less than all of it.
    """

    tensor_us: float
    exponential_us: float
    memory_us: float

    @property
    def us(self) -> float:
        """The largest of the three times."""
        return max(self.tensor_us, self.exponential_us, self.memory_us)

    @property
    def by(self) -> str:
        """The unit with the largest time."""
        times = {"tensor": self.tensor_us, "exponential": self.exponential_us, "memory": self.memory_us}
        return max(times, key=lambda name: times[name])


def limit_from(case: Case, ceilings: Ceilings, sm_count: int) -> Limit:
    """The limit of a case. Causal cases have half the scores, as in their FLOPs."""
    clocks_per_us = ceilings.clock_hz * sm_count / 1e6
    scores = case.scores / (2 if case.causal else 1)
    return Limit(
        tensor_us=case.flops / ceilings.tensor_flop_per_clk / clocks_per_us,
        exponential_us=scores / max(ceilings.exact_exponentials_per_clk, ceilings.codes_per_clk) / clocks_per_us,
        memory_us=case.least_bytes / ceilings.dram_bytes_per_s * 1e6,
    )


def limit_of(case: Case, device: Device) -> Limit | None:
    """The limit of a case on a device, or None if the device's ceilings weren't measured."""
    ceilings = ceilings_of(device)
    return None if ceilings is None else limit_from(case, ceilings, device.sm_count)
