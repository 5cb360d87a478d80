// What general calls have of single keys: their scales, and what the means of queries, and masks that say the same to all rows, add to their scores.
#pragma once

#include "../ptx/cp_async.h"
#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// Whether some come from the producer.
__device__ inline bool has_key_facts(const Params& p) { return p.k_group == 1 || p.bias != nullptr; }

// Whether the mask says the same to all rows.
__device__ inline bool has_mask_by_key(const Params& p) { return p.mask != nullptr && p.mask_strides[2] == 0; }

// Of a block of keys, and of the groups of ROWS queries that CONSUMERS attend with.
template <int CONSUMERS>
struct alignas(16) KeyFacts {
  float scale[KEYS];
  float bias[CONSUMERS][KEYS];  // over the softmax scale, until `add_mask` or `scale_bias`

  // One warp, all of it, for the keys from `start` on; zeros for those and for groups that don't exist. Each of its threads arrives at `barrier`
  // once its copies are there.
  __device__ void load(const Params& p, const Tile& tile, int start, uint64_t* barrier) {
    const int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(start));  // or addresses are made before the loop over blocks, and spilled
    if (p.k_group == 1) {
      const float* at = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1] + (start + lane) * p.k_scale_strides[2];
      for (int i = lane; i < KEYS; i += 32, at += 32 * p.k_scale_strides[2]) ptx::cp_async(&scale[i], at, start + i < p.kv_length);
    }
    if (p.bias != nullptr) {
      const float* at = bias_row(p, tile.batch, tile.head, tile.first_row) + start + 4 * lane;  // rows end at multiples of four
      for (int c = 0; c < CONSUMERS; ++c, at += bias_pitch(p))
        ptx::cp_async_16(&bias[c][4 * lane], at, start + 4 * lane < p.kv_length && tile.first_row + c * ROWS < p.q_length);
    }
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

  // Where a mask says the same to all rows: it is added to what is added to a consumer's scores, in their unit. A thread has a key.
  __device__ void add_mask(const Params& p, Tile tile, int start, int consumer) {
    float& sum = bias[consumer][threadIdx.x % KEYS];
    int key = start + int(threadIdx.x) % KEYS;
    asm volatile("" : "+r"(key), "+r"(tile.batch), "+r"(tile.head));  // or its address is made before the loop over blocks, and spilled
    sum = key < p.kv_length ? masked(p.bias != nullptr ? sum * p.score_scale : 0.0f, p, tile, 0, key) : 0.0f;
  }

  // Elsewhere `factor` brings it to that unit. Complete behind the consumer's next barrier. Without a branch, in which scores in the making
  // would have to be moved.
  __device__ void scale_bias(float factor, int consumer) { bias[consumer][threadIdx.x % KEYS] *= factor; }

  // Scores times the factors of their rows, which become 1, and what is added to them.
  template <int N>
  __device__ void add_bias(float (&s)[N], float (&factor)[2], int consumer, Fragment f) const {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&bias[consumer][8 * j + f.column]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * j + 2 * r] = fmaf(s[4 * j + 2 * r], factor[r], pair.x);
        s[4 * j + 2 * r + 1] = fmaf(s[4 * j + 2 * r + 1], factor[r], pair.y);
      }
    }
    factor[0] = factor[1] = 1.0f;
  }

  // Behind add_bias, where that is -inf: even what is NaN is hidden.
  template <int N>
  __device__ void hide(float (&s)[N], int consumer, Fragment f) const {
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(&bias[consumer][8 * j + f.column]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (pair.x == -INFINITE) s[4 * j + 2 * r] = -INFINITE;
        if (pair.y == -INFINITE) s[4 * j + 2 * r + 1] = -INFINITE;
      }
    }
  }
};
static_assert(KEYS == 128);  // a thread of a consumer each

// Of instances whose calls have none.
struct NoKeyFacts {};

}  // namespace fp8attn
