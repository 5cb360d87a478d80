// Attention to the KV cache of another engine, sm_90: `fp8attn/paged_tensors.py` defines it.
//
// The rows of a tile are the queries of all heads that share a key/value head. CTAs share the blocks of all tiles, as
// in decode.cuh. A block is 64 tokens, in e4m3 or half precision, row by row as the cache has them. One warp loads
// blocks by TMA, as many ahead as there are stages: pages of fewer tokens by several copies. To few queries a warpgroup
// attends by mma.sync (tile/token_rows.h), to many several do by wgmma (many_tensors.h).
#pragma once

#include "launch.h"
#include "many_tensors.h"
#include "ptx/grid.h"
#include "tensors_blocks.h"

namespace fp8attn {

// Whether the instance is for many queries.
template <DecodeTensorsConfig C>
constexpr bool has_many = C.rows == MANY_ROWS;

template <DecodeTensorsConfig C>
struct alignas(1024) FewStorage {
  static constexpr int threads = DECODERS + 32;  // of a CTA: a warpgroup attends, and a warp loads

  uint8_t k[C.stages][TOKENS * row_bytes<C>], v[C.stages][TOKENS * row_bytes<C>];
  uint8_t q[C.rows * row_bytes<C>];
  WarpExchange<C.rows> exchange;
  TokenExchange<C.by_token ? C.rows : 1> more;
  float row_scale[C.rows];
  int2 seen[C.rows];  // the first and the last token that a row sees; none of a row that isn't real
  float k_scale[C.by_token ? C.stages : 1][TOKENS], v_scale[C.by_token ? C.stages : 1][TOKENS];  // of the blocks' tokens, if each has its own
  int missing[C.stages];     // bit i: copy i of the block has no page
  TokenTilesOf<C> tiles[2];  // the warps' tile, and the next one, by turns
  UnitShares shares;
  bool is_last;  // whether the CTA is the last one to store its part of the tile
  uint64_t full[C.stages], empty[C.stages];

  __device__ void init(const DecodeParams&) {
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&full[stage], C.by_token ? 33 : 1);  // blocks, and each lane's scales
      ptx::mbarrier_init(&empty[stage], DECODER_WARPS);
    }
  }
};

template <DecodeTensorsConfig C>
struct DecodeTensorsStorage : std::conditional_t<has_many<C>, ManyStorage<C>, FewStorage<C>> {};

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

// Stores the rows' output and LSE; or, if the CTA has a part of the tile, the partial results. `restore`: V's scale.
// Called by all decoders.
template <DecodeTensorsConfig C, typename Rows, int GROUPS>
__device__ void store_token_rows(const DecodeParams& p, FewStorage<C>& shared, const TokenTilesOf<C>& tile, Rows& rows, float restore, Fragment f) {
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
    if (threadIdx.x < 4) store_sums(p, query, tile.batch, complete, part, m, l);
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

// Brings the queries of tile `turn`, and what its rows see, to shared memory, and finds the next tile. Called by all
// decoders.
template <DecodeTensorsConfig C, typename T>
__device__ void begin_tile(const DecodeParams& p, FewStorage<C>& shared, int turn) {
  const TokenTilesOf<C>& tile = shared.tiles[turn];
  int thread = threadIdx.x;
  compute_late(thread);
  if constexpr (C.fp8)
    quantize_queries<T, C.head_dim, false>(p, tile, false, shared.q, shared.row_scale, nullptr);
  else
    copy_queries<T, C.head_dim>(p, tile, shared.q);
  if (thread < C.rows) {
    shared.seen[thread] = tokens_seen(p, tile, thread);
  }
  ptx::warpgroup_sync(1);
  if (thread == DECODERS - 1) {
    TokenTilesOf<C> next = tile;
    next.next(p);
    shared.tiles[turn ^ 1] = next;
  }
}

// Calls body(tile, scales, f) for the CTA's tiles, with queries in shared memory. Called by all decoders. A tile is in
// shared memory: registers are scarce.
template <DecodeTensorsConfig C, typename T, typename Body>
__device__ __forceinline__ void for_tiles(const DecodeParams& p, FewStorage<C>& shared, Body&& body) {
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
__device__ __forceinline__ void attend_to_token_blocks(const DecodeParams& p, FewStorage<C>& shared) {
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
      Rows::for_queries([&](int group, int r) { factor[group][r] = scale_of_row<C>(p, shared.row_scale, of_all, QUERY_GROUP * group + f.column + r); });
      const bool nonfinite = nan_of_v[0] != 0.0f || nan_of_v[2] != 0.0f;
      rows.template attend<C.by_token>(s, shared.v[stage], factor, scales, nonfinite, shared.seen, (tile.blocks.first + block) * TOKENS, p.softcap, shared.exchange, shared.more, f);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[stage]);
    }
    store_token_rows<C, Rows, GROUPS>(p, shared, tile, rows, of_all.restore(), f);
    if (!tile.complete()) combine_parts<DIM>(p, shared, tile);
  });
}

// The grid: p.ctas. T: of the queries, and of a cache in half precision.
template <class Instance, typename T>
__global__ void __launch_bounds__(DecodeTensorsStorage<Instance::config>::threads, Instance::config.ctas) decode_tensors(const __grid_constant__ DecodeParams p) {
  constexpr DecodeTensorsConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeTensorsStorage<C>& shared = *reinterpret_cast<DecodeTensorsStorage<C>*>(bytes);
  if (threadIdx.x == 0) {
    shared.init(p);
    ptx::fence_barrier_init();
  }
  if constexpr (has_many<C>) {
    if (threadIdx.x < sizeof(shared.zeros) / 4) reinterpret_cast<uint32_t*>(shared.zeros)[threadIdx.x] = 0;
    ptx::fence_proxy_async();  // wgmma reads zeros
  }
  prefetch_inputs<T, C.head_dim, DecodeTensorsStorage<C>::threads>(p);
  if (threadIdx.x == DECODERS) {
    ptx::tma_prefetch(p.k_map);
    ptx::tma_prefetch(p.v_map);
  }
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  using Schedule = DecodeSchedule<C.rows, TokenBlocks>;
  if constexpr (has_many<C>) {
    using Shape = ManyShape<C>;
    const int warpgroup = ptx::uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (warpgroup < Shape::attenders) {
      ptx::registers_increase<Shape::registers>();
      attend_to_blocks_of_many<C, T>(p, shared, warpgroup);
    } else if (warpgroup == Shape::attenders) {
      ptx::registers_decrease<Shape::checker_registers>();
      check_blocks<C, T>(p, shared);
    } else {
      const Schedule schedule(p);  // with more registers than behind it
      TokenTilesOf<C> tiles(schedule, blockIdx.x);
      ptx::registers_decrease<Shape::loader_registers>();
      if (thread < Shape::preparers) {
        prepare_tiles<C, T>(p, shared, schedule.shares, tiles, thread);
      } else if (thread < Shape::loader) {
        load_token_blocks<C, Loads::scales>(p, shared, tiles);
      } else {
        load_token_blocks<C, Loads::tokens>(p, shared, tiles);
        store_empty_rows(p, C.head_dim);
      }
    }
  } else {
    const Schedule schedule(p);
    TokenTilesOf<C> tiles(schedule, blockIdx.x);
    if (threadIdx.x >= DECODERS) {
      load_token_blocks<C, Loads::all>(p, shared, tiles);
      store_empty_rows(p, C.head_dim);
      return;
    }
    if (threadIdx.x == 0) {
      tiles.next(p);
      shared.tiles[0] = tiles, shared.shares = schedule.shares;
    }
    attend_to_token_blocks<C, T>(p, shared);
  }
}

template <class Instance>
cudaError_t launch(const DecodeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(DecodeTensorsStorage<Instance::config>);
  const auto kernel = p.half ? decode_tensors<Instance, __half> : decode_tensors<Instance, __nv_bfloat16>;
  return launch_grid_with_shared_memory(kernel, p, ctas, DecodeTensorsStorage<Instance::config>::threads, bytes, stream);
}

}  // namespace fp8attn
