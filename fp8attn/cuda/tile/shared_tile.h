// Tiles of tensor-core operands in shared memory.
#pragma once

#include <cstdint>

#include "../ptx/convert.h"

namespace fp8attn {

// ROWS rows of BYTES bytes, in chunks of 16 bytes. The same chunk of eight consecutive rows is in eight different
// groups of four banks: by 16 bytes of padding after each row, or (SWIZZLE) by an XOR of the chunk index with bits of
// the row index.
template <int ROWS, int BYTES, bool SWIZZLE>
struct alignas(128) SharedTile {
  static constexpr int rows = ROWS, chunks = BYTES / 16;
  static constexpr int pitch = SWIZZLE ? BYTES : BYTES + 16;

  uint8_t bytes[ROWS * pitch];

  __device__ static int offset(int row, int chunk) {
    const int moved = SWIZZLE ? chunk ^ (BYTES % 128 == 0 ? row % 8 : row * BYTES / 128 % chunks) : chunk;
    return row * pitch + 16 * moved;
  }

  __device__ uint8_t* at(int row, int chunk) { return bytes + offset(row, chunk); }

  __device__ const uint8_t* at(int row, int chunk) const { return bytes + offset(row, chunk); }

  // The offset of the chunk that is `rows` rows and `chunks` chunks after the one at `lane_offset`. `rows` is a
  // multiple of 8. `chunks` is a multiple of a power of two above the lane's chunk index. This takes one instruction;
  // the compiler, which cannot assume this, would need five.
  __device__ static int moved(int lane_offset, int rows, int chunks) {
    return (SWIZZLE ? lane_offset ^ 16 * chunks : lane_offset + 16 * chunks) + rows * pitch;
  }

  __device__ const uint8_t* beyond(int lane_offset, int rows, int chunks) const { return bytes + moved(lane_offset, rows, chunks); }

  template <typename T>
  __device__ T* row(int i) {
    return reinterpret_cast<T*>(bytes + i * pitch);
  }
};

// A tile that an instance does not use.
template <int BYTES, bool SWIZZLE>
struct SharedTile<0, BYTES, SWIZZLE> {};

// Distributes the chunks of a tile over THREADS threads, and calls f(row, chunk) for those of this thread. A thread
// gets the same chunks in every call.
template <typename Tile, int THREADS, typename F>
__device__ void for_chunks(int thread, F&& f) {
  static_assert(THREADS % Tile::chunks == 0);
#pragma unroll
  for (int row = 0; row < Tile::rows; row += THREADS / Tile::chunks) {
    const int mine = row + thread / Tile::chunks;
    if (Tile::rows % (THREADS / Tile::chunks) == 0 || mine < Tile::rows) f(mine, thread % Tile::chunks);
  }
}

// Converts 16 e4m3 codes to halves. The lower pair of each word goes to the first chunk, the upper pair to the second.
// Along head_dim this reorders the summands, equally for Q and K. Along V's keys it undoes fp8attn.layout.key_of_slot.
__device__ inline void spread(const uint4& codes, uint4& first, uint4& second) {
  ptx::halves_of_e4m3(codes.x, first.x, second.x);
  ptx::halves_of_e4m3(codes.y, first.y, second.y);
  ptx::halves_of_e4m3(codes.z, first.z, second.z);
  ptx::halves_of_e4m3(codes.w, first.w, second.w);
}

// Stores a chunk of e4m3 codes as two chunks of halves.
template <typename Halves>
__device__ void store_halves(Halves& tile, int row, int chunk, const uint4& codes) {
  uint4 first, second;
  spread(codes, first, second);
  *reinterpret_cast<uint4*>(tile.at(row, 2 * chunk)) = first;
  *reinterpret_cast<uint4*>(tile.at(row, 2 * chunk + 1)) = second;
}

}  // namespace fp8attn
