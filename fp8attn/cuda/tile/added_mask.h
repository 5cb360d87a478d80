// Additive masks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ptx/ldmatrix.h"
#include "../ptx/tma.h"
#include "mask.h"
#include "schedule.h"
#include "kv_blocks.h"

namespace fp8attn {

constexpr int SLOT_KEYS = 64;  // keys in a row of a TMA box

// A mask of 16-bit numbers for one group of queries and one block of keys: swizzled TMA boxes of ROWS rows.
struct alignas(1024) AddedTile {
  uint8_t bytes[KEYS / SLOT_KEYS][ROWS * SLOT_KEYS * 2];
};

__device__ inline float2 two_numbers(uint32_t bits, __nv_bfloat16) { return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000)}; }
__device__ inline float2 two_numbers(uint32_t bits, __half) { return __half22float2(reinterpret_cast<const __half2&>(bits)); }

// Scores times `factor` plus the mask, from a tile in shared memory.
template <typename T, int N>
__device__ void add_tile(float (&s)[N], const float (&factor)[2], const AddedTile& tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < N / 4; j += 2) {  // 16 keys, both halves of the warp's rows
    const int chunk = j % (SLOT_KEYS / 8) + lane / 16;
    uint32_t numbers[4];
    ptx::ldmatrix(numbers, tile.bytes[8 * j / SLOT_KEYS] + row * 128 + (chunk ^ row % 8) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = two_numbers(numbers[i], T());
      float* at = s + 4 * (j + i / 2) + 2 * (i % 2);
      at[0] = fmaf(at[0], factor[i % 2], two.x);
      at[1] = fmaf(at[1], factor[i % 2], two.y);
    }
  }
}

// The same from global memory, for rows from `first_row` on and keys from `start` on. Loads two keys at a time where
// the layout allows it.
template <typename T, int N>
__device__ void add_numbers(float (&s)[N], const float (&factor)[2], const Params& p, const Tile& tile, int first_row, int start, Fragment f) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const MaskRow<T> row(p, tile.batch, tile.head, first_row + f.row + 8 * r, start + f.column);
    const auto add = [&](auto&& number) {
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const Two<T> two = number(8 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) s[4 * j + 2 * r + i] = fmaf(s[4 * j + 2 * r + i], factor[r], mask_value(two.of[i]));
      }
    };
    const auto existing = [&](int key, int64_t apart) { return key < row.keys ? row.at[key * apart] : T(0.0f); };
    if (row.template in_pairs<N>())
      add([&](int key) { return row.pair(key); });
    else if (row.step == 1)
      add([&](int key) { return Two<T>{existing(key, 1), existing(key + 1, 1)}; });
    else
      add([&](int key) { return Two<T>{existing(key, row.step), existing(key + 1, row.step)}; });
  }
}

// The same for a mask of any number type.
template <int N>
__device__ void add_from_memory(float (&s)[N], const float (&factor)[2], const Params& p, const Tile& tile, int first_row, int start, Fragment f) {
  with_number_type(p, [&]<typename T>(T) { add_numbers<T>(s, factor, p, tile, first_row, start, f); });
}

// An additive mask in shared memory. Each consumer has a ring of tiles, which advances only at blocks in which the mask
// changes scores of that consumer.
template <int CONSUMERS, int SLOTS>
struct AddedMask {
  using Slot = Ring<SLOTS>;

  AddedTile tiles[CONSUMERS][SLOTS];
  uint64_t full[CONSUMERS][SLOTS], empty[CONSUMERS][SLOTS];

  __device__ void init() {
    for (int i = 0; i < CONSUMERS * SLOTS; ++i) {
      ptx::mbarrier_init(&full[0][i], 1);
      ptx::mbarrier_init(&empty[0][i], 4);
    }
  }

  // Called by one thread per consumer: loads a block's tile into the consumer's ring.
  __device__ void load(const Params& p, const Tile& tile, const KvBlock& kv_block, int consumer, Slot& at) {
    if (!p.mask_in_boxes || !(kv_block.to(consumer) & ANY_ADDED)) return;
    const int batch = min(tile.batch, p.mask_batches - 1), head = min(tile.head, p.mask_heads - 1), row = tile.first_row + consumer * ROWS;
    AddedTile& to = tiles[consumer][at.stage];
    uint64_t* barrier = &full[consumer][at.stage];
    ptx::mbarrier_wait(&empty[consumer][at.stage], at.phase ^ 1);
#pragma unroll
    for (int i = 0; i < KEYS / SLOT_KEYS; ++i) ptx::tma_load(to.bytes[i], p.mask_map, barrier, 2 * (kv_block.index * KEYS + i * SLOT_KEYS), row, head, batch);
    ptx::mbarrier_expect(barrier, sizeof(AddedTile));
    at.advance();
  }

  // Called by a warpgroup at a block that it does not attend to: releases the block's tile.
  __device__ void skip(const Params& p, const KvBlock& kv_block, int consumer, Slot& at) {
    if (p.mask_in_boxes && kv_block.to(consumer) & ANY_ADDED) {
      ptx::mbarrier_wait(&full[consumer][at.stage], at.phase);
      free(consumer, at);
    }
  }

  // Scores times `factor` plus the mask.
  template <int N>
  __device__ void add(float (&s)[N], const float (&factor)[2], const Params& p, const Tile& tile, int block, int consumer, Slot& at, Fragment f) {
    if (!p.mask_in_boxes) return add_from_memory(s, factor, p, tile, tile.first_row + consumer * ROWS, block * KEYS, f);
    ptx::mbarrier_wait(&full[consumer][at.stage], at.phase);
    if (p.mask_type == 1 + int(OutType::bf16))
      add_tile<__nv_bfloat16>(s, factor, tiles[consumer][at.stage]);
    else
      add_tile<__half>(s, factor, tiles[consumer][at.stage]);
    free(consumer, at);
  }

 private:
  __device__ void free(int consumer, Slot& at) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&empty[consumer][at.stage]);
    at.advance();
  }
};

// Without room in shared memory: the mask comes from global memory.
template <int CONSUMERS>
struct AddedMask<CONSUMERS, 0> {
  struct Slot {};

  __device__ void init() {}
  __device__ void load(const Params&, const Tile&, const KvBlock&, int, Slot&) {}
  __device__ void skip(const Params&, const KvBlock&, int, Slot&) {}

  template <int N>
  __device__ void add(float (&s)[N], const float (&factor)[2], const Params& p, const Tile& tile, int block, int consumer, Slot&, Fragment f) {
    add_from_memory(s, factor, p, tile, tile.first_row + consumer * ROWS, block * KEYS, f);
  }
};

}  // namespace fp8attn
