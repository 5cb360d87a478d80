"""Compile the Triton kernels for an architecture that isn't here, through the same launch code that runs them."""

from __future__ import annotations

from contextlib import contextmanager

import triton
from triton.backends.compiler import GPUTarget


class OfflineDriver:
    """As much of a GPU driver as a launch with warmup=True asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached by device: one for each architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def architecture(arch: int):
    """Inside, Triton believes in a GPU of this architecture; only launches with warmup=True work."""
    driver = triton.runtime.driver
    before = driver._active  # None before first use; asking for the default fails without a GPU
    driver.set_active(OfflineDriver(arch))
    try:
        yield
    finally:
        driver.set_active(before)
