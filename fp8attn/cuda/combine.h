// Tiles whose keys are split between CTAs: where the partial outputs are stored, and the launch that combines them.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace fp8attn {

// Params of the attention kernel of such a call. Its output is p.parts, (key_splits, B, Hq, Sq, Dv) of float32. The
// first two are one index, split * B + batch.
inline Params parts_of(const Params& p) {
  Params part = p;
  part.out = p.parts;
  part.out_type = OutType::f32;
  part.out_strides[2] = p.value_dim;
  part.out_strides[1] = p.q_length * part.out_strides[2];
  part.out_strides[0] = p.q_heads * part.out_strides[1];
  return part;
}

// Combines the partial outputs. Compiled in a separate translation unit.
cudaError_t combine(const Params& p, cudaStream_t stream);

}  // namespace fp8attn
