// Runs a kernel, one cluster after another: the scheduler of the threads' fibers, which run.cpp defines.
#pragma once

#include "cta.h"

namespace cta {

constexpr long PATIENCE = 1 << 18;  // more rounds count as a deadlock

// Shared memory holds at first, by turns, large numbers, NaN and -1, or numbers whose sums are finite. Only NaN and -1
// where a broken kernel takes the others for indices, and would end the process.
extern bool may_hold_large_numbers;

// Queues a write of the grid before, which happens while the kernel runs: bytes are copied, and `ready` is incremented.
// The last one that is queued happens first.
void bring(void* to, const void* from, int64_t bytes, int* ready);

// A kernel with its parameters.
struct Kernel {
  void (*run)(const Kernel&);
  void (*of)();
  const void* params;
};

// Returns whether all clusters ended, each within `patience` rounds. backwards: from the last one on.
bool run(const Kernel& kernel, bool backwards, int ctas, int size, int cluster_size, long patience);

// Runs `ctas` CTAs of `size` threads, one cluster after another, or from the last one on (BACKWARDS). Returns whether all
// clusters ended, each within `patience` rounds.
template <bool BACKWARDS = false, typename Params>
bool run(void (*of)(const Params), const Params& p, int ctas, int size, int cluster_size = 1, long patience = PATIENCE) {
  const auto call = [](const Kernel& kernel) { reinterpret_cast<void (*)(const Params)>(kernel.of)(*static_cast<const Params*>(kernel.params)); };
  return run({call, reinterpret_cast<void (*)()>(of), &p}, BACKWARDS, ctas, size, cluster_size, patience);
}

}  // namespace cta
