"""What a call would run, and why: it asks the functions that the call would ask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch

from . import hybrid, ops, paged_ops, paged_tensors_ops, problem_ops
from . import triton as triton_kernels
from .backends import choose_backend, cuda_unavailable, triton_unavailable
from .cache import KVCache
from .call import AnyCall, Call, Problem, Varlen
from .cuda import configs, early
from .cuda.configs import HopperConfig
from .cuda.one_launch import OneLaunch
from .cuda.portable import PortableConfig
from .device import device_of
from .paged import New, Options, append_backend, attention_call, cache_of_call, checked_call, checked_tensors_call, paged_sdpa
from .paged_tensors import PagedTensors
from .pages import PagedBatch, PagedCall
from .prepare import autocast, call_from, operands_of, prepare, problem_of, to_quantize
from .recipe import Recipe
from .reference import CAUSAL_WINDOW
from .validate import Arguments, Backend, Checked, VarlenArguments, check, check_call, check_varlen

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """What a call would run.

    Attributes:
        backend: `triton`, `cuda`, `reference` or `modelled`.
        kernel: the kernel's name; `none` if there are no queries or keys.
        config: its config, or None for plain torch.
        compute: what the tensor cores multiply, `e4m3`, `f16` or `float32`; `int8 and …` where Q·Kᵀ is of int8; or
            `none`.
        because: why these and not the others, one reason a line.
    """

    backend: str
    kernel: str
    config: object
    compute: str
    because: tuple[str, ...]


def _takes(arguments: Callable[P, Any]) -> Callable[[Callable[..., Result]], Callable[P, Result]]:
    """Makes a function of `Arguments` one that takes the arguments apart."""

    def made(function: Callable[..., Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def taking(*args: P.args, **kwargs: P.kwargs) -> Result:
            bound = signature.bind(*args, **kwargs)  # whose errors name the argument
            return function(arguments(*bound.args, **bound.kwargs))

        signature = inspect.signature(arguments)
        taking.__signature__ = signature.replace(return_annotation=inspect.signature(function).return_annotation)  # type: ignore[attr-defined]
        return taking

    return made


@_takes(Arguments)
def explain(a: Arguments) -> Plan:
    """What `sdpa` with these arguments would run, and why. Quantizes, but doesn't attend.

    Raises:
        As `sdpa`.
    """
    query, key, value, out_dtype = autocast(a.query, a.key, a.value, a.out_dtype)
    return _explained(check(replace(a, query=query, key=key, value=value, out_dtype=out_dtype)), a.recipe, a.backend, a.return_lse)


@_takes(VarlenArguments)
def explain_varlen(a: VarlenArguments) -> Plan:
    """What `varlen_sdpa` with these arguments would run, and why. Quantizes, but doesn't attend.

    Raises:
        As `varlen_sdpa`.
    """
    q, k, v, out_dtype = autocast(a.q, a.k, a.v, a.out_dtype)
    return _explained(check_varlen(replace(a, q=q, k=k, v=v, out_dtype=out_dtype)), a.recipe, a.backend, a.return_lse)


def _takes_paged(function: Callable[..., Plan]) -> Callable[..., Plan]:
    """Makes a function of `Options` one that takes the arguments of `paged_sdpa`."""

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Plan:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        query, cache, batch, new, *options = bound.arguments.values()
        return function(query, cache, batch, new, Options(*options))

    signature = inspect.signature(paged_sdpa)
    taking.__signature__ = signature.replace(return_annotation=Plan)  # type: ignore[attr-defined]
    return taking


@_takes_paged
def explain_paged(query: torch.Tensor, cache: Any, batch: PagedBatch, new: New, options: Options) -> Plan:
    """What `paged_sdpa` with these arguments would run, and why. Neither appends nor attends.

    Raises:
        As `paged_sdpa`.
    """
    of_tensors = isinstance(cache, PagedTensors)
    if not of_tensors and not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache or a fp8attn.PagedTensors")
    how = (checked_tensors_call if of_tensors else checked_call)(query, cache, batch, new, options)
    backend, device = options.backend, query.device
    because = [f"backend={backend!r} on {device}"]
    if not paged_ops.runs_kernels(backend, device):
        return Plan("modelled", "paged_tensors" if of_tensors else "pages", None, "float32", tuple(because))
    if isinstance(how, PagedCall):
        return _explain_kv_cache(how, backend, because)
    if new is not None:
        because.append("new tokens are written by Triton")
    arguments = query, cache, batch, how
    planned = paged_tensors_ops.plan_attention(backend, *arguments) if paged_ops.asks_cuda(backend, device) else None
    compute = "bf16" if cache.k.dtype == torch.bfloat16 else "f16"  # of e4m3, codes as halves
    if isinstance(planned, paged_tensors_ops.Packing):
        few, passes = planned.room.few, planned.room.passes
        done = "copied" if cache.is_fp8 else f"quantized by the cache's recipe, {cache.recipe},"
        because.append(f"rows are {done} as packed sequences{f', in {passes} passes' if passes > 1 else ''}")
        if paged_tensors_ops.copies_queries(query, cache):
            because.append("query is copied first: several rows must be contiguous, (B, Hq, S, D) or packed")
        if few:
            because.append(f"rows of at most {few} packed queries are the decode kernel's")
        return Plan("cuda", "hopper", planned.config, "int8 and e4m3" if planned.config.int8 else "e4m3", tuple(because))
    if planned is not None and not isinstance(planned, str):
        because.append(f"not as packed sequences: {paged_tensors_ops.plan_packing(*arguments)}")
        return Plan("cuda", "decode_tensors", planned, compute, tuple(because))
    return Plan("triton", "paged_tensors", None, compute, (*because, *([] if planned is None else [f"cuda: {planned}"])))


def _explain_kv_cache(checked: PagedCall, backend: str, because: list[str]) -> Plan:
    """The plan of a call on a `KVCache`, which appends first."""
    device, compute = checked.q.device, "int8 and e4m3" if checked.recipe.qk == "int8" else "e4m3"
    if checked.new is not None:
        asked = paged_ops.asks_cuda(append_backend(backend), device)
        reason = paged_ops.unsupported_append(checked.storage, checked.new, checked.batch) if asked else "backend is triton"
        because.append("new tokens are appended by the CUDA kernel" if reason is None else f"new tokens are appended by Triton: {reason}")
    if paged_ops.asks_cuda(backend, device):
        call = attention_call(checked)
        planned = paged_ops.plan_attention(backend, call)
        if isinstance(planned, paged_ops.Attending):
            few = paged_ops.few_queries(call) if planned.kernel == "prefill" else 0
            if few:
                because.append(f"rows of at most {few} packed queries are the decode kernel's")
            return Plan("cuda", planned.kernel, planned.config, compute, tuple(because))
        because += [f"cuda: {reason}" for reason in planned]
    if not device_of(device).has_fp8_units:
        because.append(f"compute f16: {device_of(device).name} has no FP8 tensor cores")
        compute = "f16"
    return Plan("triton", "paged", None, compute, tuple(because))


def _explain_pages(checked: Checked, recipe: Recipe, chosen: str, because: Sequence[str]) -> Plan:
    """What a recipe with statistics of pages runs: kernels of KV caches."""
    q, k, v = checked.floats
    because = [*because, "statistics of pages: a KV cache of this call", "keys of a query's own page in half precision"]
    if q.numel() == 0 or k.numel() == 0:
        return Plan(chosen, "none", None, "none", (*because, "there are no queries or keys"))
    call = cache_of_call(q, k, v, checked.causal, recipe)
    options = Options(CAUSAL_WINDOW, 0.0, None, checked.softmax_scale, False, checked.out_dtype, chosen)
    return _explain_kv_cache(checked_call(q, call.cache, call.batch, call.new, options), chosen, because)


def _explained(checked: Checked, recipe: Recipe, backend: Backend, return_lse: bool) -> Plan:
    device = checked.device
    chosen = choose_backend(backend, device)
    because = [f"backend={backend!r} on {device}"]
    if chosen == "reference":
        missing = [x for x in (cuda_unavailable(device), triton_unavailable(device)) if x is not None]
        return Plan("reference", "attention", None, "float32", (*because, *missing, "exact, whatever the recipe"))
    if chosen == "modelled":
        return Plan("modelled", "pipeline", None, recipe.compute, tuple(because))
    if recipe.statistics == "page":
        return _explain_pages(checked, recipe, chosen, because)
    if recipe.has_half_keys:
        return _explain_half_keys(checked, recipe, backend)
    problem = problem_of(checked, chosen, recipe, return_lse)
    if problem is not None:
        return _explain_problem(problem, chosen, because)
    query, key, value = operands = operands_of(checked)
    prepared = prepare(replace(checked, query=query, key=key, value=value), recipe, chosen)
    q, k, v, recipe_beside = to_quantize(operands, recipe)
    if isinstance(prepared.query, torch.Tensor):
        q, because = None, [*because, "query is quantized where it attends"]
    because += _explain_quantizers(q, k, v, recipe_beside, checked.varlen)
    call = call_from(prepared, return_lse)
    check_call(call, quantizes_q=call.fuse_q_quant)
    return _explain_attention(call, chosen, because)


def _explain_quantizers(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, varlen: Varlen | None) -> list[str]:
    """Which kernels quantize which operands, and why others don't."""
    said, packed = [], None if varlen is None else varlen.k
    names = {"hopper": "the CUDA quantizer for Hopper", "general": "the general CUDA quantizer", "triton": "Triton"}
    for step in ops.plan_quantizers(q, k, v, recipe, packed) if q is not None or k is not None else ():
        operands = " and ".join(name for name, x in (("query", step.q), ("key", step.k), ("value", step.v)) if x is not None)
        because = "".join(f"; not by {reason}" for reason in step.because)
        said.append(f"{operands} {'is' if operands == 'query' else 'are'} quantized by {names[step.quantizer]}{because}")
    return said


def _explain_problem(problem: Problem, chosen: str, because: list[str]) -> Plan:
    """The plan of the operator that quantizes and attends."""
    device = device_of(problem.q.device)
    way = problem_ops.way_of(problem, device)
    if isinstance(way, OneLaunch):
        return Plan("cuda", way.kernel, way.config, "e4m3", (*because, "quantized and attended in one launch"))
    if way == "quantize first":
        because += _explain_quantizers(problem.q, problem.k, problem.v, problem.recipe, problem.varlen)
        return _explain_attention(problem_ops.quantized_call(problem)[0], chosen, because)
    because += [*_explain_quantizers(None, problem.k, problem.v, problem.recipe, problem.varlen), "query is quantized where it attends"]
    if way == "fused q":
        call = problem_ops.fused_q_call(problem)
        return _cuda_plan(call, configs.choose(call, device), because)
    config = configs.choose(problem, device)
    if early.overlaps_quantization(problem, config, device):
        because.append("attention begins with heads whose key and value are quantized")
    return _cuda_plan(problem, config, because)


def _explain_attention(call: Call, chosen: str, because: list[str]) -> Plan:
    """The plan of an operator that attends to what is quantized."""
    properties = device_of(call.q.device)
    if chosen != "triton":
        planned = ops.plan_backend(chosen, call)
        if not isinstance(planned, str):
            return _cuda_plan(call, planned, because)
        because.append(f"cuda: {planned}")
    config = triton_kernels.run.choose(call, properties)
    compute = call.compute
    if compute == "e4m3" and not properties.has_fp8_units:
        compute = "f16"
        because.append(f"compute f16: {properties.name} has no FP8 tensor cores")
    reason = triton_kernels.run.unsupported_arch(call, properties)
    if reason is not None:
        because.append(reason)
    kernel = "hopper" if isinstance(config, triton_kernels.configs.HopperConfig) else "portable"
    return Plan("triton", kernel, config, ("int8 and " if call.int8 else "") + compute, tuple(because))


def _cuda_plan(call: AnyCall, config: HopperConfig | PortableConfig, because: list[str]) -> Plan:
    """The plan of a CUDA kernel."""
    compute = "e4m3"
    if isinstance(config, PortableConfig):
        assert isinstance(call, Call)
        because.append(f"not the Hopper kernel: {configs.unsupported_call(call, device_of(call.q.device))}")
        compute = "e4m3" if config.operands == "native" else "f16"
    kernel = "portable" if isinstance(config, PortableConfig) else "hopper"
    return Plan("cuda", kernel, config, ("int8 and " if call.int8 else "") + compute, tuple(because))


def _explain_half_keys(checked: Checked, recipe: Recipe, backend: Backend) -> Plan:
    """`explain` for a recipe that keeps keys: of attention to the others."""
    q, k, v = checked.floats
    kept = f"{recipe.sinks} first keys and {recipe.recent} last ones in half precision, by Triton"
    rows, _, keys, fp8_causal = next(hybrid.ranges(q.shape[2], k.shape[2], checked.causal, recipe))
    if keys.start >= keys.stop:
        return Plan("triton", "half_keys", None, "half", (f"backend={backend!r} on {q.device}", kept, "there are no others"))
    part = replace(checked, query=q[:, :, rows], key=k[:, :, keys], value=v[:, :, keys], causal=fp8_causal)
    others = _explained(part, recipe.of_fp8_keys, backend, return_lse=True)
    return replace(others, because=(*others.because, kept))
