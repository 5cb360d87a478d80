// Matrix products of a warpgroup (wgmma). PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "operand.h"

namespace fp8attn::ptx {

// run<ADD>(d, a, b): d (64, N) = a (64, 32) * b (32, N), or += if ADD. e4m3 operands, float32 accumulators.
template <int N>
struct Wgmma;

// The same with int8 operands and int32 accumulators. Exact.
template <int N>
struct WgmmaInt8;

// The same with unsigned 8-bit operands.
template <int N>
struct WgmmaUint8;

// The same with operands T, bfloat16 or half: a (64, 16), b (16, N). run_transposed: a in registers, and b with rows of
// channels, as wgmma_descriptor_transposed describes it.
template <typename T, int N>
struct WgmmaHalf;

#include "wgmma_shapes.h"

// Required before the first wgmma after its registers were written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are incomplete.
template <int PENDING>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Placed after a wait: keeps the compiler from moving uses of the accumulators above that wait.
template <int N>
__device__ inline void wgmma_touch(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ inline void wgmma_touch(int32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

}  // namespace fp8attn::ptx
