"""Decoding of sequences whose KV cache is shared by ranks: each has some of the pages, attends to them, and outputs are
merged by their LSE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist

from .. import validate
from ..cache import KVCache
from ..paged import Options, check_options, paged_sdpa
from ..paged_ops import check_paged_batch
from ..pages import PAGE, RECENT_QUERIES, PagedBatch
from ..reference import CAUSAL_WINDOW
from . import agreement
from .agreement import CHECKS, Check
from .merge import Accumulator
from .part_calls import finished
from .sharding import group_of
from .transport import start_gather
from .wire import Form, packed, size_of, unpacked


@overload
def page_share(lengths: int, *, group: dist.ProcessGroup | None = None) -> int: ...


@overload
def page_share(lengths: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor: ...


def page_share(lengths, *, group=None):
    """How many tokens of sequences this rank holds, where pages of 128 tokens are dealt to the ranks in turns.

    Args:
        lengths: tokens of a sequence, an int; or of several, an integer tensor of any shape.
        group: the ranks; the default group if None.

    Returns:
        the tokens that this rank holds, as `lengths` is.

    Raises:
        RuntimeError: there is no group.
    """
    members = group_of(group)
    return _share(lengths, members.rank(), members.size())


def _share(lengths: Any, rank: int, ranks: int) -> Any:
    pages = lengths // PAGE
    return (pages + (ranks - 1 - rank)) // ranks * PAGE + lengths % PAGE * (pages % ranks == rank)


def page_shard(x: torch.Tensor, *, group: dist.ProcessGroup | None = None, dim: int = 2) -> torch.Tensor:
    """The tokens of this rank's pages, one after another. The first token of x is the sequence's first.

    Args:
        x: a tensor with a dimension of all tokens of a sequence, for example k (B, Hkv, S, D).
        group: the ranks; the default group if None.
        dim: the dimension of tokens.

    Raises:
        RuntimeError: there is no group.
    """
    members = group_of(group)
    starts = range(members.rank() * PAGE, x.shape[dim], members.size() * PAGE)
    return torch.cat([x.narrow(dim, start, min(PAGE, x.shape[dim] - start)) for start in starts] or [x.narrow(dim, 0, 0)], dim)


@dataclass(frozen=True, eq=False)
class PageShares:
    """What this rank holds of the sequences of a batch. Made once a step, it serves the caches of all layers.

    Attributes:
        batch: the whole sequences.
        tokens: new tokens of each sequence, S.
        to_append: this rank's tokens, of which counts are new.
        new_rows: int64 (B, S): which of the new tokens this rank appends, from the first on; None: as they come.
        to_attend: a row for each query (B · S), with this rank's tokens that it sees.
    """

    batch: PagedBatch
    tokens: int
    to_append: PagedBatch
    new_rows: torch.Tensor | None
    to_attend: PagedBatch

    @classmethod
    def of(cls, batch: PagedBatch, tokens: int = 1, *, group: dist.ProcessGroup | None = None) -> PageShares:
        """The shares of this rank. Later changes of the batch's tensors don't show in them.

        Args:
            batch: as of `context_parallel_paged_sdpa`.
            tokens: new tokens of each sequence, which its length includes.
            group: the ranks; the default group if None.

        Raises:
            TypeError, ValueError: an argument isn't as above.
            RuntimeError: there is no group.
        """
        check_paged_batch(batch)
        _check_whole(batch, batch.page_table.device)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= RECENT_QUERIES:
            raise ValueError(f"tokens is {tokens!r}; it must be an int from 1 to {RECENT_QUERIES}")
        return cls._of_checked(batch, tokens, group_of(group))

    @classmethod
    def _of_checked(cls, batch: PagedBatch, tokens: int, members: dist.ProcessGroup) -> PageShares:
        rank, ranks = members.rank(), members.size()
        lengths, device = batch.lengths, batch.lengths.device
        before, own = lengths - tokens, _share(lengths, rank, ranks)
        counts, new_rows = own - _share(before, rank, ranks), None
        if tokens > 1 and ranks > 1:
            first = torch.where(before // PAGE % ranks == rank, 0, tokens - counts)
            new_rows = (first[:, None] + torch.arange(tokens, device=device)).clamp(max=tokens - 1)
        # a query is a row of its own: it sees as many of this rank's tokens as the sequence has up to it
        seen = lengths[:, None] - torch.arange(tokens - 1, -1, -1, dtype=torch.int32, device=device)
        of_rows = _share(seen, rank, ranks).reshape(-1)
        table, sequences = batch.page_table, batch.sequences
        if tokens > 1:
            sequences = torch.arange(len(lengths), dtype=torch.int32, device=device) if sequences is None else sequences
            table, sequences = table.repeat_interleave(tokens, 0), sequences.repeat_interleave(tokens)
        to_append = PagedBatch(batch.page_table, own, counts, batch.sequences, batch.max_length)
        rows = PagedBatch(table, of_rows, (of_rows > 0).int(), sequences, batch.max_length, batch_invariant=batch.batch_invariant)
        return cls(batch, tokens, to_append, new_rows, rows)


def context_parallel_paged_sdpa(
    query: torch.Tensor,
    cache: KVCache,
    batch: PagedBatch | PageShares,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    check_ranks: Check = "shapes",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`fp8attn.paged_sdpa` of the last tokens of sequences whose pages are dealt to the ranks of a group in turns. All
    ranks call it together, with the same queries, and get the same bits.

    Page p of a sequence, its tokens 128 p to 128 p + 127, is held by rank p % n. A rank's cache sees its pages as a
    sequence of their own, which has a first page, statistics and a last page in half precision of its own. `page_shard`
    gives the tokens of a prompt that this rank appends, and `page_share` how many tokens a rank holds.

    Args:
        query: (B, Hq, S, D), the same on all ranks, of up to 65 tokens. As of `fp8attn.paged_sdpa`.
        cache: this rank's cache.
        batch: the B sequences. `page_table` has the pages of this rank's cache. `lengths` are those of the whole
            sequences, the queries' tokens included. `counts` and `cu_seqlens` must be None. With `max_length`, no rank
            holds more tokens of a sequence. Or `PageShares` of such a batch, made once for all layers of a model.
        new: keys (B, Hkv, S, D) and values (B, Hkv, S, Dv) of the queries' tokens, the same on all ranks. Each rank
            appends those of its pages first. None: they were appended before.
        group: the ranks; the default group if None.
        sinks: float (Hq,), the same on all ranks.
        softcap, scale, return_lse, out_dtype, backend: as of `fp8attn.paged_sdpa`.
        check_ranks: as of `context_parallel_sdpa`. The exchange of `calls` waits for the CPUs of all ranks.

    Returns:
        out (B, Hq, S, Dv); with `return_lse` also LSE (B, Hq, S) float32.

    Raises:
        TypeError, ValueError, BackendUnavailable: on all ranks, if an argument of one of them isn't as above.
        Disagreement: on all ranks, if the arguments of two ranks don't fit together.
        RuntimeError: an argument requires grad; there is no group; or a rank didn't come within the group's timeout.
    """
    members, how = group_of(group), Options(CAUSAL_WINDOW, softcap, sinks, scale, return_lse, out_dtype, backend)
    with agreement.refused_together((members,)):
        shares = _shares(query, cache, batch, members)
        message = agreement.described(_checked(query, cache, shares, new, how, check_ranks))
    agreement.agree(message, (members,), check_ranks)
    if new is not None:
        _append(cache, shares, new, backend)
    out, lse = _attend_to_own(query, cache, shares, how)
    out, lse = finished(*_merged(query, out, lse, members), sinks, out_dtype or query.dtype)
    return (out, lse) if return_lse else out


def _shares(query: Any, cache: Any, batch: Any, members: dist.ProcessGroup) -> PageShares:
    """The shares of a batch that is checked beside query and cache."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a fp8attn.KVCache")
    whole = batch.batch if isinstance(batch, PageShares) else batch
    check_paged_batch(whole)
    _check_whole(whole, cache.device)
    validate.check_queries(query, whole, cache.storage)
    tokens = query.shape[2]
    if tokens > RECENT_QUERIES:
        raise ValueError(f"query has {tokens} tokens; it must have at most {RECENT_QUERIES}")
    if not isinstance(batch, PageShares):
        return PageShares._of_checked(batch, tokens, members)
    if batch.tokens != tokens:
        raise ValueError(f"batch is of {batch.tokens} new tokens; it must be of query's, {tokens}")
    return batch


def _check_whole(batch: PagedBatch, device: torch.device) -> None:
    """Check a batch of whole sequences, on a cache's device."""
    for name in ("counts", "cu_seqlens"):
        if getattr(batch, name) is not None:
            raise ValueError(f"batch.{name} is given; it must be None: all rows have all queries")
    validate.check_batch(batch, device)


def _checked(query: torch.Tensor, cache: KVCache, shares: PageShares, new: Any, how: Options, check_ranks: Check) -> dict[str, Any]:
    """What a rank tells the others, of arguments that are checked."""
    if new is not None:
        if not isinstance(new, tuple) or len(new) != 2:
            raise TypeError(f"new is a {type(new).__name__}; it must be (key, value) or None")
        validate.check_new_tokens(*new, shares.batch, shares.tokens, cache.storage)
    validate.check_scores(how.softcap, how.sinks, query.shape[1], query.device)
    check_options(how)
    agreement.check_choice("check_ranks", check_ranks, CHECKS)
    return {
        "query length": 0, "key length": 0, "shape of query": list(query.shape), "dtype of query": str(query.dtype),
        "device of query": query.device.type, "heads of the cache": cache.storage.k.shape[1], "head_dim of values": cache.storage.v.shape[3],
        "recipe of the cache": cache.recipe.text, "new": None if new is None else "given", "softcap": how.softcap,
        "sinks": None if how.sinks is None else "given", "scale": how.scale, "return_lse": how.return_lse, "out_dtype": str(how.out_dtype),
        "backend": how.backend, "check_ranks": check_ranks,
    }  # fmt: skip


def _append(cache: KVCache, shares: PageShares, new: tuple[torch.Tensor, torch.Tensor], backend: str) -> None:
    """Append those of the new tokens that are in this rank's pages: the first ones, the last ones, all or none."""
    keys, values = new
    if shares.new_rows is not None:
        rows = shares.new_rows[:, None, :, None]
        keys, values = (x.gather(2, rows.expand(*x.shape[:2], -1, x.shape[3])) for x in new)
    cache.append(keys, values, shares.to_append, backend=backend)


def _attend_to_own(query: torch.Tensor, cache: KVCache, shares: PageShares, how: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to this rank's tokens: float32 (B, Hq, S, Dv), and the LSE (B, Hq, S)."""
    rows, heads, tokens, dim = query.shape
    q = query.transpose(1, 2).reshape(rows * tokens, heads, 1, dim)
    out, lse = paged_sdpa(
        q, cache, shares.to_attend, softcap=how.softcap, scale=how.scale, return_lse=True, out_dtype=torch.float32, backend=how.backend
    )  # fmt: skip
    return out.view(rows, tokens, heads, -1).transpose(1, 2), lse.view(rows, tokens, heads).transpose(1, 2)


def _merged(query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, members: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the tokens of all ranks, merged in the order of the ranks."""
    if members.size() == 1:
        return out, lse
    forms = [Form(tuple(out.shape), torch.float32), Form(tuple(lse.shape), torch.float32)]
    gathered = start_gather(packed([out, lse], forms), size_of(forms), members).wait()
    total = Accumulator(query, out.shape[3])
    for buffer in gathered.chunk(members.size()):
        total.add(0, query.shape[2], *unpacked(buffer, forms))
    return total.result(torch.float32)
