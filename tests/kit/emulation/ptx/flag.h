// Flags in global memory. CTAs run one after another, so a CTA that waits for a later one never ends.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline void store_release(int* flag, int value) { *flag = value; }

inline void add_release(int* flag, int more) { *flag += more; }

inline int load_acquire(const int* flag) {
  cta::yield();
  return *flag;
}

}  // namespace fp8attn::ptx
