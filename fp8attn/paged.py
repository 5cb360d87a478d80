"""Attention to a KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_compiling

from . import eager, paged_tensors_ops, rotary_ops, validate
from .cache import KVCache
from .ops import library_ops
from .paged_ops import check_called, check_paged_batch, operator_of, runs_kernels
from .paged_tensors import PagedTensors
from .pages import PAGE, RECENT_QUERIES, PagedBatch, PagedCall, Stage, tokens_of
from .recipe import Recipe
from .reference import CAUSAL_WINDOW, Causal, Scoring, Window
from .rotary import Angles
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
    of another engine, `PagedTensors`, is read as it is, unless its recipe allows to quantize it. Page tables, lengths
    and counts are read on the device, so they may change between replays of a CUDA graph.

    If the batch has `cu_seqlens`, tokens are packed: sequences have any numbers of them without padding, so prefill,
    decode and speculation mix in one call. Shapes in brackets are those of packed tokens.

    Args:
        query: (B, Hq, S, D) or (T, Hq, D), the cache's dtype and device, unit last stride. Hq is a multiple of Hkv.
            Queries of an e4m3 cache of another engine are float16, bfloat16 or float32.
        cache: the cache.
        batch: the B sequences that the rows belong to. Their lengths include the queries' own tokens.
        new: keys (B, Hkv, S, D) or (T, Hkv, D), and values (B, Hkv, S, Dv) or (T, Hkv, Dv), of the queries' tokens,
            which are appended first. None: they were appended before. The cache keeps what up to 65 queries of a
            sequence need after that; more need `new`, and are NaN without if they are packed. `PagedTensors` keep every
            token, and get them as by `write_to_pages`.
        window: (left, right): a query at position p sees the keys p - left to p + right; -1 for no limit. right must be
            0 with a `KVCache`, which is causal.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        sinks: float32 (Hq,), contiguous, a logit per head beside each row's scores.
        scale: factor of the scores; None: D ** -0.5.
        return_lse: also return the natural-log LSE of the scores and the sink, float32 (B, Hq, S) or (Hq, T).
        out_dtype: float16, bfloat16 or float32; None: query's.
        backend: `auto` (kernels on a GPU, else modelled); `cuda`: the kernels for Hopper GPUs; `triton`; or `modelled`:
            the oracle in plain torch. `cuda` takes packed tokens of `PagedTensors` only with `max_count`.

    Returns:
        out (B, Hq, S, Dv) or (T, Hq, Dv), and the LSE if `return_lse`. Zeros and -inf past the counts, and of packed
        queries behind the last sequence. Rows that see a token whose page number or position is out of range are NaN.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    how = Options(window, softcap, sinks, scale, return_lse, out_dtype, backend)
    if isinstance(cache, PagedTensors):
        return _attend_to_tensors(query, cache, batch, new, how)
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache or a fp8attn.PagedTensors")
    others = cache.tensors_with(batch) if new is None or (type(new) is tuple and len(new) == 2) else None
    if others is None or not how.can_be_kept:
        return _attend(query, cache, batch, new, how)
    options = ("paged_sdpa", cache.recipe.text, *batch.options, new is None, *how.without_tensors)
    operands, others = (query, *((None, None) if new is None else new)), (sinks, *others)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, *others: torch.Tensor | None):
        given = None if new is None else (key, value)
        return _attend(query, *cache.with_tensors(others, *batch.options), given, how._replace(sinks=sinks))

    like = eager.likeness_of(options, operands, others)
    repeated = eager.repeat(like, attend)
    if repeated is not None:
        return eager.attention_of(repeated)
    found = _attend(query, cache, batch, new, how)
    if runs_kernels(backend, cache.device):
        eager.remember(like)
    return found


class Options(NamedTuple):
    """The options of `paged_sdpa`."""

    window: Window
    softcap: float
    sinks: torch.Tensor | None
    scale: float | None
    return_lse: bool
    out_dtype: torch.dtype | None
    backend: str

    @property
    def can_be_kept(self) -> bool:
        """Whether the launch cache may know the call by these."""
        return type(self.window) is tuple and (self.sinks is None or isinstance(self.sinks, torch.Tensor))

    @property
    def without_tensors(self) -> tuple:
        """What the launch cache knows a call by."""
        return *self.window, self.softcap, self.scale, self.return_lse, self.out_dtype, self.backend


def check_options(options: Options) -> None:
    """Check scale, return_lse and out_dtype.

    Raises:
        TypeError, ValueError: one of them isn't as the docstring of `paged_sdpa` says.
    """
    if options.scale is not None:
        validate.check_scale("scale", options.scale)
    if not isinstance(options.return_lse, bool):
        raise TypeError(f"return_lse is a {type(options.return_lse).__name__}; it must be a bool")
    if options.out_dtype is not None and options.out_dtype not in FLOATS:
        raise TypeError(f"out_dtype is {options.out_dtype}; it must be one of {FLOATS}")


New = tuple[torch.Tensor, torch.Tensor] | None
"""Keys and values of a batch's tokens."""


def checked_call(query: torch.Tensor, cache: KVCache, batch: PagedBatch, new: New, options: Options) -> PagedCall:
    """The call of `paged_sdpa` on a `KVCache`, whose arguments are checked. It has the new tokens."""
    check_called("attention", options.backend, batch)
    check_options(options)
    storage = cache.storage
    validate.check_batch(batch, cache.device)
    validate.check_queries(query, batch, storage)
    scores = validate.checked_causal_scores(options.window, options.softcap, options.sinks, query)
    if new is not None:
        key, value = new
        validate.check_new_tokens(key, value, batch, tokens_of(query), storage)
    elif tokens_of(query) > RECENT_QUERIES and batch.cu_seqlens is None:
        raise ValueError(f"query has {tokens_of(query)} tokens and new is None; it must have at most {RECENT_QUERIES}, or new must be given")
    softmax_scale = cache.head_dim**-0.5 if options.scale is None else float(options.scale)
    return PagedCall(query, storage, new, batch, cache.recipe, softmax_scale, *scores)


def attention_call(call: PagedCall) -> PagedCall:
    """What attention gets of a checked call: of many tokens, queries need those in half precision that the last ones
    replace, so that the new tokens come with them. Few are appended before."""
    return call if call.batch.most_queries(call.q) > RECENT_QUERIES else replace(call, new=None)


class OneCall(NamedTuple):
    """A cache that serves one causal call of `sdpa`, and how.

    Attributes:
        before: the lengths before the queries' tokens; their number is `first`.
        new: the queries' tokens.
    """

    cache: KVCache
    first: int
    before: PagedBatch
    batch: PagedBatch
    new: tuple[torch.Tensor, torch.Tensor]


def cache_of_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, recipe: Recipe) -> OneCall:
    """An empty cache for a causal call of q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv)."""
    if causal == "top_left":
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    batch, heads, length, dim = k.shape
    first, pages = length - q.shape[2], max(length // PAGE, 1)
    cache = KVCache(batch, batch * pages, heads, dim, v.shape[3], recipe, q.dtype, q.device)
    table = torch.arange(batch * pages, dtype=torch.int32, device=q.device).view(batch, pages)
    before, after = (torch.full((batch,), n, dtype=torch.int32, device=q.device) for n in (first, length))
    new = k[:, :, first:], v[:, :, first:]
    return OneCall(cache, first, PagedBatch(table, before), PagedBatch(table, after, max_length=length), new)


def append_backend(backend: str) -> str:
    """The backend of an append that is part of a call by `backend`."""
    return "auto" if backend == "cuda" else backend


def _attend(query: torch.Tensor, cache: KVCache, batch: PagedBatch, new: New, options: Options) -> eager.Attention:
    """`paged_sdpa` of a call that isn't like one before."""
    checked, append = checked_call(query, cache, batch, new, options), append_backend(options.backend)
    call = attention_call(checked)
    if new is not None:
        cache.append_stage(*new, batch, append, Stage(tokens=call.new is None))
    if call.new is not None and batch.cu_seqlens is not None:  # the kernel for few queries reads their tokens from the cache
        cache.append_stage(*call.new, batch, append, Stage(pages=False, most=RECENT_QUERIES))
    given = (None, None) if call.new is None else call.new
    dtype = query.dtype if options.out_dtype is None else options.out_dtype
    operator = operator_of("attention", options.backend, batch)
    out, lse = operator(
        query, *given, call.storage.tensors(), *batch.tensors(), *batch.options, call.recipe.rotate, call.softmax_scale, dtype,
        list(call.window), call.softcap, call.sinks,
    )  # fmt: skip
    if call.new is not None:
        cache.append_stage(*call.new, batch, append, Stage(pages=False))
    return (out, lse) if options.return_lse else out


def _attend_to_tensors(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, new: New, options: Options) -> eager.Attention:
    """`paged_sdpa` of the cache of another engine."""
    kept = not is_compiling() and type(batch) is PagedBatch and options.can_be_kept and (new is None or (type(new) is tuple and len(new) == 2))
    kept = kept and isinstance(cache.recipe, (Recipe, type(None)))
    others: Any = (*batch.tensors(), cache.k, cache.v, cache.k_scale, cache.v_scale, options.sinks) if kept else ()
    kept = kept and all(x is None or isinstance(x, torch.Tensor) for x in others)
    name = ("paged_sdpa of tensors", cache.recipe_text, *batch.options, new is None, *options.without_tensors) if kept else ()
    operands = (query, *((None, None) if new is None else new)) if kept else ()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> eager.Attention:
        table, lengths, counts, _, cu_seqlens, k, v, k_scale, v_scale, sinks = others
        same = PagedBatch(table, lengths, counts, None, batch.max_length, cu_seqlens, batch.max_count, batch.batch_invariant)
        given = None if new is None else (key, value)
        return _attend_to_checked_tensors(query, PagedTensors(k, v, k_scale, v_scale, cache.recipe), same, given, options._replace(sinks=sinks))

    like = eager.likeness_of(name, operands, others) if kept else None
    repeated = eager.repeat(like, attend)
    if repeated is not None:
        return eager.attention_of(repeated)
    found = _attend_to_checked_tensors(query, cache, batch, new, options)
    if kept and runs_kernels(options.backend, query.device):
        eager.remember(like)
    return found


def checked_tensors_call(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, new: New, options: Options) -> Scoring:
    """What is done to scores in a call of `paged_sdpa` on the cache of another engine, whose arguments are checked."""
    window, softcap, sinks, scale, *_ = options
    paged_tensors_ops.check_backend("attention", options.backend)
    check_paged_batch(batch)
    check_options(options)
    validate.check_tensors_call(query, cache, batch, Scoring(1.0, window, softcap, sinks))
    if new is not None:
        key, value = new
        validate.check_appended(key, value, cache, batch, tokens_of(query))
    return Scoring(query.shape[-1] ** -0.5 if scale is None else float(scale), window, float(softcap), sinks)


def _attend_to_checked_tensors(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, new: New, options: Options) -> eager.Attention:
    """`paged_sdpa` of the cache of another engine, of a call that isn't like one before."""
    how = checked_tensors_call(query, cache, batch, new, options)
    if new is not None:
        _append_to_tensors(*new, cache, batch, append_backend(options.backend))
    dtype = query.dtype if options.out_dtype is None else options.out_dtype
    operator = getattr(library_ops, f"{options.backend}_tensors_attention")
    out, lse = operator(
        query, cache.tensors(), cache.recipe_text, batch.page_table, batch.lengths, batch.counts, batch.cu_seqlens, *batch.options,
        how.softmax_scale, list(how.window), how.softcap, how.sinks, dtype,
    )  # fmt: skip
    return (out, lse) if options.return_lse else out


Key = TypeVar("Key", torch.Tensor, None)
"""Keys, or None in their place."""


def rotary_embedding(
    query: torch.Tensor,
    key: Key,
    batch: PagedBatch,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, Key]:
    """Rotary position embeddings (Su et al., arXiv:2104.09864) of a batch's new tokens, before `paged_sdpa` gets them.

    A token's position is that in its sequence, by the batch's lengths, which are read on the device. Queries and keys
    take one launch.

    Args:
        query: (B, Hq, S, D), or packed (T, Hq, D), float16, bfloat16 or float32, unit last stride.
        key: (B, Hkv, S, D) or (T, Hkv, D), query's dtype and device, likewise; or None.
        batch: the B sequences that the rows belong to. Their lengths include these tokens.
        cos, sin: (P, R / 2), contiguous, float32 or query's dtype: of the first R channels at positions 0 to P - 1.
        interleaved: whether channels 2 i and 2 i + 1 are a pair, as in GPT-J; else i and i + R / 2, as in GPT-NeoX,
            Llama and transformers.
        backend: `auto` (Triton on a GPU, else modelled), `triton`, or `modelled`: the definition in plain torch.

    Returns:
        query and key, contiguous, computed in float32 and rounded once. Tokens at position P or later are NaN. Tokens
        past the counts, and packed ones behind the last sequence, are as they were; so are channels from R on.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    check_paged_batch(batch)

    def turn(query: torch.Tensor, key: torch.Tensor | None, *others: Any) -> eager.Attention:
        cos, sin, table, lengths, counts, _, cu_seqlens = others
        rotary_ops.check_backend(backend)
        validate.check_turned(query, key, batch, Angles(cos, sin, interleaved))
        found = getattr(library_ops, f"{backend}_rotary")(query, key, cos, sin, table, lengths, counts, cu_seqlens, interleaved)
        return found[0] if key is None else (found[0], found[1])

    found: Any = eager.kept(("rotary_embedding", interleaved, backend), (query, key), (cos, sin, *batch.tensors()), turn)
    return found if isinstance(found, tuple) else (found, None)


def write_to_pages(key: torch.Tensor, value: torch.Tensor, cache: PagedTensors, slots: torch.Tensor | PagedBatch, *, backend: str = "auto") -> None:
    """Write new tokens to the cache of another engine, before `paged_sdpa` attends to them.

    Caches in half precision keep them as they are. e4m3 caches with a scale per token and head get the scales of these
    tokens, their largest magnitude / 448. With other scales tokens are divided by them, and saturate. What isn't finite
    becomes NaN.

    Args:
        key: (T, Hkv, D), unit last stride: of any float dtype for an e4m3 cache, else of the cache's. With a batch
            (B, Hkv, S, D), or (T, Hkv, D) of packed tokens.
        value: (T, Hkv, Dv) or (B, Hkv, S, Dv), key's dtype, likewise.
        cache: the cache. Its scales are per row of a batch only if `slots` is a batch.
        slots: int32 or int64 (T,), contiguous, read on the device: page number * page + slot in the page. Tokens whose
            slot is negative or out of range are dropped. No slot may stand there twice. Or the batch whose last tokens
            these are, as for `paged_sdpa`: they go to the pages of its sequences, and a token that has no page is
            dropped.
        backend: `auto` (Triton on a GPU, else modelled), `triton`, or `modelled`: the definition in plain torch.

    Raises:
        BackendUnavailable: the backend can't run here.
        TypeError, ValueError: an argument isn't as above.
        RuntimeError: an argument requires grad.
    """
    if not isinstance(cache, PagedTensors):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.PagedTensors")
    by_batch = isinstance(slots, PagedBatch)
    places: Any = slots.tensors() if isinstance(slots, PagedBatch) else (slots,)
    others: Any = *places, cache.k, cache.v, cache.k_scale, cache.v_scale
    kept = not is_compiling() and all(x is None or isinstance(x, torch.Tensor) for x in others)
    name = ("write_to_pages", by_batch, backend)

    def write(key: torch.Tensor, value: torch.Tensor, *tensors: Any) -> None:
        places, rest = tensors[:-4], tensors[-4:]
        to = PagedBatch(places[0], places[1], places[2], places[3], None, places[4]) if by_batch else places[0]
        write_to_pages(key, value, PagedTensors(*rest), to, backend=backend)

    like = eager.likeness_of(name, (key, value), others) if kept else None
    if eager.repeat(like, write) is not None:
        return
    paged_tensors_ops.check_backend("write", backend)
    if isinstance(slots, PagedBatch):
        validate.check_appended(key, value, cache, slots, None)
        _append_to_tensors(key, value, cache, slots, backend)
    else:
        validate.check_written(key, value, cache, slots)
        getattr(library_ops, f"{backend}_write_to_pages")(key, value, cache.tensors(), slots)
    if kept and runs_kernels(backend, key.device):
        eager.remember(like)


def _append_to_tensors(key: torch.Tensor, value: torch.Tensor, cache: PagedTensors, batch: PagedBatch, backend: str) -> None:
    """Write a batch's new tokens, which are checked, to the cache of another engine."""
    append = getattr(library_ops, f"{backend}_tensors_append")
    append(key, value, cache.tensors(), batch.page_table, batch.lengths, batch.counts, batch.cu_seqlens)
