// What the binding uses of torch, by its stable ABI: one library for every torch from 2.10 on, and every Python.
// https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html
#pragma once

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace fp8attn {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

inline int32_t code_of(ScalarType dtype) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)); }

inline int32_t code_of(torch::stable::DeviceType type) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)); }

inline size_t element_size(ScalarType dtype) { return aoti_torch_dtype_element_size(code_of(dtype)); }

// As torch.empty_strided, for CUDA tensors. Looking up the operator by its name would take a microsecond more.
inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype, Device device) {
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code_of(dtype), code_of(device.type()), device.index(), &made));
  return Tensor(made);
}

inline bool is_strided(const Tensor& x) {
  int32_t layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

// Memory of the caching allocator.
inline Tensor memory(int64_t bytes, Device device) { return empty_strided({bytes}, {1}, ScalarType::Byte, device); }

// A tensor that begins `offset` elements behind `memory`. Only `memory` itself need be the device's.
// Not torch::stable::from_blob: it returns a tensor that isn't one after an error.
inline Tensor behind(const Tensor& memory, int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype) {
  const Device device = memory.device();
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(memory.mutable_data_ptr(), sizes.size(), sizes.data(), strides.data(), offset, code_of(dtype),
                                                            code_of(device.type()), device.index(), &made));
  return Tensor(made);
}

// The current stream. The function is of torch's CUDA library. It is looked up there, so that the binding also links
// where torch has no CUDA.
inline cudaStream_t current_stream(int32_t device) {
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<AOTITorchError (*)(int32_t, void**)>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(function != nullptr, "torch's CUDA library isn't loaded");
  TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fp8attn
