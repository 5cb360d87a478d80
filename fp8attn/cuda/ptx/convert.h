// Conversions to and from e4m3. PTX ISA, "Data Movement and Conversion Instructions: cvt"; "Floating Point
// Instructions: ex2".
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace fp8attn::ptx {

// 2^x. Subnormals are flushed to zero. 2^-inf is 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline uint32_t pair(uint16_t low, uint16_t high) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

#if __CUDA_ARCH__ >= 890 || !defined(__CUDA_ARCH__)

// The e4m3 codes of a, b, c and d, from the lowest byte to the highest.
__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// The e4m3 codes of two halves.
__device__ inline uint16_t e4m3x2(__half2 x) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(reinterpret_cast<const uint32_t&>(x)));
  return packed;
}

// The exact values of two e4m3 codes.
__device__ inline __half2 halves_of_e4m3x2(uint16_t codes) {
  __half2_raw halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(reinterpret_cast<uint32_t&>(halves)) : "h"(codes));
  return halves;
}

// The exact values of four e4m3 codes: those of the two lower bytes in `low`, of the two upper bytes in `high`.
__device__ inline void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

#else  // before sm_89, which introduced these instructions

__device__ inline uint32_t e4m3(float x) {
  if (x != x) return 0x7F;
  // Scaled by 2^-120, a float has e4m3's exponent field, and is subnormal where the e4m3 number is. The code is its
  // bits from bit 20 on.
  const uint32_t bits = __float_as_uint(fminf(fabsf(x), 448.0f) * 0x1p-120f);
  return (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20 | (signbit(x) ? 0x80 : 0);
}

__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) { return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24; }

// Two halves from two e4m3 codes. Each code is the upper byte of 16 bits.
__device__ inline uint32_t halves_of_upper_bytes(uint32_t codes) {
  uint32_t halves = (codes & 0x80008000) | (codes >> 1 & 0x3F803F80);
  halves |= (halves + 0x00800080) & 0x40004000;  // only e4m3's NaN carries into the highest exponent bit
  // 0x5C00 is 2^8: the exponent biases of half and e4m3 differ by 8
  const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(halves), __half2half2(__ushort_as_half(0x5C00)));
  return reinterpret_cast<const uint32_t&>(scaled);
}

__device__ inline void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = halves_of_upper_bytes(__byte_perm(codes, 0, 0x1404));
  high = halves_of_upper_bytes(__byte_perm(codes, 0, 0x3424));
}

__device__ inline uint16_t e4m3x2(__half2 x) { return e4m3(__low2float(x)) | e4m3(__high2float(x)) << 8; }

__device__ inline __half2 halves_of_e4m3x2(uint16_t codes) {
  const uint32_t halves = halves_of_upper_bytes(__byte_perm(codes, 0, 0x1404));
  return reinterpret_cast<const __half2&>(halves);
}

#endif

// a (lower half) and b (upper half), rounded to nearest even.
__device__ inline uint32_t half2(float a, float b) {
  const __half2 halves = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(halves);
}

// The same, but negative numbers become 0, and NaN becomes 0x7FFF.
__device__ inline uint32_t half2_relu(float a, float b) {
  uint32_t packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(a), "f"(b));
  return packed;
}

}  // namespace fp8attn::ptx
