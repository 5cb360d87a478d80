// What a warpgroup does with its 64 query rows, wherever keys and values come from.
#pragma once

#include <type_traits>

#include "../ptx/uniform.h"
#include "../ptx/wgmma.h"
#include "mask.h"
#include "schedule.h"
#include "seq_len.h"
#include "softmax.h"

namespace fp8attn {

// Writes the channels of ones behind those of V in shared memory: P·V has sums of P there. Called by all threads.
__device__ inline void write_ones(uint8_t* behind_values, int threads) {
  for (int i = threadIdx.x * 4; i < ONES * KEYS; i += threads * 4) *reinterpret_cast<uint32_t*>(behind_values + i) = FOUR_ONES;
}

// Issues P * V into a fresh accumulator, for so many channels: rows of KEYS bytes each.
template <int CHANNELS>
__device__ void issue_pv(float (&fresh)[CHANNELS / 2], const uint32_t (&p)[KEYS / 32][4], uint64_t v) {
  ptx::wgmma_fence();
  ptx::Wgmma<CHANNELS>::template run<false>(fresh, p[0], v);
#pragma unroll
  for (int step = 1; step < KEYS / 32; ++step) ptx::Wgmma<CHANNELS>::template run<true>(fresh, p[step], v + 2 * step);
  ptx::wgmma_commit();
}

// The running float32 output of a thread's two rows. Two-level accumulation: the multiply-add that rescales the output
// also adds what the tensor core has summed over one key block.
template <int N>
__device__ void rescale_and_add(float (&o)[N], const float (&alpha)[2], const float (&fresh)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] = fmaf(o[i], alpha[i / 2 % 2], fresh[i]);
}

// The same from element FROM on of an output that lies in two arrays.
template <int FROM, int FIRST, int SECOND, int N>
__device__ void rescale_and_add(float (&o)[FIRST], float (&o_second)[SECOND], const float (&alpha)[2], const float (&fresh)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float& to = FROM + i < FIRST ? o[(FROM + i) % FIRST] : o_second[(FROM + i - FIRST) % SECOND];
    to = fmaf(to, alpha[i / 2 % 2], fresh[i]);
  }
}

// P * V in parts, two of which are being computed at any time: part I in `fresh`, the next one in `next`. Gives these
// and all later parts to `add`. Each width has accumulators of its own: if a product went into registers of another
// width's accumulator, ptxas would make all products wait for each other (C7511).
template <int I, int CHANNELS, int N, int M, typename Add>
__device__ void add_parts(const uint32_t (&p)[KEYS / 32][4], uint64_t v, float (&fresh)[N], float (&next)[M], Add&& add) {
  constexpr int last = CHANNELS / VALUE_PART - 1;
  ptx::wgmma_wait<I == last ? 0 : 1>();
  ptx::wgmma_touch(fresh);
  add(std::integral_constant<int, I>(), fresh);
  const uint64_t after = ptx::operand_of(v, (I + 2) * VALUE_PART, KEYS);
  if constexpr (I + 2 < last) {
    issue_pv<VALUE_PART>(fresh, p, after);
    add_parts<I + 1, CHANNELS>(p, v, next, fresh, add);
  } else if constexpr (I + 2 == last) {
    float widest[(CHANNELS - last * VALUE_PART) / 2];
    issue_pv<CHANNELS - last * VALUE_PART>(widest, p, after);
    add_parts<I + 1, CHANNELS>(p, v, next, widest, add);
  } else if constexpr (I + 1 == last) {
    add_parts<I + 1, CHANNELS>(p, v, next, next, add);
  }
}

// Gives P * V of CHANNELS channels to `add`, part after part: its number, and its sums. The last part is wider than
// VALUE_PART where CHANNELS is no multiple of that.
template <int CHANNELS, typename Add>
__device__ void add_in_parts(const uint32_t (&p)[KEYS / 32][4], uint64_t v, Add&& add) {
  float fresh[VALUE_PART / 2], next[VALUE_PART / 2];
  issue_pv<VALUE_PART>(fresh, p, v);
  issue_pv<VALUE_PART>(next, p, ptx::operand_of(v, VALUE_PART, KEYS));
  add_parts<0, CHANNELS>(p, v, fresh, next, add);
}

// A warpgroup's rows of a tile.
struct WarpgroupTile {
  const Tile& tile;  // in shared memory and read there again: registers are scarce between
  int consumer;
  // Numbers of K/V blocks, without regard to a mask: at least one row of mine sees keys of the blocks begin ...
  // seen - 1, and all rows of mine see all keys of the blocks edge ... whole - 1. If all rows of mine are behind the
  // last one, I attend to the tile's first block only.
  int seen, whole, begin = 0, edge = 0;

  // Of the tile's blocks those before `end`. `window`: whether rows have a first key.
  __device__ WarpgroupTile(const Params& p, const Visible& visible, const Tile& its_tile, int number, int end = ALL_BLOCKS, bool window = false)
      : tile(its_tile), consumer(number) {
    const int row = ptx::uniform(first_row());
    seen = row < visible.q_length ? min(visible.blocks(row + ROWS - 1), end) : 1;
    whole = visible.end(row) / KEYS;
    if (!window) return;
    begin = visible.first_block(row, row + ROWS - 1);
    edge = (visible.begin(row + ROWS - 1) + KEYS - 1) / KEYS;
  }

  // A consumer's rows are a tile of their own, of which it has the first ones.
  __device__ WarpgroupTile(const Params& p, const Visible& visible, const PackedTile& its_tile, int number, int end, bool window)
      : WarpgroupTile(p, visible, its_tile.consumers[number], 0, end, window) {}

  __device__ int first_row() const { return tile.first_row + consumer * ROWS; }
};

// Stores the LSE of a thread's rows before row_end(), from their maxima and the sums of their P. `mean_scores`: what
// K's mean adds to their scores.
template <typename RowEnd>
__device__ void store_lse(const Params& p, const WarpgroupTile& wg_tile, RowEnd&& row_end, const float (&m)[2], const float (&l)[2], Fragment f, float2 mean_scores) {
  if (p.lse == nullptr || f.column != 0) return;
  const Tile& tile = wg_tile.tile;
  const int row = wg_tile.first_row() + f.row, left = row_end() - row;
  float* to = p.lse + (int64_t(tile.batch) * p.q_heads + tile.head) * p.q_length + row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float lse = (m[r] - P_OFFSET + __log2f(l[r])) * (1 / LOG2E);
    if (8 * r < left) to[8 * r] = lse + (r == 0 ? mean_scores.x : mean_scores.y);
  }
}

}  // namespace fp8attn
