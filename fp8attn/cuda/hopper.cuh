// The Hopper kernel, sm_90a: TMA, wgmma in e4m3 and int8, warp specialisation, persistent.
//
// One producer thread streams queries, keys and values into shared memory. Each consumer warpgroup attends with 64 query rows.
// P stays in registers from accumulator to operand, because V's keys are stored in the order that makes the two register layouts
// the same. V has 8 more channels than the caller knows of, all ones: the tensor core sums the rows of P.
#pragma once

#include <type_traits>

#include "config.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/flag.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/warpgroup.h"
#include "block_mask.h"
#include "tile/added_mask.h"
#include "tile/attend.h"
#include "tile/tile_scales.h"
#include "tile/key_metadata.h"
#include "tile/mask.h"
#include "tile/nonfinite.h"
#include "tile/quantize.h"
#include "tile/schedule.h"
#include "tile/staged_output.h"
#include "tile/subnormal_softmax.h"
#include "tile/stream_k.h"

namespace fp8attn {

constexpr int TILES = 4;

template <HopperConfig C>
struct Shape {
  using Score = std::conditional_t<C.int8, int32_t, float>;  // of Q * K^T
  using ScoreProduct = std::conditional_t<C.int8, ptx::WgmmaInt8<KEYS>, ptx::Wgmma<KEYS>>;
  using StartProduct = std::conditional_t<C.int8, ptx::WgmmaUint8<KEYS>, void>;  // of what scores' sums start at
  // bytes of a row in one panel of Q and K: what a swizzle spans
  static constexpr int panel = C.head_dim % 128 == 0 ? 128 : C.head_dim % 64 == 0 ? 64 : 32;
  static constexpr int panels = C.head_dim / panel;
  // P * V goes in two parts where one fresh accumulator would be too large
  static constexpr int first = C.value_dim > 128 ? 128 : C.value_dim + ONES;
  static constexpr int second = C.value_dim > 128 ? C.value_dim - 128 + ONES : 0;
  // Or in more parts, one of which is added while the next is in the making: what int8's softmax takes longer at two consumers of so many channels is
  // made up for; e4m3's is level, and with three consumers of 128 channels 4 to 7 % slower.
  static constexpr bool adds_in_parts = C.int8 && second > 0 && !C.general && !C.masked;
  static constexpr int threads = 128 * (C.consumers + 1);
  static constexpr bool skips_blocks = C.general || C.masked;  // those blocks alone in which a mask shows something
  // Whether blocks out of the ordinary have a way of their own, so that all others meet one branch: 1 to 3 % of int8's time at 128 channels, which has
  // more of them than e4m3; nothing at 64, and e4m3 is 2 to 4 % slower for it.
  static constexpr bool branches_once = C.int8 && C.head_dim > 64 && !skips_blocks;
  // Whether values are waited for behind scores' wgmma, in whose shadow nobody sees it, and not once P is there: 1 to 3 %, of int8 up to 6 with few
  // consumers; with overlap e4m3 is up to 7 % slower for it, in two parts 2 %, and int8 above 128 channels up to 5 %.
  static constexpr bool values_first = !skips_blocks && (C.int8 ? C.head_dim <= 128 : !C.overlap && second == 0);
  // Whether Q's descriptors are made of one that stays, which ptxas else makes again for every block of int8: 2 % at 64 channels, with values first. For
  // e4m3's it has room, and with masks it would spill.
  static constexpr bool has_first_panel = C.int8 && values_first;
  // Whether a block's softmax is prepared behind its scores' wgmma, all but the first of which ptxas issues after that; or else before, while sums are
  // added, with a scale that has come with the values of the block before: 1 to 2 % faster, but 2 % slower in two parts.
  static constexpr bool prepares_late = C.overlap || second > 0 || skips_blocks;
  static constexpr int producer_registers = skips_blocks ? 65536 / threads / 8 * 8 * (C.consumers + 1) - C.consumers * C.registers : 24;  // what is left
  static constexpr int tile_rows = C.consumers * ROWS;
  static constexpr int output_boxes = C.value_dim > 64 ? 2 : 1;  // of each warp
  static constexpr int start = C.int8 && !C.general ? START<C.head_dim> : 0;  // of scores' accumulators
  static constexpr bool start_by_product = start > 0 && C.head_dim <= 128;      // of ones; by moves where issue slots aren't what is short
  static_assert(!start_by_product || start == START_STEP);
  static constexpr int largest = C.general ? 0 : LARGEST_PRODUCT<C.int8> * C.head_dim;  // of scores over their scales
  using RowSoftmax = std::conditional_t<C.int8, SubnormalSoftmax<C.exact, largest, start>, Softmax<C.exact, largest>>;
  // whether CTAs may share tiles; where registers are scarcest it would spill, and tiles of more than 128 channels gain nothing that pays for int8's spills
  static constexpr bool stream_k = !skips_blocks && C.consumers < 4 && !(C.int8 && second > 0);
  static constexpr int partials_ready = stream_k ? C.consumers * sizeof(Partial<first / 2, second == 0 ? 1 : second / 2>) : 0;  // by each of them
};

struct Ones {
  alignas(16) uint8_t ones[128];  // all bits of them
};

struct OnesAndWorkTiles : Ones {
  WorkTiles work_tiles;
};

template <class Metadata, int STAGES>
struct OnesAndKeys : Ones {
  Metadata keys[STAGES];
};

// Of a stage's block, which comes with its keys, and of the next one, which comes with its values. As far from the next stage's as a barrier, so that one
// address is both's.
struct alignas(sizeof(uint64_t)) BlockScales {
  float own, next;
};

template <HopperConfig C>
struct alignas(1024) SharedStorage {
  using Added = AddedMask<C.consumers, C.added && C.head_dim <= 128 ? 2 : 0>;

  uint8_t q[C.consumers][Shape<C>::panels][ROWS * Shape<C>::panel];
  uint8_t k[C.stages][Shape<C>::panels][KEYS * Shape<C>::panel];
  uint8_t v[C.stages][(C.value_dim + ONES) * KEYS];
  // not last: compute-sanitizer takes the product of ones, which reads 128 bytes again and again, for one of as many as a product can have
  std::conditional_t<Shape<C>::skips_blocks, OnesAndKeys<std::conditional_t<C.general, KeyMetadata<C.consumers>, MaskBits<C.consumers>>, C.stages>, OnesAndWorkTiles>
      side;
  [[no_unique_address]] Added added;
  OutputBoxes<Shape<C>::output_boxes> output[C.consumers];
  TileScales<C.value_dim> scales[C.consumers];
  WorkTile tiles[TILES];  // of this round and the next; consumers may be two rounds apart
  BlockScales k_scale[C.stages];
  uint64_t q_full[C.consumers], q_empty[C.consumers];
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
};

// Where the blocks of a work_tile end.
template <HopperConfig C>
__device__ int end_of(const WorkTile& work_tile) {
  return Shape<C>::stream_k ? work_tile.end : ALL_BLOCKS;
}

template <HopperConfig C>
__device__ int begin_of(const WorkTile& work_tile) {
  return Shape<C>::stream_k ? work_tile.begin : 0;
}

// The block behind the last that is loaded of a work_tile of a tile: for the last of its rows.
template <HopperConfig C>
__device__ int loaded_end(const Visible& visible, const Tile& tile, const WorkTile& work_tile) {
  return min(visible.blocks(tile.first_row + Shape<C>::tile_rows - 1), end_of<C>(work_tile));
}

// What the CTA does after `round`; first after -1.
template <HopperConfig C>
__device__ void write_next_work_tile(SharedStorage<C>& shared, const Schedule& schedule, int round) {
  WorkTile& next = shared.tiles[(round + 1) % TILES];
  if constexpr (Shape<C>::stream_k)
    shared.side.work_tiles.write_next(next, schedule, round);
  else
    static_cast<Tile&>(next) = schedule.at(round < 0 ? blockIdx.x : schedule.after(round));
}

// Returns once a tile's keys and values are there, for this thread and its copies.
__device__ inline void wait_until_ready(const Params& p, const Tile& tile) {
  while (ptx::load_acquire(p.ready + tile.batch * p.kv_heads + tile.kv_head) < p.ready_ctas) {}
  ptx::fence_proxy_async_all();
}

// All blocks of a tile, for calls without a mask.
struct DenseKvBlocks {
  int begin;

  __device__ int first() const { return begin; }
  __device__ int next(int block) const { return block; }
};

// One thread: queries of every tile and its blocks of K and V, in the order the consumers want them. Where a mask may hide some its warp, which finds out
// which ones it doesn't.
template <HopperConfig C>
__device__ void produce(const Params& p, SharedStorage<C>& shared, const Schedule& schedule) {
  using S = Shape<C>;
  const bool elected = !S::skips_blocks || threadIdx.x == 0;
  const Visible visible(p);
  ptx::tma_prefetch(p.q_map);
  ptx::tma_prefetch(p.k_map);
  ptx::tma_prefetch(p.v_map);
  ptx::tma_prefetch(p.out_map);
  const int64_t scale_step = p.k_group == KEYS ? p.k_scale_strides[2] : 0;  // scales of single keys are the consumers' to read
  Ring<C.stages> ring;
  // a barrier is told of its bytes once they are on their way and what else it stands for is written
  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    const std::conditional_t<S::skips_blocks, const Tile&, Tile> tile = shared.tiles[round % TILES];  // where registers are scarce it stays there
    for (int c = 0; c < C.consumers; ++c) {
      ptx::mbarrier_wait(&shared.q_empty[c], round & 1 ^ 1);  // and consumers are no more than a round behind, which read tiles
      if (C.fuse_q_quant || !elected) continue;
      for (int i = 0; i < S::panels; ++i)
        ptx::tma_load(shared.q[c][i], p.q_map, &shared.q_full[c], i * S::panel, tile.first_row + c * ROWS, tile.head, tile.batch);
      ptx::mbarrier_expect(&shared.q_full[c], ROWS * C.head_dim);
    }
    if (C.fuse_q_quant && p.ready != nullptr) wait_until_ready(p, tile);
    const int blocks = loaded_end<C>(visible, tile, shared.tiles[round % TILES]), begin = begin_of<C>(shared.tiles[round % TILES]);
    const float* k_scale = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1] + begin * scale_step;
    const auto scale_at = [](const float* at) { return C.fuse_q_quant ? __ldcg(at) : *at; };  // what this SM has near may be of before it was written
    auto kv_blocks = [&] {
      if constexpr (S::skips_blocks)
        return KvBlockIterator<C.consumers>(p, tile, blocks);
      else
        return DenseKvBlocks{begin};
    }();
    int n = kv_blocks.first(), after;
    KvBlock kv_block;
    const float unit = C.general ? 1.0f : p.score_scale;
    float next_scale = scale_at(k_scale += (n - begin) * scale_step);
    for (; n < blocks; n = after, ring.advance()) {
      const int stage = ring.stage;
      if constexpr (S::skips_blocks) kv_block = {n, 0, kv_blocks.mask(n)};
      after = kv_blocks.next(n + 1);
      if (!elected) continue;
      const float scale = next_scale;
      if (after < blocks) next_scale = scale_at(k_scale += (after - n) * scale_step);
      ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      if constexpr (S::skips_blocks) {
        kv_block.next = after;
        shared.side.keys[stage].kv_block = kv_block;
        if (after == blocks) write_next_work_tile<C>(shared, schedule, round);  // before K is there, for who brings the rest
      }
      for (int i = 0; i < S::panels; ++i)
        ptx::tma_load(shared.k[stage][i], p.k_map, &shared.k_full[stage], i * S::panel, n * KEYS, tile.kv_head, tile.batch);
      shared.k_scale[stage].own = unit * scale;
      ptx::mbarrier_expect(&shared.k_full[stage], KEYS * C.head_dim);
      ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
      ptx::tma_load(shared.v[stage], p.v_map, &shared.v_full[stage], n * KEYS, (tile.batch * p.kv_heads + tile.kv_head) * p.value_dim);
      if (!S::skips_blocks && after == blocks) write_next_work_tile<C>(shared, schedule, round);
      if constexpr (!S::prepares_late) shared.k_scale[stage].next = unit * next_scale;
      ptx::mbarrier_expect(&shared.v_full[stage], KEYS * C.value_dim);
    }
    if constexpr (S::skips_blocks) __syncwarp();  // who hasn't may read the next tile
    const Tile next = shared.tiles[(round + 1) % TILES];
    for (int i = 0; C.fuse_q_quant && elected && next.exists() && i < 2 * S::panels * C.consumers; ++i)
      ptx::tma_load_ahead(p.q_map, i / C.consumers * S::panel, next.first_row + i % C.consumers * ROWS, next.head, next.batch);
  }
  if (C.fuse_q_quant && p.ready != nullptr) ptx::wait_for_grids_before();  // who comes next counts on that they have ended
}

// Another warp of the producer's, where there is something of single keys: a thread brings it for each consumer, all of them scales.
template <HopperConfig C>
__device__ void load_key_metadata(const Params& p, SharedStorage<C>& shared) {
  const int lane = threadIdx.x % 32;
  const Visible visible(p);
  Ring<C.stages> ring;
  typename SharedStorage<C>::Added::Slot added;  // the lane's consumer's
  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    const Tile& tile = shared.tiles[round % TILES];
    const int blocks = loaded_end<C>(visible, tile, shared.tiles[round % TILES]);
    KvBlockIterator<C.consumers> kv_blocks(p, tile, blocks);
    for (int n = kv_blocks.first(); n < blocks; ring.advance()) {
      const KvBlock kv_block = {n, 0, kv_blocks.mask(n)};
      n = kv_blocks.next(n + 1);
      const int stage = ring.stage;
      uint64_t* full = &shared.k_full[stage];
      ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      auto& keys = shared.side.keys[stage];
      if (lane < C.consumers) ptx::mbarrier_expect(full, keys.load(p, tile, kv_block, lane, full));
      if constexpr (C.general) {
        if (p.k_group == 1) keys.load_scales(p, tile, kv_block.index * KEYS, full);
      }
      if (lane < C.consumers) shared.added.load(p, tile, kv_block, lane, added);
      if (n == blocks) ptx::mbarrier_wait(full, ring.phase);  // then the next tile is known
    }
  }
}

// Where the copy engine brings codes of Q.
struct NoQueries {};

// Issues Q * K^T for the keys of one stage; `first_panel`, if there is one, is the first of Q, `first_keys` are those of the first stage, `ones` what sums'
// start is a product of.
template <HopperConfig C>
__device__ void start_scores(typename Shape<C>::Score (&s)[KEYS / 2], SharedStorage<C>& shared, int consumer, int stage, uint64_t first_panel,
                             uint64_t first_keys, uint64_t ones) {
  using S = Shape<C>;
  if constexpr (S::start > 0 && !S::start_by_product) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i] = S::start;
  }
  ptx::wgmma_fence();
  if constexpr (S::start_by_product) S::StartProduct::template run<false>(s, ones, ones);
#pragma unroll
  for (int i = 0; i < S::panels; ++i) {
    const uint64_t q = S::has_first_panel ? ptx::operand_of(first_panel, i, sizeof(shared.q[0][0]))
                                          : ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.q[consumer][i]));
    const uint64_t k = ptx::operand_of(ptx::operand_of(first_keys, stage, sizeof(shared.k[0])), i, sizeof(shared.k[0][0]));
#pragma unroll
    for (int step = 0; step < S::panel / 32; ++step) {
      if (S::start == 0 && i == 0 && step == 0)
        S::ScoreProduct::template run<false>(s, q, k);
      else
        S::ScoreProduct::template run<true>(s, S::has_first_panel ? ptx::operand_of(q, step, 32) : q + 2 * step, ptx::operand_of(k, step, 32));
    }
  }
  ptx::wgmma_commit();
}

// Sums of P become NaN in rows that see an int8 key of block n that isn't finite. Without masks these are the rows that see the first such key.
template <int M, int FIRST, int SECOND>
__device__ void nan_rows_of_nonfinite_keys(const Params& p, const WarpgroupTile& wg_tile, int n, const int (&row_end)[M], Fragment f, float (&o)[FIRST], float (&o_second)[SECOND]) {
  const int nonfinite = first_nonfinite_key(p, wg_tile.tile, n * KEYS);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (nonfinite >= row_end[f.row + 8 * r]) continue;
    row_sum(o, o_second, r) = NAN;
  }
}

// Normalises a warpgroup's output and stores it, and its LSE. Sums of P stand behind the last channel.
template <int FIRST, int SECOND, int BOXES, typename Scales>
__device__ void store_tile(const Params& p, const WarpgroupTile& wg_tile, const float (&m)[2], const float (&o)[FIRST], const float (&o_second)[SECOND],
                           const Scales& scales, OutputBoxes<BOXES>& boxes, Fragment f) {
  constexpr bool parts = SECOND > 1;
  constexpr int CHANNELS = Scales::channels;
  const float l[2] = {row_sum(o, o_second, 0), row_sum(o, o_second, 1)};
  const StagedOutput<Scales, BOXES> output(p, wg_tile.tile, wg_tile.first_row(), scales, boxes, l);
  output.template store<0, parts ? 2 * FIRST : CHANNELS>(o);
  if constexpr (parts) output.template store<2 * FIRST, CHANNELS - 2 * FIRST>(o_second);
  store_lse(p, wg_tile, m, l, f);
}

// One warpgroup: attention of 64 queries of every tile. Scores of a block are in the making when the loop comes to it. T is what Q consists of
// before it is quantized here.
template <HopperConfig C, typename T>
__device__ void consume(const Params& p, SharedStorage<C>& shared, int consumer) {
  using S = Shape<C>;
  const Visible visible(p);
  const Fragment f = Fragment::mine();
  const bool elected = threadIdx.x % 32 == 0;  // each warp frees for itself what it has read, or if all its threads have read scales of keys, each of them
  const bool by_key = C.general && p.k_group == 1;
  typename SharedStorage<C>::Added::Slot added;
  auto& scales = shared.scales[consumer];
  Ring<C.stages> ring;
  // the shuffles keep the compiler from making them again for every block, and tell it that they are the warp's
  const uint64_t first_keys = __shfl_sync(~0u, ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.k[0][0])), 0);
  const uint64_t first_values = __shfl_sync(~0u, ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[0])), 0);
  const uint64_t ones = S::start_by_product ? __shfl_sync(~0u, ptx::wgmma_descriptor_of_one(ptx::shared_address(shared.side.ones)), 0) : 0;
  const uint64_t first_panel = S::has_first_panel ? __shfl_sync(~0u, ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.q[consumer][0])), 0) : 0;
  typename S::Score scores[KEYS / 2];
  float alpha[2];
  uint32_t probabilities[KEYS / 32][4];

  // each is asked for as soon as nobody needs the last tile's, in this order
  const auto load_rows = [&](const Tile& tile) {
    if (tile.exists() && C.fuse_q_quant)
      scales.find_row_ends(visible, tile.first_row + consumer * ROWS);
    else if (tile.exists())
      scales.load_rows(p, visible, tile, tile.first_row + consumer * ROWS);
    ptx::cp_async_commit();
  };
  const auto load_channels = [&](const Tile& tile) {
    if (tile.exists()) scales.load_channels(p, tile);
    ptx::cp_async_commit();
  };
  using HalfQueries = std::conditional_t<C.fuse_q_quant, Queries<C.head_dim, C.int8>, NoQueries>;
  const auto load_queries = [&](HalfQueries& queries, const Tile& tile) {
    if constexpr (C.fuse_q_quant) {
      const uint16_t* head = reinterpret_cast<const uint16_t*>(p.q) + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1];
      queries.load(head, p.q_strides[2], tile.first_row + consumer * ROWS, tile.exists() ? p.q_length : 0);
    }
  };
  const auto quantize_queries = [&](HalfQueries& queries, const Tile& tile) {
    if constexpr (C.fuse_q_quant) {
      if (!tile.exists()) return;
      const auto store = [&](int row, int column, uint4 codes) {
        *reinterpret_cast<uint4*>(shared.q[consumer][column / S::panel] + ptx::swizzled<S::panel>(row, column % S::panel)) = codes;
      };
      queries.template quantize<T>(scales.row_scale, store);
      ptx::fence_proxy_async();
    }
  };
  HalfQueries first_queries;
  load_queries(first_queries, shared.tiles[0]);
  load_rows(shared.tiles[0]);
  if constexpr (!C.fuse_q_quant) load_channels(shared.tiles[0]);
  quantize_queries(first_queries, shared.tiles[0]);
  if constexpr (C.fuse_q_quant) ptx::warpgroup_sync(1 + consumer);

  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    const WorkTile& work_tile = shared.tiles[round % TILES];
    const WarpgroupTile wg_tile(p, visible, work_tile, consumer, end_of<C>(work_tile));
    typename S::RowSoftmax softmax;
    float o[S::first / 2] = {}, o_second[S::second == 0 ? 1 : S::second / 2] = {};

    // what the next softmax step wants to know, found out while its scores are in the making
    float factor[2];
    bool int_max_ok, has_nonfinite_key;
    const auto read = [&](const float& scale) { return __shfl_sync(~0u, elected ? scale : 0.0f, 0); };  // who frees the stage reads it for all
    const auto prepare = [&](float k_scale) {
      has_nonfinite_key = C.int8 && k_scale < 0.0f;  // of scales of single keys never
      const float unit = !C.general || p.bias != nullptr ? 1.0f : p.score_scale;  // with a bias it is a factor of sums
      const float key_factor = unit * (by_key ? 1.0f : C.int8 ? fabsf(k_scale) : k_scale);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float product = scales.row_scale[f.row + 8 * r] * key_factor;
        factor[r] = C.general ? score_factor(product, !(unit > 0)) : fmaxf(product, 1 / LARGEST_FACTOR);
      }
      int_max_ok = softmax.prepare(factor);
    };
    const auto free_keys = [&] {
      if (S::skips_blocks || elected) ptx::mbarrier_arrive(&shared.k_empty[ring.stage]);
    };
    // of a stage's keys, before it is free; if nobody leaves out any it is the block before `after`
    const auto kv_block_of = [&](int stage, int after) -> KvBlock {
      if constexpr (S::skips_blocks)
        return shared.side.keys[stage].kv_block;
      else
        return {after - 1, after, 0};
    };
    // the last that a block's scores want of its keys
    const auto hide_masked = [&](float (&s)[KEYS / 2], const KvBlock& kv_block) {
      if constexpr (S::skips_blocks) {
        if (kv_block.hides(consumer)) shared.side.keys[ring.stage].hide(s, p, consumer, kv_block.to(consumer) & ANY_VISIBLE, f);
        free_keys();
      }
    };
    const auto make_probabilities = [&](float (&s)[KEYS / 2], const KvBlock& kv_block, bool use_int_max) {
      const int n = kv_block.index;
      if (S::skips_blocks && has_nonfinite_key) nan_nonfinite_keys(p, wg_tile.tile, n * KEYS, s, f);
      if constexpr (C.general) {
        const auto& keys = shared.side.keys[ring.stage];
        if (by_key) keys.scale_scores(s, f);
        if (p.bias != nullptr) keys.add_bias(s, factor, score_factor(p.score_scale, true), consumer, f);
        const bool adds = C.added && kv_block.to(consumer) & ANY_ADDED;
        if (adds) {
          const float natural[2] = {factor[0] * (1 / LOG2E), factor[1] * (1 / LOG2E)};
          shared.added.add(s, natural, p, wg_tile.tile, n, consumer, added, f);
          factor[0] = factor[1] = LOG2E;
        } else if (!(p.score_scale > 0)) {
          scale_by_row(factor, s);
        }
      }
      hide_masked(s, kv_block);
      if (n >= wg_tile.whole) hide(s, scales.row_end, n * KEYS, f);
      softmax.step(s, factor, use_int_max, probabilities, alpha);
    };
    // scores of the ring's block, the last before `after`, become probabilities
    const auto attend = [&](int after) {
      const KvBlock kv_block = kv_block_of(ring.stage, after);
      if constexpr (S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(scores);
      if constexpr (!S::skips_blocks) free_keys();
      if constexpr (C.int8) {
        float s[KEYS / 2];
        if (S::branches_once && int_max_ok && !has_nonfinite_key && kv_block.index < wg_tile.whole) {
          subnormals_of(scores, s);
          softmax.step_of_sums(s, factor, true, probabilities, alpha);
          return;
        }
        const bool use_int_max = int_max_ok && !S::branches_once;
        if (S::start > 0 && (use_int_max || softmax.takes_sums(factor)) && !(C.masked && has_nonfinite_key)) {
          subnormals_of(scores, s);
          hide_masked(s, kv_block);
          if (kv_block.index >= wg_tile.whole) hide(s, scales.row_end, kv_block.index * KEYS, f);
          softmax.step_of_sums(s, factor, use_int_max, probabilities, alpha);
        } else {
          convert(scores, S::start, s);
          make_probabilities(s, kv_block, S::start == 0 && int_max_ok);
        }
        if (!S::skips_blocks && has_nonfinite_key) nan_rows_of_nonfinite_keys(p, wg_tile, kv_block.index, scales.row_end, f, o, o_second);
      } else {
        make_probabilities(scores, kv_block, int_max_ok);
      }
    };
    // P * V of the ring's stage is added to the output; `meanwhile` issues PENDING groups behind it, `then` comes before it is added
    const auto add_values = [&]<int PENDING>(std::integral_constant<int, PENDING>, auto&& meanwhile, auto&& then) {
      if constexpr (!S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      const uint64_t v = ptx::operand_of(first_values, ring.stage, sizeof(shared.v[0]));
      if constexpr (S::adds_in_parts) {
        static_assert(S::prepares_late && !C.overlap);  // there is nothing to do meanwhile
        add_in_parts(o, o_second, alpha, probabilities, v);
      } else {
        float fresh[S::first / 2];
        start_values<S::first>(fresh, probabilities, v);
        meanwhile();
        ptx::wgmma_wait<PENDING>();
        ptx::wgmma_touch(fresh);
        then();
        promote(o, alpha, fresh);
        if constexpr (S::second > 0) {
          float fresh_second[S::second / 2];
          start_values<S::second>(fresh_second, probabilities, ptx::operand_of(v, S::first, KEYS));
          ptx::wgmma_wait<0>();
          ptx::wgmma_touch(fresh_second);
          promote(o_second, alpha, fresh_second);
        }
      }
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);
    };
    constexpr std::integral_constant<int, 0> none;
    constexpr std::integral_constant<int, 1> one;
    constexpr auto nothing = [] {};

    const auto wait_for_keys = [&](Ring<C.stages> at) { ptx::mbarrier_wait(&shared.k_full[at.stage], at.phase); };

    if constexpr (!C.fuse_q_quant) ptx::mbarrier_wait(&shared.q_full[consumer], round & 1);
    wait_for_keys(ring);
    int after = kv_block_of(ring.stage, begin_of<C>(work_tile) + 1).next;  // the block after the ring's
    start_scores<C>(scores, shared, consumer, ring.stage, first_panel, first_keys, ones);
    if constexpr (C.fuse_q_quant) load_channels(work_tile);  // not before the producer has seen that they are there
    ptx::cp_async_wait_but<1>();
    ptx::warpgroup_sync(1 + consumer);  // rows' scales are here
    prepare(read(shared.k_scale[ring.stage].own));
    // One place for all blocks: warps whose blocks are ordinary and those whose aren't must issue the same wgmma.
    while (after < wg_tile.seen) {
      const Ring<C.stages> next = ring.next();
      const auto start_next = [&] {
        wait_for_keys(next);
        start_scores<C>(scores, shared, consumer, next.stage, first_panel, first_keys, ones);
        if constexpr (S::prepares_late) prepare(read(shared.k_scale[next.stage].own));
      };
      attend(after);
      if constexpr (C.overlap) {
        add_values(one, start_next, nothing);
      } else if constexpr (S::prepares_late) {
        add_values(none, nothing, nothing);
        start_next();
      } else {
        float k_scale;
        add_values(none, [&] { k_scale = read(shared.k_scale[ring.stage].next); }, [&] { prepare(k_scale); });
        start_next();
      }
      ring = next;
      after = kv_block_of(ring.stage, after + 1).next;
    }
    attend(after);
    bool nonfinite[2] = {};  // rows of Q, while it is there
    if constexpr (C.int8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) nonfinite[r] = shared.q[consumer][0][ptx::swizzled<S::panel>(f.row + 8 * r, 0)] == INT8_NAN;
      __syncwarp();
    }
    if (elected) ptx::mbarrier_arrive(&shared.q_empty[consumer]);
    add_values(none, nothing, nothing);
    ring.advance();
    const int loaded = loaded_end<C>(visible, wg_tile.tile, work_tile);
    for (; after < loaded; ring.advance()) {  // for later rows of the tile
      wait_for_keys(ring);
      const KvBlock kv_block = kv_block_of(ring.stage, after + 1);
      after = kv_block.next;
      shared.added.skip(p, kv_block, consumer, added);
      free_keys();
      ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);
    }

    if constexpr (S::stream_k) {
      if (!work_tile.complete())
        store_partial(p, consumer, C.consumers, softmax.m, o, o_second);
      else
        reduce_partials(p, work_tile.first_other, consumer, C.consumers, softmax.m, o, o_second);
    }

    if constexpr (C.int8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) nan_if_nonfinite(row_sum(o, o_second, r), nonfinite[r]);
    }
    const Tile& next_tile = shared.tiles[(round + 1) % TILES];
    HalfQueries queries;
    load_queries(queries, next_tile);
    ptx::cp_async_wait();
    ptx::warpgroup_sync(1 + consumer);  // channels' are, and all are done with rows' and with Q
    load_rows(next_tile);
    if (!S::stream_k || work_tile.complete()) store_tile(p, wg_tile, softmax.m, o, o_second, scales, shared.output[consumer], f);
    quantize_queries(queries, next_tile);
    ptx::warpgroup_sync(1 + consumer);  // and with channels'
    if constexpr (!C.fuse_q_quant) load_channels(next_tile);
  }
  ptx::tma_store_wait<0>();
}

// Instance::config is the HopperConfig; a kernel's own template parameter can't be one, for which nvcc writes a broken stub.
template <class Instance, typename T>
__global__ void __launch_bounds__(Shape<Instance::config>::threads, 1) hopper_forward(const __grid_constant__ Params p) {
  constexpr HopperConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  SharedStorage<C>& shared = *reinterpret_cast<SharedStorage<C>*>(bytes);
  const Schedule schedule(p, Shape<C>::tile_rows, C.added && p.mask_batches == 1);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is the warp's

  for (int stage = 0; stage < C.stages; ++stage)
    for (int i = threadIdx.x * 4; i < ONES * KEYS; i += Shape<C>::threads * 4)
      *reinterpret_cast<uint32_t*>(&shared.v[stage][C.value_dim * KEYS + i]) = 0x38383838;  // 1.0 in e4m3
  if (Shape<C>::start_by_product && threadIdx.x < 32) reinterpret_cast<uint32_t*>(shared.side.ones)[threadIdx.x] = ~0u;
  if (threadIdx.x == 0) {
    if constexpr (Shape<C>::stream_k) shared.side.work_tiles.find(schedule);
    write_next_work_tile<C>(shared, schedule, -1);
    for (int c = 0; c < C.consumers; ++c) {
      ptx::mbarrier_init(&shared.q_full[c], 1);
      ptx::mbarrier_init(&shared.q_empty[c], 4);
    }
    shared.added.init();
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], Shape<C>::skips_blocks ? 1 + C.consumers + (p.k_group == 1 ? 32 : 0) : 1);
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], (Shape<C>::skips_blocks ? 128 : 4) * C.consumers);
      ptx::mbarrier_init(&shared.v_empty[stage], 4 * C.consumers);
    }
    ptx::fence_barrier_init();
  }
  ptx::fence_proxy_async();
  __syncthreads();
  if (!C.fuse_q_quant || p.ready == nullptr) ptx::wait_for_grids_before();  // else the one before has waited for all before it, and says itself what is there
  ptx::launch_dependents();

  if (warpgroup == 0) {
    ptx::registers_decrease<Shape<C>::producer_registers>();
    if (threadIdx.x < (Shape<C>::skips_blocks ? 32 : 1)) produce<C>(p, shared, schedule);
    if constexpr (Shape<C>::skips_blocks) {
      if (threadIdx.x / 32 == 1) load_key_metadata<C>(p, shared);
    }
  } else {
    ptx::registers_increase<C.registers>();
    consume<C, T>(p, shared, warpgroup - 1);
  }
}

// At most one CTA an SM: `ctas` of them. A programmatic dependent of what runs before it.
template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr HopperConfig C = Instance::config;
  static_assert(Shape<C>::partials_ready == Instance::partial_bytes);
  if constexpr (Shape<C>::skips_blocks) {
    const cudaError_t error = p.mask == nullptr ? cudaSuccess : build_block_mask(p, stream);
    if (error != cudaSuccess) return error;
  }
  constexpr int bytes = sizeof(SharedStorage<C>);
  using Half = std::conditional_t<C.fuse_q_quant, __half, __nv_bfloat16>;
  const auto kernel = p.half ? hopper_forward<Instance, Half> : hopper_forward<Instance, __nv_bfloat16>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas;
  config.blockDim = Shape<C>::threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace fp8attn
