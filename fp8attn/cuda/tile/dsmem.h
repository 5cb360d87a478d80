// Stores into the shared memory of other CTAs of the cluster (DSMEM).
#pragma once

#include "../ptx/cluster.h"

namespace fp8attn {

// Stores 16 bytes into the CTA with this rank. `to` and `barrier` are addresses in this CTA, for the same locations in
// the destination CTA.
__device__ inline void dsmem_store(int rank, void* to, uint4 x, uint64_t* barrier) {
  ptx::store_async(ptx::address_in(rank, ptx::shared_address(to)), x, ptx::address_in(rank, ptx::shared_address(barrier)));
}

}  // namespace fp8attn
