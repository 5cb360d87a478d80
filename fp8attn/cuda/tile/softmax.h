// Online softmax in base 2 of a thread's two rows, its probabilities as e4m3.
#pragma once

#include <utility>

#include "../ptx/convert.h"
#include "mask.h"

namespace fp8attn {

constexpr float P_OFFSET = 8.0f;  // P = 2^(s - m + 8): e4m3 reaches 448
constexpr float LARGEST_FACTOR = 0x1p100f;
constexpr float E4M3_MAX = 448.0f;
constexpr float LARGEST_SCORE = 0x1p20f;  // products below this are rounded by less than 1/16

// A product of scales, kept where its product with any score of e4m3 is finite.
__device__ inline float score_factor(float product, bool either_sign) {
  return fmaxf(fminf(product, LARGEST_FACTOR), either_sign ? -LARGEST_FACTOR : 1 / LARGEST_FACTOR);
}

// 8 (y + 7) is the e4m3 code of 2^y at integers y >= -6, and up to 0.69 too high between them, where it takes 2^f for 1 + f. A half
// whose value is code * 2^-24 is subnormal, and its bits are the code: one conversion rounds it, and clamps what underflows to 0. It
// doesn't saturate: y must stay below 8.8. The mean of the excess is subtracted, so that exact exponentials can mix in.
constexpr float CODE = 0x1p-24f;
constexpr float CODE_ROUND = 0.458f;

template <int EXACT>
struct Probabilities {
  float exact_shift[2], direct_shift[2], exact_scale[2], direct_scale[2];

  __device__ Probabilities(const float (&factor)[2], const float (&m)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exact_scale[r] = factor[r];
      exact_shift[r] = P_OFFSET - m[r];
      direct_scale[r] = factor[r] * (8 * CODE);
      direct_shift[r] = fmaf(m[r], -8 * CODE, (8 * (P_OFFSET + 7) - CODE_ROUND) * CODE);
    }
  }

  // Two codes, as the low bytes of two halves.
  __device__ uint32_t direct(float a, float b, int r) const {
    return ptx::half2_relu(fmaf(a, direct_scale[r], direct_shift[r]), fmaf(b, direct_scale[r], direct_shift[r]));
  }

  __device__ float exact(float a, int r) const { return ptx::exp2_approx(fmaf(a, exact_scale[r], exact_shift[r])); }

  // Four codes of row r from the GROUP-th 16 keys: with the key order of quantized V an operand register of P * V.
  template <int GROUP, int N>
  __device__ uint32_t codes(const float (&s)[N], int r) const {
    const float a = s[8 * GROUP + 2 * r], b = s[8 * GROUP + 2 * r + 1], c = s[8 * GROUP + 4 + 2 * r], d = s[8 * GROUP + 5 + 2 * r];
    if constexpr (GROUP % 4 < EXACT)
      return ptx::e4m3x4(exact(a, r), exact(b, r), exact(c, r), exact(d, r));
    else
      return __byte_perm(direct(a, b, r), direct(c, d, r), 0x6420);
  }
};

// Scores times what differs by key or is negative, for calls that have such; leaves `factor` at 1.
template <int N>
__device__ void scale_scores(const Params& p, const float* k_scale, int block, float (&factor)[2], float (&s)[N], Fragment f) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int key = block * N * 2 + i / 4 * 8 + f.column + i % 2;
    if (p.k_group == 1 && key < p.kv_length) s[i] *= k_scale[key * p.k_scale_strides[2]];
    s[i] *= factor[i / 2 % 2];
  }
  factor[0] = factor[1] = 1.0f;
}

template <int EXACT>
struct Softmax {
  float m[2] = {-INFINITE, -INFINITE};  // running maxima
  bool positive = false;                // none of the warp's is negative

  // From scores over `factor` to an operand `p` of P * V, and to what sums so far are to be multiplied with. `calm`: all scores of
  // the warp are below LARGEST_SCORE.
  template <int N>
  __device__ void step(float (&s)[N], float (&factor)[2], bool calm, uint32_t (&p)[N / 16][4], float (&alpha)[2]) {
    if (!calm) {
      // a rounded maximum and unrounded products would differ by more than codes can take
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] *= factor[i / 2 % 2];
      factor[0] = factor[1] = 1.0f;
    }
    float largest[2];
    if (positive) {
      // floats from zero up compare as integers, of which an instruction takes two new ones
#pragma unroll
      for (int r = 0; r < 2; ++r) largest[r] = __int_as_float(largest_of(s, r));
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = s[2 * r];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) largest[r] = fmaxf(largest[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      }
    }
    float origin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      const float m_new = fmaxf(m[r], largest[r] * factor[r]);
      origin[r] = m_new == -INFINITE ? 0.0f : m_new;  // nothing visible so far: -inf - -inf would be NaN
      alpha[r] = ptx::exp2_approx(m[r] - origin[r]);
      m[r] = m_new;
    }
    const Probabilities<EXACT> probabilities(factor, origin);
    operands(probabilities, s, p, std::make_integer_sequence<int, N / 8>());
    if (!positive) positive = __all_sync(~0u, min(m[0], m[1]) >= 0.0f);  // a maximum only grows
  }

 private:
  template <int N>
  __device__ static int largest_of(const float (&s)[N], int r) {
    const auto bits = [&](int i) { return __float_as_int(s[i + 2 * r]); };
    int a = max(bits(0), bits(1)), b = max(bits(4), bits(5));
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
      a = __vimax3_s32(a, bits(4 * j), bits(4 * j + 1));
      b = __vimax3_s32(b, bits(4 * j + 4), bits(4 * j + 5));
    }
    return max(a, b);
  }

  template <int N, int... T>
  __device__ static void operands(const Probabilities<EXACT>& probabilities, const float (&s)[N], uint32_t (&p)[N / 16][4],
                                  std::integer_sequence<int, T...>) {
    // operand registers of 32 keys: row 0 and row 1 of the first 16, then of the second
    ((p[T / 2][T % 2 * 2] = probabilities.template codes<T>(s, 0), p[T / 2][T % 2 * 2 + 1] = probabilities.template codes<T>(s, 1)), ...);
  }
};

}  // namespace fp8attn
