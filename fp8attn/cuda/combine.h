// CTAs that share a tile, each with a range of its keys: where their parts go, and what follows them.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace fp8attn {

// What the CTAs of a call are told: where their parts go.
inline Params parts_of(const Params& p) {
  Params part = p;
  part.out = p.parts;
  part.out_type = OutType::f32;
  part.out_strides[2] = p.value_dim;
  part.out_strides[1] = p.q_length * part.out_strides[2];
  part.out_strides[0] = p.q_heads * part.out_strides[1];
  return part;
}

// Combines the parts of a call. In a translation unit of its own.
cudaError_t combine(const Params& p, cudaStream_t stream);

}  // namespace fp8attn
