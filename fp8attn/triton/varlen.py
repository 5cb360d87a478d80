"""Packed sequences: which sequence a program works on, and the order of query tiles.

Lengths are known on the GPU only. Grids have a program for every place of a unit (layout.units_of), and places without
tokens do nothing. Attention kernels read their tiles from a table, those of the longest sequences first. One launch
writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import layout, schedule
from ..call import Call
from ..device import INTERPRETING, Device
from ..pages import LARGEST_LENGTH, PagedCall
from ..recipe import SCALE_BLOCK, Packed
from ..reference import Window
from .launch import begin, launch

SEARCH: tl.constexpr = tl.constexpr(128)  # sequences that are compared at a time
PITCH: tl.constexpr = tl.constexpr(schedule.TILE_PITCH)
TILES_AT: tl.constexpr = tl.constexpr(schedule.TABLE_HEADER.index("tiles"))
TAKEN_AT: tl.constexpr = tl.constexpr(schedule.TABLE_HEADER.index("taken"))
END_AT: tl.constexpr = tl.constexpr(schedule.TABLE_HEADER.index("end"))
PAGE: tl.constexpr = tl.constexpr(SCALE_BLOCK)
# the interpreter runs plain Python functions as they are
first_unit = layout.first_unit if INTERPRETING else triton.jit(layout.first_unit)
first_tile = layout.first_tile if INTERPRETING else triton.jit(layout.first_tile)


@triton.jit
def begins_of(cu_seqlens, sequences, tokens, inside):
    """The first tokens of some sequences, a tensor or a number."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + sequences, mask=inside, other=0), 0), tokens)


@triton.jit
def spans_of(cu_seqlens, seqused, sequences, tokens, inside):
    """Packed.spans of some sequences, a tensor or a number; nothing where not `inside`.

    Without `cu_seqlens`, lengths are those of `seqused`.
    """
    if cu_seqlens is None:
        begin = sequences * 0
        length = tl.maximum(tl.load(seqused + sequences, mask=inside, other=0), 0)
    else:
        begin = begins_of(cu_seqlens, sequences, tokens, inside)
        length = tl.maximum(begins_of(cu_seqlens, sequences + 1, tokens, inside) - begin, 0)
        if seqused is not None:
            length = tl.minimum(tl.maximum(tl.load(seqused + sequences, mask=inside, other=0), 0), length)
    return begin, length


@triton.jit
def tile_at(place, cu_seqlens, sequences, tokens, group, ROWS: tl.constexpr):
    """The tile of ROWS rows, `group` for each token, at a place (layout.first_unit).

    Tokens behind the last sequence are one sequence more, number `sequences`.

    Returns:
        its sequence, its number there, and the first token and the number of tokens of the sequence. The tile may have
        no rows.
    """
    lanes = tl.arange(0, SEARCH)
    before = tl.zeros([SEARCH], tl.int32)
    for first in range(0, sequences + 1, SEARCH):
        index = first + lanes
        begin = begins_of(cu_seqlens, index, tokens, index <= sequences)
        before += ((index <= sequences) & (first_unit(begin * group, index, ROWS) <= place)).to(tl.int32)
    sequence = tl.maximum(tl.sum(before, 0) - 1, 0)
    begin = begins_of(cu_seqlens, sequence, tokens, sequence <= sequences)
    end = tl.where(sequence < sequences, begins_of(cu_seqlens, sequence + 1, tokens, sequence < sequences), tokens)
    tile = place - first_unit(begin * group, sequence, ROWS)
    # negative only if starts of sequences aren't in order
    return sequence, tl.maximum(tile, 0), begin, tl.where(tile < 0, 0, tl.maximum(end - begin, 0))


@triton.jit
def unit_at(place, cu_seqlens, seqused, sequences, tokens, size, sharing=1, units=1):
    """The unit of `size` tokens at a place (layout.first_unit); or the tile of `units` of them, of `sharing` heads
    (layout.first_tile).

    Returns:
        its sequence, its number there, and the first token and the number of tokens of the sequence. The unit may have
        no tokens.
    """
    lanes = tl.arange(0, SEARCH)
    before = tl.zeros([SEARCH], tl.int32)
    for first in range(0, sequences, SEARCH):
        index = first + lanes
        begin = begins_of(cu_seqlens, index, tokens, index < sequences)
        before += ((index < sequences) & (first_tile(begin, index, size, sharing, units) <= place)).to(tl.int32)
    sequence = tl.maximum(tl.sum(before, 0) - 1, 0)
    begin, length = spans_of(cu_seqlens, seqused, sequence, tokens, sequence < sequences)
    unit = place - first_tile(begin, sequence, size, sharing, units)
    # negative only if starts of sequences aren't in order
    return sequence, tl.maximum(unit, 0), begin, tl.where(unit < 0, 0, length)


@triton.jit
def units_in(cu_seqlens, sequences, length, SIZE: tl.constexpr):
    """Units of SIZE tokens of a head; of packed sequences their places (layout.units_of)."""
    return tl.cdiv(length, SIZE) if cu_seqlens is None else length // SIZE + sequences


@triton.jit
def unit_of_head(place, pair, cu_seqlens, seqused, sequences, heads, length, SIZE: tl.constexpr):
    """The unit of SIZE tokens at a place of a head.

    Args:
        pair: number of the head in all sequences; of packed ones, which share a tensor, in the tensor.

    Returns:
        batch and head, which the tensor is indexed by; number of the head in all sequences, by which statistics are
        indexed; the unit's number in the sequence, and the sequence's number, first token and number of tokens.
    """
    if cu_seqlens is None:
        return pair // heads, pair % heads, pair, place, pair // heads, 0, length
    else:
        sequence, unit, begin, own_length = unit_at(place, cu_seqlens, seqused, sequences, length, SIZE)
        return pair * 0, pair, sequence.to(tl.int64) * heads + pair, unit, sequence, begin.to(tl.int64), own_length


@triton.jit
def offsets_of(window, q_length, kv_length):
    """reference.window_offsets of a sequence, aligned to the bottom right. window: (left, right); -1 is unlimited."""
    aligned = kv_length - q_length
    first = tl.where(window[0] < 0, -q_length, tl.maximum(aligned - window[0], -q_length))
    return first, tl.where(window[1] < 0, kv_length, tl.minimum(aligned + window[1], kv_length))


@triton.jit
def load_tile_entry(table, index):
    """A tile of the table: schedule.TILE_FIELDS, all 0 behind the last tile. `index` is below the number of places."""
    exists = index < tl.load(table + TILES_AT)
    entry = table + (1 + index) * PITCH
    sequence, first_row = tl.where(exists, tl.load(entry), 0), tl.where(exists, tl.load(entry + 1), 0)
    q_begin, q_length = tl.where(exists, tl.load(entry + 2), 0), tl.where(exists, tl.load(entry + 3), 0)
    k_begin, k_length = tl.where(exists, tl.load(entry + 4), 0), tl.where(exists, tl.load(entry + 5), 0)
    return sequence, first_row, q_begin, q_length, k_begin, k_length, tl.where(exists, tl.load(entry + 6), 0)


@triton.jit
def tiles_of(q_length, sharing, rows, units):
    """The number of tiles of some sequences, and how many rows are missing in the last one.

    Units of rows that aren't full count as full, unless each tile has rows of one head only.
    """
    of_length = tl.cdiv(q_length, rows) * sharing
    tiles = tl.cdiv(of_length, units)
    return tiles, (tiles * units - of_length) * rows + tl.where(sharing == 1, of_length * rows - q_length, 0)


@triton.jit
def work_of(kv_length, missing, window, rows):
    """The work of the tiles of some sequences: of all full tiles, and of the last tile, in which rows are missing.

    It is the most keys that a tile of the sequence sees: all tiles of a sequence have the same, so that they come one
    after the other, and find their keys in L2. But where all of them see as many keys, a tile that isn't full has
    less: rows that don't exist take about half of the time of others.
    """
    most = tl.where((window[0] < 0) | (window[1] < 0), kv_length, tl.minimum(kv_length, window[0] + window[1] + rows))
    return most, tl.where(window[1] < 0, most - most // (2 * rows) * missing, most)


@triton.jit
def tiles_above(work, q_length, kv_length, window, sharing, rows, units):
    """The number of tiles of some sequences with more work than `work`."""
    tiles, missing = tiles_of(q_length, sharing, rows, units)
    of_full, of_last = work_of(kv_length, missing, window, rows * units)
    partial = (missing > 0).to(tl.int32)
    return tl.where(of_full > work, tiles - partial, 0) + tl.where(of_last > work, partial, 0)


@triton.jit(do_not_specialize=["sequences", "q_tokens", "k_tokens", "left", "right", "sharing", "few", "rows", "units"])
def table_kernel(
    cu_q, used_q, cu_k, used_k, table, sequences, q_tokens, k_tokens, left, right, sharing, few, rows, units, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the table of tiles of `units` x `rows` queries, (1 + layout.tiles_of(q, ...), TILE_PITCH): the header, then
    the tiles, those with the most work first.

    A tile has units of `rows` queries of `sharing` heads: of all heads the first rows, then of all heads the next ones.
    Sequences of at most `few` queries have none.

    Tiles with the same work are in the order of sequences, and in a sequence from the last one on. Each program
    computes the rank of the tile at its place. Starts of sequences that aren't in order would leave ranks without a
    tile: then the table has none.

    Grid: places.
    """
    begin(DEPENDENT)
    place = tl.program_id(0)
    window = (left, right)
    own, tile, q_begin, q_length = unit_at(place, cu_q, used_q, sequences, q_tokens, rows, sharing, units)
    k_begin, k_length = spans_of(cu_k, used_k, own, k_tokens, own < sequences)
    q_length = tl.where(q_length > few, q_length, 0)
    own_tiles, missing = tiles_of(q_length, sharing, rows, units)
    full = own_tiles - (missing > 0).to(tl.int32)
    of_full, of_last = work_of(k_length, missing, window, rows * units)
    work = tl.where(tile < full, of_full, of_last)
    lanes = tl.arange(0, SEARCH)
    ahead = tl.zeros([SEARCH], tl.int32)
    tiles = tl.zeros([SEARCH], tl.int32)
    disorder = tl.zeros([SEARCH], tl.int32)
    for first in range(0, sequences, SEARCH):
        index = first + lanes
        begins, q_lengths = spans_of(cu_q, used_q, index, q_tokens, index < sequences)
        _, k_lengths = spans_of(cu_k, used_k, index, k_tokens, index < sequences)
        q_lengths = tl.where(q_lengths > few, q_lengths, 0)
        # of earlier sequences, tiles with the same work are ahead, too
        ahead += tl.where(index == own, 0, tiles_above(tl.where(index < own, work - 1, work), q_lengths, k_lengths, window, sharing, rows, units))
        of_sequences, _ = tiles_of(q_lengths, sharing, rows, units)
        tiles += of_sequences
        ends = begins_of(cu_q, index + 1, q_tokens, index < sequences)
        disorder += (ends < begins).to(tl.int32)
    own_last = (missing > 0) & (of_last >= of_full)
    own_ahead = tl.where(tile < full, full - 1 - tile + own_last.to(tl.int32), tl.where(of_full > of_last, full, 0))
    if place == 0:
        tl.store(table + TILES_AT, tl.where(tl.sum(disorder, 0) > 0, 0, tl.sum(tiles, 0)))
        tl.store(table + TAKEN_AT, 0)
        tl.store(table + END_AT, begins_of(cu_q, sequences, q_tokens, sequences >= 0))
    rank = tl.sum(ahead, 0) + own_ahead
    there = (tile < own_tiles) & (rank < tl.num_programs(0))
    entry = table + (1 + rank) * PITCH
    tl.store(entry, own, mask=there)
    tl.store(entry + 1, tile * units // sharing * rows, mask=there)
    tl.store(entry + 2, q_begin, mask=there)
    tl.store(entry + 3, q_length, mask=there)
    tl.store(entry + 4, k_begin, mask=there)
    tl.store(entry + 5, k_length, mask=there)
    tl.store(entry + 6, first_unit(k_begin, own, PAGE), mask=there)
    tl.store(entry + 7, tile * units % sharing, mask=there)


def table_of(call: Call, rows: int, device: Device, units: int | None = None, *, warmup: bool = False) -> torch.Tensor | None:
    """The table of tiles of a call's packed sequences, int32 (1 + places, TILE_PITCH); None if there are none. What is
    behind the last tile isn't written.

    Args:
        rows: queries of a tile, all of one head; with `units`, queries of a unit.
        units: units of a tile, of any of the query heads that share keys.
        warmup: compile only.
    """
    if call.varlen is None:
        return None
    q, k = call.varlen.q, call.varlen.k
    tile = (rows, 1, 1) if units is None else (rows, call.q_heads // call.kv_heads, units)
    return _table(q, (k.cu_seqlens, k.seqused, k.tokens), call.window_offsets, tile, 0, device, warmup)


def table_of_rows(call: PagedCall, tile: tuple[int, int, int], few: int, device: Device, *, warmup: bool = False) -> torch.Tensor:
    """The same of packed queries of a cache, whose keys are not packed.

    Args:
        tile: rows of a unit, query heads that share keys, and units.
        few: rows of the batch with at most as many queries have no tiles.
        warmup: compile only.
    """
    assert call.packed is not None
    window = min(call.window[0], LARGEST_LENGTH), 0
    return _table(call.packed, (None, call.batch.lengths, 0), window, tile, few, device, warmup)


def _table(
    q: Packed, keys: tuple[torch.Tensor | None, torch.Tensor | None, int], window: Window, tile: tuple[int, int, int], few: int, device: Device,
    warmup: bool,
) -> torch.Tensor:  # fmt: skip
    """What `table_kernel` writes.

    Args:
        keys: cu_seqlens, seqused and tokens.
        tile: rows of a unit, query heads that share keys, and units.
    """
    rows, sharing, units = tile
    places = layout.tiles_of(q, rows, sharing, units)
    table = torch.empty(1 + places, schedule.TILE_PITCH, dtype=torch.int32, device=q.cu_seqlens.device)
    cu_k, used_k, k_tokens = keys
    launch(
        table_kernel, (places,),
        q.cu_seqlens, q.seqused, cu_k, used_k, table, q.sequences, q.tokens, k_tokens, *window, sharing, few, rows, units,
        device.has_dependent_launch, warmup=warmup, dependent=device.has_dependent_launch, num_warps=1,
    )  # fmt: skip
    return table


def packed_arguments(packed: Packed | None) -> tuple:
    """Arguments of kernels: cu_seqlens, seqused, sequences and tokens; None and zeros of one sequence that isn't
    packed."""
    return (None, None, 0, 0) if packed is None else (packed.cu_seqlens, packed.seqused, packed.sequences, packed.tokens)
