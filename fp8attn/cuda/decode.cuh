// Attention of few queries to a KV cache in pages, sm_90: `fp8attn/pages.py` defines it.
//
// A tile is 64 rows: the queries of all heads that share a key/value head. CTAs share the blocks of all tiles equally,
// whatever their lengths, which they read on the device. A block is a page of 128 keys in FP8, or 64 tokens in half
// precision; each takes 256 D bytes of shared memory. One warp loads blocks by TMA, as many ahead as there are stages.
// A warpgroup attends to them. Where CTAs share a tile, they store partial results, and a second kernel adds these in
// the order of the keys.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/warpgroup.h"
#include "tile/paged_rows.h"
#include "tile/products.h"

namespace fp8attn {

constexpr int DECODERS = 128;                 // threads that attend
constexpr int DECODE_THREADS = DECODERS + 32;  // and a warp that loads
constexpr int COMBINERS = 64;                 // threads of the second kernel, few, so that it fits beside the first one
constexpr int COMBINED_ROWS = COMBINERS / 32;  // a warp has a row

// The scales of a page. Both are 0 if it isn't there; V's scale is never 0 otherwise. K's is negative if an int8 key is
// not finite.
struct PageScales {
  float k, v;
};

template <DecodeConfig C>
struct DecodeShape {
  using Score = std::conditional_t<C.int8, int32_t, float>;  // of Q·Kᵀ
  using ScoreProduct = std::conditional_t<C.int8, ptx::WgmmaInt8<KEYS>, ptx::Wgmma<KEYS>>;
  static constexpr int panel = C.head_dim < 128 ? C.head_dim : 128;  // bytes of a row of K or Q in a panel
  static constexpr int panels = C.head_dim / panel;
  static constexpr int half_panels = 2 * C.head_dim / 128;  // of tokens in half precision
  static constexpr int block_bytes = KEYS * C.head_dim;     // of K or V
  static constexpr int channels = C.head_dim < 128 ? C.head_dim : 128;  // of one product P·V
  static_assert(HALF_BLOCK * 2 * C.head_dim == block_bytes);
};

template <DecodeConfig C>
struct alignas(1024) DecodeStorage {
  uint8_t k[C.stages][DecodeShape<C>::block_bytes], v[C.stages][DecodeShape<C>::block_bytes];
  uint8_t q[ROWS * C.head_dim];
  float row_scale[ROWS], mean_score[ROWS];
  PageScales scales[C.stages];
  uint8_t nonfinite[HALF_BLOCK];  // tokens of a block in half precision that are not finite
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
};

// One warp loads the blocks of all tiles of the CTA.
template <DecodeConfig C>
__device__ void load_blocks(const DecodeParams& p, DecodeStorage<C>& shared, DecodeTiles tile) {
  using S = DecodeShape<C>;
  const int lane = threadIdx.x % 32;
  Ring<C.stages> ring;
  while (tile.next()) {
    const int* pages = p.page_table + tile.batch * p.table_stride;
    const int pair = tile.row.sequence * p.kv_heads + tile.kv_head;
    for (int first = tile.begin; first < tile.end; first += 32) {
      // each lane finds one block; -1 is a page that isn't there
      const int mine = first + lane;
      int index = -1;
      PageScales scales = {};
      if (mine < min(tile.end, tile.blocks.pages)) {
        const int number = mine < p.table_width ? pages[mine] : -1;
        if (number >= 0 && number < p.every_page) {
          index = number * p.kv_heads + tile.kv_head;
          scales = {p.k_scale[index], p.v_page_scale[index]};
        }
      }
      for (int block = first; block < min(tile.end, first + 32); ++block, ring.advance()) {
        const int from = __shfl_sync(~0u, index, block - first), stage = ring.stage;
        const bool is_half = block >= tile.blocks.pages;
        uint64_t *const k_full = &shared.k_full[stage], *const v_full = &shared.v_full[stage];
        if (lane == 0) {
          ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
          ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
          if (is_half) {
            const int row = pair * RECENT + (tile.blocks.first_half + block - tile.blocks.pages) % (RECENT / HALF_BLOCK) * HALF_BLOCK;
            for (int i = 0; i < S::half_panels; ++i) ptx::tma_load(shared.k[stage] + i * HALF_BLOCK * 128, p.recent_k_map, k_full, i * 128, row);
            for (int i = 0; i < S::half_panels; ++i) ptx::tma_load(shared.v[stage] + i * HALF_BLOCK * 128, p.recent_v_map, v_full, i * 128, row);
          } else if (from >= 0) {
            for (int i = 0; i < S::panels; ++i) ptx::tma_load(shared.k[stage] + i * KEYS * S::panel, p.k_map, k_full, i * S::panel, from * KEYS);
            ptx::tma_load(shared.v[stage], p.v_map, v_full, 0, from * C.head_dim);
          }
        }
        // the scales arrive while the copies run, and are written before the barriers know of these
        const PageScales of_block = {__shfl_sync(~0u, scales.k, block - first), __shfl_sync(~0u, scales.v, block - first)};
        if (lane != 0) continue;
        shared.scales[stage] = of_block;
        if (is_half || from >= 0) {
          ptx::mbarrier_expect(k_full, S::block_bytes);
          ptx::mbarrier_expect(v_full, S::block_bytes);
        } else {
          ptx::mbarrier_arrive(k_full);
          ptx::mbarrier_arrive(v_full);
        }
      }
    }
  }
}

// Issues Q·Kᵀ of a page. Sums of int8 products start at ZERO_BITS.
template <DecodeConfig C>
__device__ void issue_page_scores(typename DecodeShape<C>::Score (&s)[KEYS / 2], const DecodeStorage<C>& shared, int stage) {
  using S = DecodeShape<C>;
  if constexpr (C.int8) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i] = ZERO_BITS;
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < S::panels; ++i) {
    const uint64_t q = ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.q + i * ROWS * S::panel));
    const uint64_t k = ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.k[stage] + i * KEYS * S::panel));
#pragma unroll
    for (int step = 0; step < S::panel / 32; ++step) {
      if (!C.int8 && i == 0 && step == 0)
        S::ScoreProduct::template run<false>(s, q, k);
      else
        S::ScoreProduct::template run<true>(s, ptx::operand_of(q, step, 32), ptx::operand_of(k, step, 32));
    }
  }
  ptx::wgmma_commit();
}

// Scores of int8 as floats. `nonfinite`: whether the page has keys that are not finite; their scores become NaN.
template <DecodeConfig C>
__device__ void float_scores(const int32_t (&sums)[KEYS / 2], float (&s)[KEYS / 2], const uint8_t* k, bool nonfinite, Fragment f) {
  static_assert(128 * 127 * C.head_dim < 1 << 22);
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) s[i] = __int_as_float(sums[i]) - ZERO;
  if (!nonfinite) return;
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i)
    if (k[ptx::swizzled<DecodeShape<C>::panel>(i / 4 * 8 + f.column + i % 2, 0)] == INT8_NAN) s[i] = NAN;
}

// Finds the tokens of a block in half precision that are not finite, and makes their V zero. What is there behind the
// last token may be NaN, too. Called by the warpgroup; two threads have a token.
template <DecodeConfig C, typename T>
__device__ void clear_nonfinite_tokens(DecodeStorage<C>& shared, int stage) {
  constexpr uint32_t EXPONENT = std::is_same_v<T, __half> ? 0x7C00 : 0x7F80, EXPONENTS = EXPONENT << 16 | EXPONENT;
  constexpr int CHUNKS = 2 * C.head_dim / 16 / 2;  // of 16 bytes, for each thread
  const int token = threadIdx.x / 2, first = threadIdx.x % 2 * CHUNKS;
  const auto at = [&](uint8_t* of, int chunk) {
    return reinterpret_cast<uint4*>(of + chunk / 8 * HALF_BLOCK * 128 + ptx::swizzled<128>(token, chunk % 8 * 16));
  };
  const auto has_nonfinite = [](uint4 x) {
    const auto found = [](uint32_t two) { return __vcmpeq2(two & EXPONENTS, EXPONENTS); };
    return (found(x.x) | found(x.y) | found(x.z) | found(x.w)) != 0;
  };
  bool nonfinite = false;
#pragma unroll 4
  for (int i = 0; i < CHUNKS; ++i) nonfinite |= has_nonfinite(*at(shared.k[stage], first + i)) | has_nonfinite(*at(shared.v[stage], first + i));
  nonfinite |= bool(__shfl_xor_sync(~0u, int(nonfinite), 1));
  shared.nonfinite[token] = nonfinite;
  if (nonfinite) {
    for (int i = 0; i < CHUNKS; ++i) *at(shared.v[stage], first + i) = {};
  }
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

// Stores the output of a thread's two rows and their LSE; or, if the CTA has a part of the tile, the partial results.
template <int DIM>
__device__ void store_rows(const DecodeParams& p, const DecodeTiles& tile, const PagedRows<DIM>& rows, Fragment f) {
  const int height = p.part_height, place = DecodeTiles::place(blockIdx.x, tile.begin == 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int mine = f.row + 8 * r;
    const QueryRow row(p, tile.row, tile.kv_head, tile.row_tile * ROWS + mine);
    const float l = quad_sum(rows.l[r]);
    if (!row.exists) continue;
    if (tile.complete()) {
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int64_t index = row.index(p, tile.batch);
#pragma unroll
      for (int j = 0; j < DIM / 8; ++j) store_pair(p, index * DIM + 8 * j + f.column, rows.o[4 * j + 2 * r] * inverse, rows.o[4 * j + 2 * r + 1] * inverse);
      if (f.column == 0) p.lse[index] = (rows.m[r] + log2f(l)) / LOG2E;
    } else {
      const int64_t at = int64_t(place) * height + mine;
#pragma unroll
      for (int j = 0; j < DIM / 8; ++j) *reinterpret_cast<float2*>(p.parts + at * DIM + 8 * j + f.column) = {rows.o[4 * j + 2 * r], rows.o[4 * j + 2 * r + 1]};
      if (f.column == 0) *reinterpret_cast<float2*>(p.part_rows + 2 * at) = {rows.m[r], l};
    }
  }
}

// Scores as floats: the sums, or what int8's were converted to.
__device__ inline float (&scores_of(float (&sums)[KEYS / 2], float (&)[1]))[KEYS / 2] { return sums; }
__device__ inline float (&scores_of(int32_t (&)[KEYS / 2], float (&converted)[KEYS / 2]))[KEYS / 2] { return converted; }

// A warpgroup attends to the blocks of all tiles of the CTA.
template <DecodeConfig C, typename T>
__device__ void attend_to_blocks(const DecodeParams& p, DecodeStorage<C>& shared, DecodeTiles tile) {
  using S = DecodeShape<C>;
  const Fragment f = Fragment::mine();
  const bool elected = threadIdx.x % 32 == 0;
  Ring<C.stages> ring;
  while (tile.next()) {
    const int height = min(p.q_heads / p.kv_heads * p.q_length - tile.row_tile * ROWS, ROWS);
    const bool active = int(threadIdx.x) / 32 * 16 < height;  // whether rows of the warp exist
    ptx::warpgroup_sync(1);                                    // nobody reads the last tile's queries any more
    quantize_queries<T, C.head_dim, S::panel, C.int8>(p, tile, shared.q, shared.row_scale, shared.mean_score);
    ptx::fence_proxy_async();
    ptx::warpgroup_sync(1);
    const HalfQueries<T> queries(p, tile, f);
    VisibleTokens visible[2];
    float row_scale[2], mean_score[2];
    bool nonfinite[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = min(f.row + 8 * r, height - 1);
      const QueryRow row(p, tile.row, tile.kv_head, tile.row_tile * ROWS + f.row + 8 * r);
      visible[r] = {max(row.position, 0) / KEYS * KEYS, row.position};
      row_scale[r] = shared.row_scale[mine], mean_score[r] = shared.mean_score[mine];
      nonfinite[r] = row.real && row_scale[r] != row_scale[r];
    }
    const int64_t pair = int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head;
    PagedRows<C.head_dim> rows;
    const auto restore = [&] { rows.restore(p.v_scale + pair * C.head_dim, p.v_mean + pair * C.head_dim, mean_score, f); };

    const int end_of_pages = min(tile.end, tile.blocks.pages);
    for (int block = tile.begin; block < end_of_pages; ++block, ring.advance()) {
      const int stage = ring.stage;
      const bool hidden[2] = {visible[0].begin <= block * KEYS, visible[1].begin <= block * KEYS};
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      const PageScales scales = shared.scales[stage];
      if (scales.v == 0.0f) {  // the page isn't there
#pragma unroll
        for (int r = 0; r < 2; ++r) rows.l[r] = hidden[r] ? rows.l[r] : NAN;
        ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
        if (elected) ptx::mbarrier_arrive(&shared.k_empty[stage]), ptx::mbarrier_arrive(&shared.v_empty[stage]);
        continue;
      }
      typename S::Score sums[KEYS / 2];
      float alpha[2] = {1.0f, 1.0f}, beta[2] = {};
      issue_page_scores<C>(sums, shared, stage);
      const float k_scale = C.int8 ? fabsf(scales.k) : scales.k;
      const float factor[2] = {score_factor(row_scale[0] * k_scale, false), score_factor(row_scale[1] * k_scale, false)};
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(sums);
      float converted[C.int8 ? KEYS / 2 : 1];
      if constexpr (C.int8) {
        float_scores<C>(sums, converted, shared.k[stage], scales.k < 0.0f, f);
        __syncwarp();  // all lanes have read the keys
      }
      auto& s = scores_of(sums, converted);
      if (elected) ptx::mbarrier_arrive(&shared.k_empty[stage]);
      uint32_t probabilities[KEYS / 32][4] = {};
      if (active) rows.softmax_of_page(s, factor, hidden, scales.v, probabilities, alpha, beta);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      const uint64_t v = ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[stage]));
#pragma unroll
      for (int channel = 0; channel < C.head_dim; channel += S::channels) {
        float fresh[S::channels / 2];
        issue_pv<S::channels>(fresh, probabilities, ptx::operand_of(v, channel, KEYS));
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(fresh);
#pragma unroll
        for (int i = 0; i < S::channels / 2; ++i) {
          float& o = rows.o[channel / 2 + i];
          o = fmaf(fresh[i], beta[i / 2 % 2], o * alpha[i / 2 % 2]);
        }
      }
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[stage]);
    }
    if (active && tile.begin < end_of_pages) restore();

    for (int block = max(tile.begin, tile.blocks.pages); block < tile.end; ++block, ring.advance()) {
      const int stage = ring.stage, start = (tile.blocks.first_half + block - tile.blocks.pages) * HALF_BLOCK;
      ptx::mbarrier_wait(&shared.k_full[stage], ring.phase);
      ptx::mbarrier_wait(&shared.v_full[stage], ring.phase);
      ptx::warpgroup_sync(1);  // nobody reads the last block's nonfinite tokens any more
      clear_nonfinite_tokens<C, T>(shared, stage);
      ptx::warpgroup_sync(1);
      if (active) rows.attend_to_half_block(shared.k[stage], shared.v[stage], shared.nonfinite, start, queries, visible, p.score_scale, f);
      ptx::fence_proxy_async();  // TMA writes V next
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(&shared.k_empty[stage]), ptx::mbarrier_arrive(&shared.v_empty[stage]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.l[r] = nonfinite[r] ? NAN : rows.l[r];
    if (active) store_rows(p, tile, rows, f);
  }
}

// The grid: p.ctas. T: of the queries and of tokens in half precision.
template <class Instance, typename T>
__global__ void __launch_bounds__(DECODE_THREADS, Instance::config.ctas) decode(const __grid_constant__ DecodeParams p) {
  constexpr DecodeConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeStorage<C>& shared = *reinterpret_cast<DecodeStorage<C>*>(bytes);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], 1);
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], DECODERS / 32);
      ptx::mbarrier_init(&shared.v_empty[stage], DECODERS / 32);
    }
    ptx::fence_barrier_init();
  }
  if (threadIdx.x == DECODERS) {
    ptx::tma_prefetch(p.k_map);
    ptx::tma_prefetch(p.v_map);
    ptx::tma_prefetch(p.recent_k_map);
    ptx::tma_prefetch(p.recent_v_map);
  }
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const DecodeSchedule schedule(p);
  const DecodeTiles tiles(schedule, blockIdx.x);
  if (threadIdx.x >= DECODERS)
    load_blocks<C>(p, shared, tiles);
  else
    attend_to_blocks<C, T>(p, shared, tiles);
}

// CTAs of the second kernel, for each tile.
__host__ __device__ inline int combining_ctas_of_tile(const DecodeParams& p) { return (p.part_height + COMBINED_ROWS - 1) / COMBINED_ROWS; }

// Adds the partial results of tiles that several CTAs share, in the order of the keys. Stores zeros for rows without
// blocks, or NaN if their sequence isn't there. The grid: combining_ctas_of_tile for each tile. A warp has a row.
template <class Instance>
__global__ void __launch_bounds__(COMBINERS) combine_decoded(const __grid_constant__ DecodeParams p) {
  constexpr int DIM = Instance::config.head_dim, PAIRS = DIM / 64;
  const int lane = threadIdx.x % 32, tile = blockIdx.x / combining_ctas_of_tile(p), mine = blockIdx.x % combining_ctas_of_tile(p) * COMBINED_ROWS + threadIdx.x / 32;
  const DecodeSchedule schedule(p);
  const int row_tile = tile % schedule.row_tiles, kv_head = tile / schedule.row_tiles % p.kv_heads, batch = tile / schedule.row_tiles / p.kv_heads;
  const BatchRow row(p, batch);
  const TileBlocks blocks(p, row, row_tile);
  const QueryRow query(p, row, kv_head, row_tile * ROWS + mine);
  int start = schedule.before(batch) + kv_head * schedule.of_head(row);
  for (int i = 0; i < row_tile; ++i) start += TileBlocks(p, row, i).size();
  const bool empty = blocks.size() == 0;
  const int first = empty ? 0 : schedule.cta_of(start), last = empty ? -1 : schedule.cta_of(start + blocks.size() - 1);
  ptx::wait_for_grids_before();
  if (first == last || mine >= p.part_height || !query.exists) return;
  const auto place = [&](int cta) { return int64_t(DecodeTiles::place(cta, cta == first)) * p.part_height + mine; };
  const auto row_of = [&](int cta) { return *reinterpret_cast<const float2*>(p.part_rows + 2 * place(cta)); };
  float largest = -INFINITE, sum = 0.0f, o[2 * PAIRS] = {};
  for (int cta = first; cta <= last; ++cta) largest = fmaxf(largest, row_of(cta).x);
#pragma unroll 4
  for (int cta = first; cta <= last; ++cta) {
    const float2 of_cta = row_of(cta);
    const float weight = ptx::exp2_approx(of_cta.x - finite_or_zero(largest));
    sum = fmaf(weight, of_cta.y, sum);
    const float* from = p.parts + place(cta) * DIM + 2 * lane;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 64 * i);
      o[2 * i] = fmaf(weight, pair.x, o[2 * i]), o[2 * i + 1] = fmaf(weight, pair.y, o[2 * i + 1]);
    }
  }
  if (query.real && !row.exists) sum = NAN;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int64_t index = query.index(p, batch);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) store_pair(p, index * DIM + 64 * i + 2 * lane, o[2 * i] * inverse, o[2 * i + 1] * inverse);
  if (lane == 0) p.lse[index] = (largest + log2f(sum)) / LOG2E;
}

template <class Instance>
cudaError_t launch(const DecodeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(DecodeStorage<Instance::config>);
  const auto kernel = p.half ? decode<Instance, __half> : decode<Instance, __nv_bfloat16>;
  const cudaError_t error = take_shared_memory(kernel, bytes);
  if (error != cudaSuccess) return error;
  const cudaError_t launched = launch_grid(kernel, p, ctas, DECODE_THREADS, bytes, stream);
  if (launched != cudaSuccess) return launched;
  const int row_tiles = (p.q_heads / p.kv_heads * p.q_length + ROWS - 1) / ROWS;
  return launch_grid(combine_decoded<Instance>, p, p.batches * p.kv_heads * row_tiles * combining_ctas_of_tile(p), COMBINERS, 0, stream);
}

}  // namespace fp8attn
