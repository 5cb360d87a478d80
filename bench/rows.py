"""Whose numerics are judged: every recipe, PyTorch in bfloat16, other people's FP8 kernels, and models of those that aren't here."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import cast

import torch

import fp8attn
from fp8attn import Recipe, reference
from fp8attn.api import Backend
from fp8attn.recipe import SCALE_BLOCK

from .adapters import OTHERS
from .cases import Case
from .peers import END_TO_END, KERNEL, PYTORCH, Attention, Peer, Problem

PLAIN = Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False)
"""A scale for each tensor and nothing removed: what FP8 attention is given by who only casts."""

RECIPES = {
    "rotated": Recipe(rotate=True),
    "token keys": Recipe(k="token"),
    "token keys rotated": Recipe(k="token", rotate=True),
    "V not smoothed": Recipe(smooth_v=False),
    "f16": Recipe(compute="f16"),
    "per tensor": PLAIN,
}
"""Beside the default; of these the kernel is whichever `sdpa` takes."""

ONE_LEVEL = Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False, two_level=False)

BASELINE, DEFAULT = "SDPA flash", "fp8attn cuda"
"""The rows that others are compared with, and that is compared."""


def _sdpa(backend: Backend | None, recipe: Recipe, problem: Problem) -> Attention:
    """`backend` None: the one that `sdpa` takes by itself, without a GPU the interpreter's."""
    chosen: Backend = backend or ("auto" if problem.device.type == "cuda" else "triton")
    options = problem.case.options | {"recipe": recipe, "backend": chosen}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options))


def _modelled_one_level(problem: Problem) -> Attention:
    """FlashAttention-3's FP8 kernel (arXiv:2407.08608, section 3.3, as released): a scale a tensor, P·V in one chain of the accumulator."""
    causal: reference.Causal = "top_left" if problem.case.causal else "none"

    def attention(i: int) -> torch.Tensor:
        operands = fp8attn.quantize(*problem.sets[i % len(problem.sets)], recipe=PLAIN)
        out, _ = reference.pipeline(*operands, block_n=SCALE_BLOCK, causal=causal, accumulator_bits=reference.TENSOR_CORE_BITS)
        return out.to(torch.bfloat16)

    return attention


def _needs_short_accumulators() -> str | None:
    return None if torch.cuda.is_available() else "an NVIDIA GPU: the interpreter's accumulators are float32"


OURS = (
    Peer(DEFAULT, (END_TO_END,), functools.partial(_sdpa, "cuda", Recipe()), own=True),
    Peer("fp8attn triton", (END_TO_END,), functools.partial(_sdpa, "triton", Recipe()), own=True),
    *(Peer(f"fp8attn {name}", (END_TO_END,), functools.partial(_sdpa, None, recipe), own=True) for name, recipe in RECIPES.items()),
)
ROWS = (
    *(peer for peer in PYTORCH if peer.name in (BASELINE, "SDPA cuDNN")),
    *OURS,
    Peer("e4m3 one level", (END_TO_END,), functools.partial(_sdpa, "triton", ONE_LEVEL), needs=_needs_short_accumulators),
    Peer("FA3 e4m3, modelled", (END_TO_END,), _modelled_one_level),
    *(peer for peer in OTHERS if "e4m3" in peer.name or (peer.name.startswith("Sage") and KERNEL not in peer.stages)),
)
"""In the order of tables. "e4m3 one level" is a Triton kernel of ours with what others do: scales of tensors, one long accumulation."""


def chosen(substrings: Sequence[str] | None) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """Rows with one of these in their names, all without any, that this machine has; and what the others need, by name.

    Raises:
        ValueError: no row's name has one of them.
    """
    for one in substrings or ():
        if not any(one.lower() in row.name.lower() for row in ROWS):
            raise ValueError(f"no row has {one!r} in its name; there are {', '.join(row.name for row in ROWS)}")
    wanted = [row for row in ROWS if not substrings or any(one.lower() in row.name.lower() for one in substrings)]
    needs = {row.name: row.needs() for row in wanted}
    return tuple(row for row in wanted if needs[row.name] is None), {name: need for name, need in needs.items() if need is not None}


def _compile(row: Peer, case: Case) -> None:
    problem = Problem.of(case, "normal", torch.device("cuda", torch.cuda.current_device()), rotate=False)
    row.prepare(problem)(0)
    torch.cuda.synchronize()


def compile_side_by_side(rows: Sequence[Peer], cases: Sequence[Case]) -> Iterator[None]:
    """Bring the rows' kernels of these cases into the caches on disk, several processes at a time; yields as each is there. What goes wrong
    goes wrong again, and is reported, where the answer is wanted."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 12), mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, row, case) for case in cases for row in rows if row.name.startswith(("fp8attn", "e4m3"))]):
            done.exception()
            yield
