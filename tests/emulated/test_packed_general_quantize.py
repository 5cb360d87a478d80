"""The general CUDA quantizer of packed keys and values: each sequence has the bytes that it has alone, on a CPU too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
from forked import in_another_process
from fp8attn import ops
from fp8attn.cuda import build, general_quantize, run
from fp8attn.cuda.build import BuildError
from fp8attn.device import ARCHITECTURES, device_of
from fp8attn.quantization import quantize_packed, quantize_q
from fp8attn.recipe import DEFAULT_RECIPE, Packed, Quantized, Recipe
from packed_batches import MANY, Batch, assert_each_alone, assert_lengths_are_the_gpus, untouched, wrong_lengths
from quantizing import assert_same, normal

H100 = ARCHITECTURES[90]

RECIPES = (
    Recipe(), Recipe(k="token"), Recipe(qk="int8"), Recipe(k="token", qk="int8", rotate=16), Recipe(smooth_k=False, smooth_v=False, rotate=0),
    Recipe(rotate=256),
)  # fmt: skip


Results = tuple[Quantized | None, Quantized, Quantized]


def quantized(
    batch: Batch, recipe: Recipe, library: build.Library | None, device: torch.device | str = "cpu", q: torch.Tensor | None = None
) -> Results:
    """By an emulated library, or on a GPU. `q`: or None."""
    (k, v), packed = batch.tensors(device), batch.packed(device)
    properties = H100 if library is not None else device_of(k.device)
    assert general_quantize.unsupported_call(q, k, v, recipe, properties, packed) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "empty_packed", untouched)
        if library is not None:
            patch.setattr(build, "load_with", lambda *_: library)
        query, key, value = run.quantize_any(q, k, v, recipe, properties, packed)
    assert key is not None and value is not None
    return query, key, value


def check(batch: Batch, recipe: Recipe, library: build.Library | None, device: torch.device | str = "cpu") -> None:
    """Pages of no sequence aren't written."""
    assert_each_alone(batch, *batch.tensors(device), recipe, quantized(batch, recipe, library, device)[1:])


def check_with_queries(batch: Batch, recipe: Recipe, library: build.Library | None, device: torch.device | str = "cpu") -> None:
    """Packed queries of another length, which have more heads."""
    q = normal((1, 2 * batch.heads, 333, batch.dim), batch.dtype, torch.device(device))[0]
    query, *others = quantized(batch, recipe, library, device, q)
    assert_each_alone(batch, *batch.tensors(device), recipe, (others[0], others[1]))
    assert query is not None
    assert_same(query, quantize_q(q, recipe))


lengths = st.one_of(st.integers(0, 5), st.sampled_from((127, 128, 129, 511, 512, 513, 1024)), st.integers(0, 1300))
dims = st.integers(2, 32).map(lambda n: 8 * n)
batches = st.builds(
    Batch,
    st.lists(lengths, min_size=1, max_size=5).map(tuple),
    unused=st.sampled_from((0, 0, 1, 70, 600)),
    behind=st.sampled_from((1, 700)),
    heads=st.integers(1, 3),
    dim=dims,
    dtype=st.sampled_from(general_quantize.DTYPES),
    seed=st.integers(0, 99),
    value_dim=st.one_of(st.just(0), dims),
    moved=st.sampled_from((0, 0, 0, 1, 4)),
)


@pytest.fixture(scope="module")
def emulated() -> build.Library:
    return emulation.general_quantizer()


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """One that the quantizer runs on."""
    reason = general_quantize.unsupported_device(device_of(device))
    if reason is not None:
        pytest.skip(reason)
    return device


@pytest.mark.anywhere
@emulation.emulates
@given(batch=batches, recipe=st.sampled_from(RECIPES))
def test_emulated_a_sequence_has_the_bytes_that_it_has_alone(emulated: build.Library, batch: Batch, recipe: Recipe) -> None:
    check(batch, recipe, emulated)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("batch", MANY, ids=("many", "long", "empty"))
def test_emulated_many_and_long_sequences(emulated: build.Library, batch: Batch) -> None:
    check(batch, DEFAULT_RECIPE, emulated)


@pytest.mark.anywhere
@emulation.emulates
@pytest.mark.parametrize("dtype", general_quantize.DTYPES)
def test_emulated_queries_beside(emulated: build.Library, dtype: torch.dtype) -> None:
    check_with_queries(Batch((300, 0, 700), unused=3, dim=40, dtype=dtype), DEFAULT_RECIPE, emulated)


GPU_BATCHES = (
    *MANY, Batch((64,) * 80, heads=16, dim=80), Batch((130, 0, 577, 1000, 512, 1) * 9, heads=5, dim=72),
    Batch((12_000, 200, 4608, 577, 1) * 3, heads=4, dim=192, value_dim=128), Batch((900,) * 16, heads=4, dim=96, dtype=torch.float16),
    Batch((2048, 30, 5000), unused=100, behind=9, heads=4, dim=160, dtype=torch.float32), Batch((700, 5) * 20, heads=3, dim=80, moved=1),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("batch", GPU_BATCHES, ids=range(len(GPU_BATCHES)))
def test_a_sequence_has_the_bytes_that_it_has_alone(gpu: torch.device, batch: Batch) -> None:
    for recipe in RECIPES[1:4:2]:
        check(batch, recipe, None, gpu)
    check_with_queries(batch, DEFAULT_RECIPE, None, gpu)


@pytest.mark.gpu
def test_same_bits_a_hundred_times(gpu: torch.device) -> None:
    """A bit that moves is a race."""
    batch = Batch((130, 0, 577, 1000, 512, 1) * 9, heads=5, dim=80)

    def all_bytes() -> torch.Tensor:
        found = quantized(batch, DEFAULT_RECIPE, None, gpu)[1:]
        return torch.cat([x.reshape(-1).view(torch.uint8) for y in found for x in (y.data, y.scale, y.mean) if x is not None])

    first, different = all_bytes(), torch.zeros((), dtype=torch.int64, device=gpu)
    for _ in range(100):
        different += (all_bytes() != first).sum()
    assert int(different) == 0


@pytest.mark.gpu
def test_the_gpu_knows_the_lengths(gpu: torch.device) -> None:
    """A graph is replayed with other lengths, that a kernel right before writes."""
    assert_lengths_are_the_gpus(gpu, 80, lambda k, v, packed: ops.quantized_packed(None, k, v, DEFAULT_RECIPE, packed)[1:])


def read_guarded() -> None:
    """Whatever the lengths say, nothing behind K and V is read."""
    library = emulation.general_quantizer()
    for dtype in general_quantize.DTYPES:
        k, v = (emulation.guarded(x.transpose(1, 2)).transpose(1, 2) for x in Batch((1300, 30), heads=1, dim=40, dtype=dtype).tensors())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: library)
            for packed in wrong_lengths():
                run.quantize_any(None, k, v, DEFAULT_RECIPE, H100, packed)


@pytest.mark.anywhere
@emulation.emulates
def test_reads_nothing_behind_its_tensors() -> None:
    """In a process of its own, which such a read ends."""
    in_another_process("import test_packed_general_quantize as test; test.read_guarded()")


MUTANTS = {
    "starts of sequences": ("general_grid.h", "+ begin * strides[2];", "+ 0 * strides[2];"),
    "rows of sequences": ("general_grid.h", "first = of.sequence.begin + of.first;", "first = of.first;"),
    "pages of sequences": (
        "general_grid.h",
        "int64_t(head) * grid.k_blocks + block),\n          p.k_mean",
        "of.first / SCALE_BLOCK),\n          p.k_mean",
    ),
    "columns of sequences": ("general_grid.h", "p.v_data + row * p.padded + slot;", "p.v_data + row * p.padded + token;"),
    "pages of no sequence": ("general_grid.h", "page.number < 0 ? 0 : page.length", "page.length"),
    "means of sequences": ("general_grid.h", "measured_head = page.sequence * p.kv_heads + head;", ""),
    "a place for each head": ("general_grid.h", "sequence.number)) * p.kv_heads + head;", "sequence.number)) + head;"),
    "tokens of a sequence": ("general_grid.h", "begin = found.begin, length = found.length;", "begin = found.begin, length = p.kv_length - begin;"),
    "token chunks of a sequence": ("general_quantize.cuh", "apart *= p.kv_heads, ", ""),
    "tokens of the mean": ("general_quantize.cuh", "__fdiv_rn(1.0f, max(sequence.length, 1))", "p.inverse_length"),
    "tokens of the sample": ("general_quantize.cuh", "? inverse_sample_of(length) : p.inverse_sample", "? p.inverse_sample : p.inverse_sample"),
    "feedback of short sequences": ("general_grid.h", "block.sequence.length > TOKEN_CHUNK ?", "true ?"),
    "more sequences than lanes": ("tile/packed.h", "first += chosen, left -= chosen;", "first = chosen, left -= chosen;"),
    "pages of all warps": ("general_quantize.cuh", "blockIdx.x * MEASURER_WARPS + warp;", "blockIdx.x * MEASURER_WARPS;"),
}


def test_mutants_change_what_is_there() -> None:
    emulation.assert_anchored(MUTANTS.values())


@pytest.mark.anywhere
@pytest.mark.thorough
@emulation.emulates
@pytest.mark.parametrize("name", MUTANTS)
def test_the_emulation_sees_what_is_wrong(name: str) -> None:
    library = emulation.general_quantizer(MUTANTS[name])

    def check_several() -> None:
        for batch in (Batch((1300, 0, 40, 600), unused=9, behind=70, dim=40), Batch((3, 700, 0, 130) * 20, unused=2, dim=24, dtype=torch.float32)):
            for recipe in RECIPES[:2]:
                check(batch, recipe, library)

    with pytest.raises((AssertionError, RuntimeError)):
        check_several()


@pytest.mark.parametrize("hopper, general, steps", (
    (True, True, ["hopper kv", "general q"]), (False, True, ["general qkv"]), (True, False, ["hopper kv", "triton q"]),
    (False, False, ["triton kv", "triton q"]),
))  # fmt: skip
def test_who_quantizes(monkeypatch: pytest.MonkeyPatch, hopper: bool, general: bool, steps: list[str]) -> None:
    """Each operand once, by the first that takes it; by Triton where nothing compiles."""
    batch = Batch((40, 9), dim=64)
    (k, v), packed = batch.tensors(), batch.packed()
    q, made = torch.randn(1, 2, 30, 64, dtype=k.dtype), []

    def noted(name: str, q: torch.Tensor | None, k: torch.Tensor | None) -> tuple:
        made.append(f"{name} {'' if q is None else 'q'}{'' if k is None else 'kv'}")
        return None if q is None else quantize_q(q, DEFAULT_RECIPE), *((None, None) if k is None else quantize_packed(k, v, DEFAULT_RECIPE, packed))

    def fails(*_: object) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(ops, "unsupported_cuda_quantize", lambda *_: None if hopper else "the test says so")
    monkeypatch.setattr(ops, "unsupported_general_quantize", lambda *_: None if general else "the test says so")
    monkeypatch.setattr(run, "quantize_packed", lambda k, *_: noted("hopper", None, k)[1:])
    monkeypatch.setattr(run, "quantize_any", lambda q, k, *_: noted("general", q, k))
    monkeypatch.setattr(ops.triton_kernels.quantize, "quantize_packed", lambda k, *_: noted("triton", None, k)[1:])
    monkeypatch.setattr(ops.triton_kernels.quantize, "quantize", lambda q, k, *_, given: noted("triton", q, k))
    assert all(x is not None for x in ops.quantized_packed(q, k, v, DEFAULT_RECIPE, packed)) and made == steps
    made.clear()
    for name in ("quantize_packed", "quantize_any"):
        monkeypatch.setattr(run, name, fails)
    if hopper or general:
        with pytest.warns(UserWarning, match="goes on with Triton: no compiler"):
            assert all(x is not None for x in ops.quantized_packed(q, k, v, DEFAULT_RECIPE, packed))
        assert made == ["triton kv", "triton q"]


def test_what_it_takes() -> None:
    packed = Packed(torch.tensor([0, 300, 900], dtype=torch.int32), None, 900)
    k = torch.zeros(1, 3, 900, 80, dtype=torch.bfloat16)
    for recipe, key, value in ((DEFAULT_RECIPE, k, k), (Recipe(k="token", smooth_v=False), k.float(), k.float()), (DEFAULT_RECIPE, k, k[..., :40])):
        for arch in (80, 89, 90):
            assert general_quantize.unsupported_call(None, key, value, recipe, ARCHITECTURES[arch], packed) is None
    for recipe, x in ((Recipe(v="head"), k), (DEFAULT_RECIPE, k[..., :76]), (DEFAULT_RECIPE, k[:, :, ::2].transpose(2, 3))):
        assert general_quantize.unsupported_call(None, x, x, recipe, H100, packed) is not None
