// Online softmax in base 2 with exact exponentials. P stays float32.
#pragma once

#include "../ptx/convert.h"
#include "mask.h"
#include "softmax.h"

namespace fp8attn {

// 2^(s * factor - m + offset). FAST: one multiply-add and ex2.approx.ftz, whose relative error is below 2^-22 (PTX ISA,
// ex2). The rounding of the sum adds |score| * 2^-24. Otherwise the difference to the maximum is exact, and exp2f has
// an error of 2 ulp.
template <bool FAST>
__device__ float probability(float s, float factor, float m, float offset = P_OFFSET) {
  if constexpr (FAST)
    return ptx::exp2_approx(fmaf(s, factor, offset - m));
  else
    return exp2f(__fsub_rn(__fmul_rn(s, factor), m) + offset);
}

// The softmax state of a thread's two rows of a warp's accumulators. P is at most 2^OFFSET.
template <bool FAST, int OFFSET = int(P_OFFSET)>
struct OnlineSoftmax {
  float m[2] = {NOTHING, NOTHING};  // the score that P is relative to
  float l[2] = {};                  // sums of P over the columns of this lane
  float origin[2];                  // what the exponent subtracts from this block's scores: m, or 0 if already done

  // Updates m by the block's row maxima. `s` are scores divided by `factor`. `alpha` is the factor that rescales
  // earlier sums. ANY_SIZE: factors are 1, and scores may be large.
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

  // Turns a thread's eight scores of 16 keys, divided by `factor`, into P.
  __device__ void exponentiate(float* s, const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* x = s + 2 * r;
#pragma unroll
      for (int i : {0, 1, 4, 5}) x[i] = probability<FAST>(x[i], factor[r], origin[r], OFFSET);
      l[r] += x[0] + x[1] + (x[4] + x[5]);
    }
  }

  // Reduces l over the quad, to sums of whole rows.
  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(~0u, l[r], 1);
      l[r] += __shfl_xor_sync(~0u, l[r], 2);
    }
  }
};

}  // namespace fp8attn
