// Masks: which keys a row attends to.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../params.h"
#include "../ptx/max.h"
#include "constants.h"

namespace fp8attn {

constexpr float INFINITE = __builtin_huge_valf();

// A thread's part of an accumulator of wgmma m64nN, or of adjacent ones of mma m16n8. In row r = 0, 1 and group j of 8
// columns, it holds the columns 8j + 2 (lane % 4) + {0, 1}, in elements 4j + 2r + {0, 1}.
struct Fragment {
  int row;     // row r = 0 in the tile; r = 1 is 8 rows below
  int column;  // first column of group 0

  __device__ static Fragment mine() {
    const int thread = threadIdx.x % 128;
    return {thread / 32 * 16 + thread % 32 / 4, thread % 4 * 2};
  }

  // For a warp whose 16 rows start at `row`.
  __device__ static Fragment of_warp(int row) { return {row + int(threadIdx.x) % 32 / 4, int(threadIdx.x) % 4 * 2}; }
};

// Which keys a row attends to: its window, of which a causal mask is one, and the end of the keys.
struct Visible {
  int q_length, kv_length, causal_offset, first_offset;

  __device__ explicit Visible(const Params& p) : q_length(p.q_length), kv_length(p.kv_length), causal_offset(p.causal_offset), first_offset(p.first_offset) {}

  // A row attends to keys begin ... end - 1. Only instances with windows ask for begin; it is 0 in others.
  __device__ int begin(int row) const { return min(kv_length, max(min(row, q_length - 1) + first_offset, 0)); }
  __device__ int end(int row) const { return max(min(kv_length, min(row, q_length - 1) + causal_offset + 1), 0); }

  // Number of blocks that rows up to `row` attend to. At least 1: rows without visible keys get one block, all of whose
  // keys are masked out.
  __device__ int blocks(int row) const { return max((end(row) + KEYS - 1) / KEYS, 1); }

  // The first block that rows from `first` to `last` attend to. There is at least one.
  __device__ int first_block(int first, int last) const { return min(begin(first) / KEYS, blocks(last) - 1); }
};

// Scores of keys from row_end on become -inf. The scores are those of a thread's rows and the keys from `start` on.
template <int N, int M>
__device__ void hide(float (&s)[N], const int (&row_end)[M], int start, Fragment f) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int limit = row_end[f.row + 8 * r] - start - f.column;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      if (8 * j >= limit) s[4 * j + 2 * r] = -INFINITE;
      if (8 * j + 1 >= limit) s[4 * j + 2 * r + 1] = -INFINITE;
    }
  }
}

// Scores of keys before the rows' windows become -inf. `begin(row)`: the first key that a row of the tile sees.
template <int N, typename Begin>
__device__ void hide_before(float (&s)[N], Begin&& begin, int start, Fragment f) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int limit = begin(f.row + 8 * r) - start - f.column;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      if (8 * j < limit) s[4 * j + 2 * r] = -INFINITE;
      if (8 * j + 1 < limit) s[4 * j + 2 * r + 1] = -INFINITE;
    }
  }
}

// Elements from one row of `bias` to the next.
__device__ inline int bias_pitch(const Params& p) { return (p.kv_length + BIAS_ALIGNMENT - 1) / BIAS_ALIGNMENT * BIAS_ALIGNMENT; }

// The row of `bias` of a query row: what the mean of its group of queries adds to scores, divided by the softmax scale.
__device__ inline const float* bias_row(const Params& p, int batch, int head, int row) {
  const int groups = (p.q_length + ROWS - 1) / ROWS;
  return p.bias + ((int64_t(batch) * p.q_heads + head) * groups + row / ROWS) * bias_pitch(p);
}

// Adds the bias to scores of rows of one group of queries and keys from `start` on. `first_row` is any row of the
// group, and `start` is even.
template <int N>
__device__ void add_bias(float (&s)[N], const Params& p, int batch, int head, int first_row, int start, Fragment f) {
  int key = start + f.column;
  asm volatile("" : "+r"(key));  // else all addresses are computed before the loop over blocks, and spilled
  const float* at = bias_row(p, batch, head, min(first_row, p.q_length - 1)) + key;
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    if (key + 8 * j >= p.kv_length) continue;
    const float2 pair = *reinterpret_cast<const float2*>(at + 8 * j);  // an even key and the next, in the padded row
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      s[4 * j + 2 * r] = fmaf(pair.x, p.score_scale, s[4 * j + 2 * r]);
      s[4 * j + 2 * r + 1] = fmaf(pair.y, p.score_scale, s[4 * j + 2 * r + 1]);
    }
  }
}

// The same for one row and key.
template <typename Place>
__device__ float biased(float score, const Params& p, const Place& tile, int row, int key) {
  return fmaf(bias_row(p, tile.batch, tile.head, row)[key], p.score_scale, score);
}

// What a mask element adds to a score, before the factor log2 e. -inf masks the key out.
__device__ inline float mask_value(uint8_t visible) { return visible ? 0.0f : -INFINITE; }
__device__ inline float mask_value(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float mask_value(__half x) { return __half2float(x); }
__device__ inline float mask_value(float x) { return x; }

// Applies a mask element to a score in base 2. A masked-out score becomes -inf, even if it was NaN.
__device__ inline float with_mask(float score, uint8_t visible) { return visible ? score : -INFINITE; }

// The product is rounded before it is added. Equal mask elements must add the same to all scores, even where the scores
// are rounded off next to it.
template <typename T>
__device__ float with_mask(float score, T x) {
  constexpr bool may_overflow = !std::is_same_v<T, __half>;
  const float value = mask_value(x), more = __fmul_rn(value, LOG2E);
  return value == -INFINITE ? -INFINITE : score + (may_overflow ? ptx::max_nan(more, LOWEST_SCORE) : more);
}

// Calls f with a number of the mask's type, which is not bool.
template <typename F>
__device__ auto with_number_type(const Params& p, F&& f) {
  switch (p.mask_type) {
    case 1 + int(OutType::bf16):
      return f(__nv_bfloat16());
    case 1 + int(OutType::f16):
      return f(__half());
    default:
      return f(float());
  }
}

// The same for any mask type; f gets a byte if it is bool.
template <typename F>
__device__ auto with_mask_type(const Params& p, F&& f) {
  return p.mask_type == 0 ? f(uint8_t()) : with_number_type(p, f);
}

// Applies the mask to the score of one row and key.
template <typename Place>
__device__ float masked(float score, const Params& p, const Place& tile, int row, int key) {
  const int64_t index = tile.batch * p.mask_strides[0] + tile.head * p.mask_strides[1] + row * p.mask_strides[2] + key * p.mask_strides[3];
  return with_mask_type(p, [&]<typename T>(T) { return with_mask(score, static_cast<const T*>(p.mask)[index]); });
}

template <typename T>
struct alignas(2 * sizeof(T)) Two {
  T of[2];
};

// A row of a mask, from the thread's first key on.
template <typename T>
struct MaskRow {
  int64_t step;
  const T* at;
  int keys;  // keys that exist from `at` on

  __device__ MaskRow(const Params& p, int batch, int head, int row, int key) : step(p.mask_strides[3]) {
    asm volatile("" : "+l"(step));  // else all addresses are computed before the loop over blocks, and spilled
    at = static_cast<const T*>(p.mask) + batch * p.mask_strides[0] + head * p.mask_strides[1] + row * p.mask_strides[2] + key * step;
    keys = row < p.q_length ? p.kv_length - key : 0;
  }

  // Whether one load can take both keys of each group of eight, in all rows of the warp. N: scores of a thread, in two
  // rows.
  template <int N>
  __device__ bool in_pairs() const {
    return __all_sync(~0u, step == 1 && reinterpret_cast<uintptr_t>(at) % sizeof(Two<T>) == 0 && keys > 2 * N - 7);
  }

  __device__ Two<T> pair(int key) const { return *reinterpret_cast<const Two<T>*>(at + key); }
};

// Applies the mask to the scores of rows from `first_row` on and keys from `start` on.
template <typename T, int N>
__device__ void add_mask_of(float (&s)[N], const Params& p, int batch, int head, int first_row, int start, Fragment f) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    MaskRow<T> row(p, batch, head, first_row + f.row + 8 * r, start + f.column);
    if (row.template in_pairs<N>()) {
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const Two<T> two = row.pair(8 * j);
#pragma unroll
        for (int i = 0; i < 2; ++i) s[4 * j + 2 * r + i] = with_mask(s[4 * j + 2 * r + i], two.of[i]);
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < N / 4; ++j, row.at += 8 * row.step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // a select, not a branch, so that loads don't wait for each other
        const T shown = T(std::is_same_v<T, uint8_t> ? 1.0f : 0.0f), x = 8 * j + i < row.keys ? row.at[i * row.step] : shown;
        s[4 * j + 2 * r + i] = with_mask(s[4 * j + 2 * r + i], x);
      }
    }
  }
}

template <int N>
__device__ void add_mask(float (&s)[N], const Params& p, int batch, int head, int first_row, int start, Fragment f) {
  with_mask_type(p, [&]<typename T>(T) { add_mask_of<T>(s, p, batch, head, first_row, start, f); });
}

}  // namespace fp8attn
