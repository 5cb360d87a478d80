// CTAs that reach each other's shared memory. PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster"; "Data Movement
// and Conversion Instructions: mapa", "st.async", "cp.async.bulk".
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Orders what threads of the cluster wrote before it and read after it.
__device__ inline void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

// The same in halves, without the order.
__device__ inline void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Where the CTA of that rank has what lies here at `address`.
__device__ inline uint32_t address_in(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Sixteen bytes to a CTA of the cluster, whose barrier hears of them.
__device__ inline void store_async(uint32_t to, uint4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w), "r"(barrier)
               : "memory");
}

// Bytes in multiples of 16 from this CTA's shared memory to another's, whose barrier hears of them.
__device__ inline void bulk_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

}  // namespace fp8attn::ptx
