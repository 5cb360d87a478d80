"""Wrong arguments of calls on caches of other engines: what is done, the error, and what it says."""

from __future__ import annotations

import dataclasses
import functools

import torch

import fp8attn
from cache_errors import ints
from fp8attn import KVCache, PagedBatch, PagedTensors
from fp8attn.ops import library_ops
from operator_errors import Sample

K = torch.zeros(4, 16, 2, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
H = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
FP8, HALF = PagedTensors(K, K.clone(), 0.5, 0.5), PagedTensors(H, H.clone())
BATCH = PagedBatch(ints(0, 1, 2, 3).view(2, 2), ints(20, 32))
PACKED = dataclasses.replace(BATCH, cu_seqlens=ints(0, 1, 3))
Q = torch.zeros(2, 4, 3, 64, dtype=torch.bfloat16)
X, SLOTS = Q[0].transpose(0, 1)[:, :2], torch.arange(3)
N = torch.zeros(2, 2, 3, 64, dtype=torch.bfloat16)


def of(cache: PagedTensors = FP8, **change: object) -> PagedTensors:
    return dataclasses.replace(cache, **change)


def attending(query: object = Q, cache: object = FP8, batch: object = BATCH, new: object = None, **options: object):
    return lambda: fp8attn.paged_sdpa(query, cache, batch, new, **options)  # type: ignore[arg-type]


def writing(key: object = X, value: object = X, cache: object = FP8, slots: object = SLOTS, **options: object):
    return lambda: fp8attn.write_to_pages(key, value, cache, slots, **options)  # type: ignore[arg-type]


CACHES = (
    (of(k="k"), TypeError, "cache.k is a str; it must be a torch.Tensor"),
    (of(k=K.view(torch.int8)), TypeError, "cache.k is torch.int8; it must be torch.float8_e4m3fn or torch.uint8 or"),
    (of(v=H), TypeError, "cache.v is torch.bfloat16; it must be torch.float8_e4m3fn"),
    (of(k=K[0]), ValueError, r"cache.k has shape \(16, 2, 64\); it must be \(pages, slots of a page, heads, head_dim\)"),
    (of(k=K[:0]), ValueError, r"cache.k has shape \(0, 16, 2, 64\)"),
    (of(k=K.transpose(2, 3)), ValueError, r"cache.k has strides .*; the last must be 1: a cache is read as it is"),
    (of(v=K[..., :10]), ValueError, "cache.v has head_dim 10"),
    (of(v=K[:2]), ValueError, r"cache.v has shape \(2, 16, 2, 64\); its pages, slots and heads must be cache.k's, \(4, 16, 2\)"),
    (of(v=K.to("meta")), ValueError, "cache.v is on meta; it must be on cpu"),
    (of(k_scale=None), ValueError, "cache.k_scale is None and cache.k is torch.float8_e4m3fn; it must be the float32 multiplier that restores k"),
    (of(v_scale=True), TypeError, "cache.v_scale is a bool; it must be a torch.Tensor"),
    (of(k_scale=torch.ones(2).double()), TypeError, "cache.k_scale is torch.float64; it must be torch.float32"),
    (of(k_scale=torch.ones(3)), ValueError, r"cache.k_scale has shape \(3,\); it must be one of \(\), \(1,\), \(2,\), \(4, 16, 2\)"),
    (of(HALF, v_scale=1.0), ValueError, "cache.v_scale is given and cache.k is torch.bfloat16; it must be None"),
)
"""Wrong caches, for calls that attend and that write."""

TENSORS_ERRORS: tuple[Sample, ...] = (
    *((attending(cache=cache), error, message) for cache, error, message in CACHES),
    *((writing(cache=cache), error, message) for cache, error, message in CACHES),
    (writing(cache=of(k_scale=torch.ones(3, 2))), ValueError, r"cache.k_scale has shape \(3, 2\)"),
    (attending(cache=of(k_scale=torch.ones(3, 2))), ValueError, r"cache.k_scale has shape \(3, 2\); it must be .*, \(2, 2\)"),
    (attending(cache="cache"), TypeError, "cache is a str; it must be a fp8attn.KVCache or a fp8attn.PagedTensors"),
    (attending(new=(X, X)), ValueError, r"key has shape \(3, 2, 64\)"),
    (attending(new=(N, N[:, :, :2])), ValueError, "value has length 2; it must be 3"),
    (attending(new=(N[:, :, :2], N[:, :, :2])), ValueError, "key has length 2; it must be 3"),
    (attending(new=(N.to(torch.int8), N)), TypeError, "key is torch.int8"),
    (attending(new=(N.half(), N)), TypeError, "value is torch.bfloat16; it must be"),
    (attending(new=(N.clone().requires_grad_(), N)), RuntimeError, "key requires grad"),
    (attending(new=(N, N), backend="eager"), ValueError, "backend is 'eager'"),
    (writing(N, N, slots=dataclasses.replace(BATCH, sequences=ints(0, 1))), ValueError, "sequences is given"),
    (writing(N[:1], N, slots=BATCH), ValueError, "key has batch 1; it must be 2"),
    (writing(N, N.half(), slots=BATCH), TypeError, "value is torch.float16"),
    (writing(N, N, of(HALF), slots=BATCH, backend="cuda"), ValueError, "backend is 'cuda'"),
    (attending(batch=None), TypeError, "batch is a NoneType"),
    (attending(batch=dataclasses.replace(BATCH, sequences=ints(0, 1))), ValueError, "sequences is given; with fp8attn.PagedTensors it must be None"),
    (attending(batch=dataclasses.replace(BATCH, lengths=ints(1, 2, 3))), ValueError, r"lengths has shape \(3,\); it must be \(2,\)"),
    (attending(batch=dataclasses.replace(BATCH, page_table=BATCH.page_table.long())), TypeError, "page_table is torch.int64"),
    (attending("query"), TypeError, "query is a str"),
    (attending(Q.double()), TypeError, "query is torch.float64; it must be one of"),
    (attending(K.view(2, 4, 8, 128)[..., :64]), TypeError, "query is torch.float8_e4m3fn; it must be one of"),
    (attending(Q.half(), HALF), TypeError, "query is torch.float16; it must be the cache's torch.bfloat16"),
    (attending(Q[:, :3]), ValueError, "query has 3 heads; it must be a multiple of the cache's 2"),
    (attending(Q[..., :32]), ValueError, "query has head_dim 32; it must be 64"),
    (attending(Q[:1]), ValueError, "query has batch 1; it must be 2"),
    (attending(Q.clone().requires_grad_()), RuntimeError, "query requires grad"),
    (attending(batch=PACKED), ValueError, r"query has shape \(2, 4, 3, 64\); with cu_seqlens it must be \(length, heads, head_dim\)"),
    (attending(Q[0].transpose(0, 1)), ValueError, r"query has shape \(3, 4, 64\); without cu_seqlens it must be \(batch, heads, length, head_dim\)"),
    (attending(Q[0, :, :, :32].transpose(0, 1), batch=PACKED), ValueError, "query has head_dim 32; it must be 64"),
    (attending(window=3), TypeError, "window is 3; it must be"),
    (attending(window=(-2, 0)), ValueError, r"window is \(-2, 0\)"),
    (attending(softcap=-1.0), ValueError, "softcap is -1.0"),
    (attending(sinks=torch.zeros(2)), ValueError, r"sinks has shape \(2,\); it must be \(4,\)"),
    (attending(sinks=torch.zeros(8)[::2]), ValueError, "sinks has strides"),
    (attending(scale=float("nan")), ValueError, "scale is nan"),
    (attending(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8"),
    (attending(cache=of(HALF, recipe="fast")), TypeError, "cache.recipe is a str; it must be a fp8attn.Recipe, or None"),
    (attending(cache=of(recipe=fp8attn.Recipe())), ValueError, "cache.recipe is given and cache.k is torch.float8_e4m3fn; it must be None"),
    (
        attending(cache=of(HALF, recipe=fp8attn.Recipe(rotate=0))),
        ValueError,
        r"cache.recipe is Recipe\(.*it must be fp8attn.Recipe\(\) or fp8attn.PRECISE",
    ),
    (attending(return_lse=1), TypeError, "return_lse is a int"),
    (attending(backend="eager"), ValueError, "backend is 'eager'; with fp8attn.PagedTensors it must be one of"),
    (writing(cache=KVCache(1, 1, 2, 64, device="cpu")), TypeError, "cache is a KVCache; it must be a fp8attn.PagedTensors"),
    (writing(None), TypeError, "key is a NoneType"),
    (writing(X.float()), TypeError, "value is torch.bfloat16; it must be torch.float32"),
    (writing(X.half(), X.half(), HALF), TypeError, "key is torch.float16; it must be torch.bfloat16"),
    (writing(X[:, :1]), ValueError, r"key has shape \(3, 1, 64\); it must be \(tokens, 2, 64\), as the cache's heads"),
    (writing(X, X[..., :32]), ValueError, "value has shape"),
    (writing(X, X[:2]), ValueError, "value has 2 tokens; it must have key's 3"),
    (writing(torch.zeros(3, 64, 2, dtype=torch.bfloat16).mT), ValueError, "key has strides"),
    (writing(X.clone().requires_grad_()), RuntimeError, "key requires grad"),
    (writing(slots=SLOTS.float()), TypeError, "slots is torch.float32; it must be torch.int32 or torch.int64"),
    (writing(slots=SLOTS[:2]), ValueError, r"slots has shape \(2,\); it must be \(3,\)"),
    (writing(slots=torch.arange(6)[::2]), ValueError, "slots has strides"),
    (writing(backend="cuda"), ValueError, "backend is 'cuda'"),
    (
        functools.partial(
            library_ops.auto_tensors_attention, Q, [K, K], None, *BATCH.tensors()[:3], None, None, None, False, 0.1, [-1, 0], 0.0, None, torch.float32
        ),
        ValueError,
        "cache.k_scale is None",
    ),
    (functools.partial(library_ops.auto_write_to_pages, X, X, [H, H], SLOTS.float()), TypeError, "slots is torch.float32"),
)
