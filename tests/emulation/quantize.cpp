// The quantizer of K and V, of both instances.
#include "quantize.cuh"
#include "run.h"

namespace fp8attn {

template <int STRIPS, int CTAS>
struct Instance {
  static constexpr QuantizeConfig config{STRIPS, CTAS};
};

template <class Instance>
bool quantize(const QuantizeParams& p, int ctas) {
  const int cluster = (p.length + STRIP - 1) / STRIP * (p.head_dim / CHANNELS);
  return cta::run(p.half ? quantize_kv<Instance, __half> : quantize_kv<Instance, __nv_bfloat16>, p, ctas, THREADS, cluster, 100);  // it takes some 40 rounds
}

}  // namespace fp8attn

// Returns whether it came to an end.
extern "C" bool quantize(const fp8attn::QuantizeParams* params, int bytes, int ctas, bool few) {
  if (bytes != sizeof(*params)) abort();
  return few ? fp8attn::quantize<fp8attn::Instance<8, 3>>(*params, ctas) : fp8attn::quantize<fp8attn::Instance<16, 2>>(*params, ctas);
}
