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

// Barrier of the 128 threads of a warpgroup. `id` is 1 to 15, and differs between warpgroups.
__device__ inline void warpgroup_sync(int id) { asm volatile("barrier.sync.aligned %0, 128;" ::"r"(id) : "memory"); }

}  // namespace fp8attn::ptx
