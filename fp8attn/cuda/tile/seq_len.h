// Packed sequences: their tiles, and what rows of a tile attend to.
#pragma once

#include "../params.h"
#include "constants.h"
#include "mask.h"
#include "schedule.h"

namespace fp8attn {

constexpr int MOST_CONSUMERS = 4;

// A tile of packed sequences, which share one tensor: rows are those of that tensor, and the sequence's end at q_end.
// Its keys begin at k_begin in K, and at page `page` in V and in K's scales. Each consumer has ROWS rows of one of the
// query heads that share the keys, as a tile of its own. The first consumer's stand here, too.
struct alignas(32) PackedTile : Tile {
  int sequence, q_end, k_begin, kv_length, page;
  Tile consumers[MOST_CONSUMERS];
};

// Tiles in the order of the table, whose header says how many there are for each key/value head. In a group of heads,
// each entry comes for all heads before the next entry. A tile goes on from a query head to the next one that shares
// the keys, and from the last one to the next rows of the first.
struct PackedSchedule : Schedule {
  __device__ PackedSchedule(const Params& params, int, bool) : Schedule(params, 1) {}

  // Writes the tile at a position; none() after the last. Each number is written as soon as it is known: registers are
  // scarce. Without a loop: beside one, ptxas moves the descriptors of each product of the consumers' main loop to
  // uniform registers, and spills in that loop.
  template <int CONSUMERS>
  __device__ void write(PackedTile& to, int position) const {
    const int entries = p.tile_table[int(TableHeader::tiles)];
    if (position >= entries * p.kv_heads) {
      static_cast<Tile&>(to) = none();
      return;
    }
    const int sharing = p.q_heads / p.kv_heads, group = p.heads_in_l2 / sharing;
    const int first = position / (group * entries) * group, inside = position % (group * entries), heads = min(group, p.kv_heads - first);
    const int kv_head = first + inside % heads;
    const int* entry = p.tile_table + int64_t(1 + inside / heads) * TILE_PITCH;  // the first is behind the header
    const auto field = [&](TileField of) { return entry[int(of)]; };
    const int q_begin = field(TileField::q_begin);
    to.sequence = field(TileField::sequence);
    to.q_end = q_begin + field(TileField::q_length);
    to.k_begin = field(TileField::k_begin);
    to.kv_length = field(TileField::k_length);
    to.page = field(TileField::page);
    int row = q_begin + field(TileField::first_row), head = field(TileField::head);
    static_cast<Tile&>(to) = {0, kv_head * sharing + head, kv_head, row};
#pragma unroll
    for (int c = 0; c < CONSUMERS; ++c) {
      to.consumers[c] = {0, kv_head * sharing + head, kv_head, row};
      if (++head == sharing) head = 0, row += ROWS;
    }
  }
};

// The first key of a tile's sequence in K, its first page, and its first key in V: 0 where each sequence has a tensor
// of its own.
__device__ inline int first_key(const Tile&) { return 0; }
__device__ inline int first_key(const PackedTile& tile) { return tile.k_begin; }
__device__ inline int first_page(const Tile&) { return 0; }
__device__ inline int first_page(const PackedTile& tile) { return tile.page; }
__device__ inline int first_value(const Tile&) { return 0; }
// Nobody has written the page of a sequence without keys. It may hold NaN, which P = 0 doesn't hide. Behind V, TMA
// reads zeros.
__device__ inline int first_value(const PackedTile& tile) { return tile.kv_length > 0 ? tile.page * KEYS : 1 << 30; }

// The head of a consumer's rows, and the first of them.
__device__ inline int query_head_of(const Tile& tile, int) { return tile.head; }
__device__ inline int query_head_of(const PackedTile& tile, int consumer) { return tile.consumers[consumer].head; }
__device__ inline int first_row_of(const Tile& tile, int consumer) { return tile.first_row + consumer * ROWS; }
__device__ inline int first_row_of(const PackedTile& tile, int consumer) { return tile.consumers[consumer].first_row; }

// Whether a tile's sequence has keys: without, nobody has written their mean.
__device__ inline bool has_keys(const Tile&) { return true; }
__device__ inline bool has_keys(const PackedTile& tile) { return tile.kv_length > 0; }

// The sequence of a tile, of whose values there are scales and means.
__device__ inline int sequence_of(const Tile& tile) { return tile.batch; }
__device__ inline int sequence_of(const PackedTile& tile) { return tile.sequence; }

// K's mean of a tile, of DIM channels.
template <int DIM, class P, class T>
__device__ const float* mean_of(const P& p, const T& tile) {
  return p.lse_mean + (int64_t(sequence_of(tile)) * p.kv_heads + tile.kv_head) * DIM;
}

// The lengths of a tile's sequence: the same for all tiles, or of packed sequences the tile's own.
template <bool PACKED>
class SeqLen {
 public:
  __device__ explicit SeqLen(const Params& p) : visible_(p) {}

  __device__ const Visible& visible(const Tile&) const { return visible_; }

  // One past the last row of the tile's sequence.
  __device__ static int row_end(const Params& p, const Tile&) { return p.q_length; }

 private:
  const Visible visible_;
};

template <>
class SeqLen<true> {
 public:
  __device__ explicit SeqLen(const Params& p) : p_(p) {}

  // Of rows of the tensor. The window is aligned to the bottom right: the last row of the sequence to its last key.
  __device__ Visible visible(const PackedTile& tile) const {
    Visible found(p_);
    const int aligned = tile.kv_length - tile.q_end;
    found.q_length = tile.q_end;
    found.kv_length = tile.kv_length;
    found.causal_offset = p_.causal_offset < 0 ? tile.kv_length : aligned + p_.causal_offset;
    found.first_offset = p_.first_offset < 0 ? -tile.q_end : aligned - p_.first_offset;
    return found;
  }

  __device__ static int row_end(const Params&, const PackedTile& tile) { return tile.q_end; }

 private:
  const Params& p_;
};

}  // namespace fp8attn
