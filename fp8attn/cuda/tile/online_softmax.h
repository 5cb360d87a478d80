// Online softmax in base 2 with exact exponentials; P stays float32.
#pragma once

#include "../ptx/convert.h"
#include "mask.h"
#include "softmax.h"

namespace fp8attn {

// 2^(s factor - m + offset). FAST: one multiply-add and ex2.approx.ftz, whose relative error is below 2^-22 (PTX ISA, ex2); with the rounding of
// the sum, |score| 2^-24 more. Otherwise the difference to the maximum is exact, and exp2f off by 2 ulp.
template <bool FAST>
__device__ float probability(float s, float factor, float m, float offset = P_OFFSET) {
  if constexpr (FAST)
    return ptx::exp2_approx(fmaf(s, factor, offset - m));
  else
    return exp2f(__fsub_rn(__fmul_rn(s, factor), m) + offset);
}

// Of a thread's two rows in the accumulators of a warp. P is 2^OFFSET at most.
template <bool FAST, int OFFSET = int(P_OFFSET)>
struct OnlineSoftmax {
  float m[2] = {NOTHING, NOTHING};  // what P is relative to
  float l[2] = {};                  // sums of P over the columns of this lane
  float origin[2];                  // what is subtracted from this block's scores in the exponent: m, or 0 if m is already subtracted

  // Moves m on to the maxima of scores over `factor`; `alpha` is what sums so far are to be multiplied with. ANY_SIZE: factors are 1, and scores may be
  // large.
  template <bool ANY_SIZE, int N>
  __device__ void advance(float (&s)[N], float (&factor)[2], float (&alpha)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = s[2 * r];
#pragma unroll
      for (int j = 0; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      alpha[r] = follow(m[r], fmaxf(__fmul_rn(largest, factor[r]), lowest(m[r])));
      l[r] *= alpha[r];
      origin[r] = m[r];
    }
    if (ANY_SIZE && any_large(m)) make_relative(factor, m, origin, s);
  }

  // Of the scores over `factor` of 16 keys, eight floats, the P.
  __device__ void exponentiate(float* s, const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* x = s + 2 * r;
#pragma unroll
      for (int i : {0, 1, 4, 5}) x[i] = probability<FAST>(x[i], factor[r], origin[r], OFFSET);
      l[r] += x[0] + x[1] + (x[4] + x[5]);
    }
  }

  // Whole rows' sums.
  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(~0u, l[r], 1);
      l[r] += __shfl_xor_sync(~0u, l[r], 2);
    }
  }
};

}  // namespace fp8attn
