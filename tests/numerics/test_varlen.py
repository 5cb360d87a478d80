"""Packed sequences: each has the bytes, the output and the LSE that it has alone, and none sees another."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8attn
import ragged as kit
from closeness import E4M3_STEP, SHARE_OFF_GRID, assert_matches_pipeline, relative
from fp8attn import PRECISE, Recipe, ops, reference
from fp8attn.cuda import run as cuda_run
from fp8attn.cuda.configs import ROWS
from fp8attn.cuda.configs import HopperConfig as HopperInstance
from fp8attn.device import device_of
from fp8attn.layout import first_tile, first_unit, tiles_of, units_of
from fp8attn.quantization import quantize_kv, quantize_packed, sequences_of
from fp8attn.recipe import Packed
from fp8attn.schedule import TABLE_HEADER, TILE_FIELDS, heads_in_l2
from fp8attn.triton import quantize as triton_quantize
from fp8attn.triton import run, varlen
from fp8attn.triton.configs import HopperConfig
from quantizing import assert_same
from ragged import KINDS, TYPICAL, Ragged, alone, any_ragged, head_first, same_lse, table, varlen_call
from running import arithmetic_of
from strategies import FEW, given_several, noted, of_few_kinds

ragged = of_few_kinds(any_ragged, kit.like, KINDS)

TILES_OF_HEADS = ((1, 3), (2, 2), (4, 3), (5, 4), (8, 2))
"""Query heads that share keys, and units of a tile that has rows of any of them."""

SLOW = () if GPU else pytest.mark.thorough

FORWARD_BACKENDS = ("triton", "modelled", "reference", *(["auto"] if GPU else []))


def attention(case: Ragged, device: torch.device, backend: str, **others) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE. `others`: in place of the case's tensors and options."""
    q, k, v = case.tensors(device)
    cu_seqlens_q, cu_seqlens_k, seqused_k = case.starts(device)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, **case.options(device)) | others
    return fp8attn.varlen_sdpa(**arguments, return_lse=True, backend=backend)  # type: ignore[return-value]


@given(starts=st.lists(st.integers(0, 3000), min_size=1, max_size=20).map(sorted), size=st.sampled_from((1, 16, 64, 128, 192, 512)))
def test_places_of_units_do_not_overlap(starts: list[int], size: int) -> None:
    tokens = starts[-1] + 50
    where = Packed(torch.tensor([*starts, tokens], dtype=torch.int32), None, tokens)
    taken: list[int] = []
    for i, (begin, length) in enumerate(where.spans()):
        place = first_unit(begin, i, size)
        taken += range(place, place - (-length // size))
    assert len(taken) == len({*taken}) and all(0 <= place < units_of(where, size) for place in taken) and taken == sorted(taken)
    for sharing, units in TILES_OF_HEADS:
        taken = []
        for i, (begin, length) in enumerate(where.spans()):
            place = first_tile(begin, i, size, sharing, units)
            taken += range(place, place - (-(-(-length // size) * sharing) // units))
        assert len(taken) == len({*taken}) and all(0 <= place < tiles_of(where, size, sharing, units) for place in taken)


@given_several(ragged)
def test_a_sequence_has_the_bytes_that_it_has_alone(drawn: tuple[Ragged, ...], device: torch.device) -> None:
    """By the definition and by the kernels, whatever lies between sequences."""
    first, *others = drawn
    for case in noted((first, *(kit.like(case, first) for case in others))):
        _, k, v = (x.transpose(0, 1).unsqueeze(0) for x in case.tensors(device))
        _, starts, used = case.starts(device)
        where = Packed(starts, used, k.shape[2])
        found = triton_quantize.quantize_packed(k, v, case.recipe, where, device_of(device))
        for results in (found, quantize_packed(k, v, case.recipe, where)):
            for span, key, value in zip(case.spans[1], *map(sequences_of, results), strict=True):
                for x, expected in zip((key, value), quantize_kv(k[:, :, span], v[:, :, span], case.recipe), strict=True):
                    assert_same(x, expected)


@given_several(ragged, part=2)
def test_a_sequence_has_the_output_that_it_has_alone(drawn: tuple[Ragged, ...], device: torch.device) -> None:
    """Bit for bit, by Triton's kernel for it and the same config; and that of the pipeline."""
    first, *others = drawn
    properties = device_of(device)
    for case in noted((first, *(kit.like(case, first) for case in others))):
        q, k, v = case.tensors(device)
        cu_seqlens_q, cu_seqlens_k, seqused_k = case.starts(device)
        quantized = fp8attn.quantize(q, k, v, recipe=case.recipe, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
        call = varlen_call(quantized, q, case.options(device))
        config = run.choose(call, properties)
        out, lse = run.forward(call, properties, config)
        for rows, one in alone(call):
            if isinstance(config, HopperConfig) and one.kv_length == 0:
                continue
            expected, expected_lse = run.forward(one, properties, config)
            assert torch.equal(out[:, :, rows].nan_to_num(7.0), expected.nan_to_num(7.0))
            assert torch.equal(lse[:, :, rows].nan_to_num(7.0), expected_lse.nan_to_num(7.0))
        oracle, oracle_lse = ops.of_sequences(call, functools.partial(ops.modelled, call, arithmetic_of(config, call)))
        inside = torch.cat([torch.arange(x.start, x.stop, device=device) for x in case.spans[0]])
        if inside.numel():
            assert_matches_pipeline(out[:, :, inside], oracle[:, :, inside], properties.emulated, oracle_lse[:, :, inside])


@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
@settings(max_examples=max(settings().max_examples // (4 if FEW else 2), 1))
@given(case=ragged)
def test_from_end_to_end(case: Ragged, device: torch.device, backend: str) -> None:
    """As close to exact attention as FP8 is; zeros and -inf, or the sink, in rows that see nothing."""
    if backend == "triton" and case.seed % 2:
        case = replace(case, k_granularity="block")
    out, lse = attention(case, device, backend)
    q, k, v = case.tensors(device)
    options = case.options(device) | {"out_dtype": torch.float32, "dtype": torch.float64}
    del options["is_causal"], options["window"], options["recipe"]
    for i, (rows, keys) in enumerate(zip(*case.spans, strict=True)):
        parts = head_first(q, rows), head_first(k, keys), head_first(v, keys)
        exact, exact_lse = fp8attn.reference_sdpa(*parts, case.mask(i, device), enable_gqa=True, return_lse=True, **options)
        assert not out[rows].isnan().any() and torch.equal(lse[:, rows].isinf(), exact_lse[0].isinf())
        unseen = ~case.mask(i, device).any(1)
        assert (out[rows][unseen] == 0).all()
        assert relative(out[rows].transpose(0, 1), exact[0]) < (1e-3 if backend == "reference" else 0.25)


@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
def test_permuted_sequences_have_permuted_outputs(device: torch.device, backend: str) -> None:
    case = replace(TYPICAL, softcap=5.0, sinks=True)
    q, k, v = case.tensors(device)
    out, lse = attention(case, device, backend)
    order = (3, 1, 4, 0, 2)
    moved = replace(case, lengths=tuple(case.lengths[i] for i in order), behind=0)
    q2, k2, v2 = (torch.cat([x[spans[i]] for i in order]) for x, spans in zip((q, k, v), (case.spans[0], case.spans[1], case.spans[1]), strict=True))
    moved_out, moved_lse = attention(moved, device, backend, q=q2, k=k2, v=v2)
    for at, i in enumerate(order):
        assert torch.equal(moved_out[moved.spans[0][at]], out[case.spans[0][i]])
        assert torch.equal(moved_lse[:, moved.spans[0][at]], lse[:, case.spans[0][i]])


@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
@pytest.mark.parametrize("where", ("q", "k", "v"))
@pytest.mark.parametrize("recipe", (Recipe(), PRECISE), ids=("e4m3", "int8"))
@pytest.mark.one_in(3)
def test_nan_stays_in_its_sequence(device: torch.device, backend: str, where: str, recipe: Recipe) -> None:
    """And reaches the rows that see it, in every head that its own head serves."""
    case = replace(TYPICAL, lengths=((40, 40), (140, 140), (50, 50)), is_causal=True)
    tensors = dict(zip("qkv", case.tensors(device), strict=True))
    token = case.spans[0][1].start + 70
    tensors[where][token, 0, 3] = torch.nan
    out, lse = attention(case, device, backend, recipe=recipe, **tensors)
    expected = torch.zeros(out.shape[:2], dtype=torch.bool, device=device)
    if where == "q":
        expected[token, 0] = True
    else:
        expected[token : case.spans[0][1].stop, :2] = True
    inside = slice(0, case.spans[0][-1].stop)
    assert torch.equal(out[inside].isnan().all(-1), expected[inside]) and torch.equal(out[inside].isnan().any(-1), expected[inside])
    assert torch.equal(lse.T[inside].isnan(), expected[inside])


@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
def test_what_is_unused_is_as_if_it_were_not_there(device: torch.device, backend: str) -> None:
    """seqused_k gives the bits of sequences that are packed without a gap; and more than a sequence has is all of it."""
    case = replace(TYPICAL, window=(60, 5), is_causal=False)
    out, lse = attention(replace(case, unused=7), device, backend)
    expected, expected_lse = attention(case, device, backend)
    inside = slice(0, case.spans[0][-1].stop)
    assert torch.equal(out[inside], expected[inside]) and torch.equal(lse[:, inside], expected_lse[:, inside])
    too_many = torch.tensor([1000] * len(case.lengths), dtype=torch.int32, device=device)
    again, _ = attention(case, device, backend, seqused_k=too_many)
    assert torch.equal(again[inside], expected[inside])


@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
def test_quantized_operands_give_the_same_bits(device: torch.device, backend: str) -> None:
    """And a query in floating point is quantized as its keys are."""
    q, k, v = TYPICAL.tensors(device)
    starts_q, starts_k, _ = TYPICAL.starts(device)
    query = fp8attn.quantize(q, recipe=PRECISE, cu_seqlens_q=starts_q)
    key, value = fp8attn.quantize(None, k, v, recipe=PRECISE, cu_seqlens_k=starts_k)
    inside = slice(0, TYPICAL.spans[0][-1].stop)
    expected = fp8attn.varlen_sdpa(q, k, v, starts_q, starts_k, recipe=PRECISE, is_causal=True, backend=backend)
    out = fp8attn.varlen_sdpa(query, key, value, None, None, is_causal=True, out_dtype=torch.float32, backend=backend)
    beside = fp8attn.varlen_sdpa(q, key, value, starts_q, starts_k, is_causal=True, backend=backend)
    if backend == "reference":
        assert relative(out[inside], expected[inside]) < 0.1 and relative(beside[inside], expected[inside]) < 0.1
    else:
        assert torch.equal(out[inside], expected[inside]) and torch.equal(beside[inside], expected[inside])
    if backend != "triton":
        return
    both = fp8attn.quantize(q, k, v, recipe=PRECISE, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
    for x, y in zip(both, (query, key, value), strict=True):
        for one, other in zip(sequences_of(x), sequences_of(y), strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("sinks", (pytest.param(False, marks=SLOW), True))
def test_the_lse_is_that_of_keys_as_they_were(device: torch.device, sinks: bool) -> None:
    """Also of quantized queries. Sinks are in it."""
    case = replace(TYPICAL, sinks=sinks)
    q, k, v = case.tensors(device)
    starts_q, starts_k, _ = case.starts(device)
    exact = attention(case, device, "reference")[1]
    inside = slice(0, case.spans[0][-1].stop)
    query = fp8attn.quantize(q, cu_seqlens_q=starts_q)
    for operand in (q, query):
        _, lse = fp8attn.varlen_sdpa(operand, k, v, starts_q, starts_k, **case.options(device), return_lse=True, backend="triton")
        assert torch.equal(lse[:, inside].isinf(), exact[:, inside].isinf())
        assert (lse - exact)[:, inside].nan_to_num(0.0).abs().max() < 1.0


def entries_of(found: torch.Tensor) -> list[dict[str, int]]:
    """The tiles of a table."""
    header = dict(zip(TABLE_HEADER, found[0].tolist(), strict=False))
    assert header["taken"] == 0
    return [dict(zip(TILE_FIELDS, entry.tolist(), strict=False)) for entry in found[1 : 1 + header["tiles"]]]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=6),
    rows=st.sampled_from((16, 64, 192)),
    heads=st.sampled_from((None, *TILES_OF_HEADS)),
    window=st.sampled_from((None, (-1, 0), (-1, -1), (50, 10), (100, -1))),
)
def test_the_table_has_each_tile_once_and_long_sequences_first(
    lengths: list[tuple[int, int]], rows: int, heads: tuple[int, int] | None, window: tuple[int, int] | None, device: torch.device
) -> None:
    """The tiles of a sequence come one after the other, from the last to the first. Only in a call that isn't causal,
    where all of them see as many keys, a tile that isn't full comes later, behind full ones with more than half as
    many keys. `heads`: how many share keys, and units of a tile; None: tiles have rows of one head."""
    sharing, units = heads or (1, 1)
    starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=device) for x in zip(*lengths, strict=True)]
    q, k = (Packed(x, None, int(x[-1]) + 3) for x in starts)
    causal, of_rows = ("none", (-1, 0)) if window is None else ("bottom_right", window)
    found = table(q, k, rows, causal, of_rows, device, sharing, None if heads is None else units)
    assert len(found) == 1 + tiles_of(q, rows, sharing, units)
    tiles = entries_of(found)
    of_sequence = [-(-q_length // rows) * sharing for q_length, _ in lengths]  # units
    expected = {(i, unit // sharing * rows, unit % sharing) for i, count in enumerate(of_sequence) for unit in range(0, count, units)}
    assert {(x["sequence"], x["first_row"], x["head"]) for x in tiles} == expected and len(tiles) == len(expected)
    for x in tiles:
        i = x["sequence"]
        assert (x["q_length"], x["k_length"]) == lengths[i] and (x["q_begin"], x["k_begin"]) == (int(starts[0][i]), int(starts[1][i]))
    right = -1 if window is None else window[1]
    of_tile = -1 if window is None or -1 in of_rows else sum(of_rows) + rows * units  # keys
    most = {i: kv_length if of_tile < 0 else min(kv_length, of_tile) for i, (_, kv_length) in enumerate(lengths)}

    def unit(tile: dict[str, int]) -> int:
        return tile["first_row"] // rows * sharing + tile["head"]

    def is_full(tile: dict[str, int]) -> bool:
        units_exist = unit(tile) + units <= of_sequence[tile["sequence"]]
        return units_exist and (sharing > 1 or tile["first_row"] + rows * units <= tile["q_length"])

    full = [x for x in tiles if right >= 0 or is_full(x)]
    assert full == sorted(full, key=lambda x: (-most[x["sequence"]], x["sequence"], -unit(x)))
    for i, x in enumerate(tiles):
        if x not in full:
            assert all(most[other["sequence"]] <= most[x["sequence"]] for other in tiles[i:] if other in full)
            assert all(2 * most[other["sequence"]] >= most[x["sequence"]] for other in tiles[:i] if other in full)


@settings(max_examples=max(settings().max_examples // 4, 1))
@given(starts=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-50, 400), min_size=2, max_size=8), rows=st.sampled_from((16, 64)))
def test_starts_without_sense_lead_nowhere_outside(starts: list[int], rows: int, device: torch.device) -> None:
    """Whatever cu_seqlens and seqused hold, kernels stay inside of tensors."""
    tokens = 300
    where = Packed(torch.tensor(starts, dtype=torch.int32, device=device), torch.tensor(starts[1:], dtype=torch.int32, device=device), tokens)
    for i, (begin, length) in enumerate(where.spans()):
        assert 0 <= begin <= begin + length <= tokens
        assert first_unit(begin, i, 128) - (-length // 128) <= units_of(where, 128)
    found = table(replace(where, seqused=None), where, rows, "bottom_right", (-1, 0), device)
    for tile in entries_of(found):
        assert all(x >= 0 for x in tile.values()) and tile["sequence"] < where.sequences
        assert all(tile[f"{name}_begin"] + tile[f"{name}_length"] <= tokens for name in "qk")
    x = torch.randn(tokens, 1, 64, device=device)
    out = fp8attn.varlen_sdpa(x, x, x, where.cu_seqlens, where.cu_seqlens, seqused_k=where.seqused, is_causal=True, backend="triton")
    assert out.shape == x.shape


@pytest.mark.parametrize("longest", (pytest.param((0, 1), marks=SLOW), (1, 100_000)), ids=str)
@pytest.mark.parametrize("backend", FORWARD_BACKENDS)
def test_wrong_longest_lengths_change_nothing_but_time(device: torch.device, backend: str, longest: tuple[int, int]) -> None:
    case = replace(TYPICAL, is_causal=False)
    out, lse = attention(case, device, backend)
    inside = slice(0, case.spans[0][-1].stop)
    for length in longest:
        found, found_lse = attention(case, device, backend, max_seqlen_q=length, max_seqlen_k=length)
        torch.testing.assert_close(found[inside], out[inside], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found_lse[:, inside], lse[:, inside], rtol=1e-3, atol=1e-3)
    q, k, _ = case.tensors(device)
    where = [Packed(starts, None, x.shape[0]) for starts, x in zip(case.starts(device)[:2], (q, k), strict=True)]
    assert heads_in_l2(kit.call_of_lengths(*where, "none", (-1, 0), longest=0), 4) == 1


@pytest.mark.parametrize("tokens", ((0, 9), (9, 0), (0, 0)))
def test_without_tokens(device: torch.device, tokens: tuple[int, int]) -> None:
    q, k = (torch.zeros(n, 2, 64, device=device) for n in tokens)
    starts = [torch.tensor([0, n, n], dtype=torch.int32, device=device) for n in tokens]
    for backend in FORWARD_BACKENDS:
        out, lse = fp8attn.varlen_sdpa(q, k, k, *starts, return_lse=True, backend=backend)
        assert out.shape == q.shape and lse.shape == (2, tokens[0]) and not out.any()
        assert bool((lse == -torch.inf).all()) == (tokens[1] == 0 or tokens[0] == 0)


def test_one_sequence_is_a_dense_call(device: torch.device) -> None:
    """Bit for bit, by one config, by Triton's quantizers and the definition's."""
    for backend in ("triton", "modelled"):
        case = replace(TYPICAL, lengths=((150, 200),), behind=0)
        q, k, v = case.tensors(device)
        out, lse = attention(case, device, backend)
        dense, dense_lse = fp8attn.sdpa(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, causal_alignment="bottom_right", enable_gqa=True, return_lse=True,
            backend=backend,
        )  # type: ignore[arg-type]  # fmt: skip
        if GPU and backend == "triton":  # the CUDA quantizer rotates on tensor cores
            assert relative(out.transpose(0, 1)[None], dense) < 2e-3
        else:
            assert torch.equal(out.transpose(0, 1)[None], dense)
            assert relative(lse[None], dense_lse) < 1e-6  # on a GPU, K's mean is multiplied in another order
            assert GPU or torch.equal(lse[None], dense_lse)


def test_autocast_and_other_dtypes(device: torch.device) -> None:
    case = replace(TYPICAL, lengths=TYPICAL.lengths[:3])
    q, k, v = case.tensors(device)
    starts = case.starts(device)[:2]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fp8attn.varlen_sdpa(q, k, v, *starts, backend="modelled").dtype == torch.bfloat16
    assert fp8attn.varlen_sdpa(q, k, v, *starts, out_dtype=torch.float16, backend="triton").dtype == torch.float16
    strided = torch.full((q.shape[1] + 1, q.shape[0], q.shape[2] + 8), 3.0, device=device)[1:, :, :64].transpose(0, 1)
    strided.copy_(q)
    inside = slice(0, case.spans[0][-1].stop)
    for x, y in zip(*(fp8attn.varlen_sdpa(x, k, v, *starts, return_lse=True, backend="triton") for x in (strided, q)), strict=True):
        assert torch.equal(x[inside] if x.dim() == 3 else x[:, inside], y[inside] if y.dim() == 3 else y[:, inside])


def test_cuda_kernels_say_which_packed_sequences_they_take(device: torch.device) -> None:
    q, k, v = TYPICAL.tensors(device)
    reasons = r"packed sequences are given; the CUDA kernel takes|it needs sm_90|tensors are on cpu"
    with pytest.raises(fp8attn.BackendUnavailable, match=f"cuda: ({reasons})"):
        fp8attn.varlen_sdpa(q, k, v, *TYPICAL.starts(device)[:2], recipe=Recipe(k="token"), backend="cuda")


@pytest.mark.gpu
@given(case=ragged)
def test_by_the_cuda_kernel_a_sequence_has_the_output_that_it_has_alone(case: Ragged, device: torch.device) -> None:
    """Bit for bit, by the instance for one sequence."""
    case, properties = replace(case, k_granularity="block", compute="e4m3"), device_of(device)
    if properties.arch // 10 != 9:
        pytest.skip("needs sm_90")
    q, k, v = case.tensors(device)
    cu_seqlens_q, cu_seqlens_k, seqused_k = case.starts(device)
    options = case.options(device)
    quantized = fp8attn.quantize(q, k, v, recipe=options["recipe"], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    call = varlen_call(quantized, q, options)
    config = cuda_run.choose(call, properties)
    assert isinstance(config, HopperInstance) and config.varlen
    out, lse = cuda_run.forward(call, properties, config, tile_table=varlen.table_of(call, ROWS, properties, config.consumers))
    for rows, one in alone(call):
        expected, expected_lse = cuda_run.forward(one, properties, replace(config, varlen=False), 1)
        assert torch.equal(out[:, :, rows].nan_to_num(7.0), expected.nan_to_num(7.0))
        assert same_lse(lse[:, :, rows].nan_to_num(7.0), expected_lse.nan_to_num(7.0), one)


KINDS_OF_SCORES: tuple[dict, ...] = ({"is_causal": True, "sinks": True}, {}, {"softcap": 5.0, "is_causal": True}, {"is_causal": True})


@pytest.mark.parametrize("fields", KINDS_OF_SCORES, ids=str)
@pytest.mark.one_in(2)
def test_the_operator_that_quantizes(device: torch.device, fields: dict) -> None:
    """Where the attention kernel can't quantize queries, it does the same in several launches."""
    case = replace(TYPICAL, dtype=torch.bfloat16, **fields)
    q, k, v = (x.transpose(0, 1)[None] for x in case.tensors(device))
    starts_q, starts_k, _ = case.starts(device)
    options = case.options(device)
    out, lse = ops.library_ops.auto_varlen_forward_from_fp16(
        q, k, v, starts_q, starts_k, None, q.shape[2], k.shape[2], q.shape[3] ** -0.5, "bottom_right" if case.is_causal else "none", torch.float32,
        True, reference.CAUSAL_WINDOW, case.softcap, options["sinks"],
    )  # fmt: skip
    expected, expected_lse = attention(case, device, "auto" if GPU else "triton", scale=q.shape[3] ** -0.5, out_dtype=torch.float32)
    inside = slice(0, case.spans[0][-1].stop)
    assert torch.equal(out[0].transpose(0, 1)[inside], expected[inside]) and torch.equal(lse[0][:, inside], expected_lse[:, inside])


@pytest.mark.gpu
@pytest.mark.parametrize("fields", KINDS_OF_SCORES, ids=str)
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_queries_that_the_cuda_kernel_quantizes(device: torch.device, dim: int, fields: dict) -> None:
    """The answers of queries that were quantized before, but for the rounding of rotations, and for K's mean in the LSE:
    it is multiplied by the queries as they came, not by their codes. Each sequence has its own mean."""
    if device_of(device).arch // 10 != 9:
        pytest.skip("needs sm_90")
    case = replace(TYPICAL, dtype=torch.bfloat16, dim=dim, value_dim=dim, **fields)
    q, k, v = case.tensors(device)
    starts_q, starts_k, _ = case.starts(device)
    options = case.options(device)
    plan = fp8attn.explain_varlen(q, k, v, starts_q, starts_k, **options, backend="cuda")
    assert isinstance(plan.config, HopperInstance) and plan.config.fuse_q_quant and "query is quantized where it attends" in plan.because
    out, lse = attention(case, device, "cuda")
    query = fp8attn.quantize(q, cu_seqlens_q=starts_q)
    key, value = fp8attn.quantize(None, k, v, cu_seqlens_k=starts_k)
    expected, expected_lse = fp8attn.varlen_sdpa(query, key, value, None, None, **options, out_dtype=out.dtype, return_lse=True, backend="cuda")
    inside = slice(0, case.spans[0][-1].stop)
    assert torch.equal(lse[:, inside].isinf(), expected_lse[:, inside].isinf())
    assert relative(out[inside], expected[inside]) < 2e-2
    assert key.mean is not None
    packed, zeros = q.transpose(0, 1)[None], torch.zeros_like(lse)[None]
    as_it_came, of_codes = (
        ops.unsmoothed_packed_lse(zeros, x, key.mean, starts_q, dim**-0.5, *of_x)[0, :, inside]
        for x, *of_x in ((packed, key.rotated), (query.data, 0, query.scale, query.granularity))
    )
    # a change of the mean's share changes an LSE by as much at most
    apart = ((lse - expected_lse)[:, inside].nan_to_num(0.0).abs() - (as_it_came - of_codes).abs()).clamp(min=0)
    assert apart.max() < E4M3_STEP and apart.quantile(1 - SHARE_OFF_GRID) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("triton", "auto"))
def test_a_graph_is_replayed_with_other_lengths(device: torch.device, backend: str) -> None:
    """Nothing waits for the GPU, and nothing of the lengths is kept."""
    lengths = ((70, 130), (30, 20)), ((20, 50), (80, 100)), ((100, 150), (0, 0))
    cases = [replace(TYPICAL, lengths=x, dtype=torch.bfloat16, behind=0) for x in lengths]
    q, k, v = (x.nan_to_num(1.0) for x in cases[0].tensors(device))
    starts = cases[0].starts(device)[:2]
    options: dict = dict(is_causal=True, return_lse=True, backend=backend)
    fp8attn.varlen_sdpa(q, k, v, *starts, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fp8attn.varlen_sdpa(q, k, v, *starts, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8attn.varlen_sdpa(q, k, v, *starts, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for case in cases:
        for mine, theirs in zip((q, k, v, *starts), (*case.tensors(device), *case.starts(device)[:2]), strict=True):
            mine.copy_(theirs)
        graph.replay()
        expected, expected_lse = fp8attn.varlen_sdpa(q, k, v, *starts, **options)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_the_exact_reference_is_float64_per_sequence(device: torch.device) -> None:
    """Of the definition: a loop over sequences."""
    q, k, v = TYPICAL.tensors(device)
    starts_q, starts_k, _ = TYPICAL.starts(device)
    where = Packed(starts_q, None, q.shape[0])
    keys = Packed(starts_k, None, k.shape[0]).spans()
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))

    def attend(i: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        span = slice(keys[i][0], sum(keys[i]))
        return reference.attention(q4[:, :, rows], k4[:, :, span], v4[:, :, span], causal="bottom_right", dtype=torch.float64)

    out, lse = reference.of_each_sequence(q4, v.shape[2], where, attend)
    found, found_lse = attention(TYPICAL, device, "reference")
    inside = slice(0, TYPICAL.spans[0][-1].stop)
    torch.testing.assert_close(found[inside].double(), out[0].transpose(0, 1)[inside], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_lse[:, inside].double(), lse[0][:, inside], rtol=1e-4, atol=1e-5)
