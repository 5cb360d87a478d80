"""Tensors packed into one buffer of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..quantization import ROW_ALIGNMENT

ALIGNMENT = 128
"""Every tensor in a buffer starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor in a buffer.

    Attributes:
        padded: whether its rows start at multiples of ROW_ALIGNMENT bytes, as those of quantized q and k must.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    padded: bool = False

    @property
    def pitch(self) -> int:
        """Elements from one row to the next."""
        size = self.dtype.itemsize
        return -(-self.shape[-1] * size // ROW_ALIGNMENT) * ROW_ALIGNMENT // size if self.padded else self.shape[-1]

    @property
    def bytes(self) -> int:
        count = self.pitch
        for size in self.shape[:-1]:
            count *= size
        return count * self.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(forms: Sequence[Form]) -> int:
    """Bytes of a buffer."""
    return sum(_aligned(form.bytes) for form in forms)


def unpacked(buffer: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """The tensors in a buffer, without a copy.

    Args:
        buffer: uint8 (bytes,), starting at a multiple of ALIGNMENT bytes.
    """
    found, start = [], 0
    for form in forms:
        rows = buffer[start : start + form.bytes].view(form.dtype).view(*form.shape[:-1], form.pitch)
        found.append(rows[..., : form.shape[-1]])
        start += _aligned(form.bytes)
    return found


def packed(tensors: Sequence[torch.Tensor], forms: Sequence[Form], buffer: torch.Tensor | None = None) -> torch.Tensor:
    """A buffer, uint8 (bytes,), that holds the tensors.

    Args:
        buffer: where to write them; None: into a new one.
    """
    if buffer is None:
        buffer = torch.empty(size_of(forms), dtype=torch.uint8, device=tensors[0].device)
    for x, place in zip(tensors, unpacked(buffer, forms), strict=True):
        place.copy_(x)
    return buffer


def concatenated_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows (B, H, S, D) of one-byte types, one tensor after another, in rows as `Form.padded` says."""
    batch, heads, _, dim = tensors[0].shape
    form = Form((batch, heads, sum(x.shape[2] for x in tensors), dim), tensors[0].dtype, padded=True)
    (rows,) = unpacked(torch.empty(form.bytes, dtype=torch.uint8, device=tensors[0].device), [form])
    start = 0
    for x in tensors:
        rows[:, :, start : start + x.shape[2]].copy_(x)
        start += x.shape[2]
    return rows
