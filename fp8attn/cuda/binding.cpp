// From tensors to Params: the only file that knows torch. fp8attn/cuda/run.py has validated what comes in.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "params.h"
#include "tensor_map.h"

namespace {

using at::Tensor;

using Launch = cudaError_t (*)(const fp8attn::Params&, int, cudaStream_t);

constexpr int64_t FAR = 1 << 30;  // behind any key, and no overflow when a row is added

fp8attn::OutType out_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return fp8attn::OutType::bf16;
    case at::kHalf:
      return fp8attn::OutType::f16;
    case at::kFloat:
      return fp8attn::OutType::f32;
    default:
      TORCH_CHECK(false, "dtype is ", type, "; it must be bfloat16, float16 or float32");
  }
}

// Boxes of `rows` rows x `bytes` bytes of (B, H, S, D).
void encode_rows(CUtensorMap& map, const Tensor& x, int64_t rows, int64_t bytes) {
  const uint64_t size = x.element_size();
  const uint64_t sizes[4] = {size * x.size(3), uint64_t(x.size(2)), uint64_t(x.size(1)), uint64_t(x.size(0))};
  const uint64_t strides[3] = {size * x.stride(2), size * x.stride(1), size * x.stride(0)};
  const uint32_t box[4] = {uint32_t(bytes), uint32_t(rows), 1, 1};
  TORCH_CHECK(fp8attn::encode(map, x.const_data_ptr(), sizes, strides, box), "no tensor map for shape ", x.sizes(), ", strides ", x.strides());
}

template <int N>
void copy_strides(int64_t (&to)[N], const Tensor& from) {
  std::copy_n(from.strides().begin(), N, to);
}

// Whether all rows of (B, H, S, D) start at multiples of 16 bytes.
bool is_aligned(const Tensor& x) {
  const auto of_16 = [&](int i) { return x.size(i) == 1 || x.stride(i) % 16 == 0; };
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && of_16(0) && of_16(1) && of_16(2);
}

// By the address of an instance's launcher, in a library that torch doesn't know.
void launch(int64_t launcher, const fp8attn::Params& p, int64_t ctas, c10::DeviceIndex device) {
  const cudaError_t error = reinterpret_cast<Launch>(launcher)(p, ctas, c10::cuda::getCurrentCUDAStream(device));
  TORCH_CHECK(error == cudaSuccess, "the CUDA kernel wasn't launched: ", cudaGetErrorString(error));
}

// fp8attn.call.Call's fields, and how to launch: the instance's launcher, its tile and box sizes (no rows: it has no use for tensor maps),
// the grid.
void forward(int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_side_by_side, const Tensor& q,
            const std::optional<Tensor>& q_scale, int64_t q_group, const Tensor& k, const Tensor& k_scale, int64_t k_group, const Tensor& v, const Tensor& v_scale, const std::optional<Tensor>& v_mean,
            const std::optional<Tensor>& attn_mask, int64_t kv_length, double softmax_scale, int64_t causal_offset, const Tensor& out, const std::optional<Tensor>& lse,
            const std::optional<Tensor>& counter, const std::optional<Tensor>& parts, const std::optional<Tensor>& part_lse) {
  fp8attn::Params p = {};
  TORCH_CHECK(v.is_contiguous() && reinterpret_cast<uintptr_t>(v.const_data_ptr()) % 16 == 0, "values of shape ", v.sizes(), " aren't contiguous from a multiple of 16 bytes on");
  if (rows > 0) {
    encode_rows(p.q_map, q, rows, panel);
    encode_rows(p.k_map, k, keys, panel);
    encode_rows(p.out_map, out, fp8attn::OUTPUT_ROWS, fp8attn::OUTPUT_BYTES);
    const uint64_t sizes[2] = {uint64_t(v.size(3)), uint64_t(v.size(0) * v.size(1) * v.size(2))}, strides[1] = {uint64_t(v.size(3))};
    const uint32_t box[2] = {uint32_t(keys), uint32_t(value_rows)};
    TORCH_CHECK(fp8attn::encode(p.v_map, v.const_data_ptr(), sizes, strides, box), "no tensor map for values of shape ", v.sizes());
  }
  p.q = static_cast<const uint8_t*>(q.const_data_ptr());
  p.k = static_cast<const uint8_t*>(k.const_data_ptr());
  p.v = static_cast<const uint8_t*>(v.const_data_ptr());
  copy_strides(p.q_strides, q);
  copy_strides(p.k_strides, k);
  p.v_pitch = v.size(3);
  p.q_aligned = is_aligned(q);
  p.k_aligned = is_aligned(k);
  p.q_scale = q_scale ? q_scale->const_data_ptr<float>() : nullptr;
  p.k_scale = k_scale.const_data_ptr<float>();
  p.v_scale = v_scale.const_data_ptr<float>();
  p.v_mean = v_mean ? v_mean->const_data_ptr<float>() : nullptr;
  p.out = out.mutable_data_ptr();
  p.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  p.counter = counter ? counter->mutable_data_ptr<int>() : nullptr;
  p.key_splits = parts ? parts->size(0) : 1;
  p.parts = parts ? parts->mutable_data_ptr<float>() : nullptr;
  p.part_lse = part_lse ? part_lse->mutable_data_ptr<float>() : nullptr;
  if (q_scale) copy_strides(p.q_scale_strides, *q_scale);
  copy_strides(p.k_scale_strides, k_scale);
  copy_strides(p.v_scale_strides, v_scale);
  copy_strides(p.out_strides, out);
  if (attn_mask) {
    p.mask = attn_mask->const_data_ptr();
    p.mask_type = attn_mask->scalar_type() == at::kBool ? 0 : 1 + int(out_type(attn_mask->scalar_type()));
    copy_strides(p.mask_strides, *attn_mask);
  }
  p.batches = q.size(0);
  p.q_heads = q.size(1);
  p.kv_heads = k.size(1);
  p.q_length = q.size(2);
  p.kv_length = kv_length;
  p.head_dim = q.size(3);
  p.value_dim = v.size(2);
  p.q_group = q_group;
  p.k_group = k_group;
  p.causal_offset = std::clamp(causal_offset, -FAR, FAR);
  p.heads_side_by_side = heads_side_by_side;
  p.score_scale = softmax_scale * 1.4426950408889634;
  p.out_type = out_type(out.scalar_type());
  p.half = q.scalar_type() == at::kHalf;

  launch(launcher, p, ctas, q.get_device());
}

// The instances that quantize: plain tensors, `splits` clusters for each head of k.
void forward_from_half(int64_t launcher, int64_t ctas, int64_t splits, const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, int64_t causal_offset,
                       const Tensor& out, const std::optional<Tensor>& lse, const std::optional<Tensor>& k_mean) {
  fp8attn::Params p = {};
  p.q = static_cast<const uint8_t*>(q.const_data_ptr());
  p.k = static_cast<const uint8_t*>(k.const_data_ptr());
  p.v = static_cast<const uint8_t*>(v.const_data_ptr());
  copy_strides(p.q_strides, q);
  copy_strides(p.k_strides, k);
  copy_strides(p.v_strides, v);
  p.out = out.mutable_data_ptr();
  p.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  p.k_mean = k_mean ? k_mean->mutable_data_ptr<float>() : nullptr;
  copy_strides(p.out_strides, out);
  p.batches = q.size(0);
  p.q_heads = q.size(1);
  p.kv_heads = k.size(1);
  p.q_length = q.size(2);
  p.kv_length = k.size(2);
  p.head_dim = q.size(3);
  p.value_dim = v.size(3);
  p.causal_offset = std::clamp(causal_offset, -FAR, FAR);
  p.score_scale = softmax_scale * 1.4426950408889634;
  p.out_type = out_type(out.scalar_type());
  p.half = q.scalar_type() == at::kHalf;
  p.inverse_length = 1.0 / k.size(2);
  p.splits = splits;
  launch(launcher, p, ctas, q.get_device());
}

TORCH_LIBRARY(fp8attn_cuda, m) {
  m.def(
      "forward(int launcher, int rows, int keys, int panel, int value_rows, int ctas, int heads_side_by_side, Tensor q, Tensor? q_scale, int q_group,"
      " Tensor k, Tensor k_scale, int k_group, Tensor v, Tensor v_scale, Tensor? v_mean, Tensor? attn_mask, int kv_length, float softmax_scale, int causal_offset,"
      " Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? counter, Tensor(d!)? parts, Tensor(e!)? part_lse) -> ()");
  m.impl("forward", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(forward)));
  m.def(
      "forward_from_half(int launcher, int ctas, int splits, Tensor q, Tensor k, Tensor v, float softmax_scale, int causal_offset, Tensor(a!) out,"
      " Tensor(b!)? lse, Tensor(c!)? k_mean) -> ()");
  m.impl("forward_from_half", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(forward_from_half)));
}

}  // namespace
