// PTX ISA, "Floating Point Instructions: fma", "Half Precision Floating Point Instructions: fma".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fp8attn::ptx {

// a * b + c, clamped to 0 ... 1. NaN becomes 0.
__device__ inline float fma_saturated(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// Of two halves each. Subnormal numbers are not flushed.
__device__ inline uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The same, but negative results become 0. NaN becomes 0x7FFF.
__device__ inline uint32_t fma_half2_relu(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 0 * x + sum, of two T each, bfloat16 or half: NaN where x is not finite, or the sum is NaN.
template <typename T>
__device__ uint32_t add_nothing(uint32_t x, uint32_t sum) {
  if constexpr (std::is_same_v<T, __half>) return fma_half2(x, 0, sum);
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(0), "r"(sum));
  return d;
}

// x, rounded to a half, in both halves.
__device__ inline uint32_t half_twice(float x) {
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(two) : "f"(x));
  return two;
}

// 1 / x, with a relative error of 2^-23.
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, rounded to nearest, for x from 2^-126 to below 2^126: what __frcp_rn does where it needn't branch.
__device__ inline float reciprocal(float x) {
  const float y = reciprocal_approx(x);
  return fmaf(y, -fmaf(y, x, -1.0f), y);
}

}  // namespace fp8attn::ptx
