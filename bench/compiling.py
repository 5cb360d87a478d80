"""Compiles in parallel what cases need, before anything is timed."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

import fp8attn

from . import adapters, rows
from .cases import Case
from .machine import keep_triton_cache
from .peers import Peer, Problem
from .progress import Progress


def compile_one(case: Case, name: str) -> str | None:
    """Have a peer answer once, so that its kernels are in the disk caches.

    Returns the compiler's message if fp8attn's kernels don't compile.
    """
    peer = next(peer for peer in (*adapters.PEERS, *rows.ROWS) if peer.name == name)
    try:
        peer.prepare(Problem.of(case, "normal", torch.device("cuda", torch.cuda.current_device()), rotate=False))(0)
        torch.cuda.synchronize()
    except fp8attn.BackendUnavailable:
        pass  # a machine without nvcc has Triton's kernels only, which is no error
    except Exception as error:
        if peer.own:
            return f"{name}: {type(error).__name__}: {error}"
    return None


def compile_all(cases: Iterable[Case], peers: Sequence[Peer], bar: Progress) -> Iterator[tuple[Case, str | None]]:
    """Compile, for each case, what the peers that compile need.

    Yields the case when one of its peers is done, with an error message or None.
    """
    keep_triton_cache()
    # pass the peer's name, because a peer can't be sent to a process
    wanted = [(case, peer.name) for case in dict.fromkeys(cases) for peer in peers if peer.compiles]
    task = bar.add_task("compiling", total=len(wanted))
    random.Random(0).shuffle(wanted)  # neighbours need the same kernels, and would each compile them
    workers = min(len(wanted), os.cpu_count() or 1, 12)
    if workers == 0:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(compile_one, case, name): case for case, name in wanted}
        for done in as_completed(started):
            bar.advance(task)
            try:
                yield started[done], done.result()
            except Exception as error:  # the process died
                yield started[done], f"{type(error).__name__}: {error}"


def compile_first(cases: Iterable[Case], peers: Sequence[Peer], bar: Progress) -> None:
    """`compile_all`, ignoring errors. They occur again and are reported when the answer is needed."""
    for _ in compile_all(cases, peers, bar):
        pass
