// CTAs of a cluster: what one has, the others have a constant distance away.
#pragma once

#include "../cta.h"

namespace fp8attn::ptx {

inline uint32_t cluster_rank() { return cta::current->rank; }

inline void cluster_sync() { cta::cluster_barrier(); }

template <typename T>
T* in_cta(T* pointer, uint32_t rank) {
  if (int(rank) >= cta::cluster) abort();
  return reinterpret_cast<T*>(uintptr_t(pointer) + (int(rank) - cta::current->rank) * cta::SHARED);
}

}  // namespace fp8attn::ptx
