"""Causal calls on one sequence, drawn by hypothesis, for page-local quantization and the KV cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from closeness import E4M3_STEP, LOG2E, SHARE_OFF_GRID, TENSOR_CORE_STEP, relative
from fp8attn import KVCache, PagedBatch, PageTable, Recipe, paged_sdpa, pages
from fp8attn.pages import PAGE, RECENT, Pages
from fp8attn.reference import Scoring
from strategies import of_few_kinds

RECIPES = st.builds(
    Recipe, smooth_k=st.booleans(), smooth_v=st.booleans(), rotate=st.sampled_from((0, 16, 64, 256)), qk=st.sampled_from(("e4m3", "int8"))
)
DIMS = st.sampled_from((16, 40, 64, 128))
DISTRIBUTIONS = ("normal", "outliers", "biased", "one sign", "grows", "falls", "zeros first")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A causal call on one sequence."""

    length: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    distribution: str
    recipe: Recipe
    seed: int

    def tensors(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        heads = self.kv_heads * self.group
        q, k = (torch.randn(h, self.length, self.dim, generator=g) for h in (heads, self.kv_heads))
        v = torch.randn(self.kv_heads, self.length, self.value_dim, generator=g)
        tokens = torch.arange(self.length)[:, None]
        if self.distribution == "outliers":
            k, v = (x + 10 * torch.randn(x.shape, generator=g) * (torch.rand(x.shape, generator=g) < 0.01) for x in (k, v))
        elif self.distribution == "biased":
            k[..., :4] += torch.tensor([10.0, -20.0, 30.0, -50.0])
            v += 3
        elif self.distribution == "one sign":
            v = v.abs()
        elif self.distribution in ("grows", "falls"):
            v = v * 2.0 ** ((3 if self.distribution == "grows" else -3) * (tokens // PAGE))
        elif self.distribution == "zeros first":
            k, v = k * (tokens >= PAGE), v * (tokens >= PAGE)
        return tuple(x.to(device, self.dtype) for x in (q, k, v))  # type: ignore[return-value]


any_problems = st.builds(
    Problem, st.integers(1, 560), st.integers(1, 2), st.sampled_from((1, 1, 3)), DIMS, DIMS,
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)), st.sampled_from(DISTRIBUTIONS), RECIPES, st.integers(0, 2**31),
)  # fmt: skip

PLAIN = Problem(300, 1, 1, 64, 64, torch.bfloat16, "normal", Recipe(), 0)
KINDS = (
    PLAIN,
    dataclasses.replace(PLAIN, dim=128, value_dim=128, group=3, dtype=torch.float16),
    dataclasses.replace(PLAIN, dim=40, dtype=torch.float32, recipe=Recipe(qk="int8", rotate=16, smooth_v=False)),
    dataclasses.replace(PLAIN, dim=128, value_dim=40, recipe=Recipe(qk="int8", rotate=256, smooth_k=False)),
)
"""What problems of the default tier on a GPU are like."""


def like(problem: Problem, kind: Problem) -> Problem:
    """`problem` with the properties that kernels are compiled for of `kind`."""
    return dataclasses.replace(kind, length=problem.length, kv_heads=problem.kv_heads, distribution=problem.distribution, seed=problem.seed)


problems = of_few_kinds(any_problems, like, KINDS)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_equal_pages(actual: Pages, expected: Pages) -> None:
    for name in Pages.__dataclass_fields__:
        assert torch.equal(bits(getattr(actual, name)), bits(getattr(expected, name))), name


def modelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe, how: Scoring | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = pages.modelled(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), recipe, how)
    return out[0], lse[0]


INTERPRETED = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 4e-4}
"""Relative error of answers where sums are float32: P of the own page is rounded as V is."""


def assert_attends(out: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, exact_sums: bool) -> None:
    """Compare a kernel's float32 output and LSE with the oracle's.

    A GPU's tensor cores sum scores with 13 bits: the tolerances of `closeness.assert_matches_pipeline`, and the rounding
    of P in the own page. `exact_sums`: sums are float32, and a P's code is rarely another than the oracle's. Up to 3 % of
    the rows, or one, may have a P that changes their LSE: in a window of few keys, one P is much of a row.
    """
    wanted, wanted_lse = expected
    for x, y in ((out, wanted), (lse, wanted_lse)):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf())
    out, lse, wanted, wanted_lse = (x.nan_to_num(0.0, 0.0, 0.0) for x in (out, lse, wanted, wanted_lse))
    largest = 0.0 if exact_sums else float(wanted_lse.abs().max()) * LOG2E
    few, by_sums = max(int(SHARE_OFF_GRID * lse.numel()), 1), largest * TENSOR_CORE_STEP
    # (absolute, relative) tolerance of all rows, and of all but few
    of_all, of_most = ((5e-3, 1e-3), (1e-4, 1e-4)) if exact_sums else ((E4M3_STEP + by_sums, 1e-3), (5e-3 + by_sums, 1e-3))
    torch.testing.assert_close(lse, wanted_lse, atol=of_all[0], rtol=of_all[1])
    apart = (lse - wanted_lse).abs() > of_most[0] + of_most[1] * wanted_lse.abs()
    assert int(apart.sum()) <= few, f"{int(apart.sum())} of {apart.numel()} rows have another LSE"
    norm = wanted.norm(dim=-1)
    error = (out - wanted).norm(dim=-1) / (norm + float(norm.max()) * 1e-6 + 1e-30)
    if exact_sums:
        assert float(error.max()) <= E4M3_STEP + INTERPRETED[dtype], f"a row is off by {float(error.max()):.1e}"
        others = error.flatten().argsort()[: max(error.numel() - few, 1)]
        assert relative(*(x.flatten(0, -2)[others] for x in (out, wanted))) <= INTERPRETED[dtype], relative(out, wanted)
        return
    by_scores = 2 ** min(by_sums, 1000.0) - 1  # of the largest scores nothing but the LSE is certain
    assert float(error.max()) <= E4M3_STEP + INTERPRETED[dtype] + by_scores, f"a row is off by {float(error.max()):.1e}"
    assert float(error.median()) <= 4e-3 + INTERPRETED[dtype] + by_scores, f"the typical row is off by {float(error.median()):.1e}"


def batched(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.unsqueeze(0) for x in tensors)


class Sequences:
    """A cache and its page table, with lengths that the host counts, too."""

    def __init__(self, problem: Problem, device: torch.device, sequences: int = 1, num_pages: int = 12) -> None:
        self.cache = KVCache(
            sequences, num_pages, problem.kv_heads, problem.dim, problem.value_dim, recipe=problem.recipe, dtype=problem.dtype, device=device
        )
        self.table = PageTable(sequences, num_pages, device=device)
        self.lengths = [0] * sequences

    def ints(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.cache.device)

    def batch(self, sequences: list[int], counts: list[int] | None = None) -> PagedBatch:
        """A batch of these sequences as they are, of which `counts` tokens are new."""
        rows = torch.tensor(sequences, device=self.cache.device)
        new = None if counts is None else self.ints(*counts)
        return PagedBatch(self.table.table[rows], self.table.lengths[rows], new, self.ints(*sequences))

    def grow(self, sequences: list[int], counts: list[int]) -> PagedBatch:
        """The batch of these sequences with `counts` more tokens."""
        for sequence, count in zip(sequences, counts, strict=True):
            self.lengths[sequence] += count
            self.table.reserve(sequence, self.lengths[sequence])
            self.table.lengths[sequence] = self.lengths[sequence]
        return self.batch(sequences, counts)

    def append(self, k: torch.Tensor, v: torch.Tensor, sequences: list[int] | None = None, counts: list[int] | None = None, **options) -> None:
        sequences = [0] if sequences is None else sequences
        counts = [k.shape[2]] * len(sequences) if counts is None else counts
        self.cache.append(k, v, self.grow(sequences, counts), **options)

    def truncate(self, sequence: int, length: int) -> None:
        self.table.truncate(sequence, length)
        self.lengths[sequence] = length

    def fork(self, source: int, target: int) -> None:
        self.table.fork(source, target, self.lengths[source])
        self.cache.fork(source, target)
        self.lengths[target] = self.lengths[source]

    def attend(self, q: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None = None, sequences: list[int] | None = None, **options):
        """Attention of one sequence's last tokens, or of several sequences'; with `new`, after they are appended."""
        sequences = [0] if sequences is None else sequences
        counts = [q.shape[2]] * len(sequences)
        batch = self.batch(sequences, counts) if new is None else self.grow(sequences, counts)
        return paged_sdpa(q, self.cache, batch, new, **options)

    def held(self, sequence: int) -> Pages:
        """The complete pages of a sequence."""
        numbers = self.table.table[sequence, : self.lengths[sequence] // PAGE].long()
        return Pages(*(x[numbers] for x in self.cache.storage.pages.tensors()))

    def assert_holds(self, sequence: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The pages are those of the tokens at once, and so are the last tokens."""
        made = pages.quantize_sequence(k, v, self.cache.recipe)
        assert self.lengths[sequence] == k.shape[1] == int(self.table.lengths[sequence])
        if made is not None:
            assert_equal_pages(self.held(sequence), made[0])
        tokens = torch.arange(k.shape[1] // PAGE * PAGE, k.shape[1], device=k.device)
        for kept, x in ((self.cache.storage.k, k), (self.cache.storage.v, v)):
            assert torch.equal(kept[sequence][:, tokens % RECENT], x[:, tokens])


def packed(q: torch.Tensor, batch: PagedBatch, counts: Sequence[int], most: int | None = None, more: int = 2) -> tuple[torch.Tensor, PagedBatch]:
    """The last queries of each row of q (B, Hq, S, D), one row after another, as (T, Hq, D), and the batch of them. `more` tokens, which are NaN,
    are no row's. most: the batch's max_count."""
    parts = [q[row, :, :n].transpose(0, 1) for row, n in enumerate(counts)]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=q.device)
    tail = torch.full_like(q[0, :, :1].transpose(0, 1), torch.nan).expand(more, -1, -1)
    return torch.cat([*parts, tail]), dataclasses.replace(batch, counts=None, cu_seqlens=starts, max_count=most)
