// The Hopper kernel's consumer warpgroups: the main loop over key blocks and the epilogue.
#pragma once

#include "hopper_storage.h"
#include "ptx/cp_async.h"
#include "ptx/mbarrier.h"
#include "ptx/tma.h"
#include "ptx/uniform.h"
#include "ptx/warpgroup.h"
#include "tile/nonfinite.h"
#include "tile/quantize.h"
#include "tile/score_mod.h"

namespace fp8attn {

// Stands for the queries of an instance that doesn't quantize them.
struct NoQueries {};

// Issues Q·Kᵀ for the keys of one stage. Descriptors: `first_panel` of Q's first panel, `first_keys` of the first
// stage's keys, `ones` of the operand of ones. int8's sums start at that operand's product with itself.
template <HopperConfig C>
__device__ void issue_qk(typename Shape<C>::Score (&s)[KEYS / 2], SharedStorage<C>& shared, int consumer, int stage, uint64_t first_panel,
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

// Bits of the first keys of 32.
__device__ inline uint32_t first_bits(int keys) { return keys < 32 ? (1u << max(keys, 0)) - 1 : ~0u; }

// Sums of P become NaN in rows that see a nonfinite int8 key of a block. Its keys are `k` in shared memory, and their
// numbers start at `start`. A row sees the keys from row_begin(row) to row_end[row]. Called by whole warps.
template <int PANEL, typename RowBegin, int M, int FIRST, int SECOND>
__device__ void nan_rows_of_nonfinite_keys(const uint8_t* k, int start, RowBegin&& row_begin, const int (&row_end)[M], Fragment f, float (&o)[FIRST], float (&o_second)[SECOND]) {
#pragma unroll 1
  for (int i = 0; i < KEYS; i += 32) {
    const uint32_t nonfinite = __ballot_sync(~0u, k[ptx::swizzled<PANEL>(i + int(threadIdx.x) % 32, 0)] == INT8_NAN);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = f.row + 8 * r;
      if (nonfinite & first_bits(row_end[row] - start - i) & ~first_bits(row_begin(row) - start - i)) row_sum(o, o_second, r) = NAN;
    }
  }
}

// What K's mean adds to the scores of a thread's two rows. Without keys, what it added to the CTA's last tile is there.
template <HopperConfig C>
__device__ float2 mean_scores_of(const Params& p, const SharedStorage<C>& shared, const TileOf<C>& tile, const WarpgroupTile& wg_tile, int consumer, Fragment f) {
  if constexpr (C.fuse_q_quant) {
    const auto& of_row = shared.mean_scores.of_row[consumer];
    return p.lse_mean != nullptr && has_keys(tile) ? float2{of_row[f.row], of_row[f.row + 8]} : float2{};
  } else {
    const int row = wg_tile.first_row() + f.row;
    return {mean_score(p, wg_tile.tile, row), mean_score(p, wg_tile.tile, row + 8)};
  }
}

// What the LSE of a thread's two rows is made of: their maxima, the sums of their P, and what K's mean adds to their
// scores.
struct RowSums {
  float m[2], l[2];
  float2 mean_scores;
};

// Normalises and stores the output. Sums of P stand behind the last channel. `sink`: of the head, if there are sinks.
// Gives `rows` the sums, and adds the sink to them.
template <HopperConfig C, typename RowEnd, int FIRST, int SECOND, int BOXES, typename Scales>
__device__ void store_tile(const Params& p, const WarpgroupTile& wg_tile, RowEnd&& row_end, RowSums& rows, const float (&o)[FIRST], const float (&o_second)[SECOND],
                           const float* sink, const Scales& scales, OutputBoxes<BOXES>& boxes) {
  constexpr bool parts = SECOND > 1;
  constexpr int CHANNELS = Scales::channels;
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.l[r] = row_sum(o, o_second, r);
  StagedOutput<Scales, BOXES, Shape<C>::stores_together, C.varlen> output(p, wg_tile.tile, wg_tile.first_row() + threadIdx.x % 128 / 32 * OUTPUT_ROWS, row_end, scales, boxes, rows.l);
  if (p.sinks != nullptr) {
    const float logit = *sink;
    output.set_weight(0, SinkRow::add<>(rows.m[0], rows.l[0], logit - rows.mean_scores.x).weight);
    output.set_weight(1, SinkRow::add<>(rows.m[1], rows.l[1], logit - rows.mean_scores.y).weight);
  }
  output.template store<0, parts ? 2 * FIRST : CHANNELS>(o);
  if constexpr (parts) output.template store<2 * FIRST, CHANNELS - 2 * FIRST>(o_second);
}

// One consumer warpgroup: attention of 64 query rows of every work tile. T is Q's dtype if the kernel quantizes it.
//
// Q·Kᵀ of a block is issued before the loop comes to the block. For each block: softmax_step (wait for Q·Kᵀ, mask, P
// and alpha), accumulate_pv (issue P·V, O = O * alpha + P·V), issue_next_qk.
template <HopperConfig C, typename T>
__device__ void consume(const Params& p, SharedStorage<C>& shared, int consumer) {
  using S = Shape<C>;
  const SeqLen<C.varlen> lengths(p);
  const Fragment f = Fragment::mine();
  // Arrives at barriers for its warp. Where all threads have read metadata of keys, each thread arrives itself.
  const bool elected = threadIdx.x % 32 == 0;
  const bool by_key = C.general && p.k_group == 1;
  typename SharedStorage<C>::Added::Slot added;
  auto& scales = shared.scales[consumer];
  Ring<C.stages> ring;
  const uint64_t first_keys = ptx::uniform(ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.k[0][0])));
  const uint64_t first_values = ptx::uniform(ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[0])));
  const uint64_t ones = S::start_by_product ? ptx::uniform(ptx::wgmma_descriptor_of_one(ptx::shared_address(shared.side.ones))) : 0;
  const uint64_t first_panel = S::has_first_panel ? ptx::uniform(ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.q[consumer][0]))) : 0;
  typename S::Score scores[KEYS / 2];
  float alpha[2];
  uint32_t probabilities[KEYS / 32][4];

  const auto first_row = [&](const TileOf<C>& tile) { return first_row_of(tile, consumer); };

  // loads for the next tile are issued in this order, each as soon as nobody reads the last tile's any more
  const auto load_rows = [&](const TileOf<C>& tile) {
    if (tile.exists() && C.fuse_q_quant)
      scales.find_row_ends(lengths.visible(tile), first_row(tile));
    else if (tile.exists())
      scales.load_rows(p, lengths.visible(tile), tile, consumer, first_row(tile), lengths.row_end(p, tile));
    ptx::cp_async_commit();
  };
  const auto load_channels = [&](const TileOf<C>& tile) {
    if (tile.exists()) scales.load_channels(p, tile);
    if constexpr (S::mean_by_products) {
      if (tile.exists() && p.sinks != nullptr && threadIdx.x % 128 == 0) ptx::cp_async(&shared.mean.sink[consumer], p.sinks + query_head_of(tile, consumer), true);
    }
    ptx::cp_async_commit();
  };
  const auto sink_of = [&](const TileOf<C>& tile) -> const float* {
    if constexpr (S::mean_by_products)
      return &shared.mean.sink[consumer];
    else
      return p.sinks + query_head_of(tile, consumer);
  };
  using HalfQueries = std::conditional_t<C.fuse_q_quant, Queries<C.head_dim, C.int8>, NoQueries>;
  const auto load_queries = [&](HalfQueries& queries, const TileOf<C>& tile) {
    if constexpr (C.fuse_q_quant) {
      const uint16_t* head = reinterpret_cast<const uint16_t*>(p.q) + tile.batch * p.q_strides[0] + query_head_of(tile, consumer) * p.q_strides[1];
      queries.load(head, p.q_strides[2], first_row(tile), tile.exists() ? lengths.row_end(p, tile) : 0);
    }
  };
  const auto wait_for_keys = [&](Ring<C.stages> at) { ptx::mbarrier_wait(&shared.k_full[at.stage], at.phase); };
  // Finds what K's mean adds to the scores of a tile's rows, by tensor cores.
  const auto multiply_by_mean = [&](const HalfQueries& queries, const TileOf<C>& tile, int round) {
    if constexpr (S::mean_by_products) {
      if (p.lse_mean == nullptr) return;
      ptx::mbarrier_wait(&shared.mean.full[round % 2], round / 2 % 2);
      if (has_keys(tile)) queries.template multiply<T>(shared.mean.columns[round % 2], p.score_scale * (1 / LOG2E), shared.mean_scores.of_row[consumer]);
    }
  };
  // Also multiplies them by K's mean, if that isn't done later.
  const auto quantize_queries = [&](HalfQueries& queries, const TileOf<C>& tile, int round) {
    if constexpr (C.fuse_q_quant) {
      if (!tile.exists()) return;
      const auto store = [&](int row, int column, uint4 codes) {
        *reinterpret_cast<uint4*>(shared.q[consumer][column / S::panel] + ptx::swizzled<S::panel>(row, column % S::panel)) = codes;
      };
      queries.template rotate<T>();
      if constexpr (S::mean_by_products) {
        queries.quantize(scales.row_scale, store);
        if (!S::multiplies_late) multiply_by_mean(queries, tile, round);
      } else {
        queries.quantize(scales.row_scale, store);
        const auto mean = KeyMeanQuarter::load(mean_of<C.head_dim>(p, tile) + QUARTER * queries.member(), p.lse_mean != nullptr && has_keys(tile));
        queries.multiply(mean, p.score_scale * (1 / LOG2E), shared.mean_scores.of_row[consumer]);
      }
      ptx::fence_proxy_async();
    }
  };
  HalfQueries queries;
  load_queries(queries, shared.tiles[0]);
  load_rows(shared.tiles[0]);
  if constexpr (!C.fuse_q_quant) load_channels(shared.tiles[0]);
  quantize_queries(queries, shared.tiles[0], 0);
  if constexpr (C.fuse_q_quant) ptx::warpgroup_sync(1 + consumer);

  for (int round = 0; shared.tiles[round % TILES].exists(); ++round) {
    const TileOf<C>& work_tile = shared.tiles[round % TILES];
    const auto& visible = lengths.visible(work_tile);
    const WarpgroupTile wg_tile(p, visible, work_tile, consumer, end_of<C>(work_tile), C.window);
    // of whose rows this consumer has some
    const std::conditional_t<C.varlen, const PackedTile&, const Tile&> whole_tile = [&]() -> const auto& {
      if constexpr (C.varlen)
        return work_tile;
      else
        return wg_tile.tile;
    }();
    typename S::RowSoftmax softmax;
    float2 capped_mean = {};  // what K's mean adds to the scores of the thread's rows, over the cap
    if constexpr (C.softcap) {
      const float2 mean = mean_scores_of<C>(p, shared, work_tile, wg_tile, consumer, f);
      capped_mean = {mean.x * p.inverse_softcap, mean.y * p.inverse_softcap};
    }
    float o[S::first / 2], o_second[S::second == 0 ? 1 : S::second / 2];

    // factors of the next softmax step, while its scores are computed
    float factor[2];
    bool int_max_ok, has_nonfinite_key;
    // The thread that frees the stage reads for its warp.
    const auto read = [&](const float& scale) { return __shfl_sync(~0u, elected ? scale : 0.0f, 0); };
    const auto prepare = [&](float k_scale) {
      has_nonfinite_key = C.int8 && k_scale < 0.0f;  // scales of single keys are never negative
      // With a bias, the softmax scale multiplies the sum of score and bias, and not the score alone.
      const float unit = !C.general || p.bias != nullptr ? 1.0f : p.score_scale;
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
    // the block in a stage whose keys aren't freed yet; where no block is skipped it is the one before `after`
    const auto kv_block_of = [&](int stage, int after) -> KvBlock {
      if constexpr (S::skips_blocks)
        return shared.side.keys[stage].kv_block;
      else
        return {after - 1, after, 0};
    };
    // the last use of the stage's metadata
    const auto apply_mask = [&](float (&s)[KEYS / 2], const KvBlock& kv_block) {
      if constexpr (S::skips_blocks) {
        if (kv_block.hides(consumer)) shared.side.keys[ring.stage].hide(s, p, consumer, kv_block.to(consumer) & ANY_VISIBLE, f);
        free_keys();
      }
    };
    const auto row_begin = [&](int row) { return C.window ? visible.begin(wg_tile.first_row() + row) : 0; };
    const auto hide_first_keys = [&](float (&s)[KEYS / 2], int n) {
      if constexpr (C.window) {
        if (n < wg_tile.edge) hide_before(s, row_begin, n * KEYS, f);
      }
    };
    const auto scores_to_p = [&](float (&s)[KEYS / 2], const KvBlock& kv_block, bool use_int_max) {
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
      apply_mask(s, kv_block);
      if (n >= wg_tile.whole) hide(s, scales.row_end, n * KEYS, f);
      hide_first_keys(s, n);
      if constexpr (C.softcap)
        softmax.step(p, s, factor, capped_mean, probabilities, alpha);
      else
        softmax.step(s, factor, use_int_max, probabilities, alpha);
    };
    // waits for Q·Kᵀ of the ring's block, the one before `after`; its scores become P and alpha
    const auto softmax_step = [&](int after) {
      const KvBlock kv_block = kv_block_of(ring.stage, after);
      if constexpr (S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(scores);
      if constexpr (!S::skips_blocks) {
        if constexpr (C.int8) {
          if (has_nonfinite_key) nan_rows_of_nonfinite_keys<S::panel>(shared.k[ring.stage][0], kv_block.index * KEYS, row_begin, scales.row_end, f, o, o_second);
        }
        free_keys();
      }
      if constexpr (C.int8 && C.softcap) {
        float s[KEYS / 2];
        convert(scores, S::start, s);
        scores_to_p(s, kv_block, false);
      } else if constexpr (C.int8) {
        float s[KEYS / 2];
        if (S::branches_once && int_max_ok && !has_nonfinite_key && kv_block.index < wg_tile.whole && (!C.window || kv_block.index >= wg_tile.edge)) {
          subnormals_of(scores, s);
          softmax.step_of_sums(s, factor, true, probabilities, alpha);
          return;
        }
        const bool use_int_max = int_max_ok && !S::branches_once;
        if (S::start > 0 && (use_int_max || softmax.takes_sums(factor)) && !(C.masked && has_nonfinite_key)) {
          subnormals_of(scores, s);
          apply_mask(s, kv_block);
          if (kv_block.index >= wg_tile.whole) hide(s, scales.row_end, kv_block.index * KEYS, f);
          hide_first_keys(s, kv_block.index);
          softmax.step_of_sums(s, factor, use_int_max, probabilities, alpha);
        } else {
          convert(scores, S::start, s);
          scores_to_p(s, kv_block, S::start == 0 && int_max_ok);
        }
      } else {
        scores_to_p(scores, kv_block, int_max_ok);
      }
    };
    // O = O * alpha + P·V of the ring's stage, which is then free. `behind` issues PENDING groups of wgmma behind P·V.
    // `before_add` runs before O is updated.
    const auto accumulate_pv = [&]<int PENDING>(std::integral_constant<int, PENDING>, auto&& behind, auto&& before_add) {
      if constexpr (!S::values_first) ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      const uint64_t v = ptx::operand_of(first_values, ring.stage, sizeof(shared.v[0]));
      if constexpr (S::adds_in_parts) {
        static_assert(S::prepares_late && !C.overlap);  // nothing is issued behind it
        add_in_parts<S::first + S::second>(probabilities, v, [&]<int PART>(std::integral_constant<int, PART>, auto& fresh) {
          rescale_and_add<PART * VALUE_PART / 2>(o, o_second, alpha, fresh);
        });
      } else {
        float fresh[S::first / 2];
        issue_pv<S::first>(fresh, probabilities, v);
        behind();
        ptx::wgmma_wait<PENDING>();
        ptx::wgmma_touch(fresh);
        before_add();
        rescale_and_add(o, alpha, fresh);
        if constexpr (S::second > 0) {
          float fresh_second[S::second / 2];
          issue_pv<S::second>(fresh_second, probabilities, ptx::operand_of(v, S::first, KEYS));
          ptx::wgmma_wait<0>();
          ptx::wgmma_touch(fresh_second);
          rescale_and_add(o_second, alpha, fresh_second);
        }
      }
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);
    };
    constexpr std::integral_constant<int, 0> none;
    constexpr std::integral_constant<int, 1> one;
    constexpr auto nothing = [] {};

    // Frees a block that only other rows of the tile attend to, and returns the one after it. A lane that still waits
    // when its warp frees a stage may miss the phase, and then waits for ever.
    const auto skip_block = [&](int block) {
      wait_for_keys(ring);
      const KvBlock kv_block = kv_block_of(ring.stage, block + 1);
      shared.added.skip(p, kv_block, consumer, added);
      __syncwarp();
      free_keys();
      ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase);
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);
      return kv_block.next;
    };

    if constexpr (!C.fuse_q_quant) ptx::mbarrier_wait(&shared.q_full[consumer], round & 1);
    if constexpr (C.window) {
      for (int n = begin_of<C>(visible, whole_tile, work_tile); n < wg_tile.begin; ring.advance()) n = skip_block(n);
    }
    wait_for_keys(ring);
    const int begin = C.window ? wg_tile.begin : begin_of<C>(visible, whole_tile, work_tile);
    int after = kv_block_of(ring.stage, begin + 1).next;  // the block after the ring's
    issue_qk<C>(scores, shared, consumer, ring.stage, first_panel, first_keys, ones);
    if constexpr (C.fuse_q_quant) {
      load_channels(work_tile);  // not before the producer has waited for the quantizer
    } else {
      ptx::cp_async_wait_but<1>();
      ptx::warpgroup_sync(1 + consumer);  // the rows' scales are there
    }
    prepare(read(shared.k_scale[ring.stage].own));
    if constexpr (S::multiplies_late) multiply_by_mean(queries, work_tile, round);
    // Not where O is declared: causal calls with 128 channels would take 1 % more clocks.
#pragma unroll
    for (float& x : o) x = 0.0f;
#pragma unroll
    for (float& x : o_second) x = 0.0f;
    // One loop for all blocks: all warps of the warpgroup must issue the same wgmma, whatever their rows need.
    while (after < wg_tile.seen) {
      const Ring<C.stages> next = ring.next();
      const auto issue_next_qk = [&] {
        wait_for_keys(next);
        issue_qk<C>(scores, shared, consumer, next.stage, first_panel, first_keys, ones);
        if constexpr (S::prepares_late) prepare(read(shared.k_scale[next.stage].own));
      };
      softmax_step(after);
      if constexpr (C.overlap) {
        accumulate_pv(one, issue_next_qk, nothing);
      } else if constexpr (S::prepares_late) {
        accumulate_pv(none, nothing, nothing);
        issue_next_qk();
      } else {
        float k_scale;
        accumulate_pv(none, [&] { k_scale = read(shared.k_scale[ring.stage].next); }, [&] { prepare(k_scale); });
        issue_next_qk();
      }
      ring = next;
      after = kv_block_of(ring.stage, after + 1).next;
    }
    softmax_step(after);
    bool nonfinite[2] = {};  // rows of Q, read before Q is freed
    if constexpr (C.int8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) nonfinite[r] = shared.q[consumer][0][ptx::swizzled<S::panel>(f.row + 8 * r, 0)] == INT8_NAN;
      __syncwarp();
    }
    if (elected) ptx::mbarrier_arrive(&shared.q_empty[consumer]);
    accumulate_pv(none, nothing, nothing);
    ring.advance();
    const int loaded = loaded_end<C>(visible, whole_tile, work_tile);
    for (; after < loaded; ring.advance()) after = skip_block(after);

    if constexpr (S::stream_k) {
      if (!work_tile.complete())
        store_partial(p, work_tile.range, consumer, C.consumers, softmax.m, o, o_second);
      else
        reduce_partials(p, work_tile, consumer, C.consumers, softmax.m, o, o_second);
    }

    if constexpr (C.int8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) nan_if_nonfinite(row_sum(o, o_second, r), nonfinite[r]);
    }
    RowSums rows = {{softmax.m[0], softmax.m[1]}};
    // Under a soft cap, the scores include them. They are read before those of the next tile replace them, and behind a
    // barrier where other warps have found them since the last one.
    const auto find_mean_scores = [&] { rows.mean_scores = C.softcap ? float2{} : mean_scores_of<C>(p, shared, work_tile, wg_tile, consumer, f); };
    if constexpr (!S::multiplies_late) find_mean_scores();
    const TileOf<C>& next_tile = shared.tiles[(round + 1) % TILES];
    load_queries(queries, next_tile);
    ptx::cp_async_wait();
    ptx::warpgroup_sync(1 + consumer);  // channels' scales are there; nobody reads rows' scales and Q any more
    load_rows(next_tile);
    if constexpr (S::multiplies_late) find_mean_scores();
    if (is_complete<C>(work_tile)) {
      const auto row_end = [&] { return lengths.row_end(p, work_tile); };
      store_tile<C>(p, wg_tile, row_end, rows, o, o_second, sink_of(work_tile), scales, shared.output[consumer]);
      store_lse(p, wg_tile, row_end, rows.m, rows.l, f, rows.mean_scores);
    }
    quantize_queries(queries, next_tile, round + 1);
    ptx::warpgroup_sync(1 + consumer);  // nobody reads channels' scales any more
    if constexpr (!C.fuse_q_quant) load_channels(next_tile);
  }
  ptx::tma_store_wait<0>();
}

}  // namespace fp8attn
