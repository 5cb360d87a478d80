// Quantizes heads that are longer than a cluster can hold, in three launches. `measure_kv` measures V and the sample of
// K, `finish_kv` makes V's means and scales and K's mean of it, `write_kv` writes the codes. V is read twice: the heads
// that are measured last are written first, while L2 still has them. If a sequence has several parts, `measure_kv` is a
// launch of its own, others make statistics of what it finds in all parts, and `write_kv` is another launch.
#pragma once

#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "tile/token_chunk.h"
#include "tile/token_chunk_keys.h"
#include "tile/token_chunk_values.h"

namespace fp8attn {

// Writes what other kernels than `finish_kv` make statistics of.
template <typename T>
__device__ void write_moments(const QuantizeParams& p, const ClusterCoord& coord, const Moments& moments, int channel) {
  const int64_t chunk = int64_t(coord.pair) * coord.token_chunks + coord.token_chunk;
  const int of_head = coord.slice * CHANNELS + channel;
  float low = INFINITE, high = -INFINITE;
  join_extremes<T>(low, high, moments, channel);
  p.v_sums[chunk * p.head_dim + of_head] = moments.sum[channel];
  p.v_extremes[2 * chunk * p.head_dim + of_head] = low;
  p.v_extremes[(2 * chunk + 1) * p.head_dim + of_head] = high;
}

// Coordinates of a CTA: heads, their token chunks, their slices. Of packed sequences: places, heads, slices. So CTAs
// that run at the same time read all heads of the same tokens, which lie side by side.
template <QuantizeConfig C>
__device__ ClusterCoord coord_of(const QuantizeParams& p, int cta) {
  if constexpr (!C.packed) {
    return ClusterCoord(p, cta, false);
  } else {
    ptx::wait_for_grids_before();  // one of which may write lengths
    const int slices = p.head_dim / CHANNELS, row = cta / slices;
    return ClusterCoord::of_place(p, row / p.heads, row % p.heads, cta % slices);
  }
}

// The grid has a CTA for every slice of every token chunk, the last heads first. K's mean, not rotated yet, goes to
// p.k_mean.
template <class Instance, typename T>
__global__ void __launch_bounds__(THREADS, Instance::config.ctas) measure_kv(const __grid_constant__ QuantizeParams p) {
  constexpr QuantizeConfig C = Instance::config;
  extern __shared__ __align__(128) uint8_t bytes[];
  QuantizeStorage<C>& shared = *reinterpret_cast<QuantizeStorage<C>*>(bytes);
  const ClusterCoord coord = coord_of<C>(p, gridDim.x - 1 - blockIdx.x);
  if (C.packed && !coord.exists()) return;
  const Mine mine;
  if (threadIdx.x < BLOCKS) shared.own.nonfinite[threadIdx.x] = {};
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const T *v = slice_of<T>(p.v, p.v_strides, coord), *k = slice_of<T>(p.k, p.k_strides, coord);
  const bool has_keys = p.step == QuantizeStep::all;
  const int words = 1 << coord.log_words(), first = has_keys ? coord.token_chunk * words : WORDS;
  Sample<T> sample;
  if (first < WORDS && threadIdx.x < LANES * words) sample.load(p, coord, k, threadIdx.x);
  mine.load(shared.tile, v + coord.first * p.v_strides[2], p.v_strides[2], coord.count);
  if (has_keys) measure_keys<C, T>(p, shared, coord, k, sample);
  measure_values<C, T>(shared, coord, mine);
  if (!has_keys && threadIdx.x >= THREADS - CHANNELS) write_moments<T>(p, coord, shared.own.token_chunk, threadIdx.x - (THREADS - CHANNELS));
  ChunkStats& to = coord.stats_of(p, coord.token_chunk, coord.slice);
  if (threadIdx.x < 32)
    reinterpret_cast<uint4*>(&to.moments)[threadIdx.x] = reinterpret_cast<const uint4*>(&shared.own.token_chunk)[threadIdx.x];
  else if (threadIdx.x < 32 + BLOCKS)
    to.nonfinite[threadIdx.x - 32] = shared.own.nonfinite[threadIdx.x - 32];
  else if (first < WORDS && threadIdx.x >= 64 && threadIdx.x < 64 + 2 * words)
    p.k_mean[coord.channel() + 2 * first + threadIdx.x - 64] = shared.own.key_mean[threadIdx.x - 64];
}

constexpr int CHUNKS_IN_FLIGHT = 8;  // token chunks whose statistics a thread of `finish_kv` loads before it adds them up
static_assert(LANES % CHUNKS_IN_FLIGHT == 0);

// The grid has a CTA for every slice of every head, of packed sequences of every head of each.
template <bool PACKED, typename T>
__global__ void __launch_bounds__(CHANNELS + 32) finish_kv(const __grid_constant__ QuantizeParams p) {
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const int slices = p.head_dim / CHANNELS, pair = blockIdx.x / slices, channel = threadIdx.x;
  const ClusterCoord coord = [&] {
    if constexpr (PACKED)
      return ClusterCoord(p, pair / p.heads, pair % p.heads, blockIdx.x % slices);
    else
      return ClusterCoord(p, pair * ((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK) * slices + blockIdx.x % slices, false);
  }();
  const int token_chunks = coord.token_chunks;
  const int64_t first = coord.channel();
  if (channel >= CHANNELS) {
    float4* means = reinterpret_cast<float4*>(p.k_mean + first);
    const float4 mean = !PACKED || coord.exists() ? removable(rotated(means[threadIdx.x % (CHANNELS / 4)])) : float4{};
    __syncwarp();  // all lanes have read `means`
    if (channel - CHANNELS < CHANNELS / 4) means[channel - CHANNELS] = mean;
    return;
  }
  const ChunkStats* stats = &coord.stats_of(p, 0, coord.slice);
  const int64_t apart = PACKED ? p.heads * slices : slices;
  float sum[LANES] = {}, low = INFINITE, high = -INFINITE;
#pragma unroll 1
  for (int i = 0; i < token_chunks; i += LANES) {
#pragma unroll
    for (int group = 0; group < LANES; group += CHUNKS_IN_FLIGHT) {
      if (i + group >= token_chunks) break;
      float sums[CHUNKS_IN_FLIGHT];
      uint32_t lows[CHUNKS_IN_FLIGHT], highs[CHUNKS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < CHUNKS_IN_FLIGHT; ++j) {  // of a token chunk that doesn't exist, the first one's extremes, and no sum
        const int chunk = i + group + j;
        const Moments& more = stats[(chunk < token_chunks ? chunk : 0) * apart].moments;
        sums[j] = chunk < token_chunks ? more.sum[channel] : 0.0f;
        lows[j] = more.low[channel / 2], highs[j] = more.high[channel / 2];
      }
#pragma unroll
      for (int j = 0; j < CHUNKS_IN_FLIGHT; ++j) {
        sum[group + j] += sums[j];
        join_extremes<T>(low, high, lows[j], highs[j], channel);
      }
    }
  }
  const float2 found = mean_and_scale(coord.inverse_length(p), sum, low, high);
  p.v_mean[first + channel] = found.x;
  p.v_scale[first + channel] = found.y;
}

// The grid has a cluster for every token chunk, with a CTA for every slice: K's scales need all slices.
template <class Instance, bool INT8, typename T>
__global__ void __launch_bounds__(THREADS, Instance::config.ctas) write_kv(const __grid_constant__ QuantizeParams p) {
  constexpr QuantizeConfig C = Instance::config;
  extern __shared__ __align__(128) uint8_t bytes[];
  QuantizeStorage<C>& shared = *reinterpret_cast<QuantizeStorage<C>*>(bytes);
  const ClusterCoord coord = coord_of<C>(p, blockIdx.x);
  if (C.packed && !coord.exists()) return;  // nor do the other CTAs of the cluster go on
  const Mine mine;
  if (threadIdx.x == 0) {
    expect(coord, &shared.largest_full, bytes_of_largest<INT8>(shared, coord));
    ptx::fence_barrier_init();
  }
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  mine.load(shared.tile, slice_of<T>(p.v, p.v_strides, coord) + coord.first * p.v_strides[2], p.v_strides[2], coord.count);
  const int slice = threadIdx.x / BLOCKS, block = threadIdx.x % BLOCKS;
  if (slice < coord.slices) {
    const uint4 nonfinite = coord.stats_of(p, coord.token_chunk, slice).nonfinite[block];
    shared.nonfinite[slice][block] = nonfinite;
    if (slice == coord.slice) shared.own.nonfinite[block] = nonfinite;
  }
  if (threadIdx.x < CHANNELS) {
    shared.key_mean[threadIdx.x] = p.k_mean[coord.channel() + threadIdx.x];
    shared.shift[threadIdx.x] = p.v_mean[coord.channel() + threadIdx.x];
    shared.factor[threadIdx.x] = __fdiv_rn(1.0f, p.v_scale[coord.channel() + threadIdx.x]);
  }
  ptx::cp_async_wait_but<0>();
  ptx::cluster_sync();  // all that is above is there, and all CTAs of the cluster have started
  const bool careful = is_careful(shared, coord, coord.slice, coord.slice + 1);
  if (careful) {
    mine.write_nan<T>(shared.tile);
    __syncthreads();
    write_values<true, C, T>(p, shared, coord);
  } else {
    write_values<false, C, T>(p, shared, coord);
  }
  __syncthreads();
  write_keys_of_token_chunk<INT8, C, T>(p, shared, coord, slice_of<T>(p.k, p.k_strides, coord) + coord.first * p.k_strides[2]);
}

// `ctas`: one for every slice of every token chunk, of packed sequences of every place and head.
template <class Instance, typename T>
cudaError_t launch_long(const QuantizeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(QuantizeStorage<Instance::config>);
  constexpr bool packed = Instance::config.packed;
  const int slices = p.head_dim / CHANNELS, of_heads = packed ? p.sequences * p.heads * slices : ctas / ((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK);
  const auto write = p.int8 ? write_kv<Instance, true, T> : write_kv<Instance, false, T>;
  cudaError_t error = take_shared_memory(measure_kv<Instance, T>, bytes);
  if (error == cudaSuccess) error = take_shared_memory(write, bytes);
  if (error == cudaSuccess && p.step != QuantizeStep::write) error = launch_clusters(measure_kv<Instance, T>, p, ctas, 1, THREADS, bytes, stream);
  if (error == cudaSuccess && p.step == QuantizeStep::all) error = launch_clusters(finish_kv<packed, T>, p, of_heads, 1, CHANNELS + 32, 0, stream);
  if (error == cudaSuccess && p.step != QuantizeStep::measure) error = launch_clusters(write, p, ctas, slices, THREADS, bytes, stream);
  return error;
}

}  // namespace fp8attn
