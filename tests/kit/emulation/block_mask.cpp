// What the Hopper kernel knows of a mask before it runs.
#include "masks.h"

// Returns whether it came to an end.
extern "C" bool build_block_mask(const void* params, int bytes, int64_t blocks) {
  fp8attn::Params p = {};
  memcpy(&p.q, params, bytes);
  return fp8attn::build_block_mask_on_cpu(p, blocks);
}
