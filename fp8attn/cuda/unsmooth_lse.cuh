// The LSE of scores of K as it was, from that of K without its mean, sm_80 and later: reference.unsmoothed_lse. Reads Q
// once. The mean is rotated back, so that queries are multiplied as they are stored.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
#include "tile/row_team.h"

namespace fp8attn {

constexpr int LSE_THREADS = 256;

// The grid has a CTA for every `config.rows` queries of every head.
template <class Instance, typename T>
__global__ void __launch_bounds__(LSE_THREADS, Instance::config.ctas) unsmooth_lse(const __grid_constant__ UnsmoothLseParams p) {
  Chunks<T, 16> rows;
  constexpr int COUNT = rows.COUNT;
  const int chunks = (p.q_length + Instance::config.rows - 1) / Instance::config.rows, head = blockIdx.x / chunks, begin = blockIdx.x % chunks * Instance::config.rows;
  const int batch = head / p.q_heads, q_head = head % p.q_heads, end = min(begin + Instance::config.rows, p.q_length);
  const RowTeam team(p.head_dim);
  const TeamRotation rotation(p.part, team, 1.0f);
  const int first = threadIdx.x / team.lanes, teams = LSE_THREADS / team.lanes;
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const float* of_keys = p.k_mean + (int64_t(batch) * p.kv_heads + q_head / (p.q_heads / p.kv_heads)) * p.head_dim + team.channel;
  float mean[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; ++i) mean[i] = team.has_channels ? of_keys[i] : 0.0f;
  rotation.unrotate(mean);
  const T* from = static_cast<const T*>(p.q) + batch * p.q_strides[0] + q_head * p.q_strides[1] + team.channel;
#pragma unroll 1
  for (int row = begin; row < end; row += COUNT * teams) {
    rows.load(from + int64_t(row + first) * p.q_strides[2], teams * p.q_strides[2], p.q_aligned,
              [&](int i) { return row + first + i * teams < end && team.has_channels; });
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float x[CHUNK], sum = 0.0f;
      rows.of[i].floats(x);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) sum = fmaf(x[j], mean[j], sum);
      sum = team.sum(sum);
      const int mine = row + first + i * teams;
      const int64_t at = int64_t(head) * p.q_length + mine;
      if (mine < end && team.member == 0) p.out[at] = fmaf(sum, p.softmax_scale, p.lse[at]);
    }
  }
}

template <class Instance, typename T>
cudaError_t launch_unsmooth(const UnsmoothLseParams& p, int ctas, cudaStream_t stream) {
  return launch_grid(unsmooth_lse<Instance, T>, p, ctas, LSE_THREADS, 0, stream);
}

template <class Instance>
cudaError_t launch(const UnsmoothLseParams& p, int ctas, cudaStream_t stream) {
  return p.type == OutType::bf16  ? launch_unsmooth<Instance, __nv_bfloat16>(p, ctas, stream)
         : p.type == OutType::f16 ? launch_unsmooth<Instance, __half>(p, ctas, stream)
                                  : launch_unsmooth<Instance, float>(p, ctas, stream);
}

}  // namespace fp8attn
