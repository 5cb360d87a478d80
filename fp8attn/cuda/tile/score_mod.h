// What is done to whole rows of scores beside masks: a soft cap before softmax, a sink after it.
#pragma once

#include "../ptx/tanh.h"
#include "mask.h"
#include "schedule.h"
#include "softmax.h"

namespace fp8attn {

// What K's mean adds to the natural score of a row of a tile; 0 if it isn't given, or the row doesn't exist.
__device__ inline float mean_score(const Params& p, const Tile& tile, int row) {
  if (p.mean_scores == nullptr || row >= p.q_length) return 0.0f;
  return p.mean_scores[(int64_t(tile.batch) * p.q_heads + tile.head) * p.q_length + row];
}

// Scores times `factor`, in base 2, under the soft cap of what they are with `shift`, which is natural. The factors
// become the cap's.
template <int N>
__device__ void cap_scores(float (&s)[N], float (&factor)[2], float2 shift, float softcap) {
  const float inverse = 1.0f / softcap;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float scale = factor[r] * (inverse / LOG2E), offset = (r == 0 ? shift.x : shift.y) * inverse;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) s[4 * j + 2 * r + i] = ptx::tanh_approx(fmaf(s[4 * j + 2 * r + i], scale, offset));
    }
    factor[r] = softcap * LOG2E;
  }
}

// A score in base 2 under a soft cap, which is natural. `inverse`: of the cap. tanh.approx is off by 2^-11 of a score.
__device__ inline float cap_score(float score, float softcap, float inverse) { return ptx::tanh_approx(score * (inverse / LOG2E)) * (softcap * LOG2E); }

// A row's sums beside a sink. `normalise`: the factor of its sums of P * V. `weight`: of all its keys.
struct SinkRow {
  float normalise, weight;

  // m and l become those of the row with the sink, a natural logit. P is at most 2^OFFSET.
  template <int OFFSET = int(P_OFFSET)>
  __device__ static SinkRow add(float& m, float& l, float sink) {
    float mine, theirs;
    const float keys = l;
    merge_rows(m, l, sink * LOG2E, float(1 << OFFSET), mine, theirs);
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    return {mine * inverse, mine * keys * inverse};
  }
};

}  // namespace fp8attn
