// Attention to the KV cache of another engine, sm_90: `fp8attn/paged_tensors.py` defines it.
//
// The rows of a tile are the queries of all heads that share a key/value head. CTAs share the blocks of all tiles, as
// in decode.cuh. A block is 64 tokens, in e4m3 or half precision, row by row as the cache has them. One warp loads
// blocks by TMA, as many ahead as there are stages: pages of fewer tokens by several copies. A warpgroup attends to one
// block after another: to few queries by mma.sync (token_rows.h), to many by wgmma (many_rows.h).
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "tile/many_rows.h"
#include "tile/paged_parts.h"
#include "tile/schedule.h"

namespace fp8attn {

constexpr int DECODE_TENSORS_THREADS = DECODERS + 32;  // and a warp that loads
template <DecodeTensorsConfig C>
using TokenTilesOf = DecodeTiles<C.rows, TokenBlocks>;

// Whether the instance is for many queries.
template <DecodeTensorsConfig C>
constexpr bool has_many = C.rows == MANY_ROWS;

template <DecodeTensorsConfig C>
struct alignas(1024) DecodeTensorsStorage {
  static constexpr int row_bytes = C.fp8 ? C.head_dim : 2 * C.head_dim, block_bytes = TOKENS * row_bytes;

  uint8_t k[C.stages][block_bytes], v[C.stages][block_bytes];
  uint8_t q[C.rows * row_bytes];
  std::conditional_t<has_many<C>, typename ManyRows<__half, C.head_dim, C.fp8, C.by_token>::Exchange, WarpExchange<C.rows>> exchange;
  TokenExchange<C.by_token && !has_many<C> ? C.rows : 1> more;
  float row_scale[C.rows];
  int2 seen[C.rows];  // the first and the last token that a row sees; none of a row that isn't real
  float k_scale[C.by_token ? C.stages : 1][TOKENS], v_scale[C.by_token ? C.stages : 1][TOKENS];  // of the blocks' tokens, if each has its own
  int missing[C.stages];     // bit i: copy i of the block has no page
  TokenTilesOf<C> tiles[2];  // the warps' tile, and the next one, by turns
  UnitShares shares;
  bool is_last;  // whether the CTA is the last one to store its part of the tile
  uint64_t full[C.stages], empty[C.stages];
};

// The copies of a block: whole pages, or parts of one. `shift`: the logarithm of a copy's tokens.
struct TokenCopies {
  int tokens, shift, of_block;

  __device__ explicit TokenCopies(const DecodeParams& p) : tokens(p.copied_tokens), shift(3 + (tokens > 8) + (tokens > 16) + (tokens > 32)), of_block(TOKENS >> shift) {}
};

// One warp loads the blocks of all tiles of the CTA.
template <DecodeTensorsConfig C>
__device__ void load_token_blocks(const DecodeParams& p, DecodeTensorsStorage<C>& shared, TokenTilesOf<C> tile) {
  using Storage = DecodeTensorsStorage<C>;
  constexpr int PANEL = TokenPanels<Storage::row_bytes>::PANEL;
  const int lane = threadIdx.x % 32;
  const TokenCopies copies(p);
  Ring<C.stages> ring;
#pragma unroll 1
  for (tile.next(p); tile.exists(); tile.next(p)) {
    const int* pages = p.page_table + tile.batch * p.table_stride;
    const float* k_scales = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[3];
    const float* v_scales = p.v_scale + tile.batch * p.v_scale_strides[0] + tile.kv_head * p.v_scale_strides[3];
    const int blocks_of_lanes = 32 / copies.of_block;  // whose pages the lanes find
#pragma unroll 1
    for (int first = tile.begin; first < tile.end; first += blocks_of_lanes) {
      // negative where there are no such tokens: lengths may be any numbers
      const int token = uint32_t(tile.blocks.first + first) * TOKENS + lane * copies.tokens, page = token / p.page;
      const int number = token >= 0 && token < p.capacity ? pages[page] : -1;
      const int found = number >= 0 && number < p.every_page ? number : -1, slot_of_copy = token - page * p.page;
#pragma unroll 1
      for (int block = first; block < min(tile.end, first + blocks_of_lanes); ++block, ring.advance()) {
        const int stage = ring.stage;
        ptx::mbarrier_wait(&shared.empty[stage], ring.phase ^ 1);
        if constexpr (C.by_token) {
#pragma unroll
          for (int i = lane; i < TOKENS; i += 32) {
            const int copy = (block - first) * copies.of_block + (i >> copies.shift);
            const int from = __shfl_sync(~0u, found, copy), slot = __shfl_sync(~0u, slot_of_copy, copy) + i % copies.tokens;
            const bool exists = from >= 0 && slot < p.page;
            ptx::cp_async(&shared.k_scale[stage][i], k_scales + (exists ? from * p.k_scale_strides[1] + slot * p.k_scale_strides[2] : 0), exists);
            ptx::cp_async(&shared.v_scale[stage][i], v_scales + (exists ? from * p.v_scale_strides[1] + slot * p.v_scale_strides[2] : 0), exists);
          }
          ptx::cp_async_arrive(&shared.full[stage]);
        }
        const int mine = (block - first) * copies.of_block;
        const uint32_t exist = __ballot_sync(~0u, found >= 0) >> mine & ((1u << copies.of_block) - 1);
        if (lane == 0) {
          shared.missing[stage] = ~exist;
          ptx::mbarrier_expect(&shared.full[stage], 2 * (Storage::block_bytes / copies.of_block) * __popc(exist));
        }
#pragma unroll 1
        for (int i = 0; i < copies.of_block; ++i) {
          const int from = __shfl_sync(~0u, found, mine + i), slot = __shfl_sync(~0u, slot_of_copy, mine + i);
          if (lane != 0 || from < 0) continue;
#pragma unroll
          for (int byte = 0; byte < Storage::row_bytes; byte += PANEL) {
            const int to = byte * TOKENS + i * copies.tokens * PANEL;
            ptx::tma_load(shared.k[stage] + to, p.k_map, &shared.full[stage], byte, slot, from, tile.kv_head);
            ptx::tma_load(shared.v[stage] + to, p.v_map, &shared.full[stage], byte, slot, from, tile.kv_head);
          }
        }
      }
    }
  }
}

// Copies the rows of a tile as they came to panels of HEIGHT rows, with TMA's swizzle. Called by all decoders.
template <typename T, int DIM, int HEIGHT>
__device__ void copy_queries(const DecodeParams& p, const DecodeTiles<HEIGHT, TokenBlocks>& tile, uint8_t* to) {
  constexpr int PANEL = 128, CHUNKS = DIM * sizeof(T) / 16;
  static_assert(DECODERS % CHUNKS == 0);
  constexpr int TOGETHER = HEIGHT * CHUNKS / DECODERS < 8 ? HEIGHT * CHUNKS / DECODERS : 8;  // loads in flight
#pragma unroll 1
  for (int first = threadIdx.x; first < tile.height(p) * CHUNKS; first += TOGETHER * DECODERS) {
    uint4 found[TOGETHER];
    const auto for_each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) f(found[i], (first + i * DECODERS) / CHUNKS, first % CHUNKS * 16);
    };
    for_each([&](uint4& chunk, int index, int byte) {
      const QueryRow row(p, tile.row, tile.kv_head, tile.first_row() + index);
      chunk = index < tile.height(p) && row.real ? *reinterpret_cast<const uint4*>(query_at<T>(p, tile.batch, row) + byte / sizeof(T)) : uint4{};
    });
    for_each([&](const uint4& chunk, int index, int byte) { *reinterpret_cast<uint4*>(to + byte / PANEL * HEIGHT * PANEL + ptx::swizzled<PANEL>(index, byte % PANEL)) = chunk; });
  }
}

// What a row's sums are multiplied by, of a complete tile or a part of one. `restore`: V's scale.
__device__ inline float weight_of(float restore, bool complete, float l) { return restore * (!complete ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l); }

// Stores the rows' output and LSE; or, if the CTA has a part of the tile, the partial results. `restore`: V's scale.
// Called by all decoders.
template <DecodeTensorsConfig C, typename Rows, int GROUPS>
__device__ void store_token_rows(const DecodeParams& p, DecodeTensorsStorage<C>& shared, const TokenTilesOf<C>& tile, Rows& rows, float restore, Fragment f) {
  constexpr int DIM = C.head_dim;
  const int place = tile.place(p), channel = Rows::channel();
  const bool complete = tile.complete();
  shared.exchange.template sum<GROUPS>(rows.l, f);
  Rows::for_queries([&](int group, int r) {
    const int mine = QUERY_GROUP * group + f.column + r;
    const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
    if (!query.real) return;
    const bool nonfinite = C.fp8 && shared.seen[mine].y >= 0 && shared.row_scale[mine] != shared.row_scale[mine];
    const float l = nonfinite ? NAN : rows.l[group][r], m = rows.m[group][r];
    const float weight = weight_of(restore, complete, l);
    const int64_t row = query.out_row(p, tile.batch), part = int64_t(place) * p.part_height + mine;
    if (threadIdx.x < 4) {
      if (complete)
        p.lse[query.index(p, tile.batch)] = (m + log2f(l)) / LOG2E;
      else
        *reinterpret_cast<float2*>(p.part_rows + 2 * part) = {m, l};
    }
#pragma unroll
    for (int t = 0; t < Rows::TILES; ++t) {
      const float a = rows.o[t][4 * group + r] * weight, b = rows.o[t][4 * group + 2 + r] * weight;
      if (complete)
        store_pair(p, row * DIM + channel + 2 * t, a, b);
      else
        *reinterpret_cast<float2*>(p.parts + part * DIM + channel + 2 * t) = {a, b};
    }
  });
}

// Scales of all tokens of a cache, or 1.
struct TensorScales {
  float k = 1.0f, v = 1.0f;

  template <typename Tile>
  __device__ TensorScales(const DecodeParams& p, const Tile& tile, bool exist) {
    if (!exist) return;
    k = p.k_scale[tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[3]];
    v = p.v_scale[tile.batch * p.v_scale_strides[0] + tile.kv_head * p.v_scale_strides[3]];
  }

  __device__ float nan() const { return (k + v) * 0.0f; }  // or 0
  __device__ float restore() const { return fabsf(v) <= -NOTHING ? v : 0.0f; }
};

// Brings the queries of tile `turn`, and what its rows see, to shared memory, and finds the next tile. Called by all
// decoders.
template <DecodeTensorsConfig C, typename T>
__device__ void begin_tile(const DecodeParams& p, DecodeTensorsStorage<C>& shared, int turn) {
  const TokenTilesOf<C>& tile = shared.tiles[turn];
  int thread = threadIdx.x;
  compute_late(thread);
  if constexpr (C.fp8)
    quantize_queries<T, C.head_dim, false>(p, tile, false, shared.q, shared.row_scale, nullptr);
  else
    copy_queries<T, C.head_dim>(p, tile, shared.q);
  if (thread < C.rows) {
    const int position = QueryRow(p, tile.row, tile.kv_head, tile.first_row() + thread).position;
    shared.seen[thread] = position < 0 ? int2{1 << 30, -1} : int2{first_seen(p, position), last_seen(p, position, tile.row.end)};
  }
  if constexpr (has_many<C>) ptx::fence_proxy_async();  // wgmma reads queries and zeros
  ptx::warpgroup_sync(1);
  if (thread == DECODERS - 1) {
    TokenTilesOf<C> next = tile;
    next.next(p);
    shared.tiles[turn ^ 1] = next;
  }
}

// What a score of a row is multiplied by, if not also by its token's scale.
template <DecodeTensorsConfig C>
__device__ float scale_of_row(const DecodeParams& p, const DecodeTensorsStorage<C>& shared, const TensorScales& scales, int row) {
  const float of_row = C.fp8 ? shared.row_scale[row] : p.score_scale;
  return C.fp8 && !C.by_token ? score_factor(of_row * scales.k, false) : of_row;
}

// The sink of a row of a tile that begins with its first key, in base 2; or -inf.
template <typename Tile>
__device__ float sink_of(const DecodeParams& p, const Tile& tile, int row, int2 seen) {
  if (p.sinks == nullptr || tile.begin != 0 || seen.y < 0) return -INFINITE;
  return p.sinks[QueryRow(p, tile.row, tile.kv_head, tile.first_row() + row).head] * LOG2E;
}

// Calls body(tile, scales, f) for the CTA's tiles, with queries in shared memory. Called by all decoders. A tile is in
// shared memory: registers are scarce.
template <DecodeTensorsConfig C, typename T, typename Body>
__device__ __forceinline__ void for_tiles(const DecodeParams& p, DecodeTensorsStorage<C>& shared, Body&& body) {
  for (int turn = 0;; turn ^= 1) {
    ptx::warpgroup_sync(1);  // nobody reads the last tile's rows any more
    const TokenTilesOf<C>& tile = shared.tiles[turn];
    if (!tile.exists()) return;
    Fragment f = Fragment::mine();
    compute_late(f.row), compute_late(f.column);
    const TensorScales scales(p, tile, C.fp8 && !C.by_token);
    begin_tile<C, T>(p, shared, turn);
    body(tile, scales, f);
  }
}

// The decoders attend to the blocks of all tiles of the CTA.
// GROUPS: of the queries of a product, the least power of two that holds the call's rows.
template <DecodeTensorsConfig C, typename T, int GROUPS = 1>
__device__ __forceinline__ void attend_to_token_blocks(const DecodeParams& p, DecodeTensorsStorage<C>& shared) {
  if constexpr (QUERY_GROUP * GROUPS < C.rows) {
    if (p.part_height > QUERY_GROUP * GROUPS) return attend_to_token_blocks<C, T, 2 * GROUPS>(p, shared);
  }
  constexpr int DIM = C.head_dim;
  using Rows = TokenRows<T, DIM, C.fp8, GROUPS>;
  const TokenCopies copies(p);
  Ring<C.stages> ring;
  for_tiles<C, T>(p, shared, [&](const TokenTilesOf<C>& tile, const TensorScales& of_all, Fragment f) {
    Rows rows;
    Rows::for_queries([&](int group, int r) {
      const int mine = QUERY_GROUP * group + f.column + r;
      if (shared.seen[mine].y >= p.capacity) rows.l[group][r] = NAN;  // tokens that the page table has no place for
      const float sink = sink_of(p, tile, mine, shared.seen[mine]);
      rows.m[group][r] = sink;
      if (sink != -INFINITE && f.row == 0) rows.l[group][r] += 1.0f;
    });
    for (int block = tile.begin; block < tile.end; ++block, ring.advance()) {
      const int stage = ring.stage;
      ptx::mbarrier_wait(&shared.full[stage], ring.phase);
      float s[GROUPS][4] = {}, nan_of_v[4] = {};
      Rows::template multiply_keys<C.rows>(s, nan_of_v, shared.k[stage], shared.v[stage], shared.q);
      TokenScales scales;
      const int missing = shared.missing[stage];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = f.row + 8 * h;
        scales.k[h] = scales.v[h] = 1.0f;
        scales.nan[h] = nan_of_v[2 * h] + (missing >> (token >> copies.shift) & 1 ? NAN : of_all.nan());
        if constexpr (C.by_token) {
          const float of_k = shared.k_scale[stage][token], of_v = shared.v_scale[stage][token];
          scales.nan[h] += (of_k + of_v) * 0.0f;
          scales.k[h] = of_k, scales.v[h] = fabsf(of_v) <= -NOTHING ? of_v : 0.0f;
        }
      }
      typename Rows::OfMine factor;
      Rows::for_queries([&](int group, int r) { factor[group][r] = scale_of_row<C>(p, shared, of_all, QUERY_GROUP * group + f.column + r); });
      const bool nonfinite = nan_of_v[0] != 0.0f || nan_of_v[2] != 0.0f;
      rows.template attend<C.by_token>(s, shared.v[stage], factor, scales, nonfinite, shared.seen, (tile.blocks.first + block) * TOKENS, p.softcap, shared.exchange, shared.more, f);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }
    store_token_rows<C, Rows, GROUPS>(p, shared, tile, rows, of_all.restore(), f);
    if (!tile.complete()) combine_parts<DIM>(p, shared, tile);
  });
}

// The tokens that all of a tile's rows see: first ... last.
struct SeenByAll {
  int first, last;

  __device__ SeenByAll(const DecodeParams& p, const BatchRow& row, int first_row, int rows) {
    const int start = row.end - row.count;
    first = first_seen(p, start + min(query_of(p, first_row + rows - 1), row.count - 1)), last = last_seen(p, start + query_of(p, first_row), row.end);
  }
};

// Whether a row of queries in half precision is finite, by the four lanes that have it: -inf would hide keys. `q`: as
// copy_queries has written it.
template <DecodeTensorsConfig C, typename T>
__device__ bool is_finite_row(const uint8_t* q, int row) {
  constexpr int PANEL = 128, BYTES = C.head_dim * sizeof(T);
  bool finite = true;
#pragma unroll
  for (int from = 0; from < BYTES; from += 4 * 16) {
    const int byte = from + threadIdx.x % 4 * 16;
    const uint4 chunk = *reinterpret_cast<const uint4*>(q + byte / PANEL * C.rows * PANEL + ptx::swizzled<PANEL>(row, byte % PANEL));
    for (uint32_t word : {chunk.x, chunk.y, chunk.z, chunk.w}) finite &= finite_elements<T>(word) == word;
  }
  const uint32_t lanes = __ballot_sync(~0u, finite) >> (threadIdx.x % 32 / 4 * 4);
  return (lanes & 15) == 15;
}

// Stores the output and LSE of many rows, or partial results.
template <DecodeTensorsConfig C, typename Rows>
__device__ void store_many_rows(const DecodeParams& p, const DecodeTensorsStorage<C>& shared, const TokenTilesOf<C>& tile, const Rows& rows, float restore, Fragment f) {
  constexpr int DIM = C.head_dim;
  const int place = tile.place(p);
  const bool complete = tile.complete();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int mine = f.row + 8 * h;
    const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
    if (!query.real) continue;
    const bool nonfinite = C.fp8 && shared.seen[mine].y >= 0 && shared.row_scale[mine] != shared.row_scale[mine];
    const float l = nonfinite ? NAN : rows.l[h], m = rows.m[h];
    const float weight = weight_of(restore, complete, l);
    const int64_t row = query.out_row(p, tile.batch), part = int64_t(place) * p.part_height + mine;
    if (f.column == 0) {
      if (complete)
        p.lse[query.index(p, tile.batch)] = (m + log2f(l)) / LOG2E;
      else
        *reinterpret_cast<float2*>(p.part_rows + 2 * part) = {m, l};
    }
#pragma unroll
    for (int i = 0; i < Rows::OF_CHANNELS; ++i) {
      const float a = rows.o[i][2 * h] * weight, b = rows.o[i][2 * h + 1] * weight;
      const int channel = 8 * i + f.column;
      if (complete)
        store_pair(p, row * DIM + channel, a, b);
      else
        *reinterpret_cast<float2*>(p.parts + part * DIM + channel) = {a, b};
    }
  }
}

// The same of many queries.
template <DecodeTensorsConfig C, typename T>
__device__ __forceinline__ void attend_to_blocks_of_many(const DecodeParams& p, DecodeTensorsStorage<C>& shared) {
  using Rows = ManyRows<T, C.head_dim, C.fp8, C.by_token>;
  const TokenCopies copies(p);
  Ring<C.stages> ring;
  int half = 0;  // turns of blocks
  for_tiles<C, T>(p, shared, [&](const TokenTilesOf<C>& tile, const TensorScales& of_all, Fragment f) {
    Rows rows;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int mine = f.row + 8 * h;
      const float sink = sink_of(p, tile, mine, shared.seen[mine]);
      if (shared.seen[mine].y >= p.capacity) rows.l[h] = NAN;  // tokens that the page table has no place for
      if constexpr (!C.fp8) {
        if (!is_finite_row<C, T>(shared.q, mine) && shared.seen[mine].y >= 0) rows.l[h] = NAN;
      }
      if (sink != -INFINITE) rows.add_sink(h, sink, f.column == 0);
      factor[h] = scale_of_row<C>(p, shared, of_all, mine);
    }
    const SeenByAll by_all(p, tile.row, tile.first_row(), C.rows);
    const bool never_plain = p.softcap > 0.0f || of_all.nan() != 0.0f;
    for (int block = tile.begin; block < tile.end; ++block, ring.advance(), half ^= 1) {
      const int stage = ring.stage, first = (tile.blocks.first + block) * TOKENS;
      ptx::mbarrier_wait(&shared.full[stage], ring.phase);
      typename Rows::Scores s;
      float nan[4];
      Rows::start(s, nan, shared.k[stage], shared.v[stage], shared.q, shared.exchange);
      uint8_t* const values = C.fp8 ? shared.exchange.v[half] : shared.v[stage];
      if constexpr (C.fp8) Rows::convert_values(shared.v[stage], values);
      rows.wait(s, nan);
      if constexpr (C.by_token) {
#pragma unroll
        for (int h = 0; h < 2; ++h) nan[2 * h] += (shared.k_scale[stage][f.row + 8 * h] + shared.v_scale[stage][f.row + 8 * h]) * 0.0f;
      }
      Rows::share_nonfinite(nan, shared.exchange, half, f);
      ptx::warpgroup_sync(1);
      const bool any_nonfinite = Rows::any_nonfinite(shared.exchange, half);
      if (any_nonfinite) {  // queries that don't see a token multiply it by zero
        TokenRows<T, C.head_dim, C.fp8, 1>::remove_nonfinite(shared.v[stage]);
        ptx::warpgroup_sync(1);
        if constexpr (C.fp8) Rows::convert_values(shared.v[stage], values);
        ptx::warpgroup_sync(1);
      }
      const int missing = shared.missing[stage] & ((1 << copies.of_block) - 1);
      const bool plain = !never_plain && !any_nonfinite && missing == 0 && first >= by_all.first && first + TOKENS - 1 <= by_all.last;
      if (!plain) {
        const auto is_nan = [&](int token) {
          if (any_nonfinite && shared.exchange.nonfinite[half][token / 16] && shared.exchange.of_token[half][token]) return true;
          return (missing >> (token >> copies.shift) & 1) || of_all.nan() != 0.0f;
        };
        Rows::finish_scores(s, factor, shared.k_scale[C.by_token ? stage : 0], is_nan, shared.seen, first, p.softcap, f);
      } else if constexpr (C.by_token) {
        Rows::scale_by_token(s, factor, shared.k_scale[stage], f);
      }
      const bool scaled = C.by_token || !plain;
      const float to_base_2[2] = {scaled ? 1.0f : factor[0], scaled ? 1.0f : factor[1]};
      rows.attend(s, to_base_2, values, C.by_token ? shared.v_scale[stage] : nullptr, f);
      if constexpr (!C.fp8) rows.finish_products();
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }
    rows.finish();
    store_many_rows<C, Rows>(p, shared, tile, rows, of_all.restore(), f);
    if (tile.complete()) return;
    // values in half precision have room for it, or queries if values aren't converted
    using Large = LargeParts<MANY_ROWS>;
    static_assert((C.fp8 ? sizeof(shared.exchange.v) : sizeof(shared.q)) >= sizeof(Large));
    combine_large_parts<C.head_dim>(p, shared, tile, *reinterpret_cast<Large*>(C.fp8 ? shared.exchange.v[0] : shared.q));
  });
}

// The grid: p.ctas. T: of the queries, and of a cache in half precision.
template <class Instance, typename T>
__global__ void __launch_bounds__(DECODE_TENSORS_THREADS, Instance::config.ctas) decode_tensors(const __grid_constant__ DecodeParams p) {
  constexpr DecodeTensorsConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeTensorsStorage<C>& shared = *reinterpret_cast<DecodeTensorsStorage<C>*>(bytes);
  if constexpr (has_many<C>) {
    if (threadIdx.x < sizeof(shared.exchange.zeros) / 4) reinterpret_cast<uint32_t*>(shared.exchange.zeros)[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], C.by_token ? 33 : 1);  // blocks, and each lane's scales
      ptx::mbarrier_init(&shared.empty[stage], DECODER_WARPS);
    }
    ptx::fence_barrier_init();
  }
  prefetch_inputs<T, C.head_dim, DECODE_TENSORS_THREADS>(p);
  if (threadIdx.x == DECODERS) {
    ptx::tma_prefetch(p.k_map);
    ptx::tma_prefetch(p.v_map);
  }
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const DecodeSchedule<C.rows, TokenBlocks> schedule(p);
  TokenTilesOf<C> tiles(schedule, blockIdx.x);
  if (threadIdx.x >= DECODERS) {
    load_token_blocks<C>(p, shared, tiles);
    store_empty_rows(p, C.head_dim);
    return;
  }
  if (threadIdx.x == 0) {
    tiles.next(p);
    shared.tiles[0] = tiles, shared.shares = schedule.shares;
  }
  if constexpr (has_many<C>)
    attend_to_blocks_of_many<C, T>(p, shared);
  else
    attend_to_token_blocks<C, T>(p, shared);
}

template <class Instance>
cudaError_t launch(const DecodeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(DecodeTensorsStorage<Instance::config>);
  const auto kernel = p.half ? decode_tensors<Instance, __half> : decode_tensors<Instance, __nv_bfloat16>;
  return launch_grid_with_shared_memory(kernel, p, ctas, DECODE_TENSORS_THREADS, bytes, stream);
}

}  // namespace fp8attn
