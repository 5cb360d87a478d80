// What the launches of the general quantizer share: their grids, the blocks of rows, the runs of V.
#pragma once

#include "config.h"
#include "params.h"
#include "tile/channels.h"
#include "tile/quantize.h"

namespace fp8attn {

constexpr int MEASURERS = 128;  // threads of `general_measure` and `general_finish`
constexpr int MEASURER_WARPS = MEASURERS / 32;
constexpr int OF_WARP = LANES / MEASURER_WARPS;  // lanes of quantization.lane_sum of a warp: MEASURER_WARPS apart
constexpr int WRITERS = 256;                     // threads of `general_write`
constexpr int WRITER_WARPS = WRITERS / 32;
constexpr int BLOCK_WORDS = SCALE_BLOCK / 32;
static_assert(MEASURED_CHANNELS == MEASURERS / LANES * CHUNK && MEASURED_CHANNELS == 32);
static_assert(TOKEN_CHUNK % SCALE_BLOCK == 0 && LANES == 32);

// What `general_measure` finds of MEASURED_CHANNELS channels of a token chunk of V: the statistics of finite elements,
// and the non-finite tokens. Token i is bit i % 32 of word i / 32.
struct MeasuredChunk {
  float sum[MEASURED_CHANNELS], low[MEASURED_CHANNELS], high[MEASURED_CHANNELS];
  uint32_t nonfinite[STEPS];
};
static_assert(sizeof(MeasuredChunk) == MEASURED_CHUNK_BYTES);

// The number of CTAs of each launch, and what a CTA works on.
struct GeneralGrid {
  int kv_heads, token_chunks, value_slices, key_slices, k_blocks, q_blocks, run, value_ctas;

  __host__ __device__ explicit GeneralGrid(const GeneralQuantizeParams& p)
      : kv_heads(p.v == nullptr ? 0 : p.batches * p.kv_heads),
        token_chunks((p.kv_length + TOKEN_CHUNK - 1) / TOKEN_CHUNK),
        value_slices((p.value_dim + MEASURED_CHANNELS - 1) / MEASURED_CHANNELS),
        key_slices(p.k_mean == nullptr ? 0 : (p.head_dim + MEASURED_CHANNELS - 1) / MEASURED_CHANNELS),
        k_blocks((p.kv_length + SCALE_BLOCK - 1) / SCALE_BLOCK),
        q_blocks((p.q_length + SCALE_BLOCK - 1) / SCALE_BLOCK),
        // without feedback, the groups of a run don't depend on each other
        run(p.kv_length > TOKEN_CHUNK ? RUN : GROUP),
        value_ctas((p.padded / run * (p.value_dim / 2) + WRITERS - 1) / WRITERS) {}

  // Token chunks of V and, if K has a mean, its sample; MEASURED_CHANNELS channels each.
  __host__ __device__ int measuring_ctas_of_head() const { return token_chunks * value_slices + key_slices; }
  __host__ __device__ int measuring_ctas() const { return kv_heads * measuring_ctas_of_head(); }

  // Channels of V; and the mean of K.
  __host__ __device__ int finishing_ctas() const { return kv_heads * (value_slices + (key_slices > 0)); }

  // Runs of channel pairs of V, and blocks of K. Behind those of all heads: blocks of Q.
  __host__ __device__ int writing_ctas_of_head() const { return value_ctas + k_blocks; }

  // Where rows have a launch of their own: runs of V; blocks of K, then of Q.
  __host__ __device__ int value_writing_ctas() const { return kv_heads * value_ctas; }
  __host__ __device__ int staged_blocks(const GeneralQuantizeParams& p) const { return kv_heads * k_blocks + (p.q == nullptr ? 0 : p.batches * p.q_heads * q_blocks); }
};

// The first element of a head of (B, H, S, D).
template <typename T>
__device__ const T* head_of(const void* x, const int64_t (&strides)[3], int heads, int index) {
  return static_cast<const T*>(x) + index / heads * strides[0] + index % heads * strides[1];
}

// A run of two channels of V: `item` of those of a head. A warp's threads have adjacent channels.
struct ValueRun {
  int64_t begin, row;  // the first token; the first channel among those of all heads
  int channel;
  bool exists;

  __device__ ValueRun(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, uint32_t item) {
    const uint32_t pairs = p.value_dim / 2;
    channel = item % pairs * 2;
    begin = int64_t(item / pairs) * grid.run, row = int64_t(head) * p.value_dim + channel;
    exists = begin < p.padded;
  }

  __device__ float2 mean(const GeneralQuantizeParams& p) const { return p.v_mean == nullptr ? float2{} : float2{p.v_mean[row], p.v_mean[row + 1]}; }
  __device__ float2 factor(const GeneralQuantizeParams& p) const { return {__frcp_rn(p.v_scale[row]), __frcp_rn(p.v_scale[row + 1])}; }

  // Token `begin`, and where its codes go.
  template <typename T>
  __device__ const T* from(const GeneralQuantizeParams& p, int head) const {
    return head_of<T>(p.v, p.v_strides, p.kv_heads, head) + begin * p.v_strides[2] + channel;
  }
  __device__ uint8_t* to(const GeneralQuantizeParams& p) const { return p.v_data + row * p.padded + begin; }
};

// quantization.feedback
__device__ inline __half2 gain_of(const GeneralQuantizeParams& p) { return __half2half2(__float2half(p.kv_length > TOKEN_CHUNK ? FEEDBACK : 0.0f)); }

// Writes the codes of a run.
template <bool ALIGNED, typename T>
__device__ void write_values(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, uint32_t item) {
  const ValueRun run(p, grid, head, item);
  if (!run.exists) return;
  const float2 mean = run.mean(p), factor = run.factor(p);
  const __half2 gain = gain_of(p);
  const T* from = run.from<T>(p, head);
  uint8_t* to = run.to(p);
  Feedback feedback;
#pragma unroll 1
  for (int first = 0; first < grid.run; first += GROUP) {
    float2 x[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) x[i] = run.begin + first + i < p.kv_length ? load_pair<ALIGNED>(from + (first + i) * p.v_strides[2]) : float2{NAN, NAN};
    const auto number = [&](int i) -> float2 {
      const float2 y = x[i];
      return {is_finite(y.x) ? (y.x - mean.x) * factor.x : 0.0f, is_finite(y.y) ? (y.y - mean.y) * factor.y : 0.0f};
    };
    uint4 of_channel[2];
    encode_group(feedback, gain, number, of_channel);
#pragma unroll
    for (int c = 0; c < 2; ++c) *reinterpret_cast<uint4*>(to + c * p.padded + first) = of_channel[c];
  }
}

// SCALE_BLOCK rows of Q or K that a CTA quantizes. `scale` is that of the block, or of its first row.
struct RowBlock {
  const void* from;
  int64_t stride, to_stride;
  uint8_t* to;
  float* scale;
  const float* mean;  // the head's, or null
  int count;          // rows that exist
  bool by_token, aligned, is_key;
  float unit;                           // the stored scale over the scale of codes
  const uint32_t* nonfinite = nullptr;  // of staged blocks of K: the first word of the first slice of V
};

// Rows of Q: block `item` of those of all heads.
__device__ inline RowBlock query_block(const GeneralQuantizeParams& p, const GeneralGrid& grid, int item, int bytes_of_element) {
  const int head = item / grid.q_blocks, block = item % grid.q_blocks, batch = head / p.q_heads, first = block * SCALE_BLOCK;
  const int64_t at = batch * p.q_strides[0] + head % p.q_heads * p.q_strides[1] + first * p.q_strides[2];
  const bool by_token = p.q_group == 1;
  return {static_cast<const uint8_t*>(p.q) + at * bytes_of_element,
          p.q_strides[2],
          p.q_data_strides[2],
          p.q_data + batch * p.q_data_strides[0] + head % p.q_heads * p.q_data_strides[1] + first * p.q_data_strides[2],
          p.q_scale + (by_token ? int64_t(head) * p.q_length + first : int64_t(head) * grid.q_blocks + block),
          nullptr,
          min(p.q_length - first, SCALE_BLOCK),
          by_token,
          p.q_aligned,
          false,
          float(max(p.part, 1))};
}

// Rows of K.
__device__ inline RowBlock key_block(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, int block, int bytes_of_element) {
  const int batch = head / p.kv_heads, first = block * SCALE_BLOCK;
  const int64_t at = batch * p.k_strides[0] + head % p.kv_heads * p.k_strides[1] + first * p.k_strides[2];
  const bool by_token = p.k_group == 1;
  return {static_cast<const uint8_t*>(p.k) + at * bytes_of_element,
          p.k_strides[2],
          p.k_data_strides[2],
          p.k_data + batch * p.k_data_strides[0] + head % p.kv_heads * p.k_data_strides[1] + first * p.k_data_strides[2],
          p.k_scale + (by_token ? int64_t(head) * p.kv_length + first : int64_t(head) * grid.k_blocks + block),
          p.k_mean == nullptr ? nullptr : p.k_mean + int64_t(head) * p.head_dim,
          min(p.kv_length - first, SCALE_BLOCK),
          by_token,
          p.k_aligned,
          true,
          1.0f};
}

}  // namespace fp8attn
