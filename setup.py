"""`FP8ATTN_PREBUILD=1 pip install --no-build-isolation .` compiles the CUDA kernels into the wheel; without, they are compiled on first use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ALL = "80,89,90"
WANTED = os.environ.get("FP8ATTN_PREBUILD", "0")
ARCHITECTURES = [] if WANTED in ("", "0") else [int(word) for word in (ALL if WANTED == "1" else WANTED).split(",")]


class BuildWithKernels(build_py):
    """Beside the sources, the libraries that fp8attn.cuda.build looks for."""

    def run(self) -> None:
        super().run()
        if not ARCHITECTURES:
            return
        sys.path.insert(0, str(Path(__file__).parent))
        from fp8attn.cuda import build

        for arch in ARCHITECTURES:
            build.prebuild(Path(self.build_lib) / "fp8attn" / "cuda" / "prebuilt", arch)


class Platform(Distribution):
    """A wheel with compiled kernels is of one platform."""

    def has_ext_modules(self) -> bool:
        return bool(ARCHITECTURES)


setup(cmdclass={"build_py": BuildWithKernels}, distclass=Platform)
