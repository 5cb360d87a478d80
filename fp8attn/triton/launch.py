"""Launching a compiled kernel at little cost to the CPU.

Triton's own path from a call to its compiled kernel binds, specializes and hashes every argument in Python, which takes longer
than a small kernel runs. Here a kernel is found by what specialization depends on, and its arguments go straight to it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..schedule import unsupported_size
from .tile import INTERPRETING

_compiled: dict[tuple, Any] = {}


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv, which takes 3 µs on the host, because kernels may call it, too."""
    return -(-a // b)


def check_counted(name: str, x: torch.Tensor) -> None:
    """Raise ValueError if kernels can't count the tokens of x (B, H, S, D), or its tiles."""
    reason = unsupported_size(name, x)
    if reason is not None:
        raise ValueError(reason)


def specialize(arguments: tuple, key: list) -> None:
    """Append to `key` what a compiled kernel depends on in its arguments.

    Follows Triton's rules: integers by width, divisibility by 16 and being 1, pointers by type and alignment to 16 bytes.
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
            specialize(argument, key)
        elif kind is float:
            key.append(float)
        elif hasattr(argument, "block_shape"):  # a tensor descriptor
            key += (argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None))
        elif isinstance(argument, torch.Tensor):
            key += (argument.dtype, argument.data_ptr() & 15 == 0)
        else:
            key.append(argument)  # None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warmup: bool = False, dependent: bool = False, **options: Any) -> None:
    """kernel[grid](*arguments, **options).

    Args:
        arguments: all of the kernel's, in order, constexprs included.
        warmup: compile only.
        dependent: launch before the kernel before has ended, for which the kernel waits by itself (quantize.begin).
        options: Triton's, as num_warps.
    """
    if dependent:
        options["launch_pdl"] = True
    if INTERPRETING or warmup:
        kernel.run(*arguments, grid=grid, warmup=warmup, **options)
        return
    device = torch.cuda.current_device()
    parts: list = [kernel, device, *options.values()]
    for parameter, argument in zip(kernel.params, arguments, strict=True):
        if parameter.is_constexpr:
            parts.append(argument)
        else:
            specialize((argument,), parts)
    key = tuple(parts)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        _compiled[key] = compiled
    stream = triton.runtime.driver.active.get_current_stream(device)
    compiled[(*grid, 1, 1)[:3]](*arguments, stream=stream)
