// From accumulators to memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../ptx/cp_async.h"
#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// Word i of lane c becomes word c of lane i, among the four lanes of a quad.
__device__ inline void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x % 2, high = threadIdx.x / 2 % 2;
  const auto exchange = [](uint32_t& a, uint32_t& b, bool upper, int lane) {
    const uint32_t received = __shfl_xor_sync(~0u, upper ? a : b, lane);
    (upper ? a : b) = received;
  };
  exchange(w[0], w[1], odd, 1);
  exchange(w[2], w[3], odd, 1);
  exchange(w[0], w[2], high, 2);
  exchange(w[1], w[3], high, 2);
}

// What THREADS threads, a warpgroup's or all of them, want to know of their tile, in shared memory: scales and means of V's channels,
// zero where there are none, scales of the M rows of Q, and how many keys these see.
template <int CHANNELS, int M = ROWS, int THREADS = 128>
struct TileFacts {
  float channel_scale[CHANNELS], channel_mean[CHANNELS], row_scale[M];
  int row_end[M];

  // Called by all of them; complete once all have been through cp_async_wait.
  __device__ void load(const Params& p, const Visible& visible, const Tile& tile, int first_row) {
    const float* scales = p.v_scale + tile.batch * p.v_scale_strides[0] + tile.kv_head * p.v_scale_strides[1];
    const float* means = p.v_mean + (int64_t(tile.batch) * p.kv_heads + tile.kv_head) * p.value_dim;
    for (int x = threadIdx.x % THREADS; x < CHANNELS; x += THREADS) {
      const bool exists = x < p.value_dim;
      ptx::cp_async(&channel_scale[x], exists ? scales + x * p.v_scale_strides[2] : p.v_scale, exists);
      ptx::cp_async(&channel_mean[x], exists && p.v_mean != nullptr ? means + x : p.v_scale, exists && p.v_mean != nullptr);
    }
    const float* row_scales = p.q_scale + tile.batch * p.q_scale_strides[0] + tile.head * p.q_scale_strides[1];
    for (int i = threadIdx.x % THREADS; i < M; i += THREADS) {
      const int row = min(first_row + i, p.q_length - 1);
      ptx::cp_async(&row_scale[i], row_scales + (p.q_group == 0 ? 0 : row / p.q_group) * p.q_scale_strides[2], true);
      row_end[i] = visible.end(first_row + i);
    }
  }
};

// NaN instead of the sums of P of a thread's rows that are of int8 that isn't finite, and see a key.
__device__ inline void poison_rows(const Params& p, const Tile& tile, int first_row, Fragment f, float (&l)[2]) {
  const uint8_t* q = p.q + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(first_row + f.row + 8 * r, p.q_length - 1);
    if (l[r] != 0.0f && q[row * p.q_strides[2]] == INT8_NAN) l[r] = NAN;
  }
}

// Where a thread's two rows of the output go, and by what they are multiplied on the way.
struct Output {
  const Params& p;
  float inverse[2], there[2];
  int64_t index[2];  // of the thread's rows
  bool inside[2];
  int column, quarter;

  __device__ Output(const Params& params, const Tile& tile, int first_row, Fragment f, const float (&l)[2]) : p(params), column(f.column), quarter(f.column / 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + f.row + 8 * r;
      inside[r] = row < p.q_length;
      index[r] = tile.batch * p.out_strides[0] + tile.head * p.out_strides[1] + row * p.out_strides[2];
      inverse[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r];  // a row without visible keys is zero
      there[r] = l[r] == 0.0f ? 0.0f : 1.0f;
    }
  }

  // Normalises, descales and stores COUNT of the channels, from FIRST on.
  template <int FIRST, int COUNT, int N, typename Facts>
  __device__ void store(const float (&o)[N], const Facts& facts) const {
    switch (p.out_type) {
      case OutType::bf16:
        return store_as<__nv_bfloat162, FIRST, COUNT>(o, facts);
      case OutType::f16:
        return store_as<__half2, FIRST, COUNT>(o, facts);
      case OutType::f32:
        return store_as<float2, FIRST, COUNT>(o, facts);
    }
  }

 private:
  template <typename Pair, int FIRST, int COUNT, int N, typename Facts>
  __device__ void store_as(const float (&o)[N], const Facts& facts) const {
#pragma unroll
    for (int g = 0; g < COUNT / 32; ++g) {
      float values[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int x = FIRST + 32 * g + i / 2 * 8 + column + i % 2;
        const float scale = facts.channel_scale[x], mean = facts.channel_mean[x];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          values[r][i] = fmaf(o[16 * g + i / 2 * 4 + 2 * r + i % 2] * inverse[r], scale, there[r] * mean);
      }
      // after the quad's transposition a lane has eight channels in a row
      const int x = FIRST + 32 * g + 8 * quarter;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (std::is_same_v<Pair, float2>) {
          uint32_t even[4], odd[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) even[i] = __float_as_uint(values[r][2 * i]), odd[i] = __float_as_uint(values[r][2 * i + 1]);
          transpose_quad(even);
          transpose_quad(odd);
          uint4* to = reinterpret_cast<uint4*>(static_cast<float*>(p.out) + index[r] + x);
          if (inside[r] && x < p.value_dim) to[0] = {even[0], odd[0], even[1], odd[1]}, to[1] = {even[2], odd[2], even[3], odd[3]};
        } else {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            Pair pair;
            if constexpr (std::is_same_v<Pair, __half2>)
              pair = __floats2half2_rn(values[r][2 * i], values[r][2 * i + 1]);
            else
              pair = __floats2bfloat162_rn(values[r][2 * i], values[r][2 * i + 1]);
            words[i] = reinterpret_cast<const uint32_t&>(pair);
          }
          transpose_quad(words);
          if (inside[r] && x < p.value_dim) *reinterpret_cast<uint4*>(static_cast<Pair*>(p.out) + (index[r] + x) / 2) = {words[0], words[1], words[2], words[3]};
        }
      }
    }
  }
};

}  // namespace fp8attn
