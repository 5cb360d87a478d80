"""Caches of other engines: what wrong arguments say, and what the operators promise torch."""

from __future__ import annotations

import pytest
import torch
from test_ops import CHECKS, COMPILER
from torch.library import opcheck

import fp8attn
from fp8attn import PagedBatch, PagedTensors
from fp8attn.ops import library_ops
from operator_errors import Sample
from tensors_errors import FP8, HALF, TENSORS_ERRORS, attending, writing


@pytest.mark.parametrize("sample", TENSORS_ERRORS, ids=lambda sample: sample[2][:40])
def test_errors_name_the_argument(sample: Sample) -> None:
    action, kind, message = sample
    with pytest.raises(kind, match=message):
        action()
    assert not any(x.view(torch.uint8).any() for cache in (FP8, HALF) for x in (cache.k, cache.v)), "a call with an error wrote"


def test_the_calls_without_a_fault_are_right() -> None:
    assert attending()().shape == (2, 4, 3, 64)  # type: ignore[union-attr]
    cache = PagedTensors(FP8.k.clone(), FP8.v.clone(), 0.5, 0.5)
    writing(cache=cache)()


def test_numbers_become_tensors() -> None:
    assert isinstance(FP8.k_scale, torch.Tensor) and FP8.k_scale.shape == () and float(FP8.k_scale) == 0.5
    assert FP8.is_fp8 and not HALF.is_fp8 and FP8.page == 16 and FP8.kv_heads == 2
    assert len(FP8.tensors()) == 4 and len(HALF.tensors()) == 2


def test_bytes_are_e4m3() -> None:
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(4, 16, 2, 64, generator=g).to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(2, 4, 3, 64, generator=g)
    found = [attending(q, PagedTensors(k.view(dtype), v.view(dtype), 0.5, 0.5))() for dtype in (torch.float8_e4m3fn, torch.uint8)]
    assert torch.equal(*found)  # type: ignore[arg-type]


def parts(device: torch.device) -> tuple[list[torch.Tensor], PagedBatch, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(shape, generator=g).to(device, torch.bfloat16) for shape in ((4, 16, 2, 64), (4, 16, 2, 64), (2, 4, 3, 64)))
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[3, 0], [1, 2]], [20, 32]))
    return [k, v], PagedBatch(table, lengths), q


def test_opcheck(device: torch.device) -> None:
    """Of a cache that torch can multiply, so that it sees what changes."""
    cache, batch, q = parts(device)
    arguments = (q, cache, None, *batch.tensors()[:3], None, None, None, False, 0.1, [-1, 0], 0.0, None, torch.float32)
    opcheck(library_ops.auto_tensors_attention, arguments, test_utils=CHECKS)
    slots = torch.tensor([3, 40], device=device)
    opcheck(library_ops.auto_write_to_pages, (q[0, :2, :2], q[1, :2, :2], cache, slots), test_utils=CHECKS[:2])


@pytest.mark.parametrize("recipe", (None, fp8attn.Recipe()))
def test_compiled_whole(device: torch.device, recipe: fp8attn.Recipe | None) -> None:
    """fullgraph=True: writing and attending; the same bits as eager."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        (k, v), batch, q = parts(device)
        cache = PagedTensors(k, v, recipe=recipe)
        slots = torch.tensor([3 * 16 + 2, 1 * 16], device=device)

        def attention(q, k, cache=cache, batch=batch, slots=slots):
            fp8attn.write_to_pages(k, k + 1, cache, slots)
            return fp8attn.paged_sdpa(q + 1, cache, batch, window=(9, 0), softcap=2.0)

        function = torch.compile(attention, fullgraph=True, backend=COMPILER) if compiled else attention
        found.append((function(q, q[0, :2, :2]), k))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
