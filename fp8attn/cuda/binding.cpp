// From tensors to Params: the only file that knows torch. fp8attn/cuda/run.py has validated what comes in.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "params.h"
#include "tensor_map.h"

namespace {

using at::Tensor;

using Launcher = cudaError_t (*)(const fp8attn::Params&, int, cudaStream_t);
using QuantizeLauncher = cudaError_t (*)(const fp8attn::QuantizeParams&, int, cudaStream_t);

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
  const auto of_16 = [&](int i) { return x.size(i) == 1 || x.stride(i) * x.element_size() % 16 == 0; };
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && of_16(0) && of_16(1) && of_16(2);
}

void check(cudaError_t error) { TORCH_CHECK(error == cudaSuccess, "the CUDA kernel wasn't launched: ", cudaGetErrorString(error)); }

// By the address of an instance's launcher, in a library that torch doesn't know.
void launch(int64_t launcher, const fp8attn::Params& p, int64_t ctas, c10::DeviceIndex device) {
  check(reinterpret_cast<Launcher>(launcher)(p, ctas, c10::cuda::getCurrentCUDAStream(device)));
}

// What all instances are told, of V no more than where it is and how wide.
fp8attn::Params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const std::optional<Tensor>& lse, int64_t kv_length, int64_t value_dim,
                          double softmax_scale, int64_t causal_offset) {
  fp8attn::Params p = {};
  p.q = static_cast<const uint8_t*>(q.const_data_ptr());
  p.k = static_cast<const uint8_t*>(k.const_data_ptr());
  p.v = static_cast<const uint8_t*>(v.const_data_ptr());
  copy_strides(p.q_strides, q);
  copy_strides(p.k_strides, k);
  p.out = out.mutable_data_ptr();
  p.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  copy_strides(p.out_strides, out);
  p.batches = q.size(0);
  p.q_heads = q.size(1);
  p.kv_heads = k.size(1);
  p.q_length = q.size(2);
  p.kv_length = kv_length;
  p.head_dim = q.size(3);
  p.value_dim = value_dim;
  p.causal_offset = std::clamp(causal_offset, -FAR, FAR);
  p.score_scale = softmax_scale * 1.4426950408889634;
  p.out_type = out_type(out.scalar_type());
  p.half = q.scalar_type() == at::kHalf;
  return p;
}

// Arguments of a call beside its tensors: the address of the instance's launcher, its tile and box sizes (0 rows: no
// tensor maps), the grid, and the numbers of fp8attn.call.Call.
struct Launch {
  int64_t launcher, rows, keys, panel, value_rows, ctas, heads_side_by_side, q_group, k_group, kv_length;
  double softmax_scale;
  int64_t causal_offset;
};

// Whether TMA can load boxes of a mask's rows: elements of 16 bits that are contiguous in a row, a row for every query,
// and rows that start at multiples of 16 bytes.
bool has_boxes(const Tensor& mask) {
  return mask.element_size() == 2 && (mask.stride(3) == 1 || mask.size(3) == 1) && mask.stride(2) > 0 && is_aligned(mask);
}

// The storage for the block mask that the Hopper kernel builds of a mask; sets its fields of p.
Tensor room_for_mask(fp8attn::Params& p, const Tensor& mask, const Launch& l) {
  const auto planes = [&](int i, int64_t size) { return mask.stride(i) == 0 ? 1 : size; };
  p.mask_batches = planes(0, mask.size(0));
  p.mask_heads = planes(1, mask.size(1));
  p.mask_groups = planes(2, (mask.size(2) + l.rows - 1) / l.rows);
  p.mask_rows = planes(2, l.rows);
  if (has_boxes(mask)) {
    // The stride of dimension i in bytes. A dimension with one plane may have any stride; it gets at least 16.
    const auto bytes = [&](int i) { return uint64_t(std::max<int64_t>(2 * mask.stride(i) / 16 * 16, 16)); };
    const uint64_t sizes[4] = {2 * uint64_t(mask.size(3)), uint64_t(mask.size(2)), uint64_t(p.mask_heads), uint64_t(p.mask_batches)};
    const uint64_t strides[3] = {bytes(2), bytes(1), bytes(0)};
    const uint32_t box[4] = {128, uint32_t(l.rows), 1, 1};
    p.mask_in_boxes = fp8attn::encode(p.mask_map, mask.const_data_ptr(), sizes, strides, box);
  }
  const int64_t blocks = int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * ((l.kv_length + l.keys - 1) / l.keys), words = 4 * p.mask_rows * blocks;
  TORCH_CHECK(blocks < int64_t(1) << 31, "attn_mask has ", blocks, " blocks of ", l.rows, " rows and ", l.keys, " keys; it must have fewer than 2^31");
  const Tensor room = at::empty({words + (blocks + 3) / 4}, mask.options().dtype(at::kInt));
  p.mask_bits = reinterpret_cast<uint32_t*>(room.mutable_data_ptr<int>());
  p.block_mask = reinterpret_cast<uint8_t*>(p.mask_bits + words);
  return room;
}

void attend(const Launch& l, const Tensor& q, const std::optional<Tensor>& q_scale, const Tensor& k, const Tensor& k_scale, const Tensor& v,
            const Tensor& v_scale, const std::optional<Tensor>& v_mean, const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& bias, const Tensor& out,
            const std::optional<Tensor>& lse, const std::optional<Tensor>& lse_mean, const std::optional<Tensor>& counter, const std::optional<Tensor>& parts,
            const std::optional<Tensor>& part_rows, const int* ready = nullptr, int ready_ctas = 0) {
  TORCH_CHECK(v.is_contiguous() && reinterpret_cast<uintptr_t>(v.const_data_ptr()) % 16 == 0, "values of shape ", v.sizes(), " aren't contiguous from a multiple of 16 bytes on");
  fp8attn::Params p = params_of(q, k, v, out, lse, l.kv_length, v.size(2), l.softmax_scale, l.causal_offset);
  if (l.rows > 0) {
    // A thread that has made no CUDA call has no context, and without one the driver's encoder of tensor maps crashes.
    check(cudaSetDevice(q.get_device()));
    encode_rows(p.q_map, q, l.rows, l.panel);
    encode_rows(p.k_map, k, l.keys, l.panel);
    encode_rows(p.out_map, out, fp8attn::OUTPUT_ROWS, fp8attn::OUTPUT_BYTES);
    const uint64_t sizes[2] = {uint64_t(v.size(3)), uint64_t(v.size(0) * v.size(1) * v.size(2))}, strides[1] = {uint64_t(v.size(3))};
    const uint32_t box[2] = {uint32_t(l.keys), uint32_t(l.value_rows)};
    TORCH_CHECK(fp8attn::encode(p.v_map, v.const_data_ptr(), sizes, strides, box), "no tensor map for values of shape ", v.sizes());
  }
  p.lse_mean = lse_mean ? lse_mean->const_data_ptr<float>() : nullptr;
  p.v_pitch = v.size(3);
  p.q_aligned = is_aligned(q);
  p.k_aligned = is_aligned(k);
  p.q_scale = q_scale ? q_scale->const_data_ptr<float>() : nullptr;
  p.k_scale = k_scale.const_data_ptr<float>();
  p.v_scale = v_scale.const_data_ptr<float>();
  p.v_mean = v_mean ? v_mean->const_data_ptr<float>() : nullptr;
  p.counter = counter ? counter->mutable_data_ptr<int>() : nullptr;
  p.key_splits = parts ? parts->size(0) : 1;
  p.parts = parts ? parts->mutable_data_ptr<float>() : nullptr;
  p.part_rows = part_rows ? part_rows->mutable_data_ptr<float>() : nullptr;
  if (l.rows > 0 && parts) {  // of the tiles that CTAs share
    p.stream_k_ctas = parts->size(0);
    std::swap(p.counter, p.partials_ready);
  }
  if (q_scale) copy_strides(p.q_scale_strides, *q_scale);
  copy_strides(p.k_scale_strides, k_scale);
  copy_strides(p.v_scale_strides, v_scale);
  if (attn_mask) {
    p.mask = attn_mask->const_data_ptr();
    p.mask_type = attn_mask->scalar_type() == at::kBool ? 0 : 1 + int(out_type(attn_mask->scalar_type()));
    copy_strides(p.mask_strides, *attn_mask);
  }
  // The storage must live until the kernel is launched.
  const std::optional<Tensor> bits = attn_mask && l.rows > 0 ? std::optional(room_for_mask(p, *attn_mask, l)) : std::nullopt;
  if (bias) {
    TORCH_CHECK(bias->is_contiguous() && reinterpret_cast<uintptr_t>(bias->const_data_ptr()) % 16 == 0, "bias of shape ", bias->sizes(),
                " isn't contiguous from a multiple of 16 bytes on");
    p.bias = bias->const_data_ptr<float>();
  }
  p.ready = ready;
  p.ready_ctas = ready_ctas;
  p.q_group = l.q_group;
  p.k_group = l.k_group;
  p.heads_side_by_side = l.heads_side_by_side;
  launch(l.launcher, p, l.ctas, q.get_device());
}

void forward(int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_side_by_side, int64_t q_group, int64_t k_group,
             int64_t kv_length, double softmax_scale, int64_t causal_offset, const Tensor& q, const std::optional<Tensor>& q_scale, const Tensor& k, const Tensor& k_scale,
             const Tensor& v, const Tensor& v_scale, const std::optional<Tensor>& v_mean, const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& bias,
             const Tensor& out, const std::optional<Tensor>& lse, const std::optional<Tensor>& lse_mean, const std::optional<Tensor>& counter,
             const std::optional<Tensor>& parts, const std::optional<Tensor>& part_rows) {
  attend({launcher, rows, keys, panel, value_rows, ctas, heads_side_by_side, q_group, k_group, kv_length, softmax_scale, causal_offset}, q, q_scale, k, k_scale, v,
         v_scale, v_mean, attn_mask, bias, out, lse, lse_mean, counter, parts, part_rows);
}

// The same with Q that isn't quantized. Attention of a head starts as soon as its K and V are quantized: `ready` is the
// tensor that `quantize` was given, and `cluster` CTAs quantize each head. `counter` is 0 at launch: a free CTA takes
// the next tile from it.
void forward_when_ready(int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_side_by_side, int64_t q_group,
                        int64_t k_group, int64_t kv_length, double softmax_scale, int64_t causal_offset, const Tensor& q, const Tensor& k, const Tensor& k_scale,
                        const Tensor& v, const Tensor& v_scale, const std::optional<Tensor>& v_mean, const Tensor& out, const std::optional<Tensor>& lse,
                        const std::optional<Tensor>& lse_mean, const Tensor& counter, const Tensor& ready, int64_t cluster) {
  attend({launcher, rows, keys, panel, value_rows, ctas, heads_side_by_side, q_group, k_group, kv_length, softmax_scale, causal_offset}, q, std::nullopt, k, k_scale, v,
         v_scale, v_mean, std::nullopt, std::nullopt, out, lse, lse_mean, counter, std::nullopt, std::nullopt, ready.const_data_ptr<int>(), cluster);
}

// The same of the instances that quantize: plain tensors, `splits` clusters for each head of k.
struct LaunchFromFp16 {
  int64_t launcher, ctas, splits;
  double softmax_scale;
  int64_t causal_offset;
  bool lse;  // whether the LSE is returned, too
};

void attend_from_fp16(const LaunchFromFp16& l, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const std::optional<Tensor>& lse) {
  fp8attn::Params p = params_of(q, k, v, out, lse, k.size(2), v.size(3), l.softmax_scale, l.causal_offset);
  copy_strides(p.v_strides, v);
  p.inverse_length = 1.0 / k.size(2);
  p.splits = l.splits;
  launch(l.launcher, p, l.ctas, q.get_device());
}

void forward_from_fp16(int64_t launcher, int64_t ctas, int64_t splits, double softmax_scale, int64_t causal_offset, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& out, const std::optional<Tensor>& lse) {
  attend_from_fp16({launcher, ctas, splits, softmax_scale, causal_offset, lse.has_value()}, q, k, v, out, lse);
}

// The quantizer's arguments beside tensors. `sampled`: the number of tokens from which K's mean is computed.
// `stats_bytes`: the size of the memory through which its kernels pass statistics.
struct QuantizeLaunch {
  int64_t launcher, ctas, sampled, stats_bytes;
};

// Quantizes K and V, (B, H, S, D), into tensors that fp8attn/cuda/quantize.py has allocated. `ready`: (B, H), each 0 at
// launch, the number of CTAs that have completed a head; or null.
void quantize_kv(const QuantizeLaunch& l, const Tensor& k, const Tensor& v, const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean, const Tensor& v_data,
                 const Tensor& v_scale, const Tensor& v_mean, int* ready) {
  fp8attn::QuantizeParams p = {};
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  p.k_data = static_cast<uint8_t*>(k_data.mutable_data_ptr());
  p.k_scale = k_scale.mutable_data_ptr<float>();
  p.k_mean = k_mean.mutable_data_ptr<float>();
  p.v_data = static_cast<uint8_t*>(v_data.mutable_data_ptr());
  p.v_scale = v_scale.mutable_data_ptr<float>();
  p.v_mean = v_mean.mutable_data_ptr<float>();
  copy_strides(p.k_strides, k);
  copy_strides(p.v_strides, v);
  copy_strides(p.k_data_strides, k_data);
  p.padded = v_data.size(3);
  p.heads = k.size(1);
  p.length = k.size(2);
  p.head_dim = k.size(3);
  p.inverse_length = 1.0 / k.size(2);
  p.inverse_sample = 1.0 / l.sampled;
  p.half = k.scalar_type() == at::kHalf;
  p.ready = ready;
  // The storage must live until the kernels are launched.
  const std::optional<Tensor> stats = l.stats_bytes > 0 ? std::optional(at::empty({l.stats_bytes}, k.options().dtype(at::kByte))) : std::nullopt;
  p.chunk_stats = stats ? stats->mutable_data_ptr() : nullptr;
  check(reinterpret_cast<QuantizeLauncher>(l.launcher)(p, l.ctas, c10::cuda::getCurrentCUDAStream(k.get_device())));
}

void quantize(int64_t launcher, int64_t ctas, int64_t sampled, int64_t stats_bytes, const Tensor& k, const Tensor& v, const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean,
              const Tensor& v_data, const Tensor& v_scale, const Tensor& v_mean, const std::optional<Tensor>& ready) {
  quantize_kv({launcher, ctas, sampled, stats_bytes}, k, v, k_data, k_scale, k_mean, v_data, v_scale, v_mean, ready ? ready->mutable_data_ptr<int>() : nullptr);
}

// All that a launch follows from but the tensors' addresses; empty of tensors that are none of a plain forward pass.
using Facts = std::vector<int64_t>;

Facts facts(int64_t options, std::initializer_list<const Tensor*> tensors) {
  Facts found;
  found.reserve(1 + 13 * tensors.size());
  found.push_back(options);
  for (const Tensor* x : tensors) {
    if (x == nullptr) {
      found.push_back(-1);
      continue;
    }
    if (x->layout() != at::kStrided || x->requires_grad()) return {};
    found.push_back(x->dim());
    found.push_back(int64_t(x->scalar_type()));
    found.push_back(int64_t(x->device().type()));
    found.push_back(x->device().index());
    found.push_back(reinterpret_cast<uintptr_t>(x->const_data_ptr()) % 16);
    found.insert(found.end(), x->sizes().begin(), x->sizes().end());
    found.insert(found.end(), x->strides().begin(), x->strides().end());
  }
  return found;
}

// Memory through which the CTAs of a launch communicate: words that are 0 at launch, and floats for each of
// `split_ctas` CTAs. See fp8attn.cuda.run.Scratch.
struct Scratch {
  int64_t words, split_ctas, floats;
};

// What a tensor is made by.
struct Form {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;

  explicit Form(const Tensor& x) : sizes(x.sizes().vec()), strides(x.strides().vec()), options(x.options()) {}

  Tensor empty() const { return at::empty_strided(sizes, strides, options); }
};

// A launch, and the output that it writes to.
template <class L>
struct Plan {
  L launch;
  Form output;
  Scratch scratch;

  std::optional<Tensor> words() const { return scratch.words == 0 ? std::nullopt : std::optional(at::zeros({scratch.words}, output.options.dtype(at::kInt))); }

  std::optional<Tensor> parts() const {
    return scratch.split_ctas == 0 ? std::nullopt : std::optional(at::empty({scratch.split_ctas, scratch.floats}, output.options.dtype(at::kFloat)));
  }
};

// Two launches: the quantizer of K and V, then attention with Q that isn't quantized. Attention waits, for each head,
// for the CTAs that quantize it. If `cluster` is 0, it waits for the whole quantizer.
struct LaunchBoth {
  QuantizeLaunch quantizer;
  Launch attention;
  int64_t cluster;
  bool lse;  // whether the LSE is returned, too
  std::vector<Form> quantized;  // k_data, k_scale, k_mean, v_data, v_scale, v_mean
};

// Of calls that were made before. Threads share it.
template <class L>
class Plans {
 public:
  void add(Facts&& facts, const L& launch, const Tensor& out, const Scratch& scratch) {
    const std::lock_guard lock(mutex_);
    if (plans_.size() >= MOST) plans_.clear();
    plans_[std::move(facts)] = std::make_shared<const Plan<L>>(Plan<L>{launch, Form(out), scratch});
  }

  std::shared_ptr<const Plan<L>> find(const Facts& facts) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(facts);
    return found == plans_.end() ? nullptr : found->second;
  }

 private:
  static constexpr size_t MOST = 4096;
  std::mutex mutex_;
  std::map<Facts, std::shared_ptr<const Plan<L>>> plans_;
};

template <class L>
Plans<L>& plans() {
  static auto& all = *new Plans<L>;  // never destroyed: threads may outlive main
  return all;
}

const Tensor* address(const std::optional<Tensor>& x) { return x ? &*x : nullptr; }

// (B or 1, H or 1, n) as (B, H, n).
Tensor of_every_head(const Tensor& scale, int64_t batch, int64_t heads, int64_t n) {
  return scale.size(0) == batch && scale.size(1) == heads && scale.size(2) == n ? scale : scale.expand({batch, heads, n});
}

// (B, Hq, Sq, Sk) of what is broadcastable to it.
std::optional<Tensor> of_every_query(const std::optional<Tensor>& attn_mask, const Tensor& q, int64_t kv_length) {
  return attn_mask ? std::optional(attn_mask->expand({q.size(0), q.size(1), q.size(2), kv_length})) : std::nullopt;
}

// The LSE of q, if it is wanted.
std::optional<Tensor> empty_lse(const Tensor& q, bool wanted) {
  return wanted ? std::optional(at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat))) : std::nullopt;
}

// What a call returns.
std::vector<Tensor> outputs(const Tensor& out, const std::optional<Tensor>& lse) {
  if (lse) return {out, *lse};
  return {out};
}

// From now on `repeat` takes calls with these options and tensors like these. `out` is like what it returns.
void remember(int64_t options, int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_side_by_side, int64_t q_group,
              int64_t k_group, int64_t kv_length, double softmax_scale, int64_t causal_offset, const Tensor& q, const Tensor& q_scale, const Tensor& k,
              const Tensor& k_scale, const Tensor& v, const Tensor& v_scale, const std::optional<Tensor>& v_mean, const std::optional<Tensor>& attn_mask,
              const Tensor& out, int64_t words, int64_t split_ctas, int64_t floats) {
  plans<Launch>().add(facts(options, {&q, &q_scale, &k, &k_scale, &v, &v_scale, address(v_mean), address(attn_mask)}),
                      {launcher, rows, keys, panel, value_rows, ctas, heads_side_by_side, q_group, k_group, kv_length, softmax_scale, causal_offset}, out,
                      {words, split_ctas, floats});
}

// Attention as in an earlier call with such options and tensors, or nothing if there was none. Scales aren't expanded
// to every head here, and a mask isn't expanded to every query.
std::optional<Tensor> repeat(int64_t options, const Tensor& q, const Tensor& q_scale, const Tensor& k, const Tensor& k_scale, const Tensor& v, const Tensor& v_scale,
                             const std::optional<Tensor>& v_mean, const std::optional<Tensor>& attn_mask) {
  const Facts known = facts(options, {&q, &q_scale, &k, &k_scale, &v, &v_scale, address(v_mean), address(attn_mask)});
  const auto plan = known.empty() ? nullptr : plans<Launch>().find(known);
  if (plan == nullptr) return std::nullopt;
  const c10::DeviceGuard guard(q.device());
  const Tensor out = plan->output.empty();
  attend(plan->launch, q, of_every_head(q_scale, q.size(0), q.size(1), q_scale.size(2)), k, of_every_head(k_scale, k.size(0), k.size(1), k_scale.size(2)), v,
         of_every_head(v_scale, v.size(0), v.size(1), v.size(2)), v_mean, of_every_query(attn_mask, q, plan->launch.kv_length), std::nullopt, out, std::nullopt,
         std::nullopt, plan->words(), plan->parts(), std::nullopt);
  return out;
}

void remember_from_fp16(int64_t options, int64_t launcher, int64_t ctas, int64_t splits, double softmax_scale, int64_t causal_offset, bool lse, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& out) {
  plans<LaunchFromFp16>().add(facts(options, {&q, &k, &v}), {launcher, ctas, splits, softmax_scale, causal_offset, lse}, out, {});
}

// Output, and LSE if it was asked for; nothing if there was no such call.
std::vector<Tensor> repeat_from_fp16(int64_t options, const Tensor& q, const Tensor& k, const Tensor& v) {
  const Facts known = facts(options, {&q, &k, &v});
  const auto plan = known.empty() ? nullptr : plans<LaunchFromFp16>().find(known);
  if (plan == nullptr) return {};
  const c10::DeviceGuard guard(q.device());
  const Tensor out = plan->output.empty();
  const std::optional<Tensor> lse = empty_lse(q, plan->launch.lse);
  attend_from_fp16(plan->launch, q, k, v, out, lse);
  return outputs(out, lse);
}

// `words`: with a cluster a counter of tiles and a word for each head of k.
void remember_both(int64_t options, int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_side_by_side,
                   int64_t q_group, int64_t k_group, int64_t kv_length, double softmax_scale, int64_t causal_offset, int64_t quantizer, int64_t quantizer_ctas,
                   int64_t sampled, int64_t stats_bytes, int64_t cluster, bool lse, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_mask, at::TensorList quantized,
                   const Tensor& out, int64_t words, int64_t split_ctas, int64_t floats) {
  plans<LaunchBoth>().add(facts(options, {&q, &k, &v, address(attn_mask)}),
                          {{quantizer, quantizer_ctas, sampled, stats_bytes},
                           {launcher, rows, keys, panel, value_rows, ctas, heads_side_by_side, q_group, k_group, kv_length, softmax_scale, causal_offset},
                           cluster,
                           lse,
                           std::vector<Form>(quantized.begin(), quantized.end())},
                          out, {words, split_ctas, floats});
}

// As repeat_from_fp16.
std::vector<Tensor> repeat_both(int64_t options, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_mask) {
  const Facts known = facts(options, {&q, &k, &v, address(attn_mask)});
  const auto plan = known.empty() ? nullptr : plans<LaunchBoth>().find(known);
  if (plan == nullptr) return {};
  const c10::DeviceGuard guard(q.device());
  const LaunchBoth& l = plan->launch;
  Tensor x[6];
  for (size_t i = 0; i < 6; ++i) x[i] = l.quantized.at(i).empty();
  const Tensor out = plan->output.empty();
  const std::optional<Tensor> lse = empty_lse(q, l.lse), lse_mean = l.lse ? std::optional(x[2]) : std::nullopt, words = plan->words();
  int* ready = l.cluster > 0 ? words->mutable_data_ptr<int>() + 1 : nullptr;
  quantize_kv(l.quantizer, k, v, x[0], x[1], x[2], x[3], x[4], x[5], ready);
  attend(l.attention, q, std::nullopt, x[0], x[1], x[3], x[4], x[5], of_every_query(attn_mask, q, k.size(2)), std::nullopt, out, lse, lse_mean, words, plan->parts(),
         std::nullopt, ready, l.cluster);
  return outputs(out, lse);
}

TORCH_LIBRARY(fp8attn_cuda, m) {
  const std::string launch =
      "int launcher, int rows, int keys, int panel, int value_rows, int ctas, int heads_side_by_side, int q_group, int k_group, int kv_length, float softmax_scale,"
      " int causal_offset, ";
  const std::string launch_from_fp16 = "int launcher, int ctas, int splits, float softmax_scale, int causal_offset, ";
  const std::string operands = "Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, Tensor? v_mean";
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };

  define("forward(" + launch + "Tensor q, Tensor? q_scale, " + operands +
         ", Tensor? attn_mask, Tensor? bias, Tensor(a!) out, Tensor(b!)? lse, Tensor? lse_mean, Tensor(c!)? counter, Tensor(d!)? parts, Tensor(e!)? part_rows) -> ()");
  m.impl("forward", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(forward)));
  define("forward_when_ready(" + launch + "Tensor q, " + operands + ", Tensor(a!) out, Tensor(b!)? lse, Tensor? lse_mean, Tensor(c!) counter, Tensor ready, int cluster) -> ()");
  m.impl("forward_when_ready", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(forward_when_ready)));
  define("forward_from_fp16(" + launch_from_fp16 + "Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse) -> ()");
  m.impl("forward_from_fp16", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(forward_from_fp16)));

  define(
      "quantize(int launcher, int ctas, int sampled, int stats_bytes, Tensor k, Tensor v, Tensor(a!) k_data, Tensor(b!) k_scale, Tensor(c!) k_mean, Tensor(d!) v_data, Tensor(e!) v_scale,"
      " Tensor(f!) v_mean, Tensor(g!)? ready) -> ()");
  m.impl("quantize", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(quantize)));

  // of any device: tensors that aren't like any before aren't an error here
  const auto any = c10::DispatchKey::CompositeExplicitAutograd;
  define("remember(int options, " + launch + "Tensor q, Tensor q_scale, " + operands + ", Tensor? attn_mask, Tensor out, int words, int split_ctas, int floats) -> ()");
  m.impl("remember", torch::dispatch(any, TORCH_FN(remember)));
  define("repeat(int options, Tensor q, Tensor q_scale, " + operands + ", Tensor? attn_mask=None) -> Tensor?");
  m.impl("repeat", torch::dispatch(any, TORCH_FN(repeat)));
  define("remember_from_fp16(int options, " + launch_from_fp16 + "bool lse, Tensor q, Tensor k, Tensor v, Tensor out) -> ()");
  m.impl("remember_from_fp16", torch::dispatch(any, TORCH_FN(remember_from_fp16)));
  define("repeat_from_fp16(int options, Tensor q, Tensor k, Tensor v) -> Tensor[]");
  m.impl("repeat_from_fp16", torch::dispatch(any, TORCH_FN(repeat_from_fp16)));
  define("remember_both(int options, " + launch + "int quantizer, int quantizer_ctas, int sampled, int stats_bytes, int cluster, bool lse, Tensor q, Tensor k, Tensor v,"
         " Tensor? attn_mask, Tensor[] quantized, Tensor out, int words, int split_ctas, int floats) -> ()");
  m.impl("remember_both", torch::dispatch(any, TORCH_FN(remember_both)));
  define("repeat_both(int options, Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None) -> Tensor[]");
  m.impl("repeat_both", torch::dispatch(any, TORCH_FN(repeat_both)));
}

}  // namespace
