// Flags in global memory, which synchronise CTAs. PTX ISA, "Memory Consistency Model".
#pragma once

namespace fp8attn::ptx {

// Release store. A thread that reads `value` with load_acquire sees the earlier stores of this thread, and of threads
// that have synchronised with it at a barrier.
__device__ inline void store_release(int* flag, int value) { asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory"); }

__device__ inline int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Release add, with the same guarantee.
__device__ inline void add_release(int* flag, int more) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(more) : "memory"); }

}  // namespace fp8attn::ptx
