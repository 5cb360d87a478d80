"""The CUDA kernel that appends tokens to a KV cache, sm_80 and later: its configs, and the calls that it supports.

The bytes are those of `pages.append`, as with Triton's kernel. An instance serves all head dims up to its own.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ..device import Device
from ..pages import PAGE, RECENT, PagedBatch, Stage, Storage, tokens_of
from ..recipe import Recipe
from ..rotation import part_of
from ..schedule import unsupported_size
from .configs import round_up
from .decode import ALIGNMENT, DTYPES, WARP, unsupported_rows
from .general_quantize import DIM_STEP, LARGEST_DIM, LEAST_DIM, MOST_CTAS, ceil_div, unsupported_device

OF_WORD = 4
"""Threads that measure a word, two channels of V, or of K's mean."""

PAGE_FACTS, MAGNITUDES = 112, 3
"""In shared memory: bytes of C++'s PageFacts, and the number of largest magnitudes."""

FEW_TOKENS = RECENT - PAGE
"""Up to so many new tokens of a row replace no token of a page that they complete, and they complete one page at most.
So one launch does all."""


@dataclass(frozen=True)
class AppendConfig:
    """One instance of the kernel. The fields of C++'s AppendConfig, in order.

    Attributes:
        head_dim: the largest number of channels of K and V.
        ctas: CTAs per SM that registers and shared memory must leave room for, at least.
    """

    head_dim: int
    ctas: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return OF_WORD * self.head_dim // 2

    @property
    def shared_bytes(self) -> int:
        """sizeof(AppendStorage), in bytes."""
        tokens, facts = 2 * 2 * PAGE * self.head_dim, 4 * (3 + 2 * OF_WORD) * self.head_dim
        return round_up(tokens + facts + PAGE_FACTS + 4 * (PAGE // WARP + MAGNITUDES + 1), 128)

    @property
    def name(self) -> str:
        return "append_" + "_".join(str(x) for x in astuple(self))


INSTANCES = (AppendConfig(64, 4), AppendConfig(128, 2), AppendConfig(256, 1))
"""The compiled instances, which are compiled together."""


def choose(storage: Storage) -> AppendConfig:
    """The instance for a cache that the kernel supports."""
    return next(config for config in INSTANCES if max(storage.k.shape[3], storage.v.shape[3]) <= config.head_dim)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, S, D), or packed x (T, H, D) as (1, H, T, D)."""
    return x if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)


def is_few(key: torch.Tensor) -> bool:
    """Whether one launch does all."""
    return tokens_of(key) <= FEW_TOKENS


def most_pages(key: torch.Tensor, batch: PagedBatch) -> int:
    """Pages that new tokens of a row may complete; of packed tokens, places of pages of all rows (layout.units_of)."""
    tokens = tokens_of(key)
    return ceil_div(tokens, PAGE) if batch.cu_seqlens is None else tokens // PAGE + batch.lengths.shape[0]


def ctas_of(key: torch.Tensor, batch: PagedBatch, config: AppendConfig, device: Device) -> int:
    """CTAs of the launch that quantizes pages."""
    rows, heads = batch.lengths.shape[0], key.shape[1]
    if is_few(key):
        return min(rows * heads, max(config.ctas * device.sm_count, ceil_div(rows * heads, WARP)))
    return most_pages(key, batch) * heads * (rows if batch.cu_seqlens is None else 1)


def numbers_of(key: torch.Tensor, batch: PagedBatch, recipe: Recipe, stage: Stage) -> list[int]:
    """What the binding's append takes as `numbers`."""
    options = (is_few(key), stage.pages, stage.tokens, recipe.smooth_k, recipe.smooth_v)
    return [part_of(key.shape[-1], recipe.rotate), most_pages(key, batch), stage.most, *map(int, options)]


def unsupported_call(storage: Storage, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch, device: Device) -> str | None:
    """The reason why the kernel doesn't append tokens to a cache, or None if it does."""
    reason = unsupported_device(device)
    if reason is not None:
        return reason
    for name, x in (("key", key), ("value", value)):
        if x.dtype not in DTYPES or storage.k.dtype != x.dtype:
            return f"{name} is {x.dtype} and the cache's tokens are {storage.k.dtype}; it takes {' or '.join(map(str, DTYPES))} for both"
        dim = x.shape[-1]
        if dim % DIM_STEP or not LEAST_DIM <= dim <= LARGEST_DIM:
            return f"{name} has head dim {dim}; it takes multiples of {DIM_STEP} from {LEAST_DIM} to {LARGEST_DIM}"
        reason = unsupported_rows(name, x) or unsupported_size(name, rows_of(x))
        if reason is not None:
            return reason
    for name, x in (("pages.v", storage.pages.v), ("k", storage.k), ("v", storage.v)):
        if x.data_ptr() % ALIGNMENT:
            return f"storage.{name} starts at {x.data_ptr():#x}; it takes multiples of {ALIGNMENT}"
    config = choose(storage)
    if config.shared_bytes > device.shared_memory:
        largest = max(x.head_dim for x in INSTANCES if x.shared_bytes <= device.shared_memory)
        return f"key and value have head dims {key.shape[-1]} and {value.shape[-1]}; on {device.name} it takes up to {largest}"
    ctas = max(ctas_of(key, batch, config, device), batch.lengths.shape[0] * key.shape[1])
    return f"it would take {ctas} CTAs; a grid has fewer than {MOST_CTAS}" if ctas >= MOST_CTAS else None
