// The softmax of softmax.h under a soft cap: P = 2^(C tanh(u) - m + 8), where u is a score over the cap, and C the cap
// in base 2. reference.capped_codes is the definition.
#pragma once

#include "../ptx/fma.h"
#include "../ptx/tanh.h"
#include "softmax.h"

namespace fp8attn {

constexpr float CAP_STEP = 8 * LOG2E / CAP_CODES;  // of distances, times the cap: what tanh is multiplied by
constexpr float LARGEST_CODE = 8 * (P_OFFSET + 7) - CODE_ROUND;

// How codes of one row fall with the distance d of a score from the row's largest score in the block:
// code = top - CAP_CODES d - curve d^2, and d is 1 at most. Codes are halves, times 2^-24, so that their bits are the
// codes.
struct CappedRow {
  float t;              // tanh of the largest u
  float slope, origin;  // d = origin - s slope
  uint32_t top, curve;  // pairs of the same half; `curve` with its sign changed

  // Of the largest score, whose code is just below `top`. `scale`: u = s scale + mean. Returns whether the row may do
  // without tanh of single scores.
  __device__ bool fit(const Params& p, float largest, float scale, float mean, float above) {
    t = ptx::tanh_approx(fmaf(largest, scale, mean));
    const float derivative = fmaf(-t, t, 1.0f), fall = derivative * (p.softcap * CAP_STEP), inverse = ptx::reciprocal_approx(fall);
    slope = scale * fall;
    origin = fmaf(largest, slope, above);
    const float second = fmaf(fmaf(derivative, -CAP_CUBIC, 2 * CAP_CUBIC / 3), inverse, t) * inverse;
    curve = ptx::half_twice(second * (-CAP_CODES * CODE));
    return p.softcap >= CAP_LEAST && fall >= CAP_LEAST_FALL && second >= CAP_LEAST_CURVE && fabsf(origin) < CAP_LARGEST_ORIGIN;
  }

  __device__ static float scale_of(const Params& p, float factor) { return factor * (p.inverse_softcap * (1 / LOG2E)); }

  // How far the code of the largest score is below the integer `code`, as a distance.
  __device__ static float above(float integer, float code) { return (integer - code) * (1 / CAP_CODES); }

  // Fits the row if m becomes its largest score, which nearly all rows' m do, and this is 0 or more. Sets m_new.
  __device__ bool fit_typical(const Params& p, float largest, float factor, float mean, float m, float& m_new) {
    constexpr float integer = 120.0f;
    static_assert(integer >= LARGEST_CODE && integer < LARGEST_CODE + 1);
    const bool fits = fit(p, largest, scale_of(p, factor), mean, above(integer, LARGEST_CODE));
    top = ptx::half_twice(integer * CODE);
    m_new = t * (p.softcap * LOG2E);
    return fits && t >= 0.0f && m < FALL;
  }

  // The same of any row. Its scores become distances.
  template <int N>
  __device__ void fit_any(const Params& p, float largest, float factor, float mean, float m, float& m_new, float (&s)[N], int r) {
    const bool sees = largest != -INFINITE;
    const float scale = fminf(scale_of(p, factor), LARGEST_FACTOR), at = sees ? largest : 0.0f;
    t = ptx::tanh_approx(fmaf(at, scale, mean));
    const float score = sees ? t * (p.softcap * LOG2E) : -INFINITE;
    m_new = fmaxf(score, lowest(m));
    const float code = ptx::max_nan(fmaf(score - m_new, 8.0f, LARGEST_CODE), 0.0f), integer = ceilf(code);
    top = ptx::half_twice(integer * CODE);
    if (fit(p, at, scale, mean, above(integer, code))) {
      for_row(s, r, [&](float x) { return distance(x); });
      return;
    }
    curve = 0;
    const float step = p.softcap * CAP_STEP, from = fmaf(t, step, above(integer, code));
    for_row(s, r, [&](float x) { return x == -INFINITE ? 1.0f : ptx::fma_saturated(ptx::tanh_approx(fmaf(x, scale, mean)), -step, from); });
  }

  template <int N, typename F>
  __device__ static void for_row(float (&s)[N], int r, F&& f) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) s[4 * j + 2 * r + i] = f(s[4 * j + 2 * r + i]);
  }

  // A hidden key has a score of -inf. NaN becomes 0, and `top` is NaN then.
  __device__ float distance(float s) const { return ptx::fma_saturated(s, -slope, origin); }

  __device__ uint32_t codes(float a, float b) const {
    const uint32_t d = ptx::half2(a, b);
    return ptx::fma_half2_relu(d, ptx::fma_half2(d, curve, ptx::half_twice(-CAP_CODES * CODE)), top);
  }

  // Of four distances.
  __device__ uint32_t codes(float a, float b, float c, float d) const { return __byte_perm(codes(a, b), codes(c, d), 0x6420); }
};

// Scores are never multiplied before distances are taken, and distances are at most 1: no score is too large.
struct CappedSoftmax : Softmax<0, 0> {
  __device__ bool prepare(const float (&)[2]) const { return false; }

  // Turns sums, which are scores in base 2 over `factor`, into an operand `p` of P * V. `mean`: what K's mean adds to
  // u of the two rows.
  template <int N>
  __device__ void step(const Params& params, float (&s)[N], const float (&factor)[2], float2 mean, uint32_t (&p)[N / 16][4], float (&alpha)[2]) {
    float largest[2], m_new[2];
    largest_scores(s, largest);
    CappedRow rows[2];
    const bool first = rows[0].fit_typical(params, largest[0], factor[0], mean.x, m[0], m_new[0]);
    const bool second = rows[1].fit_typical(params, largest[1], factor[1], mean.y, m[1], m_new[1]);
    if (__all_sync(~0u, first && second)) {
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = rows[i / 2 % 2].distance(s[i]);
    } else {
      rows[0].fit_any(params, largest[0], factor[0], mean.x, m[0], m_new[0], s, 0);
      rows[1].fit_any(params, largest[1], factor[1], mean.y, m[1], m_new[1], s, 1);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) alpha[r] = become(m[r], m_new[r]);
    write_codes(rows, rows, s, p, std::make_integer_sequence<int, N / 8>());
  }

 private:
  // Of the rows: -inf if they see no key, NaN if they see one that isn't finite.
  template <int N>
  __device__ static void largest_scores(const float (&s)[N], float (&largest)[2]) {
    const int bits[2] = {largest_bits<false>(s, 0), largest_bits<false>(s, 1)};
    largest[0] = __int_as_float(bits[0]), largest[1] = __int_as_float(bits[1]);
    if (__any_sync(~0u, min(bits[0], bits[1]) < 0)) {  // of negative floats, the largest integer is not the largest
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = s[2 * r];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) largest[r] = ptx::max_nan(largest[r], ptx::max_nan(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = ptx::max_nan(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = ptx::max_nan(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
    }
  }
};

}  // namespace fp8attn
