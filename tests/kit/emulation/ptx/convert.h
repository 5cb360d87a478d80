// The conversions of fp8attn/cuda/ptx/convert.h, computed arithmetically.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }

// Rounds to nearest even. Saturates.
inline uint32_t e4m3(float x) {
  if (x != x) return 0x7F;
  const float magnitude = std::min(std::fabs(x), 448.0f);
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int steps = int(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return (std::signbit(x) ? 0x80 : 0) | (8 * (exponent + 6) + steps);  // 16 steps equal 8 steps of the next exponent
}

inline uint32_t e4m3x4(float a, float b, float c, float d) { return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24; }

inline uint16_t e4m3x2(__half2 x) { return e4m3(__low2float(x)) | e4m3(__high2float(x)) << 8; }

inline uint32_t pair(uint16_t low, uint16_t high) { return uint32_t(high) << 16 | low; }

inline __half2 halves_of_e4m3x2(uint16_t codes) { return __floats2half2_rn(e4m3_value(codes), e4m3_value(codes >> 8)); }

inline uint32_t half2(float a, float b) {
  const __half2 halves = __floats2half2_rn(a, b);
  uint32_t bits;
  memcpy(&bits, &halves, 4);
  return bits;
}

inline uint32_t half2_relu(float a, float b) { return half2(std::max(a, 0.0f), std::max(b, 0.0f)); }

inline void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = half2(e4m3_value(codes), e4m3_value(codes >> 8));
  high = half2(e4m3_value(codes >> 16), e4m3_value(codes >> 24));
}

}  // namespace fp8attn::ptx
