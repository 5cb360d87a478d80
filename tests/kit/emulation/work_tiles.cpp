// fp8attn/cuda/tile/stream_k.h: the work tiles of CTAs. Synthetic sums over key blocks stand for attention.
#include <cstring>

#include "tile/stream_k.h"

#include "run.h"

namespace fp8attn {

constexpr int CHANNELS = 64;

// A tile has one warpgroup. p.q_scale has a score for each row and block, (B * Hq, Sq, blocks). p.out gets each row's
// 16 channels of each of its four threads, and p.lse each row's maximum and sum.
template <int FIRST, int SECOND>
void sum_blocks(const Params p) {
  using Part = Partial<FIRST, SECOND>;
  const Schedule schedule(p, ROWS);
  const Fragment f = Fragment::mine();
  const int blocks = (p.kv_length + KEYS - 1) / KEYS;
  // one thread asks, as in the kernel
  struct Shared {
    WorkTiles work_tiles;
    WorkTile next;
  };
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  if (threadIdx.x == 0) shared.work_tiles.find(schedule);
  for (int round = 0;; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) {
      std::memset(&shared.next, 0x7F, sizeof(WorkTile));  // large numbers, of a tile that was there before
      shared.work_tiles.write_next(shared.next, schedule, round - 1);
    }
    __syncthreads();
    const WorkTile work_tile = shared.next;
    if (!work_tile.exists()) return;
    float m[2] = {NOTHING, NOTHING}, o[FIRST] = {}, o_second[SECOND] = {};
    const int head = work_tile.batch * p.q_heads + work_tile.head, row = min(work_tile.first_row + f.row, p.q_length - 1);
    const int rows[2] = {row, min(work_tile.first_row + f.row + 8, p.q_length - 1)};
    const auto score = [&](int r, int block) { return p.q_scale[(int64_t(head) * p.q_length + rows[r]) * blocks + block]; };
    for (int block = work_tile.begin; block < min(work_tile.end, blocks); ++block)
      for (int r = 0; r < 2; ++r) m[r] = max(m[r], score(r, block));
    for (int block = work_tile.begin; block < min(work_tile.end, blocks); ++block) {
      const float weights[2] = {std::exp2(score(0, block) - m[0]), std::exp2(score(1, block) - m[1])};
      Part::for_quads(o, o_second, [&](float* x, int i) {
        for (int j = 0; j < 4; ++j) x[j] += weights[j / 2] * (block + 1) * (4 * i + j + 1);
      });
      for (int r = 0; r < 2; ++r) row_sum(o, o_second, r) += weights[r];
    }
    if (!work_tile.complete()) {
      store_partial(p, work_tile.range, 0, 1, m, o, o_second);
      continue;
    }
    reduce_partials(p, work_tile, 0, 1, m, o, o_second);
    for (int r = 0; r < 2; ++r) {
      if (work_tile.first_row + f.row + 8 * r >= p.q_length) continue;
      const int64_t at = int64_t(head) * p.q_length + rows[r];
      p.lse[2 * at] = m[r], p.lse[2 * at + 1] = row_sum(o, o_second, r);
      Part::for_quads(o, o_second, [&](float* x, int i) {
        for (int j = 0; j < 2; ++j) static_cast<float*>(p.out)[(at * 4 + threadIdx.x % 4) * CHANNELS / 4 + 2 * i + j] = x[2 * r + j];
      });
    }
  }
}

}  // namespace fp8attn

// Returns whether the kernel ended. `parted`: whether the channels are in two accumulators.
extern "C" bool sum_blocks(const float* scores, float* out, float* rows, float* parts, int* words, const int* numbers, bool parted) {
  fp8attn::Params p = {};
  p.q_scale = scores, p.out = out, p.lse = rows, p.parts = parts, p.counter = words, p.partials_ready = words + 1;
  p.batches = numbers[0], p.q_heads = numbers[1], p.kv_heads = numbers[2], p.q_length = numbers[3], p.kv_length = numbers[4];
  p.heads_in_l2 = p.q_heads / p.kv_heads, p.stream_k_ranges = numbers[6];
  return cta::run(parted ? fp8attn::sum_blocks<16, 20> : fp8attn::sum_blocks<36, 1>, p, numbers[5], 128);
}
