// The Hopper kernel, an instance of which instance.h names.
#include "hopper.cuh"

#include "instance.h"
#include "masks.h"

// Params from the tensor maps on. Returns whether it came to an end.
extern "C" bool forward(const void* params, int bytes, int ctas) {
  using fp8attn::Instance;
  fp8attn::Params p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  using Shape = fp8attn::Shape<Instance::config>;
  if (Shape::skips_blocks && p.mask != nullptr) {
    const int64_t blocks = int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * ((p.kv_length + fp8attn::KEYS - 1) / fp8attn::KEYS);
    if (!fp8attn::build_block_mask_on_cpu(p, blocks)) return false;
  }
  using Half = std::conditional_t<Instance::config.fuse_q_quant, __half, __nv_bfloat16>;
  constexpr long patience = 10000;  // a tile of five blocks takes some 50 rounds
  return cta::run(p.half ? fp8attn::hopper_forward<Instance, Half> : fp8attn::hopper_forward<Instance, __nv_bfloat16>, p, ctas, Shape::threads, 1, patience);
}

// Something of a head that comes while the kernel runs, the last that is named first, and with it a CTA that is done with the head.
extern "C" void bring(void* to, const void* from, int64_t bytes, int* ready) {
  cta::of_the_grid_before.push_back([=] {
    memcpy(to, from, bytes);
    ++*ready;
  });
}
