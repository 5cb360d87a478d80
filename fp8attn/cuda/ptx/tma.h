// TMA. PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include "mbarrier.h"

namespace fp8attn::ptx {

__device__ inline void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

__device__ inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(x), "r"(y)
               : "memory");
}

__device__ inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Copies contiguous bytes from global to shared memory. `bytes` and both addresses are multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier))
               : "memory");
}

// Prefetches a box into L2.
__device__ inline void tma_load_ahead(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y) : "memory");
}

__device__ inline void tma_load_ahead(const CUtensorMap& map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ inline void tma_store(const CUtensorMap& map, const void* from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(from)),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Copies contiguous bytes from shared to global memory. `bytes` and both addresses are multiples of 16.
__device__ inline void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// Commits this thread's stores since the last commit as a group.
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups of this thread but the last PENDING have read their shared memory.
template <int PENDING>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

}  // namespace fp8attn::ptx
