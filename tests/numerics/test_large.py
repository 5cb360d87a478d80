"""Tensors of more than 2^31 elements, where 32-bit offsets would wrap around, and a million keys."""

from __future__ import annotations

import pytest
import torch

import fp8attn
from closeness import relative
from fp8attn import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_gpu")]

DIM = 128
BORDER = 2**31 // DIM
"""The first row whose elements lie beyond 2^31."""


def test_queries_beyond_2_31_elements(device: torch.device) -> None:
    q = torch.randn(1, 1, BORDER + 1000, DIM, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 1, 256, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = fp8attn.sdpa(q, k, v)
    for start in (0, BORDER // 2, BORDER - 100, BORDER, q.shape[2] - 100):
        rows = slice(start, start + 100)
        exact, _ = reference.attention(q[:, :, rows], k, v)
        assert relative(out[:, :, rows], exact) <= 0.08


def test_keys_beyond_2_31_elements(device: torch.device) -> None:
    """Every query looks for one key, far or near, and gets its value: nothing was read or written elsewhere."""
    length = BORDER + 1000
    places = torch.tensor([0, 1, BORDER // 2, BORDER - 1, BORDER, BORDER + 1, length - 2, length - 1], device=device)
    k, v = (torch.randn(1, 1, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(1, 1, len(places), DIM, device=device, dtype=torch.bfloat16)
    k[0, 0, places] = 4 * q[0, 0]
    out = fp8attn.sdpa(q, k, v)
    assert relative(out, v[:, :, places]) <= 0.05


def test_a_million_keys_of_one_sign(device: torch.device) -> None:
    q = torch.randn(1, 1, 256, DIM, device=device, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 1 << 20, DIM, device=device, dtype=torch.bfloat16)
    v = torch.randn(1, 1, 1 << 20, DIM, device=device, dtype=torch.bfloat16).abs()
    exact, exact_lse = reference.attention(q, k, v)
    for recipe in (fp8attn.Recipe(), fp8attn.Recipe(smooth_v=False)):
        out, lse = fp8attn.sdpa(q, k, v, recipe=recipe, return_lse=True)
        assert relative(out, exact) <= 0.005
        torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0.02)
