// Barriers in shared memory: arrivals expected and pending, bytes to come, and the parity of the phase.
#pragma once

#include "../cta.h"

namespace fp8attn {
extern uint8_t bytes[];
}

namespace fp8attn::ptx {

struct Barrier {
  uint16_t expected, pending;
  int32_t bytes : 31;
  uint32_t parity : 1;

  void go_on() {
    if (pending == 0 && bytes == 0) pending = expected, parity ^= 1;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

inline Barrier& barrier_at(uint64_t* barrier) { return *reinterpret_cast<Barrier*>(barrier); }

inline uint32_t shared_address(const void* pointer) { return static_cast<const uint8_t*>(pointer) - fp8attn::bytes; }

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { barrier_at(barrier) = {uint16_t(arrivals), uint16_t(arrivals), 0, 0}; }

inline void fence_barrier_init() {}

inline void fence_proxy_async_all() {}

inline void mbarrier_arrive(uint64_t* barrier) {
  --barrier_at(barrier).pending;
  barrier_at(barrier).go_on();
}

inline void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_complete(uint64_t* barrier, uint32_t bytes) {
  barrier_at(barrier).bytes -= bytes;
  barrier_at(barrier).go_on();
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (barrier_at(barrier).parity == parity) cta::yield();
}

}  // namespace fp8attn::ptx
