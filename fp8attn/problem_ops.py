"""Quantization and attention of plain tensors: which kernels do which part, and the operators that do both."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from . import ops, validate
from .ambient import shield
from .call import Call, Problem, empty_lse, empty_output
from .cuda import build, configs, early, one_launch
from .cuda import run as cuda_run
from .cuda.build import BuildError
from .cuda.one_launch import OneLaunch
from .device import Device, device_of
from .recipe import FUSED_RECIPES, ProductType, Quantized
from .reference import CAUSAL_WINDOW, Causal


def plan_one_launch(problem: Problem, device: Device) -> OneLaunch | str:
    """The single launch that quantizes and attends, or why there is none.

    Nothing is compiled to find out, so compiling may still fail.
    """
    if problem.qk != "e4m3":
        return f"recipe.qk is {problem.qk!r}; it takes 'e4m3'"
    if problem.attn_mask is not None:
        return "attn_mask is given; it takes none"
    if problem.window != CAUSAL_WINDOW or problem.softcap or problem.sinks is not None:
        return "window, softcap or sinks is given; it takes none"
    q, k, v = problem.q, problem.k, problem.v
    planned = one_launch.plan(q, k, v, problem.softmax_scale, device)
    return planned if isinstance(planned, str) else build.unavailable() or planned


def unsupported_fused_q(problem: Problem, device: Device) -> str | None:
    """Why q is quantized before attention and not inside the attention kernel, or None if it is quantized inside.

    Nothing is compiled to find out, so compiling may still fail.
    """
    scores = configs.scores_of_options(problem.has_first_key, problem.softcap)
    reason = configs.unsupported_q_quant(
        problem.q, problem.v.shape[3], problem.softmax_scale, problem.qk, device, problem.attn_mask, scores, problem.varlen is not None
    )  # fmt: skip
    return reason or build.unavailable()


Way = OneLaunch | Literal["two launches", "fused q", "quantize first"]
"""How plain tensors are quantized and attended to: one kernel does both; a kernel quantizes k and v, and the attention
kernel q; k and v are quantized by any quantizer, and q by the attention kernel; all are quantized first."""


def way_of(problem: Problem, device: Device) -> Way:
    """How the operators that quantize and attend run a problem.

    Nothing is compiled to find out, so compiling may still fail.
    """
    if problem.varlen is None and isinstance(launch := plan_one_launch(problem, device), OneLaunch):
        return launch
    if unsupported_fused_q(problem, device) is not None:
        return "quantize first"
    if problem.varlen is not None:
        return "fused q"
    return "two launches" if ops.unsupported_cuda_quantize(problem.k, problem.v, problem.recipe, device) is None else "fused q"


def _quantized_problem(problem: Problem, q: torch.Tensor | None) -> tuple[Quantized | None, Quantized, Quantized]:
    """The quantized q, if it is given, k and v of a problem."""
    if problem.varlen is not None:
        return ops.quantized_packed(q, problem.k, problem.v, problem.recipe, problem.varlen.k, problem.varlen.longest_k)
    query, key, value = ops.quantized(q, problem.k, problem.v, problem.recipe)
    assert key is not None and value is not None
    return query, key, value


def fused_q_call(problem: Problem) -> Call:
    """Quantizes k and v for the way `fused q`."""
    _, key, value = _quantized_problem(problem, None)
    return problem.call_of(key, value)


def quantized_call(problem: Problem) -> tuple[Call, Quantized]:
    """Quantizes q, k and v for the way `quantize first`. Also the key, whose mean the LSE doesn't include unless there
    is a soft cap or sinks."""
    query, key, value = _quantized_problem(problem, problem.q)
    assert query is not None
    mean_scores = None
    if problem.softcap or problem.sinks is not None:
        mean_scores = _with_mean(problem, key, torch.zeros(problem.q.shape[:3], dtype=torch.float32, device=problem.q.device))
    return problem.call_of(key, value, query, mean_scores), key


def quantize_and_attend(problem: Problem, backend: ops.Forward, required: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization by recipe.FUSED_RECIPES[problem.qk], and attention.

    It does both in one launch where possible. Otherwise the attention kernel quantizes q where possible.

    Args:
        backend: attention, where it takes several.
        required: whether a kernel that doesn't compile is an error.

    Returns:
        out (B, Hq, Sq, Dv); LSE (B, Hq, Sq), empty if not asked for.
    """
    device = device_of(problem.q.device)
    with ops.current(problem.q.device):
        try:
            way = way_of(problem, device)
            if isinstance(way, OneLaunch):
                return cuda_run.forward_from_fp16(problem, device, way)
            if way == "two launches":
                return early.quantize_and_attend(problem, device)
            if way == "fused q":
                call = fused_q_call(problem)
                return ops.forward_by_cuda(call, configs.choose(call, device))
        except BuildError as error:
            if required:
                raise
            warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=3)
        call, key = quantized_call(problem)
        out, lse = backend(call)
        if problem.return_lse and call.mean_scores is None:
            lse = _with_mean(problem, key, lse)
        return out, lse


FromFp16 = Callable[[Problem], tuple[torch.Tensor, torch.Tensor]]
"""Quantization and attention of a problem that was checked: output and LSE."""

FROM_FP16: dict[str, FromFp16] = {
    "cuda": functools.partial(quantize_and_attend, backend=ops.by_cuda, required=True),
    "auto": functools.partial(quantize_and_attend, backend=ops.by_whichever, required=False),
}
"""By backend."""


def from_fp16_by(run: FromFp16):
    """Implementation of an operator that quantizes and attends."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, qk: ProductType, causal: Causal, out_dtype: torch.dtype,
        return_lse: bool, attn_mask: torch.Tensor | None = None, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        validate.check_floats(q, k, v, attn_mask)
        of_rows = validate.checked_rows(softmax_scale, causal, out_dtype, window, softcap, sinks, q)
        if qk not in FUSED_RECIPES:
            raise ValueError(f"qk is {qk!r}; it must be one of {tuple(FUSED_RECIPES)}")
        return run(Problem(q, k, v, softmax_scale, qk, causal, out_dtype, return_lse, attn_mask, of_rows, softcap, sinks))

    return forward


def attend_to_problem(problem: Problem, backend: str, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization and attention of a checked problem by an operator, or directly.

    Args:
        scale: as of `ops.register`.
    """
    if ops.is_direct(problem.q, problem.k, problem.v):
        with shield():
            return FROM_FP16[backend](problem)
    forward = "forward" if problem.varlen is None else "varlen_forward"
    return getattr(ops.library_ops, f"{backend}_{forward}_from_fp16")(*problem.arguments, scale=scale)


def _with_mean(problem: Problem, key: Quantized, lse: torch.Tensor) -> torch.Tensor:
    """lse and what K's mean adds to the scores of each row, float32 (B, Hq, Sq)."""
    assert key.mean is not None
    if problem.varlen is not None:
        return ops.unsmoothed_packed_lse(lse, problem.q, key.mean, problem.varlen.q.cu_seqlens, problem.softmax_scale, key.rotated)
    return ops.unsmoothed_lse(lse, problem.q, key.mean, problem.softmax_scale, key.rotated)


def _fake_from_fp16(q, k, v, softmax_scale, qk, causal, out_dtype, return_lse, attn_mask=None, window=CAUSAL_WINDOW, softcap=0.0, sinks=None):
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, return_lse)


for _name, _run in FROM_FP16.items():
    ops.register(
        f"{_name}_forward_from_fp16(Tensor q, Tensor k, Tensor v, float softmax_scale, str qk, str causal, ScalarType out_dtype, bool return_lse,"
        f" Tensor? attn_mask=None, {ops.OPTIONS}) -> (Tensor, Tensor)",
        from_fp16_by(_run),
        _fake_from_fp16,
    )
