"""Common parts of all commands: one-line errors, filters that must match something, and paths that are checked before
any work."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .machine import HERE, IS_CHECKOUT, ROOT

T = TypeVar("T")

PARTIAL = ".partial"
"""Suffix of the results file of an unfinished run."""

NO_GPU = "needs an NVIDIA GPU, and torch sees none"

PICTURES = (".svg", ".png")


class UsageError(ValueError):
    """The request can't be done here. `main` prints it as one line; the exit code is 2."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError where argparse prints the usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help lists the options")


def checkout(what: str) -> Path:
    """The root of the repository.

    Args:
        what: the request that needs it, for the error.

    Raises:
        UsageError: this is an installed package.
    """
    if not IS_CHECKOUT:
        raise UsageError(
            f"{what} needs a checkout of the fp8attn repository, with README.md, docs/ and bench/results; {HERE} is an installed package"
        )
    return ROOT


def at_least(minimum: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The type of an option that takes numbers from `minimum` on."""
    noun = "an integer" if kind is int else "a number"

    def parsed(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not minimum <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} isn't {noun} of {minimum} or more")
        return value

    return parsed


def more_than_zero(text: str) -> float:
    """The type of an option that takes numbers above 0."""
    value = at_least(0, float)(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number above 0")
    return value


def _name(one: Any) -> str:
    return one.name


def chosen(wanted: str | Sequence[str] | None, among: Sequence[T], option: str, kind: str = "case", name: Callable[[T], str] = _name) -> list[T]:
    """Items with one of the wanted substrings in their names, ignoring case; all items if nothing is wanted.

    Args:
        option: the option that gave `wanted`, for the error.
        kind: what the items are called in the error.

    Raises:
        UsageError: one of the substrings is in no name.
    """
    parts = [wanted] if isinstance(wanted, str) else list(wanted or ())
    names = [name(one) for one in among]
    for part in parts:
        if not any(part.lower() in one.lower() for one in names):
            raise UsageError(f"no {kind} has {part!r} in its name ({option}); there are {', '.join(dict.fromkeys(names))}")
    return [one for one, its in zip(among, names, strict=True) if not parts or any(part.lower() in its.lower() for part in parts)]


def _refused(path: Path, why: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{str(path)!r} {why}")


def _writable_folder(folder: Path, path: Path) -> None:
    if not folder.is_dir():
        raise _refused(path, f"can't be written: {str(folder)!r} isn't a folder that exists")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refused(path, f"can't be written: no file can be made in {str(folder)!r}: {error.strerror}") from error


def output_file(text: str) -> Path:
    """The type of an option that names a file to write.

    The folder must exist and be writable, and the path must not be a folder.
    """
    path = Path(text)
    if not text or path.is_dir():
        raise _refused(path, "is a folder; it must be a file")
    if path.exists() and not path.is_file():  # a device or a pipe
        return path
    _writable_folder(path.parent, path)
    if path.exists() and not os.access(path, os.W_OK):
        raise _refused(path, "can't be written: it is read-only")
    return path


def matplotlib_lacks() -> str | None:
    """How to install what pictures need, or None if it is installed."""
    return None if importlib.util.find_spec("matplotlib") else "pictures need matplotlib: pip install matplotlib"


def require_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        UsageError: matplotlib isn't installed.
    """
    lacking = matplotlib_lacks()
    if lacking is not None:
        raise UsageError(lacking)


def picture_file(text: str) -> Path:
    """The type of an option that names a picture to write. Its suffix determines the format."""
    path = output_file(text)
    lacking = matplotlib_lacks()
    if lacking is not None:
        raise argparse.ArgumentTypeError(lacking)
    if path.suffix not in PICTURES:
        raise _refused(path, f"isn't a picture's name; its suffix must be {' or '.join(PICTURES)}")
    return path


def output_folder(text: str) -> Path:
    """The type of an option that names a folder to write into. The folder is created if it doesn't exist."""
    path = Path(text)
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise _refused(path, f"can't be a folder: {str(nearest)!r} is a file")
    _writable_folder(nearest, path)
    return path


def input_file(text: str) -> Path:
    """The type of an option that names a file to read."""
    path = Path(text)
    if not path.exists():
        raise _refused(path, "doesn't exist")
    if path.is_dir():
        raise _refused(path, "is a folder; it must be a file")
    if not os.access(path, os.R_OK):
        raise _refused(path, "can't be read")
    return path


def sibling(path: Path, name: str) -> Path:
    """The picture file `name` in the folder of `path`.

    Raises:
        UsageError: it can't be written.
    """
    try:
        return picture_file(str(path.with_name(name)))
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from error


def add_case(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", metavar="SUBSTRING", help="only cases with this in their names; repeatable")


def add_peer(parser: argparse.ArgumentParser, kind: str = "row") -> None:
    parser.add_argument("--peer", action="append", metavar="SUBSTRING", help=f"only {kind}s with this in their names; repeatable")


def add_turns(parser: argparse.ArgumentParser, kind: str = "row") -> None:
    parser.add_argument("--rounds", type=at_least(1), default=5, help=f"turns that every {kind} gets (default: %(default)s)")
    parser.add_argument(
        "--milliseconds", type=more_than_zero, default=10.0, help="length of a turn, and of the same work before it (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=output_file, metavar="FILE",
        help=f"write JSON lines, to FILE{PARTIAL} until the run is over; what FILE held is kept until then",
    )  # fmt: skip


@contextlib.contextmanager
def replacing(file: Path | None) -> Iterator[Path | None]:
    """A temporary file next to `file`, for appending results. It replaces `file` at the end.

    A run that is refused or has red gates leaves `file` unchanged. So does an interrupted run, whose results stay in
    the temporary file.
    """
    if file is None or (file.exists() and not file.is_file()):
        yield file
        return
    partial = file.with_name(file.name + PARTIAL)
    partial.unlink(missing_ok=True)
    try:
        yield partial
    except BaseException:
        if partial.exists():
            print(f"cut short: what was measured is in {partial}, and {file} is as it was", file=sys.stderr)
        raise
    if partial.exists():
        partial.replace(file)
