"""Attention to a KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from . import eager, paged_tensors_ops, validate
from .cache import KVCache
from .ops import library_ops
from .paged_ops import check_paged_batch, operator_of, runs_kernels
from .paged_tensors import PagedTensors, Scoring
from .pages import RECENT_QUERIES, PagedBatch
from .reference import CAUSAL_WINDOW, Window
from .validate import FLOATS


def paged_sdpa(
    query: torch.Tensor,
    cache: KVCache | PagedTensors,
    batch: PagedBatch,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    window: Window = CAUSAL_WINDOW,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of some sequences of a cache: prefill, a chunk of it, decode, speculation.

    Query i of n attends to the tokens up to its own, the (n - i)-th last (a causal mask aligned to the bottom right).
    Of a `KVCache`, it attends in FP8 to the pages before its own page, and in half precision to its own page. The cache
    of another engine, `PagedTensors`, is read as it is. Page tables, lengths and counts are read on the device, so they
    may change between replays of a CUDA graph.

    Args:
        query: (B, Hq, S, D), the cache's dtype and device, unit last stride. Hq is a multiple of Hkv. Queries of an
            e4m3 cache of another engine are float16, bfloat16 or float32.
        cache: the cache.
        batch: the B sequences that the rows belong to. Their lengths include the queries' own tokens.
        new: keys (B, Hkv, S, D) and values (B, Hkv, S, Dv) of the queries' tokens, which are appended first. None: they
            were appended before. The cache keeps what up to 65 queries need after that; more need `new`. It must be
            None with `PagedTensors`, which keep every token: `write_to_pages` writes them.
        window: (left, right): a query at position p sees the keys p - left to p + right; -1 for no limit. It must be
            (-1, 0) with a `KVCache`, which is causal.
        softcap: scores become softcap * tanh(score / softcap); 0 for none. It must be 0 with a `KVCache`.
        sinks: float32 (Hq,), a logit per head beside each row's scores. It must be None with a `KVCache`.
        scale: factor of the scores; None: D ** -0.5.
        return_lse: also return the natural-log LSE of the scores, float32 (B, Hq, S).
        out_dtype: float16, bfloat16 or float32; None: query's.
        backend: `auto` (kernels on a GPU, else modelled); `cuda`: the kernel for few queries on Hopper GPUs; `triton`;
            or `modelled`: the oracle in plain torch. `cuda` takes no `PagedTensors`.

    Returns:
        out (B, Hq, S, Dv), and the LSE if `return_lse`. Zeros and -inf past the counts. Rows that see a token whose
        page number or position is out of range are NaN.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    how = Options(scale, return_lse, out_dtype, backend)
    if isinstance(cache, PagedTensors):
        if new is not None:
            raise ValueError("new is given; with fp8attn.PagedTensors it must be None: write_to_pages writes tokens")
        return _attend_to_tensors(query, cache, batch, how, (window, softcap, sinks))
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache or a fp8attn.PagedTensors")
    for name, given, wanted in (("window", window, CAUSAL_WINDOW), ("softcap", softcap, 0.0), ("sinks", sinks, None)):
        if given is not wanted and (isinstance(given, torch.Tensor) or given != wanted):
            raise ValueError(f"{name} is given; with a fp8attn.KVCache it must be {wanted}")
    others = cache.tensors_with(batch) if new is None or (type(new) is tuple and len(new) == 2) else None
    if others is None:
        return _attend(query, cache, batch, new, how)
    options = ("paged_sdpa", cache.recipe.text, batch.max_length, new is None, *how)
    operands = query, *((None, None) if new is None else new)
    repeated = eager.repeat(options, operands, others)
    if repeated is not None:
        return eager.attention_of(repeated)
    found = _attend(query, cache, batch, new, how)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | None) -> eager.Attention:
        return _attend(query, *cache.with_tensors(others, batch.max_length), None if new is None else (key, value), how)

    if runs_kernels(backend, cache.device):
        eager.remember(options, operands, others, attend)
    return found


class Options(NamedTuple):
    """The options of `paged_sdpa`."""

    scale: float | None
    return_lse: bool
    out_dtype: torch.dtype | None
    backend: str


def _check_options(options: Options) -> None:
    scale, return_lse, out_dtype, _ = options
    if scale is not None:
        validate.check_scale("scale", scale)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is a {type(return_lse).__name__}; it must be a bool")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {FLOATS}")


def _attend(
    query: torch.Tensor, cache: KVCache, batch: PagedBatch, new: tuple[torch.Tensor, torch.Tensor] | None, options: Options
) -> eager.Attention:
    """`paged_sdpa` of a call that isn't like one before."""
    scale, return_lse, out_dtype, backend = options
    operator = operator_of("attention", backend, batch)
    _check_options(options)
    validate.check_batch(batch, cache.device)
    validate.check_queries(query, batch, cache.storage)
    storage, key, value = cache.storage, None, None
    if new is None:
        if query.shape[2] > RECENT_QUERIES:
            raise ValueError(f"query has {query.shape[2]} tokens and new is None; it must have at most {RECENT_QUERIES}, or new must be given")
    else:
        key, value = new
        validate.check_new_tokens(key, value, batch, query.shape[2], storage)
        if query.shape[2] > RECENT_QUERIES:
            storage = replace(storage, k=storage.k.clone(), v=storage.v.clone())
        cache.append(key, value, batch, backend="auto" if backend == "cuda" else backend)
        if storage is cache.storage:
            key = value = None
    softmax_scale = cache.head_dim**-0.5 if scale is None else float(scale)
    dtype = query.dtype if out_dtype is None else out_dtype
    out, lse = operator(
        query, key, value, storage.tensors(), *batch.tensors(), batch.max_length, cache.recipe.rotate, softmax_scale, dtype
    )  # fmt: skip
    return (out, lse) if return_lse else out


Scores = tuple[Window, float, torch.Tensor | None]
"""window, softcap and sinks of `paged_sdpa`."""


def _attend_to_tensors(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, options: Options, scores: Scores) -> eager.Attention:
    """`paged_sdpa` of the cache of another engine."""
    window, softcap, sinks = scores
    kept = not is_compiling() and type(batch) is PagedBatch and isinstance(window, tuple)
    others: Any = (*batch.tensors(), cache.k, cache.v, cache.k_scale, cache.v_scale, sinks) if kept else ()
    kept = kept and all(x is None or isinstance(x, torch.Tensor) for x in others)
    name = ("paged_sdpa of tensors", batch.max_length, *window, softcap, *options) if kept else ()
    repeated = eager.repeat(name, (query,), others) if kept else None
    if repeated is not None:
        return eager.attention_of(repeated)
    found = _attend_to_checked_tensors(query, cache, batch, options, scores)

    def attend(query: torch.Tensor, *others: Any) -> eager.Attention:
        table, lengths, counts, _, *tensors, sinks = others
        same = PagedBatch(table, lengths, counts, None, batch.max_length)
        return _attend_to_checked_tensors(query, PagedTensors(*tensors), same, options, (window, softcap, sinks))

    if kept and runs_kernels(options.backend, query.device):
        eager.remember(name, (query,), others, attend)
    return found


def _attend_to_checked_tensors(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, options: Options, scores: Scores) -> eager.Attention:
    """`paged_sdpa` of the cache of another engine, of a call that isn't like one before."""
    scale, return_lse, out_dtype, backend = options
    window, softcap, sinks = scores
    paged_tensors_ops.check_backend(backend)
    check_paged_batch(batch)
    _check_options(options)
    validate.check_tensors_call(query, cache, batch, Scoring(1.0, window, softcap, sinks))
    softmax_scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    dtype = query.dtype if out_dtype is None else out_dtype
    operator = getattr(library_ops, f"{backend}_tensors_attention")
    out, lse = operator(
        query, cache.tensors(), batch.page_table, batch.lengths, batch.counts, batch.max_length, softmax_scale, list(window), float(softcap),
        sinks, dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def write_to_pages(key: torch.Tensor, value: torch.Tensor, cache: PagedTensors, slots: torch.Tensor, *, backend: str = "auto") -> None:
    """Write new tokens to the cache of another engine, before `paged_sdpa` attends to them.

    Caches in half precision keep them as they are. e4m3 caches with a scale per token and head get the scales of these
    tokens, their largest magnitude / 448. With other scales tokens are divided by them, and saturate. What isn't finite
    becomes NaN.

    Args:
        key: (T, Hkv, D), unit last stride: of any float dtype for an e4m3 cache, else of the cache's.
        value: (T, Hkv, Dv), key's dtype, likewise.
        cache: the cache, whose scales aren't per row of a batch.
        slots: int32 or int64 (T,), contiguous, read on the device: page number * page + slot in the page. Tokens whose
            slot is negative or out of range are dropped. No slot may stand there twice.
        backend: `auto` (Triton on a GPU, else modelled), `triton`, or `modelled`: the definition in plain torch.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    if not isinstance(cache, PagedTensors):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.PagedTensors")
    others: Any = slots, cache.k, cache.v, cache.k_scale, cache.v_scale
    kept = not is_compiling() and all(x is None or isinstance(x, torch.Tensor) for x in others)
    name = ("write_to_pages", backend)
    if kept and eager.repeat(name, (key, value), others) is not None:
        return
    paged_tensors_ops.check_backend(backend)
    validate.check_written(key, value, cache, slots)
    getattr(library_ops, f"{backend}_write_to_pages")(key, value, cache.tensors(), slots)

    def write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, *tensors: Any) -> None:
        write_to_pages(key, value, PagedTensors(*tensors), slots, backend=backend)

    if kept and runs_kernels(backend, key.device):
        eager.remember(name, (key, value), others, write)
