"""Random batches of prompts, chunks and decode steps on a KV cache, ours or another engine's, in one call, beside exact attention.

Which kernels a call takes follows from all of its rows. So what is right of each kernel may be wrong of them together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from conftest import GPU

import fp8attn
from closeness import E4M3_STEP, relative
from copying import packed
from foreign import E4M3, LAYOUTS, SCALES, Call, Case
from fp8attn import PRECISE, KVCache, PagedBatch, PageTable, Recipe, paged_tensors, paged_tensors_ops
from fp8attn.quantization import encode, quantize_q, scale_of
from fp8attn.reference import Scoring
from fp8attn.validate import Backend

SEEDS = range(120 if GPU else 6)

LONGEST = 1500 if GPU else 300
"""Tokens of a sequence."""


def drawn_rows(r: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of some sequences, and of their tokens how many are in the batch."""
    lengths = tuple(r.choice((1, r.randint(1, 70), r.randint(1, LONGEST), 128 * r.randint(1, LONGEST // 128))) for _ in range(r.randint(1, 6)))
    return lengths, tuple(min(n, r.choice((1, r.randint(1, 16), r.randint(1, 300), n))) for n in lengths)


def check_rows(
    answer: tuple[torch.Tensor, torch.Tensor], rows: Sequence[tuple[torch.Tensor, ...]], how: Scoring, most: float, most_lse: float
) -> None:
    """An answer to a batch is exact attention of each row, up to a relative L2 error and one of the LSE.

    Args:
        answer: output and LSE of padded or packed queries.
        rows: query (Hq, n, D), key and value (Hkv, S, D).
    """
    (out, lse), first = answer, 0
    for row, operands in enumerate(rows):
        count = operands[0].shape[1]
        wanted, wanted_lse = fp8attn.reference_sdpa(
            *(x[None] for x in operands), is_causal=True, enable_gqa=True, causal_alignment="bottom_right", window=how.window, softcap=how.softcap,
            sinks=how.sinks, out_dtype=torch.float32, return_lse=True,
        )  # fmt: skip
        if out.dim() == 3:
            found, found_lse = out[first : first + count].transpose(0, 1), lse[:, first : first + count]
        else:
            found, found_lse = out[row, :, :count], lse[row, :, :count]
        first += count
        assert relative(found, wanted[0]) < most, row
        torch.testing.assert_close(found_lse, wanted_lse[0], rtol=0, atol=most_lse)


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
        lengths, counts = drawn_rows(r)
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
    how = Scoring(x.dim**-0.5, (x.left, 0), x.softcap, sinks)
    answer = fp8attn.paged_sdpa(
        q, cache, batch, (k, v), window=how.window, softcap=how.softcap, sinks=how.sinks, return_lse=True, out_dtype=torch.float32, backend=backend
    )
    check_rows(answer, [*zip(queries, keys, values, strict=True)], how, 0.1, 0.1)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class DrawnTensors:
    """A call on a cache of another engine.

    Attributes:
        counts: of the rows' tokens, those that have queries; of more than 384 rows of a key/value head they are copied,
            or quantized by a recipe of a cache in half precision, there of more than 64.
        behind: packed queries behind the last row.
        bound: the batch's max_count.
        is_new: whether the call writes these tokens to the cache.
        few_tiles_too: whether this is so however few tiles of queries there are.
    """

    case: Case
    counts: tuple[int, ...]
    packed: bool
    behind: int
    bound: int | None
    is_new: bool
    few_tiles_too: bool

    @staticmethod
    def of_seed(seed: int) -> DrawnTensors:
        r = random.Random(seed)
        lengths, counts = drawn_rows(r)
        dtype, dim = r.choice((*[E4M3] * 4, torch.bfloat16, torch.float16)), r.choice((64, 128, 128, 256))
        scale = r.choice((*SCALES, *SCALES[:3]))
        case = Case(
            lengths, max(counts), r.choice((1, 16, 32, 64, 128, 256)), r.choice((1, 2, 3)), r.choice((1, 2, 3, 4, 8)), dim, dim, dtype,
            r.choice((torch.bfloat16, torch.float16)), (scale, scale), r.choice(LAYOUTS), (r.choice((-1, -1, r.randint(0, 600))), 0),
            r.choice((0.0, 0.0, 20.0)), r.random() < 0.25, False, seed, r.choice((None, "e4m3", "e4m3", "int8")),
        )  # fmt: skip
        is_packed = r.random() < 0.7
        bound = max(counts) if is_packed and r.random() < 0.7 else None
        return DrawnTensors(case, counts, is_packed, r.choice((0, 0, 5)), bound, r.random() < 0.3, r.random() < 0.8)

    def call(self, device: torch.device) -> Call:
        call = self.case.call(device)
        if self.packed:
            return packed(call, list(self.counts), self.behind, self.bound)
        counts = torch.tensor(self.counts, dtype=torch.int32, device=device)
        return dataclasses.replace(call, batch=dataclasses.replace(call.batch, counts=counts))

    def without_new_tokens(self, call: Call) -> tuple[Call, tuple[torch.Tensor, ...]]:
        """The call, whose cache gets NaN for the batch's tokens, and these, as `paged_sdpa` takes them."""
        cache, table = call.cache, call.batch.page_table.long()
        for row, (length, count) in enumerate(zip(self.case.lengths, self.counts, strict=True)):
            at = torch.arange(length - count, length, device=table.device)
            for x in (cache.k, cache.v):
                x.view(torch.uint8)[table[row, at // cache.page], at % cache.page] = 0xFF
        new, kept = [], []
        for every in zip(*call.tokens, strict=True):
            olds, news = zip(*(x.split((x.shape[1] - count, count), 1) for x, count in zip(every, self.counts, strict=True)), strict=True)
            kept.append([torch.cat((old, written(x, self.case, call.q.dtype)), 1) for old, x in zip(olds, news, strict=True)])
            if self.packed:
                new.append(torch.nn.functional.pad(torch.cat(news, 1).transpose(0, 1), (0, 0, 0, 0, 0, self.behind)))
            else:
                new.append(torch.stack([torch.nn.functional.pad(x, (0, 0, 0, max(self.counts) - x.shape[1])) for x in news]))
        return dataclasses.replace(call, tokens=[*zip(*kept, strict=True)]), tuple(x.to(call.q.dtype) for x in new)


def written(x: torch.Tensor, case: Case, dtype: torch.dtype) -> torch.Tensor:
    """New tokens (Hkv, n, D) of a dtype as a cache has them then: what it has already, but for scales of these tokens."""
    if case.dtype != E4M3 or case.scales[0] != "token":
        return x
    y = x.to(dtype).float()
    scale = scale_of(y.abs().amax(-1))[..., None]
    return encode(y, scale).float() * scale


def rounded(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Queries (Hq, S, D) as scores have them: of an e4m3 cache they are quantized to e4m3."""
    if not call.cache.is_fp8:
        return x.float()
    codes = quantize_q(x[None], paged_tensors.QUERIES)
    return (codes.data.float() * codes.scale[..., None])[0]


@pytest.mark.parametrize(
    "backend",
    (
        "modelled",
        pytest.param("triton", marks=pytest.mark.skipif(GPU, reason="each call would compile kernels")),
        pytest.param("auto", marks=pytest.mark.gpu),
    ),
)
@pytest.mark.parametrize("seed", range(120 if GPU else 24))
def test_rows_of_caches_of_other_engines_are_exact_attention(
    seed: int, backend: Backend, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Copied, where they lie, or both in one call. Scores are those of the quantized queries, so that P's rounding alone is an error."""
    x = DrawnTensors.of_seed(seed)
    if x.few_tiles_too:
        monkeypatch.setattr(paged_tensors_ops, "_unsupported_tiles", lambda *_: None)
    monkeypatch.setattr(paged_tensors_ops, "PACKED_ROWS", {True: 384, False: 64})
    call, new = x.call(device), None
    if x.is_new:
        call, new = x.without_new_tokens(call)
    how, is_fp8 = call.how, call.cache.is_fp8
    answer = fp8attn.paged_sdpa(
        call.q, call.cache, call.batch, new, window=how.window, softcap=how.softcap, sinks=how.sinks, return_lse=True, out_dtype=torch.float32,
        backend=backend,
    )  # type: ignore[arg-type]  # fmt: skip
    queries = call.q[: sum(x.counts)].transpose(0, 1).split(x.counts, 1) if x.packed else [q[:, :n] for q, n in zip(call.q, x.counts, strict=True)]
    rows = [(rounded(q, call), *tokens) for q, tokens in zip(queries, call.tokens, strict=True)]
    most, most_lse = (0.03, 1e-3) if is_fp8 else (0.01, 1e-3)
    if GPU and is_fp8:  # where rows are copied, P's codes are what is added up
        most, most_lse = 0.06, math.log1p(E4M3_STEP)
    elif GPU and call.cache.recipe is not None:
        most, most_lse = 0.1, 0.1
    check_rows(answer, rows, how, most, most_lse)  # type: ignore[arg-type]
