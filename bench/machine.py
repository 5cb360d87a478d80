"""Describes the machine of a measurement: the part of every JSON line that isn't a result."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

import fp8attn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
"""Root of the repository in a checkout; meaningless in an installed package."""

IS_CHECKOUT = (ROOT / "pyproject.toml").is_file() and (ROOT / "fp8attn").is_dir()

PACKAGE = __name__.rpartition(".")[0]
"""`bench` in a checkout, `fp8attn.bench` if fp8attn is installed."""

PROGRAM = f"python -m {PACKAGE}"

READINGS = {
    "sm_clock_mhz": "clocks.current.sm",
    "memory_clock_mhz": "clocks.current.memory",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
"""Readings that are recorded while a GPU works, and nvidia-smi's names for them."""


def module(name: str) -> list[str]:
    """The words after `python` that run a module of this package, in the working directory `module_folder`."""
    return ["-m", f"{PACKAGE}.{name}"]


def module_folder() -> Path | None:
    """The folder from which Python imports this package by its name; None if the package is installed."""
    return ROOT if PACKAGE == "bench" else None


def keep_triton_cache() -> None:
    """Fix Triton's cache folder. torch.compile would change it, and kernels compiled before wouldn't be found."""
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def _output(*command: str) -> str | None:
    """The output of a command, or None if it doesn't exist or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _nvidia_smi(device: torch.device, *fields: str) -> list[str] | None:
    """Values of nvidia-smi's fields for a device, or None."""
    if device.type != "cuda":
        return None
    uuid = torch.cuda.get_device_properties(device).uuid
    line = _output("nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    values = [value.strip() for value in line.split(",")] if line else []
    return values if len(values) == len(fields) else None


def commit() -> str:
    """The commit of HEAD, and whether the tree differs from it.

    FP8ATTN_COMMIT overrides it, for a tree that was copied without its history. It is unknown for an installed package,
    which may be inside another repository.
    """
    if "FP8ATTN_COMMIT" in os.environ:
        return os.environ["FP8ATTN_COMMIT"]
    if not IS_CHECKOUT:
        return "unknown"
    head, changed = _output("git", "rev-parse", "HEAD"), _output("git", "status", "--porcelain")
    if head is None or changed is None:
        return "unknown"
    return head + (" with uncommitted changes" if changed else "")


def machine(device: torch.device) -> dict[str, str | int | None]:
    """GPU, driver, versions, commit and date."""
    gpu = device.type == "cuda"
    driver = _nvidia_smi(device, "driver_version")
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fp8attn": fp8attn.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class Sensors:
    """A GPU's clocks, power and temperature while it works: by NVML if its Python module is installed, else by
    nvidia-smi, else None.

    Attributes:
        quick: whether a reading takes well under a millisecond, so that every turn of a timing has time for one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._nvml, self._handle = _nvml_handle(device)
        self.quick = self._handle is not None

    def read(self) -> dict[str, float | None]:
        """Current MHz, watts and degrees Celsius; None for values that can't be read."""
        if self._handle is None:
            values = _nvidia_smi(self.device, *READINGS.values())
            return {name: _number(values[i]) if values else None for i, name in enumerate(READINGS)}
        nvml, handle = self._nvml, self._handle
        return {
            "sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }


def _nvml_handle(device: torch.device) -> tuple[Any, Any]:
    """NVML and its handle of a device, or None twice."""
    if device.type != "cuda":
        return None, None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # NVML's errors are classes of a module that may not be installed
        return None, None


def typical(readings: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """The median of every reading; None if there is none."""
    found: dict[str, float | None] = {}
    for name in READINGS:
        there = [value for reading in readings if (value := reading[name]) is not None]
        found[name] = statistics.median(there) if there else None
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
