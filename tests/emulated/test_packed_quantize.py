"""The CUDA quantizer of packed keys and values: each sequence has the bytes that it has alone, on a CPU too."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
from forked import in_another_process
from fp8attn.call import HALVES
from fp8attn.cuda import build, quantize, run
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.quantization import TOKEN_CHUNK
from fp8attn.recipe import DEFAULT_RECIPE, FUSED_RECIPES, Recipe
from packed_batches import MANY, Batch, assert_each_alone, assert_lengths_are_the_gpus, untouched, wrong_lengths

H100 = ARCHITECTURES[90]


def check(batch: Batch, library: build.Library | None, device: torch.device | str = "cpu") -> None:
    """By an emulated library, or on a GPU. Pages of no sequence aren't written. Clusters have all sequences, those of up
    to half of the longest, or none."""
    for longest in (max(batch.lengths), max(batch.lengths) // 2, None):
        check_with(batch, longest, library, device)


def check_with(batch: Batch, longest: int | None, library: build.Library | None, device: torch.device | str) -> None:
    (k, v), packed, recipe = batch.tensors(device), batch.packed(device), FUSED_RECIPES[batch.qk]
    properties = H100 if library is not None else device_of(k.device)
    assert quantize.unsupported_call(k, v, recipe, properties) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "empty_packed", untouched)
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        patch.setattr(quantize, "LEAST_FULL", 0.0)
        found = run.quantize_packed(k, v, batch.qk, packed, properties, longest)
    assert_each_alone(batch, k, v, recipe, found)


lengths = st.one_of(st.integers(0, 5), st.sampled_from((127, 128, 129, 511, 512, 513, 1024)), st.integers(0, 1300))
batches = st.builds(
    Batch,
    st.lists(lengths, min_size=1, max_size=5).map(tuple),
    unused=st.sampled_from((0, 0, 1, 70, 600)),
    behind=st.sampled_from((1, 700)),
    heads=st.integers(1, 3),
    dim=st.sampled_from((64, 128, 192, 256)),
    dtype=st.sampled_from(HALVES),
    qk=st.sampled_from(("e4m3", "int8")),
    seed=st.integers(0, 99),
)


@pytest.fixture(scope="module")
def emulated() -> build.Library:
    return emulation.quantizer()


@pytest.mark.anywhere
@emulation.emulates
@given(batch=batches)
def test_emulated_a_sequence_has_the_bytes_that_it_has_alone(emulated: build.Library, batch: Batch) -> None:
    check(batch, emulated)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("batch", MANY, ids=("many", "long", "empty"))
def test_emulated_many_and_long_sequences(emulated: build.Library, batch: Batch) -> None:
    check(batch, emulated)


GPU_BATCHES = (
    *MANY, Batch((130, 0, 577, 1000, 512, 1) * 9, heads=5, dim=128), Batch((300,) * 40, heads=2, dim=256),
    Batch((12_000, 200, 4608, 577, 1) * 3, heads=8, dim=128), Batch((900,) * 64, heads=4, dim=128, qk="int8"), Batch((513,) * 700, heads=1),
    Batch((2048, 30, 5000), unused=100, behind=9, heads=4, dim=256, dtype=torch.float16),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("batch", GPU_BATCHES, ids=range(len(GPU_BATCHES)))
def test_a_sequence_has_the_bytes_that_it_has_alone(device: torch.device, batch: Batch) -> None:
    if quantize.unsupported_config(quantize.OF_PACKED, device_of(device)) is not None:
        pytest.skip("needs sm_90")
    check(batch, None, device)


@pytest.mark.gpu
@pytest.mark.parametrize("longest", (None, 1000))
def test_the_gpu_knows_the_lengths(device: torch.device, longest: int | None) -> None:
    """A graph is replayed with other lengths, that a kernel right before writes. The caller knows the longest, or is
    wrong."""
    if quantize.unsupported_config(quantize.OF_PACKED, device_of(device)) is not None:
        pytest.skip("needs sm_90")
    properties = device_of(device)
    assert_lengths_are_the_gpus(device, 128, lambda k, v, packed: run.quantize_packed(k, v, "e4m3", packed, properties, longest))


def read_guarded() -> None:
    """Whatever the lengths say, nothing behind K and V is read."""
    library = emulation.quantizer()
    k, v = (emulation.guarded(x.transpose(1, 2)).transpose(1, 2) for x in Batch((1300, 30), heads=1).tensors())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: library)
        for packed, longest in itertools.product(wrong_lengths(), (None, 600)):
            run.quantize_packed(k, v, "e4m3", packed, H100, longest)


@pytest.mark.anywhere
@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_packed_quantize as test; test.read_guarded()")


MUTANTS = {
    "starts of sequences": ("tile/token_chunk.h", "coord.begin * strides[2]", "0 * strides[2]"),
    "rows of sequences": ("tile/token_chunk_keys.h", "(coord.begin + coord.first + keys", "(coord.first + keys"),
    "pages of sequences": ("tile/token_chunk_keys.h", "coord.first_page + coord.token_chunk * BLOCKS", "coord.token_chunk * BLOCKS"),
    "columns of sequences": ("tile/token_chunk_values.h", "coord.first_page * KEYS + coord.first", "coord.first"),
    "rows of V": ("tile/token_chunk.h", "return packed ? head : pair;", "return packed ? 0 : pair;"),
    "keys that don't exist": ("tile/packed.h", "if (p.seqused != nullptr)", "if (false)"),
    "a place for each head": ("tile/token_chunk.h", "* p.heads + head : int64_t", "+ head : int64_t"),
    "pages that are read": (
        "tile/token_chunk_values.h",
        "(coord.length + KEYS - 1) / KEYS * KEYS;",
        "(coord.length + KEYS - 1) / KEYS * KEYS + KEYS;",
    ),
    "tokens of the mean": ("tile/token_chunk.h", "__fdiv_rn(1.0f, max(length, 1))", "__fdiv_rn(1.0f, p.length)"),
    "tokens of the sample": ("tile/quantize.h", "(length + step - 1) / step", "length"),
    "feedback of short sequences": ("tile/token_chunk_values.h", "coord.length > TOKEN_CHUNK", "p.length > TOKEN_CHUNK"),
    "more sequences than lanes": ("tile/packed.h", "first += chosen, left -= chosen;", "first = chosen, left -= chosen;"),
    "means of empty sequences": ("quantize_long.cuh", "!PACKED || coord.exists() ? removable", "true ? removable"),
    "empty sequences of clusters": ("quantize.cuh", "if (coord.length == 0 && coord.token_chunk == 0) write_nothing(p, coord);", ""),
    "CTAs of a cluster without tokens": ("quantize.cuh", "    ptx::cluster_arrive_relaxed();  // the", "    // the"),
    "sequences that clusters hold": ("tile/token_chunk.h", "token_chunks <= p.cluster_chunks", "token_chunks < p.cluster_chunks"),
    "longer sequences than the caller said": ("quantize_long.cuh", "found |= PackedSequence", "found &= PackedSequence"),
    "items of few CTAs": ("quantize_long.cuh", "n += gridDim.x", "n += items"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_wrong(name: str) -> None:
    library = emulation.quantizer(MUTANTS[name])

    def check_several() -> None:
        for batch in (Batch((1300, 0, 40, 600), unused=9, behind=70), Batch((3, 700, 0, 130) * 20, unused=2)):
            check(batch, library)

    with pytest.raises(AssertionError):
        check_several()


@pytest.mark.anywhere
@emulation.emulates
def test_the_binding_tells_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, library = emulation.binding()
    launcher = ctypes.cast(library.record_quantize, ctypes.c_void_p).value
    monkeypatch.setattr(build, "load_with", lambda *_: build.Library(operators, {quantize.OF_PACKED: launcher}))
    for batch, longest, chunks in (
        (Batch((700, 0, 1300), unused=3, heads=3, dim=128, dtype=torch.float16, qk="int8"), None, 0), (Batch((9, 100), behind=8), 1100, 0),
        (Batch((900, 1030), heads=1, dim=128), 1030, 3), (Batch((900, 5000), heads=1, dim=128), 5000, 0),
    ):  # fmt: skip
        (k, v), packed = batch.tensors(), batch.packed()
        found = run.quantize_packed(k, v, batch.qk, packed, H100, longest)
        ctas = (packed.tokens // TOKEN_CHUNK + len(batch.lengths)) * batch.heads * batch.dim // 64
        results = quantize.filled(*found)
        expected = emulation.quantize_packed_params(ctas, chunks, torch.empty(0), k, v, packed.cu_seqlens, packed.seqused, *results)
        emulation.assert_quantizer_told(library, ctas, expected)


def test_what_it_takes() -> None:
    k = torch.zeros(1, 3, 900, 128, dtype=torch.bfloat16)
    assert quantize.unsupported_call(k, k, DEFAULT_RECIPE, H100) is None
    for recipe, x in ((Recipe(k="token"), k), (Recipe(smooth_v=False), k), (DEFAULT_RECIPE, k.float()), (DEFAULT_RECIPE, k[..., :96])):
        assert quantize.unsupported_call(x, x, recipe, H100) is not None
    assert quantize.unsupported_call(k, k, DEFAULT_RECIPE, ARCHITECTURES[89]) is not None
