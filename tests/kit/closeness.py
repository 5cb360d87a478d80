"""Tolerances: how close results must be, and why."""

from __future__ import annotations

import torch

from fp8attn import Quantized
from fp8attn.quantization import numbers, row_scales

LOG2E = 1.4426950408889634
TENSOR_CORE_STEP = 2.0**-13
"""Precision of sums in FP8 tensor cores, relative to the largest term (Ada, Hopper)."""

E4M3_STEP = 2.0**-3
"""Largest distance of neighbouring e4m3 numbers, relative to the smaller one."""


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error; the absolute error if `expected` is zero."""
    difference = (actual.double() - expected.double()).norm()
    norm = expected.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """`x` truncated to multiples of a 64th of its largest power of two.

    Sums of 64 such numbers are exact, in any order and on tensor cores.
    """
    finite = x.double().nan_to_num(0.0, 0.0, 0.0)
    if not finite.any():
        return x
    largest = finite.abs().max()
    step = 2.0 ** (largest.log2().floor() - 6)
    return torch.where(x.isfinite(), (x.double() / step).trunc() * step, x.double()).to(x.dtype)


def assert_alike(actual: Quantized, expected: Quantized, share: float) -> None:
    """Check that quantized keys agree, if their rotated channels were added in another order, or by a tensor core,
    which truncates to 24 bits.

    Means must be equal bit for bit, and scales up to their last bits. At most a `share` of the codes may differ, each
    by one.
    """
    assert actual.mean is not None and expected.mean is not None
    assert torch.equal(actual.mean, expected.mean), "means differ"
    torch.testing.assert_close(actual.scale, expected.scale, rtol=2.0**-20, atol=0)
    number, wanted = ((x.data.view(torch.uint8).int() & 0x7F) * (1 - (x.data.view(torch.uint8).int() >> 7) * 2) for x in (actual, expected))
    assert torch.equal(number.abs() == 0x7F, wanted.abs() == 0x7F), "NaN in other places than expected"
    apart = (number - wanted).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).double().mean()) <= share, (
        f"{int((apart > 0).sum())} codes differ, by up to {int(apart.max())}"
    )


SHARE_OFF_GRID = 0.03
"""Fraction of Q's rows that may differ: a tensor core's rotation gives another code than the definition, or the last
bit of the row's scale changes a P."""


def assert_rows_alike(actual: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Check outputs if at most a `share` of the queries have a code or a P that is off by one.

    All other rows differ only by the last bits of their scales. These rows differ by no more than such a code can
    change weights.
    """
    error = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    assert float((error > 2.0**-18).double().mean()) <= share, f"{int((error > 2.0**-18).sum())} of {error.numel()} rows differ"
    assert float(error.max()) <= E4M3_STEP, f"a row is off by {float(error.max()):.1e}"


def score_step(q: Quantized, k: Quantized, softmax_scale: float) -> float:
    """Upper bound of the error of a score that comes from the 13 bits of a tensor core's sums.

    The terms may be far larger than their sum. The bound is this fraction of the largest norm of a row of Q times the
    largest of K.
    """
    norms = [
        float((numbers(x) * row_scales(x.multiplier, x.granularity, x.length).unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).max())
        if x.data.numel()
        else 0.0
        for x in (q, k)
    ]
    return TENSOR_CORE_STEP * norms[0] * norms[1] * abs(softmax_scale)


def assert_same_pattern(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that NaN and infinities are exactly where they are expected."""
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places than expected"
    assert torch.equal(actual.isinf(), expected.isinf()), "infinities in other places than expected"


def assert_matches_pipeline(out: torch.Tensor, oracle: torch.Tensor, emulated: bool, oracle_lse: torch.Tensor | None = None) -> None:
    """Compare a kernel's output with the oracle that models its pipeline.

    Both add the same numbers in different orders. A score that differs in its last bits occasionally moves P = 2^score
    across the border between two e4m3 numbers. Then one of the row's P is off by up to 2^-3 of its value. In emulation,
    scores differ by float32 rounding, and about one P in 10^5 changes. A tensor core with 13-bit sums changes about one
    in 100. The rest is the rounding of the output's dtype.

    A score of a thousand with 13 bits is off by an eighth and more, and its P by as much. `oracle_lse` is used as the
    size of scores.
    """
    assert out.shape == oracle.shape, f"shape {tuple(out.shape)}, expected {tuple(oracle.shape)}"
    assert_same_pattern(out, oracle)
    finite = oracle.isfinite()
    if not finite.any():
        return
    out_float, oracle = out.float().masked_fill(~finite, 0), oracle.masked_fill(~finite, 0)
    half_ulp = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[out.dtype]
    row_norm = oracle.norm(dim=-1)
    floor = float(row_norm.max()) * 1e-6 + 1e-30
    # distance of subnormal numbers of the output's dtype, however small they are
    spacing = torch.finfo(out.dtype).tiny * torch.finfo(out.dtype).eps
    row_error = ((out_float - oracle).abs() - spacing / 2).clamp(min=0).norm(dim=-1) / (row_norm + floor)
    worst = float(row_error.max())
    score = 0.0 if emulated or oracle_lse is None else float(oracle_lse.nan_to_num(0.0, 0.0, 0.0).abs().max())
    by_scores = 2 ** (score * LOG2E * TENSOR_CORE_STEP) - 1
    assert worst <= E4M3_STEP + 2 * half_ulp + by_scores, f"a row is off by {worst:.1e}, more than a flipped P can explain"
    typical = float(row_error.median())
    allowed = (2e-6 if emulated else 4e-3) + 1.2 * half_ulp + by_scores
    assert typical <= allowed, f"the typical row is off by {typical:.1e}, allowed is {allowed:.1e}"
