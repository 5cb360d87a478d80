// The Hopper kernel's producer: one thread issues TMA loads of Q, K and V; a second warp loads metadata of keys.
#pragma once

#include "hopper_storage.h"
#include "ptx/cp_async.h"
#include "ptx/flag.h"
#include "ptx/grid.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"

namespace fp8attn {

// Returns once a tile's keys and values are there, for this thread and its copies.
__device__ inline void wait_until_ready(const Params& p, const Tile& tile) {
  while (ptx::load_acquire(p.ready + tile.batch * p.kv_heads + tile.kv_head) < p.ready_ctas) {}
  ptx::fence_proxy_async_all();
}

// All blocks of a tile, for calls without a mask.
struct DenseKvBlocks {
  __device__ int first(int begin) const { return begin; }
  __device__ int next(int block) const { return block; }
};

// The shard that a key block lies in, of calls whose one batch has its keys and values in shards: shard i is batch i of
// k_map. Other calls have one shard.
struct KvShard {
  const Params& p;
  int index = 0;

  __device__ KvShard(const Params& params, int block) : p(params) {
    while (ends_before(block)) ++index;
  }

  // Whether a block lies in the next shard, or behind that.
  __device__ bool ends_before(int block) const { return block >= (index + 1) * p.shard_blocks; }

  // The number of blocks before the shard.
  __device__ int first() const { return index * p.shard_blocks; }
};

// One thread loads Q of every tile and the tile's blocks of K and V, in the order in which the consumers want them. If
// a mask may hide blocks, the thread's whole warp runs this function: it finds the blocks that the mask doesn't hide.
template <HopperConfig C>
__device__ void produce(const Params& p, SharedStorage<C>& shared, const ScheduleOf<C>& schedule) {
  using S = Shape<C>;
  const bool elected = !S::skips_blocks || threadIdx.x == 0;
  constexpr bool sharded = !S::skips_blocks && !C.varlen;
  const SeqLen<C.varlen> lengths(p);
  ptx::tma_prefetch(p.q_map);
  ptx::tma_prefetch(p.k_map);
  ptx::tma_prefetch(p.v_map);
  ptx::tma_prefetch(p.out_map);
  // The producer does not step through scales of single keys: the consumers read those.
  const int64_t scale_step = p.k_group == KEYS ? p.k_scale_strides[2] : 0;
  Ring<C.stages> ring;
  // mbarrier_expect comes last: after the copies are issued and the other data that the barrier guards is written.
  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    // A reference where registers are scarce: the tile then stays in shared memory.
    const std::conditional_t<S::skips_blocks, const Tile&, std::conditional_t<C.varlen, const PackedTile&, Tile>> tile = shared.tiles[round % TILES];
    const auto& visible = lengths.visible(tile);
    for (int c = 0; c < C.consumers; ++c) {
      // This wait also keeps the consumers, which read shared.tiles, at most one round behind.
      ptx::mbarrier_wait(&shared.q_empty[c], round & 1 ^ 1);
      if (C.fuse_q_quant || !elected) continue;
      for (int i = 0; i < S::panels; ++i)
        ptx::tma_load(shared.q[c][i], p.q_map, &shared.q_full[c], i * S::panel, first_row_of(tile, c), query_head_of(tile, c), tile.batch);
      ptx::mbarrier_expect(&shared.q_full[c], ROWS * C.head_dim);
    }
    if (C.fuse_q_quant && p.ready != nullptr) wait_until_ready(p, tile);
    const int blocks = loaded_end<C>(visible, tile, shared.tiles[round % TILES]), begin = begin_of<C>(visible, tile, shared.tiles[round % TILES]);
    const float* k_scale = p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1] + (first_page(tile) + begin) * scale_step;
    // The quantizer may have written the scales while this grid ran. L1 may hold older values: read from L2.
    const auto scale_at = [](const float* at) { return C.fuse_q_quant ? __ldcg(at) : *at; };
    auto kv_blocks = [&] {
      if constexpr (S::skips_blocks)
        return KvBlockIterator<C.consumers>(p, tile, blocks);
      else
        return DenseKvBlocks();
    }();
    int n = kv_blocks.first(begin), after;
    KvBlock kv_block;
    KvShard shard(p, sharded ? begin : 0);
    if (sharded) k_scale += shard.index * p.next_shard_scales;
    const float unit = C.general ? 1.0f : p.score_scale;
    float next_scale = scale_at(k_scale += (n - begin) * scale_step);
    for (; n < blocks; n = after, shard.index += sharded && shard.ends_before(n), ring.advance()) {
      const int stage = ring.stage;
      if constexpr (S::skips_blocks) kv_block = {n, 0, kv_blocks.mask(n)};
      after = kv_blocks.next(n + 1);
      if (!elected) continue;
      const float scale = next_scale;
      if (sharded && shard.ends_before(after)) k_scale += p.next_shard_scales;
      if (after < blocks) next_scale = scale_at(k_scale += (after - n) * scale_step);
      ptx::mbarrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      if constexpr (S::skips_blocks) {
        kv_block.next = after;
        shared.side.keys[stage].kv_block = kv_block;
        // Written before K arrives: the other producer warp reads the next tile once K has arrived.
        if (after == blocks) write_next_work_tile<C>(shared, schedule, round);
      }
      for (int i = 0; i < S::panels; ++i)
        ptx::tma_load(shared.k[stage][i], p.k_map, &shared.k_full[stage], i * S::panel, first_key(tile) + (n - shard.first()) * KEYS, tile.kv_head, tile.batch + shard.index);
      shared.k_scale[stage].own = unit * scale;
      ptx::mbarrier_expect(&shared.k_full[stage], KEYS * C.head_dim);
      ptx::mbarrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
      ptx::tma_load(shared.v[stage], p.v_map, &shared.v_full[stage], first_value(tile) + (n - shard.first()) * KEYS,
                    (tile.batch * p.kv_heads + tile.kv_head) * p.value_dim + shard.index * p.shard_rows);
      if (!S::skips_blocks && after == blocks) {
        write_next_work_tile<C>(shared, schedule, round);
        if constexpr (S::mean_by_products) ptx::mbarrier_arrive(&shared.mean.next_tile[(round + 1) % 2]);
      }
      if constexpr (!S::prepares_late) shared.k_scale[stage].next = unit * next_scale;
      ptx::mbarrier_expect(&shared.v_full[stage], KEYS * C.value_dim);
    }
    if constexpr (S::skips_blocks) __syncwarp();  // who hasn't may read the next tile
    const std::conditional_t<C.varlen, const PackedTile&, Tile> next = shared.tiles[(round + 1) % TILES];
    for (int i = 0; C.fuse_q_quant && elected && next.exists() && i < 2 * S::panels * C.consumers; ++i)
      ptx::tma_load_ahead(p.q_map, i / C.consumers * S::panel, first_row_of(next, i % C.consumers), query_head_of(next, i % C.consumers), next.batch);
  }
  // The next grid waits for this grid only, and relies on the earlier grids having ended.
  if (C.fuse_q_quant && p.ready != nullptr) ptx::wait_for_grids_before();
}

// Another warp of the producer warpgroup, where tensor cores multiply Q by K's mean: turns the mean of every tile back.
// When the producer knows the next tile, the consumers have quantized Q of this one, so the mean before it is not
// needed.
template <HopperConfig C, typename T>
__device__ void turn_means_back(const Params& p, SharedStorage<C>& shared) {
  if (p.lse_mean == nullptr) return;
  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    const TileOf<C>& tile = shared.tiles[round % TILES];
    if (p.ready != nullptr) wait_until_ready(p, tile);
    if (has_keys(tile)) shared.mean.columns[round % 2].template turn_back<T>(mean_of<C.head_dim>(p, tile));
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.mean.full[round % 2]);
    ptx::mbarrier_wait(&shared.mean.next_tile[(round + 1) % 2], round / 2 % 2);
  }
}

// Another warp of the producer warpgroup, in instances that have metadata of single keys: one thread for each consumer
// loads what that consumer needs, and all threads load the scales.
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
    for (int n = kv_blocks.first(0); n < blocks; ring.advance()) {
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

}  // namespace fp8attn
