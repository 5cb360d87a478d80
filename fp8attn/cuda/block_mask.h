// The launch that precedes an instance of the Hopper kernel with a mask.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace fp8attn {

// Fills p.mask_bits and p.block_mask from p.mask. Compiled in a separate translation unit.
cudaError_t build_block_mask(const Params& p, cudaStream_t stream);

}  // namespace fp8attn
