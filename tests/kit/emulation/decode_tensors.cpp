// The decode kernel for caches of other engines. Variant::half: whether queries are halves, else bfloat16.
#include "instance.h"
#include "run.h"

// `params`: DecodeParams, which may not be aligned as tensor maps must be. Returns whether the kernel ended.
extern "C" bool decode_tensors(const void* params, int bytes) {
  using namespace fp8attn;
  DecodeParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  if (p.half != Variant::half) abort();
  using T = std::conditional_t<Variant::half, __half, __nv_bfloat16>;
  constexpr long patience = 20000;
  // the last CTA to store its part of a tile is then the one that has the tile's first keys
  return cta::run<true>(fp8attn::decode_tensors<Instance, T>, p, p.ctas, DecodeTensorsStorage<Instance::config>::threads, 1, patience);
}
