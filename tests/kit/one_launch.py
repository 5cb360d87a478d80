"""Quantization and attention in one launch, beside two launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fp8attn
from closeness import assert_matches_pipeline, on_grid
from emulated import Emulated, quantized
from fp8attn import Recipe, reference
from fp8attn.call import Problem
from fp8attn.cuda import fused_head, fused_small, one_launch
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.one_launch import OneLaunch
from fp8attn.cuda.oracle import oracle
from fp8attn.device import Device, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.reference import Causal
from strategies import Case

Halves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def halves(q: tuple[int, ...], k: tuple[int, ...], device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> Halves:
    """q, k and v of these shapes; rotated, q and k need no rounding."""
    generator = torch.Generator().manual_seed(sum(q) + sum(k))
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in (q, k, k))
    return on_grid(query), on_grid(key), value


def launch_of(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, device: Device) -> OneLaunch:
    """The launch of a kernel, which must take the call."""
    module = {"fused_small": fused_small, "fused_head": fused_head}[kernel]
    assert module.unsupported_call(q, k, v, scale, device) is None
    return one_launch.small(q, k) if kernel == "fused_small" else one_launch.by_heads(q, k, device)


def assert_bits_of_two_launches(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: str, scale: float = 0.125, out_dtype: torch.dtype = torch.float32
) -> OneLaunch:
    """Of the output, NaN included; the LSE, to which two kernels add the part of K's mean, is close. Returns the launch."""
    device = device_of(q.device)
    if fused_small.unsupported_config(fused_small.INSTANCES[0], device) is not None:
        pytest.skip("needs sm_90")
    launch = launch_of(kernel, q, k, v, scale, device)
    operands = quantize(q, k, v, Recipe())
    options: dict = dict(is_causal=causal != "none", causal_alignment="bottom_right" if causal == "bottom_right" else "top_left", scale=scale)
    call = fp8attn.prepare.call_of(*operands, **options, enable_gqa=True, out_dtype=out_dtype, return_lse=True)
    expected, expected_lse = cuda_run.forward(call, device)
    out, lse = cuda_run.forward_from_fp16(Problem(q, k, v, scale, "e4m3", causal, out_dtype, True), device, launch)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    key = operands[1]
    assert key is not None and key.mean is not None
    expected_lse = reference.unsmoothed_lse(expected_lse, q, key.mean, scale, key.rotated)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4, equal_nan=True)
    return launch


def assert_bits_of_case(kernel: str, case: Case, device: torch.device) -> None:
    """Of a drawn case, with the head dims and the recipe that the kernel takes."""
    dtype = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
    case = dataclasses.replace(case, head_dim=64, value_dim=64, dtype=dtype, recipe=Recipe())
    q, k, v = case.tensors(device)
    assert_bits_of_two_launches(kernel, on_grid(q), on_grid(k), v, case.causal, abs(case.scale or 0.125), case.out_dtype)


def assert_bits_of_what_is_not_finite(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: str) -> None:
    """In one element of each, and in a whole channel of v. Writes to them."""
    q[0, 0, 9, 1] = torch.nan
    k[0, 0, 3, 3] = torch.inf
    v[0, 0, 77, 5] = -torch.inf
    v[-1, -1, :, 40] = torch.nan
    assert_bits_of_two_launches(kernel, q, k, v, causal)


def assert_same_bits_a_thousand_times(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A bit that moves is a race."""
    launch = assert_bits_of_two_launches(kernel, q, k, v, "top_left")

    def once() -> torch.Tensor:
        return cuda_run.forward_from_fp16(Problem(q, k, v, 0.125, "e4m3", "top_left"), device_of(q.device), launch)[0]

    expected, different = once(), torch.zeros((), dtype=torch.int64, device=q.device)
    for _ in range(1000):
        different += (once() != expected).sum()
    assert int(different) == 0


def assert_emulated(emulated: Emulated, launch: OneLaunch, tensors: Halves, causal: Causal) -> None:
    """As the oracle of the definition's bytes, in any order of warps, copies and products."""
    query = tensors[0]
    operands = quantized(*tensors, Recipe())
    options: dict = dict(is_causal=causal != "none", enable_gqa=True, out_dtype=torch.float32, return_lse=True)
    expected, expected_lse = oracle(operands, call_of(*operands, **options, scale=0.125), launch.config)
    first = emulated.from_fp16(*tensors, 0.125, causal, torch.float32, launch)
    assert_matches_pipeline(first[0], expected, True, expected_lse)
    assert operands[1].mean is not None
    expected_lse = reference.unsmoothed_lse(expected_lse, query, operands[1].mean, 0.125, operands[1].rotated)
    torch.testing.assert_close(first[1], expected_lse, rtol=1e-3, atol=5e-3, equal_nan=True)
    for x, y in zip(emulated.from_fp16(*tensors, 0.125, causal, torch.float32, launch), first, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
