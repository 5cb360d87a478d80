"""What is here, what works here and, where something doesn't, why and what to do."""

from __future__ import annotations

import platform

import torch
import triton

from .api import cuda_missing, triton_missing
from .cuda import build
from .device import Device, device_of
from .triton import run


def _cuda_kernels(device: Device) -> str:
    """Which of them a GPU gets, and what they multiply."""
    if device.arch < 80:
        return "need sm_80"
    operands = "e4m3 as it is" if device.has_fp8_units else "e4m3 as half"
    return f"{'short, hopper, and for what they refuse ' if device.arch // 10 == 9 else ''}portable, which multiplies {operands}"


def info() -> dict[str, str]:
    """Versions, GPUs and backends, each as one line of text; a backend's line starts with `works` or says what is missing."""
    lines = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none: this is a CPU build of torch",
    }
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    for index in gpus:
        device = device_of(torch.device("cuda", index))
        units = "FP8 tensor cores" if device.has_fp8_units else "no FP8 tensor cores: FP8 storage, half compute"
        lines[f"gpu {index}"] = f"{device.name}, sm_{device.arch}, {device.sm_count} SMs, {units}"
        hopper = "needs sm_90" if device.arch // 10 != 9 else run.hopper_missing or "works"
        lines[f"triton hopper kernel, gpu {index}"] = hopper
        lines[f"cuda kernels, gpu {index}"] = _cuda_kernels(device)
    if not gpus:
        lines["gpu"] = "none that torch can use"
    missing = triton_missing(torch.device("cuda" if gpus else "cpu"))
    lines["backend triton"] = missing or ("works" if gpus else "works, in Triton's interpreter")
    lacking = cuda_missing(torch.device("cuda" if gpus else "cpu"))
    lines["backend cuda"] = lacking or f"works, {'compiled already' if build.built() else 'is compiled on first use'}"
    lines["backend reference"] = "works"
    return lines
