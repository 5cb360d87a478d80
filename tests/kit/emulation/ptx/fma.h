// Multiply-adds of fp8attn/cuda/ptx/fma.h. A product of halves and its sum are exact in double.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline float fma_saturated(float a, float b, float c) {
  const float d = std::fma(a, b, c);
  return d > 0.0f ? std::min(d, 1.0f) : 0.0f;
}

inline double half_of(uint32_t two, int i) {
  const uint16_t bits = two >> 16 * i;
  __half half;
  memcpy(&half, &bits, 2);
  return __half2float(half);
}

inline uint32_t fma_half2_of(uint32_t a, uint32_t b, uint32_t c, bool relu) {
  uint32_t both = 0;
  for (int i = 0; i < 2; ++i) {
    const double sum = half_of(a, i) * half_of(b, i) + half_of(c, i);
    const __half half = __float2half_rn(float(relu && sum < 0 ? 0 : sum));
    uint16_t bits;
    memcpy(&bits, &half, 2);
    both |= uint32_t(sum != sum ? 0x7FFF : bits) << 16 * i;
  }
  return both;
}

inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) { return fma_half2_of(a, b, c, false); }

inline uint32_t fma_half2_relu(uint32_t a, uint32_t b, uint32_t c) { return fma_half2_of(a, b, c, true); }

template <typename T>
uint32_t add_nothing(uint32_t x, uint32_t sum) {
  if constexpr (std::is_same_v<T, __half>) return fma_half2(x, 0, sum);
  uint32_t both = 0;
  for (int i = 0; i < 2; ++i) {
    const auto of = [&](uint32_t two) {
      const uint32_t bits = (two >> 16 * i & 0xFFFF) << 16;
      float one;
      memcpy(&one, &bits, 4);
      return one;
    };
    const float d = of(x) * 0.0f + of(sum);
    both |= uint32_t(d != d ? 0x7FFF : 0) << 16 * i;
  }
  return both;
}

inline uint32_t half_twice(float x) {
  const __half half = __float2half_rn(x);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits * 0x10001u;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float reciprocal(float x) { return 1.0f / x; }

}  // namespace fp8attn::ptx
