"""The polynomial exponential: its error bound, modelled in NumPy from the assembly's own constants, and on a GPU as it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp8attn.triton import exp2

BOUND = 1e-4
"""Relative; e4m3's own rounding of P is 6e-2."""


def modelled(x: np.ndarray) -> np.ndarray:
    """What `_polynomial` computes, an instruction a line, in float32."""
    f32 = np.float32
    x = np.maximum(x.astype(f32), f32(exp2.LOWEST))
    t = x + f32(exp2.ROUNDER)
    f = x - (t - f32(exp2.ROUNDER))
    c0, c1, c2, c3 = (f32(c) for c in exp2.COEFFICIENTS)
    y = ((f * c3 + c2) * f + c1) * f + c0
    return y * (t.view(np.uint32) << np.uint32(23)).view(f32)


def test_error_bound() -> None:
    x = np.concatenate([np.linspace(-126, 20, 1_000_001), np.arange(-126, 20) + 0.5, np.arange(-126, 20)]).astype(np.float32)
    error = np.abs(modelled(x).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() <= BOUND
    assert modelled(np.array([-1e30, -np.inf], np.float32)).tolist() == pytest.approx([2.0**-126] * 2, rel=BOUND)


@pytest.mark.parametrize("polynomials", range(exp2.PACK + 1))
def test_assembly_has_as_many_polynomials(polynomials: int) -> None:
    text = exp2.assembly(polynomials)
    if polynomials == 0:
        assert text is None
        return
    assert text is not None
    assert text.count("max.NaN.f32") == polynomials and text.count("ex2.approx") == exp2.PACK - polynomials
    assert all(f"${i}" in text for i in range(2 * exp2.PACK))


@triton.jit
def power_kernel(x, y, N: tl.constexpr, ASSEMBLY: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(y + i, tl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [value], dtype=tl.float32, is_pure=True, pack=PACK))


@pytest.mark.gpu
@pytest.mark.parametrize("polynomials", (1, 4, 8))
def test_on_the_gpu(device: torch.device, polynomials: int) -> None:
    x = torch.linspace(-120, 20, 8192, device=device)
    x[::1000] = torch.nan
    y = torch.empty_like(x)
    power_kernel[(1,)](x, y, x.numel(), exp2.assembly(polynomials), exp2.CONSTRAINTS, exp2.PACK)
    assert torch.equal(y.isnan(), x.isnan())
    assert float((y.double() / x.double().exp2() - 1).abs().nan_to_num(0).max()) <= BOUND
