"""The decode kernel, on a CPU too: the oracle's answers, whatever the lengths, the pages and the number of CTAs that share them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import emulation
from fp8attn import KVCache, PagedBatch, Recipe, pages
from fp8attn.cuda import build, decode, run
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.pages import PAGE, PagedCall, Storage
from fp8attn.recipe import DEFAULT_RECIPE, INT8_NAN, PRECISE
from paging import assert_attends, packed

H100 = ARCHITECTURES[90]


@dataclasses.dataclass(frozen=True)
class Case:
    """Decoding of several sequences at once, whose lengths include `queries` new tokens each."""

    lengths: tuple[int, ...]
    queries: int = 1
    kv_heads: int = 1
    group: int = 4
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    recipe: Recipe = DEFAULT_RECIPE
    counts: tuple[int, ...] | None = None
    scale: float = 0.2
    seed: int = 0
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    part_pages: int = 0

    def call(self, q: torch.Tensor, storage: Storage, batch: PagedBatch) -> PagedCall:
        sinks = torch.linspace(-2, 3, self.kv_heads * self.group, device=q.device) if self.sinks else None
        return PagedCall(q, storage, None, batch, self.recipe, self.scale, (self.left, 0), self.softcap, sinks)

    def cache(self, device: torch.device) -> tuple[torch.Tensor, Storage, PagedBatch]:
        """Queries, and a cache with shuffled pages; what no token has written is NaN."""
        g = torch.Generator().manual_seed(self.seed)
        rows, longest = len(self.lengths), max(*self.lengths, 1)
        total = sum(length // PAGE for length in self.lengths) + 3
        cache = KVCache(rows + 2, total, self.kv_heads, self.dim, recipe=self.recipe, dtype=self.dtype, device=device)
        for x in cache.storage.tensors():
            if x.dtype != torch.int32:
                x.view(torch.uint8).fill_(0x7F) if x.element_size() == 1 else x.fill_(torch.nan)
        k, v = (torch.randn(rows, self.kv_heads, longest, self.dim, generator=g) for _ in range(2))
        k = (k * torch.linspace(0.5, 2, longest)[:, None] + 1).to(device, self.dtype)
        v = (v * 2.0 ** (torch.arange(longest) // PAGE % 3)[:, None] + 0.5).to(device, self.dtype)
        order = torch.randperm(total, generator=g).tolist()
        table = torch.full((rows, longest // PAGE + 1), 1 << 20, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            table[row, : length // PAGE] = torch.tensor([order.pop() for _ in range(length // PAGE)], dtype=torch.int32)
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (self.lengths, torch.randperm(rows + 2, generator=g)[:rows].tolist())]
        counts = None if self.counts is None else torch.tensor(self.counts, dtype=torch.int32, device=device)
        batch = PagedBatch(table.to(device), ints[0], ints[0], ints[1])
        pages.append(cache.storage, k, v, batch, self.recipe)
        q = torch.randn(rows, self.kv_heads * self.group, self.queries, self.dim, generator=g).to(device, self.dtype)
        return q, cache.storage, dataclasses.replace(batch, counts=counts, batch_invariant=self.part_pages > 0)


def attend(library: build.Library | None, case: Case, q: torch.Tensor, storage: Storage, batch: PagedBatch, device: Device):
    """Output and LSE of the kernel; `library` None: compiled."""
    assert decode.unsupported_call(q, storage, batch, case.scale, H100) is None
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        patch.setattr(decode, "PART_PAGES", case.part_pages or decode.PART_PAGES)
        return run.attend_to_pages(case.call(q, storage, batch), device, torch.float32)


def check(library: build.Library | None, case: Case, device: torch.device, sms: int) -> None:
    q, storage, batch = case.cache(device)
    actual = attend(library, case, q, storage, batch, dataclasses.replace(H100, sm_count=sms))
    expected = pages.attend_paged(case.call(q, storage, batch))
    assert_attends(*actual, expected, case.dtype, library is not None)
    assert not storage.tickets.any()


CASES = {
    "one query": (Case((300,)), 1),
    "all edges": (Case((0, 1, 64, 127, 128, 129, 192, 256, 257, 400)), 2),
    "half": (Case((300, 200), dtype=torch.float16, kv_heads=2), 2),
    "drafts across pages": (Case((130, 258, 5, 384), queries=5, group=2), 2),
    "drafts of several sizes": (Case((130, 258, 70, 384), queries=5, group=3, counts=(1, 5, 0, 2)), 1),
    "four groups of rows": (Case((300, 257), queries=7, group=4), 2),
    "three row tiles": (Case((300, 257), queries=17, group=4), 2),
    "more rows than the cache keeps tokens for": (Case((340, 320, 319, 321), queries=90, group=1), 3),
    "more rows than the cache keeps tokens for, window": (Case((340,), queries=90, group=1, left=20), 2),
    "two row tiles, 256 channels": (Case((300,), queries=15, group=4, dim=256), 2),
    "two groups of rows": (Case((300, 20), queries=3, group=4, dim=128), 2),
    "more than 32 parts": (Case((128 * 40, 5)), 20),
    "equal lengths, several CTAs for each": (Case((300, 300), kv_heads=2), 10),
    "equal lengths, several for each CTA": (Case((300,) * 9), 2),
    "equal lengths, no part of a tile": (Case((300,) * 7), 4),
    "256 channels, more than 8 parts": (Case((128 * 11,), dim=256, group=2), 12),
    "more CTAs than blocks": (Case((140, 20)), 5),
    "many short": (Case((3,) * 40, group=1), 2),
    "many of different lengths": (Case((3, 140) * 70, group=1), 40),
    "no rotation": (Case((300,), recipe=Recipe(rotate=0, smooth_k=False, smooth_v=False)), 1),
    "all channels rotated": (Case((300,), recipe=Recipe(rotate=256)), 1),
    "int8": (Case((300, 140), recipe=PRECISE, kv_heads=2), 1),
    "int8, 256 channels": (Case((300,), dim=256, group=2, recipe=PRECISE), 1),
    "large scores": (Case((500, 300), queries=3, scale=1e8), 2),
    "int8, 128 channels, large scores": (Case((400,), queries=3, dim=128, recipe=PRECISE, scale=1e6), 1),
    "128 channels": (Case((300, 140), dim=128), 1),
    "256 channels": (Case((300,), dim=256, group=2), 2),
    "window": (Case((700, 300, 20), queries=3, left=200), 3),
    "window within the own page": (Case((420, 200, 130), queries=4, left=40), 2),
    "window of one page": (Case((700, 641), left=128), 2),
    "window of one token": (Case((300, 257), queries=5, left=0, group=2), 1),
    "window longer than all": (Case((300,), left=1 << 40), 1),
    "window, two row tiles": (Case((700, 300), queries=15, left=150), 2),
    "window, int8, 128 channels, several parts": (Case((128 * 20 + 5,), queries=3, left=128 * 17 + 3, dim=128, recipe=PRECISE), 7),
    "soft cap": (Case((300, 140), queries=3, softcap=2.0), 2),
    "soft cap, int8, 128 channels": (Case((400, 20), queries=2, softcap=5.0, dim=128, recipe=PRECISE), 2),
    "soft cap, large scores": (Case((500,), queries=3, scale=1e8, softcap=30.0), 2),
    "soft cap without K's mean": (Case((300,), softcap=2.0, recipe=Recipe(smooth_k=False)), 1),
    "sinks": (Case((300, 200, 5), queries=2, kv_heads=2, sinks=True), 5),
    "sinks, large scores": (Case((500,), scale=1e8, sinks=True), 2),
    "window, soft cap, sinks, 256 channels": (Case((700, 64), queries=2, left=300, softcap=3.0, sinks=True, dim=256, group=2), 3),
    "fixed parts": (Case((128 * 9 + 5, 300, 0, 128 * 3), part_pages=2), 3),
    "fixed parts, more than there may be": (Case((128 * 70, 5), part_pages=1), 7),
    "fixed parts, equal lengths": (Case((128 * 5 + 70,) * 3, kv_heads=2, part_pages=2), 2),
    "fixed parts, two row tiles, 256 channels": (Case((700, 300), queries=15, dim=256, part_pages=1), 2),
    "fixed parts, window, sinks, int8": (Case((128 * 9, 300), queries=3, left=600, sinks=True, recipe=PRECISE, part_pages=2), 3),
    "window, sinks, half, more than 32 parts": (Case((128 * 40, 5), left=128 * 36, sinks=True, dtype=torch.float16), 20),
}
"""By what is special, with the number of SMs that share the work."""

MOST_CHANNELS = 128
"""Of cases of the default tier without a GPU."""


@pytest.fixture(params=(pytest.param("emulated", marks=pytest.mark.anywhere), "cuda"))
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "cuda" and (device.type != "cuda" or device_of(device).arch != 90):
        pytest.skip("needs a Hopper GPU")
    return request.param


def config_of(case: Case) -> decode.DecodeConfig:
    any_scores = case.left >= 0 or case.softcap > 0 or case.sinks
    return next(c for c in decode.INSTANCES if (c.head_dim, c.int8, c.any_scores) == (case.dim, case.recipe.qk == "int8", any_scores))


def library_of(backend: str, case: Case) -> build.Library | None:
    return emulation.decoder(config_of(case)) if backend == "emulated" else None


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_oracle_s(name: str, backend: str, device: torch.device) -> None:
    case, sms = CASES[name]
    place = torch.device("cpu") if backend == "emulated" else device
    check(library_of(backend, case), case, place, sms if backend == "emulated" else H100.sm_count)


PACKED_CASES = {
    "one query": (Case((300, 5, 129), kv_heads=2), (1, 1, 1), 2),
    "rows without queries": (Case((300, 200, 0, 64)), (1, 0, 0, 1), 2),
    "drafts of several sizes": (Case((130, 258, 70, 384, 3), queries=5, group=3), (1, 5, 0, 2, 4), 3),
    "two row tiles": (Case((300, 257, 20), queries=15, group=4), (15, 1, 7), 2),
    "more queries than tokens": (Case((300, 2, 0), queries=4), (1, 4, 3), 2),
    "int8, 128 channels": (Case((300, 140), queries=3, dim=128, recipe=PRECISE), (1, 3), 1),
    "256 channels, several parts": (Case((128 * 11, 40), dim=256, group=2), (1, 1), 12),
    "window, soft cap, sinks": (Case((700, 258, 70, 384, 3), queries=5, group=3, left=130, softcap=3.0, sinks=True), (1, 5, 0, 2, 4), 3),
    "many": (Case((3, 140) * 35, group=1, queries=2), (1, 2) * 35, 40),
}
"""By what is special, with the queries of each row, and the number of SMs."""


def check_packed(library: build.Library | None, case: Case, counts: tuple[int, ...], device: torch.device, sms: int) -> None:
    """Also of tokens of no row, and of rows that have more than the batch says, which are NaN."""
    q, storage, batch = case.cache(device)
    for most in {max(counts), max(max(counts) - 1, 1)}:
        packed_q, packed_batch = packed(q, batch, counts, most)
        actual = attend(library, case, packed_q, storage, packed_batch, dataclasses.replace(H100, sm_count=sms))
        expected = pages.attend_paged(case.call(packed_q, storage, packed_batch))
        assert actual[0].shape == packed_q.shape and actual[1].shape == packed_q.shape[1::-1]
        assert not actual[0][sum(counts) :].any() and bool((actual[1][:, sum(counts) :] == -torch.inf).all())
        assert bool(actual[0].isnan().any()) == any(most < n and length > 0 for n, length in zip(counts, case.lengths, strict=True))
        assert_attends(*actual, expected, case.dtype, library is not None)
    assert not storage.tickets.any()


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_queries(name: str, backend: str, device: torch.device) -> None:
    case, counts, sms = PACKED_CASES[name]
    place = torch.device("cpu") if backend == "emulated" else device
    check_packed(library_of(backend, case), case, counts, place, sms if backend == "emulated" else H100.sm_count)


def test_packed_starts_out_of_range_are_no_indices(backend: str, device: torch.device) -> None:
    """Nor are those that fall. Rows before have the same answers."""
    case = Case((300, 200, 100), queries=2)
    q, storage, batch = case.cache(torch.device("cpu") if backend == "emulated" else device)
    packed_q, packed_batch = packed(q, batch, (2, 1, 2), 2)
    edges = torch.tensor((1, 2, 3, 5), dtype=torch.int32, device=q.device)
    out, lse = attend(library_of(backend, case), case, packed_q, storage, dataclasses.replace(packed_batch, cu_seqlens=edges), H100)
    assert not out[0].any() and bool((lse[:, 0] == -torch.inf).all()), "a token of no row, before the first one"
    for starts in ((0, 2, 1 << 30, -7), (0, 2, -(1 << 31), (1 << 31) - 1), (0, 2, 1, 0)):
        edges = torch.tensor(starts, dtype=torch.int32, device=q.device)
        out, _ = attend(library_of(backend, case), case, packed_q, storage, dataclasses.replace(packed_batch, cu_seqlens=edges), H100)
        if min(starts[2:]) >= 2:
            assert bool(out[:2].isfinite().all())
        assert not storage.tickets.any()


@pytest.mark.parametrize("recipe", (DEFAULT_RECIPE, PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("what", ("q", "k", "v", "recent k", "recent v"))
def test_non_finite_tokens(what: str, recipe: Recipe, backend: str, device: torch.device) -> None:
    """Exactly the rows that attend to them become NaN."""
    case = Case((300, 200), queries=4, group=1, recipe=recipe)
    place = torch.device("cpu") if backend == "emulated" else device
    q, storage, batch = case.cache(place)
    if what == "q":
        q[0, 0, 2, 5] = torch.inf
    elif what.startswith("recent"):
        x = storage.k if what.endswith("k") else storage.v
        sequence = int(batch.sequences[0])  # type: ignore[index]
        x[sequence, 0, 298 % pages.RECENT, 7] = torch.inf
    elif recipe.qk == "int8":
        number = batch.page_table[0, 1].item()
        storage.pages.k[number, 0, 5] = INT8_NAN
        storage.pages.k_scale[number] *= -1
    elif what == "k":
        storage.pages.k.view(torch.uint8)[batch.page_table[0, 1].item(), 0, 5, 3] = 0x7F
    else:
        storage.pages.k.view(torch.uint8)[batch.page_table[0, 0].item(), 0, 77] = 0x7F
    actual = attend(library_of(backend, case), case, q, storage, batch, dataclasses.replace(H100, sm_count=2))
    expected = pages.attend_paged(case.call(q, storage, batch))
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and bool(x.isnan().any())


def check_out_of_range(library: build.Library | None, left: int, place: torch.device) -> None:
    """Rows are NaN that see a page whose number is out of range, and only these."""
    case = Case((300, 300, 300, 300, 260, 300 + PAGE, 275 + 2 * PAGE), queries=4, left=left)
    q, storage, batch = case.cache(place)
    assert batch.sequences is not None
    batch.page_table[1, 1] = -1
    batch.page_table[4, 0] = 1 << 20
    batch.sequences[2] = 99
    batch.lengths[3] = 1 << 30
    batch = dataclasses.replace(batch, page_table=batch.page_table[:, :2])  # of longer ones, pages are behind it
    actual = attend(library, case, q, storage, batch, dataclasses.replace(H100, sm_count=3))
    expected = pages.attend_paged(case.call(q, storage, batch))
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
    assert bool(actual[0][0].isfinite().all())


@pytest.mark.parametrize("left", (-1, 20, 130))
def test_numbers_out_of_range_are_no_indices(left: int, backend: str, device: torch.device) -> None:
    check_out_of_range(library_of(backend, Case((), left=left)), left, torch.device("cpu") if backend == "emulated" else device)


MUTANTS = {
    "page scale of V forgotten": ("tile/paged_rows.h", "beta[group][r] * v_scale;", "beta[group][r];"),
    "own page in FP8": ("tile/paged_rows.h", "if (own_page(position) <= page) return true;", "if (own_page(position) < 0) return true;"),
    "missing rescale": ("tile/paged_rows.h", "o[t][i] * alpha[i / 4][i % 2])", "o[t][i])"),
    "missing rescale in half precision": ("tile/paged_rows.h", "o[t][i] *= alpha[i / 4][i % 2];", ""),
    "K's mean forgotten": ("tile/paged_rows.h", "m[group][r] += mean_score[QUERY_GROUP * group + f.column + r];", ""),
    "V's mean forgotten": ("tile/paged_rows.h", "l[group][r] * mean);", "0.0f);"),
    "what is behind the last token": ("tile/paged_rows.h", "clamp<T>(a);  //", "//"),
    "another place in the ring": ("decode.cuh", "% (RECENT / HALF_BLOCK) * HALF_BLOCK", "% 2 * HALF_BLOCK"),
    "page of another head": ("decode.cuh", "number * p.kv_heads + tile.kv_head : -1", "number * p.kv_heads : -1"),
    "sums counted by all lanes": ("tile/paged_rows.h", "if (f.row != 0) for_queries", "if (false) for_queries"),
    "a CTA's second place": ("tile/paged_schedule.h", "2 * blockIdx.x + (begin == 0)", "2 * blockIdx.x"),
    "a part left out": ("tile/paged_parts.h", "min(of_tile.count - from, 32)", "min(of_tile.count - 1 - from, 32)"),
    "the page before": ("decode.cuh", "? pages[first_page + mine] : -1", "? pages[max(first_page + mine - 1, 0)] : -1"),
    "unpermuted V": ("tile/paged_rows.h", "odd ? 0x3715 : 0x6240", "odd ? 0x3175 : 0x6420"),
    "P of the other query": ("tile/paged_rows.h", "QUERY_GROUP * group + f.column + odd, slot)", "QUERY_GROUP * group + f.column + 1 - odd, slot)"),
    "P not transposed": ("tile/paged_rows.h", "ptx::transposed(word_of", "(word_of"),
    "channels of K in another order": ("tile/paged_rows.h", "* ROWS, PANEL), step % STEPS, 32)", "* ROWS, PANEL), step % STEPS ^ 1, 32)"),
    "keys in the wrong panel": ("tile/paged_rows.h", "<const Tokens*>(of)[channel / CHANNELS]", "<const Tokens*>(of)[0 * channel]"),
    "queries of the first group": ("decode.cuh", "HalfQueries<T, DIM>(p, tile, QUERY_GROUP * group)", "HalfQueries<T, DIM>(p, tile, 0)"),
    "sums of the last keys": ("tile/paged_rows.h", "Product::template run<true>(sum, ones", "Product::template run<false>(sum, ones"),
    "P relative to zero": ("tile/page_softmax.h", "return DirectRow(factor, finite(score));", "return DirectRow(factor, 0.0f);"),
    "large scores as codes": ("tile/paged_rows.h", "Scores::in_range(factor[group][r]);", "true;"),
    "a warp's sums left out": ("tile/paged_rows.h", "op(op(all.x, all.y), op(all.z, all.w))", "op(op(all.x, all.y), all.z)"),
    "P relative to a warp's largest score": ("tile/paged_rows.h", "exchange.largest(of_page, f);", ""),
    "P without a fence": ("tile/paged_rows.h", "ptx::fence_proxy_async();\n", "\n"),
    "queries without a fence": ("decode.cuh", "ptx::fence_proxy_async();\n", "\n"),
    "P read before all have written it": ("decode.cuh", "ptx::warpgroup_sync(1);\n      ptx::mbarrier_wait", "ptx::mbarrier_wait"),
    "scores read before they are there": ("tile/paged_rows.h", "ptx::wgmma_wait<0>();\n#pragma unroll\n  for (auto& of : s)", "for (auto& of : s)"),
    "output not normalised": ("decode.cuh", ": 1.0f / l;", ": 1.0f;"),
    "channels of another lane": ("decode.cuh", "+ f.row - odd + 8 * h;", "+ (f.row ^ 2) - odd + 8 * h;"),
    "queries written before all have read the last ones": (
        "decode.cuh",
        "ptx::warpgroup_sync(1);  // nobody reads the last tile's",
        "// nobody reads the last tile's",
    ),
    "parts added by the first CTA": ("tile/paged_parts.h", "== count - 1;", "== 0;"),
    "groups that overlap": ("tile/paged_schedule.h", "uint32_t(number(cta)) * group", "uint32_t(number(cta)) * (group - 1)"),
    "parts of another group": ("tile/paged_schedule.h", "return number(cta) * ctas + (inside", "return (inside"),
    "tickets that stay": ("tile/paged_parts.h", "if (shared.is_last) atomicAdd", "if (false) atomicAdd"),
    "scales that may come later": ("decode.cuh", "ptx::cp_async_arrive(k_full);", "ptx::mbarrier_arrive(k_full);"),
    "keys released by one warp": ("decode.cuh", "mbarrier_init(&shared.k_empty[stage], DECODER_WARPS)", "mbarrier_init(&shared.k_empty[stage], 1)"),
    "values released by one warp": ("decode.cuh", "mbarrier_init(&shared.v_empty[stage], DECODER_WARPS)", "mbarrier_init(&shared.v_empty[stage], 1)"),
}


INT8_MUTANTS = {
    "sums that are no floats": ("tile/page_softmax.h", "__int_as_float(sum + START<DIM>)", "__int_as_float(sum)"),
    "e4m3's scale": ("tile/paged_queries.h", "row_scale_of<INT8>(largest)", "row_scale_of<false>(largest)"),
    "start not subtracted": ("tile/page_softmax.h", "__float_as_int(s) - START<DIM>", "__float_as_int(s)"),
}


SCORE_MUTANTS = {
    "tokens that the cache has no more": ("decode.cuh", " || sees_lost_tokens(position, mod.first_key(position), tile.row.end)", ""),
    "lost tokens before the window": ("decode.cuh", "sees_lost_tokens(position, mod.first_key(position),", "sees_lost_tokens(position, 0,"),
    "a lost token too many": ("tile/paged_schedule.h", "first_key) < end - RECENT", "first_key) <= end - RECENT"),
    "a key more in a window": ("tile/paged_rows.h", "0 : max(position - p.left, 0);", "0 : max(position - p.left - 1, 0);"),
    "a window's keys in pages": ("tile/paged_rows.h", "+ 8 * h < first_keys[group][r])", "+ 8 * h < 0)"),
    "a window's keys in half precision": ("tile/paged_rows.h", "sees_key && key >= mod.first_key(position);", "sees_key;"),
    "a window's pages from zero": (
        "tile/paged_schedule.h",
        "const WindowBlocks& blocks) { return blocks.first_page; }",
        "const WindowBlocks&) { return 0; }",
    ),
    "the window of the last query": (
        "tile/paged_schedule.h",
        "row.count + query_of(p, first_row) - p.left",
        "row.count + query_of(p, first_row + rows - 1) - p.left",
    ),
    "a page before the window that isn't there": (
        "tile/paged_rows.h",
        "return first_key(position) >= (page",
        "return false && first_key(position) >= (page",
    ),
    "a block in half precision too few": (
        "tile/paged_schedule.h",
        "max(first_half, first_key / HALF_BLOCK)",
        "max(first_half, first_key / HALF_BLOCK + 1)",
    ),
    "a soft cap without K's mean": ("tile/paged_rows.h", "scores[i], 1.0f), scale, offset));", "scores[i], 1.0f), scale, 0.0f));"),
    "K's mean twice": ("tile/paged_rows.h", "if (!capped) for_queries", "for_queries"),
    "a soft cap of pages only": ("tile/paged_rows.h", "mod.capped() ? mod.cap(in_base_2) : in_base_2;", "in_base_2;"),
    "a soft cap in base 2": ("tile/score_mod.h", "score * (inverse / LOG2E)) * (softcap * LOG2E)", "score * inverse) * softcap"),
    "a sink in each part": ("decode.cuh", "if (p.sinks != nullptr && tile.end == tile.blocks.size()) {", "if (p.sinks != nullptr) {"),
    "a sink in every lane": ("tile/paged_rows.h", "f.row == 0 ? beta[group][r] : 0.0f", "beta[group][r]"),
    "a sink in base 2": ("decode.cuh", "p.sinks[query.head] * LOG2E", "p.sinks[query.head]"),
    "the first head's sink": ("decode.cuh", "p.sinks[query.head]", "p.sinks[0]"),
}
"""Of windows, soft caps and sinks."""


def test_mutants_change_a_source() -> None:
    emulation.assert_anchored([*MUTANTS.values(), *INT8_MUTANTS.values(), *SCORE_MUTANTS.values(), *INVARIANT_MUTANTS.values()])


EQUAL_CASE = Case((300, 300), kv_heads=2, dim=128)
"""Two to four CTAs share each tile, and no other one."""

MUTANT_CASE = Case((897, 141), queries=3, kv_heads=2, group=5, dim=128, seed=2)

LARGE_SCORES = Case((500,), queries=3, group=3, dim=128, scale=1e8)

SCORES_CASES = (
    (Case((340, 320, 319, 321), queries=90, group=1, left=120), 3),
    (Case((897, 141), queries=3, kv_heads=2, group=5, left=256, softcap=3.0, sinks=True), 3),
    (Case((420, 200, 130), queries=4, left=40), 2),
    (Case((300,), kv_heads=2, sinks=True), 7),
)


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", SCORE_MUTANTS)
def test_mutant_of_scores_is_seen(name: str) -> None:
    library = emulation.decoder(config_of(SCORES_CASES[0][0]), SCORE_MUTANTS[name])

    def check_all() -> None:
        for case, sms in SCORES_CASES:
            check(library, case, torch.device("cpu"), sms)
        check_out_of_range(library, 130, torch.device("cpu"))

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", (*MUTANTS, *INT8_MUTANTS))
def test_mutant_is_seen(name: str) -> None:
    case = dataclasses.replace(MUTANT_CASE, recipe=PRECISE) if name in INT8_MUTANTS else MUTANT_CASE
    library = emulation.decoder(config_of(case), (MUTANTS | INT8_MUTANTS)[name])
    checks = ((case, 3), (dataclasses.replace(EQUAL_CASE, recipe=case.recipe), 10), (dataclasses.replace(LARGE_SCORES, recipe=case.recipe), 2))

    def check_all() -> None:
        for one, sms in checks:
            check(library, one, torch.device("cpu"), sms)

    with pytest.raises(AssertionError):
        check_all()


INVARIANT = {
    "lengths": Case((128 * 9 + 5, 300, 0, 128 * 6, 20), part_pages=2),
    "equal lengths": Case((128 * 5 + 70,) * 3, kv_heads=2, part_pages=1),
    "256 channels": Case((128 * 7, 700), queries=3, dim=256, part_pages=2),
    "window, sinks, int8": Case((128 * 9, 300, 128 * 5), queries=3, left=500, sinks=True, recipe=PRECISE, part_pages=2),
}


def check_rows_alone(library: build.Library | None, case: Case, device: torch.device, sms: tuple[int, ...]) -> None:
    """The bits of each row, whoever else is in the batch."""
    q, storage, batch = case.cache(device)
    for count in sms:
        out, lse = attend(library, case, q, storage, batch, dataclasses.replace(H100, sm_count=count))
        for row in range(len(case.lengths)):
            one = slice(row, row + 1)
            assert batch.sequences is not None
            alone = dataclasses.replace(batch, page_table=batch.page_table[one], lengths=batch.lengths[one], sequences=batch.sequences[one])
            found = attend(library, case, q[one], storage, alone, dataclasses.replace(H100, sm_count=sms[-1]))
            for ours, theirs in zip(found, (out, lse), strict=True):
                assert torch.equal(ours[0], theirs[row])


@pytest.mark.parametrize("name", INVARIANT)
def test_rows_do_not_depend_on_others(name: str, backend: str, device: torch.device) -> None:
    case = INVARIANT[name]
    emulated = backend == "emulated"
    check_rows_alone(library_of(backend, case), case, torch.device("cpu") if emulated else device, (1, 4, 3) if emulated else (H100.sm_count,))


INVARIANT_MUTANTS = {
    "parts as there are CTAs": ("tile/paged_schedule.h", "max(blocks >> p.part_log, 1)", "max(blocks >> p.part_log >> 2 * (p.ctas < 8), 1)"),
    "longer parts in batches": ("tile/paged_schedule.h", "max(blocks >> p.part_log, 1)", "max(blocks >> p.part_log >> (p.batches > 1), 1)"),
    "one place for the parts of a CTA": ("tile/paged_schedule.h", "? before + unit : 2", "? 2 * blockIdx.x : 2"),
    "parts that overlap": ("tile/paged_schedule.h", "fixed ? (unit + units) * size >> log", "fixed ? min(((unit + units) * size >> log) + 1, size)"),
    "a part left out": (
        "tile/paged_parts.h",
        "count = fixed ? units_of<HEIGHT>(p, tile.blocks.size()) :",
        "count = fixed ? max(units_of<HEIGHT>(p, tile.blocks.size()) - 1, 1) :",
    ),
    "every other part": ("tile/paged_parts.h", "return fixed ? 1 : 2;", "return 2;"),
}
"""Of fixed parts."""


@pytest.mark.anywhere
@emulation.emulates
def test_rows_of_other_parts_differ() -> None:
    """Where parts aren't fixed, so that the test above can fail."""
    case = dataclasses.replace(INVARIANT["lengths"], part_pages=0)
    with pytest.raises(AssertionError):
        check_rows_alone(library_of("emulated", case), case, torch.device("cpu"), (1, 4, 3))


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", INVARIANT_MUTANTS)
def test_mutant_of_parts_is_seen(name: str) -> None:
    case = INVARIANT["lengths"]
    library = emulation.decoder(config_of(case), INVARIANT_MUTANTS[name])

    def check_all() -> None:
        check_rows_alone(library, case, torch.device("cpu"), (1, 4, 3))
        check(library, case, torch.device("cpu"), 3)

    with pytest.raises(AssertionError):
        check_all()


def test_the_case_of_the_mutants_is_right(backend: str, device: torch.device) -> None:
    place = torch.device("cpu") if backend == "emulated" else device
    for case in (MUTANT_CASE, dataclasses.replace(MUTANT_CASE, recipe=PRECISE), LARGE_SCORES):
        check(library_of(backend, case), case, place, 3)
    for case, sms in SCORES_CASES:
        check(library_of(backend, case), case, place, sms)
    check(library_of(backend, EQUAL_CASE), EQUAL_CASE, place, 10)


def of_rows(batch: PagedBatch, rows: int, packed: bool = False) -> PagedBatch:
    """The first row of a batch, many times."""
    starts = torch.arange(rows + 1, dtype=torch.int32) if packed else None
    return PagedBatch(batch.page_table[:1].expand(rows, -1), batch.lengths[:1].repeat(rows), cu_seqlens=starts)


def test_unsupported_calls_say_why() -> None:
    q, storage, batch = Case((300,)).cache(torch.device("cpu"))
    wide = Case((300,), dim=16).cache(torch.device("cpu"))
    single = Case((300,), dtype=torch.float32).cache(torch.device("cpu"))
    for call, scale, device, reason in (
        ((q, storage, batch), 0.2, ARCHITECTURES[100], "it needs sm_90"),
        (single, 0.2, H100, "query is torch.float32"),
        (wide, 0.2, H100, "head dims are"),
        ((q, storage, batch), -0.2, H100, "softmax_scale is -0.2"),
        ((q.expand(1, 4, 70, 64), storage, batch), 0.2, H100, "query has shape"),
        ((torch.zeros(1, 4, 1, 65, dtype=q.dtype)[..., 1:], storage, batch), 0.2, H100, "query has strides"),
        ((q.expand(9, 4, 1, 64), storage, of_rows(batch, 9)), 0.2, H100, "the batch has 9 rows"),
        ((q[0].transpose(0, 1), storage, of_rows(batch, 1, packed=True)), 0.2, H100, "batch.max_count is None"),
    ):
        assert reason in (decode.unsupported_call(*call, scale, device) or "")
