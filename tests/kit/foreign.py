"""Caches of other engines, drawn by hypothesis: their layouts, dtypes and scales, pages in any order, and NaN wherever no token is."""

from __future__ import annotations

import dataclasses

import torch
from conftest import GPU
from hypothesis import strategies as st

from closeness import E4M3_STEP, LOG2E, TENSOR_CORE_STEP
from fp8attn import PagedBatch, PagedTensors
from fp8attn.cuda import decode_tensors
from fp8attn.recipe import FUSED_RECIPES, ProductType
from fp8attn.reference import Scoring
from strategies import of_few_kinds

E4M3 = torch.float8_e4m3fn

LAYOUTS = ("tokens first", "heads first", "K, then V", "both in a page", "both in a row")
"""(P, page, Hkv, D); (P, Hkv, page, D); (2, P, page, Hkv, D); (P, 2, page, Hkv, D); (P, page, Hkv, 2 D)."""

SCALES = ("tensor", "head", "row", "token")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call on the cache of another engine.

    Attributes:
        dtype: of the cache.
        query_dtype: of the queries of an e4m3 cache.
        scales: K's and V's, of an e4m3 cache.
        lengths: of the sequences.
        ragged: whether there are counts: of every second row its length modulo 3.
        qk: names the recipe of a cache in half precision, one of recipe.FUSED_RECIPES; None: it has none.
    """

    lengths: tuple[int, ...] = (70, 0, 1, 33)
    queries: int = 3
    page: int = 16
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = E4M3
    query_dtype: torch.dtype = torch.float16
    scales: tuple[str, str] = ("head", "head")
    layout: str = "tokens first"
    window: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    sinks: bool = False
    ragged: bool = False
    seed: int = 0
    qk: ProductType | None = None

    def call(self, device: torch.device) -> Call:
        g = torch.Generator().manual_seed(self.seed)
        is_fp8, rows, page = self.dtype == E4M3, len(self.lengths), self.page
        width = -(-max(*self.lengths, 1) // page) + 1
        every = rows * width + 2
        free = torch.randperm(every, generator=g).tolist()
        table = torch.tensor([[free.pop() for _ in range(width)] for _ in range(rows)])
        k, v = (x[..., :dim] for x, dim in zip(self._tensors(every), (self.dim, self.value_dim), strict=True))
        scales = [self._scale(kind, every, g) if is_fp8 else None for kind in self.scales]
        tokens = []
        for row, length in enumerate(self.lengths):
            at = torch.arange(length)
            number, slot = table[row][at // page], at % page
            found = []
            for into, scale, kind in zip((k, v), scales, self.scales, strict=True):
                x = torch.randn(length, self.kv_heads, into.shape[3], generator=g) + 0.5
                if not is_fp8:
                    into[number, slot] = x.to(self.dtype)
                    found.append(into[number, slot].float())
                    continue
                own = torch.ones(length, self.kv_heads)
                if kind == "token":
                    least = -8 if into is v else -1  # values of tokens differ more, and scores stay small
                    own = 0.01 * 2.0 ** torch.randint(least, 2, (length, self.kv_heads), generator=g)
                    own *= 1 + torch.rand(length, self.kv_heads, generator=g)
                    scale[number, slot] = own
                else:
                    own = own * (scale[row] if kind == "row" else scale)
                codes = (x / (own.unsqueeze(-1) if kind != "token" else 0.01)).clamp(-448, 448).to(E4M3)
                into.view(torch.uint8)[number, slot] = codes.view(torch.uint8)
                found.append(codes.float() * own.unsqueeze(-1))
            tokens.append(tuple(x.transpose(0, 1).to(device) for x in found))
        q = torch.randn(rows, self.kv_heads * self.group, self.queries, self.dim, generator=g).to(self.query_dtype if is_fp8 else self.dtype)
        sinks = torch.randn(q.shape[1], generator=g).to(device) if self.sinks else None
        ints = lambda x: torch.as_tensor(x, dtype=torch.int32).to(device)  # noqa: E731
        counts = ints([self.queries if row % 2 == 0 else length % 3 for row, length in enumerate(self.lengths)]) if self.ragged else None
        moved = [None if x is None else moved_to(x, device) for x in (k, v, *scales)]
        batch = PagedBatch(ints(table), ints(self.lengths), counts)
        how = Scoring(self.dim**-0.5, self.window, self.softcap, sinks)
        return Call(q.to(device), PagedTensors(*moved, recipe=None if is_fp8 or self.qk is None else FUSED_RECIPES[self.qk]), batch, how, tokens)

    def _tensors(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (P, page, Hkv, D) of NaN, D and Dv rounded up to the same."""
        dim = max(self.dim, self.value_dim)
        shape = {
            "tokens first": (2, pages, self.page, self.kv_heads, dim),
            "heads first": (2, pages, self.kv_heads, self.page, dim),
            "K, then V": (2, pages, self.page, self.kv_heads, dim),
            "both in a page": (pages, 2, self.page, self.kv_heads, dim),
            "both in a row": (pages, self.page, self.kv_heads, 2 * dim),
        }[self.layout]
        both = torch.full(shape, 0x7F, dtype=torch.uint8).view(E4M3) if self.dtype == E4M3 else torch.full(shape, torch.nan, dtype=self.dtype)
        if self.layout == "both in a row":
            return both[..., :dim], both[..., dim:]
        if self.layout == "both in a page":
            return both[:, 0], both[:, 1]
        k, v = both if self.layout == "K, then V" else (both[0].clone(), both[1].clone())
        return (k.transpose(1, 2), v.transpose(1, 2)) if self.layout == "heads first" else (k, v)

    def _scale(self, kind: str, pages: int, g: torch.Generator) -> torch.Tensor:
        if kind == "token":
            if self.layout == "heads first":
                return torch.full((pages, self.kv_heads, self.page), torch.nan).transpose(1, 2)
            return torch.full((pages, self.page, self.kv_heads), torch.nan)
        shape = {"tensor": (), "head": (self.kv_heads,), "row": (len(self.lengths), self.kv_heads)}[kind]
        return 0.01 + 0.01 * torch.rand(shape, generator=g)


def moved_to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, with its strides."""
    return x if x.device == device else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What a case is made of.

    Attributes:
        tokens: float32 keys (Hkv, n, D) and values (Hkv, n, Dv) of each sequence, as the cache has them.
    """

    q: torch.Tensor
    cache: PagedTensors
    batch: PagedBatch
    how: Scoring
    tokens: list[tuple[torch.Tensor, torch.Tensor]]

    def unrounded(self) -> PagedTensors:
        """The cache as the interpreter multiplies it: without rounding P to bfloat16."""
        if GPU or self.cache.k.dtype != torch.bfloat16:
            return self.cache
        return PagedTensors(self.cache.k.float(), self.cache.v.float())


any_cases = st.builds(
    Case,
    lengths=st.lists(st.sampled_from((0, 1, 15, 16, 17, 47, 48, 63, 64, 65, 128, 130, 200)), min_size=2, max_size=3).map(tuple),
    queries=st.one_of(st.integers(1, 16), st.just(40)),
    page=st.sampled_from((1, 16, 32, 48, 128, 256)),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from((1, 2, 5)),
    dim=st.sampled_from((16, 40, 64, 128, 256)),
    value_dim=st.sampled_from((16, 64, 72, 256)),
    dtype=st.sampled_from((E4M3, E4M3, torch.float16, torch.bfloat16)),
    query_dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    scales=st.tuples(st.sampled_from(SCALES), st.sampled_from(SCALES)),
    layout=st.sampled_from(LAYOUTS),
    window=st.sampled_from(((-1, 0), (-1, 0), (-1, -1), (20, 0), (5, 7))),
    softcap=st.sampled_from((0.0, 0.0, 3.0)),
    sinks=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 2**31),
)

KINDS = (
    Case(dim=128, value_dim=128, query_dtype=torch.bfloat16),
    Case(scales=("token", "token"), page=48, layout="heads first", softcap=3.0),
    Case(dtype=torch.bfloat16, dim=128, value_dim=64, layout="both in a page", sinks=True),
    Case(dim=256, value_dim=256, query_dtype=torch.bfloat16),
)
"""What cases of the default tier on a GPU are like."""

FREE = ("lengths", "window", "ragged", "seed")
"""What kernels aren't compiled for."""


def like(case: Case, kind: Case) -> Case:
    return dataclasses.replace(kind, **{name: getattr(case, name) for name in FREE})


cases = of_few_kinds(any_cases, like, KINDS)


def has_fp8_sums(call: Call) -> bool:
    """Whether the CUDA kernel multiplies queries and keys in e4m3 by tensor cores."""
    return call.cache.is_fp8 and decode_tensors.choose(call.q, call.cache, call.batch).has_many


def assert_close(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, fp8_sums: bool = False
) -> None:
    """Compare float32 outputs and LSEs with the oracle's. dtype: of the cache. fp8_sums: on a GPU, scores are sums of FP8 tensor cores.

    Scores differ in their last bits. So a P may be another number of its dtype, and that row is off by no more than this P. The typical row has
    no such P.
    """
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf())
    out, lse, wanted, wanted_lse = (x.nan_to_num(0.0, 0.0, 0.0) for x in (*found, *expected))
    # terms are larger than their sum
    by_sums = 2 * LOG2E * float(wanted_lse.abs().max()) * TENSOR_CORE_STEP if fp8_sums and GPU and lse.numel() else 0.0
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4 + by_sums)
    step = {E4M3: E4M3_STEP, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    norm = wanted.norm(dim=-1)
    error = (out - wanted).norm(dim=-1) / (norm + float(norm.max() if norm.numel() else 0.0) * 1e-6 + 1e-30)
    if error.numel():
        assert float(error.max()) <= step + 1e-4, f"a row is off by {float(error.max()):.1e}"
        assert float(error.median()) <= (step / 20 if GPU else 1e-5), f"the typical row is off by {float(error.median()):.1e}"
