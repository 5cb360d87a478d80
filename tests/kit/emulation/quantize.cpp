// The K/V quantizer, all instances.
#include "quantize.cuh"
#include "run.h"

namespace fp8attn {

template <int TOKEN_CHUNKS, int CTAS, bool PACKED = false>
struct Instance {
  static constexpr QuantizeConfig config{TOKEN_CHUNKS, CTAS, PACKED};
};

// It takes about 40 rounds.
template <class Instance, bool INT8, typename T>
bool run(const QuantizeParams& p, int ctas) {
  const int slices = p.head_dim / CHANNELS, token_chunks = (p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK;
  if constexpr (IS_LONG<Instance::config>) {
    constexpr bool packed = Instance::config.packed;
    const int of_heads = packed ? p.sequences * p.heads * slices : ctas / token_chunks;
    return (p.step == QuantizeStep::write || cta::run(measure_kv<Instance, T>, p, ctas + (p.step == QuantizeStep::all) * of_heads, THREADS, 1, 100)) &&
           (p.step != QuantizeStep::all || cta::run(finish_kv<packed, T>, p, of_heads, CHANNELS + 32, 1, 100)) &&
           (p.step == QuantizeStep::measure || cta::run(write_kv<Instance, INT8, T>, p, 2 * ctas, THREADS, 1, 100));
  } else {
    return cta::run(quantize_kv<Instance, INT8, T>, p, ctas, THREADS, slices * token_chunks, 100);
  }
}

template <int TOKEN_CHUNKS, int CTAS, bool INT8, bool PACKED = false>
bool run(const QuantizeParams& p, int ctas) {
  using One = Instance<TOKEN_CHUNKS, CTAS, PACKED>;
  return p.half ? run<One, INT8, __half>(p, ctas) : run<One, INT8, __nv_bfloat16>(p, ctas);
}

template <bool INT8>
bool quantize(const QuantizeParams& p, int ctas, int token_chunks, bool packed) {
  return packed ? run<1, 3, INT8, true>(p, ctas) : token_chunks == 1 ? run<1, 3, INT8>(p, ctas) : token_chunks == 8 ? run<8, 3, INT8>(p, ctas) : run<16, 2, INT8>(p, ctas);
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool quantize(const fp8attn::QuantizeParams* params, int bytes, int ctas, int token_chunks, bool packed) {
  if (bytes != sizeof(*params)) abort();
  return params->int8 ? fp8attn::quantize<true>(*params, ctas, token_chunks, packed) : fp8attn::quantize<false>(*params, ctas, token_chunks, packed);
}
