"""Processes that are forked from one that has imported what they need, torch above all: it takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = ("torch", "triton", "ranks", "fp8attn.distributed", "torch.distributed.tensor")
"""None of them touches a GPU, which processes that are forked afterwards couldn't use."""


@contextlib.contextmanager
def server() -> Iterator[ForkServerContext]:
    """Inside, processes of this context are started. They import what this one can import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # of the server
    try:
        yield context
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def _execute(program: str, errors: str) -> None:
    """In the process: what it says goes to a file."""
    with open(errors, "wb") as file:
        os.dup2(file.fileno(), 2)
    exec(program, {})


def in_another_process(program: str) -> None:
    """Run lines of Python, which may import the tests, in another process. They must not fail, nor end it."""
    with tempfile.TemporaryDirectory() as folder, server() as context:
        errors = Path(folder) / "errors"
        process = context.Process(target=_execute, args=(program, str(errors)))
        process.start()
        process.join()
        assert process.exitcode == 0, f"exit code {process.exitcode}: {errors.read_text() if errors.exists() else ''}"
