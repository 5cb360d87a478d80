// Copies to shared memory that a thread has committed as four groups.
#pragma once

#include "../ptx/cp_async.h"

namespace fp8attn {

constexpr int COPIED_GROUPS = 4;

// Waits for this thread's copies of groups 0 ... n, once all groups are committed.
__device__ inline void wait_for_copies(int n) {
  static_assert(COPIED_GROUPS == 4);
  switch (n) {
    case 0:
      return ptx::cp_async_wait_but<3>();
    case 1:
      return ptx::cp_async_wait_but<2>();
    case 2:
      return ptx::cp_async_wait_but<1>();
    default:
      return ptx::cp_async_wait_but<0>();
  }
}

}  // namespace fp8attn
