"""KV caches: what wrong arguments say, what the page table does, and what the operators promise torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_ops import CHECKS, COMPILER
from torch.library import opcheck

import fp8attn
from fp8attn import KVCache, PageTable
from fp8attn.ops import library_ops


@pytest.mark.parametrize(
    "change, error, message",
    (
        (dict(sequences=0), ValueError, "sequences is 0"),
        (dict(num_pages=0), ValueError, "num_pages is 0"),
        (dict(kv_heads=True), ValueError, "kv_heads is True"),
        (dict(head_dim=65), ValueError, "head_dim is 65"),
        (dict(value_dim=8), ValueError, "head_dim is 8"),
        (dict(recipe=fp8attn.Recipe(recent=128)), ValueError, "recipe has recent=128"),
        (dict(recipe="int8"), TypeError, "recipe is a str"),
        (dict(dtype=torch.float64), TypeError, "dtype is torch.float64"),
    ),
)
def test_wrong_caches(change: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        KVCache(**{**dict(sequences=1, num_pages=1, kv_heads=1, head_dim=64, device="cpu"), **change})


def filled() -> tuple[KVCache, PageTable, torch.Tensor]:
    cache, table = KVCache(2, 4, 2, 64, device="cpu"), PageTable(2, 4, device="cpu")
    for sequence in (0, 1):
        table.reserve(sequence, 255)
    table.lengths += 255
    return cache, table, torch.zeros(2, 2, 60, 64, dtype=torch.bfloat16)


BATCHES = (
    (dict(page_table=torch.zeros(2, 4)), TypeError, "page_table is torch.float32; it must be torch.int32"),
    (dict(page_table=torch.zeros(4, 2, dtype=torch.int32).mT), ValueError, "page_table has shape"),
    (dict(lengths=torch.zeros(3, dtype=torch.int32)), ValueError, r"lengths has shape \(3,\); it must be \(2,\)"),
    (dict(counts=torch.zeros(2, dtype=torch.int64)), TypeError, "counts is torch.int64"),
    (dict(sequences=torch.zeros(4, dtype=torch.int32)[::2]), ValueError, "sequences has strides"),
    (dict(max_length=-1), ValueError, "max_length is -1"),
)


def test_wrong_appends() -> None:
    cache, table, x = filled()
    batch = table.batch()
    samples = (
        ((x, x[:, :1], batch), {}, ValueError, "value has heads 1; it must be 2"),
        ((x, x[..., :32], batch), {}, ValueError, "value has head_dim 32"),
        ((x.float(), x, batch), {}, TypeError, "key is torch.float32; it must be the cache's torch.bfloat16"),
        ((x[:1], x[:1], batch), {}, ValueError, "key has batch 1; it must be 2"),
        ((x[0], x, batch), {}, ValueError, "key has shape"),
        ((x, x, table), {}, TypeError, "batch is a PageTable"),
        ((x, x, batch), dict(backend="cudnn"), ValueError, "backend is 'cudnn'"),
        ((x.clone().requires_grad_(), x, batch), {}, RuntimeError, "key requires grad"),
        *(((x, x, dataclasses.replace(batch, **change)), {}, error, message) for change, error, message in BATCHES[:-1]),
    )
    before = [x.clone() for x in cache.storage.tensors()]
    for arguments, options, error, message in samples:
        with pytest.raises(error, match=message):
            cache.append(*arguments, **options)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, cache.storage.tensors(), strict=True))


def test_wrong_attention() -> None:
    cache, table, x = filled()
    q, batch = torch.zeros(2, 4, 60, 64, dtype=torch.bfloat16), table.batch()
    samples = (
        ((q, "cache", batch), {}, TypeError, "cache is a str"),
        ((q, cache, None), {}, TypeError, "batch is a NoneType"),
        ((q[:, :3], cache, batch), {}, ValueError, "query has 3 heads; it must be a multiple of the cache's 2"),
        ((q[..., :32], cache, batch), {}, ValueError, "query has head_dim 32; it must be 64"),
        ((q, cache, batch, (x, None)), {}, TypeError, "value is a NoneType"),
        ((q, cache, batch, (x[:, :, :9], x[:, :, :9])), {}, ValueError, "key has length 9; it must be 60"),
        ((q.repeat(1, 1, 4, 1), cache, batch), {}, ValueError, "query has 240 tokens and new is None"),
        ((q, cache, batch), dict(scale=float("nan")), ValueError, "scale is nan"),
        ((q, cache, batch), dict(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8"),
        ((q, cache, batch), dict(return_lse=1), TypeError, "return_lse is a int"),
        ((q, cache, batch), dict(backend="modeled"), ValueError, "backend is 'modeled'"),
        *(((q, cache, dataclasses.replace(batch, **change)), {}, error, message) for change, error, message in BATCHES),
    )
    for arguments, options, error, message in samples:
        with pytest.raises(error, match=message):
            fp8attn.paged_sdpa(*arguments, **options)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_numbers_that_check_refuses() -> None:
    cache, table, _ = filled()
    batch = table.batch()
    cache.check(batch, 4)
    hole = table.table.clone()
    hole[1, 0] = -1
    for change, message in (
        (dict(lengths=ints(255, -1)), r"lengths\[1\] is -1; it must be 0 to 639"),
        (dict(lengths=ints(255, 640)), r"lengths\[1\] is 640"),
        (dict(max_length=200), r"lengths\[0\] is 255; it must be 0 to 200"),
        (dict(lengths=ints(255, 3)), r"counts\[1\] is 4; it must be 0 to 3"),
        (dict(counts=ints(5, 4)), r"counts\[0\] is 5; it must be 0 to 4"),
        (dict(page_table=hole), r"page_table\[1, 0\] is -1; it must be 0 to 3"),
        (dict(sequences=ints(0, 0)), "sequences is .*; it must be different numbers from 0 to 1"),
        (dict(sequences=ints(0, 2)), "sequences is"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.check(dataclasses.replace(batch, **change), 4)


def test_operators_check_a_cache() -> None:
    """Anybody can call them with any tensors."""
    cache, table, x = filled()
    batch = table.batch().tensors()
    for index, wrong, error, message in (
        (0, torch.zeros(4, 2, 128, 64), TypeError, "pages.k is torch.float32"),
        (1, torch.zeros(4, 3), ValueError, "pages.k_scale has shape"),
        (2, torch.zeros(4, 2, 64, 120, dtype=torch.uint8).view(torch.float8_e4m3fn), ValueError, "pages.v has shape"),
        (7, torch.zeros(2, 2, 191, 64, dtype=torch.bfloat16), ValueError, "k has shape"),
        (8, torch.zeros(2, 2, 192, 64), TypeError, "v is torch.float32"),
        (9, torch.zeros(2, 2, dtype=torch.int32).mT, ValueError, "tickets has strides"),
    ):
        tensors = cache.storage.tensors()
        tensors[index] = wrong
        with pytest.raises(error, match=message):
            library_ops.auto_paged_append(x, x, tensors, *batch, 64, True, True)
        with pytest.raises(error, match=message):
            library_ops.auto_paged_attention(x, None, None, tensors, *batch, None, 64, 0.1, torch.float32)


def test_page_tables() -> None:
    table = PageTable(3, 5, max_pages=4, device="cpu")
    table.reserve(0, 300)
    table.reserve(1, 127)
    table.reserve(1, 128)
    assert table.table.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1], [-1] * 4] and table.free_pages == 2
    for action, error, message in (
        (lambda: table.reserve(2, 384), RuntimeError, "2 pages of 128 tokens are free; 3 are needed"),
        (lambda: table.reserve(3, 1), ValueError, "sequence is 3"),
        (lambda: table.reserve(0, 640), ValueError, "length is 640; it must be an int from 0 to 639"),
        (lambda: table.truncate(0, -1), ValueError, "length is -1"),
        (lambda: table.fork(0, 1, 128), ValueError, "target is 1, which holds 1 pages"),
        (lambda: table.fork(0, 0, 128), ValueError, "target is 0"),
        (lambda: table.fork(0, 2, 384), ValueError, "length is 384; source holds 2 pages, so it must be less than 384"),
        (lambda: PageTable(1, 0), ValueError, "num_pages is 0"),
        (lambda: KVCache(1, 1, 1, 64, device="cpu").fork(0, 1), ValueError, "target is 1"),
    ):
        with pytest.raises(error, match=message):
            action()
    table.fork(0, 2, 260)
    assert table.table[2].tolist() == [0, 1, -1, -1] and table.lengths.tolist() == [0, 0, 260] and table.free_pages == 2
    table.truncate(0, 130)
    assert table.free_pages == 2 and table.table[0].tolist() == [0, -1, -1, -1] and table.lengths.tolist() == [130, 0, 260]
    table.truncate(2, 0)
    assert table.free_pages == 3


@pytest.mark.parametrize("new", (False, True))
def test_opcheck(device: torch.device, new: bool) -> None:
    """Of tensors that torch can multiply, so that it sees what changes: pages in int8, V's codes as they are."""
    cache, table = KVCache(2, 4, 2, 64, recipe=fp8attn.PRECISE, device=device), PageTable(2, 4, device=device)
    table.lengths += 9
    x = torch.randn(2, 2, 9, 64, device=device, dtype=torch.bfloat16)
    batch = table.batch().tensors()
    checks = ("test_faketensor",)
    opcheck(library_ops.auto_paged_append, (x, x, cache.storage.tensors(), *batch, 64, True, True), test_utils=checks)
    keys = (x, x) if new else (None, None)
    arguments = (x, *keys, cache.storage.tensors(), *batch, None, 64, 0.1, torch.float32)
    opcheck(library_ops.auto_paged_attention, arguments, test_utils=CHECKS[1:])


def test_compiled_whole(device: torch.device) -> None:
    """fullgraph=True: appending and attending, a prompt and then a token; the same bits as eager."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        cache, table = KVCache(2, 8, 2, 64, device=device), PageTable(2, 8, device=device)
        batch = table.batch()

        def attention(q, k, v, cache=cache, batch=batch):
            return fp8attn.paged_sdpa(q + 1, cache, batch, (k, v))

        function = torch.compile(attention, fullgraph=True, backend=COMPILER) if compiled else attention
        g = torch.Generator().manual_seed(0)
        for length in (150, 1):
            for sequence in (0, 1):
                table.reserve(sequence, int(table.lengths[sequence]) + length)
            table.lengths += length
            q, k, v = (torch.randn(2, heads, length, 64, generator=g).to(device, torch.bfloat16) for heads in (4, 2, 2))
            found.append(function(q, k, v))
    for x, y in zip(found[:2], found[2:], strict=True):
        assert torch.equal(x, y)
