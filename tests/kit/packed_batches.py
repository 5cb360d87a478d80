"""Packed keys and values to quantize, and the comparison of each sequence with what it is alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from closeness import on_grid
from fp8attn.layout import first_unit, padded_length
from fp8attn.quantization import empty_packed, quantize_kv, sequences_of
from fp8attn.recipe import DEFAULT_RECIPE, SCALE_BLOCK, Packed, ProductType, Quantized, Recipe
from quantizing import assert_same


@dataclass(frozen=True)
class Batch:
    """Packed sequences. NaN lies where no token is.

    Attributes:
        lengths: of the sequences.
        unused: tokens behind those of each sequence that don't exist.
        behind: tokens behind the last sequence.
        value_dim: channels of V; 0: as many as of K.
        moved: elements by which rows are moved, so that they don't start at multiples of 16 bytes.
    """

    lengths: tuple[int, ...]
    unused: int = 0
    behind: int = 0
    heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    qk: ProductType = "e4m3"
    seed: int = 0
    value_dim: int = 0
    moved: int = 0

    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(n + self.unused for n in self.lengths)]

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """k and v (1, H, T, D), as views of tensors (T, H, D). Some elements aren't finite."""
        generator, found = torch.Generator().manual_seed(self.seed), []
        for offset, dim in ((0.0, self.dim), (2.0, self.value_dim or self.dim)):
            x = torch.full((self.starts()[-1] + self.behind, self.heads, dim), torch.nan)
            for i, (begin, length) in enumerate(zip(self.starts(), self.lengths, strict=False)):
                some = torch.randn(length, self.heads, dim, generator=generator) * (1 + i % 5) + offset
                if length > 5 and i % 3 == 1:
                    some[length // 2, 0, 3], some[length - 1, self.heads - 1, dim - 1] = torch.nan, torch.inf
                x[begin : begin + length] = some
            x = x.to(self.dtype).transpose(0, 1)[None]
            x = x if found else on_grid(x)
            rows = torch.full((x.shape[2], self.heads, dim + bool(self.moved) * 8), torch.nan, dtype=self.dtype)
            rows = rows[..., self.moved : self.moved + dim].copy_(x[0].transpose(0, 1)) if self.moved else x[0].transpose(0, 1).contiguous()
            found.append(rows.to(device).transpose(0, 1)[None])
        return found[0], found[1]

    def packed(self, device: torch.device | str = "cpu") -> Packed:
        starts = torch.tensor(self.starts(), dtype=torch.int32, device=device)
        used = torch.tensor(self.lengths, dtype=torch.int32, device=device) if self.unused else None
        return Packed(starts, used, self.starts()[-1] + self.behind)


Results = tuple[Quantized, Quantized]
"""Quantized K and V."""

UNTOUCHED = 0x55
"""Bytes of results before they are written."""


def untouched(*arguments: Any) -> Results:
    """quantization.empty_packed, of memory that was used before."""
    results = empty_packed(*arguments)
    for x in results:
        for tensor in (x.data, x.scale, x.mean):
            if tensor is not None:
                tensor.untyped_storage().fill_(UNTOUCHED)
    return results


def assert_each_alone(batch: Batch, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, found: Results) -> None:
    """Each sequence has the bytes that it has alone, and no page of no sequence was written: results were `untouched`."""
    columns = found[1].data.view(torch.uint8).clone()
    for i, (begin, length) in enumerate(zip(batch.starts(), batch.lengths, strict=False)):
        first = SCALE_BLOCK * first_unit(begin, i, SCALE_BLOCK)
        columns[..., first : first + padded_length(length)] = UNTOUCHED
    assert (columns == UNTOUCHED).all(), "other pages differ"
    assert_bytes_alone(batch, k, v, recipe, found)


def assert_bytes_alone(batch: Batch, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, found: Results) -> None:
    """Each sequence has the bytes that it has alone."""
    keys, values = map(sequences_of, found)
    for length in {*batch.lengths}:
        same = [i for i, other in enumerate(batch.lengths) if other == length]
        spans = [slice(batch.starts()[i], batch.starts()[i] + length) for i in same]
        # as batches of one call, since the definition takes as long for one as for many
        expected = quantize_kv(*(torch.cat([x[:, :, span] for span in spans]) for x in (k, v)), recipe)
        for n, i in enumerate(same):
            for actual, x in zip((keys[i], values[i]), expected, strict=True):
                own = slice(n, n + 1)
                assert_same(actual, replace(x, data=x.data[own], scale=x.scale[own], mean=None if x.mean is None else x.mean[own]))


def assert_lengths_are_the_gpus(device: torch.device, dim: int, quantized: Callable[[torch.Tensor, torch.Tensor, Packed], Results]) -> None:
    """A graph is replayed with other lengths, that a kernel right before writes."""
    batch, other = Batch((900, 5, 2000, 0), heads=4, dim=dim), Batch((0, 1500, 1, 1404), heads=4, dim=dim)
    (k, v), (other_k, other_v) = batch.tensors(device), other.tensors(device)
    packed, starts = batch.packed(device), other.packed(device).cu_seqlens
    quantized(k, v, packed)
    told = packed.cu_seqlens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed.cu_seqlens.copy_(told)
        found = quantized(k, v, packed)
    for to, source in ((k, other_k), (v, other_v), (told, starts)):
        to.copy_(source)
    graph.replay()
    assert_bytes_alone(other, k, v, DEFAULT_RECIPE, found)


def wrong_lengths() -> Iterator[Packed]:
    """Of two sequences of 1,330 tokens: starts that are in order or not, too large or below zero, and such lengths."""
    starts = ((0, 1300, 1330), (0, 5000, 9000), (700, 100, 1330), (-5, 600, -7))
    for of_one, used in (*((x, None) for x in starts), (starts[0], (9000, -1))):
        yield Packed(torch.tensor(of_one, dtype=torch.int32), None if used is None else torch.tensor(used, dtype=torch.int32), 1330)


MANY = (
    Batch((3, 700, 0, 130) * 20, unused=2, heads=1),  # more sequences than a warp has lanes
    Batch((17_000, 5, 600), heads=1),  # more token chunks than lanes of a sum
    Batch((0, 0), behind=3),
)
