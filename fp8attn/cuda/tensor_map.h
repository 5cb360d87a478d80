// TMA tensor maps. CUDA driver API, cuTensorMapEncodeTiled.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fp8attn {

// A function of the driver, by the version of CUDA 12.0. Looked up through the runtime, so that nothing links to the
// driver library. Null if the driver doesn't have it.
template <class Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
  return reinterpret_cast<Function>(found);
}

// Encodes a map of bytes. Sizes and strides start with the innermost dimension; its stride, 1, is left out. `brought`:
// the bytes around what is loaded that a load brings into L2: 64, 128 or 256. Returns false if the driver refuses.
template <int RANK>
bool encode(CUtensorMap& map, const void* data, const uint64_t (&sizes)[RANK], const uint64_t (&strides)[RANK - 1], const uint32_t (&box)[RANK], int brought = 256) {
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto swizzle = box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto promotion = brought == 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B : brought == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  static const auto function = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return function != nullptr && function(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, RANK, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same map of another tensor, which is like the first one. Returns false if the driver refuses.
inline bool replace_address(CUtensorMap& map, void* data) {
  static const auto function = driver_function<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  return function != nullptr && function(&map, data) == CUDA_SUCCESS;
}

}  // namespace fp8attn
