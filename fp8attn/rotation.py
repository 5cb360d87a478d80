"""Rotation of Q and K by one orthonormal matrix, which leaves their products as they are.

Random-looking signs, then a Walsh-Hadamard transform, spread what a few channels or tokens have over the channels of their part of a row, so
that a scale no longer serves an outlier at the cost of its neighbours (QuIP#, arXiv:2402.04396, section 3; FlashAttention-3,
arXiv:2407.08608, section 3.3). The signs are those of the Rudin-Shapiro sequence, anew in every part: its own Walsh spectrum is flat, so rows
whose channels are all alike are spread as well as single channels are.

Parts are of 2^k channels. A head dim of 2^k m, m odd, has parts of 2^k at most, or of 64: as many as a quad of lanes of the CUDA attention kernel has
of a row, or a CTA of the quantizer, and most of what larger parts gain is gained by then (docs/accuracy.md).

Butterflies only add; to keep them finite wherever x is, both operands are divided by 2^k first, and Q's scales make up for it: the product of two
transforms that aren't normalised is 2^k too large, of two so divided 2^k too small.
"""

from __future__ import annotations

from typing import get_args

import torch

from .recipe import Rotation

NAMED: tuple[Rotation, ...] = get_args(Rotation)
"""What `Recipe.rotate` may be."""


def part_of(dim: int, most: int) -> int:
    """2^k, the channels that are rotated together: the largest power of two that divides `dim`, `most` at most, which is a power of two or 0."""
    part = most
    while part > 1 and dim % part:  # a number also where torch.compile knows none for `dim`
        part //= 2
    return part


def named(dim: int, part: int) -> Rotation:
    """Of a recipe's rotations, one that rotates `part` channels of `dim` together."""
    return next(most for most in NAMED if part_of(dim, most) == part)


def sign_bit(channel):
    """1 where a channel's sign is turned; of numbers up to 255, ints or tensors: the parity of pairs of ones in the binary number."""
    pairs = channel & (channel >> 1)
    pairs = pairs ^ (pairs >> 4)
    pairs = pairs ^ (pairs >> 2)
    return (pairs ^ (pairs >> 1)) & 1


def rotate(x: torch.Tensor, part: int) -> torch.Tensor:
    """x (…, D) float32, `part` channels rotated together, over sqrt(part); as it is if `part` is 0.

    Of a row with an element that isn't finite no element of its part is.
    """
    if part == 0:
        return x.float()
    channels = torch.arange(x.shape[-1], device=x.device)
    y = x.float() * ((1 - 2 * sign_bit(channels % part)).float() * (1.0 / part))
    distance = 1
    while distance < part:
        low, high = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return y + 0.0  # a zero is positive, whoever adds up what


def rotate_queries(q: torch.Tensor, part: int) -> torch.Tensor:
    """q (…, D) as it is restored: rotated, times what K was divided by."""
    return rotate(q, part) * max(part, 1)
