// Queries of a tile of the decode kernel: quantized for pages, by quantization.quantize_q, and as they came for blocks
// in half precision.
#pragma once

#include "../ptx/operand.h"
#include "mask.h"
#include "paged_schedule.h"
#include "row_team.h"

namespace fp8attn {

template <typename T>
__device__ const T* query_at(const DecodeParams& p, int batch, const QueryRow& row) {
  return static_cast<const T*>(p.q) + batch * p.q_strides[0] + row.head * p.q_strides[1] + row.query * p.q_strides[2];
}

constexpr int DECODERS = 128, DECODER_WARPS = DECODERS / 32;  // threads that attend: a warpgroup
constexpr int QUERY_GROUP = 8;                                // queries of a group: columns of mma.sync, or of the narrowest wgmma

template <int DIM>
constexpr int KEY_PANEL = DIM < 128 ? DIM : 128;  // bytes of a row of K in a panel, as TMA writes it; and of Q

// Quantizes a row: `codes` are panels of HEIGHT rows, with TMA's swizzle, of which a row that doesn't exist changes
// nothing. Returns its scale, times `unit`; 1 of zeros, NaN if an element is not finite. Called by whole warps.
template <int DIM, bool INT8, int HEIGHT>
__device__ float quantize_row(const RowTeam& team, const RowChunk& chunk, float unit, uint8_t* codes, int row, bool exists) {
  constexpr int PANEL = KEY_PANEL<DIM>;
  const float largest = team.largest(chunk.largest), scale = row_scale_of<INT8>(largest), inverse = __frcp_rn(scale);
  const bool has_nan = team.any(chunk.has_nan());
  if (exists) {
    uint8_t* const panel = codes + team.channel / PANEL * HEIGHT * PANEL;
    *reinterpret_cast<uint2*>(panel + ptx::swizzled<PANEL>(row, team.channel % PANEL)) = {codes_of<INT8>(chunk.y, inverse), codes_of<INT8>(chunk.y + 4, inverse)};
  }
  return has_nan ? NAN : largest > 0.0f ? scale * unit : 1.0f;
}

// Quantizes the rows of a tile. Called by all decoders. `codes`: panels of HEIGHT rows, with TMA's swizzle. Sets the
// scales of the rows, times p.score_scale; NaN if a query is not finite. Sets `mean_score`, unless it is null, to what
// K's mean adds to the rows' scores, which is nothing if not `has_mean`.
template <typename T, int DIM, bool INT8, int HEIGHT, typename Blocks>
__device__ void quantize_queries(const DecodeParams& p, const DecodeTiles<HEIGHT, Blocks>& tile, bool has_mean, uint8_t* codes, float (&row_scale)[HEIGHT],
                                 float* mean_score) {
  const RowTeam team(DIM);
  const int rows = tile.height(p), above = threadIdx.x % 32 / team.lanes;  // rows of the warp above the thread's
  int mine = threadIdx.x / team.lanes;
  if (mine - above >= rows) return;
  const auto load = [&](int index) {
    const QueryRow row(p, tile.row, tile.kv_head, tile.first_row() + index);
    Chunk<T> chunk;
    if (index < rows && row.real) chunk.template load<true>(query_at<T>(p, tile.batch, row) + team.channel);
    return chunk;
  };
  Chunk<T> chunk = load(mine);  // in flight together with the mean
  alignas(16) float mean[CHUNK] = {};
  if (has_mean) {
    const float* from = p.k_mean + (int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head) * DIM + team.channel;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) *reinterpret_cast<float4*>(mean + i) = *reinterpret_cast<const float4*>(from + i);
  }
  const TeamRotation rotation(p.part, team, p.inverse_part);
  const float unit = p.part > 0 ? p.part : 1.0f, zeros[CHUNK] = {};
  rotation.unrotate(mean);  // over `unit`, which is a power of two
#pragma unroll 1
  for (; mine - above < rows; mine += DECODERS / team.lanes, chunk = load(mine)) {
    float x[CHUNK], sum = 0.0f;
    chunk.floats(x);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) sum = fmaf(x[i], mean[i], sum);
    sum = team.sum(sum);
    const float scale = quantize_row<DIM, INT8, HEIGHT>(team, RowChunk(chunk, rotation, zeros), unit, codes, mine, mine < rows);
    if (mine >= rows) continue;
    if (team.member == 0) {
      row_scale[mine] = scale * p.score_scale;
      if (mean_score != nullptr) mean_score[mine] = sum * unit * p.score_scale;
    }
  }
}

// B operands of mma m16n8k16 for each 16 channels: the lane's query as it came, of the eight from row `first` of the
// tile on.
template <typename T, int DIM>
struct HalfQueries {
  uint32_t words[DIM / 16][2];

  template <typename Tile>
  __device__ HalfQueries(const DecodeParams& p, const Tile& tile, int first) {
    const Fragment f = Fragment::of_warp(0);
    const QueryRow row(p, tile.row, tile.kv_head, tile.first_row() + first + f.row);
    const T* from = query_at<T>(p, tile.batch, row) + f.column;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) words[i / 2][i % 2] = row.real ? *reinterpret_cast<const uint32_t*>(from + 8 * i) : 0;
  }
};

}  // namespace fp8attn
