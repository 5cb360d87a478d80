"""Launches compiled kernels with little CPU time.

Triton's own launch path binds, specializes and hashes every argument in Python, which takes longer than a small kernel
runs. Here, a compiled kernel is looked up by the properties that specialization depends on, and called with the
arguments directly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITCallable

from .. import recording
from ..device import INTERPRETING
from ..schedule import unsupported_size

_compiled: dict[tuple, Any] = {}


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv takes 3 µs on the host, because kernels may call it, too."""
    return -(-a // b)


def check_counted(name: str, x: torch.Tensor) -> None:
    """Check that kernels can count the tokens and tiles of x (B, H, S, D).

    Raises:
        ValueError: they can't.
    """
    reason = unsupported_size(name, x)
    if reason is not None:
        raise ValueError(reason)


ROWS = 4
"""Length of a tuple of strides of rows, those of (B, H, S, D). Shorter tuples are strides of scales."""


def is_strides(argument: tuple) -> bool:
    return bool(argument) and type(argument[0]) is int


def stride_bits(strides: tuple[int, ...]) -> int:
    """What a kernel that takes strides is compiled for: 1 if the last is 1, + 2 if the others are multiples of 16, + 4
    if one needs 64 bits.

    Strides of scales never count as multiples of 16: what they are depends on lengths.
    """
    others = 0
    for stride in strides[:-1]:
        others |= stride
    last = strides[-1]
    return (last == 1) | (len(strides) == ROWS and not others & 15) << 1 | (others | last >= 0x80000000) << 2


def specialize(arguments: Sequence[Any], key: list) -> None:
    """Append to `key` the properties of the arguments on which a compiled kernel depends.

    Follows Triton's rules: integers by width, divisibility by 16 and equality to 1; pointers by type and alignment to
    16 bytes. Fewer properties of strides count, see `representative`.
    """
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            wide = 4 if not -0x80000000 <= argument < 0x80000000 else 0
            key.append(wide | (2 if argument & 15 == 0 else argument == 1))
        elif kind is torch.Tensor:
            key.append(argument.dtype)
            key.append(argument.data_ptr() & 15 == 0)
        elif kind is tuple or isinstance(argument, tuple):
            key.append(len(argument))
            if is_strides(argument):
                key.append(stride_bits(argument))
            else:
                specialize(argument, key)
        elif kind is float:
            key.append(float)
        elif hasattr(argument, "block_shape"):  # a tensor descriptor
            key += (argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None))
        elif isinstance(argument, torch.Tensor):
            key += (argument.dtype, argument.data_ptr() & 15 == 0)
        else:
            key.append(argument)  # None


def representative(argument: Any) -> Any:
    """What Triton compiles for in place of an argument, so that all arguments with one key share a kernel.

    Triton would compile another kernel for each combination of strides that are multiples of 16, or 1, and others.
    """
    if not isinstance(argument, tuple):
        return argument
    if not is_strides(argument):
        return tuple(representative(part) for part in argument)
    bits = stride_bits(argument)
    stride = (16 if bits & 2 else 17) + (1 << 32 if bits & 4 else 0)
    return (*[stride] * (len(argument) - 1), 1 if bits & 1 else stride | 1)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warmup: bool = False, dependent: bool = False, **options: Any) -> None:
    """Launch kernel[grid](*arguments, **options).

    Args:
        arguments: all arguments of the kernel, in order, constexprs included.
        warmup: compile only.
        dependent: launch before the previous kernel has ended. The kernel itself waits for it (begin).
        options: Triton's options, such as num_warps.
    """
    if dependent:
        options["launch_pdl"] = True
    if INTERPRETING:
        if recording.current() is not None:
            raise recording.NotRecordable("kernels are interpreted")
        kernel.run(*arguments, grid=grid, warmup=warmup, **options)
        return
    if warmup:
        compiled_for(kernel, arguments, options)
        return
    device = torch.cuda.current_device()
    constants, counts, others = places_of(kernel)
    parts: list = [kernel.fn, device, *options.values(), *[arguments[i] for i in constants]]
    for i in counts:
        if type(arguments[i]) is int:
            parts.append(-0x80000000 <= arguments[i] < 0x80000000)
        else:
            specialize((arguments[i],), parts)
    specialize([arguments[i] for i in others], parts)
    key = tuple(parts)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = compiled_for(kernel, arguments, options)
    recorder = recording.current()
    if recorder is not None:
        recorder.kernel(compiled, grid, arguments, dependent)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    compiled[(*grid, 1, 1)[:3]](*arguments, stream=stream)


@functools.cache
def places_of(kernel: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Which of a kernel's parameters are constants, which are not specialized, and all others."""
    constants = tuple(i for i, parameter in enumerate(kernel.params) if parameter.is_constexpr)
    counts = tuple(i for i, parameter in enumerate(kernel.params) if parameter.do_not_specialize and i not in constants)
    return constants, counts, tuple(i for i in range(len(kernel.params)) if i not in constants and i not in counts)


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """The start of a kernel that may be a dependent, before it touches memory: wait for the previous kernel, let the
    next one start."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def compiled_for(kernel: Any, arguments: tuple, options: dict[str, Any]) -> Any:
    """The kernel that launches with such arguments run, from Triton's cache on disk or compiled."""
    hash_callees_first(kernel.fn.__module__)
    return kernel.run(*map(representative, arguments), grid=(1,), warmup=True, **options)


@functools.cache
def hash_callees_first(module: str) -> None:
    """Have Triton hash all functions of a module, and of those that it imports functions from, as they are defined.

    By its hash a kernel is found on disk. Triton's hash of a function contains the constants of the functions that it
    calls only if these have been hashed before. Hashed on first use, a kernel would be compiled again in each process
    that uses kernels in another order.
    """
    for function in [*vars(sys.modules[module]).values()]:
        if isinstance(function, JITCallable):
            if function.fn.__module__ != module:
                hash_callees_first(function.fn.__module__)
            function.cache_key  # noqa: B018
