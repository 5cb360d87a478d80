"""Compiling the CUDA kernels on first use, and loading them.

A build lies in a folder named by the hash of all that went into it. It is made beside that folder and renamed when it is whole, under
a lock, so that processes which start together compile once and none loads half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from . import render
from .configs import INSTANCES
from .render import Config

SOURCES = Path(__file__).resolve().parent
NAME = "fp8attn_cuda"
CXX_FLAGS = ("-std=c++20", "-O2")
CUDA_FLAGS = ("-std=c++20", "-O3")


def cuda_flags(arch: int) -> tuple[str, ...]:
    """For GPUs of one architecture; Hopper's with what its kernel needs and no later GPU has."""
    name = f"{arch}a" if arch == 90 else str(arch)
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{name},code=sm_{name}")


class BuildError(RuntimeError):
    """The CUDA kernels can't be compiled or loaded here."""


@dataclass(frozen=True)
class Library:
    """The loaded kernels.

    Attributes:
        forward: the operator that launches an instance by its number.
        forward_from_half: likewise, of the instances that quantize.
        instances: what it was compiled with; an instance's number is its place.
    """

    forward: Callable[..., None]
    forward_from_half: Callable[..., None]
    instances: tuple[Config, ...]


def cuda_home() -> str | None:
    """Where the CUDA toolkit is, as torch finds it."""
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


@functools.cache
def missing() -> str | None:
    """What a compilation lacks on this machine and what to do, or None if it lacks nothing."""
    if torch.version.cuda is None:
        return "torch is a CPU build; install one with CUDA"
    home = cuda_home()
    if home is None or not (Path(home) / "bin" / "nvcc").exists():
        return "nvcc isn't here; install the CUDA toolkit 12.8 or newer and set CUDA_HOME"
    if shutil.which("ninja") is None:
        return "ninja isn't here; pip install ninja"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the C++ compiler {compiler!r} isn't here; install g++ or set CXX"
    return None


def version_of(*command: str) -> str:
    """What a program says of its version, nothing if it isn't there."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout


def source_files() -> list[Path]:
    """Everything written by hand that is compiled."""
    return sorted(p for p in SOURCES.rglob("*") if p.suffix in (".h", ".cuh", ".cpp"))


def fingerprint(instances: tuple[Config, ...], arch: int = 90) -> str:
    """Hash of sources, rendered sources, flags and versions."""
    nvcc = str(Path(cuda_home() or "") / "bin" / "nvcc")
    versions = (torch.__version__, str(torch.version.cuda), version_of(nvcc), version_of(os.environ.get("CXX", "c++")))
    parts = [*versions, *CXX_FLAGS, *cuda_flags(arch)]
    parts += [f"{path.relative_to(SOURCES)}\0{path.read_text()}" for path in source_files()]
    parts += [f"{name}\0{text}" for name, text in render.files(instances, arch).items()]
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Where builds lie: FP8ATTN_CACHE, or fp8attn in the user's cache folder.

    Raises:
        BuildError: others can write to it, and so could make this process load what they like.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8attn"
    folder = Path(os.environ.get("FP8ATTN_CACHE") or default)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"the cache folder {folder} is another user's or others can write to it; set FP8ATTN_CACHE to a folder of your own, mode 0700"
        )
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process holds the lock of this name."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def resources(library: Path) -> dict[str, dict[str, int]]:
    """Registers, stack, shared and local memory of every kernel in a library, as cuobjdump says; {} without it."""
    cuobjdump = Path(cuda_home() or "") / "bin" / "cuobjdump"
    if not cuobjdump.exists():
        return {}
    done = subprocess.run([str(cuobjdump), "--dump-resource-usage", str(library)], capture_output=True, text=True, check=False)
    return parse_resources(done.stdout)


def parse_resources(text: str) -> dict[str, dict[str, int]]:
    """cuobjdump's ` Function name:` lines, each followed by `REG:128 STACK:0 …`."""
    found: dict[str, dict[str, int]] = {}
    name = None
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Function"]:
            name = words[1].rstrip(":")
        elif name is not None and words and words[0].startswith("REG:"):
            pairs = (word.split(":") for word in words if word.count(":") == 1)
            found[name] = {key.lower(): int(value) for key, value in pairs if value.isdigit()}
            name = None
    return found


def write_meta(folder: Path, instances: tuple[Config, ...], arch: int, seconds: float) -> None:
    """build_meta.json: what was built, of what, with what."""
    meta = {
        "instances": {c.name: dict(zip(c.__dataclass_fields__, astuple(c), strict=True)) for c in instances},
        "cxx_flags": CXX_FLAGS,
        "cuda_flags": cuda_flags(arch),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": version_of(str(Path(cuda_home() or "") / "bin" / "nvcc")).strip().splitlines()[-1:],
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
        "resources": resources(folder / f"{NAME}.so"),
    }
    (folder / "build_meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def compile_into(folder: Path, instances: tuple[Config, ...], arch: int) -> None:
    """Compile and load the library in an empty folder.

    Raises:
        BuildError: with the compiler's words.
    """
    from torch.utils import cpp_extension

    rendered = render.files(instances, arch)
    for name, text in rendered.items():
        (folder / name).write_text(text)
    started = time.time()
    print(f"fp8attn: compiling {len(instances)} CUDA kernels, once …", end="", file=sys.stderr, flush=True)
    try:
        cpp_extension.load(
            NAME,
            [str(SOURCES / "binding.cpp"), *(str(folder / name) for name in rendered if name.endswith(".cu"))],
            extra_cflags=list(CXX_FLAGS),
            extra_cuda_cflags=list(cuda_flags(arch)),
            extra_include_paths=[str(SOURCES), str(folder)],
            build_directory=str(folder),
            is_python_module=False,
            with_cuda=True,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(" failed", file=sys.stderr, flush=True)
        raise BuildError(f"the CUDA kernels don't compile here: {error}") from error
    # torch names a process's second library of a name NAME_v1
    (compiled,) = folder.glob(f"{NAME}*.so")
    compiled.rename(folder / f"{NAME}.so")
    seconds = time.time() - started
    print(f" {seconds:.0f} s", file=sys.stderr, flush=True)
    write_meta(folder, instances, arch, seconds)


def build(instances: tuple[Config, ...], arch: int = 90) -> Path:
    """The folder of the whole and loaded build, made if it isn't there.

    Raises:
        BuildError: it can't be made.
    """
    lacking = missing()
    if lacking is not None:
        raise BuildError(lacking)
    folder = cache_folder()
    wanted = folder / fingerprint(instances, arch)
    if not wanted.exists():
        with locked(folder / f"{wanted.name}.lock"):
            if not wanted.exists():
                staging = Path(tempfile.mkdtemp(prefix=f"{wanted.name}.", dir=folder))
                try:
                    compile_into(staging, instances, arch)
                    staging.rename(wanted)
                except BaseException:
                    shutil.rmtree(staging, ignore_errors=True)
                    raise
                return wanted
    torch.ops.load_library(str(wanted / f"{NAME}.so"))
    return wanted


_libraries: dict[tuple[tuple[Config, ...], int], Library] = {}
_failures: dict[tuple[tuple[Config, ...], int], str] = {}


def load(instances: tuple[Config, ...] | None = None, arch: int = 90) -> Library:
    """The kernels, compiled if this is their first use on this machine; None: the Hopper kernel's.

    Raises:
        BuildError: they can't be; remembered, so that only the first call tries.
    """
    key = (INSTANCES if instances is None else instances, arch)
    if key not in _libraries:
        if key in _failures:
            raise BuildError(_failures[key])
        try:
            build(*key)
        except BuildError as error:
            _failures[key] = str(error)
            raise
        operators = getattr(torch.ops, render.namespace(*key))
        _libraries[key] = Library(operators.forward.default, operators.forward_from_half.default, key[0])
    return _libraries[key]


def load_with(config: Config, group: tuple[Config, ...], arch: int) -> Library:
    """The library with an instance: one that is loaded already, or that of its group.

    Raises:
        BuildError: it can't be compiled.
    """
    for (instances, built_for), library in _libraries.items():
        if built_for == arch and config in instances:
            return library
    return load(group if config in group else (config,), arch)


def unavailable() -> str | None:
    """Why kernels can't be had, as far as is known without compiling, or None."""
    return next(iter(_failures.values()), None) or missing()


def built(instances: tuple[Config, ...] | None = None, arch: int = 90) -> dict[str, Any] | None:
    """build_meta.json of the build that would be loaded now, or None if there is none; of the Hopper kernel's instances unless others are given."""
    if missing() is not None:
        return None
    meta = cache_folder() / fingerprint(INSTANCES if instances is None else instances, arch) / "build_meta.json"
    return json.loads(meta.read_text()) if meta.exists() else None
