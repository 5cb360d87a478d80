// mma.sync by the fragments of the PTX ISA: lane 4g + c has rows g and g + 8 of A, column g of B, and columns 2c and 2c
// + 1 of D.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

void mma_f16(float* d, const uint32_t* a, const uint32_t* b);
void mma_bf16(float* d, const uint32_t* a, const uint32_t* b);
void mma_e4m3(float* d, const uint32_t* a, const uint32_t* b);
void mma_e4m3(uint32_t* d, const uint32_t* a, const uint32_t* b);
void mma_s8(int32_t* d, const uint32_t* a, const uint32_t* b);

}  // namespace fp8attn::ptx
