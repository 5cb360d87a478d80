"""Wrong arguments of KV caches: what is done, the error, and what it says."""

from __future__ import annotations

import dataclasses
import functools

import torch

import fp8attn
from fp8attn import KVCache, PageTable
from fp8attn.ops import library_ops
from operator_errors import Sample

E4M3 = torch.float8_e4m3fn


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CACHE, TABLE = KVCache(2, 4, 2, 64, device="cpu"), PageTable(2, 4, device="cpu")
for _sequence in (0, 1):
    TABLE.reserve(_sequence, 255)
TABLE.lengths += 255
BATCH = TABLE.batch()
PACKED = TABLE.batch(cu_seqlens=ints(0, 20, 50))
X, Q = torch.zeros(2, 2, 60, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 60, 64, dtype=torch.bfloat16)


def appending(key: object = X, value: object = X, batch: object = BATCH, **options: object):
    return lambda: CACHE.append(key, value, batch, **options)


def attending(query: object = Q, batch: object = BATCH, new: object = None, cache: object = CACHE, **options: object):
    return lambda: fp8attn.paged_sdpa(query, cache, batch, new, **options)


def checking(**change: object):
    return lambda: CACHE.check(dataclasses.replace(BATCH, **change), 4)


def of_storage(index: int, wrong: torch.Tensor, attends: bool):
    """An operator with one tensor of the cache replaced."""
    tensors = CACHE.storage.tensors()
    tensors[index] = wrong
    if attends:
        return lambda: library_ops.auto_paged_attention(X, None, None, tensors, *BATCH.tensors(), None, None, False, 64, 0.1, torch.float32)
    return lambda: library_ops.auto_paged_append(X, X, tensors, *BATCH.tensors(), 64, True, True)


BATCHES = (
    (dict(page_table=torch.zeros(2, 4)), TypeError, "page_table is torch.float32; it must be torch.int32"),
    (dict(page_table=torch.zeros(4, 2, dtype=torch.int32).mT), ValueError, "page_table has shape"),
    (dict(lengths=ints(1, 2, 3)), ValueError, r"lengths has shape \(3,\); it must be \(2,\)"),
    (dict(counts=torch.zeros(2, dtype=torch.int64)), TypeError, "counts is torch.int64"),
    (dict(sequences=ints(0, 0, 0, 0)[::2]), ValueError, "sequences has strides"),
    (dict(cu_seqlens=ints(0, 1)), ValueError, r"cu_seqlens has shape \(2,\); it must be \(3,\)"),
    (dict(cu_seqlens=torch.zeros(3)), TypeError, "cu_seqlens is torch.float32"),
    (dict(cu_seqlens=ints(0, 0, 0, 0, 0, 0)[::2]), ValueError, "cu_seqlens has strides"),
    (dict(cu_seqlens=ints(0, 1, 2), counts=ints(1, 1)), ValueError, "counts and cu_seqlens are given"),
)

LIMITS = (
    (dict(max_length=-1), ValueError, "max_length is -1"),
    (dict(max_count=1), ValueError, "max_count is 1; it must be None, or an int of at least 1 with cu_seqlens"),
    (dict(batch_invariant=1), TypeError, "batch_invariant is a int; it must be a bool"),
    (dict(cu_seqlens=ints(0, 1, 2), max_count=0), ValueError, "max_count is 0 with cu_seqlens; it must be None, or an int of at least 1"),
)
"""Of a batch, that attention needs."""

STORAGES = (
    (0, torch.zeros(4, 2, 128, 64), TypeError, "pages.k is torch.float32"),
    (0, torch.zeros(4, 2, 64, dtype=torch.int8), ValueError, r"the cache's pages.k has shape \(4, 2, 64\)"),
    (1, torch.zeros(4, 3), ValueError, "pages.k_scale has shape"),
    (2, torch.zeros(4, 2, 64, 120, dtype=torch.uint8).view(E4M3), ValueError, "pages.v has shape"),
    (7, torch.zeros(2, 2, 191, 64, dtype=torch.bfloat16), ValueError, "k has shape"),
    (8, torch.zeros(2, 2, 192, 64), TypeError, "v is torch.float32"),
    (9, torch.zeros(2, 2, dtype=torch.int32).mT, ValueError, "tickets has strides"),
)

_NONE = [x[:0] if i < 4 else x for i, x in enumerate(CACHE.storage.tensors())]

CACHE_ERRORS: tuple[Sample, ...] = (
    (appending(value=X[:, :1]), ValueError, "value has heads 1; it must be 2"),
    (appending(value=X[..., :32]), ValueError, "value has head_dim 32"),
    (appending(X.float()), TypeError, "key is torch.float32; it must be the cache's torch.bfloat16"),
    (attending(Q.to("meta")), ValueError, "query is on meta; it must be on the cache's device, cpu"),
    (appending(X[:1], X[:1]), ValueError, "key has batch 1; it must be 2"),
    (appending(X[0]), ValueError, "key has shape"),
    (appending(batch=TABLE), TypeError, "batch is a PageTable"),
    (appending(backend="cudnn"), ValueError, "backend is 'cudnn'"),
    (appending(X.clone().requires_grad_()), RuntimeError, "key requires grad"),
    *((appending(batch=dataclasses.replace(BATCH, **change)), error, message) for change, error, message in BATCHES),
    (attending(cache="cache"), TypeError, "cache is a str"),
    (attending(batch=None), TypeError, "batch is a NoneType"),
    (lambda: CACHE.check("batch", 4), TypeError, "batch is a str; it must be a fp8attn.PagedBatch"),
    (attending("query"), TypeError, "query is a str"),
    (attending(Q[:, :3]), ValueError, "query has 3 heads; it must be a multiple of the cache's 2"),
    (attending(Q[..., :32]), ValueError, "query has head_dim 32; it must be 64"),
    (attending(new=(X, None)), TypeError, "value is a NoneType"),
    (attending(new=(X[:, :, :9], X[:, :, :9])), ValueError, "key has length 9; it must be 60"),
    (attending(Q.repeat(1, 1, 4, 1)), ValueError, "query has 240 tokens and new is None"),
    (attending(scale=float("nan")), ValueError, "scale is nan"),
    (attending(window=3), TypeError, "window is 3; it must be"),
    (attending(window=(5, 1)), ValueError, r"window is \(5, 1\); with a fp8attn.KVCache, which is causal, the second number must be 0"),
    (attending(window=(-1, -1)), ValueError, r"window is \(-1, -1\); with a fp8attn.KVCache"),
    (attending(window=(-2, 0)), ValueError, r"window is \(-2, 0\); its numbers must be -1"),
    (attending(softcap=-1.0), ValueError, "softcap is -1.0; it must be 0"),
    (attending(softcap=True), TypeError, "softcap is a bool"),
    (attending(sinks=torch.zeros(2)), ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
    (attending(sinks=torch.zeros(8)[::2]), ValueError, "sinks has strides"),
    (attending(sinks=torch.zeros(4).requires_grad_()), RuntimeError, "sinks requires grad"),
    (attending(sinks="sinks"), TypeError, "sinks is a str"),
    (attending(batch=PACKED), ValueError, r"query has shape \(2, 4, 60, 64\); with cu_seqlens it must be \(length, heads, head_dim\)"),
    (attending(Q[0]), ValueError, r"query has shape \(4, 60, 64\); without cu_seqlens it must be \(batch, heads, length, head_dim\)"),
    (attending(Q[0].transpose(0, 1), PACKED, new=(X[0], X[0])), ValueError, "key has length 2; it must be 60"),
    (appending(X[0].transpose(0, 1), X[0].transpose(0, 1)[:9], PACKED), ValueError, "value has length 9; it must be 60"),
    (appending(X[0, :, :, :32].transpose(0, 1), X[0].transpose(0, 1), PACKED), ValueError, "key has head_dim 32; it must be 64"),
    (lambda: CACHE.check(dataclasses.replace(PACKED, cu_seqlens=ints(1, 2, 3)), 60), ValueError, r"cu_seqlens is \[1, 2, 3\]; it must begin with 0"),
    (lambda: CACHE.check(dataclasses.replace(PACKED, max_count=29), 60), ValueError, "with max_count 29 no row may have more tokens"),
    (attending(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8"),
    (attending(return_lse=1), TypeError, "return_lse is a int"),
    (attending(backend="modeled"), ValueError, "backend is 'modeled'"),
    *((attending(batch=dataclasses.replace(BATCH, **change)), error, message) for change, error, message in BATCHES + LIMITS),
    (checking(lengths=ints(255, -1)), ValueError, r"lengths\[1\] is -1; it must be 0 to 639"),
    (checking(lengths=ints(255, 640)), ValueError, r"lengths\[1\] is 640"),
    (checking(max_length=200), ValueError, r"lengths\[0\] is 255; it must be 0 to 200"),
    (checking(lengths=ints(255, 3)), ValueError, r"counts\[1\] is 4; it must be 0 to 3"),
    (checking(counts=ints(5, 4)), ValueError, r"counts\[0\] is 5; it must be 0 to 4"),
    (checking(page_table=ints(0, 9, -1, 9).view(2, 2)), ValueError, r"page_table\[1, 0\] is -1; it must be 0 to 3"),
    (checking(sequences=ints(0, 0)), ValueError, "sequences is .*; it must be different numbers from 0 to 1"),
    (checking(sequences=ints(0, 2)), ValueError, "sequences is"),
    *((of_storage(index, wrong, attends), error, message) for index, wrong, error, message in STORAGES for attends in (False, True)),
    (functools.partial(library_ops.auto_paged_append, X, X, _NONE, *BATCH.tensors(), 64, True, True), ValueError, "it must have at least one page"),
)
