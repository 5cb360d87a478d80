// Register reallocation, which has no effect here, and the named barriers of a warpgroup.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

template <int REGISTERS>
inline void registers_increase() {}

template <int REGISTERS>
inline void registers_decrease() {}

template <int THREADS>
inline void threads_sync(int id) {
  cta::barrier(id, THREADS);
}

inline void warpgroup_sync(int id) { threads_sync<128>(id); }

}  // namespace fp8attn::ptx
