// What a mask shows of each block of keys to each group of queries. `build_block_mask` computes this before an instance
// of the Hopper kernel that takes a mask runs.
#pragma once

#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// Flags of a block of keys and a group of queries: the mask shows some scores, hides some, adds to some. 0: the mask
// shows none.
enum BlockMask : uint32_t { ANY_VISIBLE = 1, ANY_HIDDEN = 2, ANY_ADDED = 4 };

constexpr int BLOCK_MASK_BITS = 4;  // of them, in a word of all consumers

// Words that hold a row's mask bits of one block. Bit 2j + i of word c is of key 8j + 2c + i, so that a word has the
// bits of one thread's scores.
constexpr int MASK_WORDS = 4;

// The number of a block of a mask, which has ROWS rows (or one, if all rows are alike) and KEYS keys. Blocks are
// counted along the keys first, then group by group of rows.
__device__ inline int64_t mask_block(const Params& p, int batch, int head, int group, int block) {
  const int blocks = (p.kv_length + KEYS - 1) / KEYS;
  batch = min(batch, p.mask_batches - 1), head = min(head, p.mask_heads - 1), group = min(group, p.mask_groups - 1);
  return ((int64_t(batch) * p.mask_heads + head) * p.mask_groups + group) * blocks + block;
}

// Its bits, row by row.
__device__ inline uint32_t* mask_bits(const Params& p, int64_t block) { return p.mask_bits + block * p.mask_rows * MASK_WORDS; }

// A block of keys that a tile is attended with. `mask`: to each consumer.
struct KvBlock {
  int index, next;  // the block after it; one behind all if it is the last
  uint32_t mask;

  __device__ uint32_t to(int consumer) const { return mask >> BLOCK_MASK_BITS * consumer; }

  __device__ bool hides(int consumer) const { return (to(consumer) & (ANY_VISIBLE | ANY_HIDDEN)) != ANY_VISIBLE; }
};

// Iterates over the K/V blocks that a tile attends to, in order: the blocks before `end` of which the mask shows
// something to at least one of the CONSUMERS, or one block if there are none. All threads of a warp must call it
// together.
template <int CONSUMERS>
class KvBlockIterator {
 public:
  __device__ KvBlockIterator(const Params& p, const Tile& tile, int its_end) : p_(p), tile_(tile), end_(its_end) {}

  // The first from `block` on, or `end`. `block` is 0, or follows the one that was found last.
  __device__ int next(int block) {
    if (p_.mask == nullptr) return block;
    while (block < end_) {
      if (block % 32 == 0) look_at(block);
      const uint32_t found = found_ >> block % 32;
      if (found != 0) return block + __ffs(found) - 1;
      block = (block / 32 + 1) * 32;
    }
    return end_;
  }

  __device__ int first(int) { return min(next(0), end_ - 1); }

  // Of the one that was found last.
  __device__ uint32_t mask(int block) const {
    constexpr uint32_t all = ANY_VISIBLE * 0x11111111;
    return p_.mask == nullptr ? all : __shfl_sync(~0u, mask_, block % 32);
  }

 private:
  const Params& p_;
  const Tile& tile_;
  int end_;
  uint32_t mask_, found_;  // of the lane's block; a bit for each lane's

  __device__ void look_at(int base) {
    const int block = base + int(threadIdx.x) % 32;
    mask_ = 0;
    int row = tile_.first_row;
    asm volatile("" : "+r"(row));  // or addresses are made before the loop over blocks, and spilled
    for (int c = 0; c < CONSUMERS; ++c, row += ROWS) {
      if (block < end_ && row < p_.q_length) mask_ |= uint32_t(p_.block_mask[mask_block(p_, tile_.batch, tile_.head, row / ROWS, block)]) << BLOCK_MASK_BITS * c;
    }
    found_ = __ballot_sync(~0u, mask_ != 0);
  }
};

}  // namespace fp8attn
