// Combines the partial outputs of CTAs that split the keys of a tile, by their row maxima and row sums. The second step
// of Flash-Decoding (Dao et al., 2023). Partial results have no LSE: next to a maximum as low as a mask can make it,
// float32 would round off the logarithm of the sum.
#pragma once

#include "combine.h"
#include "tile/mask.h"
#include "tile/output.h"
#include "tile/softmax.h"

namespace fp8attn {

constexpr int COMBINING_WARPS = 4;

// One warp per row. Weights each partial output by its part of the sum of exponentials, in the order of the keys.
__global__ void __launch_bounds__(32 * COMBINING_WARPS) combine_rows(const __grid_constant__ Params p) {
  const int64_t rows = int64_t(p.batches) * p.q_heads * p.q_length, row = int64_t(blockIdx.x) * COMBINING_WARPS + threadIdx.x / 32;
  if (row >= rows) return;
  const float *maxima = p.part_rows + row, *sums = maxima + p.key_splits * rows;
  float largest = NOTHING, sum = 0.0f;
  for (int i = 0; i < p.key_splits; ++i) largest = fmaxf(largest, maxima[i * rows]);
  const auto weight = [&](int i) { return exp2f(maxima[i * rows] - largest) * sums[i * rows]; };
  for (int i = 0; i < p.key_splits; ++i) sum += weight(i);
  const int64_t head = row / p.q_length, batch = head / p.q_heads;
  const int64_t index = batch * p.out_strides[0] + (head - batch * p.q_heads) * p.out_strides[1] + (row - head * p.q_length) * p.out_strides[2];
  for (int x = threadIdx.x % 32; x < p.value_dim; x += 32) {
    float o = 0.0f;
    for (int i = 0; i < p.key_splits; ++i) o = fmaf(weight(i), p.parts[(i * rows + row) * p.value_dim + x], o);
    store_element(p, index + x, sum == 0.0f ? 0.0f : o / sum);
  }
  if (p.lse != nullptr && threadIdx.x % 32 == 0) p.lse[row] = (largest + log2f(sum)) / LOG2E;
}

cudaError_t combine(const Params& p, cudaStream_t stream) {
  const int64_t rows = int64_t(p.batches) * p.q_heads * p.q_length;
  combine_rows<<<(rows + COMBINING_WARPS - 1) / COMBINING_WARPS, 32 * COMBINING_WARPS, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fp8attn
