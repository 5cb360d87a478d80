"""The binding where there is no GPU: what it makes of tensors, bit for bit, and what it refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emulation
import foreign
import fp8attn
from emulated import in_shards, quantized
from fp8attn import recording
from fp8attn.call import HALVES, Problem
from fp8attn.cuda import append, build, decode, decode_tensors, fused_small, general_quantize, one_launch, prefill, run
from fp8attn.cuda.configs import KEYS
from fp8attn.device import ARCHITECTURES
from fp8attn.pages import PagedCall, Stage, Storage
from fp8attn.prepare import call_of
from fp8attn.recipe import Packed
from fp8attn.reference import Scoring
from fp8attn.schedule import TILE_PITCH
from strategies import Case, cases

H100 = ARCHITECTURES[90]

PLANS = itertools.count(1 << 40)
"""Numbers of plans, which no two tests share."""

pytestmark = [pytest.mark.anywhere, emulation.emulates]


class Recorder:
    """Libraries of any instances, whose launcher keeps what it is told."""

    def __init__(self) -> None:
        self.operators, self.library = emulation.binding()
        self.arguments: tuple = ()
        self.launcher = ctypes.cast(self.library.record, ctypes.c_void_p).value or 0

    def forward(self, *arguments) -> None:
        self.arguments = arguments
        self.operators.forward.default(*arguments)

    def library_of(self, config, device) -> build.Library:
        return build.Library(SimpleNamespace(forward=SimpleNamespace(default=self.forward)), {config: self.launcher})

    def recorded(self) -> tuple[int, bytes]:
        """CTAs and Params of the last launch."""
        buffer = ctypes.create_string_buffer(self.library.params_size())
        return self.library.recorded(buffer), buffer.raw


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@given(case=cases(), moved=st.sampled_from(("", "q", "k", "qk")))
def test_params_are_as_described(recorder: Recorder, case: Case, moved: str) -> None:
    """Of every call, by whichever instance: the bytes that Python makes of the same arguments."""
    operands = quantized(*case.tensors(torch.device("cpu")), case.recipe)
    call = call_of(*operands, **case.options(torch.device("cpu")), recipe=case.recipe, out_dtype=case.out_dtype, return_lse=True)
    call = dataclasses.replace(call, **{name: emulation.elsewhere(getattr(call, name), 3) for name in moved})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "library_of", recorder.library_of)
        run.forward(call, H100)
    ctas, params = recorder.recorded()
    arguments = emulation.ForwardArguments(*recorder.arguments)
    described = emulation.params(arguments)
    if described.mask_rows:  # the binding itself makes room for what is made of a mask
        told = emulation.Params.from_buffer_copy(params, emulation.MAPS)
        described.mask_bits, described.block_mask = told.mask_bits, told.block_mask
        blocks = described.mask_batches * described.mask_heads * described.mask_groups * -(-call.kv_length // KEYS)
        assert told.mask_bits % 16 == 0 and told.block_mask - told.mask_bits == 16 * described.mask_rows * blocks
    expected = emulation.tensor_maps(arguments) + bytes(described)
    assert ctas == arguments.ctas and params[: len(expected)] == expected
    assert any(params[: emulation.MAPS]) == (arguments.rows > 0) and not any(params[len(expected) :])


@pytest.mark.parametrize("heads, n", ((2, 2), (1, 4)))
def test_params_of_shards_are_as_described(recorder: Recorder, heads: int, n: int) -> None:
    q, k, v = (torch.randn(1, heads, 512, 64) for _ in range(3))
    call = in_shards(call_of(*fp8attn.quantize(q, k, v), return_lse=True), n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "library_of", recorder.library_of)
        run.forward(call, H100)
    _, params = recorder.recorded()
    arguments = emulation.ForwardArguments(*recorder.arguments)
    expected = emulation.tensor_maps(arguments) + bytes(emulation.params(arguments))
    assert params[: len(expected)] == expected
    askew = dataclasses.replace(call, v=call.v.as_strided(call.v.shape, (call.v.stride(0) - 8, *call.v.stride()[1:])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "library_of", recorder.library_of)
        with pytest.raises(RuntimeError, match="aren't contiguous"):
            run.forward(askew, H100)


@pytest.mark.parametrize("dtype", HALVES)
def test_params_of_one_launch_are_as_described(recorder: Recorder, dtype: torch.dtype) -> None:
    q, k, v = (torch.zeros(2, heads, 300, 64, dtype=dtype) for heads in (4, 2, 2))
    told: list[tuple] = []
    operator = SimpleNamespace(default=lambda *arguments: told.append(arguments) or recorder.operators.forward_from_fp16.default(*arguments))
    library = build.Library(SimpleNamespace(forward_from_fp16=operator), dict.fromkeys(fused_small.INSTANCES, recorder.launcher))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: library)
        run.forward_from_fp16(
            Problem(q, k, v.transpose(1, 2).contiguous().transpose(1, 2), 0.1, "e4m3", "bottom_right", torch.float16, True),
            H100,
            one_launch.small(q, k),
        )
    ctas, params = recorder.recorded()
    expected = bytes(emulation.MAPS) + bytes(emulation.params_from_fp16(told[0]))
    assert ctas == told[0][1] and params[: len(expected)] == expected and not any(params[len(expected) :])


def test_a_launch_that_fails_is_an_error(recorder: Recorder) -> None:
    x = torch.zeros(1, 2, 40, 64)
    call = call_of(*fp8attn.quantize(x, x, x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "library_of", recorder.library_of)
        recorder.library.fail_with(1)
        try:
            with pytest.raises(RuntimeError, match="the CUDA kernel wasn't launched: as the test says"):
                run.forward(call, H100)
        finally:
            recorder.library.fail_with(0)
        smoothed = call_of(*fp8attn.quantize(x, x, x, recipe=fp8attn.Recipe(smooth_q=True)))
        bias = torch.zeros(smoothed.bias.numel() + 2)[2:].view(smoothed.bias.shape)
        with pytest.raises(RuntimeError, match=r"bias of shape .* isn't contiguous from a multiple of 16 bytes on"):
            run.forward(dataclasses.replace(smoothed, bias=bias), H100)
        shifted = torch.zeros(call.v.numel() + 8, dtype=torch.uint8)[8:].view(call.v.dtype).view(call.v.shape)
        with pytest.raises(RuntimeError, match="aren't contiguous from a multiple of 16 bytes on"):
            run.forward(dataclasses.replace(call, v=shifted), H100)


class Told:
    """An operator of the binding that keeps what it is told."""

    def __init__(self, recorder: Recorder, name: str, launcher: str) -> None:
        self.arguments: tuple = ()
        self.operator = getattr(recorder.operators, name)
        address = ctypes.cast(getattr(recorder.library, launcher), ctypes.c_void_p).value or 0
        operators = SimpleNamespace(**{name: SimpleNamespace(default=self.call)})
        self.library = build.Library(operators, dict.fromkeys(general_quantize.INSTANCES, address))

    def call(self, *arguments) -> None:
        self.arguments = arguments
        self.operator.default(*arguments)


def recorded_general_params(recorder: Recorder) -> tuple[int, emulation.GeneralQuantizeParams]:
    """CTAs and parameters of the general quantizer's last launch."""
    buffer = ctypes.create_string_buffer(ctypes.sizeof(emulation.GeneralQuantizeParams))
    ctas = recorder.library.recorded_general_quantize(buffer)
    return ctas, emulation.GeneralQuantizeParams.from_buffer_copy(buffer)


def general_params(
    recorder: Recorder, operands: Sequence[torch.Tensor | None], recipe: fp8attn.Recipe, packed: Packed | None = None
) -> emulation.GeneralQuantizeParams:
    """The parameters that the binding makes, which are as described but for `measured`, which it allocates."""
    told = Told(recorder, "quantize_general", "record_general_quantize")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: told.library)
        run.quantize_any(*operands, recipe, H100, packed)
    ctas, found = recorded_general_params(recorder)
    assert ctas == told.arguments[1] == general_quantize.ctas_of(*operands, packed)
    measured, found.measured = found.measured, None
    assert bytes(found) == bytes(emulation.general_quantize_params(*told.arguments[2:], None))
    found.measured = measured
    return found


@pytest.mark.parametrize("given", ("qkv", "kv", "q"))
@pytest.mark.parametrize("dtype, moved", ((torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 4)))
def test_params_of_the_general_quantizer_are_as_described(recorder: Recorder, dtype: torch.dtype, moved: int, given: str) -> None:
    tensors = (torch.zeros(2, heads, n, 80, dtype=dtype)[..., moved : moved + dim] for heads, n, dim in ((4, 30, 72), (2, 700, 72), (2, 700, 40)))
    operands = [x if name in given else None for name, x in zip("qkv", tensors, strict=True)]
    for recipe in (fp8attn.Recipe(), fp8attn.Recipe(q="block", k="token", smooth_k=False, smooth_v=False, rotate=0, qk="int8")):
        assert general_quantize.unsupported_call(*operands, recipe, H100) is None
        found = general_params(recorder, operands, recipe)
        assert (found.measured is None) == (operands[1] is None)


@pytest.mark.parametrize("has_unused", (False, True))
def test_params_of_the_general_quantizer_of_packed_sequences_are_as_described(recorder: Recorder, has_unused: bool) -> None:
    q, k, v = (torch.zeros(1, heads, n, 80, dtype=torch.float16)[..., :dim] for heads, n, dim in ((4, 30, 72), (2, 700, 72), (2, 700, 40)))
    lengths = torch.tensor([0, 600, 700], dtype=torch.int32)
    packed = Packed(lengths, lengths[1:].contiguous() if has_unused else None, 700)
    found = general_params(recorder, [q, k, v], fp8attn.Recipe(), packed)
    assert found.measured is not None and found.cu_seqlens == lengths.data_ptr() and (found.seqused is not None) == has_unused


@pytest.mark.parametrize("dtype, moved", ((torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 4)))
def test_params_of_the_lse_are_as_described(recorder: Recorder, dtype: torch.dtype, moved: int) -> None:
    q, mean, lse = torch.zeros(2, 4, 300, 80, dtype=dtype)[..., moved : moved + 72], torch.zeros(2, 2, 72), torch.zeros(2, 4, 300)
    told = Told(recorder, "unsmooth_lse", "record_unsmooth_lse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: told.library)
        run.unsmoothed_lse(lse, q, mean, 0.1, 8, H100)
    buffer = ctypes.create_string_buffer(ctypes.sizeof(emulation.UnsmoothLseParams))
    assert recorder.library.recorded_unsmooth_lse(buffer) == told.arguments[1] == 2 * 4 * 3
    assert buffer.raw == bytes(emulation.unsmooth_lse_params(*told.arguments[2:]))


@pytest.mark.parametrize("dtype, dim", ((torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 256)))
def test_params_of_decode_are_as_described(recorder: Recorder, dtype: torch.dtype, dim: int) -> None:
    cache, table = fp8attn.KVCache(3, 5, 2, dim, dtype=dtype, device="cpu"), fp8attn.PageTable(3, 5, max_pages=4, device="cpu")
    counts = torch.ones(3, dtype=torch.int32)
    told = Told(recorder, "decode", "record_decode")
    told.library = build.Library(told.library.operators, dict.fromkeys(decode.INSTANCES, *{*told.library.launchers.values()}))
    edges = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    batches = table.batch(), dataclasses.replace(table.batch(counts), sequences=counts), table.batch(cu_seqlens=edges, max_count=2)
    for batch in (*batches, table.batch(batch_invariant=True)):
        packed = batch.cu_seqlens is not None
        q = torch.zeros(5, 8, 2 * dim, dtype=dtype)[..., :dim] if packed else torch.zeros(3, 2, 8, dim, dtype=dtype).transpose(1, 2)
        assert decode.unsupported_call(q, cache.storage, batch, 0.1, H100) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: told.library)
            out, lse = run.attend_to_pages(PagedCall(q, cache.storage, None, batch, fp8attn.Recipe(), 0.1), H100, torch.float32)
        assert out.shape == q.shape and out.is_contiguous() and lse.shape == ((8, 5) if packed else (3, 8, 2))
        buffer = ctypes.create_string_buffer(recorder.library.decode_params_size())
        assert recorder.library.recorded_decode(buffer) == told.arguments[1] == decode.ctas_of(decode.choose(cache.storage, Scoring(0.1)), H100)
        expected = bytes(emulation.decode_params(*told.arguments[1:]))
        assert buffer.raw[: len(expected)] == expected


@pytest.mark.parametrize(
    "case",
    (
        foreign.Case(page=16, layout="both in a row", sinks=True, query_dtype=torch.bfloat16),
        foreign.Case(page=128, scales=("token", "token"), layout="heads first", window=(70, 3), ragged=True, dim=128, value_dim=128),
        foreign.Case(page=64, dtype=torch.bfloat16, layout="both in a page", kv_heads=1, dim=256, value_dim=256),
        foreign.Case(queries=70, query_dtype=torch.bfloat16),
    ),
    ids=("e4m3", "by token", "bf16", "many rows"),
)
def test_params_of_decode_from_tensors_are_as_described(recorder: Recorder, case: foreign.Case) -> None:
    call = case.call(torch.device("cpu"))
    told = Told(recorder, "decode_tensors", "record_decode")
    told.library = build.Library(told.library.operators, dict.fromkeys(decode_tensors.INSTANCES, *{*told.library.launchers.values()}))
    assert decode_tensors.unsupported_call(call.q, call.cache, call.batch, call.how, H100) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: told.library)
        out, lse = run.attend_to_tensors(call.q, call.cache, call.batch, call.how, H100, torch.float32)
    assert out.shape == call.q.shape and out.is_contiguous() and lse.shape == call.q.shape[:3]
    buffer = ctypes.create_string_buffer(recorder.library.decode_params_size())
    assert (
        recorder.library.recorded_decode(buffer) == told.arguments[1] == decode.ctas_of(decode_tensors.choose(call.q, call.cache, call.batch), H100)
    )
    expected = bytes(emulation.decode_tensors_params(*told.arguments[1:]))
    assert buffer.raw[: len(expected)] == expected


def prefill_call(dtype: torch.dtype, dim: int, new: bool, options: dict) -> PagedCall:
    """Of a cache on the CPU, with 130 queries."""
    cache, table = fp8attn.KVCache(3, 5, 2, dim, dtype=dtype, device="cpu"), fp8attn.PageTable(3, 5, max_pages=4, device="cpu")
    q, k, v = (torch.zeros(3, 130, heads, dim, dtype=dtype).transpose(1, 2) for heads in (8, 2, 2))
    batch = dataclasses.replace(table.batch(), **options)
    return PagedCall(q, cache.storage, (k, v) if new else None, batch, fp8attn.Recipe(), 0.1)


def prefill_library(told: Told) -> build.Library:
    return build.Library(told.library.operators, dict.fromkeys(prefill.INSTANCES, *{*told.library.launchers.values()}))


FEW_SMS = dataclasses.replace(H100, sm_count=20)


def recorded_prefill(recorder: Recorder, size: int) -> bytes:
    """PrefillParams of the last launch, without the padding behind them."""
    buffer = ctypes.create_string_buffer(recorder.library.prefill_params_size())
    recorder.library.recorded_prefill(buffer)
    return buffer.raw[:size]


@pytest.mark.parametrize("dtype, dim, new", ((torch.bfloat16, 128, True), (torch.float16, 64, False), (torch.bfloat16, 256, True)))
def test_params_of_prefill_are_as_described(recorder: Recorder, dtype: torch.dtype, dim: int, new: bool) -> None:
    told = Told(recorder, "prefill", "record_prefill")
    counts = torch.ones(3, dtype=torch.int32)
    for options in ({}, dict(counts=counts, sequences=counts)):
        call = prefill_call(dtype, dim, new, options)
        assert prefill.unsupported_call(call, H100) is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: prefill_library(told))
            out, lse = run.prefill_from_pages(call, FEW_SMS, prefill.Tiling.of(call, FEW_SMS), torch.float32)
        assert out.shape == call.q.shape and out.is_contiguous() and lse.shape == (3, 8, 130)
        expected = emulation.prefill_params(*told.arguments[2:])
        assert told.arguments[1] == 20 and recorded_prefill(recorder, len(expected)) == expected


def test_params_of_prefill_with_split_keys(recorder: Recorder) -> None:
    told, call = Told(recorder, "prefill", "record_prefill"), prefill_call(torch.bfloat16, 128, True, {})
    tiling = dataclasses.replace(prefill.Tiling.of(call, FEW_SMS), splits=3)
    parts = torch.empty(3, *call.q.shape), torch.empty(3, 2, 3 * 8 * 130)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: prefill_library(told))
        assert run.prefill_from_pages(call, FEW_SMS, tiling, torch.bfloat16, None, parts) == parts
    expected = emulation.prefill_params(*told.arguments[2:])
    assert recorded_prefill(recorder, len(expected)) == expected
    assert expected.count(parts[1].data_ptr().to_bytes(8, "little")) == 1


@pytest.mark.parametrize("packed", (False, True))
def test_a_plan_repeats_prefill(recorder: Recorder, packed: bool) -> None:
    """With the addresses of another cache, batch and table of tiles, in tensor maps too. If it isn't the table's, the counter is zero at launch."""
    told = Told(recorder, "prefill", "record_prefill")

    def operands() -> list[torch.Tensor | None]:
        call = prefill_call(torch.bfloat16, 128, True, {})
        assert call.new is not None
        tokens, tile_table = (call.q, *call.new), None
        if packed:
            tokens = tuple(x.transpose(1, 2).flatten(0, 1) for x in tokens)
            tile_table = torch.zeros(9, TILE_PITCH, dtype=torch.int32)
        return [*tokens, torch.zeros(call.q.shape[1]), *call.batch.tensors()[:4], tile_table, *call.storage.tensors()]

    def attend(inputs) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, sinks, table, lengths, counts, sequences, tile_table, *storage = inputs
        batch = fp8attn.PagedBatch(table, lengths, counts, sequences, cu_seqlens=lengths if packed else None)
        call = PagedCall(q, Storage.of(storage), (k, v), batch, fp8attn.Recipe(), 0.1, (99, 0), 30.0, sinks)
        return run.prefill_from_pages(call, FEW_SMS, prefill.Tiling.of(call, FEW_SMS), torch.float32, tile_table)

    number = (1 << 41) + 2 + packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: prefill_library(told))
        assert recording.record(recorder.operators, {}, number, operands(), attend)
    _, _, numbers, scale, softcap, *_ = told.arguments
    given = operands()
    outputs = recorder.operators.repeat.default(number, given)
    tile_table, counter = given[8], torch.zeros(1, dtype=torch.int32)
    if packed:
        outputs = prefill.rows_of(outputs[0]), outputs[1][None]

    def with_counter(x: torch.Tensor) -> bytes:
        tokens = [*map(prefill.rows_of, given[:3]), given[3]]
        return emulation.prefill_params(numbers, scale, softcap, tokens, given[9:], given[4:9], [*outputs, x])

    if tile_table is not None:
        expected = with_counter(run.counter_of(tile_table))
        assert recorded_prefill(recorder, len(expected)) == expected
        return
    expected, other = with_counter(counter), with_counter(torch.zeros(1, dtype=torch.int32))
    found = recorded_prefill(recorder, len(expected))
    # the counter is the plan's own
    differs = {i for i, (x, y) in enumerate(zip(expected, other, strict=True)) if x != y}
    place = min(differs) // 8 * 8
    assert found[:place] + found[place + 8 :] == expected[:place] + expected[place + 8 :]
    assert found[place : place + 8] != bytes(8)


def append_call(dtype: torch.dtype, dim: int, tokens: int, options: dict) -> tuple[Storage, torch.Tensor, torch.Tensor, fp8attn.PagedBatch]:
    """Of a cache on the CPU; packed if `options` have cu_seqlens."""
    cache, table = fp8attn.KVCache(3, 5, 2, dim, 40, dtype=dtype, device="cpu"), fp8attn.PageTable(3, 5, max_pages=4, device="cpu")
    k, v = (torch.zeros(3, tokens, 2, n, dtype=dtype).transpose(1, 2) for n in (dim, 40))
    if "cu_seqlens" in options:
        k, v = (torch.zeros(tokens, 2, n, dtype=dtype) for n in (dim, 40))
    return cache.storage, k, v, dataclasses.replace(table.batch(), **options)


def append_library(told: Told) -> build.Library:
    return build.Library(told.library.operators, dict.fromkeys(append.INSTANCES, *{*told.library.launchers.values()}))


@pytest.mark.parametrize("dtype, dim, tokens", ((torch.bfloat16, 128, 1), (torch.float16, 64, 200), (torch.bfloat16, 256, 64)))
def test_params_of_append_are_as_described(recorder: Recorder, dtype: torch.dtype, dim: int, tokens: int) -> None:
    told = Told(recorder, "append", "record_append")
    counts = torch.ones(3, dtype=torch.int32)
    for options in ({}, dict(counts=counts, sequences=counts), dict(cu_seqlens=torch.zeros(4, dtype=torch.int32))):
        storage, k, v, batch = append_call(dtype, dim, tokens, options)
        assert append.unsupported_call(storage, k, v, batch, H100) is None
        recipe = fp8attn.Recipe(smooth_v=tokens == 1, rotate=16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "load_with", lambda *_: append_library(told))
            run.append_to_pages(storage, (k, v), batch, recipe, H100, Stage(tokens=tokens > 1))
        buffer = ctypes.create_string_buffer(ctypes.sizeof(emulation.AppendParams))
        ctas = append.ctas_of(k, batch, append.choose(storage), H100)
        assert recorder.library.recorded_append(buffer) == told.arguments[1] == ctas
        assert buffer.raw == bytes(emulation.append_params(*told.arguments[2:]))


@pytest.mark.parametrize("packed", (False, True))
def test_a_plan_repeats_append(recorder: Recorder, packed: bool) -> None:
    """With the addresses of other tokens, and of another cache and batch."""
    told = Told(recorder, "append", "record_append")

    def operands() -> list[torch.Tensor | None]:
        options = dict(cu_seqlens=torch.zeros(4, dtype=torch.int32)) if packed else {}
        storage, k, v, batch = append_call(torch.bfloat16, 128, 70, options)
        return [k, v, *batch.tensors(), *storage.tensors()]

    def append_to(inputs) -> tuple[()]:
        k, v, table, lengths, counts, sequences, cu_seqlens, *storage = inputs
        batch = fp8attn.PagedBatch(table, lengths, counts, sequences, None, cu_seqlens)
        run.append_to_pages(Storage.of(storage), (k, v), batch, fp8attn.Recipe(), H100, Stage())
        return ()

    number = (1 << 43) + packed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: append_library(told))
        assert recording.record(recorder.operators, {}, number, operands(), append_to)
    given = operands()
    assert recorder.operators.repeat.default(number, given) == []
    buffer = ctypes.create_string_buffer(ctypes.sizeof(emulation.AppendParams))
    recorder.library.recorded_append(buffer)
    tokens = [append.rows_of(x) for x in given[:2] if x is not None]
    assert buffer.raw == bytes(emulation.append_params(told.arguments[2], tokens, given[7:], given[2:7]))


def test_append_takes_all_that_it_is_told(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="append takes 8 numbers, 2 tensors of tokens, 10 of a cache and 5 of a batch"):
        recorder.operators.append.default(0, 1, [64], [torch.zeros(1)], [], [])


def check_general_plan(
    recorder: Recorder, operands: Callable[[], list[torch.Tensor]], quantized_of: Callable[[Sequence[Any]], list], names: str
) -> emulation.GeneralQuantizeParams:
    """The parameters of a plan that is repeated: `names` have the addresses of other operands, and of the outputs that it
    makes."""
    told, number = Told(recorder, "quantize_general", "record_general_quantize"), next(PLANS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: told.library)
        assert recording.record(recorder.operators, {}, number, operands(), quantized_of)
    given = operands()
    outputs = recorder.operators.repeat.default(number, given)
    _, found = recorded_general_params(recorder)
    for name, x in zip(names.split(), (*given, *outputs), strict=True):
        assert getattr(found, name) == x.data_ptr(), name
    assert found.measured is not None
    return found


def test_a_plan_repeats_the_general_quantizer(recorder: Recorder) -> None:
    def quantized_of(inputs) -> list:
        return general_quantize.filled(*run.quantize_any(*inputs, fp8attn.Recipe(), H100))

    def operands() -> list[torch.Tensor]:
        return [torch.zeros(2, heads, n, 64) for heads, n in ((4, 30), (2, 700), (2, 700))]

    found = check_general_plan(recorder, operands, quantized_of, "q k v q_data q_scale k_data k_scale k_mean v_data v_scale v_mean")
    assert found.q_length == 30


def test_a_plan_repeats_the_general_quantizer_of_packed_sequences(recorder: Recorder) -> None:
    def quantized_of(inputs) -> list:
        k, v, cu_seqlens, seqused = inputs
        return general_quantize.filled(*run.quantize_any(None, k, v, fp8attn.Recipe(), H100, Packed(cu_seqlens, seqused, 700)))[2:]

    def operands() -> list[torch.Tensor]:
        return [*(torch.zeros(1, 2, 700, 72) for _ in range(2)), torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]

    found = check_general_plan(recorder, operands, quantized_of, "k v cu_seqlens seqused k_data k_scale k_mean v_data v_scale v_mean")
    assert found.sequences == 2 and found.tokens == 700


@pytest.mark.parametrize("with_sequences", (False, True))
def test_a_plan_repeats_decode(recorder: Recorder, with_sequences: bool) -> None:
    """With the addresses of another cache and batch, in tensor maps too. Tickets are the cache's."""
    told = Told(recorder, "decode", "record_decode")
    told.library = build.Library(told.library.operators, dict.fromkeys(decode.INSTANCES, *{*told.library.launchers.values()}))
    recipe = fp8attn.Recipe()

    def operands() -> list[torch.Tensor | None]:
        cache, table = fp8attn.KVCache(3, 5, 2, 128, device="cpu"), fp8attn.PageTable(3, 5, max_pages=4, device="cpu")
        sequences = torch.arange(3, dtype=torch.int32) if with_sequences else None
        batch = dataclasses.replace(table.batch(), sequences=sequences)
        return [torch.zeros(3, 8, 2, 128, dtype=torch.bfloat16), torch.zeros(8), *batch.tensors(), *cache.storage.tensors()]

    def attend(inputs) -> tuple[torch.Tensor, torch.Tensor]:
        q, sinks, table, lengths, counts, sequences, cu_seqlens, *storage = inputs
        batch = fp8attn.PagedBatch(table, lengths, counts, sequences, None, cu_seqlens)
        return run.attend_to_pages(PagedCall(q, Storage.of(storage), None, batch, recipe, 0.1, (99, 0), 30.0, sinks), H100, torch.float32)

    number = (1 << 41) + with_sequences
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load_with", lambda *_: told.library)
        assert recording.record(recorder.operators, {}, number, operands(), attend)
    _, *numbers = told.arguments
    given = operands()
    outputs = recorder.operators.repeat.default(number, given)
    buffer = ctypes.create_string_buffer(recorder.library.decode_params_size())
    assert recorder.library.recorded_decode(buffer) == decode.ctas_of(decode.choose(Storage.of(given[7:]), Scoring(0.1)), H100)
    found = emulation.DecodeParams.from_buffer_copy(buffer)
    ctas, of_call, scale, softcap = numbers[:4]
    scratch = [torch.empty(2 * ctas, 8, width) for width in (128, 2)]
    expected = emulation.decode_params(ctas, of_call, scale, softcap, given[:2], given[7:], given[2:7], [*outputs, *scratch, given[-1]])
    room = outputs[0].data_ptr()
    assert found.parts and found.part_rows and abs(found.part_rows - found.parts) >= scratch[1].nbytes and found.parts != room
    found.parts, found.part_rows = expected.parts, expected.part_rows
    assert bytes(found) == bytes(expected)
    given[-1] = None
    assert recorder.operators.repeat.default(number, given) is None


def test_a_plan_without_outputs(recorder: Recorder) -> None:
    """Its outputs are an empty list, and those of a call that isn't kept are None."""
    x = torch.zeros(3)

    def write(inputs) -> tuple[()]:
        recorder.operators.record_function.default(78, (1, 1, 1, 32, 0), False, [inputs[0].data_ptr()], [0])
        return ()

    assert recorder.operators.repeat.default(1 << 42, [x]) is None
    assert recording.record(recorder.operators, {}, 1 << 42, [x], write)
    other = torch.zeros(3)
    recorder.library.expect_words(1)
    assert recorder.operators.repeat.default(1 << 42, [other]) == []
    assert recorder.library.launched_function()[:8] == [78, 1, 1, 1, 32, 0, 0, other.data_ptr()]


def test_the_general_quantizer_takes_all_that_it_is_told(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="quantize_general takes 5 numbers, 5 operands and 8 results"):
        recorder.operators.quantize_general.default(0, 1, [64], [torch.zeros(1, 1, 1, 64), None, None], [None] * 8)


def pointers_of_structs() -> dict[str, set[str]]:
    """Of params.h: by struct, its pointers and tensor maps, and those of its parts by dotted names."""
    text = re.sub("//.*", "", (build.SOURCES / "params.h").read_text())
    found: dict[str, set[str]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL):
        found[name] = set()
        for declaration in body.split(";"):
            kind, _, names = declaration.strip().removeprefix("const ").partition(" ")
            if kind in found:
                found[name] |= {f"{names.strip()}.{pointer}" for pointer in found[kind]}
            elif kind == "CUtensorMap" or "*" in declaration:
                found[name] |= {x.split("[")[0] for x in re.findall(r"\w+(?:\[\w+\])?(?=\s*(?:,|$))", names)}
    return found


def test_a_plan_replaces_every_address() -> None:
    """Those of a struct's pointers, and of tensor maps. Another one stays that of the call that was recorded, whose memory may be another tensor's by
    then."""
    plan, structs = (build.SOURCES / "plan.h").read_text(), pointers_of_structs()
    listed = dict(re.findall(r"addresses\(const (\w+)&\) \{(.*?)#undef AT", plan, re.DOTALL))
    assert {*listed} == {name for name in structs if name != "PackedParams"} and "tile_table" in structs["Params"]
    for name, text in listed.items():
        names = {*re.findall(r"AT\(([\w.]+)\)", text)}
        for kind, part in re.findall(r"with\(addresses\((\w+)\(\)\), AT\((\w+)\)\)", text):
            names = names - {part} | {f"{part}.{pointer}" for pointer in structs[kind]}
        assert names == structs[name], f"{name}: {names ^ structs[name]}"


def test_uses_no_more_of_torch_than_the_stable_abi() -> None:
    """So that one library serves every torch from 2.10 on."""
    emulation.binding()
    listed = subprocess.run(["nm", "-DC", "--undefined-only", emulation.binding_library()], capture_output=True, text=True, check=True).stdout
    names = [line.split(maxsplit=1)[-1].removeprefix("U ") for line in listed.splitlines()]
    of_torch = [name for name in names if re.search(r"\b(c10|at|torch|aoti)\b|^(aoti_)?torch_", name)]
    stable = "".join(
        path.read_text()
        for folder in ("stable/c", "inductor/aoti_torch/c")
        for path in (Path(torch.__file__).parent / "include/torch/csrc" / folder).glob("*.h")
    )
    assert len(of_torch) > 10 and all(re.search(rf"\b{name}\(", stable) for name in of_torch)
