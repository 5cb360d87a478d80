// The tiles behind the last full round, in calls whose tiles all have the same number of K/V blocks. CTAs split these
// blocks evenly, so that all CTAs end at once.
// Osama et al., "Stream-K" (PPoPP 2023), of whose forms this is the one with a last, shared round.
#pragma once

#include "../ptx/convert.h"
#include "../ptx/flag.h"
#include "mask.h"
#include "schedule.h"
#include "softmax.h"

namespace fp8attn {

// A tile and which of its blocks of keys.
struct alignas(32) WorkTile : Tile {
  int begin, end;
  // The tile's other blocks are those of CTAs first_other ... this one - 1. If it is -1, a later CTA has the tile's
  // last blocks and waits for this one.
  int first_other = ALL_BLOCKS;

  __device__ bool complete() const { return first_other >= 0; }
};

// One tile's blocks after the other's, in ranges of as many, a CTA's each; a range is of two tiles at most.
struct Tail {
  int tiles, blocks;  // blocks of a tile
  int range;          // of a CTA

  // No fewer CTAs than tiles.
  __device__ Tail(int of_call, int of_tile, int ctas) : tiles(of_call), blocks(of_tile), range((of_call * of_tile + ctas - 1) / ctas) {}

  // A CTA's work tile `number`, 0 or 1, of tiles from position `first_tile` on. Only work tile 0 may leave the tile's
  // last blocks to another CTA. That CTA waits for it, and has a larger number, so it wasn't launched earlier.
  __device__ WorkTile work_tile(const Schedule& schedule, int first_tile, int cta, int number) const {
    const int from = cta * range, to = min(from + range, tiles * blocks);
    if (from >= to) return {Schedule::none()};
    const int first = from / blocks, last = (to - 1) / blocks;
    if (number == 1 && first == last) return {Schedule::none()};
    const int tile = number == 0 ? last : first, begin = max(from - tile * blocks, 0), end = min(to - tile * blocks, blocks);
    return {schedule.at(first_tile + tile), begin, end, end < blocks ? -1 : begin > 0 ? tile * blocks / range : ALL_BLOCKS};
  }
};

// A CTA's work tiles, one per round: whole ones, and then its part of the tail.
struct WorkTiles {
  int whole;         // tiles before the tail's
  int rounds;        // before the tail's: as many as there may be, until the CTA has taken its last whole tile
  WorkTile tail[3];  // the last one is none

  __device__ void find(const Schedule& schedule) {
    const Params& p = schedule.p;
    rounds = whole = ALL_BLOCKS;
    if (p.stream_k_ctas == 0) return;
    const int rest = schedule.size() % int(gridDim.x);
    whole = schedule.size() - rest;
    const Tail shared(rest, (p.kv_length + KEYS - 1) / KEYS, p.stream_k_ctas);
    for (int i = 0; i < 2; ++i) tail[i] = shared.work_tile(schedule, whole, blockIdx.x, i);
    tail[2] = {Schedule::none()};
  }

  // The one after that of `round`; the first after -1. Rounds come one after the other.
  __device__ void write_next(WorkTile& to, const Schedule& schedule, int round) {
    if (round + 1 < rounds) {
      const int position = round < 0 ? blockIdx.x : schedule.after(round);
      if (position < whole) {
        to = {schedule.at(position), 0, ALL_BLOCKS};
        return;
      }
      rounds = round + 1;
    }
    to = tail[round + 1 - rounds];
  }
};

// Partial results of a warpgroup's threads, for a tile whose other blocks other CTAs have: sums of P * V, and for each
// thread's two rows m, which the sums are relative to, and the sums of P. The sums of P stand twice in the last four
// elements of O, but are stored once.
template <int FIRST, int SECOND>
struct Partial {
  static constexpr bool parts = SECOND > 1;
  static constexpr int first = (parts ? FIRST : FIRST - 4) / 4, second = parts ? (SECOND - 4) / 4 : 0;

  float4 o[first + second][128], rows[128];

  // f(a quad of a thread's, where it lies), for all of them.
  template <typename O, typename Second, typename F>
  __device__ static void for_quads(O& o, Second& o_second, F&& f) {
#pragma unroll
    for (int i = 0; i < first; ++i) f(o + 4 * i, i);
#pragma unroll
    for (int i = 0; i < second; ++i) f(o_second + 4 * i, first + i);
  }
};

// Store m and O of this CTA's work tile for the CTA that computes the tile's last blocks. Each warp signals by itself.
template <int FIRST, int SECOND>
__device__ void store_partial(const Params& p, int consumer, int consumers, const float (&m)[2], const float (&o)[FIRST], const float (&o_second)[SECOND]) {
  using Part = Partial<FIRST, SECOND>;
  const int place = blockIdx.x * consumers + consumer, thread = threadIdx.x % 128;
  Part& part = reinterpret_cast<Part*>(p.parts)[place];
  Part::for_quads(o, o_second, [&](const float* x, int i) { part.o[i][thread] = {x[0], x[1], x[2], x[3]}; });
  part.rows[thread] = {m[0], m[1], row_sum(o, o_second, 0), row_sum(o, o_second, 1)};
  __syncwarp();
  if (thread % 32 == 0) ptx::store_release(&p.partials_ready[4 * place + thread / 32], 1);
}

// Adds what others have handed over of a tile that this CTA has the last blocks of; the latest first.
template <int FIRST, int SECOND>
__device__ void reduce_partials(const Params& p, int first_other, int consumer, int consumers, float (&m)[2], float (&o)[FIRST], float (&o_second)[SECOND]) {
  using Part = Partial<FIRST, SECOND>;
  const int thread = threadIdx.x % 128;
#pragma unroll 1
  for (int cta = int(blockIdx.x) - 1; cta >= first_other; --cta) {
    const int place = cta * consumers + consumer;
    const Part& part = reinterpret_cast<const Part*>(p.parts)[place];
    while (ptx::load_acquire(&p.partials_ready[4 * place + thread / 32]) == 0) {}
    const float4 rows = __ldcg(&part.rows[thread]);
    const float their_m[2] = {rows.x, rows.y}, their_sums[2] = {rows.z, rows.w};
    float mine_by[2], theirs_by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) merge_rows(m[r], row_sum(o, o_second, r), their_m[r], their_sums[r], mine_by[r], theirs_by[r]);
    Part::for_quads(o, o_second, [&](float* to, int i) {
      const float4 x = __ldcg(&part.o[i][thread]);
      to[0] = fmaf(to[0], mine_by[0], x.x * theirs_by[0]);
      to[1] = fmaf(to[1], mine_by[0], x.y * theirs_by[0]);
      to[2] = fmaf(to[2], mine_by[1], x.z * theirs_by[1]);
      to[3] = fmaf(to[3], mine_by[1], x.w * theirs_by[1]);
    });
  }
}

}  // namespace fp8attn
