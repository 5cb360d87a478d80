"""The operators of KV caches: append, and attention. See `ops` for what all operators have in common."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from . import pages, validate
from . import triton as triton_kernels
from .cuda import append, build, decode, prefill
from .cuda import run as cuda_run
from .cuda.build import BuildError
from .device import Device, device_of
from .ops import current, has_kernels, library_ops, register
from .pages import EVERY_ROW, PagedBatch, PagedCall, Stage, Storage, empty_answer
from .pages import append as append_to
from .recipe import Recipe, Rotation
from .reference import CAUSAL_WINDOW
from .validate import BackendUnavailable

BACKENDS = {"append": ("auto", "cuda", "triton", "modelled"), "attention": ("auto", "cuda", "triton", "modelled")}
"""By what is done."""

Result = TypeVar("Result")

Tensors = Sequence[torch.Tensor]
MaybeTensor = torch.Tensor | None


def operator_of(what: str, backend: object, batch: object) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operator that appends a batch's tokens to a cache, or attends to it.

    Raises:
        ValueError: there is no such backend.
        TypeError: `batch` isn't a `PagedBatch`.
    """
    check_called(what, backend, batch)
    return getattr(library_ops, f"{backend}_paged_{what}")


def check_called(what: str, backend: object, batch: object) -> None:
    """Check the backend that is to append or to attend, and that there is a batch.

    Raises:
        ValueError: there is no such backend.
        TypeError: `batch` isn't a `PagedBatch`.
    """
    if backend not in BACKENDS[what]:
        raise ValueError(f"backend is {backend!r}; it must be one of {BACKENDS[what]}")
    check_paged_batch(batch)


def check_paged_batch(batch: object) -> None:
    """Check that `batch` is a `PagedBatch`.

    Raises:
        TypeError: it isn't.
    """
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"batch is a {type(batch).__name__}; it must be a fp8attn.PagedBatch")


@functools.cache
def _recipe(rotate: Rotation, smooth_k: bool, smooth_v: bool, int8: bool) -> Recipe:
    return Recipe(smooth_k=smooth_k, smooth_v=smooth_v, rotate=rotate, qk="int8" if int8 else "e4m3")


def runs_triton(backend: str, device: torch.device) -> bool:
    """Whether Triton's kernels serve a cache on `device`: with `auto` on GPUs.

    Raises:
        BackendUnavailable: they can't run here.
    """
    if backend == "triton" and not has_kernels(device):
        raise BackendUnavailable(f"triton: the cache is on {device}; it must be on a GPU, or TRITON_INTERPRET=1 be set before Triton is imported")
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def asks_cuda(backend: str, device: torch.device) -> bool:
    """Whether CUDA kernels are asked first for a cache on `device`."""
    return backend == "cuda" or (backend == "auto" and device.type == "cuda")


def runs_kernels(backend: str, device: torch.device) -> bool:
    """Whether kernels serve a cache on `device`, and not their model. The call has come to its end."""
    return backend == "cuda" or runs_triton(backend, device)


def unsupported_decode(call: PagedCall) -> str | None:
    """Why the CUDA kernel for few queries doesn't support a call whose tokens are in the cache, or None if it does.

    Nothing is compiled to find out, so compiling may still fail.
    """
    device = device_of(call.q.device)
    reason = decode.unsupported_call(call.q, call.storage, call.batch, call.softmax_scale, device)
    return reason or build.unavailable(decode.choose(call.storage, call.scoring), device.arch)


def unsupported_prefill(call: PagedCall) -> str | None:
    """The same of the CUDA kernel for many queries."""
    device = device_of(call.q.device)
    # instances of one library
    return prefill.unsupported_call(call, device) or build.unavailable(prefill.smallest(call), device.arch)


def _prefill(call: PagedCall, device: Device, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernel for many queries. The decode kernel attends to packed rows of few ones."""
    few = few_queries(call)
    tiling = tiling_of(call, device, few)
    results = cuda_run.attend_to_pages(call, device, out_dtype, few) if few else None
    table = None if call.packed is None else triton_kernels.varlen.table_of_rows(call, tiling.tile, few, device)
    if tiling.splits == 1:
        return cuda_run.prefill_from_pages(call, device, tiling, out_dtype, table, results)
    outputs = triton_kernels.paged_attention.Outputs.empty(call.q, call.q.shape[-1], out_dtype, tiling.splits)
    cuda_run.prefill_from_pages(call, device, tiling, out_dtype, table, outputs.parts())
    outputs.combine(call.q.shape[-1])
    return outputs.out, outputs.lse


def tiling_of(call: PagedCall, device: Device, few: int) -> prefill.Tiling:
    """How the kernel for many queries runs a call. Where some rows are the decode kernel's, those of at most `few`
    queries, the keys of the others are not split: the output has both. Nor are they where rows mustn't depend on
    others: how they are split follows from all tiles."""
    return prefill.Tiling.of(call, device, may_split=not few and not call.batch.batch_invariant)


def few_queries(call: PagedCall) -> int:
    """Of a call by the kernel for many queries: packed rows that have at most so many go to the decode kernel; 0: none
    do."""
    if call.batch.cu_seqlens is None:
        return 0
    rows, few = call.batch.lengths.shape[0], decode.few_queries(call.q, call.storage.k.shape[1], call.batch.batch_invariant)
    all_have_most = call.q.shape[0] == rows * call.batch.most_queries(call.q)
    return 0 if all_have_most or unsupported_decode(replace(call, batch=replace(call.batch, max_count=few))) else few


def unless_unbuilt(required: bool, launch: Callable[[], Result]) -> Result | None:
    """What a launch of a CUDA kernel returns; or None, with a warning, if it can't be compiled and isn't `required`.

    Raises:
        BuildError: it is required and can't be compiled here.
    """
    try:
        return launch()
    except BuildError as error:
        if required:
            raise
        warnings.warn(f"fp8attn goes on with Triton: {error}", stacklevel=3)
        return None


class Attending(NamedTuple):
    """A CUDA kernel that attends to a cache: its name, its instance, and what launches it."""

    kernel: str
    config: decode.DecodeConfig | prefill.PrefillConfig
    launch: Callable[..., tuple[torch.Tensor, torch.Tensor]]


def plan_attention(backend: str, call: PagedCall) -> Attending | list[str]:
    """The CUDA kernel that attends to a cache, or why Triton's does. `backend`: `cuda` or `auto`.

    Nothing is compiled to find out, so compiling may still fail.

    Raises:
        BackendUnavailable: the backend is `cuda`, and none supports the call.
    """
    by_decode = unsupported_decode(call) if call.new is None else None
    may_decode = call.new is None and by_decode is None

    def decodes_faster(splits: bool) -> bool:
        return may_decode and decode.is_faster(call.q, call.storage, call.batch, splits)

    by_prefill = None
    if not decodes_faster(True):  # a decode step doesn't ask how prefill would run it
        by_prefill = unsupported_prefill(call)
        if by_prefill is None:
            device = device_of(call.q.device)
            tiling = tiling_of(call, device, few_queries(call))
            if tiling.splits > 1 or not decodes_faster(False):
                return Attending("prefill", tiling.config, _prefill)
    if may_decode:
        return Attending("decode", decode.choose(call.storage, call.scoring), cuda_run.attend_to_pages)
    reasons = [*dict.fromkeys(reason for reason in (by_decode, by_prefill) if reason is not None)]
    if backend == "cuda":
        raise BackendUnavailable(f"cuda: {'; '.join(reasons)}; use backend='triton' or 'auto'")
    return reasons


def _by_cuda(backend: str, call: PagedCall, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention to a cache by a CUDA kernel, or None if Triton's is to do it.

    Raises:
        BackendUnavailable: the backend is `cuda`, and no kernel supports the call.
        BuildError: the backend is `cuda`, and the kernel can't be compiled here.
    """
    planned = plan_attention(backend, call)
    if not isinstance(planned, Attending):
        return None
    return unless_unbuilt(backend == "cuda", lambda: planned.launch(call, device_of(call.q.device), out_dtype))


def unsupported_append(cache: Storage, tokens: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch) -> str | None:
    """The same of the CUDA kernel that appends keys and values."""
    device = device_of(cache.k.device)
    return append.unsupported_call(cache, *tokens, batch, device) or build.unavailable(append.choose(cache), device.arch)


def _appended_by_cuda(
    required: bool, cache: Storage, tokens: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch, recipe: Recipe, stage: Stage
) -> bool:  # fmt: skip
    """Append keys and values by the CUDA kernel. False if Triton's is to do it.

    Raises:
        BackendUnavailable: the CUDA kernel is `required` and doesn't support the call.
        BuildError: it is required and can't be compiled here.
    """
    reason = unsupported_append(cache, tokens, batch)
    if reason is not None:
        if required:
            raise BackendUnavailable(f"cuda: {reason}; use backend='triton' or 'auto'")
        return False

    def append_here() -> bool:
        cuda_run.append_to_pages(cache, tokens, batch, recipe, device_of(cache.k.device), stage)
        return True

    return unless_unbuilt(required, append_here) is not None


def _append_by(backend: str):
    def append(
        key: torch.Tensor, value: torch.Tensor, storage: Tensors, page_table: torch.Tensor, lengths: torch.Tensor, counts: MaybeTensor,
        sequences: MaybeTensor, cu_seqlens: MaybeTensor, rotate: Rotation, smooth_k: bool, smooth_v: bool, pages: bool = True,
        tokens: bool = True, most: int = EVERY_ROW,
    ) -> None:  # fmt: skip
        cache, batch = Storage.of(storage), PagedBatch(page_table, lengths, counts, sequences, None, cu_seqlens)
        stage = Stage(pages, tokens, most)
        validate.check_storage(cache)
        validate.check_batch(batch, cache.k.device)
        validate.check_new_tokens(key, value, batch, None, cache)
        recipe = _recipe(rotate, smooth_k, smooth_v, cache.pages.k.dtype == torch.int8)
        if asks_cuda(backend, key.device):
            with current(key.device):
                if _appended_by_cuda(backend == "cuda", cache, (key, value), batch, recipe, stage):
                    return
        if runs_triton(backend, key.device):
            with current(key.device):
                triton_kernels.paged_append.append(cache, key, value, batch, recipe, device_of(key.device), stage)
        else:
            append_to(cache, key, value, batch, recipe, stage)

    return append


def _attend_by(backend: str):
    def attend(
        query: torch.Tensor, key: MaybeTensor, value: MaybeTensor, storage: Tensors, page_table: torch.Tensor, lengths: torch.Tensor,
        counts: MaybeTensor, sequences: MaybeTensor, cu_seqlens: MaybeTensor, max_length: int | None, max_count: int | None,
        batch_invariant: bool, rotate: Rotation, softmax_scale: float, out_dtype: torch.dtype, window: Sequence[int] = CAUSAL_WINDOW,
        softcap: float = 0.0, sinks: MaybeTensor = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch = PagedBatch(page_table, lengths, counts, sequences, max_length, cu_seqlens, max_count, batch_invariant)
        cache = Storage.of(storage)
        validate.check_storage(cache)
        validate.check_batch(batch, cache.k.device)
        validate.check_queries(query, batch, cache)
        validate.check_launch(softmax_scale, "bottom_right", out_dtype)
        scores = validate.checked_causal_scores(window, softcap, sinks, query)
        new = None
        if key is not None or value is not None:
            validate.check_new_tokens(key, value, batch, pages.tokens_of(query), cache)
            assert key is not None and value is not None
            new = key, value
        recipe = _recipe(rotate, True, True, cache.pages.k.dtype == torch.int8)
        call = PagedCall(query, cache, new, batch, recipe, softmax_scale, *scores)
        if asks_cuda(backend, query.device):
            with current(query.device):
                found = _by_cuda(backend, call, out_dtype)
            if found is not None:
                return found
        if runs_triton(backend, query.device):
            with current(query.device):
                return triton_kernels.paged_attention.attend(call, device_of(query.device), out_dtype)
        out, lse = pages.attend_paged(call)
        return out.to(out_dtype), lse

    return attend


def _fake_append(
    key, value, storage, page_table, lengths, counts, sequences, cu_seqlens, rotate, smooth_k, smooth_v, pages=True, tokens=True, most=EVERY_ROW
):
    return None


def _fake_attend(
    query, key, value, storage, page_table, lengths, counts, sequences, cu_seqlens, max_length, max_count, batch_invariant, rotate, softmax_scale,
    out_dtype, window=CAUSAL_WINDOW, softcap=0.0, sinks=None,
):  # fmt: skip
    out, lse = empty_answer(query, Storage.of(storage).v.shape[3])
    return out.to(out_dtype), lse


_BATCH = "Tensor page_table, Tensor lengths, Tensor? counts, Tensor? sequences, Tensor? cu_seqlens"

for _name in BACKENDS["append"]:
    register(
        f"{_name}_paged_append(Tensor key, Tensor value, Tensor(a!)[] storage, {_BATCH}, int rotate, bool smooth_k, bool smooth_v,"
        f" bool pages=True, bool tokens=True, int most={EVERY_ROW}) -> ()",
        _append_by(_name),
        _fake_append,
    )

for _name in BACKENDS["attention"]:
    register(
        f"{_name}_paged_attention(Tensor query, Tensor? key, Tensor? value, Tensor[] storage, {_BATCH}, int? max_length, int? max_count,"
        " bool batch_invariant, int rotate, float softmax_scale, ScalarType out_dtype, int[2] window=[-1, 0], float softcap=0.,"
        " Tensor? sinks=None) -> (Tensor, Tensor)",
        _attend_by(_name),
        _fake_attend,
    )
