"""Repeats calls like an earlier one, with a single operator.

What a call launches follows from its options and from its tensors' dtypes, shapes, strides, devices and alignment. The
binding keeps recorded launches under these as a key: a call whose key it finds costs one operator. A call that raises
isn't recorded. Calls that torch.compile, modes, transforms or tracers see always use the operators of fp8attn.ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from . import ops, recording
from .cuda import build
from .cuda.build import BuildError
from .recipe import Quantized
from .validate import Operand

MOST = 4096
"""Combinations of options and shapes that are kept; then all are forgotten."""

IMMUTABLE = frozenset((type(None), bool, int, float, str, torch.dtype))

Attention = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Output, or output and LSE."""

Tensors = recording.Tensors

TENSORS = ("data", "scale", "mean", "bias")
"""The fields of a Quantized that are tensors."""

_launches: dict[tuple, Callable[[Tensors], list[torch.Tensor]] | None] = {}
"""For each combination of options and shapes, the function that repeats such a call. It is None after the first call,
so that calls whose lengths always differ cost nothing."""
_numbers = itertools.count()


def _never(tensors: Tensors) -> list[torch.Tensor]:
    """Repeats calls that can't be recorded."""
    return []


def forget() -> None:
    """As if no call had been made."""
    _launches.clear()


def _known(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple) -> tuple[tuple, Tensors] | None:
    """What a call is kept by, and its tensors, a mask behind the others; None of calls that aren't plain torch."""
    if is_compiling() or _len_torch_function_stack() or _len_torch_dispatch_stack() or _is_tracing():
        return None
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return None
    if attn_mask is not None:
        if type(attn_mask) is not torch.Tensor or attn_mask.requires_grad:
            return None
        options = (options, attn_mask.shape)
    if type(query) is type(key) is type(value) is torch.Tensor:
        if query.requires_grad or key.requires_grad or value.requires_grad:
            return None
        return (options, query.shape, key.shape, value.shape), (query, key, value, attn_mask)
    if not (isinstance(query, Quantized) and isinstance(key, Quantized) and isinstance(value, Quantized)):
        return None
    operands = query, key, value
    tensors = *(t for x in operands for t in (x.data, x.scale, x.mean, x.bias)), attn_mask
    if any(x is not None and (type(x) is not torch.Tensor or x.requires_grad) for x in tensors):
        return None
    kinds = tuple((x.granularity, x.layout, x.length, x.rotated) for x in operands)
    return (options, kinds), tensors


def _with_tensors(operands: tuple[Operand, Operand, Operand], tensors: Tensors) -> tuple[Any, ...]:
    """Operands and attn_mask with `tensors`, which `_known` gave of them, in place of their own."""
    *others, attn_mask = tensors
    quantized = [x for x in operands if isinstance(x, Quantized)]
    if not quantized:
        return tuple(tensors)
    remaining: Iterator[Any] = iter(others)
    return *(replace(x, **{name: next(remaining) for name in TENSORS}) for x in quantized), attn_mask


def repeat(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple) -> Attention | None:
    """Attention, if a call like this one was kept.

    Args:
        query, key, value, attn_mask: what `sdpa` was called with.
        options: what else it was called with.
    """
    known = _known(query, key, value, attn_mask, options)
    if known is None:
        return None
    try:
        launch = _launches.get(known[0])
    except TypeError:  # an option that can't be hashed is an error, or about to be one
        return None
    outputs = [] if launch is None else launch(known[1])
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else (outputs[0], outputs[1])


def remember(query: Operand, key: Operand, value: Operand, attn_mask: torch.Tensor | None, options: tuple, attend: Callable[..., Attention]) -> None:
    """Keep a call that has come to its end. A call is kept from the second one with its options and shapes on.

    Args:
        query, key, value, attn_mask, options: as of `repeat`.
        attend: attention of other operands with these options.
    """
    known = _known(query, key, value, attn_mask, options)
    # a tensor, say, may be another number the next time
    if known is None or not all(type(x) in IMMUTABLE for x in options):
        return
    name, tensors = known
    if name not in _launches:
        if len(_launches) >= MOST:
            forget()
        _launches[name] = None
        return
    launch = _launches.get(name)
    if launch is _never:
        return
    number = launch.args[0] if isinstance(launch, partial) else next(_numbers)

    def outputs(inputs: Tensors) -> tuple[torch.Tensor, ...]:
        found = attend(*_with_tensors((query, key, value), inputs))
        return found if isinstance(found, tuple) else (found,)

    try:
        operators = build.load_binding()
    except BuildError:  # Triton goes on
        _launches[name] = _never
        return
    if recording.record(operators, ops.implementations, number, tensors, outputs):
        _launches[name] = partial(operators.repeat.default, number)
    elif launch is None:
        _launches[name] = _never
