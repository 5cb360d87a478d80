// Thread block clusters and distributed shared memory (DSMEM). PTX ISA, "Parallel Synchronization and Communication
// Instructions: barrier.cluster"; "Data Movement and Conversion Instructions: mapa", "st.async", "cp.async.bulk".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Barrier of all threads of the cluster. Writes before it are visible to reads after it.
__device__ inline void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// The same barrier in two halves. The relaxed arrival orders no memory accesses.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Maps an address in this CTA's shared memory to the same location in the CTA with this rank.
__device__ inline uint32_t address_in(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Stores 16 bytes to DSMEM. They count as transaction bytes on `barrier`, an mbarrier in the destination CTA. Both
// addresses come from address_in.
__device__ inline void store_async(uint32_t to, uint4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "r"(barrier)
               : "memory");
}

// Copies `bytes`, a multiple of 16, from this CTA's shared memory to DSMEM. They count as transaction bytes on
// `barrier`, an mbarrier in the destination CTA.
__device__ inline void bulk_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

}  // namespace fp8attn::ptx
