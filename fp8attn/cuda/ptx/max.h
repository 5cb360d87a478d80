// PTX ISA, "Floating Point Instructions: max".
#pragma once

namespace fp8attn::ptx {

// The larger number, or NaN if a or b is NaN.
__device__ inline float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace fp8attn::ptx
