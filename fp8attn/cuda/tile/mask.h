// Which keys a row sees.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../params.h"

namespace fp8attn {

constexpr int KEYS = 128;  // in a block

constexpr float INFINITE = __builtin_huge_valf();
constexpr float LOG2E = 1.4426950408889634f;

// Of the accumulator of wgmma m64nN a thread holds, for its rows r = 0, 1 and groups of 8 columns j, the columns
// 8j + 2 (lane % 4) + {0, 1}: elements 4j + 2r + {0, 1}.
struct Fragment {
  int row;     // of r = 0 in the warpgroup's 64; r = 1 is 8 below
  int column;  // of j = 0

  __device__ static Fragment mine() {
    const int thread = threadIdx.x % 128;
    return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
  }
};

// Causality and the end of the keys.
struct Visible {
  int q_length, kv_length, causal_offset;

  __device__ explicit Visible(const Params& p) : q_length(p.q_length), kv_length(p.kv_length), causal_offset(p.causal_offset) {}

  // Keys that a row sees: 0 ... end - 1.
  __device__ int end(int row) const { return max(min(kv_length, min(row, q_length - 1) + causal_offset + 1), 0); }

  // Blocks that rows up to `row` see; one even if they see nothing, so that there is something to hide.
  __device__ int blocks(int row) const { return max((end(row) + KEYS - 1) / KEYS, 1); }

  // -inf for the keys from `start` on that a row doesn't see.
  template <int N>
  __device__ void hide(float (&s)[N], int first_row, int start, Fragment f) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int limit = end(first_row + f.row + 8 * r) - start - f.column;
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        if (8 * j >= limit) s[4 * j + 2 * r] = -INFINITE;
        if (8 * j + 1 >= limit) s[4 * j + 2 * r + 1] = -INFINITE;
      }
    }
  }
};

// What a mask adds to a score over log2 e; -inf hides.
__device__ inline float mask_value(const Params& p, int64_t index) {
  switch (p.mask_type) {
    case 0:
      return static_cast<const uint8_t*>(p.mask)[index] ? 0.0f : -INFINITE;
    case 1 + int(OutType::bf16):
      return __bfloat162float(static_cast<const __nv_bfloat16*>(p.mask)[index]);
    case 1 + int(OutType::f16):
      return __half2float(static_cast<const __half*>(p.mask)[index]);
    default:
      return static_cast<const float*>(p.mask)[index];
  }
}

// Adds the mask of 64 rows and the keys from `start` on; a score that is hidden becomes -inf even if it was NaN.
template <int N>
__device__ void add_mask(float (&s)[N], const Params& p, int batch, int head, int first_row, int start, Fragment f) {
  const int64_t base = batch * p.mask_strides[0] + head * p.mask_strides[1];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int row = first_row + f.row + i / 2 % 2 * 8;
    const int key = start + i / 4 * 8 + f.column + i % 2;
    if (row < p.q_length && key < p.kv_length) {
      const float value = mask_value(p, base + row * p.mask_strides[2] + key * p.mask_strides[3]);
      s[i] = value == -INFINITE ? -INFINITE : s[i] + value * LOG2E;
    }
  }
}

}  // namespace fp8attn
