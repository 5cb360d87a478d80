// Products of Q with K's mean by tensor cores: a warp multiplies 16 rows.
#pragma once

#include "quantize.h"

namespace fp8attn {

constexpr int MEAN_ROWS = 16;

// K's mean as it was before its parts were rotated: sums of three numbers in Q's dtype. Products with these are exact,
// so that together they are those with a number of 24 bits. The order is that of MeanOperand.
template <int DIM>
struct KeyMeanPieces {
  static constexpr int parts = DIM / PART, steps = DIM / 32;

  // of each piece: of the channels whose number modulo 4 is 0 or 1, or 2 or 3; of a lane of a quad; of a product
  alignas(16) uint32_t words[MEAN_PIECES][2][4][steps][2];

  // Turns a rotated mean back, in one warp: a lane has four channels, 16 lanes have a part.
  template <typename T>
  __device__ void turn_back(const float* rotated_mean) {
    const int lane = threadIdx.x % 32, part = lane / (PART / 4) % parts, channel = PART * part + lane % (PART / 4) * 4;
    const float4 mean = __ldcg(reinterpret_cast<const float4*>(rotated_mean + channel));
    float left[4];
    reinterpret_cast<float4&>(left) = turned_back(mean);
#pragma unroll
    for (int piece = 0; piece < MEAN_PIECES; ++piece) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = next_piece<T>(left[2 * i], left[2 * i + 1]);
        if (lane / (PART / 4) < parts) words[piece][i][channel % 32 / 8][channel / 32][channel % 8 / 4] = word;
      }
    }
  }

 private:
  // Numbers in T, and subtracts them. What is too large for half becomes its largest number.
  template <typename T>
  __device__ static uint32_t next_piece(float& a, float& b) {
    const auto limited = [](float x) { return std::is_same_v<T, __half> ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x; };
    const uint32_t word = word_of<T>(limited(a), limited(b));
    const float2 x = Pair<T>::floats(word);
    a -= x.x, b -= x.y;
    return word;
  }
};

// The mean as second operand of products whose first operand are rows of Q as they come: a lane of a quad has 8 of each
// 32 channels. The product takes channels 0, 1, 4 and 5 of these for one row, and channels 2, 3, 6 and 7 for a row that
// is 8 rows below. So the latter have columns of their own, from 4 on. Column i of the four is piece i.
template <typename T, int DIM>
struct MeanOperand {
  static constexpr int steps = KeyMeanPieces<DIM>::steps;

  uint32_t at[2 * steps];

  __device__ explicit MeanOperand(const KeyMeanPieces<DIM>& mean) {
    static_assert(MEAN_PIECES < 4);
    const uint32_t column = threadIdx.x % 32 / 4, piece = column % 4;
    const uint32_t* words = mean.words[min(piece, MEAN_PIECES - 1u)][column / 4][threadIdx.x % 4][0];
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) at[i] = piece < MEAN_PIECES ? words[i] : 0;
  }

  // A lane's sum of the products of a row: those of the quad's lanes add up to the row's product. Quad i has row i.
  __device__ float sum_of(const uint16_t* row) const {
    float sums[4] = {};
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint4 channels = *reinterpret_cast<const uint4*>(row + 32 * step);
      const uint32_t words[] = {channels.x, channels.y, channels.z, channels.w};
      mma_halves<T>(sums, words, at[2 * step], at[2 * step + 1]);
    }
    return threadIdx.x % 4 < 2 ? sums[0] + sums[1] : sums[2] + sums[3];
  }

  // Writes the products of 16 rows from row `first` of `head` on, times `unit`. Where there are fewer, the last one is
  // taken again.
  __device__ void multiply(const uint16_t* rows, int64_t stride, int count, float unit, float* products) const {
    const uint32_t lane = threadIdx.x % 4, quad = threadIdx.x % 32 / 4;
    const auto row_sum = [&](uint32_t row) { return sum_of(rows + min(int(row), count - 1) * stride + 8 * lane); };
    const auto sum = [](float a, float b) { return a + b; };
    const float upper = row_sum(quad), lower = row_sum(quad + 8);
    float product = keep_one(upper, lower, lane % 2, 1, sum);
    product += __shfl_xor_sync(~0u, product, 2);
    if (lane < 2) products[quad + 8 * lane] = product * unit;
  }
};

}  // namespace fp8attn
