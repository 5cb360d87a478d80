// Attention of many queries to a KV cache in pages, sm_90a: `fp8attn/pages.py` defines it.
//
// The design is the Hopper kernel's: one producer warpgroup, consumer warpgroups of 64 query rows, persistent CTAs. A
// ring stage has a page, or 64 tokens in half precision, which take as many bytes. The producer maps blocks to pages. A
// consumer attends to its rows' own pages in half precision, and to the pages that they see in FP8.
#pragma once

#include "launch.h"
#include "prefill_producer.h"
#include "prefill_rows.h"
#include "ptx/grid.h"
#include "ptx/uniform.h"

namespace fp8attn {

// One consumer warpgroup: attention of 64 query rows of every tile. T: of queries and of tokens in half precision.
template <PrefillConfig C, typename T>
__device__ void attend_to_tiles(const PrefillParams& params, PrefillStorage<C>& shared, int consumer) {
  using S = PrefillShape<C>;
  using PageTile = typename S::PageTile;
  constexpr int K_STAGE = sizeof(shared.k[0]), V_STAGE = sizeof(shared.v[0]);
  const Params& p = params.call;
  const Fragment f = Fragment::mine();
  const bool elected = threadIdx.x % 32 == 0, leads = threadIdx.x % 128 == 0;
  auto& scales = shared.scales[consumer];
  Ring<C.stages> ring;
  const uint64_t first_keys = ptx::uniform(ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.k[0])));
  const uint64_t first_values = ptx::uniform(ptx::wgmma_descriptor<KEYS>(ptx::shared_address(shared.v[0])));
  const uint64_t codes_of_q = ptx::uniform(ptx::wgmma_descriptor<S::panel>(ptx::shared_address(shared.q[consumer][0])));

  const auto load_channels = [&](const PageTile& tile) {
    if (tile.exists()) scales.load_channels(p, tile);
    ptx::cp_async_commit();
  };
  const auto find_row_ends = [&](const PageTile& tile) {
    const typename S::Range range(params, tile, consumer);
    if (threadIdx.x % 128 < ROWS) scales.row_end[threadIdx.x % 128] = tile.exists() ? range.row_end(threadIdx.x % 128) : 0;
  };
  // Of the channels whose scales this thread has loaded: others may not be there yet.
  const auto find_inverse_scales = [&] {
    constexpr float factor = decltype(PrefillRows<C>::softmax)::BEHIND;
    for (int x = threadIdx.x % 128; x < C.head_dim; x += 128) shared.inverse_scale[consumer][x] = factor / scales.channel_scale[x];
  };
  using HalfQueries = Queries<C.head_dim, C.int8>;
  const auto load_queries = [&](HalfQueries& queries, const PageTile& tile) {
    const typename S::Range range(params, tile, consumer);
    const uint16_t* const first = reinterpret_cast<const uint16_t*>(p.q) + tensor_batch(tile) * p.q_strides[0] + tensor_row(tile) * p.q_strides[2];
    // Rows that are no tokens repeat the last one: the scores of zeros would take the softmax's branch for rows whose
    // scores are all negative.
    queries.load(tile.exists() && tile.count > 0, [&](int row) { return first + min(range.head_of(row), tile.heads_end - 1) * p.q_strides[1] + min(range.query(row), tile.count - 1) * p.q_strides[2]; });
  };
  const auto quantize_queries = [&](HalfQueries& queries, const PageTile& tile) {
    if (!tile.exists()) return;
    queries.template rotate<T>();
    const bool has_mean = tile.pages > 0;  // else the sequence may have none yet
    const auto mean = KeyMeanQuarter::load(mean_of<C.head_dim>(p, tile) + QUARTER * queries.member(), has_mean);
    queries.quantize(scales.row_scale, [&](int row, int column, uint4 codes) {
      *reinterpret_cast<uint4*>(shared.q[consumer][column / S::panel] + ptx::swizzled<S::panel>(row, column % S::panel)) = codes;
    });
    queries.multiply(mean, p.score_scale, shared.mean_score[consumer]);
    ptx::fence_proxy_async();
  };
  // Panels `from` ... `to` - 1 of the tile's queries as they came.
  const auto load_half_queries = [&](const PageTile& tile, int from, int to) {
    for_units(params, tile, consumer, [&](int unit, int head, int row) {
      for (int panel = from; panel < to; ++panel)
        ptx::tma_load(shared.half_queries(consumer, panel) + (unit << params.unit_log) * HALF_ROW, p.q_map, &shared.half_queries_full[consumer], panel * HALF_ROW, tensor_row(tile) + row, head, tensor_batch(tile));
    });
  };
  static_assert(S::early_panels <= S::half_panels);
  // Once no output is staged there any more.
  const auto fetch_half_queries = [&](const PageTile& tile) {
    if (C.packed || elected) ptx::tma_store_wait<0>();
    ptx::warpgroup_sync(1 + consumer);
    if (!leads || !tile.exists()) return;
    load_half_queries(tile, 0, S::early_panels);
    ptx::mbarrier_expect(&shared.half_queries_full[consumer], S::half_panels * ROWS * HALF_ROW);
  };

  fetch_half_queries(shared.tiles[0]);
  HalfQueries first_queries;
  load_queries(first_queries, shared.tiles[0]);
  find_row_ends(shared.tiles[0]);
  load_channels(shared.tiles[0]);
  quantize_queries(first_queries, shared.tiles[0]);

  for (int round = 0; shared.tiles[round % shared.TILES].exists(); ++round) {
    const PageTile& tile = shared.tiles[round % shared.TILES];
    const typename S::Range pages_of_rows(params, tile, consumer);
    PrefillRows<C> rows;
    typename S::Score sums[KEYS / 2];
    float factor[2], beta[2];
    uint32_t probabilities[KEYS / 32][4];
    bool in_range, missing, has_nonfinite_key;

    const auto wait_for_keys = [&](Ring<C.stages> at) { ptx::mbarrier_wait(&shared.k_full[at.stage], at.phase); };
    const auto wait_for_values = [&] { ptx::mbarrier_wait(&shared.v_full[ring.stage], ring.phase); };
    // A lane that still waits when its warp frees a stage may miss the phase, and then waits for ever.
    const auto free_keys = [&] {
      if (elected) ptx::mbarrier_arrive(&shared.k_empty[ring.stage]);
    };
    const auto free_values = [&] {
      if (elected) ptx::mbarrier_arrive(&shared.v_empty[ring.stage]);
    };
    const auto skip_block = [&] {
      wait_for_keys(ring);
      __syncwarp();
      free_keys();
      wait_for_values();
      __syncwarp();
      free_values();
    };
    // The thread that frees the stage reads for its warp.
    const auto read = [&](const float& scale) { return __shfl_sync(~0u, elected ? scale : 0.0f, 0); };
    const auto issue_scores = [&](int stage) { issue_page_scores<C>(sums, codes_of_q, ptx::operand_of(first_keys, stage, K_STAGE)); };
    // What the next softmax needs, while its scores are computed.
    const auto prepare = [&](float k_scale) {
      missing = k_scale == MISSING_PAGE, has_nonfinite_key = C.int8 && k_scale < 0.0f && !missing;
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = fmaxf(scales.row_scale[f.row + 8 * r] * fabsf(k_scale), 1 / LARGEST_FACTOR);
      if constexpr (!C.capped) in_range = rows.softmax.in_range(factor);
    };
    const auto scores_to_p = [&](float (&scores)[KEYS / 2], int page) {
      free_keys();
      if constexpr (C.capped) {
        const float* mean = shared.mean_score[consumer] + f.row;
#pragma unroll
        for (float& of_row : factor) of_row = fminf(of_row, LARGEST_FACTOR);
        cap_scores(scores, factor, {mean[0] / LOG2E, mean[8] / LOG2E}, p.softcap);
        in_range = rows.softmax.in_range(factor);
      }
      if (page >= pages_of_rows.whole || page < pages_of_rows.edge || missing) {  // one branch, which is rare
#pragma unroll
        for (float& score : scores) score = missing ? NAN : score;
        hide(scores, scales.row_end, page * KEYS, f);
        const auto begin = [&](int row) {
          const int position = pages_of_rows.position(row), first = first_key_of(params, position);
          return page < params.table_width || first >= position / KEYS * KEYS ? first : 0;  // the page behind the table is all that aren't there
        };
        if (page < pages_of_rows.edge) hide_before(scores, begin, page * KEYS, f);
      }
      rows.softmax.step(scores, factor, in_range, probabilities, beta, [&](const float (&alpha)[2]) { rows.rescale(alpha); });
    };
    // Waits for Q·Kᵀ of the ring's page; its scores become P and beta.
    const auto softmax_step = [&](int page) {
      if constexpr (!S::prepares_late) wait_for_values();
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(sums);
      if constexpr (C.int8) {
        float scores[KEYS / 2];
        float_scores<C>(sums, scores, shared.k[ring.stage], has_nonfinite_key, f);
        __syncwarp();  // all lanes have read keys
        scores_to_p(scores, page);
      } else {
        scores_to_p(sums, page);
      }
    };
    // Adds P·V of the ring's page, and prepares the next softmax.
    const auto accumulate_pv = [&] {
      if constexpr (S::prepares_late) wait_for_values();
      rows.add_page(probabilities, ptx::operand_of(first_values, ring.stage, V_STAGE), beta, [&] {
        const float2 scales = *reinterpret_cast<const float2*>(&shared.page_scales[ring.stage]);
        if constexpr (!S::prepares_late) prepare(scales.y);
        return scales.x;
      });
      __syncwarp();  // all lanes have read scales
      free_values();
    };

    const auto attend_to_pages = [&] {
      int page = tile.first_page;
      for (; page < pages_of_rows.begin; ++page, ring.advance()) skip_block();
      if (pages_of_rows.seen > page) {
        wait_for_keys(ring);
        issue_scores(ring.stage);
        prepare(read(shared.page_scales[ring.stage].k));
        // One loop for all pages: all warps of the warpgroup must issue the same wgmma, whatever their rows need.
        for (;;) {
          softmax_step(page);
          accumulate_pv();
          ring.advance();
          if (++page >= pages_of_rows.seen) break;
          wait_for_keys(ring);
          issue_scores(ring.stage);
          if constexpr (S::prepares_late) prepare(read(shared.page_scales[ring.stage].k));
        }
      }
      for (; page < tile.pages; ++page, ring.advance()) skip_block();
    };
    const auto attend_to_halves = [&](const typename S::Range& range) {
      ptx::mbarrier_wait(&shared.half_queries_full[consumer], round & 1);
      for (int i = 0; i < tile.halves; ++i, ring.advance()) {
        const int block = tile.first_half + i;
        if (block < range.first_half || block >= range.end_half) {
          skip_block();
          continue;
        }
        float s[HALF_BLOCK / 2];
        wait_for_keys(ring);
        issue_half_scores<C, T>(s, shared, consumer, ptx::uniform(ptx::wgmma_descriptor<HALF_ROW>(ptx::shared_address(shared.k[ring.stage]))));
        wait_for_values();
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(s);
        free_keys();
        see_own_page<C>(params, s, range, block, f);
        add_half_block<C, T>(rows, s, ptx::uniform(ptx::wgmma_descriptor_transposed(ptx::shared_address(shared.v[ring.stage]), HALF_BLOCK * HALF_ROW)));
        free_values();
      }
    };

    ptx::cp_async_wait();
    if constexpr (S::halves_first) find_inverse_scales();
    ptx::warpgroup_sync(1 + consumer);  // codes and scales are there
    if constexpr (S::halves_first) {
      const typename S::Range range(params, tile, consumer);
      attend_to_halves(range);
      rows.begin_pages(scales, shared.inverse_scale[consumer], shared.mean_score[consumer], range, f);
    }
    attend_to_pages();

    bool nonfinite[2] = {};  // rows of Q: their codes are NaN in a part that is rotated
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int channel = 0; channel < C.head_dim; channel += PART) {
        const uint8_t code = shared.q[consumer][channel / S::panel][ptx::swizzled<S::panel>(f.row + 8 * r, channel % S::panel)];
        nonfinite[r] |= C.int8 ? code == INT8_NAN : (code & 0x7F) == 0x7F;
      }
    // The tile may have no pages. Without this wait, consumers could run ahead, and the producer would miss a phase.
    if constexpr (!S::halves_first) wait_for_keys(ring);
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(&shared.pages_done[round % 2][consumer]);
    // read again, rather than kept in registers through the loop over pages
    const typename S::Range range(params, tile, consumer);
    if (range.seen > 0) rows.end_pages(scales, shared.mean_score[consumer], range, f);
    if constexpr (!S::halves_first) {
      ptx::warpgroup_sync(1 + consumer);  // nobody reads codes of queries any more
      if (leads) load_half_queries(tile, S::early_panels, S::half_panels);
      attend_to_halves(range);
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& l = rows.softmax.l[r];
      const int position = range.position(f.row + 8 * r);
      if (!range.is_token(f.row + 8 * r))
        l = 0.0f;
      else if (nonfinite[r] || !tile.has_sequence || (params.new_k == nullptr && sees_lost_tokens(position, first_key_of(params, position), tile.start + tile.count)))
        l = NAN;
    }
    const PageTile& next_tile = shared.tiles[(round + 1) % shared.TILES];
    HalfQueries queries;
    // With outputs in several parts, ptxas would keep a fourth of them in local memory, in the loop over pages, too.
    if constexpr (S::parts == 1) load_queries(queries, next_tile);
    ptx::warpgroup_sync(1 + consumer);  // nobody reads scales, and queries in any form, any more
    find_row_ends(next_tile);
    load_channels(next_tile);
    store_rows<C>(params, shared, range, consumer, rows, f);
    if constexpr (S::parts > 1) load_queries(queries, next_tile);
    fetch_half_queries(next_tile);
    quantize_queries(queries, next_tile);
  }
  ptx::tma_store_wait<0>();
}

// Instance::config is the PrefillConfig; see hopper.cuh.
template <class Instance, typename T>
__global__ void __launch_bounds__(PrefillShape<Instance::config>::threads, 1) prefill(const __grid_constant__ PrefillParams params) {
  constexpr PrefillConfig C = Instance::config;
  using S = PrefillShape<C>;
  extern __shared__ __align__(1024) uint8_t bytes[];
  PrefillStorage<C>& shared = *reinterpret_cast<PrefillStorage<C>*>(bytes);
  const typename S::Schedule schedule(params);
  const int warpgroup = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int c = 0; c < C.consumers; ++c) {
      for (auto& of_round : shared.pages_done) ptx::mbarrier_init(&of_round[c], 4);
      ptx::mbarrier_init(&shared.half_queries_full[c], 1);
    }
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], 1);
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], 4 * C.consumers);
      ptx::mbarrier_init(&shared.v_empty[stage], 4 * C.consumers);
      ptx::mbarrier_init(&shared.half_taken[stage], 1);
    }
    ptx::mbarrier_init(&shared.next_written, 1);
    ptx::mbarrier_init(&shared.next_read, 3);
    ptx::fence_barrier_init();
    ptx::wait_for_grids_before();  // one of which writes lengths
    write_next_tile<C>(shared, schedule, -1);
  }
  for (int stage = 0; stage < C.stages; ++stage) write_ones(&shared.v[stage][C.head_dim * KEYS], S::threads);
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  if (warpgroup == 0) {
    if constexpr (S::moves_registers) ptx::registers_decrease<S::producer_registers>();
    load_tiles<C, T>(params, shared, schedule);
  } else {
    if constexpr (S::moves_registers) ptx::registers_increase<C.registers>();
    attend_to_tiles<C, T>(params, shared, warpgroup - 1);
  }
}

template <class Instance>
cudaError_t launch(const PrefillParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(PrefillStorage<Instance::config>);
  const auto kernel = p.call.half ? prefill<Instance, __half> : prefill<Instance, __nv_bfloat16>;
  return launch_grid_with_shared_memory(kernel, p, ctas, PrefillShape<Instance::config>::threads, bytes, stream);
}

}  // namespace fp8attn
