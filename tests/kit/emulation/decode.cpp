// The decode kernel.
#include "instance.h"
#include "run.h"

// `params`: DecodeParams, which may not be aligned as tensor maps must be. Returns whether the kernel ended.
extern "C" bool decode(const void* params, int bytes) {
  using namespace fp8attn;
  DecodeParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  constexpr long patience = 20000;
  auto* kernel = p.half ? fp8attn::decode<Instance, __half> : fp8attn::decode<Instance, __nv_bfloat16>;
  // the last CTA to store its part of a tile is then the one that has the tile's first keys
  return cta::run<true>(kernel, p, p.ctas, DECODE_THREADS, 1, patience);
}
