"""The prefill kernel, emulated where there is no Hopper GPU: its answers are the oracle's."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import emulation
from fp8attn import BackendUnavailable, KVCache, PagedBatch, Recipe, paged_ops, paged_sdpa, pages
from fp8attn.cuda import build, decode, prefill, run
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.pages import PAGE, RECENT, PagedCall
from fp8attn.recipe import DEFAULT_RECIPE, INT8_NAN, PRECISE
from fp8attn.triton import varlen
from fp8attn.triton.paged_attention import Outputs
from paging import assert_attends

H100 = ARCHITECTURES[90]


@dataclasses.dataclass(frozen=True)
class Case:
    """A chunk of several sequences at once: of each, its length with the chunk, and the number of tokens of the chunk."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    recipe: Recipe = DEFAULT_RECIPE
    new: bool = True
    q_bias: float = 0.0
    k_bias: float = 1.0
    k_gain: float = 2.0
    scale: float = 0.2
    left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0
    packed: bool = False
    behind: int = 0
    consumers: int = 0
    splits: int = 1

    def call(self, device: torch.device, out_of: int | None = None) -> PagedCall:
        """The call, with shuffled pages; what no token has written is NaN."""
        g = torch.Generator().manual_seed(self.seed)
        rows, longest, most = len(self.lengths), max(*self.lengths, 1), max(self.counts)
        total = sum(length // PAGE for length in self.lengths) + 3
        cache = KVCache(rows + 2, total, self.kv_heads, self.dim, recipe=self.recipe, dtype=self.dtype, device=device)
        for x in cache.storage.tensors():
            if x.dtype != torch.int32:
                x.view(torch.uint8).fill_(0x7F) if x.element_size() == 1 else x.fill_(torch.nan)
        heads = self.kv_heads * self.group
        q = torch.randn(rows, heads, most, self.dim, generator=g) + self.q_bias
        k, v = (torch.randn(rows, self.kv_heads, longest, self.dim, generator=g) for _ in range(2))
        k = (k * torch.logspace(-1, 1, longest, self.k_gain)[:, None] + self.k_bias).to(device, self.dtype)
        v = (v * 2.0 ** (torch.arange(longest) // PAGE % 3)[:, None] + 0.5).to(device, self.dtype)
        order = torch.randperm(total, generator=g).tolist()
        table = torch.full((rows, longest // PAGE + 1), 1 << 20, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            table[row, : length // PAGE] = torch.tensor([order.pop() for _ in range(length // PAGE)], dtype=torch.int32)
        numbers = torch.randperm(rows + 2, generator=g)[:rows].tolist()
        before, after, counts, sequences = (
            torch.tensor(x, dtype=torch.int32, device=device)
            for x in ([a - b for a, b in zip(self.lengths, self.counts, strict=True)], self.lengths, self.counts, numbers)
        )
        pages.append(cache.storage, k, v, PagedBatch(table.to(device), before, before, sequences), self.recipe)
        storage = dataclasses.replace(cache.storage, k=cache.storage.k.clone(), v=cache.storage.v.clone())
        new = tuple(torch.full((rows, self.kv_heads, most, self.dim), torch.nan, dtype=self.dtype, device=device) for _ in range(2))
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            for to, x in zip(new, (k, v), strict=True):
                to[row, :, :count] = x[row, :, length - count : length]
            q[row, :, count:] = torch.nan
        batch = PagedBatch(table.to(device), after, counts, sequences)
        pages.append(cache.storage, *new, batch, self.recipe)
        q = q.to(device, self.dtype)
        sinks = torch.linspace(-2, 3, heads, device=device) if self.sinks else None
        options = self.recipe, self.scale, (self.left, 0), self.softcap, sinks
        if self.packed:
            q, *new = (
                torch.cat(
                    [*(x[i, :, :n].transpose(0, 1) for i, n in enumerate(self.counts)), torch.full((self.behind, *x.shape[1:4:2]), torch.nan).to(x)]
                )
                for x in (q, *new)
            )
            starts = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32, device=device)
            new, batch = tuple(new), PagedBatch(table.to(device), after, None, sequences, None, starts)
        return PagedCall(q, storage if self.new else cache.storage, new if self.new else None, batch, *options)


def attend(library: build.Library | None, call: PagedCall, device: Device, out_dtype: torch.dtype = torch.float32, splits: int = 1):
    """Output and LSE of the kernel; `library` None: compiled. splits: of keys."""
    assert prefill.unsupported_call(call, H100) is None
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
            patch.setattr(prefill, "choose", lambda *_: next(iter(library.launchers)))
        tiling, table = dataclasses.replace(prefill.Tiling.of(call, device), splits=splits), None
        if call.batch.cu_seqlens is not None:
            table = varlen.table_of_rows(call, tiling.tile, 0, device_of(call.q.device))
        if splits == 1:
            unwritten = torch.full_like(call.q, 1e4, dtype=out_dtype), torch.full(pages.lse_shape(call.q), 1e4, device=call.q.device)
            return run.prefill_from_pages(call, device, tiling, out_dtype, table, unwritten)
        outputs = Outputs.empty(call.q, call.q.shape[-1], out_dtype, splits)
        for x in (outputs.out, outputs.lse, *outputs.parts()):
            x.fill_(1e4)
        run.prefill_from_pages(call, device, tiling, out_dtype, table, outputs.parts())
        outputs.combine(call.q.shape[-1])
        return outputs.out, outputs.lse


def check(library: build.Library | None, case: Case, device: torch.device, sms: int) -> None:
    call = case.call(device)
    actual = attend(library, call, dataclasses.replace(H100, sm_count=sms), splits=case.splits)
    assert_attends(*actual, pages.attend_paged(call), case.dtype, library is not None)


BELOW_ZERO = Case((500,), (300,), q_bias=1.0, k_bias=-3.0, recipe=Recipe(smooth_k=False))
"""Without K's mean, a row's scores may all be negative."""

CASES = {
    "a prompt": (Case((300,), (300,)), 2),
    "a chunk from within a page": (Case((420,), (250,)), 1),
    "a chunk from a page's start": (Case((400,), (144,)), 1),
    "all edges": (Case((0, 1, 64, 127, 128, 129, 192, 256, 257), (0, 1, 64, 127, 1, 2, 65, 128, 3)), 2),
    "half": (Case((300, 200), (200, 150), dtype=torch.float16, kv_heads=2), 2),
    "tokens of the cache": (Case((300, 130, 257), (65, 30, 2), new=False), 2),
    "more tokens than the cache keeps": (Case((340, 300, 70), (250, 100, 70), new=False), 2),
    "more tokens than the cache keeps, window, 256 channels": (Case((340,), (250,), new=False, left=20, dim=256, group=1), 1),
    "packed, more tokens than the cache keeps": (Case((340, 0, 300), (250, 0, 66), new=False, packed=True, behind=3), 2),
    "keys of two CTAs, more tokens than the cache keeps": (Case((500,), (250,), new=False, splits=2, group=1), 2),
    "three query heads": (Case((300,), (200,), group=3, kv_heads=2), 5),
    "128 channels": (Case((450, 140), (200, 140), dim=128), 1),
    "256 channels": (Case((300, 140), (200, 140), dim=256), 1),
    "256 channels, tokens of the cache": (Case((300,), (60,), dim=256, group=1, new=False), 1),
    "many pages": (Case((128 * 40 + 3,), (5,), group=1), 1),
    "more pages than a warp finds at once": (Case((128 * 66,), (130,), group=1), 2),
    "scores below zero": (BELOW_ZERO, 1),
    "scores that grow": (Case((700,), (200,), k_gain=30.0), 1),
    "large scores": (Case((500,), (300,), scale=1e8), 1),
    "int8": (Case((420, 140), (250, 140), recipe=PRECISE), 2),
    "int8, 128 channels, large scores": (Case((400,), (200,), dim=128, recipe=PRECISE, scale=1e6), 1),
    "int8, 256 channels": (Case((300,), (150,), dim=256, group=1, recipe=PRECISE), 1),
    "window": (Case((700, 300), (400, 150), left=200), 2),
    "window within the own page": (Case((420, 200), (300, 200), left=40), 1),
    "window of one page": (Case((700,), (450,), left=128, group=1), 1),
    "window of one token": (Case((300,), (200,), left=0), 1),
    "window longer than all": (Case((300,), (200,), left=1 << 40), 1),
    "window, 128 channels": (Case((500,), (330,), left=150, dim=128, group=1), 1),
    "window, 256 channels, sinks": (Case((400,), (300,), left=150, dim=256, group=1, sinks=True), 1),
    "window, int8, sinks": (Case((500, 140), (300, 140), left=150, recipe=PRECISE, sinks=True), 2),
    "sinks": (Case((300, 200, 5), (200, 150, 2), kv_heads=2, sinks=True), 2),
    "sinks, large scores": (Case((500,), (300,), scale=1e8, sinks=True), 1),
    "soft cap": (Case((420, 300), (250, 300), softcap=3.0), 2),
    "soft cap, 128 channels, window, sinks": (Case((500,), (330,), left=150, softcap=5.0, dim=128, group=1, sinks=True), 1),
    "soft cap, 256 channels": (Case((400,), (200,), dim=256, group=1, softcap=3.0), 1),
    "soft cap, int8": (Case((420, 140), (250, 140), recipe=PRECISE, softcap=3.0), 2),
    "soft cap, large scores": (Case((500,), (300,), scale=1e8, softcap=30.0), 1),
    "soft cap, scores below zero": (dataclasses.replace(BELOW_ZERO, softcap=5.0), 1),
    "tiles of several heads": (Case((300, 200, 70), (130, 64, 65), group=3, kv_heads=2), 2),
    "short units": (Case((300, 200, 15, 5), (16, 13, 15, 0), group=6, kv_heads=2), 2),
    "short units of two heads": (Case((300, 200, 20), (20, 32, 17), group=3, kv_heads=2), 2),
    "short units, one consumer": (Case((300, 140, 16), (9, 16, 3), group=5, kv_heads=2, consumers=1, sinks=True, left=100), 3),
    "short units, 256 channels, one consumer": (Case((300, 140), (9, 16), group=5, dim=256, consumers=1), 3),
    "short units, 128 channels, int8, a soft cap": (Case((300, 140), (24, 11), group=4, dim=128, consumers=2, recipe=PRECISE, softcap=4.0), 1),
    "packed, short units": (Case((300, 0, 200, 16, 5), (16, 0, 13, 16, 5), group=6, kv_heads=2, packed=True, behind=3), 2),
    "packed, short units of two heads": (Case((300, 200, 20), (20, 32, 17), group=3, packed=True, consumers=1, sinks=True), 2),
    "packed, tiles of several heads": (Case((300, 0, 200, 70), (130, 0, 64, 65), group=3, kv_heads=2, packed=True, behind=9), 2),
    "packed, one consumer, 256 channels": (Case((300, 0, 140), (70, 0, 128), group=2, dim=256, consumers=1, packed=True, behind=9), 2),
    "keys of two CTAs": (Case((128 * 9 + 3, 300, 5), (20, 40, 5), group=3, kv_heads=2, splits=2, sinks=True), 3),
    "keys of five CTAs": (Case((128 * 7 + 3, 128, 0), (130, 64, 0), group=1, splits=5, dtype=torch.float16), 4),
    "keys of more CTAs than pages": (Case((300, 140), (9, 16), group=2, dim=128, splits=4, consumers=1, recipe=PRECISE), 3),
    "keys of three CTAs, window, 256 channels": (Case((128 * 6 + 70,), (30,), left=300, dim=256, splits=3), 2),
    "keys of two CTAs, soft cap": (Case((128 * 5,), (30,), softcap=3.0, group=1, splits=2), 2),
    "packed, keys of three CTAs": (Case((128 * 6, 0, 200, 5), (20, 0, 13, 5), group=3, kv_heads=2, packed=True, behind=5, splits=3, sinks=True), 3),
    "packed, keys of two CTAs, window": (Case((128 * 6 + 3, 300), (150, 64), left=200, packed=True, splits=2), 3),
    "two consumers": (Case((300, 200, 5), (200, 150, 2), consumers=2), 2),
    "two consumers, 128 channels, int8": (Case((450, 140), (200, 140), dim=128, recipe=PRECISE, consumers=2), 1),
    "packed, two consumers, 128 channels": (Case((420, 0, 5, 300), (250, 0, 5, 300), dim=128, packed=True, behind=7, consumers=2), 2),
    "packed, soft cap": (Case((420, 0, 200, 5, 300), (250, 0, 60, 5, 300), packed=True, behind=7, softcap=3.0), 2),
    "packed": (Case((420, 0, 200, 5, 300), (250, 0, 60, 5, 300), packed=True, behind=7), 2),
    "packed, all edges": (Case((0, 1, 64, 127, 128, 129, 192, 256, 257), (0, 1, 64, 127, 1, 2, 65, 128, 3), packed=True), 2),
    "packed, half": (Case((300, 200), (200, 150), dtype=torch.float16, kv_heads=2, packed=True), 2),
    "packed, tokens of the cache": (Case((300, 130, 257), (65, 30, 2), new=False, packed=True), 2),
    "packed, 128 channels, int8": (Case((450, 140), (200, 140), dim=128, recipe=PRECISE, packed=True, behind=3), 1),
    "packed, 256 channels, window, sinks": (Case((400, 200), (300, 150), left=150, dim=256, group=1, sinks=True, packed=True), 1),
    "packed, many rows": (Case((3,) * 40 + (150,), (3,) * 40 + (150,), packed=True), 3),
    "no means": (Case((300,), (200,), recipe=Recipe(smooth_k=False, smooth_v=False)), 1),
}
"""By what is special, with the number of SMs that share the work."""


@pytest.fixture(params=(pytest.param("emulated", marks=pytest.mark.anywhere), "cuda"))
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "cuda" and (device.type != "cuda" or device_of(device).arch != 90):
        pytest.skip("needs a Hopper GPU")
    return request.param


def config_of(case: Case) -> prefill.PrefillConfig:
    """The instance with so many consumers; 0: with the most."""
    able = prefill.able(case.dim, case.recipe.qk, case.packed, case.softcap > 0)
    return next(config for config in able if case.consumers in (0, config.consumers))


def library_of(backend: str, case: Case) -> build.Library | None:
    return emulation.prefiller(config_of(case)) if backend == "emulated" else None


def place_of(backend: str, device: torch.device) -> torch.device:
    return torch.device("cpu") if backend == "emulated" else device


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_oracle_s(name: str, backend: str, device: torch.device) -> None:
    case, sms = CASES[name]
    check(library_of(backend, case), case, place_of(backend, device), sms if backend == "emulated" else H100.sm_count)


@pytest.mark.parametrize("recipe", (DEFAULT_RECIPE, PRECISE), ids=("e4m3", "int8"))
@pytest.mark.parametrize("what", ("q", "page of k", "new k", "new v", "recent k", "recent v"))
def test_non_finite_tokens(what: str, recipe: Recipe, backend: str, device: torch.device) -> None:
    """Exactly the rows that attend to them become NaN."""
    case = Case((420, 200), (250, 100), group=1, recipe=recipe)
    call = case.call(place_of(backend, device))
    assert call.new is not None and call.batch.sequences is not None
    number, sequence, first = int(call.batch.page_table[0, 1]), int(call.batch.sequences[0]), 420 - 250
    if what == "q":
        call.q[0, 0, 70, 5] = torch.inf
        call.q[0, 0, 130, 5] = -torch.inf
    elif what == "page of k" and recipe.qk == "int8":
        call.storage.pages.k[number, 0, 5] = INT8_NAN
        call.storage.pages.k_scale[number] *= -1
    elif what == "page of k":
        call.storage.pages.k.view(torch.uint8)[number, 0, 5] = 0x7F
    elif what.startswith("new"):
        call.new[what == "new v"][0, 0, 300 - first, 3] = torch.inf if what == "new v" else -torch.inf
    else:
        (call.storage.k if what.endswith("k") else call.storage.v)[sequence, 0, 140 % RECENT, 7] = torch.nan
    actual = attend(library_of(backend, case), call, dataclasses.replace(H100, sm_count=2))
    expected = pages.attend_paged(call)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan()) and bool(x.isnan().any()) and not bool(x.isnan().all())
    assert_attends(*actual, expected, case.dtype, backend == "emulated")


@pytest.mark.parametrize("left", (-1, 20, 130))
@pytest.mark.parametrize("packed", (False, True))
def test_numbers_out_of_range_are_no_indices(packed: bool, left: int, backend: str, device: torch.device) -> None:
    """Rows are NaN that see a page whose number is out of range, and only these."""
    case = Case((400, 400, 400, 400, 300, 600), (200, 200, 200, 200, 150, 200), group=1, packed=packed, left=left)
    call = case.call(place_of(backend, device))
    assert call.batch.sequences is not None
    call.batch.page_table[1, 1] = -1
    call.batch.page_table[4, 0] = 1 << 20
    call.batch.sequences[2] = 99
    call.batch.lengths[3] = 1 << 30
    # pages that others have are behind it
    call = dataclasses.replace(call, batch=dataclasses.replace(call.batch, page_table=call.batch.page_table[:, :3]))
    actual = attend(library_of(backend, case), call, dataclasses.replace(H100, sm_count=3))
    expected = pages.attend_paged(call)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
    assert bool(actual[0][0].isfinite().all())


def test_rows_with_more_packed_queries_than_allowed(backend: str, device: torch.device) -> None:
    case = Case((300, 400), (200, 50), group=1, packed=True)
    call = case.call(place_of(backend, device))
    call = dataclasses.replace(call, batch=dataclasses.replace(call.batch, max_count=199))
    out, _ = attend(library_of(backend, case), call, dataclasses.replace(H100, sm_count=2))
    assert bool(out[:200].isnan().all()) and bool(out[200:].isfinite().all())


MIXED = Case((300, 420, 8, 0, 200, 258, 3), (1, 250, 8, 0, 60, 9, 3), group=2, packed=True, behind=4)
"""Rows of few queries, 8 of two heads that share keys, and of many."""


def mixed_call(device: torch.device, **options) -> PagedCall:
    """The call, whose new tokens are in the cache, too."""
    case = dataclasses.replace(MIXED, **options)
    return dataclasses.replace(case.call(device), storage=dataclasses.replace(case, new=False).call(device).storage)


@pytest.fixture
def of_batches(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where calls of batches with few and many queries run, of head dim 64."""
    monkeypatch.setattr(paged_ops, "device_of", lambda _: H100)
    if backend == "emulated":
        monkeypatch.setattr(varlen, "table_of_rows", lambda *call, table_of_rows=varlen.table_of_rows: table_of_rows(*call[:-1], device_of(device)))
        monkeypatch.setattr(build, "unavailable", lambda *_: None)
        of = {type(config): make(config) for make, config in ((emulation.prefiller, config_of(MIXED)), (emulation.decoder, decode.INSTANCES[0]))}
        monkeypatch.setattr(build, "load_with", lambda config, *_: of[type(config)])
        monkeypatch.setattr(prefill, "choose", lambda *_: config_of(MIXED))
    return place_of(backend, device)


def test_batches_of_few_and_many_queries(backend: str, of_batches: torch.device) -> None:
    call = mixed_call(of_batches)
    actual = paged_ops._prefill(call, dataclasses.replace(H100, sm_count=3), torch.float32)
    assert_attends(*actual, pages.attend_paged(call), MIXED.dtype, backend == "emulated")


def test_rows_of_few_queries_are_the_decode_kernel_s(backend: str, of_batches: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel doesn't write stays as it was."""
    call, unwritten = mixed_call(of_batches), 7.0
    few, starts = paged_ops.few_queries(call), [0, *itertools.accumulate(MIXED.counts)]
    assert few == 8

    def filled(*given, empty=run.empty_results):
        return [x.fill_(unwritten) for x in empty(*given)]

    monkeypatch.setattr(run, "empty_results", filled)
    sms, expected = dataclasses.replace(H100, sm_count=3), pages.attend_paged(call)[0]
    by_decode = run.attend_to_pages(call, sms, torch.float32, few)
    tiling = prefill.Tiling.of(call, sms, may_split=False)
    table = varlen.table_of_rows(call, tiling.tile, few, device_of(of_batches))
    by_prefill = run.prefill_from_pages(call, sms, tiling, torch.float32, table, tuple(torch.full_like(x, unwritten) for x in by_decode))
    for count, (begin, end) in zip(MIXED.counts, itertools.pairwise(starts), strict=True):
        mine, other = (by_decode, by_prefill) if count <= few else (by_prefill, by_decode)
        torch.testing.assert_close(mine[0][begin:end], expected[begin:end], atol=0.2, rtol=0.1)
        assert bool((other[0][begin:end] == unwritten).all()) and bool((other[1][:, begin:end] == unwritten).all())


def test_new_tokens_of_few_queries_are_in_the_cache_before_attention(backend: str, of_batches: torch.device) -> None:
    """The kernel for few queries reads them there."""
    call = MIXED.call(of_batches)
    assert paged_ops.few_queries(call) == 8
    sequences, pages_of_cache = call.storage.k.shape[0], call.storage.pages.k.shape[0]
    cache = KVCache(sequences, pages_of_cache, MIXED.kv_heads, MIXED.dim, recipe=MIXED.recipe, dtype=MIXED.dtype, device=of_batches)
    for to, x in zip(cache.storage.tensors(), call.storage.tensors(), strict=True):
        to.copy_(x)
    found = paged_sdpa(call.q, cache, call.batch, call.new, scale=MIXED.scale, return_lse=True, out_dtype=torch.float32, backend="cuda")
    assert_attends(*found, pages.attend_paged(call), MIXED.dtype, backend == "emulated")


@pytest.mark.parametrize(
    "options, few",
    (
        (dict(), 8),
        (dict(group=4), 4),
        (dict(counts=(3, 3, 3, 0, 3, 3, 3)), 8),
        (dict(lengths=(300, 420), counts=(150, 150)), 0),  # all rows have as many
        (dict(sinks=True), 8),
        (dict(left=100), 8),
        (dict(softcap=20.0), 8),
    ),
)
def test_of_how_many_queries_the_decode_kernel_has_rows(options: dict, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_ops, "device_of", lambda _: H100)
    monkeypatch.setattr(build, "unavailable", lambda *_: None)
    call = mixed_call(torch.device("cpu"), **options, behind=0)
    counts = call.batch.cu_seqlens.diff().tolist()  # type: ignore[union-attr]
    assert paged_ops.few_queries(dataclasses.replace(call, batch=dataclasses.replace(call.batch, max_count=max(counts)))) == few


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_every_dtype_of_the_output(dim: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    case = Case((300,), (150,), dim=dim)
    call = case.call(place_of(backend, device))
    out, lse = attend(library_of(backend, case), call, dataclasses.replace(H100, sm_count=2), dtype)
    assert out.dtype == dtype
    assert_attends(out.float(), lse, pages.attend_paged(call), case.dtype, backend == "emulated")


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_outputs_are_float32_outputs_rounded(dim: int, backend: str, device: torch.device) -> None:
    """On a GPU of many tiles on each SM: no output is overwritten before it is stored."""
    lengths = (200, 140) if backend == "emulated" else (1500, 1024, 2048)
    case = Case(lengths, lengths, dim=dim, kv_heads=1 if backend == "emulated" else 8)
    call = case.call(place_of(backend, device))
    library, sms = library_of(backend, case), dataclasses.replace(H100, sm_count=2 if backend == "emulated" else H100.sm_count)
    expected = attend(library, call, sms)[0].to(case.dtype)
    for _ in range(1 if backend == "emulated" else 5):
        out = attend(library, call, sms, case.dtype)[0]
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_strided_tokens(backend: str, device: torch.device) -> None:
    """Queries, keys and values as views of projections, (B, S, H, D)."""
    case = Case((300, 200), (200, 150), kv_heads=2)
    call = case.call(place_of(backend, device))
    assert call.new is not None
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, *call.new))
    strided = dataclasses.replace(call, q=q, new=(k, v))
    sms = dataclasses.replace(H100, sm_count=2)
    for x, y in zip(attend(library_of(backend, case), call, sms), attend(library_of(backend, case), strided, sms), strict=True):
        assert torch.equal(x, y)


CHUNKS = (100, 61, 200, 39)


def test_chunks_agree_with_the_whole_and_with_decode(backend: str, device: torch.device) -> None:
    """Chunks differ by the order of sums, and a decode step by what tensor cores round, and by P of the own page."""
    case, place = Case((400,), (400,), group=2, dim=64), place_of(backend, device)
    sms, whole = dataclasses.replace(H100, sm_count=2), case.call(place)
    assert whole.new is not None
    expected = attend(library_of(backend, case), whole, sms)
    done, found = 0, []
    for count in CHUNKS:
        part = slice(done, done + count)
        new = tuple(x[:, :, part] for x in whole.new)
        lengths = torch.full_like(whole.batch.lengths, done + count)
        # the cache as it is before the chunk
        cache = dataclasses.replace(whole.storage, k=whole.storage.k.clone(), v=whole.storage.v.clone())
        before = dataclasses.replace(whole.batch, lengths=torch.full_like(lengths, done), counts=None)
        pages.append(cache, whole.new[0][:, :, :done], whole.new[1][:, :, :done], before, case.recipe)
        batch = dataclasses.replace(whole.batch, lengths=lengths, counts=None)
        found.append(attend(library_of(backend, case), dataclasses.replace(whole, q=whole.q[:, :, part], new=new, batch=batch, storage=cache), sms))
        done += count
    for x, parts in zip(expected, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), x, rtol=1e-5, atol=1e-5)

    cache = dataclasses.replace(whole.storage, k=whole.storage.k.clone(), v=whole.storage.v.clone())
    pages.append(cache, *whole.new, dataclasses.replace(whole.batch, counts=None), case.recipe)
    last = dataclasses.replace(whole, q=whole.q[:, :, -1:], new=None, storage=cache, batch=dataclasses.replace(whole.batch, counts=None))
    decoder = emulation.decoder(decode.choose(cache, last.scoring)) if backend == "emulated" else None
    with pytest.MonkeyPatch.context() as patch:
        if decoder is not None:
            patch.setattr(build, "load_with", lambda *_: decoder)
        step = run.attend_to_pages(last, sms, torch.float32)
    out, lse = (x[:, :, -1:] for x in expected)
    assert_attends(*step, (out, lse), case.dtype, backend == "emulated")


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("left", (-1, 600))
def test_later_tokens_change_no_bit(dim: int, left: int, backend: str, device: torch.device) -> None:
    """Their keys, values and queries. Some of these are in one warp with earlier ones. Scores of a first page raise the
    base of their sums, and don't raise that of earlier ones."""
    case, place = Case((700,), (300,), group=1, dim=dim, left=left, k_gain=0.25), place_of(backend, device)
    sms, call = dataclasses.replace(H100, sm_count=2), case.call(place)
    assert call.new is not None
    expected = attend(library_of(backend, case), call, sms)
    q, k, v = (x.clone() for x in (call.q, *call.new))
    q[:, :, 150:] *= -3.0
    k[:, :, 150:], v[:, :, 150:] = 7.0, -3.0
    changed = attend(library_of(backend, case), dataclasses.replace(call, q=q, new=(k, v)), sms)
    for x, y in zip(expected, changed, strict=True):
        assert torch.equal(x[:, :, :150], y[:, :, :150])


MUTANTS = {
    "page scale of V forgotten": ("prefill_rows.h", "of_values[0] = beta[0] * v_scale,", "of_values[0] = beta[0],"),
    "own page in FP8": ("tile/paged_tiles.h", "position(row) / KEYS * KEYS : 0", "position(row) : 0"),
    "a page too many": ("prefill.cuh", "if (page >= pages_of_rows.whole || page", "if (page"),
    "missing rescale": ("tile/page_softmax.h", "    rescale(alpha);\n", ""),
    "missing rescale in half precision": ("prefill_rows.h", "rows.rescale(alpha);", ""),
    "sums that don't shrink": ("tile/page_softmax.h", "l[r] *= alpha[r];", ""),
    "K's mean forgotten": ("prefill_rows.h", "softmax.end_pages(r, C.capped ? 0.0f : mean_score[f.row + 8 * r]);", "softmax.end_pages(r, 0.0f);"),
    "K's mean forgotten before pages": (
        "prefill_rows.h",
        "softmax.begin_pages(r, C.capped ? 0.0f : mean_score[f.row + 8 * r]);",
        "softmax.begin_pages(r, 0.0f);",
    ),
    "own pages with V's mean": ("prefill_rows.h", "of[1] = fmaf(-softmax.l[r], mean.y, of[1]) * inverse.y;", "of[1] = of[1] * inverse.y;"),
    "own pages without V's scale": ("prefill_rows.h", "of[0]) * inverse.x,", "of[0]),"),
    "own pages with scales of later tokens": (
        "prefill_rows.h",
        "if (sees[r]) of[0] = fmaf(-softmax.l[r]",
        "of[0] = fmaf(-softmax.l[r]",
    ),
    "the next tile read too early": ("prefill_producer.h", "ptx::mbarrier_wait(&shared.next_written, round & 1);", ""),
    "the offset of P kept": ("tile/page_softmax.h", "limit[r] += mean_score - P_OFFSET;", "limit[r] += mean_score;"),
    "V's mean forgotten": ("prefill_rows.h", "of[1] = fmaf(of[1], scale.y, softmax.l[r] * mean.y);", "of[1] = of[1] * scale.y;"),
    "scales of another channel": ("prefill_rows.h", "i / 4 * 8 + f.column, i / 2 % 2", "i / 4 * 8, i / 2 % 2"),
    "sums with V's scale": ("prefill_rows.h", "fmaf(fresh[N + 2 * r], beta[r],", "fmaf(fresh[N + 2 * r], of_values[r],"),
    "no ones behind V": ("tile/attend.h", "= FOUR_ONES;", "= 0;"),
    "P relative to zero": ("tile/page_softmax.h", "return DirectRow(factor, finite(score));", "return DirectRow(factor, 0.0f);"),
    "scores below zero relative to zero": ("tile/page_softmax.h", "if (!INT8 && __any_sync(~0u, negative)) {", "if (false) {"),
    "larger scores only where some are below zero": ("tile/page_softmax.h", "__any_sync(~0u, negative | grows())", "__any_sync(~0u, negative)"),
    "large scores as codes": ("tile/page_softmax.h", "Scores::in_range(fmaxf(factor[0], factor[1])));", "true);"),
    "sums of two threads": ("tile/page_softmax.h", "lanes < 4; lanes *= 2) sum +=", "lanes < 2; lanes *= 2) sum +="),
    "tokens of other pages": ("prefill_rows.h", "8 * j + i >= first && 8 * j + i <= last", "8 * j + i <= last"),
    "later tokens": ("prefill_rows.h", "8 * j + i >= first && 8 * j + i <= last", "8 * j + i >= first"),
    "a key before the window": ("prefill.cuh", "? first : 0;", "? first - 1 : 0;"),
    "no window in the own page": ("prefill_rows.h", "max(position / KEYS * KEYS, position - left) - before", "position / KEYS * KEYS - before"),
    "a soft cap without K's mean": ("prefill.cuh", "{mean[0] / LOG2E, mean[8] / LOG2E}", "{0.0f, 0.0f}"),
    "a soft cap with another row's mean": ("prefill.cuh", "mean[8] / LOG2E}", "mean[0] / LOG2E}"),
    "K's mean twice under a soft cap": (
        "prefill_rows.h",
        "softmax.end_pages(r, C.capped ? 0.0f : mean_score[f.row + 8 * r]);",
        "softmax.end_pages(r, mean_score[f.row + 8 * r]);",
    ),
    "a soft cap of pages only": ("prefill_rows.h", "C.capped ? cap_score(", "false ? cap_score("),
    "windows of the first row": ("tile/paged_tiles.h", "edge = min((first_key_of(p, last)", "edge = min((first_key_of(p, tile.position(first_row))"),
    "a page of the window left out": (
        "tile/paged_tiles.h",
        "begin = min(first_key_of(p, tile.position(first_row)) / KEYS,",
        "begin = min(first_key_of(p, tile.position(first_row)) / KEYS + 1,",
    ),
    "pages before the tile's first one counted": (
        "prefill_producer.h",
        "const int behind = ring.stage + pages();",
        "const int behind = ring.stage + tile.pages;",
    ),
    "sink of the first head": ("prefill_rows.h", "p.sinks[head]", "p.sinks[0]"),
    "no sink in the LSE": ("prefill_rows.h", "limit[r] + log2f(l[r]);", "rows.softmax.limit[r] + log2f(rows.softmax.l[r]);"),
    "another place in the ring": ("prefill_producer.h", "token % RECENT", "token % (RECENT - 64)"),
    "new tokens one too early": ("prefill_producer.h", "is_new = token >= edge", "is_new = token > edge"),
    "page of another head": ("prefill_producer.h", "(exists ? tile.kv_head : 0)", "0"),
    "the page before": ("prefill_producer.h", "params.table_stride + mine)", "params.table_stride + max(mine - 1, 0))"),
    "scale of the same page": ("prefill_producer.h", "__shfl_sync(~0u, k_scale, i + 1)", "__shfl_sync(~0u, k_scale, i)"),
    "pages found at once not counted": ("prefill_producer.h", "found = page % PageLoads<C>::FOUND", "found = page % 32"),
    "half blocks without a fence": ("prefill_producer.h", "ptx::fence_proxy_async();\n", "\n"),
    "half blocks that may come later": ("prefill_producer.h", "ptx::cp_async_wait();", ""),
    "new blocks that may come later": ("prefill_producer.h", "ptx::mbarrier_wait(&shared.half_taken[taken.stage], taken.phase);", ""),
    "new blocks one token too late": ("prefill_producer.h", "block * HALF_BLOCK - edge;", "block * HALF_BLOCK - edge + 1;"),
    "new keys as values": ("prefill_producer.h", "params.new_v_map);", "params.new_k_map);"),
    "tokens that are not finite": ("prefill_producer.h", "if (Blocks::may_have_nonfinite(k, v)) ", "if (false) "),
    "half blocks before all threads have copied": (
        "prefill_producer.h",
        "ptx::threads_sync<Blocks::threads>(PrefillShape<C>::producer_barrier);\n",
        "\n",
    ),
    "queries without a fence": ("prefill.cuh", "shared.mean_score[consumer]);\n    ptx::fence_proxy_async();\n", "shared.mean_score[consumer]);\n"),
    "the wrong queries in half precision": ("prefill.cuh", "tensor_row(tile) + row, head,", "tensor_row(tile), head,"),
    "V of another half": ("prefill_rows.h", "ptx::operand_of(channels, step, 16 * HALF_ROW)", "ptx::operand_of(channels, step ^ 1, 16 * HALF_ROW)"),
    "keys released by one warp": (
        "prefill.cuh",
        "mbarrier_init(&shared.k_empty[stage], 4 * C.consumers)",
        "mbarrier_init(&shared.k_empty[stage], 1)",
    ),
    "values released by one warp": (
        "prefill.cuh",
        "mbarrier_init(&shared.v_empty[stage], 4 * C.consumers)",
        "mbarrier_init(&shared.v_empty[stage], 1)",
    ),
}


PACKED_MUTANTS = {
    "queries of the first row": ("prefill.cuh", "tensor_row(tile) * p.q_strides[2]", "0 * p.q_strides[2]"),
    "queries in half precision of the first row": ("prefill.cuh", "tensor_row(tile) + row, head,", "row, head,"),
    "new tokens of the first row": ("prefill_producer.h", "int64_t(tensor_row(tile) + token - edge)", "int64_t(token - edge)"),
    "new blocks of the first row": (
        "prefill_producer.h",
        "map, barrier, panel * HALF_ROW, tensor_row(tile) + first",
        "map, barrier, panel * HALF_ROW, first",
    ),
    "outputs of the next row": ("prefill_rows.h", "return tile.end;", "return p.q_length;"),
    "outputs in the first row": ("prefill_rows.h", "output(p, place, first_row, row_end", "output(p, place, range.first_row, row_end"),
    "LSE of the first row": ("prefill_rows.h", "const int row = first_row + f.row % OUTPUT_ROWS", "const int row = range.first_row + f.row"),
    "numbers of the first row": ("tile/paged_tiles.h", "BatchRow row(params, batch, rows);", "BatchRow row(params, 0, rows);"),
    "all packed queries are the row's": ("tile/paged_tiles.h", "BatchRow row(params, batch, rows);", "BatchRow row(params, batch, p.q_length);"),
    "a tile twice, and the last one never": ("tile/paged_tiles.h", "(1 + index) * TILE_PITCH", "max(index, 1) * TILE_PITCH"),
    "queries of no row stay": ("prefill_producer.h", "query = p.tile_table[int(TableHeader::end)] + blockIdx.x", "query = p.q_length"),
    "what grids before write read too early": ("prefill.cuh", "ptx::wait_for_grids_before();  // one of which writes lengths", ""),
    "one head of a group": ("tile/paged_tiles.h", "kv_head = first + inside % together,", "kv_head = first,"),
}
"""Of packed queries."""

UNIT_MUTANTS = {
    "consumers with the same rows": ("tile/paged_tiles.h", "head += of_consumer;", ""),
    "a head too many": ("tile/paged_tiles.h", "if (head >= heads_end)", "if (head > heads_end)"),
    "next rows that are the same": ("tile/paged_tiles.h", "head = first_head, first_row += tile_rows;", "head = first_head;"),
    "keys of the first consumer's rows": ("tile/paged_tiles.h", "last = min(first_row + tile_rows,", "last = min(tile.first_row + tile_rows,"),
    "tiles that begin with the first head": ("tile/paged_tiles.h", "{batch, unit % sharing(), kv_head", "{batch, 0, kv_head"),
    "queries in half precision of the first head": ("tile/paged_tiles.h", "of(i, first.head + i,", "of(i, first.head,"),
    "short units of one head": ("tile/paged_tiles.h", "return head + (row >> unit_log);", "return head;"),
    "short units with the rows of others": ("tile/paged_tiles.h", "(row & (1 << unit_log) - 1)", "row"),
}
"""Of tiles whose rows are those of several heads."""

SPLIT_MUTANTS = {
    "pages of all splits": ("tile/paged_tiles.h", "to.first_page = first_page + every * split / splits,", "to.first_page = first_page,"),
    "own pages in each split": ("tile/paged_tiles.h", "if (tile.is_last) first_half", "first_half"),
    "sinks in each split": ("prefill_rows.h", "!tile.is_last || ", ""),
    "sums of another split": ("prefill_rows.h", "2 * split * rows + row", "split * rows + row"),
    "outputs of the first split": ("prefill_rows.h", "tile.split * batches + batch, head", "batch, head"),
    "a split too few": ("tile/paged_tiles.h", "position >= every * heads * splits", "position >= every * heads"),
}
"""Of CTAs that split keys."""

PAGES_FIRST_MUTANTS = {
    "consumers ahead of the producer": ("prefill.cuh", "    if constexpr (!S::halves_first) wait_for_keys(ring);\n", ""),
    "queries that are still codes": ("prefill.cuh", "      ptx::warpgroup_sync(1 + consumer);  // nobody reads codes of queries any more\n", ""),
}
"""Of instances that attend to pages before their rows' own pages."""

INT8_MUTANTS = {
    "start not subtracted": ("tile/page_softmax.h", "__float_as_int(s) - START<DIM>", "__float_as_int(s)"),
    "e4m3's scale of queries": ("prefill.cuh", "Queries<C.head_dim, C.int8>", "Queries<C.head_dim, false>"),
}


def test_mutants_change_a_source() -> None:
    emulation.assert_anchored([mutant for mutants, _ in ALL_MUTANTS for mutant in mutants.values()])


MUTANT_CASES = (
    (Case((128 * 33 + 70, 300), (130, 150), kv_heads=2, group=1, k_gain=30.0, seed=1), 2),
    (BELOW_ZERO, 1),
    (Case((1,) * 9 + (70,), (1,) * 9 + (70,)), 1),
    (Case((500,), (300,), scale=1e8), 1),
    (Case((700, 300), (400, 150), left=200, sinks=True), 2),
    (Case((420,), (300,), left=40), 1),
    (Case((420,), (250,), softcap=3.0), 1),
)


SPLIT_CASE = Case((128 * 9 + 3, 300, 5), (20, 40, 5), group=3, kv_heads=2, splits=2, sinks=True), 3

UNIT_CASES = (
    (Case((300, 200), (200, 130), kv_heads=2), 2),
    (Case((300, 200, 70), (130, 64, 65), group=3, kv_heads=2), 2),
    (Case((300, 200, 15, 5), (16, 13, 15, 0), group=6, kv_heads=2, sinks=True), 2),
    (Case((300,), (30,), group=3, kv_heads=2, consumers=1), 2),
)


PACKED_CASE = Case((420, 0, 200, 5, 300), (250, 0, 60, 5, 300), packed=True, behind=7, kv_heads=2), 2

PAGES_FIRST_CASES = (
    (Case((1,) * 40 + (70,), (1,) * 40 + (70,), dim=256, group=1), 1),
    (Case((300, 200), (200, 130), dim=256), 1),
)

INT8_CASE = dataclasses.replace(MUTANT_CASES[0][0], recipe=PRECISE), 2

LOST_MUTANTS = {
    "tokens that the cache has no more": ("prefill.cuh", " || (params.new_k == nullptr && sees_lost_tokens(", " || (false && sees_lost_tokens("),
    "lost tokens in place of new ones": ("prefill.cuh", " || (params.new_k == nullptr && sees_lost_tokens(", " || (sees_lost_tokens("),
    "lost tokens before the window": (
        "tile/paged_schedule.h",
        "max(position / KEYS * KEYS, first_key) < end - RECENT",
        "position / KEYS * KEYS < end - RECENT",
    ),
    "a lost token too many": ("tile/paged_schedule.h", "first_key) < end - RECENT", "first_key) <= end - RECENT"),
    "a lost token too few": ("tile/paged_schedule.h", "first_key) < end - RECENT", "first_key) < end - RECENT - 1"),
}

LOST_CASES = (
    (Case((340,), (250,), new=False, left=20), 2),
    (Case((320, 319, 321), (90, 90, 90), new=False, group=1), 2),
    (Case((400,), (300,), group=1), 1),
)

ALL_MUTANTS = (
    (MUTANTS, MUTANT_CASES),
    (LOST_MUTANTS, LOST_CASES),
    (PAGES_FIRST_MUTANTS, PAGES_FIRST_CASES),
    (INT8_MUTANTS, (INT8_CASE,)),
    (PACKED_MUTANTS, (PACKED_CASE,)),
    (UNIT_MUTANTS, UNIT_CASES),
    (SPLIT_MUTANTS, (SPLIT_CASE,)),
)
"""With the cases that see them."""


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("name", [name for mutants, _ in ALL_MUTANTS for name in mutants])
def test_mutant_is_seen(name: str) -> None:
    mutants, cases = next(found for found in ALL_MUTANTS if name in found[0])

    def check_all() -> None:
        for case, sms in cases:
            check(emulation.prefiller(config_of(case), mutants[name]), case, torch.device("cpu"), sms)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.thorough  # as the mutants are
def test_the_cases_of_the_mutants_are_right(backend: str, device: torch.device) -> None:
    for case, sms in (case for _, cases in ALL_MUTANTS for case in cases):
        check(library_of(backend, case), case, place_of(backend, device), sms)


def test_unsupported_calls_say_why() -> None:
    call = Case((300,), (200,)).call(torch.device("cpu"))
    assert call.new is not None
    k, v = call.new
    shifted = torch.zeros(1, 2, 200, 65, dtype=call.q.dtype)[..., 1:]
    two_heads = Case((300,), (200,), kv_heads=2).call(torch.device("cpu"))
    shared = tuple(x.expand(1, 2, 200, 64) for x in (k, v))  # by the heads, without a copy
    for other, device, reason in (
        (call, ARCHITECTURES[100], "it needs sm_90"),
        (Case((300,), (200,), dtype=torch.float32).call(torch.device("cpu")), H100, "query is torch.float32"),
        (Case((300,), (200,), dim=32).call(torch.device("cpu")), H100, "head dims are [32]"),
        (Case((300,), (200,), recipe=Recipe(rotate=0)).call(torch.device("cpu")), H100, "the recipe has rotate=0"),
        (dataclasses.replace(call, softmax_scale=-0.1), H100, "softmax_scale is -0.1"),
        (dataclasses.replace(call, q=call.q[:, :, :0]), H100, "query has shape"),
        (dataclasses.replace(call, q=shifted), H100, "query has strides"),
        (dataclasses.replace(call, new=(k, v.float())), H100, "value is torch.float32"),
        (dataclasses.replace(two_heads, new=shared), H100, "key has a stride of 0 bytes, TMA needs multiples of 16"),
    ):
        assert reason in (prefill.unsupported_call(other, device) or "")


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize(
    "dim, heads, queries, consumers",
    (
        (128, 32, 256, 1),
        (128, 32, 512, 2),
        (128, 32, 640, 3),
        (128, 32, 1024, 2),
        (128, 32, 2048, 3),
        (64, 8, 2048, 2),
        (64, 32, 16_384, 3),
        (256, 16, 256, 1),
        (256, 16, 512, 1),
        (256, 16, 1024, 2),
    ),
)
def test_tiles_are_as_large_as_leaves_no_sm_idle(dim: int, heads: int, queries: int, consumers: int, packed: bool) -> None:
    work = prefill.Work(1, queries, queries if packed else None, heads, 8, 0)
    chosen = prefill.choose(work, dim, "int8", H100)
    assert (chosen.head_dim, chosen.consumers, chosen.int8, chosen.packed) == (dim, consumers, True, packed)


@pytest.mark.parametrize("most, unit", ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 64), (5000, 64)))
def test_a_short_unit_has_all_queries_of_a_head(most: int, unit: int) -> None:
    assert prefill.unit_of(most) == unit


@pytest.mark.parametrize(
    "work, rows, tiles",
    (
        (prefill.Work(2, 130, None, 8, 4, 0), 64, 2 * 4 * 6),
        (prefill.Work(2, 130, None, 8, 4, 0), 128, 2 * 4 * 3),
        (prefill.Work(2, 130, None, 6, 2, 0), 128, 2 * 2 * 5),
        (prefill.Work(3, 16, None, 12, 2, 0), 64, 3 * 2 * 2),  # four heads of 16 rows, and two
        (prefill.Work(3, 16, None, 12, 2, 0), 128, 3 * 2),
        (prefill.Work(3, 20, None, 6, 2, 0), 64, 3 * 2 * 2),
        (prefill.Work(3, 130, 390, 8, 4, 0), 128, 3 * 4 * 3),  # packed, all rows have the most
        (prefill.Work(3, 1000, 1100, 8, 4, 0), 128, 4 * (18 + 3)),
    ),
)
def test_numbers_of_tiles(work: prefill.Work, rows: int, tiles: int) -> None:
    assert work.tiles(rows) == tiles


@pytest.mark.parametrize(
    "work, rows, splits",
    (
        (prefill.Work(1, 16, None, 32, 8, 256), 64, 16),  # 8 tiles
        (prefill.Work(1, 16, None, 32, 8, 64), 64, 8),  # of few keys
        (prefill.Work(1, 16, None, 32, 8, 15), 64, 1),
        (prefill.Work(1, 64, None, 32, 8, 256), 64, 4),
        (prefill.Work(1, 64, None, 32, 8, 256), 128, 8),
        (prefill.Work(32, 64, None, 32, 8, 256), 128, 1),
    ),
)
def test_keys_are_split_where_sms_would_be_idle(work: prefill.Work, rows: int, splits: int) -> None:
    assert work.splits(rows, H100) == splits


def test_a_window_has_few_keys_to_split() -> None:
    call = Case((128 * 40,), (20,), left=300).call(torch.device("cpu"))
    assert prefill.Work.of(call).pages == 4 and prefill.Work.of(dataclasses.replace(call, window=(-1, 0))).pages == 41


@pytest.mark.parametrize(
    "options, required, expected",
    (
        (dict(counts=(200,)), False, "prefill"),
        (dict(counts=(200,)), True, "prefill"),
        (dict(counts=(4,), new=False), False, "decode"),
        (dict(counts=(4,), new=False), True, "decode"),
        (dict(counts=(4,)), False, "prefill"),
        (dict(counts=(20,), new=False), False, "prefill"),
        (dict(counts=(20,), new=False), True, "prefill"),
        (dict(counts=(3,), new=False, group=16), False, "decode"),
        (dict(counts=(4,), new=False, group=16), False, "prefill"),
        (dict(counts=(20,), new=False, recipe=Recipe(rotate=0)), False, "decode"),
        (dict(counts=(20,), recipe=Recipe(rotate=0)), False, None),
    ),
)
def test_which_kernel_a_call_gets(options: dict, required: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case((300,), **options).call(torch.device("cpu"))
    monkeypatch.setattr(paged_ops, "device_of", lambda _: H100)
    monkeypatch.setattr(build, "unavailable", lambda *_: None)
    for name, function in (("decode", "attend_to_pages"), ("prefill", "prefill_from_pages")):
        monkeypatch.setattr(run, function, lambda *_, name=name: name)
    assert paged_ops._by_cuda("cuda" if required else "auto", call, torch.float32) == expected


def test_a_kernel_that_is_required_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case((300,), (200,), dtype=torch.float32).call(torch.device("cpu"))
    monkeypatch.setattr(paged_ops, "device_of", lambda _: H100)
    assert paged_ops._by_cuda("auto", call, torch.float32) is None
    with pytest.raises(BackendUnavailable, match=r"cuda: query is torch.float32 .*; use backend='triton' or 'auto'"):
        paged_ops._by_cuda("cuda", call, torch.float32)
