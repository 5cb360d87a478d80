// Programmatic dependent launch. PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
// Before sm_90, a grid starts after the preceding ones have completed.
#pragma once

namespace fp8attn::ptx {

// Waits until the preceding grids have completed and their writes are visible. Memory that they access must not be
// accessed before.
__device__ inline void wait_for_grids_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next grid to start. It runs up to its griddepcontrol.wait.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fp8attn::ptx
