// Launch of a grid of CTAs, or of clusters.
#pragma once

#include <cuda_runtime_api.h>

namespace fp8attn {

// Allows a kernel `bytes` of dynamic shared memory.
template <typename Params>
cudaError_t take_shared_memory(void (*kernel)(Params), int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// Whether GPUs of the architecture, the only one that a library has, can start a grid before the preceding one has
// completed: programmatic dependent launch.
#ifdef __CUDA_ARCH_LIST__
constexpr bool HAS_DEPENDENT_LAUNCH = (__CUDA_ARCH_LIST__) >= 900;
#else
constexpr bool HAS_DEPENDENT_LAUNCH = false;
#endif

// Launches `kernel` without clusters, as a programmatic dependent of the kernel before it where GPUs can. `bytes`:
// dynamic shared memory.
template <typename Params>
cudaError_t launch_grid(void (*kernel)(Params), const Params& p, int ctas, int threads, int bytes, cudaStream_t stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config = {dim3(ctas), dim3(threads), size_t(bytes), stream, &attribute, HAS_DEPENDENT_LAUNCH};
  return cudaLaunchKernelEx(&config, kernel, p);
}

// The same of a kernel that takes more shared memory than it has by default.
template <typename Params>
cudaError_t launch_grid_with_shared_memory(void (*kernel)(Params), const Params& p, int ctas, int threads, int bytes, cudaStream_t stream) {
  const cudaError_t error = take_shared_memory(kernel, bytes);
  return error != cudaSuccess ? error : launch_grid(kernel, p, ctas, threads, bytes, stream);
}

// Launches `kernel` as a programmatic dependent of the kernel before it. `bytes`: dynamic shared memory.
template <typename Params>
cudaError_t launch_clusters(void (*kernel)(Params), const Params& p, int ctas, int cluster, int threads, int bytes, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  const cudaLaunchConfig_t config = {dim3(ctas), dim3(threads), size_t(bytes), stream, attributes, 2};
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace fp8attn
