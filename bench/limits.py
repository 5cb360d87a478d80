"""The least time that a GPU's units need for a problem, each from a measured ceiling: what a kernel's time is a share of."""

from __future__ import annotations

from dataclasses import dataclass

from fp8attn.device import Ceilings, Device, ceilings_of

from .cases import Case


@dataclass(frozen=True)
class Limit:
    """Microseconds of a case in e4m3 on one GPU, had each unit the GPU to itself.

    The model counts what no schedule avoids: two products on the tensor cores, one exponential a visible score in the cheapest
    form that was measured, inputs and outputs crossing device memory once. Starts and ends of tiles, launches, quantization and
    everything that units wait for each other are left out, so the share of it that a kernel reaches is less than 1.
    """

    tensor_us: float
    exponential_us: float
    memory_us: float

    @property
    def us(self) -> float:
        """The largest of the three."""
        return max(self.tensor_us, self.exponential_us, self.memory_us)

    @property
    def by(self) -> str:
        """Which of the three it is."""
        times = {"tensor": self.tensor_us, "exponential": self.exponential_us, "memory": self.memory_us}
        return max(times, key=lambda name: times[name])


def limit_from(case: Case, ceilings: Ceilings, sm_count: int) -> Limit:
    """The limit of a case; causal ones have half the scores, as in their FLOPs."""
    clocks_per_us = ceilings.clock_hz * sm_count / 1e6
    scores = case.scores / (2 if case.causal else 1)
    return Limit(
        tensor_us=case.flops / ceilings.tensor_flop_per_clk / clocks_per_us,
        exponential_us=scores / max(ceilings.exact_exponentials_per_clk, ceilings.codes_per_clk) / clocks_per_us,
        memory_us=case.least_bytes / ceilings.dram_bytes_per_s * 1e6,
    )


def limit_of(case: Case, device: Device) -> Limit | None:
    """The limit of a case on a device, or None if nobody measured its ceilings."""
    ceilings = ceilings_of(device)
    return None if ceilings is None else limit_from(case, ceilings, device.sm_count)
