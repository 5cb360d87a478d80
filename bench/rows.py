"""Whose numerics are judged: every recipe, PyTorch in bfloat16, other people's FP8 kernels, and models of those that aren't here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch

import fp8attn
from fp8attn import Quantized, Recipe, hybrid, reference
from fp8attn.quantize import quantize, values_layout
from fp8attn.recipe import SCALE_BLOCK, ComputeType

from . import adapters
from .adapters import OTHERS, per_tensor
from .peers import END_TO_END, KERNEL, OWN, PYTORCH, ROTATED_INT8, Attention, Peer, Problem, needs_gpu

PLAIN = Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False, rotate=0)
"""A scale for each tensor and nothing removed or rotated: what FP8 attention is given by who only casts."""

RECIPES = {
    "rotated": Recipe(rotate=256),
    "not rotated": Recipe(rotate=0),
    "token keys": Recipe(k="token"),
    "token keys rotated": Recipe(k="token", rotate=256),
    "V not smoothed": Recipe(smooth_v=False),
    "Q smoothed": Recipe(smooth_q=True),
    "f16": Recipe(compute="f16"),
    "int8": fp8attn.PRECISE,
    "int8 rotated": ROTATED_INT8,
    "int8, Q smoothed": Recipe(qk="int8", smooth_q=True),
    "recent 128": Recipe(recent=128),
    "sinks 128, recent 256": Recipe(sinks=128, recent=256),
    "int8, recent 256": Recipe(qk="int8", recent=256),
    "per tensor": PLAIN,
}
"""Beside the default."""

BASELINE = "SDPA flash"

FLASH_AND_CUDNN = tuple(peer for peer in PYTORCH if peer.name in (BASELINE, "SDPA cuDNN"))
"""PyTorch's backends that anyone would take."""

EXACT = 2
"""Of the CUDA Hopper kernel's shipped configs (fp8attn.cuda.configs.HopperConfig); Triton's exponentials are all exact."""


Operands = tuple[Quantized, Quantized, Quantized]


def by_oracle(quantized: Callable[..., Operands], bits: int | None, exact: int | None, problem: Problem, compute: ComputeType = "e4m3") -> Attention:
    """The pipeline's oracle on what q, k and v are `quantized` to; `bits` of its accumulator and `exact` exponentials as `fp8attn.reference.pipeline`
    has them."""
    causal: reference.Causal = "top_left" if problem.case.causal else "none"

    def attention(i: int) -> torch.Tensor:
        operands = quantized(*problem.sets[i % len(problem.sets)])
        out, _ = reference.pipeline(*operands, block_n=SCALE_BLOCK, causal=causal, compute=compute, exact=exact, accumulator_bits=bits)
        return out.to(torch.bfloat16)

    return attention


def modelled(recipe: Recipe, bits: int | None, exact: int | None, problem: Problem) -> Attention:
    """The same on what quantization is by definition."""
    if recipe.keeps_keys:
        causal: reference.Causal = "top_left" if problem.case.causal else "none"
        return lambda i: hybrid.modelled(*problem.sets[i % len(problem.sets)], recipe, causal=causal, exact=exact)[0].to(torch.bfloat16)
    return by_oracle(lambda q, k, v: cast(Operands, quantize(q, k, v, recipe)), bits, exact, problem, recipe.compute)


def cast_by_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """As others' kernels are given them: PLAIN, but for the largest of Q and K, which is e4m3's largest, and V, rounded to nearest."""
    (q, q_scale), (k, k_scale), (v, v_scale) = (per_tensor(x) for x in (q, k, v))
    return (
        Quantized(q, q_scale.view(1, 1, 1), "tensor", "rows", q.shape[2]),
        Quantized(k, k_scale.view(1, 1, 1), "tensor", "rows", k.shape[2]),
        Quantized(values_layout(v), v_scale.view(1, 1, 1), "tensor", "values", v.shape[2]),
    )


def by_recipe(recipe: Recipe, problem: Problem) -> Attention:
    """The kernel that `sdpa` takes; without a GPU the oracle, which is as exact as the interpreter and reaches further."""
    if problem.device.type != "cuda":
        return modelled(recipe, None, None, problem)
    options = problem.case.options | {"recipe": recipe}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options))


def one_level(problem: Problem) -> Attention:
    """A Triton kernel of ours that does as others do: scales of tensors, P·V in one chain of the tensor core's accumulator."""
    options = problem.case.options | {"recipe": dataclasses.replace(PLAIN, two_level=False)}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options, backend="triton"))


def _needs_short_accumulators() -> str | None:
    lacking = needs_gpu()
    return None if lacking is None else f"{lacking}: the interpreter's accumulators are float32"


ROWS = (
    *FLASH_AND_CUDNN,
    *(peer for peer in OWN if END_TO_END in peer.stages),
    *(Peer(f"fp8attn {name}", (END_TO_END,), functools.partial(by_recipe, recipe), own=True) for name, recipe in RECIPES.items()),
    Peer("e4m3 one level", (END_TO_END,), one_level, own=True, needs=_needs_short_accumulators),
    Peer("fp8attn modelled", (END_TO_END,), functools.partial(modelled, Recipe(), None, None)),
    Peer("fp8attn modelled, direct codes", (END_TO_END,), functools.partial(modelled, Recipe(), None, EXACT)),
    # arXiv:2407.08608, section 3.3, as released: a scale a tensor, one chain
    Peer("FA3 e4m3, modelled", (END_TO_END,), functools.partial(by_oracle, cast_by_tensor, reference.TENSOR_CORE_BITS, None)),
    *(peer for peer in OTHERS if "e4m3" in peer.name or (peer.name.startswith("Sage") and KERNEL not in peer.stages)),
)
"""In the order of tables."""


def chosen(substrings: Sequence[str] | None) -> tuple[Peer, ...]:
    """Rows with one of these in their names, all without any.

    Raises:
        UsageError: no row's name has one of them.
    """
    return adapters.chosen(substrings, ROWS, "row")
