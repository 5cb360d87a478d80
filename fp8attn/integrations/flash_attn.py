"""FlashAttention's functions, computed in FP8: code that is written for FlashAttention 2 runs by changing an import.

from fp8attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Layouts, causal alignment (bottom right) and windows are FlashAttention's. Arguments that fp8attn has no kernels for are
errors. Rows without visible keys are zero, and their LSE is -inf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..api import sdpa, varlen_sdpa
from ..paged import append_backend, paged_sdpa, rotary_embedding, write_to_pages
from ..paged_tensors import PagedTensors
from ..pages import PagedBatch
from ..recipe import DEFAULT_RECIPE, Recipe
from ..reference import Window
from ..validate import E4M3_BYTES, Backend

Attention = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""Output; or output, LSE and None in place of the probabilities."""

Descale = torch.Tensor | float | None
"""What restores an e4m3 cache."""

UNLIMITED: Window = (-1, -1)

MOST_STEP = 16
"""Queries of a row in a step that decodes or verifies a draft."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    backend: Backend = "auto",
) -> Attention:
    """flash_attn.flash_attn_func by fp8attn.sdpa.

    Args:
        q: (B, Sq, Hq, D).
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv).
        dropout_p: must be 0.
        softmax_scale, window_size, softcap: as `scale`, `window` and `softcap` of fp8attn.sdpa.
        causal: row i sees keys j <= i + Sk - Sq.
        alibi_slopes: must be None.
        deterministic: results always are.
        return_attn_probs: also return the LSE (B, Hq, Sq), and None in place of the probabilities.
        sinks, recipe, backend: as of fp8attn.sdpa.

    Returns:
        out (B, Sq, Hq, Dv); with `return_attn_probs` (out, LSE, None).

    Raises:
        TypeError, ValueError, RuntimeError: as fp8attn.sdpa.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes)
    result = sdpa(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, scale=softmax_scale, enable_gqa=True,
        causal_alignment="bottom_right", window=_window(window_size), softcap=softcap, sinks=sinks, recipe=recipe, return_lse=return_attn_probs,
        backend=backend,
    )  # fmt: skip
    if isinstance(result, tuple):
        return result[0].transpose(1, 2), result[1], None
    return result.transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    k_descale: Descale = None,
    v_descale: Descale = None,
    sinks: torch.Tensor | None = None,
    recipe: Recipe | None = DEFAULT_RECIPE,
    backend: Backend = "auto",
) -> Attention:
    """flash_attn.flash_attn_varlen_func by fp8attn.varlen_sdpa; of keys in pages by fp8attn.paged_sdpa.

    Args:
        q: (Tq, Hq, D).
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv); with `block_table` caches (P, page, Hkv, D) and (P, page, Hkv, Dv), in
            e4m3, too.
        cu_seqlens_q, max_seqlen_q: as of fp8attn.varlen_sdpa. A sequence's queries are its last tokens.
        cu_seqlens_k, max_seqlen_k, seqused_k: likewise. With `block_table` one of seqused_k (N) and cu_seqlens_k
            (N + 1) tells how many tokens sequences have, and the other is None.
        block_table: int32 (N, M), the pages of each sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as of `flash_attn_func`.
        return_attn_probs: also return the LSE (Hq, Tq), and None in place of the probabilities.
        k_descale, v_descale: of caches in e4m3, as of `flash_attn_with_kvcache`. Without `block_table` they must be
            None.
        sinks, recipe, backend: as of fp8attn.varlen_sdpa. With `block_table` `recipe` is that of fp8attn.PagedTensors,
            or None, and has no effect on caches in e4m3; `backend` is one that fp8attn.paged_sdpa has.

    Returns:
        out (Tq, Hq, Dv); with `return_attn_probs` (out, LSE, None).

    Raises:
        TypeError, ValueError, RuntimeError: as fp8attn.varlen_sdpa and fp8attn.paged_sdpa.
    """
    _check_unsupported(dropout_p, alibi_slopes=alibi_slopes)
    if block_table is not None:
        cache = _cache_of("k", k, v, k_descale, v_descale, recipe)
        _check_int32(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=block_table)
        if (cu_seqlens_k is None) == (seqused_k is None):
            raise ValueError(f"cu_seqlens_k and seqused_k are {'None' if seqused_k is None else 'given'}; with block_table one of them must be None")
        lengths = seqused_k if cu_seqlens_k is None else cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        assert lengths is not None
        batch = PagedBatch(block_table, lengths, max_length=max_seqlen_k, cu_seqlens=cu_seqlens_q, max_count=max_seqlen_q)
        result = paged_sdpa(
            q, cache, batch, window=_counted(window_size, causal), softcap=softcap, sinks=sinks, scale=softmax_scale,
            return_lse=return_attn_probs, backend=backend,
        )  # fmt: skip
        return (*result, None) if isinstance(result, tuple) else result
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None:
            raise ValueError(f"{name} is given; without block_table it must be None: k and v are quantized in the call")
    if recipe is None:
        raise ValueError("recipe is None; without block_table it must be a fp8attn.Recipe")
    result = varlen_sdpa(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, is_causal=causal,
        window=_window(window_size), softcap=softcap, sinks=sinks, scale=softmax_scale, recipe=recipe, return_lse=return_attn_probs,
        backend=backend,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNLIMITED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Descale = None,
    v_descale: Descale = None,
    sinks: torch.Tensor | None = None,
    recipe: Recipe | None = DEFAULT_RECIPE,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """flash_attn.flash_attn_with_kvcache by fp8attn.paged_sdpa, of caches in e4m3, too.

    Args:
        q: (B, Sq, Hq, D): float16, bfloat16 or, of an e4m3 cache, float32.
        k_cache, v_cache: (N, S, Hkv, D) and (N, S, Hkv, Dv); with `block_table` the N are pages of S tokens.
        k, v: (B, n, Hkv, D) and (B, n, Hkv, Dv), written to the cache behind cache_seqlens first.
        cache_seqlens: int32 (B), or an int: tokens of each sequence before k and v. None: S, without k.
        cache_batch_idx: int32 (B), the sequence of each row in a cache without pages. None: row b has sequence b.
        block_table: int32 (B, M), the pages of each row.
        softmax_scale, softcap: as `scale` and `softcap` of fp8attn.paged_sdpa.
        causal: query i sees keys j <= i + Sk - Sq.
        window_size: (left, right), tokens that a query sees on each side of its own; -1 for no limit.
        rotary_cos, rotary_sin: (P, R / 2), float32 or q's dtype: q and k are turned by fp8attn.rotary_embedding first.
            k has the positions from cache_seqlens on. So has q under a causal mask or a window; else all of q has that
            one. They need k. None: q and k were turned before.
        rotary_interleaved: as `interleaved` of fp8attn.rotary_embedding.
        cache_leftpad, alibi_slopes: must be None.
        num_splits: 0, or 1 as callers give it who want the same bits in every batch: `batch_invariant` of
            fp8attn.PagedBatch. Other numbers are refused: how many programs share keys follows from the call.
        return_softmax_lse: also return the LSE (B, Hq, Sq).
        k_descale, v_descale: FlashAttention-3's, what restores an e4m3 cache, as scales of fp8attn.PagedTensors; per
            row and head (B, Hkv) only without k. None: 1.
        sinks, backend: as of fp8attn.paged_sdpa.
        recipe: as of fp8attn.PagedTensors. It has no effect on caches in e4m3.

    Returns:
        out (B, Sq, Hq, Dv); with `return_softmax_lse` (out, LSE).

    Raises:
        TypeError, ValueError, RuntimeError: an argument isn't as above, or as fp8attn.paged_sdpa.
    """
    _check_unsupported(0.0, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{'rotary_cos' if rotary_cos is None else 'rotary_sin'} is None; rotary_cos and rotary_sin go together")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos is given and k is None; it must be the new tokens' keys")
    if num_splits not in (0, 1):
        raise ValueError(f"num_splits is {num_splits}; it must be 0, or 1 for the same bits in every batch")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and block_table are given; one of them must be None")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None; k and v go together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None and k is given; it must be the tokens before k")
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q is a {type(q).__name__}; it must be a torch.Tensor")
    _check_int32(cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table)
    cache, rows, device = _cache_of("k_cache", k_cache, v_cache, k_descale, v_descale, recipe), q.shape[0], q.device
    table = block_table
    if table is None:
        table = (torch.arange(rows, dtype=torch.int32, device=device) if cache_batch_idx is None else cache_batch_idx).view(-1, 1)
    if not isinstance(cache_seqlens, torch.Tensor):
        number = table.shape[1] * cache.page if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((rows,), number, dtype=torch.int32, device=device)
    new, query = None, q.transpose(1, 2)
    if k is not None and v is not None:
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                raise ValueError(f"{name} is {tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__}; it must be (B, n, Hkv, D or Dv)")
        key = k.transpose(1, 2)
        if rotary_cos is not None and rotary_sin is not None:
            turned = _Turned(PagedBatch(table, cache_seqlens), rotary_cos, rotary_sin, rotary_interleaved, append_backend(backend))
            query, key = turned(query, key, causal or tuple(window_size) != UNLIMITED)
        new, cache_seqlens = (key, v.transpose(1, 2)), cache_seqlens + k.shape[1]
    batch = PagedBatch(table, cache_seqlens, batch_invariant=num_splits == 1)
    is_packed = _is_packed(q) and rotary_cos is None and not batch.batch_invariant
    if new is not None and (is_packed or new[0].shape[2] != q.shape[1]):
        write_to_pages(*new, cache, batch, backend=backend)
        new = None
    if is_packed:
        starts = torch.arange(0, rows * q.shape[1] + 1, q.shape[1], dtype=torch.int32, device=device)
        query, batch = q.flatten(0, 1), replace(batch, cu_seqlens=starts, max_count=q.shape[1])
    result = paged_sdpa(
        query, cache, batch, new, window=_counted(window_size, causal), softcap=softcap, sinks=sinks,
        scale=softmax_scale, return_lse=return_softmax_lse, backend=backend,
    )  # fmt: skip
    out, lse = result if isinstance(result, tuple) else (result, None)
    if is_packed:
        out, lse = out.unflatten(0, (rows, -1)), None if lse is None else lse.unflatten(1, (rows, -1)).transpose(0, 1).contiguous()
    else:
        out = out.transpose(1, 2)
    return out if lse is None else (out, lse)


def _is_packed(q: torch.Tensor) -> bool:
    """Whether queries (B, Sq, Hq, D) are attended to as packed ones, in their order. Few are not: they would wait for
    the tensor that says where rows begin."""
    return q.dim() == 4 and q.shape[0] > 1 and q.shape[1] > MOST_STEP and q.stride(0) == q.shape[1] * q.stride(1)


class _Turned(NamedTuple):
    """Rotary position embeddings as FlashAttention applies them.

    Attributes:
        before: the batch without new tokens.
        cos, sin, interleaved, backend: as of fp8attn.rotary_embedding.
    """

    before: PagedBatch
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    backend: str

    def __call__(self, query: torch.Tensor, key: torch.Tensor, each_has_a_position: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, Hq, Sq, D) and keys (B, Hkv, n, D), turned. Without `each_has_a_position`, all queries have the
        first one."""
        queries = query.shape[2]
        if queries == key.shape[2] and (each_has_a_position or queries == 1):
            return self._turn(query, key)
        key = self._turn(key)[0]
        if each_has_a_position:
            return self._turn(query)[0], key
        as_heads = query.transpose(1, 2).flatten(1, 2).unsqueeze(2)
        return self._turn(as_heads)[0].unflatten(1, (queries, -1)).squeeze(3).transpose(1, 2), key

    def _turn(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        batch = replace(self.before, lengths=self.before.lengths + x.shape[2])
        return rotary_embedding(x, other, batch, self.cos, self.sin, interleaved=self.interleaved, backend=self.backend)


def _check_unsupported(dropout_p: float, **absent: object) -> None:
    """Check arguments of FlashAttention that fp8attn doesn't have."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be 0: fp8attn is for inference")
    for name, x in absent.items():
        if x is not None:
            raise ValueError(f"{name} is given; it must be None: fp8attn has no kernels for it")


def _window(window_size: Window) -> Window | None:
    """A window_size as `window` of fp8attn.sdpa."""
    return None if tuple(window_size) == UNLIMITED else window_size


def _counted(window_size: Window, causal: bool) -> Window:
    """A window_size as `window` of fp8attn.paged_sdpa."""
    left, right = window_size
    return left, 0 if causal else right


def _cache_of(
    name: str, k: torch.Tensor, v: torch.Tensor, k_descale: Descale, v_descale: Descale, recipe: Recipe | None
) -> PagedTensors:  # fmt: skip
    """The cache of another engine. `name`: of k in the call."""
    for of, x in ((name, k), (name.replace("k", "v", 1), v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{of} is a {type(x).__name__}; it must be a torch.Tensor")
    is_fp8 = k.dtype in E4M3_BYTES
    k_scale, v_scale = (1.0 if is_fp8 and scale is None else scale for scale in (k_descale, v_descale))
    return PagedTensors(k, v, k_scale, v_scale, None if is_fp8 else recipe)


def _check_int32(**tensors: object) -> None:
    """Check the dtype of those that are tensors."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.dtype != torch.int32:
            raise TypeError(f"{name} is {x.dtype}; it must be torch.int32")
