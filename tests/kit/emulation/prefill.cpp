// The prefill kernel. Variant::half: whether tokens are halves, else bfloat16.
#include "instance.h"
#include "run.h"

// `params`: PrefillParams, which may not be aligned as tensor maps must be. Returns whether the kernel ended.
extern "C" bool prefill(const void* params, int bytes, int ctas) {
  using namespace fp8attn;
  PrefillParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  if (p.call.half != Variant::half) abort();
  using T = std::conditional_t<Variant::half, __half, __nv_bfloat16>;
  constexpr long patience = 20000;
  cta::may_hold_large_numbers = false;
  return cta::run(fp8attn::prefill<Instance, T>, p, ctas, PrefillShape<Instance::config>::threads, 1, patience);
}
