// rotation.rotate of parts of 16 channels, as the default recipe has it: of rows on a warp's tensor core, of means as the definition adds.
#pragma once

#include <type_traits>

#include "../ptx/mma.h"
#include "pair.h"

namespace fp8attn {

constexpr int PART = 16;  // channels that are rotated together

constexpr uint32_t SIGNS = 0xB848;  // bits of the channels whose sign the definition turns

// A part's matrix, in a warp's registers. A quad of lanes has a row, lane c of it after the rotation channels 4c ... 4c + 3; before it the same, or, as
// ldmatrix leaves rows (LOADED), 2c, 2c + 1, 8 + 2c and 9 + 2c. Products are exact; sums are those of the tensor core, which are the definition's where 24
// bits hold them.
template <typename T, bool LOADED = false>
struct Rotation {
  uint32_t matrix[2][2];  // of the operand's columns 4a and 4a + 1, then 4a + 2 and 4a + 3: two channels each

  __device__ explicit Rotation(uint32_t thread) {
    constexpr uint32_t factors = std::is_same_v<T, __half> ? 0x2C002C00 : 0x3D803D80;  // 1 / PART
    const uint32_t lane = thread % 4, column = thread % 32 / 4, to = column / 2 * 4 + column % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t from = LOADED ? 8 * i + 2 * lane : 4 * lane + 2 * i;  // and the one behind it
      uint32_t turned = to & from;
      turned ^= turned >> 2, turned ^= turned >> 1;
      const uint32_t signs = SIGNS >> from ^ ((turned & 1) * 3) ^ (column & 1) << 1;
      matrix[0][i] = factors ^ (signs & 1) << 15 ^ (signs & 2) << 30;
      matrix[1][i] = from & 2 ? matrix[0][i] ^ 0x80008000 : matrix[0][i];
    }
  }

  // Two rows, each in two words, one after the other; four channels of each.
  __device__ void operator()(float (&y)[4], float (&z)[4], const uint32_t (&rows)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[4] = {};
      if constexpr (std::is_same_v<T, __half>)
        ptx::mma_f16(sums, rows, matrix[i]);
      else
        ptx::mma_bf16(sums, rows, matrix[i]);
      y[2 * i] = sums[0], y[2 * i + 1] = sums[1], z[2 * i] = sums[2], z[2 * i + 1] = sums[3];
    }
  }

  __device__ void operator()(float (&y)[4], float (&z)[4], uint2 upper, uint2 lower) const {
    const uint32_t rows[] = {upper.x, lower.x, upper.y, lower.y};
    (*this)(y, z, rows);
  }
};

// A quad's part, as the definition rounds it, by a warp.
__device__ inline float4 rotated(float4 x) {
  const uint32_t lane = threadIdx.x % 4;
  const auto scaled = [&](float value, uint32_t i) { return __fmul_rn(value, SIGNS >> 4 * lane >> i & 1 ? -1.0f / PART : 1.0f / PART); };
  const float a = scaled(x.x, 0), b = scaled(x.y, 1), c = scaled(x.z, 2), d = scaled(x.w, 3);
  const float sums[] = {__fadd_rn(a, b), __fadd_rn(c, d)}, differences[] = {__fsub_rn(a, b), __fsub_rn(c, d)};
  float y[] = {sums[0] + sums[1], differences[0] + differences[1], sums[0] - sums[1], differences[0] - differences[1]};
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, y[i], distance);
      y[i] = lane & distance ? other - y[i] : y[i] + other;
    }
  }
  return {y[0] + 0.0f, y[1] + 0.0f, y[2] + 0.0f, y[3] + 0.0f};
}

// A thread's part, of 16 bits a number, as the definition rounds it: products of such numbers are exact.
template <typename T>
__device__ void rotate(float (&y)[PART], const uint4 (&words)[2]) {
  const uint32_t pairs[] = {words[0].x, words[0].y, words[0].z, words[0].w, words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
  for (int i = 0; i < PART; i += 2) {
    const float2 x = Pair<T>::floats(pairs[i / 2]);
    const float low = SIGNS >> i & 1 ? -1.0f / PART : 1.0f / PART, high = SIGNS >> (i + 1) & 1 ? -1.0f / PART : 1.0f / PART;
    const float first = fmaf(x.x, low, 0.0f);  // and no zero is negative
    y[i] = fmaf(x.y, high, first), y[i + 1] = fmaf(x.y, -high, first);
  }
#pragma unroll
  for (int distance = 2; distance < PART; distance *= 2) {
#pragma unroll
    for (int i = 0; i < PART; ++i) {
      if (i & distance) continue;
      const float low = y[i], high = y[i + distance];
      y[i] = low + high, y[i + distance] = low - high;
    }
  }
}

}  // namespace fp8attn
