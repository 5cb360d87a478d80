"""Rotation of Q and K: orthonormal up to a power of two, of flat rows, and invisible in attention but for smaller errors."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Attention

import fp8attn
from fp8attn import Recipe, reference, reference_sdpa, rotation
from fp8attn.quantize import dequantize, quantize

ROTATED = Recipe(rotate=True)


def normal(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("dim", (8, 16, 24, 64, 72, 96, 128, 192, 256))
def test_matrix(dim: int) -> None:
    """Parts of 2^k; over sqrt(2^k) it is orthonormal, its elements ±1 over 2^k inside a part and 0 outside."""
    part = rotation.part_of(dim)
    assert dim % part == 0 and dim // part % 2 == 1
    matrix = rotation.rotate(torch.eye(dim))
    assert torch.equal(matrix @ matrix.T * part, torch.eye(dim))
    parts = torch.arange(dim) // part
    assert torch.equal(matrix.abs() * part, (parts[:, None] == parts).float())


def test_signs_are_the_rudin_shapiro_sequence() -> None:
    """r(2n) = r(n), r(2n + 1) = (-1)^n r(n) (Shapiro 1951)."""
    bits = [rotation.sign_bit(n) for n in range(256)]
    assert bits[0] == 0
    for n in range(128):
        assert bits[2 * n] == bits[n] and bits[2 * n + 1] == bits[n] ^ (n & 1)
    assert torch.equal(rotation.sign_bit(torch.arange(256)), torch.tensor(bits))


@pytest.mark.parametrize("dim", (16, 64, 256))
def test_rows_that_are_all_alike_become_flat(dim: int) -> None:
    """Where k is even; where it is odd, flat but for a factor of sqrt(2)."""
    spread = rotation.rotate(torch.ones(1, dim)).abs() * math.sqrt(dim)
    assert torch.equal(spread, torch.ones(1, dim))
    odd = rotation.rotate(torch.ones(1, dim // 2)).abs() * math.sqrt(dim // 2)
    assert odd.max() == pytest.approx(math.sqrt(2))


def test_largest_numbers_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    signs = 1.0 - 2.0 * rotation.sign_bit(torch.arange(256))
    assert rotation.rotate(largest * signs).isfinite().all()


def test_scores_are_the_same() -> None:
    """Of restored operands: K's share of 2^k is in Q's scales."""
    q, k, v = normal(1, 2, 60, 96)
    plain, rotated = quantize(q, k, v, Recipe()), quantize(q, k, v, ROTATED)
    assert rotated[0].rotated and rotated[1].rotated and not rotated[2].rotated and not plain[0].rotated
    exact = q @ k.transpose(-2, -1)
    for operands in (plain, rotated):
        scores = dequantize(operands[0]) @ dequantize(operands[1]).transpose(-2, -1)
        assert error(scores, exact) < 0.045  # 2.65 % rounding of q and of k


@pytest.mark.parametrize("dim", (64, 128))
def test_outliers_cost_less(dim: int) -> None:
    """FlashAttention-3's outliers: N(0, 1) + N(0, 100) · Bernoulli(0.001). N(0, 1) itself loses nothing."""
    generator = torch.Generator().manual_seed(0)
    tensors = normal(1, 2, 1024, dim)
    rough = [x + 10 * torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.001) for x in tensors]

    def error_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> float:
        return error(reference.pipeline(*quantize(q, k, v, recipe), block_n=128)[0], reference.attention(q, k, v)[0])

    assert error_of(*rough, ROTATED) < 0.9 * error_of(*rough, Recipe())
    assert error_of(*tensors, ROTATED) < 1.02 * error_of(*tensors, Recipe())


def test_kernels_and_the_lse(device: torch.device, sdpa: Attention) -> None:
    """Smoothing's shift of the LSE is in the rotated basis, too; a large mean shows it."""
    q, k, v = (x.to(device) for x in normal(1, 2, 70, 64))
    k = k + torch.linspace(-4, 4, 64, device=device)
    out, lse = sdpa(q, k, v, is_causal=True, recipe=ROTATED, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, causal="top_left")
    assert error(out, expected) < 0.06
    assert (lse - expected_lse).abs().max() < 0.2
    quantized = fp8attn.quantize(q, k, v, recipe=ROTATED)
    assert torch.equal(sdpa(*quantized, is_causal=True, out_dtype=q.dtype), out)


def test_both_or_neither(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (x.to(device) for x in normal(1, 1, 20, 64))
    rotated = quantize(q, k, v, ROTATED)
    plain = quantize(q, k, v, Recipe())
    for function in (sdpa, reference_sdpa):
        with pytest.raises(ValueError, match="query is rotated, key isn't"):
            function(rotated[0], *plain[1:])
        with pytest.raises(ValueError, match="key is rotated, query isn't"):
            function(plain[0], *rotated[1:])
    with pytest.raises(ValueError, match="key is rotated, query isn't"):
        sdpa(q, *rotated[1:])
    with pytest.raises(ValueError, match="key is rotated, query isn't"):
        reference_sdpa(q, *rotated[1:])
    sdpa(q, *rotated[1:], recipe=ROTATED)
    exact = reference_sdpa(q, k, v)
    assert error(reference_sdpa(*rotated, out_dtype=q.dtype), exact) < 0.06
