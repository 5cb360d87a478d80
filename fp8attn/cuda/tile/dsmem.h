// What CTAs of a cluster tell each other.
#pragma once

#include "../ptx/cluster.h"

namespace fp8attn {

// Sixteen bytes to a CTA of the cluster, to the same place.
__device__ inline void dsmem_store(int rank, void* to, uint4 x, uint64_t* barrier) {
  ptx::store_async(ptx::address_in(rank, ptx::shared_address(to)), x, ptx::address_in(rank, ptx::shared_address(barrier)));
}

}  // namespace fp8attn
