// Of the Hopper kernel's instances with a mask, the launch before theirs.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace fp8attn {

// Into what p has room for it in. In a translation unit of its own.
cudaError_t build_block_mask(const Params& p, cudaStream_t stream);

}  // namespace fp8attn
