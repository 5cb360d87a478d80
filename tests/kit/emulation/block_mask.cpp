// The kernel of block_mask.cuh.
#include "masks.h"

// `params`: Params from its first pointer on. Returns whether the kernel ended.
extern "C" bool build_block_mask(const void* params, int bytes, int64_t blocks) {
  fp8attn::Params p = {};
  memcpy(&p.q, params, bytes);
  return fp8attn::build_block_mask_on_cpu(p, blocks);
}
