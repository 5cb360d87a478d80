"""Which packages there are, and compiling ahead.

`FP8ATTN_PREBUILD=1 pip install --no-build-isolation .` compiles the CUDA kernels into the wheel; without, they are compiled on first use. Such a
wheel serves every Python, and every torch that has the stable ABI: it is of a platform only, that of the C library it was linked with.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent

ALL = (80, 89, 90)
"""Architectures that FP8ATTN_PREBUILD=1 stands for."""


def wanted_architectures(text: str) -> list[int]:
    """Architectures that the kernels are compiled for.

    Args:
        text: FP8ATTN_PREBUILD.

    Raises:
        SetupError: it isn't one of its values.
    """
    if text in ("", "0"):
        return []
    if text == "1":
        return list(ALL)
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise SetupError(f"FP8ATTN_PREBUILD is {text!r}; it must be 0, 1, or architectures with commas between them, such as 80,90")
    return [int(word) for word in words]


ARCHITECTURES = wanted_architectures(os.environ.get("FP8ATTN_PREBUILD", "0"))


class BuildWithKernels(build_py):
    """Beside the sources, the libraries that fp8attn.cuda.build looks for."""

    def run(self) -> None:
        super().run()
        if not ARCHITECTURES:
            return
        sys.path.insert(0, str(ROOT))
        try:
            from fp8attn import device
            from fp8attn.cuda import build
        except ImportError as error:
            raise SetupError(f"FP8ATTN_PREBUILD needs torch and Triton where the wheel is built ({error}); use pip's --no-build-isolation") from error
        unknown = [arch for arch in ARCHITECTURES if arch not in device.ARCHITECTURES]
        if unknown:
            raise SetupError(f"FP8ATTN_PREBUILD names {unknown[0]}; it must name some of {', '.join(map(str, device.ARCHITECTURES))}")
        folder = Path(self.build_lib) / "fp8attn" / "cuda" / "prebuilt"
        kept = {library for arch in ARCHITECTURES for library in build.prebuild(folder, arch)}
        for library in set(folder.iterdir()) - kept:  # of an earlier build, from other sources
            shutil.rmtree(library)


class AnyPython(bdist_wheel):
    """The kernels' binding doesn't use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        if not ARCHITECTURES:
            return super().get_tag()
        from packaging.tags import platform_tags  # which other wheels don't need

        tags = list(platform_tags())  # the newest manylinux is that of this machine's C library
        return "py3", "none", next((tag for tag in tags if tag.startswith("manylinux_2")), tags[0])


class Platform(Distribution):
    """A wheel with compiled kernels is of one platform."""

    def has_ext_modules(self) -> bool:
        return bool(ARCHITECTURES)


setup(
    packages=[
        *find_packages(str(ROOT), include=["fp8attn", "fp8attn.*"]),
        "fp8attn.bench",
        *(f"fp8attn.bench.{name}" for name in find_packages(str(ROOT / "bench"))),
    ],
    package_dir={"fp8attn.bench": "bench"},
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": AnyPython},
    distclass=Platform,
)
