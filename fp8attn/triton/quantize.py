"""Fused quantization: reads q and k once and v twice, and writes all of them as bytes, v transposed and with permuted
keys.

The result is byte for byte the one that fp8attn.quantize defines. There are three launches. `gather_kernel` computes
statistics of token chunks of v and k's mean, and quantizes q. `finish_kernel` computes v's means and scales.
`write_kernel` quantizes k and v. If a scale covers a head of k or more, k is read twice, too. For few tokens, the
launches would take longer than the work, so `fused_small_kernel` does everything in one. bias.py computes the score
bias.

Every kernel is a programmatic dependent of the previous one, and lets the next one start at once. It waits before it
first touches memory (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import quantization as quantize_ref
from .. import rotation
from ..call import GROUPS
from ..device import Device
from ..layout import padded_length, units_of
from ..recipe import E4M3, SCALE_BLOCK, Granularity, Packed, Quantized, Recipe
from .launch import ceil_div, check_counted, launch
from .quantize_kernels import finish_kernel, fused_small_kernel, gather_kernel, import_values_kernel, write_kernel
from .quantize_steps import CHANNELS, SLICE, Traits, power_of_2
from .varlen import packed_arguments

SHORT = 1024  # largest number of keys for which fused_small_kernel may be faster,
SHORT_PROGRAMS = 4  # and largest number of its programs per SM

WARPS = 8

GIVEN = ("tensor", "head")
"""Granularities whose scales are computed before rows are written."""


@functools.lru_cache(1024)
def traits_of(q_dim: int, k_dim: int, v_dim: int, recipe: Recipe, device: Device) -> Traits:
    """The `Traits` of a call. Dims of absent operands are 0."""
    there = k_dim > 0
    return Traits(
        q_dim, k_dim, v_dim, GROUPS[recipe.q], GROUPS[recipe.k], smooth_q=recipe.smooth_q and q_dim > 0,
        smooth_k=recipe.smooth_k and there, smooth_v=recipe.smooth_v and there,
        part=rotation.part_of(k_dim or q_dim, recipe.rotate), int8=recipe.qk == "int8",
        k_extremes=recipe.k in GIVEN and there, native=device.has_fp8_units and not device.emulated,
        dependent=device.has_dependent_launch,
    )  # fmt: skip


def _resources(traits: Traits, with_values: bool, warmup: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the launches that compute statistics, that write k and v, and of all others."""
    width = max(traits.widths)
    resources = dict(warmup=warmup, dependent=traits.dependent, num_warps=WARPS if width <= 128 else 16, maxnreg=128)
    if traits.int8 or traits.part > 0 or with_values or traits.smooth_q:
        # int8 is rounded by an addition. Fused with the product before it, a tie of the rounded product would no longer
        # be a tie. The same holds for values and their correction. And the products that start a rotation, and means of
        # queries, would not be rounded where they are subnormal
        resources["enable_fp_fusion"] = False
    gathering = resources
    if (width <= 64 and not traits.smooth_q) or traits.work_tiles > 1:
        # as many programs at a time as registers allow, except for a few words
        gathering = resources | dict(num_warps=WARPS, maxnreg=80 if width <= 128 else 128)
    return gathering, resources | dict(maxnreg=80) if width <= 64 else resources, resources


def quantize(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    recipe: Recipe,
    device: Device,
    *,
    warmup: bool = False,
    given: quantize_ref.Statistics | None = None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """quantization.quantize by the fused kernels: q, or k and v, or all three. A smoothed q comes without `bias`.

    Args:
        warmup: compile only.
        given: the statistics of the sequence that k and v are a part of. None: they are the whole sequence.
    """
    # these scales are of q without its means, which aren't computed yet
    if q is not None and recipe.smooth_q and recipe.q in GIVEN:
        centred, means = quantize_ref.without_means(q, recipe)
        q_quantized, k_quantized, v_quantized = quantize(centred, k, v, replace(recipe, smooth_q=False), device, warmup=warmup, given=given)
        assert q_quantized is not None
        return replace(q_quantized, mean=means), k_quantized, v_quantized
    if any(x is not None and x.numel() == 0 for x in (q, k)):
        return quantize_ref.quantize(q, k, v, recipe, given)
    like = q if q is not None else k
    assert like is not None
    for name, x in (("query", q), ("key", k)):
        if x is not None:
            check_counted(name, x)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    batch, kv_heads, kv_length, k_dim = (like.shape[0], 1, 0, 0) if k is None else k.shape
    v_dim = 0 if v is None else v.shape[3]
    _, q_heads, q_length, q_dim = (0, 1, 0, 0) if q is None else q.shape
    token_chunks = ceil_div(kv_length, quantize_ref.TOKEN_CHUNK)
    pairs = batch * kv_heads if k is not None else 0
    traits = traits_of(q_dim, k_dim, v_dim, recipe, device)
    gathering, writing, resources = _resources(traits, v is not None, warmup)

    row_type, largest_code = quantize_ref.row_type(recipe.qk), quantize_ref.largest_code(recipe.qk)
    q_data = q_scale = q_mean = None
    q_items = 0
    if q is not None:
        q_data = quantize_ref.empty_rows(q, row_type)
        if recipe.q in GIVEN:
            values = rotation.rotate(q, traits.part)
            q_scale = _reduced_scale(values.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-2), recipe.q, largest_code, traits.q_factor)
        else:
            q_scale = new(*quantize_ref.scale_shape(recipe.q, *q.shape))
        if traits.smooth_q:
            q_mean = new(batch, q_heads, ceil_div(q_length, quantize_ref.QUERY_GROUP), q_dim)
        q_items = batch * q_heads * ceil_div(q_length, SCALE_BLOCK)
    queries = (_bytes(q_data), _strides(q_data), q_scale, _scale_strides(q, q_scale), q_mean)
    q_quantized = None if q is None else Quantized(q_data, q_scale, recipe.q, "rows", q_length, q_mean, traits.part)
    sample = (quantize_ref.sample_step(kv_length), 1 / max(quantize_ref.sample_size(kv_length), 1))
    k_mean = new(batch, kv_heads, k_dim) if traits.smooth_k else None
    v_mean = new(batch, kv_heads, v_dim) if traits.smooth_v else None
    blocks = ceil_div(kv_length, SCALE_BLOCK)

    programs = pairs * (v_dim // SLICE.value + blocks) + q_items
    in_one = kv_length <= SHORT and programs <= SHORT_PROGRAMS * device.sm_count and v_dim % SLICE.value == 0
    if k is not None and v is not None and in_one and recipe.v == "channel" and not traits.k_extremes and given is None:
        k_data = quantize_ref.empty_rows(k, row_type)
        k_scale = new(*quantize_ref.scale_shape(recipe.k, *k.shape))
        v_data = new(batch, kv_heads, v_dim, padded_length(kv_length), dtype=E4M3)
        v_scale = new(batch, kv_heads, v_dim)
        launch(
            fused_small_kernel, (programs,),
            q, k, v, _strides(q), k.stride(), v.stride(), *queries, k_mean, _bytes(k_data), k_data.stride(), k_scale, _scale_strides(k, k_scale),
            v_mean, _words(v_data), v_scale, q_heads, kv_heads, pairs, q_length, kv_length, v_data.shape[3], *sample, 1 / kv_length, traits,
            **resources,
        )  # fmt: skip
        return (
            q_quantized,
            Quantized(k_data, k_scale, recipe.k, "rows", kv_length, k_mean, traits.part),
            Quantized(v_data, v_scale, recipe.v, "values", kv_length, v_mean),
        )

    k_extremes = v_sums = v_extremes = v_flags = None
    if k is not None:
        k_extremes = new(pairs, token_chunks, 2, k_dim) if traits.k_extremes else None
        v_sums = new(pairs, token_chunks, v_dim)
        v_extremes = new(pairs, token_chunks, 2, v_dim)
        v_flags = new(pairs, token_chunks, dtype=torch.int32)
    kv_items = pairs * token_chunks * (2 if traits.k_extremes else 1) + (pairs if traits.smooth_k else 0)
    launch(
        gather_kernel, (kv_items + q_items,),
        q, k, v, _strides(q), _strides(k), _strides(v), *queries, k_mean, k_extremes, v_sums, v_extremes, v_flags,
        None, None, q_heads, kv_heads, pairs, q_length, kv_length, *sample, 0, traits.of_statistics, **gathering,
    )  # fmt: skip
    if k is None or v is None:
        return q_quantized, None, None
    if given is not None and given.k_mean is not None:
        k_mean = given.k_mean.contiguous()

    k_largest = new(batch, kv_heads, k_dim) if traits.k_extremes else None
    v_largest = None if recipe.v == "channel" else new(batch, kv_heads, v_dim)
    v_scale = new(batch, kv_heads, v_dim) if recipe.v == "channel" else None
    launch(
        finish_kernel, (pairs, ceil_div(max(k_dim, v_dim), CHANNELS.value)),
        k_mean if traits.k_extremes else None, k_extremes, k_largest, v_sums, v_extremes, v_mean, v_largest, v_scale, None, None, token_chunks,
        1 / kv_length, kv_heads, kv_length, 0, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    if k_largest is None:
        k_scale = new(*quantize_ref.scale_shape(recipe.k, *k.shape))
    else:
        k_scale = _reduced_scale(k_largest, recipe.k, largest_code)
        if traits.int8:
            k_scale = quantize_ref.record_nonfinite(k_scale, ~(k.isfinite().all(-1) & v.isfinite().all(-1)), recipe.k)
    if v_largest is not None:
        v_scale = _reduced_scale(v_largest, recipe.v, quantize_ref.E4M3_MAX)
    if given is not None:
        v_scale, v_mean = given.v_scale, None if given.v_mean is None else given.v_mean.contiguous()

    v_data = new(batch, kv_heads, v_dim, padded_length(kv_length), dtype=E4M3)
    key = Quantized(quantize_ref.empty_rows(k, row_type), k_scale, recipe.k, "rows", kv_length, k_mean, traits.part)
    value = Quantized(v_data, v_scale, recipe.v, "values", kv_length, v_mean)
    _write(key, value, k, v, v_flags, traits, writing)
    return q_quantized, key, value


def quantize_packed(
    k: torch.Tensor, v: torch.Tensor, recipe: Recipe, packed: Packed, device: Device, *, warmup: bool = False
) -> tuple[Quantized, Quantized]:
    """quantization.quantize_packed by the fused kernels: each sequence has the bytes that `quantize` gives it alone.

    K's scales are those of tokens or blocks, V's those of channels.

    Args:
        warmup: compile only.
    """
    check_counted("key", k)
    key, value = quantize_ref.empty_packed(k, v, recipe, packed)
    heads, v_dim = k.shape[1], v.shape[3]
    chunks, blocks = units_of(packed, quantize_ref.TOKEN_CHUNK), units_of(packed, SCALE_BLOCK)
    pairs = packed.sequences * heads
    traits = traits_of(0, k.shape[3], v_dim, recipe, device)
    gathering, writing, resources = _resources(traits, True, warmup)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return k.new_empty(shape, dtype=dtype)

    v_sums, v_extremes, v_flags = new(heads, chunks, v_dim), new(heads, chunks, 2, v_dim), new(heads, chunks, dtype=torch.int32)
    cu_seqlens, seqused, sequences, tokens = packed_arguments(packed)
    launch(
        gather_kernel, (heads * chunks + (pairs if traits.smooth_k else 0),),
        None, k, v, _strides(None), k.stride(), v.stride(), None, _strides(None), None, _scale_strides(None, None), None, key.mean, None,
        v_sums, v_extremes, v_flags, cu_seqlens, seqused, 1, heads, pairs, 0, tokens, 1, 1.0, sequences, traits.of_statistics,
        **gathering,
    )  # fmt: skip
    launch(
        finish_kernel, (pairs, ceil_div(v_dim, CHANNELS.value)),
        None, None, None, v_sums, v_extremes, value.mean, None, value.scale, cu_seqlens, seqused, 0, 1.0, heads, tokens, sequences, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    launch(
        write_kernel, (heads * (chunks + blocks),),
        k, v, k.stride(), v.stride(), key.mean, value.mean, key.scale, value.scale, key.scale.stride(), value.scale.stride(),
        _bytes(key.data), key.data.stride(), _words(value.data), v_flags, cu_seqlens, seqused, heads, tokens, value.data.shape[3], sequences,
        traits.of_codes, **writing,
    )  # fmt: skip
    return key, value


def chunk_statistics(v: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor], device: Device) -> torch.Tensor:
    """quantization.chunk_statistics by the kernel.

    Args:
        into: where to write sums and extremes, contiguous.

    Returns:
        ChunkStatistics.careful.
    """
    (batch, heads, length, dim), (sums, extremes) = v.shape, into
    check_counted("value", v)
    token_chunks, traits = ceil_div(length, quantize_ref.TOKEN_CHUNK), traits_of(0, 0, dim, Recipe(), device)
    careful = v.new_empty(batch, heads, token_chunks, dtype=torch.int32)
    launch(
        gather_kernel, (batch * heads * token_chunks,),
        None, None, v, _strides(None), _strides(None), v.stride(), None, _strides(None), None, _scale_strides(None, None), None, None, None,
        sums, extremes, careful, None, None, 1, heads, batch * heads, 0, length, 1, 1.0, 0, traits.of_statistics, warmup=False,
        dependent=traits.dependent, num_warps=WARPS, maxnreg=80 if max(traits.widths) <= 128 else 128, enable_fp_fusion=False,
    )  # fmt: skip
    return careful


def statistics(parts: Sequence[quantize_ref.PartialStatistics], total: int, recipe: Recipe, device: Device) -> quantize_ref.Statistics:
    """quantization.statistics by the kernels: two launches behind three concatenations."""
    sample, sums, extremes = (
        torch.cat(tensors, 2) for tensors in zip(*((part.k_sample, part.v_sums, part.v_extremes) for part in parts), strict=True)
    )
    if sums.numel() == 0 or (recipe.smooth_k and sample.numel() == 0):
        return quantize_ref.statistics(parts, total, recipe)
    batch, heads, token_chunks, v_dim = sums.shape
    pairs, count = batch * heads, sample.shape[2]

    def new(there: bool, dim: int) -> torch.Tensor | None:
        return sums.new_empty(batch, heads, dim) if there else None

    k_mean, v_mean = new(recipe.smooth_k, sample.shape[3]), new(recipe.smooth_v, v_dim)
    v_scale, v_largest = new(recipe.v == "channel", v_dim), new(recipe.v != "channel", v_dim)
    if k_mean is not None:
        # the sample is a short sequence, of which all tokens are sampled. Programs of its token chunks have no values
        traits = traits_of(0, sample.shape[3], 0, replace(recipe, k="block"), device)
        gathering, _, _ = _resources(traits, True, False)
        launch(
            gather_kernel, (pairs * ceil_div(count, quantize_ref.TOKEN_CHUNK) + pairs,),
            None, sample, None, _strides(None), sample.stride(), _strides(None), None, _strides(None), None, _scale_strides(None, None), None, k_mean,
            None, None, None, None, None, None, 1, heads, pairs, 0, count, 1, 1 / count, 0, traits.of_statistics, **gathering,
        )  # fmt: skip
    traits = traits_of(0, 0, v_dim, recipe, device)
    traits = replace(traits, smooth_v=recipe.smooth_v)  # of keys that aren't there, it says no
    _, _, resources = _resources(traits, True, False)
    launch(
        finish_kernel, (pairs, ceil_div(v_dim, CHANNELS.value)),
        None, None, None, sums, extremes, v_mean, v_largest, v_scale, None, None, token_chunks, 1 / total, heads, total, 0, traits.of_scales,
        **resources | dict(num_warps=4, maxnreg=None),
    )  # fmt: skip
    if v_scale is None:
        assert v_largest is not None
        v_scale = _reduced_scale(v_largest, recipe.v, quantize_ref.E4M3_MAX)
    return quantize_ref.Statistics(k_mean, v_mean, v_scale)


def quantize_into(
    key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, careful: torch.Tensor | None, recipe: Recipe, device: Device
) -> None:
    """Quantize k and v by statistics of a sequence that they are a part of.

    Args:
        key, value: their means and V's scales are given. K's rows and scales, of tokens or blocks, and V are written.
        careful: as of ChunkStatistics, of v; None of no tokens.
    """
    assert recipe.k not in GIVEN
    if k.numel() == 0:
        return
    check_counted("key", k)
    assert careful is not None
    traits = traits_of(0, k.shape[3], v.shape[3], recipe, device)
    _write(key, value, k, v, careful, traits, _resources(traits, True, False)[1])


def _write(
    key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, careful: torch.Tensor, traits: Traits, options: dict[str, Any]
) -> None:
    """Launch write_kernel. Rows, K's scales of tokens or blocks, and values are written; all else is given."""
    batch, heads, length, _ = k.shape
    launch(
        write_kernel, (batch * heads * (ceil_div(length, quantize_ref.TOKEN_CHUNK) + ceil_div(length, SCALE_BLOCK)),),
        k, v, k.stride(), v.stride(), key.mean, value.mean, key.scale, value.scale, _scale_strides(k, key.scale),
        _scale_strides(v, value.scale, v.shape[3]), _bytes(key.data), key.data.stride(), _words(value.data), careful, None, None, heads, length,
        value.data.shape[3], 0, traits.of_codes, **options,
    )  # fmt: skip


def _reduced_scale(largest: torch.Tensor, granularity: Granularity, code: float, factor: float = 1.0) -> torch.Tensor:
    """Scales of heads or of the tensor that map to `code`, times `factor`, from channels' largest magnitudes
    (B, H, D)."""
    largest = largest.amax(-1, keepdim=True) if granularity == "head" else largest.amax().view(1, 1, 1)
    return torch.where(largest > 0, quantize_ref.scale_of(largest, code) * factor, 1.0)


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 1) if x is None else x.stride()


def _scale_strides(x: torch.Tensor | None, scale: torch.Tensor | None, last: int = -1) -> tuple[int, ...]:
    """Strides of x's scale, expanded to all heads, with `last` scales for each head (-1: as it is)."""
    return (0, 0, 0) if x is None or scale is None else scale.expand(x.shape[0], x.shape[1], last).stride()


def _bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.view(torch.uint8)


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def import_values(v: torch.Tensor, device: Device, *, warmup: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """quantization.import_values by a fused kernel."""
    batch, heads, length, dim = v.shape
    if v.numel() == 0:
        return quantize_ref.import_values(v)
    check_counted("value", v)
    data = torch.empty(batch, heads, dim, padded_length(length), dtype=E4M3, device=v.device)
    hidden = torch.empty(batch, heads, length, dtype=torch.bool, device=v.device)
    launch(
        import_values_kernel, (batch * heads * ceil_div(length, SCALE_BLOCK),),
        v.view(torch.uint8), v.stride(), data.view(torch.uint8), hidden.view(torch.uint8), heads, length, data.shape[3],
        dim, power_of_2(dim), warmup=warmup, num_warps=8,
    )  # fmt: skip
    return data, hidden
