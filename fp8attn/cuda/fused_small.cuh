// The fused small kernel, sm_90a: quantization and attention of up to 512 keys in one launch. A cluster of CTAs has one
// head of K and V.
//
// Each warpgroup of a cluster reads 16 channels of K or V for all keys. So one warpgroup computes the mean and the
// scale of a channel. A warpgroup with channels of V quantizes them. A warpgroup with channels of K sends their means
// to all CTAs, and then quantizes all channels of one block of keys, because channels are rotated together. Codes are
// copied to the shared memory of every CTA of the cluster. Then each warpgroup attends with 64 rows of Q, which it has
// quantized itself.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/uniform.h"
#include "ptx/warpgroup.h"
#include "tile/attend.h"
#include "tile/output.h"
#include "tile/quantize.h"
#include "tile/dsmem.h"
#include "tile/key_block.h"

namespace fp8attn {

constexpr int BLOCKS = TOKEN_CHUNK / KEYS;

template <FusedSmallConfig C>
struct FusedSmallShape {
  static constexpr int slices = C.head_dim / SLICE;  // of K, and of V
  static_assert(C.cluster * C.consumers == 2 * slices);
  // one block of keys for each warpgroup with channels of K, and one rotated part per row
  static_assert(slices == BLOCKS && C.head_dim == PART);
  static constexpr int block_bytes = KEYS * SLICE;  // codes of a slice of one block
  static constexpr int width = C.head_dim + ONES;
  static constexpr int threads = 128 * C.consumers;
};

// Statistics of a slice of V, which are sent to all CTAs.
struct ValueStats {
  float scale[SLICE], mean[SLICE];
  uint32_t nonfinite[STEPS];  // one bit per token: its key becomes NaN
};

// Shared memory of one warpgroup.
struct WarpgroupSmem {
  LaneStatistics<__half> lanes;  // or of bfloat16, which have the same size
  alignas(16) float shift[SLICE], factor[SLICE];
  alignas(16) ValueStats stats;
  float largest[4];  // largest magnitude of each warp's keys
  float row_scale[ROWS];
  int row_end[ROWS];
  float mean_scores[ROWS];  // what K's mean adds to the scores of each row
};

template <FusedSmallConfig C>
struct alignas(1024) FusedSmallStorage {
  using S = FusedSmallShape<C>;
  uint8_t v[BLOCKS][S::width * KEYS];
  uint8_t q[C.consumers][ROWS * C.head_dim];
  KeyColumns k[BLOCKS];
  WarpgroupSmem warpgroups[C.consumers];
  alignas(16) float channel_scale[C.head_dim], channel_mean[C.head_dim];
  alignas(16) uint32_t nonfinite[S::slices][STEPS];
  alignas(16) float4 key_mean[C.head_dim / 4];  // before the rotation
  uint4 k_largest[BLOCKS];                      // .x has the bits of a float
  uint64_t stats_full, means_full, largest_full, k_full[BLOCKS], v_full[BLOCKS];
};

// A warpgroup's slice of K or V, and for K the block that it quantizes. Its number selects its tile of queries.
template <FusedSmallConfig C>
struct Part {
  int rank, warpgroup, pair, split, slice;  // for K, `slice` is also the index of the block
  bool of_keys;

  __device__ explicit Part(const Params& p) : rank(ptx::cluster_rank()), warpgroup(ptx::uniform(threadIdx.x / 128)) {
    const int cluster = blockIdx.x / C.cluster;
    pair = cluster / p.splits, split = cluster % p.splits;
    of_keys = number() < FusedSmallShape<C>::slices;
    slice = number() % FusedSmallShape<C>::slices;
  }

  __device__ int number() const { return warpgroup * C.cluster + rank; }

  // Number of warpgroups of this CTA that quantize keys.
  __device__ int keys_here() const { return min(max((FusedSmallShape<C>::slices - rank + C.cluster - 1) / C.cluster, 0), C.consumers); }

  // Whether a warpgroup of this CTA quantizes the block.
  __device__ bool is_here(int block) const { return block % C.cluster == rank; }
};

// Copies data to the same location in the CTA `peer`, where it completes on `barrier`. If `peer` is this CTA, the data
// is there already, and this only arrives.
__device__ inline void dsmem_copy(int rank, int peer, const void* data, int bytes, uint64_t* barrier) {
  const uint32_t from = ptx::shared_address(data), full = ptx::shared_address(barrier);
  if (peer == rank)
    ptx::mbarrier_arrive(barrier);
  else
    ptx::bulk_copy(ptx::address_in(peer, from), from, bytes, ptx::address_in(peer, full));
}

// The lane of a thread in a warpgroup with channels of K.
__device__ inline int lane_of_keys() { return threadIdx.x % 128 / 4; }

// The lane of a thread in a warpgroup with channels of V. Keys that are adjacent in V's order belong to one warp.
__device__ inline int lane_of_values() {
  const int thread = threadIdx.x % 128 / 4;
  return thread & 3 | (thread & 4) << 1 | (thread & 24) >> 1 & 4 | (thread & 16);
}

// Computes the mean of a slice of K, and sends it to all CTAs.
template <FusedSmallConfig C, typename T>
__device__ void measure_keys(const Params& p, FusedSmallStorage<C>& shared, const Part<C>& part, Slice<T>& keys) {
  WarpgroupSmem& own = shared.warpgroups[part.warpgroup];
  auto& lanes = reinterpret_cast<LaneStatistics<T>&>(own.lanes);
  const int thread = threadIdx.x % 128;
  keys.template statistics<false>(lanes, sample_step(p.kv_length));
  ptx::warpgroup_sync(1 + part.warpgroup);
  const auto found = Statistics::of<false>(lanes);
  if (thread % 8 == 0) own.shift[found.channel()] = key_mean_of(found.sum, inverse_sample_of(p.kv_length));
  ptx::warpgroup_sync(1 + part.warpgroup);
  const int quad = thread / C.cluster;
  if (quad < QUADS) dsmem_store(thread % C.cluster, &shared.key_mean[part.slice * QUADS + quad], reinterpret_cast<const uint4*>(own.shift)[quad], &shared.means_full);
}

// Four channels of the rotated mean that is subtracted from K. `quad` is lane % (PART / 4). Called by a whole warp.
template <FusedSmallConfig C>
__device__ float4 rotated_mean(const FusedSmallStorage<C>& shared, int quad) {
  return removable(rotated(shared.key_mean[quad]));
}

// K's rotated mean, for the channels of this thread. Every warp computes it redundantly.
template <FusedSmallConfig C>
__device__ void finish_means(const FusedSmallStorage<C>& shared, float4 (&mean)[QUARTERS]) {
  const int lane = threadIdx.x % 32;
  const float4 own = rotated_mean(shared, lane % (PART / 4));
#pragma unroll
  for (int i = 0; i < QUARTERS; ++i) {
    const int from = i * QUADS + lane % 4;
    mean[i] = {__shfl_sync(~0u, own.x, from), __shfl_sync(~0u, own.y, from), __shfl_sync(~0u, own.z, from), __shfl_sync(~0u, own.w, from)};
  }
}

// The same for the channels of Q of this thread. `member`: of the four lanes of a row.
template <FusedSmallConfig C>
__device__ KeyMeanQuarter mean_of_quarter(const FusedSmallStorage<C>& shared, int member) {
  static_assert(C.head_dim == PART);
  const float4 own = rotated_mean(shared, threadIdx.x % (PART / 4));
  KeyMeanQuarter mean;
  mean.exists = true;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int from = member * QUADS + i;
    mean.channels[4 * i] = __shfl_sync(~0u, own.x, from);
    mean.channels[4 * i + 1] = __shfl_sync(~0u, own.y, from);
    mean.channels[4 * i + 2] = __shfl_sync(~0u, own.z, from);
    mean.channels[4 * i + 3] = __shfl_sync(~0u, own.w, from);
  }
  return mean;
}

// Quantizes block part.slice of K. Sends its largest magnitude to all CTAs, and copies the codes to them.
template <FusedSmallConfig C, typename T>
__device__ void quantize_keys(FusedSmallStorage<C>& shared, const Part<C>& part, KeyBlock<T, WARPGROUP_WARPS>& keys, int blocks) {
  using S = FusedSmallShape<C>;
  WarpgroupSmem& own = shared.warpgroups[part.warpgroup];
  const int thread = threadIdx.x % 128, block = part.slice;
  float4 mean[QUARTERS];
  ptx::mbarrier_wait(&shared.means_full, 0);
  finish_means(shared, mean);
  float y[KeyBlock<T, WARPGROUP_WARPS>::pairs][QUARTERS][2][4];
  const float of_warp = keys.rotate(y, mean);
  if (keys.lane == 0) own.largest[keys.warp] = of_warp;
  ptx::warpgroup_sync(1 + part.warpgroup);
  const float largest = fmaxf(fmaxf(own.largest[0], own.largest[1]), fmaxf(own.largest[2], own.largest[3]));
  if (thread < C.cluster) dsmem_store(thread, &shared.k_largest[block], {__float_as_uint(largest), 0, 0, 0}, &shared.largest_full);
  const float factor = __frcp_rn(row_scale_of<false>(largest));
  ptx::mbarrier_wait(&shared.stats_full, 0);
  uint32_t nonfinite = 0;
  for (int i = 0; i < S::slices; ++i) nonfinite |= shared.nonfinite[i][block * (KEYS / LANES) + keys.warp];
  keys.store(shared.k[block], y, factor, nonfinite);
  ptx::fence_proxy_async();
  ptx::warpgroup_sync(1 + part.warpgroup);
  if (block < blocks && thread < C.cluster) dsmem_copy(part.rank, thread, shared.k[block], sizeof(shared.k[block]), &shared.k_full[block]);
}

// Quantizes a slice of V. Sends its statistics to all CTAs, and copies the codes to them.
template <FusedSmallConfig C, typename T>
__device__ void quantize_values(const Params& p, FusedSmallStorage<C>& shared, const Part<C>& part, Slice<T>& values, int blocks) {
  using S = FusedSmallShape<C>;
  WarpgroupSmem& own = shared.warpgroups[part.warpgroup];
  auto& lanes = reinterpret_cast<LaneStatistics<T>&>(own.lanes);
  const int thread = threadIdx.x % 128;
  values.template statistics<true>(lanes);
  if (values.nonfinite != 0) {
#pragma unroll 1
    for (int i = 0; i < STEPS; ++i)
      if (values.nonfinite >> i & 1) atomicOr(&own.stats.nonfinite[i], 1u << values.lane);
  }
  ptx::warpgroup_sync(1 + part.warpgroup);
  const auto found = Statistics::of<true>(lanes);
  if (thread % 8 == 0) {
    const int c = found.channel();
    const float mean = removable(coarse(__fmul_rn(found.sum, p.inverse_length), found.low, found.high));
    const float scale = scale_of(fmaxf(fmaxf(found.high - mean, mean - found.low), 0.0f));
    own.stats.mean[c] = own.shift[c] = mean;
    own.stats.scale[c] = scale;
    own.factor[c] = __frcp_rn(scale);
  }
  ptx::warpgroup_sync(1 + part.warpgroup);
  const float4 mean = reinterpret_cast<const float4*>(own.shift)[values.quad], factor = reinterpret_cast<const float4*>(own.factor)[values.quad];
  if (const int i = thread / C.cluster; i < int(sizeof(ValueStats) / 16)) {
    void* const to[] = {&shared.channel_scale[part.slice * SLICE], &shared.channel_mean[part.slice * SLICE], shared.nonfinite[part.slice]};
    dsmem_store(thread % C.cluster, static_cast<uint4*>(i < 4 ? to[0] : i < 8 ? to[1] : to[2]) + i % 4, reinterpret_cast<const uint4*>(&own.stats)[i], &shared.stats_full);
  }

  // transposes codes between four lanes: from four channels of one token to four tokens of one channel
  const bool odd = thread & 4, upper = thread & 16;
  const int row = part.slice * SLICE + values.quad * 4 + odd + 2 * upper, slot = (values.lane & 6) * 2;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    uint32_t codes = values.codes(i, mean, factor);
    codes = __byte_perm(codes, __shfl_xor_sync(~0u, codes, 4), odd ? 0x3715 : 0x6240);
    codes = __byte_perm(codes, __shfl_xor_sync(~0u, codes, 16), upper ? 0x3276 : 0x5410);
    const int n = i * LANES / KEYS, group = i * LANES % KEYS / 16 + values.lane / 16;
    *reinterpret_cast<uint32_t*>(&shared.v[n][row * KEYS + (group ^ row % 8) * 16 + slot]) = codes;
  }
  ptx::fence_proxy_async();
  ptx::warpgroup_sync(1 + part.warpgroup);
  if (const int n = thread / C.cluster; n < blocks) dsmem_copy(part.rank, thread % C.cluster, &shared.v[n][part.slice * S::block_bytes], S::block_bytes, &shared.v_full[n]);
}

// Attention of 64 queries to all their keys. The next block's Q * K^T is issued behind this block's P * V. `k_scale` is
// the scale of block lane % BLOCKS.
template <FusedSmallConfig C>
__device__ void attend(const Params& p, FusedSmallStorage<C>& shared, int warpgroup, const WarpgroupTile& wg_tile, float k_scale, float (&m)[2], float (&o)[FusedSmallShape<C>::width / 2]) {
  const Fragment f = Fragment::mine();
  const uint8_t* q = shared.q[warpgroup];
  const WarpgroupSmem& own = shared.warpgroups[warpgroup];
  float s[KEYS / 2], alpha[2], factor[2];
  uint32_t probabilities[KEYS / 32][4];
  Softmax<C.exact, LARGEST_PRODUCT<false> * C.head_dim> softmax;
  bool int_max_ok;
  const auto start = [&](int n) {
    ptx::mbarrier_wait(&shared.k_full[n], 0);
    issue_qk_of_columns(s, q, shared.k[n]);
  };
  const auto prepare = [&](int n) {
    const float key_factor = p.score_scale * __shfl_sync(~0u, k_scale, n);
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = fmaxf(own.row_scale[f.row + 8 * r] * key_factor, 1 / LARGEST_FACTOR);
    int_max_ok = softmax.prepare(factor);
  };
  start(0);
  prepare(0);
#pragma unroll 1
  for (int n = 0; n < wg_tile.seen; ++n) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(s);
    if (n >= wg_tile.whole) hide(s, own.row_end, n * KEYS, f);
    softmax.step(s, factor, int_max_ok, probabilities, alpha);
    ptx::mbarrier_wait(&shared.v_full[n], 0);
    float fresh[FusedSmallShape<C>::width / 2];
    issue_pv<FusedSmallShape<C>::width>(fresh, probabilities, ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[n])));
    const int next = min(n + 1, wg_tile.seen - 1);  // computes the last scores twice: no branch around wgmma
    start(next);
    prepare(next);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(fresh);
    rescale_and_add(o, alpha, fresh);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(s);
  m[0] = softmax.m[0], m[1] = softmax.m[1];
}

// Instance::config is the FusedSmallConfig. The grid has p.splits clusters for each head of K and V, so many that a
// warpgroup has at most one tile of queries.
template <class Instance, typename T>
__global__ void __launch_bounds__(FusedSmallShape<Instance::config>::threads, 1) fused_small_forward(const __grid_constant__ Params p) {
  constexpr FusedSmallConfig C = Instance::config;
  using S = FusedSmallShape<C>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  FusedSmallStorage<C>& shared = *reinterpret_cast<FusedSmallStorage<C>*>(bytes);
  const Part<C> part(p);
  WarpgroupSmem& own = shared.warpgroups[part.warpgroup];
  const Visible visible(p);
  const int thread = threadIdx.x % 128, blocks = (p.kv_length + KEYS - 1) / KEYS;

  for (int n = 0; n < BLOCKS; ++n) write_ones(&shared.v[n][C.head_dim * KEYS], S::threads);
  if (thread < STEPS) own.stats.nonfinite[thread] = 0;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.stats_full, 1);
    ptx::mbarrier_expect(&shared.stats_full, S::slices * sizeof(ValueStats));
    ptx::mbarrier_init(&shared.means_full, 1);
    ptx::mbarrier_expect(&shared.means_full, sizeof(shared.key_mean));
    ptx::mbarrier_init(&shared.largest_full, 1);
    ptx::mbarrier_expect(&shared.largest_full, sizeof(shared.k_largest));
    const int values_here = C.consumers - part.keys_here();
    for (int n = 0; n < BLOCKS; ++n) {
      ptx::mbarrier_init(&shared.k_full[n], 1 + part.is_here(n));
      ptx::mbarrier_init(&shared.v_full[n], 1 + values_here);
      ptx::mbarrier_expect(&shared.k_full[n], part.is_here(n) ? 0 : sizeof(shared.k[n]));
      ptx::mbarrier_expect(&shared.v_full[n], (S::slices - values_here) * S::block_bytes);
    }
    ptx::fence_barrier_init();
  }
  ptx::fence_proxy_async();
  ptx::cluster_sync();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();

  const int batch = part.pair / p.kv_heads, kv_head = part.pair % p.kv_heads, group = p.q_heads / p.kv_heads;
  const int64_t* strides = part.of_keys ? p.k_strides : p.v_strides;
  const T* head = reinterpret_cast<const T*>(part.of_keys ? p.k : p.v) + batch * strides[0] + kv_head * strides[1];
  Slice<T> slice(head + part.slice * SLICE, strides[2], p.kv_length, part.of_keys ? lane_of_keys() : lane_of_values());
  const int row_tiles = (p.q_length + ROWS - 1) / ROWS, index = part.split * C.cluster * C.consumers + part.number();
  const bool attends = index < group * row_tiles;
  const Tile tile = {batch, kv_head * group + index / row_tiles, kv_head, index % row_tiles * ROWS};
  Queries<C.head_dim, false> queries;
  if (attends) {
    const uint16_t* q = reinterpret_cast<const uint16_t*>(p.q) + batch * p.q_strides[0] + tile.head * p.q_strides[1];
    queries.load(q, p.q_strides[2], tile.first_row, p.q_length);
  }

  const T* of_keys = reinterpret_cast<const T*>(p.k) + batch * p.k_strides[0] + kv_head * p.k_strides[1];
  KeyBlock<T, WARPGROUP_WARPS> keys(of_keys, p.k_strides[2], part.slice, part.of_keys ? p.kv_length : 0);

  if (part.of_keys)
    measure_keys<C>(p, shared, part, slice);
  else
    quantize_values<C>(p, shared, part, slice, blocks);
  if (attends) {
    queries.template rotate<T>();
    queries.quantize(own.row_scale, [&](int row, int column, uint4 codes) {
      *reinterpret_cast<uint4*>(shared.q[part.warpgroup] + ptx::swizzled<C.head_dim>(row, column)) = codes;
    });
    if (thread < ROWS) own.row_end[thread] = visible.end(tile.first_row + thread);
    ptx::fence_proxy_async();
  }
  if (part.of_keys) quantize_keys<C>(shared, part, keys, blocks);
  ptx::mbarrier_wait(&shared.stats_full, 0);
  ptx::mbarrier_wait(&shared.largest_full, 0);
  if (attends && p.lse != nullptr) {
    ptx::mbarrier_wait(&shared.means_full, 0);
    queries.multiply(mean_of_quarter(shared, queries.member()), p.score_scale * (1 / LOG2E), own.mean_scores);
  }
  const float k_scale = row_scale_of<false>(__uint_as_float(shared.k_largest[threadIdx.x % BLOCKS].x));

  ptx::warpgroup_sync(1 + part.warpgroup);
  const WarpgroupTile wg_tile(p, visible, tile, 0);
  float m[2], o[S::width / 2] = {};
  if (attends) attend<C>(p, shared, part.warpgroup, wg_tile, k_scale, m, o);
  // copies to this CTA read the shared memory of other CTAs, which must not exit before these copies are complete
#pragma unroll 1
  for (int n = 0; n < blocks; ++n) ptx::mbarrier_wait(&shared.k_full[n], 0), ptx::mbarrier_wait(&shared.v_full[n], 0);
  ptx::cluster_arrive_relaxed();
  if (attends) {
    const Fragment f = Fragment::mine();
    const float l[2] = {o[S::width / 2 - 4], o[S::width / 2 - 2]};  // row sums of P, behind the last channel
    Output(p, tile, tile.first_row, f, l).store<0, C.head_dim>(o, shared);
    if (p.lse != nullptr) store_lse(p, wg_tile, [&] { return p.q_length; }, m, l, f, {own.mean_scores[f.row], own.mean_scores[f.row + 8]});
  }
  ptx::cluster_wait();
}

template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr FusedSmallConfig C = Instance::config;
  constexpr int bytes = sizeof(FusedSmallStorage<C>);
  const auto kernel = p.half ? fused_small_forward<Instance, __half> : fused_small_forward<Instance, __nv_bfloat16>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, p, ctas, C.cluster, FusedSmallShape<C>::threads, bytes, stream);
}

}  // namespace fp8attn
