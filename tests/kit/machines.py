"""A machine that could compile the CUDA kernels and hasn't done so.

Its compilers are shell scripts, so no CUDA toolkit is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8attn.cuda import build
from fp8attn.cuda.build import BuildError, Kernels
from fp8attn.cuda.configs import INSTANCES

INSTANCE = INSTANCES[:1]

COMPILER = """#!/bin/sh
for word in "$@"; do
    if [ "$last" = -o ]; then echo "compiled by $0" > "$word"; fi
    if [ "$word" = --version ]; then echo "$0 1.0"; fi
    last=$word
done
echo "$0 $*" >> "{log}"
"""


def program(path: Path, text: str) -> Path:
    """Write an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Machine:
    """A machine that could compile and hasn't done so: its folders, compilers and environment.

    Attributes:
        folder: contains only the following.
        cache: folder of builds, which doesn't exist yet.
        toolkit: folder of the CUDA toolkit.
        cxx: the C++ compiler.
        log: file in which the compilers record their calls.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.cache, self.toolkit, self.log = folder / "cache", folder / "toolkit", folder / "log"
        self.cxx = program(folder / "bin" / "c++", COMPILER.format(log=self.log))
        self.nvcc = program(self.toolkit / "bin" / "nvcc", COMPILER.format(log=self.log))
        for name in ("XDG_CACHE_HOME", "MAX_JOBS", "FP8ATTN_COMPILE_TIMEOUT", "PYTORCH_NVCC", "CUDA_HOME", "CUDA_PATH"):
            patch.delenv(name, raising=False)
        patch.setenv("FP8ATTN_CACHE", str(self.cache))
        patch.setenv("CXX", str(self.cxx))
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(build, "cuda_home", lambda: str(self.toolkit))
        patch.setattr(build, "missing", build.missing.__wrapped__)
        patch.setattr(build, "PREBUILT", folder / "prebuilt")
        patch.setattr(build, "NAMESPACE", f"fp8attn_{folder.name}")
        for name in ("_failures", "_libraries", "_having"):
            patch.setattr(build, name, {})
        self.binding = object()
        patch.setattr(build, "load_binding", lambda: self.binding)

    def calls(self) -> list[list[str]]:
        """The calls of compilers, except for those that ask for a version."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [words for words in map(str.split, lines) if words[-1] != "--version"]

    def build(self) -> Path:
        """The library's folder. It is compiled if it doesn't exist."""
        return build.build(Kernels(INSTANCE, 90))

    def failure(self) -> str:
        """The reason why the library isn't available. Every attempt to load it must raise this as a BuildError."""
        with pytest.raises(BuildError) as caught:
            build.load(INSTANCE)
        words = str(caught.value)
        with pytest.raises(BuildError, match=re.escape(words)):
            build.load(INSTANCE)
        assert build.unavailable(INSTANCE[0]) == words
        return words


def fails(number: int) -> Callable[..., None]:
    """A replacement of a function that calls the operating system. It raises the OSError `number`."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


def a_file_in_its_place(machine: Machine) -> None:
    machine.cache.touch()


def a_file_above_it(machine: Machine) -> None:
    machine.patch.setenv("FP8ATTN_CACHE", str(machine.log / "cache"))
    machine.log.touch()


def a_link_to_nothing(machine: Machine) -> None:
    machine.cache.symlink_to(machine.folder / "nothing" / "here")


def another_users(machine: Machine) -> None:
    machine.cache.mkdir(0o700)
    user = os.getuid()
    machine.patch.setattr(os, "getuid", lambda: user + 1)


def writable_by_all(machine: Machine) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(0o777)


def cannot_be_made(machine: Machine) -> None:
    machine.patch.setattr(Path, "mkdir", fails(errno.EROFS))


def cannot_be_read(machine: Machine) -> None:
    machine.cache.mkdir(0o700)
    machine.patch.setattr(Path, "mkdir", lambda *_, **__: None)
    own = Path.stat
    machine.patch.setattr(Path, "stat", lambda path, **options: fails(errno.EACCES)() if path == machine.cache else own(path, **options))


def refuses_files(number: int) -> Callable[[Machine], None]:
    """The fault of a folder on a file system that is read-only, full or not the user's."""

    def fault(machine: Machine) -> None:
        machine.patch.setattr(tempfile, "mkdtemp", fails(number))
        machine.patch.setattr(tempfile, "NamedTemporaryFile", fails(number))

    return fault


def has_no_locks(machine: Machine) -> None:
    machine.patch.setattr(fcntl, "flock", fails(errno.ENOLCK))


CACHES: dict[str, tuple[Callable[[Machine], None], str]] = {
    "a file in its place": (a_file_in_its_place, "File exists"),
    "a file above it": (a_file_above_it, "Not a directory"),
    "a link to nothing": (a_link_to_nothing, "File exists"),
    "another user's": (another_users, "is another user's or others can write to it"),
    "writable by all": (writable_by_all, "mode 0777"),
    "cannot be made": (cannot_be_made, "Read-only file system"),
    "cannot be read": (cannot_be_read, "Permission denied"),
    "read-only": (refuses_files(errno.EROFS), "Read-only file system"),
    "not writable": (refuses_files(errno.EACCES), "Permission denied"),
    "full": (refuses_files(errno.ENOSPC), "No space left on device"),
    "over its quota": (refuses_files(errno.EDQUOT), "quota exceeded"),
    "without locks": (has_no_locks, "No locks available"),
}
