// Softmax of pages, by the rules of pages.py: P of a page is relative to the page's largest score, and depends on
// nothing else. All codes are direct, and rows are normalised by sums of them. Decode has the same P.
#pragma once

#include "subnormal_softmax.h"

namespace fp8attn {

// Sums are relative to a maximum that lags behind. A page whose largest score is more than 2^GROWTH times it raises it.
constexpr float GROWTH = 16.0f;

// As finite_or_zero, where only differences to -inf may be other numbers; NaN becomes a number, too.
__device__ inline float finite(float m) { return fmaxf(m, NOTHING); }

// What products of Q and K leave as scores divided by a factor, and their codes. With int8 they are subnormals, from
// START on: an FFMA reads integers as these, and they compare as integers. -inf is a key that a row doesn't see.
template <bool INT8, int DIM>
struct PageScores {
  template <typename S>
  __device__ static float of(S sum) {
    if constexpr (INT8)
      return __int_as_float(sum + START<DIM>);
    else
      return sum;
  }

  // Otherwise scores are multiplied first, and codes are made of their differences to the largest one: P would overflow
  // where its offset is rounded off.
  __device__ static bool in_range(float factor) { return factor < (INT8 ? SMALL_FACTOR : LARGEST_SCORE / (LARGEST_PRODUCT<false> * DIM)); }

  __device__ static float multiply(float s, float factor) {
    if (!INT8) return s * factor;
    return fabsf(s) < 1.0f ? __fmul_rn(float(__float_as_int(s) - START<DIM>), factor) : s;
  }

  // Of scores in range. `largest`: of a row, and `score` is that multiplied.
  __device__ static DirectRow row(float largest, float score, float factor) {
    if constexpr (INT8)
      return SubnormalDirectRow::below(fmaxf(largest, 0.0f), factor);
    else
      return DirectRow(factor, finite(score));
  }
};

// A thread's two rows.
template <bool INT8, int DIM>
struct PageSoftmax {
  using Scores = PageScores<INT8, DIM>;

  // While pages are added, a larger score raises `limit`, and sums are relative to 2^(limit - P_OFFSET); once they are,
  // to 2^limit.
  float limit[2] = {-INFINITE, -INFINITE};
  float l[2] = {};  // of whole rows

  // Whether scores of all rows of the warp are in range.
  __device__ static bool in_range(const float (&factor)[2]) { return __all_sync(~0u, Scores::in_range(fmaxf(factor[0], factor[1]))); }

  // Turns scores divided by `factor` into an operand `p` of P * V. Sets `beta`, by which P·V and the sums of P must be
  // multiplied. Calls rescale(alpha) where the output so far must be multiplied by alpha.
  template <int N, typename Rescale>
  __device__ void step(float (&s)[N], const float (&factor)[2], bool is_in_range, uint32_t (&p)[N / 16][4], float (&beta)[2], Rescale&& rescale) {
    float largest[2];
    const auto grows = [&] { return (largest[0] > limit[0]) | (largest[1] > limit[1]); };
    if (is_in_range) {
      // Floats from 0 on compare as integers, of which an instruction takes two new ones. Rows all of whose scores are
      // negative are rare; with int8, no score is but -inf.
      float of_row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int bits = Softmax<0, 0>::largest_bits<!INT8>(s, r);
        bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
        of_row[r] = __int_as_float(max(bits, __shfl_xor_sync(~0u, bits, 2)));
        largest[r] = Scores::multiply(of_row[r], factor[r]);
      }
      const bool negative = !INT8 && min(__float_as_int(of_row[0]), __float_as_int(of_row[1])) == 0;
      if (__any_sync(~0u, negative | grows())) {  // one vote, as all warps wait for it
        if (!INT8 && __any_sync(~0u, negative)) {
#pragma unroll
          for (int r = 0; r < 2; ++r) of_row[r] = largest_of_row(s, r), largest[r] = Scores::multiply(of_row[r], factor[r]);
        }
        if (__any_sync(~0u, grows())) raise(largest, rescale);
      }
      write_codes({Scores::row(of_row[0], largest[0], factor[0]), Scores::row(of_row[1], largest[1], factor[1])}, s, p);
    } else {
      const float most[2] = {fminf(factor[0], LARGEST_FACTOR), fminf(factor[1], LARGEST_FACTOR)};
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = Scores::multiply(s[i], most[i / 2 % 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = largest_of_row(s, r);
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] -= finite_or_zero(largest[i / 2 % 2]);
      if (__any_sync(~0u, grows())) raise(largest, rescale);
      write_codes({{1.0f, 0.0f}, {1.0f, 0.0f}}, s, p);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) beta[r] = ptx::exp2_approx(largest[r] - finite(limit[r]));
  }

  // Once all pages are added. `mean_score`: what K's mean adds to the scores of pages.
  __device__ void end_pages(int r, float mean_score) { limit[r] += mean_score - P_OFFSET; }

  // Before pages are added to other sums, which must be multiplied by BEHIND: most pages then don't raise the limit.
  static constexpr float BEHIND = 1.0f / (1 << int(GROWTH));
  __device__ void begin_pages(int r, float mean_score) { limit[r] += P_OFFSET - mean_score + GROWTH, l[r] *= BEHIND; }

  // As a step, of a block in half precision. Scores `s` become P. The output so far must be multiplied by `alpha`.
  template <int N>
  __device__ void step_of_halves(float (&s)[N], float (&alpha)[2], float (&beta)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest = largest_of_row(s, r), raised = fmaxf(limit[r], largest), base = finite_or_zero(raised), shift = finite_or_zero(largest);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < N / 4; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * j + 2 * r + i];
          x = ptx::exp2_approx(x - shift);
          sum += x;
        }
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      alpha[r] = ptx::exp2_approx(limit[r] - base), beta[r] = ptx::exp2_approx(largest - base);
      l[r] = fmaf(l[r], alpha[r], sum * beta[r]);
      limit[r] = raised;
    }
  }

 private:
  template <typename Rescale>
  __device__ void raise(const float (&largest)[2], Rescale&& rescale) {
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float raised = largest[r] > limit[r] ? largest[r] + GROWTH : limit[r];  // whatever other rows of the warp do
      alpha[r] = ptx::exp2_approx(limit[r] - finite_or_zero(raised));
      l[r] *= alpha[r];
      limit[r] = raised;
    }
    rescale(alpha);
  }

  template <int N>
  __device__ static void write_codes(const DirectRow (&rows)[2], const float (&s)[N], uint32_t (&p)[N / 16][4]) {
    Softmax<0, 0>::write_codes(rows, rows, s, p, std::make_integer_sequence<int, N / 8>());
  }

  template <int N>
  __device__ static float largest_of_row(const float (&s)[N], int r) {
    float largest = s[2 * r];
#pragma unroll
    for (int j = 0; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    return largest;
  }
};

}  // namespace fp8attn
