// Softmax of pages, by the rules of pages.py: P of a page is relative to the page's largest score, and depends on
// nothing else. Exponentials are exact, and their sums are those before P is rounded: decode has the same P.
#pragma once

#include "softmax.h"

namespace fp8attn {

// Sums are relative to a maximum that lags behind. A page whose largest score is more than 2^GROWTH times it raises it.
constexpr float GROWTH = 16.0f;

// A thread's two rows. LARGEST: sums of codes, over their factors, at most.
template <int LARGEST>
struct PageSoftmax {
  float m[2] = {-INFINITE, -INFINITE};  // what sums are relative to
  float l[2] = {};                      // the thread's part of the sums of 2^(score - m)

  // Whether scores are below LARGEST_SCORE in all rows of the warp. Otherwise they must be multiplied first.
  __device__ static bool in_range(const float (&factor)[2]) { return __all_sync(~0u, fmaxf(factor[0], factor[1]) < LARGEST_SCORE / LARGEST); }

  // Turns sums, which are scores divided by `factor`, into an operand `p` of P * V. Sets `beta`, by which P·V must be
  // multiplied. If it returns true, the output so far must be multiplied by `alpha`.
  template <int N>
  __device__ bool step(float (&s)[N], float (&factor)[2], bool is_in_range, uint32_t (&p)[N / 16][4], float (&alpha)[2], float (&beta)[2]) {
    if (!is_in_range) scale_by_row(factor, s);
    float largest[2], sum[2] = {}, shift[2];
    largest_of_rows(s, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] *= factor[r];
      shift[r] = P_OFFSET - finite_or_zero(largest[r]);
    }
#pragma unroll
    for (int t = 0; t < N / 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = ptx::exp2_approx(fmaf(s[8 * t + i / 2 * 4 + 2 * r + i % 2], factor[r], shift[r]));
        sum[r] += (x[0] + x[1]) + (x[2] + x[3]);
        p[t / 2][t % 2 * 2 + r] = ptx::e4m3x4(x[0], x[1], x[2], x[3]);
      }
    const bool grows = __any_sync(~0u, (largest[0] > m[0] + GROWTH) | (largest[1] > m[1] + GROWTH));
    if (grows) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float m_new = fmaxf(m[r], largest[r]);
        alpha[r] = ptx::exp2_approx(m[r] - finite_or_zero(m_new));
        l[r] *= alpha[r];
        m[r] = m_new;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      beta[r] = ptx::exp2_approx(largest[r] - finite_or_zero(m[r])) * (1.0f / (1 << int(P_OFFSET)));
      l[r] = fmaf(sum[r], beta[r], l[r]);
    }
    return grows;
  }

  // The same for a block in half precision. Scores `s` become P. The output so far must be multiplied by `alpha`.
  template <int N>
  __device__ void step_of_halves(float (&s)[N], float (&alpha)[2], float (&beta)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = largest_of_row(s, r), m_new = fmaxf(m[r], largest), base = finite_or_zero(m_new), shift = finite_or_zero(largest);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * r + i];
          x = ptx::exp2_approx(x - shift);
          sum += x;
        }
      alpha[r] = ptx::exp2_approx(m[r] - base), beta[r] = ptx::exp2_approx(largest - base);
      l[r] = fmaf(l[r], alpha[r], sum * beta[r]);
      m[r] = m_new;
    }
  }

  // From parts of a sum to the whole of it, in all threads of a row.
  __device__ void add_parts() {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) l[r] += __shfl_xor_sync(~0u, l[r], lanes);
  }

 private:
  template <int N>
  __device__ static float largest_of_row(const float (&s)[N], int r) {
    float largest = s[2 * r];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    return largest;
  }

  // Floats from 0 on compare as integers, of which an instruction takes two new ones. Rows all of whose scores are
  // negative are rare.
  template <int N>
  __device__ static void largest_of_rows(const float (&s)[N], float (&largest)[2]) {
    int bits[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto score = [&](int i) { return __float_as_int(s[i + 2 * r]); };
      int a = __vimax3_s32(score(0), score(1), 0), b = max(score(4), score(5));
#pragma unroll
      for (int j = 2; j < N / 4; j += 2) {
        a = __vimax3_s32(a, score(4 * j), score(4 * j + 1));
        b = __vimax3_s32(b, score(4 * j + 4), score(4 * j + 5));
      }
      a = max(a, b);
      a = max(a, __shfl_xor_sync(~0u, a, 1));
      bits[r] = max(a, __shfl_xor_sync(~0u, a, 2));
      largest[r] = __int_as_float(bits[r]);
    }
    if (!__any_sync(~0u, min(bits[0], bits[1]) == 0)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = largest_of_row(s, r);
  }
};

}  // namespace fp8attn
