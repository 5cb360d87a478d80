// Register reallocation and named barriers of a warpgroup. PTX ISA, "Miscellaneous Instructions:
// setmaxnreg"; "barrier".
#pragma once

namespace fp8attn::ptx {

template <int REGISTERS>
__device__ inline void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ inline void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barrier of whole warps. `id` is 1 to 15, and differs between groups of warps.
template <int THREADS>
__device__ inline void threads_sync(int id) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Barrier of a warpgroup.
__device__ inline void warpgroup_sync(int id) { threads_sync<128>(id); }

}  // namespace fp8attn::ptx
