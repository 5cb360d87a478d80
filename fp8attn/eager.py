"""Repeats calls like an earlier one, with a single operator.

What a call launches follows from its options and from its tensors' dtypes, shapes, strides, devices and alignment. The
binding keeps launches under these as a key: a call whose key it finds costs one operator. A call that raises isn't
remembered. Calls that torch.compile, modes, transforms or tracers see always use the operators of fp8attn.ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from . import ops
from .call import Call, Problem
from .cuda import early, portable
from .cuda import run as cuda_run
from .cuda.build import BuildError
from .cuda.portable import PortableConfig
from .device import device_of
from .recipe import Quantized
from .validate import Operand

MOST = 4096
"""Combinations of options that are kept; then all are forgotten."""

IMMUTABLE = frozenset((type(None), bool, int, float, str, torch.dtype))

Attention = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Output, or output and LSE."""

_launches: dict[tuple, Callable[..., Attention | None] | None] = {}
"""For each combination of options, the function that repeats such a call. It is None after the first call, so that
calls whose lengths always differ cost nothing."""
_numbers = itertools.count()


def _never(*tensors: torch.Tensor | None) -> None:
    """Repeats calls that no CUDA kernel runs by itself."""


def _repeat_from_fp16(repeat: Callable[..., list[torch.Tensor]], number: int, *tensors: torch.Tensor) -> Attention | None:
    """The output or output and LSE that the binding returns as a list; None of an empty one."""
    found = repeat(number, *tensors)
    return found[0] if len(found) == 1 else tuple(found) if found else None  # type: ignore[return-value]


def forget() -> None:
    """As if no call had been made."""
    _launches.clear()


def _known(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple) -> tuple[tuple, tuple] | None:
    """What a call is kept by, and its tensors, a mask behind the others; None of calls that aren't plain torch."""
    if is_compiling() or _len_torch_function_stack() or _len_torch_dispatch_stack() or _is_tracing():
        return None
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    masks = () if attn_mask is None else (attn_mask,)
    if masks and type(attn_mask) is not torch.Tensor:
        return None
    options = (options, *(x.shape for x in masks))
    if type(query) is type(key) is type(value) is torch.Tensor:
        return (options, query.shape, key.shape, value.shape), (query, key, value, *masks)
    if not (isinstance(query, Quantized) and isinstance(key, Quantized) and isinstance(value, Quantized)):
        return None
    if query.bias is not None or query.mean is not None:  # smoothed: nothing here tells the binding of it
        return None
    q, q_scale, k, k_scale, v, v_scale, v_mean = tensors = (query.data, query.scale, key.data, key.scale, value.data, value.scale, value.mean)
    if not (type(q) is type(q_scale) is type(k) is type(k_scale) is type(v) is type(v_scale) is torch.Tensor):
        return None
    if v_mean is not None and type(v_mean) is not torch.Tensor:
        return None
    name = (
        options, query.granularity, query.layout, query.length, query.rotated, key.granularity, key.layout, key.length, key.rotated,
        value.granularity, value.layout, value.length, value.rotated,
    )  # fmt: skip
    return name, (*tensors, *masks)


def repeat(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple) -> Attention | None:
    """Attention, if a call like this one was kept.

    Args:
        query, key, value, attn_mask: what `sdpa` was called with.
        options: what else it was called with, as far as it isn't the same in all calls that come here.
    """
    known = _known(query, key, value, attn_mask, options)
    if known is None:
        return None
    try:
        launch = _launches.get(known[0])
    except TypeError:  # an option that can't be hashed is an error, or about to be one
        return None
    return None if launch is None else launch(*known[1])


def _second(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple) -> tuple[tuple, tuple, int] | None:
    """The two results of `_known`, and the number of the options in the binding, for a call to remember.

    A call is remembered from the second one with its options on. For other calls, the result is None.
    """
    known = _known(query, key, value, attn_mask, options)
    # a tensor, say, may be another number the next time
    if known is None or not all(type(x) in IMMUTABLE for x in options):
        return None
    name, tensors = known
    if name not in _launches:
        if len(_launches) >= MOST:
            forget()
        _launches[name] = None
        return None
    launch = _launches.get(name)
    if launch is _never:
        return None
    if launch is None:
        _launches[name] = _never
    return name, tensors, launch.args[-1] if isinstance(launch, partial) else next(_numbers)


def remember(
    query: Quantized, key: Quantized, value: Quantized, attn_mask: torch.Tensor | None, options: tuple, fields: tuple, first: bool, out: torch.Tensor
) -> None:
    """Keep a call of quantized operands that has come to its end.

    Args:
        query, key, value, attn_mask, options: as of `repeat`.
        fields: `Call`'s.
        first: as of ops.plan_cuda.
        out: what it returned.
    """
    again = _second(query, key, value, attn_mask, options)
    if again is None:
        return
    call = Call(*fields)
    if out.numel() == 0 or call.kv_length == 0:
        return
    config, device = ops.plan_cuda(call, first), device_of(call.q.device)
    if isinstance(config, str):
        return
    split_ctas = cuda_run.split_ctas_of(call, config, device)
    if isinstance(config, PortableConfig) and (portable.packed(call) is not call or split_ctas > 1):
        return
    try:
        library = cuda_run.library_of(config, device)
    except BuildError:  # Triton went on
        return
    name, tensors, number = again
    arguments, scratch = cuda_run.launch_of(call, device, config, library, split_ctas)
    library.operators.remember.default(number, *arguments, *tensors[:7], attn_mask, out, *scratch)
    _launches[name] = partial(library.operators.repeat.default, number)


def remember_from_fp16(problem: Problem, options: tuple, out: torch.Tensor) -> None:
    """Keep a call of plain tensors, likewise, if CUDA's kernels quantized all of it, in one launch or in two."""
    tensors = problem.q, problem.k, problem.v
    again = _second(*tensors, problem.attn_mask, options)
    if again is None:
        return
    name, _, number = again
    device = device_of(problem.q.device)
    try:
        if ops.unsupported_one_launch(problem) is None:
            library, arguments = cuda_run.launch_from_fp16(problem, device)
            library.operators.remember_from_fp16.default(number, *arguments, problem.return_lse, *tensors, out)
            _launches[name] = partial(_repeat_from_fp16, library.operators.repeat_from_fp16.default, number)
        elif ops.unsupported_two_launches(problem) is None and out.numel() > 0:
            library, arguments, filled, scratch = early.launch_of_both(problem, device)
            library.operators.remember_both.default(number, *arguments, *tensors, problem.attn_mask, filled, out, *scratch)
            _launches[name] = partial(_repeat_from_fp16, library.operators.repeat_both.default, number)
    except BuildError:  # Triton went on
        return
