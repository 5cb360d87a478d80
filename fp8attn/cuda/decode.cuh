// Attention of few queries to a KV cache in pages, sm_90: `fp8attn/pages.py` defines it.
//
// The rows of a tile are the queries of all heads that share a key/value head. CTAs share the blocks of all tiles
// equally, whatever their lengths, which they read on the device. A block is a page of 128 keys in FP8, or 64 tokens
// in half precision; each takes 256 D bytes of shared memory. One warp loads blocks by TMA, as many ahead as there
// are stages. Four or eight warps attend. A warp has eight rows and whole blocks: if the tile has eight rows, warps
// have blocks in turn; if it has eight for each warp, all warps have all blocks. So warps wait for each other only at
// the end of a tile, where they add their sums. Where CTAs share a tile, they store partial results, and the last one
// to do so adds these, in the order of the keys. Where an SM has two CTAs, one attends while the other is between
// tiles.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/flag.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/warpgroup.h"
#include "tile/paged_rows.h"
#include "tile/schedule.h"

namespace fp8attn {

template <DecodeConfig C>
constexpr int DECODERS = 32 * C.warps;  // threads that attend
template <DecodeConfig C>
constexpr int DECODE_THREADS = DECODERS<C> + 64;  // and a warp that loads, and one that prefetches
template <DecodeConfig C>
constexpr int TILE_ROWS = QUERY_GROUP * C.warps;
template <DecodeConfig C>
using TilesOf = DecodeTiles<TILE_ROWS<C>>;
constexpr int SLICE_CHANNELS = 64;               // of the sums that warps exchange at once
constexpr int SLICE_PITCH = SLICE_CHANNELS + 4;  // floats; a warp's stores have no bank conflicts

// The scales of a page. Both are 0 if it isn't there; V's scale is never 0 otherwise. K's is negative if an int8 key is
// not finite.
struct PageScales {
  float k, v;
};

// What warps have for each of their eight rows.
template <typename T, int WARPS>
using OfWarps = T[WARPS][QUERY_GROUP];

template <DecodeConfig C>
struct alignas(1024) DecodeStorage {
  static constexpr int block_bytes = KEYS * C.head_dim;  // of K or V
  static_assert(HALF_BLOCK * 2 * C.head_dim == block_bytes);

  uint8_t k[C.stages][block_bytes], v[C.stages][block_bytes];
  union {
    uint8_t q[TILE_ROWS<C> * QUERY_PITCH<C.head_dim>];
    OfWarps<float[SLICE_PITCH], C.warps> sums;  // channels of O, once nobody reads the queries any more
  };
  float v_scale[C.head_dim], v_mean[C.head_dim];
  float row_scale[TILE_ROWS<C>], mean_score[TILE_ROWS<C>];
  int position[TILE_ROWS<C>];
  OfWarps<float, C.warps> m, l, weight;  // of the sums; `weight` makes them parts of the tile's
  PageScales scales[C.stages];
  TilesOf<C> tiles[2];  // the warps' tile, and the next one, by turns
  BlockShares shares;
  bool is_last;  // whether the CTA is the last one to store its part of the tile
  int issued;    // blocks whose loads are issued
  int started;   // whether the grids before have completed
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
};

constexpr int LINE = 128;  // bytes that a prefetch brings

// Brings into L2 what warps read before the blocks of a tile. Called by a warp.
template <typename T, int DIM, int HEIGHT>
__device__ void prefetch_tile(const DecodeParams& p, const DecodeTiles<HEIGHT>& tile) {
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
    const T* q = query_at<T>(p, tile.batch, QueryRow(p, tile.row, tile.kv_head, tile.first_row() + i));
    for (int channel = 0; channel < DIM; channel += ELEMENTS) ptx::prefetch_l2(q + channel);
  }
}

// How the warps share a tile: as many groups of eight rows, a power of two, and in each of these as many warps.
template <int WARPS>
struct WarpShares {
  int bits, groups, warps_of_group;

  __device__ explicit WarpShares(const DecodeParams& p)
      : bits((p.part_height > QUERY_GROUP) + (p.part_height > 2 * QUERY_GROUP) + (p.part_height > 4 * QUERY_GROUP)),
        groups(1 << bits),
        warps_of_group(WARPS >> bits) {}

  __device__ int group(int warp) const { return warp & (groups - 1); }

  __device__ int share(int warp) const { return warp >> bits; }
};

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
      const int mine = first + lane, number = mine < min(min(tile.end, tile.blocks.pages), p.table_width) ? pages[mine] : -1;
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
        ptx::store_relaxed_cta(&shared.issued, tile.before + block + 1);
      }
    }
    tile.next(p);
    if (tile.exists()) prefetch_tile<T, C.head_dim>(p, tile);  // warps come to it as many blocks later as there are stages
  }
}

// Waits until the loads of a block are issued. A warp that is more than `stages` blocks ahead must not wait for the
// block's barriers: they are two phases behind, where parity can't tell. What the block brings is ordered by these.
template <DecodeConfig C>
__device__ void wait_until_issued(const DecodeStorage<C>& shared, int place) {
  while (ptx::load_relaxed_cta(&shared.issued) <= place) {}
}

// Scores of int8 as floats. `nonfinite`: whether the page has keys that are not finite; their scores become NaN.
template <int DIM>
__device__ void float_scores(const int32_t (&sums)[KEYS / 16][4], float (&s)[KEYS / 16][4], const uint8_t* k, bool nonfinite, Fragment f) {
  static_assert(128 * 127 * DIM < 1 << 22);
#pragma unroll
  for (int t = 0; t < KEYS / 16; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[t][i] = __int_as_float(sums[t][i]) - ZERO;
  if (!nonfinite) return;
  int row = f.row;
  asm volatile("" : "+r"(row));  // or offsets are made before the loop over blocks, and spilled
#pragma unroll
  for (int t = 0; t < KEYS / 16; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (k[SharedTile<KEYS, KEY_PANEL<DIM>, true>::offset(16 * t + row + i / 2 * 8, 0)] == INT8_NAN) s[t][i] = NAN;
}

// Two channels of a row of the output.
__device__ inline void store_pair(const DecodeParams& p, int64_t index, float a, float b) {
  switch (p.out_type) {
    case OutType::bf16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + index) = __floats2bfloat162_rn(a, b);
      return;
    case OutType::f16:
      *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + index) = __floats2half2_rn(a, b);
      return;
    case OutType::f32:
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + index) = {a, b};
      return;
  }
}

// Adds the sums of the warps that share rows, and stores the rows' output and LSE; or, if the CTA has a part of the
// tile, the partial results. Called by all decoders.
template <DecodeConfig C>
__device__ void store_rows(const DecodeParams& p, DecodeStorage<C>& shared, const TilesOf<C>& tile, const PagedRows<C.head_dim>& rows, Fragment f) {
  constexpr int DIM = C.head_dim;
  const WarpShares<C.warps> shares(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = TilesOf<C>::place(blockIdx.x, tile.begin == 0);
  const auto row_of = [&](int index) { return QueryRow(p, tile.row, tile.kv_head, tile.first_row() + index); };
  const auto part_of = [&](int index) { return int64_t(place) * p.part_height + index; };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float l = column_sum(rows.l[r]);
    if (f.row == 0) shared.m[warp][f.column + r] = rows.m[r], shared.l[warp][f.column + r] = l;
  }
  ptx::warps_sync<DECODERS<C>>(1);  // nobody reads the queries any more, either
  if (threadIdx.x < TILE_ROWS<C>) {  // a thread weighs one row of one warp
    const int of_warp = threadIdx.x / QUERY_GROUP, query = threadIdx.x % QUERY_GROUP, group = shares.group(of_warp);
    float largest = -INFINITE, l = 0.0f;
    for (int other = group; other < C.warps; other += shares.groups) largest = fmaxf(largest, shared.m[other][query]);
    for (int other = group; other < C.warps; other += shares.groups)
      l = fmaf(ptx::exp2_approx(shared.m[other][query] - finite_or_zero(largest)), shared.l[other][query], l);
    const float weight = ptx::exp2_approx(shared.m[of_warp][query] - finite_or_zero(largest));
    shared.weight[of_warp][query] = !tile.complete() ? weight : l == 0.0f ? 0.0f : weight / l;
    const QueryRow row = row_of(group * QUERY_GROUP + query);
    if (shares.share(of_warp) == 0 && row.exists) {
      if (tile.complete())
        p.lse[row.index(p, tile.batch)] = (largest + log2f(l)) / LOG2E;
      else
        *reinterpret_cast<float2*>(p.part_rows + 2 * part_of(group * QUERY_GROUP + query)) = {largest, l};
    }
  }
#pragma unroll
  for (int slice = 0; slice < DIM; slice += SLICE_CHANNELS) {
    if (slice > 0) ptx::warps_sync<DECODERS<C>>(1);
#pragma unroll
    for (int t = 0; t < SLICE_CHANNELS / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) shared.sums[warp][f.column + i % 2][16 * t + f.row + i / 2 * 8] = rows.o[slice / 16 + t][i];
    ptx::warps_sync<DECODERS<C>>(1);
    // a warp adds whole rows, a lane two of their channels
#pragma unroll 1
    for (int mine = warp; mine < tile.height(p); mine += C.warps) {
      const int group = mine / QUERY_GROUP, query = mine % QUERY_GROUP;
      float a = 0.0f, b = 0.0f;
      for (int other = group; other < C.warps; other += shares.groups) {
        const float weight = shared.weight[other][query];
        const float2 pair = *reinterpret_cast<const float2*>(&shared.sums[other][query][2 * lane]);
        a = fmaf(weight, pair.x, a), b = fmaf(weight, pair.y, b);
      }
      if (tile.complete())
        store_pair(p, row_of(mine).index(p, tile.batch) * DIM + slice + 2 * lane, a, b);
      else
        *reinterpret_cast<float2*>(p.parts + part_of(mine) * DIM + slice + 2 * lane) = {a, b};
    }
  }
}

// Adds the parts of a tile that several CTAs share, in the order of the keys, in the last CTA that has stored its part.
// Called by all decoders. Not inlined: its loads would take registers from the loop over pages.
template <DecodeConfig C>
__device__ __noinline__ void combine_parts(const DecodeParams& p, DecodeStorage<C>& shared, const TilesOf<C>& tile) {
  constexpr int DIM = C.head_dim, TICKET_BITS = 10;  // of three row tiles at most; there are fewer CTAs
  constexpr int WIDTH = DIM < 128 ? 2 : 4, LOADS = DIM / 32 / WIDTH;  // floats of a load, and a lane's loads of a part
  constexpr int PARTS = DIM > 128 ? 8 : 32, SOME = 8;                 // whose loads are in flight together; skipped together
  using Load = std::conditional_t<WIDTH == 2, float2, float4>;
  const int lane = threadIdx.x % 32, start = shared.shares.begin(blockIdx.x) + tile.before;  // the tile's first block
  const int first = shared.shares.cta_of(start, blockIdx.x), last = shared.shares.cta_of(start + tile.blocks.size() - 1, blockIdx.x);
  ptx::warps_sync<DECODERS<C>>(1);
  if (threadIdx.x == 0) {
    int* ticket = p.tickets + tile.batch * p.kv_heads + tile.kv_head;
    const int shift = TICKET_BITS * tile.row_tile, count = last - first + 1;
    // releases the CTA's part, which its threads have stored before the barrier, and acquires the others'
    shared.is_last = (ptx::add_acq_rel(ticket, 1 << shift) >> shift & ((1 << TICKET_BITS) - 1)) == count - 1;
    if (shared.is_last) atomicAdd(ticket, int(0u - (uint32_t(count) << shift)));
  }
  ptx::warps_sync<DECODERS<C>>(1);
  if (!shared.is_last) return;
#pragma unroll 1
  for (int mine = threadIdx.x / 32; mine < tile.height(p); mine += C.warps) {
    const auto place = [&](int cta) { return TilesOf<C>::place(cta, cta == first) * p.part_height + mine; };
    float largest = -INFINITE, sum = 0.0f, o[LOADS][WIDTH] = {};
#pragma unroll 1
    for (int from = first; from <= last; from += 32) {  // each lane has the sums of one part
      const int parts = min(last + 1 - from, 32);
      const float2 of_part = lane < parts ? __ldcg(reinterpret_cast<const float2*>(p.part_rows + 2 * place(from + lane))) : float2{-INFINITE, 0.0f};
      float weight = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < parts; chunk += PARTS) {
        Load loads[PARTS][LOADS] = {};
        // all parts but the tile's first one have the first of their CTA's places
        const int here = place(from + chunk), next = TilesOf<C>::place(from + chunk + 1, false) * p.part_height + mine;
        const float* part = p.parts + WIDTH * lane;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          if (i % SOME == 0 && chunk + i >= parts) break;
          const int at = i == 0 ? here : next + 2 * (i - 1) * p.part_height;
#pragma unroll
          for (int j = 0; j < LOADS; ++j)
            if (chunk + i < parts) loads[i][j] = __ldcg(reinterpret_cast<const Load*>(part + at * DIM + 32 * WIDTH * j));
        }
        if (chunk == 0) {  // while these are in flight
          float m = fmaxf(largest, of_part.x);
#pragma unroll
          for (int distance = 16; distance > 0; distance /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, distance));
          const float kept = ptx::exp2_approx(largest - finite_or_zero(m));
          weight = ptx::exp2_approx(of_part.x - finite_or_zero(m));
          largest = m, sum *= kept;
#pragma unroll
          for (auto& of : o)
#pragma unroll
            for (float& x : of) x *= kept;
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          if (i % SOME == 0 && chunk + i >= parts) break;
          const float factor = __shfl_sync(~0u, weight, chunk + i);
          sum = fmaf(factor, __shfl_sync(~0u, of_part.y, chunk + i), sum);
#pragma unroll
          for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) o[j][k] = fmaf(factor, reinterpret_cast<const float*>(&loads[i][j])[k], o[j][k]);
        }
      }
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int64_t index = QueryRow(p, tile.row, tile.kv_head, tile.first_row() + mine).index(p, tile.batch);
#pragma unroll
    for (int j = 0; j < LOADS; ++j)
#pragma unroll
      for (int k = 0; k < WIDTH; k += 2) store_pair(p, index * DIM + WIDTH * (32 * j + lane) + k, o[j][k] * inverse, o[j][k + 1] * inverse);
    if (lane == 0) p.lse[index] = (largest + log2f(sum)) / LOG2E;
  }
}

// Stores zeros for the rows of tiles without blocks, or NaN if their sequence isn't there. CTAs share the tiles. Called
// by a warp.
template <int HEIGHT>
__device__ void store_empty_tiles(const DecodeParams& p, int dim) {
  const int lane = threadIdx.x % 32, of_head = row_tiles<HEIGHT>(p), of_batch = p.kv_heads * of_head;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.batches * of_batch; tile += p.ctas) {
    const int batch = tile / of_batch, kv_head = tile % of_batch / of_head, first_row = tile % of_head * HEIGHT;
    const BatchRow row(p, batch);
    if (TileBlocks(p, row, first_row, HEIGHT).size() > 0) continue;
#pragma unroll 1
    for (int index = first_row; index < min(p.group * p.q_length, first_row + HEIGHT); ++index) {
      const QueryRow query(p, row, kv_head, index);
      const bool nan = query.real && !row.exists;
#pragma unroll 1
      for (int channel = 2 * lane; channel < dim; channel += 64) store_pair(p, query.index(p, batch) * dim + channel, nan ? NAN : 0.0f, nan ? NAN : 0.0f);
      if (lane == 0) p.lse[query.index(p, batch)] = nan ? NAN : -INFINITE;
    }
  }
}

// Warps attend to the blocks of all tiles of the CTA. Their tile is in shared memory: registers are scarce.
template <DecodeConfig C, typename T>
__device__ void attend_to_blocks(const DecodeParams& p, DecodeStorage<C>& shared, TilesOf<C> tiles, BlockShares shares_of_ctas) {
  constexpr int DIM = C.head_dim;
  const Fragment f = Fragment::of_warp(0);
  const WarpShares<C.warps> shares(p);
  const int warp = threadIdx.x / 32, first_row = shares.group(warp) * QUERY_GROUP;
  const auto ring_at = [](int place) { return Ring<C.stages>{place % C.stages, uint32_t(place / C.stages) & 1}; };
  const auto release = [](uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barrier);
  };
  if (threadIdx.x == 0) {
    tiles.next(p);
    shared.tiles[0] = tiles, shared.shares = shares_of_ctas;
  }
  for (int turn = 0;; turn ^= 1) {
    ptx::warps_sync<DECODERS<C>>(1);  // nobody reads the last tile's sums any more
    const TilesOf<C>& tile = shared.tiles[turn];
    if (!tile.exists()) break;
    const int64_t pair = int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head;
    if (threadIdx.x < DIM / 4) {
      ptx::cp_async_16(shared.v_scale + 4 * threadIdx.x, p.v_scale + pair * DIM + 4 * threadIdx.x, true);
      ptx::cp_async_16(shared.v_mean + 4 * threadIdx.x, p.v_mean + pair * DIM + 4 * threadIdx.x, true);
    }
    quantize_queries<T, DIM, C.int8>(p, tile, shared.q, shared.row_scale, shared.mean_score);
    if (threadIdx.x < TILE_ROWS<C>) shared.position[threadIdx.x] = QueryRow(p, tile.row, tile.kv_head, tile.first_row() + threadIdx.x).position;
    ptx::cp_async_wait();
    ptx::warps_sync<DECODERS<C>>(1);
    if (threadIdx.x == DECODERS<C> - 1) {
      TilesOf<C> next = tile;
      next.next(p);
      shared.tiles[turn ^ 1] = next;
    }
    PagedRows<DIM> rows;
    const int end_of_pages = min(tile.end, tile.blocks.pages);
    int block = tile.begin + shares.share(warp);
    for (; block < end_of_pages; block += shares.warps_of_group) {
      const Ring<C.stages> ring = ring_at(tile.before + block);
      const int stage = ring.stage;
      const int* position = shared.position + first_row + f.column;
      const bool hidden[2] = {own_page(position[0]) <= block, own_page(position[1]) <= block};
      wait_until_issued(shared, tile.before + block);
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      const PageScales scales = shared.scales[stage];
      if (scales.v == 0.0f) {  // the page isn't there
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.l[r] = hidden[r] ? rows.l[r] : NAN;
        ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
        release(shared.k_empty[stage]), release(shared.v_empty[stage]);
        continue;
      }
      float s[KEYS / 16][4] = {};
      if constexpr (C.int8) {
        int32_t sums[KEYS / 16][4];
#pragma unroll
        for (auto& of : sums)
#pragma unroll
          for (int32_t& sum : of) sum = ZERO_BITS;
        multiply_keys<DIM, true>(sums, shared.k[stage], shared.q + first_row * QUERY_PITCH<DIM>);
        float_scores<DIM>(sums, s, shared.k[stage], scales.k < 0.0f, f);
      } else {
        multiply_keys<DIM, false>(s, shared.k[stage], shared.q + first_row * QUERY_PITCH<DIM>);
      }
      release(shared.k_empty[stage]);
      const float k_scale = C.int8 ? fabsf(scales.k) : scales.k;
      const float* row_scale = shared.row_scale + first_row + f.column;
      const float factor[2] = {score_factor(row_scale[0] * k_scale, false), score_factor(row_scale[1] * k_scale, false)};
      uint32_t probabilities[KEYS / 32][4];
      float alpha[2], beta[2];
      rows.softmax_of_page(s, factor, hidden, scales.v, probabilities, alpha, beta);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      rows.add_values(shared.v[stage], probabilities, alpha, beta);
      release(shared.v_empty[stage]);
    }
    if (tile.begin + shares.share(warp) < end_of_pages) rows.restore(shared.v_scale, shared.v_mean, shared.mean_score + first_row + f.column, f);

    for (; block < tile.end; block += shares.warps_of_group) {
      const Ring<C.stages> ring = ring_at(tile.before + block);
      const int stage = ring.stage, start = (tile.blocks.first_half + block - tile.blocks.pages) * HALF_BLOCK;
      const HalfQueries<T, DIM> queries(p, tile, first_row, f);
      wait_until_issued(shared, tile.before + block);
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      rows.attend_to_half_block(shared.k[stage], shared.v[stage], start, queries, shared.position + first_row + f.column, p.score_scale, f);
      release(shared.k_empty[stage]), release(shared.v_empty[stage]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = first_row + f.column + r;
      if (shared.position[mine] >= 0 && shared.row_scale[mine] != shared.row_scale[mine]) rows.l[r] = NAN;
    }
    store_rows(p, shared, tile, rows, f);
    if (!tile.complete()) combine_parts(p, shared, tile);
  }
}

// Brings into L2 what CTAs read first, and one after another. It may run before the grids before have completed, as it
// reads nothing. Warps of the grid share the rows of the batch.
template <typename T, int DIM, int THREADS>
__device__ void prefetch_inputs(const DecodeParams& p) {
  constexpr int NUMBERS = LINE / sizeof(int), ELEMENTS = LINE / sizeof(T);
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread * NUMBERS < p.batches) {
    ptx::prefetch_l2(p.lengths + thread * NUMBERS);
    if (p.counts != nullptr) ptx::prefetch_l2(p.counts + thread * NUMBERS);
    if (p.sequences != nullptr) ptx::prefetch_l2(p.sequences + thread * NUMBERS);
  }
#pragma unroll 1
  for (int batch = blockIdx.x + thread / 32 * p.ctas; batch < p.batches; batch += THREADS / 32 * p.ctas) {
#pragma unroll 1
    for (int page = lane * NUMBERS; page < p.table_width; page += 32 * NUMBERS) ptx::prefetch_l2(p.page_table + batch * p.table_stride + page);
    if (lane < p.kv_heads) ptx::prefetch_l2(p.tickets + batch * p.kv_heads + lane);
#pragma unroll 1
    for (int head = lane; head < p.q_heads; head += 32) {
      const T* q = static_cast<const T*>(p.q) + batch * p.q_strides[0] + head * p.q_strides[1];
#pragma unroll 1
      for (int query = 0; query < p.q_length; ++query, q += p.q_strides[2])
        for (int channel = 0; channel < DIM; channel += ELEMENTS) ptx::prefetch_l2(q + channel);
    }
  }
}

// Brings the CTA's first pages and their statistics into L2 while it waits for the grids before. They may still write
// lengths and page numbers, so that these may be any; results don't depend on what is prefetched. Called by a warp.
template <DecodeConfig C, typename T>
__device__ void prefetch_pages(const DecodeParams& p, const DecodeStorage<C>& shared, TilesOf<C> tile) {
  constexpr int PAGES = (64 << 10) / (2 * DecodeStorage<C>::block_bytes);
  tile.next(p);
  const int lane = threadIdx.x % 32, block = tile.begin + lane;
  if (!tile.exists()) return;
  prefetch_tile<T, C.head_dim>(p, tile);
  if (lane >= PAGES || block >= min(min(tile.end, tile.blocks.pages), p.table_width)) return;
  const int number = __ldcg(p.page_table + tile.batch * p.table_stride + block);
  if (number < 0 || number >= p.every_page || ptx::load_relaxed_cta(&shared.started)) return;
  const int from = number * p.kv_heads + tile.kv_head;
  ptx::prefetch_l2(p.k_scale + from);
  ptx::prefetch_l2(p.v_page_scale + from);
  for (int i = 0; i < C.head_dim; i += KEY_PANEL<C.head_dim>) ptx::tma_load_ahead(p.k_map, i, from * KEYS);
  ptx::tma_load_ahead(p.v_map, 0, from * C.head_dim);
}

// The grid: p.ctas. T: of the queries and of tokens in half precision.
template <class Instance, typename T>
__global__ void __launch_bounds__(DECODE_THREADS<Instance::config>, Instance::config.ctas) decode(const __grid_constant__ DecodeParams p) {
  constexpr DecodeConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeStorage<C>& shared = *reinterpret_cast<DecodeStorage<C>*>(bytes);
  if (threadIdx.x == 0) {
    const int readers = WarpShares<C.warps>(p).groups;
    shared.issued = shared.started = 0;
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], 2);  // keys and scales
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], readers);
      ptx::mbarrier_init(&shared.v_empty[stage], readers);
    }
    ptx::fence_barrier_init();
  }
  prefetch_inputs<T, C.head_dim, DECODE_THREADS<C>>(p);
  if (threadIdx.x == DECODERS<C>) {
    ptx::tma_prefetch(p.k_map);
    ptx::tma_prefetch(p.v_map);
    ptx::tma_prefetch(p.recent_k_map);
    ptx::tma_prefetch(p.recent_v_map);
  }
  __syncthreads();
  const bool prefetches = threadIdx.x >= DECODERS<C> + 32;
  if (!prefetches) {
    ptx::wait_for_grids_before();
    ptx::launch_dependents();
    if (threadIdx.x == DECODERS<C>) ptx::store_relaxed_cta(&shared.started, 1);
  }
  const DecodeSchedule<TILE_ROWS<C>> schedule(p);
  const TilesOf<C> tiles(schedule, blockIdx.x);
  if (prefetches) {
    prefetch_pages<C, T>(p, shared, tiles);
    ptx::wait_for_grids_before();
    ptx::launch_dependents();
    store_empty_tiles<TILE_ROWS<C>>(p, C.head_dim);
  } else if (threadIdx.x >= DECODERS<C>) {
    load_blocks<C, T>(p, shared, tiles);
  } else {
    attend_to_blocks<C, T>(p, shared, tiles, schedule.shares);
  }
}

template <class Instance>
cudaError_t launch(const DecodeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(DecodeStorage<Instance::config>);
  const auto kernel = p.half ? decode<Instance, __half> : decode<Instance, __nv_bfloat16>;
  const cudaError_t error = take_shared_memory(kernel, bytes);
  if (error != cudaSuccess) return error;
  return launch_grid(kernel, p, ctas, DECODE_THREADS<Instance::config>, bytes, stream);
}

}  // namespace fp8attn
