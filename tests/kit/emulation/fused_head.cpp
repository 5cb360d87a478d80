// The fused head kernel. instance.h names the instance.
#include "fused_head.cuh"

#include "instance.h"
#include "run.h"

// Params as in hopper.cpp. Returns whether the kernel ended.
extern "C" bool forward(const void* params, int bytes, int ctas) {
  using fp8attn::Instance;
  fp8attn::Params p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  using Shape = fp8attn::FusedHeadShape<Instance::config>;
  return cta::run(p.half ? fp8attn::fused_head_forward<Instance, __half> : fp8attn::fused_head_forward<Instance, __nv_bfloat16>, p, ctas, Shape::threads);
}
