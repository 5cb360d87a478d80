"""ptxas reports of instances: registers, stack, spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from fp8attn.cuda import build, render


def compiled(nvcc: str, config: render.Config, arch: int, folder: Path) -> str:
    """Compile an instance to NAME.cubin in `folder`, and return the output of ptxas."""
    for name, text in render.files((config,)).items():
        (folder / name).write_text(text)
    command = [nvcc, *build.cuda_flags(arch), "-I", str(build.SOURCES), "-I", str(folder), "-Xptxas=-v", "-cubin", f"{config.name}.cu"]
    done = subprocess.run([*command, "-o", f"{config.name}.cubin"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def numbers(report: str) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack."""
    return int(re.findall(r"Used (\d+) registers", report)[0]), int(re.findall(r"(\d+) bytes stack frame", report)[0])
