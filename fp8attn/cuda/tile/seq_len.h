// Packed sequences: their tiles, and what rows of a tile attend to.
#pragma once

#include "../params.h"
#include "constants.h"
#include "mask.h"
#include "schedule.h"

namespace fp8attn {

// A tile of packed sequences, which share one tensor: `first_row` is a row of that tensor, and the sequence's rows end
// at q_end. Its keys begin at k_begin in K, and at page `page` in V and in K's scales.
struct alignas(32) PackedTile : Tile {
  int sequence, q_end, k_begin, kv_length, page;
};

// Tiles in the order of the table, whose header says how many there are. In a group of heads, each entry comes for all
// heads before the next entry.
struct PackedSchedule : Schedule {
  __device__ PackedSchedule(const Params& params, int, bool) : Schedule(params, 1) {}

  // The tile at a position; none() after the last. Without a loop: beside one, ptxas moves the descriptors of each
  // product of the consumers' main loop to uniform registers, and spills in that loop.
  __device__ PackedTile at(int position) const {
    Schedule order = *this;
    order.tiles = p.tile_table[int(TableHeader::tiles)];
    const Tile place = order.at(position);
    if (!place.exists()) return {none()};
    const int* entry = p.tile_table + int64_t(order.tiles - place.first_row) * TILE_PITCH;  // the first is behind the header
    const auto field = [&](TileField of) { return entry[int(of)]; };
    const int q_begin = field(TileField::q_begin);
    return {{place.batch, place.head, place.kv_head, q_begin + field(TileField::first_row)}, field(TileField::sequence), q_begin + field(TileField::q_length),
            field(TileField::k_begin), field(TileField::k_length), field(TileField::page)};
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
