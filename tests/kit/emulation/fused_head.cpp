// The fused head kernel. instance.h names the instance. Variant::half: whether tensors are of halves, else of bfloat16.
#include "fused_head.cuh"

#include "instance.h"
#include "run.h"

// Params as in hopper.cpp. Returns whether the kernel ended.
extern "C" bool forward(const void* params, int bytes, int ctas) {
  using fp8attn::Instance;
  fp8attn::Params p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  if (p.half != fp8attn::Variant::half) abort();
  using T = std::conditional_t<fp8attn::Variant::half, __half, __nv_bfloat16>;
  using Shape = fp8attn::FusedHeadShape<Instance::config>;
  return cta::run(fp8attn::fused_head_forward<Instance, T>, p, ctas, Shape::threads);
}
