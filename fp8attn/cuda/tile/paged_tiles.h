// Tiles of queries whose keys lie in pages, and what their rows see.
#pragma once

#include "../ptx/uniform.h"
#include "constants.h"
#include "paged_schedule.h"
#include "schedule.h"

namespace fp8attn {

// A tile has units: rows of one query head, 2^PrefillParams::unit_log of them. A consumer has ROWS rows, which are one
// unit, or short units of so many heads. Units of the heads that share keys follow one another: of all heads the first
// rows, then of all heads the next ones. A short unit has all queries of its head. Here is a consumer's first unit.
struct Units {
  int head, first_row;
};

// A tile, of a row of the batch: `head` and `first_row` are those of its first unit. It attends to complete pages, in
// FP8, then to blocks of tokens in half precision. Rows from `count` on are no tokens. Where CTAs split keys, a tile
// has the pages of its split, and the last split has the blocks.
template <int CONSUMERS>
struct PagedTile : Tile {
  int heads_end;                  // one past the last of the query heads that share the keys
  int sequence, start, count;     // number of the sequence, position of query 0, number of queries that are tokens
  int first_page, pages;          // its rows see no page before first_page, and none from `pages` on
  int first_half, halves;         // blocks that its rows see; `first_half` counts from the start of the sequence
  int split;
  bool has_sequence;              // whether the number is in range; rows are NaN if it isn't
  bool is_last;                   // the last split
  Units consumers[CONSUMERS];

  // Of a query that is a token.
  __device__ int position(int query) const { return start + query; }
};

// A tile of packed queries, of which its row of the batch has begin ... end - 1.
template <int CONSUMERS>
struct PackedPagedTile : PagedTile<CONSUMERS> {
  int begin, end;
};

// Where a tile's query 0 is in the tensor of queries, and in that of new tokens.
template <int C>
__device__ inline int tensor_batch(const PagedTile<C>& tile) { return tile.batch; }
template <int C>
__device__ inline int tensor_batch(const PackedPagedTile<C>&) { return 0; }
template <int C>
__device__ inline int tensor_row(const PagedTile<C>&) { return 0; }
template <int C>
__device__ inline int tensor_row(const PackedPagedTile<C>& tile) { return tile.begin; }

// Of whose pages there are scales and means.
template <int C>
__device__ inline int sequence_of(const PagedTile<C>& tile) { return tile.sequence; }

// The first key that a token sees.
__device__ inline int first_key_of(const PrefillParams& p, int position) { return max(position - p.left, 0); }

// Calls of(number of the unit, its head, its first query) for each of a consumer's units. From heads_end on, heads are
// not the tile's.
template <typename PageTile, typename Of>
__device__ void for_units(const PrefillParams& p, const PageTile& tile, int consumer, Of&& of) {
  const Units first = tile.consumers[consumer];
#pragma unroll 1
  for (int i = 0; i < ROWS >> p.unit_log; ++i) of(i, first.head + i, first.first_row);
}

// Tiles of all key/value heads. Each row of the batch has as many, for all queries that a row may have. Of packed
// queries a head has those in the table, whose header says how many. In a group of heads, a tile comes for all heads
// before the next tile.
template <int CONSUMERS, bool PACKED>
struct PagedTileSchedule : Schedule {
  const PrefillParams& params;

  // Hazard: it may be made before the grids before have completed, one of which writes the table.
  __device__ explicit PagedTileSchedule(const PrefillParams& its_params) : Schedule(its_params.call, 1 << its_params.unit_log), params(its_params) {}

  // Writes the tile at a position; none() after the last. Every tile has a block in half precision, which its rows may
  // not see: consumers wait for the last block to know the next tile.
  template <typename PageTile>
  __device__ void write(PageTile& to, int position) const {
    const int heads = p.kv_heads * (PACKED ? 1 : p.batches), splits = p.key_splits, every = tiles_of_head();
    if (position >= every * heads * splits) {
      static_cast<Tile&>(to) = none();
      return;
    }
    to.split = position % splits, position /= splits;
    const int group = p.heads_in_l2 / sharing(), first = position / (group * every) * group, inside = position % (group * every);
    const int together = min(group, heads - first), kv_head = first + inside % together, index = inside / together;
    if constexpr (PACKED) {
      const int* entry = p.tile_table + int64_t(1 + index) * TILE_PITCH;  // the first is behind the header
      const auto field = [&](TileField of) { return entry[int(of)]; };
      const int begin = field(TileField::q_begin), rows = field(TileField::q_length), batch = field(TileField::sequence);
      to.begin = begin, to.end = begin + rows;
      BatchRow row(params, batch, rows);
      row.exists = row.exists && rows <= params.most;
      write_of_row(to, {batch, field(TileField::head), kv_head, field(TileField::first_row)}, row);
    } else {
      const int unit = (every - 1 - index) * units(), batch = kv_head / p.kv_heads;
      write_of_row(to, {batch, unit % sharing(), kv_head % p.kv_heads, unit / sharing() * tile_rows}, BatchRow(params, batch, p.q_length));
    }
  }

 private:
  __device__ int tiles_of_head() const { return PACKED ? p.tile_table[int(TableHeader::tiles)] : (tiles * sharing() + units() - 1) / units(); }
  __device__ int sharing() const { return p.q_heads / p.kv_heads; }
  __device__ int units() const { return CONSUMERS * ROWS >> params.unit_log; }

  // `tile`: its head counts among those that share the keys.
  __device__ void write_of_row(PagedTile<CONSUMERS>& to, Tile tile, const BatchRow& row) const {
    const int first_head = tile.kv_head * sharing(), heads_end = first_head + sharing();
    tile.head += first_head;
    int head = tile.head, first_row = tile.first_row;
    static_cast<Tile&>(to) = tile;
    to.heads_end = heads_end;
    const int of_consumer = ROWS >> params.unit_log;
#pragma unroll
    for (int c = 0; c < CONSUMERS; ++c) {
      to.consumers[c] = {head, first_row};
      if (c == CONSUMERS - 1) break;
      head += of_consumer;
      if (head >= heads_end) head = first_head, first_row += tile_rows;
    }
    const int start = row.end - row.count, last = min(first_row + tile_rows, row.count) - 1;
    to.sequence = row.sequence, to.start = start, to.count = row.count, to.has_sequence = row.exists;
    int first_page = 0, pages = 0, first_half = 0, halves = 1;
    if (row.exists && tile.first_row <= last) {
      // The page behind the table isn't there. Rows that see it, or one after it, are NaN.
      pages = min((start + last) / KEYS, params.table_width + 1);
      first_page = min(first_key_of(params, start + tile.first_row) / KEYS, min(params.table_width, pages));
      first_half = (start + tile.first_row) / KEYS * HALVES;
      halves = (start + last) / HALF_BLOCK + 1 - first_half;
    }
    const int splits = p.key_splits, split = to.split, every = pages - first_page;
    to.first_page = first_page + every * split / splits, to.pages = first_page + every * (split + 1) / splits;
    to.is_last = split == splits - 1;
    to.first_half = first_half, to.halves = to.is_last ? halves : 1;
  }
};

// What the rows of a warpgroup see of their tile.
template <typename PageTile>
struct PagedRowRange {
  const PageTile& tile;  // in shared memory
  int head, first_row, unit_log;
  // At least one row sees the pages begin ... seen - 1, and all tokens see the pages edge ... whole - 1. Blocks in half
  // precision: from first_half up to, but without, end_half.
  int begin = 0, seen = 0, edge = 0, whole = 0, first_half = 0, end_half = 0;

  __device__ PagedRowRange(const PrefillParams& p, const PageTile& its_tile, int consumer) : tile(its_tile), unit_log(p.unit_log) {
    head = ptx::uniform(tile.consumers[consumer].head), first_row = ptx::uniform(tile.consumers[consumer].first_row);
    if (!tile.has_sequence || first_row >= tile.count) return;
    const int last = tile.position(min(first_row + (1 << unit_log), tile.count) - 1);
    seen = min(last / KEYS, tile.pages), whole = tile.position(first_row) / KEYS;
    begin = min(first_key_of(p, tile.position(first_row)) / KEYS, min(p.table_width, seen));
    edge = min((first_key_of(p, last) + KEYS - 1) / KEYS, p.table_width + 1);
    if (tile.is_last) first_half = whole * HALVES, end_half = last / HALF_BLOCK + 1;
  }

  // The query head of a row, and its query.
  __device__ int head_of(int row) const { return head + (row >> unit_log); }
  __device__ int query(int row) const { return first_row + (row & (1 << unit_log) - 1); }

  __device__ bool is_token(int row) const { return query(row) < tile.count && head_of(row) < tile.heads_end; }

  // Of a row that is a token.
  __device__ int position(int row) const { return tile.position(query(row)); }

  // Keys of pages that a row sees.
  __device__ int row_end(int row) const { return is_token(row) ? position(row) / KEYS * KEYS : 0; }
};

}  // namespace fp8attn
