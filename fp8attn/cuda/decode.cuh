// Attention of few queries to a KV cache in pages, sm_90: `fp8attn/pages.py` defines it.
//
// The rows of a tile are the queries of all heads that share a key/value head. CTAs share the blocks of all tiles
// equally, whatever their lengths, which they read on the device. A block is a page of 128 keys in FP8, or 64 tokens
// in half precision; each takes 256 D bytes of shared memory. One warp loads blocks by TMA, as many ahead as there
// are stages. A warpgroup attends to one block after another: to pages by wgmma, with keys or channels as rows and
// queries as columns, of which there may be eight. Where CTAs share a tile, they store partial results, and the last
// one to do so adds these, in the order of the keys. Where an SM has two CTAs, one attends while the other waits for
// products or is between tiles.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/flag.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/uniform.h"
#include "ptx/warpgroup.h"
#include "tile/paged_parts.h"
#include "tile/paged_rows.h"
#include "tile/schedule.h"

namespace fp8attn {

constexpr int DECODE_THREADS = DECODERS + 64;  // and a warp that loads, and one that prefetches
template <DecodeConfig C>
using TilesOf = DecodeTiles<C.rows, std::conditional_t<C.any_scores, WindowBlocks, TileBlocks>>;

// The scales of a page. Both are 0 if it isn't there; V's scale is never 0 otherwise. K's is negative if an int8 key is
// not finite.
struct PageScales {
  float k, v;
};

template <DecodeConfig C>
struct alignas(1024) DecodeStorage {
  static constexpr int block_bytes = KEYS * C.head_dim;  // of K or V
  static_assert(HALF_BLOCK * 2 * C.head_dim == block_bytes);

  uint8_t k[C.stages][block_bytes], v[C.stages][block_bytes];
  uint8_t q[C.rows * C.head_dim];
  WarpExchange<C.rows> exchange;
  float v_scale[C.head_dim], v_mean[C.head_dim];
  float row_scale[C.rows], mean_score[C.rows];
  int position[C.rows];
  PageScales scales[C.stages];
  TilesOf<C> tiles[2];  // the warps' tile, and the next one, by turns
  UnitShares shares;
  bool is_last;  // whether the CTA is the last one to store its part of the tile
  int started;   // whether the grids before have completed
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
};

// Brings into L2 what warps read before the blocks of a tile. Called by a warp.
template <typename T, int DIM, typename Tiles>
__device__ void prefetch_tile(const DecodeParams& p, const Tiles& tile) {
  constexpr int FLOATS = LINE / sizeof(float), ELEMENTS = LINE / sizeof(T);
  const int lane = threadIdx.x % 32;
  if (lane < DIM / FLOATS) {
    const int64_t at = (int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head) * DIM + lane * FLOATS;
    ptx::prefetch_l2(p.k_mean + at);
    ptx::prefetch_l2(p.v_mean + at);
    ptx::prefetch_l2(p.v_scale + at);
  }
#pragma unroll 1
  for (int i = lane; i < tile.height(p); i += 32) {
    const QueryRow row(p, tile.row, tile.kv_head, tile.first_row() + i);
    if (!row.real) continue;
    const T* q = query_at<T>(p, tile.batch, row);
    for (int channel = 0; channel < DIM; channel += ELEMENTS) ptx::prefetch_l2(q + channel);
  }
}

// One warp loads the blocks of all tiles of the CTA.
template <DecodeConfig C, typename T>
__device__ void load_blocks(const DecodeParams& p, DecodeStorage<C>& shared, TilesOf<C> tile) {
  constexpr int PANEL = KEY_PANEL<C.head_dim>, HALF_BYTES = 2 * C.head_dim, bytes = DecodeStorage<C>::block_bytes;
  const int lane = threadIdx.x % 32;
  Ring<C.stages> ring;
#pragma unroll 1
  for (tile.next(p); tile.exists();) {
    const int* pages = p.page_table + tile.batch * p.table_stride;
    const int pair = tile.row.sequence * p.kv_heads + tile.kv_head;
#pragma unroll 1
    for (int first = tile.begin; first < tile.end; first += 32) {
      // each lane finds one block; -1 is a page that isn't there
      const int mine = first + lane, first_page = first_page_of(tile.blocks);
      const int number = mine < min(min(tile.end, tile.blocks.pages), p.table_width - first_page) ? pages[first_page + mine] : -1;
      const int index = number >= 0 && number < p.every_page ? number * p.kv_heads + tile.kv_head : -1;
#pragma unroll 1
      for (int block = first; block < min(tile.end, first + 32); ++block, ring.advance()) {
        const int from = __shfl_sync(~0u, index, block - first), stage = ring.stage;
        if (lane != 0) continue;
        const bool is_half = block >= tile.blocks.pages, exists = is_half || from >= 0;
        uint64_t *const k_full = &shared.k_full[stage], *const v_full = &shared.v_full[stage];
        ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
        // the scales arrive with the keys
        ptx::cp_async(&shared.scales[stage].k, p.k_scale + max(from, 0), from >= 0);
        ptx::cp_async(&shared.scales[stage].v, p.v_page_scale + max(from, 0), from >= 0);
        ptx::cp_async_arrive(k_full);
        ptx::mbarrier_expect(k_full, exists ? bytes : 0);
        if (is_half) {
          const int row = pair * RECENT + (tile.blocks.first_half + block - tile.blocks.pages) % (RECENT / HALF_BLOCK) * HALF_BLOCK;
          for (int i = 0; i < HALF_BYTES; i += HALF_PANEL) ptx::tma_load(shared.k[stage] + i * HALF_BLOCK, p.recent_k_map, k_full, i, row);
          ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
          ptx::mbarrier_expect(v_full, bytes);
          for (int i = 0; i < HALF_BYTES; i += HALF_PANEL) ptx::tma_load(shared.v[stage] + i * HALF_BLOCK, p.recent_v_map, v_full, i, row);
        } else {
          if (exists) {
            for (int i = 0; i < C.head_dim; i += PANEL) ptx::tma_load(shared.k[stage] + i * KEYS, p.k_map, k_full, i, from * KEYS);
          }
          ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
          ptx::mbarrier_expect(v_full, exists ? bytes : 0);
          if (exists) ptx::tma_load(shared.v[stage], p.v_map, v_full, 0, from * C.head_dim);
        }
      }
    }
    tile.next(p);
    if (tile.exists()) prefetch_tile<T, C.head_dim>(p, tile);  // warps come to it as many blocks later as there are stages
  }
}

// Scores of int8 as PageScores. `nonfinite`: whether the page has keys that are not finite; their scores become NaN.
template <int DIM, int GROUPS>
__device__ void float_scores(const Products<KEYS / WGMMA_ROWS, GROUPS, int32_t>& sums, Products<KEYS / WGMMA_ROWS, GROUPS>& s, const uint8_t* k, bool nonfinite,
                             Fragment f) {
#pragma unroll
  for (int t = 0; t < KEYS / WGMMA_ROWS; ++t)
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i) s[t][i] = PageScores<true, DIM>::of(sums[t][i]);
  if (!nonfinite) return;
  compute_late(f.row);
#pragma unroll
  for (int t = 0; t < KEYS / WGMMA_ROWS; ++t)
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; ++i)
      if (k[ptx::swizzled<KEY_PANEL<DIM>>(WGMMA_ROWS * t + f.row + i / 2 % 2 * 8, 0)] == INT8_NAN) s[t][i] = NAN;
}

// Stores the rows' output and LSE; or, if the CTA has a part of the tile, the partial results. Called by all decoders.
template <DecodeConfig C, int GROUPS>
__device__ void store_rows(const DecodeParams& p, DecodeStorage<C>& shared, const TilesOf<C>& tile, PagedRows<C.head_dim, GROUPS>& rows, Fragment f) {
  constexpr int DIM = C.head_dim;
  compute_late(f.row), compute_late(f.column);
  const int place = tile.place(p), odd = f.row % 2;
  const bool complete = tile.complete();
  const PagedScores<C.any_scores> mod = {p};
  shared.exchange.sum(rows.l, f);
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    // a lane and the one of the next channel exchange what they have of one of their queries
    const int mine = QUERY_GROUP * group + f.column + odd;
    const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
    const int position = shared.position[mine];
    const bool nonfinite = shared.row_scale[mine] != shared.row_scale[mine];
    const bool is_nan = position >= 0 && (nonfinite || sees_lost_tokens(position, mod.first_key(position), tile.row.end));
    const float l = is_nan ? NAN : odd ? rows.l[group][1] : rows.l[group][0], m = odd ? rows.m[group][1] : rows.m[group][0];
    const float weight = !complete ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l;
    const int64_t row = query.out_row(p, tile.batch), part = int64_t(place) * p.part_height + mine;
    if (f.row < 2 && query.real) store_sums(p, query, tile.batch, complete, part, m, l);
#pragma unroll
    for (int t = 0; t < DIM / WGMMA_ROWS; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* of = rows.o[t] + 4 * group + 2 * h;
        const float kept = (odd ? of[1] : of[0]) * weight, other = __shfl_xor_sync(~0u, odd ? of[0] : of[1], 4) * weight;
        const float a = odd ? other : kept, b = odd ? kept : other;
        const int channel = WGMMA_ROWS * t + f.row - odd + 8 * h;
        if (!query.real) continue;
        if (complete)
          store_pair(p, row * DIM + channel, a, b);
        else
          *reinterpret_cast<float2*>(p.parts + part * DIM + channel) = {a, b};
      }
  }
}

// The decoders attend to the blocks of all tiles of the CTA. Their tile is in shared memory: registers are scarce.
// GROUPS: of the queries of a product, the least power of two that holds the call's rows.
template <DecodeConfig C, typename T, int GROUPS = 1>
__device__ __forceinline__ void attend_to_blocks(const DecodeParams& p, DecodeStorage<C>& shared, TilesOf<C> tiles, UnitShares shares_of_ctas) {
  if constexpr (QUERY_GROUP * GROUPS < C.rows) {
    if (p.part_height > QUERY_GROUP * GROUPS) return attend_to_blocks<C, T, 2 * GROUPS>(p, shared, tiles, shares_of_ctas);
  }
  constexpr int DIM = C.head_dim;
  using Rows = PagedRows<DIM, GROUPS>;
  const PagedScores<C.any_scores> mod = {p};
  Ring<C.stages> ring;
  const auto release = [](uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barrier);
  };
  if (threadIdx.x == 0) {
    tiles.next(p);
    shared.tiles[0] = tiles, shared.shares = shares_of_ctas;
  }
  for (int turn = 0;; turn ^= 1) {
    ptx::warpgroup_sync(1);  // nobody reads the last tile's rows any more
    const TilesOf<C>& tile = shared.tiles[turn];
    if (!tile.exists()) break;
    Fragment f = Fragment::mine();
    int thread = threadIdx.x;
    compute_late(f.row), compute_late(f.column), compute_late(thread);
    if (thread < DIM / 4) {
      const int64_t at = (int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head) * DIM + 4 * thread;
      ptx::cp_async_16(shared.v_scale + 4 * thread, p.v_scale + at, true);
      ptx::cp_async_16(shared.v_mean + 4 * thread, p.v_mean + at, true);
    }
    // a sequence without pages may have no mean yet
    quantize_queries<T, DIM, C.int8>(p, tile, tile.blocks.pages > 0, shared.q, shared.row_scale, shared.mean_score);
    if (thread < C.rows) shared.position[thread] = QueryRow(p, tile.row, tile.kv_head, tile.first_row() + thread).position;
    ptx::cp_async_wait();
    ptx::fence_proxy_async();
    ptx::warpgroup_sync(1);
    if (thread == DECODERS - 1) {
      TilesOf<C> next = tile;
      next.next(p);
      shared.tiles[turn ^ 1] = next;
    }
    const auto of_channels = [](const uint8_t* operand) { return ptx::wgmma_descriptor<KEY_PANEL<DIM>>(ptx::shared_address(operand)); };
    const auto of_keys = [](const uint8_t* operand) { return ptx::wgmma_descriptor<KEYS>(ptx::shared_address(operand)); };
    const uint64_t first_keys = of_channels(shared.k[0]), first_values = of_keys(shared.v[0]);
    const uint64_t queries = of_channels(shared.q), probabilities = of_keys(shared.exchange.p);
    Rows rows;
    const int end_of_pages = min(tile.end, tile.blocks.pages);
    int block = tile.begin;
    for (; block < end_of_pages; ++block, ring.advance()) {
      const int stage = ptx::uniform(ring.stage), page = first_page_of(tile.blocks) + block;
      bool hidden[GROUPS][2];
      Rows::for_queries([&](int group, int r) { hidden[group][r] = mod.hides(shared.position[QUERY_GROUP * group + f.column + r], page); });
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      const PageScales scales = shared.scales[stage];
      if (scales.v == 0.0f) {  // the page isn't there
        Rows::for_queries([&](int group, int r) {
          if (!hidden[group][r]) rows.l[group][r] = NAN;
        });
        ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
        release(shared.k_empty[stage]), release(shared.v_empty[stage]);
        continue;
      }
      Products<KEYS / WGMMA_ROWS, GROUPS> s;
      const uint64_t keys = ptx::operand_of(first_keys, stage, DecodeStorage<C>::block_bytes);
      if constexpr (C.int8) {
        Products<KEYS / WGMMA_ROWS, GROUPS, int32_t> sums;
        multiply_keys<DIM, C.rows, GROUPS, true>(sums, keys, queries);
        float_scores<DIM, GROUPS>(sums, s, shared.k[stage], scales.k < 0.0f, f);
      } else {
        multiply_keys<DIM, C.rows, GROUPS, false>(s, keys, queries);
      }
      release(shared.k_empty[stage]);
      const float k_scale = C.int8 ? fabsf(scales.k) : scales.k;
      OfQueries<GROUPS> factor, alpha, beta;
      Rows::for_queries([&](int group, int r) { factor[group][r] = score_factor(shared.row_scale[QUERY_GROUP * group + f.column + r] * k_scale, false); });
      const auto softmax = [&]<bool INT8>(std::bool_constant<INT8>) { rows.template softmax_of_page<INT8>(s, factor, hidden, shared.exchange, alpha, beta, f); };
      if constexpr (C.any_scores) {
        if (mod.capped()) Rows::template cap<C.int8>(s, factor, shared.mean_score, p.softcap, f);
        int first_keys_seen[GROUPS][2];
        bool has_edge = false;  // of a window
        Rows::for_queries([&](int group, int r) {
          first_keys_seen[group][r] = mod.first_key(shared.position[QUERY_GROUP * group + f.column + r]);
          has_edge |= first_keys_seen[group][r] > page * KEYS;
        });
        if (has_edge) Rows::hide_keys_before(s, first_keys_seen, page * KEYS, f);
      }
      if (C.int8 && !mod.capped())
        softmax(std::bool_constant<C.int8>());
      else
        softmax(std::bool_constant<false>());
      ptx::warpgroup_sync(1);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      rows.add_values(ptx::operand_of(first_values, stage, DecodeStorage<C>::block_bytes), probabilities, alpha, beta, scales.v);
      release(shared.v_empty[stage]);
    }
    if (tile.begin < end_of_pages) rows.restore(shared.v_scale, shared.v_mean, shared.mean_score, mod.capped(), f);

    for (; block < tile.end; ++block, ring.advance()) {
      const int stage = ring.stage;
      const auto queries_of = [&](int group) { return HalfQueries<T, DIM>(p, tile, QUERY_GROUP * group); };
      HalfQueries<T, DIM> first_queries = queries_of(0);
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      const HalfBlock half_block = {shared.k[stage], shared.v[stage], (tile.blocks.first_half + block - tile.blocks.pages) * HALF_BLOCK};
      rows.attend_to_half_block(half_block, first_queries, queries_of, shared.position, mod, shared.exchange, f);
      release(shared.k_empty[stage]), release(shared.v_empty[stage]);
    }
    if constexpr (C.any_scores) {  // one CTA has the tile's last block
      if (p.sinks != nullptr && tile.end == tile.blocks.size()) {
        OfQueries<GROUPS> sinks;
        Rows::for_queries([&](int group, int r) {
          const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + QUERY_GROUP * group + f.column + r);
          sinks[group][r] = query.real ? p.sinks[query.head] * LOG2E : -INFINITE;
        });
        rows.add_sinks(sinks, f);
      }
    }
    store_rows<C, GROUPS>(p, shared, tile, rows, f);
    if (!tile.complete()) combine_parts<DIM>(p, shared, tile);
  }
}

// Brings the CTA's first pages and their statistics into L2 while it waits for the grids before. They may still write
// lengths and page numbers, so that these may be any; results don't depend on what is prefetched. Called by a warp.
template <DecodeConfig C, typename T>
__device__ void prefetch_pages(const DecodeParams& p, const DecodeStorage<C>& shared, TilesOf<C> tile) {
  constexpr int PAGES = (64 << 10) / (2 * DecodeStorage<C>::block_bytes);
  tile.next(p);
  const int lane = threadIdx.x % 32, block = tile.begin + lane, first_page = first_page_of(tile.blocks);
  if (!tile.exists()) return;
  prefetch_tile<T, C.head_dim>(p, tile);
  if (lane >= PAGES || block >= min(min(tile.end, tile.blocks.pages), p.table_width - first_page)) return;
  const int number = __ldcg(p.page_table + tile.batch * p.table_stride + first_page + block);
  if (number < 0 || number >= p.every_page || ptx::load_relaxed_cta(&shared.started)) return;
  const int from = number * p.kv_heads + tile.kv_head;
  ptx::prefetch_l2(p.k_scale + from);
  ptx::prefetch_l2(p.v_page_scale + from);
  for (int i = 0; i < C.head_dim; i += KEY_PANEL<C.head_dim>) ptx::tma_load_ahead(p.k_map, i, from * KEYS);
  ptx::tma_load_ahead(p.v_map, 0, from * C.head_dim);
}

// The grid: p.ctas. T: of the queries and of tokens in half precision.
template <class Instance, typename T>
__global__ void __launch_bounds__(DECODE_THREADS, Instance::config.ctas) decode(const __grid_constant__ DecodeParams p) {
  constexpr DecodeConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeStorage<C>& shared = *reinterpret_cast<DecodeStorage<C>*>(bytes);
  if (threadIdx.x == 0) {
    shared.started = 0;
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], 2);  // keys and scales
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], DECODER_WARPS);
      ptx::mbarrier_init(&shared.v_empty[stage], DECODER_WARPS);
    }
    ptx::fence_barrier_init();
  }
  prefetch_inputs<T, C.head_dim, DECODE_THREADS>(p);
  if (threadIdx.x == DECODERS) {
    ptx::tma_prefetch(p.k_map);
    ptx::tma_prefetch(p.v_map);
    ptx::tma_prefetch(p.recent_k_map);
    ptx::tma_prefetch(p.recent_v_map);
  }
  __syncthreads();
  const bool prefetches = threadIdx.x >= DECODERS + 32;
  if (!prefetches) {
    ptx::wait_for_grids_before();
    ptx::launch_dependents();
    if (threadIdx.x == DECODERS) ptx::store_relaxed_cta(&shared.started, 1);
  }
  const typename TilesOf<C>::Schedule schedule(p);
  const TilesOf<C> tiles(schedule, blockIdx.x);
  if (prefetches) {
    prefetch_pages<C, T>(p, shared, tiles);
    ptx::wait_for_grids_before();
    ptx::launch_dependents();
    store_empty_rows(p, C.head_dim);
  } else if (threadIdx.x >= DECODERS) {
    load_blocks<C, T>(p, shared, tiles);
  } else {
    attend_to_blocks<C, T>(p, shared, tiles, schedule.shares);
  }
}

template <class Instance>
cudaError_t launch(const DecodeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(DecodeStorage<Instance::config>);
  const auto kernel = p.half ? decode<Instance, __half> : decode<Instance, __nv_bfloat16>;
  return launch_grid_with_shared_memory(kernel, p, ctas, DECODE_THREADS, bytes, stream);
}

}  // namespace fp8attn
