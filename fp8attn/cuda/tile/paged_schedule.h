// Which blocks of a KV cache the CTAs of the decode kernel attend to. All of it follows from lengths on the device.
#pragma once

#include "../params.h"
#include "constants.h"

namespace fp8attn {

constexpr int HALF_BLOCK = 64;  // tokens of a block in half precision
constexpr int HALVES = KEYS / HALF_BLOCK;
static_assert(RECENT % HALF_BLOCK == 0 && KEYS == SCALE_BLOCK);

// A row of the batch, as pages.PagedBatch.rows has it: its sequence, the position behind its last token, and how many
// of its tokens are new. Only a row that `exists` has a sequence that is in the cache.
struct BatchRow {
  int sequence, end, count;
  bool exists;

  __device__ BatchRow(const DecodeParams& p, int batch) {
    const int number = p.sequences == nullptr ? batch : p.sequences[batch];
    exists = number >= 0 && number < p.every_sequence;
    sequence = exists ? number : 0;
    end = max(p.lengths[batch], 0);
    count = max(min(min(p.counts == nullptr ? p.q_length : p.counts[batch], p.q_length), end), 0);
  }
};

// The blocks that ROWS rows of a key/value head attend to: complete pages, then blocks in half precision, from block
// `first_half` of the sequence on. Row i is query i / group of the head's query head i % group.
struct TileBlocks {
  int pages = 0, halves = 0, first_half = 0;

  __device__ TileBlocks(const DecodeParams& p, const BatchRow& row, int row_tile) {
    const int group = p.q_heads / p.kv_heads, start = row.end - row.count;
    const int first = row_tile * ROWS / group, last = min((row_tile * ROWS + ROWS - 1) / group, row.count - 1);
    if (!row.exists || first > last) return;
    // The page behind the table isn't there. Rows that see it are NaN, whatever comes after it.
    pages = min((start + last) / KEYS, p.table_width + 1);
    first_half = (start + first) / KEYS * HALVES;
    halves = (start + last) / HALF_BLOCK + 1 - first_half;
  }

  __device__ int size() const { return pages + halves; }
};

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

// The blocks of all tiles, one after another: of all batches, heads and row tiles. CTAs share them equally; the first
// `sharers` have at least one each. Called by whole warps.
struct DecodeSchedule {
  static constexpr int KEPT = 4;

  const DecodeParams& p;
  int row_tiles, total = 0, sharers;
  int kept[KEPT] = {};  // numbers of blocks of the lane's first batches: every 32nd

  __device__ explicit DecodeSchedule(const DecodeParams& params)
      : p(params), row_tiles((params.q_heads / params.kv_heads * params.q_length + ROWS - 1) / ROWS) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      if (lane + 32 * i < p.batches) total += kept[i] = of_batch(lane + 32 * i);
    }
    for (int batch = lane + 32 * KEPT; batch < p.batches; batch += 32) total += of_batch(batch);
    total = __shfl_sync(~0u, inclusive_sum(total), 31);
    sharers = max(min(p.ctas, total), 1);
  }

  __device__ int of_head(const BatchRow& row) const {
    int sum = 0;
    for (int i = 0; i < row_tiles; ++i) sum += TileBlocks(p, row, i).size();
    return sum;
  }

  __device__ int of_batch(int batch) const { return p.kv_heads * of_head(BatchRow(p, batch)); }

  // The first block of a CTA.
  __device__ int begin(int cta) const { return int64_t(min(cta, sharers)) * total / sharers; }

  // The CTA that has a block.
  __device__ int cta_of(int block) const { return ((int64_t(block) + 1) * sharers - 1) / total; }

  // Moves `block` to the batch that has it, which is returned: then it counts from the first block of that batch. There
  // is such a batch.
  __device__ int find_batch(int& block) const {
    int found = -1;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      if (found < 0) found = find_among(32 * i, kept[i], block);
    }
    for (int first = 32 * KEPT; found < 0; first += 32) {
      const int batch = first + threadIdx.x % 32;
      found = find_among(first, batch < p.batches ? of_batch(batch) : 0, block);
    }
    return found;
  }

  // Number of blocks before those of a batch.
  __device__ int before(int batch) const {
    int sum = 0;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) sum += lane + 32 * i < batch ? kept[i] : 0;
    for (int other = lane + 32 * KEPT; other < batch; other += 32) sum += of_batch(other);
    return __shfl_sync(~0u, inclusive_sum(sum), 31);
  }

 private:
  // The batch that has `block`, among 32 from `first` on, of which each lane has the number of blocks of one; or -1.
  // Moves `block` to that batch, or behind all of them.
  __device__ static int find_among(int first, int mine, int& block) {
    const int upto = inclusive_sum(mine);
    const uint32_t beyond = __ballot_sync(~0u, upto > block);
    if (beyond == 0) {
      block -= __shfl_sync(~0u, upto, 31);
      return -1;
    }
    const int found = __ffs(beyond) - 1;
    block -= __shfl_sync(~0u, upto - mine, found);
    return first + found;
  }
};

// The tiles of a CTA, one after another, and which of their blocks it has: begin ... end - 1.
struct DecodeTiles {
  const DecodeSchedule& schedule;
  int batch = 0, kv_head = 0, row_tile = -1, begin = 0, end = 0;
  BatchRow row;
  TileBlocks blocks;

  __device__ DecodeTiles(const DecodeSchedule& its_schedule, int cta)
      : schedule(its_schedule),
        row(schedule.p, 0),
        blocks(schedule.p, row, 0),
        skipped_(schedule.begin(cta)),
        left_(schedule.begin(cta + 1) - skipped_) {
    if (left_ == 0) return;
    batch = schedule.find_batch(skipped_);
    row = BatchRow(schedule.p, batch);
    const int of_head = schedule.of_head(row);
    kv_head = skipped_ / of_head;
    skipped_ %= of_head;
  }

  // Goes to the next tile. Returns whether there is one.
  __device__ bool next() {
    if (left_ == 0) return false;
    for (;; skipped_ -= blocks.size()) {
      if (++row_tile == schedule.row_tiles) row_tile = 0, ++kv_head;
      if (kv_head == schedule.p.kv_heads) kv_head = 0, row = BatchRow(schedule.p, ++batch);
      blocks = TileBlocks(schedule.p, row, row_tile);
      if (skipped_ < blocks.size()) break;
    }
    begin = skipped_, end = min(blocks.size(), begin + left_);
    left_ -= end - begin;
    skipped_ = 0;
    return true;
  }

  // Whether the CTA has all blocks of the tile.
  __device__ bool complete() const { return begin == 0 && end == blocks.size(); }

  // Where its partial results of the tile go, among two places of each CTA: second if the tile begins here.
  __device__ static int place(int cta, bool begins_here) { return 2 * cta + begins_here; }

 private:
  int skipped_, left_;  // blocks before the CTA's first one in the next tiles, and blocks that the next tiles have
};

// A thread's row of a tile, as a query of a head.
struct QueryRow {
  int head, query;
  bool exists, real;  // whether the call has the row, and whether it is a token of its sequence
  int position;       // of the token; -1 if it isn't one

  __device__ QueryRow(const DecodeParams& p, const BatchRow& row, int kv_head, int index) {
    const int group = p.q_heads / p.kv_heads;
    query = index / group, head = kv_head * group + index % group;
    exists = query < p.q_length, real = query < row.count;
    position = real ? row.end - row.count + query : -1;
  }

  // Its index in (B, Hq, Sq).
  __device__ int64_t index(const DecodeParams& p, int batch) const { return (int64_t(batch) * p.q_heads + head) * p.q_length + query; }
};

}  // namespace fp8attn
