"""Rotation of Q and K by one orthonormal matrix, which doesn't change their products.

Random-looking signs, then a Walsh-Hadamard transform, spread outliers of single channels or tokens over the channels of
a part of a row. So one outlier no longer determines the scale, and with it the precision, of its neighbours (QuIP#,
arXiv:2402.04396, section 3; FlashAttention-3, arXiv:2407.08608, section 3.3). The signs are the Rudin-Shapiro sequence,
which restarts in every part. Its own Walsh spectrum is flat, so rows whose channels are all alike are spread as well as
single channels are.

A part is 2^k consecutive channels that are rotated together. For a head dim of 2^k m with m odd, parts have at most 2^k
channels, and at most 64 by default. 64 channels are what a quad of lanes of the CUDA attention kernel holds of a row,
and what a CTA of the quantizer processes; larger parts gain little more (docs/accuracy.md).

The butterflies only add. To keep their results finite wherever x is finite, both operands are first divided by 2^k, the
size of a part. The product of two unnormalised transforms is too large by a factor of 2^k, so the product of two
transforms divided this way is too small by a factor of 2^k. Q's scales compensate for it.
"""

from __future__ import annotations

from typing import get_args

import torch

from .recipe import Rotation

NAMED: tuple[Rotation, ...] = get_args(Rotation)
"""Values that `Recipe.rotate` allows."""


def part_of(dim: int, most: int) -> int:
    """The size of a part, the number of channels that are rotated together: the largest power of two that divides `dim`
    and is at most `most`.

    `most` is a power of two, or 0 for no rotation.
    """
    part = most
    while part > 1 and dim % part:  # a number even if torch.compile doesn't know `dim`
        part //= 2
    return part


def named(dim: int, part: int) -> Rotation:
    """A value of `Recipe.rotate` that rotates `part` channels of `dim` together."""
    return next(most for most in NAMED if part_of(dim, most) == part)


def sign_bit(channel):
    """1 where the sign of a channel is flipped, else 0. `channel`: ints or tensors up to 255.

    It is the parity of the number of pairs of adjacent ones in the binary number.
    """
    pairs = channel & (channel >> 1)
    pairs = pairs ^ (pairs >> 4)
    pairs = pairs ^ (pairs >> 2)
    return (pairs ^ (pairs >> 1)) & 1


def rotate(x: torch.Tensor, part: int) -> torch.Tensor:
    """Rotate x (…, D) in parts of `part` channels, and divide by sqrt(part). float32; only converted if `part` is 0.

    If an element is non-finite, all elements of its part are.
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
    return y + 0.0  # no zero is negative, so the order of the additions doesn't matter


def rotate_queries(q: torch.Tensor, part: int) -> torch.Tensor:
    """q (…, D) rotated and multiplied by sqrt(part), so that its products with `rotate(k, part)` are those of q and
    k."""
    return rotate(q, part) * max(part, 1)
