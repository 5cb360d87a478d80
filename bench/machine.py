"""On what it was measured: the part of every JSON line that isn't the measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent

CLOCKS = {"sm_clock_mhz": "clocks.current.sm", "memory_clock_mhz": "clocks.current.memory", "power_w": "power.draw"}


def _output(*command: str) -> str | None:
    """What a command prints, or None if it isn't there or fails."""
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
    """HEAD, and whether the tree differs from it; FP8ATTN_COMMIT, if set, for a tree that was copied without its history."""
    if "FP8ATTN_COMMIT" in os.environ:
        return os.environ["FP8ATTN_COMMIT"]
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
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def clocks(device: torch.device) -> dict[str, float | None]:
    """MHz and watts as nvidia-smi shows them; None where it isn't there."""
    values = _nvidia_smi(device, *CLOCKS.values())
    return {name: _number(values[i]) if values else None for i, name in enumerate(CLOCKS)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
