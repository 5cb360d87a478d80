// The Hopper kernel. instance.h names the instance. Variant::half: whether queries that the kernel quantizes are halves.
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
  if constexpr (Shape::skips_blocks) {
    const int64_t blocks = int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * ((p.kv_length + fp8attn::KEYS - 1) / fp8attn::KEYS);
    if (p.mask != nullptr && !fp8attn::build_block_mask_on_cpu(p, blocks)) return false;
  }
  if (p.half != fp8attn::Variant::half) abort();
  using T = std::conditional_t<fp8attn::Variant::half, __half, __nv_bfloat16>;
  constexpr long patience = 10000;  // a tile of five blocks takes about 50 rounds
  return cta::run(fp8attn::hopper_forward<Instance, T>, p, ctas, Shape::threads, 1, patience);
}

// As cta::bring; `ready` counts the CTAs that have completed a head.
extern "C" void bring(void* to, const void* from, int64_t bytes, int* ready) { cta::bring(to, from, bytes, ready); }
