// What a warpgroup does with its 64 query rows, wherever keys and values come from.
#pragma once

#include "../ptx/wgmma.h"
#include "mask.h"
#include "schedule.h"
#include "softmax.h"

namespace fp8attn {

constexpr int ONES = 8;  // channels of ones behind V's

// Issues P * V into a fresh accumulator, for so many channels: rows of KEYS bytes each.
template <int CHANNELS>
__device__ void start_values(float (&fresh)[CHANNELS / 2], const uint32_t (&p)[KEYS / 32][4], uint64_t v) {
  ptx::wgmma_fence();
  ptx::Wgmma<CHANNELS>::template run<false>(fresh, p[0], v);
#pragma unroll
  for (int step = 1; step < KEYS / 32; ++step) ptx::Wgmma<CHANNELS>::template run<true>(fresh, p[step], v + 2 * step);
  ptx::wgmma_commit();
}

// The running float32 output of a thread's two rows. Two-level accumulation: what the tensor core adds up of one key block comes in
// by the multiply-add that rescales.
template <int N>
__device__ void promote(float (&o)[N], const float (&alpha)[2], const float (&fresh)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] = fmaf(o[i], alpha[i / 2 % 2], fresh[i]);
}

// A warpgroup's share of a tile.
struct Share {
  const Tile& tile;  // in shared memory and read there again: registers are scarce between
  int consumer;
  int seen, whole;  // blocks of keys: that some row of mine sees, that all rows of mine see whole, if it weren't for a mask

  // Of the tile's blocks those before `end`.
  __device__ Share(const Params& p, const Visible& visible, const Tile& its_tile, int number, int end = ALL_BLOCKS) : tile(its_tile), consumer(number) {
    const int row = __shfl_sync(~0u, first_row(), 0);  // the shuffle tells the compiler that it is the warp's
    seen = min(visible.blocks(row + ROWS - 1), end);
    whole = visible.end(row) / KEYS;
  }

  __device__ int first_row() const { return tile.first_row + consumer * ROWS; }
};

// Of a thread's rows, from their maxima and the sums of their P.
__device__ inline void store_lse(const Params& p, const Share& share, const float (&m)[2], const float (&l)[2], Fragment f) {
  if (p.lse == nullptr || f.column != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = share.first_row() + f.row + 8 * r;
    if (row < p.q_length)
      p.lse[(int64_t(share.tile.batch) * p.q_heads + share.tile.head) * p.q_length + row] = (m[r] - P_OFFSET + log2f(l[r])) / LOG2E;
  }
}

}  // namespace fp8attn
