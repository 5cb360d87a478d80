// Stores the output from accumulators to global memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// Transposes words within a quad of lanes: word i of lane c becomes word c of lane i.
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

__device__ inline void store_element(const Params& p, int64_t index, float value) {
  switch (p.out_type) {
    case OutType::bf16:
      static_cast<__nv_bfloat16*>(p.out)[index] = __float2bfloat16(value);
      return;
    case OutType::f16:
      static_cast<__half*>(p.out)[index] = __float2half(value);
      return;
    case OutType::f32:
      static_cast<float*>(p.out)[index] = value;
      return;
  }
}

// Stores the LSE of a row; if CTAs split the keys, m and the sum of exponentials of this part of the keys. P is
// relative to m and at most 2^OFFSET. HAS_MEAN: K's mean adds `of_mean` to the LSE.
template <int OFFSET, bool HAS_MEAN = false>
__device__ void store_row(const Params& p, const Tile& place, int row, float m, float l, float of_mean = 0.0f) {
  const int64_t index = (int64_t(place.batch) * p.q_heads + place.head) * p.q_length + row;
  if (p.part_rows == nullptr) {
    if (p.lse != nullptr) p.lse[index] = (m - OFFSET + log2f(l)) / LOG2E;
    if (HAS_MEAN && p.lse != nullptr) p.lse[index] += of_mean;
  } else {
    p.part_rows[index] = m;
    p.part_rows[int64_t(p.key_splits) * p.batches * p.q_heads * p.q_length + index] = l * (1.0f / (1 << OFFSET));
  }
}

// Offsets and normalisation factors of a thread's two output rows.
struct Output {
  const Params& p;
  float inverse[2], there[2];
  int64_t index[2];  // offsets of the rows in `out`
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

  // Normalises, descales and stores COUNT channels, from FIRST on.
  template <int FIRST, int COUNT, int N, typename Scales>
  __device__ void store(const float (&o)[N], const Scales& scales) const {
    switch (p.out_type) {
      case OutType::bf16:
        return store_as<__nv_bfloat162, FIRST, COUNT>(o, scales);
      case OutType::f16:
        return store_as<__half2, FIRST, COUNT>(o, scales);
      case OutType::f32:
        return store_as<float2, FIRST, COUNT>(o, scales);
    }
  }

 private:
  template <typename Pair, int FIRST, int COUNT, int N, typename Scales>
  __device__ void store_as(const float (&o)[N], const Scales& scales) const {
#pragma unroll
    for (int g = 0; g < COUNT / 32; ++g) {
      float values[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int x = FIRST + 32 * g + i / 2 * 8 + column + i % 2;
        const float scale = scales.channel_scale[x], mean = scales.channel_mean[x];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          values[r][i] = fmaf(o[16 * g + i / 2 * 4 + 2 * r + i % 2] * inverse[r], scale, there[r] * mean);
      }
      // after the transpose, a lane has eight consecutive channels
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
