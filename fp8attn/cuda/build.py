"""Compiling the CUDA kernels on first use, and loading them.

A build lies in a folder named by the hash of all that went into it. It is made beside that folder and renamed when it is whole, under
a lock, so that processes which start together compile once and none loads half of it. What a wheel brings compiled (`prebuild`) is taken
instead where it is of these sources and this torch.

Kernels are compiled by nvcc alone: they know no torch, and what ptxas says of them goes into build_meta.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..device import ARCHITECTURES
from . import portable, render, short
from .configs import HALF_Q_INSTANCES, INSTANCES, INT8_INSTANCES
from .render import Config

SOURCES = Path(__file__).resolve().parent
PREBUILT = SOURCES / "prebuilt"
"""Where a wheel brings compiled kernels."""

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

    @functools.cached_property
    def _numbers(self) -> dict[Config, int]:
        return {config: number for number, config in enumerate(self.instances)}

    def number(self, config: Config) -> int:
        """What `forward` knows an instance by."""
        return self._numbers[config]


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


def nvcc() -> str:
    """Its path; it may not be there."""
    return str(Path(cuda_home() or "") / "bin" / "nvcc")


def fingerprint(instances: tuple[Config, ...], arch: int = 90) -> str:
    """Hash of sources, rendered sources, flags and versions, compilers' too."""
    return _hash([content(instances, arch), version_of(nvcc()), version_of(os.environ.get("CXX", "c++"))])


def content(instances: tuple[Config, ...], arch: int) -> str:
    """Hash of what a library does and where it can be loaded: sources, rendered sources, flags, torch."""
    parts = [torch.__version__, str(torch.version.cuda), *CXX_FLAGS, *cuda_flags(arch)]
    parts += [f"{path.relative_to(SOURCES)}\0{path.read_text()}" for path in source_files()]
    parts += [f"{name}\0{text}" for name, text in render.files(instances, arch).items()]
    return _hash(parts)


def _hash(parts: Sequence[str]) -> str:
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


def resources(report: str) -> dict[str, int]:
    """What ptxas -v says of one kernel: registers of a thread; bytes of its stack, spilled to memory and read back; static shared memory."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "static_shared_bytes": r"(\d+) bytes smem",
    }
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    return {name: 0 if match is None else int(match[1]) for name, match in found.items()}


def commit() -> str | None:
    """Of the checkout that the sources lie in, or None if they lie in none."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(SOURCES), "ls-files", "--error-unmatch", Path(__file__).name]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None  # somebody else's checkout, around site-packages
    done = subprocess.run(["git", "-C", str(SOURCES), "describe", "--always", "--abbrev=40", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def write_meta(folder: Path, instances: tuple[Config, ...], arch: int, seconds: float, reports: dict[str, str]) -> None:
    """build_meta.json: what was built, of what, with what; `reports`, by instance, is what ptxas said."""
    meta = {
        "arch": arch,
        "instances": {c.name: dict(zip(c.__dataclass_fields__, astuple(c), strict=True)) for c in instances},
        "commit": commit(),
        "content": content(instances, arch),
        "cxx_flags": CXX_FLAGS,
        "cuda_flags": cuda_flags(arch),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": version_of(nvcc()).strip().splitlines()[-1:],
        "cxx": version_of(os.environ.get("CXX", "c++")).strip().splitlines()[:1],
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
        "resources": {c.name: resources(reports.get(c.name, "")) | {"shared_bytes": c.shared_bytes} for c in instances},
    }
    (folder / "build_meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def compile_kernels(folder: Path, names: Sequence[str], arch: int) -> dict[str, str]:
    """NAME.o of every NAME.cu in `folder`; by name, what ptxas says.

    Raises:
        BuildError: with nvcc's words.
    """
    host = ["-ccbin", os.environ["CXX"]] if "CXX" in os.environ else []
    options = [*cuda_flags(arch), *host, "-Xcompiler=-fPIC", "-Xptxas=-v", "-I", str(SOURCES), "-I", str(folder)]

    def compile_one(name: str) -> str:
        command = [nvcc(), *options, "-c", f"{name}.cu", "-o", f"{name}.o"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"the CUDA kernels don't compile here: {(done.stderr + done.stdout).strip()}")
        return done.stderr + done.stdout

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(compile_one, names), strict=True))


def compile_into(folder: Path, instances: tuple[Config, ...], arch: int) -> None:
    """Compile and load the library in an empty folder.

    Raises:
        BuildError: with the compiler's words.
    """
    from torch.utils import cpp_extension

    rendered = render.files(instances, arch)
    for name, text in rendered.items():
        (folder / name).write_text(text)
    kernels = [name.removesuffix(".cu") for name in rendered if name.endswith(".cu")]
    started = time.time()
    print(f"fp8attn: compiling {len(instances)} CUDA kernels, once …", end="", file=sys.stderr, flush=True)
    try:
        reports = compile_kernels(folder, kernels, arch)
        cpp_extension.load(
            NAME,
            [str(SOURCES / "binding.cpp")],
            extra_cflags=list(CXX_FLAGS),
            extra_cuda_cflags=list(cuda_flags(arch)),  # or torch looks for a GPU to compile for
            extra_ldflags=[str(folder / f"{name}.o") for name in kernels],
            extra_include_paths=[str(SOURCES), str(folder)],
            build_directory=str(folder),
            is_python_module=False,
            with_cuda=True,
        )
    except (BuildError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(" failed", file=sys.stderr, flush=True)
        if isinstance(error, BuildError):
            raise
        raise BuildError(f"the CUDA kernels don't compile here: {error}") from error
    # torch names a process's second library of a name NAME_v1
    (compiled,) = folder.glob(f"{NAME}*.so")
    compiled.rename(folder / f"{NAME}.so")
    seconds = time.time() - started
    print(f" {seconds:.0f} s", file=sys.stderr, flush=True)
    write_meta(folder, instances, arch, seconds, reports)


def groups(arch: int) -> tuple[tuple[Config, ...], ...]:
    """What GPUs of an architecture load, library by library."""
    hopper: tuple[tuple[Config, ...], ...] = (INSTANCES, INT8_INSTANCES, HALF_Q_INSTANCES, short.INSTANCES) if arch // 10 == 9 else ()
    return (*hopper, *(portable.group(dim, ARCHITECTURES[arch], int8) for dim in portable.DIMS for int8 in (False, True)))


def prebuild(folder: Path, arch: int, libraries: tuple[tuple[Config, ...], ...] | None = None) -> None:
    """Compile ahead of time what GPUs of an architecture load, or some `libraries` of it, for a wheel to bring: `folder` becomes PREBUILT.

    Raises:
        BuildError: they can't be compiled here.
    """
    lacking = missing()
    if lacking is not None:
        raise BuildError(lacking)
    for instances in groups(arch) if libraries is None else libraries:
        into = folder / render.namespace(instances, arch)
        with tempfile.TemporaryDirectory() as staging:
            compile_into(Path(staging), instances, arch)
            into.mkdir(parents=True, exist_ok=True)
            for name in (f"{NAME}.so", "build_meta.json"):
                shutil.copy(Path(staging) / name, into / name)


def prebuilt(instances: tuple[Config, ...], arch: int) -> Path | None:
    """The folder of the library that came with the package, or None if none did that is of these sources and this torch."""
    folder = PREBUILT / render.namespace(instances, arch)
    meta = folder / "build_meta.json"
    if not meta.exists() or json.loads(meta.read_text())["content"] != content(instances, arch):
        return None
    return folder


def build(instances: tuple[Config, ...], arch: int = 90) -> Path:
    """The folder of the whole and loaded build, made if it is neither there nor came with the package.

    Raises:
        BuildError: it can't be made.
    """
    brought = prebuilt(instances, arch)
    if brought is not None:
        torch.ops.load_library(str(brought / f"{NAME}.so"))
        return brought
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
_having: dict[tuple[Config, int], Library] = {}
"""By configuration and architecture, the first library that was loaded with it."""
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
        for config in key[0]:
            _having.setdefault((config, arch), _libraries[key])
    return _libraries[key]


def load_with(config: Config, group: tuple[Config, ...], arch: int) -> Library:
    """The library with an instance: one that is loaded already, or that of its group.

    Raises:
        BuildError: it can't be compiled.
    """
    found = _having.get((config, arch))
    return load(group if config in group else (config,), arch) if found is None else found


def unavailable(config: Config | None = None, arch: int = 90) -> str | None:
    """Why an instance can't be had, as far as is known without compiling, or None; without one, why none can."""
    if config is not None:
        failed = next((words for (instances, built_for), words in _failures.items() if built_for == arch and config in instances), None)
    else:
        failed = None if _libraries else next(iter(_failures.values()), None)
    return failed or (None if PREBUILT.exists() else missing())


def built(instances: tuple[Config, ...] | None = None, arch: int = 90) -> dict[str, Any] | None:
    """build_meta.json of the build that would be loaded now, or None if there is none; of the Hopper kernel's instances unless others are given."""
    wanted = INSTANCES if instances is None else instances
    folder = prebuilt(wanted, arch)
    if folder is None:
        if missing() is not None:
            return None
        folder = cache_folder() / fingerprint(wanted, arch)
    meta = folder / "build_meta.json"
    return json.loads(meta.read_text()) if meta.exists() else None
