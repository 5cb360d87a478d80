// The prefill kernel's producer warpgroup: pages and blocks of new tokens by TMA, other tokens by asynchronous copies.
#pragma once

#include "prefill_rows.h"
#include "prefill_storage.h"
#include "ptx/cp_async.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/uniform.h"
#include "ptx/warpgroup.h"
#include "tile/pair.h"

namespace fp8attn {

// One warp loads the pages of a tile, in the order in which consumers want them. A page that isn't there is read
// outside of the tensor, where TMA reads zeros, and K's scale says so.
template <PrefillConfig C>
__device__ void load_pages(const PrefillParams& params, PrefillStorage<C>& shared, const PagedTile<C.consumers>& tile, Ring<C.stages>& ring) {
  using S = PrefillShape<C>;
  constexpr int FOUND = 31;  // pages found at once; lane 31 knows the one behind them
  const Params& p = params.call;
  const int lane = threadIdx.x % 32, nowhere = params.every_page * p.kv_heads;
  const int* numbers = params.page_table + tile.batch * params.table_stride;
#pragma unroll 1
  for (int first = tile.first_page; first < tile.pages; first += FOUND) {
    const int mine = first + lane, number = mine < min(tile.pages, params.table_width) ? __ldcg(numbers + mine) : -1;
    const bool exists = number >= 0 && number < params.every_page;
    const int index = exists ? number * p.kv_heads + tile.kv_head : nowhere;
    const float k_scale = exists ? __ldcg(p.k_scale + index) * p.score_scale : MISSING_PAGE, v_scale = exists ? __ldcg(params.v_page_scale + index) : 1.0f;
    const int end = min(tile.pages - first, FOUND);
#pragma unroll 1
    for (int i = 0; i < end; ++i, ring.advance()) {
      const int from = __shfl_sync(~0u, index, i), stage = ring.stage;
      const PageScales scales = {__shfl_sync(~0u, v_scale, i), __shfl_sync(~0u, k_scale, i + 1), __shfl_sync(~0u, k_scale, i)};
      if (lane != 0) continue;
      ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      for (int x = 0; x < S::panels; ++x)
        ptx::tma_load(shared.k[stage] + x * KEYS * S::panel, p.k_map, &shared.k_full[stage], x * S::panel, from * KEYS);
      shared.page_scales[stage].k = scales.k;
      ptx::mbarrier_expect(&shared.k_full[stage], KEYS * C.head_dim);
      ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
      ptx::tma_load(shared.v[stage], p.v_map, &shared.v_full[stage], 0, from * C.head_dim);
      shared.page_scales[stage].v = scales.v, shared.page_scales[stage].next = scales.next;
      ptx::mbarrier_expect(&shared.v_full[stage], KEYS * C.head_dim);
    }
  }
}

// Blocks of a tile in half precision. TMA loads those whose tokens are all new. Of the others, three warps copy what is
// there, from the last tokens of the cache and from the new ones.
template <typename T, PrefillConfig C>
struct TokenBlocks {
  using PageTile = typename PrefillShape<C>::PageTile;
  static constexpr int DIM = C.head_dim;
  static constexpr int first_thread = 32, threads = 96;
  static constexpr int chunks = DIM / 8, parts = HALF_BLOCK * chunks;  // of 16 bytes: of a token, and of all

  const PrefillParams& params;
  const PageTile& tile;
  int edge;  // the first token that is among the new ones; those before are among the last tokens of the cache

  __device__ TokenBlocks(const PrefillParams& its_params, const PageTile& its_tile)
      : params(its_params), tile(its_tile), edge(its_tile.start + (its_params.new_k == nullptr ? its_tile.count : 0)) {}

  // The block's first token among the new ones; negative if not all of its tokens are new.
  __device__ int first_new(int block) const { return params.new_k == nullptr ? -1 : block * HALF_BLOCK - edge; }

  // Byte offset of a chunk of a token of a block.
  __device__ static int place(int part) {
    const int token = part / chunks, chunk = part % chunks;
    return chunk / 8 * (HALF_BLOCK * HALF_ROW) + ptx::swizzled<HALF_ROW>(token, chunk % 8 * 16);
  }

  // Returns once what this thread copies is there. Tokens that don't exist become zeros.
  __device__ void copy(int block, uint8_t* k, uint8_t* v) const {
    const int64_t recent = (int64_t(tile.sequence) * params.call.kv_heads + tile.kv_head) * RECENT;
#pragma unroll 1
    for (int part = threadIdx.x - first_thread; part < parts; part += threads) {
      const int token = block * HALF_BLOCK + part / chunks, channel = part % chunks * 8;
      const bool exists = tile.has_sequence && token < tile.start + tile.count, is_new = token >= edge;
      const auto copy = [&](uint8_t* to, const void* last_tokens, const void* new_tokens, const int64_t (&strides)[3]) {
        const T* from = static_cast<const T*>(last_tokens) + (recent + token % RECENT) * DIM;
        if (is_new) from = static_cast<const T*>(new_tokens) + tensor_batch(tile) * strides[0] + tile.kv_head * strides[1] + int64_t(tensor_row(tile) + token - edge) * strides[2];
        ptx::cp_async_16(to + place(part), exists ? from + channel : static_cast<const T*>(last_tokens), exists);
      };
      copy(k, params.recent_k, params.new_k, params.new_k_strides);
      copy(v, params.recent_v, params.new_v, params.new_v_strides);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait();
  }

  // Of the parts that the thread copies. A token of which K or V is not finite gets NaN in K, and V becomes finite:
  // queries that don't see the token multiply it by zero.
  __device__ static void mark_nonfinite(uint8_t* k, uint8_t* v) {
#pragma unroll 1
    for (int part = threadIdx.x - first_thread; part < parts; part += threads) {
      uint4 &key = *reinterpret_cast<uint4*>(k + place(part)), &value = *reinterpret_cast<uint4*>(v + place(part));
      uint32_t carries = 0;
      for (const uint4& x : {key, value})
        for (uint32_t word : {x.x, x.y, x.z, x.w}) carries |= exponent_carries<T>(word);
      if ((carries & SIGN_BITS) == 0) continue;
      const uint4 bad = not_finite<T>(value);
      value = without(value, bad);
      key = {~0u, ~0u, ~0u, ~0u};
    }
  }
};

// One thread of a warp takes the stages of a tile's blocks in half precision as they become free, and starts TMA.
template <PrefillConfig C, typename T>
__device__ void start_half_blocks(const PrefillParams& params, PrefillStorage<C>& shared, const typename PrefillShape<C>::PageTile& tile, Ring<C.stages>& ring, Ring<C.stages>& taken) {
  const TokenBlocks<T, C> blocks(params, tile);
#pragma unroll 1
  for (int i = 0; i < tile.halves; ++i, ring.advance(), taken.advance()) {
    if (threadIdx.x % 32 != 0) continue;
    const int stage = ring.stage, first = blocks.first_new(tile.first_half + i);
    ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
    ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
    uint64_t* const barrier = &shared.half_taken[taken.stage];
    if (first < 0) {
      ptx::mbarrier_arrive(barrier);
      continue;
    }
#pragma unroll 1
    for (int panel = 0; panel < PrefillShape<C>::half_panels; ++panel) {
      const int offset = panel * HALF_BLOCK * HALF_ROW;
      ptx::tma_load(shared.k[stage] + offset, params.new_k_map, barrier, panel * HALF_ROW, tensor_row(tile) + first, tile.kv_head, tensor_batch(tile));
      ptx::tma_load(shared.v[stage] + offset, params.new_v_map, barrier, panel * HALF_ROW, tensor_row(tile) + first, tile.kv_head, tensor_batch(tile));
    }
    ptx::mbarrier_expect(barrier, 2 * KEYS * C.head_dim);
  }
}

// The other warps of the producer finish them.
template <PrefillConfig C, typename T>
__device__ void finish_half_blocks(const PrefillParams& params, PrefillStorage<C>& shared, const typename PrefillShape<C>::PageTile& tile, Ring<C.stages>& ring, Ring<C.stages>& taken) {
  using Blocks = TokenBlocks<T, C>;
  const Blocks blocks(params, tile);
#pragma unroll 1
  for (int i = 0; i < tile.halves; ++i, ring.advance(), taken.advance()) {
    uint8_t *k = shared.k[ring.stage], *v = shared.v[ring.stage];
    ptx::mbarrier_wait(&shared.half_taken[taken.stage], taken.phase);
    if (blocks.first_new(tile.first_half + i) < 0) blocks.copy(tile.first_half + i, k, v);
    Blocks::mark_nonfinite(k, v);
    ptx::fence_proxy_async();
    ptx::threads_sync<Blocks::threads>(PrefillShape<C>::producer_barrier);
    if (threadIdx.x == Blocks::first_thread) ptx::mbarrier_arrive(&shared.k_full[ring.stage]), ptx::mbarrier_arrive(&shared.v_full[ring.stage]);
  }
}

// Stores the outputs of packed queries of no row, zeros, and their LSE; those of all splits. CTAs share the queries,
// and the other warps of the producer the channels.
template <PrefillConfig C>
__device__ void store_queries_of_no_row(const Params& p) {
  constexpr int others = 128 - 32;
  const int thread = threadIdx.x - 32, bytes = p.q_heads * C.head_dim * (p.out_type == OutType::f32 ? 4 : 2);
#pragma unroll 1
  for (int query = p.tile_table[int(TableHeader::end)] + blockIdx.x; query < p.q_length; query += gridDim.x)
#pragma unroll 1
    for (int split = 0; split < p.key_splits; ++split) {
      uint8_t* row = static_cast<uint8_t*>(p.out) + (int64_t(split) * p.q_length + query) * bytes;  // of all heads
#pragma unroll 1
      for (int i = 16 * thread; i < bytes; i += 16 * others) *reinterpret_cast<uint4*>(row + i) = {};
#pragma unroll 1
      for (int head = thread; head < p.q_heads; head += others)
        if (p.part_rows == nullptr)
          p.lse[int64_t(head) * p.q_length + query] = -INFINITE;
        else
          store_sums(p, split, query * p.q_heads + head, 1, -INFINITE);
    }
}

// Loads all blocks of all tiles of the CTA. T: of what is in half precision. The first warp is ahead of the others. It
// writes the next tile before it takes a stage for this one's last block. The others and the consumers wait for that.
template <PrefillConfig C, typename T>
__device__ void load_tiles(const PrefillParams& params, PrefillStorage<C>& shared, const typename PrefillShape<C>::Schedule& schedule) {
  using S = PrefillShape<C>;
  const Params& p = params.call;
  const int warp = ptx::uniform(threadIdx.x / 32);
  Ring<C.stages> ring, taken;
  if constexpr (C.packed) {
    if (warp > 0) store_queries_of_no_row<C>(p);
  }
  for (int round = 0; shared.tiles[round % shared.TILES].exists(); ++round) {
    const auto& tile = shared.tiles[round % shared.TILES];
    if (warp > 0) {
      const int behind = ring.stage + tile.pages - tile.first_page;
      ring = {behind % C.stages, ring.phase ^ (behind / C.stages & 1)};
      finish_half_blocks<C, T>(params, shared, tile, ring, taken);
      continue;
    }
    // This wait also keeps the consumers, which read shared.tiles, at most one round behind.
    for (int c = 0; c < C.consumers; ++c) ptx::mbarrier_wait(&shared.q_empty[c], round & 1 ^ 1);
    load_pages<C>(params, shared, tile, ring);
    if (threadIdx.x == 0) {
      write_next_tile<C>(shared, schedule, round);
      const auto& next = shared.tiles[(round + 1) % shared.TILES];
#pragma unroll 1
      for (int c = 0; next.exists() && c < C.consumers; ++c)
        for_units(params, next, c, [&](int, int head, int row) {
          for (int panel = 0; panel < S::half_panels; ++panel) ptx::tma_load_ahead(p.q_map, panel * HALF_ROW, tensor_row(next) + row, head, tensor_batch(next));
        });
    }
    start_half_blocks<C, T>(params, shared, tile, ring, taken);
    __syncwarp();  // all lanes read the next tile
  }
}

}  // namespace fp8attn
