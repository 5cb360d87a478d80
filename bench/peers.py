"""Who is compared: fp8attn's kernels and PyTorch's attention backends, each by name."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn.api import call_of
from fp8attn.cuda import run as cuda
from fp8attn.device import device_of
from fp8attn.ops import why_not_cuda
from fp8attn.triton import run

from .cases import Case, Tensors, inputs
from .errors import Bad, Errors
from .timing import input_sets

KERNEL, END_TO_END = "kernel alone", "end to end"

MOST_SCORES = 1 << 28
"""Of PyTorch's math backend, which stores them all, more than once."""

Attention = Callable[[int], torch.Tensor]
"""The answer (B, Hq, Sq, Dv) to the input set of this number, modulo the number of sets."""


@dataclass(frozen=True)
class Problem:
    """A case with its inputs: `sets` are copies of the same q, k and v."""

    case: Case
    distribution: str
    device: torch.device
    sets: tuple[Tensors, ...]

    @classmethod
    def of(cls, case: Case, distribution: str, device: torch.device, *, rotate: bool) -> Problem:
        """
        Args:
            rotate: whether calls that are timed should walk over as many copies as keep them out of L2.
        """
        first = inputs(case, distribution, device)
        copies = input_sets(sum(x.nbytes for x in first), device) if rotate else 1
        rest: list[Tensors] = [(first[0].clone(), first[1].clone(), first[2].clone()) for _ in range(copies - 1)]
        return cls(case, distribution, device, (first, *rest))

    def expected(self) -> torch.Tensor:
        """Exact attention of the unquantized inputs, float32 (B, Hq, Sq, Dv)."""
        return cast(torch.Tensor, fp8attn.reference_sdpa(*self.sets[0], **self.case.options, out_dtype=torch.float32))


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        stages: of KERNEL and END_TO_END, those whose table it stands in; what takes bfloat16 as it is stands in both.
        prepare: everything that isn't timed.
        own: whether it is fp8attn's.
    """

    name: str
    stages: tuple[str, ...]
    prepare: Callable[[Problem], Attention]
    own: bool = False


def _triton(problem: Problem) -> Attention:
    calls = [call_of(*tensors, **problem.case.options) for tensors in problem.sets]
    device = device_of(problem.device)
    return lambda i: run.forward(calls[i % len(calls)], device)[0]


def _cuda(problem: Problem) -> Attention:
    calls = [call_of(*tensors, **problem.case.options) for tensors in problem.sets]
    device = device_of(problem.device)
    reason = why_not_cuda(calls[0])
    if reason is not None:
        raise fp8attn.BackendUnavailable(reason)
    return lambda i: cuda.forward(calls[i % len(calls)], device)[0]


def _end_to_end(backend: Literal["triton", "cuda"], problem: Problem) -> Attention:
    options = problem.case.options
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options, backend=backend))


def _pytorch(backend: SDPBackend, problem: Problem) -> Attention:
    if backend == SDPBackend.MATH and problem.case.scores > MOST_SCORES:
        raise ValueError(f"{problem.case.scores} scores, which this backend stores; not asked beyond {MOST_SCORES}")
    options = problem.case.options

    def attention(i: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*problem.sets[i % len(problem.sets)], **options)

    return attention


OWN = (
    Peer("fp8attn cuda", (KERNEL,), _cuda, own=True),
    Peer("fp8attn cuda end to end", (END_TO_END,), functools.partial(_end_to_end, "cuda"), own=True),
    Peer("fp8attn triton", (KERNEL,), _triton, own=True),
    Peer("fp8attn triton end to end", (END_TO_END,), functools.partial(_end_to_end, "triton"), own=True),
)
PYTORCH = tuple(
    Peer(f"SDPA {name}", (KERNEL, END_TO_END), functools.partial(_pytorch, backend))
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("math", SDPBackend.MATH),
    )
)
PEERS = OWN + PYTORCH


@dataclass(frozen=True)
class Answer:
    """A peer's answer to a problem: its errors and how to repeat it, or why there is none.

    `unavailable`: there can be none on this machine, and nothing is wrong.
    """

    errors: Errors | None = None
    attention: Attention | None = None
    refused: str | None = None
    unavailable: bool = False


def answer(peer: Peer, problem: Problem, expected: torch.Tensor, bad: Bad) -> Answer:
    """Ask a peer once. Whatever it raises is a refusal, and so is an answer that isn't finite."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attention = peer.prepare(problem)
            poison(expected)
            errors = Errors.of(attention(0), expected, bad)
        except Exception as error:
            # PyTorch says in warnings why a backend can't
            said = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
            words = "; ".join([f"{type(error).__name__}: {error}".strip(), *said])
            return Answer(refused=words, unavailable=isinstance(error, fp8attn.BackendUnavailable))
    if not errors.finite:
        return Answer(errors=errors, refused="the answer isn't finite")
    return Answer(errors, attention)


def poison(like: torch.Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next for a bfloat16 tensor of this size, so that what a kernel doesn't write shows."""
    torch.full_like(like, torch.nan, dtype=torch.bfloat16)


def compile_case(case: Case) -> None:
    """Run a case once: its kernels are then in Triton's cache on disk."""
    device = torch.device("cuda", torch.cuda.current_device())
    fp8attn.triton_sdpa(*inputs(case, "normal", device), **case.options)
    torch.cuda.synchronize()


def compile_all(cases: Sequence[Case]) -> Iterator[None]:
    """Compile what cases need side by side, a process each at a time, and yield as they finish.

    A compiler's error is left to the run of the case, which reports it.
    """
    workers = min(len(cases), os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in as_completed([pool.submit(compile_case, case) for case in cases]):
            yield
