// Copies to shared memory that nobody waits for. PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

// Four bytes, or zeros if not `exists`.
__device__ inline void cp_async(float* to, const float* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// Sixteen bytes, or zeros if not `exists`; both addresses are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Eight bytes, or zeros if not `exists`; both addresses are multiples of 8.
__device__ inline void cp_async_8(void* to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 8 : 0) : "memory");
}

// This thread's copies since the last commit become a group.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns once all groups of this thread but the last PENDING are done.
template <int PENDING>
__device__ inline void cp_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrives at a barrier, as one of its expected arrivals, once this thread's copies are done.
__device__ inline void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Returns once this thread's copies are done.
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace fp8attn::ptx
