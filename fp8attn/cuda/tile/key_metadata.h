// Metadata of single keys: which of them a mask shows. In general instances also the scales of keys, and what the means
// of queries add to their scores.
#pragma once

#include "../ptx/cp_async.h"
#include "../ptx/tma.h"
#include "mask.h"
#include "schedule.h"
#include "kv_blocks.h"

namespace fp8attn {

// Of a block of keys, and of the groups of ROWS queries that CONSUMERS attend with.
template <int CONSUMERS>
struct alignas(16) MaskBits {
  uint32_t bits[CONSUMERS][ROWS][MASK_WORDS];  // or of one row, where all are alike
  KvBlock kv_block;

  // One thread: loads the mask bits of a block, if the mask hides part of it from the consumer. Returns the number of
  // bytes that `barrier` must expect.
  __device__ uint32_t load(const Params& p, const Tile& tile, const KvBlock& its, int consumer, uint64_t* barrier) {
    if (!(its.to(consumer) & ANY_HIDDEN)) return 0;
    const uint32_t bytes = p.mask_rows * sizeof(bits[0][0]);
    ptx::bulk_load(bits[consumer], mask_bits(p, mask_block(p, tile.batch, tile.head, tile.first_row / ROWS + consumer, its.index)), bytes, barrier);
    return bytes;
  }

  // -inf for scores of keys that the mask hides, even where they are NaN. `any`: it shows some of them.
  template <int N>
  __device__ void hide(float (&s)[N], const Params& p, int consumer, bool any, Fragment f) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t seen = any ? bits[consumer][min(f.row + 8 * r, p.mask_rows - 1)][f.column / 2] : 0;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (!(seen >> i & 1)) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITE;
      }
    }
  }
};

template <int CONSUMERS>
struct KeyMetadata : MaskBits<CONSUMERS> {
  float scale[KEYS];
  float bias[CONSUMERS][KEYS];  // over the softmax scale; what lies behind the last key is any

  // Likewise, and what means of queries add, if its rows exist.
  __device__ uint32_t load(const Params& p, const Tile& tile, const KvBlock& its, int consumer, uint64_t* barrier) {
    const uint32_t mask_bytes = MaskBits<CONSUMERS>::load(p, tile, its, consumer, barrier);
    const int row = tile.first_row + consumer * ROWS, start = its.index * KEYS;
    if (p.bias == nullptr || row >= p.q_length) return mask_bytes;
    const uint32_t bytes = min(KEYS, bias_pitch(p) - start) * sizeof(float);  // rows end at multiples of 16
    ptx::bulk_load(bias[consumer], bias_row(p, tile.batch, tile.head, row) + start, bytes, barrier);
    return mask_bytes + bytes;
  }

  // A warp: loads the scales of the keys from `start` on. They may lie at any address. Keys that don't exist get zeros.
  // Each thread arrives at `barrier` once its copies have arrived.
  __device__ void load_scales(const Params& p, const Tile& tile, int start, uint64_t* barrier) {
    const float* at = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1];
    for (int i = threadIdx.x % 32; i < KEYS; i += 32) ptx::cp_async(&scale[i], at + (start + i) * p.k_scale_strides[2], start + i < p.kv_length);
    ptx::cp_async_arrive(barrier);
  }

  // Scores times the scales of their keys.
  template <int N>
  __device__ void scale_scores(float (&s)[N], Fragment f) const {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&scale[8 * j + f.column]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * j + 2 * r] *= pair.x;
        s[4 * j + 2 * r + 1] *= pair.y;
      }
    }
  }

  // Scores times the factors of their rows, and what means of queries add. The factors become that of both, `unit`.
  template <int N>
  __device__ void add_bias(float (&s)[N], float (&factor)[2], float unit, int consumer, Fragment f) const {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&bias[consumer][8 * j + f.column]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * j + 2 * r] = fmaf(s[4 * j + 2 * r], factor[r], pair.x);
        s[4 * j + 2 * r + 1] = fmaf(s[4 * j + 2 * r + 1], factor[r], pair.y);
      }
    }
    factor[0] = factor[1] = unit;
  }
};

}  // namespace fp8attn
