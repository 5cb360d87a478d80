"""The rows of accuracy benchmarks: every recipe, PyTorch in bfloat16, FP8 kernels of other libraries, and models of
kernels that aren't installed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch

import fp8attn
from fp8attn import Quantized, Recipe, hybrid, reference
from fp8attn.pages import PAGE
from fp8attn.quantization import quantize, values_layout
from fp8attn.recipe import SCALE_BLOCK, ComputeType
from fp8attn.validate import Backend

from . import adapters
from .adapters import OTHERS, per_tensor
from .peers import END_TO_END, KERNEL, OWN, PYTORCH, ROTATED_INT8, Attention, Peer, Problem, needs_gpu

PLAIN = Recipe(q="tensor", k="tensor", v="tensor", smooth_k=False, smooth_v=False, rotate=0)
"""One scale per tensor, nothing removed or rotated: FP8 attention by a plain cast."""

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
"""Recipes in addition to the default."""

BASELINE = "SDPA flash"

FLASH_AND_CUDNN = tuple(peer for peer in PYTORCH if peer.name in (BASELINE, "SDPA cuDNN"))
"""The PyTorch backends that users choose."""

EXACT = 2
"""`exact` of the CUDA Hopper kernel's shipped configs (fp8attn.cuda.configs.HopperConfig). Triton's exponentials are
all exact."""


Operands = tuple[Quantized, Quantized, Quantized]


def by_oracle(quantized: Callable[..., Operands], bits: int | None, exact: int | None, problem: Problem, compute: ComputeType = "e4m3") -> Attention:
    """The pipeline oracle on operands that `quantized` makes from q, k and v. `bits` and `exact` are accumulator_bits
    and exact of `fp8attn.reference.pipeline`."""
    causal: reference.Causal = "top_left" if problem.case.causal else "none"

    def attention(i: int) -> torch.Tensor:
        operands = quantized(*problem.sets[i % len(problem.sets)])
        out, _ = reference.pipeline(*operands, arithmetic=reference.Arithmetic(SCALE_BLOCK, compute, exact, bits), causal=causal)
        return out.to(torch.bfloat16)

    return attention


def modelled(recipe: Recipe, bits: int | None, exact: int | None, problem: Problem) -> Attention:
    """The pipeline oracle on operands quantized by the definition."""
    if recipe.has_half_keys:
        causal: reference.Causal = "top_left" if problem.case.causal else "none"
        return lambda i: hybrid.modelled(*problem.sets[i % len(problem.sets)], recipe, causal=causal, exact=exact)[0].to(torch.bfloat16)
    return by_oracle(lambda q, k, v: cast(Operands, quantize(q, k, v, recipe)), bits, exact, problem, recipe.compute)


def cast_by_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """Operands as other libraries' kernels get them: like PLAIN, but the largest element of Q and K is e4m3's largest
    number, and V is rounded to nearest."""
    (q, q_scale), (k, k_scale), (v, v_scale) = (per_tensor(x) for x in (q, k, v))
    return (
        Quantized(q, q_scale.view(1, 1, 1), "tensor", "rows", q.shape[2]),
        Quantized(k, k_scale.view(1, 1, 1), "tensor", "rows", k.shape[2]),
        Quantized(values_layout(v), v_scale.view(1, 1, 1), "tensor", "values", v.shape[2]),
    )


def by_recipe(recipe: Recipe, problem: Problem) -> Attention:
    """The kernel that `sdpa` chooses.

    Without a GPU, the oracle, which is as exact as the interpreter and handles longer inputs.
    """
    if problem.device.type != "cuda":
        return modelled(recipe, None, None, problem)
    options = problem.case.options | {"recipe": recipe}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options))


MOST_FORKS = 512
"""Queries that `from_cache` decodes, each from a fork of its own."""


def from_cache(recipe: Recipe, problem: Problem) -> Attention:
    """Attention to a `KVCache`. Queries of a causal case are a prefill. Other queries decode, each from a fork that has
    all keys."""
    backend: Backend = "auto" if problem.device.type == "cuda" else "modelled"
    case = problem.case
    if case.causal:
        paged = dataclasses.replace(recipe, statistics="page")
        return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **case.options, recipe=paged, backend=backend))
    if case.batch > 1 or case.q_length > MOST_FORKS:
        raise ValueError(f"batch is {case.batch} with {case.q_length} queries; a cache decodes at most {MOST_FORKS} queries of one sequence here")

    def attention(i: int) -> torch.Tensor:
        q, k, v = problem.sets[i % len(problem.sets)]
        forks, pages = case.q_length, max(case.kv_length // PAGE, 1)
        cache = fp8attn.KVCache(forks, pages, case.kv_heads, case.head_dim, case.value_dim, recipe, q.dtype, q.device)
        table, lengths = (x.to(q.device, torch.int32) for x in (torch.arange(pages), torch.tensor([case.kv_length])))
        cache.append(k, v, fp8attn.PagedBatch(table.view(1, -1), lengths), backend=backend)
        for fork in range(1, forks):
            cache.fork(0, fork)
        batch = fp8attn.PagedBatch(table.expand(forks, -1), lengths.expand(forks).contiguous())
        out = fp8attn.paged_sdpa(q.permute(2, 1, 0, 3), cache, batch, backend=backend)
        return cast(torch.Tensor, out).permute(2, 1, 0, 3)

    return attention


def one_level(problem: Problem) -> Attention:
    """fp8attn's Triton kernel with the numerics of other kernels: per-tensor scales, and P·V in one chain of the tensor
    core's accumulator."""
    options = problem.case.options | {"recipe": dataclasses.replace(PLAIN, two_level=False)}
    return lambda i: cast(torch.Tensor, fp8attn.sdpa(*problem.sets[i % len(problem.sets)], **options, backend="triton"))


def _needs_short_accumulators() -> str | None:
    lacking = needs_gpu()
    return None if lacking is None else f"{lacking}: the interpreter's accumulators are float32"


ROWS = (
    *FLASH_AND_CUDNN,
    *(peer for peer in OWN if END_TO_END in peer.stages),
    *(Peer(f"fp8attn {name}", (END_TO_END,), functools.partial(by_recipe, recipe), own=True) for name, recipe in RECIPES.items()),
    Peer("fp8attn KV cache", (END_TO_END,), functools.partial(from_cache, Recipe()), own=True),
    Peer("fp8attn KV cache int8", (END_TO_END,), functools.partial(from_cache, fp8attn.PRECISE), own=True),
    Peer("e4m3 one level", (END_TO_END,), one_level, own=True, needs=_needs_short_accumulators),
    Peer("fp8attn modelled", (END_TO_END,), functools.partial(modelled, Recipe(), None, None)),
    Peer("fp8attn modelled, direct codes", (END_TO_END,), functools.partial(modelled, Recipe(), None, EXACT)),
    # arXiv:2407.08608, section 3.3, as released: one scale per tensor, one chain
    Peer("FA3 e4m3, modelled", (END_TO_END,), functools.partial(by_oracle, cast_by_tensor, reference.TENSOR_CORE_BITS, None)),
    *(peer for peer in OTHERS if "e4m3" in peer.name or (peer.name.startswith("Sage") and KERNEL not in peer.stages)),
)
"""All rows, in the order of tables."""


def chosen(substrings: Sequence[str] | None) -> tuple[Peer, ...]:
    """Rows with one of the substrings in their names; all rows without substrings.

    Raises:
        UsageError: no row's name contains one of the substrings.
    """
    return adapters.chosen(substrings, ROWS, "row")
