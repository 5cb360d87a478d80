// The blocks of tokens of another engine's cache: how a CTA loads them, and what is said of their scales.
#pragma once

#include "config.h"
#include "ptx/cp_async.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "tile/paged_parts.h"
#include "tile/schedule.h"
#include "tile/token_rows.h"

namespace fp8attn {

template <DecodeTensorsConfig C>
using TokenTilesOf = DecodeTiles<C.rows, TokenBlocks>;

template <DecodeTensorsConfig C>
constexpr int row_bytes = C.fp8 ? C.head_dim : 2 * C.head_dim;  // of a token, and of a query as it is multiplied

// The copies of a block: whole pages, or parts of one. `shift`: the logarithm of a copy's tokens.
struct TokenCopies {
  int tokens, shift, of_block;

  __device__ explicit TokenCopies(const DecodeParams& p) : tokens(p.copied_tokens), shift(3 + (tokens > 8) + (tokens > 16) + (tokens > 32)), of_block(TOKENS >> shift) {}
};

// What a warp loads: tokens, their scales if each has its own, or both.
enum class Loads { tokens, scales, all };

// One warp loads the blocks of all tiles of the CTA; or one their tokens, and one their scales.
template <DecodeTensorsConfig C, Loads WHAT, typename Storage>
__device__ void load_token_blocks(const DecodeParams& p, Storage& shared, TokenTilesOf<C> tile) {
  constexpr int ROW_BYTES = row_bytes<C>, PANEL = TokenPanels<ROW_BYTES>::PANEL;
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
      const uint32_t exist = __ballot_sync(~0u, found >= 0);
#pragma unroll 1
      for (int block = first, mine = 0; block < min(tile.end, first + blocks_of_lanes); ++block, mine += copies.of_block, ring.advance()) {
        const int stage = ring.stage;
        ptx::mbarrier_wait(&shared.empty[stage], ring.phase ^ 1);
        if constexpr (C.by_token && WHAT != Loads::tokens) {
#pragma unroll
          for (int i = lane; i < TOKENS; i += 32) {
            const int copy = mine + (i >> copies.shift);
            const int from = __shfl_sync(~0u, found, copy), slot = __shfl_sync(~0u, slot_of_copy, copy) + i % copies.tokens;
            const bool exists = from >= 0 && slot < p.page;
            ptx::cp_async(&shared.k_scale[stage][i], k_scales + (exists ? from * p.k_scale_strides[1] + slot * p.k_scale_strides[2] : 0), exists);
            ptx::cp_async(&shared.v_scale[stage][i], v_scales + (exists ? from * p.v_scale_strides[1] + slot * p.v_scale_strides[2] : 0), exists);
          }
          ptx::cp_async_arrive(&shared.full[stage]);
        }
        if constexpr (WHAT == Loads::scales) continue;
        // a lane makes the copy whose page it has found
        const int copy = lane - mine;
        if (copy == 0) {
          const uint32_t of_block = exist >> mine & ((1u << copies.of_block) - 1);
          shared.missing[stage] = ~of_block;
          ptx::mbarrier_expect(&shared.full[stage], 2 * (TOKENS * ROW_BYTES / copies.of_block) * __popc(of_block));
        }
        __syncwarp();
        if (copy < 0 || copy >= copies.of_block || found < 0) continue;
#pragma unroll
        for (int byte = 0; byte < ROW_BYTES; byte += PANEL) {
          const int to = byte * TOKENS + copy * copies.tokens * PANEL;
          ptx::tma_load(shared.k[stage] + to, p.k_map, &shared.full[stage], byte, slot_of_copy, found, tile.kv_head);
          ptx::tma_load(shared.v[stage] + to, p.v_map, &shared.full[stage], byte, slot_of_copy, found, tile.kv_head);
        }
      }
    }
  }
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

// What a row's sums are multiplied by, of a complete tile or a part of one. `restore`: V's scale.
__device__ inline float weight_of(float restore, bool complete, float l) { return restore * (!complete ? 1.0f : l == 0.0f ? 0.0f : 1.0f / l); }

// The first and the last token that a row of a tile sees; none if it isn't real.
template <typename Tile>
__device__ int2 tokens_seen(const DecodeParams& p, const Tile& tile, int row) {
  const int position = QueryRow(p, tile.row, tile.kv_head, tile.first_row() + row).position;
  return position < 0 ? int2{1 << 30, -1} : int2{first_seen(p, position), last_seen(p, position, tile.row.end)};
}

// What a score of a row is multiplied by, if not also by its token's scale. `row_scale`: of the tile's rows.
template <DecodeTensorsConfig C>
__device__ float scale_of_row(const DecodeParams& p, const float* row_scale, const TensorScales& scales, int row) {
  const float of_row = C.fp8 ? row_scale[row] : p.score_scale;
  return C.fp8 && !C.by_token ? score_factor(of_row * scales.k, false) : of_row;
}

// The sink of a row of a tile that begins with its first key, in base 2; or -inf.
template <typename Tile>
__device__ float sink_of(const DecodeParams& p, const Tile& tile, int row, int2 seen) {
  if (p.sinks == nullptr || tile.begin != 0 || seen.y < 0) return -INFINITE;
  return p.sinks[QueryRow(p, tile.row, tile.kv_head, tile.first_row() + row).head] * LOG2E;
}

}  // namespace fp8attn
