// Non-finite rows of int8 Q and K. int8 has no NaN, so all bytes of such a row are INT8_NAN. Scores and row sums become
// NaN here instead.
#pragma once

#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// Scores of non-finite int8 keys become NaN. The first key is `start`.
template <int N>
__device__ void nan_nonfinite_keys(const Params& p, const Tile& tile, int start, float (&s)[N], Fragment f) {
  int64_t step = p.k_strides[2];
  asm volatile("" : "+l"(step));  // else all addresses are computed before the loop over blocks, and spilled
  int key = start + int(threadIdx.x) % 32;
  const uint8_t* at = p.k + tile.batch * p.k_strides[0] + tile.kv_head * p.k_strides[1] + key * step;
#pragma unroll
  for (int j = 0; j < N / 16; ++j, key += 32, at += 32 * step) {
    const uint32_t nonfinite = __ballot_sync(~0u, key < p.kv_length && *at == INT8_NAN) >> f.column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (nonfinite >> (i / 4 * 8 + i % 2) & 1) s[16 * j + i] = NAN;
    }
  }
}

// The row sum of P becomes NaN if the row of Q is non-finite and has a visible key.
__device__ inline void nan_if_nonfinite(float& sum, bool nonfinite) {
  if (sum != 0.0f && nonfinite) sum = NAN;
}

// The same for a thread's two rows.
__device__ inline void nan_nonfinite_rows(const Params& p, const Tile& tile, int first_row, Fragment f, float (&l)[2]) {
  const uint8_t* q = p.q + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(first_row + f.row + 8 * r, p.q_length - 1);
    nan_if_nonfinite(l[r], q[row * p.q_strides[2]] == INT8_NAN);
  }
}

}  // namespace fp8attn
