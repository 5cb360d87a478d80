"""Compiling what cases need before anyone is timed, side by side."""

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
    """Have the peer of this name answer once, so that its kernels are in the caches on disk; the compiler's words if fp8attn's can't be."""
    peer = next(peer for peer in (*adapters.PEERS, *rows.ROWS) if peer.name == name)
    try:
        peer.prepare(Problem.of(case, "normal", torch.device("cuda", torch.cuda.current_device()), rotate=False))(0)
        torch.cuda.synchronize()
    except fp8attn.BackendUnavailable:
        pass  # a machine without nvcc has Triton's kernels only; nothing is wrong with it
    except Exception as error:
        if peer.own:
            return f"{name}: {type(error).__name__}: {error}"
    return None


def compile_all(cases: Iterable[Case], peers: Sequence[Peer], bar: Progress) -> Iterator[tuple[Case, str | None]]:
    """Compile what those of these peers that compile need for each case, once, and yield each case as one of its peers is through, with what is wrong
    or None."""
    keep_triton_cache()
    # a peer holds what can't be sent to a process
    wanted = [(case, peer.name) for case in dict.fromkeys(cases) for peer in peers if peer.compiles]
    task = bar.add_task("compiling", total=len(wanted))
    random.Random(0).shuffle(wanted)  # neighbours need the same kernels, and each would compile them
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
    """`compile_all` where what goes wrong does so again, and is reported, when the answer is wanted."""
    for _ in compile_all(cases, peers, bar):
        pass
