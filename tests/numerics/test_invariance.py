"""batch_invariant: a row has the bits that it has alone, whoever else is in the batch. tests/emulated/test_decode.py breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import GPU

import fp8attn
from fp8attn import KVCache, PagedBatch, PagedTensors, Recipe
from fp8attn.pages import PAGE
from fp8attn.validate import BackendUnavailable
from paging import packed

LENGTHS = (1300, 150, 3000, 700, 40) if GPU else (400, 150, 40)
BACKENDS = ("auto", "triton") if GPU else ("triton", "modelled")
Cache = KVCache | PagedTensors


def shuffled_table(lengths: tuple[int, ...], page: int, device: torch.device) -> torch.Tensor:
    """Pages of rows, one more than they need, in any order."""
    width = max(lengths) // page + 2
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(2)).int()
    return order.view(len(lengths), width).to(device)


def filled(kind: str, dim: int, device: torch.device) -> tuple[Cache, PagedBatch]:
    """A cache of rows of LENGTHS, and the batch. kind: a recipe's qk, or how another engine stores keys."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    if kind in ("e4m3", "int8"):
        table = shuffled_table(LENGTHS, PAGE, device)
        cache = KVCache(len(LENGTHS), table.numel(), 2, dim, recipe=Recipe(qk=kind), dtype=torch.bfloat16, device=device)  # type: ignore[arg-type]
        k, v = (torch.randn(len(LENGTHS), 2, max(LENGTHS), dim, generator=generator).to(device, torch.bfloat16) for _ in "kv")
        cache.append(k, v, PagedBatch(table, lengths, lengths))
        return cache, PagedBatch(table, lengths, batch_invariant=True)
    table = shuffled_table(LENGTHS, 16, device)
    k, v = (torch.randn(table.numel(), 16, 2, dim, generator=generator).to(device, torch.bfloat16) for _ in "kv")
    scales = (None, None) if kind == "bf16" else [torch.full((), 0.7, device=device) for _ in "kv"]
    k, v = (x if kind == "bf16" else x.to(torch.float8_e4m3fn) for x in (k, v))
    return PagedTensors(k, v, *scales), PagedBatch(table, lengths, batch_invariant=True)


def row_of(batch: PagedBatch, row: int, of_cache: bool) -> PagedBatch:
    """One row of a batch, as a batch of its own."""
    one, device = slice(row, row + 1), batch.lengths.device
    sequences = torch.tensor([row], dtype=torch.int32, device=device) if of_cache else None
    return replace(batch, page_table=batch.page_table[one], lengths=batch.lengths[one], sequences=sequences)


@pytest.mark.parametrize(
    "kind, queries",
    [
        pytest.param(kind, queries, marks=() if GPU or (i + j) % 2 == 0 else pytest.mark.thorough)
        for i, kind in enumerate(("e4m3", "int8", "tensors e4m3", "bf16"))
        for j, queries in enumerate((1, 4, 30) if GPU else (1, 20))
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_as_each_alone(device: torch.device, kind: str, queries: int, backend: str) -> None:
    """Of one query, of drafts and of a chunk; under a window with sinks, too."""
    dim, heads = (128, 8) if GPU else (32, 4)
    cache, batch = filled(kind, dim, device)
    q = torch.randn(len(LENGTHS), heads, queries, dim, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    for scores in ({}, {"window": (200, 0), "sinks": torch.linspace(-1, 2, heads, device=device)}):
        out, lse = fp8attn.paged_sdpa(q, cache, batch, return_lse=True, backend=backend, **scores)
        for row in range(len(LENGTHS)):
            alone = row_of(batch, row, isinstance(cache, KVCache))
            found = fp8attn.paged_sdpa(q[row : row + 1], cache, alone, return_lse=True, backend=backend, **scores)
            for ours, theirs in zip(found, (out, lse), strict=True):
                assert torch.equal(ours[0], theirs[row])
        usual = fp8attn.paged_sdpa(q, cache, replace(batch, batch_invariant=False), backend=backend, **scores)
        torch.testing.assert_close(out, usual, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("e4m3", "int8"))
def test_packed_rows_are_as_each_alone(device: torch.device, kind: str) -> None:
    """Decode steps, drafts and chunks in one call, which are different kernels'."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    cache, batch = filled(kind, 128, device)
    counts = (1, 3, 50, 9, 2)
    q = torch.randn(len(LENGTHS), 16, max(counts), 128, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    packed_q, packed_batch = packed(q, batch, counts, max(counts), more=0)
    out, lse = fp8attn.paged_sdpa(packed_q, cache, packed_batch, return_lse=True)
    begin = 0
    for row, count in enumerate(counts):
        alone = row_of(batch, row, True)
        alone = replace(alone, cu_seqlens=torch.tensor([0, count], dtype=torch.int32, device=device), max_count=count)
        tokens = slice(begin, begin + count)
        its_out, its_lse = fp8attn.paged_sdpa(packed_q[tokens], cache, alone, return_lse=True)
        assert torch.equal(its_out, out[tokens]) and torch.equal(its_lse, lse[:, tokens])
        begin += count


def test_triton_refuses_packed_rows(device: torch.device) -> None:
    cache, batch = filled("e4m3", 32, device)
    q, packed_batch = packed(torch.randn(len(LENGTHS), 4, 2, 32).to(device, torch.bfloat16), batch, (2,) * len(LENGTHS))
    with pytest.raises(BackendUnavailable, match="batch_invariant is True with cu_seqlens; it must be False"):
        fp8attn.paged_sdpa(q, cache, packed_batch, backend="triton")
