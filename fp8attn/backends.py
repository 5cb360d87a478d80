"""Which backends can run here."""

from __future__ import annotations

import torch

from . import ops
from .cuda import build
from .device import device_of
from .validate import Backend, BackendUnavailable, check_backend


def cuda_unavailable(device: torch.device) -> str | None:
    """Why the CUDA kernels can't run on a device's tensors, and what to do; or None if they can.

    Nothing is compiled to find out, so compiling may still fail.
    """
    if device.type != "cuda":
        return f"cuda: tensors are on {device}; move them to a GPU"
    properties = device_of(device)
    if properties.arch < 80:
        return f"cuda: the kernels need sm_80 or later, {properties.name} is sm_{properties.arch}"
    reason = build.unavailable()
    return None if reason is None else f"cuda: {reason}"


def triton_unavailable(device: torch.device) -> str | None:
    """Why Triton kernels can't run on a device's tensors and what to do, or None if they can."""
    if ops.has_kernels(device):
        return None
    return f"triton: tensors are on {device}; move them to a GPU, or set TRITON_INTERPRET=1 before Python starts to interpret the kernels"


def choose_backend(backend: Backend, device: torch.device) -> Backend:
    """The backend that runs on a device's tensors; `auto` where the operator sees to it, call by call.

    Raises:
        BackendUnavailable: `backend` can't run here.
        ValueError: there is no such backend.
    """
    check_backend(backend)
    if backend == "auto":
        return "auto" if device.type == "cuda" else "reference"
    missing = None
    if backend == "cuda" and device.type != "cuda":
        missing = cuda_unavailable(device)
    elif backend == "triton":
        missing = triton_unavailable(device)
    if missing is not None:
        raise BackendUnavailable(missing)
    return backend
