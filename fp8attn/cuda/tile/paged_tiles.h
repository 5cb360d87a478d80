// Tiles of the queries of one head whose keys lie in pages, and what their rows see.
#pragma once

#include "../ptx/uniform.h"
#include "constants.h"
#include "paged_schedule.h"
#include "schedule.h"

namespace fp8attn {

// A tile, of a row of the batch. It attends to complete pages, in FP8, then to blocks of tokens in half precision. Rows
// from `count` on are no tokens.
struct PagedTile : Tile {
  int sequence, start, count;     // number of the sequence, position of query 0, number of queries that are tokens
  int first_page, pages;          // its rows see no page before first_page, and none from `pages` on
  int first_half, halves;         // blocks that its rows see; `first_half` counts from the start of the sequence
  bool has_sequence;              // whether the number is in range; rows are NaN if it isn't

  __device__ bool is_token(int row) const { return row < count; }

  // Of a row that is a token.
  __device__ int position(int row) const { return start + row; }
};

// A tile of packed queries. `packed`: the same tile in the tensor of all queries, where its row of the batch has the
// queries begin ... end - 1.
struct PackedPagedTile : PagedTile {
  int begin, end;
  Tile packed;
};

// Where a tile's row 0 is in the tensor of queries, and in that of new tokens.
__device__ inline int tensor_batch(const PagedTile& tile) { return tile.batch; }
__device__ inline int tensor_batch(const PackedPagedTile&) { return 0; }
__device__ inline int tensor_row(const PagedTile&) { return 0; }
__device__ inline int tensor_row(const PackedPagedTile& tile) { return tile.begin; }
__device__ inline const Tile& tensor_tile(const PagedTile& tile) { return tile; }
__device__ inline const Tile& tensor_tile(const PackedPagedTile& tile) { return tile.packed; }

// Of whose pages there are scales and means.
__device__ inline int sequence_of(const PagedTile& tile) { return tile.sequence; }

// The first key that a token sees.
__device__ inline int first_key_of(const PrefillParams& p, int position) { return max(position - p.left, 0); }

struct PagedTileSchedule : Schedule {
  const PrefillParams& params;

  __device__ PagedTileSchedule(const PrefillParams& its_params, int rows) : Schedule(its_params.call, rows), params(its_params) {}

  // The tile at a position; one that doesn't exist after the last. Every tile has a block in half precision, which its
  // rows may not see: consumers wait for the last block to know the next tile.
  __device__ PagedTile at(int position) const {
    const Tile tile = Schedule::at(position);
    if (!tile.exists()) return {tile};
    return of_row(tile, BatchRow(params, tile.batch, p.q_length));
  }

 protected:
  // A tile of a row of the batch.
  __device__ PagedTile of_row(const Tile& tile, const BatchRow& row) const {
    PagedTile found = {tile, row.sequence, row.end - row.count, row.count, 0, 0, 0, 1, row.exists};
    const int last = min(tile.first_row + tile_rows, row.count) - 1;
    if (!row.exists || tile.first_row > last) return found;
    // The page behind the table isn't there. Rows that see it, or one after it, are NaN.
    found.pages = min(found.position(last) / KEYS, params.table_width + 1);
    found.first_page = min(first_key_of(params, found.position(tile.first_row)) / KEYS, min(params.table_width, found.pages));
    found.first_half = found.position(tile.first_row) / KEYS * HALVES;
    found.halves = found.position(last) / HALF_BLOCK + 1 - found.first_half;
    return found;
  }
};

// Of packed queries: tiles in the order of the table, whose header says how many there are for each head. In a group of
// heads, each entry comes for all heads before the next entry.
struct PackedPagedTileSchedule : PagedTileSchedule {
  using PagedTileSchedule::PagedTileSchedule;

  // Writes the tile at a position; none() after the last.
  __device__ void write(PackedPagedTile& to, int position) const {
    const int entries = p.tile_table[int(TableHeader::tiles)];
    if (position >= entries * p.q_heads) {
      static_cast<Tile&>(to) = none();
      return;
    }
    const int group = p.heads_in_l2, first = position / (group * entries) * group, inside = position % (group * entries);
    const int heads = min(group, p.q_heads - first), head = first + inside % heads, kv_head = head / (p.q_heads / p.kv_heads);
    const int* entry = p.tile_table + int64_t(1 + inside / heads) * TILE_PITCH;  // the first is behind the header
    const auto field = [&](TileField of) { return entry[int(of)]; };
    const int begin = field(TileField::q_begin), rows = field(TileField::q_length), first_row = field(TileField::first_row);
    to.begin = begin, to.end = begin + rows;
    to.packed = {0, head, kv_head, begin + first_row};
    const int batch = field(TileField::sequence);
    BatchRow row(params, batch, rows);
    row.exists = row.exists && rows <= params.most;
    static_cast<PagedTile&>(to) = of_row({batch, head, kv_head, first_row}, row);
  }
};

// What the rows of a warpgroup see of their tile.
struct PagedRowRange {
  const PagedTile& tile;  // in shared memory
  int first_row;
  // At least one row sees the pages begin ... seen - 1, and all tokens see the pages edge ... whole - 1. Blocks in half
  // precision: from first_half up to, but without, end_half.
  int begin = 0, seen = 0, edge = 0, whole = 0, first_half = 0, end_half = 0;

  __device__ PagedRowRange(const PrefillParams& p, const PagedTile& its_tile, int consumer) : tile(its_tile) {
    first_row = ptx::uniform(tile.first_row + consumer * ROWS);
    if (!tile.has_sequence || !tile.is_token(first_row)) return;
    const int last = tile.position(min(first_row + ROWS, tile.count) - 1);
    seen = min(last / KEYS, tile.pages), whole = tile.position(first_row) / KEYS;
    begin = min(first_key_of(p, tile.position(first_row)) / KEYS, min(p.table_width, seen));
    edge = min((first_key_of(p, last) + KEYS - 1) / KEYS, p.table_width + 1);
    first_half = whole * HALVES, end_half = last / HALF_BLOCK + 1;
  }

  // Keys of pages that a row sees.
  __device__ int row_end(int row) const { return tile.is_token(first_row + row) ? tile.position(first_row + row) / KEYS * KEYS : 0; }
};

}  // namespace fp8attn
