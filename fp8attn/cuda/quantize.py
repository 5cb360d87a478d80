"""The CUDA quantizer of K and V for Hopper, for the recipes in recipe.FUSED_RECIPES: its configs, the calls that it
supports, and its outputs.

The bytes are those of fp8attn.quantize, as with the other quantizers. A cluster of CTAs holds one head in shared memory
and reads it once. Longer heads take three launches, which read V twice.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from .. import quantization as quantize_ref
from ..call import HALVES, unsupported_tma
from ..device import Device
from ..layout import padded_length
from ..quantization import LANES, TOKEN_CHUNK
from ..recipe import E4M3, FUSED_RECIPES, SCALE_BLOCK, ProductType, Quantized, Recipe
from ..rotation import part_of
from ..schedule import unsupported_size
from .configs import round_up, unsupported_arch, unsupported_shared_memory

CHANNELS = 64
"""Channels of K or V that a CTA holds at a time, for TOKEN_CHUNK tokens."""

LARGEST_DIM = 256

LARGEST_CLUSTER = 16
"""CTAs of the largest cluster. Clusters of more than 8 CTAs aren't portable."""

THREADS = 256
WARPS = 8

MOMENTS = CHANNELS * (4 + 2 + 2)
"""sizeof(Moments), in bytes: sums, minima and maxima of CHANNELS channels."""

NONFINITE = TOKEN_CHUNK // 8
"""Bytes of one bit for each token of a chunk."""

CHUNK_STATS_BYTES = MOMENTS + NONFINITE
"""sizeof(ChunkStats): what one kernel tells the next of a slice of a token chunk of V."""


@dataclass(frozen=True)
class QuantizeConfig:
    """One instance. The fields of C++'s QuantizeConfig, in order.

    Attributes:
        token_chunks: largest number of chunks of TOKEN_CHUNK tokens that a cluster holds; a power of two. 1: heads may
            have any number, and each chunk has a cluster.
        ctas: CTAs per SM that registers must leave room for, at least.
    """

    token_chunks: int
    ctas: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def is_long(self) -> bool:
        """Whether heads may be longer than a cluster can hold."""
        return self.token_chunks == 1

    @property
    def shared_bytes(self) -> int:
        """sizeof(QuantizeStorage), in bytes."""
        largest = 4 * TOKEN_CHUNK // SCALE_BLOCK
        measured = max((WARPS + self.token_chunks) * MOMENTS, 4 * LANES * CHANNELS)
        told = 4 * CHANNELS + LARGEST_DIM // CHANNELS * (NONFINITE + largest)
        own = MOMENTS + 4 * CHANNELS + NONFINITE + 8 * CHANNELS + WARPS * largest
        return round_up(TOKEN_CHUNK * CHANNELS * 2 + measured + told + own + 16, 128)

    @property
    def name(self) -> str:
        return "quantize_" + "_".join(str(x) for x in astuple(self))


INSTANCES = (QuantizeConfig(8, 3), QuantizeConfig(16, 2), QuantizeConfig(1, 3))
"""The compiled instances, each for e4m3 and int8. The last one takes heads that are longer than a cluster can hold."""


def token_chunks_of(k: torch.Tensor) -> int:
    """Number of token chunks of a head."""
    return -(-k.shape[2] // TOKEN_CHUNK)


def ctas_of(k: torch.Tensor) -> int:
    """Number of CTAs that share a head."""
    return token_chunks_of(k) * (k.shape[3] // CHANNELS)


def exceeds_cluster(k: torch.Tensor) -> bool:
    """Whether a head is longer than a cluster can hold."""
    return ctas_of(k) > LARGEST_CLUSTER


def choose(k: torch.Tensor) -> QuantizeConfig:
    """The instance for a call. `unsupported_call` must have returned None."""
    is_long = exceeds_cluster(k)
    return next(c for c in INSTANCES if c.is_long == is_long and (is_long or c.token_chunks >= token_chunks_of(k)))


def stats_bytes(k: torch.Tensor) -> int:
    """Bytes of what the kernels of a call tell each other."""
    return k.shape[0] * k.shape[1] * ctas_of(k) * CHUNK_STATS_BYTES if exceeds_cluster(k) else 0


def unsupported_config(config: QuantizeConfig, device: Device) -> str | None:
    """The reason why a config can't run on a device, or None if it can."""
    return unsupported_arch(device) or unsupported_shared_memory(config.shared_bytes, device)


def unsupported_call(k: torch.Tensor, v: torch.Tensor, recipe: Recipe, device: Device) -> str | None:
    """The reason why this quantizer doesn't support keys and values (B, H, S, D), or None if it does."""
    for name in ("k", "v", "smooth_k", "smooth_v", "rotate"):
        wanted = getattr(FUSED_RECIPES[recipe.qk], name)
        if getattr(recipe, name) != wanted:
            return f"recipe.{name} is {getattr(recipe, name)!r}; it takes {wanted!r}"
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
    return unsupported_config(choose(k), device)


def empty(k: torch.Tensor, v: torch.Tensor, qk: ProductType) -> tuple[Quantized, Quantized]:
    """Uninitialised key and value for the kernel to fill."""
    batch, heads, length, dim = k.shape

    def numbers(*shape: int) -> torch.Tensor:
        return k.new_empty(shape, dtype=torch.float32)

    rows = quantize_ref.empty_rows(k, quantize_ref.row_type(qk))
    scale = numbers(*quantize_ref.scale_shape("block", *k.shape))
    values = v.new_empty(batch, heads, dim, padded_length(length), dtype=E4M3)
    part = part_of(dim, FUSED_RECIPES[qk].rotate)
    return (
        Quantized(rows, scale, "block", "rows", length, numbers(batch, heads, dim), rotated=part),
        Quantized(values, numbers(batch, heads, dim), "channel", "values", length, numbers(batch, heads, dim)),
    )


def filled(key: Quantized, value: Quantized) -> list[torch.Tensor]:
    """The tensors of key and value, in the order in which the binding takes them."""
    assert key.mean is not None and value.mean is not None
    return [key.data, key.scale, key.mean, value.data, value.scale, value.mean]
