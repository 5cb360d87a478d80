// Loads matrices from shared memory into the registers of a warp. PTX ISA, "Warp-level matrix load instruction:
// ldmatrix".
#pragma once

#include <cstdint>

#include "mbarrier.h"

namespace fp8attn::ptx {

// Four matrices of 8 rows of 16 bytes. Lanes 8i ... 8i + 7 point to the rows of matrix i. Lane 4g + c gets bytes
// 4c ... 4c + 3 of row g of each matrix.
__device__ inline void ldmatrix(uint32_t* matrices, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same of transposed matrices: lane 4g + c gets elements 2c and 2c + 1, of 16 bits, of column g of each matrix.
__device__ inline void ldmatrix_transposed(uint32_t* matrices, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace fp8attn::ptx
