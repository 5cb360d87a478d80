// Transposes a matrix in the registers of a warp. PTX ISA, "Warp-level matrix transpose instruction: movmatrix".
#pragma once

#include <cstdint>

namespace fp8attn::ptx {

// A matrix of 8 rows of 8 elements of 16 bits, of which lane 4g + c has elements 2c and 2c + 1 of row g.
__device__ inline uint32_t transposed(uint32_t two) {
  uint32_t moved;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(two));
  return moved;
}

}  // namespace fp8attn::ptx
