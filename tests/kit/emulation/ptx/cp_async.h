// cp.async. Copies happen as late as allowed. Until then the destination holds NaN.
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

inline void prefetch_l2(const void*) {}

inline void copy_later(void* to, const void* from, int bytes, int count) {
  if (uintptr_t(to) % bytes != 0 || (count > 0 && uintptr_t(from) % bytes != 0) || count < 0 || count > bytes) abort();
  memset(to, 0xFF, bytes);
  cta::current->copies.open.push_back({to, from, bytes, count});
}

inline void cp_async(float* to, const float* from, bool exists) { copy_later(to, from, 4, exists ? 4 : 0); }

inline void cp_async_16(void* to, const void* from, bool exists) { copy_later(to, from, 16, exists ? 16 : 0); }

inline void cp_async_16(void* to, const void* from) { cp_async_16(to, from, true); }

inline void cp_async_8(void* to, const void* from, bool exists) { copy_later(to, from, 8, exists ? 8 : 0); }

inline void cp_async_commit() { cta::current->copies.commit(); }

template <int PENDING>
inline void cp_async_wait_but() {
  auto& groups = cta::current->copies.committed;
  for (; int(groups.size()) > PENDING; groups.erase(groups.begin())) {
    for (const cta::Copy& copy : groups.front()) {
      memset(copy.to, 0, copy.bytes);
      memcpy(copy.to, copy.from, copy.count);
    }
  }
}

inline void cp_async_wait() {
  cp_async_commit();
  cp_async_wait_but<0>();
}

inline void cp_async_arrive(uint64_t* barrier) {
  cp_async_wait();
  mbarrier_arrive(barrier);
}

}  // namespace fp8attn::ptx
