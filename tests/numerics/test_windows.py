"""Sliding windows: the keys that rows see from a first one to a last one, in every backend and oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from conftest import Attention
from hypothesis import given
from hypothesis import strategies as st

import fp8attn
from closeness import E4M3_STEP, assert_matches_pipeline, relative
from fp8attn import Recipe, reference
from fp8attn.call import Call
from fp8attn.cuda import configs as hopper
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.recipe import DEFAULT_RECIPE, ProductType
from fp8attn.schedule import heads_in_l2
from fp8attn.triton.tile import hide
from running import run_call
from strategies import given_several, lengths, noted

SIDES = (-1, 0, 1, 5, 31, 63, 64, 127, 130, 250, 1000, 1 << 40)


@dataclass(frozen=True)
class Windowed:
    """A call with a window."""

    q_length: int
    kv_length: int
    window: tuple[int, int]
    is_causal: bool
    alignment: str
    qk: ProductType
    dim: int
    seed: int

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((1, 2, self.q_length, self.dim), (1, 1, self.kv_length, self.dim), (1, 1, self.kv_length, self.dim))
        q, k, v = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        return q, k, v + 1

    @property
    def recipe(self) -> Recipe:
        return Recipe(qk=self.qk)

    @property
    def options(self) -> dict:
        """Keyword arguments of sdpa."""
        return dict(window=self.window, is_causal=self.is_causal, causal_alignment=self.alignment, enable_gqa=True)

    def mask(self, device: torch.device) -> torch.Tensor:
        """The same as a boolean mask (Sq, Sk), by its definition."""
        left, right = self.window
        rows, keys = (torch.arange(n, device=device) for n in (self.q_length, self.kv_length))
        distance = keys - (rows + (0 if self.alignment == "top_left" else self.kv_length - self.q_length))[:, None]
        right = 0 if self.is_causal else right
        return (distance >= (-left if left >= 0 else -(1 << 50))) & (distance <= (right if right >= 0 else 1 << 50))


windowed = st.builds(
    Windowed,
    q_length=lengths,
    kv_length=lengths,
    window=st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)),
    is_causal=st.booleans(),
    alignment=st.sampled_from(("top_left", "bottom_right")),
    qk=st.sampled_from(("e4m3", "e4m3", "int8")),
    dim=st.sampled_from((64, 128)),
    seed=st.integers(0, 2**31),
)


def call_by(case: Windowed, device: torch.device, **others) -> tuple[tuple, Call]:
    """Operands that are quantized by the definition, and the call of them. `others`: in place of the case's options."""
    operands = quantize(*case.tensors(device), case.recipe)
    options: dict = {**(others or case.options), "enable_gqa": True}
    return operands, call_of(*operands, **options, recipe=case.recipe, out_dtype=torch.float32, return_lse=True)


@given(case=windowed)
def test_offsets_are_the_mask(case: Windowed) -> None:
    """What kernels are told is the window's definition; and a call whose window hides nothing has none."""
    _, call = call_by(case, torch.device("cpu"))
    rows, keys = (torch.arange(n) for n in (case.q_length, case.kv_length))
    mask = case.mask(torch.device("cpu"))
    hidden = reference.hidden_keys(None, call.causal, rows, keys, case.q_length, case.kv_length, call.window)
    assert torch.equal(~hidden, mask) and (call.causal == "none") == bool(mask.all())
    first, last = call.window_offsets
    distance = keys - rows[:, None]
    assert torch.equal((distance >= first) & (distance <= last), mask) and abs(first) <= 2**30 > abs(last)
    assert not call.has_first_key or int(mask.sum(1).max()) <= call.visible_keys(1)


@given(case=windowed)
def test_exact_attention_is_that_of_the_mask(case: Windowed, device: torch.device) -> None:
    q, k, v = case.tensors(device)
    found = fp8attn.reference_sdpa(q, k, v, **case.options, return_lse=True)
    expected = fp8attn.reference_sdpa(q, k, v, case.mask(device), enable_gqa=True, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@given(case=windowed)
def test_the_oracle_has_the_bits_of_the_mask(case: Windowed, device: torch.device) -> None:
    operands, call = call_by(case, device)
    blocks = reference.Arithmetic(64)
    found = reference.pipeline(*operands, arithmetic=blocks, causal=call.causal, scoring=call.scoring)
    expected = reference.pipeline(*operands, case.mask(device), arithmetic=blocks, scoring=reference.Scoring(call.softmax_scale))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@given_several(windowed)
def test_matches_the_pipeline(drawn: tuple[Windowed, ...], device: torch.device, sdpa: Attention) -> None:
    properties = device_of(device)
    for case in noted(drawn):
        operands, call = call_by(case, device)
        out, lse, oracle, oracle_lse = run_call(operands, call, properties, sdpa)
        assert_matches_pipeline(out, oracle, properties.emulated, oracle_lse)
        atol = 1e-4 if properties.emulated else 2 * E4M3_STEP
        torch.testing.assert_close(lse, oracle_lse, rtol=1e-3, atol=atol)


@given_several(windowed, part=2)
def test_from_end_to_end(drawn: tuple[Windowed, ...], device: torch.device, sdpa: Attention) -> None:
    """As close to exact attention as FP8 is; zeros and -inf in rows that see nothing."""
    for case in noted(drawn):
        q, k, v = case.tensors(device)
        out, lse = sdpa(q, k, v, **case.options, recipe=case.recipe, return_lse=True)
        exact, exact_lse = fp8attn.reference_sdpa(q, k, v, **case.options, return_lse=True, dtype=torch.float64, out_dtype=torch.float32)
        seen = case.mask(device).any(1)
        assert torch.equal(lse.isinf(), exact_lse.isinf()) and (out[:, :, ~seen] == 0).all() and lse[:, :, seen].isfinite().all()
        assert not seen.any() or relative(out, exact) < 0.15


@pytest.mark.parametrize("window", ((1000, 1000), (-1, 1000), (1000, -1), (-1, -1)))
@pytest.mark.parametrize("lengths", ((200, 300), (300, 200)))
@pytest.mark.one_in(3)
def test_a_window_of_all_keys_is_none(device: torch.device, sdpa: Attention, window: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Bit for bit, also beside a causal mask."""
    q, k, v = (torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (*lengths, lengths[1]))
    for causal in (False, True):
        options: dict = dict(is_causal=causal, return_lse=True)
        for x, y in zip(sdpa(q, k, v, window=window, **options), sdpa(q, k, v, **options), strict=True):
            assert torch.equal(x, y)


def test_a_causal_mask_is_a_window(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (200, 300, 300))
    for alignment in ("top_left", "bottom_right"):
        found = sdpa(q, k, v, window=(-1, 0), causal_alignment=alignment)
        assert torch.equal(found, sdpa(q, k, v, is_causal=True, causal_alignment=alignment))


@pytest.mark.parametrize("qk", ("e4m3", "int8"))
@pytest.mark.parametrize("where", ("key", "value"))
def test_nan_reaches_the_rows_that_see_it(device: torch.device, sdpa: Attention, where: str, qk: ProductType) -> None:
    """Of two keys of one block, of which rows between see the second only."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 1, 400, 64, generator=generator).to(device) for name in ("query", "key", "value")}
    tensors[where][0, 0, [130, 250], 5] = torch.nan
    rows = torch.arange(400, device=device)
    expected = (rows >= 130) & (rows <= 130 + 90) | (rows >= 250) & (rows <= 250 + 90)
    out, lse = sdpa(*tensors.values(), is_causal=True, window=(90, 0), recipe=Recipe(qk=qk), return_lse=True)
    assert torch.equal(out[0, 0].isnan().all(-1), expected) and torch.equal(out[0, 0].isnan().any(-1), expected)
    assert torch.equal(lse[0, 0].isnan(), expected)


@pytest.mark.parametrize(
    "recipe",
    (Recipe(smooth_q=True), fp8attn.PRECISE, *(pytest.param(r, marks=pytest.mark.compiles) for r in (Recipe(k="token"), Recipe(compute="f16")))),
    ids=str,
)
def test_with_any_recipe(device: torch.device, sdpa: Attention, recipe: Recipe) -> None:
    if sdpa.backend == "cuda" and (recipe.k == "token" or recipe.smooth_q):
        pytest.skip("auto runs Triton")
    q, k, v = (torch.randn(1, 1, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (200, 300, 300))
    options: dict = dict(window=(70, 20), causal_alignment="bottom_right")
    for scale in (None, -0.1 if sdpa.backend == "triton" else 0.1):
        out = sdpa(q, k, v, recipe=recipe, scale=scale, **options)
        assert relative(out, fp8attn.reference_sdpa(q, k, v, scale=scale, **options)) < 0.08


def test_which_instances_take_windows() -> None:
    """Those made for windows; those for causal masks if only the last key is limited; none beside scales per key."""
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    H100 = ARCHITECTURES[90]

    def planned(recipe: Recipe = DEFAULT_RECIPE, **options) -> hopper.HopperConfig:
        call = call_of(*quantize(q, k, v, recipe), recipe=recipe, **options)
        reason = hopper.unsupported_call(call, H100)
        assert reason is None, reason
        return hopper.choose(call, H100)

    assert planned(window=(100, 0)).window and not planned(window=(-1, 20)).window and not planned(window=(500, 500)).window
    with pytest.raises(AssertionError, match="the CUDA kernels take it alone"):
        planned(Recipe(k="token"), window=(100, 0))
    assert hopper.unsupported_q_quant(q, 64, 0.1, "e4m3", H100, scores="window") is None


def test_tiles_of_windows_mix_as_many_heads_as_their_keys_allow() -> None:
    operands = quantize(*(torch.zeros(1, 1, n, 128) for n in (1, 20000, 20000)), Recipe())
    tensors = ({name: x for name, x in vars(operand).items() if isinstance(x, torch.Tensor)} for operand in operands)
    of_heads = (
        replace(a, **{name: x.expand(1, 16, *x.shape[2:]).contiguous() for name, x in b.items()}) for a, b in zip(operands, tensors, strict=True)
    )
    call = replace(call_of(*of_heads), causal="bottom_right")
    assert heads_in_l2(replace(call, window=(500, 0)), 5) > heads_in_l2(call, 5)


@triton.jit
def hide_kernel(x, out, first_row, start, kv_length, first, last, M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    at = rows * N + columns
    hidden = hide(tl.load(x + at), first_row + rows, start, columns, 1 << 30, kv_length, (first, last), None, None, WINDOW, True)
    tl.store(out + at, hidden)


@pytest.mark.parametrize("window", (True, False))
@pytest.mark.parametrize("first, last", ((-5, 5), (0, 0), (-100, -20), (30, 90), (-(1 << 30), 1 << 29), (-200, 1 << 29), (64, 64)))
def test_arithmetic_hides_as_comparisons_do(device: torch.device, first: int, last: int, window: bool) -> None:
    """The Hopper kernel's bounds are infinite, and nowhere NaN."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).to(device)
    for first_row, start, kv_length in ((0, 0, 20), (40, 32, 1000), (1 << 29, (1 << 29) + 32, 1 << 30)):
        out = torch.empty_like(x)
        hide_kernel[1,](x, out, first_row, start, kv_length, first, last, 16, 32, window)
        distance = (start + torch.arange(32, device=device)) - (first_row + torch.arange(16, device=device))[:, None]
        hidden = (distance > last) | (start + torch.arange(32, device=device) >= kv_length)
        if window:
            hidden |= distance < first
        assert torch.equal(out, x.masked_fill(hidden, -torch.inf))
