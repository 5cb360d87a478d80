"""KV caches: what wrong arguments say, what the page table does, and what the operators promise torch."""

from __future__ import annotations

import pytest
import torch
from test_ops import CHECKS, COMPILER
from torch.library import opcheck

import fp8attn
from cache_errors import BATCH, CACHE, CACHE_ERRORS, attending
from fp8attn import KVCache, PageTable
from fp8attn.ops import library_ops
from operator_errors import Sample


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


@pytest.mark.parametrize("sample", CACHE_ERRORS, ids=lambda sample: sample[2][:40])
def test_errors_name_the_argument(sample: Sample) -> None:
    action, kind, message = sample
    before = [x.clone() for x in CACHE.storage.tensors()]
    with pytest.raises(kind, match=message):
        action()
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(before, CACHE.storage.tensors(), strict=True))


def test_the_calls_without_a_fault_are_right() -> None:
    CACHE.check(BATCH, 4)
    assert attending()().shape == (2, 4, 60, 64)


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
    arguments = (x, *keys, cache.storage.tensors(), *batch, None, None, False, 64, 0.1, torch.float32)
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
