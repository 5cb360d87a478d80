"""Keeps the process's settings out of the numerics: autocast, function modes (torch.set_default_device is one), TF32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")
"""Device types of the operators, whose autocast is switched off inside."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast gives to attention on a device, or None outside of autocast."""
    if device.type not in DEVICES or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


def shielded(implementation: Callable[..., Result]) -> Callable[..., Result]:
    """An operator's implementation that neither autocast nor function modes reach. Both stay as they are for its caller."""

    @functools.wraps(implementation)
    def run(*arguments, **options) -> Result:
        with _without_autocast(), torch._C.DisableTorchFunction():
            return implementation(*arguments, **options)

    return run


def _is_exact(device: torch.device) -> bool:
    """Whether torch multiplies float32 matrices in float32."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("tf32", "bf16")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b as exact as its dtype, also where the process allows TF32 or bfloat16 for float32: then by float64."""
    if a.dtype != torch.float32 or _is_exact(a.device):
        return a @ b
    return (a.double() @ b.double()).float()
