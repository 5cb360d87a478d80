// Quantizes Q, K and V of any float dtype, head dim, strides and alignment, sm_80 and later: fp8attn/quantization.py
// with a scale per token or block. Gives the same bytes.
//
// `general_measure` finds the sums and extremes of V, its non-finite tokens, and the sum of the sample of K.
// `general_finish` makes means and scales of them. `general_write` quantizes. V is read twice. Heads that are measured
// last are written first, while L2 still has them. Q needs neither measuring nor finishing.
//
// Rows of Q and K in half precision that start at multiples of 16 bytes have a launch of their own, in which a thread
// has whole parts of a row (tile/staged_rows.h). Others are quantized by `general_write`, whose lanes exchange
// channels. It reads them once more from L1 or L2 where a scale covers a block.
#pragma once

#include "general_grid.h"
#include "general_staged.cuh"
#include "launch.h"
#include "ptx/grid.h"
#include "tile/row_team.h"

namespace fp8attn {

template <GeneralQuantizeConfig>
struct alignas(128) GeneralQuantizeStorage {
  MeasuredChunk warps[MEASURER_WARPS];  // of `general_measure` and `general_finish`
  // of `general_write`: largest magnitudes of a block's rows; whether one of its rows has a NaN, then its non-finite
  // tokens of V
  float largest[WRITER_WARPS];
  uint32_t nonfinite[1 + BLOCK_WORDS];
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

// What a CTA of `general_measure` measures: MEASURED_CHANNELS channels of a token chunk of V, or of the sample of K.
struct MeasuredItem {
  bool of_keys;
  int slice, head, measured_head;  // of its batch; as of KvBlock
  int token_chunk;
  KvSequence sequence;

  // `item`: of the CTAs behind GeneralGrid::paging_ctas. Called by whole warps.
  __device__ static MeasuredItem at(const GeneralQuantizeParams& p, const GeneralGrid& grid, int item) {
    const int values = grid.token_chunks * grid.value_slices;
    int inside = item, head = 0;  // of all heads
    if (grid.packed) {
      inside -= grid.kv_heads * values;  // below 0 for V: slices, heads and places of token chunks
    } else {
      head = item / grid.measuring_ctas_of_head(), inside = item % grid.measuring_ctas_of_head() - values;
    }
    const bool of_keys = inside >= 0;
    int slice, token_chunk = 0, number;
    if (of_keys) {
      slice = grid.packed ? inside % grid.key_slices : inside, head += grid.packed ? inside / grid.key_slices : 0;
      number = head / p.kv_heads;
    } else if (grid.packed) {
      slice = item % grid.value_slices, head = item / grid.value_slices, token_chunk = head / p.kv_heads;
      number = sequence_at<TOKEN_CHUNK>(p.packed, p.packed.sequences, token_chunk);
    } else {
      inside += values, slice = inside % grid.value_slices, token_chunk = inside / grid.value_slices;
      number = head / p.kv_heads;
    }
    const KvSequence sequence(p, grid, number);
    if (grid.packed && !of_keys) token_chunk -= first_place<TOKEN_CHUNK>(sequence.begin, number);
    return {of_keys, slice, head % p.kv_heads, grid.packed ? number * p.kv_heads + head % p.kv_heads : head, token_chunk, sequence};
  }

  // Places of token chunks may be empty. A number below 0 means that starts aren't in order.
  __device__ bool exists() const { return of_keys || (token_chunk >= 0 && token_chunk < sequence.chunks()); }

  // Where K's mean goes, and what is measured of V.
  __device__ float* mean(const GeneralQuantizeParams& p) const { return p.k_mean + int64_t(measured_head) * p.head_dim + slice * MEASURED_CHANNELS; }
  __device__ MeasuredChunk* measured(const GeneralQuantizeParams& p, const GeneralGrid& grid) const {
    const int64_t n = grid.packed ? first_chunk_of(p, sequence, head) + token_chunk * p.kv_heads : int64_t(measured_head) * grid.token_chunks + token_chunk;
    return measured_chunk(p, grid, n) + slice;
  }
};

// CTAs of `general_measure` on one SM, which registers must leave room for. Six spill on other GPUs than Hopper's.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int MEASURER_CTAS = 6;
#else
constexpr int MEASURER_CTAS = 5;
#endif

// The grid: GeneralGrid::measuring_ctas. K's mean, not rotated yet, goes to p.k_mean.
template <class Instance, typename T>
__global__ void __launch_bounds__(MEASURERS, MEASURER_CTAS) general_measure(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<GeneralQuantizeStorage<Instance::config>*>(bytes);
  const GeneralGrid grid(p);
  const int chunk = threadIdx.x % (32 / OF_WARP), warp = threadIdx.x / 32, paging = grid.paging_ctas();
  if (threadIdx.x < STEPS) shared.warps[0].nonfinite[threadIdx.x] = 0;
  __syncthreads();
  if (grid.packed) ptx::wait_for_grids_before();  // one of which may write lengths
  if (int(blockIdx.x) < paging) {
    ptx::launch_dependents();
    const int page = blockIdx.x * MEASURER_WARPS + warp;
    if (page >= grid.k_blocks) return;
    const PackedUnit found = packed_unit_at<SCALE_BLOCK>(p.packed, page);
    if (threadIdx.x % 32 == 0) pages_of(p)[page] = found;
    return;
  }
  const MeasuredItem item = MeasuredItem::at(p, grid, blockIdx.x - paging);
  if (!grid.packed) ptx::wait_for_grids_before();
  ptx::launch_dependents();
  if (!item.exists()) return;
  const int length = item.sequence.length, apart = item.of_keys ? sample_step(length) : 1;
  const int64_t step = int64_t(LANES) * apart;
  const int lane = warp + threadIdx.x % 32 / (32 / OF_WARP) * MEASURER_WARPS, channel = item.slice * MEASURED_CHANNELS + chunk * CHUNK;
  const int first = item.token_chunk * TOKEN_CHUNK + lane * apart;
  int tokens = first < length ? min(int((length - first + step - 1) / step), STEPS) : 0;
  if (channel >= (item.of_keys ? p.head_dim : p.value_dim)) tokens = 0;
  const int64_t stride = item.of_keys ? p.k_strides[2] : p.v_strides[2];
  const T* from = item.of_keys ? item.sequence.head_of<T>(grid, p.k, p.k_strides, item.head) : item.sequence.head_of<T>(grid, p.v, p.v_strides, item.head);
  from += first * stride + channel;
  void* const to = item.of_keys ? static_cast<void*>(item.mean(p)) : item.measured(p, grid);  // fewer registers than the item
  LaneMoments<T> found;
  found.add_all(from, step * stride, tokens, item.of_keys ? p.k_aligned : p.v_aligned);
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
  if (item.of_keys) {
    // of no tokens, the inverse is infinite and the mean NaN, which `removable` makes 0
    const float inverse = grid.packed ? inverse_sample_of(length) : p.inverse_sample;
    if (mine < min(p.head_dim - item.slice * MEASURED_CHANNELS, MEASURED_CHANNELS)) static_cast<float*>(to)[mine] = key_mean_of(sum_of_warps(shared, mine), inverse);
    return;
  }
  MeasuredChunk& measured = *static_cast<MeasuredChunk*>(to);
  if (mine < MEASURED_CHANNELS) {
    const float2 extremes = extremes_of_warps(shared, mine);
    measured.sum[mine] = sum_of_warps(shared, mine), measured.low[mine] = extremes.x, measured.high[mine] = extremes.y;
  } else if (mine < MEASURED_CHANNELS + STEPS) {
    measured.nonfinite[mine - MEASURED_CHANNELS] = shared.warps[0].nonfinite[mine - MEASURED_CHANNELS];
  }
}

// A mean of K, which `general_measure` has stored, rotated. Called by a warp.
__device__ inline void finish_key_mean(const GeneralQuantizeParams& p, int measured_head) {
  const RowTeam team(p.head_dim);
  const TeamRotation rotation(p.part, team, p.inverse_part);
  float* mean = p.k_mean + int64_t(measured_head) * p.head_dim + team.channel;
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
  const int of_keys = int(blockIdx.x) - grid.measured_heads * grid.value_slices;
  if (of_keys >= 0) {
    if (threadIdx.x < 32) finish_key_mean(p, of_keys);
    return;
  }
  const int measured_head = blockIdx.x / grid.value_slices, slice = blockIdx.x % grid.value_slices, warp = threadIdx.x / 32, mine = threadIdx.x % 32;
  int token_chunks = grid.token_chunks, apart = grid.value_slices;
  int64_t first_chunk = int64_t(measured_head) * grid.token_chunks;
  float inverse_length = p.inverse_length;
  if (grid.packed) {
    const KvSequence sequence(p, grid, measured_head / p.kv_heads);
    token_chunks = sequence.chunks(), apart *= p.kv_heads, first_chunk = first_chunk_of(p, sequence, measured_head % p.kv_heads);
    inverse_length = __fdiv_rn(1.0f, max(sequence.length, 1));
  }
  const MeasuredChunk* const measured = measured_chunk(p, grid, first_chunk) + slice;
  float sums[OF_WARP] = {}, low = INFINITE, high = -INFINITE;
  // token chunks are the lanes of quantization.lane_sum; chunks that don't exist add zeros
#pragma unroll 1
  for (int first = 0; first < token_chunks; first += LANES) {
#pragma unroll
    for (int i = 0; i < OF_WARP; ++i) {
      const int token_chunk = first + i * MEASURER_WARPS + warp;
      if (token_chunk >= token_chunks) continue;
      const MeasuredChunk& more = measured[int64_t(token_chunk) * apart];
      sums[i] += more.sum[mine], low = fminf(low, more.low[mine]), high = fmaxf(high, more.high[mine]);
    }
  }
  MeasuredChunk& to = shared.warps[warp];
  to.sum[mine] = halving_sum(sums), to.low[mine] = low, to.high[mine] = high;
  __syncthreads();
  const int channel = slice * MEASURED_CHANNELS + mine;
  if (warp > 0 || channel >= p.value_dim) return;
  const float2 extremes = extremes_of_warps(shared, mine);
  const int64_t at = int64_t(measured_head) * p.value_dim + channel;
  float mean = 0.0f;
  if (p.v_mean != nullptr) {
    mean = removable(coarse(__fmul_rn(sum_of_warps(shared, mine), inverse_length), extremes.x, extremes.y));
    p.v_mean[at] = mean;
  }
  p.v_scale[at] = scale_of(fmaxf(fmaxf(extremes.y - mean, mean - extremes.x), 0.0f));
}

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
  const RowBlock block = key_block(p, grid, head, item - grid.value_ctas, sizeof(T));
  if (block.count == 0) return;
  const int word = threadIdx.x / grid.value_slices, slice = threadIdx.x % grid.value_slices;
  __syncthreads();
  if (word < BLOCK_WORDS) {
    const uint32_t nonfinite = block.nonfinite[slice * (sizeof(MeasuredChunk) / 4) + word];
    if (nonfinite != 0) atomicOr(&shared.nonfinite[1 + word], nonfinite);
  }
  __syncthreads();
  write_rows<Instance, INT8, T>(p, block);
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
