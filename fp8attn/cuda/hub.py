"""A package of fp8attn for Hugging Face's kernels hub: `python -m fp8attn.cuda.hub FOLDER --archs 80,89,90`.

Made by the same build as a wheel with kernels. The binding uses PyTorch's stable ABI, so there is one variant for every
torch from 2.10 on and every Python:

    FOLDER/build/torch-stable-abi210-cu130-x86_64-linux/metadata.json
                                                        fp8attn/          the package, with its compiled kernels

`kernels.get_local_kernel(FOLDER)` returns the module. Layout: https://huggingface.co/docs/kernels
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from ..device import ARCHITECTURES
from . import build

PACKAGE = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".typed", ".json", ".h", ".cuh", ".cpp")

STABLE_ABI = "210"
"""Version of torch whose stable ABI the binding uses, see torch_abi.h."""


def backend_name(archs: Sequence[int]) -> str:
    """What the hub calls a build for these architectures: of CUDA's version, or `cpu` without any.

    Raises:
        BuildError: nvcc doesn't say which version it is.
    """
    if not archs:
        return "cpu"
    said = build.version_of(*build.nvcc())
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        raise build.BuildError(f"nvcc doesn't say its release: {said!r}")
    return f"cu{release[1]}{release[2]}"


def capability(arch: int) -> str:
    """9.0a for 90: kernels for Hopper use instructions of sm_90a."""
    return f"{arch // 10}.{arch % 10}{'a' if arch // 10 == 9 else ''}"


def make(folder: Path, archs: Sequence[int]) -> Path:
    """Make the package.

    Args:
        folder: of the hub's repository; it is made if it isn't there.
        archs: architectures that kernels are compiled for; none: Python alone, which runs on CPU tensors.

    Returns:
        the variant's folder.

    Raises:
        ValueError: an architecture isn't one that fp8attn knows; or there is such a variant already.
        BuildError: kernels can't be compiled here.
    """
    unknown = [arch for arch in archs if arch not in ARCHITECTURES]
    if unknown:
        raise ValueError(f"archs has {unknown[0]}; it must be some of {', '.join(map(str, ARCHITECTURES))}")
    backend = backend_name(archs)
    variant = folder / "build" / f"torch-stable-abi{STABLE_ABI}-{backend}-{platform.machine()}-{platform.system().lower()}"
    if variant.exists():
        raise ValueError(f"folder is {folder}; it must not have {variant.name} yet")
    copied = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in SUFFIXES and build.PREBUILT not in path.parents]
    for path in copied:
        to = variant / "fp8attn" / path.relative_to(PACKAGE)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    for arch in archs:
        build.prebuild(variant / "fp8attn" / "cuda" / "prebuilt", arch)
    digest = hashlib.sha256("\0".join(path.read_text() for path in copied).encode()).hexdigest()[:16]
    metadata = {
        "id": f"_fp8attn_{backend}_{digest}",  # the module's name
        "name": "fp8attn",
        "version": int(__version__.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [capability(arch) for arch in archs]} if archs else {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fp8attn.cuda.hub", description="Makes a package for the kernels hub.")
    parser.add_argument("folder", type=Path, help="folder of the hub's repository")
    parser.add_argument("--archs", default="80,89,90", help="architectures with commas between them; empty: Python alone (default: %(default)s)")
    found = parser.parse_args(words)
    parts = [word for word in found.archs.split(",") if word]
    if not all(word.isascii() and word.isdecimal() for word in parts):
        parser.error(f"argument --archs: {found.archs!r}; it must be architectures with commas between them, such as 80,90")
    try:
        print(make(found.folder, [int(word) for word in parts]))
    except (ValueError, build.BuildError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
