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

// Pages of a tile, which one warp finds and loads in the order in which consumers want them.
template <PrefillConfig C>
struct PageLoads {
  using S = PrefillShape<C>;
  static constexpr int FOUND = 31;  // pages found at once; lane 31 knows the one behind them

  int index;               // of the lane's page
  float k_scale, v_scale;  // its scales

  // Finds FOUND pages, from `first` on. A page that isn't there is read outside of the tensor, where TMA reads zeros,
  // and K's scale says so.
  __device__ void find(const PrefillParams& params, const PagedTile<C.consumers>& tile, int first) {
    const Params& p = params.call;
    const int mine = first + int(threadIdx.x) % 32;
    const int number = mine < min(tile.pages, params.table_width) ? __ldcg(params.page_table + tile.batch * params.table_stride + mine) : -1;
    const bool exists = number >= 0 && number < params.every_page;
    index = (exists ? number : params.every_page) * p.kv_heads + (exists ? tile.kv_head : 0);
    k_scale = exists ? __ldcg(p.k_scale + index) * p.score_scale : MISSING_PAGE, v_scale = exists ? __ldcg(params.v_page_scale + index) : 1.0f;
  }

  // Loads the i-th of them.
  __device__ void load(const Params& p, PrefillStorage<C>& shared, int i, Ring<C.stages> ring) const {
    const int from = __shfl_sync(~0u, index, i), stage = ring.stage;
    const PageScales scales = {__shfl_sync(~0u, v_scale, i), __shfl_sync(~0u, k_scale, i + 1), __shfl_sync(~0u, k_scale, i)};
    if (threadIdx.x % 32 != 0) return;
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
};

// Blocks of a tile in half precision. TMA loads those whose tokens are all new. Of the others, three warps copy what is
// there, from the last tokens of the cache and from the new ones.
template <typename T, PrefillConfig C>
struct TokenBlocks {
  using PageTile = typename PrefillShape<C>::PageTile;
  static constexpr int DIM = C.head_dim;
  static constexpr int first_thread = 32, threads = 96;
  // Parts of 16 bytes, in the order of shared memory: panels, their tokens, and the swizzled parts of these.
  static constexpr int parts = HALF_BLOCK * DIM / 8, of_row = HALF_ROW / 16;

  const PrefillParams& params;
  const PageTile& tile;
  int edge;  // the first token that is among the new ones; those before are among the last tokens of the cache

  __device__ TokenBlocks(const PrefillParams& its_params, const PageTile& its_tile)
      : params(its_params), tile(its_tile), edge(its_tile.start + (its_params.new_k == nullptr ? its_tile.count : 0)) {}

  // The block's first token among the new ones; negative if not all of its tokens are new.
  __device__ int first_new(int block) const { return params.new_k == nullptr ? -1 : block * HALF_BLOCK - edge; }

  __device__ static int token_of(int part) { return part / of_row % HALF_BLOCK; }

  // The part's first channel.
  __device__ static int channel_of(int part) {
    return part / (of_row * HALF_BLOCK) * HALF_CHANNELS + ptx::swizzled<HALF_ROW>(token_of(part), part % of_row * 16) % HALF_ROW / 2;
  }

  // Returns once what this thread copies is there. Tokens that don't exist become zeros.
  __device__ void copy(int block, uint8_t* k, uint8_t* v) const {
    const int64_t recent = (int64_t(tile.sequence) * params.call.kv_heads + tile.kv_head) * RECENT;
#pragma unroll 1
    for (int part = threadIdx.x - first_thread; part < parts; part += threads) {
      const int token = block * HALF_BLOCK + token_of(part), channel = channel_of(part);
      const bool exists = tile.has_sequence && token < tile.start + tile.count, is_new = token >= edge;
      const auto copy = [&](uint8_t* to, const void* last_tokens, const void* new_tokens, const int64_t (&strides)[3]) {
        const T* from = static_cast<const T*>(last_tokens) + (recent + token % RECENT) * DIM;
        if (is_new) from = static_cast<const T*>(new_tokens) + tensor_batch(tile) * strides[0] + tile.kv_head * strides[1] + int64_t(tensor_row(tile) + token - edge) * strides[2];
        ptx::cp_async_16(to + 16 * part, exists ? from + channel : static_cast<const T*>(last_tokens), exists);
      };
      copy(k, params.recent_k, params.new_k, params.new_k_strides);
      copy(v, params.recent_v, params.new_v, params.new_v_strides);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait();
  }

  // Whether a number of the parts that the thread copies may not be finite. Numbers are compared as halves, of which an
  // instruction takes four; as those, bfloat16 from 2^121 up isn't finite.
  __device__ static bool may_have_nonfinite(const uint8_t* k, const uint8_t* v) {
    uint32_t largest = 0;
#pragma unroll 1
    for (int part = threadIdx.x - first_thread; part < parts; part += threads) {
      const uint4 key = reinterpret_cast<const uint4*>(k)[part], value = reinterpret_cast<const uint4*>(v)[part];
      for (uint32_t word : {key.x, key.y, key.z, key.w, value.x, value.y, value.z, value.w}) largest = most_magnitude(largest, word);
    }
    return (exponent_carries<__half>(largest) & SIGN_BITS) != 0;
  }

  // Of the parts that the thread copies. A token of which K or V is not finite gets NaN in K, and V becomes finite:
  // queries that don't see the token multiply it by zero.
  __device__ static void mark_nonfinite(uint8_t* k, uint8_t* v) {
#pragma unroll 1
    for (int part = threadIdx.x - first_thread; part < parts; part += threads) {
      uint4 &key = reinterpret_cast<uint4*>(k)[part], &value = reinterpret_cast<uint4*>(v)[part];
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

// One thread takes the stage of a tile's block in half precision when it becomes free, and starts TMA.
template <PrefillConfig C, typename T>
__device__ void start_half_block(const PrefillParams& params, PrefillStorage<C>& shared, const typename PrefillShape<C>::PageTile& tile, int block, Ring<C.stages> ring, Ring<C.stages> taken) {
  const int stage = ring.stage, first = TokenBlocks<T, C>(params, tile).first_new(block);
  uint64_t* const barrier = &shared.half_taken[taken.stage];
  const auto load = [&](uint8_t* to, const auto& map) {
#pragma unroll 1
    for (int panel = 0; first >= 0 && panel < PrefillShape<C>::half_panels; ++panel)
      ptx::tma_load(to + panel * HALF_BLOCK * HALF_ROW, map, barrier, panel * HALF_ROW, tensor_row(tile) + first, tile.kv_head, tensor_batch(tile));
  };
  ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
  load(shared.k[stage], params.new_k_map);
  ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
  load(shared.v[stage], params.new_v_map);
  ptx::mbarrier_expect(barrier, first >= 0 ? 2 * KEYS * C.head_dim : 0);
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
    if (Blocks::may_have_nonfinite(k, v)) Blocks::mark_nonfinite(k, v);
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
// writes the next tile before it takes a stage for this one's last block, which consumers wait for. The others wait for
// that block, too, or, if it may be a page, for `next_written`.
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
    const auto pages = [&] { return tile.pages - tile.first_page; };  // read again each time: registers are scarce
    if (warp > 0) {
      const auto pass_pages = [&] {
        const int behind = ring.stage + pages();
        ring = {behind % C.stages, ring.phase ^ (behind / C.stages & 1)};
      };
      if constexpr (!S::halves_first) pass_pages();
      finish_half_blocks<C, T>(params, shared, tile, ring, taken);
      if constexpr (S::halves_first) {
        pass_pages();
        ptx::mbarrier_wait(&shared.next_written, round & 1);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.next_read);
      }
      continue;
    }
    for (int c = 0; c < C.consumers; ++c) ptx::mbarrier_wait(&shared.pages_done[round % 2][c], round / 2 & 1 ^ 1);  // of two rounds before
    if constexpr (S::halves_first) ptx::mbarrier_wait(&shared.next_read, round & 1 ^ 1);
    PageLoads<C> loads;
    // blocks in half precision are counted on from the pages, or back from them
    const auto first_half = [&] { return S::halves_first ? -tile.halves : pages(); };
    const auto end = [&] { return S::halves_first ? pages() : pages() + tile.halves; };
#pragma unroll 1
    for (int page = S::halves_first ? first_half() : 0; page < end(); ++page, ring.advance()) {
      if (threadIdx.x == 0 && page + 1 == end()) {
        write_next_tile<C>(shared, schedule, round);
        if constexpr (S::halves_first) ptx::mbarrier_arrive(&shared.next_written);
        const auto& next = shared.tiles[(round + 1) % shared.TILES];
#pragma unroll 1
        for (int c = 0; next.exists() && c < C.consumers; ++c)
          for_units(params, next, c, [&](int, int head, int row) {
            for (int panel = 0; panel < S::half_panels; ++panel) ptx::tma_load_ahead(p.q_map, panel * HALF_ROW, tensor_row(next) + row, head, tensor_batch(next));
          });
      }
      if (S::halves_first ? page < 0 : page >= pages()) {
        if (threadIdx.x == 0) start_half_block<C, T>(params, shared, tile, tile.first_half + page - first_half(), ring, taken);
        taken.advance();
        continue;
      }
      const int found = page % PageLoads<C>::FOUND;
      if (found == 0) loads.find(params, tile, tile.first_page + page);
      loads.load(p, shared, found, ring);
    }
    __syncwarp();  // all lanes read the next tile
  }
}

}  // namespace fp8attn
