"""Compiles the CUDA kernels and their binding to torch on first use, and loads them.

The folder of a build is named by the hash of all its inputs. A build is made in a temporary folder next to it, under a
lock, and renamed when it is complete. So processes that start together compile once, and none loads an incomplete
build. Libraries that a wheel contains (`prebuild`) are used instead if they were compiled from the same sources.

nvcc alone compiles kernels, to libraries that don't depend on torch; the output of ptxas goes into build_meta.json. One
binding serves all of them: it gets the address of the function that it launches.

Environment variables (an empty value counts as not set):
    FP8ATTN_CACHE: folder of the builds; default: `fp8attn` in XDG_CACHE_HOME or in ~/.cache. CUDA_HOME, PYTORCH_NVCC,
    CXX: the toolkit, nvcc and the C++ compiler. The last two are commands of one or more words, such as `ccache g++`.
    MAX_JOBS: number of compilers that run at the same time; default: one per CPU. FP8ATTN_COMPILE_TIMEOUT: seconds
    after which fp8attn stops waiting for a compiler, or for another process that compiles the same library; default:
    3600.

Any failure of a build, or of loading it, is raised as a BuildError; attention then runs in Triton.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import json
import math
import os
import re
import shlex
import shutil
import signal
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
from types import ModuleType
from typing import Any

import torch

from ..device import ARCHITECTURES
from . import append, decode, decode_tensors, fused_head, fused_small, general_quantize, portable, prefill, quantize, render
from .configs import GROUPS, INSTANCES, VARLEN_GROUPS
from .render import Config

SOURCES = Path(__file__).resolve().parent
PREBUILT = SOURCES / "prebuilt"
"""Folder of the libraries that a wheel contains."""

NAMESPACE = "fp8attn_cuda"
"""Namespace of the binding's operators."""

BINDING_SOURCES = ("binding.cpp", "params.h", "plan.h", "tensor_map.h", "torch_abi.h")

CXX_FLAGS = ("-std=c++20", "-O2")
CUDA_FLAGS = ("-std=c++20", "-O3")


def cuda_flags(arch: int) -> tuple[str, ...]:
    """nvcc's flags for GPUs of one architecture.

    Hopper's include features that its kernel needs and no later GPU has (sm_90a).
    """
    name = f"{arch}a" if arch == 90 else str(arch)
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{name},code=sm_{name}")


COMPILE_SECONDS = 3
"""About how many seconds a core takes for an instance, or for the binding. CPU time on an AMD EPYC, nvcc 13.0, mean of
59 instances of all kernels for sm_80 and sm_90: 2.6 s; by library from 2.0 to 4.6 s; the binding: 3.1 s."""
NEXT_SECONDS = 2
"""The same for each further instance of a translation unit, which shares the headers of the first."""


class BuildError(RuntimeError):
    """The CUDA kernels can't be compiled or loaded here."""


@dataclass(frozen=True)
class Library:
    """Loaded kernels.

    Attributes:
        operators: the binding's operators, which launch an instance through its launcher.
        launchers: for each instance, the address of its launch function.
    """

    operators: Any
    launchers: dict[Config, int]


def cuda_home() -> str | None:
    """The folder of the CUDA toolkit: CUDA_HOME or CUDA_PATH, or where torch finds one; or None. A CPU build of torch
    looks for none.

    Raises:
        BuildError: torch can't look for it.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _cpp_extension().CUDA_HOME
    return os.path.abspath(home) if home else None


def _cpp_extension() -> ModuleType:
    """torch.utils.cpp_extension, which imports setuptools and looks for the toolkit.

    Raises:
        BuildError: it can't be imported.
    """
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    except Exception as error:
        raise BuildError(f"torch.utils.cpp_extension can't be imported: {error}; it must be importable, which takes setuptools") from error


@functools.cache
def missing() -> str | None:
    """What a compilation needs and this machine doesn't have, and what to do; or None.

    It runs no compiler; `obstacle` does.
    """
    if torch.version.cuda is None:
        return "torch is a CPU build; install one with CUDA"
    return missing_compiler()


def missing_compiler() -> str | None:
    """The compiler that isn't here, and what to do; or None."""
    try:
        host, home, device_compiler = cxx()[0], cuda_home(), nvcc()[0]
    except BuildError as error:
        return str(error)
    if shutil.which(host) is None:
        return f"the C++ compiler {host!r} isn't here; install g++ or set CXX{_given('CXX')} to the command of a C++ compiler"
    folder = "CUDA_PATH" if _given("CUDA_PATH") and not _given("CUDA_HOME") else "CUDA_HOME"
    cure = f"install the CUDA toolkit 12.8 or newer and set {folder}{_given(folder)} to its folder"
    if home is None:
        return f"nvcc isn't here; {cure}"
    if shutil.which(device_compiler) is None:
        named = f"PYTORCH_NVCC{_given('PYTORCH_NVCC')} must be the command of an nvcc" if _given("PYTORCH_NVCC") else cure
        return f"nvcc isn't here: {device_compiler} is no program; {named}"
    return None


def _given(name: str) -> str:
    """The value of an environment variable, for a message that has just named it; empty if it isn't set."""
    return f", which is {os.environ[name]!r}," if os.environ.get(name) else ""


def _command(name: str, default: str) -> list[str]:
    """The words of the command in an environment variable, or of the default command.

    Raises:
        BuildError: the value can't be split like a shell command.
    """
    text = os.environ.get(name, "")
    try:
        program, *options = shlex.split(text) or [default]
    except ValueError as error:
        raise BuildError(f"{name} is {text!r}: {error}; it must be a command, such as g++ or 'ccache g++'") from error
    # an absolute path, because the command runs in another folder
    return [os.path.abspath(program) if os.sep in program else program, *options]


def cxx() -> list[str]:
    """The command of the C++ compiler. The compiler may not exist.

    Raises:
        BuildError: CXX isn't a command.
    """
    return _command("CXX", "c++")


def nvcc() -> list[str]:
    """The command of nvcc. nvcc may not exist.

    Raises:
        BuildError: PYTORCH_NVCC isn't a command, or torch can't look for the toolkit.
    """
    return _command("PYTORCH_NVCC", f"{cuda_home() or ''}/bin/nvcc")


def jobs() -> int:
    """Number of compilers that run at the same time.

    Raises:
        BuildError: MAX_JOBS isn't a positive integer.
    """
    text = os.environ.get("MAX_JOBS", "")
    if not text:
        return os.cpu_count() or 1
    if re.fullmatch(r"0*[1-9][0-9]{0,8}", text) is None:
        raise BuildError(f"MAX_JOBS is {text!r}; it must be a positive integer, the number of compilers that run at the same time")
    return int(text)


def timeout() -> float:
    """Seconds after which fp8attn stops waiting for a compiler, or for another process that compiles.

    Raises:
        BuildError: FP8ATTN_COMPILE_TIMEOUT isn't a positive number.
    """
    text = os.environ.get("FP8ATTN_COMPILE_TIMEOUT", "")
    if not text:
        return 3600.0
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", text) is None or float(text) == 0:
        raise BuildError(f"FP8ATTN_COMPILE_TIMEOUT is {text!r}; it must be a positive number of seconds")
    return float(text)


def _run(command: Sequence[str], folder: Path | None, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its output, in any encoding, and its exit code.

    Raises:
        OSError: it can't be started.
        subprocess.TimeoutExpired: it took longer than `seconds`, and was killed.
    """
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=seconds
    )


VERSION_SECONDS = 60.0
"""Seconds to wait for a program to print its version."""


def version_of(*command: str) -> str:
    """The output of a program's `--version`; empty if the program doesn't exist.

    Raises:
        BuildError: it exists and doesn't run.
    """
    if shutil.which(command[0]) is None:
        return ""
    asked = shlex.join([*command, "--version"])
    try:
        done = _run([*command, "--version"], None, VERSION_SECONDS)
    except OSError as error:
        raise BuildError(f"`{asked}` can't be run: {error}; it must be a compiler that runs here") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"`{asked}` said nothing for {VERSION_SECONDS:.0f} s; it must be a compiler that runs here") from error
    if done.returncode != 0:
        raise BuildError(f"`{asked}` {_ending(done)}; it must be a compiler that runs here")
    return done.stdout


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """How a program failed, and its output."""
    said = (done.stderr + done.stdout).strip() or "no output"
    if done.returncode >= 0:
        return f"failed with exit code {done.returncode}: {said}"
    try:
        name = signal.Signals(-done.returncode).name
    except ValueError:
        name = f"signal {-done.returncode}"
    return f"was killed by {name}: {said}"


def source_files() -> list[Path]:
    """All handwritten sources that are compiled."""
    return sorted(p for p in SOURCES.rglob("*") if p.suffix in (".h", ".cuh", ".cpp"))


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:16]


def _cache_place() -> tuple[str, Path]:
    """The environment variable that determines the cache folder, and the folder, which may not exist.

    Raises:
        BuildError: no variable determines it, and the user has no home.
    """
    name, inside = "FP8ATTN_CACHE", ""
    if not os.environ.get(name):
        name, inside = "XDG_CACHE_HOME", "fp8attn"
    text = os.environ.get(name)
    try:
        if text:
            return name, (Path(text).expanduser() / inside).absolute()
        return "HOME", (Path.home() / ".cache" / "fp8attn").absolute()
    except (RuntimeError, OSError) as error:  # no home, or a current folder that was deleted
        named = f"{name} is {text!r}" if text else "HOME isn't set, and the user has no other home"
        raise BuildError(f"there is no cache folder: {named} ({error}); FP8ATTN_CACHE must be the absolute path of a folder of your own") from error


def cache_folder() -> Path:
    """The cache folder, created if it doesn't exist: FP8ATTN_CACHE, or fp8attn in the user's cache folder. `~` at its
    start is the user's home.

    Raises:
        BuildError: it can't be created or read; or another user can write to it, and so could make this process load
            any code.
    """
    name, folder = _cache_place()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise _unusable(folder, error) from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"the cache folder {folder} (from {name}) is another user's or others can write to it: user {status.st_uid},"
            f" mode {stat.S_IMODE(status.st_mode):04o}, this process's user is {os.getuid()}; set FP8ATTN_CACHE to a folder of your own, mode 0700"
        )
    return folder


def _unusable(folder: Path, error: OSError) -> BuildError:
    """The error that the cache folder, or something in it, can't be created, read or written."""
    return BuildError(
        f"the cache folder {folder} (from {_cache_place()[0]}) can't be used: {error}; set FP8ATTN_CACHE to a folder of your own, mode 0700,"
        " on a file system that can be written to and has free space"
    )


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process holds the lock file at `path`.

    Raises:
        BuildError: the lock can't be acquired.
    """
    limit = timeout()
    deadline = time.monotonic() + limit
    try:
        file = open(path, "w")  # noqa: SIM115 - it is closed below
    except OSError as error:
        raise _unusable(path.parent, error) from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has held {path} for {limit:g} s; end it, or set FP8ATTN_COMPILE_TIMEOUT to more seconds"
                    ) from error
                time.sleep(0.05)
            except OSError as error:
                raise BuildError(
                    f"{path} can't be locked: {error.strerror or error}; set FP8ATTN_CACHE to a folder on a file system that has locks"
                ) from error
        yield


def resources(report: str) -> dict[str, int]:
    """Resources of one kernel, from the output of ptxas -v: registers of a thread; bytes of its stack, spill stores and
    spill loads; bytes of static shared memory."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "static_shared_bytes": r"(\d+) bytes smem",
    }
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    return {name: 0 if match is None else int(match[1]) for name, match in found.items()}


def report_of(instance: str, report: str) -> str:
    """The part of ptxas's output that is about the kernels of an instance, which is an argument of their templates."""
    _, *kernels = report.split("Compiling entry function ")
    return "".join(kernel for kernel in kernels if f"{len(instance)}{instance}" in kernel.split(maxsplit=1)[0])


def commit() -> str | None:
    """The commit of the checkout that contains the sources, or None if they aren't in one."""
    if shutil.which("git") is None:
        return None
    try:
        tracked = _run(["git", "-C", str(SOURCES), "ls-files", "--error-unmatch", Path(__file__).name], None, VERSION_SECONDS)
        if tracked.returncode != 0:
            return None  # another project's checkout, around site-packages
        return _run(["git", "-C", str(SOURCES), "describe", "--always", "--abbrev=40", "--dirty"], None, VERSION_SECONDS).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):  # a library is usable without a commit
        return None


def compile_by(command: Sequence[str], folder: Path) -> str:
    """Run a compiler in `folder`, and return its output.

    Raises:
        BuildError: it fails. The message contains its output.
    """
    limit = timeout()
    try:
        done = _run(command, folder, limit)
    except OSError as error:
        raise BuildError(f"the CUDA kernels don't compile here: {command[0]}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"the CUDA kernels don't compile here: {command[0]} wasn't done after {limit:g} s; it must be, or FP8ATTN_COMPILE_TIMEOUT must be larger"
        ) from error
    if done.returncode != 0:
        memory = "; if it ran out of memory, set MAX_JOBS to fewer compilers at the same time" if done.returncode == -signal.SIGKILL else ""
        raise BuildError(f"the CUDA kernels don't compile here: {command[0]} {_ending(done)}{memory}")
    return done.stderr + done.stdout


def link_flags() -> list[str]:
    """Flags of a shared library with a CUDA runtime of its own.

    So it is loaded beside any torch, whatever CUDA that was built with. Streams, contexts and memory are the driver's,
    which all runtimes of a process share.
    """
    return ["-shared", *(f"-L{cuda_home()}/{name}" for name in ("lib64", "lib")), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


@dataclass(frozen=True)
class Kernels:
    """The library of some instances for one architecture. For each it has a function `launch_<name>`."""

    instances: tuple[Config, ...]
    arch: int

    @property
    def name(self) -> str:
        """A name that is different for every library that a GPU may load."""
        return f"kernels_{self.arch}_{_hash([c.name for c in self.instances])[:8]}"

    @property
    def announcement(self) -> str:
        """What is being compiled, for a message to the user."""
        kernels = dict.fromkeys(render.KINDS[type(c)][0].removesuffix(".cuh") for c in self.instances)
        return f"{len(self.instances)} CUDA kernels ({', '.join(kernels)}, sm_{self.arch})"

    @property
    def compilers_at_once(self) -> int:
        """Number of compilers that run at the same time, on a core each."""
        return min(jobs(), os.cpu_count() or 1, len(self.instances))

    @property
    def seconds(self) -> int:
        """About how long it takes to compile."""
        return COMPILE_SECONDS + (math.ceil(len(self.instances) / self.compilers_at_once) - 1) * NEXT_SECONDS

    def content(self) -> str:
        """Hash of everything that determines what the library does and where it can be loaded: sources, rendered
        sources, flags."""
        written = [path for path in source_files() if path.name == "params.h" or path.name not in BINDING_SOURCES]
        parts = [*cuda_flags(self.arch), *_texts(written)]
        return _hash(parts + [f"{name}\0{text}" for name, text in render.files(self.instances).items()])

    def compilers(self) -> list[str]:
        """Versions of the compilers that make it."""
        return [version_of(*nvcc()), version_of(*cxx())]

    def compile_into(self, folder: Path) -> dict[str, Any]:
        """Make the library in an empty folder, and return the entries of build_meta.json that only this library has.

        Raises:
            BuildError: a compiler fails. The message contains its output.
        """
        rendered = render.files(self.instances)
        for name, text in rendered.items():
            (folder / name).write_text(text)
        units = units_of([name for name in rendered if name.endswith(".cu")], self.compilers_at_once)
        for name, sources in units.items():
            (folder / f"{name}.cu").write_text("".join(f'#include "{source}"\n' for source in sources))
        report = "".join(compile_kernels(folder, [*units], self.arch).values())
        compile_by([*cxx(), *(f"{name}.o" for name in units), *link_flags(), "-o", f"{self.name}.so"], folder)
        return self.facts({config.name: report_of(config.name, report) for config in self.instances})

    def facts(self, reports: dict[str, str]) -> dict[str, Any]:
        """The entries of build_meta.json that only this library has. `reports`: the output of ptxas, by instance."""
        return {
            "arch": self.arch,
            "instances": {c.name: dict(zip(c.__dataclass_fields__, astuple(c), strict=True)) for c in self.instances},
            "cuda_flags": cuda_flags(self.arch),
            "nvcc": version_of(*nvcc()).strip().splitlines()[-1:],
            "resources": {c.name: resources(reports.get(c.name, "")) | {"shared_bytes": c.shared_bytes} for c in self.instances},
        }


@dataclass(frozen=True)
class Binding:
    """The library of torch operators, which launch any kernel."""

    name = "binding"
    announcement = "the CUDA kernels' binding"
    compilers_at_once = 1
    seconds = COMPILE_SECONDS

    def content(self) -> str:
        """Hash of everything that determines what the library does and where it can be loaded: sources, rendered
        constants, flags.

        Any torch that has the stable ABI of torch_abi.h can load it.
        """
        return _hash([*CXX_FLAGS, render.constants(), *_texts([SOURCES / name for name in BINDING_SOURCES])])

    def compilers(self) -> list[str]:
        """Versions of the compilers that make it."""
        return [version_of(*cxx())]

    def compile_into(self, folder: Path) -> dict[str, Any]:
        """Make the library in an empty folder. See `Kernels.compile_into`."""
        (folder / "constants.h").write_text(render.constants())
        # hidden: its statics stay its own, whatever else is loaded
        compile_by([*binding_command(SOURCES / "binding.cpp"), "-I.", "-fvisibility=hidden", *link_flags(), "-o", f"{self.name}.so"], folder)
        return {}


Part = Kernels | Binding


def binding_command(source: Path) -> list[str]:
    """The command that compiles a file that includes torch's headers."""
    cpp_extension = _cpp_extension()
    # not -isystem, which breaks the compiler if the toolkit is in /usr
    includes = ["-I", str(SOURCES), *(x for path in cpp_extension.include_paths() for x in ("-isystem", path)), "-I", f"{cuda_home()}/include"]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu"]
    return [*cxx(), *CXX_FLAGS, "-fPIC", *includes, str(source), *libraries]


def _texts(paths: Sequence[Path]) -> list[str]:
    return [f"{path.relative_to(SOURCES)}\0{path.read_text()}" for path in paths]


def fingerprint(part: Part) -> str:
    """Hash of content and compilers."""
    return _hash([part.content(), *part.compilers()])


def units_of(sources: Sequence[str], count: int) -> dict[str, list[str]]:
    """Up to `count` translation units, by name, that include each source once.

    nvcc takes a third of the time of a small unit for headers.
    """
    return {f"unit_{i}": [*sources[i::count]] for i in range(min(count, len(sources)))}


def compile_kernels(folder: Path, names: Sequence[str], arch: int) -> dict[str, str]:
    """Compile every NAME.cu in `folder` to NAME.o, and return the output of ptxas by name.

    Raises:
        BuildError: nvcc fails. The message contains its output.
    """
    options = [*cuda_flags(arch), *_host_compiler(folder), "-Xcompiler=-fPIC", "-Xptxas=-v", "-I", str(SOURCES), "-I", str(folder)]

    def compile_one(name: str) -> str:
        return compile_by([*nvcc(), *options, "-c", f"{name}.cu", "-o", f"{name}.o"], folder)

    with ThreadPoolExecutor(jobs()) as pool:
        return dict(zip(names, pool.map(compile_one, names), strict=True))


def _host_compiler(folder: Path) -> list[str]:
    """nvcc's options for the C++ compiler in CXX. nvcc takes a single program, so a command of several words becomes a
    script in `folder`."""
    if not os.environ.get("CXX"):
        return []
    if len(cxx()) == 1:
        return ["-ccbin", cxx()[0]]
    script = folder / "host-compiler"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(cxx())} "$@"\n')
    script.chmod(0o700)
    return ["-ccbin", str(script)]


def write_meta(folder: Path, part: Part, seconds: float, facts: dict[str, Any]) -> None:
    """Write build_meta.json: what was built, from which sources, with which compilers."""
    meta = facts | {
        "commit": commit(),
        "content": part.content(),
        "library_bytes": (folder / f"{part.name}.so").stat().st_size,
        "cxx_flags": CXX_FLAGS,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cxx": version_of(*cxx()).strip().splitlines()[:1],
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
    }
    (folder / "build_meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def make_in(folder: Path, part: Part) -> None:
    """Compile a library in an empty folder.

    Raises:
        BuildError: a compiler fails. The message contains its output.
    """
    started = time.time()
    facts = part.compile_into(folder)
    library = folder / f"{part.name}.so"
    if not library.exists():
        raise BuildError(f"the CUDA kernels don't compile here: {shlex.join(cxx())} ended without an error, and made no {library}")
    write_meta(folder, part, time.time() - started, facts)


def announce(part: Part, why: str) -> None:
    """Print one line on standard error: what is about to be compiled, about how long it takes, and why."""
    cores = f"{part.compilers_at_once} core{'s' if part.compilers_at_once > 1 else ''}"
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        print(f"fp8attn: compiling {part.announcement}, once, about {part.seconds} s on {cores}: {why}", file=sys.stderr, flush=True)


def unprebuilt_reason(part: Part) -> str:
    """Why no prebuilt library serves for a part that `prebuilt` has none for."""
    if not PREBUILT.exists():
        return f"{'this checkout' if commit() is not None else 'this installation'} of fp8attn has no prebuilt kernels"
    if (PREBUILT / part.name).exists():
        return "the prebuilt ones are of other sources"
    archs = sorted({int(path.name.split("_")[1]) for path in PREBUILT.glob("kernels_*_*")})
    if isinstance(part, Kernels) and part.arch not in archs:
        return f"there are prebuilt kernels for {', '.join(f'sm_{arch}' for arch in archs) or 'no GPU'}, and none for sm_{part.arch}"
    return "they aren't among the prebuilt kernels"


def groups(arch: int) -> tuple[tuple[Config, ...], ...]:
    """The instances that GPUs of an architecture load, by library."""
    hopper: tuple[tuple[Config, ...], ...] = (
        *GROUPS.values(),
        *VARLEN_GROUPS.values(),
        fused_small.INSTANCES,
        fused_head.INSTANCES,
        quantize.INSTANCES,
        *decode.GROUPS,
        *prefill.GROUPS,
        *decode_tensors.GROUPS,
    )
    others = (portable.group(dim, ARCHITECTURES[arch], int8, scores) for dim in portable.DIMS for int8 in (False, True) for scores in portable.GROUPS)
    return (*(hopper if arch // 10 == 9 else ()), general_quantize.INSTANCES, append.INSTANCES, *filter(None, others))


def prebuild(folder: Path, arch: int, libraries: tuple[tuple[Config, ...], ...] | None = None) -> list[Path]:
    """Compile the binding and all libraries for an architecture, or only `libraries`, ahead of time. A wheel contains
    `folder` as PREBUILT. A CPU build of torch suffices.

    Returns:
        Their folders, those that were there before included.

    Raises:
        BuildError: they can't be compiled here.
    """
    reason = missing_compiler()
    if reason is not None:
        raise BuildError(reason)
    parts: list[Part] = [Binding(), *(Kernels(instances, arch) for instances in (groups(arch) if libraries is None else libraries))]
    for part in parts:
        if prebuilt(part, folder) is not None:
            continue
        into = folder / part.name
        announce(part, "ahead of time")
        with tempfile.TemporaryDirectory() as staging:
            make_in(Path(staging), part)
            into.mkdir(parents=True, exist_ok=True)
            for name in (f"{part.name}.so", "build_meta.json"):
                shutil.copy(Path(staging) / name, into / name)
    return [folder / part.name for part in parts]


def read_meta(folder: Path) -> dict[str, Any] | None:
    """build_meta.json of a library, or None if there is none.

    Raises:
        BuildError: it can't be read, or is incomplete.
    """
    path = folder / "build_meta.json"
    try:
        meta = json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise BuildError(f"{path} can't be read: {error}; {_cure(folder)}") from error
    if meta is not None and not (isinstance(meta, dict) and isinstance(meta.get("content"), str)):
        raise BuildError(f"{path} is no record of a build: it has no 'content'; {_cure(folder)}")
    return meta


def _cure(folder: Path) -> str:
    """What to do about a library that is incomplete."""
    return "install fp8attn again" if folder.parent == PREBUILT else f"delete {folder}: then it is compiled again"


def _check_whole(folder: Path, part: Part) -> None:
    """Check that a library has the size that was compiled. Loading an incomplete one could kill the process.

    Raises:
        BuildError: it has another size, or can't be read.
    """
    path, expected = folder / f"{part.name}.so", (read_meta(folder) or {}).get("library_bytes")
    if expected is None:  # a build by an earlier version
        return
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BuildError(f"{path} can't be read: {error.strerror or error}; {_cure(folder)}") from error
    if size != expected:
        raise BuildError(f"{path} has {size} bytes; it must have {expected}; {_cure(folder)}")


def prebuilt(part: Part, brought: Path | None = None) -> Path | None:
    """The folder of a prebuilt library in `brought` (default: in the package). None if it isn't there, or was compiled
    from other sources.

    Raises:
        BuildError: it is there and its record can't be read.
    """
    folder = (PREBUILT if brought is None else brought) / part.name
    meta = read_meta(folder)
    return folder if meta is not None and meta["content"] == part.content() else None


def build(part: Part) -> Path:
    """The folder of a complete library. It is compiled if it is neither in the package nor in the cache.

    Raises:
        BuildError: it can't be compiled, or is incomplete.
    """
    folder = prebuilt(part)
    if folder is None:
        reason = missing()
        if reason is not None:
            raise BuildError(reason)
        cache, name = cache_folder(), fingerprint(part)
        try:
            folder = _built_in(cache / name, part)
        except OSError as error:
            raise _unusable(cache, error) from error
    _check_whole(folder, part)
    return folder


def _built_in(wanted: Path, part: Part) -> Path:
    """A library's folder in the cache. It is compiled if it doesn't exist.

    Raises:
        BuildError: it can't be compiled.
        OSError: the cache can't be written to.
    """
    if not wanted.exists():
        with locked(wanted.with_name(f"{wanted.name}.lock")):
            if not wanted.exists():
                announce(part, unprebuilt_reason(part))
                staging = Path(tempfile.mkdtemp(prefix=f"{wanted.name}.", dir=wanted.parent))
                try:
                    make_in(staging, part)
                    staging.rename(wanted)
                except BaseException:
                    shutil.rmtree(staging, ignore_errors=True)
                    raise
    return wanted


def obstacle() -> str | None:
    """The reason why a library can't be compiled here, and what to do, as far as this is known without compiling one;
    or None.

    Beyond `missing`, it checks whether the compilers run, the values of environment variables, and whether the cache
    folder can be written to and locked.
    """
    reason = missing()
    if reason is not None:
        return reason
    try:
        jobs()
        timeout()
        for command in (nvcc(), cxx()):
            if not version_of(*command):
                return f"{shlex.join(command)} isn't a compiler that runs here: `--version` says nothing"
        folder = cache_folder()
        try:
            with tempfile.NamedTemporaryFile(prefix="probe.", dir=folder) as file:
                file.write(bytes(4096))
                file.flush()
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _unusable(folder, error) from error
    except BuildError as error:
        return str(error)
    return None


_libraries: dict[Kernels, Library] = {}
_having: dict[tuple[Config, int], Library] = {}
"""By config and architecture, the first loaded library that contains it."""
_failures: dict[Part, str] = {}
_loading = threading.Lock()


def load_binding() -> Any:
    """The binding's operators, compiled on their first use on this machine.

    Raises:
        BuildError: they can't be compiled or loaded. The failure is remembered, so that only the first call tries.
    """
    operators = getattr(torch.ops, NAMESPACE)
    if not hasattr(operators, "forward"):
        with _remembered(Binding()):
            torch.ops.load_library(str(build(Binding()) / f"{Binding.name}.so"))
    return operators


@contextlib.contextmanager
def _remembered(part: Part) -> Iterator[None]:
    """Inside, a failure is remembered. An earlier failure of the same part is raised again."""
    if part in _failures:
        raise BuildError(_failures[part])
    try:
        yield
    except Exception as error:  # whatever it is, attention can still run in Triton
        said = f"{error}" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        _failures[part] = str(error) if isinstance(error, BuildError) else f"{part.announcement} can't be loaded here: {said}"
        raise BuildError(_failures[part]) from error


def load(instances: tuple[Config, ...] | None = None, arch: int = 90) -> Library:
    """The kernels, compiled on their first use on this machine. None: those of the Hopper kernel.

    Raises:
        BuildError: they can't be compiled or loaded. The failure is remembered, so that only the first call tries.
    """
    kernels = Kernels(INSTANCES if instances is None else instances, arch)
    with _loading:
        if kernels not in _libraries:
            # compile both at the same time
            with _remembered(kernels), ThreadPoolExecutor(1) as pool:
                binding = pool.submit(load_binding)
                library = ctypes.CDLL(str(build(kernels) / f"{kernels.name}.so"))
                operators = binding.result()
                launchers = {c: ctypes.cast(library[f"launch_{c.name}"], ctypes.c_void_p).value or 0 for c in kernels.instances}
                _libraries[kernels] = Library(operators, launchers)
            for config in kernels.instances:
                _having.setdefault((config, arch), _libraries[kernels])
    return _libraries[kernels]


def load_with(config: Config, group: tuple[Config, ...], arch: int) -> Library:
    """A library that contains an instance: one that is loaded already, or the one of its group.

    Raises:
        BuildError: it can't be compiled.
    """
    found = _having.get((config, arch))
    return load(group if config in group else (config,), arch) if found is None else found


def unavailable(config: Config | None = None, arch: int = 90) -> str | None:
    """The reason why an instance isn't available, as far as is known without compiling, or None.

    Without `config`: why none is.
    """
    if _libraries if config is None else (config, arch) in _having:
        return None  # it is loaded: looking for compilers takes longer than a small kernel runs
    for part, words in list(_failures.items()):  # other threads add to them
        if isinstance(part, Binding) or (not _libraries if config is None else part.arch == arch and config in part.instances):
            return words
    reason = missing()
    return None if reason is None or os.path.exists(PREBUILT) else reason


def built(instances: tuple[Config, ...] | None = None, arch: int = 90) -> dict[str, Any] | None:
    """build_meta.json of the build that would be loaded now, or None if there is none. By default, of the Hopper
    kernel's instances.

    Raises:
        BuildError: this can't be determined: the record can't be read, the cache folder can't be used, or a compiler
            doesn't run.
    """
    folder = built_folder(Kernels(INSTANCES if instances is None else instances, arch))
    return None if folder is None else read_meta(folder)


def built_folder(part: Part) -> Path | None:
    """The folder of a library that is compiled already and would be loaded now, or None if there is none.

    Raises:
        BuildError: this can't be determined, as in `built`.
    """
    folder = prebuilt(part)
    if folder is not None or missing() is not None:
        return folder
    folder = cache_folder() / fingerprint(part)
    return folder if os.path.exists(folder) else None
