"""Processes that need the same Triton kernel at the same time compile it once: the first compiles, the others wait for
Triton's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.compiler import compiler

LOCKS = Path(tempfile.gettempdir()) / "fp8attn-triton-locks"


def compile_once() -> None:
    """From now on, Triton compiles by `locked`. No kernel may have been launched before."""
    LOCKS.mkdir(exist_ok=True)
    triton.compiler.compile = locked


def locked(src: Any, target: Any = None, options: dict | None = None, **others: Any) -> Any:
    """triton.compile, by one process at a time for each kernel."""
    target = target or triton.runtime.driver.active.get_current_target()
    backend = compiler.make_backend(target)
    parsed = backend.parse_options({**(options or {}), **src.parse_options()})
    key = compiler.get_cache_key(src, backend, parsed, env_vars=compiler.get_cache_invalidating_env_vars())
    with exclusive(LOCKS / hashlib.sha256(key.encode()).hexdigest()):
        return compiler.compile(src, target=target, options=options, **others)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time. Unlocks by itself: a child forked meanwhile would keep the lock as long as it has the file open."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
