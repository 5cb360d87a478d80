// Values that all threads of a warp share. CUDA C++ Programming Guide, "Warp Shuffle Functions".
#pragma once

namespace fp8attn::ptx {

// Tells the compiler that x is the warp's. What depends on a thread's number or on shared memory may otherwise differ
// between threads for it: then it moves descriptors to uniform registers for each product. Nor does it compute x again.
template <typename X>
__device__ X uniform(X x) {
  return __shfl_sync(~0u, x, 0);
}

}  // namespace fp8attn::ptx
