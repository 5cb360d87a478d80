// Thread block clusters. Shared memory of one CTA is cta::SHARED bytes after that of the CTA before.
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

inline uint32_t cluster_rank() { return cta::current->rank; }

inline void cluster_sync() {
  cta::cluster_arrive();
  cta::cluster_wait();
}

inline void cluster_arrive_relaxed() { cta::cluster_arrive(); }
inline void cluster_wait() { cta::cluster_wait(); }

inline uint32_t address_in(uint32_t rank, uint32_t address) {
  if (cta::cluster == 1 || int(rank) >= cta::cluster) abort();  // compute-sanitizer allows no DSMEM of one CTA
  return address % cta::SHARED + rank * cta::SHARED;
}

inline void store_async(uint32_t to, uint4 x, uint32_t barrier) {
  if (to % 16 != 0 || barrier % 8 != 0 || to / cta::SHARED != barrier / cta::SHARED) abort();
  memcpy(fp8attn::bytes + to, &x, 16);
  mbarrier_complete(reinterpret_cast<uint64_t*>(fp8attn::bytes + barrier), 16);
}

void bulk_copy(uint32_t to, uint32_t from, uint32_t count, uint32_t barrier);

}  // namespace fp8attn::ptx
