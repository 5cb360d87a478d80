"""Triton's Hopper kernel on a GPU: its codes of P, and scores that its main loop doesn't take."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import fp8attn
from closeness import relative
from fp8attn import PRECISE, Recipe, reference
from fp8attn.call import Call
from fp8attn.device import device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import dequantize
from fp8attn.recipe import Granularity
from fp8attn.triton import run
from fp8attn.triton.configs import HopperConfig
from fp8attn.triton.tile import pack_codes
from running import arithmetic_of

pytestmark = pytest.mark.gpu


@triton.jit
def pack_kernel(y, codes, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes + i, pack_codes(tl.load(y + i)).to(tl.uint8, bitcast=True))


def test_codes_are_rounded_to_nearest_even_and_are_no_less_than_zero(device: torch.device) -> None:
    codes = torch.arange(-512, 1536, device=device) / 12
    codes[:3] = torch.tensor([torch.nan, -torch.inf, -1e30])
    found = torch.empty(2048, dtype=torch.uint8, device=device)
    pack_kernel[(1,)](codes.clamp(max=126) * reference.CODE, found, 2048)
    assert (found[0] & 0x7F) == 0x7F
    assert torch.equal(found[1:], codes[1:].clamp(0, 126).round().to(torch.uint8))


def hopper_call(device: torch.device, *operands: torch.Tensor, **options) -> tuple[Call, HopperConfig]:
    call = call_of(*operands, enable_gqa=True, **options)
    config = run.choose(call, device_of(device))
    if not isinstance(config, HopperConfig):
        pytest.skip("only Hopper GPUs have the kernel")
    return call, config


@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("exponent", (-20, 0, 10, 30, 60))
@pytest.mark.parametrize("granularity", ("block", "token"))
def test_scores_of_any_size(device: torch.device, granularity: Granularity, exponent: int, head_dim: int, is_causal: bool) -> None:
    """Sums of small integers are exact, so that a row's largest scores are equal: their values count alike, the others
    not at all where scores are far apart."""
    generator = torch.Generator(device).manual_seed(exponent)
    q, k, v = (torch.randint(-4, 5, (1, heads, 700, head_dim), device=device, generator=generator).float() for heads in (200, 2, 2))
    recipe = Recipe(k=granularity, rotate=0, smooth_k=False, smooth_v=False)
    query, key, value = fp8attn.quantize(q, k, v, recipe=recipe)
    query.data.copy_(q), key.data.copy_(k)
    query.scale.fill_(2.0**exponent), key.scale.fill_(1.0)
    call, config = hopper_call(device, query, key, value, recipe=recipe, scale=1.0, is_causal=is_causal)
    assert (call.k_group > 1) == (granularity == "block")
    out, _ = run.forward(call, device_of(device), config)
    scores = (q.double() @ k.double().repeat_interleave(100, 1).transpose(-2, -1)) * 2.0**exponent
    if is_causal:
        scores = scores.masked_fill(torch.ones(700, 700, dtype=torch.bool, device=device).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ dequantize(value).double().repeat_interleave(100, 1)
    assert out.isfinite().all()
    assert relative(out, expected) < (0.01 if exponent > 0 else 0.1)


@pytest.mark.parametrize("recipe", (Recipe(), PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_block_that_the_main_loop_does_not_take(device: torch.device, head_dim: int, recipe: Recipe) -> None:
    """A key that is not finite, in the fourth block: rows that don't see it have the bits that they have without it."""
    q, k, v = (torch.randn(1, heads, 700, head_dim, device=device, dtype=torch.bfloat16) for heads in (200, 2, 2))
    outs = []
    for bad in (False, True):
        k[:, :, 500] = torch.inf if bad else 0.0
        quantized = fp8attn.quantize(q, k, v, recipe=Recipe(qk=recipe.qk, smooth_k=False))
        call, config = hopper_call(device, *quantized, recipe=recipe, is_causal=True, return_lse=True)
        out, lse = run.forward(call, device_of(device), config)
        expected, _ = reference.pipeline(*quantized, arithmetic=arithmetic_of(config, call), causal=call.causal, scoring=call.scoring)
        assert torch.equal(out.isnan(), expected.isnan())
        outs.append((out, lse))
    (clean, clean_lse), (out, lse) = outs
    assert torch.equal(out[:, :, :500], clean[:, :, :500]) and torch.equal(lse[:, :, :500], clean_lse[:, :, :500])
    assert out[:, :, 500:].isnan().all() and clean.isfinite().all()
