// Quantizes heads that are longer than a cluster can hold, in three launches without clusters. `measure_kv` measures
// V and the sample of K, `finish_kv` makes V's means and scales and K's mean of it, `write_kv` writes the codes. V is
// read twice: the heads that are measured last are written first, while L2 still has them. If a sequence has several
// parts, `measure_kv` is a launch of its own, others make statistics of what it finds in all parts, and `write_kv` is
// another launch.
#pragma once

#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
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

// A slice of the first token chunk of a head. `number`: heads, of packed sequences those of each, and their slices.
template <bool PACKED>
__device__ ClusterCoord coord_of_head(const QuantizeParams& p, int number) {
  const int slices = p.head_dim / CHANNELS, pair = number / slices;
  if constexpr (PACKED)
    return ClusterCoord(p, pair / p.heads, pair % p.heads, number % slices);
  else
    return ClusterCoord(p, pair * ((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK) * slices + number % slices);
}

// What is known of a slice of the n-th token chunk. In order are heads and their token chunks. Of packed sequences it
// is places and heads, so that CTAs which run at the same time read all heads of the same tokens, which lie side by
// side.
__device__ inline ChunkStats& stats_of_chunk(const QuantizeParams& p, int n, int slice) { return static_cast<ChunkStats*>(p.chunk_stats)[n * (p.head_dim / CHANNELS) + slice]; }

// Whether there are packed sequences that clusters don't quantize. Called by whole warps.
__device__ inline bool has_long_sequences(const QuantizeParams& p) {
  if (p.cluster_chunks == 0) return true;
  bool found = false;
  for (int i = threadIdx.x % 32; i < p.sequences; i += 32) found |= PackedSequence(p, i).length > p.cluster_chunks * TOKEN_CHUNK;
  return __any_sync(~0u, found);
}

// Slices of the token chunks of all places and heads. Of a cache in pages the host doesn't know how many have tokens,
// or whether any have.
template <bool PAGED>
__device__ int units_of(const QuantizeParams& p) {
  if constexpr (!PAGED) return p.units;
  const int tokens = begin_of(p, p.sequences);
  return tokens == 0 ? 0 : first_place<TOKEN_CHUNK>(tokens, p.sequences) * p.heads * (p.head_dim / CHANNELS);
}

// Calls f(n) for every item of a CTA. Of packed sequences there may be fewer CTAs than items.
template <bool PACKED, typename F>
__device__ void for_items(const QuantizeParams& p, int items, F&& f) {
  if constexpr (!PACKED) {
    f(blockIdx.x);
  } else {
    if (!has_long_sequences(p)) return;
#pragma unroll 1
    for (int n = blockIdx.x; n < items; n += gridDim.x) {
      f(n);
      __syncthreads();  // shared memory has been read
    }
  }
}

// Slices of the heads of all packed sequences.
__device__ inline int slices_of_heads(const QuantizeParams& p) { return p.sequences * p.heads * (p.head_dim / CHANNELS); }

// The first items of `measure_kv`, each of which is a slice of a head's sample of K.
template <bool PACKED>
__device__ int samples_of(const QuantizeParams& p) {
  if (p.step != QuantizeStep::all) return 0;
  return PACKED ? slices_of_heads(p) : int(gridDim.x) / ((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK + 1);
}

// Measures an item: a slice of the sample of a head, or behind these a slice of a token chunk, the last heads first.
// K's mean, not rotated yet, goes to p.k_mean. The first kernel finds the places of packed sequences for all.
template <bool PACKED, bool PAGED, typename T>
__device__ void measure_item(const QuantizeParams& p, Located<MomentsStorage, PAGED>& shared, int n, int items) {
  const bool is_sample = n < samples_of<PACKED>(p);
  const int slices = p.head_dim / CHANNELS, from_last = items - 1 - n;
  const int chunk = from_last / slices, slice = from_last % slices;
  const auto coord_of_chunk = [&] {
    if constexpr (!PACKED) return ClusterCoord(p, from_last);
    const auto place = packed_unit_at<TOKEN_CHUNK>(p, chunk / p.heads);
    if (threadIdx.x == 0) stats_of_chunk(p, chunk, slice).place = place;
    return ClusterCoord::of_place(p, place, chunk % p.heads, slice);
  };
  const ClusterCoord coord = is_sample ? coord_of_head<PACKED>(p, n) : coord_of_chunk();
  if (PACKED && (!coord.exists() || coord.is_clustered(p))) return;
  if (!is_sample) clear_flags(p, coord);
  if (threadIdx.x < BLOCKS) shared.nonfinite[threadIdx.x] = {};
  const Mine mine;
  const int end = is_sample ? coord.length : coord.count, apart = is_sample ? sample_step(coord.length) : 1;
  if constexpr (PAGED) {
    const PagedTokens<T> tokens(p, is_sample ? p.k : p.v, is_sample ? p.k_strides : p.v_strides, coord, is_sample ? 0 : coord.first, apart, (end + apart - 1) / apart, shared.offsets);
    __syncthreads();
    const Measured<T, STEPS / 2, PagedChunks<T>> measured({tokens, coord.slice * CHANNELS, mine}, end, apart, mine, !is_sample);
    measured(shared.warps, shared.token_chunk, shared.nonfinite, mine);
  } else {
    __syncthreads();
    const T* from = is_sample ? slice_of<T>(p.k, p.k_strides, coord) : slice_of<T>(p.v, p.v_strides, coord) + coord.first * p.v_strides[2];
    const Measured<T, STEPS / 2> measured({from, is_sample ? p.k_strides[2] : p.v_strides[2], apart, mine}, end, apart, mine, !is_sample);
    measured(shared.warps, shared.token_chunk, shared.nonfinite, mine);
  }
  const int channel = threadIdx.x;
  if (is_sample) {
    if (channel < CHANNELS) p.k_mean[coord.channel() + channel] = key_mean_of(shared.token_chunk.sum[channel], coord.inverse_sample(p));
    return;
  }
  if (p.step == QuantizeStep::measure && channel >= THREADS - CHANNELS) write_moments<T>(p, coord, shared.token_chunk, channel - (THREADS - CHANNELS));
  ChunkStats& to = coord.stats_of(p, coord.token_chunk, coord.slice);
  if (threadIdx.x < 32)
    reinterpret_cast<uint4*>(&to.moments)[threadIdx.x] = reinterpret_cast<const uint4*>(&shared.token_chunk)[threadIdx.x];
  else if (threadIdx.x < 32 + BLOCKS)
    to.nonfinite[threadIdx.x - 32] = shared.nonfinite[threadIdx.x - 32];
}

// CTAs of `measure_kv` on one SM, which registers must leave room for: it takes little shared memory.
constexpr int MEASURING_CTAS = 4;

template <class Instance, typename T>
__global__ void __launch_bounds__(THREADS, MEASURING_CTAS) measure_kv(const __grid_constant__ QuantizeParams p) {
  constexpr bool packed = Instance::config.packed, paged = Instance::config.paged;
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<Located<MomentsStorage, paged>*>(bytes);
  ptx::wait_for_grids_before();  // one of which may write lengths
  ptx::launch_dependents();
  const int units = packed ? units_of<paged>(p) : int(gridDim.x);
  if (units == 0) return;
  const int items = packed ? samples_of<packed>(p) + units : units;
  for_items<packed>(p, items, [&](int n) { measure_item<packed, paged, T>(p, shared, n, items); });
}

constexpr int CHUNKS_IN_FLIGHT = 8;  // token chunks whose statistics a thread of `finish_kv` loads before it adds them up
static_assert(LANES % CHUNKS_IN_FLIGHT == 0);

// Finishes an item: a slice of a head.
template <bool PACKED, bool PAGED, typename T>
__device__ void finish_item(const QuantizeParams& p, int n) {
  const int slices = p.head_dim / CHANNELS, channel = threadIdx.x;
  const ClusterCoord coord = coord_of_head<PACKED>(p, n);
  if (PACKED && p.cluster_chunks > 0 && coord.is_clustered(p)) return;
  if (PAGED && !coord.exists()) return;  // nobody attends to it
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

template <bool PACKED, bool PAGED, typename T>
__global__ void __launch_bounds__(CHANNELS + 32) finish_kv(const __grid_constant__ QuantizeParams p) {
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  for_items<PACKED>(p, slices_of_heads(p), [&](int n) { finish_item<PACKED, PAGED, T>(p, n); });
}

// The items of `write_kv` for a token chunk: slices of V, and parts of K.
__host__ __device__ inline int writers_of(int slices) { return slices + KeyPart::parts_of(slices); }

// Writes the codes of an item.
template <bool PACKED, bool PAGED, bool INT8, typename T>
__device__ void write_item(const QuantizeParams& p, Located<TileStorage, PAGED>& shared, int n) {
  const int slices = p.head_dim / CHANNELS, item = n % writers_of(slices);
  const bool is_keys = item >= slices;
  const int chunk = n / writers_of(slices), slice = is_keys ? 0 : item;
  const auto coord_of_chunk = [&] {
    if constexpr (!PACKED) return ClusterCoord(p, chunk * slices + slice);
    return ClusterCoord::of_place(p, PackedUnit::load(stats_of_chunk(p, chunk, slice).place), chunk % p.heads, slice);
  };
  const ClusterCoord coord = coord_of_chunk();
  if (PACKED && (!coord.exists() || coord.is_clustered(p))) return;
  const auto wait = [&] {
    ptx::wait_for_grids_before();
    ptx::launch_dependents();
    if (threadIdx.x >= slices * BLOCKS) return;
    const int slice = threadIdx.x / BLOCKS, block = threadIdx.x % BLOCKS;
    shared.nonfinite[slice][block] = coord.stats_of(p, coord.token_chunk, slice).nonfinite[block];
  };
  if (is_keys) {
    Keys<T> keys(KeyPart(slices, item - slices, coord.count));
    if constexpr (PAGED) {
      const PagedTokens<T> tokens(p, p.k, p.k_strides, coord, coord.first, 1, coord.count, shared.offsets);
      __syncthreads();
      keys.load(shared.tile, tokens);
    } else {
      keys.load(shared.tile, slice_of<T>(p.k, p.k_strides, coord) + coord.first * p.k_strides[2], p.k_strides[2]);
    }
    wait();
    if (threadIdx.x < p.head_dim) shared.key_mean[threadIdx.x] = p.k_mean[coord.channel() + threadIdx.x];
    __syncthreads();
    write_key_part<INT8, T>(p, shared, coord, keys);
  } else {
    const Mine mine;
    if constexpr (PAGED) {
      const PagedTokens<T> tokens(p, p.v, p.v_strides, coord, coord.first, 1, coord.count, shared.offsets);
      __syncthreads();
      mine.load(shared.tile, tokens, coord.slice * CHANNELS, coord.count);
    } else {
      mine.load(shared.tile, slice_of<T>(p.v, p.v_strides, coord) + coord.first * p.v_strides[2], p.v_strides[2], coord.count);
    }
    wait();
    if (threadIdx.x < CHANNELS) {
      shared.shift[threadIdx.x] = p.v_mean[coord.channel() + threadIdx.x];
      shared.factor[threadIdx.x] = __frcp_rn(p.v_scale[coord.channel() + threadIdx.x]);
    }
    ptx::cp_async_wait_but<0>();
    __syncthreads();
    const bool careful = is_careful(shared, coord);
    if (careful) {
      mine.write_nan<T>(shared.tile);
      __syncthreads();
      write_values<true, T>(p, shared, coord);
    } else {
      write_values<false, T>(p, shared, coord);
    }
  }
  say_done(p, coord);
}

template <class Instance, bool INT8, typename T>
__global__ void __launch_bounds__(THREADS, Instance::config.ctas) write_kv(const __grid_constant__ QuantizeParams p) {
  constexpr bool packed = Instance::config.packed, paged = Instance::config.paged;
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<Located<TileStorage, paged>*>(bytes);
  // `measure_kv` has seen to it that K, V and lengths are there; what they are quantized by may not be
  if (p.step != QuantizeStep::all) ptx::wait_for_grids_before();
  const int slices = p.head_dim / CHANNELS;
  for_items<packed>(p, units_of<paged>(p) / slices * writers_of(slices), [&](int n) { write_item<packed, paged, INT8, T>(p, shared, n); });
  if constexpr (packed) ptx::wait_for_grids_before();  // those whose items have no tokens, too: attention waits for this grid alone
}

}  // namespace fp8attn
