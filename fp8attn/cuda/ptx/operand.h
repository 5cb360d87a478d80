// How the tensor core finds an operand of wgmma in shared memory. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Descriptor Format".
#pragma once

#include <cstdint>

namespace fp8attn::ptx {

// A K-major operand of ROW_BYTES a row, rows in groups of 8, swizzled as TMA does for boxes of that width.
template <int ROW_BYTES>
__device__ inline uint64_t wgmma_descriptor(uint32_t address) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32);
  constexpr uint64_t swizzle = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  constexpr uint64_t group = 8 * ROW_BYTES / 16;
  return swizzle << 62 | group << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

// The one of that number of operands that lie so many bytes apart, a multiple of 16. Addresses stay within a descriptor's lower half, and so does their sum.
__device__ inline uint64_t operand_of(uint64_t first, uint32_t number, uint32_t bytes) {
  return first & 0xFFFFFFFF00000000 | uint32_t(uint32_t(first) + number * (bytes / 16));
}

// Where such an operand has a byte of a row.
template <int ROW_BYTES>
__device__ inline int swizzled(int row, int column) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32);
  const int swizzle = row / (128 / ROW_BYTES) % (ROW_BYTES / 16);  // by 128 bytes, as many of them as a row has chunks
  return row * ROW_BYTES + (column / 16 ^ swizzle) * 16 + column % 16;
}

// A K-major operand in columns of 16 bytes, their rows one after another, the columns `pitch` bytes apart.
__device__ inline uint64_t wgmma_descriptor_of_columns(uint32_t address, int pitch) {
  constexpr uint64_t group = 8 * 16 / 16;
  return group << 32 | uint64_t(pitch / 16) << 16 | (address & 0x3FFFF) >> 4;
}

// A K-major operand all of whose groups of 8 rows and 16 bytes are the one at `address`.
__device__ inline uint64_t wgmma_descriptor_of_one(uint32_t address) { return (address & 0x3FFFF) >> 4; }

}  // namespace fp8attn::ptx
