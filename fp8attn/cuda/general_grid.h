// What the launches of the general quantizer share: their grids, the blocks of rows, the runs of V.
#pragma once

#include "config.h"
#include "params.h"
#include "tile/channels.h"
#include "tile/packed.h"
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

static_assert(sizeof(PackedUnit) == PACKED_UNIT_BYTES);

// The number of CTAs of each launch, and what a CTA works on.
struct GeneralGrid {
  bool packed;
  int kv_heads;        // of all batches
  int measured_heads;  // that have means and scales of V: of packed sequences, those of each
  int token_chunks;    // of a head, as k_blocks; of packed sequences their places
  int value_slices, key_slices, k_blocks, q_blocks, run, value_ctas;

  __host__ __device__ explicit GeneralGrid(const GeneralQuantizeParams& p)
      : packed(p.packed.cu_seqlens != nullptr),
        kv_heads(p.v == nullptr ? 0 : p.batches * p.kv_heads),
        measured_heads(packed ? p.packed.sequences * p.kv_heads : kv_heads),
        token_chunks(units_of<TOKEN_CHUNK>(p)),
        value_slices((p.value_dim + MEASURED_CHANNELS - 1) / MEASURED_CHANNELS),
        key_slices(p.k_mean == nullptr ? 0 : (p.head_dim + MEASURED_CHANNELS - 1) / MEASURED_CHANNELS),
        k_blocks(units_of<SCALE_BLOCK>(p)),
        q_blocks((p.q_length + SCALE_BLOCK - 1) / SCALE_BLOCK),
        // without feedback, the groups of a run don't depend on each other
        run(p.kv_length > TOKEN_CHUNK || packed ? RUN : GROUP),
        value_ctas((p.padded / run * (p.value_dim / 2) + WRITERS - 1) / WRITERS) {}

  // Of packed sequences layout.units_of.
  template <int UNIT>
  __host__ __device__ static int units_of(const GeneralQuantizeParams& p) {
    return p.packed.cu_seqlens != nullptr ? p.kv_length / UNIT + p.packed.sequences : (p.kv_length + UNIT - 1) / UNIT;
  }

  // Of packed sequences, a warp finds what lies on a page.
  __host__ __device__ int paging_ctas() const { return packed ? (k_blocks + MEASURER_WARPS - 1) / MEASURER_WARPS : 0; }

  // Pages; token chunks of V and, if K has a mean, its sample; MEASURED_CHANNELS channels each.
  __host__ __device__ int measuring_ctas_of_head() const { return token_chunks * value_slices + key_slices; }
  __host__ __device__ int measuring_ctas() const { return paging_ctas() + kv_heads * token_chunks * value_slices + measured_heads * key_slices; }

  // Channels of V; and the mean of K.
  __host__ __device__ int finishing_ctas() const { return measured_heads * (value_slices + (key_slices > 0)); }

  // Runs of channel pairs of V, and blocks of K. Behind those of all heads: blocks of Q.
  __host__ __device__ int writing_ctas_of_head() const { return value_ctas + k_blocks; }

  // Where rows have a launch of their own: runs of V; blocks of K, then of Q.
  __host__ __device__ int value_writing_ctas() const { return kv_heads * value_ctas; }
  __host__ __device__ int staged_blocks(const GeneralQuantizeParams& p) const { return kv_heads * k_blocks + (p.q == nullptr ? 0 : p.batches * p.q_heads * q_blocks); }
};

// What lies on each page of packed sequences.
__device__ inline PackedUnit* pages_of(const GeneralQuantizeParams& p) { return static_cast<PackedUnit*>(p.measured); }

// A sequence of K and V: a batch, or one of packed sequences.
struct KvSequence {
  int number, begin, length;  // among all sequences; its first token; its tokens

  __device__ KvSequence(int number, int begin, int length) : number(number), begin(begin), length(length) {}

  __device__ KvSequence(const GeneralQuantizeParams& p, const GeneralGrid& grid, int number) : KvSequence(number, 0, p.kv_length) {
    if (!grid.packed) return;
    const PackedSequence found(p.packed, number);
    begin = found.begin, length = found.length;
  }

  __device__ int chunks() const { return (length + TOKEN_CHUNK - 1) / TOKEN_CHUNK; }

  // The first token of a head of (B, H, S, D).
  template <typename T>
  __device__ const T* head_of(const GeneralGrid& grid, const void* x, const int64_t (&strides)[3], int head) const {
    return static_cast<const T*>(x) + (grid.packed ? 0 : number) * strides[0] + head * strides[1] + begin * strides[2];
  }
};

// The slices of the n-th token chunk, of all heads one after another. Of packed sequences, the n-th place has a token
// chunk of each head.
__device__ inline MeasuredChunk* measured_chunk(const GeneralQuantizeParams& p, const GeneralGrid& grid, int64_t n) {
  return reinterpret_cast<MeasuredChunk*>(pages_of(p) + (grid.packed ? grid.k_blocks : 0)) + n * grid.value_slices;
}

// The number of the first token chunk of a head of a packed sequence; those behind it are kv_heads apart.
__device__ inline int64_t first_chunk_of(const GeneralQuantizeParams& p, const KvSequence& sequence, int head) {
  return int64_t(first_place<TOKEN_CHUNK>(sequence.begin, sequence.number)) * p.kv_heads + head;
}

// SCALE_BLOCK tokens of a head of K and V.
struct KvBlock {
  KvSequence sequence;
  int head, measured_head;  // of its batch; and its number among those that have means and scales of V
  int first, count;         // the first token in the sequence; tokens: none of a page without a sequence

  // `head_of_all`: of all batches. `block`: of the head; of packed sequences a page, the last one if it does not exist.
  __device__ KvBlock(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head_of_all, int block)
      : sequence(head_of_all / p.kv_heads, 0, p.kv_length), head(head_of_all % p.kv_heads), measured_head(head_of_all) {
    if (grid.packed) {
      const PackedUnit page = pages_of(p)[min(block, grid.k_blocks - 1)];
      sequence = {page.sequence, page.begin, page.number < 0 ? 0 : page.length};
      measured_head = page.sequence * p.kv_heads + head;
      block = max(page.number, 0);
    }
    first = block * SCALE_BLOCK, count = min(sequence.length - first, SCALE_BLOCK);
  }

  // The non-finite tokens from `token` of the sequence on, 32 to a word, in the first slice of V.
  __device__ const uint32_t* nonfinite(const GeneralQuantizeParams& p, const GeneralGrid& grid, int token) const {
    const int chunk = token / TOKEN_CHUNK;
    const int64_t n = grid.packed ? first_chunk_of(p, sequence, head) + chunk * p.kv_heads : int64_t(measured_head) * grid.token_chunks + chunk;
    return measured_chunk(p, grid, n)->nonfinite + token % TOKEN_CHUNK / 32;
  }
};

// A run of two channels of V: `item` of those of a head. A warp's threads have adjacent channels.
struct ValueRun {
  int slot;  // the first one
  KvBlock block;
  int channel, token, left;  // the first token in its sequence; tokens that exist from there on
  int64_t row, measured;     // the first channel among those of all heads, and among those that have scales
  bool exists;

  __device__ ValueRun(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, uint32_t item)
      : slot(item / uint32_t(p.value_dim / 2) * grid.run), block(p, grid, head, slot / SCALE_BLOCK) {
    channel = item % uint32_t(p.value_dim / 2) * 2;
    token = block.first + slot % SCALE_BLOCK, left = block.sequence.length - token;
    row = int64_t(head) * p.value_dim + channel, measured = int64_t(block.measured_head) * p.value_dim + channel;
    exists = slot < p.padded && block.count > 0;
  }

  __device__ float2 mean(const GeneralQuantizeParams& p) const { return p.v_mean == nullptr ? float2{} : float2{p.v_mean[measured], p.v_mean[measured + 1]}; }
  __device__ float2 factor(const GeneralQuantizeParams& p) const { return {__frcp_rn(p.v_scale[measured]), __frcp_rn(p.v_scale[measured + 1])}; }

  // quantization.feedback
  __device__ __half2 gain() const { return __half2half2(__float2half(block.sequence.length > TOKEN_CHUNK ? FEEDBACK : 0.0f)); }

  // The first token, and where its codes go.
  template <typename T>
  __device__ const T* from(const GeneralQuantizeParams& p, const GeneralGrid& grid) const {
    return block.sequence.head_of<T>(grid, p.v, p.v_strides, block.head) + token * p.v_strides[2] + channel;
  }
  __device__ uint8_t* to(const GeneralQuantizeParams& p) const { return p.v_data + row * p.padded + slot; }
};

// Writes the codes of a run.
template <bool ALIGNED, typename T>
__device__ void write_values(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, uint32_t item) {
  const ValueRun run(p, grid, head, item);
  if (!run.exists) return;
  const float2 mean = run.mean(p), factor = run.factor(p);
  const __half2 gain = run.gain();
  const T* from = run.from<T>(p, grid);
  uint8_t* to = run.to(p);
  Feedback feedback;
#pragma unroll 1
  for (int first = 0; first < grid.run; first += GROUP) {
    float2 x[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) x[i] = first + i < run.left ? load_pair<ALIGNED>(from + (first + i) * p.v_strides[2]) : float2{NAN, NAN};
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
  int count;          // rows that exist; 0 of a page of no sequence; -1: there are no more blocks
  bool by_token, aligned, is_key;
  float unit;                           // the stored scale over the scale of codes
  const uint32_t* nonfinite = nullptr;  // of K: the first word of the first slice of V
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

// Rows of K: a block of a head of all batches, of packed sequences a page.
__device__ inline RowBlock key_block(const GeneralQuantizeParams& p, const GeneralGrid& grid, int head, int block, int bytes_of_element) {
  const KvBlock of(p, grid, head, block);
  const int batch = grid.packed ? 0 : of.sequence.number, first = of.sequence.begin + of.first;
  const int64_t at = batch * p.k_strides[0] + of.head * p.k_strides[1] + first * p.k_strides[2];
  const bool by_token = p.k_group == 1;
  return {static_cast<const uint8_t*>(p.k) + at * bytes_of_element,
          p.k_strides[2],
          p.k_data_strides[2],
          p.k_data + batch * p.k_data_strides[0] + of.head * p.k_data_strides[1] + first * p.k_data_strides[2],
          p.k_scale + (by_token ? int64_t(head) * p.kv_length + first : int64_t(head) * grid.k_blocks + block),
          p.k_mean == nullptr ? nullptr : p.k_mean + int64_t(of.measured_head) * p.head_dim,
          of.count,
          by_token,
          p.k_aligned,
          true,
          1.0f,
          of.nonfinite(p, grid, of.first)};
}

}  // namespace fp8attn
