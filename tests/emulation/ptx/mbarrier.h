// Barriers in shared memory: arrivals expected and pending, and the parity of the phase.
#pragma once

#include "../cta.h"

namespace fp8attn::ptx {

struct Barrier {
  uint16_t expected, pending;
  uint32_t parity;
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { *reinterpret_cast<Barrier*>(barrier) = {uint16_t(arrivals), uint16_t(arrivals), 0}; }

inline void mbarrier_arrive(uint64_t* barrier) {
  Barrier& b = *reinterpret_cast<Barrier*>(barrier);
  if (--b.pending == 0) b = {b.expected, b.expected, b.parity ^ 1};
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (reinterpret_cast<volatile Barrier*>(barrier)->parity == parity) cta::yield();
}

}  // namespace fp8attn::ptx
