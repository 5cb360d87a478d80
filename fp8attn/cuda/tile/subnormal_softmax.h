// The softmax of softmax.h from int8's sums of products as the tensor core leaves them. An integer from 0 up to below
// 2^23 has the bits of the subnormal float that is 2^-149 times as large, and an FFMA reads it as that float at no
// cost. Sums don't become negative, because they start high enough.
#pragma once

#include "softmax.h"

namespace fp8attn {

constexpr int START_STEP = 32 * 255 * 255;  // what a product of 32 times 255 and 255 adds

// Where sums of DIM products start. -128 is no number, but a mark.
template <int DIM>
constexpr int START = (128 * 127 * DIM + START_STEP - 1) / START_STEP * START_STEP;
static_assert(START<128> == START_STEP && START<256> == 2 * START_STEP && START<256> + 128 * 128 * 256 < 1 << 23);

// From here on a factor's product with START is a float that a code wouldn't know from the number that it stands for.
constexpr float SMALL_FACTOR = 0x1p-6f;

// x that is normal, times 2^n, which need not be a float, if the product is normal, too.
__device__ inline float times_power_of_2(float x, int n) { return __int_as_float(__float_as_int(x) + (n << 23)); }

// Rows of subnormals, relative to m, which is START times the factor more: `above`; or to another subnormal.
struct SubnormalExactRow : ExactRow {
  __device__ SubnormalExactRow(float factor, float above) : ExactRow(times_power_of_2(factor, 149 - 127), above) {}

  __device__ static SubnormalExactRow below(float peak, float factor) {
    SubnormalExactRow row(factor, 0.0f);
    row.shift = fmaf(peak * 0x1p127f, -row.scale, row.shift);
    return row;
  }

  __device__ float operator()(float s) const { return ExactRow::operator()(s * 0x1p127f); }

  __device__ uint32_t codes(float a, float b, float c, float d) const { return ptx::e4m3x4((*this)(a), (*this)(b), (*this)(c), (*this)(d)); }
};

struct SubnormalDirectRow : DirectRow {
  __device__ SubnormalDirectRow(float factor, float above) : DirectRow(factor, above) { scale = times_power_of_2(factor, 149 + LOG_OF_CODES); }

  __device__ static SubnormalDirectRow below(float peak, float factor) {
    SubnormalDirectRow row(factor, 0.0f);
    row.shift = fmaf(peak, -row.scale, row.shift);
    return row;
  }
};

// The largest of what a row's four threads have, or `least`.
__device__ inline int largest_of_row(int largest, int least) {
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  return __vimax3_s32(largest, __shfl_xor_sync(~0u, largest, 2), least);
}

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

// BEGIN: the accumulator's first value. With 0, sums may be negative, and no step works on the sums themselves.
template <int EXACT, int LARGEST, int BEGIN>
struct SubnormalSoftmax : Softmax<EXACT, LARGEST> {
  using Softmax<EXACT, LARGEST>::m;

  // Whether the next step may take the maximum of sums as integers: factors are small, and each m of the warp may fall
  // to 0. With BEGIN 0, as in Softmax.
  __device__ bool prepare(const float (&factor)[2]) const {
    if (BEGIN == 0) return Softmax<EXACT, LARGEST>::prepare(factor);
    return __all_sync(~0u, this->is_low() & factors_small(factor));
  }

  // Whether a step for which `prepare` is false may still work on the sums themselves.
  __device__ static bool takes_sums(const float (&factor)[2]) { return __all_sync(~0u, factors_small(factor)); }

  // As a step, from subnormals; those of hidden keys are -inf, as an integer less than any sum, too.
  template <int N>
  __device__ void step_of_sums(const float (&s)[N], const float (&factor)[2], bool int_max_ok, uint32_t (&p)[N / 16][4], float (&alpha)[2]) {
    const auto write = [&](const SubnormalExactRow(&exact)[2], const SubnormalDirectRow(&direct)[2]) {
      this->write_codes(exact, direct, s, p, std::make_integer_sequence<int, N / 8>());
    };
    if (int_max_ok) {  // codes are relative to a row's largest sum itself, and don't wait for the number that it is
      float peak[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int top = largest_of_row(this->template largest_bits<false>(s, r), BEGIN);
        peak[r] = __int_as_float(top);
        // __fmul_rn, so that the product is not fused with a difference and is the same in every instance
        alpha[r] = become(m[r], __fmul_rn(float(top - BEGIN), factor[r]));
      }
      write({SubnormalExactRow::below(peak[0], factor[0]), SubnormalExactRow::below(peak[1], factor[1])},
            {SubnormalDirectRow::below(peak[0], factor[0]), SubnormalDirectRow::below(peak[1], factor[1])});
    } else {
      float above[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int top = this->template largest_bits<false>(s, r);
        alpha[r] = follow(m[r], fmaxf(top < 0 ? -INFINITE : float(top - BEGIN) * factor[r], lowest(m[r])));
        above[r] = fmaf(BEGIN, factor[r], m[r]);
      }
      write({{factor[0], above[0]}, {factor[1], above[1]}}, {{factor[0], above[0]}, {factor[1], above[1]}});
    }
  }

 private:
  __device__ static bool factors_small(const float (&factor)[2]) { return fmaxf(factor[0], factor[1]) < SMALL_FACTOR; }
};

}  // namespace fp8attn
