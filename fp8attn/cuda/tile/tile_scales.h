// What a tile's threads want to know of it beside Q, K and V.
#pragma once

#include "../ptx/cp_async.h"
#include "mask.h"
#include "schedule.h"
#include "seq_len.h"

namespace fp8attn {

// What THREADS threads (those of a warpgroup, or all) need to know of their tile, in shared memory: scales and means of
// V's channels, zero where there are none; scales of the M rows of Q; and how many keys each row sees.
template <int CHANNELS, int M = ROWS, int THREADS = 128>
struct TileScales {
  static constexpr int channels = CHANNELS;

  float channel_scale[CHANNELS], channel_mean[CHANNELS], row_scale[M];
  int row_end[M];

  // Called by all of them; complete once all have been through cp_async_wait.
  __device__ void load(const Params& p, const Visible& visible, const Tile& tile, int first_row) {
    load_channels(p, tile);
    load_rows(p, visible, tile, 0, first_row, p.q_length);
  }

  template <typename Place>
  __device__ void load_channels(const Params& p, const Place& tile) {
    const float* scales = p.v_scale + sequence_of(tile) * p.v_scale_strides[0] + tile.kv_head * p.v_scale_strides[1];
    const float* means = p.v_mean + (int64_t(sequence_of(tile)) * p.kv_heads + tile.kv_head) * p.value_dim;
    for (int x = threadIdx.x % THREADS; x < CHANNELS; x += THREADS) {
      const bool exists = x < p.value_dim;
      ptx::cp_async(&channel_scale[x], exists ? scales + x * p.v_scale_strides[2] : p.v_scale, exists);
      ptx::cp_async(&channel_mean[x], exists && p.v_mean != nullptr ? means + x : p.v_scale, exists && p.v_mean != nullptr);
    }
  }

  // Of a consumer's rows. `end`: of the rows of the tile's sequence.
  template <typename Place>
  __device__ void load_rows(const Params& p, const Visible& visible, const Place& tile, int consumer, int first_row, int end) {
    const float* row_scales = p.q_scale + tile.batch * p.q_scale_strides[0] + query_head_of(tile, consumer) * p.q_scale_strides[1];
    for (int i = threadIdx.x % THREADS; i < M; i += THREADS) {
      const int row = min(first_row + i, end - 1);
      ptx::cp_async(&row_scale[i], row_scales + (p.q_group <= 1 ? row * p.q_group : row / p.q_group) * p.q_scale_strides[2], true);
    }
    find_row_ends(visible, first_row);
  }

  __device__ void find_row_ends(const Visible& visible, int first_row) {
    for (int i = threadIdx.x % THREADS; i < M; i += THREADS) row_end[i] = visible.end(first_row + i);
  }
};

}  // namespace fp8attn
