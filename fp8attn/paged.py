"""Attention to a KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from . import eager, validate
from .cache import KVCache
from .paged_ops import operator_of, runs_kernels
from .pages import RECENT_QUERIES, PagedBatch
from .validate import FLOATS


def paged_sdpa(
    query: torch.Tensor,
    cache: KVCache,
    batch: PagedBatch,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of some sequences of a cache: prefill, a chunk of it, decode, speculation.

    Query i of n attends to the tokens up to its own, the (n - i)-th last (a causal mask aligned to the bottom right):
    in FP8 to the pages before its own page, in half precision to its own page. It reads page tables, lengths and counts
    on the device, so they may change between replays of a CUDA graph.

    Args:
        query: (B, Hq, S, D), the cache's dtype and device, unit last stride. Hq is a multiple of Hkv.
        cache: the cache.
        batch: the B sequences that the rows belong to. Their lengths include the queries' own tokens.
        new: keys (B, Hkv, S, D) and values (B, Hkv, S, Dv) of the queries' tokens, which are appended first. None: they
            were appended before. The cache keeps what up to 65 queries need after that; more need `new`.
        scale: factor of the scores; None: D ** -0.5.
        return_lse: also return the natural-log LSE of the scores, float32 (B, Hq, S).
        out_dtype: float16, bfloat16 or float32; None: query's.
        backend: `auto` (kernels on a GPU, else modelled); `cuda`: the kernel for few queries on Hopper GPUs; `triton`;
            or `modelled`: the oracle in plain torch.

    Returns:
        out (B, Hq, S, Dv), and the LSE if `return_lse`. Zeros and -inf past the counts.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache")
    how = Options(scale, return_lse, out_dtype, backend)
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


def _attend(
    query: torch.Tensor, cache: KVCache, batch: PagedBatch, new: tuple[torch.Tensor, torch.Tensor] | None, options: Options
) -> eager.Attention:
    """`paged_sdpa` of a call that isn't like one before."""
    scale, return_lse, out_dtype, backend = options
    operator = operator_of("attention", backend, batch)
    if scale is not None:
        validate.check_scale("scale", scale)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is a {type(return_lse).__name__}; it must be a bool")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {FLOATS}")
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
