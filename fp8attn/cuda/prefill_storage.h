// Shared memory of the prefill kernel, and what follows from its config.
#pragma once

#include "config.h"
#include "params.h"
#include "tile/attend.h"
#include "tile/paged_tiles.h"
#include "tile/staged_output.h"
#include "tile/tile_scales.h"

namespace fp8attn {

constexpr int HALF_ROW = 128;                      // bytes of a row of a panel in half precision
constexpr int HALF_CHANNELS = HALF_ROW / 2;        // channels of it
constexpr float MISSING_PAGE = -INFINITE;          // K's scale of a page that isn't there

// Scales of a stage's page: K's times the softmax scale, and V's. `next`: K's of the next page; it arrives with V. K's
// is negative if an int8 key is not finite.
struct alignas(16) PageScales {
  float v, next;  // read together
  float k;
};

template <PrefillConfig C>
struct PrefillShape {
  using Score = std::conditional_t<C.int8, int32_t, float>;  // of Q * K^T
  static constexpr int dim = C.head_dim;
  static constexpr int panel = dim < 128 ? dim : 128, panels = dim / panel;        // of Q and K
  static constexpr int half_panels = dim / HALF_CHANNELS;                          // of blocks in half precision
  // channels of P·V in one accumulator; with two parts of 128 channels, the loop over pages would spill
  static constexpr int part = dim == 128 ? 128 : 64, parts = dim / part;
  static constexpr int threads = 128 * (C.consumers + 1);
  static constexpr bool moves_registers = C.consumers > 1;  // else each thread has as many as it can
  static constexpr int producer_registers = 65536 / threads / 8 * 8 * (C.consumers + 1) - C.consumers * C.registers;
  static constexpr int output_boxes = dim > 64 ? 2 : 1;
  // Whether blocks in half precision come before pages, so that they are loaded while the tile before is stored. Where
  // queries as they came lie where their codes are, pages come first.
  static constexpr int early_panels = sizeof(OutputBoxes<output_boxes>) / (ROWS * HALF_ROW);  // of these queries, where the output is staged
  static constexpr bool halves_first = half_panels <= early_panels;
  static constexpr int producer_barrier = 1 + C.consumers;
  static constexpr bool prepares_late = parts > 1;  // as the dense kernel's Shape
  using PageTile = std::conditional_t<C.packed, PackedPagedTile<C.consumers>, PagedTile<C.consumers>>;
  using Schedule = PagedTileSchedule<C.consumers, C.packed>;
  using Range = PagedRowRange<PageTile>;
  static_assert(HALF_BLOCK * 2 == KEYS);            // a block in half precision is as large as a page
};

template <PrefillConfig C>
struct alignas(1024) PrefillStorage {
  using S = PrefillShape<C>;

  uint8_t q[C.consumers][S::panels][ROWS * S::panel];
  uint8_t k[C.stages][KEYS * C.head_dim], v[C.stages][KEYS * (C.head_dim + ONES)];  // behind the channels of V, ones
  OutputBoxes<S::output_boxes> output[C.consumers];  // between two outputs, queries as they came
  TileScales<C.head_dim> scales[C.consumers];
  float inverse_scale[C.consumers][S::halves_first ? C.head_dim : 1];  // of V's channels, times PageSoftmax::BEHIND
  float mean_score[C.consumers][ROWS];  // what K's mean adds to the scores of each row, in base 2
  typename S::PageTile tiles[4];        // consumers are up to two rounds behind the producer, which writes the next one
  PageScales page_scales[C.stages];
  uint64_t pages_done[2][C.consumers], half_queries_full[C.consumers];  // the former of even and of odd rounds
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
  uint64_t next_written, next_read;  // the next tile, by the producer's first warp, and by its others; if halves_first
  uint64_t half_taken[C.stages];  // blocks in half precision, one after another: their stages are free, or TMA's bytes are there

  static constexpr int TILES = 4;

  // A panel of a consumer's queries as they came: where the output is staged, and behind that, where their codes were.
  __device__ uint8_t* half_queries(int consumer, int panel) {
    constexpr int bytes = ROWS * HALF_ROW;
    return panel < S::early_panels ? output[consumer].bytes[0][0] + panel * bytes : q[consumer][0] + (panel - S::early_panels) * bytes;
  }
};

// What the CTA does after `round`; first after -1.
template <PrefillConfig C>
__device__ void write_next_tile(PrefillStorage<C>& shared, const typename PrefillShape<C>::Schedule& schedule, int round) {
  const int position = round < 0 ? int(blockIdx.x) : schedule.after(round);
  schedule.write(shared.tiles[(round + 1) % shared.TILES], position);
}

}  // namespace fp8attn
