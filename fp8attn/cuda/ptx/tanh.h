// Hyperbolic tangent. PTX ISA, tanh: sm_75 and later.
#pragma once

namespace fp8attn::ptx {

// The largest relative error is 2^-11.
__device__ inline float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace fp8attn::ptx
