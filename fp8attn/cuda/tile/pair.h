// Two bfloat16 or half numbers in a 32-bit word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/convert.h"

namespace fp8attn {

template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr uint32_t infinities = 0x7F807F80;

  __device__ static float2 floats(uint32_t word) { return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000)}; }
};

template <>
struct Pair<__half> {
  using type = __half2;
  static constexpr uint32_t infinities = 0x7C007C00;

  __device__ static float2 floats(uint32_t word) { return __half22float2(reinterpret_cast<const __half2&>(word)); }
};

// a and b as elements of T, a in the lower half.
template <typename T>
__device__ uint32_t word_of(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    return ptx::half2(a, b);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(two);
  }
}

// What a number that isn't finite carries out of its exponent: SIGN_BITS of this sum. May be collected over many words.
template <typename T>
__device__ uint32_t exponent_carries(uint32_t word) {
  constexpr uint32_t infinities = Pair<T>::infinities, least_exponents = infinities & ~(infinities << 1);
  static_assert(least_exponents == 0x00800080 || least_exponents == 0x04000400);
  return (word & infinities) + least_exponents;
}

constexpr uint32_t SIGN_BITS = 0x80008000;

// All bits of the numbers that are not finite; zeros elsewhere.
template <typename T>
__device__ uint32_t not_finite(uint32_t word) {
  return __vcmpeq2(word & Pair<T>::infinities, Pair<T>::infinities);
}

template <typename T>
__device__ uint2 not_finite(uint2 words) {
  return {not_finite<T>(words.x), not_finite<T>(words.y)};
}

template <typename T>
__device__ uint4 not_finite(uint4 words) {
  return {not_finite<T>(words.x), not_finite<T>(words.y), not_finite<T>(words.z), not_finite<T>(words.w)};
}

__device__ inline uint2 operator|(uint2 a, uint2 b) { return {a.x | b.x, a.y | b.y}; }
__device__ inline uint4 operator|(uint4 a, uint4 b) { return {a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w}; }

// Words without some bits.
__device__ inline uint2 without(uint2 words, uint2 bits) { return {words.x & ~bits.x, words.y & ~bits.y}; }
__device__ inline uint4 without(uint4 words, uint4 bits) { return {words.x & ~bits.x, words.y & ~bits.y, words.z & ~bits.z, words.w & ~bits.w}; }

// f of two pairs of numbers.
template <typename T, typename F>
__device__ uint32_t of_pairs(uint32_t a, uint32_t b, F&& f) {
  using Two = typename Pair<T>::type;
  const Two x = f(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
  return reinterpret_cast<const uint32_t&>(x);
}

template <typename T>
__device__ uint32_t least(uint32_t a, uint32_t b) {
  return of_pairs<T>(a, b, [](auto x, auto y) { return __hmin2(x, y); });
}

template <typename T>
__device__ uint32_t most(uint32_t a, uint32_t b) {
  return of_pairs<T>(a, b, [](auto x, auto y) { return __hmax2(x, y); });
}

// The same, but NaN if either is.
template <typename T>
__device__ uint32_t least_or_nan(uint32_t a, uint32_t b) {
  return of_pairs<T>(a, b, [](auto x, auto y) { return __hmin2_nan(x, y); });
}

template <typename T>
__device__ uint32_t most_or_nan(uint32_t a, uint32_t b) {
  return of_pairs<T>(a, b, [](auto x, auto y) { return __hmax2_nan(x, y); });
}

// The same of a and the magnitudes of b, as halves.
__device__ inline uint32_t most_magnitude(uint32_t a, uint32_t b) {
  return of_pairs<__half>(a, b, [](auto x, auto y) { return __hmax2_nan(x, __habs2(y)); });
}

// Non-finite numbers become NaN.
template <typename T, typename Words>
__device__ Words nan_where_nonfinite(Words words) {
  return not_finite<T>(words) | words;
}

}  // namespace fp8attn
