// The tile scheduler.
#pragma once

#include "../params.h"

namespace fp8attn {

constexpr int ALL_BLOCKS = 1 << 30;  // as an end: all key blocks that the tile's rows attend to

struct Tile {
  int batch, head, kv_head, first_row;

  __device__ bool exists() const { return first_row >= 0; }
};

// A fixed order of all tiles. Heads come in groups that have the same keys or fit into L2 together. Within a group the
// last tiles come first: in causal calls these are the longest.
struct Schedule {
  const Params& p;
  int tile_rows, tiles;
  bool across_batches;  // one head of all batches comes before the next head

  __device__ Schedule(const Params& params, int rows, bool batches_first = false)
      : p(params), tile_rows(rows), tiles((params.q_length + rows - 1) / rows), across_batches(batches_first) {}

  // The position of this CTA's tile after that of `round`; the first is blockIdx.x. With a counter, a free CTA takes
  // the next position. Otherwise the order is static, and its direction alternates between rounds.
  __device__ int after(int round) const {
    if (p.counter != nullptr) return gridDim.x + atomicAdd(p.counter, 1);
    return (round + 1) * gridDim.x + (round % 2 == 1 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

  // Number of tiles of all heads.
  __device__ int size() const { return tiles * p.batches * p.q_heads; }

  __device__ static Tile none() { return {0, 0, 0, -1}; }

  // The tile at a position; none() after the last.
  __device__ Tile at(int position) const {
    if (position >= size()) return none();
    const int group = p.heads_in_l2;
    const int first = position / (group * tiles) * group;
    const int inside = position % (group * tiles);
    const int heads = min(group, p.batches * p.q_heads - first);
    const int head = first + inside % heads;
    const int in_batch = across_batches ? head / p.batches : head % p.q_heads;
    return {across_batches ? head % p.batches : head / p.q_heads, in_batch, in_batch / (p.q_heads / p.kv_heads), (tiles - 1 - inside / heads) * tile_rows};
  }
};

// A position in a ring of shared-memory stages, and the phase parity of its barriers.
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
