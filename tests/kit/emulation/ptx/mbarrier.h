// Barriers in shared memory: expected and pending arrivals, pending transaction bytes, and the parity of the phase.
#pragma once

#include "cta.h"

namespace fp8attn {
// Shared memory, and its content as TMA and tensor cores see it: as of the last proxy fence.
extern uint8_t bytes[], seen_by_engines[];
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

// The last lane of a warp to arrive executes the fence for all of them. It does more than it must: it also publishes
// writes of other threads.
inline void fence_proxy_async() {
  if (cta::is_last_of_warp()) memcpy(cta::shared_memory(seen_by_engines), cta::shared_memory(bytes), cta::SHARED);
}

inline void fence_proxy_async_all() {}

// Writes by TMA are visible to threads and to engines.
inline void write_by_engine(void* to, const void* from, int64_t count) {
  memcpy(to, from, count);
  memcpy(seen_by_engines + (static_cast<uint8_t*>(to) - bytes), from, count);
}

inline void hide_from_all(void* to, int64_t count) {
  memset(to, 0xFF, count);
  memset(seen_by_engines + (static_cast<uint8_t*>(to) - bytes), 0xFF, count);
}

inline void mbarrier_arrive(uint64_t* barrier) {
  --barrier_at(barrier).pending;
  barrier_at(barrier).go_on();
  cta::perhaps_rest();
}

inline void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  barrier_at(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}

inline void mbarrier_complete(uint64_t* barrier, uint32_t bytes) {
  barrier_at(barrier).bytes -= bytes;
  barrier_at(barrier).go_on();
}

inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) { cta::wait_for_phase(barrier, parity); }

inline bool mbarrier_is_complete(uint64_t* barrier, uint32_t parity) { return barrier_at(barrier).parity != parity; }

}  // namespace fp8attn::ptx
