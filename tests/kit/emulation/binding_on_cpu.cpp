// The binding without a GPU: its operators for CPU tensors, with a launcher and a driver that record their arguments.
#include "binding.cpp"

#include <cstring>

#include "tensor_map_on_cpu.h"

namespace {

fp8attn::Params launched;
fp8attn::QuantizeParams quantized;
int launched_ctas;
cudaError_t answer = cudaSuccess;
thread_local bool has_context = false;

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  TensorMapOnCpu known = {static_cast<uint8_t*>(data), uint64_t(type), rank, uint64_t(swizzle)};
  for (cuuint32_t i = 0; i < rank; ++i) {
    known.sizes[i] = sizes[i];
    known.box[i] = {steps[i], box[i]};
    if (i + 1 < rank) known.strides[i] = strides[i];
  }
  std::memcpy(map, &known, sizeof(*map));
  return CUDA_SUCCESS;
}

TORCH_LIBRARY_IMPL(fp8attn_on_cpu, CPU, m) {
  m.impl("forward", TORCH_FN(forward));
  m.impl("forward_when_ready", TORCH_FN(forward_when_ready));
  m.impl("forward_from_fp16", TORCH_FN(forward_from_fp16));
  m.impl("quantize", TORCH_FN(quantize));
}

}  // namespace

namespace c10::cuda {

CUDAStream getCurrentCUDAStream(DeviceIndex) { return CUDAStream(CUDAStream::UNCHECKED, Stream(Stream::DEFAULT, Device(kCUDA, 0))); }
cudaStream_t CUDAStream::stream() const { return nullptr; }

}  // namespace c10::cuda

extern "C" {

cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult*) {
  *found = reinterpret_cast<void*>(encode_tiled);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "as the test says"; }

cudaError_t record(const fp8attn::Params& p, int ctas, cudaStream_t) {
  launched = p;
  launched_ctas = ctas;
  return answer;
}

int recorded(void* to) {
  std::memcpy(to, &launched, sizeof(launched));
  return launched_ctas;
}

cudaError_t record_quantize(const fp8attn::QuantizeParams& p, int ctas, cudaStream_t) {
  quantized = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_quantize(void* to) {
  std::memcpy(to, &quantized, sizeof(quantized));
  return launched_ctas;
}

int params_size() { return sizeof(fp8attn::Params); }

void fail_with(int error) { answer = cudaError_t(error); }
}
