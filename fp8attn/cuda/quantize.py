"""The CUDA quantizer of K and V for Hopper, for the recipes in recipe.FUSED_RECIPES: its configs, the calls that it
supports, and its outputs.

The bytes are those of fp8attn.quantize, as with the other quantizers. A cluster of CTAs holds one head in shared memory
and reads it once. Longer heads take three launches, which read V twice.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass

import torch

from .. import quantization as quantize_ref
from ..call import HALVES, unsupported_tma
from ..device import Device
from ..layout import padded_length, units_of
from ..quantization import LANES, TOKEN_CHUNK
from ..recipe import E4M3, FUSED_RECIPES, SCALE_BLOCK, Packed, ProductType, Quantized, Recipe
from ..rotation import part_of
from ..schedule import unsupported_size
from .configs import round_up, unsupported_arch, unsupported_shared_memory

CHANNELS = 64
"""Channels of K or V that a CTA holds at a time, for TOKEN_CHUNK tokens."""

LARGEST_DIM = 256

LARGEST_CLUSTER = 16
"""CTAs of the largest cluster."""

PORTABLE_CLUSTER = 8
"""CTAs of the largest cluster that every GPU can run."""

THREADS = 256
WARPS = 8

MOMENTS = CHANNELS * (4 + 2 + 2)
"""sizeof(Moments), in bytes: sums, minima and maxima of CHANNELS channels."""

NONFINITE = TOKEN_CHUNK // 8
"""Bytes of one bit for each token of a chunk."""

PACKED_UNIT_BYTES = 4 * 4
"""sizeof(PackedUnit): what lies at a place of packed sequences."""

CHUNK_STATS_BYTES = MOMENTS + NONFINITE + PACKED_UNIT_BYTES
"""sizeof(ChunkStats): what one kernel tells the next of a slice of a token chunk of V."""


@dataclass(frozen=True)
class QuantizeConfig:
    """One instance. The fields of C++'s QuantizeConfig, in order.

    Attributes:
        token_chunks: largest number of chunks of TOKEN_CHUNK tokens that a cluster holds; a power of two. 1: there are
            no clusters, and heads may have any number.
        ctas: CTAs per SM that registers must leave room for, at least.
        packed: for packed sequences, also longer ones than a cluster holds.
        paged: K and V lie in pages; packed are the results.
    """

    token_chunks: int
    ctas: int
    packed: bool = False
    paged: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def is_long(self) -> bool:
        """Whether heads may be longer than a cluster can hold."""
        return self.token_chunks == 1 or self.packed

    @functools.cached_property
    def shared_bytes(self) -> int:
        """sizeof(QuantizeStorage), in bytes."""
        slices, largest = LARGEST_DIM // CHANNELS, 4 * TOKEN_CHUNK // SCALE_BLOCK
        tile = TOKEN_CHUNK * CHANNELS * 2 + slices * (4 * CHANNELS + NONFINITE) + 8 * CHANNELS + WARPS * largest
        if self.token_chunks == 1:
            return round_up(round_up(tile, 128) + (8 * TOKEN_CHUNK if self.paged else 0), 128)
        measured = max((WARPS + self.token_chunks) * MOMENTS, 4 * LANES * CHANNELS)
        own = MOMENTS + 4 * CHANNELS + NONFINITE
        return round_up(round_up(tile, 128) + measured + own + 8, 128)

    def stats_bytes(self, ctas: int) -> int:
        """Bytes of what the kernels of a call with so many CTAs tell each other."""
        return ctas * CHUNK_STATS_BYTES if self.is_long else 0

    @property
    def name(self) -> str:
        return "quantize_" + "_".join(str(int(x)) for x in astuple(self))


OF_CLUSTERS = (QuantizeConfig(8, 3), QuantizeConfig(16, 2))
OF_LONG = QuantizeConfig(1, 3)
"""For heads that are longer than a cluster can hold."""

OF_PACKED = QuantizeConfig(8, 3, packed=True)
"""For packed sequences."""

OF_PAGES = QuantizeConfig(1, 3, packed=True, paged=True)
"""For sequences of a cache in pages."""

LEAST_FULL = 0.3
"""The share of their room that clusters of several token chunks must fill, or packed sequences take none: a cluster
begins where there is room for all of its CTAs, also those that will have no tokens."""

INSTANCES = (*OF_CLUSTERS, OF_LONG, OF_PACKED, OF_PAGES)
"""The compiled instances, each for e4m3 and int8. They are compiled together."""

LARGEST = max(INSTANCES, key=lambda config: config.shared_bytes)
"""The instance that needs the most of a device."""


def token_chunks_of(k: torch.Tensor) -> int:
    """Number of token chunks of a head."""
    return -(-k.shape[2] // TOKEN_CHUNK)


def slices_of(k: torch.Tensor) -> int:
    """Number of CTAs that share a token chunk."""
    return k.shape[3] // CHANNELS


def ctas_of(k: torch.Tensor) -> int:
    """Number of CTAs that share a head."""
    return token_chunks_of(k) * slices_of(k)


def ctas_of_packed(k: torch.Tensor, packed: Packed) -> int:
    """Number of CTAs for packed keys (1, H, T, D): one for each slice of each head of each place of a token chunk."""
    return units_of(packed, TOKEN_CHUNK) * k.shape[1] * slices_of(k)


def cluster_chunks_of(k: torch.Tensor, packed: Packed, longest: int | None) -> int:
    """Token chunks of the clusters that quantize packed keys (1, H, T, D); 0: no clusters do.

    Args:
        longest: the most tokens of a sequence, as far as the caller knows, or None. Sequences that turn out to be
            longer take the kernels without clusters.
    """
    chunks = 0 if longest is None else -(-longest // TOKEN_CHUNK)
    is_empty = chunks > 1 and packed.tokens < LEAST_FULL * packed.sequences * chunks * TOKEN_CHUNK
    return 0 if is_empty or chunks * slices_of(k) > PORTABLE_CLUSTER else chunks


def grid_of(k: torch.Tensor) -> tuple[QuantizeConfig, int]:
    """The instance for a call, and `ctas_of`. `unsupported_call` must have returned None."""
    chunks, ctas = token_chunks_of(k), ctas_of(k)
    if ctas > LARGEST_CLUSTER:
        return OF_LONG, ctas
    return next(c for c in OF_CLUSTERS if c.token_chunks >= chunks), ctas


def writers_of(k: torch.Tensor, config: QuantizeConfig) -> int:
    """Number of CTAs that write a head. The long instance has some for slices of V, and others for parts of K: as many
    of a token chunk as the power of two from its slices on."""
    slices = slices_of(k)
    return token_chunks_of(k) * (slices + (1 << (slices - 1).bit_length()) if config.is_long else slices)


def choose(k: torch.Tensor) -> QuantizeConfig:
    """The instance for a call. `unsupported_call` must have returned None."""
    return grid_of(k)[0]


def unsupported_config(config: QuantizeConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
    return unsupported_arch(device) or unsupported_shared_memory(config.shared_bytes, device)


def unsupported_call(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, device: Device) -> str | None:
    """The reason why this quantizer doesn't support keys and values (B, H, S, D), packed or not, or None if it does."""
    wanted = FUSED_RECIPES[recipe.qk]
    for name in () if recipe is wanted else ("k", "v", "smooth_k", "smooth_v", "rotate"):
        if getattr(recipe, name) != getattr(wanted, name):
            return f"recipe.{name} is {getattr(recipe, name)!r}; it takes {getattr(wanted, name)!r}"
    if k.dtype not in HALVES or k.dtype != v.dtype:
        return f"key and value are {k.dtype} and {v.dtype}; it takes bfloat16 or float16"
    if k.shape != v.shape:
        return f"key has shape {tuple(k.shape)}, value {tuple(v.shape)}; it takes the same of both"
    dim = k.shape[3]
    if dim % CHANNELS or not 0 < dim <= LARGEST_DIM:
        return f"head dim is {dim}; it takes multiples of {CHANNELS} up to {LARGEST_DIM}"
    if k.numel() == 0:
        return f"key has shape {tuple(k.shape)}"
    for name, x in (("key", k), ("value", v)):
        reason = unsupported_size(name, x) or unsupported_tma(x, name)
        if reason is not None:
            return reason
    return unsupported_config(LARGEST, device)


def empty(k: torch.Tensor, v: torch.Tensor, qk: ProductType) -> tuple[Quantized, Quantized]:
    """Uninitialised key and value for the kernel to fill."""
    batch, heads, length, dim = k.shape
    rows = quantize_ref.empty_rows(k, quantize_ref.row_type(qk))
    scale = k.new_empty(quantize_ref.scale_shape("block", batch, heads, length, dim), dtype=torch.float32)
    values = k.new_empty(batch, heads, dim, padded_length(length), dtype=E4M3)
    k_mean, v_scale, v_mean = [k.new_empty(batch, heads, dim, dtype=torch.float32) for _ in range(3)]
    part = part_of(dim, FUSED_RECIPES[qk].rotate)
    return (
        Quantized(rows, scale, "block", "rows", length, k_mean, part),
        Quantized(values, v_scale, "channel", "values", length, v_mean),
    )


def filled(key: Quantized, value: Quantized) -> list[torch.Tensor]:
    """The tensors of key and value, in the order in which the binding takes them."""
    assert key.mean is not None and value.mean is not None
    return [key.data, key.scale, key.mean, value.data, value.scale, value.mean]
