"""The key order of quantized V, and the places of packed sequences. Defined once for PyTorch, Triton and the tests.

V is stored transposed, (B, H, D, S_padded), because FP8 tensor cores take K-major operands only. Its keys are permuted
inside groups of 16. With this order, a thread's accumulators of Q·Kᵀ, converted to e4m3, are the bytes of its A operand
of P·V without a shuffle (PTX ISA, fragments of wgmma and mma.m16n8k32): the accumulator gives thread c of a quad the
columns 2c, 2c+1, 8+2c, 8+2c+1, and the operand needs the columns 4c … 4c+3.
"""

from __future__ import annotations

import torch

from .recipe import SCALE_BLOCK, Packed

GROUP = 16
PADDING = SCALE_BLOCK
"""Keys of quantized V are padded with zeros to a multiple of this, so that no key block reads past the end."""


def key_of_slot(slot):
    """The key stored at position `slot` of quantized V.

    `slot` is anything with integer arithmetic: an int, a torch tensor or a Triton tensor. If the low bits of a slot are
    c1 c0 h p (c: thread in the quad, h: half of the group, p: element of the pair), those of its key are h c1 c0 p.
    """
    return (slot & ~15) | ((slot & 2) << 2) | ((slot & 12) >> 1) | (slot & 1)


def padded_length(length: int) -> int:
    """`length` rounded up to whole padding blocks."""
    return -(-length // PADDING) * PADDING


def first_unit(begin, sequence, size):
    """The place of a packed sequence's first unit of `size` tokens among the units of all sequences.

    `begin` is the sequence's first token, `sequence` its number. Its units don't overlap the next one's, and all fit
    into `units_of` places, so nobody has to add up lengths. The arguments are as of `key_of_slot`.
    """
    return begin // size + sequence


def units_of(packed: Packed, size: int) -> int:
    """Places of units of `size` tokens of all packed sequences, some of which stay empty."""
    return packed.tokens // size + packed.sequences


def first_tile(begin, sequence, rows, sharing, units):
    """The place of a packed sequence's first tile among the tiles of all sequences, as `first_unit`.

    A tile has `units` units of `rows` tokens of `sharing` heads, which follow one another.
    """
    return (begin // rows + sequence) * sharing // units + sequence * (units > 1)


def tiles_of(packed: Packed, rows: int, sharing: int, units: int) -> int:
    """Places of tiles of all packed sequences, as `units_of`."""
    return first_tile(packed.tokens, packed.sequences, rows, sharing, units)


def slots(length: int, device: torch.device | None = None) -> torch.Tensor:
    """key_of_slot(0 … length - 1) as an int64 tensor; `length` is a multiple of 16."""
    return key_of_slot(torch.arange(length, device=device))
