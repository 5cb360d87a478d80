// Which tile of queries comes when.
#pragma once

#include "../params.h"

namespace fp8attn {

constexpr int ALL_BLOCKS = 1 << 30;  // of keys: as many as a tile's rows see

struct Tile {
  int batch, head, kv_head, first_row;

  __device__ bool exists() const { return first_row >= 0; }
};

// A fixed order of all tiles. Heads are taken in groups that share keys or fit into L2 together; inside a group the last tiles go
// first, which in a causal call are the long ones.
struct Schedule {
  const Params& p;
  int tile_rows, tiles;
  bool across_batches;  // a head of all batches comes before the next one

  __device__ Schedule(const Params& params, int rows, bool batches_first = false)
      : p(params), tile_rows(rows), tiles((params.q_length + rows - 1) / rows), across_batches(batches_first) {}

  // This CTA's position after that of `round`; its first is its number. Whoever is free takes the next, or they take turns, to and fro.
  __device__ int after(int round) const {
    if (p.counter != nullptr) return gridDim.x + atomicAdd(p.counter, 1);
    return (round + 1) * gridDim.x + (round % 2 == 1 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  // Tiles of all heads.
  __device__ int size() const { return tiles * p.batches * p.q_heads; }

  __device__ static Tile none() { return {0, 0, 0, -1}; }

  // None after the last.
  __device__ Tile at(int position) const {
    if (position >= size()) return none();
    const int group = p.heads_side_by_side;
    const int first = position / (group * tiles) * group;
    const int inside = position % (group * tiles);
    const int heads = min(group, p.batches * p.q_heads - first);
    const int head = first + inside % heads;
    const int in_batch = across_batches ? head / p.batches : head % p.q_heads;
    return {across_batches ? head % p.batches : head / p.q_heads, in_batch, in_batch / (p.q_heads / p.kv_heads), (tiles - 1 - inside / heads) * tile_rows};
  }
};

// A place in the ring of shared-memory stages, which barriers go round in two phases.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ Ring next() const {
    const bool last = stage == STAGES - 1;
    return {last ? 0 : stage + 1, phase ^ last};
  }

  __device__ void advance() { *this = next(); }
};

}  // namespace fp8attn
