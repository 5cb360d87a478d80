"""Attention to a KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Numbers

import torch

from . import pages, validate
from .ambient import shielded
from .cache import KVCache, by_kernels
from .device import device_of
from .ops import current
from .pages import PAGE, RECENT
from .triton import paged_attention
from .validate import FLOATS


def paged_sdpa(
    query: torch.Tensor,
    cache: KVCache,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    *,
    sequences: Numbers[int] | None = None,
    counts: Numbers[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of some sequences of a cache: prefill, a chunk of it, decode, speculation.

    Query i of n attends to the tokens up to its own, the (n - i)-th last (a causal mask aligned to the bottom right):
    in FP8 to the pages before its own page, in half precision to its own page. With `key` and `value`, these are
    appended first. Without, they must have been appended already.

    Args:
        query: (B, Hq, S, D), the cache's dtype and device, unit last stride. Hq is a multiple of Hkv.
        cache: the cache.
        key, value: (B, Hkv, S, D) and (B, Hkv, S, Dv), the new tokens; both or none.
        sequences: the B sequences that the rows belong to, each at most once; None: all, in order.
        counts: how many of the S tokens are real, from the first on, for each of the B; None: all S. Of the others, the
            output is zero and the LSE -inf.
        scale: factor of the scores; None: D ** -0.5.
        return_lse: also return the natural-log LSE of the scores, float32 (B, Hq, S).
        out_dtype: float16, bfloat16 or float32; None: query's.
        backend: `auto` (Triton on a GPU, else modelled), `triton`, or `modelled`: the oracle in plain torch.

    Returns:
        out (B, Hq, S, Dv), and the LSE if `return_lse`.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above; or without key and value, the cache has fewer tokens than
            queries, or no longer has all tokens of the first query's page in half precision. It has for up to 65
            queries, unless the sequence was cut back since.
        RuntimeError: there are too few free pages, or an argument requires grad.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache")
    kernels = by_kernels(backend, cache.device)
    rows = cache.checked_rows(query, sequences, counts, "query")
    validate.check_tokens("query", query, (cache.dtype, cache.device), (len(rows), None, None, cache.head_dim))
    if query.shape[1] % cache.kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads; it must be a multiple of the cache's {cache.kv_heads}")
    if scale is not None:
        validate.check_scale("scale", scale)
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse is a {type(return_lse).__name__}; it must be a bool")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {FLOATS}")
    if (key is None) != (value is None):
        raise ValueError(f"{'key' if key is None else 'value'} is None; key and value are given together")
    recent = cache.storage.k, cache.storage.v
    if key is None or value is None:
        _check_appended(cache, rows)
        step = cache.step(rows)
    else:
        for name, x in (("key", key), ("value", value)):
            if isinstance(x, torch.Tensor) and (x.dim() != 4 or x.shape[0] != len(rows) or x.shape[2] != query.shape[2]):
                raise ValueError(f"{name} has shape {tuple(x.shape)}; its batch and length must be query's, {len(rows)} and {query.shape[2]}")
        if query.shape[2] > RECENT - PAGE:  # else no token of the first query's page is overwritten
            recent = recent[0].clone(), recent[1].clone()
        step = cache.checked_append(key, value, rows, kernels)
    softmax_scale = cache.head_dim**-0.5 if scale is None else float(scale)
    dtype = query.dtype if out_dtype is None else out_dtype
    arguments = (query, cache.storage, step, recent, cache.recipe, softmax_scale)
    if kernels:
        most_tokens = max((cache.lengths[sequence] for sequence, _ in rows), default=0)
        with current(cache.device):
            out, lse = shielded(paged_attention.attend)(*arguments, device_of(cache.device), most_tokens=most_tokens, out_dtype=dtype)
    else:
        out, lse = shielded(pages.attend_paged)(*arguments)
        out = out.to(dtype)
    return (out, lse) if return_lse else out


def _check_appended(cache: KVCache, rows: list[tuple[int, int]]) -> None:
    """Check that the cache has the tokens of the queries, and those of their pages in half precision."""
    for sequence, count in rows:
        length = cache.lengths[sequence]
        if count > length:
            raise ValueError(f"query has {count} tokens for sequence {sequence}, which has {length}; it must have at most as many: append them first")
        if count and (length - count) // PAGE < cache.oldest_page(sequence):
            raise ValueError(
                f"query has {count} tokens for sequence {sequence}, and the first one's page is no longer kept in half precision;"
                " it must have fewer tokens, or key and value must be given"
            )
