// The Hopper kernel. instance.h names the instance.
#include "hopper.cuh"

#include "instance.h"
#include "masks.h"

// `params`: Params, from its tensor maps on. Returns whether the kernel ended.
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
  constexpr long patience = 10000;  // a tile of five blocks takes about 50 rounds
  return cta::run(p.half ? fp8attn::hopper_forward<Instance, Half> : fp8attn::hopper_forward<Instance, __nv_bfloat16>, p, ctas, Shape::threads, 1, patience);
}

// Queues a write of the preceding grid, which happens while the kernel runs: bytes of a head are copied, and one more
// CTA has completed the head. The last write that is queued happens first.
extern "C" void bring(void* to, const void* from, int64_t bytes, int* ready) {
  cta::of_the_grid_before.push_back([=] {
    memcpy(to, from, bytes);
    ++*ready;
  });
}
