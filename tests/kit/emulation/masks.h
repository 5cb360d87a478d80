// The kernel of block_mask.cuh, which runs before the Hopper kernel. Included once.
#pragma once

#include "block_mask.cuh"
#include "run.h"

namespace fp8attn {

template <typename T>
bool build_block_mask_of(const Params& p, int64_t blocks) {
  return cta::run(read_blocks<T>, p, (blocks + READERS - 1) / READERS, 32 * READERS);
}

// Returns whether the kernel ended.
inline bool build_block_mask_on_cpu(const Params& p, int64_t blocks) {
  switch (p.mask_type) {
    case 0:
      return build_block_mask_of<uint8_t>(p, blocks);
    case 1 + int(OutType::bf16):
      return build_block_mask_of<__nv_bfloat16>(p, blocks);
    case 1 + int(OutType::f16):
      return build_block_mask_of<__half>(p, blocks);
    default:
      return build_block_mask_of<float>(p, blocks);
  }
}

}  // namespace fp8attn
