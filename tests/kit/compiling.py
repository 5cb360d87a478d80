"""What ptxas says of instances: registers, stack, spills."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fp8attn.cuda import build, render
from fp8attn.cuda.configs import (
    HopperConfig,
)

STACK = {
    HopperConfig(192, 192, 2, 3, 232, False, 2, True): 8,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, True): 8,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True): 8,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, True): 8,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, added=True): 8,
    HopperConfig(192, 192, 2, 3, 232, False, 2, True, True, added=True): 8,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, added=True): 8,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, True, added=True): 8,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, False, True, masked=True): 48,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True, masked=True): 64,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, False, True, masked=True): 104,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, True, True, masked=True): 120,
    HopperConfig(64, 64, 3, 4, 152, False, 2, True, False, True, added=True): 8,
    HopperConfig(64, 64, 3, 4, 152, False, 0, True, True, True, added=True): 8,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, False, True, added=True): 72,
    HopperConfig(256, 256, 2, 2, 232, False, 2, True, True, True, added=True): 104,
    HopperConfig(64, 64, 4, 4, 112, False, 2, False, masked=True): 48,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, masked=True): 64,
    HopperConfig(192, 192, 2, 3, 232, False, 2, False, masked=True): 8,
    HopperConfig(192, 192, 2, 3, 232, False, 2, False, True, masked=True): 8,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, masked=True): 8,
    HopperConfig(256, 256, 2, 2, 224, False, 2, False, True, masked=True): 16,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True): 16,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True): 24,
    HopperConfig(64, 64, 4, 4, 112, False, 0, False, True, True): 16,
    HopperConfig(128, 128, 3, 4, 160, False, 1, False, True, True): 24,
    HopperConfig(256, 256, 2, 2, 240, False, 2, False, False, True): 8,
    HopperConfig(256, 256, 1, 2, 240, False, 2, False, False, True): 8,
}
"""Bytes of it that an instance may have; the others have none."""


def compiled(nvcc: str, instances: tuple, arch: int, folder: Path) -> dict[Any, str]:
    """What ptxas says of every instance; NAME.cubin is left in `folder`."""
    for name, text in render.files(instances).items():
        (folder / name).write_text(text)

    def compile_one(config) -> str:
        command = [nvcc, *build.cuda_flags(arch), "-I", str(build.SOURCES), "-I", str(folder), "-Xptxas=-v", "-cubin", f"{config.name}.cu"]
        done = subprocess.run([*command, "-o", f"{config.name}.cubin"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(instances, pool.map(compile_one, instances), strict=True))


def numbers(report: str) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack."""
    return int(re.findall(r"Used (\d+) registers", report)[0]), int(re.findall(r"(\d+) bytes stack frame", report)[0])
