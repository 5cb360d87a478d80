// The prefill kernel.
#include "instance.h"
#include "run.h"

// `params`: PrefillParams, which may not be aligned as tensor maps must be. Returns whether the kernel ended.
extern "C" bool prefill(const void* params, int bytes, int ctas) {
  using namespace fp8attn;
  PrefillParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  constexpr long patience = 20000;
  cta::may_hold_large_numbers = false;
  return cta::run(p.call.half ? fp8attn::prefill<Instance, __half> : fp8attn::prefill<Instance, __nv_bfloat16>, p, ctas, PrefillShape<Instance::config>::threads, 1, patience);
}
