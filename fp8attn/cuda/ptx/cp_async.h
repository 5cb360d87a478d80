// Copies of single words to shared memory. PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

// Four bytes, or zeros if not `exists`.
__device__ inline void cp_async(float* to, const float* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// Returns once this thread's copies are done.
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace fp8attn::ptx
