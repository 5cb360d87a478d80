"""Random batches of prompts, chunks and decode steps on a KV cache, in one call, beside exact attention.

Which kernels a call takes follows from all of its rows. So what is right of each kernel may be wrong of them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from conftest import GPU

import fp8attn
from closeness import relative
from fp8attn import PRECISE, KVCache, PagedBatch, PageTable, Recipe
from fp8attn.validate import Backend

SEEDS = range(120 if GPU else 6)

LONGEST = 1500 if GPU else 300
"""Tokens of a sequence."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call.

    Attributes:
        counts: of the rows' tokens, those that are new.
        bound: the batch's max_count.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    kv_heads: int
    group: int
    dim: int
    dtype: torch.dtype
    recipe: Recipe
    left: int
    softcap: float
    sinks: bool
    packed: bool
    bound: int | None

    @staticmethod
    def of_seed(seed: int) -> Drawn:
        r = random.Random(seed)
        lengths = tuple(r.choice((1, r.randint(1, 70), r.randint(1, LONGEST), 128 * r.randint(1, LONGEST // 128))) for _ in range(r.randint(1, 6)))
        counts = tuple(min(n, r.choice((1, r.randint(1, 16), r.randint(1, 300), n))) for n in lengths)
        packed = r.random() < 0.7
        if not packed:
            counts = tuple(min(n, max(counts)) for n in lengths)
        return Drawn(
            lengths, counts, r.choice((1, 2, 3)), r.choice((1, 1, 2, 3, 4, 8)), r.choice((64, 128, 256)), r.choice((torch.bfloat16, torch.float16)),
            r.choice((Recipe(), Recipe(), PRECISE)), r.choice((-1, -1, r.randint(0, 600))), r.choice((0.0, 0.0, 20.0)), r.random() < 0.25, packed,
            max(counts) if packed and r.random() < 0.5 else None,
        )  # fmt: skip


@pytest.mark.parametrize("backend", ("modelled", pytest.param("auto", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_batch_are_exact_attention(seed: int, backend: Backend, device: torch.device) -> None:
    """With new tokens, behind those that earlier calls have appended."""
    x = Drawn.of_seed(seed)
    g = torch.Generator().manual_seed(seed)
    noise = lambda heads, tokens: torch.randn(heads, tokens, x.dim, generator=g).to(device, x.dtype)  # noqa: E731
    ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    keys, values = ([noise(x.kv_heads, n) for n in x.lengths] for _ in "kv")
    queries = [noise(x.kv_heads * x.group, n) for n in x.counts]
    sinks = torch.randn(x.kv_heads * x.group, generator=g).to(device) if x.sinks else None
    rows, num_pages = len(x.lengths), sum(n // 128 + 1 for n in x.lengths)
    cache = KVCache(rows, num_pages, x.kv_heads, x.dim, recipe=x.recipe, dtype=x.dtype, device=device)
    table = PageTable(rows, num_pages, device=device)
    for row, (length, count) in enumerate(zip(x.lengths, x.counts, strict=True)):
        table.reserve(row, length)
        if length > count:
            batch = PagedBatch(table.table[row : row + 1], ints([length - count]), None, ints([row]))
            cache.append(*(of[row][None, :, : length - count] for of in (keys, values)), batch, backend=backend)

    new = [[of[row][:, -count:] for row, count in enumerate(x.counts)] for of in (keys, values)]
    if x.packed:
        q, k, v = (torch.cat([part.transpose(0, 1) for part in parts]) for parts in (queries, *new))
        batch = PagedBatch(table.table, ints(x.lengths), cu_seqlens=ints([0, *itertools.accumulate(x.counts)]), max_count=x.bound)
    else:
        most = max(x.counts)
        q, k, v = (torch.stack([torch.nn.functional.pad(part, (0, 0, 0, most - part.shape[1])) for part in parts]) for parts in (queries, *new))
        batch = PagedBatch(table.table, ints(x.lengths), ints(x.counts))
    out, lse = fp8attn.paged_sdpa(
        q, cache, batch, (k, v), window=(x.left, 0), softcap=x.softcap, sinks=sinks, return_lse=True, out_dtype=torch.float32, backend=backend
    )
    first = 0
    for row, count in enumerate(x.counts):
        tokens = (of[row][None] for of in (queries, keys, values))
        wanted, wanted_lse = fp8attn.reference_sdpa(
            *tokens, is_causal=True, enable_gqa=True, causal_alignment="bottom_right", window=(x.left, 0), softcap=x.softcap, sinks=sinks,
            out_dtype=torch.float32, return_lse=True,
        )  # fmt: skip
        if x.packed:
            found, found_lse = out[first : first + count].transpose(0, 1), lse[:, first : first + count]
        else:
            found, found_lse = out[row, :, :count], lse[row, :, :count]
        first += count
        assert relative(found, wanted[0]) < 0.1, (row, x)
        torch.testing.assert_close(found_lse, wanted_lse[0], rtol=0, atol=0.1)
