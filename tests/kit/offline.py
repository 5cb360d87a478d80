"""Compiles the Triton kernels for an architecture without its GPU, with the launch code that also runs them."""

from __future__ import annotations

from contextlib import contextmanager

import triton
from triton.backends.compiler import GPUTarget


class OfflineDriver:
    """The part of a GPU driver that a launch with warmup=True uses."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached by device, so each architecture is a device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def architecture(arch: int):
    """Inside, Triton assumes a GPU of this architecture. Only launches with warmup=True work."""
    driver = triton.runtime.driver
    before = driver._active  # None before first use; asking for the default driver fails without a GPU
    driver.set_active(OfflineDriver(arch))
    try:
        yield
    finally:
        driver.set_active(before)
