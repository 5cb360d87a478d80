"""Compiling the CUDA kernels and their binding to torch on first use, and loading them.

A build lies in a folder named by the hash of all that went into it. It is made beside that folder and renamed when it is whole, under
a lock, so that processes which start together compile once and none loads half of it. What a wheel brings compiled (`prebuild`) is taken
instead where it is of these sources and, the binding, of this torch.

Kernels are compiled by nvcc alone to libraries that know no torch; what ptxas says of them goes into build_meta.json. The binding, one for all
of them, is handed the address of what it launches.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from ..device import ARCHITECTURES
from . import portable, quantize, render, short
from .configs import GROUPS, INSTANCES
from .render import Config

SOURCES = Path(__file__).resolve().parent
PREBUILT = SOURCES / "prebuilt"
"""Where a wheel brings what is compiled."""

NAMESPACE = "fp8attn_cuda"
"""Of the binding's operators."""

BINDING_SOURCES = ("binding.cpp", "params.h", "tensor_map.h")

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
    """Loaded kernels.

    Attributes:
        operators: the binding's, which launch an instance by its launcher.
        launchers: addresses of what launches each instance.
    """

    operators: Any
    launchers: dict[Config, int]


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
    if shutil.which(cxx()) is None:
        return f"the C++ compiler {cxx()!r} isn't here; install g++ or set CXX"
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


def cxx() -> str:
    """The C++ compiler; it may not be there."""
    return os.environ.get("CXX", "c++")


def nvcc() -> str:
    """Its path; it may not be there."""
    return str(Path(cuda_home() or "") / "bin" / "nvcc")


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


def compile_by(command: Sequence[str], folder: Path) -> str:
    """What a compiler says that runs in `folder`.

    Raises:
        BuildError: with its words.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the CUDA kernels don't compile here: {error}") from error
    said = done.stderr + done.stdout
    if done.returncode != 0:
        raise BuildError(f"the CUDA kernels don't compile here: {said.strip()}")
    return said


def link_flags() -> list[str]:
    """Of a shared library that takes the process's CUDA runtime, which is torch's: dlopen knows that by its name."""
    return ["-shared", *(f"-L{cuda_home()}/{name}" for name in ("lib64", "lib")), "-lcudart"]


@dataclass(frozen=True)
class Kernels:
    """The library of some instances for one architecture: of each, `launch_<name>`."""

    instances: tuple[Config, ...]
    arch: int

    @property
    def name(self) -> str:
        """Another one for every library that a GPU may load."""
        return f"kernels_{self.arch}_{_hash([c.name for c in self.instances])[:8]}"

    @property
    def announcement(self) -> str:
        """What somebody waits for."""
        return f"{len(self.instances)} CUDA kernels"

    def content(self) -> str:
        """Hash of what the library does and where it can be loaded: sources, rendered sources, flags, CUDA."""
        written = [path for path in source_files() if path.name == "params.h" or path.name not in BINDING_SOURCES]
        parts = [str(torch.version.cuda), *cuda_flags(self.arch), *_texts(written)]
        return _hash(parts + [f"{name}\0{text}" for name, text in render.files(self.instances).items()])

    def compilers(self) -> list[str]:
        """Versions of those that make it."""
        return [version_of(nvcc()), version_of(cxx())]

    def compile_into(self, folder: Path) -> dict[str, Any]:
        """The library, in an empty folder; what build_meta.json says of it alone.

        Raises:
            BuildError: with the compiler's words.
        """
        rendered = render.files(self.instances)
        for name, text in rendered.items():
            (folder / name).write_text(text)
        units = [name.removesuffix(".cu") for name in rendered if name.endswith(".cu")]
        reports = compile_kernels(folder, units, self.arch)
        compile_by([cxx(), *(f"{name}.o" for name in units), *link_flags(), "-o", f"{self.name}.so"], folder)
        return self.facts(reports)

    def facts(self, reports: dict[str, str]) -> dict[str, Any]:
        """What build_meta.json says of this library alone; `reports`, by instance, is what ptxas said."""
        return {
            "arch": self.arch,
            "instances": {c.name: dict(zip(c.__dataclass_fields__, astuple(c), strict=True)) for c in self.instances},
            "cuda_flags": cuda_flags(self.arch),
            "nvcc": version_of(nvcc()).strip().splitlines()[-1:],
            "resources": {c.name: resources(reports.get(c.name, "")) | {"shared_bytes": c.shared_bytes} for c in self.instances},
        }


@dataclass(frozen=True)
class Binding:
    """The library of torch's operators that launch any kernels."""

    name = "binding"
    announcement = "the CUDA kernels' binding"

    def content(self) -> str:
        """Hash of what the library does and where it can be loaded: sources, flags, torch."""
        return _hash([torch.__version__, str(torch.version.cuda), *CXX_FLAGS, *_texts([SOURCES / name for name in BINDING_SOURCES])])

    def compilers(self) -> list[str]:
        """Versions of those that make it."""
        return [version_of(cxx())]

    def compile_into(self, folder: Path) -> dict[str, Any]:
        """As of `Kernels`."""
        compile_by([*binding_command(SOURCES / "binding.cpp"), "-lc10_cuda", "-ltorch_cuda", *link_flags(), "-o", f"{self.name}.so"], folder)
        return {}


Part = Kernels | Binding


def binding_command(source: Path) -> list[str]:
    """How a file is compiled that knows torch."""
    from torch.utils import cpp_extension

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # not -isystem, which breaks the compiler where the toolkit lies in /usr
    includes = ["-I", str(SOURCES), *(x for path in cpp_extension.include_paths() for x in ("-isystem", path)), "-I", f"{cuda_home()}/include"]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
    return [cxx(), *CXX_FLAGS, abi, "-fPIC", *includes, str(source), *libraries]


def _texts(paths: Sequence[Path]) -> list[str]:
    return [f"{path.relative_to(SOURCES)}\0{path.read_text()}" for path in paths]


def fingerprint(part: Part) -> str:
    """Hash of content and compilers."""
    return _hash([part.content(), *part.compilers()])


def compile_kernels(folder: Path, names: Sequence[str], arch: int) -> dict[str, str]:
    """NAME.o of every NAME.cu in `folder`; by name, what ptxas says.

    Raises:
        BuildError: with nvcc's words.
    """
    host = ["-ccbin", os.environ["CXX"]] if "CXX" in os.environ else []
    options = [*cuda_flags(arch), *host, "-Xcompiler=-fPIC", "-Xptxas=-v", "-I", str(SOURCES), "-I", str(folder)]

    def compile_one(name: str) -> str:
        return compile_by([nvcc(), *options, "-c", f"{name}.cu", "-o", f"{name}.o"], folder)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(compile_one, names), strict=True))


def write_meta(folder: Path, part: Part, seconds: float, facts: dict[str, Any]) -> None:
    """build_meta.json: what was built, of what, with what."""
    meta = facts | {
        "commit": commit(),
        "content": part.content(),
        "cxx_flags": CXX_FLAGS,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cxx": version_of(cxx()).strip().splitlines()[:1],
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
    }
    (folder / "build_meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def make_in(folder: Path, part: Part) -> None:
    """Compile a library in an empty folder.

    Raises:
        BuildError: with the compiler's words.
    """
    started = time.time()
    print(f"fp8attn: compiling {part.announcement}, once …", file=sys.stderr, flush=True)
    facts = part.compile_into(folder)
    write_meta(folder, part, time.time() - started, facts)


def groups(arch: int) -> tuple[tuple[Config, ...], ...]:
    """What GPUs of an architecture load, library by library."""
    hopper: tuple[tuple[Config, ...], ...] = (
        *GROUPS.values(),
        *(short.INSTANCES, quantize.INSTANCES, quantize.INT8_INSTANCES),
    )
    others = (portable.group(dim, ARCHITECTURES[arch], int8) for dim in portable.DIMS for int8 in (False, True))
    return (*(hopper if arch // 10 == 9 else ()), *others)


def prebuild(folder: Path, arch: int, libraries: tuple[tuple[Config, ...], ...] | None = None) -> None:
    """Compile ahead of time what GPUs of an architecture load, or some `libraries` of it, and the binding, for a wheel to bring: `folder` becomes
    PREBUILT.

    Raises:
        BuildError: they can't be compiled here.
    """
    lacking = missing()
    if lacking is not None:
        raise BuildError(lacking)
    parts: list[Part] = [Binding(), *(Kernels(instances, arch) for instances in (groups(arch) if libraries is None else libraries))]
    for part in parts:
        if prebuilt(part, folder) is not None:
            continue
        into = folder / part.name
        with tempfile.TemporaryDirectory() as staging:
            make_in(Path(staging), part)
            into.mkdir(parents=True, exist_ok=True)
            for name in (f"{part.name}.so", "build_meta.json"):
                shutil.copy(Path(staging) / name, into / name)


def prebuilt(part: Part, brought: Path | None = None) -> Path | None:
    """The folder of a library among those `brought`, with the package if nothing else is said, or None if it isn't among them, or of other sources
    or another torch."""
    folder = (PREBUILT if brought is None else brought) / part.name
    meta = folder / "build_meta.json"
    if not meta.exists() or json.loads(meta.read_text())["content"] != part.content():
        return None
    return folder


def build(part: Part) -> Path:
    """The folder of a whole library, made if it is neither there nor came with the package.

    Raises:
        BuildError: it can't be made.
    """
    brought = prebuilt(part)
    if brought is not None:
        return brought
    lacking = missing()
    if lacking is not None:
        raise BuildError(lacking)
    folder = cache_folder()
    wanted = folder / fingerprint(part)
    if not wanted.exists():
        with locked(folder / f"{wanted.name}.lock"):
            if not wanted.exists():
                staging = Path(tempfile.mkdtemp(prefix=f"{wanted.name}.", dir=folder))
                try:
                    make_in(staging, part)
                    staging.rename(wanted)
                except BaseException:
                    shutil.rmtree(staging, ignore_errors=True)
                    raise
    return wanted


_libraries: dict[Kernels, Library] = {}
_having: dict[tuple[Config, int], Library] = {}
"""By configuration and architecture, the first library that was loaded with it."""
_failures: dict[Part, str] = {}
_loading = threading.Lock()


def load_binding() -> Any:
    """The binding's operators, compiled if this is their first use on this machine.

    Raises:
        BuildError: they can't be; remembered, so that only the first call tries.
    """
    operators = getattr(torch.ops, NAMESPACE)
    if not hasattr(operators, "forward"):
        with _remembered(Binding()):
            torch.ops.load_library(str(build(Binding()) / f"{Binding.name}.so"))
    return operators


@contextlib.contextmanager
def _remembered(part: Part) -> Iterator[None]:
    """Inside, what fails before is raised again, and what fails is remembered."""
    if part in _failures:
        raise BuildError(_failures[part])
    try:
        yield
    except (BuildError, OSError) as error:
        _failures[part] = str(error) if isinstance(error, BuildError) else f"{part.announcement} can't be loaded here: {error}"
        raise BuildError(_failures[part]) from error


def load(instances: tuple[Config, ...] | None = None, arch: int = 90) -> Library:
    """The kernels, compiled if this is their first use on this machine; None: the Hopper kernel's.

    Raises:
        BuildError: they can't be; remembered, so that only the first call tries.
    """
    kernels = Kernels(INSTANCES if instances is None else instances, arch)
    with _loading:
        if kernels not in _libraries:
            # compiled at the same time
            with ThreadPoolExecutor(1) as pool:
                binding = pool.submit(load_binding)
                with _remembered(kernels):
                    library = ctypes.CDLL(str(build(kernels) / f"{kernels.name}.so"))
                operators = binding.result()
            launchers = {c: ctypes.cast(library[f"launch_{c.name}"], ctypes.c_void_p).value or 0 for c in kernels.instances}
            _libraries[kernels] = Library(operators, launchers)
            for config in kernels.instances:
                _having.setdefault((config, arch), _libraries[kernels])
    return _libraries[kernels]


def load_with(config: Config, group: tuple[Config, ...], arch: int) -> Library:
    """The library with an instance: one that is loaded already, or that of its group.

    Raises:
        BuildError: it can't be compiled.
    """
    found = _having.get((config, arch))
    return load(group if config in group else (config,), arch) if found is None else found


def unavailable(config: Config | None = None, arch: int = 90) -> str | None:
    """Why an instance can't be had, as far as is known without compiling, or None; without one, why none can."""
    for part, words in _failures.items():
        if isinstance(part, Binding) or (not _libraries if config is None else part.arch == arch and config in part.instances):
            return words
    lacking = missing()
    return None if lacking is None or PREBUILT.exists() else lacking


def built(instances: tuple[Config, ...] | None = None, arch: int = 90) -> dict[str, Any] | None:
    """build_meta.json of the build that would be loaded now, or None if there is none; of the Hopper kernel's instances unless others are given."""
    wanted = Kernels(INSTANCES if instances is None else instances, arch)
    folder = prebuilt(wanted)
    if folder is None:
        if missing() is not None:
            return None
        folder = cache_folder() / fingerprint(wanted)
    meta = folder / "build_meta.json"
    return json.loads(meta.read_text()) if meta.exists() else None
