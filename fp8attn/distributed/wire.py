"""Tensors packed into one buffer of bytes."""

from __future__ import annotations

import functools
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


class BufferLayout:
    """Where tensors lie in a buffer, one after another.

    Attributes:
        bytes: of the buffer.
        places: of each tensor its dtype, shape and strides, and its first element, counted from the buffer's beginning.
    """

    def __init__(self, forms: Sequence[Form]) -> None:
        self.bytes = 0
        self.places: list[tuple[torch.dtype, tuple[int, ...], list[int], int]] = []
        for form in forms:
            strides = [1] * len(form.shape)
            for i in range(len(strides) - 1, 0, -1):
                strides[i - 1] = strides[i] * (form.shape[i] if i < len(strides) - 1 else form.pitch)
            self.places.append((form.dtype, form.shape, strides, self.bytes // form.dtype.itemsize))
            self.bytes += _aligned(form.bytes)

    def tensors(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """As `unpacked` returns them."""
        found = []
        views: dict[torch.dtype, torch.Tensor] = {}
        for dtype, shape, strides, first in self.places:
            view = views.get(dtype)
            if view is None:
                view = views[dtype] = buffer.view(dtype)
            found.append(view.as_strided(shape, strides, view.storage_offset() + first))
        return found


@functools.lru_cache(1024)
def layout_of(forms: tuple[Form, ...]) -> BufferLayout:
    """The layout of a buffer, made once: calls of a model all have the same few."""
    return BufferLayout(forms)


def size_of(forms: Sequence[Form]) -> int:
    """Bytes of a buffer."""
    return layout_of(tuple(forms)).bytes


def unpacked(buffer: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """The tensors in a buffer, without a copy.

    Args:
        buffer: uint8 (size_of(forms),), or longer. It and its size are multiples of ALIGNMENT bytes from the beginning
            of its memory.
    """
    return layout_of(tuple(forms)).tensors(buffer)


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
    (rows,) = unpacked(torch.empty(size_of([form]), dtype=torch.uint8, device=tensors[0].device), [form])
    start = 0
    for x in tensors:
        rows[:, :, start : start + x.shape[2]].copy_(x)
        start += x.shape[2]
    return rows
