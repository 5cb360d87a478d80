// rotation.rotate for parts of 64 channels, as in the default recipe. Rows are rotated on tensor cores, means by
// additions in the definition's order.
#pragma once

#include <type_traits>

#include "../ptx/mma.h"
#include "pair.h"

namespace fp8attn {

constexpr int PART = 64;  // channels that are rotated together
constexpr int QUARTER = PART / 4;
constexpr int QUARTERS = PART / QUARTER;

constexpr uint64_t SIGNS = 0xB8B7B848'4748B848;  // bit i: the definition flips the sign of channel i

// The parity of the bits of x < 64. parity(i & j) is the sign of element (i, j) of the definition's matrix.
__device__ constexpr uint32_t parity(uint32_t x) {
  x ^= x >> 4, x ^= x >> 2;
  return (x ^ x >> 1) & 1;
}

// Two matrix elements +-1 / PART in a word. Bits 0 and 1 of `signs` are their signs.
template <typename T>
__device__ uint32_t matrix_word(uint32_t signs) {
  constexpr uint32_t factors = std::is_same_v<T, __half> ? 0x24002400 : 0x3C803C80;
  return factors ^ (signs & 1) << 15 ^ (signs & 2) << 30;
}

template <typename T>
__device__ void mma_halves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[] = {b0, b1};
  if constexpr (std::is_same_v<T, __half>)
    ptx::mma_f16(d, a, b);
  else
    ptx::mma_bf16(d, a, b);
}

// The same; the first operand has 16 bytes of each lane.
template <typename T>
__device__ void mma_halves(float (&d)[4], uint4 a, uint32_t b0, uint32_t b1) {
  const uint32_t words[] = {a.x, a.y, a.z, a.w};
  mma_halves<T>(d, words, b0, b1);
}

// Rotates rows of K. A quad of lanes has one part of a row. After the rotation, lane c of the quad has channels
// 4c ... 4c + 3 of every quarter. Before it, the lane has the same channels, or those of ldmatrix (LOADED): 2c, 2c + 1,
// 8 + 2c and 9 + 2c. Tensor cores rotate the quarters. The rest are sums and differences of quarters. Products are
// exact. Sums are those of the tensor core; they equal the definition's where 24 bits hold them.
template <typename T, bool LOADED>
struct KeyRotation {
  // [a][i]: B operand whose product gives lane c of a quad the channels 4c + 2a and 4c + 2a + 1. Word i has two input
  // channels. `odd` is for odd quarters, whose signs differ.
  uint32_t matrix[2][2], odd[2][2];

  __device__ explicit KeyRotation(uint32_t thread) {
    const uint32_t lane = thread % 4, column = thread % 32 / 4, to = column / 2 * 4 + column % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t from = LOADED ? 8 * i + 2 * lane : 4 * lane + 2 * i;  // this channel and the next
      matrix[0][i] = matrix_word<T>(uint32_t(SIGNS >> from) ^ parity(to & from) * 3 ^ (column & 1) << 1);
      matrix[1][i] = from & 2 ? matrix[0][i] ^ 0x80008000 : matrix[0][i];
#pragma unroll
      for (int a = 0; a < 2; ++a) odd[a][i] = from & 8 ? matrix[a][i] ^ 0x80008000 : matrix[a][i];
    }
  }

  // Rotates two rows. load(words, quarter) gives a word of the first row, of the second, of the first, of the second.
  template <typename Load>
  __device__ void operator()(float (&y)[QUARTERS][2][4], Load&& load) const {
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
      uint32_t words[4];
      load(words, quarter);
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        float sums[4] = {};
        mma_halves<T>(sums, words, quarter % 2 ? odd[a][0] : matrix[a][0], quarter % 2 ? odd[a][1] : matrix[a][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[quarter][i / 2][2 * a + i % 2] = sums[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float &a = y[0][i / 4][i % 4], &b = y[1][i / 4][i % 4], &c = y[2][i / 4][i % 4], &d = y[3][i / 4][i % 4];
      const float sums[] = {a + b, a - b, c - d, c + d};  // the last quarter has all signs flipped
      a = sums[0] + sums[2], b = sums[1] + sums[3], c = sums[0] - sums[2], d = sums[1] - sums[3];
    }
  }
};

// Rotates a row of Q. A quad of lanes has one part of it, each lane one quarter. The first operand of a product takes
// 16 bytes of each lane as they come from memory: words 0 and 2 in the upper of two rows, words 1 and 3 in the lower.
//
// The lower row has channels 2 above those of the upper row. In the definition, signs of channels c and c + 2 differ
// where bits 0 and 2 of c do. So with the upper row's matrix, the lower row's part of output o is found as that of
// o ^ 5, negated if bit 1 of o is set. The matrix of o is that of o ^ 2, so half of the products are enough.
template <typename T>
struct QueryRotation {
  uint32_t matrix[2][2];  // B operand of product 0: of each uint4, for words x and y, and for z and w

  // Columns 2c and 2c + 1 of product j are lane c's channels 4j and 4j + 1.
  __device__ explicit QueryRotation(uint32_t thread) {
    const uint32_t lane = thread % 4, column = thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t from = QUARTER * lane + 8 * i + 4 * half;
        matrix[i][half] = matrix_word<T>(uint32_t(SIGNS >> from) ^ parity(lane & column / 2) * 3 ^ (column & 1) << 1);
      }
    }
  }

  // Returns the largest magnitude of the lane's quarter, not counting NaN.
  __device__ float operator()(float (&y)[QUARTER], const uint4 (&quarter)[2]) const {
    const auto multiply = [&](float (&sums)[4], int i, int j) { mma_halves<T>(sums, quarter[i], signed_word(i, 0, j), signed_word(i, 1, j)); };
    float first[2][4] = {}, sums[4][4], largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) multiply(first[j], 0, j);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[j][k] = first[j % 2][k];
      multiply(sums[j], 1, j);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float upper = sums[j][i], lower = sums[j ^ 1][3 - i];
        y[4 * j + i] = upper + lower, y[4 * j + 2 + i] = upper - lower;
        largest = fmaxf(largest, fabsf(upper) + fabsf(lower));  // of both
      }
    }
    return largest;
  }

 private:
  // Of product j, whose two bits are bits 2 and 3 of its channels.
  __device__ uint32_t signed_word(int i, int half, int j) const { return parity(half & j) ^ parity(i & j >> 1) ? matrix[i][half] ^ 0x80008000 : matrix[i][half]; }
};

// Sums and differences over the lanes of a part, which have four channels each. Called by a whole warp.
__device__ inline void transform_over_lanes(float (&x)[4], uint32_t lane) {
#pragma unroll
  for (int distance = 1; distance < PART / 4; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], distance);
      x[i] = lane & distance ? other - x[i] : x[i] + other;
    }
  }
}

// Rotates a part that 16 lanes have, four channels each, with the definition's rounding. Called by a whole warp.
__device__ inline float4 rotated(float4 x) {
  const uint32_t lane = threadIdx.x % (PART / 4);
  const auto scaled = [&](float value, uint32_t i) { return __fmul_rn(value, SIGNS >> (4 * lane + i) & 1 ? -1.0f / PART : 1.0f / PART); };
  const float a = scaled(x.x, 0), b = scaled(x.y, 1), c = scaled(x.z, 2), d = scaled(x.w, 3);
  const float sums[] = {__fadd_rn(a, b), __fadd_rn(c, d)}, differences[] = {__fsub_rn(a, b), __fsub_rn(c, d)};
  float y[] = {sums[0] + sums[1], differences[0] + differences[1], sums[0] - sums[1], differences[0] - differences[1]};
  transform_over_lanes(y, lane);
  return {y[0] + 0.0f, y[1] + 0.0f, y[2] + 0.0f, y[3] + 0.0f};
}

// The inverse of `rotated`, but for rounding.
__device__ inline float4 turned_back(float4 y) {
  const uint32_t lane = threadIdx.x % (PART / 4);
  float x[] = {y.x + y.y + y.z + y.w, y.x - y.y + y.z - y.w, y.x + y.y - y.z - y.w, y.x - y.y - y.z + y.w};
  transform_over_lanes(x, lane);
  const auto restored = [&](int i) { return SIGNS >> (4 * lane + i) & 1 ? -x[i] : x[i]; };
  return {restored(0), restored(1), restored(2), restored(3)};
}

}  // namespace fp8attn
