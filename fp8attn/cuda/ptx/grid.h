// Programmatic dependent launch. PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fp8attn::ptx {

// Waits until the preceding grids have completed and their writes are visible. Memory that they access must not be
// accessed before.
__device__ inline void wait_for_grids_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allows the next grid to start. It runs up to its griddepcontrol.wait.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fp8attn::ptx
