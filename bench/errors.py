"""Errors of an answer relative to the exact one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def standard_error(numbers: Sequence[float]) -> float:
    """Standard error of the mean of two or more numbers."""
    return statistics.stdev(numbers) / math.sqrt(len(numbers))


@dataclass(frozen=True)
class Bad:
    """Definition of bad elements: |error| > rtol · |expected| + atol_rms · rms(expected), or NaN.

    The absolute part is relative to the size of the answer. Attention over S keys averages, so that N(0, 1) values give
    an answer of about sqrt(e / S). With a fixed bound of 0.05, zeros would pass as the answer from a few thousand keys
    on.
    """

    rtol: float
    atol_rms: float


@dataclass(frozen=True)
class Errors:
    """Errors of an answer against the exact one, over all elements.

    Attributes:
        max_abs, mean_abs: maximum and mean of |error|.
        rmse: root of the mean squared error.
        relative_l2: ‖error‖ / ‖expected‖.
        bad_share: fraction of elements that are `Bad`.
        sqnr_db: signal to quantization noise, 10 log10(‖expected‖² / ‖error‖²).
        cosine: cosine of the angle between the answers, 0 if one of them is zero.
    """

    max_abs: float
    mean_abs: float
    rmse: float
    relative_l2: float
    bad_share: float
    sqnr_db: float
    cosine: float

    @classmethod
    def of(cls, out: torch.Tensor, expected: torch.Tensor, bad: Bad) -> Errors:
        """The errors of `out`.

        Args:
            out: any float dtype.
            expected: float32, of out's shape.

        Raises:
            ValueError: the shapes differ.
        """
        if out.shape != expected.shape:
            raise ValueError(f"the answer has shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
        out = out.float()
        error = (out - expected).abs_()
        signal, size, noise = _norm(expected), _norm(out), _norm(error)
        elements = max(expected.numel(), 1)
        relative = noise / signal if signal > 0 else noise
        limit = expected.abs().mul_(bad.rtol).add_(bad.atol_rms * signal / math.sqrt(elements))
        good = error <= limit  # False for NaN
        return cls(
            max_abs=float(error.max()),
            mean_abs=float(error.mean(dtype=torch.float64)),
            rmse=noise / math.sqrt(elements),
            relative_l2=relative,
            bad_share=1.0 - int(good.sum()) / good.numel(),
            sqnr_db=math.inf if relative == 0 else -20 * math.log10(relative),
            # computed from norms only, because float32 products of long answers would lose the significant digits
            cosine=(size**2 + signal**2 - noise**2) / (2 * size * signal) if size and signal else 0.0,
        )

    @classmethod
    def mean(cls, several: Sequence[Errors]) -> Errors:
        """Means over several answers; the maximum for max_abs."""
        means = {name: statistics.fmean(getattr(errors, name) for errors in several) for name in cls.__dataclass_fields__}
        return cls(**means | {"max_abs": max(errors.max_abs for errors in several)})

    @property
    def finite(self) -> bool:
        return math.isfinite(self.relative_l2)


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
