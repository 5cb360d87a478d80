// The binding without a GPU: its operators for CPU tensors, with a launcher and a driver that record their arguments.
#include "binding.cpp"

#include <cstring>

#include "tensor_map_on_cpu.h"

namespace {

fp8attn::Params launched;
fp8attn::QuantizeParams quantized;
fp8attn::GeneralQuantizeParams generally_quantized;
fp8attn::UnsmoothLseParams unsmoothed;
fp8attn::DecodeParams decoded;
fp8attn::PrefillParams prefilled;
fp8attn::AppendParams appended;
std::vector<int64_t> function_launch;  // function, grid, threads, shared memory, attributes, and the parameters' words
int64_t function_words = 0;            // how many there are
int launched_ctas;
int counter_at_launch = -1;  // -1: there is none
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

CUresult replace_address(CUtensorMap* map, void* data) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  reinterpret_cast<TensorMapOnCpu*>(map)->data = static_cast<uint8_t*>(data);
  return CUDA_SUCCESS;
}

CUresult launch_function(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  function_launch = {reinterpret_cast<int64_t>(function), config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes, config->numAttrs};
  for (int64_t i = 0; i < function_words; ++i) function_launch.push_back(*static_cast<int64_t*>(parameters[i]));
  return answer == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

STABLE_TORCH_LIBRARY_IMPL(fp8attn_on_cpu, CPU, m) { implement_launches(m); }

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult*) {
  const std::string wanted = name;
  *found = wanted == "cuTensorMapEncodeTiled"      ? reinterpret_cast<void*>(encode_tiled)
           : wanted == "cuTensorMapReplaceAddress" ? reinterpret_cast<void*>(replace_address)
           : wanted == "cuLaunchKernelEx"          ? reinterpret_cast<void*>(launch_function)
                                                   : nullptr;
  return *found == nullptr ? cudaErrorUnknown : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "as the test says"; }

cudaError_t record(const fp8attn::Params& p, int ctas, cudaStream_t) {
  launched = p;
  counter_at_launch = p.counter == nullptr ? -1 : *p.counter;
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

cudaError_t record_general_quantize(const fp8attn::GeneralQuantizeParams& p, int ctas, cudaStream_t) {
  generally_quantized = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_general_quantize(void* to) {
  std::memcpy(to, &generally_quantized, sizeof(generally_quantized));
  return launched_ctas;
}

cudaError_t record_unsmooth_lse(const fp8attn::UnsmoothLseParams& p, int ctas, cudaStream_t) {
  unsmoothed = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_unsmooth_lse(void* to) {
  std::memcpy(to, &unsmoothed, sizeof(unsmoothed));
  return launched_ctas;
}

cudaError_t record_decode(const fp8attn::DecodeParams& p, int ctas, cudaStream_t) {
  decoded = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_decode(void* to) {
  std::memcpy(to, &decoded, sizeof(decoded));
  return launched_ctas;
}

cudaError_t record_prefill(const fp8attn::PrefillParams& p, int ctas, cudaStream_t) {
  prefilled = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_prefill(void* to) {
  std::memcpy(to, &prefilled, sizeof(prefilled));
  return launched_ctas;
}

cudaError_t record_append(const fp8attn::AppendParams& p, int ctas, cudaStream_t) {
  appended = p;
  launched_ctas = ctas;
  return answer;
}

int recorded_append(void* to) {
  std::memcpy(to, &appended, sizeof(appended));
  return launched_ctas;
}

int prefill_params_size() { return sizeof(fp8attn::PrefillParams); }

int decode_params_size() { return sizeof(fp8attn::DecodeParams); }

// The last launch of a function with `words` parameters.
void expect_words(int words) { function_words = words; }
const int64_t* launched_function() { return function_launch.data(); }

int counter() { return counter_at_launch; }

int params_size() { return sizeof(fp8attn::Params); }

void fail_with(int error) { answer = cudaError_t(error); }
}
