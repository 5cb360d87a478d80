"""A tiny kernel, which shows whether Triton works on a device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_kernel(x, count, out):
    """The sum of `count` numbers. Its loop bound is loaded, as in the attention kernels."""
    total = 0.0
    for i in range(tl.load(count)):
        total += tl.load(x + i)
    tl.store(out, total)


def check_sum(device: torch.device, interpreted: bool = False) -> None:
    """Run the kernel on a device's tensors, interpreted where everything is or if `interpreted`.

    Raises:
        Exception: Triton's own error, if it can't run the kernel.
        RuntimeError: the sum is wrong.
    """
    kernel: Any = _sum_kernel
    if interpreted:
        from triton.runtime.interpreter import InterpretedFunction

        kernel = InterpretedFunction(_sum_kernel.fn)
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float32, device=device)
    count, out = torch.tensor([3], dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.float32, device=device)
    kernel[(1,)](x, count, out)
    if out.item() != 6.0:
        raise RuntimeError(f"a kernel that adds 1, 2 and 3 gave {out.item()}")
