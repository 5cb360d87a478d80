// Queries of a tile of the decode kernel: quantized for pages, by quantization.quantize_q, and as they came for blocks
// in half precision.
#pragma once

#include "../ptx/operand.h"
#include "paged_schedule.h"
#include "row_team.h"

namespace fp8attn {

template <typename T>
__device__ const T* query_at(const DecodeParams& p, int batch, const QueryRow& row) {
  return static_cast<const T*>(p.q) + batch * p.q_strides[0] + row.head * p.q_strides[1] + row.query * p.q_strides[2];
}

// Quantizes the rows of a tile. Called by a warpgroup. `codes`: an operand of wgmma with rows of PANEL bytes. Sets the
// scales of the rows, times p.score_scale; NaN if a query is not finite. Sets what K's mean adds to the rows' scores.
template <typename T, int DIM, int PANEL, bool INT8>
__device__ void quantize_queries(const DecodeParams& p, const DecodeTiles& tile, uint8_t* codes, float (&row_scale)[ROWS], float (&mean_score)[ROWS]) {
  const RowTeam team(DIM);
  const TeamRotation rotation(p.part, team, p.inverse_part), rotation_of_mean(p.part, team, 1.0f);
  const float unit = p.part > 0 ? p.part : 1.0f, zeros[CHUNK] = {};
  float mean[CHUNK] = {};
  if (tile.blocks.pages > 0) {  // else the sequence may have none yet
    const float* from = p.k_mean + (int64_t(tile.row.sequence) * p.kv_heads + tile.kv_head) * DIM + team.channel;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) mean[i] = from[i];
  }
  rotation_of_mean.unrotate(mean);
  const int rows = min(p.q_heads / p.kv_heads * p.q_length - tile.row_tile * ROWS, ROWS), at_once = 128 / team.lanes;
#pragma unroll 1
  for (int first = 0; first < rows; first += at_once) {
    const int mine = first + int(threadIdx.x) / team.lanes;
    const QueryRow row(p, tile.row, tile.kv_head, tile.row_tile * ROWS + mine);
    Chunk<T> chunk;
    if (mine < rows && row.real) chunk.template load<true>(query_at<T>(p, tile.batch, row) + team.channel);
    float x[CHUNK], sum = 0.0f;
    chunk.floats(x);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) sum = fmaf(x[i], mean[i], sum);
    sum = team.sum(sum);
    const RowChunk rotated(chunk, rotation, zeros);
    const float largest = team.largest(rotated.largest), scale = row_scale_of<INT8>(largest), inverse = __fdiv_rn(1.0f, scale);
    const bool has_nan = team.any(rotated.has_nan());
    const uint2 of_chunk = {codes_of<INT8>(rotated.y, inverse), codes_of<INT8>(rotated.y + 4, inverse)};
    float kept = largest > 0.0f ? scale * unit : 1.0f;
    if constexpr (!INT8 && DIM <= FIT_DIM) {
      Fit sums;
      sums.add(rotated.y, inverse, of_chunk.x);
      sums.add(rotated.y + 4, inverse, of_chunk.y);
      kept = fminf(fmaxf(kept * Fit::factor(sums.sums(team.lanes)), SMALLEST_SCALE), -NOTHING);
    }
    if (mine >= rows) continue;
    uint8_t* panel = codes + team.channel / PANEL * (ROWS * PANEL);
    *reinterpret_cast<uint2*>(panel + ptx::swizzled<PANEL>(mine, team.channel % PANEL)) = of_chunk;
    if (team.member == 0) row_scale[mine] = has_nan ? NAN : kept * p.score_scale, mean_score[mine] = sum * p.score_scale;
  }
}

// Words of the A operands of mma m16n8k16, of 16 channels from `channel` on: a thread's two rows as they came.
template <typename T>
struct HalfQueries {
  const T* rows[2];
  bool real[2];

  __device__ HalfQueries(const DecodeParams& p, const DecodeTiles& tile, Fragment f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const QueryRow row(p, tile.row, tile.kv_head, tile.row_tile * ROWS + f.row + 8 * r);
      rows[r] = query_at<T>(p, tile.batch, row) + f.column, real[r] = row.real;
    }
  }

  __device__ void load(uint32_t (&a)[4], int channel) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = real[i % 2] ? *reinterpret_cast<const uint32_t*>(rows[i % 2] + channel + i / 2 * 8) : 0;
  }
};

}  // namespace fp8attn
