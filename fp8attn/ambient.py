"""Isolates the numerics from settings of the process: autocast, function modes (such as torch.set_default_device) and
TF32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch._C import DisableTorchFunction, _is_any_autocast_enabled

Result = TypeVar("Result")

DEVICES = ("cpu", "cuda")
"""Device types of the operators. Autocast is switched off for them inside an operator."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts attention on a device, or None outside of autocast."""
    if device.type not in DEVICES or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextlib.contextmanager
def _without_autocast_and_modes() -> Iterator[None]:
    with DisableTorchFunction():
        enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device in enabled:
                torch.set_autocast_enabled(device, True)


def shield() -> AbstractContextManager[None]:
    """Inside, autocast and function modes don't affect torch."""
    return _without_autocast_and_modes() if _is_any_autocast_enabled() else DisableTorchFunction()


def shielded(implementation: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap an operator's implementation so that autocast and function modes don't affect it.

    Both stay active for its caller.
    """

    @functools.wraps(implementation)
    def run(*arguments, **options) -> Result:
        with shield():
            return implementation(*arguments, **options)

    return run


def _is_exact(device: torch.device) -> bool:
    """Whether torch multiplies float32 matrices in float32."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("tf32", "bf16")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b as exactly as its dtype allows.

    If the process allows TF32 or bfloat16 for float32, it is computed in float64.
    """
    if a.dtype != torch.float32 or _is_exact(a.device):
        return a @ b
    return (a.double() @ b.double()).float()
