// The softmax of softmax.h from int8's sums of products as the tensor core leaves them: an integer from 0 up, below 2^23, has the bits of the subnormal
// float that is 2^-149 times as large, and an FFMA takes it for that at no price. Sums don't become negative because they start high enough.
#pragma once

#include "softmax.h"

namespace fp8attn {

constexpr int START_STEP = 32 * 255 * 255;  // what a product of 32 times 255 and 255 adds

// Where sums of DIM products start. -128 is no number, but a mark.
template <int DIM>
constexpr int START = (128 * 127 * DIM + START_STEP - 1) / START_STEP * START_STEP;
static_assert(START<128> == START_STEP && START<256> == 2 * START_STEP && START<256> + 128 * 128 * 256 < 1 << 23);

// Between these a factor times a power of two, and times START, is a float that a code wouldn't know from the number that it stands for.
constexpr float STEADY_MOST = 0x1p-6f, STEADY_LEAST = 0x1p-24f;

// x that is normal, times 2^n, which need not be a float, if the product is normal, too.
__device__ inline float times_power_of_2(float x, int n) { return __int_as_float(__float_as_int(x) + (n << 23)); }

// Rows of subnormals; `m` is what START adds higher.
struct SubnormalExactRow : ExactRow {
  __device__ SubnormalExactRow(float factor, float m) : ExactRow(times_power_of_2(factor, 149 - 127), m) {}

  __device__ float operator()(float s) const { return ExactRow::operator()(s * 0x1p127f); }

  __device__ uint32_t codes(float a, float b, float c, float d) const { return ptx::e4m3x4((*this)(a), (*this)(b), (*this)(c), (*this)(d)); }
};

struct SubnormalDirectRow : DirectRow {
  __device__ SubnormalDirectRow(float factor, float m) : DirectRow(factor, m) { scale = times_power_of_2(factor, 149 + LOG_OF_CODES); }
};

template <int N>
__device__ void subnormals_of(const int32_t (&sums)[N], float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __int_as_float(sums[i]);
}

// Scores of sums that start at `start`.
template <int N>
__device__ void convert(const int32_t (&sums)[N], int start, float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = float(sums[i] - start);
}

// BEGIN: where sums start, or 0: they may be negative, and are never steady.
template <int EXACT, int LARGEST, int BEGIN>
struct SubnormalSoftmax : Softmax<EXACT, LARGEST> {
  using Softmax<EXACT, LARGEST>::m;

  // Whether the next step is of sums; or as of Softmax, where none is.
  __device__ bool prepare(const float (&factor)[2]) const {
    if (BEGIN == 0) return Softmax<EXACT, LARGEST>::prepare(factor);
    return __all_sync(~0u, max(factor[0], factor[1]) < STEADY_MOST & min(factor[0], factor[1]) >= STEADY_LEAST);
  }

  // As a step, from subnormals; those of hidden keys are -inf.
  template <int N>
  __device__ void step_of_sums(const float (&s)[N], const float (&factor)[2], uint32_t (&p)[N / 16][4], float (&alpha)[2]) {
    float m_new[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int top = this->template largest_bits<false>(s, r);  // -inf is less than any sum here, too
      m_new[r] = fmaxf(top < 0 ? -INFINITE : float(top - BEGIN) * factor[r], lowest(m[r]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) alpha[r] = follow(m[r], m_new[r]);
    const float above[2] = {fmaf(BEGIN, factor[0], m[0]), fmaf(BEGIN, factor[1], m[1])};
    const SubnormalExactRow exact[2] = {{factor[0], above[0]}, {factor[1], above[1]}};
    const SubnormalDirectRow direct[2] = {{factor[0], above[0]}, {factor[1], above[1]}};
    this->write_codes(exact, direct, s, p, std::make_integer_sequence<int, N / 8>());
  }
};

}  // namespace fp8attn
