"""The CUDA kernel that appends tokens to a KV cache, on a CPU too: the definition's bytes, and which calls it takes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
from forked import in_another_process
from fp8attn import PRECISE, BackendUnavailable, KVCache, PagedBatch, Recipe, paged_ops, pages
from fp8attn import triton as triton_kernels
from fp8attn.cuda import append, build, general_quantize, run
from fp8attn.cuda.build import BuildError
from fp8attn.device import ARCHITECTURES, Device, device_of
from fp8attn.pages import EVERY_ROW, PAGE, Stage, Storage
from fp8attn.recipe import DEFAULT_RECIPE
from paging import RECIPES, bits

H100 = ARCHITECTURES[90]
SMS = 2
"""Of the emulated GPU: CTAs have several heads each."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Appends to the sequences of a cache.

    Attributes:
        chunks: for each append, the numbers of new tokens of the rows.
        packed: tokens are packed; otherwise rows have as many as the longest, and counts.
        apart: pages and last tokens are appended by calls of their own; first the tokens of rows with up to `most` new ones.
        layout: of what tokens are views: (B, H, S, D), (B, S, H, D), or rows with others between them.
        wide: numbers differ so much in size that their sums depend on the order.
        bad: number that is in some keys and values, or None.
        extreme: sums of some keys' channels overflow unless they are divided before, and other keys are subnormal.
    """

    chunks: tuple[tuple[int, ...], ...]
    dim: int = 64
    value_dim: int = 64
    kv_heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    recipe: Recipe = DEFAULT_RECIPE
    packed: bool = False
    apart: bool = False
    layout: str = "bhsd"
    wide: bool = False
    bad: float | None = None
    seed: int = 0
    extreme: bool = False
    most: int = EVERY_ROW

    @property
    def rows(self) -> int:
        return len(self.chunks[0])

    def storage(self, device: torch.device) -> Storage:
        """Of a cache that nobody has written to."""
        total = sum(sum(counts) // PAGE for counts in zip(*self.chunks, strict=True)) + 2
        cache = KVCache(self.rows + 1, total, self.kv_heads, self.dim, self.value_dim, self.recipe, self.dtype, device)
        for x in cache.storage.tensors()[:-1]:
            x.view(torch.uint8).fill_(0x5A)
        return cache.storage

    def tokens(self, device: torch.device) -> list[torch.Tensor]:
        """Keys and values of all tokens, (B, H, S, D). Values have means, and differ in size by page and channel."""
        g = torch.Generator().manual_seed(self.seed)
        longest = max(map(sum, zip(*self.chunks, strict=True)))
        k, v = (torch.randn(self.rows, self.kv_heads, longest, dim, generator=g) for dim in (self.dim, self.value_dim))
        k = k * torch.logspace(-1, 1, longest)[:, None] + 1
        channels = torch.arange(self.value_dim)
        v = (v * 2.0 ** ((torch.arange(longest) + 64) // PAGE % 4 * 3 - 6)[:, None] + 0.5 * (channels % 3)) * 2.0 ** -(channels % 7)
        if self.wide:
            k, v = (x * 2.0 ** torch.randint(-10, 11, x.shape, generator=g) for x in (k, v))
        if self.extreme:
            limits, token = torch.finfo(self.dtype), torch.arange(longest)[:, None] % (2 * PAGE)
            tiny, largest = k * limits.smallest_normal / 16, k.sign() * limits.max
            mixed = torch.where(k.abs() > 1.5, largest, tiny)
            k = torch.where(token >= PAGE, tiny, torch.where(token % 9 == 3, largest, torch.where(token % 9 == 4, mixed, k)))
        if self.bad is not None:
            k.view(-1)[self.seed % 50 :: 1009 * self.dim // 16 + 1] = self.bad
            v.view(-1)[self.seed % 90 + 7 :: 811 * self.value_dim // 16 + 1] = self.bad
        return [x.to(device, self.dtype) for x in (k, v)]

    def batches(self, device: torch.device) -> list[PagedBatch]:
        """Of each append: shuffled pages, and sequences in any order."""
        g = torch.Generator().manual_seed(self.seed)
        ends = list(itertools.accumulate(self.chunks, lambda before, counts: tuple(map(sum, zip(before, counts, strict=True)))))
        order = torch.randperm(sum(end // PAGE for end in ends[-1]) + 2, generator=g).tolist()
        table = torch.full((self.rows, max(ends[-1]) // PAGE + 1), 1 << 20, dtype=torch.int32)
        for row, end in enumerate(ends[-1]):
            table[row, : end // PAGE] = torch.tensor([order.pop() for _ in range(end // PAGE)], dtype=torch.int32)
        sequences = torch.randperm(self.rows + 1, generator=g)[: self.rows].int().to(device)
        found = []
        for end, counts in zip(ends, self.chunks, strict=True):
            lengths, of_rows = (torch.tensor(x, dtype=torch.int32, device=device) for x in (end, counts))
            edges = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
            found.append(
                PagedBatch(table.to(device), lengths, None if self.packed else of_rows, sequences, None, edges if self.packed else None),
            )
        return found

    def chunk(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """The tokens of an append. Those that aren't real are NaN."""
        begins, counts = [sum(of_row[:index]) for of_row in zip(*self.chunks, strict=True)], self.chunks[index]
        parts = [x[row, :, begin : begin + count] for row, (begin, count) in enumerate(zip(begins, counts, strict=True))]
        if self.packed:
            return torch.cat(parts, 1).transpose(0, 1).contiguous()
        padded = x.new_full((self.rows, self.kv_heads, max(counts), x.shape[3]), torch.nan)
        for row, part in enumerate(parts):
            padded[row, :, : part.shape[1]] = part
        if self.layout == "bshd":
            return padded.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat((padded, padded), 3)[..., : x.shape[3]] if self.layout == "padded" else padded


def append_by(library: build.Library | None, storage: Storage, tokens: Any, batch: PagedBatch, recipe: Recipe, stage: Stage) -> None:
    """By the kernel; `library` None: compiled."""
    device = dataclasses.replace(H100, sm_count=SMS) if library is not None else device_of(storage.k.device)
    assert append.unsupported_call(storage, *tokens, batch, device) is None
    with pytest.MonkeyPatch.context() as patch:
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        run.append_to_pages(storage, tokens, batch, recipe, device, stage)


def assert_same(actual: Storage, expected: Storage) -> None:
    for index, (x, y) in enumerate(zip(actual.tensors(), expected.tensors(), strict=True)):
        assert torch.equal(bits(x), bits(y)), f"{int((bits(x) != bits(y)).sum())} bytes of tensor {index} differ"
    assert not actual.tickets.any()


def check(library: build.Library | None, case: Case, device: torch.device, **changes: Any) -> None:
    """Every tensor of the cache, after every append. `changes`: of the batches."""
    expected, actual, tokens = case.storage(device), case.storage(device), case.tokens(device)
    for index, batch in enumerate(case.batches(device)):
        batch = dataclasses.replace(batch, **changes)
        key, value = (case.chunk(x, index) for x in tokens)
        apart = Stage(tokens=False), Stage(pages=False, most=case.most), Stage(pages=False)
        for stage in apart if case.apart else (Stage(),):
            pages.append(expected, key, value, batch, case.recipe, stage)
            append_by(library, actual, (key, value), batch, case.recipe, stage)
            assert_same(actual, expected)


@pytest.fixture(params=(pytest.param("emulated", marks=pytest.mark.anywhere), "cuda"))
def backend(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "cuda" and (device.type != "cuda" or general_quantize.unsupported_device(device_of(device))):
        pytest.skip("needs a GPU of sm_80 or later")
    return request.param


def config_of(case: Case) -> append.AppendConfig:
    return append.choose(case.storage(torch.device("cpu")))


def library_of(backend: str, case: Case) -> build.Library | None:
    return emulation.appender(config_of(case)) if backend == "emulated" else None


def place_of(backend: str, device: torch.device) -> torch.device:
    return torch.device("cpu") if backend == "emulated" else device


CASES = {
    "token by token": Case(((126,), (1,), (1,), (1,), (126,), (1,))),
    "at once": Case(((420, 130),), kv_heads=2),
    "pages' edges": Case(((127, 128, 129, 0), (1, 128, 127, 256), (64, 65, 66, 192)), dim=16, value_dim=16),
    "few tokens, many heads": Case(((120,) * 9, (4, 8, 12, 16, 64, 7, 8, 9, 0)), dim=16, value_dim=24, kv_heads=8),
    "128 channels": Case(((200, 10), (60, 130)), dim=128, value_dim=128, dtype=torch.float16),
    "256 channels": Case(((150,), (120,)), dim=256, value_dim=256),
    "D is not Dv": Case(((150, 40), (120, 300)), dim=192, value_dim=40, layout="bshd"),
    "16 channels beside 256": Case(((290,),), dim=16, value_dim=256),
    "rotation of 256": Case(((280,),), dim=256, value_dim=16, recipe=Recipe(rotate=256)),
    "no rotation, no means": Case(((300,),), dim=72, value_dim=72, recipe=Recipe(rotate=0, smooth_k=False, smooth_v=False)),
    "negative zeros": Case(((300,),), recipe=Recipe(rotate=0, smooth_k=False, smooth_v=False), bad=-0.0),
    "int8": Case(((270, 150), (20, 120)), dim=128, recipe=PRECISE, layout="padded"),
    "packed": Case(((130, 5, 0, 200), (1, 200, 64, 60)), packed=True, kv_heads=2),
    "few packed": Case(((127, 100, 1), (1, 30, 20), (0, 0, 60)), packed=True, kv_heads=3),
    "more rows than a warp": Case(((4,) * 40, (130,) * 40), dim=16, value_dim=16, packed=True),
    "last tokens apart": Case(((300, 100), (65, 129)), apart=True, most=65),
    "few last tokens apart": Case(((100, 128), (40, 0), (64, 60)), apart=True, packed=True, most=60),
    "sums that depend on the order": Case(((260,), (10,)), dim=32, wide=True),
    "64 channels of keys": Case(((150,), (120,)), dim=64, value_dim=136),
    "64 channels of values": Case(((150,), (120,)), dim=128, value_dim=64, layout="bshd"),
    "192 channels": Case(((150,), (120,)), dim=192, value_dim=128, recipe=PRECISE, bad=torch.nan),
    "sums that overflow": Case(((300,), (100,)), dim=128, value_dim=128, extreme=True),
    "sums that overflow, packed": Case(((260, 130),), packed=True, recipe=PRECISE, extreme=True, bad=torch.inf),
    "sums of halves": Case(((300,),), dim=256, dtype=torch.float16, extreme=True),
    "sums that overflow in teams": Case(((300,),), dim=96, value_dim=96, extreme=True),
    "parts whose sums depend on the order": Case(((260,), (10,)), dim=128, value_dim=128, wide=True, seed=5),
    "NaN": Case(((300,), (120,)), bad=torch.nan, seed=1),
    "infinities": Case(((300,), (120,)), dim=128, value_dim=128, dtype=torch.float16, bad=-torch.inf, seed=2),
    "NaN of int8": Case(((300, 260), (120, 10)), dim=40, recipe=Recipe(qk="int8", rotate=16), bad=torch.nan, seed=3),
    "infinities without rotation": Case(((300, 260),), recipe=Recipe(qk="int8", rotate=0), bad=torch.inf, seed=4),
}
"""By what is special."""


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_definition_s(name: str, backend: str, device: torch.device) -> None:
    check(library_of(backend, CASES[name]), CASES[name], place_of(backend, device))


dims = st.integers(2, 32).map(lambda n: 8 * n)


@st.composite
def cases(draw) -> Case:
    rows = draw(st.integers(1, 3))
    counts = st.tuples(*[st.one_of(st.sampled_from((0, 1, 64, 65, 127, 128, 129)), st.integers(0, 300))] * rows)
    chunks = draw(st.lists(counts.filter(any), min_size=1, max_size=3))
    dim = draw(dims)
    return Case(
        tuple(chunks), dim, draw(st.one_of(st.just(dim), dims)), draw(st.integers(1, 2)), draw(st.sampled_from(append.DTYPES)), draw(RECIPES),
        draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(("bhsd", "bshd", "padded"))), draw(st.booleans()),
        draw(st.sampled_from((None, -0.0, torch.nan, torch.inf))), draw(st.integers(0, 1000)), draw(st.booleans()),
    )  # fmt: skip


@pytest.mark.anywhere
@emulation.emulates
@given(case=cases())
def test_emulated_it_writes_the_bytes_of_the_definition(case: Case) -> None:
    check(library_of("emulated", case), case, torch.device("cpu"))


@pytest.mark.gpu
@given(case=cases())
def test_writes_the_bytes_of_the_definition(device: torch.device, case: Case) -> None:
    check(None, case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("at once", "256 channels", "int8", "packed", "NaN", "few packed"))
def test_kernels_agree(name: str, device: torch.device) -> None:
    """With Triton's, through the cache that users have."""
    case, tokens = CASES[name], CASES[name].tokens(device)
    caches = [KVCache(case.rows + 1, 12, case.kv_heads, case.dim, case.value_dim, case.recipe, case.dtype, device) for _ in range(3)]
    reason = general_quantize.unsupported_device(device_of(device))
    if reason is not None:
        pytest.skip(reason)
    for index, batch in enumerate(case.batches(device)):
        parts = [case.chunk(x, index) for x in tokens]
        for cache, backend in zip(caches, ("cuda", "auto", "triton"), strict=True):
            cache.append(parts[0], parts[1], batch, backend=backend)
    for cache in caches[:-1]:
        assert_same(cache.storage, caches[-1].storage)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", (DEFAULT_RECIPE, PRECISE), ids=("e4m3", "int8"))
def test_same_bits_a_hundred_times(recipe: Recipe, device: torch.device) -> None:
    """A bit that moves is a race."""
    case = Case(((1500, 900), (60, 100)), kv_heads=4, dim=128, value_dim=128, recipe=recipe)
    if general_quantize.unsupported_device(device_of(device)) is not None:
        pytest.skip("needs sm_80 or later")
    tokens, batches, different = case.tokens(device), case.batches(device), torch.zeros((), dtype=torch.int64, device=device)
    first: Storage | None = None
    for _ in range(100):
        storage = case.storage(device)
        for index, batch in enumerate(batches):
            append_by(None, storage, tuple(case.chunk(x, index) for x in tokens), batch, recipe, Stage())
        first = storage if first is None else first
        for x, y in zip(storage.tensors(), first.tensors(), strict=True):
            different += (bits(x) != bits(y)).sum()
    assert int(different) == 0


OUT_OF_RANGE = Case(((200,) * 5,), kv_heads=2)


def test_numbers_out_of_range_are_no_indices(backend: str, device: torch.device) -> None:
    """Few tokens and many; of pages, the first one and another."""
    place = place_of(backend, device)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=place)

    table = ints(-1, 3, 0, 1 << 20, 4, 1, 2, -7, 5, 6).view(5, 2)
    for case in (OUT_OF_RANGE, dataclasses.replace(OUT_OF_RANGE, chunks=((60,) * 5,) * 5)):
        library = library_of(backend, case)
        check(library, case, place, page_table=table)
        check(library, case, place, sequences=ints(0, -1, 6, 1 << 30, 3))
        check(library, case, place, lengths=ints(0, -3, 1 << 30, 40, (1 << 31) - 1))
        check(library, case, place, counts=ints(-5, 1 << 30, 7, 0, 1000))
        check(library, case, place, page_table=table[:, :1])
    for case in (Case(((200, 90, 50),), packed=True), Case(((20, 30, 14),), packed=True)):
        check(library_of(backend, case), case, place, cu_seqlens=ints(-4, 20, 20, 1 << 30))


def read_guarded() -> None:
    """Where nothing behind tokens and numbers can be read."""
    for case in (CASES["at once"], CASES["few packed"], CASES["packed"], CASES["256 channels"]):
        storage, tokens, library = case.storage(torch.device("cpu")), case.tokens(torch.device("cpu")), emulation.appender(config_of(case))
        for index, batch in enumerate(case.batches(torch.device("cpu"))):
            guarded = PagedBatch(*(None if x is None else emulation.guarded(x) for x in batch.tensors()[:4]))  # type: ignore[arg-type]
            if batch.cu_seqlens is not None:
                guarded = dataclasses.replace(guarded, cu_seqlens=emulation.guarded(batch.cu_seqlens))
            parts = tuple(emulation.guarded(case.chunk(x, index)) for x in tokens)
            append_by(library, storage, parts, guarded, case.recipe, Stage())


@pytest.mark.anywhere
@emulation.emulates
def test_emulated_reads_nothing_behind_its_operands() -> None:
    in_another_process("import test_append; test_append.read_guarded()")


MUTANTS = {
    "tokens of the ring one too late": ("append_tokens.h", "recent + token % RECENT * dim", "recent + (token + 1) % RECENT * dim"),
    "the first new token is an old one": ("append.cuh", "token < tokens.old ?", "token <= tokens.old ?"),
    "another page of the table": ("append.cuh", "p.table_stride + of.page)", "p.table_stride + of.page / 2)"),
    "page of another head": ("append.cuh", "int64_t(facts.number) * p.kv_heads + facts.page.head.head;", "int64_t(facts.number) * p.kv_heads;"),
    "statistics of a page that isn't the first": ("append.cuh", "measures = of.page == 0 &&", "measures = of.page < 2 &&"),
    "no statistics without the page": ("append.cuh", "if (measures) appended.", "if (measures && shared.facts.number >= 0) appended."),
    "page scale forgotten": ("append.cuh", "__fmul_rn(shared.v_scale[channel], scale)", "shared.v_scale[channel]"),
    "small channels": ("append.cuh", "__uint_as_float(shared.largest_channel), LEAST_CHANNEL", "__uint_as_float(shared.largest_channel), 0.0f"),
    "runs that go on": ("append.cuh", "words_of(shared.values) + run * RUN * WORDS + word", "words_of(shared.values) + word"),
    "channels exchanged": ("append.cuh", "word)] = of_channel[c]", "word)] = of_channel[1 - c]"),
    "no zero for what isn't finite": ("append.cuh", "if constexpr (CAREFUL) x =", "if constexpr (false) x ="),
    "keys of non-finite values": ("append.cuh", "bool hidden = is_hidden(row_of_part());", "bool hidden = false;"),
    "keys of non-finite values, in teams": ("append.cuh", "bool hidden = !values_are_finite &&", "bool hidden = false &&"),
    "infinite keys": ("append.cuh", "return largest < INFINITE ? largest : without_infinities(rows);", "return largest;"),
    "parts among lanes": ("tile/row_team.h", "distance * CHUNK < part; distance *= 2", "distance * CHUNK < part / 2; distance *= 2"),
    "infinities in extremes": ("append.cuh", "if (not_finite<T>(low) | not_finite<T>(high)) {", "if (false) {"),
    "lanes in another order": ("append.cuh", "first = i * OF_WORD + member,", "first = i * OF_WORD + member % 2 * 2 + member / 2,"),
    "values before they have come": ("append.cuh", "    ptx::cp_async_wait_but<1>();\n", ""),
    "keys before they have come": ("append.cuh", "    ptx::cp_async_wait_but<0>();\n", ""),
    "a warp's largest magnitude": ("append.cuh", "raise(shared.largest_value,", "if (threadIdx.x >= 32) raise(shared.largest_value,"),
    "a channel's sign": ("append.cuh", "SIGNS >> (i + 1) & 1", "SIGNS >> i & 1"),
    "sums that overflow": ("append.cuh", "if (before != 1.0f) break;", "break;"),
    "sums that become NaN": ("append.cuh", "ptx::max_nan(largest, ", "fmaxf(largest, "),
    "int8 keys that aren't finite elsewhere": ("append.cuh", "if (INT8 && !(largest < INFINITE)) hide(row);", ""),
    "another swizzle of keys": ("append.cuh", "[swizzled(channel / CHUNK + i, row)]", "[swizzled(channel / CHUNK + i, row + 4)]"),
    "another swizzle of keys in sums": ("append.cuh", "swizzled(word / 4, first)", "swizzled(word / 4, member)"),
    "another swizzle of codes": ("append.cuh", "swizzled(lane, 4 * i + lane / 8)", "swizzled(lane, lane / 8)"),
    "codes before a warp has stored them": ("append.cuh", "    __syncwarp();\n    uint8_t* to", "    uint8_t* to"),
    "codes before all are encoded": (
        "append.cuh",
        "      encode_values<true>(v_scale);\n    __syncthreads();\n",
        "      encode_values<true>(v_scale);\n",
    ),
    "a page before it is known": ("append.cuh", "    }\n    __syncthreads();\n    append_page<", "    }\n    append_page<"),
    "rows that are left out": ("append_tokens.h", "if (numbers.exists && numbers.count <= p.most)", "if (numbers.exists)"),
    "rows with the most tokens": ("append_tokens.h", "numbers.count <= p.most", "numbers.count < p.most"),
    "too few tokens copied": ("append_tokens.h", "max(of.old, of.end - RECENT)", "max(of.old, of.end - RECENT + 1)"),
    "tokens of a head's first row": ("append_tokens.h", "of.begin * strides[2]", "0"),
    "places counted from the first row": ("append_tokens.h", "max(place - first_place<SCALE_BLOCK>(begin_of(p, row), row), 0)", "place"),
    "any sequence's row": ("tile/packed.h", "  return first;", "  return 0;"),
    "tokens before pages": ("append_tokens.h", "  if (p.pages) next(", "  if (p.tokens) next(AppendStep::tokens, heads);\n  if (p.pages) next("),
}

MUTANT_CASES = (
    Case(((250, 70), (10, 200), (62, 60)), kv_heads=2, bad=torch.inf, seed=9),
    Case(((300, 20, 300),), packed=True, dtype=torch.float16),
    Case(((130,),), dim=16, value_dim=16, wide=True, bad=-torch.inf, seed=3),
    Case(((258,),), dim=128, recipe=PRECISE, bad=torch.nan, extreme=True),
    Case(((126,) * 5, (3,) * 5), dim=16, value_dim=16, kv_heads=4, recipe=Recipe(qk="int8", rotate=0)),
    Case(((70, 65, 66),), dim=16, value_dim=16, apart=True, packed=True, most=65),
)


def check_mutant_cases(*mutations: emulation.Mutation) -> None:
    for case in MUTANT_CASES:
        check(emulation.appender(config_of(case), *mutations), case, torch.device("cpu"))
    case = dataclasses.replace(OUT_OF_RANGE, chunks=((60,) * 5,) * 5)
    table = torch.tensor([-1, 3, 0, 1 << 20, 4, 1, 2, -7, 5, 6], dtype=torch.int32).view(5, 2)
    check(emulation.appender(config_of(case), *mutations), case, torch.device("cpu"), page_table=table)


def test_mutants_change_a_source() -> None:
    emulation.assert_anchored(MUTANTS.values())


@pytest.mark.anywhere
@emulation.emulates
def test_the_cases_of_the_mutants_are_right() -> None:
    check_mutant_cases()


QUICK = ("page scale forgotten", "the first new token is an old one")
"""Of the default tier."""


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in MUTANTS])
def test_mutant_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        check_mutant_cases(MUTANTS[name])


def small_call(dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Storage, torch.Tensor, torch.Tensor, PagedBatch]:
    case = Case(((200, 130),), dim=dim, value_dim=dim)
    place = torch.device("cpu")
    x = torch.zeros(2, 1, 200, dim, dtype=dtype)
    return dataclasses.replace(case, dtype=dtype).storage(place), x, x, case.batches(place)[0]


def test_unsupported_calls_say_why() -> None:
    storage, key, value, batch = small_call()
    shifted = torch.zeros(2, 1, 200, 65, dtype=key.dtype)[..., 1:]
    calls: tuple[tuple[tuple, Device, str], ...] = (
        ((storage, key, value, batch), dataclasses.replace(H100, emulated=True), "it needs sm_80 or later"),
        (small_call(dtype=torch.float32), H100, "key is torch.float32"),
        ((storage, key, value.half(), batch), H100, "value is torch.float16 and the cache's tokens are torch.bfloat16"),
        ((storage, shifted, value, batch), H100, "key has strides"),
        ((storage, key, shifted, batch), H100, "value has strides"),
        (small_call(dim=256), ARCHITECTURES[89], "head dims 256 and 256; on NVIDIA L40S it takes up to 128"),
    )
    for call, device, reason in calls:
        assert reason in (append.unsupported_call(*call, device) or ""), reason
    for device in ARCHITECTURES.values():
        assert append.unsupported_call(storage, key, value, batch, device) is None
    assert append.unsupported_call(*small_call(dim=256), H100) is None


def test_who_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernel what this one doesn't take, and where it can't be compiled."""
    storage, key, value, batch = small_call()
    made: list[str] = []
    reason: str | None = None
    monkeypatch.setattr(paged_ops, "device_of", lambda _: H100)
    monkeypatch.setattr(paged_ops, "has_kernels", lambda _: True)
    monkeypatch.setattr(paged_ops, "unsupported_append", lambda *_: reason)
    monkeypatch.setattr(run, "append_to_pages", lambda *_: made.append("cuda"))
    monkeypatch.setattr(triton_kernels.paged_append, "append", lambda *_: made.append("triton"))

    def append_(backend: str) -> str:
        paged_ops._append_by(backend)(key, value, storage.tensors(), *batch.tensors(), 64, True, True)
        return made.pop()

    assert append_("cuda") == "cuda" and append_("triton") == "triton"
    reason = "the test says so"
    with pytest.raises(BackendUnavailable, match="cuda: the test says so; use backend='triton' or 'auto'"):
        append_("cuda")
    call = storage, (key, value), batch, DEFAULT_RECIPE, Stage()
    assert not paged_ops._appended_by_cuda(False, *call) and not made
    reason = None
    assert paged_ops._appended_by_cuda(False, *call) and made.pop() == "cuda"

    def fails(*_) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(run, "append_to_pages", fails)
    with pytest.warns(UserWarning, match="goes on with Triton: no compiler"):
        assert not paged_ops._appended_by_cuda(False, *call)
    with pytest.raises(BuildError, match="no compiler"):
        append_("cuda")


def test_the_grid() -> None:
    """As many CTAs as run at once have all heads of few tokens; each page of many has its own."""
    config, few = append.AppendConfig(128, 2), torch.zeros(40, 300, append.FEW_TOKENS, 64)
    batch = PagedBatch(torch.zeros(40, 4, dtype=torch.int32), torch.zeros(40, dtype=torch.int32))
    many = torch.zeros(40, 300, append.FEW_TOKENS + 1, 64)
    assert append.ctas_of(few[:2], dataclasses.replace(batch, lengths=batch.lengths[:2]), config, H100) == 264
    assert append.ctas_of(few[:1, :5], dataclasses.replace(batch, lengths=batch.lengths[:1]), config, H100) == 5
    assert append.ctas_of(few, batch, config, H100) == 40 * 300 // 32
    assert append.ctas_of(many, batch, config, H100) == 40 * 300
    packed = dataclasses.replace(batch, cu_seqlens=torch.zeros(41, dtype=torch.int32))
    assert append.ctas_of(torch.zeros(300, 5, 64), packed, config, H100) == (300 // PAGE + 40) * 5
