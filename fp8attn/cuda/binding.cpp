// From tensors to Params. This file, plan.h and torch_abi.h are the only ones that know torch. fp8attn/cuda/run.py has
// validated what comes in.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "constants.h"
#include "params.h"
#include "plan.h"
#include "tensor_map.h"
#include "torch_abi.h"

namespace {

using fp8attn::check;
using fp8attn::recording;
using fp8attn::ScalarType;
using fp8attn::Tensor;

using Ints = std::vector<int64_t>;

// (1, 2, 3) for messages.
template <class Sizes>
std::string text(const Sizes& sizes) {
  std::string found = "(";
  for (int64_t size : sizes) found += (found.size() > 1 ? ", " : "") + std::to_string(size);
  return found + ")";
}

constexpr int64_t FAR = 1 << 30;  // behind any key, and no overflow when a row is added

fp8attn::OutType out_type(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return fp8attn::OutType::bf16;
    case ScalarType::Half:
      return fp8attn::OutType::f16;
    case ScalarType::Float:
      return fp8attn::OutType::f32;
    default:
      STD_TORCH_CHECK(false, "dtype is ", torch::headeronly::toString(type), "; it must be bfloat16, float16 or float32");
  }
}

// What a tensor map is made with. A plan puts addresses of later tensors in its place. While a call is recorded it is a
// small number, because no driver promises to take an address without memory.
const void* map_address(const Tensor& x) { return recording != nullptr ? reinterpret_cast<const void*>(recording->distance(x)) : x.const_data_ptr(); }

// Boxes of `rows` rows x `bytes` bytes of (B, H, S, D).
void encode_rows(CUtensorMap& map, const Tensor& x, int64_t rows, int64_t bytes) {
  const uint64_t size = x.element_size();
  const uint64_t sizes[4] = {size * x.size(3), uint64_t(x.size(2)), uint64_t(x.size(1)), uint64_t(x.size(0))};
  const uint64_t strides[3] = {size * x.stride(2), size * x.stride(1), size * x.stride(0)};
  const uint32_t box[4] = {uint32_t(bytes), uint32_t(rows), 1, 1};
  STD_TORCH_CHECK(fp8attn::encode(map, map_address(x), sizes, strides, box), "no tensor map for shape ", text(x.sizes()), ", strides ", text(x.strides()));
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

// By the address of an instance's launcher, in a library that torch doesn't know.
template <class P>
void launch(int64_t launcher, const P& p, int64_t ctas, int32_t device) {
  if (recording != nullptr) return recording->add(launcher, p, ctas);
  check(reinterpret_cast<fp8attn::Launcher<P>>(launcher)(p, ctas, fp8attn::current_stream(device)));
}

// An uninitialised tensor for a launch's own use. It must live until the kernel is launched.
Tensor room_of(const Ints& sizes, const Ints& strides, ScalarType dtype, const Tensor& like) {
  return recording != nullptr ? recording->tensor(sizes, strides, dtype, 0, false) : fp8attn::empty_strided(sizes, strides, dtype, like.device());
}

Tensor room_of(const Ints& sizes, ScalarType dtype, const Tensor& like) {
  Ints strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return room_of(sizes, strides, dtype, like);
}

Tensor room_of(int64_t bytes, const Tensor& like) { return room_of({bytes}, {1}, ScalarType::Byte, like); }

// What all instances are told, of V no more than where it is. The number of keys and V's width are the caller's.
fp8attn::Params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const std::optional<Tensor>& lse, double softmax_scale,
                          int64_t causal_offset) {
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
  p.head_dim = q.size(3);
  p.causal_offset = std::clamp(causal_offset, -FAR, FAR);
  p.score_scale = softmax_scale * 1.4426950408889634;
  p.out_type = out_type(out.scalar_type());
  p.half = q.scalar_type() == ScalarType::Half;
  return p;
}

// Arguments of a call beside its tensors: the address of the instance's launcher, its tile and box sizes (0 rows: no
// tensor maps), the grid, and the numbers of fp8attn.call.Call.
struct Launch {
  int64_t launcher, rows, keys, panel, value_rows, ctas, heads_in_l2, q_group, k_group, kv_length;
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
    p.mask_in_boxes = fp8attn::encode(p.mask_map, map_address(mask), sizes, strides, box);
  }
  const int64_t blocks = int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * ((l.kv_length + l.keys - 1) / l.keys), words = 4 * p.mask_rows * blocks;
  STD_TORCH_CHECK(blocks < int64_t(1) << 31, "attn_mask has ", blocks, " blocks of ", l.rows, " rows and ", l.keys, " keys; it must have fewer than 2^31");
  const Tensor room = room_of(4 * words + blocks, mask);
  p.mask_bits = static_cast<uint32_t*>(room.mutable_data_ptr());
  p.block_mask = reinterpret_cast<uint8_t*>(p.mask_bits + words);
  return room;
}

// The address of a tensor that may not be there.
template <class T>
const T* address_of(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

const std::optional<Tensor> NONE;

// Tensors and options of a call, as fp8attn.call.Call has them, and the memory through which its CTAs communicate.
struct Attention {
  const Tensor& q;
  const std::optional<Tensor>& q_scale = NONE;
  const Tensor &k, &k_scale, &v, &v_scale;
  const std::optional<Tensor>&v_mean = NONE, &attn_mask = NONE, &bias = NONE;
  const Tensor& out;
  const std::optional<Tensor>&lse = NONE, &lse_mean = NONE, &parts = NONE;
  int* counter = nullptr;
  void* part_rows = nullptr;
  const int* ready = nullptr;
  int ready_ctas = 0;
  int64_t first_offset = 0;
  double softcap = 0.0;
  const std::optional<Tensor>&sinks = NONE, &mean_scores = NONE, &tile_table = NONE;
};

// Whether values (shards, H, D, S) are contiguous in each shard, and shards begin whole rows apart.
bool are_shards(const Tensor& v) {
  const bool rows = v.stride(3) == 1 && v.stride(2) == v.size(3), heads = v.size(1) == 1 || v.stride(1) == v.size(2) * v.size(3);
  return rows && heads && v.stride(0) % v.size(3) == 0;
}

void attend(const Launch& l, const Attention& a) {
  const Tensor &q = a.q, &k = a.k, &v = a.v, &out = a.out;
  const bool in_shards = k.size(0) > q.size(0);
  const int64_t pitch = v.size(3), rows = v.size(1) * v.size(2), apart = in_shards ? v.stride(0) / pitch : rows;  // of V's matrix
  STD_TORCH_CHECK((in_shards ? are_shards(v) : v.is_contiguous()) && reinterpret_cast<uintptr_t>(v.const_data_ptr()) % 16 == 0, "values of shape ",
                  text(v.sizes()), " aren't contiguous from a multiple of 16 bytes on");
  fp8attn::Params p = params_of(q, k, v, out, a.lse, l.softmax_scale, l.causal_offset);
  p.kv_length = l.kv_length;
  p.value_dim = v.size(2);
  if (l.rows > 0) {
    // A thread that has made no CUDA call has no context, and without one the driver's encoder of tensor maps crashes.
    check(cudaSetDevice(q.get_device()));
    encode_rows(p.q_map, q, l.rows, l.panel);
    encode_rows(p.k_map, k, l.keys, l.panel);
    encode_rows(p.out_map, out, fp8attn::OUTPUT_ROWS, fp8attn::OUTPUT_BYTES);
    const uint64_t sizes[2] = {uint64_t(pitch), uint64_t((v.size(0) - 1) * apart + rows)}, strides[1] = {uint64_t(pitch)};
    const uint32_t box[2] = {uint32_t(l.keys), uint32_t(l.value_rows)};
    STD_TORCH_CHECK(fp8attn::encode(p.v_map, map_address(v), sizes, strides, box), "no tensor map for values of shape ", text(v.sizes()));
  }
  p.lse_mean = address_of<float>(a.lse_mean);
  p.v_pitch = pitch;
  p.q_aligned = is_aligned(q);
  p.k_aligned = is_aligned(k);
  p.q_scale = address_of<float>(a.q_scale);
  p.k_scale = a.k_scale.const_data_ptr<float>();
  p.v_scale = a.v_scale.const_data_ptr<float>();
  p.v_mean = address_of<float>(a.v_mean);
  p.counter = a.counter;
  p.key_splits = a.parts ? a.parts->size(0) : 1;
  p.parts = a.parts ? a.parts->mutable_data_ptr<float>() : nullptr;
  if (l.rows > 0 && a.parts) {  // of the tiles that CTAs share
    p.stream_k_ranges = a.parts->size(0);
    p.partials_ready = static_cast<int*>(a.part_rows);
  } else if (a.parts) {
    p.part_rows = static_cast<float*>(a.part_rows);
  }
  if (a.q_scale) copy_strides(p.q_scale_strides, *a.q_scale);
  copy_strides(p.k_scale_strides, a.k_scale);
  copy_strides(p.v_scale_strides, a.v_scale);
  if (a.attn_mask) {
    p.mask = a.attn_mask->const_data_ptr();
    p.mask_type = a.attn_mask->scalar_type() == ScalarType::Bool ? 0 : 1 + int(out_type(a.attn_mask->scalar_type()));
    copy_strides(p.mask_strides, *a.attn_mask);
  }
  const std::optional<Tensor> bits = a.attn_mask && l.rows > 0 ? std::optional(room_for_mask(p, *a.attn_mask, l)) : std::nullopt;
  if (a.bias) {
    STD_TORCH_CHECK(a.bias->is_contiguous() && reinterpret_cast<uintptr_t>(a.bias->const_data_ptr()) % 16 == 0, "bias of shape ", text(a.bias->sizes()),
                " isn't contiguous from a multiple of 16 bytes on");
    p.bias = a.bias->const_data_ptr<float>();
  }
  p.first_offset = std::clamp(a.first_offset, -FAR, FAR);
  p.softcap = a.softcap;
  p.inverse_softcap = 1.0 / a.softcap;
  p.sinks = address_of<float>(a.sinks);
  p.mean_scores = address_of<float>(a.mean_scores);
  p.tile_table = address_of<int>(a.tile_table);
  p.ready = a.ready;
  p.ready_ctas = a.ready_ctas;
  p.q_group = l.q_group;
  p.k_group = l.k_group;
  p.shard_blocks = FAR;
  if (in_shards) {
    p.shard_blocks = k.size(2) / l.keys;
    p.shard_rows = apart;
    p.next_shard_scales = a.k_scale.stride(0) - (l.k_group == l.keys ? p.shard_blocks * a.k_scale.stride(2) : 0);
  }
  p.heads_in_l2 = l.heads_in_l2;
  launch(l.launcher, p, l.ctas, q.get_device());
}

// Attends to quantized operands. `ready`: a word for each head of K, from whose value `ready_ctas` on the head is
// there; or none, if all are. Callers in Python have none.
void forward(int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_in_l2, int64_t q_group, int64_t k_group,
             int64_t kv_length, double softmax_scale, int64_t causal_offset, const Tensor& q, const std::optional<Tensor>& q_scale, const Tensor& k, const Tensor& k_scale,
             const Tensor& v, const Tensor& v_scale, const std::optional<Tensor>& v_mean, const std::optional<Tensor>& attn_mask, const std::optional<Tensor>& bias,
             const Tensor& out, const std::optional<Tensor>& lse, const std::optional<Tensor>& lse_mean, const std::optional<Tensor>& counter,
             const std::optional<Tensor>& parts, const std::optional<Tensor>& part_rows, int64_t first_offset, double softcap,
             const std::optional<Tensor>& sinks, const std::optional<Tensor>& mean_scores, const std::optional<Tensor>& tile_table, const std::optional<Tensor>& ready,
             int64_t ready_ctas) {
  attend({launcher, rows, keys, panel, value_rows, ctas, heads_in_l2, q_group, k_group, kv_length, softmax_scale, causal_offset},
         {.q = q, .q_scale = q_scale, .k = k, .k_scale = k_scale, .v = v, .v_scale = v_scale, .v_mean = v_mean, .attn_mask = attn_mask, .bias = bias, .out = out, .lse = lse,
          .lse_mean = lse_mean, .parts = parts, .counter = counter ? counter->mutable_data_ptr<int>() : nullptr,
          .part_rows = part_rows ? part_rows->mutable_data_ptr() : nullptr, .ready = address_of<int>(ready), .ready_ctas = int(ready_ctas),
          .first_offset = first_offset, .softcap = softcap, .sinks = sinks, .mean_scores = mean_scores, .tile_table = tile_table});
}

// The same of the instances that quantize: plain tensors, `splits` clusters for each head of k.
void forward_from_fp16(int64_t launcher, int64_t ctas, int64_t splits, double softmax_scale, int64_t causal_offset, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& out, const std::optional<Tensor>& lse) {
  fp8attn::Params p = params_of(q, k, v, out, lse, softmax_scale, causal_offset);
  p.kv_length = k.size(2);
  p.value_dim = v.size(3);
  copy_strides(p.v_strides, v);
  p.inverse_length = 1.0 / k.size(2);
  p.splits = splits;
  launch(launcher, p, ctas, q.get_device());
}

// Parameters of the quantizer of K and V that follow from V (B, H, S, D). K has its shape.
fp8attn::QuantizeParams params_of_values(const Tensor& v) {
  fp8attn::QuantizeParams p = {};
  p.v = v.const_data_ptr();
  copy_strides(p.v_strides, v);
  p.heads = v.size(1);
  p.length = v.size(2);
  p.head_dim = v.size(3);
  p.half = v.scalar_type() == ScalarType::Half;
  return p;
}

// Sets the parameters that follow from K and the results.
void write_to(fp8attn::QuantizeParams& p, const Tensor& k, const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean, const Tensor& v_data, const Tensor& v_scale,
              const Tensor& v_mean) {
  p.k = k.const_data_ptr();
  p.k_data = static_cast<uint8_t*>(k_data.mutable_data_ptr());
  p.k_scale = k_scale.mutable_data_ptr<float>();
  p.k_mean = k_mean.mutable_data_ptr<float>();
  p.v_data = static_cast<uint8_t*>(v_data.mutable_data_ptr());
  p.v_scale = v_scale.mutable_data_ptr<float>();
  p.v_mean = v_mean.mutable_data_ptr<float>();
  copy_strides(p.k_strides, k);
  copy_strides(p.k_data_strides, k_data);
  p.padded = v_data.size(3);
  p.int8 = k_data.scalar_type() == ScalarType::Char;
}

// Quantizes K and V, (B, H, S, D), into tensors that fp8attn/cuda/quantize.py has allocated. `sampled`: the number of
// tokens from which K's mean is computed. `stats_bytes`: the size of the memory through which its kernels pass
// statistics. `words`: set to 0; then each of the last B * H becomes the number of CTAs that have completed a head.
void quantize(int64_t launcher, int64_t ctas, int64_t sampled, int64_t stats_bytes, const Tensor& k, const Tensor& v, const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean,
              const Tensor& v_data, const Tensor& v_scale, const Tensor& v_mean, const std::optional<Tensor>& words) {
  fp8attn::QuantizeParams p = params_of_values(v);
  write_to(p, k, k_data, k_scale, k_mean, v_data, v_scale, v_mean);
  p.inverse_length = 1.0 / k.size(2);
  p.inverse_sample = 1.0 / sampled;
  if (words) {
    p.cleared = words->numel() - k.size(0) * k.size(1);
    p.ready = words->mutable_data_ptr<int>() + p.cleared;
  }
  const std::optional<Tensor> stats = stats_bytes > 0 ? std::optional(room_of(stats_bytes, k)) : std::nullopt;
  p.chunk_stats = stats ? stats->mutable_data_ptr() : nullptr;
  launch(launcher, p, ctas, k.get_device());
}

using Operands = std::vector<std::optional<Tensor>>;

// Quantizes K and V, and attends to them with Q that isn't quantized. `quantizer`: the first four arguments of
// `quantize`, the tokens of V's rows, and how many CTAs quantize a head if attention of a head begins once its K and V
// are quantized, else 0. `scratch`: those of fp8attn.cuda.run.Scratch, of which the quantizer sets counters and flags
// to 0. `adds_mean`: whether attention finds what K's mean adds to scores. `operands`: Q, K, V, a mask and sinks.
// `results`: output and LSE.
void quantize_and_attend(int64_t launcher, int64_t rows, int64_t keys, int64_t panel, int64_t value_rows, int64_t ctas, int64_t heads_in_l2, int64_t q_group,
                         int64_t k_group, int64_t kv_length, double softmax_scale, int64_t causal_offset, const Ints& quantizer, bool int8, const Ints& scratch,
                         bool adds_mean, int64_t first_offset, double softcap, const Operands& operands, const Operands& results) {
  STD_TORCH_CHECK(quantizer.size() == 6 && scratch.size() == 4 && operands.size() == 5 && operands[0] && operands[1] && operands[2] && results.size() == 2 && results[0],
                  "quantize_and_attend takes 6 numbers of the quantizer, 4 of scratch, 5 operands and 2 results");
  const Tensor &q = *operands[0], &k = *operands[1], &v = *operands[2];
  const int64_t batch = k.size(0), heads = k.size(1), length = k.size(2), dim = k.size(3), writers = quantizer[5];
  const auto floats = [&](const Ints& sizes) { return room_of(sizes, ScalarType::Float, k); };
  const bool heads_last = k.stride(1) < k.stride(2);
  const Ints k_strides = {heads * length * dim, heads_last ? dim : length * dim, heads_last ? heads * dim : dim, 1};
  const Tensor k_data = room_of({batch, heads, length, dim}, k_strides, int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn, k);
  const Tensor v_data = room_of({batch, heads, dim, quantizer[4]}, ScalarType::Float8_e4m3fn, k);
  const Tensor k_scale = floats({batch, heads, (length + keys - 1) / keys}), v_scale = floats({batch, heads, dim});
  const std::optional<Tensor> k_mean = floats({batch, heads, dim}), v_mean = floats({batch, heads, dim});
  const std::optional<Tensor> parts = scratch[2] > 0 ? std::optional(floats({scratch[2], scratch[3]})) : std::nullopt;
  // counter, flags, and a word for each head, one after the other
  const std::optional<Tensor> words =
      scratch[0] + scratch[1] + writers > 0 ? std::optional(room_of({scratch[0] + scratch[1] + batch * heads}, ScalarType::Int, k)) : std::nullopt;
  int* const counter = words ? words->mutable_data_ptr<int>() : nullptr;
  quantize(quantizer[0], quantizer[1], quantizer[2], quantizer[3], k, v, k_data, k_scale, *k_mean, v_data, v_scale, *v_mean, words);
  attend({launcher, rows, keys, panel, value_rows, ctas, heads_in_l2, q_group, k_group, kv_length, softmax_scale, causal_offset},
         {.q = q, .k = k_data, .k_scale = k_scale, .v = v_data, .v_scale = v_scale, .v_mean = v_mean, .attn_mask = operands[3], .out = *results[0], .lse = results[1],
          .lse_mean = adds_mean ? k_mean : NONE, .parts = parts, .counter = scratch[0] > 0 ? counter : nullptr, .part_rows = counter + scratch[0],
          .ready = writers > 0 ? counter + scratch[0] + scratch[1] : nullptr, .ready_ctas = int(writers), .first_offset = first_offset, .softcap = softcap, .sinks = operands[4]});
}

// Launches the quantizer of sequences that begin at cu_seqlens in the results, and have `seqused` tokens.
void launch_packed(int64_t launcher, fp8attn::QuantizeParams& p, int64_t ctas, int64_t stats_bytes, const Tensor& cu_seqlens, const std::optional<Tensor>& seqused) {
  p.cu_seqlens = cu_seqlens.const_data_ptr<int>();
  p.seqused = address_of<int>(seqused);
  p.sequences = cu_seqlens.size(0) - 1;
  p.units = ctas;
  const Tensor stats = room_of(stats_bytes, cu_seqlens);
  p.chunk_stats = stats.mutable_data_ptr();
  launch(launcher, p, ctas, cu_seqlens.get_device());
}

// Quantizes packed K and V, (1, H, T, D), each sequence as if it were alone.
void quantize_packed(int64_t launcher, int64_t ctas, int64_t cluster_chunks, int64_t stats_bytes, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens, const std::optional<Tensor>& seqused,
                     const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean, const Tensor& v_data, const Tensor& v_scale, const Tensor& v_mean) {
  fp8attn::QuantizeParams p = params_of_values(v);
  write_to(p, k, k_data, k_scale, k_mean, v_data, v_scale, v_mean);
  p.cluster_chunks = cluster_chunks;
  launch_packed(launcher, p, ctas, stats_bytes, cu_seqlens, seqused);
}

// Quantizes sequences of a cache in pages. k and v: (pages, H, slots, D). `batch`: the page table, and of each sequence
// where its results begin, how many tokens are quantized, which is the first, and how many are there.
void quantize_pages(int64_t launcher, int64_t ctas, int64_t stats_bytes, const Tensor& k, const Tensor& v, const std::vector<Tensor>& batch, const Tensor& k_data, const Tensor& k_scale,
                    const Tensor& k_mean, const Tensor& v_data, const Tensor& v_scale, const Tensor& v_mean) {
  STD_TORCH_CHECK(batch.size() == 5, "quantize_pages takes 5 tensors of a batch");
  const Tensor &table = batch[0], &starts = batch[1], &used = batch[2], &firsts = batch[3], &ends = batch[4];
  fp8attn::QuantizeParams p = params_of_values(v);
  write_to(p, k, k_data, k_scale, k_mean, v_data, v_scale, v_mean);
  p.length = k_data.size(2);
  p.page_table = table.const_data_ptr<int>();
  p.firsts = firsts.const_data_ptr<int>();
  p.ends = ends.const_data_ptr<int>();
  p.table_stride = table.stride(0);
  p.pages = k.size(0);
  p.page = k.size(2);
  p.page_log = (p.page & p.page - 1) == 0 ? __builtin_ctz(p.page) : -1;
  launch_packed(launcher, p, ctas, stats_bytes, starts, used);
}

// Measures V of a part of a sequence: sums and extremes of its token chunks, and what `write_part` must know of it.
void measure_part(int64_t launcher, int64_t ctas, const Tensor& v, const Tensor& sums, const Tensor& extremes, const Tensor& chunk_stats) {
  fp8attn::QuantizeParams p = params_of_values(v);
  p.v_sums = sums.mutable_data_ptr<float>();
  p.v_extremes = extremes.mutable_data_ptr<float>();
  p.chunk_stats = chunk_stats.mutable_data_ptr();
  p.step = fp8attn::QuantizeStep::measure;
  launch(launcher, p, ctas, v.get_device());
}

// Quantizes K and V of a part of a sequence by K's mean, and V's scales and means, of all of it.
void write_part(int64_t launcher, int64_t ctas, const Tensor& k, const Tensor& v, const Tensor& chunk_stats, const Tensor& k_data, const Tensor& k_scale, const Tensor& k_mean,
                const Tensor& v_data, const Tensor& v_scale, const Tensor& v_mean) {
  fp8attn::QuantizeParams p = params_of_values(v);
  write_to(p, k, k_data, k_scale, k_mean, v_data, v_scale, v_mean);
  p.chunk_stats = chunk_stats.mutable_data_ptr();
  p.step = fp8attn::QuantizeStep::write;
  launch(launcher, p, ctas, k.get_device());
}

// Quantizes any Q, K and V, (B, H, S, D). `numbers`: the channels that are rotated together, the rows under one scale
// of Q and of K, the number of tokens from which K's mean is computed, and the size of the memory through which its
// kernels pass statistics. `operands`: q, k and v; of packed k and v also cu_seqlens and seqused. `results`: data and
// scale of q; data, scale and mean of k; the same of v.
void quantize_general(int64_t launcher, int64_t ctas, const Ints& numbers, const Operands& operands, const Operands& results) {
  STD_TORCH_CHECK(numbers.size() == 5 && operands.size() == 5 && results.size() == 8, "quantize_general takes 5 numbers, 5 operands and 8 results");
  const auto address = [](const Operands& of, size_t i) { return of[i] ? of[i]->mutable_data_ptr() : nullptr; };
  const auto bytes = [&](size_t i) { return static_cast<uint8_t*>(address(results, i)); };
  const auto floats = [&](size_t i) { return static_cast<float*>(address(results, i)); };
  const std::optional<Tensor>&q = operands[0], &k = operands[1], &v = operands[2], &q_data = results[0], &k_data = results[2];
  const Tensor& first = q ? *q : *k;
  fp8attn::GeneralQuantizeParams p = {};
  p.q_data = bytes(0), p.q_scale = floats(1);
  p.k_data = bytes(2), p.k_scale = floats(3), p.k_mean = floats(4);
  p.v_data = bytes(5), p.v_scale = floats(6), p.v_mean = floats(7);
  p.batches = first.size(0);
  p.head_dim = first.size(3);
  p.part = numbers[0], p.q_group = numbers[1], p.k_group = numbers[2];
  p.inverse_part = 1.0 / std::max(p.part, 1);
  p.type = out_type(first.scalar_type());
  p.int8 = (q ? *q_data : *k_data).scalar_type() == ScalarType::Char;
  if (q) {
    p.q = q->const_data_ptr();
    copy_strides(p.q_strides, *q);
    copy_strides(p.q_data_strides, *q_data);
    p.q_heads = q->size(1), p.q_length = q->size(2), p.q_aligned = is_aligned(*q);
  }
  std::optional<Tensor> measured;
  if (k) {
    p.k = k->const_data_ptr(), p.v = v->const_data_ptr();
    copy_strides(p.k_strides, *k);
    copy_strides(p.v_strides, *v);
    copy_strides(p.k_data_strides, *k_data);
    p.kv_heads = k->size(1), p.kv_length = k->size(2), p.value_dim = v->size(3), p.padded = results[5]->size(3);
    p.k_aligned = is_aligned(*k), p.v_aligned = is_aligned(*v);
    p.inverse_length = 1.0 / p.kv_length, p.inverse_sample = 1.0 / numbers[3];
    measured = room_of(numbers[4], *k);
    p.measured = measured->mutable_data_ptr();
  }
  if (operands[3]) {
    p.packed.cu_seqlens = operands[3]->const_data_ptr<int>();
    p.packed.seqused = address_of<int>(operands[4]);
    p.packed.sequences = operands[3]->size(0) - 1;
    p.packed.length = p.kv_length;
  }
  launch(launcher, p, ctas, first.get_device());
}

// Adds to `lse`, (B, Hq, Sq), what K's mean, rotated in parts of `part` channels, adds to the scores of q.
void unsmooth_lse(int64_t launcher, int64_t ctas, int64_t part, double softmax_scale, const Tensor& q, const Tensor& k_mean, const Tensor& lse, const Tensor& out) {
  fp8attn::UnsmoothLseParams p = {};
  p.q = q.const_data_ptr();
  p.k_mean = k_mean.const_data_ptr<float>();
  p.lse = lse.const_data_ptr<float>();
  p.out = out.mutable_data_ptr<float>();
  copy_strides(p.q_strides, q);
  p.q_heads = q.size(1), p.kv_heads = k_mean.size(1), p.q_length = q.size(2), p.head_dim = q.size(3);
  p.part = part;
  p.softmax_scale = softmax_scale;
  p.type = out_type(q.scalar_type());
  p.q_aligned = is_aligned(q);
  launch(launcher, p, ctas, q.get_device());
}

// Boxes of `rows` rows x `bytes` bytes of a contiguous tensor, as one matrix of rows of its last size.
void encode_matrix(CUtensorMap& map, const Tensor& x, int64_t rows, int64_t bytes) {
  const uint64_t pitch = x.element_size() * x.size(x.dim() - 1), sizes[2] = {pitch, uint64_t(x.numel() / x.size(x.dim() - 1))}, strides[1] = {pitch};
  const uint32_t box[2] = {uint32_t(bytes), uint32_t(rows)};
  STD_TORCH_CHECK(fp8attn::encode(map, map_address(x), sizes, strides, box), "no tensor map for shape ", text(x.sizes()));
}

// The parameters that both decode kernels have, of queries (B, Hq, Sq, D) or packed ones (T, Hq, D). `most`: the most
// queries of a row of the batch. `part`: channels that are rotated together. `batch`: the page table, lengths, counts,
// sequences and cu_seqlens of pages.PagedBatch.
// `results`: the output, its LSE, memory for partial results, and tickets.
fp8attn::DecodeParams decode_params_of(int64_t ctas, int64_t most, int64_t part, double softmax_scale, const Tensor& q, int64_t kv_heads, const Operands& batch,
                                       const std::vector<Tensor>& results) {
  STD_TORCH_CHECK(batch.size() == 5 && batch[0] && batch[1] && results.size() == 5, "a decode kernel takes 5 tensors of a batch and 5 results");
  fp8attn::DecodeParams p = {};
  p.q = q.const_data_ptr();
  p.page_table = address_of<int>(batch[0]), p.lengths = address_of<int>(batch[1]), p.counts = address_of<int>(batch[2]), p.sequences = address_of<int>(batch[3]);
  p.cu_seqlens = address_of<int>(batch[4]);
  p.out = results[0].mutable_data_ptr(), p.lse = results[1].mutable_data_ptr<float>();
  p.parts = results[2].mutable_data_ptr<float>(), p.part_rows = results[3].mutable_data_ptr<float>();
  p.tickets = results[4].mutable_data_ptr<int>(), p.tickets_of_head = 1;
  p.table_stride = batch[0]->stride(0), p.table_width = batch[0]->size(1);
  p.batches = batch[0]->size(0), p.q_heads = q.size(1), p.kv_heads = kv_heads, p.q_length = most;
  if (p.cu_seqlens == nullptr) {
    copy_strides(p.q_strides, q);
    p.out_strides[0] = p.lse_strides[0] = q.size(1) * q.size(2), p.out_strides[1] = p.lse_strides[1] = q.size(2), p.out_strides[2] = 1;
  } else {
    p.tokens = q.size(0);
    p.q_strides[1] = q.stride(1), p.q_strides[2] = q.stride(0);
    p.out_strides[1] = 1, p.out_strides[2] = q.size(1), p.lse_strides[1] = q.size(0);
  }
  p.group = p.q_heads / p.kv_heads, p.group_inverse = ~0u / p.group;
  p.ctas = ctas, p.part_height = results[2].size(1);
  const int tiles = p.batches * p.kv_heads;
  p.tiles_of_group = (tiles + p.ctas - 1) / p.ctas, p.ctas_of_group = std::clamp(p.ctas / tiles, 1, fp8attn::MOST_PARTS);
  p.ctas_of_group_inverse = ((1 << 16) + p.ctas_of_group - 1) / p.ctas_of_group;
  p.part = part, p.inverse_part = 1.0 / std::max<int64_t>(part, 1);
  p.score_scale = softmax_scale * 1.4426950408889634;
  p.out_type = out_type(results[0].scalar_type());
  p.half = q.scalar_type() == ScalarType::Half;
  return p;
}

// Attends to a KV cache with few queries. `numbers`: `most` and `part` of decode_params_of, whether rows of more
// queries are another kernel's, and how many keys before its own one a query sees, or -1: all. `tokens`: queries;
// sinks, or none. `storage`: the tensors of pages.Storage. `batch`, `results`: as of decode_params_of.
void decode(int64_t launcher, int64_t ctas, const Ints& numbers, double softmax_scale, double softcap, const Operands& tokens, const std::vector<Tensor>& storage,
            const Operands& batch, const std::vector<Tensor>& results) {
  STD_TORCH_CHECK(numbers.size() == 5 && tokens.size() == 2 && tokens[0] && storage.size() == 10, "decode takes 5 numbers, 2 tensors of tokens and 10 of a cache");
  const Tensor& q = *tokens[0];
  const Tensor &k = storage[0], &v = storage[2], &recent_k = storage[7], &recent_v = storage[8];
  const int64_t dim = k.size(3);
  fp8attn::DecodeParams p = decode_params_of(ctas, numbers[0], numbers[1], softmax_scale, q, k.size(1), batch, results);
  p.leaves_longer = numbers[2], p.left = numbers[3], p.part_log = numbers[4], p.softcap = softcap, p.sinks = address_of<float>(tokens[1]);
  // A thread that has made no CUDA call has no context, and without one the driver's encoder of tensor maps crashes.
  check(cudaSetDevice(q.get_device()));
  const int64_t keys = k.size(2), panel = std::min<int64_t>(dim, 128);
  encode_matrix(p.k_map, k, keys, panel);
  encode_matrix(p.v_map, v, dim, keys);
  encode_matrix(p.recent_k_map, recent_k, keys / 2, 128);
  encode_matrix(p.recent_v_map, recent_v, keys / 2, 128);
  p.k = k.const_data_ptr(), p.v = v.const_data_ptr(), p.recent_k = recent_k.const_data_ptr(), p.recent_v = recent_v.const_data_ptr();
  p.k_scale = storage[1].const_data_ptr<float>(), p.v_page_scale = storage[3].const_data_ptr<float>();
  p.k_mean = storage[4].const_data_ptr<float>(), p.v_mean = storage[5].const_data_ptr<float>(), p.v_scale = storage[6].const_data_ptr<float>();
  p.every_page = k.size(0), p.every_sequence = recent_k.size(0);
  launch(launcher, p, ctas, q.get_device());
}

// Boxes of `rows` slots x at most 128 bytes of the cache of another engine, (P, page, Hkv, D).
void encode_slots(CUtensorMap& map, const Tensor& x, int64_t rows) {
  const uint64_t size = x.element_size(), width = size * x.size(3);
  // a dimension of size 1 may have any stride; it gets one that a map may have
  const auto stride = [&](int i) { return x.size(i) == 1 ? width : size * x.stride(i); };
  const uint64_t sizes[4] = {width, uint64_t(x.size(1)), uint64_t(x.size(0)), uint64_t(x.size(2))}, strides[3] = {stride(1), stride(0), stride(2)};
  const uint32_t box[4] = {uint32_t(std::min<uint64_t>(width, 128)), uint32_t(rows), 1, 1};
  // what is behind a row is often another head's, for which L2 has no room until that comes
  const int brought = strides[0] == width ? 256 : std::min<uint64_t>(width, 256);
  STD_TORCH_CHECK(fp8attn::encode(map, map_address(x), sizes, strides, box, brought), "no tensor map for shape ", text(x.sizes()), ", strides ", text(x.strides()));
}

// Attends to the KV cache of another engine with few queries. `queries`: `most` of decode_params_of, and whether rows
// of more queries are another kernel's. `numbers`: those of decode_tensors.numbers_of. `cache`: K, V, their scales, and
// sinks. `batch`, `results`: as of decode_params_of.
void decode_tensors(int64_t launcher, int64_t ctas, const Ints& queries, const Ints& numbers, double softmax_scale, double softcap, const Tensor& q,
                    const Operands& cache, const Operands& batch, const std::vector<Tensor>& results) {
  STD_TORCH_CHECK(queries.size() == 2 && numbers.size() == 15 && cache.size() == 5 && cache[0] && cache[1],
                  "decode_tensors takes 2 numbers of queries, 15 others and 5 tensors of a cache");
  const Tensor &k = *cache[0], &v = *cache[1];
  fp8attn::DecodeParams p = decode_params_of(ctas, queries[0], 0, softmax_scale, q, k.size(2), batch, results);
  p.leaves_longer = queries[1];
  p.page = numbers[0], p.copied_tokens = numbers[1], p.capacity = numbers[2], p.left = numbers[3], p.right = numbers[4], p.part_log = numbers[5], p.softcap = softcap;
  p.tickets_of_head = numbers[6], p.group_tickets = p.tickets + int64_t(p.batches) * p.kv_heads * p.tickets_of_head;
  std::copy_n(&numbers[7], 4, p.k_scale_strides);
  std::copy_n(&numbers[11], 4, p.v_scale_strides);
  check(cudaSetDevice(q.get_device()));  // as in `decode`
  encode_slots(p.k_map, k, p.copied_tokens);
  encode_slots(p.v_map, v, p.copied_tokens);
  p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
  p.k_scale = address_of<float>(cache[2]), p.v_scale = address_of<float>(cache[3]), p.sinks = address_of<float>(cache[4]);
  p.every_page = k.size(0), p.every_sequence = p.batches;
  launch(launcher, p, ctas, q.get_device());
}

// Attends to a KV cache with many queries. `numbers`: heads_in_l2, how many keys before its own one a query sees, how
// many packed queries a row may have, log2 of the rows of a tile's unit, and how many CTAs split a tile's keys. Packed
// tensors are (1, H, T, D). `tokens`: queries; keys and values of their tokens, or none; sinks, or none. `storage`,
// `batch`: those of `decode`, but for cu_seqlens the table of tiles of packed queries. `results`: the output, its LSE,
// and a counter of tiles, 0 at launch, or none; or outputs of all splits, (splits * B, H, S, D), and their sums.
void prefill(int64_t launcher, int64_t ctas, const Ints& numbers, double softmax_scale, double softcap, const Operands& tokens, const std::vector<Tensor>& storage,
             const Operands& batch, const Operands& results) {
  STD_TORCH_CHECK(numbers.size() == 5 && tokens.size() == 4 && tokens[0] && storage.size() == 10 && batch.size() == 5 && batch[0] &&
                      batch[1] && results.size() == 3 && results[0] && results[1],
                  "prefill takes 5 numbers, 4 tensors of tokens, 10 of a cache, 5 of a batch and 3 results");
  const Tensor &q = *tokens[0], &k = storage[0], &v = storage[2], &recent_k = storage[7], &out = *results[0];
  fp8attn::PrefillParams p = {};
  p.call = params_of(q, k, v, out, results[1], softmax_scale, 0);
  p.call.value_dim = q.size(3), p.call.key_splits = numbers[4];
  if (numbers[4] > 1) std::swap(p.call.part_rows, p.call.lse);
  // A thread that has made no CUDA call has no context, and without one the driver's encoder of tensor maps crashes.
  check(cudaSetDevice(q.get_device()));
  const int64_t dim = q.size(3), keys = k.size(2), panel = std::min<int64_t>(dim, 128);
  encode_rows(p.call.q_map, q, int64_t(1) << numbers[3], 128);
  encode_matrix(p.call.k_map, k, keys, panel);
  encode_matrix(p.call.v_map, v, dim, keys);
  encode_rows(p.call.out_map, out, fp8attn::OUTPUT_ROWS, fp8attn::OUTPUT_BYTES);
  p.call.k_scale = storage[1].const_data_ptr<float>(), p.v_page_scale = storage[3].const_data_ptr<float>();
  p.call.lse_mean = storage[4].const_data_ptr<float>(), p.call.v_mean = storage[5].const_data_ptr<float>(), p.call.v_scale = storage[6].const_data_ptr<float>();
  copy_strides(p.call.v_scale_strides, storage[6]);
  p.call.counter = results[2] ? results[2]->mutable_data_ptr<int>() : nullptr;
  p.call.heads_in_l2 = numbers[0], p.left = numbers[1], p.most = numbers[2], p.unit_log = numbers[3];
  p.call.tile_table = address_of<int>(batch[4]);
  p.call.softcap = softcap, p.call.inverse_softcap = 1.0 / softcap, p.call.sinks = address_of<float>(tokens[3]);
  p.recent_k = recent_k.const_data_ptr(), p.recent_v = storage[8].const_data_ptr();
  if (tokens[1]) {
    p.new_k = tokens[1]->const_data_ptr(), p.new_v = tokens[2]->const_data_ptr();
    copy_strides(p.new_k_strides, *tokens[1]);
    copy_strides(p.new_v_strides, *tokens[2]);
    encode_rows(p.new_k_map, *tokens[1], keys / 2, 128);
    encode_rows(p.new_v_map, *tokens[2], keys / 2, 128);
  }
  p.page_table = address_of<int>(batch[0]), p.lengths = address_of<int>(batch[1]), p.counts = address_of<int>(batch[2]), p.sequences = address_of<int>(batch[3]);
  p.table_stride = batch[0]->stride(0), p.table_width = batch[0]->size(1);
  p.every_page = k.size(0), p.every_sequence = recent_k.size(0);
  launch(launcher, p, ctas, q.get_device());
}

// Appends tokens to a KV cache. `numbers`: the channels that are rotated together, the pages that may become complete
// (AppendParams::most_pages), the most new tokens of a row that isn't left out, and whether tokens are few, pages are
// written, tokens are, K's and V's means are removed.
// `tokens`: keys and values, packed ones as (1, H, T, D). `storage`, `batch`: as of `decode`, with cu_seqlens.
void append(int64_t launcher, int64_t ctas, const Ints& numbers, const std::vector<Tensor>& tokens, const std::vector<Tensor>& storage, const Operands& batch) {
  STD_TORCH_CHECK(numbers.size() == 8 && tokens.size() == 2 && storage.size() == 10 && batch.size() == 5 && batch[0] && batch[1],
                  "append takes 8 numbers, 2 tensors of tokens, 10 of a cache and 5 of a batch");
  const Tensor &k = tokens[0], &v = tokens[1];
  const auto floats = [&](size_t i) { return storage[i].mutable_data_ptr<float>(); };
  fp8attn::AppendParams p = {};
  p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
  p.k_pages = static_cast<uint8_t*>(storage[0].mutable_data_ptr()), p.v_pages = static_cast<uint8_t*>(storage[2].mutable_data_ptr());
  p.k_scale = floats(1), p.v_page_scale = floats(3), p.k_mean = floats(4), p.v_mean = floats(5), p.v_scale = floats(6);
  p.recent_k = storage[7].mutable_data_ptr(), p.recent_v = storage[8].mutable_data_ptr();
  p.page_table = address_of<int>(batch[0]), p.lengths = address_of<int>(batch[1]), p.counts = address_of<int>(batch[2]), p.sequences = address_of<int>(batch[3]);
  p.cu_seqlens = address_of<int>(batch[4]);
  copy_strides(p.k_strides, k);
  copy_strides(p.v_strides, v);
  if (batch[4]) p.k_strides[0] = p.v_strides[0] = 0;
  p.table_stride = batch[0]->stride(0), p.table_width = batch[0]->size(1);
  p.rows = batch[1]->size(0), p.kv_heads = k.size(1), p.length = k.size(2), p.head_dim = k.size(3), p.value_dim = v.size(3);
  p.every_page = storage[0].size(0), p.every_sequence = storage[7].size(0);
  p.part = numbers[0], p.inverse_part = 1.0 / std::max(p.part, 1), p.most_pages = numbers[1], p.most = numbers[2];
  p.step = numbers[3] ? fp8attn::AppendStep::few : fp8attn::AppendStep::pages;
  p.pages = numbers[4], p.tokens = numbers[5], p.smooth_k = numbers[6], p.smooth_v = numbers[7];
  p.half = k.scalar_type() == ScalarType::Half, p.int8 = storage[0].scalar_type() == ScalarType::Char;
  launch(launcher, p, ctas, k.get_device());
}

// The tensors among a call's operands.
std::vector<Tensor> present(const Operands& operands) {
  std::vector<Tensor> found;
  found.reserve(operands.size());
  for (const std::optional<Tensor>& x : operands)
    if (x) found.push_back(*x);
  return found;
}

// What a plan is found by: the call's options, and which operands are tensors, with their dtype, device, alignment,
// shape and strides. Empty if there are tensors that no plan is for.
fp8attn::Facts facts(int64_t options, const Operands& operands) {
  fp8attn::Facts found;
  found.reserve(1 + 13 * operands.size());
  found.push_back(options);
  for (const std::optional<Tensor>& operand : operands) {
    if (!operand) {
      found.push_back(-1);
      continue;
    }
    const Tensor& x = *operand;
    if (!fp8attn::is_strided(x)) return {};
    found.push_back(x.dim());
    found.push_back(int64_t(x.scalar_type()));
    found.push_back(int64_t(x.device().type()));
    found.push_back(x.device().index());
    found.push_back(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16);
    found.insert(found.end(), x.sizes().begin(), x.sizes().end());
    found.insert(found.end(), x.strides().begin(), x.strides().end());
  }
  return found;
}

// From now on this thread's launches are recorded, until `keep` or `discard`.
// Its tensors are `device`'s.
void record(fp8attn::Device device) { recording = std::make_unique<fp8attn::Recording>(device); }

void discard() { recording.reset(); }

Tensor recorded_tensor(const Ints& size, const Ints& stride, ScalarType dtype, int64_t remainder, bool zero) {
  STD_TORCH_CHECK(recording != nullptr, "nothing is being recorded");
  return recording->tensor(size, stride, dtype, remainder, zero);
}

void record_function(int64_t function, const Ints& shape, bool dependent, const Ints& words, const Ints& pointers) {
  STD_TORCH_CHECK(recording != nullptr && shape.size() == 5, "nothing is being recorded");
  recording->add(function, shape, dependent, words, pointers);
}

// Ends the recording. `repeat` takes calls with these options and operands like these from now on, if the result is
// true. `outputs` are recorded tensors.
bool keep(int64_t options, const Operands& operands, const std::vector<Tensor>& outputs) {
  STD_TORCH_CHECK(recording != nullptr, "nothing is being recorded");
  fp8attn::Facts known = facts(options, operands);
  auto plan = std::exchange(recording, nullptr)->finish(present(operands).size(), outputs);
  if (known.empty() || plan == nullptr) return false;
  fp8attn::plans().add(std::move(known), std::move(plan));
  return true;
}

// The outputs of a call like one that was recorded, of which there may be none; null if no call like it was recorded.
std::optional<std::vector<Tensor>> repeat(int64_t options, const Operands& operands) {
  const fp8attn::Facts known = facts(options, operands);
  const auto plan = known.empty() ? nullptr : fp8attn::plans().find(known);
  if (plan == nullptr) return std::nullopt;
  const std::vector<Tensor> tensors = present(operands);
  const fp8attn::DeviceGuard guard(tensors.at(0).get_device_index());
  return plan->run(tensors);
}

STABLE_TORCH_LIBRARY(fp8attn_cuda, m) {
  const std::string launch =
      "int launcher, int rows, int keys, int panel, int value_rows, int ctas, int heads_in_l2, int q_group, int k_group, int kv_length, float softmax_scale,"
      " int causal_offset, ";
  const std::string operands = "Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, Tensor? v_mean";
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };

  define("forward(" + launch + "Tensor q, Tensor? q_scale, " + operands +
         ", Tensor? attn_mask, Tensor? bias, Tensor(a!) out, Tensor(b!)? lse, Tensor? lse_mean, Tensor(c!)? counter, Tensor(d!)? parts, Tensor(e!)? part_rows, int first_offset, float softcap, Tensor? sinks, Tensor? mean_scores, Tensor? tile_table=None, Tensor? ready=None, int ready_ctas=0) -> ()");
  define("quantize_and_attend(" + launch +
         "int[] quantizer, bool int8, int[] scratch, bool adds_mean, int first_offset, float softcap, Tensor?[] operands, Tensor?[] results) -> ()");
  define("forward_from_fp16(int launcher, int ctas, int splits, float softmax_scale, int causal_offset, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse) -> ()");
  define(
      "quantize(int launcher, int ctas, int sampled, int stats_bytes, Tensor k, Tensor v, Tensor(a!) k_data, Tensor(b!) k_scale, Tensor(c!) k_mean, Tensor(d!) v_data, Tensor(e!) v_scale,"
      " Tensor(f!) v_mean, Tensor(g!)? words) -> ()");
  define(
      "quantize_packed(int launcher, int ctas, int cluster_chunks, int stats_bytes, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? seqused, Tensor(a!) k_data, Tensor(b!) k_scale, Tensor(c!) k_mean,"
      " Tensor(d!) v_data, Tensor(e!) v_scale, Tensor(f!) v_mean) -> ()");
  define(
      "quantize_pages(int launcher, int ctas, int stats_bytes, Tensor k, Tensor v, Tensor[] batch, Tensor(a!) k_data, Tensor(b!) k_scale, Tensor(c!) k_mean, Tensor(d!) v_data, Tensor(e!) v_scale,"
      " Tensor(f!) v_mean) -> ()");
  define("measure_part(int launcher, int ctas, Tensor v, Tensor(a!) sums, Tensor(b!) extremes, Tensor(c!) chunk_stats) -> ()");
  define(
      "write_part(int launcher, int ctas, Tensor k, Tensor v, Tensor chunk_stats, Tensor(a!) k_data, Tensor(b!) k_scale, Tensor k_mean, Tensor(c!) v_data, Tensor v_scale,"
      " Tensor v_mean) -> ()");

  define("quantize_general(int launcher, int ctas, int[] numbers, Tensor?[] operands, Tensor?[] results) -> ()");
  define("unsmooth_lse(int launcher, int ctas, int part, float softmax_scale, Tensor q, Tensor k_mean, Tensor lse, Tensor(a!) out) -> ()");

  define("decode(int launcher, int ctas, int[] numbers, float softmax_scale, float softcap, Tensor?[] tokens, Tensor[] storage, Tensor?[] batch, Tensor(a!)[] results) -> ()");

  define(
      "decode_tensors(int launcher, int ctas, int[] queries, int[] numbers, float softmax_scale, float softcap, Tensor q, Tensor?[] cache, Tensor?[] batch, Tensor(a!)[] results) -> ()");

  define("prefill(int launcher, int ctas, int[] numbers, float softmax_scale, float softcap, Tensor?[] tokens, Tensor[] storage, Tensor?[] batch, Tensor?[] results) -> ()");

  define("append(int launcher, int ctas, int[] numbers, Tensor[] tokens, Tensor(a!)[] storage, Tensor?[] batch) -> ()");

  define("record(Device device) -> ()");
  define("discard() -> ()");
  define("recorded_tensor(int[] size, int[] stride, ScalarType dtype, int remainder, bool zero) -> Tensor");
  define("record_function(int function, int[] shape, bool dependent, int[] words, int[] pointers) -> ()");
  define("keep(int options, Tensor?[] operands, Tensor[] outputs) -> bool");
  define("repeat(int options, Tensor?[] operands) -> Tensor[]?");
}

// The operators that launch kernels.
void implement_launches(torch::stable::detail::StableLibrary& m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("quantize_and_attend", TORCH_BOX(&quantize_and_attend));
  m.impl("forward_from_fp16", TORCH_BOX(&forward_from_fp16));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_packed", TORCH_BOX(&quantize_packed));
  m.impl("quantize_pages", TORCH_BOX(&quantize_pages));
  m.impl("measure_part", TORCH_BOX(&measure_part));
  m.impl("write_part", TORCH_BOX(&write_part));
  m.impl("quantize_general", TORCH_BOX(&quantize_general));
  m.impl("unsmooth_lse", TORCH_BOX(&unsmooth_lse));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("decode_tensors", TORCH_BOX(&decode_tensors));
  m.impl("prefill", TORCH_BOX(&prefill));
  m.impl("append", TORCH_BOX(&append));
}

STABLE_TORCH_LIBRARY_IMPL(fp8attn_cuda, CUDA, m) { implement_launches(m); }

// Of any device: tensors that aren't like any before aren't an error here.
STABLE_TORCH_LIBRARY_IMPL(fp8attn_cuda, CompositeExplicitAutograd, m) {
  m.impl("record", TORCH_BOX(&record));
  m.impl("discard", TORCH_BOX(&discard));
  m.impl("recorded_tensor", TORCH_BOX(&recorded_tensor));
  m.impl("record_function", TORCH_BOX(&record_function));
  m.impl("keep", TORCH_BOX(&keep));
  m.impl("repeat", TORCH_BOX(&repeat));
}

}  // namespace
