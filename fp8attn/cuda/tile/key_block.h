// A block of K of PART channels, of a head whose codes stay in shared memory: a few warps read it from global memory
// and quantize it.
#pragma once

#include "../ptx/mbarrier.h"
#include "../ptx/wgmma.h"
#include "quantize.h"

namespace fp8attn {

constexpr int WARPGROUP_WARPS = 4;

// Codes of a block: a K-major operand without swizzle, in columns of 16 channels.
using KeyColumns = uint8_t[QUARTERS][KEYS * QUARTER];

// A block of K that BLOCK_WARPS warps have in registers. A quad of lanes has two keys of every pair, and each lane four
// channels of every quarter of these keys.
template <typename T, int BLOCK_WARPS>
struct KeyBlock {
  static constexpr int pairs = KEYS / BLOCK_WARPS / 16;  // pairs of keys per thread
  const int warp = threadIdx.x / 32 % BLOCK_WARPS, lane = threadIdx.x % 32, column = lane % 4 * 4;
  int first, length;
  uint2 raw[pairs][QUARTERS][2];

  // Index of a key in the block.
  __device__ int key(int pair, int i) const { return 16 * (pairs * warp + pair) + 8 * i + lane / 4; }

  __device__ bool exists(int pair, int i) const { return first + key(pair, i) < length; }

  __device__ KeyBlock(const T* head, int64_t stride, int block, int its_length) : length(its_length) { load(head, stride, block); }

  // Loads a block. Keys beyond the end are zero.
  __device__ void load(const T* head, int64_t stride, int block) {
    first = block * KEYS;
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const T* at = head + (first + key(pair, i)) * stride + column;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter)
          raw[pair][quarter][i] = exists(pair, i) ? *reinterpret_cast<const uint2*>(at + quarter * QUARTER) : uint2{};
      }
    }
  }

  // y: the keys, rotated, minus the mean. Returns the largest magnitude of the warp's keys that exist. Non-finite
  // elements become NaN.
  __device__ float rotate(float (&y)[pairs][QUARTERS][2][4], const float4 (&mean)[QUARTERS]) {
    const KeyRotation<T, false> rotation(threadIdx.x);
    float largest;
#pragma unroll 1
    for (;;) {
      largest = 0.0f;
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        rotation(y[pair], [&](uint32_t (&words)[4], int quarter) {
          const uint2 upper = raw[pair][quarter][0], lower = raw[pair][quarter][1];
          words[0] = upper.x, words[1] = lower.x, words[2] = upper.y, words[3] = lower.y;
        });
#pragma unroll
        for (int i = 0; i < 2 * QUARTERS; ++i) {
          float(&row)[4] = y[pair][i / 2][i % 2];
          centre(row, mean[i / 2]);
          // fmaxf ignores NaN
          const float of_row = fmaxf(fmaxf(fabsf(row[0]), fabsf(row[1])), fmaxf(fabsf(row[2]), fabsf(row[3])));
          if (exists(pair, i % 2)) largest = fmaxf(largest, of_row);
        }
      }
      if (!__any_sync(~0u, largest == INFINITE)) break;
#pragma unroll
      for (int i = 0; i < 2 * pairs * QUARTERS; ++i) {
        uint2& words = raw[i / (2 * QUARTERS)][i / 2 % QUARTERS][i % 2];
        words = nan_where_nonfinite<T>(words);
      }
    }
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  }

  // Stores the codes of what `rotate` gave. `factor`: the inverse scale. `nonfinite`: one bit for each of the LANES
  // keys that the warp's are among: they become NaN.
  __device__ void store(KeyColumns& to, const float (&y)[pairs][QUARTERS][2][4], float factor, uint32_t nonfinite) const {
#pragma unroll
    for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int its_key = key(pair, i);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
          const uint32_t codes = codes_of<false>(y[pair][quarter][i], factor);
          *reinterpret_cast<uint32_t*>(&to[quarter][its_key * QUARTER + column]) = nonfinite >> its_key % LANES & 1 ? NAN_CODES<false> : codes;
        }
      }
    }
  }
};

// Issues Q·Kᵀ for a block. `q`: rows of PART bytes, with their swizzle.
__device__ inline void issue_qk_of_columns(float (&s)[KEYS / 2], const uint8_t* q, const KeyColumns& k) {
  constexpr int column_bytes = sizeof(k[0]);
  const uint64_t rows = ptx::wgmma_descriptor<PART>(ptx::shared_address(q));
  const uint64_t keys = ptx::wgmma_descriptor_of_columns(ptx::shared_address(k), column_bytes);
  ptx::wgmma_fence();
  ptx::Wgmma<KEYS>::run<false>(s, rows, keys);
#pragma unroll
  for (int step = 1; step < PART / 32; ++step) ptx::Wgmma<KEYS>::run<true>(s, rows + 2 * step, keys + 2 * step * (column_bytes / 16));
  ptx::wgmma_commit();
}

}  // namespace fp8attn
