// Asynchronous copies from global to shared memory. PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

// Brings the line of 128 bytes that has an address of global memory into L2, whatever it holds then.
__device__ inline void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Copies 4 bytes; writes zeros if `exists` is false.
__device__ inline void cp_async(float* to, const float* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// Copies 16 bytes; writes zeros if `exists` is false. Both addresses are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// Copies 16 bytes. Both addresses are multiples of 16.
__device__ inline void cp_async_16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Copies 8 bytes; writes zeros if `exists` is false. Both addresses are multiples of 8.
__device__ inline void cp_async_8(void* to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 8 : 0) : "memory");
}

// Commits this thread's copies since the last commit as a group.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups of this thread but the last PENDING are complete.
template <int PENDING>
__device__ inline void cp_async_wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrives at `barrier` once this thread's copies are complete. The arrival is one of those that the barrier expects.
__device__ inline void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until all copies of this thread are complete.
__device__ inline void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace fp8attn::ptx
