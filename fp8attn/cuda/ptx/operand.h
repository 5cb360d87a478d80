// Matrix descriptors: wgmma operands in shared memory. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions:
// Matrix Descriptor Format".
#pragma once

#include <cstdint>

namespace fp8attn::ptx {

// A K-major operand with rows of ROW_BYTES bytes, in groups of 8 rows. It has TMA's swizzle for boxes of that width.
template <int ROW_BYTES>
__device__ inline uint64_t wgmma_descriptor(uint32_t address) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32);
  constexpr uint64_t swizzle = ROW_BYTES == 128 ? 1 : ROW_BYTES == 64 ? 2 : 3;
  constexpr uint64_t group = 8 * ROW_BYTES / 16;
  return swizzle << 62 | group << 32 | 1ull << 16 | (address & 0x3FFFF) >> 4;
}

// A B operand of 16-bit elements that isn't K-major: a row has what all columns multiply with one k. Panels of 64
// columns, `panel_bytes` apart, have rows of 128 bytes with TMA's swizzle.
__device__ inline uint64_t wgmma_descriptor_transposed(uint32_t address, int panel_bytes) {
  constexpr uint64_t group = 8 * 128 / 16;
  return 1ull << 62 | group << 32 | uint64_t(panel_bytes / 16) << 16 | (address & 0x3FFFF) >> 4;
}

// Operand `number` of operands that are `bytes` apart, a multiple of 16; `first` is operand 0. The address, and so the
// sum, stays within the lower 32 bits of the descriptor.
__device__ inline uint64_t operand_of(uint64_t first, uint32_t number, uint32_t bytes) {
  return first & 0xFFFFFFFF00000000 | uint32_t(uint32_t(first) + number * (bytes / 16));
}

// Byte offset of (row, column) in an operand with TMA's swizzle.
template <int ROW_BYTES>
__device__ inline int swizzled(int row, int column) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32);
  // one step per 128 bytes, modulo the number of 16-byte chunks in a row
  const int swizzle = row / (128 / ROW_BYTES) % (ROW_BYTES / 16);
  return row * ROW_BYTES + (column / 16 ^ swizzle) * 16 + column % 16;
}

// A K-major operand without swizzle, stored as columns of 16 bytes. The rows of a column are contiguous. Columns are
// `pitch` bytes apart.
__device__ inline uint64_t wgmma_descriptor_of_columns(uint32_t address, int pitch) {
  constexpr uint64_t group = 8 * 16 / 16;
  return group << 32 | uint64_t(pitch / 16) << 16 | (address & 0x3FFFF) >> 4;
}

// A K-major operand whose 8 x 16-byte core matrices are all the same one, at `address`.
__device__ inline uint64_t wgmma_descriptor_of_one(uint32_t address) { return (address & 0x3FFFF) >> 4; }

}  // namespace fp8attn::ptx
