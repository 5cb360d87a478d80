// Conversions to e4m3. PTX ISA, "Data Movement and Conversion Instructions: cvt"; "Floating Point Instructions: ex2".
#pragma once

#include <cstdint>

namespace fp8attn::ptx {

// 2^x, flushing subnormals; 2^-inf is 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

// Halves low to high: a and b rounded to nearest even, negative numbers to 0, NaN to 0x7FFF.
__device__ inline uint32_t half2_relu(float a, float b) {
  uint32_t packed;
  asm("cvt.rn.relu.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(a), "f"(b));
  return packed;
}

}  // namespace fp8attn::ptx
