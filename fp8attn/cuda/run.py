"""Launching the CUDA kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..call import AnyCall, Call, Problem, empty_lse, empty_output
from ..device import Device
from ..paged_copies import Spans
from ..paged_tensors import PagedTensors, counted_window
from ..pages import PagedBatch, PagedCall, Stage, Storage, lse_shape
from ..quantization import empty_packed, sample_size
from ..recipe import FUSED_RECIPES, Packed, ProductType, Quantized, Recipe
from ..reference import Scoring, causal_offset
from ..rotation import part_of
from ..schedule import TABLE_HEADER, heads_in_l2
from . import append, build, configs, decode, decode_tensors, general_quantize, one_launch, portable, prefill, quantize
from .configs import KEYS, ROWS, HopperConfig
from .one_launch import OneLaunch
from .portable import PortableConfig
from .quantize import QuantizeConfig

Config = HopperConfig | PortableConfig

LONG_KEYS = 16384
"""From so many keys on, free CTAs take the next tile in every call: kernels of other streams may hold multiprocessors
for a while, and a CTA that starts late must not have as many tiles as the others."""


def plan(call: Call, device: Device, first: bool = False) -> Config | str:
    """The instance that runs a call, the Hopper kernel's where one does, or why none does.

    Args:
        first: only instances that `auto` takes before Triton's kernels: those of the Hopper kernel. On other GPUs the
            portable kernel wasn't measured beside Triton's kernels. On Hopper, Triton's e4m3 kernel is faster than it.
    """
    reason = configs.unsupported_call(call, device)
    if reason is None:
        return configs.choose(call, device)
    return reason if first or call.varlen is not None else portable.unsupported_call(call, device) or portable.choose(call, device)


def choose(call: Call, device: Device) -> Config:
    """The instance that runs a call that `plan` has one for."""
    planned = plan(call, device)
    assert not isinstance(planned, str), planned
    return planned


def library_of(config: Config, device: Device) -> build.Library:
    """The kernels that an instance is among, compiled if this is their first use on this machine.

    Raises:
        BuildError: they can't be.
    """
    if isinstance(config, HopperConfig):
        return build.load_with(config, configs.instances(config.scores, config.int8, config.fuse_q_quant, config.varlen), device.arch)
    return build.load_with(config, portable.group(config.head_dim, device, config.int8, config.scores), device.arch)


def splits_of(call: Call, config: Config, device: Device) -> int:
    """Into how many ranges of keys tiles are split; 1 if they aren't.

    Portable kernel: ranges of each tile. Hopper kernel: of the tiles behind the last full round, one after the other.
    """
    if isinstance(config, PortableConfig):
        return portable.key_splits(portable.packed(call), config, device)
    return configs.stream_k_ranges(call, config, device)


def forward(
    call: Call,
    device: Device,
    config: Config | None = None,
    splits: int | None = None,
    tile_table: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the instance `config`, or the one that `plan` has for the call.

    Args:
        splits: as `splits_of` says; None: as many as that.
        tile_table: the table of tiles of packed sequences, int32 (1 + places, TILE_PITCH), for
            the config's consumers.
        into: where to write the results; None: into new tensors.

    Returns:
        out (B, Hq, Sq, Dv) and LSE (B, Hq, Sq), empty if not asked for.

    Raises:
        ValueError: splits of a call in which nobody can; an instance that doesn't do what the call asks for.
        BuildError: the kernels can't be compiled here.
    """
    out, lse = into or (empty_output(call.q, call.value_dim, call.out_dtype), empty_lse(call.q, call.return_lse))
    if out.numel() == 0:
        return out, lse
    if call.kv_length == 0:
        if call.return_lse and call.sinks is not None:
            return out.zero_(), lse.copy_(call.sinks[:, None].expand_as(lse))
        return out.zero_(), lse.fill_(-torch.inf)
    if config is None:
        config = choose(call, device)
    elif isinstance(config, HopperConfig) and not config.does(call):
        raise ValueError(f"config is {config.name}, made for {config.scores!r} scores; the call's are {configs.scores_of(call)!r}")
    to, parts, part_rows = out, None, None
    if isinstance(config, PortableConfig):
        heads, call = call.q_heads, portable.packed(call)
        if call.q_heads < heads:
            to = portable.rows_of_heads(out, heads // call.q_heads)
    splits = splits_of(call, config, device) if splits is None else splits
    if isinstance(config, HopperConfig):
        if splits > 1 and (call.causal != "none" or not config.stream_k):
            raise ValueError(f"splits is {splits}; it must be 1: {config.name} shares no tiles, or the call is causal")
    elif splits > 1:
        parts = torch.empty(splits, *to.shape, dtype=torch.float32, device=out.device)
        part_rows = torch.empty(2, *parts.shape[:-1], dtype=torch.float32, device=out.device)
    library = library_of(config, device)
    arguments, scratch = launch_of(call, device, config, library, splits)
    memory = memory_of(scratch, out)
    counter = memory.counter if tile_table is None else counter_of(tile_table)
    if scratch.splits:
        parts, part_rows = memory.parts, memory.flags
    library.operators.forward.default(
        *arguments, call.q, call.q_scale, call.k, call.k_scale, call.v, call.v_scale, call.v_mean, call.attn_mask, call.bias,
        to, lse if call.return_lse else None, call.lse_mean, counter, parts, part_rows,
        call.window_offsets[0] if config.window else 0, call.softcap, call.sinks, call.mean_scores, tile_table,
    )  # fmt: skip
    return out, lse


class Scratch(NamedTuple):
    """Memory through which a call's CTAs communicate.

    Attributes:
        counters: int32, 0 at launch: one from which a free CTA takes the next tile, or none. Packed sequences have it
            in the header of their table.
        flags: int32, 0 at launch, of each warp that computes one of `splits`: whether it has stored its partial
            results.
        splits, floats: the number of ranges whose partial results are stored, and of float32 of each; or 0.
    """

    counters: int = 0
    flags: int = 0
    splits: int = 0
    floats: int = 0


class Memory(NamedTuple):
    """Memory through which a call's CTAs communicate.

    Attributes:
        counter, flags: as of `Scratch`, or None.
        parts: float32 (splits, floats) of `Scratch`, or None.
    """

    counter: torch.Tensor | None
    parts: torch.Tensor | None
    flags: torch.Tensor | None


def memory_of(scratch: Scratch, like: torch.Tensor) -> Memory:
    """Allocated on the device of `like`."""
    counters, flags = scratch.counters, scratch.flags
    counter = of_warps = None
    if counters or flags:
        counter, of_warps = like.new_zeros(counters + flags, dtype=torch.int32).split_with_sizes((counters, flags))
    parts = like.new_empty(scratch.splits, scratch.floats, dtype=torch.float32) if scratch.splits else None
    return Memory(counter if counters else None, parts, of_warps if flags else None)


def launch_of(call: AnyCall, device: Device, config: Config, library: build.Library, splits: int) -> tuple[tuple[int | float, ...], Scratch]:
    """The launch arguments that aren't tensors, and the scratch tensors.

    The portable kernel's `parts` isn't among the scratch tensors.
    """
    tiles, stored = call.tiles(config.tile_rows), (0, 0, 0)
    if isinstance(config, PortableConfig):
        boxes = (0, 0, 0, 0)
        ctas = min(tiles, device.sm_count * config.ctas) if config.persistent else splits * tiles
    else:
        boxes = (ROWS, KEYS, config.panel, config.value_dim)
        ctas = min(max(tiles, splits), device.sm_count)
        if splits > 1:
            stored = splits * config.consumers * 4, splits, config.partial_bytes // 4
    takes_next = tiles > ctas and call.varlen is None and (call.causal != "none" or call.kv_length >= LONG_KEYS)
    takes_next = takes_next or (isinstance(config, HopperConfig) and splits > ctas)
    in_l2 = heads_in_l2(call, min(ctas, device.sm_count))
    numbers = (call.q_group, call.k_group, call.kv_length, call.softmax_scale, call.window_offsets[1])
    return (library.launchers[config], *boxes, ctas, in_l2, *numbers), Scratch(int(takes_next), *stored)


def forward_from_fp16(problem: Problem, device: Device, launch: OneLaunch) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization with the default recipe and attention in one launch.

    Args:
        launch: of `one_launch.plan`.

    Returns:
        out (B, Hq, Sq, D); LSE (B, Hq, Sq), empty if not asked for.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    q, k, v = problem.q, problem.k, problem.v
    out, lse = empty_output(q, v.shape[3], problem.out_dtype), empty_lse(q, problem.return_lse)
    library = build.load_with(launch.config, one_launch.group(launch.config), device.arch)
    arguments = (
        library.launchers[launch.config],
        launch.ctas,
        launch.splits,
        problem.softmax_scale,
        causal_offset(problem.causal, q.shape[2], k.shape[2]),
    )
    library.operators.forward_from_fp16.default(*arguments, q, k, v, out, lse if problem.return_lse else None)
    return out, lse


def quantize_kv(k: torch.Tensor, v: torch.Tensor, qk: ProductType, device: Device) -> tuple[Quantized, Quantized]:
    """fp8attn.quantization.quantize_kv with recipe.FUSED_RECIPES[qk].

    `quantize.unsupported_call` must return None for the call.

    Args:
        k, v: (B, H, S, D), bfloat16 or float16.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    key, value = quantize.empty(k, v, qk)
    library, _, numbers = quantizer_of(k, device)
    library.operators.quantize.default(*numbers, k, v, *quantize.filled(key, value), None)
    return key, value


def quantizer_of(k: torch.Tensor, device: Device) -> tuple[build.Library, QuantizeConfig, tuple[int, int, int, int]]:
    """What quantizes keys like k, and their values, and the launch arguments that aren't tensors."""
    config, ctas_of_head = quantize.grid_of(k)
    library = build.load_with(config, quantize.INSTANCES, device.arch)
    batch, heads, length, _ = k.shape
    ctas = batch * heads * ctas_of_head
    return library, config, (library.launchers[config], ctas, sample_size(length), config.stats_bytes(ctas))


def quantize_packed(
    k: torch.Tensor, v: torch.Tensor, qk: ProductType, packed: Packed, device: Device, longest: int | None = None
) -> tuple[Quantized, Quantized]:
    """fp8attn.quantization.quantize_packed with recipe.FUSED_RECIPES[qk].

    `quantize.unsupported_call` must return None for packed keys and values like these.

    Args:
        k, v: (1, H, T, D), bfloat16 or float16.
        longest: the most tokens of a sequence, as far as the caller knows, or None. Only speed depends on it.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    key, value = empty_packed(k, v, FUSED_RECIPES[qk], packed)
    library = build.load_with(quantize.OF_PACKED, quantize.INSTANCES, device.arch)
    ctas = quantize.ctas_of_packed(k, packed)
    library.operators.quantize_packed.default(
        library.launchers[quantize.OF_PACKED], ctas, quantize.cluster_chunks_of(k, packed, longest), quantize.OF_PACKED.stats_bytes(ctas), k, v,
        packed.cu_seqlens, packed.seqused, *quantize.filled(key, value),
    )  # fmt: skip
    return key, value


def empty_pages(cache: PagedTensors, packed: Packed, qk: ProductType) -> tuple[Quantized, Quantized]:
    """Uninitialised results of `quantize_pages`, of so many packed tokens, for recipe.FUSED_RECIPES[qk]."""
    like = cache.k[:1].transpose(1, 2)[:, :, :1].expand(1, -1, packed.tokens, -1)
    return empty_packed(like, like, FUSED_RECIPES[qk], packed)


def quantize_pages(cache: PagedTensors, table: torch.Tensor, spans: Spans, into: tuple[Quantized, Quantized], device: Device) -> None:
    """fp8attn.quantization.quantize_packed of tokens of a cache in half precision.

    `quantize.unsupported_call` must return None for its pages (P, Hkv, slots, D).

    Args:
        table: int32 (B, M), the pages of each row.
        spans: where rows lie in the results, and which of their tokens.
        into: of `empty_pages`.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    packed, k, v = into[0].packed, cache.k.transpose(1, 2), cache.v.transpose(1, 2)
    assert packed is not None
    library = build.load_with(quantize.OF_PAGES, quantize.INSTANCES, device.arch)
    ctas = quantize.ctas_of_packed(k, packed)
    library.operators.quantize_pages.default(
        library.launchers[quantize.OF_PAGES], ctas, quantize.OF_PAGES.stats_bytes(ctas), k, v, [table, spans.k, spans.keys, spans.firsts, spans.ends],
        *quantize.filled(*into),
    )  # fmt: skip


def measure_part(v: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor], device: Device) -> torch.Tensor:
    """Measure a part of a sequence's values (B, H, S, D).

    `quantize.unsupported_call` must return None for keys and values like them.

    Args:
        into: where to write sums and extremes, as of ChunkStatistics.

    Returns:
        what `write_part` must be told of V's token chunks: uint8 (B, H, ceil(S / 512), bytes).

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    library = build.load_with(quantize.OF_LONG, quantize.INSTANCES, device.arch)
    batch, heads = v.shape[:2]
    stats = v.new_empty(batch, heads, quantize.token_chunks_of(v), quantize.slices_of(v) * quantize.CHUNK_STATS_BYTES, dtype=torch.uint8)
    library.operators.measure_part.default(library.launchers[quantize.OF_LONG], batch * heads * quantize.ctas_of(v), v, *into, stats)
    return stats


def write_part(key: Quantized, value: Quantized, k: torch.Tensor, v: torch.Tensor, chunk_stats: torch.Tensor, device: Device) -> None:
    """Quantize a part of a sequence by the means and V's scales of all of it, which key and value have.

    `quantize.unsupported_call` must return None for k and v.

    Args:
        chunk_stats: what `measure_part` returned for v.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    library = build.load_with(quantize.OF_LONG, quantize.INSTANCES, device.arch)
    ctas = k.shape[0] * k.shape[1] * quantize.ctas_of(k)
    library.operators.write_part.default(library.launchers[quantize.OF_LONG], ctas, k, v, chunk_stats, *quantize.filled(key, value))


def quantize_any(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, recipe: Recipe, device: Device, packed: Packed | None = None,
    into: Quantized | None = None,
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:  # fmt: skip
    """fp8attn.quantization.quantize by the general quantizer.

    `general_quantize.unsupported_call` must return None for the call.

    Args:
        q, k, v: (B, H, S, D), any float dtype; q, or k and v, may be None.
        packed: the sequences of k and v, or None.
        into: where q is written, of a call without k and v; None: to new tensors.

    Raises:
        BuildError: the kernels can't be compiled here.
    """
    first = k if q is None else q
    assert first is not None
    if into is not None:
        made: tuple[Quantized | None, Quantized | None, Quantized | None] = (into, None, None)
    elif packed is None:
        made = general_quantize.empty(q, k, v, recipe)
    else:
        assert k is not None and v is not None
        made = (general_quantize.empty(q, None, None, recipe)[0], *empty_packed(k, v, recipe, packed))
    lengths = (None, None) if packed is None else (packed.cu_seqlens, packed.seqused)
    config = general_quantize.QUANTIZER
    library = build.load_with(config, general_quantize.INSTANCES, device.arch)
    numbers = general_quantize.numbers_of(k, v, recipe, first.shape[3], packed)
    ctas = general_quantize.ctas_of(q, k, v, packed)
    library.operators.quantize_general.default(library.launchers[config], ctas, numbers, [q, k, v, *lengths], general_quantize.filled(*made))
    return made


def unsmoothed_lse(lse: torch.Tensor, q: torch.Tensor, k_mean: torch.Tensor, softmax_scale: float, rotated: int, device: Device) -> torch.Tensor:
    """reference.unsmoothed_lse by a kernel.

    `general_quantize.unsupported_lse` must return None for `lse` and `q`.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    config = general_quantize.UNSMOOTHER
    library = build.load_with(config, general_quantize.INSTANCES, device.arch)
    out, ctas = torch.empty_like(lse), general_quantize.unsmoothing_ctas(q)
    library.operators.unsmooth_lse.default(library.launchers[config], ctas, rotated, softmax_scale, q, k_mean.contiguous(), lse, out)
    return out


def counter_of(tile_table: torch.Tensor) -> torch.Tensor:
    """Of the tiles of packed sequences that CTAs have taken."""
    return tile_table[0].narrow(0, TABLE_HEADER.index("taken"), 1)


def attend_to_pages(call: PagedCall, device: Device, out_dtype: torch.dtype, few: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """pages.attend_paged by the decode kernel, of queries whose tokens are in the cache.

    `decode.unsupported_call` must return None for the call.

    Args:
        few: outputs of rows with more packed queries are not written. None: such rows have max_count at most.

    Returns:
        out (B, Hq, S, D) and LSE (B, Hq, S); of packed queries (T, Hq, D) and (Hq, T).

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    q, storage, batch = call.q, call.storage, call.batch if few is None else replace(call.batch, max_count=few)
    config = decode.choose(storage, call.scoring)
    library = build.load_with(config, decode.group(config), device.arch)
    ctas = decode.ctas_of(config, device)
    kv_heads, part_log = storage.k.shape[1], decode.part_log(batch)
    numbers = [batch.most_queries(q), part_of(q.shape[-1], call.recipe.rotate), few is not None, counted_window(call.window)[0], part_log]
    places = decode.places_of_parts(ctas, decode.tiles_of(q, kv_heads, batch), decode.most_blocks(batch), part_log)
    out, lse = empty_results(q, q.shape[-1], out_dtype)
    parts = _decoded(q, places, decode.part_height(config, q, kv_heads, batch))
    library.operators.decode.default(
        library.launchers[config], ctas, numbers, call.softmax_scale, call.softcap, [q, call.sinks], storage.tensors(), list(batch.tensors()),
        [out, lse, *parts, storage.tickets],
    )  # fmt: skip
    return out, lse


def _decoded(q: torch.Tensor, places: int, height: int) -> list[torch.Tensor]:
    """Two tensors of partial results of a decode kernel, of `height` rows of a tile."""
    return [q.new_empty(places, height, width, dtype=torch.float32) for width in (q.shape[-1], 2)]


def empty_results(q: torch.Tensor, value_dim: int, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised output and LSE of queries of a cache: (B, Hq, S, Dv) and (B, Hq, S), or of packed queries (T, Hq,
    Dv) and (Hq, T)."""
    return q.new_empty(*q.shape[:-1], value_dim, dtype=out_dtype), q.new_empty(lse_shape(q), dtype=torch.float32)


def attend_to_tensors(
    q: torch.Tensor, cache: PagedTensors, batch: PagedBatch, how: Scoring, device: Device, out_dtype: torch.dtype, few: int | None = None,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """paged_tensors.attend by the decode kernel for caches of other engines.

    `decode_tensors.unsupported_call` must return None for the call.

    Args:
        few: outputs of rows with more packed queries are not written. None: such rows have max_count at most.
        results: output and LSE, of `empty_results`; None: they are made.

    Returns:
        out (B, Hq, S, D) and LSE (B, Hq, S); of packed queries (T, Hq, D) and (Hq, T).

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    batch = batch if few is None else replace(batch, max_count=few)
    config = decode_tensors.choose(q, cache, batch)
    library = build.load_with(config, decode_tensors.group(config), device.arch)
    ctas, kv_heads = decode.ctas_of(config, device), cache.kv_heads
    blocks, log = decode_tensors.most_blocks(cache, batch), decode_tensors.part_log(batch)
    places = decode.places_of_parts(ctas, decode.tiles_of(q, kv_heads, batch, config.rows), blocks, log)
    out, lse = results or empty_results(q, q.shape[-1], out_dtype)
    parts = _decoded(q, places, decode.part_height(config, q, kv_heads, batch))
    of_head = decode.tickets_of_head(config, q, kv_heads, batch)
    tickets = q.new_zeros(batch.page_table.shape[0] * kv_heads * of_head + 2 * ctas, dtype=torch.int32)  # of heads, and of groups of parts
    numbers = decode_tensors.numbers_of(cache, batch, how, of_head)
    library.operators.decode_tensors.default(
        library.launchers[config], ctas, [batch.most_queries(q), few is not None], numbers, how.softmax_scale, how.softcap, q,
        [cache.k, cache.v, *cache.scales, how.sinks], list(batch.tensors()), [out, lse, *parts, tickets],
    )  # fmt: skip
    return out, lse


def prefill_from_pages(
    call: PagedCall, device: Device, tiling: prefill.Tiling, out_dtype: torch.dtype, tile_table: torch.Tensor | None = None,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """pages.attend_paged by the prefill kernel.

    `prefill.unsupported_call` must return None for the call.

    Args:
        tile_table: of packed queries, triton.varlen.table_of_rows for `tiling`.
        results: output and LSE, which have the rows that aren't in the table; or the outputs of all splits, float32
            (splits, B, Hq, S, D) or (splits, T, Hq, D), and their sums (splits, 2, rows), contiguous. None: they are
            made.

    Returns:
        out (B, Hq, S, D) and LSE (B, Hq, S), of packed queries (T, Hq, D) and (Hq, T); or the results that are given.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    q, storage, packed = call.q, call.storage, call.batch.cu_seqlens is not None
    library = build.load_with(tiling.config, prefill.group(tiling.config), device.arch)
    tiles = tiling.tiles(call.packed) * tiling.splits
    ctas = min(tiles, device.sm_count)
    out, lse = results or empty_results(q, q.shape[-1], out_dtype)
    counter = None if tile_table is None else counter_of(tile_table)
    if tile_table is None and tiles > ctas:
        counter = q.new_zeros(1, dtype=torch.int32)
    k, v = (None, None) if call.new is None else (prefill.rows_of(x) for x in call.new)
    work, to = tiling.work, [prefill.rows_of(out), lse[None] if packed else lse]
    if tiling.splits > 1:
        to = [out.transpose(1, 2) if packed else out.flatten(0, 1), lse]
    numbers = [prefill.heads_in_l2(call, ctas), prefill.left_of(call.window), work.queries, work.unit.bit_length() - 1, tiling.splits]
    library.operators.prefill.default(
        library.launchers[tiling.config], ctas, numbers, call.softmax_scale, call.softcap, [prefill.rows_of(q), k, v, call.sinks],
        storage.tensors(), [*call.batch.tensors()[:4], tile_table], [*to, counter],
    )  # fmt: skip
    return out, lse


def append_to_pages(
    storage: Storage, tokens: tuple[torch.Tensor, torch.Tensor], batch: PagedBatch, recipe: Recipe, device: Device, stage: Stage
) -> None:
    """pages.append by the append kernel.

    `append.unsupported_call` must return None for the call.

    Args:
        tokens: the new keys and values.

    Raises:
        BuildError: the kernel can't be compiled here.
    """
    key, value = tokens
    if key.numel() == 0 or batch.lengths.shape[0] == 0:
        return
    config = append.choose(storage)
    library = build.load_with(config, append.INSTANCES, device.arch)
    library.operators.append.default(
        library.launchers[config], append.ctas_of(key, batch, config, device), append.numbers_of(key, batch, recipe, stage),
        [append.rows_of(key), append.rows_of(value)], storage.tensors(), list(batch.tensors()),
    )  # fmt: skip
