// Programmatic dependent launch. PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fp8attn::ptx {

// Waits for the grids before this one to end, and for what they wrote. No memory they touch may be touched earlier.
__device__ inline void wait_for_grids_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid begin, as far as it gets without what this one writes.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fp8attn::ptx
