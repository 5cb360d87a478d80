// Quantizes K and V of bfloat16 or half, sm_90a: fp8attn/quantization.py's default recipe, or its int8 variant. Gives
// the same bytes. Heads that a cluster can hold take one launch, which reads K and V once; longer ones take three
// (quantize_long.cuh). Of packed sequences, clusters quantize those that they can hold, if the caller says that there
// are few others; the three kernels follow, and do what is left. Of a cache in pages the three kernels quantize all.
//
// A cluster of CTAs has one head. Each CTA has a part of a chunk of 512 tokens in shared memory, first of V, then of K.
// V comes first because keys of tokens with non-finite values become NaN. Of V it is a slice of 64 channels. Of K it is
// all channels of some blocks, whose scales need no other CTA then. CTAs exchange statistics through DSMEM: V's means
// and scales need all token chunks, and K's mean is taken over a sample of the tokens, which CTAs read from global
// memory.
#pragma once

#include <algorithm>

#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "tile/token_chunk.h"
#include "tile/token_chunk_keys.h"
#include "tile/token_chunk_values.h"
#include "quantize_long.cuh"

namespace fp8attn {

// Bytes that a CTA receives on stats_full: V's moments of all token chunks, and of all slices K's mean and the
// non-finite tokens.
__device__ inline int bytes_of_stats(const ClusterCoord& coord) {
  return coord.token_chunks * int(sizeof(Moments)) + coord.slices * int(CHANNELS * sizeof(float) + sizeof(TileStorage().nonfinite[0]));
}

// Sends V's moments to the slice's CTAs, this CTA's channels of K's mean to all CTAs, and the non-finite tokens to
// those of the token chunk.
template <QuantizeConfig C>
__device__ void broadcast_stats(QuantizeStorage<C>& shared, const ClusterCoord& coord) {
  static_assert(sizeof(Moments) == 32 * 16);
  const int lane = threadIdx.x % 32, log_words = coord.log_words(), first = coord.token_chunk << log_words;
  const bool has_mean = first < WORDS && lane < (1 << log_words) / 2;  // a lane has four channels
#pragma unroll 1
  for (int rank = threadIdx.x / 32; rank < coord.token_chunks * coord.slices; rank += WARPS) {
    uint64_t* full = &shared.stats_full;
    if (rank % coord.slices == coord.slice)
      send(coord, rank, reinterpret_cast<uint4*>(&shared.values.token_chunks[coord.token_chunk]) + lane, reinterpret_cast<const uint4*>(&shared.own.token_chunk)[lane], full);
    if (has_mean) send(coord, rank, &shared.tile.key_mean[coord.slice * CHANNELS + 2 * first + 4 * lane], reinterpret_cast<const uint4*>(shared.own.key_mean)[lane], full);
  }
  const int slice = threadIdx.x / BLOCKS, n = threadIdx.x % BLOCKS;
  if (slice < coord.slices) send(coord, coord.rank_of(coord.token_chunk, slice), &shared.tile.nonfinite[coord.slice][n], shared.own.nonfinite[n], &shared.stats_full);
}

// What there is of an empty sequence.
__device__ inline void write_nothing(const QuantizeParams& p, const ClusterCoord& coord) {
  if (threadIdx.x >= CHANNELS) return;
  const int64_t channel = coord.channel() + threadIdx.x;
  p.k_mean[channel] = 0.0f, p.v_mean[channel] = 0.0f, p.v_scale[channel] = 1.0f;
}

// The coordinates of a CTA.
template <bool PACKED>
__device__ ClusterCoord coord_of_cta(const QuantizeParams& p, int cta) {
  if constexpr (PACKED)
    return ClusterCoord::of_cluster(p, cta);
  else
    return ClusterCoord(p, cta);
}

// Instance::config is the QuantizeConfig. INT8: K becomes int8, not e4m3. The grid has one cluster per head of K and V.
// Of packed sequences, it runs beside the kernel before, which has seen to it that K, V and lengths are there.
// A CTA exits only after it has received everything that is sent to it. So no store targets a CTA that has exited, and
// the kernel ends without a cluster barrier.
template <class Instance, bool INT8, typename T>
__global__ void __launch_bounds__(THREADS, Instance::config.ctas) quantize_kv(const __grid_constant__ QuantizeParams p) {
  constexpr QuantizeConfig C = Instance::config;
  extern __shared__ __align__(128) uint8_t bytes[];
  QuantizeStorage<C>& shared = *reinterpret_cast<QuantizeStorage<C>*>(bytes);
  const ClusterCoord coord = coord_of_cta<C.packed>(p, blockIdx.x);
  if (C.packed && (!coord.exists() || !coord.is_clustered(p))) {
    ptx::cluster_arrive_relaxed();  // the sequence's other CTAs wait for it
    if (coord.length == 0 && coord.token_chunk == 0) write_nothing(p, coord);
    return ptx::wait_for_grids_before();
  }
  const Mine mine;
  if (threadIdx.x < BLOCKS) shared.own.nonfinite[threadIdx.x] = {};
  if (threadIdx.x == 0) {
    expect(coord, &shared.stats_full, bytes_of_stats(coord));
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  if constexpr (!C.packed) {
    ptx::wait_for_grids_before();
    clear_flags(p, coord);
  }
  ptx::launch_dependents();
  const T *v = slice_of<T>(p.v, p.v_strides, coord), *k = slice_of<T>(p.k, p.k_strides, coord);
  const bool one_chunk = coord.token_chunks == 1;
  Sample<T> sample;
  if (!one_chunk && threadIdx.x < Sample<T>::parts(coord)) sample.load(p, coord, k);
  mine.load(shared.tile.tile, v + coord.first * p.v_strides[2], p.v_strides[2], coord.count);
  if (one_chunk)
    measure_slice_of_keys<C, T>(p, shared, coord, k, mine);
  else
    measure_sampled_keys<C, T>(p, shared, coord, sample);
  measure_values<C, T>(shared, coord, mine);
  __syncwarp();
  ptx::cluster_wait();  // all CTAs of the cluster have started, so that stores to them are allowed
  broadcast_stats<C>(shared, coord);
  ptx::mbarrier_wait(&shared.stats_full, 0);

  if (threadIdx.x < CHANNELS)
    finish_values<C, T>(p, shared, coord, threadIdx.x);
  else if (threadIdx.x < CHANNELS + 32 * coord.slices)
    finish_keys(p, shared.tile, coord, (threadIdx.x - CHANNELS) / 32, threadIdx.x % 32);
  __syncthreads();
  if (is_careful(shared.tile, coord))
    write_values<true, T>(p, shared.tile, coord);
  else
    write_values<false, T>(p, shared.tile, coord);

  __syncthreads();

  // Its coordinates again, computed where they are needed: else registers hold them, and some are spilled.
  const auto again = [&] {
    int cta = blockIdx.x;
    asm volatile("" : "+r"(cta));
    return coord_of_cta<C.packed>(p, cta);
  };
  const auto first_key = [&](const ClusterCoord& of) { return slice_of<T>(p.k, p.k_strides, of) + of.first * p.k_strides[2] - of.slice * CHANNELS; };
  const ClusterCoord of_keys = again();
  Keys<T> keys(KeyPart(p.head_dim / CHANNELS, of_keys.slice, of_keys.count));
  keys.load(shared.tile.tile, first_key(of_keys), p.k_strides[2]);
  write_key_parts<INT8, T>(p, shared.tile, of_keys, keys, [&] { return first_key(again()); });
  if constexpr (C.packed)
    ptx::wait_for_grids_before();
  else
    say_done(p, of_keys);
}

template <class Instance, typename T>
cudaError_t launch_in_clusters(const QuantizeParams& p, int ctas, int cluster, cudaStream_t stream) {
  constexpr int bytes = sizeof(QuantizeStorage<Instance::config>);
  const auto kernel = p.int8 ? quantize_kv<Instance, true, T> : quantize_kv<Instance, false, T>;
  cudaError_t error = take_shared_memory(kernel, bytes);
  if (error == cudaSuccess && cluster > PORTABLE_CLUSTER) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, p, ctas, cluster, THREADS, bytes, stream);
}

// CTAs of kernels that have no more to do than to look whether there are longer sequences than the caller said.
constexpr int FEW_CTAS = 128;

// CTAs of kernels of a cache in pages at most: most places may have no tokens.
constexpr int PAGED_CTAS = 1024;

// `ctas`: slices of token chunks, of packed sequences of every place and head.
template <class Instance, typename T>
cudaError_t launch_long(const QuantizeParams& p, int ctas, cudaStream_t stream) {
  constexpr bool packed = Instance::config.packed;
  const int slices = p.head_dim / CHANNELS, heads = packed ? p.sequences * p.heads : ctas / slices / ((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK);
  const int samples = p.step == QuantizeStep::all ? heads * slices : 0;
  const bool in_clusters = packed && p.cluster_chunks > 0;
  const auto grid = [&](int items) { return Instance::config.paged ? std::min(items, PAGED_CTAS) : in_clusters ? std::min(items, FEW_CTAS) : items; };
  const auto write = p.int8 ? write_kv<Instance, true, T> : write_kv<Instance, false, T>;
  constexpr int measured_bytes = sizeof(Located<MomentsStorage, Instance::config.paged>), written_bytes = sizeof(Located<TileStorage, Instance::config.paged>);
  cudaError_t error = take_shared_memory(write, written_bytes);
  if (error == cudaSuccess && p.step != QuantizeStep::write)
    error = launch_grid(measure_kv<Instance, T>, p, grid(samples + ctas), THREADS, measured_bytes, stream);
  if constexpr (packed && !Instance::config.paged) {
    const int cluster = p.cluster_chunks * slices;
    if (error == cudaSuccess && in_clusters) error = launch_in_clusters<Instance, T>(p, heads * cluster, cluster, stream);
  }
  if (error == cudaSuccess && p.step == QuantizeStep::all) error = launch_grid(finish_kv<packed, Instance::config.paged, T>, p, grid(heads * slices), CHANNELS + 32, 0, stream);
  if (error == cudaSuccess && p.step != QuantizeStep::measure) error = launch_grid(write, p, grid(ctas / slices * writers_of(slices)), THREADS, written_bytes, stream);
  return error;
}

template <class Instance, typename T>
cudaError_t launch_of(const QuantizeParams& p, int ctas, cudaStream_t stream) {
  if constexpr (Instance::config.token_chunks == 1 || Instance::config.packed)
    return launch_long<Instance, T>(p, ctas, stream);
  else
    return launch_in_clusters<Instance, T>(p, ctas, (p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK * (p.head_dim / CHANNELS), stream);
}

template <class Instance>
cudaError_t launch(const QuantizeParams& p, int ctas, cudaStream_t stream) {
  return p.half ? launch_of<Instance, __half>(p, ctas, stream) : launch_of<Instance, __nv_bfloat16>(p, ctas, stream);
}

}  // namespace fp8attn
