// Words in global memory by which CTAs wait for each other. PTX ISA, "Memory Consistency Model".
#pragma once

namespace fp8attn::ptx {

// What this thread, and those that it has met at a barrier, stored before is there for who sees `value`.
__device__ inline void store_release(int* flag, int value) { asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory"); }

__device__ inline int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Adds, likewise.
__device__ inline void add_release(int* flag, int more) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(more) : "memory"); }

}  // namespace fp8attn::ptx
