"""The peers of the comparison, by name: fp8attn's kernels, PyTorch's attention backends, and other installed
libraries."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8attn
from fp8attn.backends import cuda_unavailable, triton_unavailable
from fp8attn.cuda import run as cuda_run
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.triton import run

from .cases import SEED, Case, Tensors, inputs
from .errors import Bad, Errors
from .timing import input_sets

KERNEL, END_TO_END = "kernel alone", "end to end"

MOST_SCORES = 1 << 28
"""Most scores for PyTorch's math backend, which stores all of them more than once."""

MOST_CHECKED = 1 << 37
"""Most scores for which the exact answer is computed. For larger problems it is computed for the last CHECKED_ROWS
queries only."""

CHECKED_ROWS = 1024

Attention = Callable[[int], torch.Tensor]
"""The answer (B, Hq, Sq, Dv) to an input set, given by its number modulo the number of sets."""


def as_it_is(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    return out


def needs_nothing() -> str | None:
    return None


def device_here() -> torch.device:
    """The GPU on which everything runs, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def needs_gpu() -> str | None:
    return None if torch.cuda.is_available() else "an NVIDIA GPU"


def needs_cuda_kernels() -> str | None:
    lacking = needs_gpu() or cuda_unavailable(device_here())
    return None if lacking is None else lacking.removeprefix("cuda: ")


def needs_triton() -> str | None:
    lacking = triton_unavailable(device_here())
    return None if lacking is None else lacking.removeprefix("triton: ")


def needs_cudnn() -> str | None:
    return needs_gpu() or (None if torch.backends.cudnn.is_available() else "a build of torch with cuDNN")


def needs_flash() -> str | None:
    """PyTorch has flash attention for CPUs, too."""
    there = not torch.cuda.is_available() or torch.backends.cuda.is_flash_attention_available()
    return None if there else "a build of torch with flash attention"


@dataclass(frozen=True)
class Problem:
    """A case with its inputs. `sets` are copies of the same q, k and v."""

    case: Case
    distribution: str
    device: torch.device
    sets: tuple[Tensors, ...]

    @classmethod
    def of(cls, case: Case, distribution: str, device: torch.device, *, rotate: bool, seed: int = SEED) -> Problem:
        """A problem with inputs of a distribution.

        Args:
            rotate: whether to make enough copies that timed calls, which walk over them, don't find them in L2.
        """
        first = inputs(case, distribution, device, seed)
        copies = input_sets(sum(x.nbytes for x in first), device) if rotate else 1
        rest: list[Tensors] = [(first[0].clone(), first[1].clone(), first[2].clone()) for _ in range(copies - 1)]
        return cls(case, distribution, device, (first, *rest))

    @property
    def checked_rows(self) -> int:
        """Number of last queries for which there is an expected answer."""
        return self.case.q_length if self.case.scores <= MOST_CHECKED else min(CHECKED_ROWS, self.case.q_length)

    def expected(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Exact attention of the last `checked_rows` unquantized queries, computed in `dtype`: float32
        (B, Hq, rows, Dv)."""
        q, k, v = self.sets[0]
        # the last rows of a square causal problem are a causal problem aligned to the bottom right
        return cast(
            torch.Tensor,
            fp8attn.reference_sdpa(
                q[:, :, -self.checked_rows :], k, v, **self.case.options, causal_alignment="bottom_right", out_dtype=torch.float32, dtype=dtype
            ),
        )


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        stages: the tables (KERNEL, END_TO_END) in which the row is. A peer that takes bfloat16 directly is in both.
        prepare: everything that isn't timed.
        own: whether it is fp8attn's.
        jit: whether its first answer to a case compiles to a disk cache, as fp8attn's do.
        needs: what this machine doesn't have for it, or None.
        restored: converts the answer to the inputs' units, if the call doesn't do it.
    """

    name: str
    stages: tuple[str, ...]
    prepare: Callable[[Problem], Attention]
    own: bool = False
    jit: bool = False
    needs: Callable[[], str | None] = needs_nothing
    restored: Callable[[Problem, torch.Tensor], torch.Tensor] = as_it_is

    @property
    def compiles(self) -> bool:
        return self.own or self.jit

    def effort(self, case: Case, gpu: bool) -> float:
        """Estimated seconds of an answer, for estimates of the remaining time.

        On a CPU, Triton's kernels are interpreted.
        """
        if gpu:
            return 0.3
        elements = case.q_heads * case.q_length * case.head_dim + case.kv_heads * case.kv_length * (case.head_dim + case.value_dim)
        if self.own and "triton" in self.name:
            return 0.3 + 1e-5 * case.batch * (elements * (END_TO_END in self.stages) + case.scores / case.batch)
        return 0.02 + 2e-6 * case.batch * elements


def _triton(problem: Problem) -> Attention:
    calls = [call_of(*tensors, **problem.case.options) for tensors in problem.sets]
    device = device_of(problem.device)
    return lambda i: run.forward(calls[i % len(calls)], device)[0]


def _cuda(recipe: fp8attn.Recipe, problem: Problem) -> Attention:
    options = problem.case.options | {"recipe": recipe}
    calls = [call_of(*tensors, **options) for tensors in problem.sets]
    device = device_of(problem.device)
    fp8attn.explain(*problem.sets[0], **options, backend="cuda")  # raises with the reason if something is missing
    return lambda i: cuda_run.forward(calls[i % len(calls)], device)[0]


def _end_to_end(backend: Literal["triton", "cuda"], recipe: fp8attn.Recipe, problem: Problem) -> Attention:
    options = problem.case.options | {"recipe": recipe}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options, backend=backend))


def _pytorch(backend: SDPBackend, problem: Problem) -> Attention:
    if backend == SDPBackend.MATH and problem.case.scores > MOST_SCORES:
        raise ValueError(f"{problem.case.scores} scores, which this backend stores; not asked beyond {MOST_SCORES}")
    options = problem.case.options

    def attention(i: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*problem.sets[i % len(problem.sets)], **options)

    return attention


ROTATED_INT8 = fp8attn.Recipe(rotate=256, qk="int8")

CUDA_RECIPES = {"": fp8attn.Recipe(), " rotated": fp8attn.Recipe(rotate=256), " int8": fp8attn.PRECISE, " int8 rotated": ROTATED_INT8}
"""Recipes of end-to-end rows with CUDA kernels, by the words that their names add."""

OWN = (
    Peer("fp8attn cuda", (KERNEL,), functools.partial(_cuda, fp8attn.Recipe()), own=True, needs=needs_cuda_kernels),
    Peer("fp8attn cuda int8", (KERNEL,), functools.partial(_cuda, fp8attn.PRECISE), own=True, needs=needs_cuda_kernels),
    *(
        Peer(f"fp8attn cuda{name} end to end", (END_TO_END,), functools.partial(_end_to_end, "cuda", recipe), own=True, needs=needs_cuda_kernels)
        for name, recipe in CUDA_RECIPES.items()
    ),
    Peer("fp8attn triton", (KERNEL,), _triton, own=True, needs=needs_triton),
    Peer("fp8attn triton end to end", (END_TO_END,), functools.partial(_end_to_end, "triton", fp8attn.Recipe()), own=True, needs=needs_triton),
)
PYTORCH = tuple(
    Peer(f"SDPA {name}", (KERNEL, END_TO_END), functools.partial(_pytorch, backend), needs=needs)
    for name, backend, needs in (
        ("flash", SDPBackend.FLASH_ATTENTION, needs_flash),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION, needs_cudnn),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION, needs_gpu),
        ("math", SDPBackend.MATH, needs_nothing),
    )
)


@dataclass(frozen=True)
class Answer:
    """A peer's answer to a problem: its errors and how to repeat it, or the reason why there is none.

    Attributes:
        unavailable: this machine can't run the peer, which is no error.
        seconds: duration of the first answer, with compilation, loading and planning.
    """

    errors: Errors | None = None
    attention: Attention | None = None
    refused: str | None = None
    unavailable: bool = False
    seconds: float = 0.0


def answer(peer: Peer, problem: Problem, expected: torch.Tensor, bad: Bad) -> Answer:
    """Ask a peer once. Any exception is a refusal, and so is a non-finite answer."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attention = peer.prepare(problem)
            poison(problem)
            out = peer.restored(problem, attention(0))
            errors = Errors.of(out[:, :, -problem.checked_rows :], expected, bad)
        except Exception as error:
            # PyTorch explains in warnings why a backend can't run
            told = [warning.message for warning in caught if not issubclass(warning.category, DeprecationWarning)]
            said = [str(message).split(" (Triggered internally")[0] for message in told]
            words = "; ".join([f"{type(error).__name__}: {error}".strip(), *said])
            return Answer(refused=words, unavailable=isinstance(error, fp8attn.BackendUnavailable))
    if not errors.finite:
        return Answer(errors=errors, refused="the answer isn't finite")
    return Answer(errors, attention, seconds=time.perf_counter() - start)


def poison(problem: Problem) -> None:
    """Fill the memory that the allocator will use next for a bfloat16 output with NaN, so that elements that a kernel
    doesn't write are visible."""
    case = problem.case
    shape = (case.batch, case.q_heads, case.q_length, case.value_dim)
    torch.full(shape, torch.nan, dtype=torch.bfloat16, device=problem.device)
