"""The operators of caches of other engines: attention to them, and writing to them. See `ops` for what all operators
have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from . import paged_tensors, validate
from . import triton as triton_kernels
from .cuda import build, decode_tensors
from .cuda import run as cuda_run
from .device import device_of
from .ops import current, register
from .paged_ops import asks_cuda, runs_triton, unless_unbuilt
from .paged_tensors import PagedTensors
from .pages import PagedBatch, empty_answer
from .reference import Scoring
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


def plan_attention(
    backend: str, query: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring
) -> decode_tensors.DecodeTensorsConfig | str:  # fmt: skip
    """The instance of the CUDA kernel that attends, or why Triton's does. `backend`: `cuda` or `auto`.

    Nothing is compiled to find out, so compiling may still fail.

    Raises:
        BackendUnavailable: the backend is `cuda`, and the kernel doesn't support the call.
    """
    device = device_of(query.device)
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
    if isinstance(plan_attention(backend, query, cache, batch, how), str):
        return None
    device = device_of(query.device)
    return unless_unbuilt(backend == "cuda", lambda: cuda_run.attend_to_tensors(query, cache, batch, how, device, out_dtype))


def _attend_by(backend: str):
    def attend(
        query: torch.Tensor, cache: Sequence[torch.Tensor], page_table: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, max_length: int | None, max_count: int | None, batch_invariant: bool, softmax_scale: float,
        window: Sequence[int], softcap: float, sinks: torch.Tensor | None, out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        batch = PagedBatch(page_table, lengths, counts, None, max_length, cu_seqlens, max_count, batch_invariant)
        tensors = PagedTensors.of(cache)
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
    query, cache, page_table, lengths, counts, cu_seqlens, max_length, max_count, batch_invariant, softmax_scale, window, softcap, sinks, out_dtype
):
    out, lse = empty_answer(query, cache[1].shape[3])
    return out.to(out_dtype), lse


def _fake_write(key, value, cache, *where) -> None:
    return None


for _name in BACKENDS["attention"]:
    register(
        f"{_name}_tensors_attention(Tensor query, Tensor[] cache, Tensor page_table, Tensor lengths, Tensor? counts, Tensor? cu_seqlens,"
        " int? max_length, int? max_count, bool batch_invariant, float softmax_scale, int[2] window, float softcap, Tensor? sinks,"
        " ScalarType out_dtype)"
        " -> (Tensor, Tensor)",
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
