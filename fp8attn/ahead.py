"""Compiles and loads what calls will need, before they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .api import sdpa

Shape = Sequence[int]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def warmup(
    *shapes: tuple[Shape, Shape] | tuple[Shape, Shape, Shape],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    heads_last: bool = False,
    mask: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Make calls of `sdpa` with zeros, so that later calls of these shapes find their kernels compiled and loaded.

    Kernels serve many lengths: one length of each kind compiles what the others need, too. A call of one of these
    shapes, with the same options and with tensors in the same layout, is repeated from the launch cache. To warm up a
    model, run it twice.

    Args:
        shapes: for each call those of query (B, Hq, Sq, D), of key (B, Hkv, Sk, D) and, if it has another head dim, of
            value (B, Hkv, Sk, Dv).
        dtype: of all three: bfloat16, float16 or float32.
        device: a GPU, or the CPU with a backend that runs there.
        heads_last: tensors are stored as (B, S, H, D), as those of projections are.
        mask: dtype of an attn_mask of shape (Sq, Sk) that is made for each call, or None.
        options: arguments of `sdpa` beside operands and mask.

    Raises:
        TypeError, ValueError: an argument isn't as above, or `sdpa` refuses a call.
        BackendUnavailable: the backend can't run here.
    """
    if not shapes:
        raise ValueError("shapes is empty; it must have a pair of shapes, of query and key, for each call")
    for shape in shapes:
        if not (isinstance(shape, tuple) and len(shape) in (2, 3) and all(_is_shape(x) for x in shape)):
            raise ValueError(f"shapes has {shape!r}; it must have tuples of two or three shapes (B, H, S, D): of query, key and value")
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    wrong = [name for name in ("query", "key", "value", "attn_mask") if name in options]
    if wrong:
        raise TypeError(f"{wrong[0]} is given; warmup makes it")
    for query, key, *value in shapes:
        q, k, v = (_zeros(shape, dtype, device, heads_last) for shape in (query, key, *(value or [key])))
        attn_mask = None if mask is None else torch.zeros(query[2], key[2], dtype=mask, device=device)
        for _ in range(2):  # the second call is the one that the launch cache keeps
            sdpa(q, k, v, attn_mask, **options)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _is_shape(x: object) -> bool:
    return isinstance(x, Sequence) and len(x) == 4 and all(type(n) is int and n > 0 for n in x)


def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device | str, heads_last: bool) -> torch.Tensor:
    batch, heads, length, dim = shape
    if heads_last:
        return torch.zeros(batch, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    return torch.zeros(batch, heads, length, dim, dtype=dtype, device=device)
