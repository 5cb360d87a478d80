// Words by which CTAs wait for each other. CTAs run one after another, so who waits for a later one waits for ever.
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
