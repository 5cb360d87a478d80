// Online softmax in base 2 of a thread's two rows, its probabilities as e4m3.
#pragma once

#include <type_traits>
#include <utility>

#include "../ptx/convert.h"
#include "mask.h"
#include "schedule.h"

namespace fp8attn {

constexpr uint32_t FOUR_ONES = 0x38383838;  // e4m3

// Of a product of a number of Q and one of K.
template <bool INT8>
constexpr int LARGEST_PRODUCT = INT8 ? 128 * 128 : 448 * 448;

// A product of scales, kept where its product with any sum of codes is finite, and isn't NaN where that is -inf.
__device__ inline float score_factor(float product, bool either_sign) {
  return fmaxf(fminf(product, LARGEST_FACTOR), either_sign ? -LARGEST_FACTOR : 1 / LARGEST_FACTOR);
}

// P of a key block is relative to m, the largest score of that block, so that P is as large as it can be. The sums so
// far are multiplied by 2^(m - m_new), whether m grows or falls. This function is the lower bound of m_new: see
// reference.lowest.
__device__ inline float lowest(float m) { return fabsf(m) >= FALL ? m : m >= 0.0f ? 0.0f : -FALL; }

// Merges m and sum of a row with those of other keys, whose P are relative to `their_m`. Sets the factors by which the
// two outputs must be multiplied.
__device__ inline void merge_rows(float& m, float& sum, float their_m, float their_sum, float& mine, float& theirs) {
  const float m_new = fmaxf(m, their_m);
  mine = ptx::exp2_approx(m - m_new);
  theirs = ptx::exp2_approx(their_m - m_new);
  m = m_new;
  sum = fmaf(sum, mine, their_sum * theirs);
}

// Set m to m_new. Returns the factor by which the sums so far must be multiplied.
__device__ inline float become(float& m, float m_new) {
  const float alpha = ptx::exp2_approx(m - m_new);
  m = m_new;
  return alpha;
}

// The same of the largest of what a row's four threads have.
__device__ inline float follow(float& m, float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  return become(m, fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)));
}

// 8 (y + 7) is the e4m3 code of 2^y at integers y >= -6. Between integers it is up to 0.69 too high, because 1 + f
// stands for 2^f. A half whose value is code * 2^-24 is subnormal, and its bits are the code: one conversion rounds it,
// and clamps underflow to 0. The conversion doesn't saturate: y must stay below 8.8. The mean of the excess is
// subtracted, so that exact exponentials can mix in.
constexpr int LOG_OF_CODES = 3 - 24;  // of 8 * CODE

// A maximum from which scores are subtracted: 0 instead of that of no score.
__device__ inline float finite_or_zero(float m) { return m == -INFINITE ? 0.0f : m; }

// A row's 2^(s factor - m + 8).
struct ExactRow {
  float scale, shift;

  __device__ ExactRow(float factor, float m) : scale(factor), shift(P_OFFSET - m) {}

  __device__ float operator()(float s) const { return ptx::exp2_approx(fmaf(s, scale, shift)); }

  __device__ uint32_t codes(float a, float b, float c, float d) const { return ptx::e4m3x4((*this)(a), (*this)(b), (*this)(c), (*this)(d)); }
};

// The e4m3 codes of four numbers that are codes times CODE, rounded to nearest even.
__device__ inline uint32_t direct_codes(float a, float b, float c, float d) { return __byte_perm(ptx::half2_relu(a, b), ptx::half2_relu(c, d), 0x6420); }

// The same by codes.
struct DirectRow {
  float scale, shift;

  __device__ DirectRow(float factor, float m) : scale(factor * (8 * CODE)), shift(fmaf(m, -8 * CODE, (8 * (P_OFFSET + 7) - CODE_ROUND) * CODE)) {}

  __device__ float operator()(float s) const { return fmaf(s, scale, shift); }

  __device__ uint32_t codes(float a, float b, float c, float d) const { return direct_codes((*this)(a), (*this)(b), (*this)(c), (*this)(d)); }
};

// Scores times the scales of single keys.
template <int N>
__device__ void scale_by_key(const Params& p, const Tile& tile, int start, float (&s)[N], Fragment f) {
  int64_t step = p.k_scale_strides[2];
  asm volatile("" : "+l"(step));  // or all addresses are made before the loop over blocks, and spilled
  const float* at = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1] + (start + f.column) * step;
  const int keys = p.kv_length - start - f.column;
#pragma unroll
  for (int j = 0; j < N / 4; ++j, at += 8 * step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * j + i >= keys) continue;
      const float k_scale = at[i * step];
      s[4 * j + i] *= k_scale;
      s[4 * j + 2 + i] *= k_scale;
    }
  }
}

// Scores times the factors of their rows, which become 1.
template <int N>
__device__ void scale_by_row(float (&factor)[2], float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] *= factor[i / 2 % 2];
  factor[0] = factor[1] = 1.0f;
}

// Whether a row of the warp has so large an m that float32 rounds off P's offset next to it, or that a score from an
// unrounded product differs from m, which is a rounded product.
__device__ inline bool any_large(const float (&m)[2]) { return __any_sync(~0u, fmaxf(fabsf(m[0]), fabsf(m[1])) >= LARGEST_SCORE); }

// Multiplies scores by the factors of their rows and subtracts m, the largest product. A score that overflows because a
// mask added a low finite number counts as LOWEST_SCORE. The score of a key that the mask hides stays -inf. The factors
// become 1. `origin`, which is still to be subtracted, becomes 0.
template <int N>
__device__ void make_relative(float (&factor)[2], const float (&m)[2], float (&origin)[2], float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (s[i] != -INFINITE) s[i] = ptx::max_nan(__fmul_rn(s[i], factor[i / 2 % 2]), LOWEST_SCORE) - m[i / 2 % 2];
  factor[0] = factor[1] = 1.0f;
  origin[0] = origin[1] = 0.0f;
}

// The sum of P of a thread's row r. It stands in the last channels of O, whose V are ones. If O has two parts, these
// are the last channels of the second part.
template <typename First, typename Second>
__device__ auto& row_sum(First& o, Second& o_second, int r) {
  constexpr int first = std::extent_v<First>, second = std::extent_v<Second>;
  if constexpr (second > 1)
    return o_second[second - 4 + 2 * r];
  else
    return o[first - 4 + 2 * r];
}

// Sums of codes, over their factors, are LARGEST at most, or any if that is 0.
template <int EXACT, int LARGEST>
struct Softmax {
  float m[2] = {NOTHING, NOTHING};  // what P is relative to

  // Whether the next step may take the maximum of the scores' bits as integers: each m of the warp may fall to 0, and
  // the scores are in range. As signed integers, floats of 0 and more compare like floats. As unsigned integers,
  // negative floats are above them.
  __device__ bool prepare(const float (&factor)[2]) const { return __all_sync(~0u, is_low() & (LARGEST == 0 || in_range(factor))); }

  // Turns sums, which are scores divided by `factor`, into an operand `p` of P * V. Sets `alpha`, by which the sums so
  // far must be multiplied. Factors are at least 1 / LARGEST_FACTOR if LARGEST isn't 0.
  template <int N>
  __device__ void step(float (&s)[N], float (&factor)[2], bool int_max_ok, uint32_t (&p)[N / 16][4], float (&alpha)[2]) {
    float m_new[2];
    if (int_max_ok) {
      // an instruction takes two new integers, but one new float
#pragma unroll
      for (int r = 0; r < 2; ++r) m_new[r] = __int_as_float(largest_bits<true>(s, r)) * factor[r];
    } else {
      if (LARGEST > 0 && !__all_sync(~0u, in_range(factor))) {
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = fminf(factor[r], LARGEST_FACTOR);
        scale_by_row(factor, s);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = s[2 * r];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m_new[r] = fmaxf(largest * factor[r], lowest(m[r]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) alpha[r] = follow(m[r], m_new[r]);
    float origin[2] = {m[0], m[1]};
    if (LARGEST == 0 && any_large(m)) make_relative(factor, m, origin, s);
    const ExactRow exact[2] = {{factor[0], origin[0]}, {factor[1], origin[1]}};
    const DirectRow direct[2] = {{factor[0], origin[0]}, {factor[1], origin[1]}};
    write_codes(exact, direct, s, p, std::make_integer_sequence<int, N / 8>());
  }

  // Of a thread's row r, compared as integers; OR_ZERO: 0 if all are negative.
  template <bool OR_ZERO, int N>
  __device__ static int largest_bits(const float (&s)[N], int r) {
    const auto bits = [&](int i) { return __float_as_int(s[i + 2 * r]); };
    int a = OR_ZERO ? __vimax3_s32(bits(0), bits(1), 0) : max(bits(0), bits(1)), b = max(bits(4), bits(5));
#pragma unroll
    for (int j = 2; j < N / 4; j += 2) {
      a = __vimax3_s32(a, bits(4 * j), bits(4 * j + 1));
      b = __vimax3_s32(b, bits(4 * j + 4), bits(4 * j + 5));
    }
    return max(a, b);
  }

  // Writes codes of the groups T, of 16 keys each, into operand registers of P * V. Of eight groups, EXACT are exact,
  // as far apart as possible. With the key order of quantized V, a thread's scores of one row and group are the bytes
  // of one register.
  template <typename Exact, typename Direct, int N, int... T>
  __device__ static void write_codes(const Exact (&exact)[2], const Direct (&direct)[2], const float (&s)[N], uint32_t (&p)[N / 16][4],
                                     std::integer_sequence<int, T...>) {
    const auto write = [&](int t, const auto& rows) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        p[t / 2][t % 2 * 2 + r] = rows[r].codes(s[8 * t + 2 * r], s[8 * t + 2 * r + 1], s[8 * t + 4 + 2 * r], s[8 * t + 5 + 2 * r]);
    };
    ((T * EXACT % 8 < EXACT ? write(T, exact) : write(T, direct)), ...);
  }

 protected:
  // Whether each of the thread's m may fall to 0.
  __device__ bool is_low() const { return max(__float_as_uint(m[0]), __float_as_uint(m[1])) < __float_as_uint(FALL); }

  // Whether scores are below LARGEST_SCORE. Otherwise their sums must be multiplied first: a rounded maximum and
  // unrounded products would differ by more than codes can hold.
  __device__ static bool in_range(const float (&factor)[2]) { return fmaxf(factor[0], factor[1]) < LARGEST_SCORE / LARGEST; }
};

}  // namespace fp8attn
