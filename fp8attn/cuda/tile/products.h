// Tensor-core products of a warp with operands in shared memory: e4m3, or halves, to which e4m3 may be converted in
// registers.
#pragma once

#include <cuda_fp16.h>

#include <bit>

#include "config.h"
#include "../ptx/convert.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"

namespace fp8attn {

// Words of a thread's A and B operands of a product over 32 summands.
template <Operands O>
constexpr int A_WORDS = O == Operands::native ? 4 : 8;
template <Operands O>
constexpr int B_WORDS = O == Operands::native ? 2 : 4;

// The offset of the row and chunk that this lane passes to ldmatrix, in the first operand of load_rows and
// load_columns.
template <typename Tile>
__device__ int lane_of_rows() {
  return Tile::offset(threadIdx.x % 16, threadIdx.x % 32 / 16);
}

template <Operands O, typename Tile>
__device__ int lane_of_columns() {
  const int lane = threadIdx.x % 32;
  return O == Operands::shared ? Tile::offset(lane % 8, lane / 8) : Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Loads an A operand: rows row ... row + 15, counted from those of `lane`, and summands 32 step ... 32 step + 31.
template <Operands O, typename Tile>
__device__ void load_rows(uint32_t (&a)[A_WORDS<O>], const Tile& tile, int lane, int row, int step) {
#pragma unroll
  for (int i = 0; i < A_WORDS<O> / 4; ++i) ptx::ldmatrix(a + 4 * i, tile.beyond(lane, row, A_WORDS<O> / 2 * step + 2 * i));
}

// Loads two B operands of 8 columns each: rows row ... row + 15 of the tile, counted from those of `lane`. Operands in
// `registers` are converted from e4m3 to half here.
template <Operands O, typename Tile>
__device__ void load_columns(uint32_t (&b)[2][B_WORDS<O>], const Tile& tile, int lane, int row, int step) {
  if constexpr (O == Operands::shared) {
#pragma unroll
    for (int j = 0; j < 2; ++j) ptx::ldmatrix(b[j], tile.beyond(lane, row + 8 * j, 4 * step));
  } else {
    uint32_t codes[4];
    ptx::ldmatrix(codes, tile.beyond(lane, row, 2 * step));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (O == Operands::native)
        b[i / 2][i % 2] = codes[i];
      else
        ptx::halves_of_e4m3(codes[i], b[i / 2][i % 2 * 2], b[i / 2][i % 2 * 2 + 1]);
    }
  }
}

// d (16, 8) += a (16, 32) * b (32, 8).
template <Operands O>
__device__ void multiply(float* d, const uint32_t (&a)[A_WORDS<O>], const uint32_t (&b)[B_WORDS<O>]) {
  if constexpr (O == Operands::native) {
    ptx::mma_e4m3(d, a, b);
  } else {
    ptx::mma_f16(d, a, b);
    ptx::mma_f16(d, a + 4, b + 2);
  }
}

// The same with half accumulators, two to a word.
template <Operands O>
__device__ void multiply(uint32_t* d, const uint32_t (&a)[A_WORDS<O>], const uint32_t (&b)[B_WORDS<O>]) {
  static_assert(O == Operands::native);
  ptx::mma_e4m3(d, a, b);
}

template <Operands O>
__device__ void multiply(int32_t* d, const uint32_t (&a)[A_WORDS<O>], const uint32_t (&b)[B_WORDS<O>]) {
  static_assert(O == Operands::native);
  ptx::mma_s8(d, a, b);
}

// Packs a thread's P of 32 keys as A operand of P * V, without a shuffle. Of every 16 keys, lane c of a quad has
// 2c, 2c + 1, 8 + 2c and 9 + 2c. The operand of halves takes these keys. The operand of e4m3 takes slots 4c ... 4c + 3,
// where quantized V stores the same keys.
template <Operands O, bool E4M3>
__device__ void operand_of(uint32_t (&a)[A_WORDS<O>], const float* p) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* x = p + 8 * h + 2 * r;
      if constexpr (O == Operands::native) {
        a[2 * h + r] = ptx::e4m3x4(x[0], x[1], x[4], x[5]);
      } else if constexpr (E4M3) {
        ptx::halves_of_e4m3(ptx::e4m3x4(x[0], x[1], x[4], x[5]), a[4 * h + r], a[4 * h + 2 + r]);
      } else {
        a[4 * h + r] = ptx::half2(x[0], x[1]);
        a[4 * h + 2 + r] = ptx::half2(x[4], x[5]);
      }
    }
  }
}

// A sum of int8 products that starts at ZERO_BITS has the bits of the float ZERO + sum, if 22 bits and a sign hold the
// sum. Subtracting ZERO then gives the sum as a float. Unlike a conversion, a subtraction does not use the half-rate
// pipe of V's conversions.
constexpr float ZERO = 0x1.8p23f;
constexpr int32_t ZERO_BITS = std::bit_cast<int32_t>(ZERO);

// P * V of one block, 16 rows and 8 channels: a lane has two channels of two rows.
struct FloatSums {
  float words[4] = {};

  __device__ float at(int i) const { return words[i]; }
};

struct HalfSums {
  uint32_t words[2] = {};

  __device__ float at(int i) const {
    const __half2& two = reinterpret_cast<const __half2&>(words[i / 2]);
    return i % 2 == 0 ? __low2float(two) : __high2float(two);
  }
};

}  // namespace fp8attn
