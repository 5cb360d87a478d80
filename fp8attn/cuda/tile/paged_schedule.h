// Which blocks of a KV cache the CTAs of the decode kernel attend to. All of it follows from lengths on the device.
#pragma once

#include "../params.h"
#include "constants.h"

namespace fp8attn {

constexpr int HALVES = KEYS / HALF_BLOCK;
static_assert(RECENT % HALF_BLOCK == 0 && KEYS == SCALE_BLOCK);

// Where packed queries of a row of the batch begin, and how many it has from there on.
__device__ inline int packed_start(const DecodeParams& p, int batch) { return min(max(__ldcg(p.cu_seqlens + batch), 0), p.tokens); }
__device__ inline int queries_of(const DecodeParams& p, int batch, int begin) {
  return p.cu_seqlens == nullptr ? p.q_length : max(packed_start(p, batch + 1) - begin, 0);
}

// A row of the batch, as pages.PagedBatch.rows has it: its sequence, the position behind its last token, and how many
// of its tokens are new. Only a row that `exists` has a sequence that is in the cache, and no more queries than the
// call has room for. Its numbers are read from L2: L1 may not have them, as a warp reads them before the grids before
// have completed.
struct BatchRow {
  int sequence, end, count;
  int begin;  // the row's first query among all packed ones; or 0
  bool exists;

  BatchRow() = default;

  __device__ BatchRow(const DecodeParams& p, int batch) : BatchRow(p, batch, p.q_length) {
    if (p.cu_seqlens == nullptr) return;
    begin = packed_start(p, batch);
    const int given = queries_of(p, batch, begin);
    count = min(given, end), exists = exists && given <= p.q_length;
  }

  // Of the numbers in `p`, for calls of `q_length` queries.
  template <typename Numbers>
  __device__ BatchRow(const Numbers& p, int batch, int q_length) {
    const int number = p.sequences == nullptr ? batch : __ldcg(p.sequences + batch);
    exists = number >= 0 && number < p.every_sequence;
    sequence = exists ? number : 0;
    end = max(__ldcg(p.lengths + batch), 0);
    count = max(min(min(p.counts == nullptr ? q_length : __ldcg(p.counts + batch), q_length), end), 0);
    begin = 0;
  }

  // That of another lane. Called by a whole warp.
  __device__ BatchRow of_lane(int lane) const {
    const auto theirs = [&](int x) { return __shfl_sync(~0u, x, lane); };
    BatchRow row;
    row.sequence = theirs(sequence), row.end = theirs(end), row.count = theirs(count), row.begin = theirs(begin), row.exists = theirs(exists);
    return row;
  }
};

// Whether a query sees tokens in half precision that its cache has no more: those of its own page from `first_key` on.
// `end`: behind the last token of its sequence.
__device__ inline bool sees_lost_tokens(int position, int first_key, int end) { return max(position / KEYS * KEYS, first_key) < end - RECENT; }

// Tiles of HEIGHT rows of a key/value head.
template <int HEIGHT>
__device__ int row_tiles(const DecodeParams& p) {
  return (p.group * p.q_length + HEIGHT - 1) / HEIGHT;
}

// The query of a row of a key/value head, without a division. Times the group, there are fewer than 2^32 rows.
__device__ inline int query_of(const DecodeParams& p, int row) { return __umulhi(row + 1, p.group_inverse); }

// The blocks that some rows of a key/value head attend to: complete pages, then blocks in half precision, from block
// `first_half` of the sequence on. Row i is query i / group of the head's query head i % group.
struct TileBlocks {
  int pages = 0, halves = 0, first_half = 0;

  TileBlocks() = default;

  // Whatever the row's numbers are, there are at most p.table_width + 8.
  __device__ TileBlocks(const DecodeParams& p, const BatchRow& row, int first_row, int rows) {
    const int start = row.end - row.count;
    const int first = query_of(p, first_row);
    const int last = min(query_of(p, first_row + rows - 1), row.count - 1);
    if (!row.exists || first > last) return;
    // The page behind the table isn't there. Rows that see it are NaN, whatever comes after it.
    pages = min((start + last) / KEYS, p.table_width + 1);
    first_half = (start + first) / KEYS * HALVES;
    halves = (start + last) / HALF_BLOCK + 1 - first_half;
  }

  __device__ int size() const { return pages + halves; }
};

// The same in a window, p.left and what is at the query itself: pages from `first_page` of the sequence on.
struct WindowBlocks : TileBlocks {
  int first_page = 0;

  WindowBlocks() = default;

  __device__ WindowBlocks(const DecodeParams& p, const BatchRow& row, int first_row, int rows) : TileBlocks(p, row, first_row, rows) {
    if (size() == 0 || p.left < 0) return;
    const int first_key = max(row.end - row.count + query_of(p, first_row) - p.left, 0), end = first_half + halves;
    // of pages behind the table the first one is read, which isn't there
    first_page = min(first_key / KEYS, min(pages, p.table_width));
    pages -= first_page;
    first_half = max(first_half, first_key / HALF_BLOCK), halves = end - first_half;
  }
};

// Whether parts of tiles are fixed. How a tile is split follows from its number of blocks alone then, into 2^k parts of
// equal size.
__device__ inline bool has_fixed_parts(const DecodeParams& p) { return p.part_log >= 0; }
__device__ inline int log2_of_parts(const DecodeParams& p, int blocks) { return 31 - __clz(min(max(blocks >> p.part_log, 1), MOST_FIXED_PARTS)); }

// What a CTA does for a tile beside its blocks takes about as long as so many of them, where tiles have many rows. They
// are the first units of a tile.
template <int HEIGHT>
constexpr int units_beside = HEIGHT == MANY_ROWS ? BESIDE_BLOCKS : 0;

// CTAs share units: blocks and what is beside them, or fixed parts.
template <int HEIGHT>
__device__ int units_of(const DecodeParams& p, int blocks) {
  return has_fixed_parts(p) ? int(blocks > 0) << log2_of_parts(p, blocks) : blocks > 0 ? blocks + units_beside<HEIGHT> : 0;
}

// The number of a tile's first page.
__device__ inline int first_page_of(const TileBlocks&) { return 0; }
__device__ inline int first_page_of(const WindowBlocks& blocks) { return blocks.first_page; }

// Sum of x over the lanes up to this one. Called by a whole warp.
__device__ inline int inclusive_sum(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_sync(~0u, x, max(lane - distance, 0));
    if (lane >= distance) x += other;
  }
  return x;
}

// Which of `count` things has a unit; `count` if none has. `unit` counts from the first thing's first unit, and is
// moved to count from that of the thing found. units_of(i): those of thing i + the lane's number, 0 from `count` on.
// Called by a whole warp.
template <typename UnitsOf>
__device__ int find_unit(int count, int& unit, UnitsOf&& units_of) {
#pragma unroll 1
  for (int start = 0; start < count; start += 32) {
    const int mine = units_of(start), upto = inclusive_sum(mine);
    const uint32_t beyond = __ballot_sync(~0u, upto > unit);
    const int found = beyond != 0 ? __ffs(beyond) - 1 : 31;
    unit -= __shfl_sync(~0u, beyond != 0 ? upto - mine : upto, found);
    if (beyond != 0) return start + found;
  }
  return count;
}

// Units of a row tile of a row of the batch. Blocks: TileBlocks, or what is like it.
template <int HEIGHT, typename Blocks>
__device__ int units_of_tile(const DecodeParams& p, const BatchRow& row, int row_tile) {
  return units_of<HEIGHT>(p, Blocks(p, row, row_tile * HEIGHT, HEIGHT).size());
}

// Units of one key/value head of the lane's row of the batch.
template <int HEIGHT, typename Blocks>
__device__ int units_of_head(const DecodeParams& p, const BatchRow& row) {
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < row_tiles<HEIGHT>(p); ++i) sum += units_of_tile<HEIGHT, Blocks>(p, row, i);
  return sum;
}

// The same of a row that all lanes have. Called by a whole warp.
template <int HEIGHT, typename Blocks>
__device__ int units_of_head_by_warp(const DecodeParams& p, const BatchRow& row) {
  int sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < row_tiles<HEIGHT>(p); i += 32) sum += units_of_tile<HEIGHT, Blocks>(p, row, i);
  return __reduce_add_sync(~0u, sum);
}

// How CTAs share units. Units form groups of equal size, one after another. A group has as many CTAs as any other. Each
// of these has `share` of its units, and the first `longer` ones have one more.
struct UnitShares {
  int total, group, ctas, ctas_inverse, share, longer;

  // All units are one group.
  __device__ static UnitShares equal(const DecodeParams& p, int total) { return {total, total, p.ctas, 0, total / p.ctas, total % p.ctas}; }

  // For tiles of equal size: groups are whole tiles. No CTA has a part of a tile and anything else: between tiles it
  // brings nothing from memory for some time.
  __device__ static UnitShares of_tiles(const DecodeParams& p, int total, int size) {
    const int group = p.tiles_of_group * size;
    return {total, group, p.ctas_of_group, p.ctas_of_group_inverse, group / p.ctas_of_group, group % p.ctas_of_group};
  }

  __device__ int longest() const { return share + (longer > 0); }

  // The group of a CTA.
  __device__ int number(int cta) const { return cta * ctas_inverse >> 16; }

  // The first unit of a CTA, and how many it has.
  __device__ int begin(int cta) const {
    const int inside = cta - number(cta) * ctas;
    return min(uint32_t(number(cta)) * group + inside * share + min(inside, longer), uint32_t(total));
  }
  __device__ int size(int cta) const { return min(share + (cta - number(cta) * ctas < longer), total - begin(cta)); }

  // The CTA that has a unit, which is one of the group of `cta`.
  __device__ int cta_of(int unit, int cta) const {
    const int of_longer = longer * (share + 1), inside = unit - number(cta) * group;
    return number(cta) * ctas + (inside < of_longer ? inside / (share + 1) : longer + (inside - of_longer) / share);
  }
};

// The units of all tiles, one after another: of all batches, heads and row tiles. Called by whole warps. The batch's
// numbers may change meanwhile if the grids before have not completed.
template <int HEIGHT, typename Blocks = TileBlocks>
struct DecodeSchedule {
  const DecodeParams& p;
  BatchRow row;  // the lane's first one, and its units
  int first;
  UnitShares shares;

  __device__ explicit DecodeSchedule(const DecodeParams& params) : p(params), row(row_of(threadIdx.x % 32)), first(units_of(row, 0)) {
    const int of_batch = __shfl_sync(~0u, first, 0);
    int total = first;
    bool differs = row_tiles<HEIGHT>(p) > 1 || (threadIdx.x % 32 < p.batches && first != of_batch);
#pragma unroll 1
    for (int start = 32; start < p.batches; start += 32) {
      const int batch = start + threadIdx.x % 32, units = units_of(row_of(batch), start);
      total += units, differs |= batch < p.batches && units != of_batch;
    }
    total = __shfl_sync(~0u, inclusive_sum(total), 31);
    shares = UnitShares::equal(p, total);
    if (__any_sync(~0u, differs)) return;
    const UnitShares of_tiles = UnitShares::of_tiles(p, total, of_batch / p.kv_heads);
    // the longest shares decide when the call ends
    if (8 * of_tiles.longest() <= 9 * shares.longest()) shares = of_tiles;
  }

  // Moves `unit` to the batch that has it, which is returned: then it counts from the first unit of that batch. Sets
  // the batch's row. p.batches if there is none.
  __device__ int find_batch(int& unit, BatchRow& its_row) const {
    BatchRow of_lanes = row;
    const int found = find_unit(p.batches, unit, [&](int start) {
      if (start > 0) of_lanes = row_of(start + threadIdx.x % 32);
      return start > 0 ? units_of(of_lanes, start) : first;
    });
    its_row = of_lanes.of_lane(found % 32);
    return found;
  }

 private:
  __device__ BatchRow row_of(int batch) const { return BatchRow(p, min(batch, p.batches - 1)); }

  // Of each lane's row of the batch, the first of which is row `start`; 0 behind the last one. Lanes share the tiles of
  // a row where that takes less time.
  __device__ int units_of(const BatchRow& of_lanes, int start) const {
    const int rows = min(p.batches - start, 32), lane = threadIdx.x % 32;
    if (row_tiles<HEIGHT>(p) <= rows) return lane < rows ? p.kv_heads * units_of_head<HEIGHT, Blocks>(p, of_lanes) : 0;
    int mine = 0;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const int units = units_of_head_by_warp<HEIGHT, Blocks>(p, of_lanes.of_lane(i));
      if (lane == i) mine = p.kv_heads * units;
    }
    return mine;
  }
};

// The tiles of a CTA, one after another, and which of their blocks it has: begin ... end - 1. If parts are fixed, a
// tile comes once for each of its parts that the CTA has.
template <int HEIGHT, typename Blocks = TileBlocks>
struct DecodeTiles {
  using Schedule = DecodeSchedule<HEIGHT, Blocks>;

  int batch = 0, kv_head = 0, row_tile = -1, begin = 0, end = 0;
  int before = 0;  // units before the tile
  int unit = 0;    // the first one that the CTA has, among the tile's
  BatchRow row;
  Blocks blocks;

  DecodeTiles() = default;

  // Called by whole warps.
  __device__ DecodeTiles(const Schedule& schedule, int cta) : before(schedule.shares.begin(cta)), unit(before), left_(schedule.shares.size(cta)) {
    if (left_ == 0) return;
    batch = schedule.find_batch(unit, row);
    if (batch == schedule.p.batches) {
      left_ = 0;
      return;
    }
    const int of_head = units_of_head_by_warp<HEIGHT, Blocks>(schedule.p, row);
    kv_head = unit / of_head;
    unit %= of_head;
    before -= unit;
    if (row_tiles<HEIGHT>(schedule.p) > 1) find_row_tile(schedule.p);
  }

  // Goes to the next tile, or its next part. Without one, begin is end.
  __device__ void next(const DecodeParams& p) {
    constexpr int BESIDE = units_beside<HEIGHT>;
    const bool fixed = has_fixed_parts(p);
    if (exists()) unit = fixed ? unit + 1 : end + BESIDE;
    begin = end = 0;
    if (left_ == 0) return;
    do {
      for (int units = row_tile < 0 ? 0 : units_of<HEIGHT>(p, blocks.size()); unit >= units; units = units_of<HEIGHT>(p, blocks.size())) {
        unit -= units, before += units;
        if (++row_tile == row_tiles<HEIGHT>(p)) row_tile = 0, ++kv_head;
        if (kv_head == p.kv_heads) kv_head = 0, row = BatchRow(p, ++batch);
        blocks = Blocks(p, row, first_row(), HEIGHT);
      }
      const int size = blocks.size(), units = fixed ? 1 : min(size + BESIDE - unit, left_), log = fixed ? log2_of_parts(p, size) : 0;
      begin = fixed ? unit * size >> log : max(unit - BESIDE, 0), end = fixed ? (unit + units) * size >> log : max(unit + units - BESIDE, 0);
      left_ -= units;
      if (BESIDE > 0 && !exists()) unit += units;  // these were all beside blocks
    } while (BESIDE > 0 && !exists() && left_ > 0);
  }

  // Whether there is one, and whether the CTA has all of its blocks.
  __device__ bool exists() const { return begin < end; }
  __device__ bool complete() const { return begin == 0 && end == blocks.size(); }

  // Its first row, and how many rows the call has of it.
  __device__ int first_row() const { return row_tile * HEIGHT; }
  __device__ int height(const DecodeParams& p) const { return min(p.group * p.q_length - first_row(), HEIGHT); }

  // Where the CTA's partial results of the tile go: a fixed part has a place of its own, a CTA otherwise two, the
  // second of which is for a tile that begins there.
  __device__ int place(const DecodeParams& p) const { return has_fixed_parts(p) ? before + unit : 2 * blockIdx.x + (begin == 0); }

 private:
  int left_ = 0;  // units that the next tiles have

  // Moves `unit` from the first one of a head to the row tile that has it. Called by whole warps.
  __device__ void find_row_tile(const DecodeParams& p) {
    const int in_head = unit, tiles = row_tiles<HEIGHT>(p);
    row_tile = find_unit(tiles, unit, [&](int start) {
      const int mine = start + threadIdx.x % 32;
      return mine < tiles ? units_of_tile<HEIGHT, Blocks>(p, row, mine) : 0;
    });
    before += in_head - unit;
    blocks = Blocks(p, row, first_row(), HEIGHT);
  }
};

// A thread's row of a tile, as a query of a head.
struct QueryRow {
  int head, query;    // `query`: among those of the row of the batch, or among all packed ones
  bool real;          // whether it is a token of its sequence
  int position;       // of the token; -1 if it isn't one

  __device__ QueryRow(const DecodeParams& p, const BatchRow& row, int kv_head, int index) {
    const int number = query_of(p, index);
    head = kv_head * p.group + index - number * p.group, query = row.begin + number;
    real = number < row.count;
    position = real ? row.end - row.count + number : -1;
  }

  __device__ QueryRow(int its_head, int its_query) : head(its_head), query(its_query), real(true), position(-1) {}

  // Its index in the LSE, and its row of the output.
  __device__ int index(const DecodeParams& p, int batch) const { return batch * p.lse_strides[0] + head * p.lse_strides[1] + query; }
  __device__ int out_row(const DecodeParams& p, int batch) const { return batch * p.out_strides[0] + head * p.out_strides[1] + query * p.out_strides[2]; }
};

}  // namespace fp8attn
