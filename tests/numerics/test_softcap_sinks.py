"""Soft caps of scores, and sinks: logits beside a row's scores that take weight and have no value."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import Attention
from hypothesis import given
from hypothesis import strategies as st

import fp8attn
from closeness import E4M3_STEP, assert_matches_pipeline, relative
from fp8attn import Recipe, reference
from fp8attn.call import Call
from fp8attn.cuda import configs as hopper
from fp8attn.cuda import portable
from fp8attn.cuda import run as cuda_run
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.prepare import call_of
from fp8attn.quantization import quantize
from fp8attn.recipe import DEFAULT_RECIPE
from running import run_call
from strategies import given_several, lengths, noted, of_few_kinds


@dataclasses.dataclass(frozen=True)
class Modified:
    """A call with a soft cap, sinks or both, and perhaps a window or a mask."""

    q_length: int
    kv_length: int
    softcap: float
    sinks: bool
    window: tuple[int, int] | None
    masked: bool
    recipe: Recipe
    seed: int

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values have means, which quantization removes."""
        generator = torch.Generator().manual_seed(self.seed)
        q, k, v = (
            torch.randn(1, h, n, 64, generator=generator).to(device) for h, n in ((4, self.q_length), (2, self.kv_length), (2, self.kv_length))
        )
        return 2 * q, k + torch.linspace(-2, 2, 64, device=device), v + 1

    def options(self, device: torch.device) -> dict:
        """Keyword arguments of sdpa."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = torch.randn(4, generator=generator).to(device) * 4 if self.sinks else None
        mask = None
        if self.masked and self.window is None:
            mask = (torch.rand(self.q_length, self.kv_length, generator=generator) < 0.7).to(device)
        return dict(softcap=self.softcap, sinks=sinks, window=self.window, causal_alignment="bottom_right", attn_mask=mask, enable_gqa=True)


RECIPES = Recipe(), Recipe(qk="int8"), Recipe(smooth_k=False), Recipe(smooth_q=True), Recipe(k="token"), Recipe(compute="f16")

any_modified = st.builds(
    Modified,
    q_length=lengths,
    kv_length=lengths,
    softcap=st.sampled_from((0.0, 3.0, 30.0, 50.0)),
    sinks=st.booleans(),
    window=st.sampled_from((None, None, (40, 0), (130, 20), (-1, 0))),
    masked=st.booleans(),
    recipe=st.sampled_from(RECIPES),
    seed=st.integers(0, 2**31),
)

KINDS = tuple(
    Modified(1, 1, softcap, sinks, window, masked, RECIPES[i % len(RECIPES)], 0)
    for i, (softcap, sinks, window, masked) in enumerate(
        (
            (3.0, False, None, False),
            (30.0, True, None, True),
            (0.0, True, None, False),
            (50.0, True, (130, 20), False),
            (0.0, True, (-1, 0), False),
            (0.0, True, None, True),
        )
    )
)


def of_kind(case: Modified, kind: Modified) -> Modified:
    """`case` with the properties that kernels are compiled for of `kind`."""
    softcap = case.softcap if case.softcap and kind.softcap else kind.softcap
    return dataclasses.replace(kind, q_length=case.q_length, kv_length=case.kv_length, softcap=softcap, seed=case.seed)


modified = of_few_kinds(any_modified, of_kind, KINDS)


def by_definition(case: Modified, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE in float64: the sink is an extra key with its logit, and a value of zeros."""
    q, k, v = (x.double() for x in case.tensors(device))
    options = case.options(device)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(-1, -2) / 8
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    if options["attn_mask"] is not None:
        scores = scores.masked_fill(~options["attn_mask"], -math.inf)
    if case.window is not None:
        distance = (
            torch.arange(case.kv_length, device=device) - torch.arange(case.q_length, device=device)[:, None] - (case.kv_length - case.q_length)
        )
        left, right = case.window
        hidden = (distance > right) | (distance < -left if left >= 0 else False)
        scores = scores.masked_fill(hidden, -math.inf)
    if case.sinks:
        logits = options["sinks"].double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat((scores, logits), -1), F.pad(v, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp() @ v, lse


def refused(call: Call, device: Device) -> bool:
    """Whether no CUDA kernel takes a call, because of what is done to scores beside a window, a soft cap or sinks."""
    planned = cuda_run.plan(call, device)
    assert not isinstance(planned, str) or "kernels take it alone" in planned or "kernel takes it alone" in planned
    return isinstance(planned, str)


@given(case=modified)
def test_exact_attention_is_the_definition(case: Modified, device: torch.device) -> None:
    out, lse = fp8attn.reference_sdpa(*case.tensors(device), **case.options(device), return_lse=True, dtype=torch.float64)
    expected, expected_lse = by_definition(case, device)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@given_several(modified)
def test_matches_the_pipeline(drawn: tuple[Modified, ...], device: torch.device, sdpa: Attention) -> None:
    properties = device_of(device)
    for case in noted(drawn):
        operands = quantize(*case.tensors(device), case.recipe)
        call = call_of(*operands, **case.options(device), recipe=case.recipe, out_dtype=torch.float32, return_lse=True)
        if sdpa.backend == "cuda" and refused(call, properties):
            continue
        out, lse, oracle, oracle_lse = run_call(operands, call, properties, sdpa)
        assert_matches_pipeline(out, oracle, properties.emulated, oracle_lse)
        torch.testing.assert_close(lse, oracle_lse, rtol=1e-3, atol=1e-4 if properties.emulated else 2 * E4M3_STEP)


@given_several(modified, part=2)
def test_from_end_to_end(drawn: tuple[Modified, ...], device: torch.device, sdpa: Attention) -> None:
    """K's mean, which quantization removes, matters to a soft cap and to sinks."""
    for case in noted(drawn):
        options = case.options(device)
        if sdpa.backend == "cuda":
            operands = quantize(*case.tensors(device), case.recipe)
            if refused(call_of(*operands, **options, recipe=case.recipe), device_of(device)):
                continue
        out, lse = sdpa(*case.tensors(device), **options, recipe=case.recipe, return_lse=True)
        expected, expected_lse = by_definition(case, device)
        assert torch.equal(lse.isinf(), expected_lse.isinf())
        error = (lse - expected_lse).nan_to_num(0.0, 0.0, 0.0).abs().max()
        assert relative(out, expected) < 0.12 and float(error) < 1.0


@pytest.mark.parametrize("recipe", (Recipe(), pytest.param(Recipe(qk="int8"), marks=pytest.mark.compiles)), ids=str)
def test_a_distant_cap_and_no_sink_change_nothing(device: torch.device, sdpa: Attention, recipe: Recipe) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (150, 200, 200))
    plain, plain_lse = sdpa(q, k, v, recipe=recipe, return_lse=True)
    capped, capped_lse = sdpa(q, k, v, recipe=recipe, return_lse=True, softcap=1e6)
    # under a cap, the Hopper kernel has all codes of P directly, and a quarter of them exactly without one
    exact = fp8attn.reference_sdpa(q, k, v)
    if sdpa.backend == "cuda":
        assert relative(capped, exact) < 1.03 * relative(plain, exact) and relative(capped, plain) < relative(plain, exact) / 3
    else:
        assert relative(capped, plain) < 0.01
    assert relative(capped_lse, plain_lse) < 2e-3
    none = torch.full((2,), -torch.inf, device=device)
    out, lse = sdpa(q, k, v, recipe=recipe, return_lse=True, sinks=none)
    assert relative(out, plain) < (1e-6 if sdpa.backend == "triton" else 0.01) and relative(lse, plain_lse) < 1e-4


def test_rows_without_keys_see_their_sink(device: torch.device, sdpa: Attention) -> None:
    q, k, v = (torch.randn(1, 2, n, 64, generator=torch.Generator().manual_seed(n)).to(device) for n in (130, 70, 70))
    sinks = torch.tensor([2.0, -1.5], device=device)
    for softcap in (0.0, 20.0):
        out, lse = sdpa(q, k, v + 5, is_causal=True, causal_alignment="bottom_right", sinks=sinks, softcap=softcap, return_lse=True)
        assert (out[:, :, :60] == 0).all()
        torch.testing.assert_close(lse[:, :, :60], sinks[:, None].expand(1, 2, 60), rtol=0, atol=2e-3)
        assert lse[:, :, 60:].isfinite().all() and (lse[:, :, 60:] > sinks[:, None]).all()
    empty = k[:, :, :0]
    out, lse = sdpa(q, empty, empty, sinks=sinks, return_lse=True)
    assert (out == 0).all() and torch.allclose(lse, sinks[:, None].expand_as(lse))


@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_a_sink_that_is_not_finite_stays_in_its_head(device: torch.device, sdpa: Attention, bad: float) -> None:
    q, k, v = (torch.randn(1, 3, 150, 64, generator=torch.Generator().manual_seed(1)).to(device) for _ in range(3))
    sinks = torch.tensor([0.0, bad, 1.0], device=device)
    out, lse = sdpa(q, k, v, sinks=sinks, is_causal=True, return_lse=True)
    assert out[:, 1].isnan().all() and lse[:, 1].isnan().all() and out[:, ::2].isfinite().all() and lse[:, ::2].isfinite().all()


def test_more_sink_is_less_weight(device: torch.device, sdpa: Attention) -> None:
    """Outputs keep their direction: a sink takes weight from all keys alike."""
    q, k, v = (torch.randn(1, 1, 150, 64, generator=torch.Generator().manual_seed(2)).to(device) for _ in range(3))
    plain, lse = sdpa(q, k, v, return_lse=True)
    for sink in (-2.0, 3.0, 12.0):
        out = sdpa(q, k, v, sinks=torch.full((1,), sink, device=device))
        expected = plain * (1 / (1 + (sink - lse).exp())).unsqueeze(-1)
        assert relative(out, expected) < (1e-5 if device_of(device).emulated else 0.02)


def test_which_instances_take_them() -> None:
    H100 = ARCHITECTURES[90]
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3))

    def reason_of(recipe: Recipe = DEFAULT_RECIPE, **options) -> str | hopper.HopperConfig:
        call = call_of(*quantize(q, k, v, recipe), recipe=recipe, **options)
        return hopper.unsupported_call(call, H100) or hopper.choose(call, H100)

    sinks, mask = torch.zeros(2), torch.ones(300, 300).bool()
    for options in (dict(softcap=5.0), dict(softcap=5.0, sinks=sinks, window=(5, 0)), dict(sinks=sinks, window=(5, 0))):
        chosen = reason_of(**options)
        assert isinstance(chosen, hopper.HopperConfig) and chosen.window and chosen.softcap == ("softcap" in options)
        assert "the CUDA kernels take it alone" in str(reason_of(Recipe(k="token"), **options))
    assert "the CUDA kernels take it alone" in str(reason_of(softcap=5.0, attn_mask=mask))
    for recipe, options, scores in (
        (DEFAULT_RECIPE, {}, "plain"),
        (Recipe(k="token"), {}, "general"),
        (DEFAULT_RECIPE, {"attn_mask": mask}, "masked"),
    ):
        chosen = reason_of(recipe, sinks=sinks, **options)
        assert isinstance(chosen, hopper.HopperConfig) and chosen.scores == scores, "sinks need no instance of their own"
        call = call_of(*quantize(q, k, v, recipe), recipe=recipe, sinks=sinks, **options)
        assert ("sinks is given beside" in str(portable.unsupported_call(call, H100))) == (scores != "plain")
    assert hopper.unsupported_q_quant(q, 64, 0.1, "e4m3", H100, torch.ones(300, 300).bool(), "softcap") is not None


def test_the_recipe_and_the_argument_of_one_name(device: torch.device) -> None:
    """Recipe.sinks is a number of keys that stay in half precision; a recipe with them refuses logits."""
    q = torch.randn(1, 2, 200, 64, device=device)
    with pytest.raises(ValueError, match=r"sinks is given and recipe keeps keys \(sinks=128, recent=0\)"):
        fp8attn.sdpa(q, q, q, recipe=Recipe(sinks=128), sinks=torch.zeros(2, device=device), backend="modelled")


def test_merging_by_lse_is_what_sinks_do(device: torch.device) -> None:
    out, lse = torch.randn(2, 3, 5, 8, device=device), torch.randn(2, 3, 5, device=device)
    sinks = torch.randn(3, device=device)
    expected = reference.combine(torch.stack((out, torch.zeros_like(out))), torch.stack((lse, sinks[:, None].expand_as(lse))))
    for x, y in zip(reference.with_sinks(out, lse, sinks), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.anywhere
@pytest.mark.parametrize("softcap", (13.0, 20.0, 30.0, 50.0, 1e4))
def test_codes_from_a_quadratic_are_those_of_tanh(softcap: float) -> None:
    """Above 2^-8 of the largest P they differ by one step at most, below by eight. The error of P is as large."""
    generator = torch.Generator().manual_seed(0)
    for share in (-0.1, 0.1, 0.5, 1.0):
        largest = share * min(softcap, 50.0)
        scores = (largest - 12 * torch.rand(200, 128, generator=generator)) / softcap
        natural = reference.LOG2E * reference.capped(scores * softcap, softcap)
        m = natural.amax(-1, keepdim=True)
        p, by_tanh = reference.capped_codes(scores, 0.0, m, softcap), reference.direct_code(natural - m + reference.P_OFFSET)
        steps = (p.to(reference.E4M3).view(torch.uint8).int() - by_tanh.to(reference.E4M3).view(torch.uint8).int()).abs()
        assert int(steps[natural - m > -8].max()) <= 1 and int(steps.max()) <= 8
        exact = (natural - m + reference.P_OFFSET).exp2()
        assert relative(p, exact) < 1.04 * relative(by_tanh, exact)
