// Conversions to e4m3 and from it. PTX ISA, "Data Movement and Conversion Instructions: cvt"; "Floating Point Instructions: ex2".
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace fp8attn::ptx {

// 2^x, flushing subnormals; 2^-inf is 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if __CUDA_ARCH__ >= 890 || !defined(__CUDA_ARCH__)

// Bytes low to high: e4m3 of a, b, c, d.
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

// The same of two halves.
__device__ inline uint16_t e4m3x2(__half2 x) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(reinterpret_cast<const uint32_t&>(x)));
  return packed;
}

// What the two e4m3 bytes of `codes` stand for, exact.
__device__ inline __half2 halves_of_e4m3x2(uint16_t codes) {
  __half2_raw halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(reinterpret_cast<uint32_t&>(halves)) : "h"(codes));
  return halves;
}

__device__ inline uint32_t pair(uint16_t low, uint16_t high) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

// Halves low to high of the e4m3 bytes of `codes`, exact.
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

#else  // the same without the instructions, which came with sm_89

__device__ inline uint32_t e4m3(float x) {
  if (x != x) return 0x7F;
  // times 2^-120, numbers that are subnormal in one are in the other, and the upper 8 of a float's bits after its sign are the code
  const uint32_t bits = __float_as_uint(fminf(fabsf(x), 448.0f) * 0x1p-120f);
  return (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20 | (signbit(x) ? 0x80 : 0);
}

__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) { return e4m3(a) | e4m3(b) << 8 | e4m3(c) << 16 | e4m3(d) << 24; }

// Two halves from e4m3 in the upper byte of each.
__device__ inline uint32_t halves_of_upper_bytes(uint32_t codes) {
  uint32_t halves = (codes & 0x80008000) | (codes >> 1 & 0x3F803F80);
  halves |= (halves + 0x00800080) & 0x40004000;  // only e4m3's NaN carries into the exponent's highest bit
  const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(halves), __half2half2(__ushort_as_half(0x5C00)));  // 2^8: the biases differ by 8
  return reinterpret_cast<const uint32_t&>(scaled);
}

__device__ inline void halves_of_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = halves_of_upper_bytes(__byte_perm(codes, 0, 0x1404));
  high = halves_of_upper_bytes(__byte_perm(codes, 0, 0x3424));
}

#endif

// Halves low to high: a and b rounded to nearest even.
__device__ inline uint32_t half2(float a, float b) {
  const __half2 halves = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t&>(halves);
}

// Halves low to high: a and b rounded to nearest even, negative numbers to 0, NaN to 0x7FFF.
__device__ inline uint32_t half2_relu(float a, float b) {
  uint32_t packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(a), "f"(b));
  return packed;
}

}  // namespace fp8attn::ptx
