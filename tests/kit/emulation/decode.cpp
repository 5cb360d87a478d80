// The decode kernel: its two launches, one after another.
#include "instance.h"
#include "run.h"

// `params`: DecodeParams, which may not be aligned as tensor maps must be. Returns whether the kernels ended.
extern "C" bool decode(const void* params, int bytes) {
  using namespace fp8attn;
  DecodeParams p = {};
  if (bytes > int(sizeof(p))) abort();
  memcpy(&p, params, bytes);
  constexpr long patience = 20000;
  auto* kernel = p.half ? fp8attn::decode<Instance, __half> : fp8attn::decode<Instance, __nv_bfloat16>;
  if (!cta::run(kernel, p, p.ctas, DECODE_THREADS, 1, patience)) return false;
  return cta::run(combine_decoded<Instance>, p, p.batches * p.kv_heads * row_tiles(p) * combining_ctas_of_tile(p), COMBINERS, 1, patience);
}
