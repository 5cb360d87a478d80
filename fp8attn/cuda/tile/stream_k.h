// The tiles behind the last full round, in calls whose tiles all have the same number of K/V blocks. Their blocks are
// split into ranges of as many, which CTAs take as they become free, so that all CTAs end at about the same time.
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
  // The tile's other blocks are in the ranges from first_other to the one before `range`. If it is -1, a later range
  // has the tile's last blocks, and who computes it waits for this one.
  int first_other = ALL_BLOCKS;
  int range;  // that it is of

  __device__ bool complete() const { return first_other >= 0; }
};

// A CTA's work tiles, one per round: whole ones, and then those of ranges of blocks. Ranges follow one another through
// the blocks of all split tiles, which are those after the last full round. A range is of two tiles at most.
struct WorkTiles {
  int whole;                // tiles before the split ones
  int blocks, size, total;  // blocks of a tile, of a range, and of all split tiles
  int range, begin, end;    // the range that was taken last, and its blocks that are not taken yet

  // No fewer ranges than tiles.
  __device__ void find(const Schedule& schedule) {
    const int ranges = schedule.p.stream_k_ranges, rest = schedule.size() % int(gridDim.x);
    range = begin = end = 0;
    whole = ALL_BLOCKS;
    if (ranges == 0) return;
    whole = schedule.size() - rest;
    blocks = (schedule.p.kv_length + KEYS - 1) / KEYS;
    total = rest * blocks;
    size = (total + ranges - 1) / ranges;
  }

  // The one after that of `round`; the first after -1. Rounds come one after the other.
  //
  // Of a range's two work tiles, the one that leaves its tile's last blocks to a later range comes first. Ranges are
  // taken in order, so who reduces waits for nobody who hasn't begun.
  __device__ void write_next(WorkTile& to, const Schedule& schedule, int round) {
    int position = ALL_BLOCKS;
    if (begin == end) {
      position = round < 0 ? blockIdx.x : schedule.after(round);
      if (position >= whole) {
        // in a static order each CTA has one range at most, the one of its number
        const int next = position - whole;
        range = schedule.p.counter != nullptr || next >= int(gridDim.x) ? next : blockIdx.x;
        begin = min(range * size, total);
        end = min(begin + size, total);
        position = ALL_BLOCKS;
      }
    }
    to.begin = 0;
    to.end = to.first_other = ALL_BLOCKS;
    to.range = range;  // also of whole tiles: `reduce_partials` looks at it
    if (begin < end) {
      const int tile = (end - 1) / blocks, first = tile * blocks;
      to.begin = max(begin - first, 0);
      to.end = end - first;
      to.first_other = to.end < blocks ? -1 : to.begin > 0 ? first / size : ALL_BLOCKS;
      end = first + to.begin;
      position = whole + tile;
    }
    static_cast<Tile&>(to) = schedule.at(position);
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

// Store m and O of a range's blocks of a tile, for the CTA that computes the tile's last ones. Each warp signals by
// itself.
template <int FIRST, int SECOND>
__device__ void store_partial(const Params& p, int range, int consumer, int consumers, const float (&m)[2], const float (&o)[FIRST], const float (&o_second)[SECOND]) {
  using Part = Partial<FIRST, SECOND>;
  const int place = range * consumers + consumer, thread = threadIdx.x % 128;
  Part& part = reinterpret_cast<Part*>(p.parts)[place];
  Part::for_quads(o, o_second, [&](const float* x, int i) { part.o[i][thread] = {x[0], x[1], x[2], x[3]}; });
  part.rows[thread] = {m[0], m[1], row_sum(o, o_second, 0), row_sum(o, o_second, 1)};
  __syncwarp();
  if (thread % 32 == 0) ptx::store_release(&p.partials_ready[4 * place + thread / 32], 1);
}

// Adds what has been stored of the tile of a work tile that has its last blocks; the latest first.
template <int FIRST, int SECOND>
__device__ void reduce_partials(const Params& p, const WorkTile& work_tile, int consumer, int consumers, float (&m)[2], float (&o)[FIRST], float (&o_second)[SECOND]) {
  using Part = Partial<FIRST, SECOND>;
  const int thread = threadIdx.x % 128;
#pragma unroll 1
  for (int range = work_tile.range - 1; range >= work_tile.first_other; --range) {
    const int place = range * consumers + consumer;
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
