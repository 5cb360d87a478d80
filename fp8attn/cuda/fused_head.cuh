// The fused head kernel, sm_90a: quantization and attention in one launch. A CTA has one head of K and V, whose codes
// stay in its shared memory.
//
// A CTA measures V and K's sample in two parts of its warps, which have token chunks by turns. Then one part writes V's
// codes, and the other K's. They read V and K again, from L2. Then each warpgroup attends with tiles of 64 rows of Q,
// one after another, which it quantizes itself. Nothing is loaded in the loop over blocks.
//
// There is little to hide the latency of instructions that are not in a cache: each is executed few times. So every
// step is at one place, and loops are unrolled no further than they must be.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
#include "ptx/uniform.h"
#include "ptx/warpgroup.h"
#include "tile/attend.h"
#include "tile/key_block.h"
#include "tile/output.h"
#include "tile/token_chunk_values.h"

namespace fp8attn {

template <FusedHeadConfig C>
struct FusedHeadShape {
  static_assert(C.head_dim == PART && C.head_dim == CHANNELS);
  static constexpr int threads = 2 * THREADS;  // those of V, then those of K
  static constexpr int warpgroups = threads / 128;
  static constexpr int token_chunks = (C.blocks + BLOCKS - 1) / BLOCKS;
  static constexpr int width = C.head_dim + ONES;
};

constexpr int RUNS_OF_WARP = 4, WORDS_OF_WARP = 8;  // of V, of which a warp writes codes at a time: 32 bytes of a token
static_assert(RUNS_OF_WARP * WORDS_OF_WARP == 32);

// A group of tokens of each run of a warp. Runs have their tokens in orders that differ, so that none has the banks of
// another.
struct ValueGroups {
  uint4 halves[RUNS_OF_WARP][GROUP][2];  // of a token's 32 bytes

  __device__ static int place(int run, int token) { return token ^ run; }
};

// What is measured of V and K.
template <int TOKEN_CHUNKS>
struct MeasuredHead {
  Moments warps[2][WARPS];
  Moments found[TOKEN_CHUNKS + 1];  // of V's token chunks, and behind them of K's sample
  uint4 of_keys[BLOCKS];            // non-finite tokens of the sample, of which nobody needs to know
};

// The CTA's head, and its part of the head's queries.
struct HeadPart {
  int batch, kv_head, group, split;

  __device__ explicit HeadPart(const Params& p)
      : batch(blockIdx.x / p.splits / p.kv_heads), kv_head(blockIdx.x / p.splits % p.kv_heads), group(p.q_heads / p.kv_heads), split(blockIdx.x % p.splits) {}

  // The n-th tile of a warpgroup. The last rows, to which causal calls show most keys, come first.
  __device__ Tile tile(const Params& p, int warpgroups, int warpgroup, int n) const {
    const int row_tiles = (p.q_length + ROWS - 1) / ROWS, index = (n * p.splits + split) * warpgroups + warpgroup;
    const int row = group == 1 ? index : index / group;
    if (row >= row_tiles) return {batch, 0, kv_head, -1};
    return {batch, kv_head * group + index - row * group, kv_head, (row_tiles - 1 - row) * ROWS};
  }
};

template <FusedHeadConfig C>
struct alignas(1024) FusedHeadStorage {
  using S = FusedHeadShape<C>;
  uint8_t v[C.blocks][S::width * KEYS];
  union {  // one after another
    MeasuredHead<S::token_chunks> measured;
    ValueGroups values[WARPS];
    uint8_t q[S::warpgroups][ROWS * C.head_dim];
  };
  KeyColumns k[C.blocks];
  alignas(16) float key_mean[C.head_dim];
  alignas(16) float channel_scale[C.head_dim], channel_mean[C.head_dim], channel_factor[C.head_dim];  // factor: the inverse scale
  uint4 nonfinite[S::token_chunks][BLOCKS];  // as in MomentsStorage: tokens of V whose keys become NaN
  alignas(16) float largest[2][WARPS];       // largest magnitudes of K's rows of a warp, of two blocks by turns
  float k_scale[C.blocks];
  float row_scale[S::warpgroups][ROWS];
  int row_end[S::warpgroups][ROWS];
  float mean_scores[S::warpgroups][ROWS];  // what K's mean adds to the scores of each row
  HeadPart part;
  Tile tiles[S::warpgroups][2];  // the warpgroup's tile and the next, by turns
};

// The first token of a head.
template <typename T>
__device__ const T* first_of(const void* x, const int64_t (&strides)[3], int batch, int head) {
  return static_cast<const T*>(x) + batch * strides[0] + head * strides[1];
}

__device__ inline int token_chunks_of(const Params& p) { return (p.kv_length + TOKEN_CHUNK - 1) / TOKEN_CHUNK; }

// Measures the token chunks of V, in two parts of the CTA by turns, and K's sample, in the part that has less to do.
template <FusedHeadConfig C, typename T>
__device__ void measure(const Params& p, FusedHeadStorage<C>& shared, const Mine& mine, const T* v, const T* k) {
  const int token_chunks = token_chunks_of(p);
#pragma unroll 1
  for (int i = mine.part; i < token_chunks + 2 * mine.part; i += 2) {
    const bool of_keys = i >= token_chunks;
    const int first = of_keys ? 0 : i * TOKEN_CHUNK, count = of_keys ? p.kv_length : min(p.kv_length - first, TOKEN_CHUNK);
    const int64_t stride = of_keys ? p.k_strides[2] : p.v_strides[2];
    const int apart = of_keys ? sample_step(p.kv_length) : 1;
    const Measured<T, STEPS> measured({(of_keys ? k : v) + first * stride, stride, apart, mine}, count, apart, mine, !of_keys);
    measured(shared.measured.warps[mine.part], shared.measured.found[of_keys ? token_chunks : i], *(of_keys ? &shared.measured.of_keys : &shared.nonfinite[i]), mine);
  }
}

// Sets V's means and scales.
template <FusedHeadConfig C, typename T>
__device__ void finish_values(const Params& p, FusedHeadStorage<C>& shared, int channel) {
  const float2 found = mean_and_scale<FusedHeadShape<C>::token_chunks, T>(p.inverse_length, shared.measured.found, token_chunks_of(p), channel);
  shared.channel_mean[channel] = found.x, shared.channel_scale[channel] = found.y;
  shared.channel_factor[channel] = __frcp_rn(found.y);
}

// Sets K's mean, rotated, in one warp.
template <FusedHeadConfig C>
__device__ void finish_keys(const Params& p, FusedHeadStorage<C>& shared) {
  const int lane = threadIdx.x % 32, token_chunks = token_chunks_of(p);
  const float4 sum = reinterpret_cast<const float4*>(shared.measured.found[token_chunks].sum)[lane % (PART / 4)];
  const float inverse = inverse_sample_of(p.kv_length);
  const float4 mean = removable(rotated({key_mean_of(sum.x, inverse), key_mean_of(sum.y, inverse), key_mean_of(sum.z, inverse), key_mean_of(sum.w, inverse)}));
  if (lane < PART / 4) reinterpret_cast<float4*>(shared.key_mean)[lane] = mean;
}

// Writes V's codes, as write_values of a token chunk does, straight from global memory. A warp has RUNS_OF_WARP runs
// and WORDS_OF_WARP words of each, a thread one of both. It loads 16 bytes of a token at a time, and other threads get
// them through shared memory.
template <FusedHeadConfig C, typename T>
struct ValueWriter {
  FusedHeadStorage<C>& shared;
  const T* v;
  int64_t stride;
  int length;
  const int lane = threadIdx.x % 32;

  // The thread's part of a group of tokens of each run. What doesn't exist or is non-finite is NaN, whose code is zero:
  // a zero itself could be so far from V's mean that its code is NaN.
  __device__ void load(uint4 (&raw)[RUNS_OF_WARP], int first_run, int first_word, int group, bool any_nonfinite) const {
    const int first = first_run * RUN + group * GROUP + lane / 2;
    const T* from = v + first * stride + 2 * first_word + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < RUNS_OF_WARP; ++i, from += RUN * stride) raw[i] = first + i * RUN < length ? *reinterpret_cast<const uint4*>(from) : uint4{~0u, ~0u, ~0u, ~0u};
    if (!any_nonfinite) return;
#pragma unroll
    for (int i = 0; i < RUNS_OF_WARP; ++i) raw[i] = nan_where_nonfinite<T>(raw[i]);
  }

  __device__ void write(ValueGroups& groups, int first_run, int first_word, bool any_nonfinite) const {
    const int its_run = lane / WORDS_OF_WARP, its_word = lane % WORDS_OF_WARP, run = first_run + its_run, word = first_word + its_word;
    const float2 mean = reinterpret_cast<const float2*>(shared.channel_mean)[word], factor = reinterpret_cast<const float2*>(shared.channel_factor)[word];
    const __half2 gain = __half2half2(__float2half(length > TOKEN_CHUNK ? FEEDBACK : 0.0f));
    const bool exists = run * RUN < (length + KEYS - 1) / KEYS * KEYS;
    Feedback feedback;
    uint4 raw[RUNS_OF_WARP];
    load(raw, first_run, first_word, 0, any_nonfinite);
#pragma unroll 1
    for (int group = 0; group < RUN / GROUP; ++group) {
#pragma unroll
      for (int i = 0; i < RUNS_OF_WARP; ++i) groups.halves[i][ValueGroups::place(i, lane / 2)][lane % 2] = raw[i];
      __syncwarp();
      if (group + 1 < RUN / GROUP) load(raw, first_run, first_word, group + 1, any_nonfinite);  // in flight meanwhile
      const int first = run * RUN + group * GROUP;
      const auto number = [&](int i) -> float2 {
        const float2 y = Pair<T>::floats(reinterpret_cast<const uint32_t*>(groups.halves[its_run][ValueGroups::place(its_run, i)])[its_word]);
        return {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
      };
      uint4 of_channel[2];
      encode_group<true>(feedback, gain, number, of_channel);
      const bool swaps = word & 4;  // so that eight lanes store to different banks
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = 2 * word + (c ^ swaps);
        uint8_t* to = shared.v[first / KEYS] + row * KEYS + (first % KEYS / GROUP ^ row % 8) * GROUP;
        if (exists) *reinterpret_cast<uint4*>(to) = swaps ? of_channel[1 - c] : of_channel[c];
      }
      __syncwarp();
    }
  }

  __device__ void operator()() const {
    bool nonfinite = false;
    for (int i = 0; i * TOKEN_CHUNK < length; ++i)
      for (int n = 0; n < BLOCKS; ++n) nonfinite |= any(shared.nonfinite[i][n]);
    constexpr int of_runs = WORDS / WORDS_OF_WARP;  // warps that share runs
    const int warp = threadIdx.x / 32;
#pragma unroll 1
    for (int item = warp; item / of_runs * RUNS_OF_WARP * RUN < length; item += WARPS)
      write(shared.values[warp], item / of_runs * RUNS_OF_WARP, item % of_runs * WORDS_OF_WARP, nonfinite);
  }
};

// Writes K's codes, and the scales of its blocks. `keys`: the first block.
template <FusedHeadConfig C, typename T>
__device__ void write_keys(const Params& p, FusedHeadStorage<C>& shared, const Mine& mine, const T* k, KeyBlock<T, WARPS>& keys, int blocks) {
  float4 mean[QUARTERS];
#pragma unroll
  for (int i = 0; i < QUARTERS; ++i) mean[i] = *reinterpret_cast<const float4*>(shared.key_mean + i * QUARTER + keys.column);
#pragma unroll 1
  for (int n = 0; n < blocks; ++n) {
    float y[KeyBlock<T, WARPS>::pairs][QUARTERS][2][4];
    float* largest = shared.largest[n % 2];
    const float of_warp = keys.rotate(y, mean);
    keys.load(k, p.k_strides[2], n + 1);  // behind the last block, nothing
    if (keys.lane == 0) largest[keys.warp] = of_warp;
    mine.sync();
    float of_block = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) of_block = fmaxf(of_block, largest[i]);
    const float scale = row_scale_of<false>(of_block);
    if (mine.thread == 0) shared.k_scale[n] = scale;
    keys.store(shared.k[n], y, __frcp_rn(scale), reinterpret_cast<const uint32_t*>(&shared.nonfinite[n / BLOCKS][n % BLOCKS])[keys.key(0, 0) / LANES]);
  }
}

// Attention of a warpgroup's 64 queries to all their keys.
template <FusedHeadConfig C>
__device__ void attend(const Params& p, FusedHeadStorage<C>& shared, int warpgroup, const WarpgroupTile& wg_tile, float (&m)[2], float (&o)[FusedHeadShape<C>::width / 2]) {
  constexpr int width = FusedHeadShape<C>::width;
  const Fragment f = Fragment::mine();
  const uint8_t* q = shared.q[warpgroup];
  float s[KEYS / 2], alpha[2], factor[2];
  uint32_t probabilities[KEYS / 32][4];
  Softmax<C.exact, LARGEST_PRODUCT<false> * C.head_dim> softmax;
  bool int_max_ok;
  const auto prepare = [&](int n) {
    const float key_factor = p.score_scale * shared.k_scale[n];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = fmaxf(shared.row_scale[warpgroup][f.row + 8 * r] * key_factor, 1 / LARGEST_FACTOR);
    int_max_ok = softmax.prepare(factor);
  };
  const auto softmax_step = [&](int n) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(s);
    if (n >= wg_tile.whole) hide(s, shared.row_end[warpgroup], n * KEYS, f);
    softmax.step(s, factor, int_max_ok, probabilities, alpha);
  };
  issue_qk_of_columns(s, q, shared.k[0]);
  prepare(0);
  const int last = wg_tile.seen - 1;
#pragma unroll 1
  for (int n = 0;; ++n) {
    softmax_step(n);
    float fresh[width / 2];
    const int block = ptx::uniform(n);
    issue_pv<width>(fresh, probabilities, ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[block])));
    prepare(min(n + 1, last));
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(fresh);
    rescale_and_add(o, alpha, fresh);
    if (n == last) break;
    issue_qk_of_columns(s, q, shared.k[block + 1]);
  }
  m[0] = softmax.m[0], m[1] = softmax.m[1];
}

// Whether a warp of a warpgroup has rows, where each has `rows` of them from `first_row` on. Where lengths are few more
// than a multiple of ROWS, as an image's tokens and one more, most warps of one tile have none.
__device__ inline bool has_rows_from(const Params& p, int first_row, int rows) { return first_row + int(threadIdx.x) % 128 / 32 * rows < p.q_length; }

// Tiles of a warpgroup: it quantizes their queries and attends with them, one after another.
template <FusedHeadConfig C, typename T>
struct HeadTiles {
  using S = FusedHeadShape<C>;
  const Params& p;
  FusedHeadStorage<C>& shared;
  const Visible visible;
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  Queries<C.head_dim, false> queries;
  bool exists;  // whether there is a tile whose queries are loaded

  __device__ HeadTiles(const Params& params, FusedHeadStorage<C>& storage) : p(params), shared(storage), visible(params) { load(0); }

  // Finds tile n of a warpgroup.
  __device__ static void find(const Params& p, FusedHeadStorage<C>& shared, int warpgroup, int n) {
    shared.tiles[warpgroup][n % 2] = shared.part.tile(p, S::warpgroups, warpgroup, n);
  }

  __device__ void load(int n) {
    const Tile& tile = shared.tiles[warpgroup][n % 2];
    exists = tile.exists();
    queries.load(first_of<uint16_t>(p.q, p.q_strides, tile.batch, tile.head), p.q_strides[2], tile.first_row, exists ? p.q_length : 0);
  }

  // Quantizes the queries of tile n, which are loaded. A warp has eight rows of each round, those of the first before
  // all others.
  __device__ void quantize(int n) {
    if (has_rows_from(p, shared.tiles[warpgroup][n % 2].first_row, 8)) {
      queries.template rotate<T>();
      queries.quantize(shared.row_scale[warpgroup], [&](int row, int column, uint4 codes) {
        *reinterpret_cast<uint4*>(shared.q[warpgroup] + ptx::swizzled<C.head_dim>(row, column)) = codes;
      });
      if (p.lse != nullptr) queries.multiply(KeyMeanQuarter::of(shared.key_mean + QUARTER * queries.member()), p.score_scale * (1 / LOG2E), shared.mean_scores[warpgroup]);
    }
    ptx::fence_proxy_async();
  }

  // Attends with tile n, which is quantized, and loads the queries of the next.
  __device__ void attend(int n) {
    const Tile& tile = shared.tiles[warpgroup][n % 2];
    if (threadIdx.x % 128 == 0) find(p, shared, warpgroup, n + 1);
    if (threadIdx.x % 128 < ROWS) shared.row_end[warpgroup][threadIdx.x % 128] = visible.end(tile.first_row + threadIdx.x % 128);
    ptx::warpgroup_sync(1 + warpgroup);
    const WarpgroupTile wg_tile(p, visible, tile, 0);
    float m[2], o[S::width / 2] = {};
    fp8attn::attend<C>(p, shared, warpgroup, wg_tile, m, o);
    load(n + 1);
    const Fragment f = Fragment::mine();
    const float l[2] = {o[S::width / 2 - 4], o[S::width / 2 - 2]};  // row sums of P, behind the last channel
    if (has_rows_from(p, tile.first_row, 16)) Output(p, tile, tile.first_row, f, l).template store<0, C.head_dim>(o, shared);
    const float* mean_scores = shared.mean_scores[warpgroup];
    if (p.lse != nullptr) store_lse(p, wg_tile, [&] { return p.q_length; }, m, l, f, {mean_scores[f.row], mean_scores[f.row + 8]});
    ptx::warpgroup_sync(1 + warpgroup);  // nobody reads the tile's scales and Q any more
  }
};

// Instance::config is the FusedHeadConfig. The grid has p.splits CTAs for each head of K and V, each of which quantizes
// it.
template <class Instance, typename T>
__global__ void __launch_bounds__(FusedHeadShape<Instance::config>::threads, 1) fused_head_forward(const __grid_constant__ Params p) {
  constexpr FusedHeadConfig C = Instance::config;
  using S = FusedHeadShape<C>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  FusedHeadStorage<C>& shared = *reinterpret_cast<FusedHeadStorage<C>*>(bytes);
  if (threadIdx.x == 0) shared.part = HeadPart(p);
  const bool of_keys = threadIdx.x >= THREADS;
  const Mine mine(of_keys);
  const int blocks = (p.kv_length + KEYS - 1) / KEYS;
  for (int n = 0; n < blocks; ++n) write_ones(&shared.v[n][C.head_dim * KEYS], S::threads);
  if (threadIdx.x < S::token_chunks * BLOCKS) (&shared.nonfinite[0][0])[threadIdx.x] = {};
  __syncthreads();
  const HeadPart& part = shared.part;
  if (threadIdx.x < S::warpgroups) HeadTiles<C, T>::find(p, shared, threadIdx.x, 0);
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const T* v = first_of<T>(p.v, p.v_strides, part.batch, part.kv_head);
  const T* k = first_of<T>(p.k, p.k_strides, part.batch, part.kv_head);
  measure<C>(p, shared, mine, v, k);
  __syncthreads();
  if (threadIdx.x < CHANNELS) finish_values<C, T>(p, shared, threadIdx.x);
  if (threadIdx.x / 32 == WARPS) finish_keys<C>(p, shared);
  // The first block is in flight during the barrier. __syncthreads must be at one place for both parts.
  KeyBlock<T, WARPS> keys(k, p.k_strides[2], 0, of_keys ? p.kv_length : 0);
  __syncthreads();
  if (of_keys) {
    write_keys<C>(p, shared, mine, k, keys, blocks);
    ptx::fence_proxy_async();
  } else {
    const ValueWriter<C, T> write = {shared, v, p.v_strides[2], p.kv_length};
    write();
    ptx::fence_proxy_async();
    mine.sync();  // nobody reads `values` any more
  }
  // Those that have written V quantize their first queries while others still write K.
  HeadTiles<C, T> tiles(p, shared);
  const int first = of_keys ? -1 : 0;
#pragma unroll 1
  for (int n = first; n == first || tiles.exists; ++n) {
    const bool attends = n >= 0 && tiles.exists;
    if (attends) tiles.quantize(n);
    if (n == first) __syncthreads();
    if (attends) tiles.attend(n);
  }
}

template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr FusedHeadConfig C = Instance::config;
  const auto kernel = p.half ? fused_head_forward<Instance, __half> : fused_head_forward<Instance, __nv_bfloat16>;
  return launch_grid_with_shared_memory(kernel, p, ctas, FusedHeadShape<C>::threads, sizeof(FusedHeadStorage<C>), stream);
}

}  // namespace fp8attn
