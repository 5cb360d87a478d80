// Quantizes Q, K and V of any float dtype, head dim, strides and alignment, sm_80 and later: fp8attn/quantization.py
// with a scale per token or block. Gives the same bytes.
//
// `general_measure` finds the sums and extremes of V, its non-finite tokens, and the sum of the sample of K.
// `general_finish` makes means and scales of them. `general_write` quantizes. V is read twice. Heads that are measured
// last are written first, while L2 still has them. Q needs neither measuring nor finishing.
//
// Rows of Q and K in half precision that start at multiples of 16 bytes have a launch of their own, in which a thread
// has whole parts of a row (tile/staged_rows.h). Others are quantized by `general_write`, whose lanes exchange channels.
// It reads them once more from L1 or L2 where a scale covers a block.
#pragma once

#include <algorithm>

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
#include "tile/row_team.h"
#include "tile/staged_rows.h"

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

template <GeneralQuantizeConfig>
struct alignas(128) GeneralQuantizeStorage {
  MeasuredChunk warps[MEASURER_WARPS];  // of `general_measure` and `general_finish`
  // of `general_write`: largest magnitudes of a block's rows; whether one of its rows has a NaN, then its non-finite
  // tokens of V
  float largest[WRITER_WARPS];
  uint32_t nonfinite[1 + BLOCK_WORDS];
};

// Whether rows of Q and K have a launch of their own.
__host__ __device__ inline bool are_staged(const GeneralQuantizeParams& p) {
  const auto are_near = [](const int64_t(&strides)[3]) { return strides[2] >= 0 && strides[2] < MOST_STRIDE; };
  return p.type != OutType::f32 && p.part <= LARGEST_PART && (p.q == nullptr || (p.q_aligned && are_near(p.q_strides) && are_near(p.q_data_strides))) &&
         (p.k == nullptr || (p.k_aligned && are_near(p.k_strides) && are_near(p.k_data_strides)));
}

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

// Statistics of a thread's chunk of channels, over the tokens of one lane.
template <typename T>
struct LaneMoments {
  float sum[CHUNK] = {}, low[CHUNK], high[CHUNK];

  __device__ LaneMoments() {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) low[i] = INFINITE, high[i] = -INFINITE;
  }

  // Adds `tokens` of them, which begin at `from`, `stride` elements apart. Non-finite elements make sums non-finite.
  __device__ void add_all(const T* from, int64_t stride, int tokens, bool aligned) {
    Chunks<T, 32> chunks;
    constexpr int COUNT = chunks.COUNT;
#pragma unroll 1
    for (int first = 0; first < tokens; first += COUNT, from += COUNT * stride) {
      chunks.load(from, stride, aligned, [&](int i) { return first + i < tokens; });
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        if (first + j >= tokens) break;
        float x[CHUNK];
        chunks.of[j].floats(x);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sum[i] += x[i], low[i] = fminf(low[i], x[i]), high[i] = fmaxf(high[i], x[i]);
      }
    }
  }

  // The same of the finite elements. Returns a bit for each token that has others.
  __device__ uint32_t add_finite(const T* from, int64_t stride, int tokens) {
    uint32_t nonfinite = 0;
#pragma unroll 1
    for (int token = 0; token < tokens; ++token, from += stride) {
      Chunk<T> chunk;
      chunk.template load<false>(from);
      float x[CHUNK];
      chunk.floats(x);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        if (is_finite(x[i]))
          sum[i] += x[i], low[i] = fminf(low[i], x[i]), high[i] = fmaxf(high[i], x[i]);
        else
          nonfinite |= 1u << token;
      }
    }
    return nonfinite;
  }

  // Whether all elements were finite and no sum overflowed.
  __device__ bool are_finite() const {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) zero = fmaf(sum[i], 0.0f, zero);
    return zero == 0.0f;
  }

  // Adds the moments of the lane that is `distance` threads away.
  __device__ void join(int distance) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
      low[i] = fminf(low[i], __shfl_xor_sync(~0u, low[i], distance));
      high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], distance));
    }
  }
};

// The first element of a head of (B, H, S, D).
template <typename T>
__device__ const T* head_of(const void* x, const int64_t (&strides)[3], int heads, int index) {
  return static_cast<const T*>(x) + index / heads * strides[0] + index % heads * strides[1];
}

// The sum of a channel over a CTA's warps, in the order of quantization.lane_sum.
template <GeneralQuantizeConfig C>
__device__ float sum_of_warps(const GeneralQuantizeStorage<C>& shared, int channel) {
  float sums[MEASURER_WARPS];
#pragma unroll
  for (int i = 0; i < MEASURER_WARPS; ++i) sums[i] = shared.warps[i].sum[channel];
  return halving_sum(sums);
}

// The least and the largest number of a channel.
template <GeneralQuantizeConfig C>
__device__ float2 extremes_of_warps(const GeneralQuantizeStorage<C>& shared, int channel) {
  float2 found = {INFINITE, -INFINITE};
#pragma unroll
  for (int i = 0; i < MEASURER_WARPS; ++i) found = {fminf(found.x, shared.warps[i].low[channel]), fmaxf(found.y, shared.warps[i].high[channel])};
  return found;
}

// The grid: GeneralGrid::measuring_ctas. K's mean, not rotated yet, goes to p.k_mean.
template <class Instance, typename T>
__global__ void __launch_bounds__(MEASURERS) general_measure(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<GeneralQuantizeStorage<Instance::config>*>(bytes);
  const GeneralGrid grid(p);
  const int head = blockIdx.x / grid.measuring_ctas_of_head(), item = blockIdx.x % grid.measuring_ctas_of_head();
  const int values = grid.token_chunks * grid.value_slices;
  const bool of_keys = item >= values;
  const int token_chunk = of_keys ? 0 : item / grid.value_slices, slice = of_keys ? item - values : item % grid.value_slices;
  const int apart = of_keys ? sample_step(p.kv_length) : 1;
  const int64_t step = int64_t(LANES) * apart;
  const int chunk = threadIdx.x % (32 / OF_WARP), warp = threadIdx.x / 32;
  const int lane = warp + threadIdx.x % 32 / (32 / OF_WARP) * MEASURER_WARPS, channel = slice * MEASURED_CHANNELS + chunk * CHUNK;
  const int first = token_chunk * TOKEN_CHUNK + lane * apart;
  int tokens = first < p.kv_length ? min(int((p.kv_length - first + step - 1) / step), STEPS) : 0;
  if (channel >= (of_keys ? p.head_dim : p.value_dim)) tokens = 0;
  if (threadIdx.x < STEPS) shared.warps[0].nonfinite[threadIdx.x] = 0;
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const T* from = of_keys ? head_of<T>(p.k, p.k_strides, p.kv_heads, head) : head_of<T>(p.v, p.v_strides, p.kv_heads, head);
  const int64_t stride = of_keys ? p.k_strides[2] : p.v_strides[2];
  from += first * stride + channel;
  LaneMoments<T> found;
  found.add_all(from, step * stride, tokens, of_keys ? p.k_aligned : p.v_aligned);
  if (!found.are_finite()) {
    found = {};
    for (uint32_t nonfinite = found.add_finite(from, step * stride, tokens); nonfinite != 0; nonfinite &= nonfinite - 1)
      atomicOr(&shared.warps[0].nonfinite[__ffs(nonfinite) - 1], 1u << lane);
  }
  // the order of quantization.lane_sum: lanes 16 apart, then 8 and 4, then those of the warps
  found.join(16);
  found.join(8);
  found.join(4);
  if (threadIdx.x % 32 < 32 / OF_WARP) {
    MeasuredChunk& to = shared.warps[warp];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) to.sum[chunk * CHUNK + i] = found.sum[i], to.low[chunk * CHUNK + i] = found.low[i], to.high[chunk * CHUNK + i] = found.high[i];
  }
  __syncthreads();
  const int mine = threadIdx.x;
  if (of_keys) {
    const int to = slice * MEASURED_CHANNELS + mine;
    if (mine < MEASURED_CHANNELS && to < p.head_dim) p.k_mean[int64_t(head) * p.head_dim + to] = key_mean_of(sum_of_warps(shared, mine), p.inverse_sample);
    return;
  }
  MeasuredChunk& to = static_cast<MeasuredChunk*>(p.measured)[(int64_t(head) * grid.token_chunks + token_chunk) * grid.value_slices + slice];
  if (mine < MEASURED_CHANNELS) {
    const float2 extremes = extremes_of_warps(shared, mine);
    to.sum[mine] = sum_of_warps(shared, mine), to.low[mine] = extremes.x, to.high[mine] = extremes.y;
  } else if (mine < MEASURED_CHANNELS + STEPS) {
    to.nonfinite[mine - MEASURED_CHANNELS] = shared.warps[0].nonfinite[mine - MEASURED_CHANNELS];
  }
}

// A mean of K, which `general_measure` has stored, rotated. Called by a warp.
__device__ inline void finish_key_mean(const GeneralQuantizeParams& p, int head) {
  const RowTeam team(p.head_dim);
  const TeamRotation rotation(p.part, team, p.inverse_part);
  float* mean = p.k_mean + int64_t(head) * p.head_dim + team.channel;
  float y[CHUNK] = {};
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) y[i] = team.has_channels ? mean[i] : 0.0f;
  rotation.rotate(y);
  __syncwarp();  // all teams of the warp have read the mean
  if (threadIdx.x >= team.lanes || !team.has_channels) return;
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) mean[i] = removable(y[i]);
}

// The grid: GeneralGrid::finishing_ctas.
template <class Instance>
__global__ void __launch_bounds__(MEASURERS) general_finish(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<GeneralQuantizeStorage<Instance::config>*>(bytes);
  const GeneralGrid grid(p);
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  if (blockIdx.x >= grid.kv_heads * grid.value_slices) {
    if (threadIdx.x < 32) finish_key_mean(p, blockIdx.x - grid.kv_heads * grid.value_slices);
    return;
  }
  const int head = blockIdx.x / grid.value_slices, slice = blockIdx.x % grid.value_slices, warp = threadIdx.x / 32, mine = threadIdx.x % 32;
  const auto* measured = static_cast<const MeasuredChunk*>(p.measured) + int64_t(head) * grid.token_chunks * grid.value_slices + slice;
  float sums[OF_WARP] = {}, low = INFINITE, high = -INFINITE;
  // token chunks are the lanes of quantization.lane_sum; chunks that don't exist add zeros
#pragma unroll 1
  for (int first = 0; first < grid.token_chunks; first += LANES) {
#pragma unroll
    for (int i = 0; i < OF_WARP; ++i) {
      const int token_chunk = first + i * MEASURER_WARPS + warp;
      if (token_chunk >= grid.token_chunks) continue;
      const MeasuredChunk& more = measured[int64_t(token_chunk) * grid.value_slices];
      sums[i] += more.sum[mine], low = fminf(low, more.low[mine]), high = fmaxf(high, more.high[mine]);
    }
  }
  MeasuredChunk& to = shared.warps[warp];
  to.sum[mine] = halving_sum(sums), to.low[mine] = low, to.high[mine] = high;
  __syncthreads();
  const int channel = slice * MEASURED_CHANNELS + mine;
  if (warp > 0 || channel >= p.value_dim) return;
  const float2 extremes = extremes_of_warps(shared, mine);
  const int64_t at = int64_t(head) * p.value_dim + channel;
  float mean = 0.0f;
  if (p.v_mean != nullptr) {
    mean = removable(coarse(__fmul_rn(sum_of_warps(shared, mine), p.inverse_length), extremes.x, extremes.y));
    p.v_mean[at] = mean;
  }
  p.v_scale[at] = scale_of(fmaxf(fmaxf(extremes.y - mean, mean - extremes.x), 0.0f));
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

constexpr int RUN_GROUPS = RUN / GROUP;

// Runs of a warp in shared memory: a word of each lane for each token. Once a group of tokens is read, its codes are
// there: 16 bytes of each channel.
struct StagedRuns {
  uint32_t words[RUN][32];

  // The codes of a group of the warp's channel, at a place where four groups have different banks.
  __device__ uint4& codes(int group, int channel) { return reinterpret_cast<uint4*>(words[group * GROUP])[(channel + 2 * group) % 64]; }
};
static_assert(RUN_GROUPS == 4 && sizeof(StagedRuns) == RUN_GROUPS * 2 * 64 * sizeof(uint4));

// Waits for this thread's copies of groups 0 ... n of a run.
__device__ inline void wait_for_group(int n) {
  switch (n) {
    case 0:
      return ptx::cp_async_wait_but<3>();
    case 1:
      return ptx::cp_async_wait_but<2>();
    case 2:
      return ptx::cp_async_wait_but<1>();
    default:
      return ptx::cp_async_wait_but<0>();
  }
}

// The same of a warp, whose runs are copied. CAREFUL: some tokens don't exist or aren't finite.
template <bool CAREFUL, typename T>
__device__ void write_staged_runs(const GeneralQuantizeParams& p, const GeneralGrid& grid, const ValueRun& run, StagedRuns& staged) {
  const int lane = threadIdx.x % 32;
  const float2 mean = run.exists ? run.mean(p) : float2{}, factor = run.exists ? run.factor(p) : float2{};
  const __half2 gain = gain_of(p);
  Feedback feedback;
#pragma unroll 1
  for (int group = 0; group < grid.run / GROUP; ++group) {
    wait_for_group(group);
    __syncwarp();
    const auto number = [&](int i) -> float2 {
      const float2 y = Pair<T>::floats(staged.words[group * GROUP + i][lane]);
      const float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
      if (!CAREFUL) return x;
      const bool exists = run.begin + group * GROUP + i < p.kv_length;
      return {exists && is_finite(y.x) ? x.x : 0.0f, exists && is_finite(y.y) ? x.y : 0.0f};
    };
    uint4 of_channel[2];
    encode_group(feedback, gain, number, of_channel);
    __syncwarp();  // the group has been read
#pragma unroll
    for (int c = 0; c < 2; ++c) staged.codes(group, 2 * lane + c) = of_channel[c];
  }
  __syncwarp();
  uint64_t to = run.exists ? reinterpret_cast<uint64_t>(run.to(p)) : 0;
  const int group = lane % RUN_GROUPS;
#pragma unroll
  for (int first = 0; first < 64; first += 8) {
    const int channel = first + lane / RUN_GROUPS;
    uint8_t* const of_run = reinterpret_cast<uint8_t*>(__shfl_sync(~0u, to, channel / 2));
    if (of_run != nullptr && group * GROUP < grid.run) *reinterpret_cast<uint4*>(of_run + channel % 2 * p.padded + group * GROUP) = staged.codes(group, channel);
  }
}

// Where rows have a launch of their own. The grid: GeneralGrid::value_ctas for each head of V. Whole runs are in flight
// at a time, if tokens start at multiples of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(WRITERS, 3) general_write_values(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  StagedRuns& staged = reinterpret_cast<StagedRuns*>(bytes)[threadIdx.x / 32];
  const GeneralGrid grid(p);
  const int head = grid.kv_heads - 1 - blockIdx.x / grid.value_ctas, lane = threadIdx.x % 32;
  const uint32_t item = uint32_t(blockIdx.x % grid.value_ctas) * WRITERS + threadIdx.x;
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  if (!p.v_aligned) return write_values<false, T>(p, grid, head, item);
  // four adjacent lanes have a chunk of eight channels, of which each lane copies some tokens
  const ValueRun copied(p, grid, head, item - lane + lane % 8 * 4), run(p, grid, head, item);
  const T* from = copied.from<T>(p, head) + lane / 8 * p.v_strides[2];
#pragma unroll 1
  for (int group = 0; group < RUN_GROUPS; ++group) {
    if (copied.exists && group * GROUP < grid.run) {
#pragma unroll
      for (int i = 0; i < GROUP; i += 4, from += 4 * p.v_strides[2]) {
        const int token = group * GROUP + i + lane / 8;
        ptx::cp_async_16(&staged.words[token][lane % 8 * 4], from, copied.begin + token < p.kv_length);
      }
    }
    ptx::cp_async_commit();
  }
  bool careful = run.exists && run.begin + grid.run > p.kv_length;
  if (run.exists && !careful) {
    const int64_t token_chunk = int64_t(head) * grid.token_chunks + run.begin / TOKEN_CHUNK;
    const auto& measured = static_cast<const MeasuredChunk*>(p.measured)[token_chunk * grid.value_slices + run.channel / MEASURED_CHANNELS];
    for (int i = 0; i < grid.run; i += 32) careful |= measured.nonfinite[(run.begin % TOKEN_CHUNK + i) / 32] != 0;
  }
  if (__any_sync(~0u, careful))
    write_staged_runs<true, T>(p, grid, run, staged);
  else
    write_staged_runs<false, T>(p, grid, run, staged);
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
  float unit;                 // the stored scale over the scale of codes
  const uint32_t* nonfinite;  // of staged blocks of K: the first word of the first slice of V
};

// Rows of a CTA, which its teams take by turns.
template <typename T>
struct TeamRows {
  DenseTeam team;
  TeamRotation rotation;
  float mean[CHUNK];
  int first, teams;
  const T* from;

  __device__ TeamRows(const GeneralQuantizeParams& p, const RowBlock& block)
      : team(p.head_dim), rotation(p.part, team, p.inverse_part), first(threadIdx.x / 32 * team.of_warp + team.number), teams(WRITER_WARPS * team.of_warp) {
    from = static_cast<const T*>(block.from) + first * block.stride + team.channel;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) mean[i] = block.mean != nullptr && team.has_channels ? block.mean[team.channel + i] : 0.0f;
  }

  // Calls use(index of a row in the block, whether it exists, the lane's RowChunk of it), for all rows of the team. The
  // last may lie behind the block.
  template <typename Use>
  __device__ void for_all(const RowBlock& block, Use&& use) const {
    Chunks<T, 16> chunks;
    constexpr int COUNT = chunks.COUNT;
#pragma unroll 1
    for (int row = first; row - first < SCALE_BLOCK; row += COUNT * teams) {
      chunks.load(from + (row - first) * block.stride, teams * block.stride, block.aligned,
                  [&](int i) { return row + i * teams < block.count && team.has_channels; });
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (row + i * teams - first >= SCALE_BLOCK) break;
        RowChunk chunk(chunks.of[i], rotation, mean);
        const bool exists = row + i * teams < block.count;
        if (!exists || !team.has_channels) chunk.largest = 0.0f;  // it was a mean
        use(row + i * teams, exists, chunk);
      }
    }
  }
};

// Writes codes and scales of a block of rows.
template <class Instance, bool INT8, typename T>
__device__ void write_rows(const GeneralQuantizeParams& p, const RowBlock& block) {
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<GeneralQuantizeStorage<Instance::config>*>(bytes);
  const TeamRows<T> rows(p, block);
  const DenseTeam& team = rows.team;
  float scale = 1.0f;
  if (!block.by_token) {
    float largest = 0.0f;
    bool nonfinite = false;
    rows.for_all(block, [&](int, bool exists, const RowChunk& chunk) {
      largest = fmaxf(largest, chunk.largest);
      if constexpr (INT8) nonfinite |= exists && chunk.has_nan();
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
    if (INT8 && nonfinite) shared.nonfinite[0] = 1;
    __syncthreads();
    for (int i = 0; i < WRITER_WARPS; ++i) largest = fmaxf(largest, shared.largest[i]);
    scale = row_scale_of<INT8>(largest);
    bool marked = INT8 && block.is_key && shared.nonfinite[0];
#pragma unroll
    for (int i = 0; i < BLOCK_WORDS; ++i) marked |= INT8 && block.is_key && shared.nonfinite[1 + i] != 0;
    const float kept = largest > 0.0f ? scale * block.unit : 1.0f;
    if (threadIdx.x == 0) *block.scale = marked ? -kept : kept;
  }
  rows.for_all(block, [&](int row, bool exists, const RowChunk& chunk) {
    float largest = 0.0f;
    if (block.by_token) {
      largest = team.largest(chunk.largest);
      scale = row_scale_of<INT8>(largest);
    }
    const float inverse = __frcp_rn(scale);
    const bool has_nan = INT8 && team.any(team.has_channels && chunk.has_nan());
    const bool hidden = has_nan || (block.is_key && exists && shared.nonfinite[1 + row / 32] >> row % 32 & 1);
    uint2 codes = {codes_of<INT8>(chunk.y, inverse), codes_of<INT8>(chunk.y + 4, inverse)};
    if (hidden) codes = {NAN_CODES<INT8>, NAN_CODES<INT8>};
    if (!exists || !team.has_channels) return;
    *reinterpret_cast<uint2*>(block.to + row * block.to_stride + team.channel) = codes;
    if (!block.by_token || team.member != 0) return;
    const float kept = largest > 0.0f ? scale * block.unit : 1.0f;
    block.scale[row] = INT8 && block.is_key && hidden ? NAN : kept;
  });
}

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
          float(max(p.part, 1)),
          nullptr};
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
          1.0f,
          nullptr};
}

constexpr int STAGES = 2, MOST_GROUPS = RowUnits<CHUNK>::most_groups;
constexpr int WORD_SLICES = 256 / MEASURED_CHANNELS;  // slices of V, at most
static_assert(BLOCK_WORDS * WORD_SLICES == 32);

// Of `general_write_rows`. Rows of STAGES blocks follow.
struct StagedStorage {
  RowBlock blocks[STAGES + 1];  // that the CTA has next
  // largest magnitudes of the rows' units of a group, if each row has a scale; else those of warps, all in the first
  float largest[MOST_GROUPS][SCALE_BLOCK];
  alignas(16) float mean[STAGES][256];
  float nonfinite[STAGES][BLOCK_WORDS][WORD_SLICES];  // bits: tokens of V, of each slice
  uint32_t hidden[STAGES][BLOCK_WORDS];               // a bit for each row: all of its codes are NaN
};
static_assert(sizeof(StagedStorage) % 16 == 0);

// The blocks of rows of a call: those of K, then those of Q. Each CTA takes every gridDim-th.
struct StagedBlocks {
  const GeneralQuantizeParams& p;
  const GeneralGrid grid;

  __device__ explicit StagedBlocks(const GeneralQuantizeParams& params) : p(params), grid(params) {}

  // Block `item`. One that doesn't exist has no rows.
  __device__ RowBlock at(int item, int bytes_of_element) const {
    const int of_queries = item - grid.kv_heads * grid.k_blocks;
    if (item >= grid.staged_blocks(p)) return {};
    if (of_queries >= 0) return query_block(p, grid, of_queries, bytes_of_element);
    RowBlock found = key_block(p, grid, item / grid.k_blocks, item % grid.k_blocks, bytes_of_element);
    const int word = item % grid.k_blocks * BLOCK_WORDS;
    found.nonfinite = static_cast<const MeasuredChunk*>(p.measured)[(int64_t(item / grid.k_blocks) * grid.token_chunks + word / STEPS) * grid.value_slices].nonfinite + word % STEPS;
    return found;
  }
};

// PART: p.part. With K and V it runs beside the grid before, which has seen to it that everything is there. While a
// block is quantized, the rows of the next one arrive.
template <int PART, bool INT8, typename T>
__global__ void __launch_bounds__(RowUnits<PART>::most_threads) general_write_rows(const __grid_constant__ GeneralQuantizeParams p) {
  using Units = RowUnits<PART>;
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<StagedStorage*>(bytes);
  const Units units(p.head_dim);
  const StagedRows<Units::chunks> rows(p.head_dim, units.threads());
  const auto tile_of = [&](int round) { return bytes + sizeof(StagedStorage) + round % STAGES * rows.bytes_of(p.head_dim); };
  const auto block_of = [&](int round) -> RowBlock& { return shared.blocks[round % (STAGES + 1)]; };
  if (p.v == nullptr) ptx::wait_for_grids_before();
  ptx::launch_dependents();
  // Begins to copy what a block is quantized from.
  const auto load = [&](int round) {
    const RowBlock& block = block_of(round);
    if (block.count == 0) return;
    const int stage = round % STAGES, slice = threadIdx.x % WORD_SLICES, word = threadIdx.x / WORD_SLICES;
    rows.load(tile_of(round), block.from, block.stride, block.count);
    if (block.mean != nullptr && threadIdx.x < p.head_dim / 4) ptx::cp_async_16(&shared.mean[stage][4 * threadIdx.x], block.mean + 4 * threadIdx.x);
    if (!block.is_key || threadIdx.x >= 32) return;
    const bool exists = slice * MEASURED_CHANNELS < p.value_dim;
    ptx::cp_async(&shared.nonfinite[stage][word][slice], reinterpret_cast<const float*>(block.nonfinite + (exists ? slice * (sizeof(MeasuredChunk) / 4) + word : 0)), exists);
  };
  if (threadIdx.x < STAGES) block_of(threadIdx.x) = StagedBlocks(p).at(blockIdx.x + threadIdx.x * gridDim.x, sizeof(T));
  if (threadIdx.x < BLOCK_WORDS) shared.hidden[0][threadIdx.x] = 0;
  __syncthreads();
  load(0);
  for (int round = 0; block_of(round).count > 0; ++round) {
    const RowBlock& block = block_of(round);
    uint8_t* const tile = tile_of(round);
    const int stage = round % STAGES, row = units.row();
    uint32_t(&hidden)[BLOCK_WORDS] = shared.hidden[stage];
    ptx::cp_async_wait();
    __syncthreads();  // also: nobody reads the tile before any more
    load(round + 1);
    if (threadIdx.x == 0) block_of(round + STAGES) = StagedBlocks(p).at(blockIdx.x + (round + STAGES) * gridDim.x, sizeof(T));
    if (threadIdx.x < BLOCK_WORDS) shared.hidden[(round + 1) % STAGES][threadIdx.x] = 0;
    if (block.is_key && threadIdx.x < 32) {
      const uint32_t nonfinite = __float_as_uint(shared.nonfinite[stage][threadIdx.x / WORD_SLICES][threadIdx.x % WORD_SLICES]);
      if (nonfinite != 0) atomicOr(&hidden[threadIdx.x / WORD_SLICES], nonfinite);
    }

    const bool exists = row < block.count;
    float y[Units::count][Units::channels], largest = 0.0f;
    bool has_nan = false;
#pragma unroll
    for (int i = 0; i < Units::count; ++i) {
      if (!units.has(i)) continue;
      const int channel = units.unit(i) * Units::channels;
      rotate_unit<PART, T>(y[i], reinterpret_cast<const uint4*>(tile + row * rows.pitch + 2 * channel));
      if (block.mean != nullptr) {
#pragma unroll
        for (int c = 0; c < Units::channels; c += 4) centre(reinterpret_cast<float(&)[4]>(y[i][c]), *reinterpret_cast<const float4*>(&shared.mean[stage][channel + c]));
      }
      largest = fmaxf(largest, largest_of_unit(y[i]));
      if constexpr (INT8) {
#pragma unroll
        for (int c = 0; c < Units::channels; ++c) has_nan |= y[i][c] != y[i][c];
      }
    }
    if (!exists) largest = 0.0f;
    if (INT8 && exists && has_nan) atomicOr(&hidden[row / 32], 1u << row % 32);
    if (block.by_token) {
      shared.largest[units.group()][row] = largest;
    } else {
      const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
      if (threadIdx.x % 32 == 0) shared.largest[0][threadIdx.x / 32] = __uint_as_float(of_warp);
    }
    __syncthreads();  // the rows have been read, too

    if (block.by_token) {
      for (int i = 0; i < units.groups; ++i) largest = fmaxf(largest, shared.largest[i][row]);
    } else {
      const int lane = threadIdx.x % 32;
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(lane < units.threads() / 32 ? shared.largest[0][lane] : 0.0f)));
    }
    const float scale = row_scale_of<INT8>(largest), inverse = __frcp_rn(scale), kept = largest > 0.0f ? scale * block.unit : 1.0f;
    const bool is_hidden = hidden[row / 32] >> row % 32 & 1;
#pragma unroll
    for (int i = 0; i < Units::count; ++i) {
      if (!units.has(i)) continue;
#pragma unroll
      for (int c = 0; c < Units::channels; c += CHUNK) {
        uint2 codes = {codes_of_rotated<PART, INT8>(&y[i][c], inverse), codes_of_rotated<PART, INT8>(&y[i][c + 4], inverse)};
        if (is_hidden) codes = {NAN_CODES<INT8>, NAN_CODES<INT8>};
        *reinterpret_cast<uint2*>(tile + row * rows.pitch + units.unit(i) * Units::channels + c) = codes;
      }
    }
    if (block.by_token) {
      if (units.group() == 0 && exists) block.scale[row] = INT8 && block.is_key && is_hidden ? NAN : kept;
    } else if (threadIdx.x == 0) {
      bool marked = false;
      for (int i = 0; i < BLOCK_WORDS; ++i) marked |= INT8 && block.is_key && hidden[i] != 0;
      *block.scale = marked ? -kept : kept;
    }
    __syncthreads();
    rows.store_codes(tile, block.to, block.to_stride, block.count);
  }
  if (p.v != nullptr) ptx::wait_for_grids_before();
}

// Dynamic shared memory of `general_write_rows`.
template <int PART>
int staged_bytes(const GeneralQuantizeParams& p) {
  return sizeof(StagedStorage) + STAGES * StagedRows<RowUnits<PART>::chunks>::bytes_of(p.head_dim);
}

// CTAs of `general_write_rows`, all of which can run at once; 0 if the device has too little shared memory.
template <int PART>
int resident_ctas(const GeneralQuantizeParams& p) {
  int device = 0, multiprocessors = 0, shared = 0, of_cta = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&of_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int bytes = staged_bytes<PART>(p);
  if (bytes > of_cta) return 0;
  const int by_registers = RowUnits<PART>::most_threads / RowUnits<PART>(p.head_dim).threads(), by_memory = shared / (bytes + 1024);  // the system takes 1024
  return std::min(GeneralGrid(p).staged_blocks(p), multiprocessors * std::max(std::min(by_registers, by_memory), 1));
}

// Calls f with p.part as a constant. `are_staged` must be true.
template <typename F>
auto with_part(const GeneralQuantizeParams& p, F&& f) {
  switch (p.part) {
    case 0:
      return f(std::integral_constant<int, 0>());
    case 8:
      return f(std::integral_constant<int, 8>());
    case 16:
      return f(std::integral_constant<int, 16>());
    case 32:
      return f(std::integral_constant<int, 32>());
    default:
      return f(std::integral_constant<int, LARGEST_PART>());
  }
}

template <typename T>
cudaError_t launch_rows(const GeneralQuantizeParams& p, int ctas, cudaStream_t stream) {
  return with_part(p, [&]<int PART>(std::integral_constant<int, PART>) {
    const auto kernel = p.int8 ? general_write_rows<PART, true, T> : general_write_rows<PART, false, T>;
    return launch_grid_with_shared_memory(kernel, p, ctas, RowUnits<PART>(p.head_dim).threads(), staged_bytes<PART>(p), stream);
  });
}

// The grid: GeneralGrid::writing_ctas_of_head for each head of K and V, then a CTA for each block of Q.
template <class Instance, bool INT8, typename T>
__global__ void __launch_bounds__(WRITERS, Instance::config.ctas) general_write(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<GeneralQuantizeStorage<Instance::config>*>(bytes);
  const GeneralGrid grid(p);
  if (threadIdx.x <= BLOCK_WORDS) shared.nonfinite[threadIdx.x] = 0;
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const int of_head = grid.writing_ctas_of_head(), of_queries = blockIdx.x - grid.kv_heads * of_head;
  if (of_queries >= 0) {
    __syncthreads();
    return write_rows<Instance, INT8, T>(p, query_block(p, grid, of_queries, sizeof(T)));
  }
  const int head = grid.kv_heads - 1 - blockIdx.x / of_head, item = blockIdx.x % of_head;
  if (item < grid.value_ctas) {
    const uint32_t of_thread = uint32_t(item) * WRITERS + threadIdx.x;
    return p.v_aligned ? write_values<true, T>(p, grid, head, of_thread) : write_values<false, T>(p, grid, head, of_thread);
  }
  const int block = item - grid.value_ctas, word = block * BLOCK_WORDS + threadIdx.x / grid.value_slices;
  __syncthreads();
  if (threadIdx.x < BLOCK_WORDS * grid.value_slices) {
    const int64_t token_chunk = int64_t(head) * grid.token_chunks + word / STEPS;
    const auto& measured = static_cast<const MeasuredChunk*>(p.measured)[token_chunk * grid.value_slices + threadIdx.x % grid.value_slices];
    const uint32_t nonfinite = measured.nonfinite[word % STEPS];
    if (nonfinite != 0) atomicOr(&shared.nonfinite[1 + threadIdx.x / grid.value_slices], nonfinite);
  }
  __syncthreads();
  write_rows<Instance, INT8, T>(p, key_block(p, grid, head, block, sizeof(T)));
}

// `ctas`: of `general_write`.
template <class Instance, typename T>
cudaError_t launch_general(const GeneralQuantizeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(GeneralQuantizeStorage<Instance::config>);
  const GeneralGrid grid(p);
  if (grid.kv_heads > 0) {
    cudaError_t error = launch_grid(general_measure<Instance, T>, p, grid.measuring_ctas(), MEASURERS, bytes, stream);
    if (error == cudaSuccess) error = launch_grid(general_finish<Instance>, p, grid.finishing_ctas(), MEASURERS, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  if constexpr (sizeof(T) == 2) {
    const int of_rows = are_staged(p) ? with_part(p, [&]<int PART>(std::integral_constant<int, PART>) { return resident_ctas<PART>(p); }) : 0;
    if (of_rows > 0) {
      const cudaError_t error = grid.kv_heads > 0 ? launch_grid_with_shared_memory(general_write_values<T>, p, grid.value_writing_ctas(), WRITERS, WRITER_WARPS * sizeof(StagedRuns), stream) : cudaSuccess;
      return error != cudaSuccess ? error : launch_rows<T>(p, of_rows, stream);
    }
  }
  return launch_grid(p.int8 ? general_write<Instance, true, T> : general_write<Instance, false, T>, p, ctas, WRITERS, bytes, stream);
}

template <class Instance>
cudaError_t launch(const GeneralQuantizeParams& p, int ctas, cudaStream_t stream) {
  return p.type == OutType::bf16  ? launch_general<Instance, __nv_bfloat16>(p, ctas, stream)
         : p.type == OutType::f16 ? launch_general<Instance, __half>(p, ctas, stream)
                                  : launch_general<Instance, float>(p, ctas, stream);
}

}  // namespace fp8attn
