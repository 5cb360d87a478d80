"""The operators of caches of other engines: attention to them, and writing to them. See `ops` for what all operators
have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from . import paged_copies, paged_tensors, validate
from . import triton as triton_kernels
from .call import GROUPS, Call, Problem, Varlen
from .cuda import build, configs, decode, decode_tensors, general_quantize, quantize
from .cuda import run as cuda_run
from .cuda.portable import PortableConfig
from .device import Device, device_of
from .ops import current, register
from .paged_copies import Copies, Room, Spans
from .paged_ops import asks_cuda, runs_triton, unless_unbuilt
from .paged_tensors import QUERIES, PagedTensors
from .pages import PagedBatch, empty_answer, tokens_of
from .problem_ops import unsupported_fused_q
from .recipe import E4M3, Quantized
from .reference import CAUSAL_WINDOW, Causal, Scoring, Window
from .schedule import unsupported_size
from .validate import BackendUnavailable

BACKENDS = {"attention": ("auto", "cuda", "triton", "modelled"), "write": ("auto", "triton", "modelled")}
"""By what is done."""


def check_backend(what: str, backend: object) -> None:
    """Check the backend of a call on a cache of another engine: `what` is done.

    Raises:
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS[what]:
        raise ValueError(f"backend is {backend!r}; with fp8attn.PagedTensors it must be one of {BACKENDS[what]}")


PACKED_ROWS = {True: 384, False: 640}
"""Rows of a key/value head up to which it is faster to attend to a row of the batch where it lies; whether the cache is
e4m3."""


class Packing(NamedTuple):
    """Attention to those rows of the batch that have many queries as packed sequences, by the Hopper kernel: of an e4m3
    cache to copies, of another one to what the recipe makes of it.

    Attributes:
        config: its instance.
        room: of the sequences. Packed rows of at most `room.few` queries are the decode kernel's.
    """

    config: configs.HopperConfig
    room: Room


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as it is, and packed (T, H, D) as (1, H, T, D)."""
    return x.transpose(0, 1).unsqueeze(0) if x.dim() == 3 else x


def _as_packed(x: torch.Tensor) -> torch.Tensor:
    """Contiguous (B, H, S, D) as packed sequences (1, H, T, D): sequence b begins with token b H S, and head h lies h S
    tokens behind the first one. One row of any strides as it is, and packed (T, H, D) as (1, H, T, D)."""
    if x.dim() == 3 or x.shape[0] == 1:
        return _as_batch(x)
    rows, heads, length, dim = x.shape
    return x.as_strided((1, heads, ((rows - 1) * heads + 1) * length, dim), (x.numel(), length * dim, dim, 1))


def _empty_codes(query: torch.Tensor, device: torch.device) -> Quantized:
    """Uninitialised codes of queries (B, Hq, S, D), or packed (T, Hq, D) as (1, Hq, T, D), stored in that order."""
    codes = torch.empty(query.shape, dtype=E4M3, device=device)
    data = _as_batch(codes)
    return Quantized(data, torch.empty(data.shape[:3], dtype=torch.float32, device=device), "token", "rows", data.shape[2])


def _causal_of(how: Scoring) -> tuple[Causal, Window]:
    """Which keys rows of packed sequences see, as `Call` has it."""
    return ("none", CAUSAL_WINDOW) if how.window == (-1, -1) else ("bottom_right", how.window)


Placed = tuple[PagedBatch, Spans, Room]
"""Rows of a batch that are attended to as packed sequences, where they lie, and what there is room for."""


def _call_of(query: torch.Tensor, placed: Placed, copies: Copies, codes: Quantized, how: Scoring, out_dtype: torch.dtype) -> Call:
    """Attention of quantized queries to copies of an e4m3 cache. codes: of `_empty_codes`."""
    q, q_scale, heads = codes.data, codes.scale, query.shape[1]
    if query.dim() == 4:
        q = _as_packed(q)
        q_scale = q_scale.as_strided((1, heads, q.shape[2]), (q_scale.numel(), query.shape[2], 1))
    causal, window = _causal_of(how)
    return Call(
        q, q_scale, GROUPS["token"], copies.k, copies.k_scale, GROUPS["block"], copies.v, copies.v_scale, None, None, None, copies.k.shape[2],
        how.softmax_scale, causal, "e4m3", None, out_dtype, True, window, how.softcap, how.sinks, varlen=_varlen_of(query, q, placed),
    )  # fmt: skip


def _problem_of(query: torch.Tensor, placed: Placed, cache: PagedTensors, how: Scoring, out_dtype: torch.dtype) -> Problem:
    """Attention to a cache in half precision that is quantized, as the attention kernel quantizes queries.

    Args:
        query: as `_as_packed` takes it.
    """
    assert cache.recipe is not None
    q, (causal, window), tokens = _as_packed(query), _causal_of(how), placed[2].tokens
    k, v = (torch.empty(1, cache.kv_heads, tokens, x.shape[3], dtype=x.dtype, device="meta") for x in (cache.k, cache.v))
    varlen = _varlen_of(query, q, placed)
    return Problem(q, k, v, how.softmax_scale, cache.recipe.qk, causal, out_dtype, True, None, window, how.softcap, how.sinks, varlen)


def _varlen_of(query: torch.Tensor, q: torch.Tensor, placed: Placed) -> Varlen:
    """The sequences of queries, which `q` has packed, and of their keys."""
    batch, spans, room = placed
    return spans.varlen((q.shape[2], room.tokens), batch, (batch.most_queries(query), room.longest))


def copies_queries(query: torch.Tensor, cache: PagedTensors) -> bool:
    """Whether queries that attend to packed sequences are copied first: `_as_packed` doesn't take them as they lie."""
    return cache.recipe is not None and query.dim() == 4 and query.shape[0] > 1 and not query.is_contiguous()


def _attend_to_packed(
    query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, device: Device, out_dtype: torch.dtype, plan: Packing
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention as planned by `plan_packing`.

    Raises:
        BuildError: a kernel can't be compiled here.
    """
    out, lse = results = cuda_run.empty_results(query, cache.v.shape[3], out_dtype)
    room, rows, on = plan.room, batch.lengths.shape[0], query.device
    placed = batch, Spans.empty(rows, on), room
    if room.few:
        cuda_run.attend_to_tensors(query, cache, batch, how, device, out_dtype, room.few, results)
    fill: Callable[[], None]  # brings what was placed to where the kernel attends to it
    if cache.recipe is None:
        copies, codes = Copies.empty(cache, rows, room, on), _empty_codes(query, on)
        cuda_run.quantize_any(_as_batch(query), None, None, QUERIES, device, into=codes)
        call = _call_of(query, placed, copies, codes, how, out_dtype)
        fill = functools.partial(triton_kernels.paged_copies.copy, cache, batch, room, placed[1], copies)
    else:
        problem = _problem_of(query.contiguous() if copies_queries(query, cache) else query, placed, cache, how, out_dtype)
        quantized = cuda_run.empty_pages(cache, placed[1].packed(room.tokens), problem.qk)
        call = problem.call_of(*quantized)
        fill = functools.partial(cuda_run.quantize_pages, cache, batch.page_table, placed[1], quantized, device)
    packed_out, packed_lse = _as_packed(out), lse.unsqueeze(0)
    if query.dim() == 4:
        packed_lse = lse.new_empty(1, *packed_out.shape[1:3])
    for number in range(room.passes):
        triton_kernels.paged_copies.place(query, cache, batch, room, placed[1], results, number)
        fill()
        table = triton_kernels.varlen.table_of(call, configs.ROWS, device, plan.config.consumers)
        cuda_run.forward(call, device, plan.config, tile_table=table, into=(packed_out, packed_lse))
        if query.dim() == 4:
            triton_kernels.paged_copies.store_lse(packed_lse, placed[1].queries, lse)
    return results


def _few_queries(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch) -> int:
    """Packed rows of at most so many queries are attended to where they lie, beside others that aren't; 0: none are.

    A kernel that expects several queries of a row takes twice as long for single ones. So it expects as many as rows
    have on average beside the longest one, unless these are many: then there are several long ones.
    """
    rows, tokens, most = batch.lengths.shape[0], tokens_of(query), batch.most_queries(query)
    if batch.cu_seqlens is None or tokens == rows * most:
        return 0
    group = query.shape[1] // cache.kv_heads
    single, several = (max(height // group, 1) for height in (decode_tensors.FEW_ROWS[False], decode.TILE_ROWS))
    return several if single * (rows - 1) < tokens - most <= several * (rows - 1) else single


def _unsupported_tiles(rows: int, config: configs.HopperConfig, device: Device) -> str | None:
    """The reason why it isn't worth while for so few rows of all query heads, or None if it is: tiles of packed
    sequences aren't split, and the decode kernel's are."""
    tiles = rows // config.tile_rows
    return f"there are {tiles} tiles of {config.tile_rows} rows; it takes one for each two SMs" if 2 * tiles < device.sm_count else None


def _planned(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, room: Room) -> configs.HopperConfig | str:
    """The instance that attends to packed sequences, or why none does."""
    device, meta = device_of(query.device), torch.device("meta")
    rows = batch.lengths.shape[0]
    placed = batch, Spans.empty(rows, meta), room
    if cache.recipe is None:
        call = _call_of(query, placed, Copies.empty(cache, rows, room, meta), _empty_codes(query, meta), how, torch.float32)
        planned = cuda_run.plan(call, device, first=True)
        assert not isinstance(planned, PortableConfig)
        reason = general_quantize.unsupported_call(_as_batch(query), None, None, QUERIES, device)
        return planned if isinstance(planned, str) or reason is None else reason
    if copies_queries(query, cache):
        query = torch.empty(query.shape, dtype=query.dtype, device=meta)
    problem = _problem_of(query, placed, cache, how, torch.float32)
    reason = (
        unsupported_fused_q(problem, device)
        or unsupported_size("key", problem.k)
        or quantize.unsupported_call(cache.k.transpose(1, 2), cache.v.transpose(1, 2), cache.recipe, device)
    )
    return reason or configs.choose(problem, device)


def plan_packing(query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring) -> Packing | str:
    """Attention to packed sequences, or why all rows are attended to where they lie.

    Nothing is compiled to find out, so compiling may still fail.
    """
    device, group = device_of(query.device), query.shape[1] // max(cache.kv_heads, 1)
    reason, least = paged_copies.unsupported_cache(cache), PACKED_ROWS[cache.is_fp8]
    if reason is None and (query.numel() == 0 or decode.rows_of_head(query, cache.kv_heads, batch) <= least):
        reason = f"rows of the batch have up to {batch.most_queries(query)} queries; it takes more than {least // max(group, 1)}"
    if reason is None and batch.batch_invariant:
        reason = "the batch is batch_invariant"
    if reason is not None:
        return reason
    rows, tokens = batch.lengths.shape[0], tokens_of(query)
    few = _few_queries(query, cache, batch)
    room, queries = Room.of(query, cache, batch, how.window, few), tokens if batch.cu_seqlens is not None else rows * tokens
    planned = room.unsupported(queries) or _planned(query, cache, batch, how, room)
    if isinstance(planned, str):
        return planned
    reasons = (
        _unsupported_tiles(query.shape[1] * queries, planned, device),
        decode_tensors.unsupported_call(query, cache, replace(batch, max_count=few), how, device) if few else None,
        build.unavailable(planned, device.arch),
    )
    return next(filter(None, reasons), None) or Packing(planned, room)


def plan_attention(
    backend: str, query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring
) -> decode_tensors.DecodeTensorsConfig | Packing | str:  # fmt: skip
    """The instance of the CUDA kernel that attends, or attention to packed sequences; or why Triton's kernel attends.
    `backend`: `cuda` or `auto`.

    Nothing is compiled to find out, so compiling may still fail.

    Raises:
        BackendUnavailable: the backend is `cuda`, and the kernels don't support the call.
    """
    device = device_of(query.device)
    packing = plan_packing(query, cache, batch, how)
    if isinstance(packing, Packing):
        return packing
    reason = decode_tensors.unsupported_call(query, cache, batch, how, device)
    if reason is None:
        config = decode_tensors.choose(query, cache, batch)
        reason = build.unavailable(config, device.arch)
        if reason is None:
            return config
    if backend == "cuda":
        raise BackendUnavailable(f"cuda: {reason}; use backend='triton' or 'auto'")
    return reason


def _by_cuda(
    backend: str, query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """Attention by the CUDA kernel, or None if Triton's is to do it.

    Raises:
        BackendUnavailable: the backend is `cuda`, and the kernel doesn't support the call.
        BuildError: the backend is `cuda`, and the kernel can't be compiled here.
    """
    planned, device = plan_attention(backend, query, cache, batch, how), device_of(query.device)
    if isinstance(planned, str):
        return None
    if isinstance(planned, Packing):
        return unless_unbuilt(backend == "cuda", lambda: _attend_to_packed(query, cache, batch, how, device, out_dtype, planned))
    return unless_unbuilt(backend == "cuda", lambda: cuda_run.attend_to_tensors(query, cache, batch, how, device, out_dtype))


def _attend_by(backend: str):
    def attend(
        query: torch.Tensor, cache: Sequence[torch.Tensor], recipe: str | None, page_table: torch.Tensor, lengths: torch.Tensor,
        counts: torch.Tensor | None, cu_seqlens: torch.Tensor | None, max_length: int | None, max_count: int | None, batch_invariant: bool,
        softmax_scale: float, window: Sequence[int], softcap: float, sinks: torch.Tensor | None, out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch = PagedBatch(page_table, lengths, counts, None, max_length, cu_seqlens, max_count, batch_invariant)
        tensors = PagedTensors.of(cache, recipe)
        how = Scoring(softmax_scale, (window[0], window[1]), softcap, sinks)
        validate.check_tensors_call(query, tensors, batch, how)
        validate.check_launch(softmax_scale, "bottom_right", out_dtype)
        if asks_cuda(backend, query.device):
            with current(query.device):
                found = _by_cuda(backend, query, tensors, batch, how, out_dtype)
            if found is not None:
                return found
        if runs_triton(backend, query.device):
            with current(query.device):
                return triton_kernels.paged_tensors.attend(query, tensors, batch, how, device_of(query.device), out_dtype)
        out, lse = paged_tensors.attend(query, tensors, batch, how)
        return out.to(out_dtype), lse

    return attend


def _store(
    kind: Literal["write", "append"], backend: str, cache: PagedTensors, key: torch.Tensor, value: torch.Tensor, to: torch.Tensor | PagedBatch
) -> None:
    """paged_tensors.write or paged_tensors.append, by Triton where it runs. `to`: slots, or a batch."""
    if runs_triton(backend, key.device):
        with current(key.device):
            getattr(triton_kernels.paged_tensors, kind)(cache, key, value, to, device_of(key.device))
    else:
        getattr(paged_tensors, kind)(cache, key, value, to)


def _write_by(backend: str):
    def write(key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
        tensors = PagedTensors.of(cache)
        validate.check_written(key, value, tensors, slots)
        _store("write", backend, tensors, key, value, slots)

    return write


def _append_by(backend: str):
    def append(
        key: torch.Tensor, value: torch.Tensor, cache: Sequence[torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor,
        counts: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    ) -> None:  # fmt: skip
        tensors, batch = PagedTensors.of(cache), PagedBatch(page_table, lengths, counts, None, None, cu_seqlens)
        validate.check_appended(key, value, tensors, batch, None)
        _store("append", backend, tensors, key, value, batch)

    return append


def _fake_attend(
    query, cache, recipe, page_table, lengths, counts, cu_seqlens, max_length, max_count, batch_invariant, softmax_scale, window, softcap, sinks,
    out_dtype,
):  # fmt: skip
    out, lse = empty_answer(query, cache[1].shape[3])
    return out.to(out_dtype), lse


def _fake_write(key, value, cache, *where) -> None:
    return None


for _name in BACKENDS["attention"]:
    register(
        f"{_name}_tensors_attention(Tensor query, Tensor[] cache, str? recipe, Tensor page_table, Tensor lengths, Tensor? counts,"
        " Tensor? cu_seqlens, int? max_length, int? max_count, bool batch_invariant, float softmax_scale, int[2] window, float softcap,"
        " Tensor? sinks, ScalarType out_dtype) -> (Tensor, Tensor)",
        _attend_by(_name),
        _fake_attend,
    )

for _name in BACKENDS["write"]:
    register(f"{_name}_write_to_pages(Tensor key, Tensor value, Tensor(a!)[] cache, Tensor slots) -> ()", _write_by(_name), _fake_write)
    register(
        f"{_name}_tensors_append(Tensor key, Tensor value, Tensor(a!)[] cache, Tensor page_table, Tensor lengths, Tensor? counts,"
        " Tensor? cu_seqlens) -> ()",
        _append_by(_name),
        _fake_write,
    )
