// The K/V quantizer, all instances.
#include "quantize.cuh"
#include "run.h"

namespace fp8attn {

template <int STRIPS, int CTAS, bool INT8>
struct Instance {
  static constexpr QuantizeConfig config{STRIPS, CTAS, INT8};
};

template <class Instance>
bool run(const QuantizeParams& p, int ctas) {
  const int cluster = (p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK * (p.head_dim / CHANNELS);
  // it takes about 40 rounds
  return cta::run(p.half ? quantize_kv<Instance, __half> : quantize_kv<Instance, __nv_bfloat16>, p, ctas, THREADS, cluster, 100);
}

template <bool INT8>
bool quantize(const QuantizeParams& p, int ctas, bool few) {
  return few ? run<Instance<8, 3, INT8>>(p, ctas) : run<Instance<16, 2, INT8>>(p, ctas);
}

}  // namespace fp8attn

// Returns whether the kernel ended.
extern "C" bool quantize(const fp8attn::QuantizeParams* params, int bytes, int ctas, bool few, bool int8) {
  if (bytes != sizeof(*params)) abort();
  return int8 ? fp8attn::quantize<true>(*params, ctas, few) : fp8attn::quantize<false>(*params, ctas, few);
}
