// cp.async. Copies happen as late as allowed. Until then the destination holds NaN.
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

inline void prefetch_l2(const void*) {}

void copy_later(void* to, const void* from, int bytes, int count);
void cp_async_commit();
void copy_but(int pending);

inline void cp_async(float* to, const float* from, bool exists) { copy_later(to, from, 4, exists ? 4 : 0); }

inline void cp_async_16(void* to, const void* from, bool exists) { copy_later(to, from, 16, exists ? 16 : 0); }

inline void cp_async_16(void* to, const void* from) { cp_async_16(to, from, true); }

inline void cp_async_8(void* to, const void* from, bool exists) { copy_later(to, from, 8, exists ? 8 : 0); }

template <int PENDING>
inline void cp_async_wait_but() {
  copy_but(PENDING);
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
