// Matrix products of a warpgroup. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <cstdint>

#include "operand.h"

namespace fp8attn::ptx {

// (64, N) accumulators, 32 of K in a step: run<ADD>(d, a, b).
template <int N>
struct Wgmma;

// The same of int8, exact.
template <int N>
struct WgmmaInt8;

// The same of unsigned ones.
template <int N>
struct WgmmaUint8;

#include "wgmma_shapes.h"

// Before the first wgmma after registers were written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns once at most PENDING committed groups are unfinished.
template <int PENDING>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of registers that a wgmma writes above the wait for it.
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
