"""Every operator of the library: schema, implementation, fake implementation.

fp8attn.api checks a user's arguments, in the user's words. An operator checks again what its kernels rely on, because
anybody can call it: no arguments make a kernel read or write outside of its tensors. Tensors that don't exist are
passed as None and returned empty, because an operator can't return None.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from . import quantization as quantize_ref
from . import recording, reference, rotation, validate
from . import triton as triton_kernels
from .ambient import shield, shielded
from .call import GRANULARITIES, Call, HalfKeys, empty_lse, empty_output
from .cuda import build, general_quantize
from .cuda import quantize as cuda_quantize
from .cuda import run as cuda_run
from .cuda.build import BuildError
from .cuda.configs import ROWS, HopperConfig
from .device import INTERPRETING, Device, device_of
from .layout import padded_length
from .recipe import (
    E4M3,
    FUSED_RECIPES,
    QUERY_GROUP,
    SCALE_BLOCK,
    ComputeType,
    Granularity,
    Layout,
    Packed,
    ProductType,
    Quantized,
    Recipe,
    Rotation,
    frozen,
)
from .reference import CAUSAL_WINDOW, Causal, causal_offset
from .validate import BackendUnavailable

_recipe = functools.cache(Recipe)

library = torch.library.Library("fp8attn", "DEF")
implementations: dict[str, Callable[..., Any]] = {}
"""By the operators' names."""
library_ops = torch.ops.fp8attn

OPTIONS = f"int[2] window={list(CAUSAL_WINDOW)}, float softcap=0.0, Tensor? sinks=None"
"""The last arguments of operators that attend: what is done to scores beside a mask."""

Forward = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]
"""Attention's output and LSE."""


def _with_scale(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation that takes `scale` behind its own arguments."""
    names = list(inspect.signature(implementation).parameters)
    position = names.index("softmax_scale")

    def run(*arguments, scale: torch.Tensor | None = None):
        if len(arguments) > len(names):
            arguments, scale = arguments[:-1], arguments[-1]
        if scale is None:
            return implementation(*arguments)
        return implementation(*arguments[:position], float(scale), *arguments[position + 1 :])

    return run


def _without_scale(fake: Callable[..., Any]) -> Callable[..., Any]:
    count = len(inspect.signature(fake).parameters)
    return lambda *arguments, scale=None, **options: fake(*arguments[:count], **options)


def register(schema: str, implementation, fake, keys: Sequence[str] = ("CPU", "CUDA")) -> None:
    """Define fp8attn::<name> for CPU and CUDA tensors, or those of other dispatch keys.

    A number in a schema is part of a compiled graph. One graph should serve all softmax scales. Operators that have a
    softmax scale therefore also take it as a tensor, `scale`, float64 on the CPU, which overrides `softmax_scale`.
    """
    name = schema.split("(", 1)[0]
    if "float softmax_scale" in schema:
        schema = schema.replace(") -> ", ", Tensor? scale=None) -> ")
        implementation, fake = _with_scale(implementation), _without_scale(fake)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementations[name] = shielded(implementation)
    for key in keys:
        library.impl(name, implementations[name], key)
    torch.library.register_fake(f"fp8attn::{name}", fake, lib=library)


def is_plain() -> bool:
    """Whether nothing but this code sees the operators that it calls: torch.compile, modes, transforms and tracers."""
    return not (
        is_compiling()
        or _len_torch_function_stack()
        or _len_torch_dispatch_stack()
        or _is_tracing()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


WITH_MEMORY = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
"""Types of tensors that have memory, and of none."""


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels are called without the operators around them, which check again: that takes longer than a launch.

    Not where anything but this code, which includes its recorder, sees operators, nor with tensors that have no memory.
    """
    return (recording.current() is not None or is_plain()) and WITH_MEMORY.issuperset(map(type, tensors))


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device's tensors: a GPU, or the CPU in Triton's interpreter."""
    return device.type == "cuda" or INTERPRETING


NOTHING = contextlib.nullcontext()


def current(device: torch.device):
    """Triton launches on the current device; make it the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device(device)


def unsupported_cuda_quantize(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, device: Device) -> str | None:
    """Why the CUDA quantizer of keys and values for Hopper doesn't support them, packed or not, or None if it does.

    Nothing is compiled to find out, so compiling may still fail.
    """
    return cuda_quantize.unsupported_call(k, v, recipe, device) or build.unavailable(cuda_quantize.LARGEST, device.arch)


def unsupported_general_quantize(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, packed: Packed | None = None
) -> str | None:
    """Why the general CUDA quantizer doesn't support operands, of which q, or k and v, may be None; or None if it does.

    Nothing is compiled to find out, so compiling may still fail.
    """
    like = k if q is None else q
    assert like is not None
    device = device_of(like.device)
    return general_quantize.unsupported_call(q, k, v, recipe, device, packed) or build.unavailable(general_quantize.QUANTIZER, device.arch)


def unsupported_cuda_lse(lse: torch.Tensor, q: torch.Tensor) -> str | None:
    """Why Triton's kernel adds to the LSE what K's mean adds to scores, or None if a CUDA kernel does."""
    device = device_of(q.device)
    return general_quantize.unsupported_lse(lse, q, device) or build.unavailable(general_quantize.UNSMOOTHER, device.arch)


def quantized_packed(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed, longest: int | None = None
) -> tuple[Quantized | None, Quantized, Quantized]:
    """quantization.quantize_packed of k and v, and quantization.quantize_q, by kernels on devices that run kernels. The
    bytes are the same.

    Args:
        q: or None.
        packed: the sequences of k and v.
        longest: the most tokens of a sequence, as far as the caller knows, or None. Only speed depends on it.
    """
    if not has_kernels(k.device):
        return modelled_packed(q, k, v, recipe, packed)
    device = device_of(k.device)
    query = key = value = None
    with current(k.device):
        try:
            query, key, value = _by_cuda_quantizers(q, k, v, recipe, device, packed, longest)
        except BuildError as error:
            warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=2)
        if key is None or value is None:
            key, value = triton_kernels.quantize.quantize_packed(k, v, recipe, packed, device)
        if q is not None and query is None:
            query, _, _ = triton_kernels.quantize.quantize(q, None, None, recipe, device, given=None)
    return query, key, value


def modelled_packed(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed
) -> tuple[Quantized | None, Quantized, Quantized]:
    """`quantized_packed` in plain torch."""
    return None if q is None else quantize_ref.quantize_q(q, recipe), *quantize_ref.quantize_packed(k, v, recipe, packed)


def quantized(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Recipe,
    by_triton: bool = False,
    given: quantize_ref.Statistics | None = None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """quantization.quantize, by kernels on devices that run kernels. The bytes are the same.

    The CUDA quantizer for Hopper quantizes keys and values if it supports them. The general CUDA quantizer quantizes
    what else it supports, and Triton's kernels the rest.

    Args:
        by_triton: use no CUDA kernel.
        given: the statistics of the sequence that k and v are a part of; None: they are the whole sequence.
    """
    like = k if q is None else q
    assert like is not None
    if not has_kernels(like.device):
        return quantize_ref.quantize(q, k, v, recipe, given)
    device = device_of(like.device)
    with current(like.device):
        q_quantized, k_quantized, v_quantized = _by_kernels(q, k, v, recipe, device, by_triton or given is not None, given)
        if q_quantized is not None and recipe.smooth_q and k is not None and k_quantized is not None:
            q_quantized = triton_kernels.bias.with_bias(q_quantized, k, k_quantized, device)
        return q_quantized, k_quantized, v_quantized


QUANTIZERS = {"quantize": shielded(quantized), "modelled_quantize": shielded(quantize_ref.quantize)}
"""What operators do with q, k and v that were checked, and a recipe."""


def chunk_statistics(
    k: torch.Tensor, v: torch.Tensor, recipe: Recipe, into: tuple[torch.Tensor, torch.Tensor] | None = None
) -> quantize_ref.ChunkStatistics:
    """quantization.chunk_statistics of v, by kernels on devices that run kernels. The numbers are the same.

    Args:
        k, v: will be quantized by the recipe: `careful` is for the kernel that does it.
        into: where to write sums and extremes, contiguous; None: into new tensors.
    """
    sums, extremes = into or [torch.empty(shape, dtype=torch.float32, device=v.device) for shape in quantize_ref.chunk_shapes(v)]
    if not has_kernels(v.device) or v.numel() == 0:
        found = quantize_ref.chunk_statistics(v)
        return quantize_ref.ChunkStatistics(sums.copy_(found.sums), extremes.copy_(found.extremes), found.careful)
    device = device_of(v.device)
    with current(v.device):
        if unsupported_cuda_quantize(k, v, recipe, device) is None:
            try:
                return quantize_ref.ChunkStatistics(sums, extremes, cuda_run.measure_part(v, (sums, extremes), device))
            except BuildError as error:
                warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=2)
        return quantize_ref.ChunkStatistics(sums, extremes, triton_kernels.quantize.chunk_statistics(v, (sums, extremes), device))


def statistics(parts: Sequence[quantize_ref.PartialStatistics], total: int, recipe: Recipe) -> quantize_ref.Statistics:
    """quantization.statistics, by kernels on devices that run kernels. The numbers are the same."""
    device = parts[0].v_sums.device
    if not has_kernels(device):
        return quantize_ref.statistics(parts, total, recipe)
    with current(device):
        return triton_kernels.quantize.statistics(parts, total, recipe, device_of(device))


def quantize_into(key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, careful: torch.Tensor | None, recipe: Recipe) -> None:
    """Quantize k and v by statistics of a sequence that they are a part of.

    Args:
        key, value: their means and V's scales are given. K's rows and scales, and V, are written.
        careful: as `chunk_statistics` gave it; None: it wasn't measured.
    """
    if has_kernels(k.device) and recipe.k not in triton_kernels.quantize.GIVEN:
        device = device_of(k.device)
        with current(k.device):
            careful = chunk_statistics(k, v, recipe).careful if careful is None and k.numel() else careful
            if careful is not None and careful.dtype == torch.uint8:
                cuda_run.write_part(key, value, k, v, careful, device)
            else:
                triton_kernels.quantize.quantize_into(key, value, k, v, careful, recipe, device)
        return
    given = quantize_ref.Statistics(key.mean, value.mean, value.scale)
    _, new_key, new_value = quantized(None, k, v, recipe, given=given)
    assert new_key is not None and new_value is not None
    for into, x in ((key.data, new_key.data), (key.scale, new_key.scale), (value.data, new_value.data)):
        into.copy_(x)


def _by_kernels(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Recipe,
    device: Device,
    by_triton: bool,
    given: quantize_ref.Statistics | None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """A smoothed q is without `bias`."""
    query = key = value = None
    if not by_triton:
        try:
            query, key, value = _by_cuda_quantizers(q, k, v, recipe, device)
        except BuildError as error:
            warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=3)
    q, k, v = (x if y is None else None for x, y in zip((q, k, v), (query, key, value), strict=True))
    if q is None and k is None:
        return query, key, value
    others = triton_kernels.quantize.quantize(q, k, v, recipe, device, given=given)
    return others[0] or query, others[1] or key, others[2] or value


@frozen
class Quantizing:
    """Operands that one quantizer takes.

    Attributes:
        quantizer: `hopper` takes key and value, `general` any of the three, both are CUDA kernels; `triton` the rest.
        q, k, v: the operands, or None.
        because: why the quantizers before it don't take them.
    """

    quantizer: Literal["hopper", "general", "triton"]
    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    because: tuple[str, ...] = ()


def plan_quantizers(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, packed: Packed | None = None
) -> list[Quantizing]:
    """Which quantizer takes which of the operands, of which q, or k and v, may be None.

    Nothing is compiled to find out, so compiling may still fail.

    Args:
        packed: the sequences of k and v, or None.
    """
    found: list[Quantizing] = []
    not_hopper: tuple[str, ...] = ()
    if k is not None and v is not None:
        reason = unsupported_cuda_quantize(k, v, recipe, device_of(k.device))
        if reason is None:
            found.append(Quantizing("hopper", None, k, v))
            k = v = None
        else:
            not_hopper = (f"the Hopper quantizer: {reason}",)
    if q is not None and k is not None and unsupported_general_quantize(q, k, v, recipe, packed) is None:
        return [*found, Quantizing("general", q, k, v, not_hopper)]
    for of_q, of_k, of_v, because in ((None, k, v, not_hopper), (q, None, None, ())):
        if of_q is None and of_k is None:
            continue
        reason = unsupported_general_quantize(of_q, of_k, of_v, recipe, packed if of_q is None else None)
        if reason is None:
            found.append(Quantizing("general", of_q, of_k, of_v, because))
        else:
            found.append(Quantizing("triton", of_q, of_k, of_v, (*because, f"the general quantizer: {reason}")))
    return found


def _by_cuda_quantizers(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Recipe,
    device: Device,
    packed: Packed | None = None,
    longest: int | None = None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """Those of the operands that CUDA kernels quantize; None for the others.

    Args:
        packed, longest: as of `quantized_packed`; packed is None if k and v aren't.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    query = key = value = None
    for step in plan_quantizers(q, k, v, recipe, packed):
        if step.quantizer == "hopper":
            assert step.k is not None and step.v is not None
            if packed is None:
                key, value = cuda_run.quantize_kv(step.k, step.v, recipe.qk, device)
            else:
                key, value = cuda_run.quantize_packed(step.k, step.v, recipe.qk, packed, device, longest)
        elif step.quantizer == "general":
            of_q, of_k, of_v = cuda_run.quantize_any(step.q, step.k, step.v, recipe, device, None if step.k is None else packed)
            query, key, value = of_q or query, of_k or key, of_v or value
    return query, key, value


def _quantize(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    q_granularity: Granularity,
    k_granularity: Granularity,
    v_granularity: Granularity,
    smooth_k: bool,
    smooth_v: bool,
    smooth_q: bool,
    rotate: Rotation,
    qk: ProductType,
    by: Callable[..., tuple[Quantized | None, Quantized | None, Quantized | None]] | None = None,
) -> tuple[torch.Tensor, ...]:
    recipe = _recipe(q_granularity, k_granularity, v_granularity, smooth_k, smooth_v, smooth_q, rotate, qk)
    # without keys, means of queries are quantized apart from what they add to scores
    validate.check_quantize(q, k, v, replace(recipe, smooth_q=False) if k is None and smooth_q else recipe)
    like = k if q is None else q
    assert like is not None
    results = (by or quantized)(q, k, v, recipe)
    tensors: list[torch.Tensor | None] = []
    for x in results:
        tensors += (None,) * 3 if x is None else (x.data, x.scale, x.mean)
    tensors.append(None if results[0] is None else results[0].bias)
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in tensors)


def _bias_shape(means: Sequence[int], kv_length: int) -> tuple[int, int, int, int]:
    """Of Quantized.bias, by the shape of the means."""
    return means[0], means[1], means[2], quantize_ref.bias_pitch(kv_length)


def _fake_quantize(q, k, v, q_granularity, k_granularity, v_granularity, smooth_k, smooth_v, smooth_q, rotate, qk) -> tuple[torch.Tensor, ...]:
    like = k if q is None else q

    def numbers(*shape) -> torch.Tensor:
        return like.new_empty(shape, dtype=torch.float32)

    q_data, q_scale, q_mean, bias = (numbers(0) for _ in range(4))
    if q is not None:
        q_data = quantize_ref.empty_rows(q, quantize_ref.row_type(qk))
        q_scale = numbers(*quantize_ref.scale_shape(q_granularity, *q.shape))
        if smooth_q:
            means = (*q.shape[:2], -(-q.shape[2] // QUERY_GROUP), q.shape[3])
            q_mean = numbers(*means)
            bias = bias if k is None else numbers(*_bias_shape(means, k.shape[2]))
    if k is None:
        return q_data, q_scale, q_mean, *(numbers(0) for _ in range(7))
    batch, heads, length, dim = v.shape
    return (
        q_data,
        q_scale,
        q_mean,
        quantize_ref.empty_rows(k, quantize_ref.row_type(qk)),
        numbers(*quantize_ref.scale_shape(k_granularity, *k.shape)),
        numbers(batch, heads, k.shape[3]) if smooth_k else numbers(0),
        v.new_empty(batch, heads, dim, padded_length(length), dtype=E4M3),
        numbers(*quantize_ref.scale_shape(v_granularity, batch, heads, length, dim)),
        numbers(batch, heads, dim) if smooth_v else numbers(0),
        bias,
    )


for _name, _quantizer in (("quantize", _quantize), ("modelled_quantize", functools.partial(_quantize, by=quantize_ref.quantize))):
    register(
        f"{_name}(Tensor? q, Tensor? k, Tensor? v, str q_granularity, str k_granularity, str v_granularity, bool smooth_k, bool smooth_v,"
        " bool smooth_q, int rotate, str qk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _quantizer,
        _fake_quantize,
    )


def _score_bias(q_mean: torch.Tensor, k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity) -> torch.Tensor:
    validate.check_score_bias(q_mean, k_data, k_scale, k_granularity)
    return quantize_ref.score_bias(q_mean, quantize_ref.dequantize(Quantized(k_data, k_scale, k_granularity, "rows", k_data.shape[2])))


def _fake_score_bias(q_mean: torch.Tensor, k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity) -> torch.Tensor:
    return q_mean.new_empty(_bias_shape(q_mean.shape, k_data.shape[2]))


register("score_bias(Tensor q_mean, Tensor k_data, Tensor k_scale, str k_granularity) -> Tensor", _score_bias, _fake_score_bias)


def _import_kv(k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    validate.check_import_operands(k_data, k_scale, k_granularity, v)
    if has_kernels(v.device):
        with current(v.device):
            data, tokens = triton_kernels.quantize.import_values(v, device_of(v.device))
    else:
        data, tokens = quantize_ref.import_values(v)
    k = Quantized(k_data, k_scale, k_granularity, "rows", k_data.shape[2])
    return quantize_ref.with_nan_scales(k, tokens).scale, data


def _fake_import_kv(k_data: torch.Tensor, k_scale: torch.Tensor, k_granularity: Granularity, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, heads, length, dim = v.shape
    return k_scale.new_empty(batch, heads, length), v.new_empty(batch, heads, dim, padded_length(length))


register("import_kv(Tensor k_data, Tensor k_scale, str k_granularity, Tensor v) -> (Tensor, Tensor)", _import_kv, _fake_import_kv)


def _by_triton(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return triton_kernels.run.forward(call, device_of(call.q.device))


def plan_cuda(call: Call, first: bool = False) -> cuda_run.Config | str:
    """The instance of the CUDA kernels that runs a call, or why none does.

    Nothing is compiled to find out, so compiling may still fail.

    Args:
        first: only instances that `auto` takes before Triton's kernels.
    """
    device = device_of(call.q.device)
    planned = cuda_run.plan(call, device, first)
    return planned if isinstance(planned, str) else build.unavailable(planned, device.arch) or planned


def forward_by_cuda(call: Call, planned: cuda_run.Config, into: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """By an instance of the CUDA kernels. Triton's kernel writes the table of tiles of packed sequences.

    Args:
        into: where to write the results, but of packed sequences; None: into new tensors.
    """
    device = device_of(call.q.device)
    if call.varlen is None:
        return cuda_run.forward(call, device, planned, into=into)
    assert isinstance(planned, HopperConfig)
    table = triton_kernels.varlen.table_of(call, ROWS, device, planned.consumers)
    return cuda_run.forward(call, device, planned, tile_table=table)


def plan_backend(backend: str, call: Call) -> cuda_run.Config | str:
    """The instance of the CUDA kernels with which `cuda` or `auto` attends, or why `auto` takes Triton's kernels.

    Raises:
        BackendUnavailable: `backend` is `cuda`, and there is no instance.
    """
    planned = plan_cuda(call, first=backend == "auto")
    if backend == "cuda" and isinstance(planned, str):
        raise BackendUnavailable(f"cuda: {planned}; use backend='triton' or 'auto'")
    return planned


def by_cuda(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    planned = plan_backend("cuda", call)
    assert not isinstance(planned, str)
    return forward_by_cuda(call, planned)


def _with_quantized_q(call: Call, backend: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    """A call whose q the kernel should have quantized, with q quantized first."""
    query = quantized(call.q, None, None, FUSED_RECIPES["int8" if call.int8 else "e4m3"])[0]
    assert query is not None
    mean, of_lse = call.lse_mean, None

    def with_mean(lse: torch.Tensor) -> torch.Tensor:
        return lse if mean is None else unsmoothed_lse(lse, call.q, mean, call.softmax_scale, query.rotated)

    if call.softcap or call.sinks is not None:
        of_lse = None if mean is None else with_mean(torch.zeros(call.q.shape[:3], dtype=torch.float32, device=call.q.device))
    out, lse = backend(replace(call, q=query.data, q_scale=query.scale, mean_scores=of_lse, lse_mean=None))
    return out, with_mean(lse) if call.return_lse and of_lse is None else lse


def by_whichever(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """By CUDA where it can, by Triton where not, also if compiling CUDA turns out to fail."""
    planned = plan_backend("auto", call)
    if not isinstance(planned, str):
        try:
            return forward_by_cuda(call, planned)
        except BuildError as error:
            warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=2)
    return _with_quantized_q(call, _by_triton) if call.fuse_q_quant else _by_triton(call)


def laid_out(
    q: torch.Tensor, found: tuple[torch.Tensor, torch.Tensor], out_dtype: torch.dtype, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE that plain torch computed, in the dtypes and strides in which kernels give them."""
    out, lse = empty_output(q, found[0].shape[3], out_dtype), empty_lse(q, return_lse)
    return out.copy_(found[0]), lse.copy_(found[1]) if return_lse else lse


def _by_model(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """By the pipeline's oracle, in plain torch: what the kernels compute, but for float32's order of summation."""
    model = functools.partial(modelled, call, reference.Arithmetic(SCALE_BLOCK, call.compute))
    if call.varlen is None:
        return laid_out(call.q, model(*quantized_of(call), call.mean_scores), call.out_dtype, call.return_lse)
    found = of_sequences(call, model)
    return laid_out(call.q, found, call.out_dtype, call.return_lse)


def modelled(
    call: Call, arithmetic: reference.Arithmetic, q: Quantized, k: Quantized, v: Quantized, mean_scores: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.pipeline with a call's options."""
    return reference.pipeline(
        q, k, v, call.attn_mask, arithmetic=arithmetic, causal=call.causal, scoring=call.scoring, mean_scores=mean_scores
    )  # fmt: skip


def of_sequences(call: Call, attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed operands in plain torch.

    Args:
        attend: of q, k and v of a sequence, and of what K's mean adds to the scores of its rows, or None.
    """
    assert call.varlen is not None
    q, k, v = (quantize_ref.sequences_of(x) for x in quantized_of(call))

    def of_one(sequence: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        mean_scores = None if call.mean_scores is None else call.mean_scores[:, :, rows]
        return attend(q[sequence], k[sequence], v[sequence], mean_scores)

    return reference.of_each_sequence(call.q, call.value_dim, call.varlen.q, of_one)


def quantized_of(call: Call) -> tuple[Quantized, Quantized, Quantized]:
    """q, k and v of a call as `Quantized`, without what the kernels aren't told."""
    assert call.q_scale is not None
    of_q, of_k = (None, None) if call.varlen is None else (call.varlen.q, call.varlen.k)
    q = Quantized(call.q, call.q_scale, GRANULARITIES[call.q_group], "rows", call.q_length, None, 0, call.bias, of_q)
    k = Quantized(call.k, call.k_scale, GRANULARITIES[call.k_group], "rows", call.kv_length, packed=of_k)
    return q, k, Quantized(call.v, call.v_scale, "channel", "values", call.kv_length, call.v_mean, packed=of_k)


def forward_by(backend: Forward):
    """A forward operator's implementation: Call's fields in order."""

    def forward(
        q: torch.Tensor,
        q_scale: torch.Tensor | None,
        q_group: int,
        k: torch.Tensor,
        k_scale: torch.Tensor,
        k_group: int,
        v: torch.Tensor,
        v_scale: torch.Tensor,
        v_mean: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        bias: torch.Tensor | None,
        kv_length: int,
        softmax_scale: float,
        causal: Causal,
        compute: ComputeType,
        two_level: bool | None,
        out_dtype: torch.dtype,
        return_lse: bool,
        window: Sequence[int] = CAUSAL_WINDOW,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        mean_scores: torch.Tensor | None = None,
        lse_mean: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = Call(
            q, q_scale, q_group, k, k_scale, k_group, v, v_scale, v_mean, attn_mask, bias,
            kv_length, softmax_scale, causal, compute, two_level, out_dtype, return_lse, validate.checked_window(window),
            softcap, sinks, mean_scores, lse_mean,
        )  # fmt: skip
        validate.check_call(call, quantizes_q=backend in (by_cuda, by_whichever))
        with current(q.device):
            return backend(call)

    return forward


def _fake_forward(q, q_scale, q_group, k, k_scale, k_group, v, v_scale, v_mean, attn_mask, bias, kv_length,
                  softmax_scale, causal, compute, two_level, out_dtype, return_lse, window=CAUSAL_WINDOW, softcap=0.0,
                  sinks=None, mean_scores=None, lse_mean=None):  # fmt: skip
    return empty_output(q, v.shape[2], out_dtype), empty_lse(q, return_lse)


FORWARDS: dict[str, Forward] = {"triton": _by_triton, "cuda": by_cuda, "auto": by_whichever, "modelled": _by_model}
"""Attention to quantized operands, by backend."""

FUSING = ("auto", "cuda")
"""Backends whose attention kernel may quantize q."""


def attend_to_quantized(call: Call, backend: str, scale: torch.Tensor | None = None, made_here: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by a forward operator, or directly.

    Args:
        scale: as of `register`.
        made_here: whether all of q, k and v were quantized by `quantized`. Others are checked, as an operator does.
    """
    if is_direct(call.q, call.k, call.v):
        if not made_here or call.kv_heads == 0:
            validate.check_call(call, quantizes_q=backend in FUSING)
        with shield(), current(call.q.device):
            return FORWARDS[backend](call)
    operator = getattr(library_ops, f"{backend}_forward" if call.varlen is None else f"{backend}_varlen_forward")
    return operator(*call.arguments, scale=scale)


for _name, _backend in FORWARDS.items():
    register(
        f"{_name}_forward(Tensor q, Tensor? q_scale, int q_group, Tensor k, Tensor k_scale, int k_group,"
        " Tensor v, Tensor v_scale, Tensor? v_mean, Tensor? attn_mask, Tensor? bias, SymInt kv_length, float softmax_scale, str causal,"
        f" str compute, bool? two_level, ScalarType out_dtype, bool return_lse, {OPTIONS}, Tensor? mean_scores=None, Tensor? lse_mean=None)"
        " -> (Tensor, Tensor)",
        forward_by(_backend),
        _fake_forward,
    )


def _half_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8_out: torch.Tensor | None, fp8_lse: torch.Tensor | None, k_mean: torch.Tensor | None,
    rotated: int, sinks: int, recent: int, softmax_scale: float, causal: Causal, out_dtype: torch.dtype, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    validate.check_half_keys(q, k, v, fp8_out, fp8_lse, k_mean)
    validate.check_launch(softmax_scale, causal, out_dtype)
    out, lse = _launch_half_keys(q, k, v, fp8_out, fp8_lse, k_mean, rotated, sinks, recent, softmax_scale, causal, out_dtype, return_lse)
    return out, empty_lse(q, False) if lse is None else lse


def _launch_half_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator `half_keys` of arguments that were checked."""
    *of_fp8_keys, sinks, recent, softmax_scale, causal, out_dtype, return_lse = others
    offset = causal_offset(causal, q.shape[2], k.shape[2])
    call = HalfKeys(q, k, v, sinks, recent, softmax_scale, offset, out_dtype, return_lse, *of_fp8_keys)
    with current(q.device):
        return triton_kernels.half_keys.half_keys(call, device_of(q.device))


def attend_to_half_keys(*arguments: Any, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention to half-precision keys of a checked call by the operator `half_keys`, or directly: then without an LSE
    that isn't asked for.

    Args:
        arguments: the operator's.
        scale: as of `register`.
    """
    if not is_direct(*arguments[:3]):
        return library_ops.half_keys(*arguments, scale=scale)
    with shield():
        return _launch_half_keys(*arguments)


def _half_keys_modelled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8_out: torch.Tensor | None, fp8_lse: torch.Tensor | None, k_mean: torch.Tensor | None,
    rotated: int, sinks: int, recent: int, softmax_scale: float, causal: Causal, out_dtype: torch.dtype, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    validate.check_half_keys(q, k, v, fp8_out, fp8_lse, k_mean)
    validate.check_launch(softmax_scale, causal, out_dtype)
    fp8 = None
    if fp8_out is not None and fp8_lse is not None:
        fp8 = fp8_out, fp8_lse if k_mean is None else reference.unsmoothed_lse(fp8_lse, q, k_mean, softmax_scale, rotated)
    found = reference.with_half_keys(q, k, v, fp8, reference.HalfKeyCounts(sinks, recent), causal=causal, softmax_scale=softmax_scale)
    return laid_out(q, found, out_dtype, return_lse)


def _fake_half_keys(q, k, v, fp8_out, fp8_lse, k_mean, rotated, sinks, recent, softmax_scale, causal, out_dtype, return_lse):
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, return_lse)


for _name, _kept in (("half_keys", _half_keys), ("modelled_half_keys", _half_keys_modelled)):
    register(
        f"{_name}(Tensor q, Tensor k, Tensor v, Tensor? fp8_out, Tensor? fp8_lse, Tensor? k_mean, int rotated, int sinks, int recent,"
        " float softmax_scale, str causal, ScalarType out_dtype, bool return_lse) -> (Tensor, Tensor)",
        _kept,
        _fake_half_keys,
    )


def _reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, softmax_scale: float, causal: Causal, dtype: torch.dtype,
    out_dtype: torch.dtype, window: Sequence[int] = CAUSAL_WINDOW, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    validate.check_floats(q, k, v, attn_mask)
    of_rows = validate.checked_rows(softmax_scale, causal, out_dtype, window, softcap, sinks, q)
    scoring = reference.Scoring(softmax_scale, of_rows, softcap, sinks)
    found = reference.attention(q, k, v, attn_mask, causal=causal, scoring=scoring, dtype=dtype)
    return laid_out(q, found, out_dtype, True)


def _fake_reference_forward(q, k, v, attn_mask, softmax_scale, causal, dtype, out_dtype, window=CAUSAL_WINDOW, softcap=0.0, sinks=None):
    return empty_output(q, v.shape[3], out_dtype), empty_lse(q, True)


register(
    "reference_forward(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float softmax_scale, str causal, ScalarType dtype, ScalarType out_dtype,"
    f" {OPTIONS}) -> (Tensor, Tensor)",
    _reference_forward,
    _fake_reference_forward,
    ("CompositeExplicitAutograd",),  # of any device
)


def _dequantize(
    data: torch.Tensor, scale: torch.Tensor, granularity: Granularity, layout: Layout, length: int, mean: torch.Tensor | None
) -> torch.Tensor:
    x = Quantized(data, scale, granularity, layout, length, mean)
    validate.check_quantized("x", x, layout)
    return quantize_ref.dequantize(x).contiguous()


def _fake_dequantize(data, scale, granularity, layout, length, mean):
    return torch.empty(Quantized(data, scale, granularity, layout, length).shape, dtype=torch.float32, device=data.device)


register(
    "dequantize(Tensor data, Tensor scale, str granularity, str layout, SymInt length, Tensor? mean) -> Tensor",
    _dequantize,
    _fake_dequantize,
    ("CompositeExplicitAutograd",),
)


def _rotate(x: torch.Tensor, part: int, factor: float) -> torch.Tensor:
    if part and (part < 0 or part & (part - 1) or x.shape[-1] % part):
        raise ValueError(f"part is {part}; it must be 0 or a power of two that divides x's last size, {x.shape[-1]}")
    return rotation.rotate(x, part) * factor


def _fake_rotate(x, part, factor):
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


register("rotate(Tensor x, int part, float factor) -> Tensor", _rotate, _fake_rotate, ("CompositeExplicitAutograd",))


def unsmoothed_lse(
    lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float, rotated: int, q_scale: torch.Tensor | None = None,
    granularity: Granularity = "token",
) -> torch.Tensor:  # fmt: skip
    query = q if q_scale is None else Quantized(q, q_scale, granularity, "rows", q.shape[2])
    validate.check_unsmoothed_lse(lse, query, k_mean)
    if not has_kernels(q.device) or not lse.is_contiguous():
        return reference.unsmoothed_lse(lse, q if isinstance(query, torch.Tensor) else quantize_ref.dequantize(query), k_mean, softmax_scale, rotated)
    device = device_of(q.device)
    with current(q.device):
        if isinstance(query, torch.Tensor) and unsupported_cuda_lse(lse, q) is None:
            try:
                return cuda_run.unsmoothed_lse(lse, q, k_mean, softmax_scale, rotated, device)
            except BuildError as error:
                warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=2)
        return triton_kernels.lse.unsmoothed_lse(lse, query, k_mean, softmax_scale, rotated, device)


def unsmoothed_packed_lse(
    lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, cu_seqlens_q: torch.Tensor, softmax_scale: float, rotated: int,
    q_scale: torch.Tensor | None = None, granularity: Granularity = "token",
) -> torch.Tensor:  # fmt: skip
    """unsmoothed_lse of packed queries: (1, Hq, T, D), the LSE (1, Hq, T), and K's mean (B, Hkv, D)."""
    packed = Packed(cu_seqlens_q, None, q.shape[2])
    query = q if q_scale is None else Quantized(q, q_scale, granularity, "rows", q.shape[2])
    validate.check_unsmoothed_lse(lse, query, k_mean, packed)
    if has_kernels(q.device):
        with current(q.device):
            return triton_kernels.lse.unsmoothed_lse(lse, query, k_mean, softmax_scale, rotated, device_of(q.device), packed=packed)
    floats = q if isinstance(query, torch.Tensor) else quantize_ref.dequantize(query)
    out = lse.clone()
    for i, (begin, length) in enumerate(packed.spans()):
        rows = slice(begin, begin + length)
        out[:, :, rows] = reference.unsmoothed_lse(lse[:, :, rows], floats[:, :, rows], k_mean[i : i + 1], softmax_scale, rotated)
    return out


def _fake_unsmoothed_lse(lse, q, k_mean, softmax_scale, rotated, q_scale=None, granularity="token"):
    return torch.empty_like(lse)


QUERY_SCALES = "Tensor? q_scale=None, str granularity='token'"
"""Arguments of operators whose queries may be quantized: rows that are rotated as keys are."""

register(
    f"unsmoothed_lse(Tensor lse, Tensor q, Tensor k_mean, float softmax_scale, int rotated, {QUERY_SCALES}) -> Tensor",
    unsmoothed_lse,
    _fake_unsmoothed_lse,
)
