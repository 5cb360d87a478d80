"""Compiling what cases need before anyone is timed, side by side."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

import fp8attn

from .adapters import PEERS
from .cases import Case
from .peers import Peer, Problem


def compile_case(case: Case, names: Sequence[str]) -> str | None:
    """Have the peers of these names answer once, so that their kernels are in the caches on disk; the compiler's words if fp8attn's can't be."""
    problem = Problem.of(case, "normal", torch.device("cuda", torch.cuda.current_device()), rotate=False)
    for peer in PEERS:
        try:
            if peer.name in names:
                peer.prepare(problem)(0)
        except fp8attn.BackendUnavailable:
            pass  # a machine without nvcc has Triton's kernels only; nothing is wrong with it
        except Exception as error:
            if peer.own:
                return f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    return None


def compile_all(cases: Sequence[Case], peers: Sequence[Peer]) -> Iterator[tuple[Case, str | None]]:
    """Compile what those of these peers that compile need for each case, a process each at a time, and yield each as it finishes, with what is
    wrong or None."""
    names = [peer.name for peer in peers if peer.compiles]  # a peer holds what can't be sent to a process
    workers = min(len(cases), os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(compile_case, case, names): case for case in cases}
        for done in as_completed(started):
            try:
                yield started[done], done.result()
            except Exception as error:  # the process died
                yield started[done], f"{type(error).__name__}: {error}"
