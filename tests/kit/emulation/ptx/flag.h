// Flags in global and in shared memory. CTAs run one after another, so a CTA that waits for a later one never ends.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline void store_release(int* flag, int value) { *flag = value; }

inline void add_release(int* flag, int more) { *flag += more; }

inline int add_acq_rel(int* flag, int more) {
  const int before = *flag;
  *flag += more;
  return before;
}

inline int load_acquire(const int* flag) {
  cta::yield();
  return *flag;
}

inline void store_relaxed_cta(int* counter, int value) { *counter = value; }

inline int load_relaxed_cta(const int* counter) { return load_acquire(counter); }

}  // namespace fp8attn::ptx
