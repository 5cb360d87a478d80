// Flags in global memory, which synchronise CTAs, and in shared memory, which synchronise warps. PTX ISA, "Memory
// Consistency Model".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

// Release store. A thread that reads `value` with load_acquire sees the earlier stores of this thread, and of threads
// that have synchronised with it at a barrier.
__device__ inline void store_release(int* flag, int value) { asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory"); }

__device__ inline int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// A flag in shared memory, of the threads of a CTA. It orders no other accesses: ptxas makes st.release a fence,
// which waits for the thread's loads.
__device__ inline void store_relaxed_cta(int* flag, int value) {
  asm volatile("st.relaxed.cta.shared::cta.b32 [%0], %1;" ::"r"(shared_address(flag)), "r"(value) : "memory");
}

__device__ inline int load_relaxed_cta(const int* flag) {
  int value;
  asm volatile("ld.relaxed.cta.shared::cta.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(flag)) : "memory");
  return value;
}

// Adds, and returns what was there. A release and an acquire: threads that add in turn see each other's earlier stores.
__device__ inline int add_acq_rel(int* flag, int more) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(flag), "r"(more) : "memory");
  return before;
}

// Release add, with the same guarantee.
__device__ inline void add_release(int* flag, int more) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(more) : "memory"); }

}  // namespace fp8attn::ptx
