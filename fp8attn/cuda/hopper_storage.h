// Shared memory of the Hopper kernel, and what follows from its config.
#pragma once

#include <type_traits>

#include "config.h"
#include "params.h"
#include "ptx/wgmma.h"
#include "tile/added_mask.h"
#include "tile/attend.h"
#include "tile/capped_softmax.h"
#include "tile/key_metadata.h"
#include "tile/mask.h"
#include "tile/quantize.h"
#include "tile/schedule.h"
#include "tile/seq_len.h"
#include "tile/staged_output.h"
#include "tile/stream_k.h"
#include "tile/subnormal_softmax.h"
#include "tile/tile_scales.h"

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
  // Or in more parts, one of which is added to O while the next is computed. With two consumers of so many channels,
  // this makes up for the longer softmax of int8. e4m3 gains nothing by it, and with three consumers of 128 channels
  // e4m3 is 4 to 7 % slower.
  static constexpr bool adds_in_parts = C.int8 && second > 0 && !C.general && !C.masked;
  static constexpr int threads = 128 * (C.consumers + 1);
  static constexpr bool skips_blocks = C.general || C.masked;  // those blocks alone in which a mask shows something
  // Whether exceptional blocks take a path of their own, so that all other blocks meet a single branch. This saves 1 to
  // 3 % of int8's time at 128 channels, where int8 has more branches than e4m3. It saves nothing at 64 channels, and
  // makes e4m3 2 to 4 % slower.
  static constexpr bool branches_once = C.int8 && C.head_dim > 64 && !skips_blocks && !C.softcap;
  // Whether to wait for V while the wgmma of Q·Kᵀ run, which hides the wait, or else after P is computed. It gains 1 to
  // 3 %, and up to 6 % for int8 with few consumers. But it makes e4m3 slower by up to 7 % with overlap and by 2 % in
  // two parts, and int8 above 128 channels by up to 5 %.
  static constexpr bool values_first = !skips_blocks && (C.int8 ? C.head_dim <= 128 : !C.overlap && second == 0);
  // Whether Q's descriptors are computed from one that stays in registers. Otherwise ptxas recomputes all of them for
  // every block of int8. It gains 2 % at 64 channels, together with values_first. For e4m3, ptxas has room for them.
  // With masks, the kernel would spill.
  static constexpr bool has_first_panel = C.int8 && values_first;
  // Whether the softmax of a block is prepared behind the wgmma of its scores. ptxas then issues all of these wgmma but
  // the first after the preparation. Otherwise the softmax is prepared earlier, while sums are added, with a scale that
  // arrived with V of the block before. That is 1 to 2 % faster, but 2 % slower in two parts.
  static constexpr bool prepares_late = C.overlap || second > 0 || skips_blocks;
  // of a thread; instances that skip blocks, or take packed sequences, give the producer all that the consumers leave
  static constexpr int producer_registers = skips_blocks || C.varlen ? 65536 / threads / 8 * 8 * (C.consumers + 1) - C.consumers * C.registers : 24;
  static constexpr int tile_rows = C.consumers * ROWS;
  static constexpr int output_boxes = C.value_dim > 64 ? 2 : 1;  // of each warp
  // Whether a tile's boxes are stored behind one fence. With 128 channels and 1k keys, that is 1 % faster where the
  // kernel quantizes Q, and 3 to 4 % slower elsewhere.
  static constexpr bool stores_together = C.fuse_q_quant;
  static constexpr int start = C.int8 && !C.general && !C.softcap ? START<C.head_dim> : 0;  // of scores' accumulators
  // Whether a product of ones sets the start. Moves set it where issue slots are not the bottleneck.
  static constexpr bool start_by_product = start > 0 && C.head_dim <= 128;
  static_assert(!start_by_product || start == START_STEP);
  static constexpr int largest = C.general || C.softcap ? 0 : LARGEST_PRODUCT<C.int8> * C.head_dim;  // of scores over their scales
  using FloatSoftmax = std::conditional_t<C.softcap, CappedSoftmax, Softmax<C.exact, largest>>;
  using RowSoftmax = std::conditional_t<C.int8 && !C.softcap, SubnormalSoftmax<C.exact, largest, start>, FloatSoftmax>;
  // Whether CTAs may split tiles. Where registers are scarcest, the kernel would spill. With more than 128 channels,
  // int8 spills too, and gains too little to pay for that.
  static constexpr bool stream_k = !skips_blocks && !C.window && !C.varlen && C.consumers < 4 && !(C.int8 && second > 0);
  static_assert(!C.varlen || !skips_blocks);
  // Whether tensor cores multiply Q by K's mean. Where blocks are skipped, threads do: no warp is idle that could turn
  // the mean back.
  static constexpr bool mean_by_products = C.fuse_q_quant && !skips_blocks;
  // Whether they do while a tile's first scores are computed, and not right behind its codes. With 128 channels and 1k
  // keys, an LSE then costs 1.9 % in place of 2.7. With 64 it gains nothing, and with 256 the kernel would spill. Under
  // a soft cap, the first scores take what is found.
  static constexpr bool multiplies_late = mean_by_products && C.head_dim == 128 && !C.softcap;
  // bytes of each CTA's partial results
  static constexpr int partials_ready = stream_k ? C.consumers * sizeof(Partial<first / 2, second == 0 ? 1 : second / 2>) : 0;
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

// What K's mean adds to the scores of each row of a tile.
template <int CONSUMERS>
struct RowMeanScores {
  float of_row[CONSUMERS][ROWS];
};

// K's mean of this round's tile and of the next one's, what says which tile is next, and sinks of the consumers' tiles.
template <int PARTS, int CONSUMERS>
struct MeanStorage {
  KeyMeanColumns<PARTS> columns[2];
  uint64_t full[2], next_tile[2];
  float sink[CONSUMERS];
};

// K's scales: of a stage's block, which arrives with the block's K, and of the next block, which arrives with this
// block's V. The struct is as large as a barrier, so one address serves a stage's scales and barriers.
struct alignas(sizeof(uint64_t)) BlockScales {
  float own, next;
};

template <HopperConfig C>
using TileOf = std::conditional_t<C.varlen, PackedTile, WorkTile>;

template <HopperConfig C>
using ScheduleOf = std::conditional_t<C.varlen, PackedSchedule, Schedule>;

template <HopperConfig C>
struct alignas(1024) SharedStorage {
  using Added = AddedMask<C.consumers, C.added && C.head_dim <= 128 ? 2 : 0>;

  uint8_t q[C.consumers][Shape<C>::panels][ROWS * Shape<C>::panel];
  uint8_t k[C.stages][Shape<C>::panels][KEYS * Shape<C>::panel];
  uint8_t v[C.stages][(C.value_dim + ONES) * KEYS];
  // Must not be the last member: the product of ones reads the same 128 bytes again and again, but compute-sanitizer
  // assumes that it reads as many bytes as the largest operand has.
  std::conditional_t<Shape<C>::skips_blocks, OnesAndKeys<std::conditional_t<C.general, KeyMetadata<C.consumers>, MaskBits<C.consumers>>, C.stages>, OnesAndWorkTiles>
      side;
  [[no_unique_address]] Added added;
  OutputBoxes<Shape<C>::output_boxes> output[C.consumers];
  TileScales<C.value_dim> scales[C.consumers];
  [[no_unique_address]] std::conditional_t<C.fuse_q_quant, RowMeanScores<C.consumers>, Nothing> mean_scores;
  [[no_unique_address]] std::conditional_t<Shape<C>::mean_by_products, MeanStorage<C.head_dim / PART, C.consumers>, Nothing> mean;
  TileOf<C> tiles[TILES];  // of this round and the next; consumers may be two rounds apart
  BlockScales k_scale[C.stages];
  uint64_t q_full[C.consumers], q_empty[C.consumers];
  uint64_t k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
};

// The K/V blocks of a work tile: from begin_of up to, but without, end_of, and those alone that its rows see.
template <HopperConfig C>
__device__ int end_of(const TileOf<C>& work_tile) {
  if constexpr (Shape<C>::stream_k)
    return work_tile.end;
  else
    return ALL_BLOCKS;
}

// Of a tile's rows the last one. They may be more than there are.
template <HopperConfig C, typename Place>
__device__ int last_row_of(const Place& tile) {
  return first_row_of(tile, C.consumers - 1) + ROWS - 1;
}

// `tile`: what the caller knows of the work tile, which may be in registers.
template <HopperConfig C, typename Place>
__device__ int begin_of(const Visible& visible, const Place& tile, const TileOf<C>& work_tile) {
  if constexpr (C.window)
    return visible.first_block(tile.first_row, last_row_of<C>(tile));
  else if constexpr (Shape<C>::stream_k)
    return work_tile.begin;
  else
    return 0;
}

// Whether the CTA attends to all of a tile's blocks, or to the last ones, so that it stores the output.
template <HopperConfig C>
__device__ bool is_complete(const TileOf<C>& work_tile) {
  if constexpr (Shape<C>::stream_k)
    return work_tile.complete();
  else
    return true;
}

// One past the last K/V block that a work tile loads: that of the tile's last row.
template <HopperConfig C, typename Place>
__device__ int loaded_end(const Visible& visible, const Place& tile, const TileOf<C>& work_tile) {
  return min(visible.blocks(last_row_of<C>(tile)), end_of<C>(work_tile));
}

// What the CTA does after `round`; first after -1.
template <HopperConfig C>
__device__ void write_next_work_tile(SharedStorage<C>& shared, const ScheduleOf<C>& schedule, int round) {
  TileOf<C>& next = shared.tiles[(round + 1) % TILES];
  const auto position = [&] { return round < 0 ? int(blockIdx.x) : schedule.after(round); };
  if constexpr (C.varlen)
    schedule.template write<C.consumers>(next, position());
  else if constexpr (Shape<C>::stream_k)
    shared.side.work_tiles.write_next(next, schedule, round);
  else
    static_cast<Tile&>(next) = schedule.at(position());
}

}  // namespace fp8attn
