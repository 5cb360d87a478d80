// Tiles in shared memory, where tensor cores find them.
#pragma once

#include <cstdint>

#include "../ptx/convert.h"

namespace fp8attn {

// ROWS rows of BYTES bytes, in chunks of 16. The same chunk of eight rows in a row lies in eight different groups of four banks: by 16 bytes
// of padding behind each row, or by an XOR of the chunk's number with bits of the row's.
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

  // From the offset of a lane's own row and chunk, that of the row `rows` below, a multiple of 8, and of the chunk `chunks` on, a multiple
  // of a power of two above the lane's own: one instruction, where the compiler, which doesn't know this, would need five.
  __device__ static int moved(int lane_offset, int rows, int chunks) {
    return (SWIZZLE ? lane_offset ^ 16 * chunks : lane_offset + 16 * chunks) + rows * pitch;
  }

  __device__ const uint8_t* beyond(int lane_offset, int rows, int chunks) const { return bytes + moved(lane_offset, rows, chunks); }

  template <typename T>
  __device__ T* row(int i) {
    return reinterpret_cast<T*>(bytes + i * pitch);
  }
};

// What an instance has no use for.
template <int BYTES, bool SWIZZLE>
struct SharedTile<0, BYTES, SWIZZLE> {};

// f(row, chunk) for every chunk of a tile, shared out among THREADS threads; a thread has the same ones each time.
template <typename Tile, int THREADS, typename F>
__device__ void for_chunks(int thread, F&& f) {
  static_assert(THREADS % Tile::chunks == 0);
#pragma unroll
  for (int row = 0; row < Tile::rows; row += THREADS / Tile::chunks) {
    const int mine = row + thread / Tile::chunks;
    if (Tile::rows % (THREADS / Tile::chunks) == 0 || mine < Tile::rows) f(mine, thread % Tile::chunks);
  }
}

// Sixteen e4m3 as halves: words' lower pairs in the first chunk, their upper pairs in the second. Along head_dim it is an order of the
// summands, the same for Q and K; along V's keys it undoes fp8attn.layout.key_of_slot.
__device__ inline void spread(const uint4& codes, uint4& first, uint4& second) {
  ptx::halves_of_e4m3(codes.x, first.x, second.x);
  ptx::halves_of_e4m3(codes.y, first.y, second.y);
  ptx::halves_of_e4m3(codes.z, first.z, second.z);
  ptx::halves_of_e4m3(codes.w, first.w, second.w);
}

// A chunk of e4m3 becomes two of halves.
template <typename Halves>
__device__ void store_halves(Halves& tile, int row, int chunk, const uint4& codes) {
  uint4 first, second;
  spread(codes, first, second);
  *reinterpret_cast<uint4*>(tile.at(row, 2 * chunk)) = first;
  *reinterpret_cast<uint4*>(tile.at(row, 2 * chunk + 1)) = second;
}

}  // namespace fp8attn
