// What K's mean adds to scores, and so to the LSE: products of plain queries with it, in float32.
#pragma once

#include "pair.h"
#include "rotate.h"
#include "schedule.h"

namespace fp8attn {

// Of a kernel that doesn't see plain queries: nothing.
struct NoMeanScores {};

__device__ inline float with_mean(float lse, NoMeanScores, int) { return lse; }
__device__ inline float with_mean(float lse, float2 of_rows, int r) { return lse + (r == 0 ? of_rows.x : of_rows.y); }

// Of the 16 rows of a warp. A team of lanes has a row in each round; a lane has four channels of every 4 * TEAM.
template <typename T, int DIM>
struct MeanScores {
  static constexpr int TEAM = DIM / 16, ROWS_PER_ROUND = 32 / TEAM, ROUNDS = 16 / ROWS_PER_ROUND;
  static constexpr int LOADED = ROUNDS < 4 ? ROUNDS : 4;  // rounds whose loads are under way together
  static constexpr int PARTS = DIM > 128 ? DIM / 128 : 1, LANES_OF_PART = DIM / PARTS / 4;

  float4 mean[4];
  uint2 words[LOADED][4];

  // Those of a thread's two rows of a fragment, in units of the LSE. Called by a whole warp. rotated_mean(i) gives the
  // i-th four channels of the rotated mean.
  template <typename Mean>
  __device__ static float2 of(const Params& p, const Tile& tile, int warpgroup_row, Mean&& rotated_mean) {
    MeanScores scores;
    scores.template load<0>(p, tile, warpgroup_row);
    scores.set_mean(rotated_mean);
    float2 found = {};
    scores.template add<0>(found);
    if constexpr (LOADED < ROUNDS) {
      static_assert(ROUNDS == 2 * LOADED);
      scores.template load<LOADED>(p, tile, warpgroup_row);
      scores.template add<LOADED>(found);
    }
    return {found.x * (p.score_scale / LOG2E), found.y * (p.score_scale / LOG2E)};
  }

 private:
  template <int ROUND>
  __device__ void load(const Params& p, const Tile& tile, int warpgroup_row) {
    const int lane = threadIdx.x % 32, first = warpgroup_row + threadIdx.x % 128 / 32 * 16 + lane / TEAM + ROUND * ROWS_PER_ROUND;
    const uint16_t* row = reinterpret_cast<const uint16_t*>(p.q) + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1] + first * p.q_strides[2] + lane % TEAM * 4;
#pragma unroll
    for (int i = 0; i < LOADED; ++i, row += ROWS_PER_ROUND * p.q_strides[2]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i][j] = first + i * ROWS_PER_ROUND < p.q_length ? *reinterpret_cast<const uint2*>(row + 4 * TEAM * j) : uint2{};
    }
  }

  template <typename Mean>
  __device__ void set_mean(Mean&& rotated_mean) {
    const int lane = threadIdx.x % 32;
    float4 part[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) part[i] = unrotated(rotated_mean(LANES_OF_PART * i + lane % LANES_OF_PART));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4& from = part[TEAM * j / 32];
      const int other = lane % TEAM + TEAM * j % 32;
      mean[j] = {__shfl_sync(~0u, from.x, other), __shfl_sync(~0u, from.y, other), __shfl_sync(~0u, from.z, other), __shfl_sync(~0u, from.w, other)};
    }
  }

  template <int ROUND>
  __device__ void add(float2& found) const {
    const int row = threadIdx.x % 32 / 4;  // of a fragment; the other one is row + 8
#pragma unroll
    for (int i = 0; i < LOADED; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 low = Pair<T>::floats(words[i][j].x), high = Pair<T>::floats(words[i][j].y);
        sum = fmaf(low.x, mean[j].x, sum), sum = fmaf(low.y, mean[j].y, sum);
        sum = fmaf(high.x, mean[j].z, sum), sum = fmaf(high.y, mean[j].w, sum);
      }
#pragma unroll
      for (int distance = TEAM / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      const float of_row = __shfl_sync(~0u, sum, row % ROWS_PER_ROUND * TEAM);
      if (row / ROWS_PER_ROUND == ROUND + i) found.x = of_row;
      if ((row + 8) / ROWS_PER_ROUND == ROUND + i) found.y = of_row;
    }
  }
};

}  // namespace fp8attn
