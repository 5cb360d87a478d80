"""Random tensors to quantize, and the comparison of quantized results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fp8attn import Quantized
from fp8attn.device import device_of
from fp8attn.quantization import LANES, sample_step
from strategies import Case

BAD = (torch.nan, torch.inf, -torch.inf)


BAD_PLACES = (*["nowhere"] * 5, "elements", "elements", "tokens", "channel", "everywhere")


MAGNITUDES = (*["as drawn"] * 3, "subnormal", "largest")


@dataclass(frozen=True)
class Problem:
    """A case with magnitudes at the limits of its dtype, and with non-finite numbers."""

    case: Case
    magnitude: str
    places: tuple[str, str, str]

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.case.seed)
        tensors = self.case.tensors(device)
        for x, place in zip(tensors, self.places, strict=True):
            plant(at_limits(x, self.magnitude), place, generator)
        return tensors

    def like(self, first: Problem) -> Problem:
        """This problem, changed so that it uses the kernels of another."""
        return dataclasses.replace(self, case=self.case.like(first.case))


def at_limits(x: torch.Tensor, magnitude: str) -> torch.Tensor:
    """x, scaled in place to the largest or smallest numbers of its dtype."""
    limits = torch.finfo(x.dtype)
    if magnitude == "largest":
        return x.clamp_(-1, 1).mul_(limits.max)
    # Triton's interpreter reads bfloat16 subnormals as other numbers
    if magnitude == "subnormal" and not (x.dtype == torch.bfloat16 and device_of(x.device).emulated):
        return x.mul_(limits.smallest_normal / 8)
    return x


def plant(x: torch.Tensor, place: str, generator: torch.Generator) -> None:
    """Write non-finite numbers into x (B, H, S, D), in place."""

    def drawn(size: int) -> int:
        return int(torch.randint(size, (), generator=generator))

    if place == "everywhere":
        x.fill_(BAD[drawn(3)])
    elif place == "channel":
        x[..., drawn(x.shape[3])] = BAD[drawn(3)]
    elif place in ("elements", "tokens"):
        for bad in BAD:
            batch, head, token, channel = (drawn(size) for size in x.shape)
            x[batch, head, token, slice(None) if place == "tokens" else channel] = bad


def assert_same(actual: Quantized | None, expected: Quantized | None) -> None:
    """Check that everything stored is equal bit for bit."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    for field in ("granularity", "layout", "length", "shape", "rotated"):
        assert getattr(actual, field) == getattr(expected, field)
    assert actual.data.dtype == expected.data.dtype
    assert torch.equal(codes(actual), codes(expected)), f"{int((codes(actual) != codes(expected)).sum())} bytes differ"
    # all NaN are equivalent
    assert torch.equal(*(x.scale.nan_to_num(nan=-torch.inf).view(torch.int32) for x in (actual, expected))), "scales differ"
    assert (actual.mean is None) == (expected.mean is None)
    if actual.mean is not None and expected.mean is not None:
        assert torch.equal(actual.mean.view(torch.int32), expected.mean.view(torch.int32)), "means differ"
    assert (actual.bias is None) == (expected.bias is None)
    if actual.bias is not None and expected.bias is not None:
        assert torch.equal(actual.bias, expected.bias), "what means of queries add differs"


def codes(x: Quantized) -> torch.Tensor:
    return x.data.view(torch.uint8)


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """k and v whose channels have different means and standard deviations."""
    generator = torch.Generator().manual_seed(sum(shape))
    k, v = (
        torch.randn(shape, generator=generator) * torch.rand(shape[3], generator=generator) + torch.randn(shape[3], generator=generator)
        for _ in range(2)
    )
    return k.to(device, dtype), v.to(device, dtype)


def cancelling(shape: tuple[int, ...], distance: int = LANES // 2) -> tuple[torch.Tensor, ...]:
    """Numbers whose sums are what is left of large ones: these cancel if lanes so far apart are added to each other."""
    k, v = normal(shape, torch.float32)
    step = sample_step(shape[2])
    for first in range(min(LANES, -(-shape[2] // step)) - distance):
        if first & distance:
            continue
        k[:, :, first * step] *= 2.0**23
        k[:, :, (first + distance) * step] = -k[:, :, first * step]
    return k.bfloat16(), v.bfloat16()
