// The decode kernel for caches of other engines.
#include "instance.h"
#include "run.h"

// `params`: DecodeParams, which may not be aligned as tensor maps must be. Returns whether the kernel ended.
extern "C" bool decode_tensors(const void* params, int bytes) {
  using namespace fp8attn;
  DecodeParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  constexpr long patience = 20000;
  auto* kernel = p.half ? fp8attn::decode_tensors<Instance, __half> : fp8attn::decode_tensors<Instance, __nv_bfloat16>;
  // the last CTA to store its part of a tile is then the one that has the tile's first keys
  return cta::run<true>(kernel, p, p.ctas, decode_tensors_threads<Instance::config>, 1, patience);
}
