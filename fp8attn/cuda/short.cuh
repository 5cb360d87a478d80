// The Hopper kernel of short sequences, sm_90a: quantization and attention in one launch, by clusters of CTAs that share a head's K and V.
//
// Every warpgroup of a cluster quantizes 16 channels of K or V of all keys, so that means and scales of channels are made in one place;
// of K's scales, which are those of blocks of keys, a cluster exchanges the largest magnitudes. What is quantized goes into the shared memory of every
// CTA of the cluster. Then each warpgroup quantizes 64 rows of Q and attends.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/warpgroup.h"
#include "tile/attend.h"
#include "tile/output.h"
#include "tile/quantize.h"

namespace fp8attn {

constexpr int BLOCKS = STRIP / KEYS;

template <ShortConfig C>
struct ShortShape {
  static constexpr int slices = C.head_dim / SLICE;  // of K, and of V
  static_assert(C.cluster * C.consumers == 2 * slices);
  static constexpr int panel = C.head_dim;          // bytes of a row of Q
  static constexpr int block_bytes = KEYS * SLICE;  // of a slice's codes of a block
  static constexpr int width = C.head_dim + ONES;
  static constexpr int threads = 128 * C.consumers;
};

// What a slice of V is to tell everyone.
struct ValueFacts {
  float scale[SLICE], mean[SLICE];
  uint32_t spoiled[STEPS];  // a bit for each token whose key becomes NaN
};

// A warpgroup's own.
struct Desk {
  LaneStatistics<__half> lanes;  // or bfloat16
  alignas(16) float shift[SLICE], factor[SLICE];
  alignas(16) ValueFacts facts;
  alignas(16) float largest[4][BLOCKS];  // of a warp
  float row_scale[ROWS];
  int row_end[ROWS];
};

template <ShortConfig C>
struct alignas(1024) ShortStorage {
  using S = ShortShape<C>;
  uint8_t v[BLOCKS][S::width * KEYS];
  uint8_t q[C.consumers][ROWS * S::panel];
  uint8_t k[BLOCKS][S::slices][S::block_bytes];
  Desk desks[C.consumers];
  alignas(16) float channel_scale[C.head_dim], channel_mean[C.head_dim];
  alignas(16) uint32_t spoiled[S::slices][STEPS];
  alignas(16) float k_largest[S::slices][BLOCKS];
  uint64_t facts_full, k_full[BLOCKS], v_full[BLOCKS];
};

// Which slice a warpgroup quantizes, and which tiles it attends for.
template <ShortConfig C>
struct Part {
  int rank, warpgroup, pair, split, slice;
  bool of_keys;

  __device__ explicit Part(const Params& p) : rank(ptx::cluster_rank()), warpgroup(__shfl_sync(~0u, threadIdx.x / 128, 0)) {
    const int cluster = blockIdx.x / C.cluster;
    pair = cluster / p.splits, split = cluster % p.splits;
    of_keys = number() < ShortShape<C>::slices;
    slice = number() % ShortShape<C>::slices;
  }

  __device__ int number() const { return warpgroup * C.cluster + rank; }

  // Of the CTA's warpgroups, how many quantize keys.
  __device__ int keys_here() const { return min(max((ShortShape<C>::slices - rank + C.cluster - 1) / C.cluster, 0), C.consumers); }
};

// Sixteen bytes to a CTA of the cluster, to the same place.
template <ShortConfig C>
__device__ void tell(ShortStorage<C>& shared, int rank, void* to, uint4 x) {
  ptx::store_async(ptx::address_in(rank, ptx::shared_address(to)), x, ptx::address_in(rank, ptx::shared_address(&shared.facts_full)));
}

// What lies here for the blocks of a slice is written to the same place in the other CTAs.
template <ShortConfig C, typename At>
__device__ void share_out(int rank, int blocks, uint64_t* full, At&& at) {
  ptx::fence_proxy_async();
  ptx::warpgroup_sync(1 + threadIdx.x / 128);
  const int thread = threadIdx.x % 128, peer = thread % C.cluster, n = thread / C.cluster;
  if (n >= blocks) return;
  const uint32_t from = ptx::shared_address(at(n)), barrier = ptx::shared_address(&full[n]);
  if (peer == rank)
    ptx::mbarrier_arrive(&full[n]);
  else
    ptx::bulk_copy(ptx::address_in(peer, from), from, ShortShape<C>::block_bytes, ptx::address_in(peer, barrier));
}

// The lane of a thread of those that quantize keys: their codes are written one after another.
__device__ inline int lane_of_keys() { return threadIdx.x % 128 / 4; }

// Of those that quantize values: keys that lie together in V's order are those of one warp.
__device__ inline int lane_of_values() {
  const int thread = threadIdx.x % 128 / 4;
  return thread & 3 | (thread & 4) << 1 | (thread & 24) >> 1 & 4 | (thread & 16);
}

// Rotates a slice of K, the thread's channels of it, and takes its mean; everyone hears its largest magnitudes.
template <ShortConfig C, typename T>
__device__ void measure_keys(const Params& p, ShortStorage<C>& shared, const Part<C>& part, Slice<T>& keys, float (&y)[STEPS][4]) {
  Desk& desk = shared.desks[part.warpgroup];
  auto& lanes = reinterpret_cast<LaneStatistics<T>&>(desk.lanes);
  const int thread = threadIdx.x % 128;
  keys.template statistics<false>(lanes);
  keys.rotate(y);
  ptx::warpgroup_sync(1 + part.warpgroup);
  const auto found = Statistics::of<false>(lanes);
  if (thread % 8 == 0) desk.shift[found.channel()] = __fmul_rn(found.sum, p.inverse_length);
  ptx::warpgroup_sync(1 + part.warpgroup);
  const float4 mean = removable(rotated(reinterpret_cast<const float4*>(desk.shift)[keys.quad]));
  if (p.k_mean != nullptr && part.split == 0 && thread < QUADS)
    reinterpret_cast<float4*>(p.k_mean + part.pair * C.head_dim + part.slice * SLICE)[keys.quad] = mean;
  float largest[BLOCKS] = {};
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    centre(y[i], mean);
    float& of_block = largest[i * LANES / KEYS];
    if (i < keys.count) of_block = fmaxf(of_block, fmaxf(fmaxf(fabsf(y[i][0]), fabsf(y[i][1])), fmaxf(fabsf(y[i][2]), fabsf(y[i][3]))));
  }
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest[n]));
    if (thread % 32 == n) desk.largest[thread / 32][n] = __uint_as_float(of_warp);
  }
  ptx::warpgroup_sync(1 + part.warpgroup);
  if (thread < C.cluster) {
    uint32_t of_slice[BLOCKS];
#pragma unroll
    for (int n = 0; n < BLOCKS; ++n)
      of_slice[n] = __float_as_uint(fmaxf(fmaxf(desk.largest[0][n], desk.largest[1][n]), fmaxf(desk.largest[2][n], desk.largest[3][n])));
    tell(shared, thread, shared.k_largest[part.slice], {of_slice[0], of_slice[1], of_slice[2], of_slice[3]});
  }
}

// Codes of a slice of K without its mean. A lane has the inverse of the scale of the block of its number, modulo BLOCKS.
template <ShortConfig C, typename T>
__device__ void quantize_keys(ShortStorage<C>& shared, const Part<C>& part, const Slice<T>& keys, const float (&y)[STEPS][4], float inverse, int blocks) {
  using S = ShortShape<C>;
  uint32_t hidden = 0, any = 0;
  for (int i = threadIdx.x % 32; i < S::slices * STEPS; i += 32) any |= shared.spoiled[i / STEPS][i % STEPS];
  if (__any_sync(~0u, any != 0)) {
#pragma unroll 1
    for (int i = 0; i < S::slices * STEPS; ++i) hidden |= (shared.spoiled[i / STEPS][i % STEPS] >> keys.lane & 1) << i % STEPS;
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int n = i * LANES / KEYS, key = i * LANES % KEYS + keys.lane;
    const float factor = __shfl_sync(~0u, inverse, n);
    const uint32_t codes = codes_of<false>(y[i], factor);
    *reinterpret_cast<uint32_t*>(&shared.k[n][part.slice][key * 16 + keys.quad * 4]) = hidden >> i & 1 ? NAN_CODES<false> : codes;
  }
  share_out<C>(part.rank, blocks, shared.k_full, [&](int n) { return shared.k[n][part.slice]; });
}

// A slice of V, and what everyone is to know of it.
template <ShortConfig C, typename T>
__device__ void quantize_values(const Params& p, ShortStorage<C>& shared, const Part<C>& part, Slice<T>& values, int blocks) {
  using S = ShortShape<C>;
  Desk& desk = shared.desks[part.warpgroup];
  auto& lanes = reinterpret_cast<LaneStatistics<T>&>(desk.lanes);
  const int thread = threadIdx.x % 128;
  values.template statistics<true>(lanes);
  if (values.spoiled != 0) {
#pragma unroll 1
    for (int i = 0; i < STEPS; ++i)
      if (values.spoiled >> i & 1) atomicOr(&desk.facts.spoiled[i], 1u << values.lane);
  }
  ptx::warpgroup_sync(1 + part.warpgroup);
  const auto found = Statistics::of<true>(lanes);
  if (thread % 8 == 0) {
    const int c = found.channel();
    const float mean = removable(coarse(__fmul_rn(found.sum, p.inverse_length), found.low, found.high));
    const float scale = scale_of(fmaxf(fmaxf(found.high - mean, mean - found.low), 0.0f));
    desk.facts.mean[c] = desk.shift[c] = mean;
    desk.facts.scale[c] = scale;
    desk.factor[c] = __fdiv_rn(1.0f, scale);
  }
  ptx::warpgroup_sync(1 + part.warpgroup);
  const float4 mean = reinterpret_cast<const float4*>(desk.shift)[values.quad], factor = reinterpret_cast<const float4*>(desk.factor)[values.quad];
  if (const int i = thread / C.cluster; i < int(sizeof(ValueFacts) / 16)) {
    void* const to[] = {&shared.channel_scale[part.slice * SLICE], &shared.channel_mean[part.slice * SLICE], shared.spoiled[part.slice]};
    tell(shared, thread % C.cluster, static_cast<uint4*>(i < 4 ? to[0] : i < 8 ? to[1] : to[2]) + i % 4, reinterpret_cast<const uint4*>(&desk.facts)[i]);
  }

  // four tokens' codes of four channels become four channels' codes of four tokens
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
  share_out<C>(part.rank, blocks, shared.v_full, [&](int n) { return &shared.v[n][part.slice * S::block_bytes]; });
}

// Issues Q * K^T for a block of keys.
template <ShortConfig C>
__device__ void start_scores(float (&s)[KEYS / 2], const uint8_t* q, const uint8_t* k) {
  using S = ShortShape<C>;
  const uint64_t rows = ptx::wgmma_descriptor<S::panel>(ptx::shared_address(q));
  const uint64_t keys = ptx::wgmma_descriptor_of_columns(ptx::shared_address(k), S::block_bytes);
  ptx::wgmma_fence();
  ptx::Wgmma<KEYS>::template run<false>(s, rows, keys);
#pragma unroll
  for (int step = 1; step < C.head_dim / 32; ++step) ptx::Wgmma<KEYS>::template run<true>(s, rows + 2 * step, keys + 2 * step * (S::block_bytes / 16));
  ptx::wgmma_commit();
}

// Attention of 64 queries with all their keys; scores of the next block are in the making behind this block's P * V. A lane has the
// scale of the block of its number, modulo BLOCKS.
template <ShortConfig C>
__device__ void attend(const Params& p, ShortStorage<C>& shared, int warpgroup, const Share& share, float k_scale, float (&m)[2], float (&o)[ShortShape<C>::width / 2]) {
  const Fragment f = Fragment::mine();
  const uint8_t* q = shared.q[warpgroup];
  const Desk& desk = shared.desks[warpgroup];
  float s[KEYS / 2], alpha[2], factor[2];
  uint32_t probabilities[KEYS / 32][4];
  Softmax<C.exact, LARGEST_PRODUCT<false> * C.head_dim> softmax;
  bool easy;
  const auto start = [&](int n) {
    ptx::mbarrier_wait(&shared.k_full[n], 0);
    start_scores<C>(s, q, shared.k[n][0]);
  };
  const auto prepare = [&](int n) {
    const float key_factor = p.score_scale * __shfl_sync(~0u, k_scale, n);
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = fmaxf(desk.row_scale[f.row + 8 * r] * key_factor, 1 / LARGEST_FACTOR);
    easy = softmax.prepare(factor);
  };
  start(0);
  prepare(0);
#pragma unroll 1
  for (int n = 0; n < share.seen; ++n) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(s);
    if (n >= share.whole) hide(s, desk.row_end, n * KEYS, f);
    softmax.step(s, factor, easy, probabilities, alpha);
    ptx::mbarrier_wait(&shared.v_full[n], 0);
    float fresh[ShortShape<C>::width / 2];
    start_values<ShortShape<C>::width>(fresh, probabilities, ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[n])));
    const int next = min(n + 1, share.seen - 1);  // the last block's scores twice: no branch around a wgmma
    start(next);
    prepare(next);
    ptx::wgmma_wait<1>();
    ptx::wgmma_touch(fresh);
    promote(o, alpha, fresh);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_touch(s);
  m[0] = softmax.m[0], m[1] = softmax.m[1];
}

// Instance::config is the ShortConfig. A grid of clusters: `splits` of them for each head of K and V, so many that every warpgroup has at
// most one tile of queries.
template <class Instance, typename T>
__global__ void __launch_bounds__(ShortShape<Instance::config>::threads, 1) short_forward(const __grid_constant__ Params p) {
  constexpr ShortConfig C = Instance::config;
  using S = ShortShape<C>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  ShortStorage<C>& shared = *reinterpret_cast<ShortStorage<C>*>(bytes);
  const Part<C> part(p);
  Desk& desk = shared.desks[part.warpgroup];
  const Visible visible(p);
  const int thread = threadIdx.x % 128, blocks = (p.kv_length + KEYS - 1) / KEYS;

  for (int n = 0; n < BLOCKS; ++n)
    for (int i = threadIdx.x * 4; i < ONES * KEYS; i += S::threads * 4)
      *reinterpret_cast<uint32_t*>(&shared.v[n][C.head_dim * KEYS + i]) = 0x38383838;  // 1.0 in e4m3
  if (thread < STEPS) desk.facts.spoiled[thread] = 0;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.facts_full, 1);
    ptx::mbarrier_expect(&shared.facts_full, S::slices * (sizeof(ValueFacts) + sizeof(shared.k_largest[0])));
    const int keys_here = part.keys_here(), values_here = C.consumers - keys_here;
    for (int n = 0; n < BLOCKS; ++n) {
      ptx::mbarrier_init(&shared.k_full[n], 1 + keys_here);
      ptx::mbarrier_init(&shared.v_full[n], 1 + values_here);
      ptx::mbarrier_expect(&shared.k_full[n], (S::slices - keys_here) * S::block_bytes);
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

  float keys[STEPS][4];
  if (part.of_keys)
    measure_keys<C>(p, shared, part, slice, keys);
  else
    quantize_values<C>(p, shared, part, slice, blocks);
  if (attends) {
    queries.template quantize<T>(desk.row_scale, [&](int row, int column, uint4 codes) {
      *reinterpret_cast<uint4*>(shared.q[part.warpgroup] + ptx::swizzled<S::panel>(row, column)) = codes;
    });
    if (thread < ROWS) desk.row_end[thread] = visible.end(tile.first_row + thread);
    ptx::fence_proxy_async();
  }
  ptx::mbarrier_wait(&shared.facts_full, 0);
  float largest = 0.0f;
  for (int i = 0; i < S::slices; ++i) largest = fmaxf(largest, shared.k_largest[i][threadIdx.x % BLOCKS]);
  const float k_scale = row_scale_of<false>(largest);
  if (part.of_keys) quantize_keys<C>(shared, part, slice, keys, __fdiv_rn(1.0f, k_scale), blocks);

  ptx::warpgroup_sync(1 + part.warpgroup);
  const Share share(p, visible, tile, 0);
  float m[2], o[S::width / 2] = {};
  if (attends) attend<C>(p, shared, part.warpgroup, share, k_scale, m, o);
  // what comes to this CTA is read from the shared memory of others, which must not end before
#pragma unroll 1
  for (int n = 0; n < blocks; ++n) ptx::mbarrier_wait(&shared.k_full[n], 0), ptx::mbarrier_wait(&shared.v_full[n], 0);
  ptx::cluster_arrive_relaxed();
  if (attends) {
    const Fragment f = Fragment::mine();
    const float l[2] = {o[S::width / 2 - 4], o[S::width / 2 - 2]};  // sums of P stand behind the last channel
    Output(p, tile, tile.first_row, f, l).store<0, C.head_dim>(o, shared);
    store_lse(p, share, m, l, f);
  }
  ptx::cluster_wait();
}

template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr ShortConfig C = Instance::config;
  constexpr int bytes = sizeof(ShortStorage<C>);
  const auto kernel = p.half ? short_forward<Instance, __half> : short_forward<Instance, __nv_bfloat16>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, p, ctas, C.cluster, ShortShape<C>::threads, bytes, stream);
}

}  // namespace fp8attn
